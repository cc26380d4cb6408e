"""What each task's typed call sends, and what it makes of the outputs; both clients use these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.serving.client.errors import InvalidRequest
from triptych.serving.client.wire import Parameter

RowOutputs = dict[str, NDArray[Any]]
Vectors = NDArray[np.float32]


def texts_to_embed(texts: Sequence[str | bytes]) -> Sequence[str | bytes]:
    """`texts`, or one text where there are none.

    The width of a vector varies with the request's parameters, so no config tells it; an answer
    does.
    """
    return texts if len(texts) or isinstance(texts, str | bytes) else ["a"]


def embed_parameters(dimensions: int | None, prompt_name: str | None) -> dict[str, Parameter]:
    """The request parameters of text-embedding; what is None is not sent."""
    parameters: dict[str, Parameter] = {}
    if dimensions is not None:
        parameters["dimensions"] = dimensions
    if prompt_name is not None:
        parameters["prompt_name"] = prompt_name
    return parameters


def read_vectors(outputs: Mapping[str, NDArray[Any]]) -> Vectors:
    """The vectors of text-embedding, [rows, dimensions]."""
    return _output(outputs, "embedding")


def read_each_vector(rows: Sequence[RowOutputs | InvalidRequest]) -> list[Vectors | InvalidRequest]:
    """For each row its vector, [dimensions], or why it was refused."""
    return [row if isinstance(row, InvalidRequest) else _output(row, "embedding") for row in rows]


def _output(outputs: Mapping[str, NDArray[Any]], name: str) -> NDArray[Any]:
    if name not in outputs:
        raise InvalidRequest(
            f"The pipeline must have the output `{name}` for this call. "
            f"Given: {', '.join(sorted(outputs))}. Make the call that fits its task."
        )
    return outputs[name]
