"""Lint: the Python steps load in the container, and run on the CPU."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from triptych.lint.flaw import Flaw, error, names, warning
from triptych.lint.python_source import Source, defined_names, imports_of
from triptych.lint.snapshot import Model, Repository, enum_name, exists

_CLASS = "TritonPythonModel"
_IN_CONTAINER = {"numpy", "tokenizers", "triton_python_backend_utils", "c_python_backend_utils"}
_GPU_MODULES = {"torch", "cupy", "tensorrt", "onnxruntime", "jax", "vllm", "numba", "pycuda"}


def python_model(repository: Repository) -> Iterator[Flaw]:
    """Every Python file parses, and the model file defines TritonPythonModel with execute."""
    for model in repository.executed():
        for source in model.sources:
            if source.problem:
                yield error(
                    source.file,
                    "must be Python that parses",
                    given=source.problem,
                    remedy="Mend the line, or build the pipeline again",
                )
            elif source.path in [folder / model.model_file for folder in model.served_folders]:
                yield from _check_class(source)


def _check_class(source: Source) -> Iterator[Flaw]:
    defined = defined_names(source.tree)
    found = defined.get(_CLASS)
    if found is None and "*" not in defined:
        yield error(
            source.file,
            f"must define the class {_CLASS}",
            given=f"defined there: {names(defined)}",
            remedy=f"Define class {_CLASS} with execute(self, requests)",
        )
    elif isinstance(found, ast.ClassDef) and not found.bases:
        methods = {node.name for node in found.body if hasattr(node, "name")}
        if "execute" not in methods:
            yield error(
                source.file,
                f"must give {_CLASS} a method execute(self, requests)",
                given=f"methods: {names(methods)}",
                remedy="Define execute; it returns one response for each request",
            )


def python_import(repository: Repository) -> Iterator[Flaw]:
    """Python steps import only what is in the container, and siblings that exist."""
    for model in repository.executed():
        if "EXECUTION_ENV_PATH" in model.config.parameters:
            continue
        for source in model.sources:
            foreign = {name for name in _absolute_imports(source) if not _importable(name, model)}
            if foreign:
                yield warning(
                    source.file,
                    f"should import only the standard library, {names(_IN_CONTAINER)} and siblings",
                    given=names(foreign),
                    remedy="Add the package to the image, or set EXECUTION_ENV_PATH to an "
                    "environment that has it",
                )
            yield from _missing_siblings(source)


def _absolute_imports(source: Source) -> set[str]:
    return {name.partition(".")[0] for name, level in imports_of(source.tree) if level == 0}


def _importable(name: str, model: Model) -> bool:
    if name in _IN_CONTAINER or name in sys.stdlib_module_names:
        return True
    # The stub puts the version folder and the model's folder on the module search path.
    return any(_is_module(place / name) for place in [model.folder, *model.served_folders])


def _is_module(path: Path) -> bool:
    return exists(path.parent / f"{path.name}.py") or exists(path)


def _missing_siblings(source: Source) -> Iterator[Flaw]:
    relative = {name.partition(".")[0] for name, level in imports_of(source.tree) if level == 1}
    missing = [name for name in relative if not _is_module(source.path.parent / name)]
    # `from . import name` may name something that a package defines in its __init__.py.
    if missing and not source.path.with_name("__init__.py").exists():
        yield error(
            source.file,
            "must find the siblings it imports in its own folder",
            given=f"missing: {names(missing)}",
            remedy=f"Add {source.folder}/{min(missing)}.py, or build the pipeline again",
        )


def python_kind(repository: Repository) -> Iterator[Flaw]:
    """Python steps that need no GPU say KIND_CPU: a GPU build puts KIND_AUTO on every GPU."""
    for model in repository.executed():
        if model.backend != "python" or _uses_gpu(model):
            continue
        kinds = {enum_name(group, "kind") for group in model.config.instance_group}
        if "KIND_GPU" in kinds:
            yield error(
                model.config_file,
                "must run a Python step that uses no GPU as KIND_CPU",
                given="KIND_GPU, which does not load on a machine without a GPU",
                remedy="Write instance_group [{ count: 1 kind: KIND_CPU }]",
            )
        elif "KIND_AUTO" in kinds or not kinds:
            yield warning(
                model.config_file,
                "should run a Python step that uses no GPU as KIND_CPU",
                given="KIND_AUTO" if kinds else "no instance_group, which means KIND_AUTO",
                remedy="Write instance_group [{ count: 1 kind: KIND_CPU }]: on a GPU machine "
                "KIND_AUTO starts the count on every GPU",
            )


def _uses_gpu(model: Model) -> bool:
    imported = (_absolute_imports(source) for source in model.sources)
    return any(found & _GPU_MODULES for found in imported)
