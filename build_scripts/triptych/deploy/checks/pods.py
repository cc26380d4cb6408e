"""Checks of the pods that run Triton: probes, shared memory, memory, shutdown.

Some checks compare with the build and the measurements of the pipeline.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from triptych.container.flags import ServerFlags
from triptych.container.serving_machine import (
    ServingMachine,
    choose,
    parse_machine,
    variants_in,
)
from triptych.container.supervisor import EXIT_S
from triptych.deploy.checks.objects import KIND, ServerPods, mapping, sequence
from triptych.deploy.context import PRODUCT
from triptych.deploy.generation import generation_shm_mib
from triptych.deploy.numbers import measured_memory_mib, shm_mib
from triptych.repository.lint.snapshot import Flaw, error, warning
from triptych.repository.manifest import CompiledManifest, TextManifest, read_manifest
from triptych.repository.records import EngineRecord

PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
USUAL_GRACE_S = 30
_SHELLS = ("sh", "bash", "dash", "ash")
_HEALTH = "triptych.container.health"
_ANSWER_S = 4
_SIZES = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "k": 10**3, "M": 10**6, "G": 10**9}
_KSERVE = ("InferenceService", "ServingRuntime", "ClusterServingRuntime")


def startup_probe(server: ServerPods) -> Iterator[Flaw]:
    container = server.container
    if "livenessProbe" in container and "startupProbe" not in container:
        yield error(
            "A server that loads models must have a startup probe, which suspends the liveness "
            "probe while they load",
            "livenessProbe and no startupProbe",
            "Add a startupProbe that lasts longer than the models were measured to load",
        )


def readiness_probe(server: ServerPods) -> Iterator[Flaw]:
    probe = mapping(server.container.get("readinessProbe"))
    path = _path(probe)
    if not probe:
        added = " except KServe's check of a port" if server.owner.kind in _KSERVE else ""
        yield error(
            "A readiness probe must check the models: without one, requests arrive too early",
            f"no readinessProbe{added}",
            f"Use /v2/health/ready, or better `python3 -m {_HEALTH}`",
        )
    elif "tcpSocket" in probe:
        yield error(
            "A readiness probe must check the models: the port is open while they load",
            "a readinessProbe of tcpSocket",
            f"Use /v2/health/ready, or better `python3 -m {_HEALTH}`",
        )
    elif path.endswith("/health/live"):
        yield error(
            "A readiness probe must check the models, not whether the process runs",
            path,
            "Use /v2/health/ready",
        )


def liveness_probe(server: ServerPods) -> Iterator[Flaw]:
    path = _path(mapping(server.container.get("livenessProbe")))
    if path.endswith("/ready"):
        yield error(
            "A liveness probe must not check readiness: a single model that is not ready would "
            "restart the server with all other models again and again",
            path,
            "Use /v2/health/live; the readiness probe takes the replica out of the Service",
        )


def probe_timeout(server: ServerPods) -> Iterator[Flaw]:
    for kind in PROBES:
        probe = mapping(server.container.get(kind))
        seconds = _number(probe.get("timeoutSeconds"), 1)
        if _HEALTH in str(probe.get("exec")) and seconds < _ANSWER_S:
            yield error(
                "The health check waits 3 s for an answer after its own start: with a shorter "
                "timeout a busy server is reported as unhealthy",
                f"timeoutSeconds of {kind}: {seconds:g}",
                "Set 10",
            )


def shared_memory(server: ServerPods) -> Iterator[Flaw]:
    volume = next(iter(server.shared_memory), {})
    if volume.get("medium") != "Memory":
        yield error(
            "Python steps need shared memory, 64 MiB each: with 64 MiB in total they "
            'end with "No space left on device"',
            "no emptyDir of medium Memory at /dev/shm",
            "Mount one there, with a sizeLimit of 64 MiB and the largest request for each process",
        )
    elif "sizeLimit" not in volume:
        yield warning(
            "Shared memory must have a limit, because it counts as the container's memory",
            "an emptyDir of medium Memory without sizeLimit",
            "Set 64 MiB and the largest request for each Python process",
        )


def pre_stop(server: ServerPods) -> Iterator[Flaw]:
    handler = mapping(mapping(server.container.get("lifecycle")).get("preStop"))
    command = [str(word) for word in sequence(mapping(handler.get("exec")).get("command"))]
    fault = _shell_fault(command)
    if fault:
        yield error(
            "The command of preStop must work: if it fails, SIGTERM is sent at once",
            f"{shlex.join(command)}: {fault}",
            'Write one word after -c: ["sh", "-c", "touch /tmp/stop; sleep 10"]',
        )
    elif not handler and not _is_knative(server) and server.owner.kind != KIND:
        yield warning(
            "A replica must wait before SIGTERM until no client sends requests to it",
            "no preStop",
            'Add preStop: {exec: {command: ["sleep", "10"]}}',
        )


def grace(server: ServerPods) -> Iterator[Flaw]:
    if _is_knative(server):
        return
    sleep_s = pre_stop_s(server)
    exit_s = exit_timeout_s(server)
    needed = sleep_s + exit_s + EXIT_S
    given = _number(server.pod.get("terminationGracePeriodSeconds"), USUAL_GRACE_S)
    if given < needed:
        yield error(
            "terminationGracePeriodSeconds must be longer than a replica takes to end: SIGKILL "
            "ends requests in flight",
            f"{given:g} s; preStop {sleep_s:g} s, requests in flight {exit_s:g} s and {EXIT_S:g} s "
            "for the server to end",
            f"Set {needed:g} or more",
        )


def model_control(server: ServerPods) -> Iterator[Flaw]:
    mode = server.flag("model-control-mode") or "none"
    if mode != "none":
        yield warning(
            "Replicas should serve the models that they started with: otherwise they change at "
            "different times, and no rollback is possible",
            f"--model-control-mode={mode}",
            "Leave it out; roll out an image or a volume with another name",
        )


def pre_stop_s(server: ServerPods) -> float:
    """Return the seconds that preStop sleeps, if its command can be parsed."""
    handler = mapping(mapping(server.container.get("lifecycle")).get("preStop"))
    native = mapping(handler.get("sleep")).get("seconds")
    if native is not None:
        return _number(native, 0)
    command = [str(word) for word in sequence(mapping(handler.get("exec")).get("command"))]
    if _shell_fault(command):
        return 0.0
    return sum(float(found) for found in re.findall(r"\bsleep (\d+)", " ".join(command)))


def exit_timeout_s(server: ServerPods) -> float:
    """Return the seconds that Triton waits for requests in flight."""
    flag = server.flag("exit-timeout-secs")
    given = server.variables.get("TRIPTYCH_EXIT_TIMEOUT_S") if flag is None else flag
    return _number(given, ServerFlags.exit_timeout_s)


def parse_bytes(quantity: object) -> float:
    """Return a quantity of Kubernetes in bytes; 0 for another text."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z]{0,2})", str(quantity))
    return float(found[1]) * _SIZES.get(found[2], 1) if found else 0.0


def _shell_fault(command: list[str]) -> str:
    """Return the fault of a shell command with words after its script; empty without one."""
    if len(command) < 2 or command[0].rpartition("/")[2] not in _SHELLS or command[1] != "-c":
        return ""
    script, rest = command[2] if len(command) > 2 else "", command[3:]
    if rest:
        return f"the shell runs `{script}` alone; {', '.join(rest)} are its parameters"
    return "nothing to run" if not script.strip() else ""


def _is_knative(server: ServerPods) -> bool:
    mode = str(server.owner.annotations.get("serving.kserve.io/deploymentMode", ""))
    return mode in ("Serverless", "Knative")


def _path(probe: dict[str, object]) -> str:
    """Return the path of an HTTP probe, or of a probe that calls curl."""
    path = mapping(probe.get("httpGet")).get("path")
    found = re.search(
        r"/v2/[\w./-]*", " ".join(map(str, sequence(mapping(probe.get("exec")).get("command"))))
    )
    return str(path or (found[0] if found else "")).rstrip("/")


def _number(value: object, usual: float) -> float:
    try:
        return usual if value is None else float(str(value))
    except ValueError:
        return usual


_MIB = 2**20


@dataclass(frozen=True)
class BuildInfo:
    """Information about a built pipeline, with which manifests are checked."""

    name: str
    engine: EngineRecord | None  # TensorRT engine, if the pipeline has one
    gpus: int  # Number of GPUs of a copy of the model; 0 for any number
    # Maximum memory that `bench` measured; None without a bench of this build.
    memory_mib: float | None
    shm_mib: int  # Maximum shared memory of the steps
    # Machine that the build is planned for, if the pipeline names one.
    machine: ServingMachine | None = None
    plans: Collection[str] = ()  # Names of the machines with a plan of their own


def read_encoder_info(repository: Path, pipeline: str, reports: Path) -> BuildInfo:
    """Return the information about an encoder or an own model; see `targets.read_build_info`."""
    build = read_manifest(repository, pipeline, CompiledManifest)
    memory_mib = measured_memory_mib(build, reports)
    return BuildInfo(
        pipeline,
        build.engine,
        0,
        memory_mib,
        shm_mib(build, repository),
        build.spec.serving.served_by,
        variants_in(build.files),
    )


def read_generation_info(repository: Path, pipeline: str) -> BuildInfo:
    """Return that about a pipeline that generates text; see `targets.read_build_info`."""
    spec = read_manifest(repository, pipeline, TextManifest).spec
    shared_mib = generation_shm_mib(repository, spec)
    return BuildInfo(pipeline, None, spec.gpus_per_copy, None, shared_mib)


def memory_measured(server: ServerPods) -> Iterator[Flaw]:
    build = server.owner.folder.build
    if build is None or build.memory_mib is None:
        return
    limit = server.resources("limits").get("memory")
    if 0 < parse_bytes(limit) / _MIB < build.memory_mib:
        yield error(
            "The memory limit must not be below the measured memory of the server",
            f"{limit}; it used {build.memory_mib:.0f} MiB, and shared memory counts",
            f"Set {build.memory_mib + build.shm_mib:.0f}Mi or more",
        )


def shared_memory_measured(server: ServerPods) -> Iterator[Flaw]:
    build = server.owner.folder.build
    if build is None:
        return
    for volume in server.shared_memory:
        size = volume.get("sizeLimit")
        if 0 < parse_bytes(size) / _MIB < build.shm_mib:
            yield error(
                "Shared memory must be large enough for the steps of the pipeline",
                f"sizeLimit: {size}; its instances and largest request take {build.shm_mib} MiB",
                f"Set {build.shm_mib}Mi, and raise the memory limit by the same amount",
            )


def cores_planned(server: ServerPods) -> Iterator[Flaw]:
    """Say what a pod reaches that requests fewer cores than the build is planned for."""
    build, requested = server.owner.folder.build, server.resources("requests").get("cpu")
    cores = parse_cores(requested)
    if build is None or build.machine is None or not 0 < cores < build.machine.cores:
        return
    machine = build.machine
    here = machine._replace(cores=max(1, math.ceil(cores)))
    plans = {*build.plans, machine.name}
    plan = choose(plans, here) or min(plans, key=lambda each: parse_machine(each).order)
    yield warning(
        "Pods should request the cores of serving.machine, for which the steps are planned",
        f"cpu: {requested}, and {machine.name} has {machine.cores}; the server uses the plan for "
        f"{plan}, and reaches about {cores / machine.cores:.0%} of the planned rate",
        f"Request {machine.cores} cores, or build with serving.machine: {here.name}",
    )


def parse_cores(quantity: object) -> float:
    """Return the cores of a quantity of Kubernetes (``1500m``); 0 if it is not one."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(m?)", str(quantity))
    return 0.0 if found is None else float(found[1]) / (1000 if found[2] else 1)


def engine_gpu(server: ServerPods) -> Iterator[Flaw]:
    build = server.owner.folder.build
    if build is None or server.owner.kind == KIND:
        return
    if build.gpus:
        yield from _parts(server, build)
    engine = build.engine
    if engine is None:
        return
    own = engine.gpu.replace(" ", "-")
    node = mapping(server.pod.get("nodeSelector")).get(PRODUCT)
    if engine.hardware == "none" and node != own:
        yield error(
            "Nodes must have the GPU that the engine was built for, because no other GPU loads it",
            f"{PRODUCT}: {node or 'not selected'}; the engine is of {own}",
            f"Select {own}, or run `triptych engine {build.name}` on the other one",
        )


def _parts(server: ServerPods, build: BuildInfo) -> Iterator[Flaw]:
    limits = server.resources("limits")
    given = {name: count for name, count in limits.items() if name.startswith("nvidia.com/")}
    if [str(count) for count in given.values()] != [str(build.gpus)]:
        shown = ", ".join(f"{name}: {count}" for name, count in given.items())
        yield error(
            "A pod must have a GPU for each part of the model",
            f"{shown or 'no nvidia.com/gpu'}; it has {build.gpus} (tensor_parallel_size x "
            "pipeline_parallel_size)",
            f"Limit nvidia.com/gpu to {build.gpus}, or build {build.name} with as many parts",
        )
