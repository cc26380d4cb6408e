"""What each TensorRT release has: recorded from the real bindings; a fake may show nothing else."""

import json
from enum import Enum
from types import ModuleType
from typing import Any

from tests.support.project import ROOT

MAJORS = ("10", "11")
FOLDER = ROOT / "tests/data/tensorrt_api"


def read_record(major: str) -> dict[str, Any]:
    """``version``, ``source``, ``classes`` (name -> members), ``enums`` (name -> member -> int)."""
    record: dict[str, Any] = json.loads((FOLDER / f"{major}.json").read_text(encoding="utf-8"))
    return record


class FakeEnum(Enum):
    """A pybind11 enum: int() works on it, arithmetic and literal integers do not."""

    def __int__(self) -> int:
        return int(self.value)


def make_enum(name: str, members: dict[str, int]) -> Any:
    """The recorded enum; equal values are aliases, as in the bindings."""
    make: Any = FakeEnum
    return make(name, members)


class Fake:
    """A class of the fake; its objects know their module."""

    _trt: Any


def limited(cls: type, name: str, members: set[str], module: ModuleType) -> type:
    """`cls` as one release has it: a public name it lacks raises AttributeError, set or read."""

    def refuse(attribute: str) -> None:
        if not attribute.startswith("_") and attribute not in members:
            raise AttributeError(f"'tensorrt.{name}' object has no attribute '{attribute}'")

    def read(self: Any, attribute: str) -> Any:
        refuse(attribute)
        return object.__getattribute__(self, attribute)

    def write(self: Any, attribute: str, value: Any) -> None:
        refuse(attribute)
        object.__setattr__(self, attribute, value)

    body = {
        "__getattribute__": read,
        "__setattr__": write,
        "_trt": module,
        "__module__": "tensorrt",
    }
    return type(name, (cls,), body)


class RecordedModule(ModuleType):
    """The module ``tensorrt`` of one release: nothing is in it but what was put there."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"module 'tensorrt' has no attribute '{name}'")
