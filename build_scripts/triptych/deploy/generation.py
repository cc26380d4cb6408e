"""`triptych deploy` of a pipeline that generates text: it scales by requests under way."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych.container.locks import find_pipelines
from triptych.container.sizes import STEP_SHM_MIB, largest_request_mib
from triptych.container.supervisor import EXIT_S
from triptych.deploy import envoy
from triptych.deploy.basis import Manifests
from triptych.deploy.monitoring import pod_monitor
from triptych.deploy.options import Options, check
from triptych.deploy.scaling import scaled, trigger
from triptych.deploy.sizing import FEWEST_REPLICAS, PRE_STOP_S, Sizes, delay, stable_s
from triptych.deploy.workload import CONTAINER, deployment, disruption_budget
from triptych.errors import UserError
from triptych.fleet.reasons import Because
from triptych.pipeline.generation_spec import GenerationSpec
from triptych.pipeline.text2text_spec import Text2TextSpec
from triptych.repository.lock import build_id
from triptych.runtime.generation_engine import MODEL_FOLDER
from triptych.runtime.sampling_parameters import DEFAULTS

Spec = GenerationSpec | Text2TextSpec
FULL = 0.9
"""Of a replica's KV cache: beyond, what comes waits or is thrown out and computed again."""

BUSY = 0.8
"""Of the requests that share a batch: the rest is room until another replica answers."""

_READ_MIB_S, _ENGINE_S, _TIMES = 100, 120, 3
_TOKEN_MS = 100
_ENGINE_MIB, _STEPS_CPU = 4096, 2
_DNS_S, _ABOVE_FEWEST, _VERSION_DIGITS = 5, 4, 12
_MIB = 1 << 20


@dataclass(frozen=True)
class GenerationBasis:
    """A built pipeline; `sizes` has a replica's share of requests as its threshold."""

    repository: Path
    spec: Spec
    options: Options
    sizes: Sizes


def generation_manifests(
    repository: Path, spec: Spec, options: Options, affinity: str | None
) -> Manifests:
    """The manifests: Kubernetes, our own Envoy in front.

    Args:
        repository: holds the pipeline, and no other.
        spec: that it was built by.
        options: the user's.
        affinity: header of streams that belong to the same replica; None spreads all.

    Raises:
        UserError: what cannot work.
    """
    check(options)
    if options.target != "kubernetes" or options.gateway is not None:
        raise UserError(
            "--target",
            "must be kubernetes without --gateway for a pipeline that generates text",
            given=options.target if options.gateway is None else "--gateway",
            remedy="Leave it out",
        )
    for field, value in (
        ("--capacity", options.capacity_per_s),
        ("--peak-rate", options.peak_per_s),
    ):
        if value is not None:
            raise UserError(
                field,
                "must be left out for a pipeline that generates text: it scales by requests under "
                "way, not by their rate",
                given=value,
                remedy="Set core.max_sequences, which says how many one replica takes",
            )
    for field, other in (
        ("--mirror", options.mirrored),
        ("--replaces", options.replaces),
        ("--watch-image", options.watch_image),
    ):
        if other is not None:
            raise UserError(
                field,
                "must be left out for a pipeline that generates text: its answers are not sampled",
                remedy="Leave it out",
            )
    others = [one.name for one in find_pipelines(repository) if one.name != spec.name]
    if others:
        raise UserError(
            str(repository),
            "must hold only the pipeline that is deployed",
            given=f"{spec.name} and {', '.join(others)}",
            remedy=f"Run `triptych build {spec.name} --repository FOLDER` and name that one",
        )
    basis = GenerationBasis(repository, spec, options, _sizes(repository, spec, options))
    version = build_id(repository, spec.name)[:_VERSION_DIGITS]
    base = {
        "deployment.yaml": deployment(options, basis.sizes, version),
        "disruption-budget.yaml": disruption_budget(options),
        **envoy.behind_envoy(basis),
        "scaled-object.yaml": _scaled(basis),
        "pod-monitor.yaml": pod_monitor(options),
    }
    files: dict[str, Any] = {f"base/{name}": document for name, document in base.items()}
    files["base/envoy.yaml"] = envoy.configuration_of(
        basis, envoy.replicas_name(options), affinity=affinity
    )
    kind = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    config = {
        "name": Because(
            envoy.proxy_name(options), "its hash becomes part of its name: a change rolls out"
        ),
        "files": ["envoy.yaml"],
    }
    overlay = "gpu" if _gpus(spec) else "cpu"
    files = {
        "base/kustomization.yaml": {
            **kind,
            "resources": list(base),
            "configMapGenerator": [config],
        },
        **files,
        f"overlays/{overlay}/kustomization.yaml": {
            **kind,
            "namespace": options.namespace,
            "resources": ["../../base"],
            "patches": [{"path": "resources.yaml"}],
        },
        f"overlays/{overlay}/resources.yaml": _resources(basis),
    }
    return Manifests(files, version, f"overlays/{overlay}", "kubectl apply -k {}")


def _gpus(spec: Spec) -> int:
    """Of a pod."""
    on_gpu = isinstance(spec, GenerationSpec) and spec.core.backend != "scripted"
    return spec.core.parts if on_gpu and isinstance(spec, GenerationSpec) else 0


def _scaled(basis: GenerationBasis) -> dict[str, Any]:
    spec, options = basis.spec, basis.options

    def gauge(name: str) -> str:
        labels = f'namespace="{options.namespace}",pipeline="{spec.name}"'
        return f"triptych_generation_{name}{{{labels}}}"

    under_way = Because(
        f"sum({gauge('running')} + {gauge('waiting')})",
        "requests in the engines and before them: an answer takes as long as it is, so that a rate "
        "says little",
    )
    triggers = [trigger(options, "requests", under_way, basis.sizes.threshold_per_s)]
    if isinstance(spec, GenerationSpec):
        cache = gauge("kv_cache_share")
        full = Because(
            f"(avg({cache}) > bool {FULL:g}) * (count({cache}) + 1)",
            f"a guard: one replica more for as long as the KV caches are over {FULL:.0%} full on "
            "average, as with prompts longer than planned",
        )
        triggers.append(trigger(options, "kv-cache", full, "1"))
    return scaled(options, basis.sizes, triggers)


def _resources(basis: GenerationBasis) -> dict[str, Any]:
    """What the overlay puts into the Deployment."""
    spec, options, sizes = basis.spec, basis.options, basis.sizes
    limits: dict[str, Any] = {"memory": sizes.memory_mib.value}
    pod: dict[str, Any] = {}
    count = _gpus(spec)
    if count:
        if options.gpu is not None and "-MIG-" in options.gpu and count > 1:
            raise UserError(
                "--gpu",
                "must be whole GPUs: a model is not split over slices",
                given=f"{options.gpu}, {count} parts",
                remedy="Name another product, or build with tensor_parallel: 1",
            )
        slices = options.gpu.partition("-MIG-")[2] if options.gpu is not None else ""
        resource = f"nvidia.com/mig-{slices}" if slices else "nvidia.com/gpu"
        limits[resource] = Because(
            count, "tensor_parallel x pipeline_parallel: a pod is one copy of the model"
        )
        pod["tolerations"] = [
            {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
        ]
        if options.gpu is not None:
            pod["nodeSelector"] = {"nvidia.com/gpu.product": Because(options.gpu, "--gpu")}
    resources = {
        "requests": {"cpu": sizes.cpu_milli, "memory": sizes.memory_mib},
        "limits": limits,
    }
    pod["containers"] = [{"name": CONTAINER, "resources": resources}]
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": options.name},
        "spec": {"template": {"spec": pod}},
    }


def _sizes(repository: Path, spec: Spec, options: Options) -> Sizes:
    weights_mib = _weights_mib(repository, spec)
    start_s = math.ceil(_TIMES * (weights_mib / _READ_MIB_S + _ENGINE_S))
    ready_s = options.ready_s or start_s / _TIMES
    answer_s = math.ceil(
        int(spec.parameters.get("max_tokens", DEFAULTS["max_tokens"])) * _TOKEN_MS / 1e3
    )
    pre_stop_s = PRE_STOP_S + _DNS_S
    grace_s = options.grace_s or pre_stop_s + answer_s + math.ceil(EXIT_S) + _DNS_S
    processes = spec.serving.preprocess_instances + 2
    request_mib = largest_request_mib(repository)
    shm_mib = processes * (STEP_SHM_MIB + request_mib)
    gpus = _gpus(spec)
    memory_mib = options.memory_mib or math.ceil(2 * weights_mib) + _ENGINE_MIB + shm_mib
    cores = options.cpu_cores or _STEPS_CPU + max(1, gpus)
    at_once = spec.core.max_sequences
    most = _ABOVE_FEWEST * FEWEST_REPLICAS
    return Sizes(
        start_s=Because(
            start_s,
            f"{_TIMES} times {weights_mib:.0f} MiB of weights at {_READ_MIB_S} MiB/s of a volume, "
            f"and {_ENGINE_S} s of the engine's own start; not measured",
        ),
        pre_stop_s=Because(
            pre_stop_s, "before SIGTERM, so that the proxy has let go of this replica"
        ),
        exit_timeout_s=Because(
            str(answer_s), f"an answer under way may take {_TOKEN_MS} ms a token, not measured"
        ),
        grace_s=Because(
            grace_s, "preStop, the longest answer, the end of the server, and a margin"
        ),
        connection_age_s=Because(
            math.ceil(2 * delay(ready_s)), "clients find new replicas with a new connection"
        ),
        shm_mib=Because(
            shm_mib,
            f"{processes} Python processes x ({STEP_SHM_MIB} MiB + {request_mib} MiB, the largest "
            "request)",
        ),
        memory_mib=Because(
            f"{memory_mib}Mi",
            "given by hand (--memory)"
            if options.memory_mib
            else f"not measured: twice the {weights_mib:.0f} MiB of weights while they load, "
            f"{_ENGINE_MIB} MiB of the engine, and shared memory",
        ),
        cpu_milli=Because(
            f"{math.ceil(cores * 1000)}m", "a core for each GPU's process and two for the steps"
        ),
        threshold_per_s=Because(
            f"{max(1.0, BUSY * at_once):.4g}",
            f"requests under way: {BUSY:.0%} of the {at_once} that share a batch "
            "(core.max_sequences); replicas = ceil(requests / this)",
        ),
        fewest=Because(FEWEST_REPLICAS, "one may end, or be exchanged, while the other answers"),
        most=Because(most, f"{_ABOVE_FEWEST} times the fewest: a bound on cost"),
        stable_s=Because(stable_s(ready_s), f"a replica that goes is missed for {ready_s:.0f} s"),
    )


def _weights_mib(repository: Path, spec: Spec) -> float:
    folder = repository / f"{spec.name}_core/1" / MODEL_FOLDER
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / _MIB
