"""The page of a pipeline that generates text, whose answers appear as they come.

It is a conversation, or, of a pipeline that makes one text of another, a text and its answer.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, cast

from triptych.client import Client, Completion, Generation, InferenceError, Sampling
from triptych.interface.page.web import PageServer, read_text
from triptych.interface.report.pages import lines, render
from triptych.spec.generation_spec import GenerationSpec
from triptych.spec.text2text_spec import Text2TextSpec
from triptych.spec.traffic import TRAFFIC_FILE, read_lines

EXAMPLES = 8
"""Prompts of the traffic that a page offers."""

PARAMETERS = ("max_tokens", "temperature")
Messages = Sequence[Mapping[str, str]]


class ChatPage(PageServer):
    """Answers browsers until it is closed.

    Args:
        spec: of the pipeline.
        folder: where its traffic is, if there is any.
        grpc_url: ``host:port`` of the server's gRPC endpoint.
        host: to listen on.
        port: 0 picks a free one.
        timeout_s: of an answer.

    Raises:
        OSError: nothing can listen there.
        UserError: its traffic cannot be read.
    """

    def __init__(
        self,
        spec: GenerationSpec | Text2TextSpec,
        folder: Path,
        grpc_url: str,
        host: str,
        port: int,
        *,
        timeout_s: float,
    ) -> None:
        examples = _examples(folder / TRAFFIC_FILE)
        super().__init__(host, port)
        self._spec = spec
        self._talks = isinstance(spec, GenerationSpec)
        self._examples = examples
        self._grpc_url = grpc_url
        self._client = Client(spec.name, grpc_url, timeout_s=timeout_s)

    def page(self, example: str) -> str:
        known = example.isdecimal() and int(example) < len(self._examples)
        said = self._examples[int(example)] if known else ""
        return self._render((), {"say": said})

    def answer(self, sent: Mapping[str, bytes]) -> tuple[HTTPStatus, Iterator[str]]:
        given = {name: str(read_text(content)) for name, content in sent.items()}
        try:
            messages = json.loads(given.get("messages") or "[]") if self._talks else []
            roles = [message["role"] + message["content"] for message in messages]
        except (ValueError, TypeError, KeyError):
            return HTTPStatus.UNPROCESSABLE_ENTITY, iter([self._render((), given)])
        if not roles and not given.get("say"):
            return HTTPStatus.UNPROCESSABLE_ENTITY, iter([self._render((), given)])
        said = {"role": "user", "content": given.get("say", "")}
        return HTTPStatus.OK, self._answered([*messages, said], given)

    def end(self) -> None:
        self._client.close()

    def _answered(self, messages: Messages, given: Mapping[str, str]) -> Iterator[str]:
        """The page up to the answer, the answer piece by piece, and the rest."""
        # What comes before the answer and behind it is cut out of one page.
        mark = secrets.token_hex(16)
        kept = {**given, "say": ""}
        yield self._render(messages, kept, mark=mark).split(mark)[0]
        began, first_s, error = time.monotonic(), 0.0, ""
        chunks = []
        try:
            with self._ask(messages, _sampling(given)) as answer:
                for chunk in answer:
                    first_s = first_s or time.monotonic() - began
                    chunks.append(chunk)
                    yield str(lines(chunk.text))
        except InferenceError as fault:
            error = fault.message
        took_s = time.monotonic() - began
        if not chunks:
            after = self._render(messages[:-1], given, mark=mark, error=error)
            yield after.split(mark)[1]
            return
        whole = Completion.join(chunks)
        told = {
            "tokens": len(whole.token_ids),
            "prompt_tokens": "" if whole.usage is None else whole.usage.prompt_tokens,
            "finish": whole.finish_reason or "broke off",
            "first_us": first_s * 1e6,
            "whole_us": took_s * 1e6,
        }
        turns = [*messages, {"role": "assistant", "content": whole.text}]
        after = self._render(turns, kept, mark=mark, error=error, told=told)
        yield after.split(mark)[1]

    def _ask(self, messages: Messages, sampling: Sampling) -> Generation:
        if self._talks:
            return self._client.chat(messages, **sampling)
        return self._client.generate(messages[-1]["content"], **sampling)

    def _render(
        self,
        messages: Messages,
        values: Mapping[str, str],
        *,
        mark: str = "",
        error: str = "",
        told: Mapping[str, Any] | None = None,
    ) -> str:
        return render(
            "chat.html.j2",
            name=self._spec.name,
            task=self._spec.task,
            talks=self._talks,
            model=self._spec.model.source,
            url=self._grpc_url,
            # The last answer has been sent where the page goes on behind it.
            messages=messages if told is None else messages[:-1],
            history=json.dumps(list(messages)),
            values=values,
            parameters=PARAMETERS,
            defaults=self._spec.parameters,
            examples=self._examples,
            mark=mark,
            error=error,
            told=told,
        )


def _sampling(given: Mapping[str, str]) -> Sampling:
    """Parameters as the form has them; the pipeline says what is wrong with one."""
    sampling: dict[str, Any] = {}
    for name in PARAMETERS:
        text = given.get(name, "").strip()
        try:
            value: Any = json.loads(text) if text else None
        except ValueError:
            value = text
        if value is not None:
            sampling[name] = value
    return cast("Sampling", sampling)


def _examples(path: Path) -> list[str]:
    """What users say last in the first prompts of the traffic."""
    if not path.is_file():
        return []
    found = []
    for _, _, row in read_lines(path):
        talk = (row or {}).get("messages") or [{"content": (row or {}).get("text_input", "")}]
        found.append(str(talk[-1].get("content", "")))
    return found[:EXAMPLES]
