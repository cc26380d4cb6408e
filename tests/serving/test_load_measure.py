"""Load on real servers: what a measurement holds, and what it names as the bottleneck."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from known_speed import write_model
from triptych.base.errors import UserError
from triptych.serving.bench import measure as load_measure
from triptych.serving.bench import rates
from triptych.serving.bench.bottleneck import find_bottleneck
from triptych.serving.bench.measure import BenchTarget, measure
from triptych.serving.bench.rates import find_highest_rate
from triptych.serving.bench.results import Kind, OfferedLoad, from_json, to_json
from triptych.serving.bench.results import Measurement as Measured
from triptych.serving.bench.statistics import STEPS
from triptych.serving.server import Server
from triptych.spec.slo import Slo

TEXTS = ["one", "two", "three"]
SECONDS = 0.9
STEADY_SECONDS = 3.0  # a busy machine's pause must not change what was busy
SLEEP_S = 0.02
HELD_S = 0.2

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


def write_line(repository: Path) -> None:
    """An ensemble of three Python steps: one instance that sleeps, before two that rarely do."""
    sleeps = {"preprocess": SLEEP_S, "core": 0.001, "postprocess": 0.001}
    names = ["text", "one", "two", "echo"]
    steps = ""
    for place, (step, seconds) in enumerate(sleeps.items()):
        write_model(repository, f"line_{step}", f"time.sleep({seconds})", max_batch_size=8)
        if step != "preprocess":
            config = repository / f"line_{step}" / "config.pbtxt"
            config.write_text(config.read_text().replace("count: 1", "count: 2"))
        steps += LINE_STEP.format(step=step, before=names[place], after=names[place + 1])
    (repository / "line" / "1").mkdir(parents=True)
    (repository / "line" / "config.pbtxt").write_text(LINE.replace("STEPS", steps))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("load") / "repository"
    write_line(repository)
    delay = f"dynamic_batching {{ max_queue_delay_microseconds: {HELD_S * 1e6:.0f} }}"
    write_model(repository, "held", max_batch_size=8, batching=delay)
    write_model(repository, "sleeping", "time.sleep(0.05)")
    write_model(repository, "brief", "time.sleep(0.005)")
    write_model(repository, "failing", "self.calls += 1; 1 / (self.calls % 5)")
    write_model(repository, "stuck", "time.sleep(3)")
    with Server(repository) as running:
        yield running


def target(server: Server, pipeline: str) -> BenchTarget:
    return BenchTarget(server.grpc_url, pipeline, server.metrics_url, server.pid)


def check_whole(measured: Measured) -> None:
    """What must hold of every measurement without errors."""
    assert measured.errors == {}
    assert measured.throughput_per_s == pytest.approx(measured.requests / measured.seconds)
    assert sum(measured.histogram_us.values()) == measured.requests
    latencies = list(measured.latencies_us.values())
    assert latencies == sorted(latencies)
    assert sum(part.us for part in measured.parts) == pytest.approx(measured.mean_us)
    assert min(part.us for part in measured.parts) >= 0
    for step in measured.steps:
        assert step.failures == 0
        assert sum(step.batch_sizes.values()) == step.executions
        assert sum(rows * count for rows, count in step.batch_sizes.items()) == step.rows
        assert step.busy is not None
        assert 0 < step.busy <= 1
    assert measured.resources is not None
    named = {process.name for process in measured.resources.processes}
    assert named >= {"tritonserver", *(step.model for step in measured.steps)}
    # Of 50 requests, which may be less than a tick of 10 ms.
    assert 0 <= measured.resources.client_cpu_cores < 1
    assert from_json(Measured, to_json(measured)) == measured


@pytest.mark.server
@pytest.mark.parametrize(
    ("kind", "value", "burst"),
    [("concurrency", 4, 1), ("constant", 40, 1), ("poisson", 40, 1), ("burst", 40, 4)],
)
def test_every_kind_of_load_is_measured_in_full(
    server: Server, kind: Kind, value: float, burst: int
) -> None:
    load = OfferedLoad(kind, value, burst)
    measured = measure(target(server, "line"), TEXTS, load, seconds=SECONDS, warmup_requests=5)

    check_whole(measured)
    assert [step.step for step in measured.steps] == list(STEPS)
    assert [step.instances for step in measured.steps] == [1, 2, 2]
    assert measured.steps[0].compute_us > SLEEP_S * 1e6
    if kind == "concurrency":
        assert measured.sent_per_s is None
    else:
        assert measured.sent_per_s is not None
        assert 0 < measured.sent_per_s < 1.5 * value
    if kind == "burst":  # the requests of a burst wait for one another: 1.5 sleeps on average
        assert measured.steps[0].queue_us > SLEEP_S * 1e6


@pytest.mark.server
@pytest.mark.parametrize(
    ("pipeline", "clients", "kind", "step", "remedy"),
    [
        ("line", 6, "instances", "preprocess", "Raise serving.instances.preprocess"),
        ("sleeping", 3, "instances", "sleeping", "Raise serving.instances.sleeping"),
        ("held", 1, "queue delay", "held", "Lower serving.queue.max_delay_us of held"),
    ],
)
def test_the_bottleneck_is_named(
    server: Server, pipeline: str, clients: int, kind: str, step: str, remedy: str
) -> None:
    load = OfferedLoad("concurrency", clients)
    measured = measure(target(server, pipeline), TEXTS, load, seconds=STEADY_SECONDS)
    check_whole(measured)
    found = find_bottleneck(measured, load)
    assert (found.kind, found.step, found.remedy) == (kind, step, remedy), found


@pytest.mark.server
def test_a_server_elsewhere_is_judged_by_its_counts(server: Server) -> None:
    load = OfferedLoad("concurrency", 6)
    measured = measure(BenchTarget(server.grpc_url, "line"), TEXTS, load, seconds=SECONDS)
    assert measured.resources is not None
    assert (measured.resources.machine_cpu, measured.resources.processes) == (None, ())
    found = find_bottleneck(measured, load)
    assert (found.kind, found.step) == ("instances", "preprocess"), found


@pytest.mark.server
def test_errors_are_counted_by_kind_and_nothing_is_made_up(server: Server) -> None:
    measured = measure(
        target(server, "failing"), TEXTS, OfferedLoad("concurrency", 2), seconds=SECONDS
    )
    (kind,) = measured.errors
    assert "division by zero" in kind
    assert not re.search(r"\d", kind)
    assert measured.errors[kind] >= 1
    assert (measured.requests, measured.throughput_per_s, measured.histogram_us) == (0, 0, {})
    assert measured.steps[0].step == "failing"


@pytest.mark.server
def test_missing_answers_are_an_error_of_the_measurement(server: Server) -> None:
    measured = measure(
        target(server, "stuck"), TEXTS, OfferedLoad("concurrency", 1), seconds=0.3, timeout_s=1
    )
    assert list(measured.errors) == ["no answer in time"]


@pytest.mark.server
def test_a_pipeline_that_is_not_there_is_the_users_mistake(server: Server) -> None:
    with pytest.raises(UserError, match="nowhere") as caught:
        measure(target(server, "nowhere"), TEXTS, OfferedLoad("concurrency", 1), seconds=SECONDS)
    assert caught.value.field.startswith("nowhere at ")


def test_a_server_that_is_not_there_is_the_users_mistake() -> None:
    with pytest.raises(UserError) as caught:
        measure(
            BenchTarget("127.0.0.1:1", "line"), TEXTS, OfferedLoad("poisson", 1), seconds=SECONDS
        )
    assert caught.value.field == "--url"


@pytest.mark.server
@pytest.mark.long
def test_the_highest_rate_lies_below_what_one_instance_can_do(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(rates, "MAX_BRACKET_RATIO", 3.0)
    monkeypatch.setattr(rates, "MIN_REQUESTS", 150)
    # A busy machine may send less than 300/s, which is still more than one instance can do.
    monkeypatch.setattr(load_measure, "MIN_SENT_RATIO", 0.75)
    # One request every 5 ms at most.
    found = find_highest_rate(
        target(server, "brief"),
        TEXTS,
        Slo(p50_ms=20_000),
        start_per_s=300,
        seconds=SECONDS,
        budget_s=120,
        progress=lambda _stage, line: lines.append(line),
    )
    assert found.lowest_broken_per_s is not None
    # It is 0 on a machine so busy that no rate is confirmed.
    assert found.highest_per_s < min(200, found.lowest_broken_per_s)
    assert found.lowest_broken_per_s <= 300
    assert len(found.points) > 1, "a lower rate was tried"
    first = max(found.points, key=lambda point: point.load.value)
    assert len(first.rounds) > 1, "no single round decides"
    assert first.bottleneck is not None
    assert len(lines) >= len(found.points), "the highest rate is measured again"
