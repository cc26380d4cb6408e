"""The local stand-in for Triton's native TensorRT backend: serves ``backend: "tensorrt"``.

For GPU machines with TensorRT's and CUDA's Python packages but without NVIDIA's Triton image. It
reads the same config.pbtxt; the config must be whole, for nothing is filled in from the engine.
Triton runs this file in a process of its own for each model instance, with this folder on its path.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import triton_python_backend_utils as pb_utils

from triptych.engine.cuda import Cuda
from triptych.engine.engine_file import open_engine
from triptych.engine.engine_runner import EngineRunner
from triptych.engine.profile_choice import ShapeError
from triptych.runtime.shared_memory import make_private
from triptych.server.stand_in import contract as contracts
from triptych.server.stand_in import feeds

if TYPE_CHECKING:
    from triptych.server.backends.tensorrt import trt_contract, trt_settings
else:
    import trt_contract
    import trt_settings


class TritonPythonModel:
    """One instance of a model whose config says ``backend: "tensorrt"``."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the plan and refuse a config that does not fit it."""
        make_private()
        config = json.loads(args["model_config"])
        device = trt_settings.device_of(
            config, kind=args["model_instance_kind"], device_id=args["model_instance_device_id"]
        )
        self._contract = contracts.parse_contract(config, backend="tensorrt")
        path = trt_settings.plan_file(Path(args["model_repository"], args["model_version"]), config)
        profiles = trt_settings.profiles_of(config, args["model_instance_name"])
        graphs = trt_settings.graph_specs(config)
        pinned, pinned_output = trt_settings.pinned(config)
        Cuda(device)
        # A lean runtime inside a plan is program code: the repository's owner put it there.
        engine = open_engine(path.read_bytes(), host_code=True)
        trt_contract.check_engine(
            self._contract, engine.inputs, engine.outputs, engine.profiles, profiles
        )
        self._names = [spec.name for spec in self._contract.outputs]
        self._runner = EngineRunner(
            engine,
            device=device,
            pinned=pinned,
            pinned_output=pinned_output,
            graphs=graphs,
            packed=any(spec.ragged for spec in self._contract.inputs),
            profiles=profiles,
            warn=pb_utils.Logger.log_warn,
        )
        pb_utils.Logger.log_info(
            f"{args['model_instance_name']}: local TensorRT stand-in on GPU {device}, optimization "
            f"profiles {profiles}, {len(self._runner.captured)} of {len(graphs)} CUDA graphs"
        )

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Run the dynamic batch as one; if that fails, each request by itself."""
        tickets = [
            feeds.new_ticket(
                self._contract, None, {tensor.name(): tensor.as_numpy() for tensor in r.inputs()}
            )
            for r in requests
        ]
        if self._contract.max_batch_size > 0 and self._run(tickets) is None:
            return [self._response(ticket) for ticket in tickets]
        return [self._alone(ticket) for ticket in tickets]

    def finalize(self) -> None:
        self._runner.close()

    def _alone(self, ticket: feeds.Ticket) -> Any:
        error = self._run([ticket])
        return self._response(ticket) if error is None else _failure(error)

    def _run(self, tickets: Sequence[feeds.Ticket]) -> Exception | None:
        """Run the rows of all tickets as one batch; returns what went wrong."""
        parts = [feeds.Part(ticket, 0, ticket.rows) for ticket in tickets]
        try:
            values = self._runner.run(feeds.build_feed(self._contract, parts))
            feeds.hand_out(self._contract, [values[name] for name in self._names], parts)
        except Exception as error:  # whatever it is, it must end these requests only
            return error
        return None

    def _response(self, ticket: feeds.Ticket) -> Any:
        # Triton itself leaves out what was not requested.
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor(name, np.ascontiguousarray(value))
                for name, value in zip(self._names, ticket.outputs(), strict=True)
            ]
        )


def _failure(error: Exception) -> Any:
    codes = pb_utils.TritonError
    code = codes.INVALID_ARG if isinstance(error, ShapeError) else codes.INTERNAL
    return pb_utils.InferenceResponse(output_tensors=[], error=codes(str(error), code))
