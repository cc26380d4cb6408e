"""Triptych: a Hugging Face model becomes a Triton ensemble that tokenizes, infers and decodes.

`new`, `build` and `serve` do from Python what the verbs of the command line do.

>>> triptych.build("minilm")
>>> with triptych.serve("minilm") as server:
...     vectors = server.client("minilm").embed(["my delivery is late"])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triptych.api.verbs import Build, Served, build, new, serve
    from triptych.client import Client
    from triptych.errors import UserError
    from triptych.gate.cached import GateFailure

__all__ = ["Build", "Client", "GateFailure", "Served", "UserError", "build", "new", "serve"]

_ELSEWHERE = {
    "Client": "triptych.client",
    "GateFailure": "triptych.gate.cached",
    "UserError": "triptych.errors",
}


def __getattr__(name: str) -> Any:
    """Import at the first use: the package is in images and steps that need none of it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_ELSEWHERE.get(name, "triptych.api.verbs")), name)
