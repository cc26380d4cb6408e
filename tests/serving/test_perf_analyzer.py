"""Load on a real server: what the numbers mean, what is sent, and how failures are told."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from known_speed import write_model
from triptych.base.errors import UserError
from triptych.serving.bench.measure import BenchTarget, measure
from triptych.serving.bench.perf_analyzer import (
    VERSION,
    LoadError,
    LoadResult,
    find_perf_analyzer,
    run,
)
from triptych.serving.bench.perf_output import check_stability
from triptych.serving.bench.results import OfferedLoad
from triptych.serving.server import Server

TEXTS = ["hello", "nul \0 inside", "😀 é", "", 'quote " \\ \n \t \x01', "\u2028", "x" * 3000]
PAUSE_S = 0.02


ENSEMBLE = """
platform: "ensemble"
max_batch_size: 8
input { name: "text" data_type: TYPE_STRING dims: [1] }
output { name: "echo" data_type: TYPE_STRING dims: [1] }
ensemble_scheduling {
  step {
    model_name: "first" model_version: -1
    input_map { key: "text" value: "text" } output_map { key: "echo" value: "between" }
  }
  step {
    model_name: "second" model_version: -1
    input_map { key: "text" value: "between" } output_map { key: "echo" value: "echo" }
  }
}
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    seen = folder.parent / "seen.txt"
    record = f"Path({str(seen)!r}).open('a').write(repr(text.as_numpy().ravel()[0]) + '\\n')"
    write_model(folder, "recorder", record)
    write_model(folder, "pausing", f"time.sleep({PAUSE_S})")
    write_model(folder, "slowing", "self.calls += 1; time.sleep(0.003 * self.calls)")
    write_model(folder, "stuck", "time.sleep(8)")
    write_model(folder, "failing", "raise pb_utils.TritonModelException('row \"7\" is bad')")
    batching = "dynamic_batching { max_queue_delay_microseconds: 2000 }"
    write_model(folder, "first", "time.sleep(0.002)", max_batch_size=8, batching=batching)
    write_model(folder, "second", max_batch_size=8, batching=batching)
    (folder / "both" / "1").mkdir(parents=True)
    (folder / "both" / "config.pbtxt").write_text(ENSEMBLE)
    return folder


@pytest.fixture(scope="module")
def url(repository: Path) -> Iterator[str]:
    with Server(repository) as server:
        yield server.grpc_url


@pytest.mark.server
def test_every_request_is_sent_byte_for_byte(url: str, repository: Path) -> None:
    result = run(url, "recorder", TEXTS, concurrency=2, request_count=3 * len(TEXTS))

    seen = (repository.parent / "seen.txt").read_text().splitlines()
    assert set(seen) == {repr(text.encode()) for text in TEXTS}
    assert len(seen) == result.requests == 3 * len(TEXTS)
    assert check_stability(result.windows()) == (None, [])


@pytest.mark.server
def test_closed_loop_numbers_agree_with_a_model_of_known_speed(url: str) -> None:
    result = run(url, "pausing", TEXTS, concurrency=4, window_s=0.7, warmup_requests=4)

    # One instance answers a request each 20 ms: the fourth client in the queue waits for four.
    assert 0 < result.throughput_per_s <= 1.1 / PAUSE_S
    latencies = result.percentiles_us(50, 90, 95, 99)
    assert latencies[0] > 3.5 * PAUSE_S * 1e6
    assert latencies == sorted(latencies)
    assert result.requests / result.throughput_per_s > 1.4  # three windows of 0.7 s
    assert result.sent_per_s is None
    assert len(result.windows()) == 3


@pytest.mark.server
def test_the_server_s_counts_agree_with_a_model_of_known_speed(url: str) -> None:
    load = OfferedLoad("concurrency", 4)
    measured = measure(BenchTarget(url, "pausing"), TEXTS, load, seconds=2.1, warmup_requests=4)
    (step,) = measured.steps
    assert (step.model, step.mean_batch) == ("pausing", 1.0)
    assert PAUSE_S * 1e6 <= step.compute_infer_us < step.queue_us
    assert step.queue_us > 2 * PAUSE_S * 1e6


@pytest.mark.server
def test_an_ensemble_reports_each_step_and_its_batches(url: str) -> None:
    measured = measure(BenchTarget(url, "both"), TEXTS, OfferedLoad("concurrency", 8), seconds=1.5)

    steps = {step.model: step for step in measured.steps}
    assert set(steps) == {"first", "second"}
    assert steps["first"].mean_batch > 1.5
    assert steps["first"].rows >= measured.requests
    assert steps["first"].requests == pytest.approx(steps["second"].requests, rel=0.2)
    assert steps["first"].compute_infer_us > 2000


@pytest.mark.server
def test_a_request_may_have_several_tensors(url: str) -> None:
    requests = [{"text": text} for text in TEXTS] + [{"text": b"\xff\x00raw"}]
    assert run(url, "first", requests, concurrency=1, request_count=9).requests == 9


@pytest.mark.server
@pytest.mark.parametrize("distribution", ["constant", "poisson"])
def test_an_open_loop_keeps_its_rate(url: str, distribution: str) -> None:
    result = run(
        url,
        "second",
        TEXTS,
        request_rate_per_s=30,
        distribution="constant" if distribution == "constant" else "poisson",
        window_s=0.8,
    )
    assert result.sent_per_s is not None
    # A closed loop would send thousands. A busy machine sends less than it should, but not more.
    assert 0 < result.throughput_per_s < 60


@pytest.mark.server
def test_an_unstable_measurement_is_returned_and_says_so(url: str) -> None:
    result = run(url, "slowing", TEXTS, concurrency=1, window_s=0.5)

    is_stable, warnings = check_stability(result.windows())
    assert is_stable is False
    assert "unstable" in warnings[0]
    assert len({window.throughput_per_s for window in result.windows()}) == 3


@pytest.mark.server
def test_an_answer_that_is_an_error_is_raised_with_the_servers_words(url: str) -> None:
    with pytest.raises(LoadError, match="without errors") as caught:
        run(url, "failing", TEXTS, concurrency=2, window_s=0.5)
    assert any('row "7" is bad' in error for error in caught.value.errors)


@pytest.mark.server
def test_an_unknown_model_is_named(url: str) -> None:
    with pytest.raises(LoadError, match="'nowhere' is not found"):
        run(url, "nowhere", TEXTS, concurrency=1)


@pytest.mark.server
def test_a_model_that_does_not_answer_is_given_up_in_time(url: str) -> None:
    with pytest.raises(LoadError, match="in time"):
        run(url, "stuck", TEXTS, concurrency=1, window_s=0.5, timeout_s=2)


def test_a_server_that_is_not_there_is_an_error() -> None:
    with pytest.raises(LoadError, match="Connection refused"):
        run("127.0.0.1:1", "echo", TEXTS, concurrency=1)


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("requests", lambda: run("", "echo", [], concurrency=1)),
        ("load", lambda: run("", "echo", TEXTS)),
        ("load", lambda: run("", "echo", TEXTS, concurrency=1, request_rate_per_s=1)),
        ("concurrency", lambda: run("", "echo", TEXTS, concurrency=0)),
        ("request_rate_per_s", lambda: run("", "echo", TEXTS, request_rate_per_s=0)),
        ("burst", lambda: run("", "echo", TEXTS, request_rate_per_s=1, burst=0)),
    ],
)
def test_arguments_out_of_range_are_refused(field: str, call: Callable[[], LoadResult]) -> None:
    with pytest.raises(UserError) as caught:
        call()
    assert caught.value.field == field


def test_it_is_fetched_once_and_mended_when_its_libraries_are_gone(tmp_path: Path) -> None:
    found = find_perf_analyzer(tmp_path)
    fetched_at = found.binary.stat().st_mtime_ns
    assert find_perf_analyzer(tmp_path) == found
    assert found.binary.stat().st_mtime_ns == fetched_at
    assert [path.name for path in tmp_path.iterdir()] == [VERSION]

    library = tmp_path / VERSION / "lib" / "libb64.so.0d"
    library.unlink()
    library.symlink_to(tmp_path / "gone")
    assert find_perf_analyzer(tmp_path).binary.stat().st_mtime_ns > fetched_at
    assert library.is_file()


def test_a_failed_fetch_leaves_nothing_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(UserError, match="or put perf_analyzer on PATH") as caught:
        find_perf_analyzer(tmp_path)
    assert f"tritonclient=={VERSION}" in caught.value.given
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("works", [True, False])
def test_the_one_on_path_is_used_if_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    own = tmp_path / "bin" / "perf_analyzer"
    own.parent.mkdir()
    own.write_text(f"#!{sys.executable}\nraise SystemExit({0 if works else 127})\n")
    own.chmod(0o755)
    monkeypatch.setenv("PATH", str(own.parent))
    found = find_perf_analyzer().binary
    assert (found == own) is works
