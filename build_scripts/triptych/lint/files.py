"""Lint: the files of a repository are where Triton looks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from triptych.lint.flaw import Flaw, error, names, warning
from triptych.lint.python_source import files_beside
from triptych.lint.snapshot import (
    Model,
    Repository,
    exists,
    is_file,
    waits_for_engine,
)

# Pointer files of git LFS are about 130 bytes; no model is that small.
_LFS_START = b"version https://git-lfs"
_FILE_SUFFIXES = (".json", ".txt", ".model", ".vocab", ".bpe", ".npy", ".npz", ".tar.gz", ".so")
_MODEL_FOLDER = "$$TRITON_MODEL_DIRECTORY/"


def repository_readable(repository: Repository) -> Iterator[Flaw]:
    """The repository is a folder with at least one model folder in it."""
    if repository.models:
        return
    yield error(
        ".",
        "must be a folder with one folder for each model",
        given="no model folder" if repository.root.is_dir() else "not a folder",
        remedy="Build a pipeline into it (triptych build NAME) or name another folder",
    )


def config_readable(repository: Repository) -> Iterator[Flaw]:
    """Every model folder holds a config.pbtxt that parses."""
    for model in repository.models.values():
        if model.config_problem:
            yield _unreadable(model)
        elif model.config is None:
            yield _missing(model)


def _unreadable(model: Model) -> Flaw:
    remedy = "Mend the line, or build the pipeline again"
    if "scheduling_choice" in model.config_problem:
        remedy = (
            "Keep one of dynamic_batching, sequence_batching and ensemble_scheduling: batching of "
            "an ensemble is set on its steps"
        )
    return error(
        model.config_file,
        "must be a ModelConfig in protobuf text format",
        given=model.config_problem,
        remedy=remedy,
    )


def _missing(model: Model) -> Flaw:
    rule = "must exist in every model folder"
    if model.completes_itself:
        return warning(
            model.config_file,
            rule,
            given=f"no config; the {model.backend} backend guesses one, for at most 4 rows a batch",
            remedy="Write a config.pbtxt with max_batch_size, input, output and dynamic_batching",
        )
    return error(
        model.config_file,
        rule,
        given=f"no config, and the {model.backend} model does not complete one"
        if model.backend
        else "neither a config nor a model file in a version folder",
        remedy="Write a config.pbtxt, or move the folder out of the repository",
    )


def model_name(repository: Repository) -> Iterator[Flaw]:
    """The name in the config is the folder's name."""
    for model in repository.configured():
        if model.config.name not in ("", model.name):
            yield error(
                model.config_file,
                "must name the model as its folder is named",
                given=f"name: {model.config.name}, folder: {model.name}",
                remedy=f'Write name: "{model.name}", or rename the folder',
            )


def version_folder(repository: Repository) -> Iterator[Flaw]:
    """Every model has a numeric version folder."""
    for model in repository.models.values():
        if not model.backend and model.config is None and not model.config_problem:
            continue  # no model at all, see config_readable
        usable = [name for name in model.version_folders if _is_version(name)]
        ignored = [name for name in model.version_folders if not _is_version(name)]
        if not usable:
            yield error(
                model.name,
                "must hold a version folder with a number for its name, also when it stays empty",
                given=f"folders that look like versions: {names(ignored)}",
                remedy=f"Create {model.name}/1",
            )
        elif ignored:
            yield warning(
                model.name,
                "should name its version folders with plain numbers, others are ignored",
                given=names(ignored),
                remedy=f"Rename or remove {model.name}/{ignored[0]}",
            )


def _is_version(name: str) -> bool:
    return name.isascii() and name.isdigit() and (name == "0" or name[0] != "0")


def version_policy(repository: Repository) -> Iterator[Flaw]:
    """The version policy can be met by the version folders that exist."""
    for model in repository.configured():
        policy = model.config.version_policy
        present = {int(name) for name in model.version_folders if _is_version(name)}
        missing = sorted(set(policy.specific.versions) - present)
        if present and not model.served_versions:
            yield error(
                model.config_file,
                "must serve at least one version",
                given=f"a version_policy that selects none of the folders {names(present)}",
                remedy="Write version_policy { latest { num_versions: 1 } }, or remove it",
            )
        elif missing:
            yield warning(
                model.config_file,
                "should list only versions in version_policy that have a folder",
                given=f"versions {names(missing)}, folders {names(present)}",
                remedy=f"Create {model.name}/{missing[0]}, or correct version_policy",
            )


def model_file(repository: Repository) -> Iterator[Flaw]:
    """Every served version holds what its backend loads, and it is not empty."""
    for model in repository.executed():
        if waits_for_engine(model):
            continue  # see engine_built
        for folder in model.served_folders:
            if model.model_file:
                yield from _check_model_file(model, folder)


def _check_model_file(model: Model, folder: Path) -> Iterator[Flaw]:
    path = folder / model.model_file
    relative = f"{model.name}/{folder.name}/{model.model_file}"
    if is_file(path):
        start = _first_bytes(path)
        if start and not start.startswith(_LFS_START):
            return
        yield error(
            relative,
            f"must be what the {model.backend} backend loads",
            given="a pointer of git LFS" if start else "an empty file",
            remedy="Run git lfs pull" if start else "Build the pipeline again",
        )
    elif not is_file(path / model.model_file):
        yield error(
            relative,
            f"must exist: the {model.backend} backend loads it",
            given=f"files there: {names(_entries(folder))}",
            remedy="Add it (build the pipeline again), or set default_model_filename to its name",
        )


def _first_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(len(_LFS_START))
    except OSError:
        return b""


def _entries(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in folder.iterdir()]
    except OSError:
        return []


def referenced_file(repository: Repository) -> Iterator[Flaw]:
    """Files that a config or a Python step refers to exist."""
    for model in repository.configured():
        places = [model.folder, *model.served_folders]
        for kind, origin, name in _references(model):
            if not any(is_file(place / name) for place in places):
                yield kind(
                    model.config_file,
                    "must refer to files in the model's folder or its version folder",
                    given=f"{origin}: {name}",
                    remedy="Add the file, correct the name, or build the pipeline again",
                )
        for source in model.sources:
            for name in sorted(files_beside(source.tree)):
                if not exists(source.path.parent / name):
                    yield error(
                        f"{source.folder}/{name}",
                        "must exist: a Python step reads it",
                        given=f"{source.file} reads {name}",
                        remedy=f"Add {source.folder}/{name}, or build the pipeline again",
                    )


def _references(model: Model) -> Iterator[tuple[Callable[..., Flaw], str, str]]:
    for output in model.config.output:
        if output.label_filename:
            yield error, f"output {output.name}, label_filename", output.label_filename
    for key, name in sorted(model.config.cc_model_filenames.items()):
        yield error, f"cc_model_filenames {key}", name
    for key, parameter in sorted(model.config.parameters.items()):
        name = parameter.string_value.removeprefix(_MODEL_FOLDER)
        # An absolute path is the container's business: it cannot be seen from here.
        if name.endswith(_FILE_SUFFIXES) and not name.startswith("/") and " " not in name:
            # What a parameter means is up to the code that reads it; ours reads files.
            yield (error if model.is_ours else warning), f"parameter {key}", name
