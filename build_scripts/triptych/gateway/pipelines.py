"""Pipelines that a gateway serves: names, aliases, clients, and tokens of texts."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import Field
from tokenizers import Tokenizer

from triptych.base.errors import UserError, closest
from triptych.client import AsyncClient, Client, PipelineConfig
from triptych.client.flows import CALL_PARAMETERS, PRIORITY
from triptych.container.manifests import MANIFEST_FILE, check_readable
from triptych.gateway.errors import ApiError, as_json, invalid
from triptych.gateway.http import OPERATIONS, WHOLE, Operation, Shared
from triptych.gateway.keys import CALLER
from triptych.repository.manifest import BuildManifest, find_manifest
from triptych.runtime.request_errors import RequestError
from triptych.runtime.row_types import RowInputs, find_class
from triptych.runtime.rows_text import TokenRowMaker
from triptych.runtime.triton_io import read_settings

_MAX_INLINE_BYTES = 8192
"""Maximum size of texts that are tokenized on the event loop: about a millisecond."""
_OF_THE_OWNER = "set tokenizer.truncation to truncate in the pipeline"
"""Remedy of a text that is too long, for the owner of a pipeline that refuses it."""
_MOVED = {
    "rows_text.HypothesisRowMaker": "rows_hypothesis.HypothesisRowMaker",
    "rows_text.MaskRowMaker": "rows_mask.MaskRowMaker",
}
"""Batch encoders by the name that they have in repositories of older builds."""
_CHECK_S = 1.0
"""Interval of the checks for changed files of the repository, whose disk may be slow."""
_SAME_PROMPTS = {
    "query": ("query", "search_query"),
    "passage": ("passage", "document", "search_document"),
    "document": ("document", "passage", "search_document"),
    "search_query": ("search_query", "query"),
    "search_document": ("search_document", "document", "passage"),
}
"""Names of the same prompt, by the value of `input_type` in the APIs of NVIDIA and Cohere."""

_SOME = Field(min_length=1, fail_fast=True)
Text = Annotated[str, Field(min_length=1)]
Lines = Annotated[list[str], _SOME]
_Ids = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], _SOME, WHOLE]
Texts = str | Lines | _Ids | Annotated[list[_Ids], _SOME]
"""A text or token ids, or a list of them."""

EMBEDDING, RERANKING, CLASSIFICATION = "text-embedding", "reranking", "text-classification"
SPARSE, MULTI_VECTOR = "sparse-embedding", "multi-vector-embedding"
FITS: Mapping[str, Callable[[Set[str]], bool]] = {
    EMBEDDING: lambda outputs: (
        "embedding" in outputs and ("token_count" not in outputs or "token_embedding" in outputs)
    ),
    RERANKING: lambda outputs: outputs == {"score"},
    SPARSE: lambda outputs: outputs >= {"token_id", "weight"},
    MULTI_VECTOR: lambda outputs: "token_count" in outputs,
    CLASSIFICATION: lambda outputs: outputs >= {"label", "score"},
}
"""Whether a pipeline with these outputs has a task."""


def float_encoding(config: PipelineConfig) -> Literal["float"] | None:
    """Return the encoding of vectors of numbers; None for a pipeline that has no other."""
    return "float" if "encoding" in config.options else None


class PreprocessFiles:
    """Files of a pipeline's preprocess step: its settings, and its tokenizer.

    The tokenizer counts tokens exactly as the server does, with prompt and truncation, unless a
    function of the pipeline changes the texts first.
    """

    def __init__(self, folder: Path) -> None:
        self.settings: Mapping[str, Any] = read_settings(folder)
        self._has_hooks = (folder / "hooks.py").is_file()
        self._folder = folder
        name = self.settings.get("row_maker", "")
        # Images and inputs of own models have other classes, which may run functions of the user.
        found: Any = find_class(_MOVED.get(name, name)) if name else object
        self._class: type[TokenRowMaker] | None = (
            found if issubclass(found, TokenRowMaker) else None
        )
        self._maker: TokenRowMaker | None = None
        self._strict: TokenRowMaker | None = None
        self._tokenizer: Tokenizer | None = None
        self._lock = threading.Lock()

    @property
    def knows_tokens(self) -> bool:
        """Whether the rows are texts that no function of the pipeline changes."""
        return self._class is not None and not self._has_hooks

    @property
    def is_busy(self) -> bool:
        """Whether a thread tokenizes, perhaps megabytes, so that the event loop must not wait."""
        return self._lock.locked()

    def maker(self) -> TokenRowMaker | None:
        """Return the batch encoder of the pipeline; None if its rows are no texts."""
        if self._maker is None and self._class is not None:
            self._maker = self._class(self.settings, self._folder)
        return self._maker

    def count(
        self, columns: Mapping[str, list[str]], parameters: Mapping[str, object]
    ) -> list[int] | None:
        """Return the number of tokens of each row; None if it is not known."""
        if not self.knows_tokens:
            return None
        rows = len(next(iter(columns.values())))
        most = self.settings["max_core_rows"]
        given = {**self.settings["parameters"], **parameters}
        requests = [
            RowInputs({name: column[at : at + most] for name, column in columns.items()}, given)
            for at in range(0, rows, most)
        ]
        with self._lock:
            maker = self.maker()
            made = [] if maker is None else maker.token_rows(requests)
        counts: list[int] = []
        for each in made:
            if isinstance(each, Exception):
                return None
            counts += [len(row.ids) for row in each]
        return counts or None

    def find_refused(
        self, columns: Mapping[str, list[str]], parameters: Mapping[str, object]
    ) -> tuple[int, Exception] | None:
        """Return the first row that would be refused without truncation, and its error."""
        rows = zip(*columns.values(), strict=True)
        requests = [
            RowInputs({name: [text] for name, text in zip(columns, row, strict=True)}, parameters)
            for row in rows
        ]
        settings = {**self.settings, "overflow": "reject"}
        with self._lock:
            if self._strict is None and self._class is not None:
                self._strict = self._class(settings, self._folder)
            made = [] if self._strict is None else self._strict.token_rows(requests)
        errors = ((row, each) for row, each in enumerate(made) if isinstance(each, Exception))
        return next(errors, None)

    def _whole_tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer without truncation; None if the rows are no texts."""
        with self._lock:
            maker = self.maker()
            if self._tokenizer is None and maker is not None:
                self._tokenizer = Tokenizer.from_str(maker.tokenizer.to_str())
                self._tokenizer.no_truncation()
                self._tokenizer.no_padding()
            return self._tokenizer

    def decode(self, rows: Sequence[list[int]]) -> list[str | None]:
        """Return the text of each row of token ids.

        It is None for ids that are not exactly those of a text with its special tokens. Ids of
        another tokenizer are recognized by this, because they lack the special tokens.
        """
        tokenizer = self._whole_tokenizer()
        if tokenizer is None:
            return [None] * len(rows)
        most = self.settings["max_text_bytes"]
        texts = tokenizer.decode_batch([ids if len(ids) <= most else [] for ids in rows])
        return [
            text if made.ids == ids and any(made.special_tokens_mask) else None
            for ids, text, made in zip(rows, texts, tokenizer.encode_batch(texts), strict=True)
        ]

    def tokenize(
        self, texts: Sequence[str], *, add_special_tokens: bool
    ) -> list[list[dict[str, object]]] | None:
        """Return the tokens of each text without truncation; None if the rows are no texts."""
        tokenizer = self._whole_tokenizer()
        if tokenizer is None:
            return None
        special = {
            number
            for number, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        }
        return [
            [
                {
                    "id": number,
                    "text": token if number in special else text[start:end],
                    "special": number in special,
                    "start": None if number in special else start,
                    "stop": None if number in special else end,
                }
                for number, token, (start, end) in zip(
                    encoding.ids, encoding.tokens, encoding.offsets, strict=True
                )
            ]
            for text, encoding in zip(
                texts,
                tokenizer.encode_batch(list(texts), add_special_tokens=add_special_tokens),
                strict=True,
            )
        ]


class Pipeline:
    """One pipeline behind the gateway.

    Attributes:
        name: Name on the server.
        client: Client of the pipeline.
    """

    def __init__(self, name: str, client: AsyncClient, repository: Path | None) -> None:
        self.name = name
        self.client = client
        self._repository = repository
        self._step: tuple[Path, int, PreprocessFiles] | None = None
        self._reading = asyncio.Lock()
        self._step_until = self._levels_until = 0.0  # without another check, by `time.monotonic`
        self._levels: tuple[int, int] | None = None  # time of the manifest, and its priority levels

    async def config(self) -> PipelineConfig:
        """Return the interface of the pipeline.

        Raises:
            ApiError: The server has a model of this name that is no pipeline, such as a step.
            InferenceError: The server has no model of this name, or does not answer.
        """
        config = await self.client.interface()
        if config.steps == (self.name,):
            raise not_found(self.name, ())
        return config

    async def require(self, task: str) -> PipelineConfig:
        """Return the interface of the pipeline if it has this task, one of `FITS`.

        Raises:
            ApiError: The pipeline has another task.
        """
        config = await self.config()
        if not FITS[task](config.outputs.keys()):
            raise ApiError(
                400,
                "unsupported_task",
                f"`model` must name a pipeline for {task}. Given: {self.name}, with the outputs "
                f"{', '.join(config.outputs)}. Call /v1/pipelines/{self.name}.",
                param="model",
            )
        return config

    async def generating(self) -> Pipeline:
        """Return the pipeline itself if it generates text.

        Raises:
            ApiError: The pipeline has another task.
        """
        if not (await self.config()).generates:
            raise invalid(
                "model",
                "must name a pipeline that generates text",
                self.name,
                "Choose another, or call the endpoint of its task",
            )
        return self

    async def step(self) -> PreprocessFiles | None:
        """Return the files of the preprocess step; None without a repository."""
        if self._repository is None:
            return None
        folder = self._repository / (await self.config()).steps[0] / "1"
        async with self._reading:
            is_other = self._step is not None and self._step[0] != folder
            if is_other or time.monotonic() > self._step_until:
                self._step = await asyncio.to_thread(self._read_step, folder)
                self._step_until = time.monotonic() + _CHECK_S
            return None if self._step is None else self._step[2]

    def _read_step(self, folder: Path) -> tuple[Path, int, PreprocessFiles] | None:
        """Return a folder, the time of its settings and its files; None if they are missing."""
        try:
            changed = (folder / "settings.json").stat().st_mtime_ns
            if self._step is None or self._step[:2] != (folder, changed):
                return folder, changed, PreprocessFiles(folder)
        except OSError:  # the repository has another build than the server
            return None
        return self._step

    def priority_levels(self) -> int:
        """Return the number of priority levels; 0 without levels, or without a repository."""
        if self._repository is None:
            return 0
        if self._levels is not None and time.monotonic() < self._levels_until:
            return self._levels[1]
        self._levels_until = time.monotonic() + _CHECK_S
        try:
            changed = (self._repository / self.name / MANIFEST_FILE).stat().st_mtime_ns
        except OSError:
            return 0
        if self._levels is None or self._levels[0] != changed:
            manifest = find_manifest(self._repository, self.name, BuildManifest)
            priority = (
                None if manifest is None else getattr(manifest.spec.serving, "priority", None)
            )
            self._levels = changed, 0 if priority is None else priority.levels
        return self._levels[1]

    async def labels(self) -> list[str]:
        """Return the labels of a classification in the order of their ids; empty if not known."""
        if self._repository is None:
            return []
        folder = self._repository / (await self.config()).steps[-1] / "1"
        try:
            settings = await asyncio.to_thread(read_settings, folder)
            return list(settings.get("labels", ()))
        except OSError:
            return []

    async def count_tokens(
        self, columns: Mapping[str, list[Any]], parameters: Mapping[str, object]
    ) -> int | None:
        """Return the number of tokens of all rows; None without the files of the pipeline.

        They count for the limit of the key.
        """
        step = await self.step()
        if step is None:
            return None
        size = sum(len(text) for text in chain(*columns.values()) if isinstance(text, str))
        if size <= _MAX_INLINE_BYTES and not step.is_busy:
            counts = step.count(columns, parameters)
        else:
            counts = await asyncio.to_thread(step.count, columns, parameters)
        if counts is None:
            return None
        spend_tokens(sum(counts))
        return sum(counts)

    async def spend_tokens(self, columns: Mapping[str, list[Any]]) -> None:
        """Count the tokens of all rows for the limit of the key, if it has one."""
        caller = CALLER.get()
        if caller is not None and caller.has_token_limit:
            await self.count_tokens(columns, {})

    async def check_lengths(
        self,
        columns: Mapping[str, list[str]],
        parameters: Mapping[str, str | None] | None = None,
        *,
        field: str = "inputs",
    ) -> None:
        """Raise `ApiError` if the pipeline would truncate a row, or if that is not known.

        Args:
            columns: Texts of each input.
            parameters: Parameters of the request that choose its prompt, which counts; None for the
                pipeline's own.
            field: Name of the rows in the request.
        """
        step = await self.step()
        if step is None or not step.knows_tokens:
            rule = "is only supported with --repository, and for pipelines of texts without hooks"
            raise invalid("truncate", rule, "", "Leave it out")
        given = dict(step.settings["parameters"])
        given |= {name: each for name, each in (parameters or {}).items() if each is not None}
        found = await asyncio.to_thread(step.find_refused, columns, given)
        if found is not None:
            row, error = found
            name = f"{field}[{row}]"
            text = error.text if isinstance(error, RequestError) else "cannot be tokenized."
            text = text.replace(_OF_THE_OWNER, "leave out `truncate`")
            raise ApiError(400, "invalid_value", f"{name}: {text}", param=name)

    async def decode(self, rows: Sequence[list[int]], field: str) -> list[str]:
        """Return the text of each row of token ids.

        Raises:
            ApiError: Ids are not those of a text, or the gateway does not have the tokenizer.
        """
        step = await self.step()
        texts = [None] * len(rows) if step is None else await asyncio.to_thread(step.decode, rows)
        found = [text for text in texts if text is not None]
        if len(found) < len(rows):
            row = texts.index(None)
            raise invalid(
                f"{field}[{row}]" if len(rows) > 1 else field,
                "must be a text, or its ids as /tokenize of a gateway with --repository returns "
                "them",
                f"{len(rows[row])} ids that are not",
                "Send texts; for LangChain set check_embedding_ctx_length=False",
            )
        return found

    async def prompt(self, input_type: str | None, named: str | None) -> str | None:
        """Return the prompt for a request; None for the default of the pipeline.

        Args:
            input_type: Kind of the texts, such as ``query``; has no effect on a pipeline without
                prompts.
            named: Name or text of a prompt, which wins.

        Raises:
            ApiError: The pipeline has prompts, and none for this kind of text.
        """
        if named is not None or input_type is None:
            return named
        step = await self.step()
        if step is None:
            return None
        prompts = step.settings.get("prompts") or {}
        if not prompts:
            return None
        for name in _SAME_PROMPTS.get(input_type, (input_type,)):
            if name in prompts:
                return name
        remedy = f"Choose one of: {', '.join(prompts)}"
        raise invalid("input_type", "is no prompt of the pipeline", as_json(input_type), remedy)


class Pipelines:
    """All pipelines of a gateway.

    Args:
        names: Names of the pipelines; empty for all that `repository` has.
        aliases: Name of a pipeline by another name for it.
        repository: Repository that the server serves, for names, tokens and information.
        options: Arguments of each `AsyncClient`.
    """

    def __init__(
        self,
        names: Sequence[str],
        aliases: Mapping[str, str],
        repository: Path | None,
        options: Mapping[str, Any],
    ) -> None:
        self._names = tuple(names)
        self.aliases = dict(aliases)
        self._repository = repository
        self._options = dict(options)
        self._opened: dict[str, Pipeline] = {}
        if repository is not None:
            check_readable(repository)
        if not self.names():
            raise UserError(
                "NAME",
                "is required where no repository is given",
                given=f"no built pipelines in {repository}" if repository else "",
                remedy="Name the pipelines of the server, or its --repository",
            )
        for alias, name in self.aliases.items():
            if name not in self.names():
                raise UserError(
                    "--alias",
                    "must name a pipeline of the gateway",
                    given=f"{alias}={name}",
                    remedy=f"Choose one of: {', '.join(self.names())}",
                )
        # Reads the files of `tls`, and checks `url` and headers, before a request comes.
        Client(self.names()[0], **self._options).close()

    def names(self) -> tuple[str, ...]:
        """Return the names of the pipelines that the caller may use, without aliases."""
        names: Sequence[str] = self._names
        if not names and self._repository is not None:
            found = self._repository.glob(f"*/{MANIFEST_FILE}")
            names = sorted(path.parent.name for path in found)
        return tuple(name for name in names if _may_use(name))

    def names_and_aliases(self) -> list[str]:
        """Return the names and aliases of the pipelines that the caller may use."""
        names = self.names()
        return [*names, *(alias for alias, name in self.aliases.items() if name in names)]

    def find(self, name: str | None) -> Pipeline:
        """Return the pipeline with this name or alias; the only pipeline without a name.

        Raises:
            ApiError: There is no such pipeline.
        """
        if name is None:
            names = self.names()
            if len(names) != 1:
                raise not_found(None, names)
            name = names[0]
        name = self.aliases.get(name, name)
        found = self._opened.get(name)
        if not _may_use(name):
            raise ApiError(
                403,
                "permission_denied",
                f"The key may not use pipeline {as_json(name)}. Choose one of: "
                f"{', '.join(self.names_and_aliases()) or 'none'}.",
                param="model",
            )
        if found is None:
            if name not in self.names():
                raise not_found(name, self.names_and_aliases())
            client = AsyncClient(name, **self._options)
            found = self._opened[name] = Pipeline(name, client, self._repository)
        caller = CALLER.get()
        priority = None if caller is None else caller.entry.priority
        levels = found.priority_levels() if priority else 0
        CALL_PARAMETERS.set({PRIORITY: min(priority, levels)} if priority and levels else None)
        return found

    async def only(self, task: str) -> Pipeline:
        """Return the only pipeline with this task, one of `FITS`.

        Raises:
            ApiError: None has, or several have.
        """
        found = []
        for name in self.names():
            pipeline = self.find(name)
            try:
                await pipeline.require(task)
            except ApiError:
                continue
            found.append(pipeline)
        if len(found) == 1:
            return self.find(found[0].name)
        names = ", ".join(pipeline.name for pipeline in found) or "none"
        raise ApiError(
            404,
            "model_not_found",
            f"This path is for a gateway with one pipeline for {task}. Given: {names}. Put the "
            "name in front of the path, such as /tei/NAME/info.",
        )

    async def close(self) -> None:
        """Close all connections; calls in flight end with an error."""
        await asyncio.gather(*(pipeline.client.close() for pipeline in self._opened.values()))


class Endpoints:
    """Base class of the endpoints of an API.

    Handlers raise `ApiError` for a request that is not valid, and `InferenceError` if the pipeline
    does not answer.
    """

    tag: str
    """Group of its operations in the OpenAPI document."""

    def __init__(self, pipelines: Pipelines, shared: Shared) -> None:
        self._pipelines = pipelines
        self._limits = shared.limits
        self._items = shared.metrics.items

    def operations(self) -> list[Operation]:
        """Return the operations of the methods that `Operation` decorates."""
        return [
            replace(
                each,
                summary=(method.__doc__ or "").partition("\n")[0],
                tag=self.tag,
                handler=getattr(self, name),
                body=get_type_hints(method).get("body"),
            )
            for name, method in vars(type(self)).items()
            for each in getattr(method, OPERATIONS, ())
        ]

    async def _texts(self, pipeline: Pipeline, given: Texts, field: str) -> list[str]:
        """Return the texts of a request, which may be token ids, and count them.

        Raises:
            ApiError: There are too many, or ids that are not those of a text.
        """
        is_one = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
        rows: list[Any] = [given] if is_one else given  # type: ignore[assignment]
        self._limits.check_items(field, len(rows))
        return rows if isinstance(rows[0], str) else await pipeline.decode(rows, field)


def spend_tokens(count: int) -> None:
    """Count tokens for the limit of the key, if there is one."""
    caller = CALLER.get()
    if caller is not None:
        caller.spend_tokens(count)


def _may_use(name: str) -> bool:
    caller = CALLER.get()
    return caller is None or caller.may_use(name)


def not_found(name: str | None, known: Sequence[str]) -> ApiError:
    """Return the error for a name that is no pipeline of the gateway."""
    given = "" if name is None else f"Given: {as_json(name)}. "
    names = f"Choose one of: {', '.join(known)}." if known else "See /v1/models."
    return ApiError(
        404,
        "model_not_found",
        f"`model` must name a pipeline of this gateway. {given}{closest(name or '', known)}{names}",
        param="model",
    )
