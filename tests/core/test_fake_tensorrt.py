"""The fake TensorRT shows what the real bindings were recorded to show, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from fake_tensorrt import MAJORS, builder, inspector, make_module, network, parser, runtime
from fake_tensorrt.records import read_record

HALVES = (builder, inspector, network, parser, runtime)
FAKES: dict[str, type] = {name: cls for half in HALVES for name, cls in half.CLASSES.items()}


class Quiet:
    def log(self, severity: Any, message: str) -> None:
        pass


@pytest.mark.parametrize("name", FAKES)
def test_a_fake_has_only_members_that_some_release_has(name: str) -> None:
    recorded = {
        member for major in MAJORS for member in read_record(major)["classes"].get(name, ())
    }
    shown = {member for member in vars(FAKES[name]) if not member.startswith("_")}
    assert shown <= recorded


@pytest.mark.parametrize("major", MAJORS)
def test_the_module_has_the_recorded_version_and_enums(major: str) -> None:
    trt, record = make_module(major), read_record(major)
    assert trt.__version__ == record["version"]
    for name, members in record["enums"].items():
        assert {key: int(value) for key, value in getattr(trt, name).__members__.items()} == members


MISSING: list[tuple[str, Any]] = [
    ("10", lambda trt: trt.DataType.FP7),
    ("11", lambda trt: trt.NetworkDefinitionCreationFlag.EXPLICIT_BATCH),
    ("11", lambda trt: trt.BuilderFlag.FP16),
    ("11", lambda trt: trt.BuilderFlag.OBEY_PRECISION_CONSTRAINTS),
    ("11", lambda trt: trt.ILayer("a", None, "", []).precision),
    ("10", lambda trt: trt.build_engine),
    ("10", lambda trt: setattr(trt.IBuilderConfig(), "max_workspace_size", 1)),
]


@pytest.mark.parametrize(("major", "use"), MISSING)
def test_what_a_release_lacks_raises_an_attribute_error(major: str, use: Any) -> None:
    with pytest.raises(AttributeError):
        use(make_module(major))


@pytest.mark.parametrize("major", MAJORS)
def test_numbers_are_no_flags(major: str) -> None:
    trt = make_module(major)
    config = trt.Builder(Quiet()).create_builder_config()
    calls: tuple[Any, ...] = (
        lambda: config.set_flag(0),
        lambda: config.clear_flag(6),
        lambda: config.set_memory_pool_limit(0, 1),
    )
    for call in calls:
        with pytest.raises(TypeError):
            call()
