"""Demo page of a served pipeline, made of components of Gradio (the extra `page`)."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, pairwise
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
from triptych.client.zero_shot import TEMPLATE
from triptych.interface import answer_views
from triptych.interface.answer_views import Row, TokenNames
from triptych.interface.cli.rows import describe_answer
from triptych.models.roles import ROLES
from triptych.tasks.prompts import ROLE
from triptych.tasks.task import Task, ViewKind

MAX_EXAMPLES = 8
"""Maximum number of rows of the traffic that a page offers as examples."""

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
.matches { overflow-x: auto; }
.matches table { border-collapse: collapse; font-size: .75rem; width: auto; }
.matches th, .matches td { padding: .1rem .2rem; white-space: nowrap; text-align: left; }
.matches thead th { vertical-align: bottom; }
.matches thead th:nth-child(n + 3) { writing-mode: vertical-rl; padding: .2rem 0; }
.matches tbody th { position: sticky; left: 0; background: var(--block-background-fill); }
.matches [style] { background: rgb(234 88 12 / var(--share)); min-width: 1rem; }
.matches .best { outline: 2px solid currentColor; outline-offset: -2px; }
"""

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
    step: Path  # folder of the version of its first step, which need not be there


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
        return _RowForm(pipeline, pipeline.task, client).page(about)
    about["concurrency_limit"] = _MAX_ANSWERS
    about["additional_inputs"] = [
        _parameter(name, rule, pipeline.defaults.get(name)) for name, rule in _SAMPLING.items()
    ]
    prompts = [[_prompt(row)] for row in pipeline.rows] or None
    make = _chat_page if pipeline.is_chat else _text_page
    return make(client, {**about, "examples": prompts})


class _RowForm:
    """Fields and answers of a task on a page."""

    def __init__(self, pipeline: PagePipeline, task: Task, client: Client) -> None:
        """Read the interface of the pipeline.

        Raises:
            UserError: The pipeline is not available.
        """
        try:
            config = client.interface()
        except InferenceError as error:
            raise request_failure(pipeline.name, pipeline.url, error) from error
        self._pipeline, self._client, self._kind = pipeline, client, task.view.kind
        self._inputs, self._first = task.inputs, task.inputs[0]
        self._compares = self._kind in ("vectors", "matches")
        self._labels = config.space is not None and self._first.content == "image"
        self._rules = {
            name: pipeline.rules.get(name, {"type": _OPTION_TYPES[datatype]})
            for name, datatype in config.options.items()
            if name not in config.row_types
        }
        self._asked = {
            name: min(count, self._rules[name]["max"])
            for name, count in task.view.asks.items()
            if "max" in self._rules.get(name, {})
        }
        self._view = _VIEWS.get("choices" if self._labels else self._kind)
        self._tokens: TokenNames | None = None
        if self._kind in ("matches", "terms"):
            with suppress(OSError):  # the page of another machine's server
                self._tokens = TokenNames(pipeline.step)
        self._fields = [_field(tensor, self._kind) for tensor in task.inputs]
        beside = [_field(self._first, self._kind)] if self._compares else []
        for field in beside:
            other = "document" if self._kind == "matches" else f"another {self._first.name}"
            field.label = f"{other} to compare with"
        if self._labels:
            beside.append(gr.Textbox(label="labels, one a line", lines=3))
            beside.append(gr.Textbox(label="text with {} for a label", placeholder=TEMPLATE))
        for field in beside:
            field.value = "" if isinstance(field, gr.Textbox) else None  # programs may leave it out
        self._fields += beside

    def page(self, about: Mapping[str, object]) -> gr.Blocks:
        """Return the page with the fields, the parameters, and the answer with its times."""
        defaults, rules, asked = self._pipeline.defaults, self._rules, self._asked
        beside = [field.value for field in self._fields[len(self._inputs) :]]
        examples = []
        for row in self._pipeline.rows:
            given = {**asked, **row.get("parameters", {})}
            examples.append([
                *(_example(self._pipeline, tensor, row) for tensor in self._inputs),
                *beside,
                *(
                    _parameter_example(rule, defaults.get(name), given.get(name))
                    for name, rule in rules.items()
                ),
            ])  # fmt: skip
        return gr.Interface(
            self.answer,
            self._fields,
            [
                *([self._view.component()] if self._view else []),
                gr.Textbox(label="Outputs", lines=3, max_lines=20, buttons=["copy"]),
                gr.Markdown(elem_classes="times"),
                gr.JSON(label="Raw outputs", open=False),
            ],
            additional_inputs=[
                _parameter(name, rule, defaults.get(name), asked.get(name))
                for name, rule in rules.items()
            ],
            examples=examples or None,
            deep_link=False,
            **about,
        )

    def answer(self, *given: Any) -> list[Any]:
        """Return what the page shows of the answer to these fields and parameters."""
        fields = {tensor.name: value for tensor, value in zip(self._inputs, given, strict=False)}
        beside = given[len(self._inputs) : len(self._fields)]
        name = self._first.name
        row = {
            tensor.name: _typed_input(tensor, fields[tensor.name])
            for tensor in self._inputs
            if fields[tensor.name] not in (None, "") or not tensor.optional
        }
        rows, parameters = [row], _read_parameters(self._rules, given[len(self._fields) :])
        if self._compares and beside[0]:
            rows.append({**row, name: _typed_input(self._first, beside[0])})
        requests = [(rows, parameters)]
        if self._kind == "matches" and len(rows) > 1:
            pairs = zip(rows, ROLES, strict=True)
            requests = [([each], {**parameters, ROLE: role}) for each, role in pairs]
        try:
            answers, times = _send(self._client, requests)
            found = answers[0]
            if self._labels:
                found = _choose_labels(self._client, row[name], *beside[1:])
        except InferenceError as error:  # The message need not name the only row.
            message = plain(error.message if len(rows) == 1 else str(error))
            raise gr.Error(str(message), duration=None, print_exception=False) from error
        lines = [*answer_views.describe_similarity(answers), *chain(*map(describe_answer, answers))]
        shown: list[object] = ["\n".join(lines), times, answers]
        if self._view is not None:
            value = None
            # A hook may return another form, and the heat map needs two texts.
            with suppress(KeyError, TypeError, ValueError):
                if self._kind == "matches":
                    texts = [each[name] for each in rows]
                    found = answer_views.pair_vectors(answers, texts, self._tokens)
                elif self._tokens is not None:
                    found = {**found, "token_id": [*map(self._tokens.name, found["token_id"])]}
                value = self._view.value(fields, found)
            shown.insert(0, value)
        return shown


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


def _choose_labels(client: Client, image: bytes, labels: str, template: str) -> Row:
    """Return the labels with their scores, best first; none without labels."""
    lines = [line for line in labels.splitlines() if line.strip()]
    if not lines:
        return {}
    (choices,) = client.classify_images_zero_shot(
        [image], lines, hypothesis_template=template or TEMPLATE
    )
    return {"label": [each.label for each in choices], "score": [each.score for each in choices]}


def _send(
    client: Client, requests: Sequence[tuple[Sequence[Row], Mapping[str, Any]]]
) -> tuple[list[Row], str]:
    """Return the outputs of each row of all requests, and the table of the times of the steps."""
    steps: Sequence[StepStatistics] = ()
    rows = sum(len(rows) for rows, _ in requests)
    answers: list[Row] = []
    before, unknown_reason = _count(client)
    total_us = 0.0
    for sent, parameters in requests:
        inputs = {name: [row[name] for row in sent] for name in sent[0]}
        began = time.perf_counter()
        outputs = client.infer(inputs, parameters=parameters)
        total_us += (time.perf_counter() - began) * 1e6
        columns = plain_outputs(client.interface(), outputs)
        made = zip(*columns.values(), strict=True)
        answers += [dict(zip(columns, row, strict=True)) for row in made]
    until = time.monotonic() + _COUNTED_WITHIN_S
    while before:
        steps = [now - old for now, old in zip(client.step_statistics(), before, strict=True)]
        if all(step.requests for step in steps) or time.monotonic() > until:
            break
        time.sleep(0.01)
    return answers, _times(client.pipeline, steps, rows, total_us, unknown_reason)


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
        image = gr.Image(
            label=tensor.name, sources=["upload", "clipboard"], type="filepath", image_mode=None
        )
        image.preprocess = lambda upload: upload and upload.path  # not of an example, from a copy
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


@dataclass(frozen=True)
class _View:
    """Component for an answer, and its value for the fields and the outputs of a row."""

    component: Callable[[], gr.components.Component]
    value: Callable[[Row, Row], Any]


_VIEWS: Mapping[ViewKind, _View] = {
    "choices": _View(lambda: gr.Label(label="Scores"), answer_views.show_scores),
    "entities": _View(lambda: gr.HighlightedText(label="Entities"), answer_views.mark_entities),
    "answer": _View(lambda: gr.HighlightedText(label="Answer"), answer_views.mark_answer),
    "terms": _View(lambda: gr.HighlightedText(label="Terms with weights"), answer_views.list_terms),
    "boxes": _View(lambda: gr.AnnotatedImage(label="Boxes"), answer_views.place_boxes),
    "matches": _View(lambda: gr.HTML(container=True), answer_views.draw_matches),
}
