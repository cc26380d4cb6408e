"""Load on real servers: what a measurement holds, and what it names as the bottleneck."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import traffic_texts
from known_speed import write_model
from triptych.base.errors import UserError
from triptych.serving.bench import rates
from triptych.serving.bench.bottleneck import find_bottleneck
from triptych.serving.bench.measure import NO_ANSWER, BenchTarget, measure
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
    write_model(repository, "sleeping", f"time.sleep({SLEEP_S})")
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
        assert measured.sent_per_s == pytest.approx(value, rel=0.5)


@pytest.mark.server
def test_a_server_elsewhere_is_judged_by_its_counts(server: Server) -> None:
    load = OfferedLoad("concurrency", 6)
    measured = measure(BenchTarget(server.grpc_url, "line"), TEXTS, load, seconds=STEADY_SECONDS)
    assert measured.resources is not None
    assert (measured.resources.machine_cpu, measured.resources.processes) == (None, ())
    found = find_bottleneck(measured, load)
    assert (found.kind, found.step) == ("instances", "preprocess"), found


@pytest.mark.server
def test_a_burst_arrives_at_once_and_a_constant_rate_does_not(server: Server) -> None:
    burst, constant = (
        measure(target(server, "sleeping"), TEXTS, load, seconds=SECONDS)
        for load in (OfferedLoad("burst", 40, 10), OfferedLoad("constant", 20))
    )
    # The requests of a burst wait for one another: 4.5 sleeps on average.
    assert burst.steps[0].queue_us > 2 * SLEEP_S * 1e6
    assert burst.p50_us > 2 * constant.p50_us > 0


@pytest.mark.server
def test_a_model_alone_is_its_own_step(server: Server) -> None:
    load = OfferedLoad("concurrency", 3)
    measured = measure(target(server, "sleeping"), TEXTS, load, seconds=STEADY_SECONDS)
    check_whole(measured)
    (step,) = measured.steps
    assert (step.step, step.model, step.instances) == ("sleeping", "sleeping", 1)
    assert step.busy is not None
    assert step.busy > 0.7
    found = find_bottleneck(measured, load)
    assert (found.kind, found.step) == ("instances", "sleeping")


@pytest.mark.server
def test_the_starved_instance_is_named(server: Server) -> None:
    load = OfferedLoad("concurrency", 6)
    measured = measure(
        target(server, "line"), TEXTS, load, seconds=STEADY_SECONDS, warmup_requests=6
    )
    found = find_bottleneck(measured, load)
    assert (found.kind, found.step) == ("instances", "preprocess"), found
    assert found.remedy == "Raise serving.instances.preprocess"


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
    assert caught.value.field == "pipeline"


def test_a_server_that_is_not_there_is_the_users_mistake() -> None:
    with pytest.raises(UserError) as caught:
        measure(
            BenchTarget("127.0.0.1:1", "line"), TEXTS, OfferedLoad("poisson", 1), seconds=SECONDS
        )
    assert caught.value.field == "url"


@pytest.mark.server
def test_the_highest_rate_lies_below_what_one_instance_can_do(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(rates, "MAX_BRACKET_RATIO", 3.0)
    monkeypatch.setattr(rates, "MIN_REQUESTS", 60)
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
    assert 0 < found.highest_per_s < 200
    assert found.highest_per_s < found.lowest_broken_per_s <= 300
    first = max(found.points, key=lambda point: point.load.value)
    assert len(first.rounds) == 2, "a rate that breaks is measured again"
    assert first.bottleneck is not None
    assert len(lines) == len(found.points)


def copy_pipeline(repository: Path, pipeline: str, name: str) -> None:
    """The pipeline once more under another name; the big files are shared."""
    for folder in [pipeline, *(f"{pipeline}_{step}" for step in STEPS)]:
        source = repository / folder
        copied = repository / folder.replace(pipeline, name)
        shutil.copytree(source, copied, copy_function=os.link)
        config = copied / "config.pbtxt"
        text = config.read_text().replace(pipeline, name)
        config.unlink()  # linked: the original must stay
        config.write_text(text)


@pytest.fixture(scope="module")
def planted(minilm_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """MiniLM as it is built, and twice with a fault: ``held`` and ``drowsy``."""
    repository = tmp_path_factory.mktemp("planted") / "repository"
    names = ["minilm_packed", *(f"minilm_packed_{step}" for step in STEPS)]
    for name in names:
        shutil.copytree(minilm_repository / name, repository / name)
    copy_pipeline(repository, "minilm_packed", "held")
    config = repository / "held_core" / "config.pbtxt"
    delay = "dynamic_batching {\n  max_queue_delay_microseconds: 50000"
    config.write_text(config.read_text().replace("dynamic_batching {", delay))
    copy_pipeline(repository, "minilm_packed", "drowsy")
    model = repository / "drowsy_postprocess" / "1" / "model.py"
    text = model.read_text()
    model.unlink()
    answer = "return [self._respond(request) for request in requests]"
    assert answer in text
    model.write_text(text.replace(answer, f"__import__('time').sleep(0.2); {answer}"))
    with Server(repository) as running:
        yield running


@pytest.mark.server
@pytest.mark.parametrize(
    ("pipeline", "clients", "kinds", "step"),
    [
        ("minilm_packed", 32, {"compute"}, "core"),
        ("minilm_packed", 1, {"compute", "none"}, None),
        ("held", 1, {"queue delay"}, "core"),
        ("held", 4, {"queue delay"}, "core"),
        ("drowsy", 16, {"instances"}, "postprocess"),
    ],
)
def test_the_bottleneck_of_a_real_pipeline(
    planted: Server, pipeline: str, clients: int, kinds: set[str], step: str | None
) -> None:
    load = OfferedLoad("concurrency", clients)
    measured = measure(
        target(planted, pipeline), traffic_texts(), load, seconds=2.1, warmup_requests=clients
    )
    if set(measured.errors) == {NO_ANSWER}:  # a busy machine stood still for a whole window
        measured = measure(target(planted, pipeline), traffic_texts(), load, seconds=6.3)
    check_whole(measured)
    found = find_bottleneck(measured, load)
    assert found.kind in kinds, (found, measured.steps, measured.resources)
    assert step in (None, found.step), found
