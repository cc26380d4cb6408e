"""What a replica's processor asks of a node: one overlay for a CPU, a GPU or a slice of one."""

from __future__ import annotations

import re
from typing import Any

from triptych.base.errors import UserError
from triptych.base.explained import ExplainedValue
from triptych.deploy.numbers import Measured, Sizes
from triptych.deploy.options import DeployOptions
from triptych.deploy.workload import CONTAINER
from triptych.repository.manifest import BuildManifest

_SLICE = re.compile(r".*-MIG-(\d+g\.\d+gb)")
PRODUCT = "nvidia.com/gpu.product"
"""Label of NVIDIA's GPU feature discovery: the device's name with dashes, and its MIG profile."""


def overlay_of(lock: BuildManifest, options: DeployOptions) -> str:
    """``cpu``, ``gpu`` or ``mig``: where the core that was built runs.

    Raises:
        UserError: a GPU for a core on the CPU, an engine that is not built or of another GPU.
    """
    if lock.spec.core.device == "cpu":
        if options.gpu_product is not None:
            raise UserError(
                "--gpu-product",
                "must be given for a core on a GPU only",
                given=f"{options.gpu_product}; the core was built for the CPU",
                remedy="Set core.device: gpu and build it again",
            )
        return "cpu"
    product = _product(lock, options)
    return "mig" if product is not None and _SLICE.fullmatch(product) else "gpu"


def gpu_node(product: str | None, why: str) -> dict[str, Any]:
    """Fields of a pod for nodes with GPUs, those of a product where it is known."""
    tolerated = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    selected = {} if product is None else {"nodeSelector": {PRODUCT: ExplainedValue(product, why)}}
    return {"tolerations": [tolerated], **selected}


def gpu_resource(product: str | None) -> str:
    """What a container asks for: whole GPUs, or slices of the product's profile."""
    profile = _SLICE.fullmatch(product or "")
    return f"nvidia.com/mig-{profile[1]}" if profile else "nvidia.com/gpu"


def placement(
    lock: BuildManifest, options: DeployOptions, sizes: Sizes, measured: Measured
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Resources of the container; fields of the pod that choose its node."""
    requests: dict[str, Any] = {"cpu": sizes.cpu_milli, "memory": sizes.memory_mib}
    limits: dict[str, Any] = {"memory": sizes.memory_mib.value}
    pod: dict[str, Any] = {}
    if lock.spec.core.device == "gpu":
        product = _product(lock, options)
        used = measured.gpu_memory_mib
        told = "not measured" if used is None else f"measured: {used:.0f} MiB of its memory in use"
        limits[gpu_resource(product)] = ExplainedValue(
            len(lock.spec.serving.gpus), f"serving.gpus has {lock.spec.serving.gpus}; {told}"
        )
        pod = gpu_node(product, _why(lock))
    return {"requests": requests, "limits": limits}, pod


def resources_patch(
    options: DeployOptions, resources: dict[str, Any], pod: dict[str, Any]
) -> dict[str, Any]:
    """What the overlay puts into the Deployment: what `placement` returns."""
    container = {"name": CONTAINER, "resources": resources}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": options.name},
        "spec": {"template": {"spec": {**pod, "containers": [container]}}},
    }


def _product(lock: BuildManifest, options: DeployOptions) -> str | None:
    """The label of the nodes that can run the core; None for any with a GPU."""
    engine = lock.engine
    if lock.spec.core.backend != "tensorrt":
        return options.gpu_product
    if engine is None:
        raise UserError(
            lock.spec.name,
            "must have an engine before it is deployed",
            given="none in the repository",
            remedy=f"Run `triptych engine {lock.spec.name}` on the GPU that will serve",
        )
    own = engine.gpu.replace(" ", "-")
    if options.gpu_product is None:
        return own
    if engine.hardware == "none" and options.gpu_product != own:
        raise UserError(
            "--gpu-product",
            "must be the GPU that the engine was built for",
            given=f"{options.gpu_product}; the engine is of {own}",
            remedy=f"Run `triptych engine {lock.spec.name}` there, or set core.engine.hardware",
        )
    return options.gpu_product


def _why(lock: BuildManifest) -> str:
    if lock.engine is None:
        return "given by hand (--gpu-product)"
    return (
        f"the engine was built on {lock.engine.gpu} (compute capability "
        f"{lock.engine.compute_capability}) with TensorRT {lock.engine.tensorrt}; the start-up "
        "check refuses another"
    )
