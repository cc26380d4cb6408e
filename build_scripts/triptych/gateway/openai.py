"""OpenAI's API: embeddings and models."""

from __future__ import annotations

import asyncio
import base64
import re
import time
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Discriminator, Field, Tag
from typing_extensions import TypeIs

from triptych.client import InferenceError
from triptych.gateway.errors import from_inference, invalid
from triptych.gateway.http import WHOLE, Body, Operation, Shared
from triptych.gateway.pipelines import (
    EMBEDDING,
    MULTI_VECTOR,
    Endpoints,
    Pipeline,
    Pipelines,
    Texts,
    float_encoding,
    not_found,
)


class ImageUrl(Body):
    """Data URL of an image."""

    url: str


class ImagePart(Body):
    """Image as OpenAI's chats and vLLM have it."""

    type: Literal["image_url"]
    image_url: ImageUrl


class JinaImage(Body):
    """Image as Jina's embeddings have it: a data URL."""

    image: str


Images = Annotated[list[ImagePart | JinaImage], Field(min_length=1, fail_fast=True)]


def _kind(given: object) -> str:
    """Return the tag of the member of `Inputs` whose errors a value is to have."""
    first = given[0] if isinstance(given, list) and given else None
    is_image = isinstance(first, ImagePart | JinaImage)
    if isinstance(first, dict):
        is_image = not first.keys().isdisjoint(("image", "image_url"))
    return "Images" if is_image else "Texts"


Inputs = Annotated[
    Annotated[Texts, Tag("Texts")] | Annotated[Images, Tag("Images")], Discriminator(_kind)
]
_DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,")


def decode_images(parts: Images) -> list[bytes]:
    """Return the bytes of the files in a request's data URLs.

    Raises:
        ApiError: One is another URL, which is never fetched, or is not base64.
    """
    files = []
    for index, part in enumerate(parts):
        url = part.image if isinstance(part, JinaImage) else part.image_url.url
        start = _DATA_URL.match(url)
        try:
            if start is None:
                raise ValueError("another URL")
            files.append(base64.b64decode(url[start.end() :], validate=True))
        except ValueError:
            rule = "must be a data URL with base64 (data:image/png;base64,…); nothing is fetched"
            raise invalid(f"input[{index}]", rule, url[:40], "Send the file itself") from None
    return files


class EmbeddingRequest(Body):
    """Request for embeddings.

    Attributes:
        model: Name of a pipeline, or an alias.
        input: A text, or a list of texts of any length up to the limit of the gateway. In place of
            a text, its token ids as /tokenize returns them. For a pipeline of images, a list of
            images as data URLs, in the form of vLLM (`image_url`) or of Jina (`image`).
        dimensions: Number of leading numbers of each vector that are returned.
        encoding_format: ``base64`` is the little-endian float32 numbers of a vector.
        user: Ignored.
        input_type: Kind of the texts, such as query or passage; chooses the prompt of this name.
        prompt: Name of a prompt of the pipeline, or its text if the pipeline takes any.
        truncate_prompt_tokens: Only -1, the maximum of the model, which the pipeline applies; as
            clients of vLLM send it.
    """

    model: str
    input: Inputs
    dimensions: Annotated[int, Field(ge=1), WHOLE] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    user: str | None = None
    input_type: str | None = None
    prompt: str | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=-1), WHOLE] | None = None


class TokenUsage(BaseModel):
    """Number of tokens as the model counts them."""

    prompt_tokens: int
    total_tokens: int


class Embedding(BaseModel):
    """Vector of the text at `index`."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingResponse(BaseModel):
    """Vectors in the order of the texts; no usage without the repository of the pipeline."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: TokenUsage | None = None


class PoolingRequest(Body):
    """Request for a vector of each token, as vLLM has it.

    Attributes:
        model: Name of a pipeline, or an alias.
        input: A text, or a list of texts, or their token ids, as for embeddings.
        task: The only one here.
        encoding_format: Numbers as JSON; base64 is not supported.
        input_type: Role of the texts.
        user: Ignored.
        truncate_prompt_tokens: Only -1, the maximum of the model, which the pipeline applies.
    """

    model: str
    input: Texts
    task: Literal["token_embed"] | None = None
    encoding_format: Literal["float"] | None = None
    input_type: Literal["query", "document"] | None = None
    user: str | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=-1), WHOLE] | None = None


class Pooled(BaseModel):
    """Vectors of the tokens of the text at `index`."""

    object: Literal["pooling"] = "pooling"
    index: int
    data: list[list[float]]


class PoolingResponse(BaseModel):
    """Vectors of tokens in the order of the texts; see `EmbeddingResponse`."""

    object: Literal["list"] = "list"
    data: list[Pooled]
    model: str
    usage: TokenUsage | None = None


class ModelEntry(BaseModel):
    """A pipeline, or an alias, whose `root` is the pipeline."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "triptych"
    root: str


class ModelList(BaseModel):
    """All pipelines and aliases."""

    object: Literal["list"] = "list"
    data: list[ModelEntry]


def is_images(given: Texts | Images) -> TypeIs[Images]:
    """Whether the input of a request is images."""
    return isinstance(given, list) and isinstance(given[0], ImagePart | JinaImage)


def encode_vectors(vectors: NDArray[np.generic], encoding: str | None) -> list[object]:
    """Return vectors [n, dimensions] as lists of numbers or base64 of little-endian float32."""
    if encoding != "base64":
        plain: list[object] = vectors.tolist()
        return plain
    rows = np.ascontiguousarray(vectors, "<f4")
    return [base64.b64encode(row.data).decode() for row in rows]


def _listed(
    model: str, kind: str, field: str, values: Sequence[object], tokens: int | None
) -> dict[str, object]:
    """Return a response with an object of a kind for each value, which is in its `field`."""
    data = [{"object": kind, "index": index, field: value} for index, value in enumerate(values)]
    response: dict[str, object] = {"object": "list", "data": data, "model": model}
    if tokens is not None:
        response["usage"] = {"prompt_tokens": tokens, "total_tokens": tokens}
    return response


async def token_vectors(
    pipeline: Pipeline, texts: list[str], role: Literal["query", "document"] | None
) -> list[list[list[float]]]:
    """Return a vector of each token of each text."""
    config = await pipeline.config()
    found = await pipeline.client.embed_multi_vector(
        texts, role=role, encoding=float_encoding(config)
    )
    return [each.tolist() for each in found]


class OpenAi(Endpoints):
    """Endpoints of OpenAI's API."""

    tag = "OpenAI"

    def __init__(self, pipelines: Pipelines, shared: Shared) -> None:
        super().__init__(pipelines, shared)
        self._created = int(time.time())

    @Operation(
        "/v1/embeddings",
        EmbeddingResponse,
        rows="input",
        example={"model": "minilm", "input": ["my delivery is late", "where is my parcel?"]},
    )
    async def embeddings(self, body: EmbeddingRequest) -> dict[str, object]:
        """Return an embedding of each text or image."""
        pipeline = self._pipelines.find(body.model)
        if is_images(body.input):
            return await self._embed_images(pipeline, body, body.input)
        texts = await self._texts(pipeline, body.input, "input")
        config = await pipeline.require(EMBEDDING)
        prompt = await pipeline.prompt(body.input_type, body.prompt)
        parameters = {} if prompt is None else {"prompt": prompt}
        try:
            vectors, tokens = await asyncio.gather(
                pipeline.client.embed(
                    texts,
                    dimensions=body.dimensions,
                    encoding=float_encoding(config),
                    prompt=prompt,
                ),
                pipeline.count_tokens({"text": texts}, parameters),
            )
        except InferenceError as error:
            if isinstance(body.input, str):
                raise from_inference(error, lambda _: "input") from error
            raise
        self._items.labels(pipeline.name).inc(len(texts))
        encoded = encode_vectors(vectors, body.encoding_format)
        return _listed(body.model, "embedding", "embedding", encoded, tokens)

    async def _embed_images(
        self, pipeline: Pipeline, body: EmbeddingRequest, parts: Images
    ) -> dict[str, object]:
        """Return an embedding of each image."""
        self._limits.check_items("input", len(parts))
        config = await pipeline.require(EMBEDDING)
        vectors = await pipeline.client.embed_images(
            decode_images(parts), dimensions=body.dimensions, encoding=float_encoding(config)
        )
        self._items.labels(pipeline.name).inc(len(parts))
        encoded = encode_vectors(vectors, body.encoding_format)
        return _listed(body.model, "embedding", "embedding", encoded, None)

    @Operation(
        "/pooling",
        PoolingResponse,
        rows="input",
        example={"model": "tokens", "input": ["my delivery is late"], "task": "token_embed"},
    )
    async def pooling(self, body: PoolingRequest) -> dict[str, object]:
        """Return a vector of each token of each text, as vLLM's task token_embed."""
        pipeline = self._pipelines.find(body.model)
        texts = await self._texts(pipeline, body.input, "input")
        await pipeline.require(MULTI_VECTOR)
        role = {} if body.input_type is None else {"role": body.input_type}
        vectors, tokens = await asyncio.gather(
            token_vectors(pipeline, texts, body.input_type),
            pipeline.count_tokens({"text": texts}, role),
        )
        self._items.labels(pipeline.name).inc(len(texts))
        return _listed(body.model, "pooling", "data", vectors, tokens)

    @Operation("/v1/models", ModelList)
    async def models(self) -> dict[str, object]:
        """List all pipelines and aliases."""
        names = self._pipelines.names_and_aliases()
        return {"object": "list", "data": [self._model(name) for name in names]}

    @Operation("/v1/models/{model}", ModelEntry)
    async def model(self, model: str) -> dict[str, object]:
        """Return a pipeline by its name or alias."""
        names = self._pipelines.names_and_aliases()
        if model not in names:
            raise not_found(model, names)
        return self._model(model)

    def _model(self, name: str) -> dict[str, object]:
        root = self._pipelines.aliases.get(name, name)
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "triptych",
            "root": root,
        }
