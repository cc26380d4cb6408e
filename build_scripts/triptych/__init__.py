"""Triptych: a Hugging Face model becomes a Triton ensemble that tokenizes, infers and decodes.

`new`, `build` and `serve` do from Python what the verbs of the command line do.

>>> triptych.build("minilm")
>>> with triptych.serve("minilm") as server:
...     vectors = server.client("minilm").embed(["my delivery is late"])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triptych.base.errors import UserError
    from triptych.client import Client
    from triptych.core.gate.cached import GateFailure
    from triptych.interface.api import BuildResult, ServerHandle, build, new, serve
    from triptych.interface.bulk.predictor import Predictor

    __version__: str

__all__ = [
    "BuildResult",
    "Client",
    "GateFailure",
    "Predictor",
    "ServerHandle",
    "UserError",
    "build",
    "new",
    "serve",
]
_ELSEWHERE = {
    "Client": "triptych.client",
    "GateFailure": "triptych.core.gate.cached",
    "Predictor": "triptych.interface.bulk.predictor",
    "UserError": "triptych.base.errors",
}


def __getattr__(name: str) -> Any:
    """Import at the first use: the package is in images and steps that need none of it."""
    if name == "__version__":
        from importlib.metadata import version

        return version("triptych-client")  # the other distribution has the same version
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_ELSEWHERE.get(name, "triptych.interface.api")), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
