"""The verbs `new`, `build` and `serve` for programs and notebooks; each imports what it needs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triptych.base.errors import Progress, UserError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from triptych.building.build import Built
    from triptych.client import Client
    from triptych.interface.report.plots import Figure

PIPELINES = Path("pipelines")
REPOSITORY = Path("model_repository")


def _silent(_stage: str, _line: str) -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class Build:
    """What `build` did; its gate has passed.

    Attributes:
        built: plan, models that changed, the gate's result and findings of lint.
    """

    built: Built

    @property
    def figures(self) -> dict[str, float]:
        """What the gate measured, by the metric's name."""
        return {verdict.metric: verdict.value for verdict in self.built.gate.verdicts}

    def plot_differences(self) -> Figure:
        """How far the rows of your traffic are from the original model; a notebook shows it."""
        from triptych.interface.report.plots import differences_of

        return differences_of(self.built.gate)

    def plot_lengths(self) -> Figure:
        """Tokens of the rows of your traffic; empty for images."""
        from triptych.interface.report.plots import lengths_of

        return lengths_of(self.built.plan.lengths)


@dataclass(frozen=True)
class Served:
    """A server that is ready, for as long as the context of `serve` lasts.

    Attributes:
        grpc_url: ``host:port``.
        http_url: ``host:port``.
        metrics_url: the whole address.
    """

    grpc_url: str
    http_url: str
    metrics_url: str
    _clients: dict[str, Client] = field(default_factory=dict, repr=False)
    _open: ExitStack = field(default_factory=ExitStack, repr=False)

    def client(self, name: str) -> Client:
        """The typed client of a pipeline; closed with the server."""
        from triptych.client import Client

        if name not in self._clients:
            self._clients[name] = self._open.enter_context(Client(name, self.grpc_url))
        return self._clients[name]

    def infer(
        self,
        name: str,
        inputs: Mapping[str, list[str] | list[bytes]],
        parameters: Mapping[str, str | int | float | bool] | None = None,
    ) -> Mapping[str, NDArray[Any]]:
        """The outputs of a pipeline by name, ``[rows, …]`` each; texts are bytes in them.

        Raises:
            InferenceError: the pipeline refuses the request or fails.
        """
        return self.client(name).infer(inputs, parameters=parameters)


def new(
    name: str,
    task: str,
    *,
    model: str | None = None,
    hooks: bool = False,
    pipelines: Path | str = PIPELINES,
) -> Path:
    """Write the folder of a new pipeline, as `triptych new` does; its path.

    Raises:
        UserError: a name or task that will not do, or a pipeline that exists.
    """
    from triptych.spec.scaffold import scaffold

    made = scaffold(name, task=task, model=model, with_hooks=hooks, pipelines=Path(pipelines))
    return Path(made.folder)


def build(
    name: str,
    *,
    pipelines: Path | str = PIPELINES,
    repository: Path | str = REPOSITORY,
    overrides: Mapping[str, Any] | None = None,
    accept_failed_gate: str = "",
    rehearsal: bool = True,
    progress: Progress = _silent,
) -> Build:
    """Build a pipeline into the model repository, as `triptych build` does; no report is written.

    Args:
        name: of the pipeline's folder in `pipelines`.
        pipelines: folder of the pipelines.
        repository: folder of the models.
        overrides: fields of the spec by their dotted keys, such as ``core.precision``.
        accept_failed_gate: the reason why a failed gate does not matter; it goes on record.
        rehearsal: whether TensorRT for RTX tries the engine where none can be built.
        progress: told each stage and what became of it; ``print`` will do.

    Raises:
        GateFailure: the artifact differs from the original model; nothing was written.
        LintFailure: the repository would not serve.
        EngineFailure: the engine differs from the graph, which is written without it.
        UserError: in the spec, the model, the hooks or the traffic.
    """
    from triptych.building.build import build as build_pipeline
    from triptych.core.inputs import read_inputs
    from triptych.spec.spec import load_spec

    changes = [f"{key}={json.dumps(value)}" for key, value in (overrides or {}).items()]
    inputs = read_inputs(load_spec(Path(pipelines) / name, changes), progress)
    accept = accept_failed_gate.strip()
    built = build_pipeline(
        inputs, Path(repository), progress, accept=accept, engine_dry_run=rehearsal
    )
    return Build(built)


@contextmanager
def serve(
    *names: str,
    repository: Path | str = REPOSITORY,
    host: str = "127.0.0.1",
    grpc_port: int = 0,
    http_port: int = 0,
    metrics_port: int = 0,
) -> Iterator[Served]:
    """Serve what is built with a real tritonserver, until the context ends.

    Args:
        names: pipelines; none of them for all that the repository holds.
        repository: folder of the models.
        host: address to listen on.
        grpc_port: 0 picks a free one, as for the other two.
        http_port: see `grpc_port`.
        metrics_port: see `grpc_port`.

    Raises:
        UserError: a pipeline is not built, or not as its lock says, or does not load.
    """
    from triptych.repository.store import recover
    from triptych.serving.endpoint import check_built
    from triptych.serving.server import Server, check_and_make_flags

    folder = Path(repository)
    if not folder.is_dir():
        raise UserError(
            "repository",
            "must be a folder with models",
            given=folder,
            remedy="Build a pipeline into it first",
        )
    for name in names:
        check_built(folder, name)
    recover(folder)
    check_and_make_flags(folder, production=False)
    server = Server(
        folder,
        host=host,
        grpc_port=grpc_port,
        http_port=http_port,
        metrics_port=metrics_port,
        models=names,
    )
    with server, ExitStack() as clients:
        yield Served(server.grpc_url, server.http_url, server.metrics_url, _open=clients)
