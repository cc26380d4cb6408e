"""The limit on requests under way: shared by processes, and never stuck on what got lost."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from triptych.runtime import admission
from triptych.runtime.admission import Door, Ledger

PIPELINE = f"test-{os.getpid()}"


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    ledger = Ledger(PIPELINE)
    yield ledger
    ledger.path.unlink()


def test_room_shrinks_and_grows(ledger: Ledger) -> None:
    door = Door(ledger, limit=3)
    assert door.room() == 3
    tickets = [door.admit() for _ in range(3)]
    assert door.room() == 0
    ledger.settle(tickets[0])
    assert door.room() == 1


def test_the_limit_holds_over_all_instances(ledger: Ledger) -> None:
    first, second = (Door(other, limit=4) for other in (ledger, Ledger(PIPELINE)))
    tickets = [door.admit() for door in (first, second, second)]
    assert (first.room(), second.room()) == (1, 1)
    ledger.settle(tickets[2])
    assert first.room() == 3


def test_what_got_lost_is_forgotten_with_the_next_that_comes_through(ledger: Ledger) -> None:
    door = Door(ledger, limit=10)
    tickets = [door.admit() for _ in range(9)]
    ledger.settle(tickets[8])  # the eight before it failed in the core, or their clients left
    assert ledger.under_way() == 0
    ledger.settle(tickets[3])  # late, out of order: takes nothing back
    assert ledger.under_way() == 0


def test_a_full_pipeline_that_lost_everything_opens_again(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = Door(ledger, limit=2)
    for _ in range(2):
        door.admit()
    assert door.room() == 0
    later = time.monotonic() + admission.PATIENCE_S + 0.1
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert door.room() == 1
    assert door.room() == 0  # one probe, not a flood
    ledger.settle(door.admit())
    assert door.room() == 2


COUNT = """
import os, sys
os.getppid = lambda: int(sys.argv[2])  # as the stubs of one server have one parent
from triptych.runtime.admission import Ledger
ledger = Ledger(sys.argv[1])
slot = ledger.take_slot()
for _ in range(1000):
    ledger.admit(slot)
print(slot, flush=True)
sys.stdin.read()
"""


def test_processes_share_one_count_and_leave_their_slots(ledger: Ledger) -> None:
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
    assert ledger.under_way() == 3000
    for child in children:
        child.communicate(timeout=30)
    assert ledger.take_slot() == 0  # a reloaded step takes a dead one's, and what it had under way
    assert ledger.under_way() == 2000


def test_the_ledger_of_a_dead_server_is_removed() -> None:
    left = admission.SHARED_MEMORY / f"triptych_ledger.4194304-12345.{PIPELINE}"
    left.write_bytes(bytes(8))
    Ledger(PIPELINE).path.unlink()
    assert not left.exists()


def test_a_server_may_choose_the_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(admission.PREFIX_VARIABLE, "triptych_mine_")
    ledger = Ledger(PIPELINE)
    ledger.path.unlink()
    assert ledger.path.name.startswith("triptych_mine_ledger.")
