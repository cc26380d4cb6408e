"""A fake of TensorRT, one for each major release: the seam where a GPU would be.

`install` puts a module ``tensorrt`` into ``sys.modules`` that shows exactly what the recorded
release has. Building (`builder`) writes a fake plan around the ONNX graph; running one (`runtime`)
executes that graph with ONNX Runtime. What goes wrong is set in `Play`.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.fake_tensorrt.records import (
    MAJORS,
    RecordedModule,
    limited,
    make_enum,
    read_record,
)

__all__ = ["MAJORS", "Play", "install"]


@dataclass
class Play:
    """Settings of one fake module.

    Attributes:
        no_gpu: builder and runtime do not come into being.
        log: messages (severity, text) told while an engine is built.
        build_fails: the builder gives None after `log`.
        parser_errors: each the fields of a ParserError; parsing fails with them.
        layer_types: ONNX node -> the type its kernel really has (``Float``, ``Half``, ...).
        fused: the inspector shows the whole graph as one layer.
        lost_profile: the last profile is not in the plan.
        stale: plans do not deserialize.
        miscompute: changes the outputs of a run.
        builds: what each build was asked for, in order.
    """

    no_gpu: bool = False
    log: list[tuple[str, str]] = field(default_factory=list)
    build_fails: bool = False
    parser_errors: list[dict[str, Any]] = field(default_factory=list)
    layer_types: dict[str, str] = field(default_factory=dict)
    fused: bool = False
    lost_profile: bool = False
    stale: bool = False
    miscompute: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    builds: list[dict[str, Any]] = field(default_factory=list)


def install(monkeypatch: pytest.MonkeyPatch, major: str) -> Any:
    """Make ``import tensorrt`` give the fake of `major` until the test ends.

    Returns:
        The module; its ``_play`` says what goes wrong and remembers what was asked of it.
    """
    module = make_module(major)
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    return module


def make_module(major: str) -> Any:
    """Return the fake module of ``10`` or ``11``."""
    from tests.support.fake_tensorrt import builder, runtime

    record = read_record(major)
    module = RecordedModule("tensorrt")
    module.__dict__.update({"__version__": record["version"], "_play": Play()})
    for name, members in record["enums"].items():
        setattr(module, name, make_enum(name, members))
    for fake in (*builder.CLASSES, *runtime.CLASSES):
        if (name := fake.__name__) in record["classes"]:
            setattr(module, name, limited(fake, name, set(record["classes"][name]), module))
    return module
