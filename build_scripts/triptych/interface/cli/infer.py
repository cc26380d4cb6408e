"""The verb `infer`: requests to a served pipeline, of some rows or a whole file."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from triptych.base.errors import Count, UserError
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
    from triptych.interface.bulk.cluster import ClusterProgress
    from triptych.interface.bulk.jobs import JobOptions
    from triptych.interface.bulk.run import BulkProgress


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """Rows to send."""

    text: Annotated[
        list[str] | None,
        typer.Option("--text", "-t", help="Text to send; may be repeated. Default: no text."),
    ] = None
    text_pair: Annotated[
        list[str] | None,
        typer.Option(
            help="Second text of a pair, such as a context; may be repeated. Default: none."
        ),
    ] = None
    image: Annotated[
        list[Path] | None,
        typer.Option(help="Image file to send; may be repeated. Default: no image."),
    ] = None
    values: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            "-i",
            metavar="INPUT=VALUE",
            help="Value of an input of one row, for task: model; a path for the type bytes; may be "
            "repeated. Default: no input.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """File of rows to send, and file for their answers."""

    file: Annotated[
        str | None,
        typer.Option(
            "--file",
            "-f",
            metavar="FILE",
            help="File of rows: .csv, .tsv, .parquet, .jsonl, or one text per line; a folder of "
            "images; - is standard input. With --ray a folder, or a pattern such as "
            "'s3://bucket/part-*.parquet'. "
            "Default: none.",
        ),
    ] = None
    out: Annotated[
        str | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="File for the rows of --file with their answers, in the format of its extension: "
            ".csv, .tsv, .jsonl, .parquet, or .npy for vectors alone; required for .csv, .tsv and "
            ".parquet. With --ray a folder of Parquet files. Default: print the answers.",
        ),
    ] = None
    file_format: Annotated[
        Literal["csv", "tsv", "jsonl", "parquet", "text"] | None,
        typer.Option("--format", help="Format of --file. Default: that of its extension, or text."),
    ] = None
    encoding: Annotated[
        str, typer.Option(help="Encoding of the text in --file, such as latin-1 or utf-16.")
    ] = "utf-8"
    text_column: Annotated[
        str | None, typer.Option(help="Column of the texts in --file. Default: text.")
    ] = None
    text_pair_column: Annotated[
        str | None, typer.Option(help="Column of the second texts in --file. Default: text_pair.")
    ] = None
    image_column: Annotated[
        str | None,
        typer.Option(help="Column of images in --file, as paths or bytes. Default: image."),
    ] = None
    parameter_columns: Annotated[
        list[str] | None,
        typer.Option(
            "--parameter-column",
            metavar="KEY=COLUMN",
            help="Request parameter whose value for each row is a column of --file; may be "
            "repeated. Default: no column.",
        ),
    ] = None
    empty: Annotated[
        Literal["send", "skip", "refuse"],
        typer.Option(
            help="Treatment of rows of --file with an empty input: they are sent, stay without an "
            "answer, or get an error."
        ),
    ] = "send"
    json_cells: Annotated[
        bool, typer.Option("--json-cells", help="Write vectors into .csv and .tsv, as JSON.")
    ] = False

    @property
    def columns(self) -> dict[str, str]:
        """Columns of the file whose names are given, by input."""
        columns = {
            "text": self.text_column,
            "text_pair": self.text_pair_column,
            "image": self.image_column,
        }
        return {name: column for name, column in columns.items() if column is not None}

    @property
    def suffix(self) -> str | None:
        """Extension of the given format of the file."""
        return None if self.file_format is None else f".{self.file_format}"


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """Cluster that reads --file and writes --out."""

    ray: Annotated[
        str | None,
        typer.Option(
            metavar="auto|local|ADDRESS",
            help="Cluster of Ray for --file; auto is the one of this machine or of RAY_ADDRESS, or "
            "a new one, as local. Default: no cluster.",
        ),
    ] = None
    repository: Annotated[
        Path | None,
        typer.Option(
            "--repository",
            "-r",
            help="Model repository on every node, which --ray starts a server on for each GPU, or "
            "each node without one. Default: use the server at --url.",
        ),
    ] = None
    max_errors: Annotated[
        int | None,
        typer.Option(help="Number of failed rows after which --ray stops. Default: no limit."),
    ] = None
    price_per_hour: Annotated[
        float | None,
        typer.Option(help="Price of a GPU, or a node without one, per hour. Default: no cost."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """Prompt to generate text for."""

    chat: Annotated[
        str | None,
        typer.Option(help="Message of a user; the answer is streamed. Default: no message."),
    ] = None
    prompt: Annotated[
        str | None,
        typer.Option(help="Prompt to continue; the answer is streamed. Default: no prompt."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """Server and options of every request."""

    url: Annotated[
        str,
        typer.Option(help="gRPC address, several IP addresses with commas, or dns:///NAME:PORT."),
    ] = "127.0.0.1:8001"
    parameters: Annotated[
        list[str] | None,
        typer.Option(
            "--parameter",
            "-p",
            metavar="KEY=VALUE",
            help="Request parameter; may be repeated. Default: the pipeline's parameters.",
        ),
    ] = None
    timeout_s: Annotated[
        float | None,
        typer.Option(
            help="Request timeout in seconds. Default: 30, or 600 to generate text for a file."
        ),
    ] = None

    @property
    def limit_s(self) -> float:
        """Timeout of a request that does not belong to a file, in seconds."""
        from triptych.interface.cli.rows import TIMEOUT_S

        return TIMEOUT_S if self.timeout_s is None else self.timeout_s


@verb()
def infer(
    name: Name,
    rows: RowOptions,
    table: FileOptions,
    cluster: RayOptions,
    prompt: PromptOptions,
    request: RequestOptions,
    connection: ConnectionOptions,
    as_json: Json = False,
) -> None:
    """Send texts, images, a file of rows or a chat to a served pipeline.

    An option that is given once applies to every row: `--text Q --text-pair A --text-pair B` sends
    the pairs Q, A and Q, B. The options --chat and --prompt exclude each other and all other
    inputs. With --out, an interrupted run continues when the command is repeated.
    """
    connection.apply()
    if prompt.chat is not None or prompt.prompt is not None:
        is_both = prompt.chat is not None and prompt.prompt is not None
        if is_both or (rows, table, cluster) != (RowOptions(), FileOptions(), RayOptions()):
            raise UserError(
                "--chat, --prompt",
                "cannot be combined with each other or with other inputs",
                given="several inputs",
                remedy="Keep one of them and remove the other inputs",
            )
        _generate(name, prompt, request, as_json=as_json)
    elif cluster != RayOptions():
        _infer_corpus(_job(name, rows, table, request), table, cluster, as_json=as_json)
    elif table.out is not None:
        job = _job(name, rows, table, request)
        _infer_file(job, table, Path(table.out), as_json=as_json)
    else:
        _infer_rows(name, rows, table, request, as_json=as_json)


def _job(name: str, rows: RowOptions, table: FileOptions, request: RequestOptions) -> JobOptions:
    from triptych.interface.bulk.jobs import JobOptions
    from triptych.interface.cli.rows import parse_pairs, read_constants

    if rows.values:
        raise UserError(
            "--input",
            "is only supported for a single row",
            given=rows.values[0],
            remedy="Remove it, and give the rows of --file a column for the input",
        )
    return JobOptions(
        name,
        request.url,
        table.columns,
        read_constants(rows.text or (), rows.text_pair or (), rows.image or ()),
        request.parameters or (),
        request.timeout_s,
        parse_pairs(
            "--parameter-column",
            table.parameter_columns or (),
            lambda column: column or None,
            "KEY=COLUMN",
            "top_k=wanted",
        ),
        table.empty,
        table.encoding,
        table.suffix,
    )


def _infer_file(job: JobOptions, table: FileOptions, out: Path, *, as_json: bool) -> None:
    """Send the rows of a file, and write them with their answers."""
    from triptych.interface.bulk.jobs import BulkOptions
    from triptych.interface.bulk.run import run

    if table.file is None:
        raise UserError(
            "--out", "is only supported with --file", given=out, remedy="Add --file FILE"
        )
    with (
        _spooled(Path(table.file)) as source,
        _continued(out),
        show_progress("infer", "sending") as show,
    ):
        options = BulkOptions(**vars(job), file=source, out=out, json_cells=table.json_cells)
        done = run(
            options,
            lambda now: show(
                Count(now.done, now.rows, "rows", now.rows_per_s, f", {now.failed:,} failed")
            ),
        )
    _print_run(done, out, as_json)


def _infer_corpus(
    job: JobOptions, table: FileOptions, cluster: RayOptions, *, as_json: bool
) -> None:
    """Let a cluster send the rows of files, and write them with their answers."""
    from triptych.interface.bulk.cluster import ClusterOptions, run_on_cluster

    if cluster.ray is None or table.file is None or table.out is None:
        raise UserError(
            "--ray, --file, --out",
            "are required together",
            remedy="Add --ray auto, the files with --file, and a folder with --out",
        )
    options = ClusterOptions(
        **vars(job),
        file=table.file,
        out=table.out,
        address=cluster.ray,
        repository=cluster.repository and cluster.repository.absolute(),
        max_errors=cluster.max_errors,
        price_per_hour=cluster.price_per_hour,
    )
    with show_progress("infer", "sending") as show, sigterm_as_interrupt():
        done = run_on_cluster(
            options,
            lambda now: show(
                Count(
                    now.done,
                    now.parts,
                    "parts",
                    now.done / now.seconds,
                    f", {now.describe()}, {now.failed:,} failed",
                )
            ),
        )
    _print_run(done, table.out, as_json)


def _infer_rows(
    name: str, rows: RowOptions, table: FileOptions, request: RequestOptions, *, as_json: bool
) -> None:
    """Send rows and print their answers."""
    from triptych.interface.cli.rows import (
        describe_answer,
        find_row_types,
        parse_parameters,
        read_input_rows,
        send_rows,
    )

    if table.columns or table.parameter_columns or table.empty != "send" or table.json_cells:
        raise UserError(
            "--out",
            "is required with options about columns and cells",
            remedy="Add --out FILE",
        )
    has_types = rows.values or table.file is not None
    types = find_row_types(name, request.url, request.limit_s) if has_types else {}
    with nullcontext() if table.file is None else _spooled(Path(table.file)) as source:
        read = read_input_rows(
            rows.text or (),
            rows.text_pair or (),
            rows.image or (),
            source,
            values=rows.values or (),
            types=types,
            encoding=table.encoding,
            suffix=table.suffix,
        )
    parameters = parse_parameters(request.parameters or ())
    answers = send_rows(
        name, read, url=request.url, parameters=parameters, timeout_s=request.limit_s
    )
    if as_json:
        print_json(answers)
        return
    for row, answer in zip(read, answers, strict=True):
        output.print(f"{row.shown!r:.70}", style="bold", markup=False)
        for line in describe_answer(answer):
            output.print(f"  {line}", markup=False)


def _generate(name: str, prompt: PromptOptions, request: RequestOptions, *, as_json: bool) -> None:
    """Print an answer while it is streamed, then token counts and times."""
    from triptych.client.generation import Completion
    from triptych.interface.cli.rows import parse_sampling, stream_answer

    began, first_s, last_s, chunks = time.monotonic(), 0.0, 0.0, []
    sampling = parse_sampling(request.parameters or ())
    for chunk in stream_answer(
        name, request.url, prompt.chat, prompt.prompt, sampling, request.limit_s
    ):
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


@contextmanager
def _spooled(file: Path) -> Iterator[Path]:
    """Yield the file of rows; standard input as a copy, since it is read twice."""
    from triptych.interface.bulk.jobs import SPOOLED

    if str(file) != "-":
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
    from triptych.interface.bulk.run import describe_stored

    try:
        with sigterm_as_interrupt():
            yield
    except KeyboardInterrupt:
        told = describe_stored(out) or "nothing is stored: run the same command again"
        status.print(f"interrupted: {told}", style="yellow", markup=False)
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _print_run(done: BulkProgress | ClusterProgress, out: Path | str, as_json: bool) -> None:
    from triptych.base.formatting import amount

    result = {"out": str(out), **asdict(done), "rows_per_s": round(done.rows_per_s, 1)}
    if done.failed:
        rows = amount(done.rows, "row")
        reasons = f"column `error` of {out} has the reasons"
        if str(out).lower().endswith(".npy"):
            reasons = f"their rows in {out} are NaN or 0; another format has the reasons"
        fail(as_json, result, f"{done.failed:,} of {rows}; {reasons}")
    if as_json:
        print_json(result)
        return
    earlier = f", {done.earlier:,} of them by earlier runs" if done.earlier else ""
    output.print(f"{amount(done.rows, 'row')}{earlier}, {done.describe()}: {out}", markup=False)
