"""The fake TensorRT shows what the real bindings were recorded to show, and nothing else."""

from collections.abc import Callable
from typing import Any

import pytest

from fake_tensorrt import MAJORS, builder, make_module, runtime
from fake_tensorrt.records import read_record

LACKING: tuple[tuple[str, Callable[[Any], object]], ...] = (
    ("10", lambda trt: trt.DataType.FP7),
    ("11", lambda trt: trt.BuilderFlag.FP16),
    ("11", lambda trt: trt.INetworkDefinition(0).has_implicit_batch_dimension),
    ("10", lambda trt: trt.build_engine),
    ("10", lambda trt: setattr(trt.IBuilderConfig(), "max_workspace_size", 1)),
)
"""Uses of members that a release lacks."""


def test_a_fake_has_only_what_its_release_has() -> None:
    for fake in (*builder.CLASSES, *runtime.CLASSES):
        name = fake.__name__
        recorded = {
            member for major in MAJORS for member in read_record(major)["classes"].get(name, ())
        }
        assert {member for member in vars(fake) if not member.startswith("_")} <= recorded, name
    for major, use in LACKING:
        with pytest.raises(AttributeError):
            use(make_module(major))
