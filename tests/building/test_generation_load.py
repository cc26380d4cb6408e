"""Load on streamed answers, without a server: promises, perf_analyzer's export, what is shown."""

import csv
import json
import os
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import pytest

from tests.support.generation_load_cases import MS, result
from tests.support.mistakes import check_refused
from tests.support.project import write_pipeline
from triptych.interface.report.bench import as_csv
from triptych.repository.records import read_record
from triptych.serving.bench.bench import mean_answer_tokens
from triptych.serving.bench.comparison import Price
from triptych.serving.bench.measure import run_longer
from triptych.serving.bench.perf_analyzer import LoadError
from triptych.serving.bench.perf_output import (
    LoadResult,
    StreamedAnswer,
    compute_streaming_metrics,
    meets_limits,
    read_export,
)
from triptych.serving.bench.resources import name_process, process_tree
from triptych.serving.bench.results import BenchResult, judge_slo, to_json
from triptych.spec.generation_fields import load_generation_spec
from triptych.spec.slo import GenerationSlo, parse_generation_slo
from triptych.spec.spec import load_spec

TEXT = "task: text-generation\nmodel: {source: m}\nserving: {slo: {%s}}\n"


def exported(sent_ms: int, *responses: tuple[int, int, str]) -> str:
    """A request of perf_analyzer's export: time in ms, new tokens and finish reason of each."""
    outputs = [
        {"text_output": 'a "num_output_tokens":9', "num_output_tokens": new, "finish_reason": why}
        for _, new, why in responses
    ]
    return (
        f'{{"timestamp":{sent_ms * MS},"request_inputs":{{"text_input":"x"}},'
        f'"response_timestamps":{[at * MS for at, _, _ in responses]},'
        f'"response_outputs":{json.dumps(outputs)}}}'
    ).replace(": ", ":")


EXPORT = (
    '{"experiments":[{"requests":['
    + ",".join(
        [
            exported(0, (10, 1, ""), (14, 2, ""), (20, 1, "stop"), (21, 4223719217, "")),
            exported(5, (10, 1, ""), (12, 0, "length")),
            exported(6, (30, 1, "")),  # still under way
        ]
    )
    + f'],"window_boundaries":[0,{20 * MS},{100 * MS}]}}]}}'
)


def test_an_answer_is_read_response_by_response(tmp_path: Path) -> None:
    """The second brings two tokens, the fourth is what ends a stream; one has not ended."""
    path = tmp_path / "export.json"
    path.write_text(EXPORT)
    export = read_export(path, streaming=True)
    assert export is not None
    short, long = export.answers
    assert (long.ttft_us, long.itl_us, long.e2e_us) == (10_000, [4_000, 6_000], 20_000)
    assert long.tokens == 4
    assert (short.ttft_us, short.itl_us, short.tokens) == (5_000, [], 1)
    assert export.latencies_us == (5_000, 20_000)

    found = compute_streaming_metrics(export, GenerationSlo(ttft_p99="9ms"))
    assert (found.tokens, found.tokens_per_s, found.goodput_per_s) == (5, 50.0, 10.0)
    assert (found.ttft.samples, found.ttft.p99_us, found.ttft.mean_us) == (2, 10_000, 7_500)
    assert (found.itl.samples, found.itl.p50_us) == (2, 6_000)


def test_goodput_counts_the_answers_that_keep_every_limit() -> None:
    answer = StreamedAnswer(0, (100 * MS, 110 * MS, 140 * MS, 150 * MS), 4)
    one_token = StreamedAnswer(0, (1,), 1)  # nothing is between its tokens
    assert meets_limits(one_token, GenerationSlo(itl_p99="1us"))
    cases: tuple[tuple[dict[str, str], bool], ...] = (
        ({}, True),
        ({"ttft_p50": "50ms", "ttft_p99": "100ms"}, True),  # the loosest: half may take longer
        ({"ttft_p50": "50ms", "ttft_p99": "99ms"}, False),
        ({"e2e_p95": "0.139s"}, False),
        ({"itl_p50": "10ms", "itl_p99": "30ms"}, True),  # each at the answer's own percentile
        ({"itl_p99": "29ms"}, False),
        ({"itl_p50": "9ms", "itl_p99": "30ms"}, False),
    )
    for limits, kept in cases:
        assert meets_limits(answer, GenerationSlo.model_validate(limits)) is kept, limits


def test_promises_of_the_spec_and_of_the_command_line(tmp_path: Path) -> None:
    folder = tmp_path / "chat"
    folder.mkdir()
    file = folder / "pipeline.yaml"
    file.write_text(TEXT % "ttft_p99: 500ms, itl_p99: 0.05s, throughput: 2.0")
    slo = load_generation_spec(folder).serving.slo
    assert slo.limits_ms == {"ttft_p99": 500.0, "itl_p99": 50.0}
    assert str(slo) == "ttft p99 <= 500 ms, itl p99 <= 50 ms, at least 2/s"
    for given, said in (
        ("p99_ms: 50", "serving.slo.p99_ms.*is not a field of the spec.*ttft_p50"),
        ("ttft_p99: 500", "serving.slo.ttft_p99.*must be a text.*quotes"),
        ("ttft_p99: 5 hours", "must be a time greater than 0, at most 1 hour, such as 500ms"),
        ("itl_p99: 0ms", "a time greater than 0"),
        ("throughput: 0.0", "greater than 0"),
    ):
        file.write_text(TEXT % given)
        check_refused(said.split(".*"), load_generation_spec, folder)
    words = ["slo.ttft_p99", "is not a field of the spec", "p50_ms"]
    tickets = write_pipeline(tmp_path / "tickets")
    check_refused(words, load_spec, tickets, ["serving.slo.ttft_p99=500ms"])
    own = GenerationSlo(ttft_p99="1s")
    assert parse_generation_slo([], None, own) is own
    found = parse_generation_slo(["ttft_p99=500ms", "e2e_p50 < 20s"], 3.0, own)
    assert found == GenerationSlo(ttft_p99="500ms", e2e_p50="20s", throughput=3.0)
    for text in ("p99=50ms", "ttft_p99", "ttft_p99=50", "ttft_p99.9=1s", "itl_p99=0ms"):
        check_refused("ttft_p99=500ms", parse_generation_slo, [text], None, own)


def test_what_a_step_has_started_counts_as_the_step() -> None:
    sleeper = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    command = [sys.executable, "-c", sleeper, "chat_core_0_0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as step:
        deadline = time.monotonic() + 120
        while len(found := process_tree(step.pid)) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert {name_process(one, os.getpid()) for one in found} == {"chat_core_0_0"}
        step.communicate(b"\n")


def test_a_window_without_an_answer_is_made_longer() -> None:
    empty = "No valid requests recorded"
    for first, said, wanted in (
        (3.0, [empty, empty, "all is lost"], [3.0, 6.0, 12.0]),
        (3.0, [empty] * 9, [3.0, 6.0, 12.0, 24.0, 48.0]),  # until it lasts 30 s
        (20.0, [empty] * 9, [20.0, 40.0, 80.0]),  # twice at least
    ):
        asked: list[float] = []

        def run(seconds: float, asked: list[float] = asked, said: list[str] = said) -> LoadResult:
            asked.append(seconds)
            why = said[len(asked) - 1]
            raise LoadError("must be measured", why, "", why, is_late=True)

        with pytest.raises(LoadError, match=said[-1]):
            run_longer(run, first)
        assert asked == wanted


def test_what_was_measured_is_kept_and_shown() -> None:
    """The page and the table of the terminal are on record in `test_golden_reports`."""
    found = result()
    assert read_record(BenchResult, json.loads(json.dumps(to_json(found)))) == found
    assert judge_slo(found).kind == "met"
    rows = list(csv.DictReader(StringIO(as_csv(found))))
    assert [row["itl_samples"] for row in rows] == ["180", "180", "720", "720"]
    assert rows[2]["ttft_p99_us"] == "60000.0"
    broken = result(slow=2.0)  # a missed SLO costs goodput
    assert judge_slo(broken).explanation.endswith("met at 1 client.")
    assert [point.median("goodput_per_s") for point in broken.points] == [2.0, 0.0]
    assert mean_answer_tokens(found.points) == 10
    price = Price(3.6, currency="USD", headroom=0.3)
    costs = [price.cost(8.0, tokens) for tokens in (10.0, None)]
    # 3.6 / 3600 s / 80 tokens/s * 1e6
    assert [cost and cost.per_million_tokens for cost in costs] == [pytest.approx(12.5), None]
