"""Page with streamed answers, for chats and for single texts."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, cast

from triptych.client import Client, Completion, Generation, InferenceError, Sampling
from triptych.interface.page.web import MAX_EXAMPLES, PageServer, read_text
from triptych.interface.report.pages import lines, render
from triptych.models.fields import name_of_source
from triptych.spec.generation_fields import TextSpec
from triptych.spec.traffic import TRAFFIC_FILE, read_lines

PARAMETERS = ("max_tokens", "temperature")
Messages = Sequence[Mapping[str, str]]


class ChatPage(PageServer):
    """Chat page of a pipeline that generates text.

    Args:
        spec: Spec of the pipeline.
        folder: Folder of the pipeline, which may contain traffic.
        grpc_url: Address ``host:port`` of the server's gRPC endpoint.
        host: Address to listen on.
        port: Port to listen on; 0 picks a free port.
        timeout_s: Timeout of an answer, in seconds.

    Raises:
        OSError: The server cannot listen on the address.
        UserError: The traffic cannot be read.
    """

    has_turns = True
    """Whether a request is a complete conversation; otherwise it is a single text."""

    def __init__(
        self,
        spec: TextSpec,
        folder: Path,
        grpc_url: str,
        host: str,
        port: int,
        timeout_s: float,
    ) -> None:
        examples = _examples(folder / TRAFFIC_FILE)
        super().__init__(host, port)
        self._spec = spec
        self._examples = examples
        self._grpc_url = grpc_url
        self._client = Client(spec.name, grpc_url, timeout_s=timeout_s)

    def page(self, example: str) -> str:
        known = example.isdecimal() and int(example) < len(self._examples)
        text = self._examples[int(example)] if known else ""
        return self._render((), {"say": text})

    def answer(self, sent: Mapping[str, bytes]) -> tuple[HTTPStatus, Iterator[str]]:
        given = {name: str(read_text(content)) for name, content in sent.items()}
        try:
            messages = json.loads(given.get("messages") or "[]") if self.has_turns else []
            roles = [message["role"] + message["content"] for message in messages]
        except (ValueError, TypeError, KeyError):
            return HTTPStatus.UNPROCESSABLE_ENTITY, iter([self._render((), given)])
        if not roles and not given.get("say"):
            return HTTPStatus.UNPROCESSABLE_ENTITY, iter([self._render((), given)])
        message = {"role": "user", "content": given.get("say", "")}
        return HTTPStatus.OK, self._stream([*messages, message], given)

    def end(self) -> None:
        self._client.close()

    def _stream(self, messages: Messages, given: Mapping[str, str]) -> Iterator[str]:
        """Yield the page up to the answer, the answer in pieces, and the rest of the page."""
        # The parts before and after the answer are cut from one page, at a random mark.
        mark = secrets.token_hex(16)
        values = {**given, "say": ""}
        yield self._render(messages, values, mark=mark).split(mark)[0]
        began, first_s, error = time.monotonic(), 0.0, ""
        chunks = []
        try:
            with self._generate(messages, _sampling(given)) as answer:
                for chunk in answer:
                    first_s = first_s or time.monotonic() - began
                    chunks.append(chunk)
                    yield str(lines(chunk.text))
        except InferenceError as failure:
            error = failure.message
        took_s = time.monotonic() - began
        if not chunks:
            after = self._render(messages[:-1], given, mark=mark, error=error)
            yield after.split(mark)[1]
            return
        completion = Completion.join(chunks)
        summary = {
            "tokens": len(completion.token_ids),
            "prompt_tokens": "" if completion.usage is None else completion.usage.prompt_tokens,
            "finish": completion.finish_reason or "interrupted",
            "first_us": first_s * 1e6,
            "total_us": took_s * 1e6,
        }
        turns = [*messages, {"role": "assistant", "content": completion.text}]
        after = self._render(turns, values, mark=mark, error=error, summary=summary)
        yield after.split(mark)[1]

    def _generate(self, messages: Messages, sampling: Sampling) -> Generation:
        if self.has_turns:
            return self._client.chat(messages, **sampling)
        return self._client.generate(messages[-1]["content"], **sampling)

    def _render(
        self,
        messages: Messages,
        values: Mapping[str, str],
        *,
        mark: str = "",
        error: str = "",
        summary: Mapping[str, Any] | None = None,
    ) -> str:
        return render(
            "chat.html.j2",
            name=self._spec.name,
            task=self._spec.task,
            has_turns=self.has_turns,
            model=name_of_source(self._spec.model.source),
            url=self._grpc_url,
            # The last answer was already streamed if there is a summary.
            messages=messages if summary is None else messages[:-1],
            history=json.dumps(list(messages)),
            values=values,
            parameters=PARAMETERS,
            defaults=self._spec.parameters,
            examples=self._examples,
            mark=mark,
            error=error,
            summary=summary,
        )


class TextPage(ChatPage):
    """Page of a pipeline that summarizes or translates."""

    has_turns = False


def _sampling(given: Mapping[str, str]) -> Sampling:
    """Return the parameters of the form, unchecked: the pipeline rejects invalid values."""
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
    """Return the last user message of the first prompts of the traffic."""
    if not path.is_file():
        return []
    examples = []
    for _, _, row in read_lines(path):
        fields = row or {}
        messages = fields.get("messages") or [{"content": fields.get("text_input", "")}]
        examples.append(str(messages[-1].get("content", "")))
    return examples[:MAX_EXAMPLES]
