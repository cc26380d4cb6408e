"""A repository served by several replicas, from nothing to a fleet and back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from triptych.container.locks import find_pipelines
from triptych.container.sizes import largest_request_mib
from triptych.files import told_to_user
from triptych.fleet.bootstrap import Listen
from triptych.fleet.fleet import Fleet
from triptych.fleet.gpus import variables_of
from triptych.fleet.proxy import Proxy, find_envoy
from triptych.fleet.settings import proxy_settings
from triptych.repository.lock import find_lock
from triptych.repository.store import work_beside
from triptych.server.ports import claim_ports
from triptych.server.server import Server
from triptych.server.wait import until_asked

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
    exchanges: bool = True,
    log_file: Path | None = None,
    load_s: float = 120.0,
    on_change: Callable[[str], None],
    on_problem: Callable[[str], None],
) -> Iterator[Fleet]:
    """A fleet of two replicas or more, not started; what it leaves on the disk goes at the end.

    Each of the `gpus`, written as in ``CUDA_VISIBLE_DEVICES``, is one replica's; without them each
    sees all. Each replica and Envoy log into a file of their own beside the name `log_file`. What
    `Fleet` and `Server` take besides is passed on.

    Raises:
        UserError: Envoy is not installed, a port is busy, or the folder beside the repository
            cannot be made.
    """
    find_envoy()
    wanted = {"grpc_port": grpc_port, "http_port": http_port, "metrics_port": metrics_port}
    own = [f"{name}_{number}" for number in range(replicas) for name in wanted]
    # All at once, so that no two replicas pick the same.
    ports = claim_ports(host, {**wanted, **dict.fromkeys(["admin_port", *own], 0)})

    def new_server(build: Path, number: int) -> Server:
        return Server(
            build,
            grpc_port=ports[f"grpc_port_{number}"],
            http_port=ports[f"http_port_{number}"],
            metrics_port=ports[f"metrics_port_{number}"],
            models=models,
            production_flags=production_flags,
            environment={**(environment or {}), **variables_of(gpus, number)},
            log_file=_beside(log_file, str(number + 1)),
        )

    with ExitStack() as opened:
        with told_to_user(repository.resolve().parent):
            folder = opened.enter_context(work_beside(repository, "serve"))
        settings = proxy_settings(
            replicas=replicas,
            max_request_mib=largest_request_mib(repository),
            limits_ms=_promised_ms(repository),
        )
        proxy = Proxy(
            settings,
            Listen(host, **{name: ports[name] for name in (*wanted, "admin_port")}),
            log_file=_beside(log_file, "envoy") or folder / "envoy.log",
            orphan_paths=[folder],
        )
        yield Fleet(
            repository,
            folder,
            new_server,
            replicas=replicas,
            proxy=proxy,
            models=models,
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
