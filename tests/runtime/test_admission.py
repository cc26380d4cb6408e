"""Which requests are admitted: counts shared by processes, and no rejection without an answer."""

import os
import random
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from client_toy import wait_until
from simulated_core import CORE_ROWS, PIPELINE, Clock, Deadlines, Job, Pipeline, Storm
from triptych.runtime import flow_control as module
from triptych.runtime.flow_control import (
    BUDGET_S,
    EPOCH_NS,
    EPOCHS,
    MIN_REQUESTS,
    SHUTDOWN_GRACE_S,
    SILENCE_S,
    FlowControl,
    InFlight,
)
from triptych.runtime.request_errors import Overloaded, Stopping

EPOCH_S = EPOCH_NS / 1e9


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


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch, in_flight: InFlight, clock: Clock) -> Any:
    """A function that makes a pipeline with some limits."""

    def make(**limits: Any) -> Pipeline:
        return Pipeline(monkeypatch, in_flight, clock, **limits)

    return make


def test_counts_are_exact_in_any_order(in_flight: InFlight, clock: Clock) -> None:
    """More epochs pass than there is room for; requests of two epochs are answered in any order."""
    draw, processes = random.Random(3), [in_flight, InFlight(PIPELINE)]
    open_: list[Any] = []
    for _ in range(10_000):
        clock.now += draw.choice((0.0, 0.001, 0.03))
        open_.append(draw.choice(processes).admit(draw.randint(1, 5)))
        while len(open_) > 40 or (open_ and draw.random() < 0.5):
            ticket = open_.pop(draw.randrange(len(open_)))
            for other in [other for other in open_ if other[0] < ticket[0] - 1]:
                open_.remove(other)
                draw.choice(processes).done(other)
            for is_first in (True, False):  # it counts once
                assert in_flight.is_awaited(ticket, ticket[1]) is is_first
                draw.choice(processes).done(ticket)
        expected = len(open_), sum(ticket[1] for ticket in open_)
        assert in_flight.load()[:4] == (*expected, *expected)
    assert open_[-1][0] > 3 * EPOCHS


def test_lost_requests_are_forgotten_with_the_answer_of_a_later_one(
    in_flight: InFlight, clock: Clock
) -> None:
    other = InFlight(PIPELINE)
    tickets, seen = [in_flight.admit(2) for _ in range(9)], []
    for _ in range(3):
        clock.now += 1.01 * EPOCH_S
        seen.append(in_flight.load().requests)
        other.done(other.admit(1))
    assert (*seen, in_flight.load().requests) == (9, 9, 9, 0)
    in_flight.done(tickets[3])  # forgotten already
    assert in_flight.load()[:4] == (0, 0, 0, 0)
    rows, answered_at, _ = in_flight.answered()
    assert (rows, round(answered_at, 6)) == (5, round(clock.now, 6))
    for number in range(1, 10 * EPOCHS):  # without an answer none is forgotten
        clock.now += 2 * EPOCH_S
        in_flight.admit(1)
        assert in_flight.load().requests == number


def test_a_forged_ticket_is_not_valid(in_flight: InFlight) -> None:
    ticket = in_flight.admit(3, b"payload")
    assert in_flight.is_valid(ticket, b"payload")
    assert InFlight(PIPELINE).is_valid(ticket, b"payload")
    assert not in_flight.is_valid(ticket, b"another")
    assert not in_flight.is_awaited(ticket, 4)
    epoch, rows, name, mac = ticket
    for forged in (
        (0, 0, 0, 0),
        (2**62, 2**62, 2**62, 0),
        (-1, -1, -1, -1),
        (epoch + 1, rows, name, mac),
        (epoch, rows + 1, name, mac),
        (epoch, rows, name + 1, mac),
        (epoch, rows, name, mac ^ 1),
    ):
        assert not in_flight.is_valid(forged, b"payload")


def test_requests_are_forwarded_while_the_core_has_room(pipeline: Any) -> None:
    served = pipeline()
    (*_, last) = served.send_many(2 * CORE_ROWS + 9)
    assert len(served.core) == 2 * CORE_ROWS
    assert served.counts.load().requests == 2 * CORE_ROWS + 9
    served.look()
    assert len(served.core) == 2 * CORE_ROWS
    served.compute(0.1, 5)
    assert len(served.core) == 2 * CORE_ROWS
    assert served.counts.load() == (2 * CORE_ROWS + 4, 2 * CORE_ROWS + 4, 64, 64, 5)

    def fail(jobs: list[Any]) -> Any:
        raise ZeroDivisionError

    served.flow._make = fail
    while served.core:
        served.compute(0.1)
    assert served.counts.load()[:4] == (0, 0, 0, 0)
    assert isinstance(served.ended[last][0], ZeroDivisionError)  # it waited when the step failed
    assert len(served.rejected(list(served.ended))) == 4


def test_the_core_gets_as_much_as_it_computes_in_a_while(pipeline: Any) -> None:
    served = pipeline(max_requests=100_000, max_wait_s=100.0)
    served.send_many(5000)
    for _ in range(20):
        served.compute(0.01)
    assert len(served.core) == pytest.approx(BUDGET_S * CORE_ROWS / 0.01, abs=2)
    for _ in range(200):
        served.compute(0.1, 4)  # it has become slower
    assert len(served.core) == pytest.approx(2 * CORE_ROWS, abs=2)


def test_a_request_is_rejected_once_an_answer_proves_that_the_core_works(pipeline: Any) -> None:
    served = pipeline(max_wait_s=2.0)
    jobs = served.send_many(400)
    for _ in range(3):
        served.look()
    assert not served.ended
    served.compute(0.32)  # they may have been computed before the clients left
    assert not served.rejected(jobs)
    served.compute(0.32)  # 100 rows a second: 200 of them are answered within 2 s
    errors = served.rejected(jobs)
    assert len(errors) == pytest.approx(400 - 64 - 136, abs=2)
    # The last request of those that are too late would wait for about 2 s.
    assert all(isinstance(error, Overloaded) for error in errors)
    assert "The request would wait for 20" in str(errors[0])
    assert "ms; the limit is 2000 ms. Try again in 10" in str(errors[0])
    while served.core:
        served.compute(0.32)
    assert len(served.rejected(jobs)) == len(errors)
    assert max(ended_at for _, ended_at in served.ended.values()) < 1000.0 + 2.0 + 0.7


def test_a_deadline_that_cannot_be_met_is_rejected(pipeline: Any) -> None:
    served = pipeline()
    served.send_many(150)
    early, late = served.send(Job(left_s=3.0), Job(left_s=1.0))
    for _ in range(2):
        served.compute(0.32)
    (error,) = served.rejected([early, late])
    assert "the limit is 700 ms, by the deadline of the request" in str(error)
    assert late in served.ended


def test_the_number_of_requests_is_limited_over_all_instances(pipeline: Any) -> None:
    served = pipeline(max_requests=3, max_wait_s=60.0)
    jobs = served.send_many(5)
    assert len(served.core) == 3
    served.compute(0.01, 1)
    assert len(served.core) == 3
    assert not served.ended.keys() & set(jobs[1:])
    served.send_many(3)
    while served.core:
        served.compute(0.01, 3)
    assert not served.rejected(list(served.ended))
    # Far beyond the limit a request makes way for a later one at once.
    jobs = served.send_many(40)
    errors = served.rejected(jobs)
    assert len(errors) == 40 - 3 - MIN_REQUESTS
    assert "The limit of 3 requests in flight is reached. Try again in" in str(errors[0])
    assert "raise serving.queue.max_in_flight" in str(errors[0])
    served.leave()
    while served.counts.load().requests:
        served.compute(5.0)
    first, second = pipeline(max_requests=4), pipeline(max_requests=4)
    first.send_many(3)
    second.send_many(3)
    assert (len(first.core), len(second.core)) == (3, 1)
    first.compute(0.01, 2)
    second.look()
    assert len(second.core) == 3


def answered(
    served: Pipeline, *, rate_per_s: float, requests: int, left_s: float | None = None
) -> tuple[list[float], list[float]]:
    """Latencies of answers and of rejections; a batch takes 150 ms and 20 ms a row."""
    draw = random.Random(7)
    arrivals = deque(accumulate((draw.expovariate(rate_per_s) for _ in range(requests)), initial=0))
    start, batch, done_s = served.clock.now, list[Any](), 0.0
    sent: dict[Any, float] = {}
    while arrivals or served.core or batch or served.counts.load().requests:
        looks_s = served.clock.now - start + 0.01
        next_s = min([looks_s, *arrivals][:2] + ([done_s] if batch else []))
        served.clock.now = start + next_s
        if arrivals and next_s == arrivals[0]:
            (job,) = served.send(Job(left_s=left_s))
            sent[job] = start + arrivals.popleft()
        elif batch and next_s == done_s:
            for job, ticket in batch:
                served.counts.done(ticket)
                served.ended[job] = None, served.clock.now
            batch = []
        served.look()
        if not batch and served.core:
            batch = [served.core.popleft() for _ in range(min(CORE_ROWS, len(served.core)))]
            done_s = served.clock.now - start + 0.15 + 0.02 * len(batch)
    latencies: tuple[list[float], list[float]] = ([], [])
    for job, (error, ended_at) in served.ended.items():
        latencies[error is not None].append(ended_at - sent[job])
    assert len(served.ended) == requests + 1
    return latencies


def test_load_is_answered_in_time_and_what_is_too_much_is_rejected(pipeline: Any) -> None:
    """The core answers up to 40 a second, in batches of up to 0.8 s; deadlines are 6 s."""
    latencies, rejections = answered(pipeline(max_wait_s=1.0), rate_per_s=16, requests=1000)
    assert max(latencies) < 1.0
    assert not rejections  # small batches tell nothing of large ones
    for max_wait_s, left_s in ((2.5, None), (60.0, 6.0)):
        served = pipeline(max_wait_s=max_wait_s)
        latencies, rejections = answered(served, rate_per_s=80, requests=2000, left_s=left_s)
        assert len(latencies) == pytest.approx(25 * 40, rel=0.2 if left_s else 0.15)
        limit_s = left_s or 2.5 + 2 * 0.8 + 0.8
        assert sum(latency < limit_s for latency in latencies) > 0.97 * len(latencies)
        assert left_s or max(latencies) < limit_s
        assert max(rejections) < 2 * 0.8 + 0.1


@pytest.mark.parametrize("silent_s", [0.0, 0.01, 0.3, 1000.0])
@pytest.mark.parametrize("burst", [40, 64, 90, 400, 1500])
@pytest.mark.parametrize("batches", [0, 1, 4])
def test_a_request_after_an_abandoned_burst_is_never_rejected(
    pipeline: Any, silent_s: float, burst: int, batches: int
) -> None:
    """Whatever the burst has left in the core and in the queue, and whatever rate it showed."""
    served = pipeline(max_requests=1000, max_wait_s=2.0)
    served.send_many(burst)
    for _ in range(batches):
        served.compute(0.5)
    finishing = [served.core.popleft() for _ in range(min(CORE_ROWS, len(served.core)))]
    served.leave()
    served.clock.now += silent_s
    for number in range(20):
        (lone,) = served.send(Job())
        sent_at = served.clock.now
        for job, ticket in finishing:  # what the clients left while it was computed
            served.counts.done(ticket)
            served.ended[job] = None, served.clock.now
        finishing = []
        while lone not in served.ended:
            served.core = deque(each for each in served.core if each[0] is lone)
            served.compute(0.001) if served.core else served.look()
            served.clock.now += 0.01
        assert not served.rejected([lone]), number
        assert served.clock.now - sent_at < SILENCE_S + 0.1
    served.clock.now += 10.0
    served.look()
    assert served.counts.load().requests == 0


def test_an_answer_that_is_counted_late_does_not_stop_flow_control(pipeline: Any) -> None:
    """Postprocess may be stopped for any time between two words that it writes."""
    served = pipeline(max_wait_s=1e6)
    jobs = served.send_many(300)
    served.compute(0.1)
    stopped_at, served.clock.now = served.clock.now, 1.0
    served.counts.done(served.core.popleft()[1])
    served.counts._own[module._DONE_AT] = 1
    served.clock.now = stopped_at + 5000.0
    served.flow._measured_at = served.clock.now
    served.look()
    while served.core:
        served.compute(0.1)
    assert len(set(jobs) & set(served.ended)) == 299
    assert not served.rejected(jobs)


def test_a_core_that_is_silent_gets_a_probe_at_a_time(pipeline: Any) -> None:
    """It may also be slow, or have no CPU: then all that it is given comes too late."""
    served = pipeline(max_wait_s=60.0)
    jobs = served.send_many(300)
    for number in range(1, 20):
        served.clock.now += 0.9 * SILENCE_S
        served.look()
        assert len(served.core) == 2 * CORE_ROWS + number - 1
        served.clock.now += 0.2 * SILENCE_S
        served.look()
        served.look()
        assert len(served.core) == 2 * CORE_ROWS + number
        assert served.core[-1][0] is jobs[-number]
    assert served.counts.load().requests == 300
    while served.core:
        served.compute(0.1)
    assert set(served.ended) == set(jobs)
    assert served.counts.load()[:4] == (0, 0, 0, 0)


def test_a_slow_core_that_answers_does_not_get_the_queue(pipeline: Any) -> None:
    """Otherwise requests whose clients leave later would be computed."""
    served = pipeline(max_requests=1000, max_wait_s=100.0)
    served.send_many(600)
    for _ in range(8):
        for _ in range(15):
            served.clock.now += 0.1
            served.look()
        served.compute(0.5)
        assert len(served.core) < 4 * CORE_ROWS


def test_a_storm_of_cancellations_fails_no_request_of_other_clients(pipeline: Any) -> None:
    served = pipeline(max_wait_s=5.0)
    storm = Storm(served)
    storm.run(1.0, 0.001)
    quiet = len(storm.latencies)
    storm.run(9.0, 1600.0)
    assert len(storm.canceled_at) > 14_000
    assert len(storm.latencies) > 2 * quiet  # 9 times as many without a storm
    assert sorted(storm.latencies)[len(storm.latencies) // 2] < 0.1
    now = served.clock.now
    assert max(*storm.latencies, *(now - sent_at for sent_at in storm.waiting.values())) < 5.0


def test_expired_deadlines_do_not_fill_a_slow_core(pipeline: Any) -> None:
    """Clients whose deadlines pass are no storm: the core must not get the queue."""
    served = pipeline(max_wait_s=5.0)
    Deadlines(served).run(15.0, 200.0)
    answered = sum(error is None for error, _ in served.ended.values())
    assert answered > 400  # of 680 that the core can compute


def test_a_request_waits_no_longer_than_the_limit(pipeline: Any) -> None:
    served = pipeline(max_wait_s=0.2)
    jobs = [*served.send_many(100), *served.send(Job(left_s=0.1))]
    served.clock.now += 0.21
    served.look()
    errors = served.rejected(jobs)
    assert len(errors) >= 100 - 2 * CORE_ROWS
    assert "would wait for 210 ms; the limit is 200 ms. Try again in 110 ms" in str(errors[0])


def test_requests_before_the_stop_are_admitted(pipeline: Any, in_flight: InFlight) -> None:
    busy, idle = pipeline(), pipeline()
    clock = busy.clock

    def is_stopped(served: Pipeline) -> bool:
        (job,) = served.send(Job())
        return any(isinstance(error, Stopping) for error in served.rejected([job]))

    make: Any = busy.flow._make

    def make_slowly(jobs: list[Any]) -> list[tuple[Any, Any]]:
        clock.now += 1.0
        in_flight.stop_admitting()
        clock.now += SHUTDOWN_GRACE_S / 2
        assert not is_stopped(idle)
        clock.now += 1.0
        return list(make(jobs))

    busy.flow._make = make_slowly
    assert not is_stopped(busy)
    busy.flow._make = make
    for served in (busy, idle):
        served.compute(0.0)
    assert is_stopped(idle)
    assert not is_stopped(busy)  # it has waited in the queue of this instance
    assert is_stopped(busy)


def test_a_stopping_server_forwards_one_request_when_the_core_is_silent(pipeline: Any) -> None:
    served = pipeline()
    served.send_many(40)
    served.leave()
    served.counts.stop_admitting()
    for pause_s, forwarded in ((2 * SHUTDOWN_GRACE_S, 0), (SILENCE_S, 1), (0.1, 0)):
        served.clock.now += pause_s
        jobs = served.send(Job(), Job())
        assert len(served.rejected(jobs)) == 2 - forwarded, pause_s
    assert served.counts.load().requests == 41
    served.compute(0.1)
    assert served.counts.load().requests == 0
    served.clock.now += 10 * SILENCE_S
    assert served.rejected(served.send(Job()))  # no request is in flight


def test_the_thread_sends_what_waited(in_flight: InFlight) -> None:
    sent: list[Any] = []
    tickets: list[Any] = []

    def make(jobs: list[Any]) -> list[tuple[Any, Any]]:
        tickets.extend(flow.admit(job.rows) for job in jobs)
        return [(job, "forwarded") for job in jobs]

    def send(job: Any, result: Any) -> None:
        sent.append(job)
        raise RuntimeError("the client has left")

    settings = {"pipeline": PIPELINE, "max_requests": 9, "max_wait_ms": 60_000, "core_rows": 1}
    flow = FlowControl(settings, make, send)
    jobs = [Job() for _ in range(9)]
    assert [job for job, _ in flow.take(jobs)] == jobs[:2]
    assert [job.sender for job in jobs] == [None] * 2 + ["sender"] * 7

    def all_are_answered() -> bool:
        while tickets:
            in_flight.done(tickets.pop())
        return len(sent) == 7

    wait_until(all_are_answered, "the others are forwarded")
    wait_until(lambda: all_are_answered() and not in_flight.load().requests, "nothing is in flight")
    assert sorted(map(jobs.index, sent)) == [2, 3, 4, 5, 6, 7, 8]


COUNT = """
import os, sys
os.getppid = lambda: int(sys.argv[2])  # as the stubs of one server have one parent
from triptych.runtime.flow_control import InFlight
in_flight = InFlight(sys.argv[1])
for _ in range(1000):
    in_flight.admit(2)
in_flight.wait(1, 5)
print(in_flight.slot, flush=True)
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
    assert slots == {"1", "2", "3"}
    assert in_flight.load()[:4] == (3003, 6015, 3000, 6000)
    (same,) = [
        counts for counts in InFlight.of_server(os.getppid()) if counts.path == in_flight.path
    ]
    assert same.load().requests == 3003
    for child in children:
        child.communicate(timeout=120)
    # A reloaded step takes a dead one's slot. Its requests in the core will be answered.
    assert InFlight(PIPELINE).slot == 1
    assert in_flight.load()[:4] == (3002, 6010, 3000, 6000)
    assert in_flight.path.stat().st_mode & 0o777 == 0o600
    for _ in range(module.SLOTS - 2):
        InFlight(PIPELINE)
    with pytest.raises(RuntimeError, match="at most 64 instances"):
        InFlight(PIPELINE)


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
