"""The verb that asks a served pipeline, `infer`: a few rows, or a whole file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from triptych.base.errors import UserError
from triptych.interface.cli.options import (
    ENDPOINTS,
    Json,
    Name,
    app,
    fail,
    output,
    print_json,
    progress,
    status,
)

if TYPE_CHECKING:
    from triptych.client.bulk.run import Progress

_EVERY_S = 10.0
"""A line about a run that no terminal shows."""


@app.command()
def infer(
    name: Name,
    text: Annotated[
        list[str] | None, typer.Option("--text", "-t", help="A text; may be repeated.")
    ] = None,
    text_pair: Annotated[
        list[str] | None,
        typer.Option(
            "--text-pair", help="What goes with the text: a context, a passage; may be repeated."
        ),
    ] = None,
    image: Annotated[
        list[Path] | None, typer.Option("--image", help="An image file; may be repeated.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file", "-f", help=".csv, .tsv, .parquet, .jsonl, or a file with one text a line."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Where the file's rows go with their answers."),
    ] = None,
    text_column: Annotated[
        str | None, typer.Option("--text-column", help="The file's column of texts.")
    ] = None,
    text_pair_column: Annotated[
        str | None, typer.Option("--text-pair-column", help="Its column of what goes with them.")
    ] = None,
    image_column: Annotated[
        str | None, typer.Option("--image-column", help="Its column of images: paths, or bytes.")
    ] = None,
    chat: Annotated[
        str | None, typer.Option("--chat", help="What a user says: the answer is streamed.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", help="A text to go on with, streamed.")
    ] = None,
    url: Annotated[str, typer.Option(help=ENDPOINTS)] = "127.0.0.1:8001",
    parameters: Annotated[
        list[str] | None,
        typer.Option("--parameter", "-p", metavar="KEY=VALUE", help="For the request."),
    ] = None,
    timeout_s: Annotated[
        float | None, typer.Option(help="Deadline; 30, and 600 of a file's generations.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Ask a served pipeline: texts, images, a file of rows, a chat.

    Of --text and --text-pair one may be given once: it then goes with each of the other.
    With --out the rows of --file are written again, with columns of answers; after a break the same
    command goes on where it was.
    """
    from triptych.client.questions import (
        TIMEOUT_S,
        ask,
        describe_answer,
        parse_parameters,
        read_questions,
    )

    if chat is not None or prompt is not None:
        others = (text, text_pair, image, file, out, text_column, text_pair_column, image_column)
        given = (chat is None) + (prompt is None)
        if given == 0 or any(other is not None for other in others):
            raise UserError(
                "--chat, --prompt", "must be given alone", remedy="Leave the others out"
            )
        limit_s = TIMEOUT_S if timeout_s is None else timeout_s
        _generate(name, url, chat, prompt, parameters or (), limit_s, as_json=as_json)
        return
    columns = {"text": text_column, "text_pair": text_pair_column, "image": image_column}
    named = {name: column for name, column in columns.items() if column is not None}
    if out is not None:
        from triptych.client.bulk.asked import Asked
        from triptych.client.bulk.run import run
        from triptych.client.questions import read_constants

        if file is None:
            raise UserError("--out", "must go with --file", given=out, remedy="Give both")
        constants = read_constants(text or (), text_pair or (), image or ())
        order = Asked(name, file, out, url, named, constants, parameters or (), timeout_s)
        with _shown() as tell:
            done = run(order, tell)
        _print_run(done, out, as_json)
        return
    if named:
        raise UserError(
            "--out", "must go with columns of a file", given="nothing", remedy="Name a file"
        )
    questions = read_questions(text or (), text_pair or (), image or (), file)
    asked = parse_parameters(parameters or ())
    limit_s = TIMEOUT_S if timeout_s is None else timeout_s
    answers = ask(name, questions, url=url, parameters=asked, timeout_s=limit_s)
    if as_json:
        print_json(answers)
        return
    for question, answer in zip(questions, answers, strict=True):
        output.print(f"{question.shown!r:.70}", style="bold", markup=False)
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
    """Print an answer as it comes, and its figures at the end."""
    from triptych.client.generation import Completion
    from triptych.client.questions import parse_sampling, stream_answer

    began, first_s, last_s, chunks = time.monotonic(), 0.0, 0.0, []
    asked = parse_sampling(parameters)
    for chunk in stream_answer(name, url, chat, prompt, asked, timeout_s):
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
    rate = f", {(tokens - 1) / (last_s - first_s):.3g} a second after" if last_s > first_s else ""
    given = f"{whole.usage.prompt_tokens} prompt tokens, " if whole.usage is not None else ""
    status.print(
        f"{given}{tokens} tokens ({whole.finish_reason}), first after {first_s:.3f} s{rate}",
        markup=False,
    )


@contextmanager
def _shown() -> Iterator[Callable[[Progress], None]]:
    """What tells a terminal at once, and anything else now and then, how far a run is."""
    told = time.monotonic()
    with status.status("reading") as spinner:

        def tell(now: Progress) -> None:
            nonlocal told
            left_s = (now.rows - now.done) / now.rows_per_s if now.rows_per_s else 0.0
            line = (
                f"{now.done:,} of {now.rows:,} rows, {now.rows_per_s:,.0f} a second, "
                f"{now.failed:,} failed, {left_s / 60:,.0f} min left"
            )
            if status.is_terminal:
                spinner.update(line)
            elif time.monotonic() - told > _EVERY_S:
                told = time.monotonic()
                progress("infer", line)

        yield tell


def _print_run(done: Progress, out: Path, as_json: bool) -> None:
    from triptych.base.formatting import amount

    result = {"out": str(out), **done.as_dict()}
    if done.failed:
        rows = amount(done.rows, "row")
        fail(as_json, result, f"{done.failed:,} of {rows}: why is in `error` of {out}")
    if as_json:
        print_json(result)
        return
    earlier = f", {done.earlier:,} of them by earlier runs" if done.earlier else ""
    output.print(
        f"{amount(done.rows, 'row')}{earlier}, {done.rows_per_s:,.0f} a second: {out}", markup=False
    )
