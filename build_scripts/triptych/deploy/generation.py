"""What `triptych deploy` knows of a pipeline that generates text.

It scales by requests under way: an answer takes as long as it is, so that a rate says little.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from triptych.base.errors import UserError
from triptych.base.explained import ExplainedValue
from triptych.container.sizes import STEP_SHM_MIB, largest_request_mib
from triptych.container.supervisor import EXIT_S
from triptych.deploy.basis import VERSION_DIGITS, check_alone
from triptych.deploy.dashboard import dashboard_map
from triptych.deploy.devices import gpu_node, gpu_resource
from triptych.deploy.generation_monitoring import (
    FULL,
    Spec,
    generation_objectives,
    generation_promise,
    generation_rows,
    generation_rule,
)
from triptych.deploy.metrics import GenerationMetrics
from triptych.deploy.monitoring import Objective
from triptych.deploy.numbers import MIN_REPLICAS, Sizes, delay, pre_stop, stable_s
from triptych.deploy.options import DeployOptions, check_options
from triptych.deploy.scaling import scaled, trigger
from triptych.repository.manifest import build_id, read_built_spec
from triptych.runtime.generation_engine import MODEL_FOLDER
from triptych.runtime.sampling_parameters import DEFAULTS
from triptych.spec.fields import Sample
from triptych.spec.generation_fields import GeneratingSpec

BUSY = 0.8
"""Of the requests that share a batch: the rest is room until another replica answers."""
HOME = "/tmp"

_READ_MIB_S, _ENGINE_S, _TIMES = 100, 120, 3
_TOKEN_MS = 100
_ENGINE_MIB, _STEPS_CPU = 4096, 2
_PARTS_SHM_MIB, _CACHES_MIB = 2048, 1024
_END_MARGIN_S, _ABOVE_FEWEST = 5, 4
_MIB = 1 << 20


@dataclass(frozen=True)
class GenerationBasis:
    """A built pipeline; `sizes` has a replica's share of requests as its threshold."""

    repository: Path
    spec: Spec
    options: DeployOptions
    sizes: Sizes
    version: str
    in_place: str | None = None

    @property
    def metrics(self) -> GenerationMetrics:
        """Queries on the fleet."""
        options = self.options
        return GenerationMetrics(self.name, options.namespace, options.workload, options.envoy)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def sample(self) -> Sample | None:
        return None

    @property
    def gpus(self) -> int:
        return self.spec.gpus_per_copy

    @property
    def cores(self) -> ExplainedValue:
        milli = float(self.sizes.cpu_milli.value.removesuffix("m"))
        return ExplainedValue(milli / 1000, "by an estimate")

    @property
    def limits_ms(self) -> Sequence[float]:
        return []

    @property
    def environment(self) -> Mapping[str, ExplainedValue]:
        return {
            "HOME": ExplainedValue(
                HOME, "engines keep what they compile below it, and the file system is read-only"
            )
        }

    @property
    def requests_at_once(self) -> ExplainedValue | None:
        threshold = self.sizes.threshold_per_s
        return ExplainedValue(max(1, math.floor(float(threshold.value))), threshold.reason)

    def overlay(self) -> str:
        if not self.gpus:
            return "cpu"
        return "mig" if gpu_resource(self.options.gpu_product) != gpu_resource(None) else "gpu"

    def placement(self) -> tuple[dict[str, Any], dict[str, Any]]:
        sizes, product = self.sizes, self.options.gpu_product
        limits: dict[str, Any] = {"memory": sizes.memory_mib.value}
        pod: dict[str, Any] = {}
        if self.gpus:
            limits[gpu_resource(product)] = ExplainedValue(
                self.gpus,
                "tensor_parallel_size x pipeline_parallel_size: a pod is one copy of the model",
            )
            pod = gpu_node(product, "--gpu-product")
        return {
            "requests": {"cpu": sizes.cpu_milli, "memory": sizes.memory_mib},
            "limits": limits,
        }, pod

    def objectives(self) -> Sequence[Objective]:
        return list(generation_objectives(self.spec, self.options, self.metrics))

    def rule(self) -> dict[str, Any]:
        return generation_rule(self.spec, self.options, self.sizes, self.metrics)

    def scaled(self) -> dict[str, Any]:
        metrics = self.metrics
        under_way = ExplainedValue(
            f"sum({metrics.gauge('running')} + {metrics.gauge('waiting')})",
            "requests in the engines and before them: an answer takes as long as it is, so that a "
            "rate says little",
        )
        triggers = [trigger(self.options, "requests", under_way, self.sizes.threshold_per_s)]
        if self.spec.has_kv_cache:
            cache = metrics.gauge("kv_cache_share")
            full = ExplainedValue(
                f"(avg({cache}) > bool {FULL:g}) * (count({cache}) + 1)",
                f"a guard: one replica more for as long as the KV caches are over {FULL:.0%} full "
                "on average, as with prompts longer than planned",
            )
            triggers.append(trigger(self.options, "kv-cache", full, "1"))
        return scaled(self.options, self.sizes, triggers)

    def dashboard(self) -> dict[str, Any]:
        rows = generation_rows(self.spec, self.options, self.metrics, on_gpu=self.gpus > 0)
        return dashboard_map(generation_promise(self.spec), self.options, rows)


def generation_basis(
    repository: Path, pipeline: str, options: DeployOptions, _reports: Path
) -> GenerationBasis:
    """Return the deployment context of a pipeline that generates text; nothing in it was measured.

    Args:
        repository: Repository with this pipeline and no other.
        pipeline: Name of the pipeline.
        options: Options of the user.

    Raises:
        UserError: The pipeline cannot be deployed so.
    """
    check_options(options)
    spec = cast("Spec", read_built_spec(repository, pipeline))
    for field, value, why, remedy in (
        *(
            (field, value, "it scales by requests under way, not by their rate",
             "Set core.max_num_seqs, which says how many one replica takes")
            for field, value in (
                ("--rps-per-replica", options.rps_per_replica), ("--peak-rps", options.peak_rps),
            )
        ),
        *(
            (field, value, "its answers are not sampled", "Leave it out")
            for field, value in (
                ("--mirror", options.mirrored),
                ("--baseline", options.baseline),
                ("--monitor-image", options.monitor_image),
            )
        ),
    ):  # fmt: skip
        if value is not None:
            raise UserError(
                field,
                f"must be left out for a pipeline that generates text: {why}",
                given=value,
                remedy=remedy,
            )
    check_alone(repository, spec.name)
    _check_gpu(spec, options)
    version = build_id(repository, spec.name)[:VERSION_DIGITS]
    return GenerationBasis(repository, spec, options, _sizes(repository, spec, options), version)


def _check_gpu(spec: Spec, options: DeployOptions) -> None:
    count = spec.gpus_per_copy
    if options.gpu_product is None:
        return
    if not count:
        raise UserError(
            "--gpu-product", "must be given for an engine on a GPU only", given=options.gpu_product,
            remedy="Leave it out",
        )  # fmt: skip
    if count > 1 and gpu_resource(options.gpu_product) != gpu_resource(None):
        raise UserError(
            "--gpu-product",
            "must be whole GPUs: a model is not split over slices",
            given=f"{options.gpu_product}, {count} parts",
            remedy="Name another product, or build with tensor_parallel_size: 1",
        )


def generation_shm_mib(repository: Path, spec: GeneratingSpec) -> int:
    """Shared memory that the steps may need, in MiB."""
    parts_mib = _PARTS_SHM_MIB if spec.gpus_per_copy > 1 else 0
    return _processes(spec) * (STEP_SHM_MIB + largest_request_mib(repository)) + parts_mib


def _processes(spec: GeneratingSpec) -> int:
    return spec.serving.preprocess_instances + 2


def _sizes(repository: Path, spec: Spec, options: DeployOptions) -> Sizes:
    weights_mib = _weights_mib(repository, spec)
    start_s = math.ceil(_TIMES * (weights_mib / _READ_MIB_S + _ENGINE_S))
    ready_s = options.startup_seconds or start_s / _TIMES
    answer_s = math.ceil(
        int(spec.parameters.get("max_tokens", DEFAULTS["max_tokens"])) * _TOKEN_MS / 1e3
    )
    before_end = pre_stop(options)
    drain_s = before_end.value + answer_s + math.ceil(EXIT_S)
    if options.max_grace_seconds is not None and options.max_grace_seconds < drain_s:
        raise UserError(
            "--max-grace-seconds",
            "must be longer than a replica takes to end: sleep, the longest answer, exit",
            given=f"{options.max_grace_seconds} s; {before_end.value} + {answer_s} + {EXIT_S:g} s "
            f"are {drain_s} s",
            remedy="Give more, or build with a lower parameters.max_tokens",
        )
    grace_s = options.max_grace_seconds or drain_s + _END_MARGIN_S
    gpus, shm_mib = spec.gpus_per_copy, generation_shm_mib(repository, spec)
    memory_mib = options.memory_mib or math.ceil(2 * weights_mib) + _ENGINE_MIB + shm_mib
    cores = options.cpu_cores or _STEPS_CPU + max(1, gpus)
    at_once = spec.core.max_num_seqs
    most = _ABOVE_FEWEST * MIN_REPLICAS
    return Sizes(
        start_s=ExplainedValue(
            start_s,
            f"{_TIMES} times {weights_mib:.0f} MiB of weights at {_READ_MIB_S} MiB/s of a volume, "
            f"and {_ENGINE_S} s of the engine's own start; not measured",
        ),
        pre_stop_s=before_end,
        exit_timeout_s=ExplainedValue(
            str(answer_s), f"an answer under way may take {_TOKEN_MS} ms a token, not measured"
        ),
        grace_s=ExplainedValue(
            grace_s, "preStop, the longest answer, the end of the server, and a margin"
        ),
        connection_age_s=ExplainedValue(
            math.ceil(2 * delay(ready_s)), "clients find new replicas with a new connection"
        ),
        shm_mib=ExplainedValue(
            shm_mib,
            f"{_processes(spec)} Python processes x ({STEP_SHM_MIB} MiB + "
            f"{largest_request_mib(repository)} MiB, the largest request)"
            + (f"; {_PARTS_SHM_MIB} MiB in which the parts of the model talk" * (gpus > 1)),
        ),
        memory_mib=ExplainedValue(
            f"{memory_mib}Mi",
            "given by hand (--memory)"
            if options.memory_mib
            else f"not measured: twice the {weights_mib:.0f} MiB of weights while they load, "
            f"{_ENGINE_MIB} MiB of the engine, and shared memory",
        ),
        cpu_milli=ExplainedValue(
            f"{math.ceil(cores * 1000)}m", "a core for each GPU's process and two for the steps"
        ),
        threshold_per_s=ExplainedValue(
            f"{max(1.0, BUSY * at_once):.4g}",
            f"requests under way: {BUSY:.0%} of the {at_once} that share a batch "
            "(core.max_num_seqs); replicas = ceil(requests / this)",
        ),
        fewest=ExplainedValue(
            MIN_REPLICAS, "one may end, or be exchanged, while the other answers"
        ),
        most=ExplainedValue(most, f"{_ABOVE_FEWEST} times the fewest: a bound on cost"),
        stable_s=ExplainedValue(
            stable_s(ready_s), f"a replica that goes is missed for {ready_s:.0f} s"
        ),
        tmp_mib=ExplainedValue(
            _CACHES_MIB, "what the engine compiles, not measured; nothing is kept"
        ),
    )


def _weights_mib(repository: Path, spec: Spec) -> float:
    folder = repository / f"{spec.name}_core/1" / MODEL_FOLDER
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / _MIB
