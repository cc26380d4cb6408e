"""Rerank APIs of Cohere (v1, v2) and Jina."""

from __future__ import annotations

import asyncio
import uuid
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from triptych.client import InvalidRequestError, Ranked
from triptych.gateway.errors import COHERE, ApiError, invalid
from triptych.gateway.http import WHOLE, Body, One, Operation
from triptych.gateway.pipelines import RERANKING, Endpoints, Pipeline, Text


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
    top_n: Annotated[int, Field(ge=1), WHOLE] | None = Field(
        default=None, validation_alias=AliasChoices("top_n", "top_k")
    )
    return_documents: bool | None = None
    prompt: str | None = None
    rank_fields: list[Literal["text"]] | None = None
    priority: Annotated[int, Field(ge=0, le=0), WHOLE] | None = None
    max_tokens_per_doc: Annotated[int, Field(ge=1), WHOLE] | None = None
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
    meta: dict[str, Any]


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


async def _check_length(pipeline: Pipeline, max_tokens: int | None) -> None:
    """Raise `ApiError` if documents would have to be cut shorter than the pipeline cuts them."""
    step = None if max_tokens is None else await pipeline.step()
    limit = None if step is None else step.settings.get("max_length")
    if max_tokens is not None and (limit is None or max_tokens < limit):
        raise invalid(
            "max_tokens_per_doc",
            "must not be below the maximum of the pipeline, which cuts longer documents",
            str(max_tokens),
            f"Send {limit or 'none'}",
        )


class Rerank(Endpoints):
    """Endpoints that sort documents."""

    def operations(self) -> list[Operation]:
        """Return the operations for the table of the application."""
        example = {
            "model": "reranker",
            "query": "where is my parcel?",
            "documents": ["parcels arrive on Tuesday", "refunds take a week"],
        }
        return [
            Operation(
                path,
                f"Sort documents by how well they answer a query ({vendor}).",
                "Rerank",
                self.rerank,
                COHERE,
                RerankRequest,
                RerankResponse,
                rows="documents",
                example=example,
            )
            for path, vendor in (
                ("/v2/rerank", "Cohere v2"),
                ("/v1/rerank", "Jina and Cohere v1"),
            )
        ]

    async def rerank(self, body: RerankRequest) -> dict[str, Any]:
        """Return documents, best first."""
        self._limits.check_items("documents", len(body.documents))
        texts = [each if isinstance(each, str) else each.text for each in body.documents]
        pipeline = self._pipelines.find(body.model)
        await _check_length(pipeline, body.max_tokens_per_doc)
        ranked, tokens = await rank(pipeline, body.query, texts, body.prompt, "documents")
        self._items.labels(pipeline.name).inc(len(texts))
        results: list[dict[str, Any]] = [
            {"index": each.index, "relevance_score": each.score} for each in ranked[: body.top_n]
        ]
        if body.return_documents:
            for result in results:
                document = body.documents[result["index"]]
                plain = {"text": document} if isinstance(document, str) else document.model_dump()
                result["document"] = plain
        response: dict[str, Any] = {
            "id": str(uuid.uuid4()),
            "model": body.model,
            "results": results,
            "meta": {"api_version": {"version": "2"}},
        }
        if tokens is not None:
            response["usage"] = {"prompt_tokens": tokens, "total_tokens": tokens}
        return response
