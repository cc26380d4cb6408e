"""What computes is busy, what does not is stuck: the progress that the health check sees."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from triptych.container import health
from triptych.container.health import WORK_FIELD, HealthCheck
from triptych.container.manifests import find_pipelines
from triptych.container.progress import (
    FIRST_BATCH_S,
    MAX_GAP_S,
    MIN_STUCK_S,
    STUCK_BATCHES,
    Executions,
    ProgressLog,
    read_executions,
)

MODELS = ("p_preprocess", "p_core", "p_postprocess")
METRICS = b"""# TYPE nv_inference_exec_count counter
nv_inference_exec_count{model="p_core",version="1"} 4
nv_inference_exec_count{model="p_core",version="2"} 1
nv_inference_request_success{model="p_core",version="1"} 8
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


def batches(
    core: int, core_s: float, *, first_s: float | None = None, steps: int = 1
) -> dict[str, Executions]:
    """A core that took `core_s` seconds for each batch but the first, beside other steps."""
    seconds = core * core_s if first_s is None else first_s + (core - 1) * core_s
    own = Executions(core, core, seconds)
    return {MODELS[0]: Executions(steps), MODELS[1]: own, MODELS[2]: Executions(steps)}


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
        "p_core": Executions(5.0, 8.0, 2.5),
        "p_postprocess": Executions(7.0, 0.0, 0.0),
    }
    assert read_executions(b"<html>not metrics</html>") == {}


@pytest.mark.parametrize("batch_s", [0.01, 2.0, 31.6])
def test_a_core_that_computes_is_busy_and_one_that_does_not_is_stuck(
    clock: Clock, batch_s: float
) -> None:
    log, work = ProgressLog(None), 32 * 8
    row_s = batch_s / work  # the rows of the check, alone
    assert log.update("p", batches(1, row_s), work, answered=True) is None
    done = 1
    for _ in range(100):  # each batch takes as long as the largest
        for _ in range(5):
            clock.now += batch_s / 5
            executions = batches(done, batch_s, first_s=row_s, steps=done)
            assert log.update("p", executions, work, answered=False) is None
        done += 1
    limit_s = max(STUCK_BATCHES * batch_s, MIN_STUCK_S)
    stuck_at = clock.now
    frozen = batches(done, batch_s, first_s=row_s, steps=done)
    told = None
    while told is None:
        assert clock.now - stuck_at < 1.5 * limit_s  # within 3 times the longest batch
        clock.now += limit_s / 20
        told = log.update("p", frozen, work, answered=False)
    assert clock.now - stuck_at > 0.9 * limit_s
    assert told.startswith("p_preprocess has computed nothing for ")
    assert log.update("p", frozen, work, answered=True) is None  # it has answered after all


def test_the_model_that_does_nothing_beside_others_is_named(clock: Clock) -> None:
    log = ProgressLog(None)
    log.update("p", batches(1, 0.1), 1.0, answered=True)
    told = None
    for done in range(2, 20):
        executions = batches(done, 0.1, steps=done) | {MODELS[2]: Executions(1)}
        told = told or log.update("p", executions, 1.0, answered=False)
        clock.now += 1.0
    assert told is not None
    assert told.startswith("p_postprocess has computed nothing")


def test_without_a_measurement_the_first_batch_may_take_long(clock: Clock) -> None:
    log, nothing = ProgressLog(None), dict.fromkeys(MODELS, Executions())
    for _ in range(int(STUCK_BATCHES * FIRST_BATCH_S)):
        assert log.update("p", nothing, 1e9, answered=False) is None
        clock.now += 1.0
    clock.now += 1.0
    assert log.update("p", nothing, 1e9, answered=False)
    # What is scaled from single rows is at most that, what was measured is not limited.
    for seconds, longest_s in ((1.0, FIRST_BATCH_S), (500.0, 500.0)):
        log = ProgressLog(None)
        log.update("p", batches(1, seconds), 1e9, answered=True)
        assert log._seen["p"].longest_s == longest_s
    log.update("p", batches(0, 0.0), 1e9, answered=True)  # the server was started again
    assert log._seen["p"].longest_s == 0.0


def test_another_process_goes_on_where_one_ended(clock: Clock, tmp_path: Path) -> None:
    file, frozen = tmp_path / "state.json", batches(3, 1.0)

    def check() -> str | None:
        log = ProgressLog(file)
        told = log.update("p", frozen, 1.0, answered=False)
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
    for damage in ("", "{", "[]", '{"p": {"unknown": 1}}', '{"p": 3}'):
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
