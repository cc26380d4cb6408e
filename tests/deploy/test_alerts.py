"""What is told of a deployment: alerts by promtool on made-up series, dashboard, runbook."""

import json
import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from benchmarks.prometheus_tools import tool
from tests.support.deploy_cases import ENGINE, options, write_built, write_generation
from tests.support.project import ROOT
from triptych.base.explained import plain, yaml_of
from triptych.deploy.context import Manifests
from triptych.deploy.kubernetes import render_alertmanager
from triptych.deploy.targets import make_manifests
from triptych.repository.config import HISTOGRAM

BY_HAND: dict[str, Any] = {"rps_per_replica": 20.0, "cpu_cores": 1.0, "memory_mib": 2048}
SOURCES: dict[str, tuple[dict[str, float], ...]] = {
    "summary": ({"p50_ms": 5.0}, {"p99_ms": 80.0}),
    "histogram": ({"p99_ms": 80.0}, {"p99_9_ms": 30_000.0}),
    "envoy": ({"p50_ms": 5.0}, {"p99_ms": 80.0}),
}
"""Promises by source of the latencies: Triton 24.10, Triton 26.08, an Envoy in front."""
RULES = ("base/prometheus-rule.yaml", "base/http-api-rule.yaml")
STEP_MIN = 2
"""Between two values of a series, and two looks at the rules."""
USUAL = 600.0 * STEP_MIN
"""Requests in a step: 10 a second, half of what is held."""
POD = 'namespace="default",pod="minilm-1"'
Series = dict[str, str]
Check = dict[str, Any]


class Case(NamedTuple):
    """A deployment: its manifests, its promise, and the source of its latencies."""

    name: str
    made: Manifests
    promise: Mapping[str, float] = MappingProxyType({})
    watched: str = ""

    @property
    def groups(self) -> list[dict[str, Any]]:
        rules = [plain(self.made.files[name]) for name in RULES if name in self.made.files]
        return [group for rule in rules for group in rule["spec"]["groups"]]

    @property
    def alerts(self) -> dict[str, dict[str, Any]]:
        rules = [rule for group in self.groups for rule in group["rules"]]
        return {rule["alert"]: rule for rule in rules if "alert" in rule}


def deployed(
    folder: Path, promise: dict[str, float], watched: str, *, samples: bool = False, **built: Any
) -> Case:
    """`samples`: with servers that sample, and somebody who looks at it."""
    release = "24.10" if watched == "summary" else "26.08"
    serving: dict[str, Any] = {"slo": promise, "triton": release}
    if samples:
        serving["sample"] = {"rate": 0.01}
    chosen = options(
        triton=release,
        gateway=None if watched == "envoy" else "edge",
        monitor_image="watch:1" if samples else None,
        **BY_HAND,
    )
    repository = write_built(folder, serving=serving, **built)
    made = make_manifests(repository, "minilm", chosen, folder / "none")
    return Case(f"{'-'.join(promise)}-{watched}", made, promise, watched)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    """One deployment for each of `SOURCES` and its promises."""
    base = tmp_path_factory.mktemp("deployed")
    return [
        deployed(base / f"{watched}-{number}", promise, watched)
        for watched, promises in SOURCES.items()
        for number, promise in enumerate(promises)
    ]


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A pipeline that generates text: ten places in each replica's batch, on a GPU."""
    folder = tmp_path_factory.mktemp("talking")
    limits = ("serving.slo.ttft_p99=500ms", "serving.slo.itl_p99=50ms", "serving.slo.e2e_p50=8s")
    repository = write_generation(folder, *limits)
    return Case("talk", make_manifests(repository, "talk", options(name="talk"), repository))


def run_tool(name: str, *words: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [tool(name), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


def promtool(*words: str | Path) -> None:
    environment = {**os.environ, "GOGC": "400"}  # a third less work
    said = run_tool("promtool", *words, env=environment)
    assert said.returncode == 0, said.stdout + said.stderr


def held(name: str, labels: str, values: str | Iterable[float]) -> Series:
    """A series of Prometheus, from values in promtool's notation or the increases of a counter."""
    text = values if isinstance(values, str) else " ".join(f"{v:g}" for v in accumulate(values))
    return {"series": f"{name}{{{labels}}}", "values": text}


def series(case: Case, steps: list[tuple[float, float]]) -> Iterator[Series]:
    """What Prometheus holds of one replica, from requests in each step and their slow share."""
    offered = [requests for requests, _ in steps]
    good = [requests * (1 - slow) for requests, slow in steps]
    for step in ("minilm_preprocess", "minilm"):
        yield held("nv_inference_request_success", f'{POD},model="{step}"', offered)
    yield held("nv_inference_count", f'{POD},model="minilm_preprocess"', offered)
    ((name, limit_ms),) = case.promise.items()
    if case.watched == "summary":
        quantile = float(name[1:-3].replace("_", ".")) / 100
        values = " ".join(f"{limit_ms * (1500 if slow else 500):g}" for _, slow in steps)
        labels = f'{POD},model="minilm",quantile="{quantile:g}"'
        yield held("nv_inference_request_summary_us", labels, values)
    elif case.watched == "histogram":
        yield held(f"{HISTOGRAM}_bucket", f'{POD},model="minilm",le="{limit_ms:g}"', good)
    else:
        pod = 'namespace="default",pod="minilm-envoy-1"'
        cluster = f'{pod},envoy_cluster_name="triton_grpc"'
        time = "envoy_cluster_upstream_rq_time"
        yield held(f"{time}_bucket", f'{cluster},le="{limit_ms:.32g}"', good)
        yield held(f"{time}_count", cluster, offered)
        manager = f'{pod},envoy_http_conn_manager_prefix="grpc"'
        yield held("envoy_http_downstream_rq_total", manager, offered)


def raised(case: Case, minute: int, name: str, is_raised: bool, **labels: str) -> Check:
    """A check of promtool: an alert, with more `labels`, fires at a minute, or does not."""
    rule = case.alerts[name]
    one = {"exp_labels": rule["labels"] | labels, "exp_annotations": rule["annotations"]}
    return {"eval_time": f"{minute}m", "alertname": name, "exp_alerts": [one] if is_raised else []}


def write_test(
    folder: Path, name: str, case: Case, all_series: Iterable[Series], checks: list[Check]
) -> Path:
    """Write a test of promtool with the rules of a deployment, and return its file."""
    rules, file = folder / f"{case.name}.rules.yaml", folder / f"{name}.test.yaml"
    rules.write_text(json.dumps({"groups": case.groups}))  # JSON is YAML
    every = f"{STEP_MIN}m"
    one = {"interval": every, "input_series": list(all_series), "alert_rule_test": checks}
    content = {"rule_files": [rules.name], "evaluation_interval": every, "tests": [one]}
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
        assert len(about) == (1 if case.watched == "summary" else 3), case.name
        fast = [name for name in about if "Burn3d" not in name]
        hourly = [name for name in fast if "6h" not in name]
        others = set(case.alerts) - set(about) - {"MinilmReplicaNotReady"}
        checks = [
            *(raised(case, 58, name, False) for name in case.alerts),
            *(raised(case, 118, name, True) for name in hourly),
            *(raised(case, 136, name, False) for name in hourly),
            *(raised(case, minute, name, False) for name in others for minute in (118, 136)),
        ]
        files.append(write_test(tmp_path, case.name, case, series(case, steps), checks))
        if case.watched != "summary" and "p99_ms" in case.promise:
            # One slow request among few is no reason to wake anybody.
            lone = [raised(case, 62, name, False) for name in fast]
            files.append(write_test(tmp_path, f"{case.name}-few", case, series(case, few), lone))
    promtool("check", "rules", *tmp_path.glob("*.rules.yaml"))
    promtool("test", "rules", *files)


def test_missing_failing_and_crowded_replicas_and_gateways_are_told(
    cases: list[Case], tmp_path: Path
) -> None:
    (case,) = (each for each in cases if each.name == "p99_ms-envoy")
    # 20 a second are held; 30 come in for ten minutes; then a replica is missing; then all.
    busy = [(USUAL, 0.0)] * 10 + [(3 * USUAL, 0.0)] * 8 + [(USUAL, 0.0)] * 14
    unavailable = "kube_deployment_status_replicas_unavailable"
    more = (
        held(unavailable, 'namespace="default",deployment="minilm"', "0x17 1x20"),
        held("kube_pod_container_status_restarts_total", f'{POD},container="triton"', "0x10 1x30"),
    )
    wait = int(case.alerts["MinilmReplicaNotReady"]["for"].removesuffix("s")) // 60
    missing, pod = {"deployment": "minilm"}, {"pod": "minilm-1"}
    checks = [
        raised(case, 34, "MinilmSaturated", True),
        raised(case, 46, "MinilmSaturated", False),
        raised(case, 36 + wait - 2, "MinilmReplicaNotReady", False),
        raised(case, 36 + wait + 2, "MinilmReplicaNotReady", True, **missing),
        raised(case, 18, "MinilmServerRestarted", False),
        raised(case, 26, "MinilmServerRestarted", True, **pod),
        raised(case, 46, "MinilmServerRestarted", False),
        raised(case, 60, "MinilmNoMetrics", False),
        raised(case, 80, "MinilmNoMetrics", True),
    ]
    fleet = write_test(tmp_path, "fleet", case, [*series(case, busy), *more], checks)
    chosen = options(http_api_image="triptych-build:26.11", **BY_HAND)
    made = make_manifests(write_built(tmp_path / "made"), "minilm", chosen, tmp_path / "none")
    case = Case("gateway", made)
    of, answers = 'namespace="default",pod="minilm-http-api-1"', "triptych_gateway_requests_total"
    deployment = {"deployment": "minilm-http-api"}
    down = f'namespace="default",deployment="{deployment["deployment"]}"'
    of_gateway = (
        held(answers, f'{of},status="200"', "0+1000x60"),
        held(answers, f'{of},status="503"', "0+1x10 10+100x10 1010+1x30"),
        held(unavailable, down, "0x30 1x30"),
    )
    checks = [
        raised(case, 18, "MinilmHttpApiFailures", False),
        raised(case, 40, "MinilmHttpApiFailures", True),
        raised(case, 58, "MinilmHttpApiFailures", False),
        raised(case, 70, "MinilmHttpApiNotReady", False),
        raised(case, 90, "MinilmHttpApiNotReady", True, **deployment),
    ]
    promtool("test", "rules", fleet, write_test(tmp_path, "gateway", case, of_gateway, checks))


def test_what_streams_late_hangs_or_finds_no_place_is_told(talking: Case, tmp_path: Path) -> None:
    """A replica of ten places. An hour is well, then one thing is wrong, then all is well."""
    alerts = talking.alerts
    burning = ("Failures", "SlowTtftP99", "SlowItlP99", "SlowE2EP50")
    assert {name.removeprefix("Talk") for name in alerts} == {
        *(f"{what}Burn{window}" for what in burning for window in ("1h", "6h", "3d")),
        *("EngineStalled", "RequestsQueued", "KvCacheFull", "ReplicaNotReady", "NoMetrics"),
        "ServerRestarted",
    }
    where = 'namespace="default",pod="talk-1",pipeline="talk"'

    def phased(well: float, wrong: float) -> list[float]:
        return [well] * 30 + [wrong] * 30 + [well] * 15

    def story(wrong: str) -> Iterator[Series]:
        """Yield what Prometheus holds if this is wrong meanwhile."""

        def counted(name: str, labels: str, well: float, otherwise: float, *faults: str) -> Series:
            increases = phased(well, otherwise if wrong in faults else well)
            return held(f"triptych_generation_{name}", f"{where}{labels}", increases)

        def gauge(name: str, well: float, otherwise: float) -> Series:
            values = " ".join(map(str, phased(well, otherwise if wrong == "crowd" else well)))
            return held(f"triptych_generation_{name}", where, values)

        for moment, limit in (("ttft", "0.5"), ("itl", "0.05"), ("e2e", "8")):
            yield counted(f"{moment}_seconds_bucket", f',le="{limit}"', USUAL, 0, moment)
            yield counted(f"{moment}_seconds_count", "", USUAL, USUAL)
        for outcome, well, otherwise, fault in (
            ("stop", USUAL, USUAL / 2, "fault"),
            ("overloaded", 0, USUAL / 2, "fault"),
            ("refused", 0, 9 * USUAL, "client"),
        ):
            yield counted("requests_total", f',outcome="{outcome}"', well, otherwise, fault)
        yield counted("preprocess_errors_total", ',outcome="error"', 0, 0)
        yield counted("tokens", ',kind="new"', USUAL, 0, "hang")
        yield gauge("in_flight", 4, 4)
        yield gauge("waiting", 0, 3)
        yield gauge("kv_cache_usage_ratio", 0.5, 0.95)
        yield held("nv_inference_count", f'{where},model="talk_preprocess"', phased(USUAL, USUAL))

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
        labels = {"pod": "talk-1"} if wrong == "hang" else {}
        checks = [
            raised(talking, minute, name, minute == 116 and name in raises, **labels)
            for minute in (58, 116, 148)
            for name in alerts
            if not (minute > 58 and ("Burn3d" in name or ("Burn6h" in name and name not in raises)))
            and not (minute == 148 and "Burn6h" in name)
        ]
        files.append(write_test(tmp_path, wrong, talking, story(wrong), checks))
    promtool("test", "rules", *files)


def test_rows_that_drifted_and_what_the_monitor_finds_are_told(tmp_path: Path) -> None:
    """A run of the monitor at once, a second one that alarms, then none any more."""
    promise = {"p99_ms": 80.0}
    case = deployed(tmp_path / "lengths", promise, "histogram", mean_tokens=20.0)
    pod = f'{POD},pipeline="minilm"'
    usual = [(USUAL, 0.0)]
    files = []
    for name, mean in (("longer", 30.0), ("shorter", 10.0), ("near", 22.0)):
        rows = [200.0] * 30
        tokens = (
            held("triptych_row_tokens_count", pod, rows),
            held("triptych_row_tokens_sum", pod, [each * mean for each in rows]),
        )
        alert = "MinilmInputLengthDrift"
        checks = [
            raised(case, 8, alert, False),  # too few rows to tell
            raised(case, 50, alert, name != "near"),
        ]
        files.append(write_test(tmp_path, name, case, [*series(case, usual * 30), *tokens], checks))
    case = deployed(tmp_path / "built", promise, "histogram", samples=True)
    case = case._replace(name="watched")
    where = 'namespace="default",pod="minilm-watch-1",pipeline="minilm"'
    more = (
        held("triptych_monitor_alarms", where, "0x30 1x90"),
        held("triptych_monitor_drifts", where, "0x30 1x29 0x60"),
        held("triptych_monitor_last_run_timestamp_seconds", where, "0x30 3600x180"),
        held("triptych_samples_written_total", pod, "0+4x180"),
        *(
            held("triptych_samples_dropped_total", f'{pod},reason="{reason}"', values)
            for reason, values in (
                ("disk", "0x60 0+2x120"),
                ("redact", "0+50x180"),
                ("exchange", "0+50x180"),
            )
        ),
    )
    checks = [
        raised(case, minute, f"Minilm{name}", is_raised)
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
    files.append(write_test(tmp_path, "watch", case, [*series(case, usual * 160), *more], checks))
    gone = [raised(case, minute, "MinilmMonitorStale", minute > 60) for minute in (50, 70)]
    files.append(write_test(tmp_path, "gone", case, series(case, usual * 40), gone))
    promtool("test", "rules", *files)


def test_alerts_fit_the_promise_and_the_release(tmp_path: Path) -> None:
    for limit_ms, built, served, has_histogram in (
        (5.0, "24.10", "26.08", False),  # the default bounds of its histogram have none there
        (100.0, "24.10", "26.08", True),
        (100.0, "24.10", "24.10", False),
        (5.0, "26.08", "26.08", True),
    ):
        serving = {"slo": {"p99_ms": limit_ms}, "triton": built}
        repository = write_built(tmp_path / f"{limit_ms}-{built}-{served}", serving=serving)
        # An Envoy in front tells latencies whatever the release.
        by_hand = options(triton=served, gateway="edge", **BY_HAND)
        made = make_manifests(repository, "minilm", by_hand, tmp_path / "none")
        alerts = Case("", made).alerts
        assert any("Slow" in alert for alert in alerts) == has_histogram, limit_ms
        text = re.sub(r"\s+# ", " ", yaml_of(made.files["base/prometheus-rule.yaml"]))
        assert (f'le=~"{limit_ms:g}([.]0)?"' in text) == has_histogram, limit_ms
        assert ("no histogram with a bound there" in text) != has_histogram, limit_ms
        missed = [str(rule["expr"]) for alert, rule in alerts.items() if "Missed" in alert]
        assert [f"> {limit_ms * 1e3:.0f}" in one for one in missed] == [True] * (not has_histogram)


def test_the_alertmanager_example_wakes_somebody_once(cases: list[Case], tmp_path: Path) -> None:
    file = tmp_path / "alertmanager.yaml"
    file.write_text(yaml_of(render_alertmanager()["alertmanager.example.yaml"]))
    assert file.read_text() == yaml_of(cases[0].made.files["alertmanager.example.yaml"])
    done = run_tool("amtool", "check-config", file)
    assert done.returncode == 0, done.stdout + done.stderr
    labels = {rule["labels"]["severity"]: rule["labels"] for rule in cases[0].alerts.values()}
    for severity, receiver in (("page", "on-call"), ("ticket", "tickets")):
        words = [f"{name}={value}" for name, value in labels[severity].items()]
        done = run_tool("amtool", "config", "routes", "test", f"--config.file={file}", *words)
        assert done.stdout.strip() == receiver, done.stderr
    kinds = {rule["labels"]["kind"] for case in cases for rule in case.alerts.values()}
    assert kinds == {"failures", "latency", "saturation", "replicas", "metrics"}


def test_the_dashboard_is_as_grafana_has_it(
    cases: list[Case], talking: Case, tmp_path: Path
) -> None:
    """Grafana's own types read it and lose nothing; each panel says what to do."""
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    on_gpu = {"engine": ENGINE, "core": {"backend": "tensorrt"}, "mean_tokens": 20.0}
    gpu = deployed(tmp_path, {"p99_ms": 80.0}, "envoy", samples=True, **on_gpu)
    for case in (*cases, talking, gpu):
        (text,) = plain(case.made.files["base/dashboard.yaml"])["data"].values()
        made = json.loads(text)
        read = json.loads(JSONEncoder().encode(Dashboard.from_json(made)))
        assert within(made, read), case.name
        for panel in made["panels"]:
            is_said = panel["type"] == "row" or len(panel["description"].split(". ")) >= 2
            assert is_said, panel["title"]
        places = [(each["gridPos"]["x"], each["gridPos"]["y"]) for each in made["panels"]]
        assert len(set(places)) == len(places)
        records = {rule.get("record") for group in case.groups for rule in group["rules"]}
        used = set(re.findall(r"triptych:\w+:ratio:\w+", text))
        assert used
        assert used <= records, case.name


def within(part: Any, whole: Any) -> bool:
    """Whether all that is in a document is also in another one, which may have defaults more."""
    if isinstance(part, dict):
        named = {name: value for name, value in part.items() if value is not None}
        return named.keys() <= whole.keys() and all(within(named[n], whole[n]) for n in named)
    if isinstance(part, list):
        return len(part) == len(whole) and all(map(within, part, whole))
    return bool(part == whole)


def test_the_runbook_has_an_entry_for_each_alert(
    cases: list[Case], talking: Case, tmp_path: Path
) -> None:
    drifting = deployed(tmp_path, {"p99_ms": 80.0}, "histogram", samples=True, mean_tokens=20.0)
    names = {name for case in (*cases, talking, drifting) for name in case.alerts}
    kinds = {
        re.sub(r"P[\d_]+(?=Burn|LatencySloMissed)|(?<=Burn)\w+$|^(Minilm|Talk)", "", name)
        for name in names
    }
    runbook = (ROOT / "docker/runbook.md").read_text()
    assert set(re.findall(r"(?m)^## (\w+)", runbook)) == kinds
