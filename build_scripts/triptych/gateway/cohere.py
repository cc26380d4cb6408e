"""APIs of Cohere (v1, v2): embed, and rerank, which Jina has, too."""

from __future__ import annotations

import asyncio
import uuid
from typing import Annotated, Literal

import numpy as np
from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field

from triptych.client import InvalidRequestError, Ranked
from triptych.client.answers import Vectors
from triptych.client.tasks import Encoding
from triptych.gateway.errors import COHERE, ApiError, invalid
from triptych.gateway.http import WHOLE, Body, One, Operation
from triptych.gateway.openai import encode_vectors
from triptych.gateway.pipelines import (
    EMBEDDING,
    RERANKING,
    Endpoints,
    Lines,
    Pipeline,
    Text,
    float_encoding,
)

_NoPriority = Annotated[int, Field(ge=0, le=0), WHOLE] | None
_Size = Annotated[int, Field(ge=1), WHOLE] | None
_Type = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]


def _without_images(given: object) -> object:
    if given:
        raise ValueError("is not supported, because pipelines embed `texts`")
    return given


_NoImages = Annotated[list[object], Field(max_length=0), BeforeValidator(_without_images)] | None


class CohereEmbedRequest(Body):
    """Request for embeddings.

    Attributes:
        model: Name of a pipeline, or an alias.
        texts: Texts of any number up to the limit of the gateway.
        input_type: Kind of the texts, such as search_query; chooses the prompt of this name.
        embedding_types: Types of the vectors; float by default.
        output_dimension: Number of leading numbers of each vector that are returned.
        truncate: END, or NONE, with which a text that is too long is an error.
        max_tokens: Not below the maximum of the pipeline, which cuts longer texts.
        priority: Only 0, Cohere's default.
        images: Only empty, because pipelines embed texts.
        inputs: Only empty; send `texts`.
    """

    model: str
    images: _NoImages = None
    inputs: _NoImages = None
    texts: Lines
    input_type: str | None = None
    embedding_types: Annotated[list[_Type], Field(fail_fast=True)] | None = None
    output_dimension: _Size = None
    truncate: Literal["END", "NONE"] | None = None
    max_tokens: _Size = None
    priority: _NoPriority = None


class CohereEmbedResponse(BaseModel):
    """Vectors by their type, in the order of the texts; of v1 without types, those of floats."""

    response_type: Literal["embeddings_by_type", "embeddings_floats"]
    id: str
    embeddings: dict[_Type, list[list[float]] | list[list[int]] | list[str]] | list[list[float]]
    texts: list[str]
    meta: dict[str, object]


class Document(Body):
    """A document as an object; its other fields are in the results, as Cohere has it."""

    model_config = ConfigDict(extra="allow")

    text: Text


class RerankRequest(Body):
    """Request to sort documents by how well they answer a query.

    Attributes:
        model: Name of a pipeline, or an alias.
        documents: Texts, or objects with a text.
        top_n: Maximum number of results; all by default.
        return_documents: Whether the results contain the texts of their documents.
        prompt: Name of a prompt of the pipeline, or its text if the pipeline takes any.
        rank_fields: Only the field `text` of documents.
        priority: Only 0, Cohere's default.
        max_tokens_per_doc: Not below the maximum of the pipeline, which cuts longer documents.
        max_chunks_per_doc: Only 1: a document is not divided.
    """

    model: str
    query: Text
    documents: Annotated[list[Text | Document], Field(min_length=1, fail_fast=True)]
    top_n: _Size = Field(default=None, validation_alias=AliasChoices("top_n", "top_k"))
    return_documents: bool | None = None
    prompt: str | None = None
    rank_fields: list[Literal["text"]] | None = None
    priority: _NoPriority = None
    max_tokens_per_doc: _Size = None
    max_chunks_per_doc: One = None


class RerankResult(BaseModel):
    """Document at `index` of the request."""

    index: int
    relevance_score: float
    document: Document | None = None


class RerankResponse(BaseModel):
    """Documents, best first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: dict[str, int] | None = None
    meta: dict[str, object]


async def rank(
    pipeline: Pipeline, query: str, texts: list[str], prompt: str | None, field: str
) -> tuple[list[Ranked], int | None]:
    """Return the texts, best first, and their number of tokens, if it is known.

    Raises:
        ApiError: The pipeline has another task, or refuses the query or one of the texts, which are
            the `field` of the request.
        InferenceError: The pipeline does not answer.
    """
    await pipeline.require(RERANKING)
    columns = {"text": [query] * len(texts), "text_pair": texts}
    try:
        ranked, tokens = await asyncio.gather(
            pipeline.client.rerank(query, texts, prompt=prompt),
            pipeline.count_tokens(columns, {} if prompt is None else {"prompt": prompt}),
        )
    except InvalidRequestError as error:
        name, _, rule = error.message.partition(" ")
        at = {"`text`": "query", "`text_pair`": f"{field}[{error.row}]"}.get(name)
        if at is None:
            raise
        raise ApiError(400, "invalid_value", f"`{at}` {rule}", param=at) from error
    return ranked, tokens


async def _check_length(pipeline: Pipeline, max_tokens: int | None, field: str) -> None:
    """Raise `ApiError` if texts would have to be cut shorter than the pipeline cuts them."""
    step = None if max_tokens is None else await pipeline.step()
    limit = None if step is None else step.settings.get("max_length")
    if max_tokens is not None and (limit is None or max_tokens < limit):
        raise invalid(
            field,
            "must not be below the maximum of the pipeline, which cuts longer texts",
            str(max_tokens),
            f"Send {limit or 'none'}",
        )


_PASSES: dict[_Type, Encoding] = {
    **{"float": "float", "base64": "float", "int8": "uint8", "uint8": "uint8"},
    **{"binary": "ubinary", "ubinary": "ubinary"},
}
"""Encoding that the pipeline is asked for, by the type that is made from it."""


def _vectors(made: Vectors, kind: _Type) -> list[object]:
    """Return vectors [n, size] as plain data; signed ones differ in the first bit."""
    if kind in ("int8", "binary"):
        made = (made ^ np.uint8(0x80)).view(np.int8)
    return encode_vectors(made, kind)


_TEXTS = {"model": "minilm", "texts": ["where is my parcel?"], "input_type": "search_query"}
_DOCUMENTS = {
    **{"model": "reranker", "query": "where is my parcel?"},
    "documents": ["parcels arrive on Tuesday", "refunds take a week"],
}


class Cohere(Endpoints):
    """Endpoints that embed texts or sort documents."""

    tag = "Cohere"

    @Operation("/v2/embed", CohereEmbedResponse, "texts", _TEXTS, COHERE)
    async def embed(self, body: CohereEmbedRequest) -> dict[str, object]:
        """Return an embedding of each text, in each of the types (Cohere v2)."""
        texts = body.texts
        self._limits.check_items("texts", len(texts))
        pipeline = self._pipelines.find(body.model)
        config = await pipeline.require(EMBEDDING)
        await _check_length(pipeline, body.max_tokens, "max_tokens")
        prompt = await pipeline.prompt(body.input_type, None)
        if body.truncate == "NONE":
            await pipeline.check_lengths({"text": texts}, {"prompt": prompt}, field="texts")
        types = body.embedding_types or ["float"]
        passes = list(dict.fromkeys(_PASSES[each] for each in types))
        if {"float", "ubinary"} <= set(passes):
            passes.remove("ubinary")
        *made, tokens = await asyncio.gather(
            *(
                pipeline.client.embed(
                    texts,
                    dimensions=body.output_dimension,
                    encoding=float_encoding(config) if encoding == "float" else encoding,
                    prompt=prompt,
                )
                for encoding in passes
            ),
            pipeline.count_tokens({"text": texts}, {} if prompt is None else {"prompt": prompt}),
        )
        self._items.labels(pipeline.name).inc(len(texts))
        found = dict(zip(passes, made, strict=True))
        if "float" in found:
            found["ubinary"] = np.packbits(found["float"] > 0, axis=1)
        vectors = {each: _vectors(found[_PASSES[each]], each) for each in types}
        meta: dict[str, object] = {"api_version": {"version": "2"}}
        if tokens is not None:
            meta["billed_units"] = {"input_tokens": tokens}
        return {
            "response_type": "embeddings_by_type",
            "id": str(uuid.uuid4()),
            "embeddings": vectors,
            "texts": texts,
            "meta": meta,
        }

    @Operation("/v1/embed", CohereEmbedResponse, "texts", _TEXTS, COHERE)
    async def embed_v1(self, body: CohereEmbedRequest) -> dict[str, object]:
        """Return an embedding of each text (Cohere v1)."""
        made = await self.embed(body)
        vectors = made["embeddings"]
        if body.embedding_types or not isinstance(vectors, dict):
            return made
        return {**made, "response_type": "embeddings_floats", "embeddings": vectors["float"]}

    @Operation("/v1/rerank", RerankResponse, "documents", _DOCUMENTS, COHERE)
    @Operation("/v2/rerank", RerankResponse, "documents", _DOCUMENTS, COHERE)
    async def rerank(self, body: RerankRequest) -> dict[str, object]:
        """Sort documents by how well they answer a query (Cohere v1 and v2, Jina)."""
        self._limits.check_items("documents", len(body.documents))
        texts = [each if isinstance(each, str) else each.text for each in body.documents]
        pipeline = self._pipelines.find(body.model)
        await _check_length(pipeline, body.max_tokens_per_doc, "max_tokens_per_doc")
        ranked, tokens = await rank(pipeline, body.query, texts, body.prompt, "documents")
        self._items.labels(pipeline.name).inc(len(texts))
        results: list[dict[str, object]] = []
        for each in ranked[: body.top_n]:
            results.append({"index": each.index, "relevance_score": each.score})
            if body.return_documents:
                given = body.documents[each.index]
                plain = {"text": given} if isinstance(given, str) else given.model_dump()
                results[-1]["document"] = plain
        response: dict[str, object] = {
            "id": str(uuid.uuid4()),
            "model": body.model,
            "results": results,
            "meta": {"api_version": {"version": "2"}},
        }
        if tokens is not None:
            response["usage"] = {"prompt_tokens": tokens, "total_tokens": tokens}
        return response
