"""Demo page of a served pipeline, made of components of Gradio (the extra `page`)."""

from __future__ import annotations

import asyncio
import json
import math
import os
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import fastapi
import gradio as gr
import uvicorn

from triptych.base.files import parse_yaml
from triptych.base.formatting import amount, milliseconds, plain
from triptych.base.tensors import Tensor
from triptych.client import Client, Completion, Generation, InferenceError, StepStatistics
from triptych.client.connection import is_loopback
from triptych.client.plain import plain_outputs, request_parameter
from triptych.client.server_info import request_failure
from triptych.interface.cli.rows import describe_answer
from triptych.tasks.task import Task, ViewKind

MAX_EXAMPLES = 8
"""Maximum number of rows of the traffic that a page offers as examples."""

MAX_TERMS = 64
"""Maximum number of terms of a text that a page shows."""

_MAX_FILE_BYTES = 64 << 20
_UPLOADS = "GRADIO_TEMP_DIR"
"""Variable of the folder in which Gradio keeps the files that were sent to a page."""

_MAX_ANSWERS = 16
"""Maximum number of answers that a page generates at a time."""

_MAX_EXACT = 2**53 - 1
"""Largest integer that a browser does not round."""

_COUNTED_WITHIN_S = 0.5
"""Maximum delay until Triton's statistics include an answered request, in seconds."""

_OPTION_TYPES = {"BOOL": "bool", "INT32": "int", "FP32": "float", "BYTES": "str"}
"""Type of a parameter by the datatype of its optional input."""

_SAMPLING = {"max_tokens": {"type": "int"}, "temperature": {"type": "float"}}
# Gradio's page has scripts in it, and compiles some; nothing comes from another host.
_POLICY = (
    "default-src 'self' data: blob:; script-src 'self' 'unsafe-inline' 'unsafe-eval'; "
    "style-src 'self' 'unsafe-inline'; base-uri 'self'; form-action 'self'; frame-ancestors 'none'"
)

# Gradio breaks marked texts within words and at each mark, and numbers in narrow tables.
_STYLE = """
.textfield { display: block !important; word-break: normal !important; }
.token.highlighted { display: inline-block; }
.times table { word-break: normal !important; overflow-wrap: normal; }
.times td, .times th { padding: .2rem !important; font-size: .75rem !important; }
"""

Row = Mapping[str, Any]
"""Inputs or outputs of a row by name, as plain data."""

Rules = Mapping[str, Mapping[str, Any]]
"""Rule of each request parameter, as the first step of a pipeline has it."""


@dataclass(frozen=True, kw_only=True)
class PagePipeline:
    """A served pipeline, and what its page shows of it."""

    name: str
    about: str  # task and model
    url: str  # address host:port of the server's gRPC endpoint
    timeout_s: float  # maximum time of a request
    task: Task | None  # None if the pipeline generates text
    is_chat: bool  # whether it answers conversations
    rules: Rules  # empty if they are unknown
    defaults: Mapping[str, Any]  # defaults of request parameters, as far as they are known
    rows: Sequence[Row]  # examples: rows of the traffic
    folder: Path  # folder of the files that the rows name
    tokenizer: Path | None = None  # file of the tokenizer, if it is known


@contextmanager
def open_page(pipeline: PagePipeline, host: str, port: int) -> Iterator[str]:
    """Serve the page of a pipeline while the block runs, and yield its URL.

    A process has one page at a time, because a variable names the folder of files that it gets.

    Raises:
        OSError: The page cannot listen on the address.
        UserError: The address of the pipeline is invalid, or the pipeline is not available there.
    """
    with (
        Client(pipeline.name, pipeline.url, timeout_s=pipeline.timeout_s) as client,
        tempfile.TemporaryDirectory() as uploads,
    ):
        os.environ[_UPLOADS] = os.path.realpath(uploads)
        # Where no event loop runs, Gradio makes several, and closes none.
        app = asyncio.run(_make_app(pipeline, client, host, port))
        server = uvicorn.Server(
            uvicorn.Config(app, host, port, log_level="critical", timeout_graceful_shutdown=1)
        )
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while thread.is_alive() and not server.started:
            time.sleep(0.01)
        if not server.started:
            raise OSError(f"cannot listen on {host}:{port}")
        try:
            yield f"http://{host}:{port}/"
        finally:
            server.should_exit = True
            thread.join()


async def _make_app(
    pipeline: PagePipeline, client: Client, host: str, port: int
) -> fastapi.FastAPI:
    page = _page(pipeline, client)
    # Else Gradio reads every file of this machine that a request names (gradio 6.31).
    page.has_launched = True
    app = gr.mount_gradio_app(
        fastapi.FastAPI(openapi_url=None),
        page,
        path="",
        server_name=host,
        server_port=port,
        footer_links=[],
        max_file_size=_MAX_FILE_BYTES,
        ssr_mode=False,
        css=_STYLE,
    )
    app.middleware("http")(_make_guard(is_local=is_loopback(f"{host}:{port}")))
    return app


def _make_guard(*, is_local: bool) -> Callable[[fastapi.Request, Any], Awaitable[fastapi.Response]]:
    """Return a middleware that rejects requests of other sites, and sends the policy."""

    async def guard(request: fastapi.Request, call_next: Any) -> fastapi.Response:
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        is_foreign = origin is not None and origin.partition("://")[2] != host
        if is_local and not is_loopback(host if ":" in host else f"{host}:80"):
            is_foreign = True  # a name that was made to point here
        if is_foreign:
            return fastapi.Response("403 Forbidden\n", 403)
        response: fastapi.Response = await call_next(request)
        response.headers["Content-Security-Policy"] = _POLICY
        response.headers["Referrer-Policy"] = "same-origin"
        return response

    return guard


def _page(pipeline: PagePipeline, client: Client) -> gr.Blocks:
    about = {
        "title": pipeline.name,
        "description": f"{pipeline.about}, served at {pipeline.url}",
        "additional_inputs_accordion": gr.Accordion(
            "Parameters", open=pipeline.task is not None, render=False
        ),
        "analytics_enabled": False,
        "cache_examples": False,
        "flagging_mode": "never",
    }
    if pipeline.task is not None:
        return _row_page(pipeline, pipeline.task, client, about)
    about["concurrency_limit"] = _MAX_ANSWERS
    about["additional_inputs"] = [
        _parameter(name, rule, pipeline.defaults.get(name)) for name, rule in _SAMPLING.items()
    ]
    prompts = [[_prompt(row)] for row in pipeline.rows] or None
    make = _chat_page if pipeline.is_chat else _text_page
    return make(client, {**about, "examples": prompts})


def _row_page(
    pipeline: PagePipeline, task: Task, client: Client, about: Mapping[str, object]
) -> gr.Blocks:
    """Return the form of a task's inputs and parameters, with the answer and its times."""
    try:
        config = client.interface()
    except InferenceError as error:
        raise request_failure(pipeline.name, pipeline.url, error) from error
    names = [tensor.name for tensor in task.inputs]
    fields = [_field(tensor, task.view.kind) for tensor in task.inputs]
    if compares := task.view.kind == "vectors":
        fields.append(gr.Textbox("", label=f"another {names[0]} to compare with", lines=3))
    rules = {
        name: pipeline.rules.get(name, {"type": _OPTION_TYPES[datatype]})
        for name, datatype in config.options.items()
        if name not in config.row_types
    }
    asked = {
        name: min(count, rules[name]["max"])
        for name, count in task.view.asks.items()
        if "max" in rules.get(name, {})
    }
    view = _VIEWS.get(task.view.kind)
    words = _read_words(pipeline.tokenizer) if task.view.kind == "terms" else None

    def answer(*given: Any) -> list[Any]:
        fields_given = dict(zip(names, given, strict=False))
        row = {
            tensor.name: _typed_input(tensor, fields_given[tensor.name])
            for tensor in task.inputs
            if fields_given[tensor.name] not in (None, "") or not tensor.optional
        }
        rows = [row]
        if compares and (second := given[len(names)]):
            rows.append({**row, names[0]: second})
        answers, times = _send(client, rows, _read_parameters(rules, given[len(fields) :]))
        lines = [line for each in answers for line in describe_answer(each)]
        shown: list[object] = ["\n".join([*_similarity(answers), *lines]), times, answers]
        if view is not None:
            value = None
            with suppress(KeyError, TypeError, ValueError):  # a hook may return another form
                first = answers[0] if words is None else _named(answers[0], words)
                value = view.value(fields_given, first)
            shown.insert(0, value)
        return shown

    return gr.Interface(
        answer,
        fields,
        [
            *([view.component()] if view else []),
            gr.Textbox(label="Outputs", lines=3, max_lines=20, buttons=["copy"]),
            gr.Markdown(elem_classes="times"),
            gr.JSON(label="Raw outputs", open=False),
        ],
        additional_inputs=[
            _parameter(name, rule, pipeline.defaults.get(name), asked.get(name))
            for name, rule in rules.items()
        ],
        examples=[
            [
                *(_example(pipeline, tensor, row) for tensor in task.inputs),
                *([""] if compares else []),
                *(
                    _parameter_example(
                        rules[name],
                        pipeline.defaults.get(name),
                        row.get("parameters", {}).get(name, asked.get(name)),
                    )
                    for name in rules
                ),
            ]
            for row in pipeline.rows
        ]
        or None,
        deep_link=False,
        **about,
    )


def _text_page(client: Client, about: Mapping[str, object]) -> gr.Blocks:
    """Return a page with a text and its streamed answer."""

    def answer(text: str, *given: Any) -> Iterator[tuple[str, str]]:
        yield from _stream(client.generate(text, **_read_parameters(_SAMPLING, given)))

    return gr.Interface(
        answer,
        gr.Textbox(label="text", lines=6),
        [gr.Textbox(label="answer", lines=6), gr.Textbox(label="Tokens and times")],
        deep_link=False,
        **about,
    )


def _chat_page(client: Client, about: Mapping[str, object]) -> gr.Blocks:
    """Return a page with a conversation, whose answers are streamed."""

    def answer(text: str, history: Sequence[Row], *given: Any) -> Iterator[tuple[str, str]]:
        turns = [(turn["role"], _said(turn["content"])) for turn in history]
        messages = []
        for asked, answered in pairwise(turns):  # without those that got no answer
            if (asked[0], answered[0]) == ("user", "assistant") and answered[1]:
                messages += [{"role": role, "content": said} for role, said in (asked, answered)]
        messages.append({"role": "user", "content": text})
        yield from _stream(client.chat(messages, **_read_parameters(_SAMPLING, given)))

    summary = gr.Textbox(label="Tokens and times", render=False)
    # Without the button that shares a conversation with a site.
    chatbot = gr.Chatbot(label="Conversation", buttons=["copy", "copy_all"])
    with gr.ChatInterface(
        answer,
        chatbot=chatbot,
        additional_outputs=[summary],
        run_examples_on_click=False,
        **about,
    ) as page:
        summary.render()
    return page


def _said(content: str | Sequence[Row]) -> str:
    """Return the text of a turn: Gradio has its parts, its API the text."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _stream(answer: Generation) -> Iterator[tuple[str, str]]:
    """Yield the answer so far, and at the end also its tokens and times, or the error."""
    began, first_s, text = time.monotonic(), 0.0, ""
    chunks = []
    try:
        with answer:
            for chunk in answer:
                first_s = first_s or time.monotonic() - began
                chunks.append(chunk)
                text += chunk.text
                yield text, ""
    except InferenceError as error:  # After an exception a chat would take no more messages.
        gr.Warning(str(plain(error.message)), duration=None, title="No answer")
        yield text, error.message
        return
    took_s = time.monotonic() - began
    whole = Completion.join(chunks)
    prompt = "" if whole.usage is None else f"{whole.usage.prompt_tokens} prompt tokens, "
    yield (
        text,
        f"{prompt}{amount(len(whole.token_ids), 'token')} ({whole.finish_reason}); first token "
        f"after {milliseconds(first_s * 1e6)} ms, last token after {milliseconds(took_s * 1e6)} ms",
    )


def _send(
    client: Client, rows: Sequence[Row], parameters: Mapping[str, Any]
) -> tuple[list[Row], str]:
    """Return the outputs of each row, and the table of the times of the steps."""
    steps: Sequence[StepStatistics] = ()
    inputs = {name: [row[name] for row in rows] for name in rows[0]}
    try:
        before, unknown_reason = _count(client)
        began = time.perf_counter()
        outputs = client.infer(inputs, parameters=parameters)
        total_us = (time.perf_counter() - began) * 1e6
        config = client.interface()
        until = time.monotonic() + _COUNTED_WITHIN_S
        while before:
            steps = [now - old for now, old in zip(client.step_statistics(), before, strict=True)]
            if all(step.requests for step in steps) or time.monotonic() > until:
                break
            time.sleep(0.01)
    except InferenceError as error:  # The message need not name the only row.
        message = plain(error.message if len(rows) == 1 else str(error))
        raise gr.Error(str(message), duration=None, print_exception=False) from error
    columns = plain_outputs(config, outputs)
    answers: list[Row] = [
        dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
    ]
    return answers, _times(client.pipeline, steps, len(rows), total_us, unknown_reason)


def _count(client: Client) -> tuple[list[StepStatistics], str]:
    try:
        return client.step_statistics(), ""
    except InferenceError as error:  # A server may not offer statistics.
        return [], str(error)


def _times(
    pipeline: str, steps: Sequence[StepStatistics], rows: int, total_us: float, unknown_reason: str
) -> str:
    """Return a table of the times of the steps, in Markdown."""
    lines = ["| ms | queue | input | compute | output | total |", "| :-" + " | -:" * 5 + " |"]
    outside_us = total_us
    for step in steps:
        waited_us = (step.queue_us, step.compute_input_us)
        phases_us = (*waited_us, step.compute_infer_us, step.compute_output_us)
        outside_us -= sum(phases_us)
        times = " | ".join(map(milliseconds, (*phases_us, sum(phases_us))))
        lines.append(f"| {step.model.removeprefix(f'{pipeline}_')} | {times} |")
    if steps:
        between = milliseconds(max(0.0, outside_us))
        lines.append(f"| gRPC, and server between steps | | | | | {between} |")
    lines.append(f"| total, measured by this page | | | | | {milliseconds(total_us)} |")
    requests = max((step.requests for step in steps), default=0)
    note = "Statistics of Triton; there were no other requests in this time."
    if unknown_reason:
        note = f"The server does not report statistics of its steps: {plain(unknown_reason)}"
    elif requests > 1:
        note = (
            f"Times of steps are means over {requests} requests; {rows} or fewer are of this page."
        )
    return "\n".join([*lines, "", note])


def _field(tensor: Tensor, view: ViewKind) -> gr.components.Component:
    """Return the component of an input."""
    if tensor.content == "image" or view == "boxes":  # only the pipeline reads the file
        image = gr.Image(label=tensor.name, sources=["upload", "clipboard"])
        image.preprocess = lambda upload: upload and upload.path
        return image
    if tensor.content == "bytes":
        return gr.File(label=tensor.name)
    if _is_integer(tensor):
        return gr.Number(label=tensor.name, precision=0, minimum=-_MAX_EXACT, maximum=_MAX_EXACT)
    is_number = tensor.dims == (1,) and tensor.dtype not in ("BYTES", "BOOL")
    return gr.Textbox(label=tensor.name, lines=1 if is_number else 3)


def _parameter(
    name: str, rule: Mapping[str, Any], default: object, value: object = None
) -> gr.components.Component:
    """Return the component of a parameter; if it is empty, the pipeline's default applies."""
    hint = _text(request_parameter(default))
    choices = ("true", "false") if rule["type"] == "bool" else rule.get("choices")
    if choices:
        empty = (f"{hint or 'none'} (default of the pipeline)", "")
        named = [(choice, choice) for choice in choices]
        return gr.Dropdown([empty, *named], value=_text(value), label=name)
    bounds = [
        f"{word} {rule[end]:g}" for word, end in (("from", "min"), ("to", "max")) if end in rule
    ]
    info = " ".join(bounds) or None
    if _has_number(rule, default):
        return gr.Number(default if value is None else value, label=name, precision=0, info=info)
    return gr.Textbox(_text(value), label=name, placeholder=hint, info=info)


def _has_number(rule: Mapping[str, Any], default: object) -> bool:
    """Return whether a parameter has a field of a number, which is 0 if it is empty."""
    return rule["type"] == "int" and isinstance(default, int)


def _is_integer(tensor: Tensor) -> bool:
    return tensor.dims == (1,) and "INT" in tensor.dtype and not tensor.optional


def _read_parameters(rules: Rules, given: Sequence[str | int | None]) -> dict[str, Any]:
    """Return parameters that are not empty; a wrong number stays text for the pipeline's error."""
    sent: dict[str, object] = {}
    for (name, rule), text in zip(rules.items(), given, strict=True):
        if text not in (None, ""):
            sent[name] = text == "true" if rule["type"] == "bool" else text
            with suppress(ValueError):
                if rule["type"] in ("int", "float"):
                    sent[name] = int(text) if rule["type"] == "int" else float(text)
    return sent


def _typed_input(tensor: Tensor, given: str | int | None) -> Any:
    """Return the value of an input; a wrong number stays text, because the error explains it."""
    if isinstance(given, int):
        return given
    if tensor.content in ("image", "bytes"):
        if given and not Path(given).resolve().is_relative_to(os.environ[_UPLOADS]):
            raise gr.Error(f"`{tensor.name}` must be a file that was sent to the page")
        return Path(given).read_bytes() if given else b""
    if tensor.dtype != "BYTES" or tensor.dims != (1,):
        with suppress(ValueError):
            return parse_yaml(given or "")
    return given or ""


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value)


def _parameter_example(rule: Mapping[str, Any], default: object, value: object) -> object:
    """Return the value of a parameter in an example, as its component takes it."""
    if _has_number(rule, default):
        return default if value is None else value
    return _text(value)


def _example(pipeline: PagePipeline, tensor: Tensor, row: Row) -> object:
    """Return the value of an input in a row of the traffic, as its component takes it."""
    value = row.get(tensor.name)
    if tensor.content in ("image", "bytes"):
        return None if value is None else str(pipeline.folder / value)
    return value if _is_integer(tensor) else _text(value)


def _prompt(row: Row) -> str:
    """Return the last message of a row of the traffic."""
    messages = row.get("messages") or [{"content": row.get("text_input", "")}]
    return str(messages[-1].get("content", ""))


def _similarity(answers: Sequence[Row]) -> Iterator[str]:
    """Yield a line with the cosine similarity, if each of two rows has one vector of floats."""
    vectors = [
        values
        for row in answers
        for values in row.values()
        if isinstance(values, list) and values and isinstance(values[0], float)
    ]
    if len(vectors) == len(answers) == 2:
        lengths = math.prod(math.hypot(*values) for values in vectors)
        cosine = sum(one * other for one, other in zip(*vectors, strict=True)) / (
            lengths or math.nan
        )
        yield f"Cosine similarity of both vectors: {cosine:.4f}"


Pieces = list[tuple[str, str | None]]
"""Parts of a text; a marked part has a label."""


def mark_spans(text: str, spans: Iterable[Row]) -> Pieces:
    """Return `text` in pieces, with its spans marked.

    A span has the characters from `start` up to `end` (exclusive), their `text` and a `label`. If
    spans overlap, the first is marked. A span whose text differs is skipped, because a hook may
    have changed the text that the model read.
    """
    pieces: Pieces = []
    done = 0
    for span in sorted(spans, key=lambda span: (span["start"], -span["end"])):
        start, end = span["start"], span["end"]
        if done <= start < end and text[start:end] == span["text"]:
            pieces += [(text[done:start], None), (text[start:end], span["label"])]
            done = end
    return [piece for piece in (*pieces, (text[done:], None)) if piece[0]]


def _scores(given: Row, row: Row) -> dict[str, float]:
    labels = next(value for name, value in row.items() if name != "score")
    scores = (score if math.isfinite(score) else 0.0 for score in row["score"])
    return dict(zip(labels, scores, strict=True))


def _entities(given: Row, row: Row) -> Pieces:
    spans = [{**entity, "label": entity["entity"]} for entity in row["entities"]]
    return mark_spans(given["text"], spans)


def _answer(given: Row, row: Row) -> Pieces:
    return mark_spans(given["text_pair"], [{**row, "text": row["answer"], "label": "answer"}])


def _read_words(tokenizer: Path | None) -> Callable[[int], str | None] | None:
    """Return the function from the id of a token to the token; None without a tokenizer."""
    if tokenizer is None or not tokenizer.is_file():
        return None
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(tokenizer)).id_to_token


def _named(row: Row, words: Callable[[int], str | None]) -> Row:
    """Return a row with tokens in place of their ids."""
    return {**row, "token_id": [words(index) or index for index in row["token_id"]]}


def _terms(given: Row, row: Row) -> Pieces:
    """Return the terms of a text, each with its weight, the highest first."""
    terms = zip(row["token_id"], row["weight"], strict=True)
    return [(str(term), f"{weight:.2f}") for term, weight in islice(terms, MAX_TERMS)]


def _boxes(given: Row, row: Row) -> tuple[str, list[tuple[tuple[int, ...], str]]]:
    """Return the file of an image, with the pixels and the label of each box."""
    lists = [value for value in row.values() if isinstance(value, list)]
    (boxes,) = (value for value in lists if all(isinstance(each, list) for each in value))
    (labels,) = (value for value in lists if all(isinstance(each, str) for each in value))
    named = zip(boxes, labels, strict=True)
    return next(iter(given.values())), [(tuple(map(round, box)), label) for box, label in named]


@dataclass(frozen=True)
class _View:
    """Component for an answer, and its value for the fields and the outputs of a row."""

    component: Callable[[], gr.components.Component]
    value: Callable[[Row, Row], Any]


_VIEWS: Mapping[ViewKind, _View] = {
    "choices": _View(lambda: gr.Label(label="Scores"), _scores),
    "entities": _View(lambda: gr.HighlightedText(label="Entities"), _entities),
    "answer": _View(lambda: gr.HighlightedText(label="Answer"), _answer),
    "terms": _View(lambda: gr.HighlightedText(label="Terms with weights"), _terms),
    "boxes": _View(lambda: gr.AnnotatedImage(label="Boxes"), _boxes),
}
