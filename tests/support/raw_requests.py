"""Requests to a single model of a server, alone or at the same time."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tritonclient.grpc import InferenceServerClient, InferInput, InferRequestedOutput
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

Arrays = dict[str, Any]


def ask(
    client: InferenceServerClient,
    model: str,
    inputs: Arrays,
    *,
    outputs: Sequence[str] = (),
    version: str = "",
    request_id: str = "",
) -> Arrays:
    """Return the outputs of one request by name; all of them unless `outputs` names some."""
    tensors = []
    for name, value in inputs.items():
        dtype = np_to_triton_dtype(value.dtype)
        tensors.append(InferInput(name, value.shape, dtype).set_data_from_numpy(value))
    result = client.infer(
        model,
        tensors,
        model_version=version,
        request_id=request_id,
        outputs=[InferRequestedOutput(name) for name in outputs] or None,
        client_timeout=60,
    )
    return {out.name: result.as_numpy(out.name) for out in result.get_response().outputs}


def ask_together(
    client: InferenceServerClient, model: str, requests: Sequence[Arrays]
) -> list[Arrays | InferenceServerException]:
    """Answers to requests that are sent at the same time, in their order."""
    gate = threading.Barrier(len(requests))

    def send(inputs: Arrays) -> Arrays | InferenceServerException:
        gate.wait()
        try:
            return ask(client, model, inputs)
        except InferenceServerException as error:
            return error

    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(send, requests))
