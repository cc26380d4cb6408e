"""What people are shown of a deployment: its dashboard, the runbook, who is told of an alert."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from alert_cases import Case, deployed, deployed_cases, deployed_talk
from benchmarks.prometheus_tools import tool
from conftest import ROOT
from deploy_cases import ENGINE
from triptych.base.explained import yaml_of
from triptych.deploy.kubernetes import render_alertmanager


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    return deployed_cases(tmp_path_factory.mktemp("deployed"))


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return deployed_talk(tmp_path_factory.mktemp("talking"))


def test_the_alertmanager_example_wakes_somebody_once(cases: list[Case], tmp_path: Path) -> None:
    file = tmp_path / "alertmanager.yaml"
    file.write_text(yaml_of(render_alertmanager()["alertmanager.example.yaml"]))
    assert yaml.safe_load(file.read_text()) == cases[0].documents["alertmanager.example.yaml"]
    check = [str(tool("amtool")), "check-config", str(file)]
    done = subprocess.run(check, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    labels = {rule["labels"]["severity"]: rule["labels"] for rule in cases[0].alerts.values()}
    for severity, receiver in (("page", "on-call"), ("ticket", "tickets")):
        words = [f"{name}={value}" for name, value in labels[severity].items()]
        done = subprocess.run(
            [tool("amtool"), "config", "routes", "test", f"--config.file={file}", *words],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.stdout.strip() == receiver, done.stderr
    kinds = {rule["labels"]["kind"] for case in cases for rule in case.alerts.values()}
    assert kinds == {"failures", "latency", "saturation", "replicas", "metrics"}


def test_the_dashboard_is_as_grafana_has_it(
    cases: list[Case], talking: Case, tmp_path: Path
) -> None:
    """Grafana's own types read it and lose nothing; each panel says what to do."""
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    gpu = deployed(
        tmp_path, {"p99_ms": 80.0}, "envoy", engine=ENGINE, core={"backend": "tensorrt"},
        mean_tokens=20.0, samples=True,
    )  # fmt: skip
    for case in (*cases, talking, gpu):
        (text,) = case.documents["base/dashboard.yaml"]["data"].values()
        made = json.loads(text)
        read = json.loads(JSONEncoder().encode(Dashboard.from_json(made)))
        assert within(made, read), case.name
        panels = [panel for panel in made["panels"] if panel["type"] != "row"]
        for panel in panels:
            assert len(panel["description"].split(". ")) >= 2, panel["title"]
        places = [(each["gridPos"]["x"], each["gridPos"]["y"]) for each in made["panels"]]
        assert len(set(places)) == len(places)
        records = {rule.get("record") for group in case.groups for rule in group["rules"]}
        used = set(re.findall(r"triptych:\w+:ratio:\w+", text))
        assert used
        assert used <= records, case.name
    titles = {panel["title"] for panel in made["panels"]}
    assert titles >= {"Tokens of a row", "GPU busy", "Latency at Envoy", "Capacity used"}
    assert titles >= {"Samples", "Evidence of wrong answers", "Monitor runs"}


def within(part: Any, whole: Any) -> bool:
    """Whether all that is in a document is also in another one, which may have defaults more."""
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(
            value is None or (name in whole and within(value, whole[name]))
            for name, value in part.items()
        )
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
