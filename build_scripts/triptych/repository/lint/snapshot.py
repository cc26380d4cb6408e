"""A model repository, read once for all checks, and the findings that checks yield.

`Flaw` is a finding without its id. `Graph` has the inputs and outputs of an ONNX file in Triton's
terms. `Source` is a parsed Python file of a step, with its imports and the files it reads.
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from triptych.base.errors import Finding, Severity, UserError
from triptych.base.onnx_graph import MODEL_FILE, GraphTensor, read_interface
from triptych.base.releases import Release
from triptych.container.serving_machine import variants_in
from triptych.repository.config import CONFIG_FILE, new_config, read_config
from triptych.repository.manifest import MANIFEST_FILE
from triptych.runtime.triton_io import SETTINGS_FILE, SETTINGS_PARAMETER

if TYPE_CHECKING:
    from tritonclient.grpc.model_config_pb2 import (
        ModelConfig,
        ModelInstanceGroup,
        ModelVersionPolicy,
    )


@dataclass(frozen=True)
class Flaw:
    """A broken rule. If `file` is empty, the finding is about the config of the checked subject.

    Severity ``error``: the server refuses to load it, or requests fail, hang or give wrong results.
    ``warning``: it serves but is slow, fragile or not as intended. ``info``: it is as planned and
    worth knowing.
    """

    severity: Severity
    rule: str
    given: str
    remedy: str
    file: str = ""


class LintCheck(NamedTuple):
    """A row of a table of checks: `flaws` is called with each of the `subjects`."""

    id: str
    subjects: Callable[[Any], Iterable[Any]]
    flaws: Callable[[Any], Iterator[Flaw]]


SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")


def find_flaws(checks: Iterable[LintCheck], checked: object) -> list[Finding]:
    """Return the findings of a table of checks, errors first.

    Args:
        checks: Checks in the order of their findings: causes before consequences.
        checked: Model repository or folder of manifests, whose subjects are checked. A flaw without
            a file is reported for the subject's `where`.
    """
    findings = [
        Finding(check.id, **{**vars(flaw), "file": flaw.file or subject.where})
        for check in checks
        for subject in check.subjects(checked)
        for flaw in check.flaws(subject)
    ]
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


error = partial(Flaw, "error")
warning = partial(Flaw, "warning")
info = partial(Flaw, "info")


def names(items: Iterable[object]) -> str:
    """Return a sorted list for a message; ``none`` if it is empty."""
    return ", ".join(sorted({str(item) for item in items})) or "none"


def dims_text(dims: Iterable[int]) -> str:
    """Return dims as in config.pbtxt: ``[-1, 384]``."""
    return f"[{', '.join(str(dim) for dim in dims)}]"


_FLOATS = {"FLOAT": "FP32", "FLOAT16": "FP16", "BFLOAT16": "BF16", "DOUBLE": "FP64"}


@dataclass(frozen=True)
class TypedTensor:
    """Type and dims of a graph's input or output.

    The dims include the batch dimension and are -1 if variable; None if the file does not contain
    them.
    """

    data_type: str
    dims: tuple[int, ...] | None


@dataclass(frozen=True)
class Graph:
    """Inputs and outputs of an ONNX file."""

    file: str  # Path relative to the repository
    inputs: dict[str, TypedTensor] = field(default_factory=dict)
    outputs: dict[str, TypedTensor] = field(default_factory=dict)
    data_files: tuple[str, ...] = ()  # Files with weights that it refers to, relative to its folder
    problem: str = ""  # Reason why it could not be read; empty otherwise


def _has_onnx() -> bool:
    try:
        import onnx  # noqa: F401
    except ImportError:
        return False
    return True


def _read_graph(path: Path, file: str) -> Graph:
    """Read the graph at `path` without its external weights.

    If the file is broken, the result has a `problem`.
    """
    try:
        graph = read_interface(path)
    except Exception as problem:  # the parser raises more than its documented DecodeError
        return Graph(file, problem=f"{type(problem).__name__}: {problem}")
    if not graph.outputs:
        return Graph(file, problem="no graph with an output in it")
    return Graph(
        file,
        inputs={tensor.name: _typed(tensor) for tensor in graph.inputs},
        outputs={tensor.name: _typed(tensor) for tensor in graph.outputs},
        data_files=graph.weight_files,
    )


def _typed(tensor: GraphTensor) -> TypedTensor:
    dims = None
    if tensor.axes is not None:
        dims = tuple(-1 if isinstance(axis, str) else axis for axis in tensor.axes)
    return TypedTensor(f"TYPE_{_FLOATS.get(tensor.kind, tensor.kind)}", dims)


_IMPORT_ERRORS = {"ImportError", "ModuleNotFoundError", "Exception"}
_HOLDS_IMPORTS = (ast.stmt, ast.excepthandler, ast.match_case)
_remembered = lru_cache(maxsize=128)
"""Cache for parsed sources, because steps and builds of a process share most of their files."""


class Source:
    """A parsed Python file.

    Attributes:
        file: Path relative to the repository, like `folder`.
        tree: Parsed module; empty if the file does not parse. Files of equal content share it.
    """

    def __init__(self, path: Path, root: Path) -> None:
        self.path, self.file = path, path.relative_to(root).as_posix()
        self.folder = self.file.rpartition("/")[0]
        self.tree = ast.Module(body=[], type_ignores=[])
        with suppress(OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            self.tree = _parsed(path.read_bytes())


@_remembered
def _parsed(content: bytes) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python's warnings are not findings
        return ast.parse(content)


def read_sources(folders: Iterable[Path], root: Path) -> list[Source]:
    """Return the Python files in `folders` and below them.

    Paths in messages are relative to `root`.
    """
    return [Source(path, root) for folder in folders for path in sorted(folder.rglob("*.py"))]


@_remembered
def imports_of(tree: ast.Module) -> frozenset[str]:
    """Return the top-level modules that a file needs, without its siblings.

    Imports that may fail (under ``try``/``except ImportError``), or that only a type checker runs,
    are omitted.
    """
    found: set[str] = set()
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        pending += [child for child in _needed_children(node) if isinstance(child, _HOLDS_IMPORTS)]
    return frozenset(name.partition(".")[0] for name in found)


def _needed_children(node: ast.AST) -> Iterable[ast.AST]:
    if isinstance(node, ast.Try) and any(
        handler.type is None or mentions(handler.type, _IMPORT_ERRORS) for handler in node.handlers
    ):
        return [*node.orelse, *node.finalbody]
    if isinstance(node, ast.If) and mentions(node.test, {"TYPE_CHECKING"}):
        return node.orelse
    return ast.iter_child_nodes(node)


@_remembered
def files_beside(tree: ast.Module) -> frozenset[str]:
    """Return the names of files that a source reads in its own folder.

    It recognizes ``Path(__file__).with_name("x")`` and ``Path(__file__).parent / "x"``.
    """
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                ast.Attribute(place, "with_name"), [ast.Constant(str(name)), *_]
            ) | ast.BinOp(ast.Attribute(place, "parent"), ast.Div(), ast.Constant(str(name))):
                if mentions(place, {"__file__"}):
                    found.add(name)
    return frozenset(found)


def mentions(node: ast.AST, names: set[str]) -> bool:
    """Return whether a source uses one of the names, alone or as an attribute."""
    return any(
        getattr(child, "id", None) in names or getattr(child, "attr", None) in names
        for child in ast.walk(node)
    )


@_remembered
def defines(tree: ast.Module, name: str) -> bool:
    """Return whether a source defines a function or method `name`."""
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in ast.walk(tree))


@_remembered
def calls(tree: ast.Module, method: str) -> bool:
    """Return whether a source calls a method of this name without arguments."""
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == method
        and not node.args
        for node in ast.walk(tree)
    )


# Only Python steps that Triptych writes have this file.
_OUR_MARK = "triton_io.py"
_SETTING_TYPES: Mapping[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("tensor_parallel", "pipeline_parallel"), int),
    **dict.fromkeys(("kv_token_bytes", "kv_cache_mib"), (int, float)),
    **dict.fromkeys(("max_length", "max_sequences", "request_tokens"), int),
    **{"gpus": list, "special_tokens": dict},
}
"""Types of the settings that checks read; a setting without a value has none."""
NO_SETTINGS = "no file"
"""Problem of a step without a file of settings."""


@dataclass(frozen=True)
class Backend:
    """A backend of Triton."""

    platforms: tuple[str, ...] = ()  # Values of `platform` that belong to it; any if empty
    # File that it loads from a version folder by default; empty if that varies.
    model_file: str = ""
    batches_itself: bool = False  # Whether it forms batches without the server


ENSEMBLE = "ensemble"

BACKENDS: dict[str, Backend] = {
    "python": Backend(model_file="model.py"),
    "onnxruntime": Backend(("onnxruntime_onnx",), "model.onnx"),
    "tensorrt": Backend(("tensorrt_plan",), "model.plan"),
    "pytorch": Backend(("pytorch_libtorch", "pytorch", "torch_aoti")),
    "tensorflow": Backend(("tensorflow_graphdef", "tensorflow_savedmodel")),
    "vllm": Backend(model_file="model.json", batches_itself=True),
    "tensorrtllm": Backend(batches_itself=True),
    "openvino": Backend(model_file="model.xml"),
    **dict.fromkeys(("dali", "fil", "identity", "repeat", "square"), Backend()),
}

GRAPH_BACKENDS = ("onnxruntime", "tensorrt")
"""Backends whose version folders contain an ONNX file, to run or to build an engine from."""


class Model:
    """A folder of the repository.

    Attributes:
        config: A ModelConfig; None if missing or unreadable.
        config_problem: Reason why `config` is None, with line:column if known; empty if missing.
        manifest: Parsed `triptych.lock.json`; None if missing or unreadable.
        inputs: Inputs of the config, by name.
        ragged: Inputs whose rows are joined end to end.
        varying: Inputs whose rows may have different shapes.
        added: Inputs that the server adds to a batch.
        version_folders: Names of its subfolders that start with a digit.
        served_versions: Versions that its version policy serves, newest first.
        backend: ``ensemble``, a backend's name, or empty if unknown. Without a config it is the
            backend that would load the existing files.
        model_file: File that the backend loads from a version folder; empty if that varies.
        is_ours: Whether Triptych wrote this step, and with it the producer of planned shapes.
        settings: Settings of the newest version of a step of Triptych; empty if there are none that
            can be read.
        settings_file: Path of the settings of a Python step, relative to the repository; empty
            if there is none.
        settings_problem: Reason why `settings` could not be read.
        sources: Python files of the served versions of a Python model.
        completes_itself: Whether the server completes missing inputs and outputs of the config.
        waits_for_engine: Whether a served version of a TensorRT model has the graph but no engine.
        graphs: Graph of each served version that contains an ONNX file.
    """

    def __init__(self, repository: Repository, folder: Path) -> None:
        self.repository, self.folder, self.name = repository, folder, folder.name
        variant = f"configs/{repository.variant}.pbtxt"
        is_variant = bool(repository.variant) and is_file(folder / variant)
        config_file = variant if is_variant else CONFIG_FILE
        self.where = f"{folder.name}/{config_file}"
        self.manifest_file = f"{folder.name}/{MANIFEST_FILE}"
        self.config, self.config_problem = _read(folder / config_file, read_config)
        self.manifest, self.manifest_problem = _read(
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
        self.settings_file, self.settings_problem = "", ""
        self.settings: Mapping[str, Any] = {}
        for place in self.served_folders[:1] if self.is_ours else ():
            self.settings_file = f"{folder.name}/{place.name}/{SETTINGS_FILE}"
            settings, self.settings_problem = _read(
                place / SETTINGS_FILE, lambda path: json.loads(path.read_bytes())
            )
            if isinstance(settings, dict):
                self.settings = settings
                if SETTINGS_PARAMETER in config.parameters:
                    self._replace_settings(config.parameters[SETTINGS_PARAMETER].string_value)
                self._drop_settings()
            elif not self.settings_problem:
                self.settings_problem = NO_SETTINGS if settings is None else "no JSON object"
        self.sources = read_sources(self.served_folders if python else (), folder.parent)
        self.completes_itself = bool(self.backend) and not self.is_ensemble
        if python:
            trees = (source.tree for source in self.sources)
            self.completes_itself = any(defines(tree, "auto_complete_config") for tree in trees)
        self.waits_for_engine = self.backend == "tensorrt" and any(
            is_file(place / MODEL_FILE) and not exists(place / self.model_file)
            for place in self.served_folders
        )
        # An engine is stored beside the graph it is built from, with any name.
        name = own_file if own_file and self.backend != "tensorrt" else MODEL_FILE
        self.graphs: list[Graph] = []
        has_graph = self.backend in GRAPH_BACKENDS
        if self.backend == "openvino":  # it loads an IR and other formats, too
            has_graph = own_file.endswith(".onnx")
        if repository.graphs is not None:
            self.graphs = repository.graphs.get(self.name, [])
        elif repository.reads_graphs and self.config is not None and has_graph:
            for version in self.served_versions:
                # A model with external weights may be a folder that contains the ONNX file.
                places = [f"{version}/{name}", f"{version}/{name}/{name}"]
                found = [place for place in places if is_file(folder / place)][:1]
                self.graphs += [_read_graph(folder / f, f"{folder.name}/{f}") for f in found]

    def _replace_settings(self, text: str) -> None:
        try:
            self.settings = {**self.settings, **json.loads(text)}
        except (ValueError, TypeError, RecursionError):
            self.settings_file, self.settings_problem = self.where, f"parameter settings: {text}"

    def _drop_settings(self) -> None:
        """Leave out the settings that checks cannot read."""
        dropped = {
            name: self.settings[name]
            for name, kind in _SETTING_TYPES.items()
            if name in self.settings and not isinstance(self.settings[name], kind)
        }
        self.settings = {key: self.settings[key] for key in self.settings if key not in dropped}
        if wrong := [name for name, value in dropped.items() if value is not None]:
            self.settings_problem = f"another type of {names(wrong)}"

    def instances_of(self, group: ModelInstanceGroup) -> int:
        """Return the number of instances of an instance group, including the server's default."""
        on_cpu = (self.backend, enum_name(group, "kind")) == ("onnxruntime", "KIND_CPU")
        return group.count if group.count > 0 else 2 if on_cpu else 1


@dataclass(frozen=True, eq=False)
class Repository:
    """A model repository and the release it is meant for."""

    root: Path
    triton: Release  # Release that serves it, or the oldest that may
    is_exact: bool  # Whether `triton` is the release that serves it
    reads_graphs: bool  # Whether the models have `graphs`, for which onnx must be installed
    # Release that serves it now, if it is to be replaced by `triton`.
    upgraded_from: Release | None = None
    models: dict[str, Model] = field(default_factory=dict)  # Models by folder name, sorted
    # Name of the configs that the server uses where a model has them; empty for none.
    variant: str = ""
    # Graphs of the models, if they were read before.
    graphs: Mapping[str, list[Graph]] | None = None
    where = ""

    def itself(self) -> tuple[Repository]:
        return (self,)

    def folders(self) -> Iterable[Model]:
        """Return all models, including those with an unreadable config."""
        return self.models.values()

    def configured(self) -> Iterator[Model]:
        """Yield the models whose config could be read."""
        return (model for model in self.models.values() if model.config is not None)

    def ensembles(self) -> Iterator[Model]:
        return (model for model in self.configured() if model.is_ensemble)

    def executed(self) -> Iterator[Model]:
        """Yield the models among `configured` that a backend runs, that is all except ensembles."""
        return (model for model in self.configured() if not model.is_ensemble)


def read_repository(
    root: Path,
    triton: Release,
    *,
    is_exact: bool,
    upgraded_from: Release | None = None,
    with_graphs: bool = True,
) -> Repository:
    """Read every model folder below `root`; unreadable files become a model's problem."""
    reads_graphs = with_graphs and _has_onnx()
    repository = Repository(root, triton, is_exact, reads_graphs, upgraded_from)
    # Hidden folders are included, because the server treats every folder as a model.
    repository.models.update((f.name, Model(repository, f)) for f in _folders(root))
    return repository


def with_variants(repository: Repository) -> Iterator[Repository]:
    """Yield the repository, then as a server on each machine with configs of its own sees it."""
    yield repository
    files = (file.relative_to(repository.root) for file in repository.root.glob("*/configs/*"))
    graphs = {model.name: model.graphs for model in repository.folders()}
    for name in sorted(variants_in(file.as_posix() for file in files)):
        there = replace(repository, models={}, variant=name, graphs=graphs)
        there.models.update((model, Model(there, repository.root / model)) for model in graphs)
        yield there


def request_parameters(model: Model) -> list[str]:
    """Return the names of the request parameters that a step of Triptych reads."""
    rules = model.settings.get("request_parameters")
    return sorted(rules) if isinstance(rules, dict) else []


def entries(folder: Path) -> list[Path]:
    """Return the content of `folder`, sorted by name; nothing if it cannot be listed."""
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
    """Return whether `path` is a file; false for impossible names."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def exists(path: Path) -> bool:
    """Return whether `path` is a file or a folder; false for impossible names."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def enum_name(message: Any, field: str) -> str:
    """Return the name of the enum value in `field` of `message`, as in config.pbtxt."""
    values = message.DESCRIPTOR.fields_by_name[field].enum_type.values_by_number
    value = values.get(getattr(message, field))
    return value.name if value else str(getattr(message, field))


def fits(dims: Sequence[int], declared: Sequence[int]) -> bool:
    """Return whether `dims` match the declared dims, where -1 matches any size."""
    pairs = zip(dims, declared, strict=False)
    return len(dims) == len(declared) and all(want in (-1, got) for got, want in pairs)


def is_version(name: str) -> bool:
    """Return whether the server treats a folder of this name as a version."""
    return name.isascii() and name.isdigit() and str(int(name)) == name


def _backend_of(config: ModelConfig, files: set[str]) -> str:
    """Return the backend that the server infers from a config, or else from the files."""
    if config.platform == ENSEMBLE or config.HasField("ensemble_scheduling"):
        return ENSEMBLE
    if config.backend:
        return str(config.backend)
    for name, backend in BACKENDS.items():
        if config.platform in backend.platforms if config.platform else backend.model_file in files:
            return name
    return ""


def _read(path: Path, parse: Callable[[Path], Any]) -> tuple[Any, str]:
    """Return the content of a file, or None and the reason why it is unreadable.

    Without a file the reason is empty.
    """
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


def _served_versions(policy: ModelVersionPolicy, folders: Sequence[str]) -> list[int]:
    newest_first = sorted((int(name) for name in folders if is_version(name)), reverse=True)
    choice = policy.WhichOneof("policy_choice")
    if choice in (None, "latest"):
        return newest_first[: policy.latest.num_versions if choice else 1]
    return [v for v in newest_first if choice == "all" or v in policy.specific.versions]
