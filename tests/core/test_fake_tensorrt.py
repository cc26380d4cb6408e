"""The fake TensorRT shows what the real bindings were recorded to show, and nothing else."""

from typing import Any

import pytest

from fake_tensorrt import MAJORS, builder, make_module, runtime
from fake_tensorrt.records import read_record


class Quiet:
    def log(self, severity: Any, message: str) -> None:
        pass


def test_a_fake_has_only_members_that_some_release_has() -> None:
    for fake in (*builder.CLASSES, *runtime.CLASSES):
        name = fake.__name__
        recorded = {
            member for major in MAJORS for member in read_record(major)["classes"].get(name, ())
        }
        assert {member for member in vars(fake) if not member.startswith("_")} <= recorded, name


def test_the_module_has_the_recorded_version_and_enums() -> None:
    for major in MAJORS:
        trt, record = make_module(major), read_record(major)
        assert trt.__version__ == record["version"]
        for name, members in record["enums"].items():
            found = getattr(trt, name).__members__.items()
            assert {key: int(value) for key, value in found} == members, name


MISSING: list[tuple[str, Any]] = [
    ("10", lambda trt: trt.DataType.FP7),
    ("11", lambda trt: trt.NetworkDefinitionCreationFlag.EXPLICIT_BATCH),
    ("11", lambda trt: trt.BuilderFlag.FP16),
    ("11", lambda trt: trt.INetworkDefinition(0).has_implicit_batch_dimension),
    ("10", lambda trt: trt.build_engine),
    ("10", lambda trt: setattr(trt.IBuilderConfig(), "max_workspace_size", 1)),
]


def test_what_a_release_lacks_raises_an_attribute_error() -> None:
    for major, use in MISSING:
        with pytest.raises(AttributeError):
            use(make_module(major))


def test_numbers_are_no_flags() -> None:
    for major in MAJORS:
        config = make_module(major).Builder(Quiet()).create_builder_config()
        calls: tuple[Any, ...] = (
            lambda config=config: config.set_flag(0),
            lambda config=config: config.clear_flag(6),
            lambda config=config: config.set_memory_pool_limit(0, 1),
        )
        for call in calls:
            with pytest.raises(TypeError):
                call()
