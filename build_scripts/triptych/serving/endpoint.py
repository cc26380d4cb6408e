"""Where a pipeline is served: a server of one's own while needed, or one that runs already."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from triptych.base.errors import UserError
from triptych.repository.config import CONFIG_FILE
from triptych.repository.store import complete
from triptych.runtime.sample_files import FOLDER_VARIABLE
from triptych.serving.server import Server

_DEATH_S = 3.0
"""How long a server that stopped answering may take to be seen dead."""

UNSAMPLED = {FOLDER_VARIABLE: ""}
"""Environment of a server that no user asks: nothing is sampled, whatever this process has set."""


@dataclass(frozen=True)
class Endpoint:
    """A server that is ready: ``host:port``, the whole address of its metrics, its own process.

    `load_s` is how long it took from its start to ready, where it was started here.
    """

    grpc_url: str
    metrics_url: str | None = None
    pid: int | None = None
    load_s: float | None = None


def check_built(repository: Path, pipeline: str) -> None:
    """Raises a `UserError` where the repository does not hold the pipeline."""
    if not (repository / pipeline / CONFIG_FILE).is_file():
        raise UserError(
            str(repository),
            "must hold the pipeline",
            given=f"no model {pipeline}",
            remedy=f"Run `triptych build {pipeline}`, or name a server with --url",
        )


@contextmanager
def served(
    repository: Path,
    pipeline: str,
    url: str | None,
    progress: Callable[[str, str], None],
    *,
    metrics_url: str | None = None,
) -> Iterator[Endpoint]:
    """The server at `url`; without it one on `repository` that lives as long as the context.

    Raises:
        UserError: the pipeline is not built, or its server does not start, or died meanwhile.
    """
    if url is not None:
        yield Endpoint(url, metrics_url)
        return
    check_built(repository, pipeline)
    complete(repository)
    progress("serve", f"tritonserver on {repository} ...")
    began = time.monotonic()
    with Server(repository, models=[pipeline], environment=UNSAMPLED) as server:
        load_s = time.monotonic() - began
        try:
            yield Endpoint(server.grpc_url, server.metrics_url, server.pid, load_s)
        except UserError as error:
            death = server.death(_DEATH_S)
            if death is not None:
                raise death from error
            raise
