"""What a request asks to go on from: a text or messages, as the model's token ids."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders

from .chat_template import ChatTemplate, Message
from .faults import RequestError
from .generation_wire import TOKENIZER_FILE
from .source_pieces import PIECES_FILE, SourcePieces

TEMPLATE_FILE = "chat_template.jinja"


class Prompts:
    """Makes prompts of one model.

    Args:
        settings: ``special_tokens``, name to text; ``max_length``, tokens of a prompt and its
            answer together; ``max_answer``, where an answer has a limit of its own, else None;
            ``prefix``, which is put before a text; ``vocabulary``, ids that the model knows.
        folder: with `TOKENIZER_FILE` and, where the model has them, `TEMPLATE_FILE` and
            `PIECES_FILE`.
    """

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        pieces = folder / PIECES_FILE
        self._pieces = SourcePieces(self._tokenizer, pieces) if pieces.is_file() else None
        template = folder / TEMPLATE_FILE
        source = template.read_text(encoding="utf-8") if template.is_file() else None
        self._template = ChatTemplate(source, settings["special_tokens"])
        self._bos: str = settings["special_tokens"].get("bos_token", "")
        self._max_length: int = settings["max_length"]
        self._apart = settings["max_answer"] is not None
        self._most = self._max_length if self._apart else self._max_length - 1
        self._prefix: str = settings["prefix"]
        self._vocabulary: int = settings["vocabulary"]
        # Characters of a token, where each is one of some token: other tokenizers may leave spaces
        # out, or take many characters for one unknown token.
        self._widest = None
        if isinstance(self._tokenizer.decoder, decoders.ByteLevel):
            self._widest = max(map(len, self._tokenizer.get_vocab()))

    def of_text(self, text: str) -> list[int]:
        """The ids of a text, with the tokens that the tokenizer adds.

        A text that begins with the first of these (a chat template was applied before) gets no
        second one.
        """
        whole = self._prefix + text
        if self._pieces is not None:
            return self._checked(self._pieces.encode(whole), "text_input")
        rendered = bool(self._bos) and text.startswith(self._bos)
        return self._encode(whole, "text_input", special=not rendered)

    def of_messages(self, text: str) -> list[int]:
        """The ids of a conversation: a JSON list of objects with `role` and `content`."""
        rendered = self._template.render(read_messages(text))
        try:
            rendered.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                "messages",
                "must be text: half of a character alone (a surrogate) is none",
                ascii(rendered[error.start]),
                "Correct it",
            ) from error
        # The template writes the special tokens itself.
        return self._encode(rendered, "messages", special=False)

    def _encode(self, text: str, field: str, *, special: bool) -> list[int]:
        if self._widest and len(text) > self._most * self._widest:
            # Tokenizing a megabyte takes a second, in which other requests would wait.
            normalizer = self._tokenizer.normalizer
            length = len(normalizer.normalize_str(text) if normalizer else text)
            if length > self._most * self._widest:
                characters = f"{length} characters, of which a token has {self._widest} at most"
                raise self._too_many(field, characters)
        # Without offsets in the text, which take as long as the rest.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        return self._checked(encoding.ids, field)

    def _too_many(self, field: str, given: str) -> RequestError:
        left = f", so that one of the {self._max_length} that fit is left for an answer"
        return RequestError(
            field,
            f"must have 1 to {self._most} tokens{'' if self._apart else left}",
            given,
            "Shorten it, or raise the maximum length of the pipeline",
        )

    def _checked(self, ids: list[int], field: str) -> list[int]:
        if not 0 < len(ids) <= self._most:
            raise self._too_many(field, f"{len(ids)} tokens")
        if (largest := max(ids)) >= self._vocabulary:  # vLLM would read on behind its weights
            raise RequestError(
                field,
                "must have no token that the tokenizer has and the model has not",
                repr(self._tokenizer.id_to_token(largest)),
                "Leave it out",
            )
        return ids


def read_messages(text: str) -> list[Message]:
    """A conversation; parts of a message, which must be texts, are joined by line ends as in vLLM.

    Raises:
        RequestError: no JSON list of at least one message, or a message without its strings.
    """
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(
            "messages", "must be JSON", str(error), 'Send [{"role": "user", "content": "…"}]'
        ) from error
    if not isinstance(messages, list) or not messages:
        raise RequestError(
            "messages",
            "must be a list with at least one message",
            repr(text)[:80],
            'Send [{"role": "user", "content": "…"}]',
        )
    return [_read_message(message, f"messages[{n}]") for n, message in enumerate(messages)]


def _read_message(given: Any, field: str) -> Message:
    message = dict(given) if isinstance(given, dict) else {}
    if isinstance(content := message.get("content"), list) and content:
        message["content"] = _joined(content, f"{field}.content")
    if not all(isinstance(message.get(name), str) for name in ("role", "content")):
        raise RequestError(
            field,
            "must be an object with strings for `role` and `content`",
            repr(given)[:80],
            "Correct it",
        )
    return message


def _joined(parts: Sequence[Any], field: str) -> str:
    texts = []
    for number, part in enumerate(parts):
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise RequestError(
                f"{field}[{number}]",
                'must be {"type": "text", "text": "…"}: the model takes nothing else',
                repr(part)[:80],
                "Leave it out",
            )
        texts.append(text)
    return "\n".join(texts)
