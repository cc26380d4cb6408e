"""Which requests the core gets under overload, and the marks that its steps share."""

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.client_toy import wait_until
from tests.support.simulated_core import BATCH_ROWS, PIPELINE, Clock, Job, Load, Setup, Simulation
from triptych.container import supervisor
from triptych.runtime import in_flight as module
from triptych.runtime.flow_control import SHUTDOWN_GRACE_S, SILENCE_S, TURNS, FlowControl
from triptych.runtime.in_flight import MARKS, PREFIX_VARIABLE, REORDER_S, InFlight, Ticket
from triptych.runtime.rejections import Overloaded, Stopping

SLOW = Setup(batch_s=(2.0, 0.0))
FIFTY = Setup(batch_s=(0.0, 0.02))


@pytest.fixture
def simulate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function that makes a simulation of a pipeline."""
    made: list[Simulation] = []

    def make(setup: Setup | None = None, **settings: Any) -> Simulation:
        for other in made:
            other.close()
        made.append(Simulation(monkeypatch, setup or Setup(**settings)))
        return made[-1]

    yield make
    made[-1].close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("time.monotonic", clock.monotonic)
    monkeypatch.setattr("time.monotonic_ns", clock.monotonic_ns)
    return clock


@pytest.fixture
def marks() -> Iterator[InFlight]:
    marks = InFlight(PIPELINE, 1)
    yield marks
    marks.path.unlink()


# Lowest goodput by capacity, from the fourth second or the tenth full batch on. The server knows no
# deadline. Where two full batches take longer than the deadline, batches have to shrink.
OVERLOADS = [
    (Setup(), Load(256), 0.9),
    (Setup(), Load(512), 0.9),
    (Setup(instances=6), Load(512), 0.85),
    (Setup(cores=2), Load(512), 0.85),
    (Setup(instances=6, cores=2), Load(512), 0.85),
    (Setup(), Load(256, pause_s=0.0), 0.9),
    (Setup(), Load(256, pause_s=0.5), 0.9),
    (Setup(), Load(rate=2 * Setup().capacity), 0.85),
    (Setup(), Load(rate=5 * Setup().capacity), 0.85),
    (Setup(), Load(64, rows=16), 0.85),
    (Setup(), Load(256, deadlines_s=(0.5,)), 0.85),
    (Setup(), Load(256, deadlines_s=(0.3,)), 0.75),
    (Setup(), Load(256, deadlines_s=(0.5, 1.0, 5.0, None)), 0.85),
    (FIFTY, Load(100), 0.8),
    (FIFTY, Load(250), 0.85),
    (FIFTY, Load(1000), 0.75),
    (Setup(batch_s=(0.2, 0.0)), Load(256, deadlines_s=(0.5,)), 0.7),
    (Setup(), Load(512, back_s=0.05), 0.85),
    (Setup(), Load(rate=5 * Setup().capacity, back_s=0.05), 0.85),
    (Setup(), Load(256, deadlines_s=(0.5,), back_s=0.05), 0.8),
    (SLOW, Load(128, deadlines_s=(6.5,)), 0.7),
]


def test_goodput_under_overload(simulate: Any) -> None:
    for setup, load, lowest in OVERLOADS:
        simulation = simulate(setup)
        simulation.start(load)
        first_s = max(4.0, 10 * BATCH_ROWS * setup.cores / setup.capacity)
        simulation.run(3 * first_s + 2.0)
        assert simulation.goodput(first_s) > lowest, (setup, load)


@pytest.mark.parametrize("tells", [False, True])
def test_goodput_returns_after_the_core_stood_still(simulate: Any, tells: bool) -> None:
    """It must not get all that comes meanwhile, nor count as slow afterwards."""
    simulation = simulate()
    simulation.start(Load(256, tells=tells))
    simulation.run(5.0)
    simulation.setup = Setup(batch_s=(10.0, 0.0))
    simulation.run(0.2)
    simulation.setup = Setup()
    simulation.run(10.0)
    assert len(simulation.core) < 4 * BATCH_ROWS
    simulation.run(10.0)
    assert simulation.goodput(simulation.clock.now - simulation.start_s - 5.0) > 0.7


def test_after_an_overload_a_lone_request_is_answered_at_its_usual_time(simulate: Any) -> None:
    for setup, usual_s in (
        (Setup(), 0.0274),
        # Requests whose clients have left may hold the core's rows for a while.
        (FIFTY, 1.0),
        (Setup(instances=6, cores=2), 1.0),
    ):
        simulation = simulate(setup)
        simulation.start(Load(400))
        simulation.run(8.0)
        simulation.stop()
        batch_s = BATCH_ROWS * setup.cores / setup.capacity
        simulation.run(max(1.0, batch_s))
        for _ in range(3):
            (job,) = simulation.send(Job())
            simulation.run(usual_s)
            assert job.is_answered, setup


def test_patient_clients_are_served_in_the_order_of_their_arrival(simulate: Any) -> None:
    simulation = simulate()
    simulation.start(Load(32, deadlines_s=(None,)))
    simulation.run(5.0)
    assert simulation.goodput(1.0) > 0.9
    simulation = simulate()
    simulation.start(Load(256, deadlines_s=(None,)))
    simulation.run(10.0)
    assert not simulation.errors
    assert simulation.goodput(1.0) > 0.98
    each = [simulation.by_client[client] for client in range(256)]
    assert min(each) > 0.8 * sum(each) / 256
    # One of eight is the newest request; the others keep their order.
    waits = [job.ended_at - job.sent_at for job in simulation.jobs if job.is_answered]
    assert sorted(waits)[len(waits) // 2] == pytest.approx(256 / simulation.setup.capacity, rel=0.2)


def test_patient_clients_are_served_among_impatient_ones(simulate: Any) -> None:
    simulation = simulate()
    simulation.start(Load(256, deadlines_s=(1.0, None)))
    simulation.run(20.0)
    by_kind = [sum(simulation.by_client[c] for c in range(kind, 256, 2)) for kind in (0, 1)]
    assert min(by_kind) > 0.3 * sum(by_kind)


def test_what_cannot_be_answered_in_its_timeout_is_refused_and_not_computed(simulate: Any) -> None:
    simulation = simulate()
    simulation.start(Load(256, tells=True))
    simulation.run(14.0)
    assert simulation.goodput(4.0) > 0.95
    assert sum(job.has_left for job in simulation.computed) < 0.02 * len(simulation.computed)
    assert all(isinstance(error, Overloaded) for error in simulation.errors)
    assert "The deadline is in " in str(simulation.errors[0])
    assert 20 <= simulation.errors[0].numbers["retry_after_ms"] <= 10_000


def test_a_flood_of_impossible_deadlines_costs_the_core_nothing(simulate: Any) -> None:
    simulation = simulate()
    simulation.start(Load(4, deadlines_s=(None,)))
    simulation.run(2.0)
    before = len(simulation.answers)
    for _ in range(200):
        simulation.send(*(Job(left_s=1e-6) for _ in range(50)))
        simulation.run(0.01)
    flood = [job for job in simulation.jobs if job.left_s]
    assert all(isinstance(job.error, Overloaded) for job in flood)
    assert len(simulation.answers) - before >= 0.95 * before


def test_a_limit_of_the_wait_holds_also_if_the_core_is_silent(simulate: Any) -> None:
    simulation = simulate(batch_s=(30.0, 0.0), max_wait_ms=500.0)
    jobs = simulation.send(*(Job() for _ in range(100)))
    simulation.run(0.6)
    refused = [job for job in jobs if job.error]
    assert 100 - 2 * BATCH_ROWS - 3 < len(refused) < 100 - 2 * BATCH_ROWS  # and probes
    assert {round(job.ended_at - job.sent_at, 1) for job in refused} == {0.5}
    assert "The request waited for 5" in str(refused[0].error)
    assert "raise serving.queue.max_backlog_ms" in str(refused[0].error)
    simulation.run(150.0)
    assert all(job.is_answered or job.error for job in jobs)


def test_a_slow_core_gets_few_probes(simulate: Any) -> None:
    simulation = simulate(batch_s=(20.0, 0.0))
    simulation.send(*(Job() for _ in range(400)))
    simulation.run(19.0)
    assert len(simulation.core) + len(simulation.computed) < 3 * BATCH_ROWS


def test_the_number_of_requests_is_limited_over_all_instances(simulate: Any) -> None:
    simulation = simulate(instances=2, max_requests=70)
    simulation.send(*(Job() for _ in range(40)), instance=0)
    jobs = simulation.send(*(Job() for _ in range(40)), instance=1)
    refused = [job for job in jobs if job.error]
    assert len(refused) == 10
    assert not set(refused) & set(jobs[:20])
    error = refused[0].error
    assert isinstance(error, Overloaded)
    assert "The limit of 70 requests in flight is reached. Try again in" in str(error)
    assert "raise serving.queue.max_in_flight" in str(error)
    simulation.run(5.0)
    assert sum(job.is_answered for job in simulation.jobs) == 70
    assert simulation.postprocess.requests() == 0


@pytest.mark.parametrize("silent_s", [0.0, 0.3, 100.0])
@pytest.mark.parametrize("burst", [40, 90, 400, 1500])
@pytest.mark.parametrize("seconds", [0.0, 0.1, 1.0])
def test_a_request_after_an_abandoned_burst_is_never_rejected(
    simulate: Any, silent_s: float, burst: int, seconds: float
) -> None:
    """Whatever the burst has left in the core and in the queue."""
    simulation = simulate(max_requests=2000)
    simulation.send(*(Job() for _ in range(burst)))
    simulation.run(seconds)
    simulation.leave(*simulation.jobs)
    simulation.run(silent_s)
    for number in range(5):
        (job,) = simulation.send(Job())
        simulation.run(1.0 if number or seconds else 2.5)  # nothing was answered before
        assert job.is_answered
    simulation.postprocess.stop_admitting()  # what waits is handed over, and dropped
    for _ in range(4):
        simulation.run(1.0)
        simulation.send(Job())
    simulation.run(1.0)
    assert simulation.postprocess.requests() == 0


def test_patient_requests_are_answered_among_many_whose_clients_have_left(simulate: Any) -> None:
    """No further request comes, whose answer would prove that the others are lost."""
    simulation = simulate()
    simulation.send(Job())
    simulation.run(1.0)
    jobs = simulation.send(*(Job() for _ in range(900)))
    patient = jobs[100::300]
    simulation.leave(*(job for job in jobs if job not in patient))
    simulation.run(100.0)
    assert all(job.is_answered for job in patient)


def test_requests_before_the_stop_are_admitted(simulate: Any) -> None:
    simulation = simulate(instances=2)
    busy, clock = simulation.flows[0], simulation.clock
    make: Any = busy._make

    def make_slowly(jobs: list[Any]) -> list[tuple[Any, Any]]:
        clock.now += 1.0
        simulation.postprocess.stop_admitting()
        clock.now += SHUTDOWN_GRACE_S / 2
        assert not isinstance(simulation.send(Job(), instance=1)[0].error, Stopping)
        clock.now += 1.0
        return list(make(jobs))

    busy._make = make_slowly
    first = simulation.send(Job(), instance=0)[0]
    busy._make = make
    assert isinstance(simulation.send(Job(), Job(), instance=1)[1].error, Stopping)
    waited = simulation.send(Job(), instance=0)[0]  # in the queue of this instance meanwhile
    assert isinstance(simulation.send(Job(), Job(), instance=0)[1].error, Stopping)
    simulation.run(1.0)
    assert first.is_answered
    assert waited.is_answered


def test_a_stopping_server_forwards_one_request_when_the_core_is_silent(simulate: Any) -> None:
    simulation = simulate()
    simulation.leave(*simulation.send(*(Job() for _ in range(40))))
    simulation.run(0.1)
    simulation.postprocess.stop_admitting()
    for pause_s, admitted in ((2 * SHUTDOWN_GRACE_S, 0), (SILENCE_S, 1), (0.02, 0)):
        simulation.run(pause_s)
        jobs = simulation.send(Job(), Job())
        assert sum(isinstance(job.error, Stopping) for job in jobs) == 2 - admitted, pause_s
    simulation.run(1.0)
    assert simulation.postprocess.requests() == 0
    assert simulation.send(Job())[0].error  # no request is in flight


def test_a_stop_waits_until_each_request_is_answered_or_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prefix, server = f"triptych_{PIPELINE}_", os.getppid()
    monkeypatch.setenv(PREFIX_VARIABLE, prefix)
    monkeypatch.setattr(supervisor, "_LAST_WRITE_S", 0.05)
    marks, answered = InFlight(PIPELINE, 1), list[bool]()
    try:
        marks.admit(1)
        assert not supervisor.drain(server, 0.5, list, prefix)
        assert marks.closed_at

        def ask() -> list[str]:
            marks.done(marks.admit(1))  # shows that the first request is lost
            return []

        assert supervisor.drain(server, 60.0, ask, prefix)
        ticket = marks.admit(1)

        def answer() -> None:
            answered.append(True)
            marks.done(ticket)

        threading.Timer(0.7, answer).start()
        assert supervisor.drain(server, 60.0, list, prefix)
        assert answered
        marks.admit(1)  # the core fails it, which postprocess does not see
        assert not supervisor.drain(server, 1.5, lambda: ["another"], prefix)
        assert supervisor.drain(server, 60.0, lambda: [PIPELINE], prefix)
    finally:
        marks.path.unlink()


def test_a_step_that_fails_answers_what_waited(simulate: Any) -> None:
    simulation = simulate()

    def fail(_: list[Any]) -> Any:
        raise ZeroDivisionError

    simulation.flows[0]._make = fail
    jobs = simulation.send(*(Job() for _ in range(200)))
    simulation.run(1.0)
    assert {type(job.error) for job in jobs} == {ZeroDivisionError}
    assert simulation.postprocess.requests() == 0


def test_the_thread_sends_what_waited(marks: InFlight) -> None:
    sent: list[Any] = []
    tickets: list[Any] = []
    lock = threading.Lock()

    def make(jobs: list[Any]) -> list[tuple[Any, Any]]:
        with lock:
            tickets.extend(flow.admit(job.rows, job) for job in jobs)
        return [(job, "handed over") for job in jobs]

    def send(job: Any, result: Any) -> None:
        sent.append(job)
        raise RuntimeError("the client has left")

    settings = {
        "pipeline": PIPELINE,
        "max_requests": 99,
        "max_wait_ms": None,
        "core_rows": 1,
        "core_instances": 1,
    }
    flow = FlowControl(settings, make, send)
    jobs = [Job() for _ in range(9)]
    assert [job for job, _ in flow.take(jobs)] == jobs[:2]
    assert [job.sender for job in jobs] == [None] * 2 + ["sender"] * 7

    def all_are_answered() -> bool:
        with lock:
            while tickets:
                marks.done(tickets.pop(0))
        return len(sent) == 7

    wait_until(all_are_answered, "the others are handed over")
    wait_until(lambda: all_are_answered() and not marks.requests(), "nothing is in flight")
    assert sorted(map(jobs.index, sent)) == [2, 3, 4, 5, 6, 7, 8]
    assert TURNS == 8  # with fewer requests a turn, others would be the newest


def test_marks_are_exact_in_any_order(marks: InFlight, clock: Clock) -> None:
    """A ticket counts once; requests that others overtake for longer than allowed are lost."""
    draw, postprocess = random.Random(3), [InFlight(PIPELINE) for _ in range(2)]
    open_: list[tuple[Ticket, int, float]] = []
    for _ in range(5000):
        clock.now += draw.choice((0.0, 0.0001, 0.001))
        rows = draw.randint(1, 5)
        open_.append((marks.admit(rows), rows, clock.now))
        while len(open_) > 40 or (open_ and draw.random() < 0.5):
            ticket, _, _ = open_.pop(draw.randrange(min(len(open_), 20)))
            for is_first in (True, False):
                assert marks.is_set(ticket) is is_first
                draw.choice(postprocess).done(ticket)
        expected = len(open_), sum(rows for _, rows, _ in open_)
        assert marks.in_core(10.0) == expected
        assert marks.requests() == expected[0]
    clock.now += 1.0
    last = marks.admit(1)
    assert marks.requests() == len(open_) + 1
    postprocess[0].done(last)
    assert marks.requests() == 0
    assert marks.answered().at == pytest.approx(clock.now)
    for ticket, _, _ in open_:  # late answers change nothing
        postprocess[0].done(ticket)
    assert marks.requests() == 0


def test_a_batch_that_another_one_overtakes_is_not_lost(clock: Clock) -> None:
    marks, postprocess = InFlight(PIPELINE, cores=2), InFlight(PIPELINE)
    try:
        slow = [marks.admit(1) for _ in range(3)]
        clock.now += 20.0
        postprocess.done(slow.pop())  # the longest time in the core so far
        for _ in range(4):
            clock.now += 4.0
            postprocess.done(marks.admit(1))
            assert marks.requests() == 2
        clock.now += 30.0
        postprocess.done(marks.admit(1))
        assert marks.requests() == 0
    finally:
        marks.path.unlink()


def test_a_forged_ticket_changes_nothing(marks: InFlight) -> None:
    ticket = marks.admit(3)
    place, number = ticket
    for forged in (
        (0, 0),
        (place, number ^ 1),
        (place + 1, number),
        (-1, number),
        (2**62, 2**62),
        (-(2**63), -(2**63)),
        (place, 0),
    ):
        assert not marks.is_set(forged)
        marks.done(forged)
        assert marks.in_core() == (1, 3)
    assert marks.is_set(ticket)


def test_without_a_free_mark_a_request_is_not_counted(marks: InFlight, clock: Clock) -> None:
    tickets = [marks.admit(1) for _ in range(MARKS)]
    assert len({ticket.place for ticket in tickets}) == MARKS
    assert marks.admit(1) == Ticket()
    marks.done(Ticket())
    assert marks.in_core() == (MARKS, MARKS)
    marks.done(tickets[5])
    again = marks.admit(1)
    assert again.place == tickets[5].place
    clock.now += 1.0 + REORDER_S
    marks.done(again)
    marks.done(marks.admit(1))
    assert marks.admit(1).number  # the others are lost


COUNT = """
import os, sys
os.getppid = lambda: int(sys.argv[2])  # as the stubs of one server have one parent
from triptych.runtime.in_flight import InFlight
marks = InFlight(sys.argv[1], 1)
for _ in range(100):
    marks.admit(2)
marks.wait(1, 5)
print(marks.slot, flush=True)
sys.stdin.read()
"""


def test_processes_share_one_file_and_leave_their_slots(marks: InFlight) -> None:
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
    assert marks.in_core() == (300, 600)
    assert marks.waiting() == (3, 15)
    (same,) = [each for each in InFlight.of_server(os.getppid()) if each.path == marks.path]
    assert same.requests() == 303
    for child in children:
        child.communicate(timeout=120)
    # A reloaded step takes a dead one's slot. Its requests in the core will be answered.
    assert InFlight(PIPELINE).slot == 1
    assert marks.requests() == 302
    assert marks.path.stat().st_mode & 0o777 == 0o600
    for _ in range(module.SLOTS - 2):
        InFlight(PIPELINE)
    with pytest.raises(RuntimeError, match="at most 64 instances"):
        InFlight(PIPELINE)


def test_files_of_dead_servers_are_removed(marks: InFlight) -> None:
    namespace = marks.path.name.split(".")[2].split("-")[0]
    dead = marks.path.with_name(f"triptych_in_flight.5.{namespace}-{2**22 + 1}-1.{PIPELINE}")
    other = marks.path.with_name(f"triptych_in_flight.5.1-{2**22 + 1}-1.{PIPELINE}")
    for path in (dead, other):
        path.touch()
    try:
        InFlight(PIPELINE)
        assert not dead.exists()
        assert other.exists()  # of another namespace
    finally:
        other.unlink()
