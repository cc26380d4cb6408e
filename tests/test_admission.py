"""The limit on requests under way: shared by processes, and never stuck on what got lost."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from triptych.runtime import admission
from triptych.runtime.admission import Admission, InFlight

PIPELINE = f"test-{os.getpid()}"


@pytest.fixture
def in_flight() -> Iterator[InFlight]:
    in_flight = InFlight(PIPELINE)
    yield in_flight
    in_flight.path.unlink()


def test_room_shrinks_and_grows(in_flight: InFlight) -> None:
    door = Admission(in_flight, limit=3)
    assert door.room() == 3
    tickets = [door.admit() for _ in range(3)]
    assert door.room() == 0
    in_flight.settle(tickets[0])
    assert door.room() == 1


def test_the_limit_holds_over_all_instances(in_flight: InFlight) -> None:
    first, second = (Admission(other, limit=4) for other in (in_flight, InFlight(PIPELINE)))
    tickets = [door.admit() for door in (first, second, second)]
    assert (first.room(), second.room()) == (1, 1)
    in_flight.settle(tickets[2])
    assert first.room() == 3


def test_what_got_lost_is_forgotten_with_the_next_that_comes_through(in_flight: InFlight) -> None:
    door = Admission(in_flight, limit=10)
    tickets = [door.admit() for _ in range(9)]
    in_flight.settle(tickets[8])  # the eight before it failed in the core, or their clients left
    assert in_flight.under_way() == 0
    in_flight.settle(tickets[3])  # late, out of order: takes nothing back
    assert in_flight.under_way() == 0


def test_a_full_pipeline_that_lost_everything_opens_again(
    in_flight: InFlight, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = Admission(in_flight, limit=2)
    for _ in range(2):
        door.admit()
    assert door.room() == 0
    later = time.monotonic() + admission.PATIENCE_S + 0.1
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert door.room() == 1
    assert door.room() == 0  # one probe, not a flood
    in_flight.settle(door.admit())
    assert door.room() == 2


COUNT = """
import os, sys
os.getppid = lambda: int(sys.argv[2])  # as the stubs of one server have one parent
from triptych.runtime.admission import InFlight
in_flight = InFlight(sys.argv[1])
slot = in_flight.take_slot()
for _ in range(1000):
    in_flight.admit(slot)
print(slot, flush=True)
sys.stdin.read()
"""


def test_processes_share_one_count_and_leave_their_slots(in_flight: InFlight) -> None:
    words = [sys.executable, "-c", COUNT, PIPELINE, str(os.getppid())]
    children = [
        subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    slots = set()
    for child in children:
        assert child.stdout is not None
        slots.add(child.stdout.readline().strip())
    assert slots == {"0", "1", "2"}
    assert in_flight.under_way() == 3000
    for child in children:
        child.communicate(timeout=30)
    assert (
        in_flight.take_slot() == 0
    )  # a reloaded step takes a dead one's, and what it had under way
    assert in_flight.under_way() == 2000


def test_the_counts_of_a_dead_server_is_removed() -> None:
    left = admission.SHARED_MEMORY / f"triptych_in_flight.4194304-12345.{PIPELINE}"
    left.write_bytes(bytes(8))
    InFlight(PIPELINE).path.unlink()
    assert not left.exists()


def test_a_server_may_choose_the_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(admission.PREFIX_VARIABLE, "triptych_mine_")
    in_flight = InFlight(PIPELINE)
    in_flight.path.unlink()
    assert in_flight.path.name.startswith("triptych_mine_in_flight.")
