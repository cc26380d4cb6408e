"""When the alerts of a deployment rise and clear, by promtool on made-up series."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from alert_cases import Case, deployed, deployed_cases, deployed_gateway, deployed_talk
from benchmarks.prometheus_tools import tool
from triptych.repository.config import HISTOGRAM

STEP_MIN = 2
"""Between two values of a series, and two looks at the rules."""
USUAL = 600.0 * STEP_MIN
"""Requests in a step: 10 a second, half of what is held."""


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    return deployed_cases(tmp_path_factory.mktemp("deployed"))


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return deployed_talk(tmp_path_factory.mktemp("talking"))


def promtool(*words: str | Path) -> str:
    done = subprocess.run(
        [tool("promtool"), *map(str, words)], capture_output=True, text=True, timeout=120,
        env={**os.environ, "GOGC": "400"},  # a third less work
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def write_rules(folder: Path, case: Case) -> Path:
    file = folder / f"{case.name}.rules.yaml"
    file.write_text(json.dumps({"groups": case.groups}))  # JSON is YAML
    return file


def counter(each: list[float]) -> str:
    """Values of a counter, step by step, from its increases."""
    total, values = 0.0, []
    for increase in each:
        total += increase
        values.append(f"{total:g}")
    return " ".join(values)


def series(case: Case, steps: list[tuple[float, float]]) -> Iterator[dict[str, str]]:
    """What Prometheus holds of one replica, from requests in each step and their slow share."""
    where = 'namespace="default",pod="minilm-1"'
    offered = [requests for requests, _ in steps]
    good = [requests * (1 - slow) for requests, slow in steps]
    for step in ("minilm_preprocess", "minilm"):
        yield {
            "series": f'nv_inference_request_success{{{where},model="{step}"}}',
            "values": counter(offered),
        }
    yield {
        "series": f'nv_inference_count{{{where},model="minilm_preprocess"}}',
        "values": counter(offered),
    }
    ((name, limit_ms),) = case.promise.items()
    if case.watched == "summary":
        quantile = float(name[1:-3].replace("_", ".")) / 100
        yield {
            "series": f'nv_inference_request_summary_us{{{where},model="minilm",'
            f'quantile="{quantile:g}"}}',
            "values": " ".join(f"{limit_ms * (1500 if slow else 500):g}" for _, slow in steps),
        }
    elif case.watched == "histogram":
        yield {
            "series": f'{HISTOGRAM}_bucket{{{where},model="minilm",le="{limit_ms:g}"}}',
            "values": counter(good),
        }
    else:
        of = 'namespace="default",pod="minilm-envoy-1",envoy_cluster_name="triton_grpc"'
        yield {
            "series": f'envoy_cluster_upstream_rq_time_bucket{{{of},le="{limit_ms:.32g}"}}',
            "values": counter(good),
        }
        yield {
            "series": f"envoy_cluster_upstream_rq_time_count{{{of}}}",
            "values": counter(offered),
        }
        yield {
            "series": 'envoy_http_downstream_rq_total{namespace="default",'
            'pod="minilm-envoy-1",envoy_http_conn_manager_prefix="grpc"}',
            "values": counter(offered),
        }


def raised(case: Case, minute: int, name: str, *, is_raised: bool) -> dict[str, Any]:
    """A check of promtool: an alert fires at a minute, or does not."""
    rule = case.alerts[name]
    one = {"exp_labels": rule["labels"], "exp_annotations": rule["annotations"]}
    return {"eval_time": f"{minute}m", "alertname": name, "exp_alerts": [one] if is_raised else []}


def write_test(
    folder: Path, name: str, case: Case, steps: list[tuple[float, float]],
    checks: list[dict[str, Any]], more: tuple[dict[str, str], ...] = (),
) -> Path:  # fmt: skip
    return write_case(folder, name, case, [*series(case, steps), *more], checks)


def write_case(
    folder: Path, name: str, case: Case, held: list[dict[str, str]], checks: list[dict[str, Any]]
) -> Path:
    file = folder / f"{name}.test.yaml"
    one = {"interval": f"{STEP_MIN}m", "input_series": held, "alert_rule_test": checks}
    content = {
        "rule_files": [write_rules(folder, case).name],
        "evaluation_interval": f"{STEP_MIN}m",
        "tests": [one],
    }
    file.write_text(json.dumps(content))
    return file


def test_alerts_rise_when_a_promise_breaks_and_clear_when_it_is_kept(
    cases: list[Case], tmp_path: Path
) -> None:
    """An hour is well, then all is slow for an hour, then all is well again."""
    steps = [(USUAL, 0.0)] * 30 + [(USUAL, 1.0)] * 30 + [(USUAL, 0.0)] * 15
    few = [(1.0, 0.0)] * 30 + [(1.0, 1.0)] + [(1.0, 0.0)] * 10
    files = []
    for case in cases:
        about = [name for name, rule in case.alerts.items() if rule["labels"]["kind"] == "latency"]
        fast = [name for name in about if "Burn3d" not in name]
        assert len(about) == (1 if case.watched == "summary" else 3), case.name
        others = set(case.alerts) - set(about) - {"MinilmReplicaNotReady"}
        checks = [
            *(raised(case, 58, name, is_raised=False) for name in case.alerts),
            *(raised(case, 118, name, is_raised=True) for name in fast if "6h" not in name),
            *(raised(case, 136, name, is_raised=False) for name in fast if "6h" not in name),
            *(
                raised(case, minute, name, is_raised=False)
                for name in others
                for minute in (118, 136)
            ),
        ]
        files.append(write_test(tmp_path, case.name, case, steps, checks))
        if case.watched != "summary" and "p99_ms" in case.promise:
            # One slow request among few is no reason to wake anybody.
            lone = [raised(case, 62, name, is_raised=False) for name in fast]
            files.append(write_test(tmp_path, f"{case.name}-few", case, few, lone))
    promtool("check", "rules", *tmp_path.glob("*.rules.yaml"))
    promtool("test", "rules", *files)


def test_a_fleet_that_is_too_small_short_of_replicas_or_unseen_is_told(
    cases: list[Case], tmp_path: Path
) -> None:
    (case,) = (each for each in cases if each.name == "p99_ms-envoy")
    down = 'kube_deployment_status_replicas_unavailable{namespace="default",deployment="minilm"}'
    # 20 a second are held; 30 come in for ten minutes; then a replica is missing; then all.
    busy = [(USUAL, 0.0)] * 10 + [(3 * USUAL, 0.0)] * 8 + [(USUAL, 0.0)] * 14
    missing = {"series": down, "values": "0x17 1x20"}
    died = {
        "series": 'kube_pod_container_status_restarts_total{namespace="default",pod="minilm-1",'
        'container="triton"}',
        "values": "0x10 1x30",
    }
    wait = int(case.alerts["MinilmReplicaNotReady"]["for"].removesuffix("s")) // 60
    checks = [
        raised(case, 34, "MinilmSaturated", is_raised=True),
        raised(case, 46, "MinilmSaturated", is_raised=False),
        raised(case, 36 + wait - 2, "MinilmReplicaNotReady", is_raised=False),
        raised(case, 36 + wait + 2, "MinilmReplicaNotReady", is_raised=True),
        raised(case, 18, "MinilmServerRestarted", is_raised=False),
        raised(case, 26, "MinilmServerRestarted", is_raised=True),
        raised(case, 46, "MinilmServerRestarted", is_raised=False),
        raised(case, 60, "MinilmNoMetrics", is_raised=False),
        raised(case, 80, "MinilmNoMetrics", is_raised=True),
    ]
    for check in checks:
        if check["alertname"] == "MinilmReplicaNotReady":
            for one in check["exp_alerts"]:
                one["exp_labels"] = {**one["exp_labels"], "deployment": "minilm"}
        if check["alertname"] == "MinilmServerRestarted":
            for one in check["exp_alerts"]:
                one["exp_labels"] = {**one["exp_labels"], "pod": "minilm-1"}
    promtool("test", "rules", write_test(tmp_path, "fleet", case, busy, checks, (missing, died)))


def test_failing_and_missing_gateways_are_reported(tmp_path: Path) -> None:
    case = deployed_gateway(tmp_path / "deployed")
    of = 'namespace="default",pod="minilm-http-api-1"'
    held = [
        {"series": f'triptych_gateway_requests_total{{{of},status="{status}"}}', "values": values}
        for status, values in (("200", "0+1000x60"), ("503", "0+1x10 10+100x10 1010+1x30"))
    ]
    down = 'namespace="default",deployment="minilm-http-api"'
    held.append(
        {
            "series": f"kube_deployment_status_replicas_unavailable{{{down}}}",
            "values": "0x30 1x30",
        }
    )
    missing = raised(case, 90, "MinilmHttpApiNotReady", is_raised=True)
    missing["exp_alerts"][0]["exp_labels"] |= {"deployment": "minilm-http-api"}
    checks = [
        raised(case, 18, "MinilmHttpApiFailures", is_raised=False),
        raised(case, 40, "MinilmHttpApiFailures", is_raised=True),
        raised(case, 58, "MinilmHttpApiFailures", is_raised=False),
        raised(case, 70, "MinilmHttpApiNotReady", is_raised=False),
        missing,
    ]
    promtool("test", "rules", write_case(tmp_path, "gateway", case, held, checks))


def test_what_streams_late_hangs_or_finds_no_place_is_told(talking: Case, tmp_path: Path) -> None:
    """A replica of ten places. An hour is well, then one thing is wrong, then all is well."""
    alerts = talking.alerts
    assert {name.removeprefix("Talk") for name in alerts} == {
        *(
            f"{what}Burn{window}"
            for what in ("Failures", "SlowTtftP99", "SlowItlP99", "SlowE2EP50")
            for window in ("1h", "6h", "3d")
        ),
        *("EngineStalled", "RequestsQueued", "KvCacheFull", "ReplicaNotReady", "NoMetrics"),
        "ServerRestarted",
    }
    phases = (30, 30, 15)

    def phased(well: float, wrong: float) -> list[float]:
        steps = zip((well, wrong, well), phases, strict=True)
        return [value for value, count in steps for _ in range(count)]

    def story(wrong: str) -> dict[str, list[float]]:
        """Series to their values, or for counters their increases; what is wrong meanwhile."""
        late = {moment: 0.0 if wrong == moment else USUAL for moment in ("ttft", "itl", "e2e")}
        return {
            'ttft_seconds_bucket,le="0.5"': phased(USUAL, late["ttft"]),
            'itl_seconds_bucket,le="0.05"': phased(USUAL, late["itl"]),
            'e2e_seconds_bucket,le="8"': phased(USUAL, late["e2e"]),
            **{f"{moment}_seconds_count": phased(USUAL, USUAL) for moment in late},
            'requests_total,outcome="stop"': phased(
                USUAL, USUAL / 2 if wrong == "fault" else USUAL
            ),
            'requests_total,outcome="overloaded"': phased(0, USUAL / 2 if wrong == "fault" else 0),
            'requests_total,outcome="refused"': phased(0, 9 * USUAL if wrong == "client" else 0),
            'preprocess_errors_total,outcome="error"': phased(0, 0),
            'tokens,kind="new"': phased(USUAL, 0 if wrong == "hang" else USUAL),
            "in_flight": phased(4, 4),
            "waiting": phased(0, 3 if wrong == "crowd" else 0),
            "kv_cache_usage_ratio": phased(0.5, 0.95 if wrong == "crowd" else 0.5),
        }

    gauges = ("in_flight", "waiting", "kv_cache_usage_ratio")
    files = []
    for wrong, raises in {
        "ttft": {"TalkSlowTtftP99Burn1h", "TalkSlowTtftP99Burn6h"},
        "itl": {"TalkSlowItlP99Burn1h", "TalkSlowItlP99Burn6h"},
        "e2e": {"TalkSlowE2EP50Burn1h"},
        "fault": {"TalkFailuresBurn1h", "TalkFailuresBurn6h"},
        "hang": {"TalkEngineStalled"},
        "crowd": {"TalkRequestsQueued", "TalkKvCacheFull"},
        "client": set(),
    }.items():
        where = 'namespace="default",pod="talk-1",pipeline="talk"'
        series = [
            {
                "series": f"triptych_generation_{name.partition(',')[0]}"
                f"{{{','.join((where, *name.split(',')[1:]))}}}",
                "values": " ".join(map(str, each)) if name in gauges else counter(each),
            }
            for name, each in story(wrong).items()
        ]
        inference = f'nv_inference_count{{{where},model="talk_preprocess"}}'
        series.append({"series": inference, "values": counter(phased(USUAL, USUAL))})
        checks = [
            raised(talking, minute, name, is_raised=minute == 116 and name in raises)
            for minute in (58, 116, 148)
            for name in alerts
            if not (minute > 58 and ("Burn3d" in name or ("Burn6h" in name and name not in raises)))
            and not (minute == 148 and "Burn6h" in name)
        ]
        if wrong == "hang":
            for check in checks:
                for one in check["exp_alerts"]:
                    one["exp_labels"] = {**one["exp_labels"], "pod": "talk-1"}
        files.append(write_case(tmp_path, wrong, talking, series, checks))
    promtool("test", "rules", *files)


def test_rows_that_drifted_are_told(tmp_path: Path) -> None:
    case = deployed(tmp_path / "built", {"p99_ms": 80.0}, "histogram", mean_tokens=20.0)
    longer, shorter, near = ("minilm-longer", 30.0), ("minilm-shorter", 10.0), ("minilm-near", 22.0)
    files = []
    for name, mean in (longer, shorter, near):
        rows = [200.0] * 30
        where = 'namespace="default",pod="minilm-1",pipeline="minilm"'
        more = (
            {"series": f"triptych_row_tokens_count{{{where}}}", "values": counter(rows)},
            {
                "series": f"triptych_row_tokens_sum{{{where}}}",
                "values": counter([each * mean for each in rows]),
            },
        )
        alert = "MinilmInputLengthDrift"
        checks = [
            raised(case, 8, alert, is_raised=False),  # too few rows to tell
            raised(case, 50, alert, is_raised=mean != near[1]),
        ]
        files.append(write_test(tmp_path, name, case, [(USUAL, 0.0)] * 30, checks, more))
    promtool("test", "rules", *files)


def test_what_the_watch_finds_is_told_and_that_it_does_not_look(tmp_path: Path) -> None:
    """Values every two minutes; a look at once, a second one that alarms, then none any more."""
    case = deployed(tmp_path / "built", {"p99_ms": 80.0}, "histogram", samples=True)
    where = 'namespace="default",pod="minilm-watch-1",pipeline="minilm"'
    looks = {
        "alarms": "0x30 1x90",
        "drifts": "0x30 1x29 0x60",
        "last_run_timestamp_seconds": "0x30 3600x180",
    }
    pod = 'namespace="default",pod="minilm-1",pipeline="minilm"'
    lost = {"disk": "0x60 0+2x120", "redact": "0+50x180", "exchange": "0+50x180"}
    more = (
        *({"series": f"triptych_monitor_{n}{{{where}}}", "values": v} for n, v in looks.items()),
        {"series": f"triptych_samples_written_total{{{pod}}}", "values": "0+4x180"},
        *(
            {"series": f'triptych_samples_dropped_total{{{pod},reason="{why}"}}', "values": values}
            for why, values in lost.items()
        ),
    )
    checks = [
        raised(case, minute, f"Minilm{name}", is_raised=is_raised)
        for name, minute, is_raised in (
            ("AccuracyDegraded", 58, False),
            ("AccuracyDegraded", 64, True),
            ("AccuracyDegraded", 240, True),
            ("RequestsDrifted", 64, True),
            ("RequestsDrifted", 130, False),
            ("MonitorStale", 230, False),
            ("MonitorStale", 310, True),  # three hours and the hour of `for`
            ("SamplesDropped", 118, False),
            ("SamplesDropped", 210, True),
        )
    ]
    promtool(
        "test", "rules", write_test(tmp_path, "watch", case, [(USUAL, 0.0)] * 160, checks, more)
    )
    gone = [
        raised(case, minute, "MinilmMonitorStale", is_raised=minute > 60) for minute in (50, 70)
    ]
    promtool("test", "rules", write_test(tmp_path, "gone", case, [(USUAL, 0.0)] * 40, gone))
