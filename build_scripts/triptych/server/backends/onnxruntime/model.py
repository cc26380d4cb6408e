"""The local stand-in for Triton's native ONNX Runtime backend: serves ``backend: "onnxruntime"``.

Triton runs this file in a process of its own for each model instance, with this folder on its path.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import psutil
import triton_python_backend_utils as pb_utils

from triptych.runtime.shared_memory import make_private
from triptych.server.stand_in import contract, feeds

if TYPE_CHECKING:
    from triptych.server.backends.onnxruntime import ort_contract, ort_runner, ort_sessions
else:
    import ort_contract
    import ort_runner
    import ort_sessions


class _Caller(NamedTuple):
    """Whom to answer: a request's place in its dynamic batch, and its response sender."""

    place: int
    sender: Any


class TritonPythonModel:
    """One instance of a model whose config says ``backend: "onnxruntime"``."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        """Fill in inputs, outputs and batching that the config leaves out."""
        config = auto_complete_model_config.as_dict()
        if config.get("output") and not ort_contract.needs_inputs(config):
            return auto_complete_model_config
        # Triton tells this method nothing of the model's folder: it stands on the command line.
        folder = Path(psutil.Process().cmdline()[1]).parent
        path = contract.model_file(folder, config, ort_sessions.MODEL_FILE)
        session = ort_sessions.open_session(path, config, threads=1)
        ort_contract.complete_config(
            config, _graph_tensors(session.get_inputs()), _graph_tensors(session.get_outputs())
        )
        return auto_complete_model_config

    def initialize(self, args: dict[str, str]) -> None:
        """Open the sessions and refuse a config that does not fit the graph.

        A throughput session of one thread serves as many workers as the instance has cores: that
        measured 245-250 texts/s (MiniLM-L6, 2 cores) and steady, against 175-240 for two threads
        on one micro-batch; a convolutional network gained as much. A lone row gets all cores:
        3.5 ms against 5.9 ms.
        """
        make_private()
        config = json.loads(args["model_config"])
        ort_sessions.check_settings(config, kind=args["model_instance_kind"])
        self._contract = contract.parse_contract(config, backend="onnxruntime")
        folder = Path(args["model_repository"], args["model_version"])
        path = contract.model_file(folder, config, ort_sessions.MODEL_FILE)
        budget = ort_sessions.token_budget(config)
        if budget and not self._contract.measured_inputs:
            budget = sys.maxsize  # rows of one fixed shape are only dealt out to the workers
        cores = ort_sessions.instance_cores(config)
        threads = ort_sessions.intra_op_threads(config)
        splits = self._contract.max_batch_size > 0 and budget > 0
        workers = max(1, cores // (threads or 1)) if splits else 1
        if threads or workers == 1:
            alone = beside = ort_sessions.open_session(path, config, threads=threads or cores)
        else:
            alone, beside = ort_sessions.open_sessions(path, config, threads=(cores, 1))
        ort_contract.check_contract(
            self._contract,
            _graph_tensors(alone.get_inputs()),
            _graph_tensors(alone.get_outputs()),
            _graph_tensors(alone.get_overridable_initializers()),
        )
        self._names = [spec.name for spec in self._contract.outputs]
        self._strings = frozenset(
            spec.name for spec in self._contract.inputs if spec.data_type == "TYPE_STRING"
        )
        options = ort_sessions.run_options(config)
        self._runner = ort_runner.Runner(
            self._contract,
            run_alone=partial(alone.run, self._names, run_options=options),
            run_beside=partial(beside.run, self._names, run_options=options),
            workers=workers,
            budget=budget,
            answer=self._send,
        )
        limit = budget if 0 < budget < sys.maxsize else "any number of"
        pb_utils.Logger.log_info(
            f"{args['model_instance_name']}: local ONNX Runtime stand-in on {cores} core(s), "
            f"{workers} worker(s), micro-batches of {limit} elements"
        )

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answer each request once its rows are done; those that end last are returned instead.

        Some may still be running when this returns: they are answered by their response senders.
        """
        responses: list[Any] = [None] * len(requests)
        tickets = []
        for index, request in enumerate(requests):
            try:
                inputs = self._read(request)
            except ValueError as error:
                responses[index] = _failure(error, pb_utils.TritonError.INVALID_ARG)
                continue
            caller = _Caller(index, request.get_response_sender())
            tickets.append(feeds.new_ticket(self._contract, caller, inputs))
        if tickets:
            for outcome in self._runner.run(tickets):
                responses[outcome.ticket.caller.place] = self._response(outcome)
        return responses

    def finalize(self) -> None:
        self._runner.close()

    def _read(self, request: Any) -> feeds.Feed:
        # These arrays own their memory, so rows may still run after `execute` has returned.
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        for name in self._strings.intersection(inputs):
            inputs[name] = _decode(name, inputs[name])
        return inputs

    def _send(self, outcome: ort_runner.Outcome) -> None:
        final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        sender = outcome.ticket.caller.sender
        try:
            sender.send(self._response(outcome), flags=final)
        except Exception as error:  # raised here, it would end a worker for good
            pb_utils.Logger.log_error(f"{self._contract.model}: a response was lost: {error}")

    def _response(self, outcome: ort_runner.Outcome) -> Any:
        if outcome.error is not None:
            return _failure(outcome.error, _error_code(outcome.error))
        # Triton itself leaves out what was not requested.
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor(name, _encode(value))
                for name, value in zip(self._names, outcome.ticket.outputs(), strict=True)
            ]
        )


def _graph_tensors(nodes: Sequence[Any]) -> list[ort_contract.OrtTensor]:
    return [
        ort_contract.OrtTensor(
            node.name,
            node.type,
            tuple(dim if isinstance(dim, int) else -1 for dim in node.shape or ()),
        )
        for node in nodes
    ]


def _decode(name: str, value: feeds.Array) -> feeds.Array:
    # ONNX Runtime takes `str` objects only: it would run on the printed form of `bytes`.
    try:
        texts = [item.decode("utf-8") for item in value.reshape(-1)]
    except UnicodeDecodeError as error:
        raise ValueError(f"input '{name}' must be UTF-8 text: {error}") from error
    return np.array(texts, dtype=np.object_).reshape(value.shape)


def _encode(value: feeds.Array) -> feeds.Array:
    if value.dtype != np.object_:
        return np.ascontiguousarray(value)
    texts = [item.encode("utf-8") for item in value.reshape(-1)]
    return np.array(texts, dtype=np.object_).reshape(value.shape)


def _error_code(error: Exception) -> Any:
    from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

    if isinstance(error, InvalidArgument):
        return pb_utils.TritonError.INVALID_ARG
    return pb_utils.TritonError.INTERNAL


def _failure(error: Exception, code: Any) -> Any:
    return pb_utils.InferenceResponse(
        output_tensors=[], error=pb_utils.TritonError(str(error), code)
    )
