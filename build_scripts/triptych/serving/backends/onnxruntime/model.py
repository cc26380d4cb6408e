"""The emulated ONNX Runtime backend of Triton: serves models with ``backend: "onnxruntime"``.

Triton runs this file in a process for each model instance, with this folder on its path.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import triton_python_backend_utils as pb_utils

from triptych.runtime.overflow import survive_overflow
from triptych.runtime.triton_io import make_private
from triptych.serving.backends import contract, execution, feeds

if TYPE_CHECKING:
    from triptych.serving.backends.onnxruntime import ort_sessions
else:
    import ort_sessions


class TritonPythonModel:
    """Instance of a model with ``backend: "onnxruntime"``."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        """Add the inputs, outputs and batching that the config leaves out."""
        config = auto_complete_model_config.as_dict()
        if config.get("output") and not ort_sessions.needs_inputs(config):
            return auto_complete_model_config
        # Triton does not pass the model's folder to this method, only to the process.
        folder = Path(psutil.Process().cmdline()[1]).parent
        path = contract.model_file(folder, config, ort_sessions.MODEL_FILE)
        session = ort_sessions.open_session(path, config)
        inputs, outputs = session.get_inputs(), session.get_outputs()
        ort_sessions.complete_config(
            config, ort_sessions.read_tensors(inputs), ort_sessions.read_tensors(outputs)
        )
        return auto_complete_model_config

    def initialize(self, args: dict[str, str]) -> None:
        """Open the session, and reject a config that does not match the graph."""
        make_private()
        survive_overflow(args["model_config"])
        config = json.loads(args["model_config"])
        ort_sessions.check_settings(config, kind=args["model_instance_kind"])
        parsed = contract.parse_contract(config, backend="onnxruntime")
        # The native backend keeps outputs in a sorted map, and answers them in its order.
        self._contract = parsed._replace(outputs=tuple(sorted(parsed.outputs)))
        folder = Path(args["model_repository"], args["model_version"])
        path = contract.model_file(folder, config, ort_sessions.MODEL_FILE)
        self._session = ort_sessions.open_session(path, config)
        self._run_options = ort_sessions.run_options(config)
        contract.check_model(
            self._contract,
            ort_sessions.read_tensors(self._session.get_inputs()),
            ort_sessions.read_tensors(self._session.get_outputs()),
            ort_sessions.read_tensors(self._session.get_overridable_initializers()),
        )
        self._names = [spec.name for spec in self._contract.outputs]
        pb_utils.Logger.log_info(f"{args['model_instance_name']}: emulated ONNX Runtime backend")

    def execute(self, requests: Sequence[object]) -> list[object]:
        """Run all requests as one batch, and return their responses together."""
        return execution.run_batch(self._contract, requests, self._run, _decode, _message)

    def _run(self, feed: feeds.Arrays) -> feeds.Arrays:
        values = self._session.run(self._names, feed, self._run_options)
        return dict(zip(self._names, values, strict=True))


def _decode(name: str, value: feeds.Array) -> feeds.Array:
    # ONNX Runtime's Python binding takes `str` objects only: it would convert `bytes` by `str()`.
    # The native backend passes C strings, which end at the first NUL.
    try:
        texts = [item.partition(b"\0")[0].decode("utf-8") for item in value.reshape(-1)]
    except UnicodeDecodeError as error:
        raise ValueError(f"input '{name}' must be UTF-8 text: {error}") from error
    return np.array(texts, dtype=np.object_).reshape(value.shape)


def _message(error: Exception) -> str:
    """Return the native backend's text of an error of ONNX Runtime."""
    text = str(error)
    found = re.fullmatch(r"\[ONNXRuntimeError\] : (\d+) : \w+ : (.*)", text, re.DOTALL)
    return f"onnx runtime error {found[1]}: {found[2]}" if found else text
