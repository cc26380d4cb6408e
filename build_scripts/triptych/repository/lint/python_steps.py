"""Checks that the Python steps load in the container and run on the CPU."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from triptych.repository.lint.snapshot import (
    Flaw,
    Model,
    Source,
    defined_names,
    enum_name,
    error,
    exists,
    imports_of,
    names,
    warning,
)

_CLASS = "TritonPythonModel"
_IN_CONTAINER = {"numpy", "tokenizers", "triton_python_backend_utils", "c_python_backend_utils"}
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
    """Check that every Python file parses, and that the model file defines its class."""
    for source in model.sources:
        if source.problem:
            yield error(
                "must be Python that parses",
                source.problem,
                "Correct the line, or build the pipeline again",
                source.file,
            )
        elif source.path in [folder / model.model_file for folder in model.served_folders]:
            yield from _check_class(source)


def _check_class(source: Source) -> Iterator[Flaw]:
    defined = defined_names(source.tree)
    found = defined.get(_CLASS)
    if found is None and "*" not in defined:
        yield error(
            f"must define the class {_CLASS}",
            f"defined there: {names(defined)}",
            f"Define class {_CLASS} with execute(self, requests)",
            source.file,
        )
    elif isinstance(found, ast.ClassDef) and not found.bases:
        methods = {node.name for node in found.body if hasattr(node, "name")}
        if "execute" not in methods:
            yield error(
                f"must give {_CLASS} a method execute(self, requests)",
                f"methods: {names(methods)}",
                "Define execute; it returns one response for each request",
                source.file,
            )


def python_import(model: Model) -> Iterator[Flaw]:
    """Check that Python steps import only packages of the container and existing siblings."""
    # The stub puts the version folder and the model's folder on the module search path.
    places = [model.folder, *model.served_folders]
    for source in model.sources if "EXECUTION_ENV_PATH" not in model.config.parameters else ():
        imported = imports_of(source.tree, 0) - _IN_CONTAINER - sys.stdlib_module_names
        if exists(source.path.with_name(_GENERATION_MARK)):
            imported -= _FOR_GENERATION
        foreign = [n for n in imported if not any(_is_module(place / n) for place in places)]
        if foreign:
            yield warning(
                f"should import only the standard library, {names(_IN_CONTAINER)} and siblings",
                names(foreign),
                "Add the package to the image, or set EXECUTION_ENV_PATH to an environment that "
                "has it",
                source.file,
            )
        relative = imports_of(source.tree, 1)
        missing = [name for name in relative if not _is_module(source.path.parent / name)]
        # `from . import name` may import a name that a package defines in its __init__.py.
        if missing and not source.path.with_name("__init__.py").exists():
            yield error(
                "must find the siblings it imports in its own folder",
                f"missing: {names(missing)}",
                f"Add {source.folder}/{min(missing)}.py, or build the pipeline again",
                source.file,
            )


def _is_module(path: Path) -> bool:
    return exists(path.parent / f"{path.name}.py") or exists(path)


def python_kind(model: Model) -> Iterator[Flaw]:
    """Check that Python steps without a GPU have KIND_CPU.

    A GPU build of Triton places KIND_AUTO on every GPU.
    """
    on_gpu = any(imports_of(source.tree, 0) & _GPU_MODULES for source in model.sources)
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
