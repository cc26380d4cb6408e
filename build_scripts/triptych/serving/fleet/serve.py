"""A repository served by several replicas, from nothing to a fleet and back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from triptych.base.files import told_to_user
from triptych.container.locks import find_pipelines
from triptych.container.sizes import largest_request_mib
from triptych.repository.lock import find_lock
from triptych.repository.store import work_beside
from triptych.serving.fleet.bootstrap import Listen
from triptych.serving.fleet.builds import Build
from triptych.serving.fleet.candidate import Candidate
from triptych.serving.fleet.clusters import EndpointNames, Mirror
from triptych.serving.fleet.fleet import Fleet
from triptych.serving.fleet.gpus import variables_of
from triptych.serving.fleet.mirrored import Mirrored
from triptych.serving.fleet.proxy import Proxy, find_envoy
from triptych.serving.fleet.replica import Replica
from triptych.serving.fleet.settings import proxy_settings
from triptych.serving.ports import claim_ports
from triptych.serving.server import Server
from triptych.serving.wait import until_asked

_LOOPBACK = "127.0.0.1"
_LOOK_S = 0.3


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
    mirrored: Mirrored | None = None,
    candidate_environment: Mapping[str, str] | None = None,
    exchanges: bool = True,
    log_file: Path | None = None,
    load_s: float = 120.0,
    on_change: Callable[[str], None],
    on_problem: Callable[[str], None],
) -> Iterator[Fleet]:
    """A fleet of two replicas or more, not started; what it leaves on the disk goes at the end.

    Each of the `gpus`, written as in ``CUDA_VISIBLE_DEVICES``, is one replica's; without them each
    sees all. `mirrored` is a candidate of the same flags, with variables of its own. Each server
    and Envoy log into a file of their own beside the name `log_file`. What `Fleet` and `Server`
    take besides is passed on.

    Raises:
        UserError: Envoy is not installed, a port is busy, or the folder beside the repository
            cannot be made.
    """
    find_envoy()
    wanted = {"grpc_port": grpc_port, "http_port": http_port, "metrics_port": metrics_port}
    servers = replicas + (mirrored is not None)
    own = [f"{name}_{number}" for number in range(servers) for name in wanted]
    # All at once, so that no two replicas pick the same.
    ports = claim_ports(host, {**wanted, **dict.fromkeys(["admin_port", *own], 0)})

    def new_server(build: Path, number: int) -> Server:
        variables = {**(environment or {}), **variables_of(gpus, number)}
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
            log_file=_beside(log_file, name),
        )

    with ExitStack() as opened:
        with told_to_user(repository.resolve().parent):
            folder = opened.enter_context(work_beside(repository, "serve"))
        settings = proxy_settings(
            replicas=replicas,
            max_request_mib=largest_request_mib(repository),
            limits_ms=_promised_ms(repository),
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
            candidate = Candidate(
                Replica("candidate", server, models, Build(1, mirrored.repository)),
                load_s=load_s,
                on_change=on_change,
                on_problem=on_problem,
            )
        proxy = Proxy(
            settings,
            Listen(host, **{name: ports[name] for name in (*wanted, "admin_port")}),
            log_file=_beside(log_file, "envoy") or folder / "envoy.log",
            mirror=mirror,
            orphan_paths=[folder],
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


def serve_until_asked(fleet: Fleet, on_ready: Callable[[], None]) -> str:
    """Start a fleet and keep it up until the first SIGTERM or SIGINT, also one while it starts.

    Returns:
        The signal's name.

    Raises:
        UserError: a replica does not load at first, or none is left.
    """
    with until_asked(fleet.stop) as asked:
        fleet.start()
        on_ready()
        while True:
            time.sleep(_LOOK_S)
            fleet.look()
    return asked[0]


def _promised_ms(repository: Path) -> list[float]:
    locks = [find_lock(repository, pipeline.name) for pipeline in find_pipelines(repository)]
    return [ms for lock in locks if lock for ms in lock.spec.serving.slo.limits_ms.values()]


def _beside(log_file: Path | None, name: str) -> Path | None:
    return log_file and log_file.with_name(f"{log_file.stem}-{name}{log_file.suffix}")
