"""Run a dynamic batch once, and make the responses of all its requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from triptych.serving.backends import feeds
from triptych.serving.backends.contract import Contract


def run_batch(
    contract: Contract,
    requests: Sequence[Any],
    inputs: Sequence[feeds.Arrays],
    run: Callable[[feeds.Arrays], feeds.Arrays],
    message: Callable[[Exception], str] = str,
) -> list[Any]:
    """Return the responses of the requests, in order, after one run of all their rows.

    If the run fails, all requests get the same error.

    Args:
        contract: Contract of the model.
        requests: Requests of the batch.
        inputs: Inputs of each request.
        run: Runs the model on a feed and returns its outputs.
        message: Returns the error text of an exception.
    """
    try:
        values = run(feeds.build_feed(contract, inputs))
        shares = feeds.split_outputs(contract, values, inputs)
    except Exception as error:  # any failure of a batch must leave the instance running
        text = message(error)
        return [failure(text, pb_utils.TritonError.INTERNAL) for _ in requests]
    return [_response(*pair) for pair in zip(requests, shares, strict=True)]


def failure(text: str, code: Any) -> Any:
    """Return a response with an error; `code` is a constant of `pb_utils.TritonError`."""
    return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(text, code))


def _response(request: Any, share: feeds.Arrays | feeds.SplitError) -> Any:
    if isinstance(share, feeds.SplitError):
        request_id = request.request_id() or "<id_unknown>"
        text = f"[request id: {request_id}] {share}"
        return failure(text, pb_utils.TritonError.UNSUPPORTED)
    # Triton itself leaves out outputs that the request does not ask for.
    return pb_utils.InferenceResponse(
        [pb_utils.Tensor(name, _encoded(value)) for name, value in share.items()]
    )


def _encoded(value: feeds.Array) -> feeds.Array:
    if value.dtype != np.object_:
        return np.ascontiguousarray(value)
    texts = [item.encode("utf-8") for item in value.reshape(-1)]
    return np.array(texts, dtype=np.object_).reshape(value.shape)
