"""Code copied verbatim into the repository and run by Triton's Python stub.

It imports the standard library, numpy, tokenizers and `triton_python_backend_utils`, nothing else.
"""

import importlib
from pathlib import Path
from types import ModuleType


def module_of(file: str) -> ModuleType:
    """A module of this package by its file's name, as a task names what it needs of it."""
    return importlib.import_module(f"{__name__}.{Path(file).stem}")
