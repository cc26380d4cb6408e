"""Serve a repository with several replicas: options, GPUs, capacity warnings, and the fleet."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from triptych.base.errors import UserError
from triptych.base.files import os_errors_as_user_errors
from triptych.container.manifests import find_pipelines, largest_request_mib
from triptych.container.settings import read_trace
from triptych.repository.manifest import EncoderManifest, find_manifest
from triptych.repository.store import sibling_work_dir
from triptych.serving.endpoint import in_order, until_signal
from triptych.serving.fleet.access import Access
from triptych.serving.fleet.envoy import EndpointNames, Listen, Mirror, proxy_settings
from triptych.serving.fleet.fleet import CandidateServer, Fleet, Replica, ReplicaBuild
from triptych.serving.fleet.mirror import MirrorOption
from triptych.serving.fleet.proxy import Proxy, find_envoy
from triptych.serving.ports import reserve_ports
from triptych.serving.server import Server, new_shell_safe_dir

_MIB = 2**20


def find_capacity_warnings(servers: Iterable[int]) -> list[str]:
    """Return capacity warnings about running servers, given their process ids."""
    used = [_memory_mib(pid) for pid in servers]
    free_mib = psutil.virtual_memory().available / _MIB
    return list(capacity_warnings(used, free_mib, len(os.sched_getaffinity(0))))


def capacity_warnings(used_mib: list[float], free_mib: float, cores: int) -> Iterator[str]:
    """Yield capacity warnings from the memory of each replica, free memory (MiB), and cores."""
    if max(used_mib) > free_mib:
        yield (
            f"a replica uses {max(used_mib):.0f} MiB and {free_mib:.0f} MiB are free: under load "
            "replicas may need more; use fewer replicas"
        )
    if len(used_mib) > cores:
        yield f"{len(used_mib)} replicas share {cores} cores and slow each other down"


def _memory_mib(server: int) -> float:
    """Return the memory of a server and its steps in MiB (PSS: shared pages count once)."""
    total = 0
    with suppress(psutil.Error):
        process = psutil.Process(server)
        for member in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):
                total += member.memory_full_info().pss
    return total / _MIB


def count_replicas(replicas: int | None, gpus: Sequence[str]) -> int:
    """Return the number of replicas.

    Raises:
        UserError: The number is below 1 or differs from the number of GPUs, or a GPU is repeated.
    """
    count = len(gpus) or 1 if replicas is None else replicas
    if count < 1:
        raise UserError(
            "--replicas", "must be at least 1", given=replicas, remedy="Give another number"
        )
    if "" in gpus or len(set(gpus)) < len(gpus):
        raise UserError(
            "--gpus",
            "must list each GPU once, as numbers or UUIDs of `nvidia-smi -L`",
            given=",".join(gpus),
            remedy="Write for example --gpus 0,1",
        )
    if gpus and count != len(gpus):
        raise UserError(
            "--replicas",
            "must equal the number of GPUs, because each replica uses one",
            given=f"{count} with --gpus {','.join(gpus)}",
            remedy="Leave --replicas out",
        )
    return count


def check_gpus(gpus: Sequence[str], installed: int) -> None:
    """Check that this machine has the GPUs; raise `UserError` otherwise."""
    for gpu in gpus:
        if installed == 0 or (gpu.isdecimal() and int(gpu) >= installed):
            raise UserError(
                "--gpus",
                "contains an unknown GPU",
                given=f"{gpu}; GPUs of this machine: {installed or 'none'}",
                remedy="Use numbers of `nvidia-smi -L`" if installed else "Leave --gpus out",
            )


def gpu_variables(gpus: Sequence[str], number: int) -> dict[str, str]:
    """Return the variable that limits a server to its GPU; empty without `gpus`."""
    return {"CUDA_VISIBLE_DEVICES": gpus[number]} if gpus else {}


CANDIDATE_FOLDER = ".candidate"
"""Subfolder for the candidate's samples, so that they do not displace those of the fleet."""


_LOOPBACK = "127.0.0.1"
_POLL_S = 0.3


@contextmanager
def new_fleet(
    repository: Path,
    *,
    replicas: int,
    gpus: Sequence[str] = (),
    host: str = "127.0.0.1",
    grpc_port: int = 0,
    http_port: int = 0,
    metrics_port: int = 0,
    models: Sequence[str] = (),
    production_flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    mirrored: MirrorOption | None = None,
    candidate_environment: Mapping[str, str] | None = None,
    exchanges: bool = True,
    access: Access | None = None,
    log_file: Path | None = None,
    backend_directory: Path | None = None,
    machine: str | None = None,
    load_s: float = 120.0,
    on_change: Callable[[str], None],
    on_problem: Callable[[str], None],
) -> Iterator[Fleet]:
    """Yield a fleet of at least two replicas, not started; remove its files after the block.

    Each entry of `gpus`, written as in ``CUDA_VISIBLE_DEVICES``, is the GPU of one replica; without
    it each replica sees all GPUs. `mirrored` is a candidate with the same flags and with
    `candidate_environment`. `access` is that of Envoy. Each server and Envoy write a log file whose
    name starts like `log_file`. The other arguments are those of `Fleet` and `Server`.

    Raises:
        UserError: Envoy is not installed, a port is busy, or the folder beside the repository
            cannot be created.
    """
    find_envoy()
    wanted = {"grpc_port": grpc_port, "http_port": http_port, "metrics_port": metrics_port}
    servers = replicas + (mirrored is not None)
    own = [f"{name}_{number}" for number in range(servers) for name in wanted]
    # Reserved together, so that no two replicas pick the same port.
    ports = reserve_ports(host, {**wanted, **dict.fromkeys(own, 0)})

    def new_server(build: Path, number: int) -> Server:
        variables = {**(environment or {}), **gpu_variables(gpus, number)}
        return server_at(build, number, variables, str(number + 1))

    def server_at(build: Path, number: int, variables: Mapping[str, str], name: str) -> Server:
        return Server(
            build,
            grpc_port=ports[f"grpc_port_{number}"],
            http_port=ports[f"http_port_{number}"],
            metrics_port=ports[f"metrics_port_{number}"],
            models=models,
            production_flags=production_flags,
            environment=variables,
            log_file=_sibling_log(log_file, name),
            backend_directory=backend_directory,
            machine=machine,
        )

    with ExitStack() as opened:
        with os_errors_as_user_errors(repository.resolve().parent):
            folder = opened.enter_context(sibling_work_dir(repository, "serve"))
        sockets = new_shell_safe_dir()  # short, because the path of a socket has at most 107 bytes
        opened.callback(shutil.rmtree, sockets, ignore_errors=True)
        settings = proxy_settings(
            replicas=replicas,
            max_request_mib=largest_request_mib(repository),
            limits_ms=_slo_limits_ms(repository),
        )
        mirror = candidate = None
        if mirrored is not None:
            at = EndpointNames(
                _LOOPBACK, ports[f"grpc_port_{replicas}"], ports[f"http_port_{replicas}"]
            )
            mirror = Mirror(mirrored.share, at)
            server = server_at(
                mirrored.repository, replicas, candidate_environment or {}, "candidate"
            )
            candidate = CandidateServer(
                Replica("candidate", server, models, ReplicaBuild(1, mirrored.repository)),
                load_s=load_s,
                on_change=on_change,
                on_problem=on_problem,
            )
        trace = read_trace(os.environ)
        proxy = Proxy(
            settings,
            Listen(host, **{name: ports[name] for name in wanted}),
            log_file=_sibling_log(log_file, "envoy") or folder / "envoy.log",
            mirror=mirror,
            access=access,
            gateway_socket=sockets / "grpc.sock",
            collector=trace and trace.collector,
            orphan_paths=[folder, sockets],
        )
        yield Fleet(
            repository,
            folder,
            new_server,
            replicas=replicas,
            proxy=proxy,
            models=models,
            candidate=candidate,
            exchanges=exchanges,
            load_s=load_s,
            on_change=on_change,
            on_problem=on_problem,
        )


def serve_until_signal(
    fleet: Fleet,
    on_ready: Callable[[], None],
    *,
    meanwhile: Callable[[], None] = lambda: None,
    before_stop: Callable[[], None] = lambda: None,
) -> str:
    """Start a fleet and reconcile it until SIGTERM or SIGINT; return the signal's name.

    `meanwhile` is called after each look at the fleet, and `before_stop` before it stops.

    Raises:
        UserError: A replica does not load at the start, or all replicas fail for good.
    """
    with until_signal(in_order(before_stop, fleet.stop)) as signals:
        fleet.start()
        on_ready()
        while True:
            time.sleep(_POLL_S)
            fleet.reconcile()
            meanwhile()
    return signals[0]


def _slo_limits_ms(repository: Path) -> list[float]:
    names = [pipeline.name for pipeline in find_pipelines(repository)]
    manifests = [find_manifest(repository, name, EncoderManifest) for name in names]
    slos = [manifest.spec.serving.slo for manifest in manifests if manifest is not None]
    return [limit_ms for slo in slos for limit_ms in slo.limits_ms.values()]


def _sibling_log(log_file: Path | None, name: str) -> Path | None:
    return log_file and log_file.with_name(f"{log_file.stem}-{name}{log_file.suffix}")
