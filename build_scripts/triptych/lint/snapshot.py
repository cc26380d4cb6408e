"""A model repository read once: what every lint check looks at."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from triptych.errors import UserError
from triptych.graph.files import MODEL_FILE
from triptych.lint.graph import Graph, onnx_installed, read_graph
from triptych.lint.python_source import Source, defines, read_sources
from triptych.releases import Release
from triptych.repository.config import CONFIG_FILE, read_config
from triptych.repository.lock import LOCK_FILE

# Every Python step that Triptych writes carries it, and nothing else does.
_OUR_MARK = "stub_io.py"


@dataclass(frozen=True)
class Backend:
    """A backend of Triton.

    Attributes:
        platforms: values of `platform` that go with it; any when empty.
        model_file: what it loads from a version folder by default; empty when that varies.
        batches_itself: the server need not.
    """

    platforms: tuple[str, ...] = ()
    model_file: str = ""
    batches_itself: bool = False


ENSEMBLE = "ensemble"

BACKENDS: dict[str, Backend] = {
    "python": Backend(model_file="model.py"),
    "onnxruntime": Backend(("onnxruntime_onnx",), "model.onnx"),
    "tensorrt": Backend(("tensorrt_plan",), "model.plan"),
    "pytorch": Backend(("pytorch_libtorch", "pytorch", "torch_aoti")),
    "tensorflow": Backend(("tensorflow_graphdef", "tensorflow_savedmodel")),
    "vllm": Backend(model_file="model.json", batches_itself=True),
    "tensorrtllm": Backend(batches_itself=True),
    **dict.fromkeys(("openvino", "dali", "fil", "identity", "repeat", "square"), Backend()),
}

GRAPH_BACKENDS = ("onnxruntime", "tensorrt")
"""Backends whose version folders hold an ONNX file: to be run, or to build an engine from."""


@dataclass(frozen=True, eq=False)
class Model:
    """One folder of the repository.

    Attributes:
        config: a ModelConfig; None when missing or unreadable.
        config_problem: why `config` is None, with line:column where known; empty when missing.
        lock: the parsed `triptych.lock.json`; `lock_problem` likewise.
        version_folders: names of its subfolders that start with a digit.
        served_versions: those that its version policy serves, newest first.
        backend: ``ensemble``, a backend's name, or empty when it cannot be told; without a
            config, the one that would load the files that are there.
        graphs: one for each served version that holds an ONNX file.
        sources: the Python files of the served versions of a Python model.
    """

    repository: Repository
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
        return f"{self.name}/{CONFIG_FILE}"

    @property
    def lock_file(self) -> str:
        return f"{self.name}/{LOCK_FILE}"

    @property
    def is_ensemble(self) -> bool:
        return self.backend == ENSEMBLE

    @property
    def is_ours(self) -> bool:
        """Whether Triptych wrote this step, and with it the producer of planned shapes."""
        return any(is_file(folder / _OUR_MARK) for folder in self.served_folders)

    @property
    def served_folders(self) -> tuple[Path, ...]:
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

    @property
    def waits_for_engine(self) -> bool:
        """Whether a served version of a TensorRT model holds the graph, but not yet the engine."""
        return self.backend == "tensorrt" and any(
            is_file(folder / MODEL_FILE) and not exists(folder / self.model_file)
            for folder in self.served_folders
        )

    @property
    def tensors(self) -> dict[str, Any]:
        """The config's inputs by name."""
        return {tensor.name: tensor for tensor in self.config.input}

    @property
    def ragged(self) -> set[str]:
        """Inputs whose rows come end to end."""
        return {tensor.name for tensor in self.config.input if tensor.allow_ragged_batch}

    @property
    def varying(self) -> set[str]:
        """Inputs whose rows may be of different shape."""
        return {tensor.name for tensor in self.config.input if -1 in tensor.dims}

    @property
    def added(self) -> set[str]:
        """Inputs that the server adds to a batch."""
        return {name for each in self.config.batch_input for name in each.target_name}

    @property
    def queue_policies(self) -> list[Any]:
        batching = self.config.dynamic_batching
        return [batching.default_queue_policy, *batching.priority_queue_policy.values()]

    def instances_of(self, group: Any) -> int:
        """Instances the server starts for an instance group, its own default included."""
        on_cpu = (self.backend, enum_name(group, "kind")) == ("onnxruntime", "KIND_CPU")
        return group.count if group.count > 0 else 2 if on_cpu else 1


@dataclass(frozen=True, eq=False)
class Repository:
    """A model repository and the release it is meant for.

    Attributes:
        with_engines: whether the release must load the engines, too.
        reads_graphs: whether onnx is installed; without it no model has `graphs`.
        models: by folder name, sorted.
    """

    root: Path
    triton: Release
    with_engines: bool
    reads_graphs: bool
    models: dict[str, Model] = field(default_factory=dict)
    config_file = ""

    def itself(self) -> tuple[Repository]:
        return (self,)

    def folders(self) -> Iterable[Model]:
        """Every model, its config readable or not."""
        return self.models.values()

    def configured(self) -> Iterator[Model]:
        """The models whose config could be read."""
        return (model for model in self.models.values() if model.config is not None)

    def ensembles(self) -> Iterator[Model]:
        return (model for model in self.configured() if model.is_ensemble)

    def executed(self) -> Iterator[Model]:
        """The models among `configured` that a backend runs: everything but ensembles."""
        return (model for model in self.configured() if not model.is_ensemble)


def read_repository(root: Path, triton: Release, *, with_engines: bool) -> Repository:
    """Read every model folder below `root`; what cannot be read becomes a model's problem."""
    repository = Repository(root, triton, with_engines, onnx_installed())
    # Hidden folders too: the server takes every folder for a model.
    repository.models.update((f.name, _read_model(repository, f)) for f in _subfolders(root))
    return repository


def entries(folder: Path) -> list[Path]:
    """What is in `folder`, sorted by name; nothing when it cannot be listed."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _subfolders(folder: Path) -> list[Path]:
    try:
        return [entry for entry in entries(folder) if entry.is_dir()]
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


def enum_name(message: Any, field: str) -> str:
    """The name of the enum value in `field` of `message`, as config.pbtxt spells it."""
    values = message.DESCRIPTOR.fields_by_name[field].enum_type.values_by_number
    value = values.get(getattr(message, field))
    return value.name if value else str(getattr(message, field))


def fits(dims: Sequence[int], declared: Sequence[int]) -> bool:
    """Whether `dims` are those declared, where -1 is for any."""
    pairs = zip(dims, declared, strict=False)
    return len(dims) == len(declared) and all(want in (-1, got) for got, want in pairs)


def is_version(name: str) -> bool:
    """Whether the server takes a folder of this name for a version."""
    return name.isascii() and name.isdigit() and str(int(name)) == name


def backend_of(config: Any, version_files: Collection[str]) -> str:
    """The backend that serves a config (or files alone) as the server infers it; else empty."""
    if config is not None:
        if config.platform == ENSEMBLE or config.HasField("ensemble_scheduling"):
            return ENSEMBLE
        if config.backend:
            return str(config.backend)
        if config.platform:
            return next((n for n, b in BACKENDS.items() if config.platform in b.platforms), "")
        if config.default_model_filename:
            version_files = [config.default_model_filename]
    return next(
        (n for n, b in BACKENDS.items() if b.model_file and b.model_file in version_files), ""
    )


def _read_model(repository: Repository, folder: Path) -> Model:
    config, config_problem = _read(folder / CONFIG_FILE, read_config)
    lock, lock_problem = _read(folder / LOCK_FILE, lambda path: json.loads(path.read_bytes()))
    versions = tuple(sub.name for sub in _subfolders(folder) if sub.name[0].isdigit())
    served = _served_versions(config, versions)
    backend = backend_of(config, {path.name for v in served for path in entries(folder / str(v))})
    with_graphs = repository.reads_graphs and config is not None and backend in GRAPH_BACKENDS
    # An engine lies beside the graph it is built from, whatever the engine is called.
    own = config.default_model_filename if with_graphs and backend == "onnxruntime" else ""
    python = [folder / str(v) for v in served] if backend == "python" else []
    return Model(
        repository=repository,
        name=folder.name,
        folder=folder,
        config=config,
        config_problem=config_problem,
        lock=lock,
        lock_problem=lock_problem,
        version_folders=versions,
        served_versions=served,
        backend=backend,
        graphs=tuple(_read_graphs(folder, own or MODEL_FILE, served if with_graphs else ())),
        sources=read_sources(python, folder.parent),
    )


def _read(path: Path, parse: Callable[[Path], Any]) -> tuple[Any, str]:
    """What a file holds, or None and why it cannot be read; None alone where there is no file."""
    if not is_file(path):
        return None, ""
    try:
        return parse(path), ""
    except UserError as problem:
        return None, problem.given
    except UnicodeDecodeError as problem:
        return None, f"byte {problem.start} is not UTF-8"
    except (ValueError, RecursionError) as problem:
        return None, f"not JSON: {problem}"
    except OSError as problem:
        return None, f"cannot be read: {problem.strerror}"


def _served_versions(config: Any, folders: tuple[str, ...]) -> tuple[int, ...]:
    newest_first = sorted((int(name) for name in folders if is_version(name)), reverse=True)
    policy = config.version_policy if config is not None else None
    choice = policy.WhichOneof("policy_choice") if policy is not None else None
    if policy is None or choice is None:
        return tuple(newest_first[:1])
    if choice == "latest":
        return tuple(newest_first[: policy.latest.num_versions])
    return tuple(v for v in newest_first if choice == "all" or v in policy.specific.versions)


def _read_graphs(folder: Path, name: str, versions: tuple[int, ...]) -> Iterator[Graph]:
    for version in versions:
        # A model with weights in files of its own may be a folder that holds the ONNX file.
        for file in (f"{version}/{name}", f"{version}/{name}/{name}"):
            if is_file(folder / file):
                yield read_graph(folder / file, f"{folder.name}/{file}")
                break
