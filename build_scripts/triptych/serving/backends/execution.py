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
    requests: Sequence[object],
    run: Callable[[feeds.Arrays], feeds.Arrays],
    decode: Callable[[str, feeds.Array], feeds.Array] | None = None,
    message: Callable[[Exception], str] = str,
) -> list[object]:
    """Return the responses of the requests, in order, after one run of all their rows.

    An invalid request gets its own error. If the run fails, all other requests get the same error.

    Args:
        contract: Contract of the model.
        requests: Requests of the batch.
        run: Runs the model on a feed and returns its outputs.
        decode: Converts the value of an input of strings; it raises a `ValueError` for wrong ones.
        message: Returns the error text of an exception.
    """
    inputs, responses = {}, {}
    for index, request in enumerate(requests):
        try:
            inputs[index] = _read(contract, request, decode)
        except ValueError as error:
            responses[index] = _failure(str(error), pb_utils.TritonError.INVALID_ARG)
    if inputs:
        valid = [*inputs.values()]
        try:
            values = run(feeds.build_feed(contract, valid))
            shares = feeds.split_outputs(contract, values, valid)
        except Exception as error:  # any failure of a batch must leave the instance running
            text = message(error)
            for index in inputs:
                responses[index] = _failure(text, pb_utils.TritonError.INTERNAL)
        else:
            for index, share in zip(inputs, shares, strict=True):
                responses[index] = _response(requests[index], share)
    return [responses[index] for index in range(len(requests))]


def _read(
    contract: Contract,
    request: Any,
    decode: Callable[[str, feeds.Array], feeds.Array] | None,
) -> feeds.Arrays:
    inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
    for spec in contract.inputs:
        value = inputs.get(spec.name)
        if value is None:
            continue
        # See `runtime.overflow`; the native backends answer such a request with INTERNAL.
        if value.ndim != len(spec.dims) + (contract.max_batch_size > 0):
            raise ValueError(f"the shape of input '{spec.name}' is too large")
        if decode is not None and spec.data_type == "TYPE_STRING":
            inputs[spec.name] = decode(spec.name, value)
    return inputs


def _failure(text: str, code: Any) -> Any:
    return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(text, code))


def _response(request: Any, share: feeds.Arrays | feeds.SplitError) -> Any:
    if isinstance(share, feeds.SplitError):
        request_id = request.request_id() or "<id_unknown>"
        text = f"[request id: {request_id}] {share}"
        return _failure(text, pb_utils.TritonError.UNSUPPORTED)
    # Triton itself leaves out outputs that the request does not ask for.
    return pb_utils.InferenceResponse(
        [pb_utils.Tensor(name, _encoded(value)) for name, value in share.items()]
    )


def _encoded(value: feeds.Array) -> feeds.Array:
    if value.dtype != np.object_:
        return np.ascontiguousarray(value)
    texts = [item.encode("utf-8") for item in value.reshape(-1)]
    return np.array(texts, dtype=np.object_).reshape(value.shape)
