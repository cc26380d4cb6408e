"""The verb `infer`: requests to a served pipeline, of some rows or a whole file."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from triptych.base.counted import Count
from triptych.base.errors import UserError
from triptych.interface.cli.command import EXIT_INTERRUPTED, verb
from triptych.interface.cli.options import (
    ConnectionOptions,
    Json,
    Name,
    fail,
    output,
    print_json,
    show_progress,
    sigterm_as_interrupt,
    status,
)

if TYPE_CHECKING:
    from triptych.client.bulk.run import BulkProgress


@verb()
def infer(
    name: Name,
    *,
    text: Annotated[
        list[str] | None,
        typer.Option("--text", "-t", help="Text to send; may be repeated. Default: no text."),
    ] = None,
    text_pair: Annotated[
        list[str] | None,
        typer.Option(
            help="Second text of a pair, such as a context; may be repeated. Default: none."
        ),
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(help="Image file to send; may be repeated. Default: no image."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            help="File of rows: .csv, .tsv, .parquet, .jsonl, or one text per line; - is standard "
            "input. Default: none.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="File for the rows of --file with their answers, in the format of its extension: "
            ".csv, .tsv, .jsonl, .parquet, or .npy for vectors alone; required for .csv, .tsv and "
            ".parquet. Default: print the answers.",
        ),
    ] = None,
    file_format: Annotated[
        Literal["csv", "tsv", "jsonl", "parquet", "text"] | None,
        typer.Option("--format", help="Format of --file. Default: that of its extension, or text."),
    ] = None,
    encoding: Annotated[
        str, typer.Option(help="Encoding of the text in --file, such as latin-1 or utf-16.")
    ] = "utf-8",
    text_column: Annotated[
        str | None, typer.Option(help="Column of the texts in --file. Default: text.")
    ] = None,
    text_pair_column: Annotated[
        str | None, typer.Option(help="Column of the second texts in --file. Default: text_pair.")
    ] = None,
    image_column: Annotated[
        str | None,
        typer.Option(help="Column of images in --file, as paths or bytes. Default: image."),
    ] = None,
    parameter_columns: Annotated[
        list[str] | None,
        typer.Option(
            "--parameter-column",
            metavar="KEY=COLUMN",
            help="Request parameter whose value for each row is a column of --file; may be "
            "repeated. Default: no column.",
        ),
    ] = None,
    empty: Annotated[
        Literal["send", "skip", "refuse"],
        typer.Option(
            help="Treatment of rows of --file with an empty input: they are sent, stay without an "
            "answer, or get an error."
        ),
    ] = "send",
    json_cells: Annotated[
        bool, typer.Option("--json-cells", help="Write vectors into .csv and .tsv, as JSON.")
    ] = False,
    values: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            "-i",
            metavar="INPUT=VALUE",
            help="Value of an input of one row, for task: model; a path for the type bytes; may be "
            "repeated. Default: no input.",
        ),
    ] = None,
    chat: Annotated[
        str | None,
        typer.Option(help="Message of a user; the answer is streamed. Default: no message."),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(help="Prompt to continue; the answer is streamed. Default: no prompt."),
    ] = None,
    url: Annotated[
        str,
        typer.Option(help="gRPC address, several IP addresses with commas, or dns:///NAME:PORT."),
    ] = "127.0.0.1:8001",
    parameters: Annotated[
        list[str] | None,
        typer.Option(
            "--parameter",
            "-p",
            metavar="KEY=VALUE",
            help="Request parameter; may be repeated. Default: the pipeline's parameters.",
        ),
    ] = None,
    timeout_s: Annotated[
        float | None,
        typer.Option(
            help="Request timeout in seconds. Default: 30, or 600 to generate text for a file."
        ),
    ] = None,
    connection: ConnectionOptions,
    as_json: Json = False,
) -> None:
    """Send texts, images, a file of rows or a chat to a served pipeline.

    An option that is given once applies to every row: `--text Q --text-pair A --text-pair B` sends
    the pairs Q, A and Q, B. The options --chat and --prompt exclude each other and all other
    inputs. With --out, an interrupted run continues when the command is repeated.
    """
    from triptych.client.rows import (
        TIMEOUT_S,
        describe_answer,
        find_row_types,
        parse_parameters,
        read_input_rows,
        send_rows,
    )

    connection.apply()
    if chat is not None or prompt is not None:
        others = (text, text_pair, image, file, out, text_column, text_pair_column, image_column)
        given = (chat is None) + (prompt is None)
        if given == 0 or any(other is not None for other in others):
            raise UserError(
                "--chat, --prompt",
                "cannot be combined with each other or with other inputs",
                given="several inputs",
                remedy="Keep one of them and remove the other inputs",
            )
        limit_s = TIMEOUT_S if timeout_s is None else timeout_s
        _generate(name, url, chat, prompt, parameters or (), limit_s, as_json=as_json)
        return
    columns = {"text": text_column, "text_pair": text_pair_column, "image": image_column}
    named = {name: column for name, column in columns.items() if column is not None}
    suffix = None if file_format is None else f".{file_format}"
    if out is not None:
        from triptych.client.bulk.jobs import BulkOptions
        from triptych.client.bulk.run import run
        from triptych.client.rows import read_constants

        if file is None:
            raise UserError(
                "--out", "is only supported with --file", given=out, remedy="Add --file FILE"
            )
        constants = read_constants(text or (), text_pair or (), image or ())
        with _spooled(file) as source, _continued(out), show_progress("infer", "sending") as show:
            options = BulkOptions(
                name,
                source,
                out,
                url,
                named,
                constants,
                parameters or (),
                timeout_s,
                parameter_columns=_parse_columns(parameter_columns or ()),
                empty=empty,
                encoding=encoding,
                suffix=suffix,
                json_cells=json_cells,
            )
            done = run(
                options,
                lambda now: show(
                    Count(now.done, now.rows, "rows", now.rows_per_s, f", {now.failed:,} failed")
                ),
            )
        _print_run(done, out, as_json)
        return
    if named or parameter_columns or empty != "send" or json_cells:
        raise UserError(
            "--out",
            "is required with options about columns and cells",
            remedy="Add --out FILE",
        )
    limit_s = TIMEOUT_S if timeout_s is None else timeout_s
    types = find_row_types(name, url, limit_s) if values or file is not None else {}
    with _spooled(file) as source:
        rows = read_input_rows(
            text or (),
            text_pair or (),
            image or (),
            source,
            values=values or (),
            types=types,
            encoding=encoding,
            suffix=suffix,
        )
    parsed = parse_parameters(parameters or ())
    answers = send_rows(name, rows, url=url, parameters=parsed, timeout_s=limit_s)
    if as_json:
        print_json(answers)
        return
    for row, answer in zip(rows, answers, strict=True):
        output.print(f"{row.shown!r:.70}", style="bold", markup=False)
        for line in describe_answer(answer):
            output.print(f"  {line}", markup=False)


def _generate(
    name: str,
    url: str,
    chat: str | None,
    prompt: str | None,
    parameters: Sequence[str],
    timeout_s: float,
    *,
    as_json: bool,
) -> None:
    """Print an answer while it is streamed, then token counts and times."""
    from triptych.client.generation import Completion
    from triptych.client.rows import parse_sampling, stream_answer

    began, first_s, last_s, chunks = time.monotonic(), 0.0, 0.0, []
    sampling = parse_sampling(parameters)
    for chunk in stream_answer(name, url, chat, prompt, sampling, timeout_s):
        last_s = time.monotonic() - began
        first_s = first_s or last_s
        chunks.append(chunk)
        if not as_json:
            output.print(chunk.text, end="", markup=False)
            output.file.flush()
    whole = Completion.join(chunks)
    if as_json:
        print_json(asdict(whole))
        return
    output.print()
    tokens = len(whole.token_ids)
    rate = f", then {(tokens - 1) / (last_s - first_s):.3g} tokens/s" if last_s > first_s else ""
    prompt_part = f"{whole.usage.prompt_tokens} prompt tokens, " if whole.usage is not None else ""
    status.print(
        f"{prompt_part}{tokens} tokens ({whole.finish_reason}), first after {first_s:.3f} s{rate}",
        markup=False,
    )


def _parse_columns(pairs: Sequence[str]) -> dict[str, str]:
    columns = {}
    for pair in pairs:
        key, _, column = pair.partition("=")
        if not key or not column:
            raise UserError(
                "--parameter-column",
                "must be KEY=COLUMN",
                given=pair,
                remedy="Write for example --parameter-column top_k=wanted",
            )
        columns[key] = column
    return columns


@contextmanager
def _spooled(file: Path | None) -> Iterator[Any]:
    """Yield the file of rows; standard input as a copy, since it is read twice."""
    from triptych.client.bulk.jobs import SPOOLED

    if file is None or str(file) != "-":
        yield file
        return
    with tempfile.TemporaryDirectory(prefix=SPOOLED) as folder:
        copy = Path(folder, "stdin")
        with copy.open("wb") as target:
            shutil.copyfileobj(sys.stdin.buffer, target)
        yield copy


@contextmanager
def _continued(out: Path) -> Iterator[None]:
    """Say how a run is continued that is interrupted in the block."""
    from triptych.client.bulk.run import describe_stored

    try:
        with sigterm_as_interrupt():
            yield
    except KeyboardInterrupt:
        told = describe_stored(out) or "nothing is stored: run the same command again"
        status.print(f"interrupted: {told}", style="yellow", markup=False)
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _print_run(done: BulkProgress, out: Path, as_json: bool) -> None:
    from triptych.base.formatting import amount

    result = {"out": str(out), **done.as_dict()}
    if done.failed:
        rows = amount(done.rows, "row")
        reasons = f"column `error` of {out} has the reasons"
        if out.suffix.lower() == ".npy":
            reasons = f"their rows in {out} are NaN or 0; another format has the reasons"
        fail(as_json, result, f"{done.failed:,} of {rows}; {reasons}")
    if as_json:
        print_json(result)
        return
    earlier = f", {done.earlier:,} of them by earlier runs" if done.earlier else ""
    output.print(
        f"{amount(done.rows, 'row')}{earlier}, {done.rows_per_s:,.0f} rows/s: {out}", markup=False
    )
