"""`triptych bench` through the command line: a real server, a real load, files that can be read."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from conftest import TRAFFIC_ROWS, build_into, write_pipeline
from triptych.base.errors import UserError
from triptych.interface.cli import app
from triptych.interface.cli.measure import PriceOptions
from triptych.serving.bench import bench
from triptych.serving.bench.bench import parse_loads, sustained_rate
from triptych.serving.bench.comparison import Price
from triptych.serving.bench.results import (
    BenchResult,
    LoadPoint,
    Measurement,
    OfferedLoad,
    from_json,
)
from triptych.spec.slo import Slo


def triptych(*words: str, status: int = 0) -> str:
    """What the command prints in this process, or its mistake."""
    done = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    if isinstance(done.exception, UserError):
        assert status == 2
        return done.exception.message
    assert done.exit_code == status, (done.output, done.stderr, done.exc_info)
    return done.stderr if status == 2 else done.stdout


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A folder with a pipeline of a tiny model, built."""
    home = tmp_path_factory.mktemp("bench")
    model = {"source": str(tiny_model)}
    folder = write_pipeline(
        home / "pipelines" / "tiny", model=model, serving={"slo": {"p99_ms": 9e5}}
    )
    build_into(folder, home / "repository")
    return home


def options(home: Path, reports: str) -> list[str]:
    return [
        *("--pipelines", str(home / "pipelines"), "--repository", str(home / "repository")),
        *("--reports", str(home / reports), "--window-seconds", "0.6", "--rounds", "2"),
    ]


@pytest.fixture(scope="module")
def measured(home: Path) -> dict[str, Any]:
    """Two closed loops and bursts, two baselines, and a price."""
    words = ["-c", "1", "-c", "4", "--rate", "20", "--arrivals", "burst", "--burst", "4"]
    price = ["--price-per-hour", "3.6", "--peak-rps", "1000", "--daily-requests", "1000000"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "ALL", ("torch eager", "onnxruntime"))  # test_baselines has all
        text = triptych(
            "bench", "tiny", *options(home, "a"), *words, *price, "--baseline", "--json"
        )
    document: dict[str, Any] = json.loads(text)
    return document


def test_every_load_is_measured_with_its_steps_and_where_time_goes(
    home: Path, measured: dict[str, Any]
) -> None:
    result = from_json(BenchResult, measured)
    assert [str(point.load) for point in result.points] == [
        "1 client",
        "4 clients",
        "20/s in bursts of 4",
    ]
    for point in result.points:
        one = point.typical
        assert one.requests > 0
        assert point.errors == {}
        assert [use.step for use in one.steps] == ["preprocess", "core", "postprocess"]
        assert sum(part.us for part in one.parts) == pytest.approx(one.mean_us, rel=0.02)
        assert point.bottleneck is not None
    assert result.subject.requests == TRAFFIC_ROWS
    assert sum(result.subject.lengths.values()) == TRAFFIC_ROWS
    assert result.slo == Slo(p99_ms=9e5)
    assert result.cost is not None
    assert [point.contender for point in result.baselines] == ["torch eager", "onnxruntime"]
    assert result.not_runnable == {}
    assert all(len(point.rounds) == 2 and point.typical.requests for point in result.baselines)
    # All loads hold so loose a promise: the price is that of the fastest.
    best = max(point.median("throughput_per_s") for point in result.points)
    assert result.cost.per_million == pytest.approx(3.6 / 3600 / best * 1e6, rel=1e-6)
    # The files say the same.
    folder = home / "a" / "tiny" / "bench"
    assert json.loads((folder / "bench.json").read_text(encoding="utf-8")) == measured
    rows = list(csv.DictReader((folder / "bench.csv").read_text(encoding="utf-8").splitlines()))
    assert len(rows) == 10  # two rounds of three loads and two baselines
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "SLO met" in page
    assert "20/s in bursts of 4" in page


def test_a_missed_slo_ends_with_1_and_a_comparison_tells_what_changed(
    home: Path, measured: dict[str, Any]
) -> None:
    words = ["-c", "4", "--slo", "p99=1us", "--min-throughput", "100000", "--rounds", "1"]
    shown = triptych("bench", "tiny", *options(home, "b"), *words, status=1)
    assert "SLO: cannot tell" in shown
    assert "one round does not show the noise, use --rounds 3" in shown
    files = [str(home / reports / "tiny" / "bench" / "bench.json") for reports in "ab"]
    compared = triptych("bench-diff", *files)
    assert "4 clients" in compared
    assert "cannot tell at 4 clients: one round does not show the noise" in compared
    assert json.loads(triptych("bench-diff", *files, "--json"))


MISTAKES = (
    ("bench tiny --rate 5 --arrivals sine", "must be one of poisson"),
    ("bench tiny --time-budget 5", "Write it as 90s"),
    ("bench tiny --slo p99=fast", "must have the form"),
    ("bench tiny --peak-rps 5", "`--price-per-hour` is required"),
    ("bench tiny --url 127.0.0.1:9 -c 1", "127.0.0.1:9"),
    ("bench-diff here.json there.json", "here.json"),
    ("tune tiny --slo fast", "must have the form"),
    ("drift tiny nowhere.jsonl", "nowhere.jsonl"),
)


def test_a_mistake_is_named(home: Path, tmp_path: Path) -> None:
    for line, says in MISTAKES:
        verb, *rest = line.split()
        places = [] if verb == "bench-diff" else options(home, "c")
        if verb in ("tune", "drift"):
            places = places[:6]
        assert says in triptych(verb, *rest, *places, status=2), line
    words = [*options(home, "d"), "--repository", str(tmp_path)]
    assert "Run `triptych build tiny`" in triptych("bench", "tiny", *words, status=2)


def point(rate: float, p99_us: float) -> LoadPoint:
    times = (p99_us / 2,) * 4
    one = Measurement(1.0, 100, {}, rate, *times, p99_us, p99_us, True)
    return LoadPoint("tiny", OfferedLoad("concurrency", 1.0), (one,))


def test_what_is_sustained_is_the_fastest_load_within_the_latencies() -> None:
    points = [point(100, 10e3), point(200, 40e3), point(300, 90e3)]
    assert sustained_rate(points, Slo(p99_ms=50.0, throughput=1e9), None) == 200
    assert sustained_rate(points, Slo(), None) == 300
    assert sustained_rate(points, Slo(p99_ms=1.0), None) == 0
    assert Price(2.0, currency="USD", headroom=0).cost(0.0) is None


def test_loads_and_prices_are_checked() -> None:
    loads = parse_loads([2], [10.0], "poisson", 8)
    assert loads == (OfferedLoad("concurrency", 2.0), OfferedLoad("poisson", 10.0, 1))
    with pytest.raises(UserError, match="--burst"):
        parse_loads([], [5.0], "burst", 0)
    with pytest.raises(UserError):
        PriceOptions(price_per_hour=-1.0).price()
    with pytest.raises(UserError, match="--price-per-hour"):
        PriceOptions(daily_requests=1e6).price()
    assert PriceOptions().price() is None
    made = PriceOptions(price_per_hour=3.6, headroom=0.2).price()
    assert made == Price(3.6, currency="USD", headroom=0.2)
