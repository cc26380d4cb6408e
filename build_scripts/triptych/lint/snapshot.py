"""A model repository read once: what every lint check looks at."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych.errors import UserError
from triptych.lint.backends import BACKENDS, ENSEMBLE, backend_of, inferred_backend
from triptych.lint.graph import Graph, onnx_installed, read_graph
from triptych.lint.python_source import Source, defines, read_sources
from triptych.releases import Release
from triptych.repository.config import CONFIG_FILE, read_config
from triptych.repository.lock import LOCK_FILE

# Every Python step that Triptych writes carries it, and nothing else does.
_OUR_MARK = "stub_io.py"

GRAPH_BACKENDS = ("onnxruntime", "tensorrt")
"""Backends whose version folders hold an ONNX file: to be run, or to build an engine from."""


@dataclass(frozen=True)
class Model:
    """One folder of the repository.

    Attributes:
        name: of the folder.
        folder: absolute, or relative to the working directory.
        config: a ModelConfig; None when missing or unreadable.
        config_problem: why `config` is None, with line:column where known; empty when missing.
        lock: the parsed `triptych.lock.json`; None when missing or unreadable.
        lock_problem: why `lock` is None; empty when missing.
        version_folders: names of its subfolders that start with a digit.
        served_versions: those that its version policy serves, newest first.
        backend: ``ensemble``, a backend's name, or empty when it cannot be told; without a
            config, the one that would load the files that are there.
        graphs: one for each served version that holds an ONNX file.
        sources: the Python files of the served versions of a Python model.
    """

    name: str
    folder: Path
    config: Any
    config_problem: str
    lock: Any
    lock_problem: str
    version_folders: tuple[str, ...]
    served_versions: tuple[int, ...]
    backend: str
    graphs: tuple[Graph, ...]
    sources: tuple[Source, ...]

    @property
    def config_file(self) -> str:
        """Path of its config, relative to the repository."""
        return f"{self.name}/{CONFIG_FILE}"

    @property
    def is_ensemble(self) -> bool:
        """Whether it only wires other models."""
        return self.backend == ENSEMBLE

    @property
    def is_ours(self) -> bool:
        """Whether Triptych wrote this step, and with it the producer of planned shapes."""
        return any(is_file(folder / _OUR_MARK) for folder in self.served_folders)

    @property
    def served_folders(self) -> tuple[Path, ...]:
        """The version folders that the server loads."""
        return tuple(self.folder / str(version) for version in self.served_versions)

    @property
    def completes_itself(self) -> bool:
        """Whether the server finds out what the config leaves out: its inputs and outputs."""
        if self.backend == "python":
            return any(defines(source.tree, "auto_complete_config") for source in self.sources)
        return bool(self.backend) and not self.is_ensemble

    @property
    def model_file(self) -> str:
        """What the backend loads from a version folder; empty when that varies."""
        known = BACKENDS.get(self.backend)
        return str(self.config.default_model_filename) or (known.model_file if known else "")


@dataclass(frozen=True)
class Repository:
    """A model repository and the release it is meant for.

    Attributes:
        root: its folder.
        models: by folder name, sorted.
        triton: the target release.
        with_engines: whether it must load the engines, too.
        reads_graphs: whether onnx is installed; without it no model has `graphs`.
    """

    root: Path
    models: dict[str, Model]
    triton: Release
    with_engines: bool
    reads_graphs: bool

    def configured(self) -> Iterator[Model]:
        """The models whose config could be read."""
        return (model for model in self.models.values() if model.config is not None)

    def ensembles(self) -> Iterator[Model]:
        """The ensembles among `configured`."""
        return (model for model in self.configured() if model.is_ensemble)

    def executed(self) -> Iterator[Model]:
        """The models among `configured` that a backend runs: everything but ensembles."""
        return (model for model in self.configured() if not model.is_ensemble)


def read_repository(root: Path, triton: Release, *, with_engines: bool) -> Repository:
    """Read every model folder below `root`; what cannot be read becomes a model's problem."""
    reads_graphs = onnx_installed()
    # Hidden folders too: the server takes every folder for a model.
    folders = subfolders(root)
    models = {folder.name: _read_model(folder, reads_graphs=reads_graphs) for folder in folders}
    return Repository(root, models, triton, with_engines, reads_graphs)


def subfolders(folder: Path) -> list[Path]:
    """The folders in `folder`, sorted by name; none when it cannot be listed."""
    try:
        return sorted(entry for entry in folder.iterdir() if entry.is_dir())
    except OSError:
        return []


def is_file(path: Path) -> bool:
    """Whether `path` is a file; no for a name that no file can have."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def exists(path: Path) -> bool:
    """Whether `path` is a file or a folder; no for a name that neither can have."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def waits_for_engine(model: Model) -> bool:
    """Whether a served version of a TensorRT model holds the graph, but not yet the engine."""
    graph = BACKENDS["onnxruntime"].model_file
    return model.backend == "tensorrt" and any(
        is_file(folder / graph) and not exists(folder / model.model_file)
        for folder in model.served_folders
    )


def enum_name(message: Any, field: str) -> str:
    """The name of the enum value in `field` of `message`, as config.pbtxt spells it."""
    values = message.DESCRIPTOR.fields_by_name[field].enum_type.values_by_number
    value = values.get(getattr(message, field))
    return value.name if value else str(getattr(message, field))


def _read_model(folder: Path, *, reads_graphs: bool) -> Model:
    config, config_problem = _read_config(folder / CONFIG_FILE)
    lock, lock_problem = _read_lock(folder / LOCK_FILE)
    versions = tuple(sub.name for sub in subfolders(folder) if sub.name[0].isdigit())
    served = _served_versions(config, versions)
    files = _file_names(folder, served)
    backend = inferred_backend(files) if config is None else backend_of(config, files)
    return Model(
        name=folder.name,
        folder=folder,
        config=config,
        config_problem=config_problem,
        lock=lock,
        lock_problem=lock_problem,
        version_folders=versions,
        served_versions=served,
        backend=backend,
        graphs=_read_graphs(folder, _graph_file(config, backend), served)
        if reads_graphs and config is not None and backend in GRAPH_BACKENDS
        else (),
        sources=read_sources([folder / str(v) for v in served], folder.parent)
        if backend == "python"
        else (),
    )


def _read_config(path: Path) -> tuple[Any, str]:
    if not is_file(path):
        return None, ""
    try:
        return read_config(path), ""
    except UserError as problem:
        return None, problem.given
    except UnicodeDecodeError as problem:
        return None, f"byte {problem.start} is not UTF-8"
    except OSError as problem:
        return None, f"cannot be read: {problem.strerror}"


def _read_lock(path: Path) -> tuple[Any, str]:
    if not is_file(path):
        return None, ""
    try:
        return json.loads(path.read_text(encoding="utf-8")), ""
    except (ValueError, RecursionError) as problem:
        return None, f"not JSON: {problem}"
    except OSError as problem:
        return None, f"cannot be read: {problem.strerror}"


def _served_versions(config: Any, folders: tuple[str, ...]) -> tuple[int, ...]:
    # The server ignores names with leading zeros or anything but digits.
    present = [int(n) for n in folders if n.isascii() and n.isdigit() and str(int(n)) == n]
    newest_first = sorted(present, reverse=True)
    policy = config.version_policy if config is not None else None
    choice = policy.WhichOneof("policy_choice") if policy is not None else None
    if choice == "all":
        return tuple(newest_first)
    if policy is not None and choice == "specific":
        return tuple(v for v in newest_first if v in policy.specific.versions)
    wanted = policy.latest.num_versions if policy is not None and choice == "latest" else 1
    return tuple(newest_first[:wanted])


def _file_names(folder: Path, versions: tuple[int, ...]) -> set[str]:
    try:
        return {entry.name for v in versions for entry in (folder / str(v)).iterdir()}
    except OSError:
        return set()


def _graph_file(config: Any, backend: str) -> str:
    # An engine lies beside the graph it is built from, whatever the engine is called.
    own = config.default_model_filename if backend == "onnxruntime" else ""
    return own or BACKENDS["onnxruntime"].model_file


def _read_graphs(folder: Path, name: str, versions: tuple[int, ...]) -> tuple[Graph, ...]:
    graphs = []
    for version in versions:
        # A model with weights in files of its own may be a folder that holds the ONNX file.
        candidates = [f"{version}/{name}", f"{version}/{name}/{name}"]
        file = next((file for file in candidates if is_file(folder / file)), None)
        if file:
            graphs.append(read_graph(folder / file, f"{folder.name}/{file}"))
    return tuple(graphs)
