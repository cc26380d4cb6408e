"""Python functions `new`, `build` and `serve`, for programs and notebooks."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triptych.base.errors import Progress, UserError, no_progress

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from triptych.building.build import BuildOutcome
    from triptych.client import Client
    from triptych.interface.report.plots import SvgFigure

PIPELINES = Path("pipelines")
REPOSITORY = Path("model_repository")


def print_progress(stage: str, line: str) -> None:
    """Print the outcome of a stage of a build on stderr."""
    print(f"  {stage:8} {line}", file=sys.stderr, flush=True)


_WORDS = re.compile(r"`triptych [^`]*`|--([a-z]+(?:-[a-z]+)*)")
"""Commands, which messages keep, and options of the command line."""


@contextmanager
def _name_arguments() -> Iterator[None]:
    """Let errors of the block name arguments of Python instead of options of the command line."""

    def argument(match: re.Match[str]) -> str:
        option = match[1]
        if option is None:
            return match[0]
        return "overrides" if option == "set" else option.replace("-", "_")

    try:
        yield
    except UserError as error:
        parts = {name: _WORDS.sub(argument, text) for name, text in error.as_dict().items()}
        if parts == error.as_dict():
            raise
        raise UserError(**parts) from error


@dataclass(frozen=True, repr=False)
class BuildResult:
    """Result of `build`, whose accuracy gate has passed."""

    # Changed models, gate result and findings of lint; for an encoder also the plan.
    built: BuildOutcome

    @property
    def figures(self) -> dict[str, float]:
        """Values of the gate's metrics by their names."""
        return {verdict.metric: verdict.value for verdict in self.built.gate.verdicts}

    def plot_differences(self) -> SvgFigure:
        """Return a histogram of the rows' differences from the original model."""
        from triptych.interface.report.plots import plot_row_differences

        return plot_row_differences(self.built.gate)

    def plot_lengths(self) -> SvgFigure:
        """Return a histogram of the rows' number of tokens; empty for images and generated text."""
        from triptych.interface.report.plots import plot_row_lengths

        plan = self.built.plan
        return plot_row_lengths(None if plan is None else plan.lengths)

    def __repr__(self) -> str:
        changed = ", ".join(self.built.changed) or "nothing"
        figures = ", ".join(f"{name}={value:.4g}" for name, value in self.figures.items())
        return f"BuildResult(written: {changed}; gate: {figures})"

    def _repr_html_(self) -> str:
        """Return a table of the gate's metrics with their limits, for notebooks."""
        rows = "".join(
            f"<tr><td>{escape(verdict.metric)}</td><td>{verdict.value:.4g}</td>"
            f"<td>{'none' if verdict.limit is None else format(verdict.limit, '.4g')}</td>"
            f"<td>{'passed' if verdict.passed else 'failed'}</td></tr>"
            for verdict in self.built.gate.verdicts
        )
        changed = escape(", ".join(self.built.changed) or "nothing")
        head = "<tr><th>metric</th><th>value</th><th>limit</th><th></th></tr>"
        return f"<p>written: {changed}</p><table>{head}{rows}</table>"


@dataclass(frozen=True)
class ServerHandle:
    """A running server of `serve`."""

    grpc_url: str  # Address ``host:port`` of gRPC
    http_url: str  # Address ``host:port`` of HTTP
    metrics_url: str  # Complete URL of the metrics page
    _clients: dict[str, Client] = field(default_factory=dict, repr=False)
    _open: ExitStack = field(default_factory=ExitStack, repr=False)

    def client(self, name: str) -> Client:
        """Return the typed client of a pipeline, which is closed with the server."""
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
        """Return the outputs of a pipeline by name, of shape ``[rows, …]``; texts are str.

        Raises:
            InferenceError: The pipeline rejects the request or fails.
        """
        return self.client(name).infer(inputs, parameters=parameters)


def new(
    name: str,
    task: str | None = None,
    *,
    template: str | None = None,
    model: str | None = None,
    hooks: bool = False,
    pipelines: Path | str = PIPELINES,
) -> Path:
    """Write the folder of a new pipeline, as `triptych new` does, and return its path.

    Args:
        name: Name of the pipeline.
        task: Task, or another built-in template; None with `template`.
        template: Name of a built-in template, or a folder.
        model: A Hub id, ``package:NAME``, a folder, an ONNX file, or ``FILE.py:NAME`` of a
            PyTorch module. None: an example for the task.
        hooks: Whether to add ``hooks.py`` and its tests.
        pipelines: Folder of the pipelines.

    Raises:
        UserError: The name, task or template is invalid, or the pipeline exists.
    """
    from triptych.core.own_scaffold import describe_model
    from triptych.spec.scaffold import scaffold

    with _name_arguments():
        made = scaffold(
            name,
            task=task,
            model=model,
            with_hooks=hooks,
            pipelines=Path(pipelines),
            describe=describe_model,
            template=template,
        )
    return Path(made.folder)


def build(
    name: str,
    *,
    pipelines: Path | str = PIPELINES,
    repository: Path | str = REPOSITORY,
    overrides: Mapping[str, object] | None = None,
    accept_failed_gate: str = "",
    engine_dry_run: bool = True,
    progress: Progress | None = print_progress,
) -> BuildResult:
    """Build a pipeline of any kind, as `triptych build` does, without a report.

    Args:
        name: Name of the pipeline's folder in `pipelines`.
        pipelines: Folder of the pipelines.
        repository: Folder of the model repository.
        overrides: Fields of the spec by their dotted keys, such as ``core.precision``.
        accept_failed_gate: Reason to accept a failed gate, which is recorded.
        engine_dry_run: Whether a machine that cannot build the engine does a dry run of its build.
        progress: Called with each stage and its outcome; None for no output.

    Raises:
        GateFailure: The model's accuracy is insufficient; nothing was written.
        LintFailure: A server would reject the repository.
        EngineFailure: The engine's accuracy is insufficient; the repository has no engine.
        UserError: The spec, the model, the hooks or the traffic are invalid.
    """
    from triptych.building.pipeline import open_pipeline
    from triptych.building.stages import BuildOptions
    from triptych.spec.any_spec import load_any_spec

    changes = [f"{key}={json.dumps(value)}" for key, value in (overrides or {}).items()]
    options = BuildOptions(
        repository=Path(repository),
        progress=progress or no_progress,
        accept=accept_failed_gate.strip(),
        engine_dry_run=engine_dry_run,
    )
    with _name_arguments():
        spec = load_any_spec(Path(pipelines) / name, changes)
        return BuildResult(open_pipeline(spec).build(options))


@contextmanager
def serve(
    *names: str,
    repository: Path | str = REPOSITORY,
    host: str = "127.0.0.1",
    grpc_port: int = 0,
    http_port: int = 0,
    metrics_port: int = 0,
) -> Iterator[ServerHandle]:
    """Serve built pipelines with tritonserver until the context ends.

    Args:
        names: Pipelines; without names, all pipelines of the repository.
        repository: Folder of the model repository.
        host: Address to listen on.
        grpc_port: Port of gRPC; 0 picks a free port.
        http_port: Port of HTTP; 0 picks a free port.
        metrics_port: Port of the metrics page; 0 picks a free port.

    Raises:
        UserError: A pipeline is not built, differs from its build manifest, or does not load.
    """
    from triptych.repository.store import recover
    from triptych.serving.endpoint import check_built
    from triptych.serving.server import Server, ServerAddress, check_and_make_flags

    folder = Path(repository)
    if not folder.is_dir():
        raise UserError(
            "repository",
            "must be a folder with models",
            given=folder,
            remedy="Run `triptych build NAME` first",
        )
    for name in names:
        check_built(folder, name)
    recover(folder)
    check_and_make_flags(folder, production=False)
    address = ServerAddress(
        host=host, grpc_port=grpc_port, http_port=http_port, metrics_port=metrics_port
    )
    with Server(folder, models=names, address=address) as server, ExitStack() as clients:
        yield ServerHandle(server.grpc_url, server.http_url, server.metrics_url, _open=clients)
