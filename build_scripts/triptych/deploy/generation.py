"""Deployment context of a pipeline that generates text.

Replicas scale by requests in flight. The request rate is no measure of the load, because the
duration of an answer depends on its length.
"""

from __future__ import annotations

import math
from pathlib import Path

from triptych.base.errors import UserError
from triptych.base.explained import ExplainedValue
from triptych.container.manifests import STEP_SHM_MIB, largest_request_mib
from triptych.container.supervisor import EXIT_S
from triptych.deploy.assumptions import assume_alone, core_files_mib
from triptych.deploy.context import (
    VERSION_DIGITS,
    DeploymentContext,
    Placement,
    find_others,
    gpu_resource,
)
from triptych.deploy.metrics import GenerationQueries
from triptych.deploy.numbers import (
    MIN_REPLICAS,
    Sizes,
    given_memory,
    pre_stop,
    scaling_delay_s,
    stable_s,
)
from triptych.deploy.options import DeployOptions, complete_options
from triptych.deploy.rules import TextSpec, generation_objectives, generation_rule_values
from triptych.deploy.scaling import generation_triggers
from triptych.deploy.variables import step_shm_mib
from triptych.repository.manifest import TextManifest, build_id, read_manifest
from triptych.runtime.sampling_parameters import DEFAULTS
from triptych.spec.generation_fields import GeneratingSpec

BUSY_RATIO = 0.8
"""Requests per replica over those that share a batch; the rest waits for another replica."""

_READ_MIB_S, _ENGINE_S, _START_FACTOR = 100, 120, 3
_TOKEN_MS = 100
_ENGINE_MIB, _STEPS_CPU = 4096, 2
_PARTS_SHM_MIB, _CACHES_MIB = 2048, 1024
_END_MARGIN_S, _MAX_FACTOR = 5, 4
_BY_CONCURRENCY = (
    "it scales by requests in flight, not by their rate",
    "Set core.max_num_seqs, the number of requests that one replica takes",
)
_NOT_SAMPLED = ("its answers are not sampled", "Leave it out")
_UNSUPPORTED = {
    "--rps-per-replica": ("rps_per_replica", *_BY_CONCURRENCY),
    "--peak-rps": ("peak_rps", *_BY_CONCURRENCY),
    "--mirror": ("mirrored", *_NOT_SAMPLED),
    "--baseline": ("baseline", *_NOT_SAMPLED),
    "--monitor-image": ("monitor_image", *_NOT_SAMPLED),
}
"""Field of the options that is not supported, the reason and the remedy."""


def read_generation_context(
    repository: Path, pipeline: str, options: DeployOptions
) -> DeploymentContext:
    """Return the context of a pipeline that generates text, without measurements.

    Args:
        repository: Repository that holds the pipeline alone.
        pipeline: Name of the pipeline.
        options: Options of the user.

    Raises:
        UserError: An option cannot work.
    """
    spec = read_manifest(repository, pipeline, TextManifest).spec
    options = complete_options(options, spec)
    for option, (field, why, remedy) in _UNSUPPORTED.items():
        value = getattr(options, field)
        if value is not None:
            raise UserError(
                option,
                f"is not supported for a pipeline that generates text: {why}",
                given=value,
                remedy=remedy,
            )
    placement = _place(spec, options)
    sizes = _sizes(repository, spec, options)
    metrics = GenerationQueries(spec.name, options.namespace, options.workload, options.envoy)
    threshold = sizes.threshold_per_s
    return DeploymentContext(
        pipeline=spec.name,
        repository=repository,
        options=options,
        sizes=sizes,
        version=build_id(repository, spec.name)[:VERSION_DIGITS],
        placement=placement,
        slo=str(spec.serving.slo),
        metrics=metrics,
        objectives=list(generation_objectives(spec, options, metrics)),
        rule_values=generation_rule_values(spec, metrics),
        triggers=generation_triggers(spec, sizes, metrics),
        gpus=spec.gpus_per_copy,
        cores=ExplainedValue(
            float(sizes.cpu_milli.value.removesuffix("m")) / 1000, "by an estimate"
        ),
        environment={
            "HOME": ExplainedValue(
                "/tmp", "engines store compiled code below it, and the file system is read-only"
            ),
            **options.environment,
        },
        concurrency=ExplainedValue(max(1, math.floor(float(threshold.value))), threshold.reason),
        assumptions=assume_alone(spec.name, find_others(repository, spec.name)),
    )


def _place(spec: TextSpec, options: DeployOptions) -> Placement:
    count, product = spec.gpus_per_copy, options.gpu_product
    resource = gpu_resource(product)
    is_whole = resource == gpu_resource(None)
    if not count:
        if product is not None:
            raise UserError(
                "--gpu-product",
                "is only supported for an engine on a GPU",
                given=product,
                remedy="Leave it out",
            )
        return Placement("cpu")
    if count > 1 and not is_whole:
        raise UserError(
            "--gpu-product",
            "must be whole GPUs: a model is not split over slices",
            given=f"{product}, {count} parts",
            remedy="Name another product, or build with tensor_parallel_size: 1",
        )
    return Placement(
        "gpu" if is_whole else "mig",
        resource,
        ExplainedValue(
            count, "tensor_parallel_size x pipeline_parallel_size: a pod is one copy of the model"
        ),
        None if product is None else ExplainedValue(product, "--gpu-product"),
    )


def generation_shm_mib(repository: Path, spec: GeneratingSpec) -> int:
    """Return the shared memory that the steps may need, in MiB."""
    parts_mib = _PARTS_SHM_MIB if spec.gpus_per_copy > 1 else 0
    return (
        _processes(spec) * (STEP_SHM_MIB + largest_request_mib(repository, spec.name)) + parts_mib
    )


def _processes(spec: GeneratingSpec) -> int:
    return spec.serving.preprocess_instances + 2


def _sizes(repository: Path, spec: TextSpec, options: DeployOptions) -> Sizes:
    weights_mib = core_files_mib(repository, spec.name)
    start_s = math.ceil(_START_FACTOR * (weights_mib / _READ_MIB_S + _ENGINE_S))
    ready_s = options.startup_seconds or start_s / _START_FACTOR
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
    gpus, own_mib = spec.gpus_per_copy, step_shm_mib(options.server_variables)
    shm_mib = generation_shm_mib(repository, spec) + _processes(spec) * (own_mib - STEP_SHM_MIB)
    cores = options.cpu_cores or _STEPS_CPU + max(1, gpus)
    at_once = spec.core.max_num_seqs
    return Sizes(
        start_s=ExplainedValue(
            start_s,
            f"{_START_FACTOR} times {weights_mib:.0f} MiB of weights at {_READ_MIB_S} MiB/s of a "
            f"volume, and {_ENGINE_S} s of the engine's own start; not measured",
        ),
        pre_stop_s=before_end,
        exit_timeout_s=ExplainedValue(
            str(answer_s), f"an answer in flight may take {_TOKEN_MS} ms a token, not measured"
        ),
        grace_s=ExplainedValue(
            grace_s, "preStop, the longest answer, the end of the server, and a margin"
        ),
        connection_age_s=ExplainedValue(
            math.ceil(2 * scaling_delay_s(ready_s)),
            "clients find new replicas with a new connection",
        ),
        shm_mib=ExplainedValue(
            shm_mib,
            f"{_processes(spec)} Python processes x ({own_mib} MiB + "
            f"{largest_request_mib(repository, spec.name)} MiB, the largest request)"
            + (
                f"; {_PARTS_SHM_MIB} MiB for communication between the parts of the model"
                * (gpus > 1)
            ),
        ),
        memory_mib=given_memory(options, shm_mib)
        or ExplainedValue(
            f"{math.ceil(2 * weights_mib) + _ENGINE_MIB + shm_mib}Mi",
            f"not measured: twice the {weights_mib:.0f} MiB of weights while they load, "
            f"{_ENGINE_MIB} MiB of the engine, and shared memory",
        ),
        cpu_milli=ExplainedValue(
            f"{math.ceil(cores * 1000)}m",
            "given by the user (--cpu)"
            if options.cpu_cores
            else "a core for each GPU's process and two for the steps",
        ),
        threshold_per_s=ExplainedValue(
            f"{max(1.0, BUSY_RATIO * at_once):.4g}",
            f"requests in flight: {BUSY_RATIO:.0%} of the {at_once} that share a batch "
            "(core.max_num_seqs); replicas = ceil(requests / this)",
        ),
        min_replicas=ExplainedValue(
            MIN_REPLICAS, "one may end, or be replaced, while the other answers"
        ),
        max_replicas=ExplainedValue(
            _MAX_FACTOR * MIN_REPLICAS, f"{_MAX_FACTOR} times the minimum, to limit the cost"
        ),
        stable_s=ExplainedValue(stable_s(ready_s), f"a new replica takes {ready_s:.0f} s"),
        tmp_mib=ExplainedValue(
            _CACHES_MIB, "code that the engine compiles, not measured; nothing in it persists"
        ),
    )
