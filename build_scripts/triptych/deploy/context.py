"""Deployment context: the values in the templates of every target."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from triptych.base.errors import Finding, UserError
from triptych.base.explained import ExplainedValue, reasons_of
from triptych.container.manifests import find_pipelines
from triptych.container.processor import node_label
from triptych.container.settings import CORES_VARIABLE
from triptych.deploy.assumptions import Assumption, assume_alone, assume_slo, is_on_gpu
from triptych.deploy.metrics import Metrics
from triptych.deploy.numbers import MeasuredReplica, Sizes, compute_sizes, read_measurements
from triptych.deploy.options import DeployOptions, complete_options
from triptych.deploy.rules import SloObjective, encoder_objectives, encoder_rule_values
from triptych.deploy.scaling import Trigger, encoder_triggers
from triptych.repository.manifest import CompiledManifest, build_id, read_manifest
from triptych.spec.fields import SamplingSettings

VERSION_DIGITS = 12
PRODUCT = "nvidia.com/gpu.product"
"""Label of NVIDIA's GPU feature discovery: the device's name with dashes, and its MIG profile."""

_SLICE = re.compile(r".*-MIG-(\d+g\.\d+gb)")


class Placement(NamedTuple):
    """Nodes that a replica runs on."""

    overlay: str  # ``cpu``, ``gpu`` or ``mig``
    gpu_resource: str | None = None  # Name of the resource that a container requests; None on a CPU
    gpus: ExplainedValue | None = None  # Number of GPUs, or slices of one
    product: ExplainedValue | None = None  # Value of the label `PRODUCT`; None for any GPU
    # Labels of nodes on a CPU, by node-feature-discovery.
    labels: Mapping[str, ExplainedValue] = MappingProxyType({})


class CandidateBuild(NamedTuple):
    """Build that gets copies of requests, by the first digits of its manifest's hash."""

    version: str
    placement: Placement


@dataclass(frozen=True)
class DeploymentContext:
    """A built pipeline of any task that can be deployed."""

    pipeline: str
    repository: Path  # Repository that holds the pipeline alone
    options: DeployOptions
    sizes: Sizes
    # First digits of the hash of the build manifest, which name the repository's image or volume.
    version: str
    placement: Placement
    slo: str  # Text of the SLO
    metrics: Metrics  # Queries of the pipeline's metrics
    objectives: Sequence[SloObjective]
    rule_values: Mapping[str, object]  # Further values for the templates of rules and dashboard
    triggers: Sequence[Trigger]
    gpus: int  # Number of GPUs of a replica
    cores: ExplainedValue  # Number of cores that a replica keeps busy
    # Rows per second of a replica that is always busy; None for a pipeline that generates text.
    peak_per_s: ExplainedValue | None = None
    # Latency limits that Envoy can measure, which are those of whole answers.
    limits_ms: Sequence[float] = ()
    # Environment variables of the server besides those that all servers have.
    environment: Mapping[str, ExplainedValue] = field(default_factory=dict)
    # Concurrent requests per replica; None if the request rate scales replicas.
    concurrency: ExplainedValue | None = None
    sample: SamplingSettings | None = None
    candidate: CandidateBuild | None = None
    # First digits of the hash of the active build; None without a comparison.
    baseline: str | None = None
    assumptions: Sequence[Assumption] = ()  # Assumptions in place of what was not measured or set


@dataclass(frozen=True)
class Manifests:
    """Files to write."""

    files: Mapping[str, object]  # Document of each file by its path
    version: str  # Version of the context
    start: str  # Path of the folder or file that the tool takes
    tool: str  # Command with ``{}`` in place of the path of `start`
    triton: str = ""  # Triton release in the image
    known_defects: Sequence[Finding] = ()  # Known defects of that release that the pipeline meets
    assumptions: Sequence[Assumption] = ()  # Assumptions of the context

    def command(self, folder: Path) -> str:
        """Return the command that applies the manifests written to `folder`."""
        return self.tool.format(folder / self.start)

    def as_dict(self) -> dict[str, object]:
        """Return the files and each number with its reason, for ``--json``."""
        return {
            "start": self.start,
            "version": self.version,
            "triton": self.triton,
            "files": list(self.files),
            "numbers": [
                {"file": file, "field": field, "value": value, "reason": reason}
                for file, document in self.files.items()
                for field, value, reason in reasons_of(document)
            ],
            "known_defects": [finding.as_dict() for finding in self.known_defects],
            "assumptions": [assumption.as_dict() for assumption in self.assumptions],
        }


def read_context(
    repository: Path,
    pipeline: str,
    options: DeployOptions,
    reports: Path,
    *,
    time_scale: float = 1.0,
) -> DeploymentContext:
    """Return the context of a pipeline that does not generate text.

    Args:
        repository: Repository that holds the pipeline alone.
        pipeline: Name of the pipeline.
        options: Options of the user.
        reports: Folder of the pipeline's reports, with the result of `bench`.
        time_scale: Factor of all windows of queries; below 1 for tests.

    Raises:
        UserError: A measurement is of another build, or an option cannot work.
    """
    if options.affinity_header is not None:
        raise UserError(
            "--affinity-header",
            "is only supported for pipelines that generate text",
            given=options.affinity_header,
            remedy="Leave it out",
        )
    build = read_manifest(repository, pipeline, CompiledManifest)
    tensorrt = build.engine.tensorrt if build.engine else None
    options = complete_options(options, build.spec, tensorrt)
    _check_build(build, options)
    measured = read_measurements(build, options, reports, repository)
    build, assumed_slo = assume_slo(build)
    assumptions = [
        *assumed_slo,
        *measured.assumptions,
        *assume_alone(pipeline, find_others(repository, pipeline)),
    ]
    sizes = compute_sizes(build, options, measured, repository)
    version = build_id(repository, pipeline)[:VERSION_DIGITS]
    metrics = Metrics(
        pipeline,
        options.namespace,
        options.workload,
        options.envoy,
        time_scale,
        is_chain=bool(build.cores),
    )
    candidate = baseline = None
    if options.mirrored is not None:
        other = options.mirrored.repository
        candidate = CandidateBuild(
            _read_version(other, pipeline, version, "--mirror"),
            _place(read_manifest(other, pipeline, CompiledManifest), options, measured),
        )
    if options.baseline is not None:
        baseline = _read_version(options.baseline, pipeline, version, "--baseline")
    return DeploymentContext(
        pipeline=pipeline,
        repository=repository,
        options=options,
        sizes=sizes,
        version=version,
        placement=_place(build, options, measured),
        slo=f"{build.spec.serving.slo}{' (assumed)' * bool(assumed_slo)}",
        metrics=metrics,
        objectives=list(encoder_objectives(build, options, metrics)),
        rule_values=encoder_rule_values(build, options, measured, metrics),
        triggers=encoder_triggers(build, sizes, metrics),
        gpus=build.spec.serving.gpus_of_replica if is_on_gpu(build.spec) else 0,
        cores=ExplainedValue(measured.cpu_cores.value, "at capacity"),
        peak_per_s=measured.peak_per_s,
        limits_ms=list(build.spec.serving.slo.limits_ms.values()),
        environment={
            **options.environment,
            CORES_VARIABLE: ExplainedValue(
                str(math.ceil(measured.cpu_cores.value)),
                "cores that the server is planned for: those requested, since the node may have "
                "more",
            ),
        },
        sample=build.spec.serving.sample,
        candidate=candidate,
        baseline=baseline,
        assumptions=assumptions,
    )


def gpu_resource(product: str | None) -> str:
    """Return the resource of whole GPUs, or of slices with the product's profile."""
    profile = _SLICE.fullmatch(product or "")
    return f"nvidia.com/mig-{profile[1]}" if profile else "nvidia.com/gpu"


def find_others(repository: Path, name: str) -> list[str]:
    """Return the names of the other pipelines in a repository."""
    return [pipeline.name for pipeline in find_pipelines(repository) if pipeline.name != name]


def _place(build: CompiledManifest, options: DeployOptions, measured: MeasuredReplica) -> Placement:
    if not is_on_gpu(build.spec):
        if options.gpu_product is not None:
            raise UserError(
                "--gpu-product",
                "is only supported for a core on a GPU",
                given=f"{options.gpu_product}; the core was built for the CPU",
                remedy="Set core.device: gpu and build it again",
            )
        measured_with = ExplainedValue(
            "true", f"measured in {build.gate.precision} with it; by node-feature-discovery"
        )
        sets = dict.fromkeys(map(node_label, build.instruction_sets), measured_with)
        return Placement("cpu", labels=sets)
    product = _find_product(build, options)
    used = measured.gpu_memory_mib
    memory = "not measured" if used is None else f"measured: {used:.0f} MiB of its memory in use"
    serving = build.spec.serving
    return Placement(
        "mig" if product is not None and _SLICE.fullmatch(product) else "gpu",
        gpu_resource(product),
        ExplainedValue(serving.gpus_of_replica, f"serving.gpus has {serving.gpus}; {memory}"),
        None if product is None else ExplainedValue(product, _explain_product(build)),
    )


def _find_product(build: CompiledManifest, options: DeployOptions) -> str | None:
    """Return the label of the nodes that can run the core; None for any with a GPU."""
    engine = build.engine
    if build.spec.core.backend != "tensorrt":
        return options.gpu_product
    if engine is None:
        raise UserError(
            build.spec.name,
            "must have an engine before it is deployed",
            given="none in the repository",
            remedy=f"Run `triptych engine {build.spec.name}` on the GPU that will serve",
        )
    own = engine.gpu.replace(" ", "-")
    if options.gpu_product is None:
        return own
    if engine.hardware == "none" and options.gpu_product != own:
        raise UserError(
            "--gpu-product",
            "must be the GPU that the engine was built for",
            given=f"{options.gpu_product}; the engine is of {own}",
            remedy=f"Run `triptych engine {build.spec.name}` there, or set core.engine.hardware",
        )
    return options.gpu_product


def _explain_product(build: CompiledManifest) -> str:
    if build.engine is None:
        return "given by the user (--gpu-product)"
    return (
        f"the engine was built on {build.engine.gpu} (compute capability "
        f"{build.engine.compute_capability}) with TensorRT {build.engine.tensorrt}; the start-up "
        "check refuses another"
    )


def _read_version(repository: Path, pipeline: str, version: str, option: str) -> str:
    """Return the first digits of the hash of the build that an option names."""
    found = build_id(repository, pipeline)[:VERSION_DIGITS]
    if found == version:
        raise UserError(
            option,
            "must name another build than the one that is deployed",
            given=f"{repository}, which holds {found}, too",
            remedy="Name the repository of the other build",
        )
    return found


def _check_build(build: CompiledManifest, options: DeployOptions) -> None:
    """Raise a `UserError` for a build that cannot be deployed with these options."""
    name, serving = build.spec.name, build.spec.serving
    if build.spec.core.shared_from is not None:
        # The capacity was measured with a core of its own.
        raise UserError(
            "core.shared_from",
            "must not be set for a pipeline that is deployed",
            given=f"{name} uses the core of {build.spec.core.shared_from}",
            remedy=f"Run `triptych build {name} --set core.shared_from=null --repository FOLDER`",
        )
    for option, given in (
        ("--monitor-image", options.monitor_image),
        ("--mirror", options.mirrored),
    ):
        if given is not None and serving.sample is None:
            raise UserError(
                option,
                "needs a build that samples",
                given="no serving.sample",
                remedy="Write `sample: {rate: 0.001}` below serving, and run `triptych build "
                f"{name}`",
            )
