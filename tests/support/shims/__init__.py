"""Commands whose processes see another clock or a slow folder, by C compiled for LD_PRELOAD."""

import shutil
import struct
import subprocess
from pathlib import Path

import pytest

_FOLDER = Path(__file__).parent


def _wrapper(name: str, folder: Path, **variables: object) -> list[str]:
    """The first words of a command whose processes load a library; it is compiled in a folder."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    library = folder / f"{name}.so"
    words = ("cc", "-Wall", "-Werror", "-O2", "-shared", "-fPIC", "-o", library)
    subprocess.run([*words, _FOLDER / f"{name}.c"], check=True)
    given = {"LD_PRELOAD": library, **variables}
    return ["env", *(f"{variable}={value}" for variable, value in given.items())]


class MovedClock:
    """A clock that `move` sets forward or back for the processes of commands after `wrapper`."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "moved"
        self._moved_s = 0
        self._file.write_bytes(bytes(8))
        self.wrapper = _wrapper("clock", folder, CLOCK_FILE=self._file)

    def move(self, seconds: int) -> None:
        self._moved_s += seconds
        with self._file.open("r+b") as file:
            file.write(struct.pack("q", self._moved_s))


def slow_access(folder: Path, slow: Path, ms: int) -> list[str]:
    """The first words of a command for which each access to what is in `slow` takes so long."""
    return _wrapper("slow", folder, SLOW_FOLDER=slow, SLOW_MS=ms)
