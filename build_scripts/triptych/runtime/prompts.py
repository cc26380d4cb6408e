"""Make token ids of prompts, from texts, rendered chats and Marian's source texts."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from secrets import token_hex
from typing import Any

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer, decoders

from .generation_messages import TOKENIZER_FILE
from .request_errors import RequestError

Message = Mapping[str, str]
_OTHER_CALLS = "<function=", "<arg_key>"
"""Texts in templates whose calls are not JSON: Qwen3-Coder's and GLM's."""
_MAX_SHOWN = 200
"""Maximum number of characters of a template's error, which may repeat a message."""


class _Generation(Extension):
    """Tag ``{% generation %}``, which marks a model's answer for training; its content stays."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One model's template, rendered as transformers does: same filters, same sandbox.

    Args:
        source: Jinja text; None for a model without a template.
        special_tokens: Text of the special tokens by name, such as ``bos_token``.
    """

    def __init__(self, source: str | None, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._template = None if source is None else environment.from_string(source)
        self._special_tokens = dict(special_tokens)
        self._has_developer = source is not None and "developer" in source
        self._has_tools = source is not None and (
            "tools" in meta.find_undeclared_variables(environment.parse(source))
            and "<tool_call>" in source
            and not any(other in source for other in _OTHER_CALLS)
        )

    def render(self, messages: Sequence[Message], tools: Sequence[object] | None = None) -> str:
        """Return the prompt of a conversation, up to the beginning of the model's answer.

        The role ``developer`` is ``system`` for a template that does not know it.

        Raises:
            RequestError: The model has no template, or its template rejects the messages or has no
                tools.
        """
        if tools and not self._has_tools:
            raise RequestError(
                "tools",
                "is only supported for models whose chat template has tools, and calls as "
                '<tool_call>{"name": …, "arguments": …}</tool_call>',
                f"{len(tools)} tools",
                "Leave them out, or use another model",
            )
        if self._template is None:
            raise RequestError(
                "messages",
                "is only supported for models with a chat template",
                f"{len(messages)} messages",
                "Send text_input, or use a model that was trained to chat",
            )
        if not self._has_developer:
            messages = [
                {**each, "role": "system"} if each.get("role") == "developer" else each
                for each in messages
            ]
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except Exception as error:  # the template is the model's own and may raise anything
            kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
            raise RequestError(
                "messages",
                "must be a conversation that the model's chat template accepts",
                f"{kind}{error}"[:_MAX_SHOWN],
                "Check the roles, their order, and fields besides `role` and `content`",
            ) from error


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> None:
    raise TemplateError(message)


PIECES_FILE = "source_pieces.json"
SPACE = "\u2581"
"""A space in a piece."""


class SourcePieces:
    """Tokenizer with the same ids as `transformers.MarianTokenizer`.

    Args:
        tokenizer: Tokenizer that splits normalized text into pieces.
        file: JSON object with ``ids`` (id by piece, in the shared vocabulary), ``special`` (pieces
            that are always a token), the ids ``unknown`` and ``end``, and ``characters`` (a
            `CharacterMap` in base64).
    """

    def __init__(self, tokenizer: Tokenizer, file: Path) -> None:
        known = json.loads(file.read_bytes())
        self._tokenizer = tokenizer
        self._ids: dict[str, int] = known["ids"]
        self._special: list[str] = known["special"]
        self._unknown: int = known["unknown"]
        self._end: int = known["end"]
        self._split = re.compile(f"({'|'.join(map(re.escape, self._special))})")
        self._characters = CharacterMap(b64decode(known["characters"]))

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, with the end token."""
        pieces: list[str] = []
        for part in self._split.split(text):
            if part in self._special:
                pieces.append(part)
                continue
            end = part.find("<<") + 2
            if part.startswith(">>") and end > 1:  # >>fra<<, the language of the answer
                pieces.append(part[:end])
                part = part[end:]
            pieces += self._find(part)
        return [*(self._ids.get(piece, self._unknown) for piece in pieces), self._end]

    def _find(self, text: str) -> list[str]:
        """Return the pieces of a text, normalized as in sentencepiece."""
        plain = re.sub(" {2,}", " ", self._characters.change(text)).lstrip(" ")
        plain = plain.replace(" ", SPACE).rstrip(SPACE)
        if not plain:
            return []
        found: list[str] = self._tokenizer.encode(SPACE + plain, add_special_tokens=False).tokens
        return found


class CharacterMap:
    """Character normalization of sentencepiece, applied before it splits a text into pieces.

    The normalizer of that name in `tokenizers` leaves some characters unchanged.

    Args:
        compiled: A ``precompiled_charsmap``: the size of a trie in bytes, the trie, and texts that
            end in zeros. The values of the trie are offsets in these texts. The trie is a double
            array of Darts-clone, in units of 32 bits. If empty, nothing is changed.
    """

    def __init__(self, compiled: bytes) -> None:
        size = int.from_bytes(compiled[:4], "little")
        self._units = memoryview(compiled)[4 : 4 + size].cast("I")
        self._texts = compiled[4 + size :]

    def change(self, text: str) -> str:
        """Return `text` with the longest match of the map at each position replaced."""
        if not self._units:
            return text
        given, changed, at = text.encode(), bytearray(), 0
        while at < len(given):
            length, offset = self._longest(given, at)
            if length:
                changed += self._texts[offset : self._texts.index(0, offset)]
            else:
                lead = given[at]
                length = 1 + (lead >= 0xC0) + (lead >= 0xE0) + (lead >= 0xF0)
                changed += given[at : at + length]
            at += length
        return changed.decode()

    def _longest(self, given: bytes, start: int) -> tuple[int, int]:
        """Return the byte length of the longest match at `start`, and its replacement's offset.

        The length is 0 without a match.
        """
        units = self._units
        node, found = _below(units[0]), (0, 0)
        for at in range(start, len(given)):
            node ^= given[at]
            unit = units[node] if node < len(units) else 0
            if unit & 0x800000FF != given[at]:
                break
            node ^= _below(unit)
            if unit >> 8 & 1:
                found = at + 1 - start, units[node] & 0x7FFFFFFF
        return found


def _below(unit: int) -> int:
    """Return the offset of a unit's children."""
    return unit >> 10 << ((unit & 1 << 9) >> 6)


class PlainTexts:
    """Encoder of chats in which special tokens that messages contain are texts.

    `hide` puts a mark in place of each, so that the chat template can be rendered. `parts` splits
    the rendered text at the marks, and `encode` tokenizes the parts as one text, because the
    pieces of a text depend on what precedes it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder().values()
        tokens = [token.content for token in added if token.special]
        self._texts = [*sorted(tokens, key=len, reverse=True), *_MARKS]
        self._find = re.compile("|".join(map(re.escape, self._texts)))

    def hide(self, value: object) -> Any:
        """Return a JSON value with marks in its texts."""
        if isinstance(value, str):
            return self._find.sub(self._mark, value)
        if isinstance(value, dict):
            return {name: self.hide(item) for name, item in value.items()}
        return [self.hide(item) for item in value] if isinstance(value, list) else value

    def _mark(self, found: re.Match[str]) -> str:
        return f"{_MARKS[0]}{self._texts.index(found[0])}{_MARKS[1]}"

    def parts(self, rendered: str) -> list[str]:
        """Return the rendered text in pieces; every second one is a special token as a text."""
        parts = _MARK.split(rendered)
        return [self._texts[int(part)] if n % 2 else part for n, part in enumerate(parts)]

    def encode(self, parts: Sequence[str]) -> list[int]:
        """Return the ids of the `parts`, without tokens that the tokenizer adds."""
        tokenizer, names, ids = self._renamed
        text = "".join(
            part if number % 2 else self._find.sub(lambda found: names[found[0]], part)
            for number, part in enumerate(parts)
        )
        (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return [ids.get(token, token) for token in encoding.ids]

    @cached_property
    def _renamed(self) -> tuple[Tokenizer, Mapping[str, str], Mapping[int | None, int]]:
        """Tokenizer whose special tokens have random names, these names, and ids by its ids.

        Nothing that a client sends is a special token in it: not even where the model's vocabulary
        has the token as a piece, which some tokenizers would find in a text.
        """
        secret = token_hex(8)
        content = json.loads(self._tokenizer.to_str())
        added, model = content["added_tokens"], content["model"]
        names = {
            token["content"]: f"{_MARKS[0]}{secret}-{token['id']}{_MARKS[1]}"
            for token in added
            if token["special"]
        }
        for token in added:
            token["content"] = names.get(token["content"], token["content"])
        # A model that spells unknown characters in bytes finds these pieces by their names.
        pieces = {name: new for name, new in names.items() if not _BYTE.fullmatch(name)}
        vocabulary = model["vocab"]
        if isinstance(vocabulary, dict):
            model["vocab"] = {pieces.get(piece, piece): id_ for piece, id_ in vocabulary.items()}
        else:
            model["vocab"] = [[pieces.get(piece, piece), score] for piece, score in vocabulary]
        if "merges" in model:
            model["merges"] = [
                pair for pair in model["merges"] if names.keys().isdisjoint((*pair, "".join(pair)))
            ]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        content["post_processor"] = None
        tokenizer = Tokenizer.from_str(json.dumps(content))
        ids = {tokenizer.token_to_id(token["content"]): token["id"] for token in added}
        return tokenizer, names, ids


_MARKS = "\ue000", "\ue001"
"""Characters of private use around the index of a text."""
_MARK = re.compile(f"{_MARKS[0]}([0-9]+){_MARKS[1]}")
_BYTE = re.compile("<0x[0-9A-F]{2}>")

TEMPLATE_FILE = "chat_template.jinja"


class Prompts:
    """Encoder of prompts for one model.

    Args:
        settings: ``special_tokens`` (text by name), ``max_length`` (maximum tokens of prompt and
            answer), ``max_answer`` (separate limit of the answer, or None), ``prefix`` (text
            before each text), ``vocabulary`` (number of ids of the model), and
            ``message_special_tokens`` (what a special token in a message is: ``text`` or
            ``token``).
        folder: Folder with `TOKENIZER_FILE` and, if the model has them, `TEMPLATE_FILE` and
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
        self._has_answer_limit = settings["max_answer"] is not None
        self._max_prompt = self._max_length if self._has_answer_limit else self._max_length - 1
        self._prefix: str = settings["prefix"]
        self._vocabulary: int = settings["vocabulary"]
        as_texts = settings["message_special_tokens"] == "text"
        self._plain_texts = PlainTexts(self._tokenizer) if as_texts else None
        # Maximum characters of a token. Other tokenizers may omit spaces, or make one unknown token
        # of many characters.
        self._widest = None
        if isinstance(self._tokenizer.decoder, decoders.ByteLevel):
            self._widest = max(map(len, self._tokenizer.get_vocab()))

    def of_text(self, text: str) -> list[int]:
        """Return the ids of a text, with the tokens that the tokenizer adds.

        No tokens are added if the text already begins with the BOS token (a rendered chat).
        """
        whole = self._prefix + text
        if self._pieces is not None:
            return self._checked(self._pieces.encode(whole), "text_input")
        rendered = bool(self._bos) and text.startswith(self._bos)
        return self._encode(whole, "text_input", special=not rendered)

    def of_messages(self, text: str) -> list[int]:
        """Return the ids of a conversation: a JSON list of objects with `role` and `content`.

        With tools it is an object of ``messages`` and ``tools``.
        """
        messages, tools = read_conversation(text)
        plain = self._plain_texts
        if plain is not None:
            messages, tools = plain.hide(messages), plain.hide(tools)
        rendered = self._template.render(messages, tools)
        parts = [rendered] if plain is None else plain.parts(rendered)
        rendered = "".join(parts)
        try:
            rendered.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                "messages",
                "must be valid text without lone surrogates",
                ascii(rendered[error.start]),
                "Correct the text",
            ) from error
        # The template writes the special tokens itself.
        if plain is None or len(parts) == 1:
            return self._encode(rendered, "messages", special=False)
        self._check_size(rendered, "messages")
        return self._checked(plain.encode(parts), "messages")

    def _encode(self, text: str, field: str, *, special: bool) -> list[int]:
        self._check_size(text, field)
        # Without character offsets, which take as long as the rest.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        return self._checked(encoding.ids, field)

    def _check_size(self, text: str, field: str) -> None:
        if self._widest and len(text) > self._max_prompt * self._widest:
            # Tokenizing a megabyte takes a second, in which other requests would wait.
            normalizer = self._tokenizer.normalizer
            length = len(normalizer.normalize_str(text) if normalizer else text)
            if length > self._max_prompt * self._widest:
                characters = f"{length} characters; a token has at most {self._widest}"
                raise self._too_many(field, characters)

    def _too_many(self, field: str, given: str) -> RequestError:
        left = f", because the answer needs one of {self._max_length} tokens"
        return RequestError(
            field,
            f"must have 1 to {self._max_prompt} tokens{'' if self._has_answer_limit else left}",
            given,
            "Shorten it, or raise the maximum length of the pipeline",
        )

    def _checked(self, ids: list[int], field: str) -> list[int]:
        if not 0 < len(ids) <= self._max_prompt:
            raise self._too_many(field, f"{len(ids)} tokens")
        if (largest := max(ids)) >= self._vocabulary:  # vLLM would read beyond its weights
            raise RequestError(
                field,
                "has a token of the tokenizer that the model does not have",
                repr(self._tokenizer.id_to_token(largest)),
                "Leave out this token",
            )
        return ids


def read_conversation(text: str) -> tuple[list[Message], list[Any] | None]:
    """Return messages and tools; text parts of a message are joined by line feeds, as in vLLM.

    Raises:
        RequestError: The text is no JSON list of messages with `role` and `content`, and no object
            of such ``messages`` and a list of ``tools``.
    """
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(
            "messages", "must be JSON", str(error), 'Send [{"role": "user", "content": "…"}]'
        ) from error
    if not isinstance(given, dict):
        return _read_messages(given), None
    tools = given.get("tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RequestError(
            "tools",
            "must be a list of objects",
            repr(tools)[:80],
            'Send [{"type": "function", "function": {"name": "…"}}]',
        )
    return _read_messages(given.get("messages")), tools


def _read_messages(messages: object) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise RequestError(
            "messages",
            "must be a list with at least one message",
            repr(messages)[:80],
            'Send [{"role": "user", "content": "…"}]',
        )
    return [_read_message(message, f"messages[{n}]") for n, message in enumerate(messages)]


def _read_message(given: object, field: str) -> Message:
    message = dict(given) if isinstance(given, dict) else {}
    if isinstance(content := message.get("content"), list) and content:
        message["content"] = _joined(content, f"{field}.content")
    if not all(isinstance(message.get(name), str) for name in ("role", "content")):
        raise RequestError(
            field,
            "must be an object with strings for `role` and `content`",
            repr(given)[:80],
            "Correct the message",
        )
    return message


def _joined(parts: Sequence[object], field: str) -> str:
    texts = []
    for number, part in enumerate(parts):
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise RequestError(
                f"{field}[{number}]",
                'must be {"type": "text", "text": "…"}, the only supported type',
                repr(part)[:80],
                "Leave out this part",
            )
        texts.append(text)
    return "\n".join(texts)
