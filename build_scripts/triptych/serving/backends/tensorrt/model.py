"""The emulated TensorRT backend of Triton: serves models with ``backend: "tensorrt"``.

It is for GPU machines with the Python packages of TensorRT and CUDA, but without NVIDIA's image of
Triton. The config must be complete, because nothing is read from the engine to complete it.
Triton runs this file in a process for each model instance, with this folder on its path.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import triton_python_backend_utils as pb_utils

from triptych.core.engine.cuda import Cuda
from triptych.core.engine.runner import EngineRunner, Pinned, open_engine
from triptych.runtime.overflow import survive_overflow
from triptych.runtime.triton_io import make_private
from triptych.serving.backends import contract as contracts
from triptych.serving.backends import execution

if TYPE_CHECKING:
    from triptych.serving.backends.tensorrt import trt_settings
else:
    import trt_settings


class TritonPythonModel:
    """Instance of a model with ``backend: "tensorrt"``."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the plan, and reject a config that does not match it."""
        make_private()
        survive_overflow(args["model_config"])
        config = json.loads(args["model_config"])
        device = trt_settings.instance_device(
            config, kind=args["model_instance_kind"], device_id=args["model_instance_device_id"]
        )
        self._contract = contracts.parse_contract(config, backend="tensorrt")
        path = trt_settings.plan_file(Path(args["model_repository"], args["model_version"]), config)
        profiles = trt_settings.instance_profiles(config, args["model_instance_name"])
        graphs = trt_settings.graph_specs(config)
        Cuda(device)
        # A lean runtime inside a plan is program code: the repository's owner put it there.
        engine = open_engine(path.read_bytes(), host_code=True)
        trt_settings.check_profiles(self._contract, engine.profiles, profiles)
        contracts.check_model(
            self._contract,
            trt_settings.read_tensors(engine.inputs),
            trt_settings.read_tensors(engine.outputs),
        )
        self._runner = EngineRunner(
            engine,
            device=device,
            pinned=Pinned(*trt_settings.pinned_memory(config)),
            graphs=graphs,
            packed=any(spec.ragged for spec in self._contract.inputs),
            profiles=profiles,
            warn=pb_utils.Logger.log_warn,
        )
        pb_utils.Logger.log_info(
            f"{args['model_instance_name']}: emulated TensorRT backend on GPU {device}, "
            f"optimization profiles {profiles}, "
            f"{len(self._runner.captured)} of {len(graphs)} CUDA graphs"
        )

    def execute(self, requests: Sequence[object]) -> list[Any]:
        """Run all requests as one batch, and return their responses together."""
        return execution.run_batch(self._contract, requests, self._runner.run)

    def finalize(self) -> None:
        self._runner.close()
