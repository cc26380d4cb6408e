"""A fake of TensorRT, one for each major release: the seam where a GPU would be.

`install` puts a module ``tensorrt`` into ``sys.modules`` that shows exactly what the recorded
release has. Building (`builder`, `network`, `parser`) writes a fake plan around the ONNX graph;
running one (`runtime`) executes that graph with ONNX Runtime. What goes wrong is set in `Play`.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest

from fake_tensorrt.play import Play
from fake_tensorrt.records import MAJORS, RecordedModule, limited, make_enum, read_record

__all__ = ["MAJORS", "Play", "install"]


def install(monkeypatch: pytest.MonkeyPatch, major: str) -> Any:
    """Make ``import tensorrt`` give the fake of `major` until the test ends.

    Returns:
        The module; its ``_play`` says what goes wrong and remembers what was asked of it.
    """
    module = make_module(major)
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    return module


def make_module(major: str) -> Any:
    """The fake module of ``10`` or ``11``."""
    from fake_tensorrt import builder, inspector, network, parser, runtime

    record = read_record(major)
    module = RecordedModule("tensorrt")
    contents: dict[str, Any] = {
        "__version__": record["version"],
        "_play": Play(),
        "_record": record,
    }
    contents |= {name: make_enum(name, members) for name, members in record["enums"].items()}
    classes: dict[str, type] = {}
    for half in (builder, inspector, network, parser, runtime):
        classes |= half.CLASSES
    for name, members in record["classes"].items():
        if name in classes:
            contents[name] = limited(classes[name], name, set(members), module)
    module.__dict__.update(contents)
    return module
