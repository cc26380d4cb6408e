"""Pieces of sampling, without a server: what is drawn, how it travels, the folder of files."""

import importlib
import random
import signal
import stat
import subprocess
import sys
import time
import types
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from tests.support.client_toy import wait_until
from triptych.runtime.row_types import (
    NO_TICKET,
    PAYLOAD,
    TICKET,
    make_payload,
    read_payload,
    write_ticket,
)
from triptych.runtime.sampling import (
    FOLDER_VARIABLE,
    MAX_SAMPLE_BYTES,
    PARTIAL,
    RowSampler,
    list_files,
    remove_old,
    unpack_sample,
    write_file,
)


def test_rows_are_drawn_alike_whatever_request_they_are_in() -> None:
    drawing = RowSampler(0.1, random.Random(5))
    found: Counter[int] = Counter()
    for request in range(4000):
        texts = [f"{request} {row}" for row in range(1 + request % 5)]
        passenger = drawing.draw({"text": texts}, "{}")
        if passenger:
            sampled = unpack_sample(passenger)
            assert sampled.columns["text"] == [texts[row].encode() for row in sampled.rows]
            found.update(sampled.rows)
    sent = {row: 4000 - 800 * row for row in range(5)}
    for row, count in sent.items():  # five standard deviations
        assert abs(found[row] - 0.1 * count) < 5 * (0.09 * count) ** 0.5, (row, found)
    every = RowSampler(1.0).draw({"text": ["a", "b"], "image": [b"\0", b""]}, '{"top_k": 1}')
    sampled = unpack_sample(every)
    assert (sampled.rows, sampled.parameters) == ([0, 1], '{"top_k": 1}')
    assert sampled.columns == {"text": [b"a", b"b"], "image": [b"\0", b""]}
    large = unpack_sample(RowSampler(1.0).draw({"text": ["x" * (MAX_SAMPLE_BYTES + 1)]}, "{}"))
    assert (large.rows, large.columns) == ([0], {})


def test_options_and_sample_travel_beside_the_numbers_of_the_ticket() -> None:
    numbers = (2**62, -(2**63))
    sample = RowSampler(1.0).draw({"text": ["ä" * 100, "b", "c"]}, "{}") + b"\0\0"
    for given in (("", sample), ('{"top_k": 3}', b""), ('{"labels": "ä"}', sample)):
        tensors = write_ticket(numbers, make_payload(*given), 3)
        assert tensors[TICKET].tolist() == [[*numbers], [0, 0], [0, 0]]
        first, *others = tensors[PAYLOAD].ravel().tolist()
        assert (read_payload(first), others) == (given, [b"", b""])
    assert write_ticket(NO_TICKET, make_payload("", b""), 3) == {}
    assert [*write_ticket(numbers, b"", 1)] == [TICKET]
    assert [*write_ticket(NO_TICKET, b"sample", 1)] == [PAYLOAD]


def test_a_folder_keeps_to_its_limits_and_ages(tmp_path: Path) -> None:
    folder = tmp_path / "samples" / "p"

    def write(lines: int, **limits: int) -> None:
        bounds = {"max_rows": 10, "max_bytes": 1000, **limits}
        write_file(folder, "p", [b"x" * 9 + b"\n"] * lines, rows=lines, **bounds)

    for _ in range(6):
        write(3)
    files = list_files(folder, "p")
    assert [file.rows for file in files] == [3, 3, 3]
    assert {stat.S_IMODE(file.path.stat().st_mode) for file in files} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    write(3, max_bytes=65)
    assert sum(file.size for file in list_files(folder, "p")) == 60
    (folder / "another.1.1.aa.jsonl").write_text("not ours")
    now = time.time()
    remove_old(folder, "p", 1.0, now + 1800)
    assert len(list_files(folder, "p")) == 2
    remove_old(folder, "p", 1.0, now + 7200)
    assert not list_files(folder, "p")
    write(1)
    remove_old(folder, "p", 1.0, now - 7200)  # the clock went back: nobody knows its age
    assert [path.name for path in folder.iterdir()] == ["another.1.1.aa.jsonl"]


KILLED = """
import os, signal, sys
from pathlib import Path
from triptych.runtime.sampling import write_file

Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
write_file(Path(sys.argv[1]), "p", [b"{}"] * 9, rows=9, max_rows=99, max_bytes=999)
"""


def test_a_writer_that_is_killed_amid_a_file_leaves_none_for_long(tmp_path: Path) -> None:
    folder = tmp_path / "p"
    done = subprocess.run([sys.executable, "-c", KILLED, folder], check=False)
    assert done.returncode == -signal.SIGKILL
    (partial,) = folder.iterdir()
    assert partial.name.startswith(PARTIAL)
    assert stat.S_IMODE(partial.stat().st_mode) == 0o600
    assert not list_files(folder, "p")
    remove_old(folder, "p", 0.5, time.time() + 1700)
    assert partial.exists()  # it may be another server's that writes
    remove_old(folder, "p", 0.5, time.time() + 1900)
    assert not partial.exists()


HANGS = """
import time
from pathlib import Path


def redact(inputs, answer):
    while not Path("GO").exists():
        time.sleep(0.01)
    return inputs, answer
"""


class FakeMetricFamily:
    """A fake of the Python backend's: counts by the label `reason`, else by name."""

    COUNTER = 0
    counts: ClassVar[Counter[str]] = Counter()

    def __init__(self, name: str, description: str, **_: object) -> None:
        self.name = "" if description.startswith("Deprecated") else name

    def Metric(self, labels: dict[str, str]) -> Any:
        name = labels.get("reason", self.name) if self.name else ""
        return types.SimpleNamespace(
            increment=lambda value: FakeMetricFamily.counts.update(
                {name: int(value)} if name else {}
            )
        )


def test_what_a_hanging_redact_costs_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "triton_python_backend_utils"
    monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    monkeypatch.setattr(sys.modules[module], "MetricFamily", FakeMetricFamily, raising=False)
    writing = importlib.import_module("triptych.runtime.sample_writer")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "samples"))
    step = tmp_path / "p_postprocess/1"
    step.mkdir(parents=True)
    (step / "hooks.py").write_text(HANGS.replace("GO", str(tmp_path / "go")))
    limits = {"max_rows": 10**6, "max_bytes": 10**9, "retention_hours": 1, "window_s": 0.01}
    own = {**limits, "redact": "hooks.redact"}
    settings = {"pipeline": "p", "sample": own, "sample_inputs": {"text": "text"}}
    label = {"name": "label", "dtype": "BYTES", "dims": [1], "json": False}
    writer = writing.SampleWriter({**settings, "outputs": [label]}, step)
    counts = FakeMetricFamily.counts
    sample = RowSampler(1.0).draw({"text": ["a"]}, "{}")

    def put(sample: bytes, label: bytes) -> None:
        writer.put(sample, {"label": np.array([[label]], dtype=object)})

    put(sample, b"x")
    wait_until(lambda: not writer._waiting, "a writer")  # it has the row, and hangs
    for _ in range(writing.MAX_WAITING + 5):
        put(sample, b"x")
    assert +counts == {"waiting": 5}
    (tmp_path / "go").touch()
    wait_until(lambda: counts[writing.WRITTEN] > writing.MAX_WAITING, "all rows")
    put(sample, b"x")
    put(b"\xff" * 16, b"x")  # what makes no sense costs no other row
    writer.close(60.0)
    kept = writing.MAX_WAITING + 2
    found = {name: count for name, count in counts.items() if name != writing.BYTES}
    assert found == {"waiting": 5, writing.WRITTEN: kept, "fault": 1}
    assert sum(file.rows for file in list_files(tmp_path / "samples/p", "p")) == kept
    assert not writer._thread.is_alive()
