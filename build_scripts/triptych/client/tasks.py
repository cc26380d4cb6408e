"""Typed calls for each task.

Each function becomes a method of both clients with the same name, arguments and docstring. Texts
are str, or bytes of UTF-8; a parameter that is None takes the pipeline's default; `timeout_s` is as
in `infer`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from numpy.typing import NDArray

from triptych.client.answers import (
    Answer,
    Choice,
    Entity,
    HybridEmbedding,
    Ranked,
    SparseVector,
    TokenChoice,
    Vectors,
)
from triptych.client.errors import InvalidRequestError, RowError
from triptych.client.images import Images, encode_images
from triptych.client.wire import Parameter, PipelineConfig, Rows, check_rows

RowOutputs = dict[str, NDArray[Any]]
Outputs = Mapping[str, NDArray[Any]]
Whole = TypeVar("Whole")
Row = TypeVar("Row")
Named = TypeVar("Named")


Texts = Sequence["str | bytes"]
Encoding = Literal["float", "int8", "uint8", "binary", "ubinary"]
TokenEncoding = Literal[Encoding, "float16"]
Role = Literal["query", "document"]
HybridOutput = Literal["dense", "sparse", "vectors"]
Aggregation = Literal["none", "simple", "first", "max", "average"]


@dataclass(frozen=True)
class TaskCall(Generic[Whole, Row]):
    """Request and result of a typed call.

    Attributes:
        outputs: Outputs that the call reads.
        read: Returns the result of the call from all outputs, [rows, …] each.
        read_row: Returns the result of one row from its index and outputs.
        is_placeholder: Whether the only row of `inputs` is a placeholder for no rows.
        has_one_output: Whether a response has only one of the outputs.
        requested: Outputs that a response has; all if none is given.
    """

    inputs: Rows
    parameters: Mapping[str, Parameter]
    outputs: tuple[str, ...]
    read: Callable[[Outputs], Whole]
    read_row: Callable[[int, RowOutputs], Row]
    timeout_s: float | None
    is_placeholder: bool = False
    has_one_output: bool = False
    requested: tuple[str, ...] = ()

    def requested_of(self, config: PipelineConfig | None) -> tuple[str, ...]:
        """Return the outputs to ask a pipeline with this interface for; none for all.

        If a pipeline may answer with one of several outputs, its parameters decide, so all are
        asked for.
        """
        known = () if config is None else config.outputs
        usable = tuple(name for name in self.outputs if name in known)
        return usable if self.has_one_output and len(usable) == 1 else self.requested

    def whole(self, outputs: Outputs) -> Whole:
        """Return the result of the call.

        Raises:
            InvalidRequestError: The pipeline lacks an output, because it has another task.
        """
        self._raise_if_lacking(outputs)
        return self.read(outputs)

    def each(self, rows: Sequence[RowOutputs | RowError]) -> list[Row | RowError]:
        """Return for each row its result, or the error why it was rejected; raises as `whole`."""
        results: list[Row | RowError] = []
        for index, row in enumerate(rows):
            if isinstance(row, RowError):
                results.append(row)
            else:
                self._raise_if_lacking(row)
                results.append(self.read_row(index, row))
        return results

    def mismatch(self, config: PipelineConfig) -> InvalidRequestError | None:
        """Return why a pipeline with this interface cannot answer the call; None if it can."""
        try:
            self._raise_if_lacking(config.outputs)
        except InvalidRequestError as error:
            return error
        if set(self.inputs) == set(config.inputs):
            return None
        return InvalidRequestError(
            f"The pipeline must have the input {_quoted(self.inputs)} for this call. "
            f"Given: {', '.join(config.inputs)} (outputs: {', '.join(sorted(config.outputs))}). "
            "Make the call that fits its task."
        )

    def _raise_if_lacking(self, outputs: Mapping[str, object]) -> None:
        lacking = [name for name in self.outputs if name not in outputs]
        if len(lacking) >= (len(self.outputs) if self.has_one_output else 1):
            raise InvalidRequestError(
                f"The pipeline must have the output `{lacking[0]}` for this call. "
                f"Given: {', '.join(sorted(outputs))}. Make the call that fits its task."
            )


def embed(
    texts: Texts,
    *,
    dimensions: int | None = None,
    normalize_embeddings: bool | None = None,
    encoding: Encoding | None = None,
    prompt: str | None = None,
    role: Role | None = None,
    timeout_s: float | None = None,
) -> TaskCall[Vectors, Vectors]:
    """Return an embedding of each text.

    `dimensions` keeps that many leading numbers of a vector and normalizes it again, unless
    `normalize_embeddings` is False; if that is True, all vectors are normalized. `encoding` is
    float, int8, uint8, or binary or ubinary (one bit per number, eight per byte). `prompt` names
    the prompt put before each text, or is its text in a pipeline with `prompts: any`; in its place,
    `role` takes the model's prompt of queries or of documents.

    Returns:
        float32 [texts, dimensions] in the order of `texts`, with the right width for no texts; int8
        or uint8 [texts, bytes] with another encoding.
    """
    check_rows("text", texts)
    parameters = _given(
        dimensions=dimensions,
        normalize_embeddings=normalize_embeddings,
        encoding=encoding,
        prompt=prompt,
        role=role,
    )
    return _vectors("text", texts, "a", parameters, encoding, timeout_s)


def embed_images(
    images: Images,
    *,
    dimensions: int | None = None,
    normalize_embeddings: bool | None = None,
    encoding: Encoding | None = None,
    timeout_s: float | None = None,
) -> TaskCall[Vectors, Vectors]:
    """Return an embedding of each image: bytes of a file, a path, an image of Pillow or an array.

    `dimensions`, `normalize_embeddings` and `encoding` are as in `embed`.

    Returns:
        float32 [images, dimensions] in the order of `images`; int8 or uint8 [images, bytes] with
        another encoding.
    """
    parameters = _given(
        dimensions=dimensions, normalize_embeddings=normalize_embeddings, encoding=encoding
    )
    return _vectors("image", encode_images(images), _PIXEL, parameters, encoding, timeout_s)


_PIXEL = (
    b"GIF89a\1\0\1\0\x80\0\0\0\0\0\xff\xff\xff,\0\0\0\0\1\0\1\0\0\2\2D\1\0;"  # image of one pixel
)


def _vectors(
    field: str,
    rows: Sequence[str | bytes],
    placeholder: str | bytes,
    parameters: dict[str, Parameter],
    encoding: Encoding | None,
    timeout_s: float | None,
) -> TaskCall[Vectors, Vectors]:
    """Return a call for a vector of each row; no rows send the placeholder."""
    # The width of a vector varies with the request's parameters, so only a response has it.
    none = not len(rows)
    outputs: tuple[str, ...] = ("embedding", "embedding_int8", "embedding_uint8")
    if encoding is not None:  # else the pipeline's own parameters decide
        of_encoding = {"float": 0, "uint8": 2, "ubinary": 2}.get(encoding, 1)
        outputs = outputs[of_encoding : of_encoding + 1]

    def read(found: Outputs) -> Vectors:
        # A pipeline of a former version has both outputs, one of them empty.
        vectors = max(
            (found[name] for name in outputs if name in found), key=lambda each: each.shape[-1]
        )
        return vectors[:0] if none else vectors

    def read_row(_: int, found: RowOutputs) -> Vectors:
        return read(found)

    return TaskCall(
        {field: [placeholder] if none else rows},
        parameters,
        outputs,
        read,
        read_row,
        timeout_s,
        is_placeholder=none,
        has_one_output=encoding is None,
    )


def embed_multi_vector(
    texts: Texts,
    *,
    role: Role | None = None,
    encoding: TokenEncoding | None = None,
    timeout_s: float | None = None,
) -> TaskCall[list[Vectors], Vectors]:
    """Return a vector of each token of each text, as `MultiVectorEncoder` computes them.

    `role` is query or document, which is the default: prompts, lengths and the tokens that have a
    vector differ. `encoding` is as in `embed`, or float16. `maxsim` scores the vectors.

    Returns:
        For each text its vectors, ``[tokens, dimensions]``, float32 unless `encoding` says another
        type; of bits, ``[tokens, dimensions / 8]``.
    """
    return TaskCall(
        {"text": texts},
        _given(role=role, encoding=encoding),
        (COUNT,),
        _by_row(_token_vectors_of),
        _token_vectors_of,
        timeout_s,
    )


TERMS = ("token_id", "weight")
"""Outputs of sparse embeddings; a row with fewer terms than another one ends with weights of 0."""
COUNT = "token_count"
"""Output of a pipeline with a vector for each token; a row has that many."""
TOKEN_VECTORS = (
    "token_embedding", "embedding", "embedding_float16", "embedding_int8", "embedding_uint8",
)  # fmt: skip
"""Outputs of a pipeline with a vector for each token, of which the first one of a response counts:
a pipeline with several kinds of vectors has an `embedding` of the text, too."""


def embed_sparse(
    texts: Texts,
    *,
    max_active_dims: int | None = None,
    threshold: float | None = None,
    prompt: str | None = None,
    role: Role | None = None,
    timeout_s: float | None = None,
) -> TaskCall[list[SparseVector], SparseVector]:
    """Return the terms of each text with their weights, as `SparseEncoder` computes them.

    A text has at most `max_active_dims` terms, each with a weight above `threshold`. `prompt`
    and `role` are as in `embed`.

    Returns:
        For each text its terms, in the order of `texts`.
    """
    return TaskCall(
        {"text": texts},
        _given(max_active_dims=max_active_dims, threshold=threshold, prompt=prompt, role=role),
        TERMS,
        _by_row(_terms_of),
        _terms_of,
        timeout_s,
        requested=TERMS,
    )


def embed_hybrid(
    texts: Texts,
    *,
    outputs: Sequence[HybridOutput] = ("dense", "sparse", "vectors"),
    max_active_dims: int | None = None,
    threshold: float | None = None,
    prompt: str | None = None,
    role: Role | None = None,
    timeout_s: float | None = None,
) -> TaskCall[list[HybridEmbedding], HybridEmbedding]:
    """Return the vector, the terms and the vectors of the tokens of each text, as BGE-M3 has them.

    The server sends only the `outputs` that are named; the model computes all in one pass.
    `max_active_dims`, `threshold`, `prompt` and `role` are as in `embed_sparse`.

    Returns:
        For each text its embeddings, in the order of `texts`; None for those not named.
    """
    unknown = [name for name in outputs if name not in _HYBRID]
    if unknown or not outputs:
        raise InvalidRequestError(
            f"`outputs` must name some of {', '.join(_HYBRID)}. Given: {list(outputs)}. "
            "Correct them."
        )
    read = {name: of_row for name, (_, of_row) in _HYBRID.items() if name in outputs}

    def read_row(index: int, found: RowOutputs) -> HybridEmbedding:
        return HybridEmbedding(**{name: of_row(index, found) for name, of_row in read.items()})

    requested = tuple(tensor for name in read for tensor in _HYBRID[name][0])
    return TaskCall(
        {"text": texts},
        _given(max_active_dims=max_active_dims, threshold=threshold, prompt=prompt, role=role),
        requested,
        _by_row(read_row),
        read_row,
        timeout_s,
        requested=requested,
    )


def _terms_of(_: int, outputs: RowOutputs) -> SparseVector:
    terms = outputs["weight"] != 0  # rows with fewer terms than others end with 0
    return SparseVector(outputs["token_id"][terms], outputs["weight"][terms])


def _token_vectors_of(_: int, outputs: RowOutputs) -> Vectors:
    name = next(name for name in TOKEN_VECTORS if name in outputs)
    return outputs[name][: outputs[COUNT].item()]


_HYBRID: Mapping[str, tuple[tuple[str, ...], Callable[[int, RowOutputs], Any]]] = {
    "dense": (("embedding",), lambda _, outputs: outputs["embedding"]),
    "sparse": (TERMS, _terms_of),
    "vectors": (("token_embedding", COUNT), _token_vectors_of),
}
"""Outputs of a pipeline that each embedding is read from, with the function that reads a row."""


def classify(
    texts: Texts,
    *,
    text_pairs: Texts | None = None,
    top_k: int | None = None,
    threshold: float | None = None,
    timeout_s: float | None = None,
) -> TaskCall[list[list[Choice]], list[Choice]]:
    """Choose the best `top_k` labels of each text, or of each pair of a text and a second text.

    Of a multi-label model, the labels with a score above `threshold` are chosen, at most `top_k`.

    Pipelines with ``pairs: true`` require `text_pairs`, one for each text; others have none.

    Returns:
        For each text its labels, best first.
    """
    inputs = {"text": texts} if text_pairs is None else {"text": texts, "text_pair": text_pairs}
    parameters = _given(top_k=top_k, threshold=threshold)
    return _ranked(inputs, parameters, timeout_s, "label", Choice)


def classify_images(
    images: Images,
    *,
    top_k: int | None = None,
    threshold: float | None = None,
    timeout_s: float | None = None,
) -> TaskCall[list[list[Choice]], list[Choice]]:
    """Choose the best `top_k` labels of each image.

    An image is the bytes of its file (JPEG, PNG and others), a path, an image of Pillow or an
    array.

    Of a multi-label model, the labels with a score above `threshold` are chosen, at most `top_k`.

    Returns:
        For each image its labels, best first.
    """
    inputs, parameters = {"image": encode_images(images)}, _given(top_k=top_k, threshold=threshold)
    return _ranked(inputs, parameters, timeout_s, "label", Choice)


def classify_zero_shot(
    texts: Texts,
    candidate_labels: Sequence[str] | None = None,
    *,
    multi_label: bool | None = None,
    hypothesis_template: str | None = None,
    timeout_s: float | None = None,
    labels: Sequence[str] | None = None,
) -> TaskCall[list[list[Choice]], list[Choice]]:
    """Return scores of `candidate_labels` for each text, without training on them.

    With `multi_label` each label is scored independently, else the scores of a text sum to 1;
    `hypothesis_template` is the sentence that the model judges, with ``{}`` for the label. `labels`
    is another name of `candidate_labels`.

    Returns:
        For each text all labels, best first.
    """
    named = labels if candidate_labels is None else candidate_labels
    parameters = _given(
        candidate_labels=None if named is None else _json_list("candidate_labels", named),
        multi_label=multi_label,
        hypothesis_template=hypothesis_template,
    )
    return _ranked({"text": texts}, parameters, timeout_s, "label", Choice)


def fill_mask(
    texts: Texts, *, top_k: int | None = None, timeout_s: float | None = None
) -> TaskCall[list[list[TokenChoice]], list[TokenChoice]]:
    """Find the best `top_k` tokens for the model's mask token, which each text must have.

    Returns:
        For each text the tokens with their scores, best first.
    """
    return _ranked({"text": texts}, _given(top_k=top_k), timeout_s, "token", TokenChoice)


def entities(
    texts: Texts,
    *,
    aggregation_strategy: Aggregation | None = None,
    timeout_s: float | None = None,
    aggregation: Aggregation | None = None,
) -> TaskCall[list[list[Entity]], list[Entity]]:
    """Find named entities in each text.

    `aggregation_strategy` (or `aggregation`) determines how tokens form entities.

    Returns:
        For each text its entities in order, with character offsets.
    """

    def read_row(_: int, outputs: RowOutputs) -> list[Entity]:
        return [
            Entity(
                *(found["entity"], found["text"]),
                math.nan if found["score"] is None else found["score"],
                *(found["start"], found["end"]),
            )
            for found in json.loads(outputs["entities"][0])
        ]

    parameters = _given(aggregation_strategy=aggregation_strategy or aggregation)
    inputs = {"text": texts}
    return TaskCall(inputs, parameters, ("entities",), _by_row(read_row), read_row, timeout_s)


def answer(
    questions: Texts,
    contexts: Texts,
    *,
    max_answer_len: int | None = None,
    handle_impossible_answer: bool | None = None,
    timeout_s: float | None = None,
    max_answer_tokens: int | None = None,
    impossible_answer: bool | None = None,
) -> TaskCall[list[Answer], Answer]:
    """Answer each question with a span of its context, of at most `max_answer_len` tokens.

    With `handle_impossible_answer` the model may return an empty answer for none.
    `max_answer_tokens` and `impossible_answer` are other names of these arguments.

    Returns:
        For each question its answer, with character offsets in the context.
    """

    def read_row(_: int, outputs: RowOutputs) -> Answer:
        span, score = outputs["answer"][0], outputs["score"].item()
        return Answer(span, score, outputs["start"].item(), outputs["end"].item())

    return TaskCall(
        {"text": questions, "text_pair": contexts},
        _given(
            max_answer_len=max_answer_tokens if max_answer_len is None else max_answer_len,
            handle_impossible_answer=impossible_answer
            if handle_impossible_answer is None
            else handle_impossible_answer,
        ),
        ("answer", "score", "start", "end"),
        _by_row(read_row),
        read_row,
        timeout_s,
    )


def rerank(
    query: str | bytes,
    passages: Texts,
    *,
    prompt: str | None = None,
    timeout_s: float | None = None,
) -> TaskCall[list[Ranked], Ranked]:
    """Sort passages by how well they answer a query.

    `prompt` names the prompt of the model or pipeline, such as an instruction, or is its text in a
    pipeline with `prompts: any`.

    Returns:
        All passages, best first; `rerank_each` keeps their order.
    """

    def read_row(index: int, outputs: RowOutputs) -> Ranked:
        return Ranked(index, outputs["score"].item())

    in_order = _by_row(read_row)

    def read(outputs: Outputs) -> list[Ranked]:
        return sorted(in_order(outputs), key=lambda ranked: -ranked.score)

    check_rows("text_pair", passages)
    inputs = {"text": [query] * len(passages), "text_pair": passages}
    return TaskCall(inputs, _given(prompt=prompt), ("score",), read, read_row, timeout_s)


def _ranked(
    inputs: Rows,
    parameters: dict[str, Parameter],
    timeout_s: float | None,
    names: str,
    make: Callable[[str, float], Named],
) -> TaskCall[list[list[Named]], list[Named]]:
    """Return a call whose output `names` has names with their scores, best first."""

    def read_row(_: int, outputs: RowOutputs) -> list[Named]:
        pairs = zip(outputs[names].tolist(), outputs["score"].tolist(), strict=True)
        # Rows with fewer labels than others end with empty ones.
        return [make(name, score) for name, score in pairs if name or score]

    return TaskCall(inputs, parameters, (names, "score"), _by_row(read_row), read_row, timeout_s)


def _by_row(read_row: Callable[[int, RowOutputs], Row]) -> Callable[[Outputs], list[Row]]:
    def read(outputs: Outputs) -> list[Row]:
        return [
            read_row(index, dict(zip(outputs, row, strict=True)))
            for index, row in enumerate(zip(*outputs.values(), strict=True))
        ]

    return read


def _given(**parameters: Parameter | None) -> dict[str, Parameter]:
    return {name: value for name, value in parameters.items() if value is not None}


def _json_list(name: str, values: Sequence[str]) -> str:
    if isinstance(values, str | bytes) or not all(isinstance(value, str) for value in values):
        raise InvalidRequestError(
            f"The parameter `{name}` must be a list of str. Given: {values!r:.80}. Convert it."
        )
    return json.dumps(list(values), ensure_ascii=False)


def _quoted(names: Sequence[str] | Rows) -> str:
    return ", ".join(f"`{name}`" for name in names)
