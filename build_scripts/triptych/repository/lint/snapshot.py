"""A model repository read once: what every lint check looks at.

What a lint check yields: a `Finding` without its id, and mostly without its file.

The inputs and outputs of an ONNX file, in Triton's terms.

The Python sources of a step, parsed: what they import and which files they read.
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from triptych.base.errors import Severity, UserError
from triptych.base.onnx_graph import MODEL_FILE
from triptych.base.releases import Release
from triptych.repository.config import CONFIG_FILE, new_config, read_config
from triptych.repository.manifest import MANIFEST_FILE


@dataclass(frozen=True)
class Flaw:
    """One broken rule; its file is the config of what is checked where `file` is empty.

    Severity: ``error`` when the server refuses to load it, or requests fail, hang or come back
    wrong; ``warning`` when it serves but is slow, fragile or not what was meant; ``info`` when it
    is as planned and worth knowing.
    """

    severity: Severity
    rule: str
    given: str
    remedy: str
    file: str = ""


error = partial(Flaw, "error")
warning = partial(Flaw, "warning")
info = partial(Flaw, "info")


def names(items: Iterable[object]) -> str:
    """A sorted list for a message; ``none`` when there is nothing."""
    return ", ".join(sorted({str(item) for item in items})) or "none"


def dims_text(dims: Iterable[int]) -> str:
    """Dims as in config.pbtxt: ``[-1, 384]``."""
    return f"[{', '.join(str(dim) for dim in dims)}]"


_FLOATS = {"FLOAT": "FP32", "FLOAT16": "FP16", "BFLOAT16": "BF16", "DOUBLE": "FP64"}


@dataclass(frozen=True)
class GraphTensor:
    """Its dims have the batch dimension, -1 where variable; None when the file does not say."""

    data_type: str
    dims: tuple[int, ...] | None


@dataclass(frozen=True)
class Graph:
    """What one ONNX file says about itself.

    Attributes:
        file: path relative to the repository.
        data_files: files with weights that it refers to, relative to its folder.
        problem: why it could not be read; empty when it could.
    """

    file: str
    inputs: dict[str, GraphTensor] = field(default_factory=dict)
    outputs: dict[str, GraphTensor] = field(default_factory=dict)
    data_files: tuple[str, ...] = ()
    problem: str = ""


def onnx_installed() -> bool:
    try:
        import onnx  # noqa: F401
    except ImportError:
        return False
    return True


def read_graph(path: Path, file: str) -> Graph:
    """Read the graph at `path` without its external weights; a broken file is a graph's `problem`.

    Raises:
        ImportError: onnx is not installed (see `onnx_installed`).
    """
    import onnx

    try:
        graph = onnx.load(str(path), load_external_data=False).graph
    except Exception as problem:  # the parser raises more than its documented DecodeError
        return Graph(file, problem=f"{type(problem).__name__}: {problem}")
    if not graph.output:
        return Graph(file, problem="no graph with an output in it")
    weights = {tensor.name for tensor in graph.initializer}
    stored_apart = filter(onnx.external_data_helper.uses_external_data, graph.initializer)
    locations = {e.value for t in stored_apart for e in t.external_data if e.key == "location"}
    return Graph(
        file,
        inputs={value.name: _tensor(value) for value in graph.input if value.name not in weights},
        outputs={value.name: _tensor(value) for value in graph.output},
        data_files=tuple(sorted(locations)),
    )


def _tensor(value: Any) -> GraphTensor:
    import onnx

    tensor = value.type.tensor_type
    known = tensor.elem_type in onnx.TensorProto.DataType.values()
    name = onnx.TensorProto.DataType.Name(tensor.elem_type) if known else "INVALID"
    dims = None
    if tensor.HasField("shape"):
        dims = tuple(d.dim_value if d.HasField("dim_value") else -1 for d in tensor.shape.dim)
    return GraphTensor(f"TYPE_{_FLOATS.get(name, name)}", dims)


_IMPORT_ERRORS = {"ImportError", "ModuleNotFoundError", "Exception"}
_HOLDS_IMPORTS = (ast.stmt, ast.excepthandler, ast.match_case)
_remembered = lru_cache(maxsize=128)
"""Steps share most of their files, and so do the builds of one process."""


class Source:
    """One parsed file.

    Attributes:
        file: its path relative to the repository; `folder` likewise.
        tree: an empty module when it does not parse; shared by files of the same content.
        problem: why it does not parse, with the line; empty when it does.
    """

    def __init__(self, path: Path, root: Path) -> None:
        self.path, self.file = path, path.relative_to(root).as_posix()
        self.folder = self.file.rpartition("/")[0]
        self.tree, self.problem = ast.Module(body=[], type_ignores=[]), ""
        try:
            self.tree = _parsed(path.read_bytes())
        except SyntaxError as broken:
            self.problem = f"line {broken.lineno}: {broken.msg}"
        except (OSError, ValueError, RecursionError, MemoryError) as broken:
            self.problem = f"{type(broken).__name__}: {broken}"


@_remembered
def _parsed(content: bytes) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Python merely doubts is not lint's concern
        return ast.parse(content)


def read_sources(folders: Iterable[Path], root: Path) -> list[Source]:
    """The Python files in `folders` and below them; paths in messages are relative to `root`."""
    return [Source(path, root) for folder in folders for path in sorted(folder.rglob("*.py"))]


@_remembered
def imports_of(tree: ast.Module, level: int) -> frozenset[str]:
    """The top-level modules a file needs: absolute at level 0, siblings at level 1.

    Imports that may fail (under ``try``/``except ImportError``) or that only a type checker runs
    are left out.
    """
    found: set[str] = set()
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.ImportFrom) and node.level == level:
            found.update([node.module] if node.module else (alias.name for alias in node.names))
        elif isinstance(node, ast.Import) and level == 0:
            found.update(alias.name for alias in node.names)
        pending += [child for child in _needed_children(node) if isinstance(child, _HOLDS_IMPORTS)]
    return frozenset(name.partition(".")[0] for name in found)


def _needed_children(node: ast.AST) -> Iterable[ast.AST]:
    if isinstance(node, ast.Try) and any(
        handler.type is None or _mentions(handler.type, _IMPORT_ERRORS) for handler in node.handlers
    ):
        return [*node.orelse, *node.finalbody]
    if isinstance(node, ast.If) and _mentions(node.test, {"TYPE_CHECKING"}):
        return node.orelse
    return ast.iter_child_nodes(node)


@_remembered
def files_beside(tree: ast.Module) -> frozenset[str]:
    """Names of the files that a source looks for in its own folder.

    It knows ``Path(__file__).with_name("x")`` and ``Path(__file__).parent / "x"``.
    """
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                ast.Attribute(place, "with_name"), [ast.Constant(str(name)), *_]
            ) | ast.BinOp(ast.Attribute(place, "parent"), ast.Div(), ast.Constant(str(name))):
                if _mentions(place, {"__file__"}):
                    found.add(name)
    return frozenset(found)


def _mentions(node: ast.AST, names: set[str]) -> bool:
    return any(
        getattr(child, "id", None) in names or getattr(child, "attr", None) in names
        for child in ast.walk(node)
    )


@_remembered
def defines(tree: ast.Module, name: str) -> bool:
    """Whether a function or method `name` is defined anywhere in a source."""
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in ast.walk(tree))


def defined_names(tree: ast.Module) -> dict[str, ast.stmt]:
    """What a module defines, imports or assigns at its top level, by name; ``*`` for a star."""
    found: dict[str, ast.stmt] = {}
    for node in tree.body:
        match node:
            case ast.ClassDef(name) | ast.FunctionDef(name):
                found[name] = node
            case ast.Import(aliases) | ast.ImportFrom(_, aliases):
                found.update((alias.asname or alias.name, node) for alias in aliases)
            case ast.Assign(targets):
                found.update((t.id, node) for t in targets if isinstance(t, ast.Name))
    return found


# Every Python step that Triptych writes carries it, and nothing else does.
_OUR_MARK = "triton_io.py"


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


class Model:
    """One folder of the repository.

    Attributes:
        config: a ModelConfig; None when missing or unreadable.
        config_problem: why `config` is None, with line:column where known; empty when missing.
        lock: the parsed `triptych.lock.json`; `lock_problem` likewise.
        inputs: the config's, by name.
        ragged: inputs whose rows come end to end.
        varying: inputs whose rows may be of different shape.
        added: inputs that the server adds to a batch.
        version_folders: names of its subfolders that start with a digit.
        served_versions: those that its version policy serves, newest first.
        backend: ``ensemble``, a backend's name, or empty when it cannot be told; without a
            config, the one that would load the files that are there.
        model_file: what the backend loads from a version folder; empty when that varies.
        is_ours: Triptych wrote this step, and with it the producer of planned shapes.
        sources: the Python files of the served versions of a Python model.
        completes_itself: the server finds out what the config leaves out: inputs and outputs.
        waits_for_engine: a served version of a TensorRT model holds the graph, but no engine yet.
        graphs: one for each served version that holds an ONNX file.
    """

    def __init__(self, repository: Repository, folder: Path) -> None:
        self.repository, self.folder, self.name = repository, folder, folder.name
        self.config_file = f"{folder.name}/{CONFIG_FILE}"
        self.lock_file = f"{folder.name}/{MANIFEST_FILE}"
        self.config, self.config_problem = _read(folder / CONFIG_FILE, read_config)
        self.lock, self.lock_problem = _read(
            folder / MANIFEST_FILE, lambda path: json.loads(path.read_bytes())
        )
        config = new_config() if self.config is None else self.config
        self.inputs: dict[str, Any] = {tensor.name: tensor for tensor in config.input}
        self.ragged = {tensor.name for tensor in config.input if tensor.allow_ragged_batch}
        self.varying = {tensor.name for tensor in config.input if -1 in tensor.dims}
        self.added = {name for each in config.batch_input for name in each.target_name}
        by_priority = config.dynamic_batching.priority_queue_policy.values()
        self.queue_policies = [config.dynamic_batching.default_queue_policy, *by_priority]
        self.version_folders = [path.name for path in _folders(folder) if path.name[0].isdigit()]
        self.served_versions = _served_versions(config.version_policy, self.version_folders)
        self.served_folders = [folder / str(version) for version in self.served_versions]
        own_file = str(config.default_model_filename)
        files = {path.name for place in self.served_folders for path in entries(place)}
        self.backend = _backend_of(config, {own_file} if own_file else files)
        self.is_ensemble = self.backend == ENSEMBLE
        self.model_file = own_file or BACKENDS.get(self.backend, Backend()).model_file
        self.is_ours = any(is_file(place / _OUR_MARK) for place in self.served_folders)
        python = self.backend == "python"
        self.sources = read_sources(self.served_folders if python else (), folder.parent)
        self.completes_itself = bool(self.backend) and not self.is_ensemble
        if python:
            trees = (source.tree for source in self.sources)
            self.completes_itself = any(defines(tree, "auto_complete_config") for tree in trees)
        self.waits_for_engine = self.backend == "tensorrt" and any(
            is_file(place / MODEL_FILE) and not exists(place / self.model_file)
            for place in self.served_folders
        )
        # An engine lies beside the graph it is built from, whatever the engine is called.
        name = own_file if own_file and self.backend == "onnxruntime" else MODEL_FILE
        self.graphs: list[Graph] = []
        if repository.reads_graphs and self.config is not None and self.backend in GRAPH_BACKENDS:
            for version in self.served_versions:
                # A model with weights in files of its own may be a folder with the ONNX file in it.
                places = [f"{version}/{name}", f"{version}/{name}/{name}"]
                found = [place for place in places if is_file(folder / place)][:1]
                self.graphs += [read_graph(folder / f, f"{folder.name}/{f}") for f in found]

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
    repository.models.update((f.name, Model(repository, f)) for f in _folders(root))
    return repository


def entries(folder: Path) -> list[Path]:
    """What is in `folder`, sorted by name; nothing when it cannot be listed."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _folders(folder: Path) -> list[Path]:
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


def _backend_of(config: Any, files: set[str]) -> str:
    """The backend that the server infers from a config, or else from the files to serve."""
    if config.platform == ENSEMBLE or config.HasField("ensemble_scheduling"):
        return ENSEMBLE
    if config.backend:
        return str(config.backend)
    for name, backend in BACKENDS.items():
        if config.platform in backend.platforms if config.platform else backend.model_file in files:
            return name
    return ""


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


def _served_versions(policy: Any, folders: Sequence[str]) -> list[int]:
    newest_first = sorted((int(name) for name in folders if is_version(name)), reverse=True)
    choice = policy.WhichOneof("policy_choice")
    if choice in (None, "latest"):
        return newest_first[: policy.latest.num_versions if choice else 1]
    return [v for v in newest_first if choice == "all" or v in policy.specific.versions]
