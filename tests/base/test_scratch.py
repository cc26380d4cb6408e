"""Folders for the time of some work: gone at its end, or with the next work of that kind."""

import subprocess
import sys
from pathlib import Path

import pytest

from triptych.base.files import scratch_folder

HOLD = """
import sys
from triptych.base.files import scratch_folder
with scratch_folder("triptych-lint-") as folder:
    (folder / "model").mkdir()
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_a_killed_build_leaves_nothing_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "with space \u00fc"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    (temporary / "triptych-lint-mine").mkdir()  # of nobody's that can be told
    holders = [
        subprocess.Popen(
            [sys.executable, "-c", HOLD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        killed, living = (
            Path(holder.stdout.readline().strip()) for holder in holders if holder.stdout
        )
        holders[0].kill()
        holders[0].wait()
        assert killed.is_dir()
        with scratch_folder("triptych-lint-") as own:
            assert sorted(temporary.glob("triptych-lint-*")) == sorted(
                [living, own, temporary / "triptych-lint-mine"]
            )
        assert not own.exists()
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()
