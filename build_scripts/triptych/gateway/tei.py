"""API of Hugging Face's Text Embeddings Inference (TEI), for one pipeline."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from importlib.metadata import version
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel

from triptych.gateway.errors import TEI, ApiError, invalid
from triptych.gateway.http import Body, No, Operation
from triptych.gateway.pipelines import (
    CLASSIFICATION,
    EMBEDDING,
    FITS,
    RERANKING,
    Endpoints,
    Lines,
    Pipeline,
    Texts,
)
from triptych.gateway.rerank import rank


class _TeiBody(Body):
    """Body of a request; as TEI itself, it ignores unknown fields."""

    model_config = ConfigDict(extra="ignore")


class _Inputs(_TeiBody):
    truncate: bool | None = None
    truncation_direction: Literal["right", "Right"] | None = None  # the pipeline's own


class EmbedRequest(_Inputs):
    """Request for embeddings; the pipeline decides whether long texts are truncated."""

    inputs: Texts
    normalize: bool = True
    prompt_name: str | None = None
    dimensions: int | None = None


class PredictRequest(_Inputs):
    """Request for labels of a text, a pair of texts, or a batch of lists of one or two texts."""

    inputs: str | Lines | Annotated[list[Lines], Field(fail_fast=True)]
    raw_scores: No = False


class TeiRerankRequest(_Inputs):
    """Request to sort texts by how well they answer a query."""

    query: str
    texts: Lines
    raw_scores: No = False
    return_text: bool = False


class TokenizeRequest(_TeiBody):
    """Request for the tokens of texts."""

    inputs: str | Lines
    add_special_tokens: bool = True
    prompt_name: str | None = None


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
    model_type: dict[str, Any]
    max_input_length: int | None
    max_client_batch_size: int
    max_batch_requests: int
    auto_truncate: bool | None
    version: str


Vectors = RootModel[list[list[float]]]
Ranks = RootModel[list[Rank]]
Labels = RootModel[list[Prediction] | list[list[Prediction]]]
Tokens = RootModel[list[list[Token]]]


class Tei(Endpoints):
    """Endpoints of TEI: for the only pipeline of a task, or for that in the path."""

    def operations(self) -> list[Operation]:
        """Return the operations for the table of the application."""
        late = {"inputs": ["my delivery is late"]}
        query = {"query": "where is my parcel?", "texts": ["parcels arrive on Tuesday"]}
        table: list[tuple[str, str, Any, type[Body] | None, Any, str, dict[str, Any]]] = [
            ("embed", "Return embeddings.", self.embed, EmbedRequest, Vectors, "inputs", late),
            ("predict", "Return labels.", self.predict, PredictRequest, Labels, "inputs", late),
            ("rerank", "Sort texts.", self.rerank, TeiRerankRequest, Ranks, "texts", query),
            ("tokenize", "Return tokens.", self.tokenize, TokenizeRequest, Tokens, "inputs", late),
            ("info", "Describe the pipeline.", self.info, None, Info, "", {}),
        ]
        made = [
            Operation(f"/{name}", summary, "TEI", handler, TEI, body, result, rows, example)
            for name, summary, handler, body, result, rows, example in table
        ]
        named = [replace(each, path=f"/tei/{{name}}{each.path}") for each in made]
        # TEI answers requests for embeddings at the root, too, as clients of endpoints send them.
        return [*made, replace(made[0], path="/"), *named, replace(named[0], path="/tei/{name}")]

    async def embed(self, body: EmbedRequest, name: str | None = None) -> list[list[float]]:
        """Return an embedding of each text."""
        pipeline = await self._find(name, EMBEDDING)
        texts = await self._texts(pipeline, body.inputs, "inputs")
        config = await pipeline.require(EMBEDDING)
        vectors = await pipeline.client.embed(
            texts,
            dimensions=body.dimensions,
            normalize_embeddings=True if body.normalize else None,
            encoding="float" if "encoding" in config.options else None,
            prompt=body.prompt_name,
        )
        self._items.labels(pipeline.name).inc(len(texts))
        await pipeline.spend_tokens({"text": texts})
        plain: list[list[float]] = vectors.tolist()
        return plain

    async def predict(self, body: PredictRequest, name: str | None = None) -> list[Any]:
        """Return all labels of each text, best first."""
        given = body.inputs
        is_batch = not isinstance(given, str) and bool(given) and not isinstance(given[0], str)
        rows: list[Any] = given if is_batch else [[given] if isinstance(given, str) else given]  # type: ignore[assignment]
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
        step = await pipeline.step()
        rule = {} if step is None else step.settings["request_parameters"].get("top_k", {})
        choices = await pipeline.client.classify(
            [row[0] for row in rows],
            text_pairs=[row[1] for row in rows] if sizes == {2} else None,
            top_k=rule.get("max"),
        )
        self._items.labels(pipeline.name).inc(len(rows))
        columns = zip(("text", "text_pair"), zip(*rows, strict=True), strict=False)
        await pipeline.spend_tokens({each: list(column) for each, column in columns})
        labels = [[{"label": c.label, "score": c.score} for c in each] for each in choices]
        return labels if is_batch else labels[0]

    async def rerank(self, body: TeiRerankRequest, name: str | None = None) -> list[dict[str, Any]]:
        """Return texts, best first."""
        self._limits.check_items("texts", len(body.texts))
        pipeline = await self._find(name, RERANKING)
        ranked, _ = await rank(pipeline, body.query, body.texts, None)
        self._items.labels(pipeline.name).inc(len(body.texts))
        results: list[dict[str, Any]] = [
            {"index": each.index, "score": each.score} for each in ranked
        ]
        if body.return_text:
            for result in results:
                result["text"] = body.texts[result["index"]]
        return results

    async def tokenize(
        self, body: TokenizeRequest, name: str | None = None
    ) -> list[list[dict[str, Any]]]:
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
                    repr(body.prompt_name),
                    f"Choose one of: {', '.join(prompts) or 'none'}",
                )
            texts = [prompts[body.prompt_name] + text for text in texts]
        encoded = await asyncio.to_thread(
            step.tokenize, texts, add_special_tokens=body.add_special_tokens
        )
        if encoded is None:
            raise invalid("path", "needs a pipeline of texts", pipeline.name, "Name another")
        return encoded

    async def info(self, name: str | None = None) -> dict[str, Any]:
        """Return properties of the pipeline."""
        pipeline = await self._find(name)
        config = await pipeline.config()
        step = await pipeline.step()
        settings = {} if step is None else step.settings
        kinds = {EMBEDDING: "embedding", RERANKING: "reranker", CLASSIFICATION: "classifier"}
        kind = next((task for task, fits in FITS.items() if fits(config.outputs.keys())), "")
        details: dict[str, Any] = {}
        if kind == CLASSIFICATION:
            details["id2label"] = dict(enumerate(await pipeline.labels()))
        return {
            "model_id": pipeline.name,
            "model_type": {kinds.get(kind, "other"): details},
            "max_input_length": settings.get("max_length"),
            "max_client_batch_size": self._limits.items,
            "max_batch_requests": config.max_batch_size,
            "auto_truncate": settings["overflow"] == "truncate" if "overflow" in settings else None,
            "version": version("triptych"),
        }

    async def _find(self, name: str | None, task: str | None = None) -> Pipeline:
        if name is None and task is not None:
            return await self._pipelines.only(task)
        return self._pipelines.find(name)
