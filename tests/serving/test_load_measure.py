"""Load on a real server: what is sent, what a measurement holds, and the bottleneck it names."""

import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.mistakes import refusal
from tests.support.processes import running
from triptych.base.errors import UserError
from triptych.repository.records import read_record
from triptych.serving.bench import measure as load_measure
from triptych.serving.bench import rates
from triptych.serving.bench.bottleneck import find_bottleneck
from triptych.serving.bench.measure import BenchTarget, measure
from triptych.serving.bench.perf_analyzer import (
    VERSION,
    Duration,
    LoadError,
    find_perf_analyzer,
    run,
)
from triptych.serving.bench.perf_output import check_stability
from triptych.serving.bench.rates import find_highest_rate
from triptych.serving.bench.results import Kind, OfferedLoad, to_json
from triptych.serving.bench.results import Measurement as Measured
from triptych.serving.bench.statistics import STEPS
from triptych.serving.server import Server
from triptych.spec.slo import Slo

TEXTS = ["hello", "nul \0 inside", "😀 é", "", 'quote " \\ \n \t \x01', "\u2028", "x" * 3000]
SECONDS = 0.9
SLEEP_S = 0.02
CLIENTS = 32  # so many wait for the instance that sleeps, also on a busy machine
HELD_S = 0.2
BRIEF_PER_S = 20
"""Maximum number of answers of the model `brief`."""

CONFIG = """
backend: "python"
max_batch_size: {max_batch_size}
input {{ name: "text" data_type: TYPE_STRING dims: [1] }}
output {{ name: "echo" data_type: TYPE_STRING dims: [1] }}
instance_group {{ kind: KIND_CPU count: {instances} }}
{batching}
"""
ECHO = """
import time
from pathlib import Path
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.calls = 0

    def execute(self, requests):
        responses = []
        for request in requests:
            self.calls += 1
            text = pb_utils.get_input_tensor_by_name(request, "text")
            {each}
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("echo", text.as_numpy())]))
        return responses
"""
LINE_STEP = """
  step {{
    model_name: "line_{step}" model_version: -1
    input_map {{ key: "text" value: "{before}" }} output_map {{ key: "echo" value: "{after}" }}
  }}
"""
LINE = """
platform: "ensemble"
max_batch_size: 8
input { name: "text" data_type: TYPE_STRING dims: [1] }
output { name: "echo" data_type: TYPE_STRING dims: [1] }
ensemble_scheduling { STEPS }
"""


def write_model(
    repository: Path,
    name: str,
    each: str = "pass",
    *,
    max_batch_size: int = 0,
    instances: int = 1,
    batching: str = "",
) -> None:
    """A model that repeats its text, and runs the statement `each` for each request."""
    (repository / name / "1").mkdir(parents=True)
    config = CONFIG.format(max_batch_size=max_batch_size, instances=instances, batching=batching)
    (repository / name / "config.pbtxt").write_text(config)
    (repository / name / "1" / "model.py").write_text(ECHO.format(each=each))


def write_line(repository: Path) -> None:
    """An ensemble of three Python steps: one instance that sleeps, before two that rarely do."""
    names = ["text", "one", "two", "echo"]
    steps = ""
    for place, step in enumerate(("preprocess", "core", "postprocess")):
        seconds, instances = (0.001, 2) if place else (SLEEP_S, 1)
        each = f"time.sleep({seconds})"
        write_model(repository, f"line_{step}", each, max_batch_size=8, instances=instances)
        steps += LINE_STEP.format(step=step, before=names[place], after=names[place + 1])
    (repository / "line" / "1").mkdir(parents=True)
    (repository / "line" / "config.pbtxt").write_text(LINE.replace("STEPS", steps))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("load") / "repository"
    write_line(folder)
    seen = folder.parent / "seen.txt"
    record = f"Path({str(seen)!r}).open('a').write(repr(text.as_numpy().ravel()[0]) + '\\n')"
    write_model(folder, "recorder", record)
    delay = f"dynamic_batching {{ max_queue_delay_microseconds: {HELD_S * 1e6:.0f} }}"
    write_model(folder, "held", max_batch_size=8, batching=delay)
    write_model(folder, "brief", f"time.sleep({1 / BRIEF_PER_S})")
    write_model(folder, "slowing", "time.sleep(0.003 * self.calls)")
    fail = "raise pb_utils.TritonModelException('row \"7\" is bad')"
    write_model(folder, "failing", f"if self.calls % 2 == 0: {fail}")
    write_model(folder, "stuck", "time.sleep(600)")
    return folder


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Server]:
    with running(Server(repository)) as server:
        yield server


def target(server: Server, pipeline: str) -> BenchTarget:
    return BenchTarget(server.grpc_url, pipeline, server.metrics_url, server.pid)


def measure_until(
    holds: Callable[[Measured], bool], place: BenchTarget, load: OfferedLoad
) -> Measured:
    """Measure, and measure again while a pause of the machine hides what holds, up to five times.

    What must hold of every measurement is checked.
    """
    for _ in range(5):
        measured = measure(place, TEXTS, load, seconds=SECONDS, warmup_requests=5)
        check_whole(measured, is_local=place.pid is not None)
        if holds(measured):
            break
    return measured


def check_whole(measured: Measured, *, is_local: bool) -> None:
    """What must hold of every measurement without errors."""
    assert measured.errors == {}
    assert measured.throughput_per_s == pytest.approx(measured.requests / measured.seconds)
    assert sum(measured.histogram_us.values()) == measured.requests
    latencies = list(measured.latencies_us.values())
    assert latencies == sorted(latencies)
    assert sum(part.us for part in measured.parts) == pytest.approx(measured.mean_us)
    assert min(part.us for part in measured.parts) >= 0
    assert all(step.failures == 0 and 0 < (step.busy or 0) <= 1 for step in measured.steps)
    seen = measured.resources
    assert seen is not None
    named = {process.name for process in seen.processes}
    models = {step.model for step in measured.steps}
    assert named >= {"tritonserver", *models} if is_local else not named
    assert (seen.machine_cpu is not None) is is_local
    assert read_record(Measured, to_json(measured)) == measured


@pytest.mark.server
def test_every_request_is_sent_byte_for_byte(server: Server, repository: Path) -> None:
    requests: list[Any] = [*TEXTS, {"text": "a tensor by name"}, {"text": b"\xff\x00raw"}]
    count = 3 * len(requests)
    clients, span = OfferedLoad("concurrency", 2), Duration(request_count=count)
    result = run(server.grpc_url, "recorder", requests, clients, span)
    seen = (repository.parent / "seen.txt").read_text().splitlines()
    sent = {text.encode() for text in TEXTS} | {b"a tensor by name", b"\xff\x00raw"}
    assert set(seen) == {repr(text) for text in sent}
    assert len(seen) == result.requests == count
    assert check_stability(result.windows()) == (None, [])


@pytest.mark.server
@pytest.mark.parametrize(
    ("kind", "value", "burst"), [("constant", 40, 1), ("poisson", 40, 1), ("burst", 40, 4)]
)
def test_every_kind_of_rate_is_sent(server: Server, kind: Kind, value: float, burst: int) -> None:
    def is_as_sent(measured: Measured) -> bool:
        assert measured.sent_per_s is not None
        # The requests of a burst wait for one another: 1.5 sleeps on average.
        waits_us = measured.steps[0].queue_us
        is_wait_right = kind != "burst" or waits_us > SLEEP_S * 1e6
        return is_wait_right and 0 < measured.sent_per_s < 1.5 * value

    load = OfferedLoad(kind, value, burst)
    assert is_as_sent(measure_until(is_as_sent, target(server, "line"), load))


@pytest.mark.server
def test_clients_in_a_closed_loop_are_measured_in_full_and_the_bottleneck_is_named(
    server: Server,
) -> None:
    line, held = target(server, "line"), target(server, "held")
    elsewhere = BenchTarget(server.grpc_url, "line")  # is judged by the counts of the server
    full = ("instances", "preprocess", "Raise serving.instances.preprocess")
    waits = ("queue delay", "held", "Lower serving.queue.max_delay_us of held")
    for place, wanted in ((line, full), (elsewhere, full), (held, waits)):
        load = OfferedLoad("concurrency", 4 if place is held else CLIENTS)

        def named(measured: Measured, load: OfferedLoad = load) -> tuple[str, str, str]:
            found = find_bottleneck(measured, load)
            return found.kind, found.step, found.remedy

        measured = measure_until(lambda one: named(one) == wanted, place, load)  # noqa: B023
        assert named(measured) == wanted
        assert measured.sent_per_s is None
        first = measured.steps[0]
        if place is held:
            assert first.mean_batch > 1.5
            continue
        assert [step.step for step in measured.steps] == list(STEPS)
        assert [step.instances for step in measured.steps] == [1, 2, 2]
        assert (first.model, set(first.batch_sizes)) == ("line_preprocess", {1})
        # One instance answers a request each 20 ms.
        assert first.compute_us > SLEEP_S * 1e6
        assert measured.throughput_per_s <= 2 / SLEEP_S
        assert min(measured.p50_us, first.queue_us) > 2 * SLEEP_S * 1e6


@pytest.mark.server
def test_an_unstable_measurement_is_returned_and_says_so(server: Server) -> None:
    client = OfferedLoad("concurrency", 1)
    result = run(server.grpc_url, "slowing", TEXTS, client, Duration(window_s=0.5))
    is_stable, warnings = check_stability(result.windows())
    assert is_stable is False
    assert "unstable" in warnings[0]
    assert len({window.throughput_per_s for window in result.windows()}) == 3


@pytest.mark.server
def test_errors_are_counted_by_kind_and_nothing_is_made_up(server: Server) -> None:
    load = OfferedLoad("concurrency", 2)
    measured = measure(target(server, "failing"), TEXTS, load, seconds=SECONDS)
    (kind,) = measured.errors
    assert "is bad" in kind
    assert not re.search(r"\d", kind)
    assert (measured.requests, measured.throughput_per_s, measured.histogram_us) == (0, 0, {})
    assert measured.steps[0].step == "failing"
    with pytest.raises(LoadError, match="without errors") as caught:
        run(server.grpc_url, "failing", TEXTS, load, Duration(window_s=0.5))
    assert any('row "7" is bad' in error for error in caught.value.errors)
    one = OfferedLoad("concurrency", 1)
    measured = measure(target(server, "stuck"), TEXTS, one, seconds=0.3, timeout_s=1)
    assert list(measured.errors) == ["no answer in time"]
    nowhere = target(server, "nowhere"), BenchTarget("127.0.0.1:1", "line")
    missing, gone = (refusal(measure, place, TEXTS, one, seconds=SECONDS) for place in nowhere)
    assert missing.field.startswith("nowhere at ")
    assert gone.field == "--url"


@pytest.mark.server
@pytest.mark.long
def test_the_highest_rate_lies_below_what_one_instance_can_do(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(rates, "MAX_BRACKET_RATIO", 3.0)
    monkeypatch.setattr(rates, "MIN_REQUESTS", 30)
    monkeypatch.setattr(rates, "LOOKS", (3,))
    # A busy machine may send less than the rate, which is still more than one instance can do.
    monkeypatch.setattr(load_measure, "MIN_SENT_RATIO", 0.5)
    found = find_highest_rate(
        target(server, "brief"),
        TEXTS,
        Slo(p50_ms=20_000),
        start_per_s=3 * BRIEF_PER_S,
        seconds=0.6,
        budget_s=120,
        progress=lambda _stage, line: lines.append(line),
    )
    assert found.lowest_broken_per_s is not None
    # It is 0 on a machine so busy that no rate is confirmed.
    assert found.highest_per_s < min(BRIEF_PER_S, found.lowest_broken_per_s)
    assert found.lowest_broken_per_s <= 3 * BRIEF_PER_S
    assert len(found.points) > 1, "a lower rate was tried"
    first = max(found.points, key=lambda point: point.load.value)
    assert len(first.rounds) > 1, "no single round decides"
    assert first.bottleneck is not None
    assert len(lines) >= len(found.points), "the highest rate is measured again"


def test_arguments_out_of_range_are_refused() -> None:
    cases = [
        ("requests", [], OfferedLoad("concurrency", 1)),
        ("concurrency", TEXTS, OfferedLoad("concurrency", 0)),
        ("rate", TEXTS, OfferedLoad("poisson", 0)),
        ("burst", TEXTS, OfferedLoad("burst", 1, 0)),
    ]
    for field, texts, load in cases:
        assert refusal(run, "", "echo", texts, load, Duration()).field == field


def test_perf_analyzer_is_fetched_once_and_again_when_its_libraries_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(find_perf_analyzer().binary.parent, cache / VERSION)
    found = find_perf_analyzer(cache)
    fetched_at = found.binary.stat().st_mtime_ns
    assert find_perf_analyzer(cache) == found
    assert found.binary.stat().st_mtime_ns == fetched_at
    assert [path.name for path in cache.iterdir()] == [VERSION]

    library = cache / VERSION / "lib" / "libb64.so.0d"
    library.unlink()
    library.symlink_to(tmp_path / "gone")
    assert find_perf_analyzer(cache).binary.stat().st_mtime_ns > fetched_at
    assert library.is_file()
    # One on PATH is used if it runs.
    own = tmp_path / "bin" / "perf_analyzer"
    own.parent.mkdir()
    monkeypatch.setenv("PATH", str(own.parent))
    for status, is_used in ((0, True), (127, False)):
        own.write_text(f"#!{sys.executable}\nraise SystemExit({status})\n")
        own.chmod(0o755)
        assert (find_perf_analyzer(cache).binary == own) is is_used
    # A fetch that fails leaves nothing.
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(UserError, match="or put perf_analyzer on PATH") as caught:
        find_perf_analyzer(tmp_path / "none")
    assert f"tritonclient=={VERSION}" in caught.value.given
    assert list((tmp_path / "none").iterdir()) == []
