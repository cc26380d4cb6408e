"""Which requests are let in: counts shared by processes, never stuck on what got lost."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from client_toy import wait_until
from triptych.runtime import in_flight as module
from triptych.runtime.flow_control import MIN_REQUESTS, SHUTDOWN_GRACE_S, Admission
from triptych.runtime.in_flight import (
    FIRST_PATIENCE_S,
    MIN_PATIENCE_S,
    PLACES,
    REORDERED,
    SILENT_BATCHES,
    InFlight,
    Ticket,
)
from triptych.runtime.request_errors import Overloaded, Stopping

PIPELINE = f"test-{os.getpid()}"


class Clock:
    """Stands for the monotonic clock."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def monotonic_ns(self) -> int:
        return round(self.now * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("time.monotonic", clock.monotonic)
    monkeypatch.setattr("time.monotonic_ns", clock.monotonic_ns)
    return clock


@pytest.fixture
def in_flight() -> Iterator[InFlight]:
    in_flight = InFlight(PIPELINE)
    yield in_flight
    in_flight.path.unlink()


def ask(
    admission: Admission, requests: int = 1, *, rows: int = 1, left_s: float | None = None
) -> list[Ticket]:
    """Tickets of the requests let in, of those that come together."""
    tickets: list[Ticket] = []
    admission.begin()
    for _ in range(requests):
        try:
            admission.check(left_s)
        except (Overloaded, Stopping):
            continue
        tickets.append(admission.admit(rows))
    admission.end()
    return tickets


def serve(counts: InFlight, clock: Clock, tickets: list[Ticket], row_s: float) -> None:
    """Answer the requests, one row each, one after the other."""
    for ticket in tickets:
        clock.now += row_s
        assert counts.mark_finished(ticket)


@pytest.mark.usefixtures("clock")
def test_so_many_are_let_in_and_no_more(in_flight: InFlight) -> None:
    admission = Admission(in_flight, 3, 1.0)
    tickets = ask(admission, 5)
    assert len(tickets) == 3
    assert in_flight.mark_finished(tickets[0])
    assert len(ask(admission, 5)) == 1


@pytest.mark.usefixtures("clock")
def test_the_limit_holds_over_all_instances(in_flight: InFlight) -> None:
    first, second = (Admission(other, 4, 1.0) for other in (in_flight, InFlight(PIPELINE)))
    tickets = [*ask(first), *ask(second, 2)]
    assert in_flight.mark_finished(tickets[2])
    assert len(ask(first, 9)) == 2


def test_counts_are_exact_in_any_order_within_a_window(in_flight: InFlight) -> None:
    """More requests than places pass; each is answered before `REORDERED` later ones are."""
    draw, slots = random.Random(3), [in_flight.take_slot()]
    slots.append(InFlight(PIPELINE).take_slot())
    open_: dict[int, list[Ticket]] = {slot: [] for slot in slots}
    rows_of: dict[Ticket, int] = {}
    for _ in range(3 * PLACES):
        slot = draw.choice(slots)
        tickets = open_[slot]
        rows = draw.randint(1, 5)
        tickets.append(in_flight.admit(slot, rows))
        rows_of[tickets[-1]] = rows
        while tickets and (
            tickets[-1].number - tickets[0].number >= REORDERED - 1 or draw.random() < 0.5
        ):
            is_late = tickets[-1].number - tickets[0].number >= REORDERED - 1
            ticket = tickets.pop(0 if is_late else draw.randrange(len(tickets)))
            for _ in range(2):  # it counts once
                assert in_flight.mark_finished(ticket)
        left = [ticket for tickets in open_.values() for ticket in tickets]
        assert in_flight.load().requests == len(left)
        assert in_flight.load().rows_in_core == sum(rows_of[ticket] for ticket in left)


def test_what_got_lost_is_forgotten_with_one_that_came_much_later(in_flight: InFlight) -> None:
    tickets = ask(Admission(in_flight, 1000, 1.0), REORDERED + 9, rows=2)
    in_flight.mark_finished(tickets[-1])
    assert in_flight.load().requests == REORDERED - 1
    in_flight.mark_finished(tickets[3])  # forgotten already: takes nothing back
    assert in_flight.load().rows == 2 * (REORDERED - 1)
    in_flight.mark_finished(tickets[40])
    assert in_flight.load().requests == REORDERED - 2


@pytest.mark.parametrize("batch_s", [0.0, 0.02, 0.2])
def test_a_burst_whose_clients_left_is_forgotten(
    in_flight: InFlight, clock: Clock, batch_s: float
) -> None:
    admission, patience_s = Admission(in_flight, 32, 1000.0), FIRST_PATIENCE_S
    if batch_s:
        patience_s = max(SILENT_BATCHES * batch_s, MIN_PATIENCE_S)
        for _ in range(9):
            tickets = ask(admission, 32)
            clock.now += batch_s
            serve(in_flight, clock, tickets, 0.0)
    assert len(ask(admission, 40)) == 32
    clock.now += 0.9 * patience_s
    assert not ask(admission)
    clock.now += 0.2 * patience_s
    lone = ask(admission)
    assert len(lone) == 1
    assert in_flight.load().requests == 1
    # The core may also be slow: it is given as much again only after twice the time.
    assert len(ask(admission, 40)) == 31
    clock.now += 1.9 * patience_s
    assert not ask(admission)
    clock.now += 0.2 * patience_s
    lone = ask(admission)
    assert len(lone) == 1
    serve(in_flight, clock, lone, 0.0)
    assert in_flight.load().requests == 0


def test_abandoned_requests_of_one_instance_are_forgotten_while_another_is_busy(
    in_flight: InFlight, clock: Clock
) -> None:
    left, busy = Admission(in_flight, 100, 9.0), Admission(InFlight(PIPELINE), 100, 9.0)
    ask(left, 20)
    for _ in range(40):
        tickets = ask(busy, 8)
        clock.now += 0.02
        serve(in_flight, clock, tickets, 0.0)
    assert in_flight.load().requests == 20
    assert in_flight.load(clock.now).requests == 0


def test_the_queue_is_bounded_by_time_at_the_rate_measured(
    in_flight: InFlight, clock: Clock
) -> None:
    admission = Admission(in_flight, 1000, 2.0)
    first = ask(admission, 200)
    assert len(first) == 200  # nothing is known yet
    serve(in_flight, clock, first, 0.02)
    assert in_flight.row_s == pytest.approx(0.02)
    assert len(ask(admission, 300)) == pytest.approx(100, abs=2)
    admission.begin()
    with pytest.raises(Overloaded, match=r"take 20\d\d ms; .* Try again in 10\d\d ms"):
        admission.check(None)


def test_a_deadline_that_cannot_be_met_is_refused(in_flight: InFlight, clock: Clock) -> None:
    admission = Admission(in_flight, 1000, 2.0)
    serve(in_flight, clock, ask(admission, 100), 0.02)
    assert len(ask(admission, 50)) == 50
    assert not ask(admission, left_s=1.3)
    assert len(ask(admission, left_s=1.5)) == 1


def test_a_slow_pipeline_still_lets_some_in(in_flight: InFlight, clock: Clock) -> None:
    admission = Admission(in_flight, 1000, 0.1)
    serve(in_flight, clock, ask(admission, 4), 5.0)
    assert len(ask(admission, 50)) == MIN_REQUESTS


def test_the_rate_of_an_idle_pipeline_limits_nothing(in_flight: InFlight, clock: Clock) -> None:
    admission = Admission(in_flight, 1000, 2.0)
    for _ in range(50):
        serve(in_flight, clock, ask(admission), 0.01)  # one client alone: no batches
        clock.now += 10.0
    assert in_flight.row_s == pytest.approx(0.01)
    assert len(ask(admission, 1000)) == 1000


def answered(
    counts: InFlight, clock: Clock, *, longest_wait_s: float, rate_per_s: float, requests: int
) -> list[float]:
    """Latencies of those let in, behind a core that takes 150 ms a batch and 20 ms a row."""
    admission = Admission(counts, 1000, longest_wait_s)
    draw = random.Random(7)
    arrivals = deque(accumulate((draw.expovariate(rate_per_s) for _ in range(requests)), initial=0))
    queue: deque[tuple[Ticket, float]] = deque()
    batch: list[tuple[Ticket, float]] = []
    start, done_s, latencies = clock.now, 0.0, []
    while arrivals or queue or batch:
        if arrivals and not (batch and done_s <= arrivals[0]):
            clock.now = start + arrivals[0]
            queue.extend((ticket, arrivals[0]) for ticket in ask(admission))
            arrivals.popleft()
        else:
            clock.now = start + done_s
            for ticket, arrived_s in batch:
                counts.mark_finished(ticket)
                latencies.append(done_s - arrived_s)
            batch.clear()
        if not batch and queue:
            batch = [queue.popleft() for _ in range(min(32, len(queue)))]
            done_s = clock.now - start + 0.15 + 0.02 * len(batch)
    return latencies


def test_small_batches_tell_nothing_of_large_ones(in_flight: InFlight, clock: Clock) -> None:
    """The core can answer 40 a second: at 16 nobody waits for long, and nobody is refused."""
    latencies = answered(in_flight, clock, longest_wait_s=1.0, rate_per_s=16, requests=1000)
    assert max(latencies) < 0.8
    assert len(latencies) == 1001


def test_more_than_the_core_can_do_is_refused(in_flight: InFlight, clock: Clock) -> None:
    latencies = answered(in_flight, clock, longest_wait_s=1.0, rate_per_s=80, requests=2000)
    assert len(latencies) == pytest.approx(25 * 38, rel=0.1)
    settled = latencies[200:]  # before, the rate is being learned
    assert max(settled) < 1.3


def test_a_pipeline_that_becomes_faster_is_believed(in_flight: InFlight, clock: Clock) -> None:
    admission = Admission(in_flight, 1000, 2.0)
    serve(in_flight, clock, ask(admission, 100), 0.02)
    for _ in range(40):
        serve(in_flight, clock, ask(admission, 100), 0.002)
    assert in_flight.row_s == pytest.approx(0.002, rel=0.05)


def test_a_batch_is_answered_all_at_once(in_flight: InFlight, clock: Clock) -> None:
    admission = Admission(in_flight, 1000, 2.0)
    for _ in range(3):
        tickets = ask(admission, 32)
        clock.now += 0.32  # the whole batch takes so long
        serve(in_flight, clock, tickets, 0.0)
    assert in_flight.row_s == pytest.approx(0.01)


def test_rows_count_not_requests(in_flight: InFlight, clock: Clock) -> None:
    admission = Admission(in_flight, 1000, 2.0)
    for ticket in ask(admission, 10, rows=16):
        clock.now += 16 * 0.02
        in_flight.mark_finished(ticket)
    assert len(ask(admission, 100, rows=16)) == pytest.approx(7, abs=1)


def test_what_got_lost_tells_little_of_the_rate(in_flight: InFlight, clock: Clock) -> None:
    """Nobody knows whether it was computed: the rate known stays where either may be true."""
    admission = Admission(in_flight, 1000, 1000.0)

    def lose_all_but_one(taken_s: float) -> None:
        for _ in range(20):
            tickets = ask(admission, 40)
            clock.now += taken_s
            in_flight.mark_finished(tickets[-1])

    serve(in_flight, clock, ask(admission, 100), 0.02)
    lose_all_but_one(0.4)
    assert in_flight.row_s == pytest.approx(0.02)
    lose_all_but_one(4.0)  # slower than that even if all were computed
    assert in_flight.row_s == pytest.approx(0.1, rel=0.05)


class Sender:
    """Triton's, of one response."""

    def send(self, response: Any, flags: int) -> None:
        pass

    def get_response_sender(self) -> Sender:
        return self


@pytest.fixture
def backlog_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module as it is in a step, where Triton's own module is there."""
    monkeypatch.setattr("triptych.runtime.triton_io.pb_utils", MagicMock())
    return import_module("triptych.runtime.flow_control")


def test_a_core_that_says_nothing_is_given_more_in_ever_longer_steps(
    in_flight: InFlight, clock: Clock, backlog_module: Any
) -> None:
    """It may have lost what it had, or have no CPU: then all that it is given comes too late."""
    slot, sender, tickets = in_flight.take_slot(), Sender(), []
    backlog = backlog_module.Backlog(in_flight, slot, batch_rows=32, max_wait_s=60.0)
    backlog._release = looks = MagicMock(wraps=backlog._release)

    def respond() -> None:
        tickets.append(in_flight.admit(slot, 1))

    def is_given(number: int) -> bool:
        wait_until(lambda: len(tickets) == number, f"{number} rows in the core")
        seen = looks.call_count
        wait_until(lambda: looks.call_count > seen + 2, "the backlog looks again")
        return len(tickets) == number

    backlog.take([(sender, 1, 1000.0, respond) for _ in range(3000)])
    given = window = 64
    assert is_given(given)
    for doubled in (1, 2, 4):
        clock.now += 0.9 * doubled * FIRST_PATIENCE_S
        assert is_given(given)
        clock.now += 0.2 * doubled * FIRST_PATIENCE_S
        given += backlog_module.MAX_WINDOWS * window
        assert is_given(given)
    in_flight.mark_finished(tickets[-500])  # it was slow, and goes on
    clock.now += 0.5 * MIN_PATIENCE_S
    assert is_given(given)
    clock.now += 1000.0
    wait_until(lambda: sum(in_flight._waiting) == 0, "those that have expired wait no more")


def test_a_forged_ticket_settles_nothing(in_flight: InFlight) -> None:
    ticket = ask(Admission(in_flight, 10, 1.0), 4)[0]
    for forged in (
        Ticket(2**62, 2**62, 0, 0),
        Ticket(0, 0, 0, 0),
        Ticket(-1, -1, -1, -1),
        ticket._replace(number=ticket.number + 3),
        ticket._replace(rows=ticket.rows + 3),
        ticket._replace(mac=ticket.mac ^ 1),
    ):
        assert not in_flight.mark_finished(forged)
    assert not in_flight.mark_finished(ticket, payload=b"another")
    assert in_flight.load().requests == 4


def test_what_waited_is_let_in_when_the_server_stops(in_flight: InFlight, clock: Clock) -> None:
    busy, idle = Admission(in_flight, 10, 1.0), Admission(in_flight, 10, 1.0)
    ask(idle)
    busy.begin()
    clock.now += 1.0
    in_flight.stop_admitting()
    clock.now += SHUTDOWN_GRACE_S / 2
    assert ask(idle)
    clock.now += 1.0
    busy.end()  # what came meanwhile has waited in its queue
    assert not ask(idle)
    assert ask(busy)
    assert not ask(busy)
    with pytest.raises(Stopping, match="The server is stopping"):
        idle.check(None)


COUNT = """
import os, sys
os.getppid = lambda: int(sys.argv[2])  # as the stubs of one server have one parent
from triptych.runtime.in_flight import InFlight
in_flight = InFlight(sys.argv[1])
slot = in_flight.take_slot()
for _ in range(1000):
    in_flight.admit(slot, 2)
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
    assert (in_flight.load().requests, in_flight.load().rows) == (3000, 6000)
    (same,) = [
        counts for counts in InFlight.of_server(os.getppid()) if counts.path == in_flight.path
    ]
    assert same.load().requests == 3000
    for child in children:
        child.communicate(timeout=30)
    # A reloaded step takes a dead one's slot, and what that had under way.
    assert in_flight.take_slot() == 0
    assert in_flight.load().requests == 2000
    assert in_flight.path.stat().st_mode & 0o777 == 0o600


def test_only_counts_of_dead_servers_in_the_same_pid_namespace_are_removed() -> None:
    own = Path("/proc/self/ns/pid").stat().st_ino
    left, old, foreign = (
        module.SHARED_MEMORY / f"triptych_in_flight.{version}.{namespace}-4194304-12345.{PIPELINE}"
        for version, namespace in ((module.FORMAT, own), (1, own), (module.FORMAT, own + 1))
    )
    for path in (left, old, foreign):
        path.write_bytes(bytes(8))
    InFlight(PIPELINE).path.unlink()
    assert [path.exists() for path in (left, old, foreign)] == [False, False, True]
    foreign.unlink()


def test_a_server_may_choose_the_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(module.PREFIX_VARIABLE, "triptych_mine_")
    in_flight = InFlight(PIPELINE)
    in_flight.path.unlink()
    assert in_flight.path.name.startswith("triptych_mine_in_flight.")
