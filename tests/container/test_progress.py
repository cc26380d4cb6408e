"""What computes is busy, what does not is stuck: the progress that the health check sees."""

import json
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import eventually
from triptych.container import health, supervisor
from triptych.container.health import WORK_FIELD, HealthCheck
from triptych.container.manifests import find_pipelines
from triptych.container.periodic import PeriodicCheck
from triptych.container.progress import (
    FIRST_WORK_S,
    MAX_GAP_S,
    MIN_STUCK_S,
    Executions,
    ModelProgress,
    ProgressLog,
    read_executions,
)
from triptych.container.supervisor import EXIT_DEAD

MODELS = ("p_preprocess", "p_core", "p_postprocess")
METRICS = b"""# TYPE nv_inference_exec_count counter
nv_inference_exec_count{model="p_core",version="1"} 4
nv_inference_exec_count{model="p_core",version="2"} 1
nv_inference_request_success{model="p_core",version="1"} 8
nv_inference_count{model="p_core",version="1"} 64
nv_inference_request_failure{model="p_core",reason="OTHER",version="1"} 3
nv_inference_compute_infer_duration_us{model="p_core",version="1"} 2.5e+06
nv_inference_exec_count{model="p_postprocess",version="1"} 7
"""


class Clock:
    """Stands for the monotonic clock."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("time.monotonic", clock.monotonic)
    return clock


ROWS = 32
"""Rows of the largest batch."""


def batches(
    core: int, core_s: float, *, row_s: float | None = None, steps: int = 1
) -> dict[str, Executions]:
    """A core that took `core_s` seconds for each batch but the first, a row, and other steps."""
    seconds = (core_s if row_s is None else row_s) + (core - 1) * core_s
    own = Executions(core, core, 1 + ROWS * (core - 1), seconds)
    others = Executions(steps, steps, steps, 1e-3 * steps)
    return {MODELS[0]: others, MODELS[1]: own, MODELS[2]: others}


@pytest.fixture
def http_answers() -> Any:
    """A function that starts a server with an error message or page for ends of paths."""
    started = []

    def start(answers: dict[str, tuple[int, str]]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                found = (answers[end] for end in answers if self.path.endswith(end))
                status, text = next(found, (200, ""))
                body = text if self.path == "/metrics" else json.dumps({"error": text})
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body.encode())

            do_GET = do_POST = answer

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        started.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


def test_metrics_are_read_for_each_model() -> None:
    assert read_executions(METRICS) == {
        "p_core": Executions(5.0, 8.0, 64.0, 2.5),
        "p_postprocess": Executions(7.0),
    }
    assert read_executions(b"<html>not metrics</html>") == {}


def stuck_after_s(log: ProgressLog, clock: Clock, work: float, busy: int = 1) -> tuple[float, str]:
    """Seconds and message with which models that compute nothing more are found."""
    began, frozen, told = clock.now, {name: each.done for name, each in log._seen.items()}, None
    while told is None:
        assert clock.now - began < 1000.0
        clock.now += 0.05
        told = log.update(frozen, work, answered=False, busy=busy)
    return clock.now - began, told


@pytest.mark.parametrize("batch_s", [0.01, 2.0, 31.6, 200.0])
def test_a_core_that_computes_is_busy_and_one_that_does_not_is_stuck(
    clock: Clock, batch_s: float
) -> None:
    log, work = ProgressLog(None), ROWS * 8
    row_s = batch_s / work
    assert log.update(batches(1, row_s), work, answered=True) is None
    done = 1
    for _ in range(100):  # each batch takes as long as the largest
        for _ in range(20):
            clock.now += batch_s / 20
            executions = batches(done, batch_s, row_s=row_s, steps=done)
            assert log.update(executions, work, answered=False) is None
        done += 1
    after_s, told = stuck_after_s(log, clock, work)
    # The step before the core has not computed since the batch in the core began.
    assert told.startswith("p_preprocess has computed nothing for ")
    assert max(batch_s, MIN_STUCK_S - batch_s) <= after_s < max(2 * batch_s, MIN_STUCK_S) + 0.2
    # It has answered after all.
    assert log.update(batches(done, batch_s, row_s=row_s), work, answered=True) is None


def test_pipelines_that_compute_at_the_same_time_share_the_machine(clock: Clock) -> None:
    log, found = ProgressLog(None), []
    for busy in (1, 2, 3):
        log.update(batches(1 + busy, 10.0), 1.0, answered=True)
        found.append(stuck_after_s(log, clock, 1.0, busy)[0])
    assert found == pytest.approx([20.0, 30.0, 40.0], abs=0.2)


def test_a_slow_step_is_part_of_the_longest_work(clock: Clock) -> None:
    """Rows of images are decoded for longer than the core computes."""
    log, slow = ProgressLog(None), Executions(1, 1, ROWS, 10.0)
    log.update(batches(1, 0.1) | {MODELS[0]: slow}, 1.0, answered=True)
    assert stuck_after_s(log, clock, 1.0)[0] == pytest.approx(20.2, abs=0.2)


def test_the_duration_of_a_row_is_kept_up_to_date(clock: Clock) -> None:
    """A first row on a cold machine says little about the largest batch."""
    log, work = ProgressLog(None), 1000.0
    longest = []
    for rows, seconds, answered in (
        (1, 0.2, True),  # cold
        (1, 0.01, True),
        (1, 0.02, True),  # other programs began to compute
        (ROWS, ROWS * 0.03, True),  # a batch of clients
        (ROWS, ROWS * 0.015, False),
        (ROWS, 25.0, False),
    ):
        done = log._seen.get(MODELS[1], ModelProgress()).done
        new = Executions(1, 1, rows, seconds)
        total = Executions(*(a + b for a, b in zip(done, new, strict=True)))
        log.update({MODELS[1]: total}, work, answered=answered)
        core = log._seen[MODELS[1]]
        longest.append(max(core.longest_s, work * core.row_s))
    assert longest == pytest.approx([200.0, 10.0, 20.0, 20.0, 15.0, 25.0])
    log.update(batches(0, 0.0), work, answered=True)  # the server was started again
    assert core.longest_s == core.row_s == 0.0


def test_the_model_that_does_nothing_beside_others_is_named(clock: Clock) -> None:
    log = ProgressLog(None)
    log.update(batches(1, 0.1), 1.0, answered=True)
    told = None
    for done in range(2, 20):
        executions = batches(done, 0.1, steps=done) | {MODELS[2]: Executions(1, 1, 1, 1e-3)}
        told = told or log.update(executions, 1.0, answered=False)
        clock.now += 1.0
    assert told is not None
    assert told.startswith("p_postprocess has computed nothing")


def test_without_a_measurement_the_first_batch_may_take_long(clock: Clock) -> None:
    log, nothing = ProgressLog(None), dict.fromkeys(MODELS, Executions())
    log.update(nothing, 1.0, answered=False)
    assert stuck_after_s(log, clock, 1.0)[0] == pytest.approx(2 * FIRST_WORK_S, abs=0.2)


def test_another_process_goes_on_where_one_ended(clock: Clock, tmp_path: Path) -> None:
    file, frozen = tmp_path / "state.json", batches(3, 1.0)

    def check() -> str | None:
        log = ProgressLog(file)
        told = log.update(frozen, 1.0, answered=False)
        log.write()
        return told

    told = [check()]
    for _ in range(6):
        clock.now += 1.0
        told.append(check())
    assert told[-1] is not None
    assert told[:4] == [None] * 4
    clock.now += MAX_GAP_S + 1  # nobody has looked since
    assert check() is None
    for damage in (
        "",
        "{",
        "[]",
        '{"p": {"unknown": 1}}',
        '{"p": {"done": [1], "x": 2}}',
        '{"p": 3}',
    ):
        file.write_text(damage)
        assert check() is None
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]
    ProgressLog(tmp_path / "none/state.json").write()  # cannot be written


@pytest.mark.parametrize(
    ("status", "said", "is_busy"),
    [
        (503, "in ensemble 'p', [overloaded retry_after_ms=20] busy", True),
        (503, "in ensemble 'p', Exceeds maximum queue size", True),
        (503, "Request timeout expired", True),
        (503, "[engine_died] the engine has ended", False),
        (503, "[stopping] The server is stopping", False),
        (500, "Stub process 'p_core_0_0' is not healthy.", False),
        (400, "[invalid_request] `text` is too long", False),
    ],
)
def test_a_refusal_is_judged_by_its_kind_and_by_progress(
    status: int, said: str, is_busy: bool, tmp_path: Path, clock: Clock, http_answers: Any
) -> None:
    (tmp_path / "p").mkdir()
    steps = "".join(f'step {{ model_name: "{name}" }}\n' for name in MODELS)
    (tmp_path / "p/config.pbtxt").write_text('platform: "ensemble"\n' + steps)
    (tmp_path / "p/health.request").write_bytes(
        b'{"inputs": [], "parameters": {"%s": 8}}\n' % WORK_FIELD.encode()
    )
    page = "".join(f'nv_inference_exec_count{{model="{m}",version="1"}} 5\n' for m in MODELS)
    url = http_answers({"/infer": (status, said), "/metrics": (200, page)})
    check = HealthCheck(find_pipelines(tmp_path), f"{url}/metrics")
    assert (check.find_fault(url) is None) is is_busy
    clock.now += 10.0
    assert check.find_fault(url) is None or not is_busy
    for _ in range(20):
        clock.now += 10.0
        told = check.find_fault(url)
    assert told is not None
    assert said[:20] in told
    assert ("has computed nothing for" in told) is is_busy
    # Without metrics only what a step says shows that it is busy.
    blind = HealthCheck(find_pipelines(tmp_path))
    assert (blind.find_fault(url) is None) is ("[overloaded" in said)


def test_the_state_of_the_image_is_in_its_own_shared_memory() -> None:
    assert health.STATE_FILE.parent == Path("/dev/shm")


def test_a_server_that_fails_its_health_check_ends_if_it_was_healthy(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("_CHECK_S", 0.0), ("_POLL_S", 0.0), ("conceal_keys", lambda _pid: True)):
        monkeypatch.setattr(supervisor, name, value)
    for name in ("step_processes", "dead_steps"):
        monkeypatch.setattr(supervisor, name, lambda _pid, *steps: {} if steps else {5: "a"})

    def ends_after(*faults: str) -> int | None:
        asked, left = list[int](), iter(faults)

        def find_fault() -> str:
            fault = next(left, None)
            if fault is None:
                asked.append(signal.SIGTERM)
            return fault or ""

        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as server:
            try:
                return supervisor._watch(server, asked, lambda: True, find_fault, lambda: False)
            finally:
                server.kill()

    assert ends_after("", "it hangs", "it hangs") == EXIT_DEAD
    assert "error: the server fails its health check: it hangs" in capfd.readouterr().err
    assert ends_after("", "a lost connection", "", "another one") is None
    # Docker, unlike Kubernetes, may have other pipelines there that answer.
    assert ends_after(*["a mistake in its hooks"] * 5) is None


def test_failed_checks_in_a_row_are_counted() -> None:
    found = iter(["frozen", "frozen", None, "dead"])
    with ThreadPoolExecutor(1) as pool:
        check = PeriodicCheck(pool, lambda: next(found), interval_s=0.0)
        for failures, fault in ((1, "frozen"), (2, "frozen"), (0, ""), (1, "dead")):
            assert eventually(check.has_result)
            assert (check.failures, check.fault) == (failures, fault)
