"""API of Hugging Face's Text Embeddings Inference (TEI), for one pipeline."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from importlib.metadata import version
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, RootModel, SkipValidation

from triptych.client import PipelineConfig
from triptych.gateway.cohere import Cohere, RerankRequest, RerankResponse, rank
from triptych.gateway.errors import TEI, ApiError, as_json, invalid
from triptych.gateway.http import WHOLE, Body, No, Operation, Shared
from triptych.gateway.openai import token_vectors
from triptych.gateway.pipelines import (
    CLASSIFICATION,
    EMBEDDING,
    FITS,
    MULTI_VECTOR,
    RERANKING,
    SPARSE,
    Endpoints,
    Lines,
    Pipeline,
    Pipelines,
    Text,
    Texts,
    float_encoding,
)


class _TeiBody(Body):
    """Body of a request; as TEI itself, it ignores unknown fields."""

    model_config = ConfigDict(extra="ignore")


class _Inputs(_TeiBody):
    truncate: bool | None = None  # False: a text that is too long is an error
    truncation_direction: Literal["right", "Right"] | None = None  # the pipeline's own


class SparseRequest(_Inputs):
    """Request for the terms of texts."""

    inputs: Texts
    prompt_name: str | None = None


class EmbedAllRequest(_Inputs):
    """Request for a vector of each token of texts; `prompt_name` is the role of the texts."""

    inputs: Texts
    prompt_name: Literal["query", "document"] | None = None


class EmbedRequest(SparseRequest):
    """Request for embeddings."""

    normalize: bool = True
    dimensions: Annotated[int, Field(ge=1), WHOLE] | None = None


class PredictRequest(_Inputs):
    """Request for labels of a text, a pair of texts, or a batch of lists of one or two texts."""

    inputs: str | Lines | Annotated[list[Lines], Field(fail_fast=True)]
    raw_scores: No = False


class TeiRerankRequest(_Inputs):
    """Request to sort texts by how well they answer a query."""

    query: Text
    texts: Annotated[list[Text], Field(min_length=1, fail_fast=True)]
    raw_scores: No = False
    return_text: bool = False


class SentencePairs(_TeiBody):
    """A text, and texts to compare with it."""

    source_sentence: str
    sentences: Lines


class SimilarityRequest(_TeiBody):
    """Request for the cosine similarity of a text to others."""

    inputs: SentencePairs
    parameters: dict[str, object] = Field(default_factory=dict)  # fields of EmbedRequest


class TokenizeRequest(_TeiBody):
    """Request for the tokens of texts."""

    inputs: str | Lines
    add_special_tokens: bool = True
    prompt_name: str | None = None


class Term(BaseModel):
    """Weight of a term, by its index in the vocabulary of the model."""

    index: int
    value: float


class Rank(BaseModel):
    """Text at `index` of the request."""

    index: int
    score: float
    text: str | None = None


class Prediction(BaseModel):
    """Label with its score."""

    label: str
    score: float


class Token(BaseModel):
    """Token with the range of its characters in the text."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class Info(BaseModel):
    """Properties of the pipeline, with the names of TEI."""

    model_id: str
    model_type: dict[str, object]
    max_input_length: int | None
    max_client_batch_size: int
    max_batch_requests: int
    auto_truncate: bool | None
    version: str


RootRequest = RootModel[
    SkipValidation[EmbedRequest | SimilarityRequest | PredictRequest | TeiRerankRequest]
]
AnyRerankRequest = RootModel[SkipValidation[TeiRerankRequest | RerankRequest]]
Vectors = RootModel[list[list[float]]]
Terms = RootModel[list[list[Term]]]
TokenVectors = RootModel[list[list[list[float]]]]
Similarities = RootModel[list[float]]
Ranks = RootModel[list[Rank]]
AnyRanks = RootModel[list[Rank] | RerankResponse]
Labels = RootModel[list[Prediction] | list[list[Prediction]]]
Tokens = RootModel[list[list[Token]]]
Results = RootModel[
    list[list[float]] | list[float] | list[Rank] | list[Prediction] | list[list[Prediction]]
]


_LATE = {"inputs": ["my delivery is late"]}
_QUERY = {"query": "where is my parcel?", "texts": ["parcels arrive on Tuesday"]}
_PAIRS = {"inputs": {"source_sentence": "where is it?", "sentences": ["my delivery is late"]}}


class Tei(Endpoints):
    """Endpoints of TEI: for the only pipeline of a task, or for that in the path."""

    tag = "TEI"

    def __init__(self, pipelines: Pipelines, shared: Shared) -> None:
        super().__init__(pipelines, shared)
        self._documents = Cohere(pipelines, shared)

    def operations(self) -> list[Operation]:
        """Return the operations for the only pipeline of a task, and for that in the path."""
        made = [replace(each, errors=TEI) for each in super().operations()]
        named = [
            replace(each, path=f"/tei/{{name}}{each.path}".removesuffix("/"))
            for each in made
            if each.handler != self.rerank_any
        ]
        return [*(each for each in made if each.handler != self.rerank), *named]

    @Operation("/", Results, "inputs", _LATE)
    async def root(self, body: RootRequest, name: str | None = None) -> object:
        """Return embeddings, similarities, labels or ranks, by the pipeline."""
        is_only = name is None and len(self._pipelines.names()) == 1
        pipeline = await self._find(name, None if is_only else EMBEDDING)
        outputs = (await pipeline.config()).outputs.keys()
        if FITS[RERANKING](outputs):
            return await self.rerank(TeiRerankRequest.model_validate(body.root), pipeline.name)
        if FITS[CLASSIFICATION](outputs):
            return await self.predict(PredictRequest.model_validate(body.root), pipeline.name)
        given: Any = body.root
        if isinstance(given, dict) and isinstance(given.get("inputs"), dict):
            return await self.similarity(SimilarityRequest.model_validate(given), pipeline.name)
        return await self.embed(EmbedRequest.model_validate(given), pipeline.name)

    @Operation("/embed", Vectors, "inputs", _LATE)
    async def embed(self, body: EmbedRequest, name: str | None = None) -> list[list[float]]:
        """Return an embedding of each text."""
        pipeline, config, texts = await self._checked_texts(name, EMBEDDING, body)
        has_option = "normalize_embeddings" in config.options
        vectors = await pipeline.client.embed(
            texts,
            dimensions=body.dimensions,
            normalize_embeddings=body.normalize if has_option else None,
            encoding=float_encoding(config),
            prompt=body.prompt_name,
        )
        if not body.normalize:
            check_not_normalized(vectors, body.dimensions)
        elif not has_option:
            vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True).clip(min=1e-12)
        self._items.labels(pipeline.name).inc(len(texts))
        await pipeline.spend_tokens({"text": texts})
        plain: list[list[float]] = vectors.tolist()
        return plain

    @Operation("/embed_all", TokenVectors, "inputs", _LATE)
    async def embed_all(self, body: EmbedAllRequest, name: str | None = None) -> object:
        """Return a vector of each token of each text that the model keeps."""
        pipeline, _, texts = await self._checked_texts(name, MULTI_VECTOR, body)
        found = await token_vectors(pipeline, texts, body.prompt_name)
        self._items.labels(pipeline.name).inc(len(texts))
        await pipeline.spend_tokens({"text": texts})
        return found

    @Operation("/embed_sparse", Terms, "inputs", _LATE)
    async def embed_sparse(self, body: SparseRequest, name: str | None = None) -> object:
        """Return the terms of each text with their weights, the highest first."""
        pipeline, _, texts = await self._checked_texts(name, SPARSE, body)
        found = await pipeline.client.embed_sparse(texts, prompt=body.prompt_name)
        self._items.labels(pipeline.name).inc(len(texts))
        await pipeline.spend_tokens({"text": texts})
        return [
            [
                {"index": index, "value": value}
                for index, value in zip(each.indices.tolist(), each.values.tolist(), strict=True)
            ]
            for each in found
        ]

    @Operation("/similarity", Similarities, "inputs", _PAIRS)
    async def similarity(self, body: SimilarityRequest, name: str | None = None) -> list[float]:
        """Return the cosine similarity of a text to each of the others."""
        texts = [body.inputs.source_sentence, *body.inputs.sentences]
        wanted = EmbedRequest.model_validate(
            {**body.parameters, "inputs": texts, "normalize": True}
        )
        vectors = np.array(await self.embed(wanted, name))
        scores: list[float] = (vectors[1:] @ vectors[0]).tolist()
        return scores

    @Operation("/predict", Labels, "inputs", _LATE)
    async def predict(self, body: PredictRequest, name: str | None = None) -> object:
        """Return all labels of each text, best first."""
        given = [body.inputs] if isinstance(body.inputs, str) else body.inputs
        rows = [each for each in given if not isinstance(each, str)]
        is_batch = bool(rows)
        rows = rows or [[each for each in given if isinstance(each, str)]]
        self._limits.check_items("inputs", len(rows))
        sizes = {len(row) for row in rows}
        if not sizes <= {1, 2} or len(sizes) > 1:
            raise invalid(
                "inputs",
                "must have one text or one pair of texts in each row, the same number in all rows",
                f"rows of {', '.join(map(str, sorted(sizes)))} texts",
                "Send texts and pairs in different requests",
            )
        pipeline = await self._find(name, CLASSIFICATION)
        await pipeline.require(CLASSIFICATION)
        columns = dict(zip(("text", "text_pair"), map(list, zip(*rows, strict=True)), strict=False))
        if body.truncate is False:
            await pipeline.check_lengths(columns)
        step = await pipeline.step()
        rule = {} if step is None else step.settings["request_parameters"].get("top_k", {})
        choices = await pipeline.client.classify(
            [row[0] for row in rows],
            text_pairs=[row[1] for row in rows] if sizes == {2} else None,
            top_k=rule.get("max"),
        )
        self._items.labels(pipeline.name).inc(len(rows))
        await pipeline.spend_tokens(columns)
        labels = [[{"label": c.label, "score": c.score} for c in each] for each in choices]
        return labels if is_batch else labels[0]

    @Operation("/rerank", AnyRanks, "texts", _QUERY)
    async def rerank_any(self, body: AnyRerankRequest) -> Any:
        """Sort texts as TEI does, or documents as /v1/rerank does."""
        given: Any = body.root
        if isinstance(given, dict) and "documents" in given and "texts" not in given:
            return await self._documents.rerank(RerankRequest.model_validate(given))
        return await self.rerank(TeiRerankRequest.model_validate(given))

    @Operation("/rerank", Ranks, "texts", _QUERY)
    async def rerank(self, body: TeiRerankRequest, name: str | None = None) -> list[object]:
        """Sort texts by how well they answer a query."""
        self._limits.check_items("texts", len(body.texts))
        pipeline = await self._find(name, RERANKING)
        if body.truncate is False:
            columns = {"text": [body.query] * len(body.texts), "text_pair": body.texts}
            await pipeline.check_lengths(columns, field="texts")
        ranked, _ = await rank(pipeline, body.query, body.texts, None, "texts")
        self._items.labels(pipeline.name).inc(len(body.texts))
        return [
            {"index": each.index, "score": each.score}
            | ({"text": body.texts[each.index]} if body.return_text else {})
            for each in ranked
        ]

    @Operation("/tokenize", Tokens, "inputs", _LATE)
    async def tokenize(
        self, body: TokenizeRequest, name: str | None = None
    ) -> list[list[dict[str, object]]]:
        """Return the tokens of each text, as the pipeline makes them without truncation."""
        pipeline = await self._find(name)
        texts = await self._texts(pipeline, body.inputs, "inputs")
        step = await pipeline.step()
        if step is None:
            raise ApiError(
                501,
                "no_tokenizer",
                "The gateway has no tokenizer. Start it with the --repository of the server.",
            )
        if body.prompt_name is not None:
            prompts = step.settings.get("prompts") or {}
            if body.prompt_name not in prompts:
                raise invalid(
                    "prompt_name",
                    "must name a prompt of the pipeline",
                    as_json(body.prompt_name),
                    f"Choose one of: {', '.join(prompts) or 'none'}",
                )
            texts = [prompts[body.prompt_name] + text for text in texts]
        encoded = await asyncio.to_thread(
            step.tokenize, texts, add_special_tokens=body.add_special_tokens
        )
        if encoded is None:
            raise invalid("path", "needs a pipeline of texts", pipeline.name, "Name another")
        return encoded

    @Operation("/info", Info)
    async def info(self, name: str | None = None) -> dict[str, object]:
        """Describe the pipeline."""
        pipeline = await self._find(name)
        config = await pipeline.config()
        step = await pipeline.step()
        settings = {} if step is None else step.settings
        kinds = {EMBEDDING: "embedding", RERANKING: "reranker", CLASSIFICATION: "classifier"}
        kind = next((task for task, fits in FITS.items() if fits(config.outputs.keys())), "")
        details: dict[str, object] = {}
        if kind == CLASSIFICATION:
            details["id2label"] = dict(enumerate(await pipeline.labels()))
        elif kind == SPARSE:
            kind, details["pooling"] = EMBEDDING, "splade"
        elif kind == MULTI_VECTOR:
            kind = EMBEDDING
        return {
            "model_id": pipeline.name,
            "model_type": {kinds.get(kind, "other"): details},
            "max_input_length": settings.get("max_length"),
            "max_client_batch_size": self._limits.items,
            "max_batch_requests": config.max_batch_size,
            "auto_truncate": settings["overflow"] == "truncate" if "overflow" in settings else None,
            "version": version("triptych"),
        }

    async def _checked_texts(
        self, name: str | None, task: str, body: SparseRequest | EmbedAllRequest
    ) -> tuple[Pipeline, PipelineConfig, list[str]]:
        """Return the pipeline of a task, its interface, and the texts that it is to embed."""
        pipeline = await self._find(name, task)
        texts = await self._texts(pipeline, body.inputs, "inputs")
        config = await pipeline.require(task)
        if body.truncate is False:
            parameter = "role" if task == MULTI_VECTOR else "prompt"
            await pipeline.check_lengths({"text": texts}, {parameter: body.prompt_name})
        return pipeline, config, texts

    async def _find(self, name: str | None, task: str | None = None) -> Pipeline:
        if name is None and task is not None:
            return await self._pipelines.only(task)
        return self._pipelines.find(name)


_MAX_OFF_UNIT = 1e-3
"""Maximum difference from 1 of the length of a vector that the model has normalized."""


def check_not_normalized(vectors: NDArray[np.generic], dimensions: int | None) -> None:
    """Raise `ApiError` if the model normalizes its vectors [n, size], or if that is not known."""
    is_unit = abs(np.linalg.norm(vectors, axis=1) - 1).max() < _MAX_OFF_UNIT
    if is_unit or dimensions is not None:
        rule = "must be true if the model itself normalizes its vectors, and with `dimensions`"
        raise invalid("normalize", rule, "false", "Leave it out")
