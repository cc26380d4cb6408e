"""Checks of files and Python steps: where Triton needs them, unchanged, able to run."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from triptych.base.errors import UserError
from triptych.container.manifests import check_readable
from triptych.repository.config import CONFIG_FILE
from triptych.repository.lint.engine import sha256_of
from triptych.repository.lint.snapshot import (
    NO_SETTINGS,
    Flaw,
    Model,
    Repository,
    Source,
    entries,
    enum_name,
    error,
    exists,
    files_beside,
    imports_of,
    is_file,
    is_version,
    names,
    warning,
)
from triptych.repository.python_env import ENV_PARAMETER
from triptych.runtime.hooking import FILES_FOLDER
from triptych.runtime.triton_io import SETTINGS_FILE

# Pointer files of git LFS have about 130 bytes; no model is that small.
_LFS_START = b"version https://git-lfs"
_FILE_SUFFIXES = (".json", ".txt", ".model", ".vocab", ".bpe", ".npy", ".npz", ".tar.gz", ".so")
_MODEL_FOLDER = "$$TRITON_MODEL_DIRECTORY/"
_MIN_ROWS = 50
_MAX_TRUNCATED_SHARE = 0.05
_MIN_VOCABULARY_SHARE = 0.03
_MAX_NEAR_DUPLICATES = 0.2


def repository_readable(repository: Repository) -> Iterator[Flaw]:
    """Check that the repository is a folder with models, all of which this user can read."""
    try:
        check_readable(repository.root)
    except UserError as closed:
        yield error(closed.rule, f"{closed.field} ({closed.given})", closed.remedy, ".")
    if not repository.models:
        yield error(
            "must be a folder with one folder for each model",
            "no model folder" if repository.root.is_dir() else "not a folder",
            "Build a pipeline into it (triptych build NAME) or name another folder",
            ".",
        )


def config_readable(model: Model) -> Iterator[Flaw]:
    """Check that every model folder has a config.pbtxt that parses."""
    rule, backend = "must exist in every model folder", model.backend
    if model.config_problem:
        yield error(
            "must be a ModelConfig in protobuf text format",
            model.config_problem,
            "Keep one of dynamic_batching, sequence_batching and ensemble_scheduling: batching of "
            "an ensemble is set on its steps"
            if "scheduling_choice" in model.config_problem
            else "Correct the line, or build the pipeline again",
        )
    elif model.config is None and model.completes_itself:
        yield warning(
            rule,
            f"no config; the {backend} backend guesses one, for at most 4 rows per batch",
            "Write a config.pbtxt with max_batch_size, input, output and dynamic_batching",
        )
    elif model.config is None:
        yield error(
            rule,
            f"no config, and the {backend} model does not complete one"
            if backend
            else "neither a config nor a model file in a version folder",
            "Write a config.pbtxt, or move the folder out of the repository",
        )


def version_folder(model: Model) -> Iterator[Flaw]:
    """Check that every model has a numeric version folder."""
    if not model.backend and model.config is None and not model.config_problem:
        return  # not a model; see config_readable
    ignored = [name for name in model.version_folders if not is_version(name)]
    if len(ignored) == len(model.version_folders):
        yield error(
            "must hold a version folder with a number for its name, also when it stays empty",
            f"folders that look like versions: {names(ignored)}",
            f"Create {model.name}/1",
            model.name,
        )
    elif ignored:
        yield warning(
            "should name its version folders with plain numbers, others are ignored",
            names(ignored),
            f"Rename or remove {model.name}/{ignored[0]}",
            model.name,
        )


def version_policy(model: Model) -> Iterator[Flaw]:
    """Check that the version policy lists versions that exist."""
    present = {int(name) for name in model.version_folders if is_version(name)}
    missing = sorted(set(model.config.version_policy.specific.versions) - present)
    if missing and model.served_versions:
        yield warning(
            "should list only versions in version_policy that have a folder",
            f"versions {names(missing)}, folders {names(present)}",
            f"Create {model.name}/{missing[0]}, or correct version_policy",
        )


def model_file(model: Model) -> Iterator[Flaw]:
    """Check that every served version has the file its backend loads, and it is not empty."""
    if model.waits_for_engine or not model.model_file:
        return  # see engine_built
    for folder in model.served_folders:
        path = folder / model.model_file
        relative = f"{model.name}/{folder.name}/{model.model_file}"
        start = _first_bytes(path)
        if start is not None and (not start or start.startswith(_LFS_START)):
            yield error(
                f"must be what the {model.backend} backend loads",
                "a pointer of git LFS" if start else "an empty file",
                "Run git lfs pull" if start else "Build the pipeline again",
                relative,
            )
        elif start is None and not is_file(path / model.model_file):
            yield error(
                f"must exist: the {model.backend} backend loads it",
                f"files there: {names(path.name for path in entries(folder))}",
                "Add it (build the pipeline again), or set default_model_filename to its name",
                relative,
            )


def _first_bytes(path: Path) -> bytes | None:
    if not is_file(path):
        return None
    try:
        with path.open("rb") as file:
            return file.read(len(_LFS_START))
    except OSError:
        return b""


def referenced_file(model: Model) -> Iterator[Flaw]:
    """Check that files named by a config or a Python step exist."""
    places = [model.folder, *model.served_folders]
    for kind, origin, name in _references(model):
        if not any(is_file(place / name) for place in places):
            yield kind(
                "must refer to files in the model's folder or its version folder",
                f"{origin}: {name}",
                "Add the file, correct the name, or build the pipeline again",
            )
    for source in model.sources:
        for name in sorted(files_beside(source.tree)):
            if not exists(source.path.parent / name):
                yield error(
                    "must exist: a Python step reads it",
                    f"{source.file} reads {name}",
                    f"Add {source.folder}/{name}, or build the pipeline again",
                    f"{source.folder}/{name}",
                )


def _references(model: Model) -> Iterator[tuple[Callable[..., Flaw], str, str]]:
    for key, name in sorted(model.config.cc_model_filenames.items()):
        yield error, f"cc_model_filenames {key}", name
    for key, parameter in sorted(model.config.parameters.items()):
        name = parameter.string_value.removeprefix(_MODEL_FOLDER)
        # Absolute paths are in the container and cannot be checked.
        if name.endswith(_FILE_SUFFIXES) and not name.startswith("/") and " " not in name:
            yield warning, f"parameter {key}", name


def step_settings(model: Model) -> Iterator[Flaw]:
    """Check that the settings of a step of Triptych can be read."""
    if model.settings_problem == NO_SETTINGS:
        yield warning(
            f"should have its settings in {SETTINGS_FILE}: an earlier release wrote them into "
            f"{CONFIG_FILE}, where lint does not check them",
            model.settings_problem,
            "Build the pipeline again",
            model.settings_file,
        )
    elif model.settings_problem:
        yield error(
            "must be a JSON object of settings, or the step does not load",
            model.settings_problem,
            "Correct it, or build the pipeline again",
            model.settings_file,
        )


def manifest_readable(model: Model) -> Iterator[Flaw]:
    """Check that a build manifest is a JSON object whose `files` maps paths to hashes."""
    problem = model.manifest_problem or _malformed(model.manifest)
    if problem:
        yield error(
            "must be a build manifest: a JSON object whose `files` maps paths to sha256",
            problem,
            "Build the pipeline again",
            model.manifest_file,
        )


def _malformed(manifest: object) -> str:
    if manifest is None:
        return ""
    if not isinstance(manifest, dict):
        return f"a {type(manifest).__name__}"
    files = manifest.get("files", {})
    if not isinstance(files, dict) or not all(isinstance(v, str) for v in files.values()):
        return "`files` is something else"
    return "" if isinstance(manifest.get("traffic", {}), dict) else "`traffic` is no object"


def in_manifest(model: Model, *keys: str) -> Any:
    """Return the value in the build manifest at a path of keys; None if there is none."""
    held = None if _malformed(model.manifest) else model.manifest
    for key in keys:
        held = held.get(key) if isinstance(held, dict) else None
    return held


def manifest_files(model: Model) -> Iterator[Flaw]:
    """Check that every file in the build manifest is unchanged since the build."""
    if model.repository.variant:  # the files are the same on every machine, and may be large
        return
    missing: dict[str, list[str]] = {}
    for name, digest in sorted((in_manifest(model, "files") or {}).items()):
        path = model.repository.root / name
        if not is_file(path):
            place = _missing_folder(model.repository.root, path) or name
            missing.setdefault(place, []).append(name)
        elif sha256_of(path) != digest.lower().removeprefix("sha256:"):
            yield _changed(model, name, "the content has changed")
    for place, files in missing.items():
        one = files == [place]
        given = "the file is missing" if one else f"the folder is missing, with {len(files)} files"
        yield _changed(model, place, given)


def _changed(model: Model, place: str, given: str) -> Flaw:
    return error(
        f"must be as it was built and verified, see {model.manifest_file}",
        given,
        f"Build {model.name} again: change the pipeline, not its built files",
        place,
    )


def _missing_folder(root: Path, path: Path) -> str:
    """Return the outermost missing folder of a missing file, or of the file that a link names."""
    target = Path(os.path.normpath(path.parent / path.readlink())) if path.is_symlink() else path
    missing = [folder for folder in target.parents if not exists(folder)]
    if not missing or not missing[-1].is_relative_to(root):
        return ""
    return missing[-1].relative_to(root).as_posix()


def traffic(model: Model) -> Iterator[Flaw]:
    """Check that the traffic is large and varied enough and fits the maximum length."""
    rows, truncated = (in_manifest(model, "traffic", key) for key in ("rows", "truncated_share"))
    if _is_number(rows) and rows < _MIN_ROWS:
        yield warning(
            f"should be built from at least {_MIN_ROWS} rows of traffic",
            f"{rows} rows",
            "Add real requests to traffic.jsonl: padded lengths, calibration and the gate depend "
            "on them",
            model.manifest_file,
        )
    if _is_number(truncated) and truncated > _MAX_TRUNCATED_SHARE:
        yield warning(
            f"should truncate at most {_MAX_TRUNCATED_SHARE:.0%} of the traffic",
            f"{truncated:.1%} of the rows are longer than tokenizer.max_length",
            "Raise tokenizer.max_length, split long texts, or set tokenizer.truncation: reject",
            model.manifest_file,
        )
    yield from _narrow_traffic(model)


def _narrow_traffic(model: Model) -> Iterator[Flaw]:
    keys = ("words", "vocabulary_share", "near_duplicates")
    words, share, near = (in_manifest(model, "traffic", key) for key in keys)
    if not (_is_number(words) and _is_number(share) and _is_number(near)):
        return
    if share < _MIN_VOCABULARY_SHARE or near > _MAX_NEAR_DUPLICATES:
        yield warning(
            f"should be built from varied traffic, with at least {_MIN_VOCABULARY_SHARE:.0%} "
            f"different words and at most {_MAX_NEAR_DUPLICATES:.0%} near-duplicate rows",
            f"{words} different words, {share:.1%} of all; {near:.0%} of the rows are near "
            "duplicates of others",
            "Add real requests with other words to traffic.jsonl: the gate and int8 only use these "
            "rows",
            model.manifest_file,
        )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def gate_accepted(model: Model) -> Iterator[Flaw]:
    """Check that the build did not fail the accuracy gate."""
    reason = in_manifest(model, "gate", "accepted")
    if reason:
        yield warning(
            "should be a build that passed the accuracy gate",
            f"accepted although it failed: {reason!s:.200}",
            "See the report of the build; fix the failure and build again",
            model.manifest_file,
        )


def shared_core(model: Model) -> Iterator[Flaw]:
    """Check that a pipeline was built with the current core of the pipeline it shares with."""
    name = in_manifest(model, "spec", "core", "shared_from")
    owner = model.repository.models.get(name) if isinstance(name, str) else None
    readable = owner is not None and owner.manifest is not None and not _malformed(owner.manifest)
    if owner and readable and in_manifest(owner, "core_key") != in_manifest(model, "core_key"):
        yield error(
            "must be built against the core that it shares",
            f"the core of {name} was rebuilt since",
            f"Build {model.name} again",
            model.manifest_file,
        )


_CLASS = "TritonPythonModel"
_IN_CONTAINER = {"PIL", "numpy", "tokenizers"}
"""Packages of the serving image (docker/requirements-serve.txt)."""
_OF_BACKEND = {"triton_python_backend_utils", "c_python_backend_utils"}
_GENERATION_MARK = "generation_messages.py"
# Steps with the file above need NVIDIA's image with the engine, or CTranslate2.
_FOR_GENERATION = {"jinja2", "vllm", "tensorrt_llm", "ctranslate2"}
_GPU_MODULES = {
    "torch",
    "cupy",
    "tensorrt",
    "onnxruntime",
    "jax",
    "vllm",
    "tensorrt_llm",
    "numba",
    "pycuda",
}


def python_model(model: Model) -> Iterator[Flaw]:
    """Check that every Python file exists, and that the class of a model file can be executed."""
    broken = [source for source in model.sources if _is_broken_link(source.path)]
    if broken:
        files = f"{broken[0].file} and {len(broken) - 1} more" if broken[1:] else broken[0].file
        yield error(
            "must have no links to files that are missing",
            f"{files}, to {broken[0].path.readlink().parent}",
            "Copy the repository with its links, or build the pipeline again",
            broken[0].file,
        )
    for source in model.sources:
        if source not in broken and source.path in [
            folder / model.model_file for folder in model.served_folders
        ]:
            yield from _check_class(source)


def _check_class(source: Source) -> Iterator[Flaw]:
    for found in source.tree.body:
        if isinstance(found, ast.ClassDef) and found.name == _CLASS and not found.bases:
            methods = {node.name for node in found.body if hasattr(node, "name")}
            if "execute" not in methods:
                yield error(
                    f"must give {_CLASS} a method execute(self, requests)",
                    f"methods: {names(methods)}",
                    "Define execute; it returns one response for each request",
                    source.file,
                )


def python_import(model: Model) -> Iterator[Flaw]:
    """Check that Python steps import only packages of the container, and siblings."""
    # The stub puts the version folder and the model's folder on the module search path.
    places = [model.folder, *model.served_folders]
    for source in model.sources if ENV_PARAMETER not in model.config.parameters else ():
        imported = imports_of(source.tree) - _IN_CONTAINER - _OF_BACKEND
        imported -= sys.stdlib_module_names
        if exists(source.path.with_name(_GENERATION_MARK)):
            imported -= _FOR_GENERATION
        # Functions of a pipeline load the files beside them with the folder of each on the path.
        here = [*places, source.path.parent] if FILES_FOLDER in source.path.parts else places
        foreign = [n for n in imported if not any(_is_module(place / n) for place in here)]
        if foreign:
            yield warning(
                f"should import only the standard library, {names(_IN_CONTAINER)} and siblings",
                names(foreign),
                "Add the package to the image, or set EXECUTION_ENV_PATH to an environment that "
                "has it",
                source.file,
            )


def _is_module(path: Path) -> bool:
    module = path.parent / f"{path.name}.py"
    return exists(module) or exists(path) or _is_broken_link(module)  # `python_model` reports it


def _is_broken_link(path: Path) -> bool:
    return path.is_symlink() and not exists(path)


def python_kind(model: Model) -> Iterator[Flaw]:
    """Check that Python steps without a GPU have KIND_CPU.

    A GPU build of Triton places KIND_AUTO on every GPU.
    """
    on_gpu = any(imports_of(source.tree) & _GPU_MODULES for source in model.sources)
    if model.backend != "python" or on_gpu:
        return
    kinds = {enum_name(group, "kind") for group in model.config.instance_group}
    if "KIND_GPU" in kinds:
        yield error(
            "must run a Python step that uses no GPU as KIND_CPU",
            "KIND_GPU, which does not load on a machine without a GPU",
            "Write instance_group [{ count: 1 kind: KIND_CPU }]",
        )
    elif "KIND_AUTO" in kinds or not kinds:
        yield warning(
            "should run a Python step that uses no GPU as KIND_CPU",
            "KIND_AUTO" if kinds else "no instance_group, which means KIND_AUTO",
            "Write instance_group [{ count: 1 kind: KIND_CPU }]: on a GPU machine KIND_AUTO "
            "starts the count on every GPU",
        )
