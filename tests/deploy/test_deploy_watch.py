"""What `triptych deploy` writes for the watch: samples, who looks at them, and what that tells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from conftest import lock_data, write_lock
from deploy_cases import (
    ENGINE,
    KUBERNETES,
    compose_schema,
    document,
    kustomized,
    options,
    taken,
    write_bench,
    write_built,
)
from triptych.base.errors import UserError
from triptych.deploy.checks import check_manifests
from triptych.deploy.context import Manifests
from triptych.deploy.folder import write_manifests
from triptych.deploy.targets import make_manifests
from triptych.interface.cli import app
from triptych.spec.slo import Slo

SAMPLING: dict[str, Any] = {"serving": {"slo": {"p99_ms": 80.0}, "sample": {"rate": 0.01}}}


def manifests(folder: Path, **changes: Any) -> Manifests:
    """Of a pipeline that samples, with somebody who looks."""
    repository, reports = write_built(folder, **SAMPLING), write_bench(folder / "reports")
    chosen = options(**{"monitor_image": "watch:1", **changes})
    return make_manifests(repository, "minilm", chosen, reports)


def parses(command: list[str]) -> bool:
    """Whether the command line takes these words; with --help it does nothing else."""
    assert command[0] == "triptych"
    return CliRunner().invoke(app, [*command[1:], "--help"]).exit_code == 0


def test_all_replicas_write_where_the_watch_reads(tmp_path: Path) -> None:
    made = manifests(tmp_path)
    objects = taken(kustomized(tmp_path / "out", made))
    assert check_manifests(tmp_path / "out") == []
    claim = objects["PersistentVolumeClaim minilm-samples"]["spec"]
    assert claim["accessModes"] == ["ReadWriteMany"]
    assert claim["resources"]["requests"]["storage"] == "768Mi"
    pods = [
        objects[f"Deployment {name}"]["spec"]["template"]["spec"]
        for name in ("minilm", "minilm-watch")
    ]
    for pod in pods:
        assert {"name": "samples", "persistentVolumeClaim": {"claimName": "minilm-samples"}} in pod[
            "volumes"
        ]
        # One user, since files are for their user alone; its group may write to a new volume.
        security = pod["securityContext"]
        assert (security["runAsUser"], security["fsGroup"]) == (1000, 1000)
        assert security["fsGroupChangePolicy"] == "OnRootMismatch"
        assert pod["automountServiceAccountToken"] is False
        (container,) = pod["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert {"name": "samples", "mountPath": "/samples"} in container["volumeMounts"]
    server, watch = (pod["containers"][0] for pod in pods)
    assert {"name": "TRIPTYCH_SAMPLES", "value": "/samples"} in server["env"]
    models = [next(v for v in pod["volumes"] if v["name"] == "models") for pod in pods]
    assert models[0] == models[1]
    assert parses(watch["command"])
    assert not parses([*watch["command"], "--portt", "1"])
    deployed = objects["Deployment minilm-watch"]["spec"]
    assert (deployed["replicas"], deployed["strategy"]) == (1, {"type": "Recreate"})
    # No Service, budget or autoscaler takes it for a server; Prometheus alone reaches it.
    labels = deployed["selector"]["matchLabels"]
    assert objects["PodMonitor minilm-watch"]["spec"]["selector"]["matchLabels"] == labels
    assert objects["Service minilm-replicas"]["spec"]["selector"] != labels
    policy = objects["NetworkPolicy minilm-watch"]["spec"]
    assert [port["port"] for rule in policy["ingress"] for port in rule["ports"]] == [8002]
    assert policy["egress"] == []


def test_without_sampling_or_an_image_there_is_nothing_to_look_at(tmp_path: Path) -> None:
    alone = manifests(tmp_path / "alone", monitor_image=None)
    assert "base/samples-claim.yaml" in alone.files
    assert not [file for file in alone.files if "watch" in file]
    rules = document(alone, "prometheus-rule.yaml")["spec"]["groups"][1]["rules"]
    assert [rule["alert"] for rule in rules][-1] == "MinilmSamplesDropped"
    assert "triptych_watch" not in str(rules)
    repository, reports = write_built(tmp_path), write_bench(tmp_path / "reports")
    plain = make_manifests(repository, "minilm", options(), reports)
    assert "fsGroup" not in str(plain.files)
    for image, said in (("watch:1", "a build that samples"), ("watch", "tag that does not move")):
        with pytest.raises(UserError, match=said):
            make_manifests(repository, "minilm", options(monitor_image=image), reports)


def test_a_canary_waits_for_the_verdict_on_both_builds(tmp_path: Path) -> None:
    sampling = {"slo": {"p99_ms": 80.0}, "triton": "26.08", "sample": {"rate": 0.01}}
    new, old = (write_built(tmp_path / name, serving=sampling) for name in ("new", "old"))
    lock = lock_data(old, "minilm")
    (old / "minilm/triptych.lock.json").unlink()
    write_lock(old, "minilm", {**lock, "built_at": "2025-01-01T00:00:00+00:00"})
    reports = write_bench(tmp_path / "reports", slo=Slo(p99_ms=80.0))
    usual: dict[str, Any] = {"monitor_image": "watch:1", "baseline": old}
    argo = options(**usual, gateway="public", rollout="argo")
    made = make_manifests(new, "minilm", argo, reports)
    objects = taken(kustomized(tmp_path / "argo", made))
    assert check_manifests(tmp_path / "argo") == []
    steps = objects["Rollout minilm"]["spec"]["strategy"]["canary"]["steps"]
    assert steps[0] == {"analysis": {"templates": [{"templateName": "minilm-verdict"}]}}
    assert "setWeight" in steps[1]
    (metric,) = objects["AnalysisTemplate minilm-verdict"]["spec"]["metrics"]
    job = metric["provider"]["job"]
    canary = options(**usual, target="kserve", canary_percent=10)
    made = make_manifests(new, "minilm", canary, reports)
    objects = taken(kustomized(tmp_path / "kserve", made))
    assert check_manifests(tmp_path / "kserve") == []
    alone = document(made, "verdict-job.yaml")
    kubernetes_validate.validate(alone, KUBERNETES[0], strict=True)
    assert alone["spec"] == job["spec"]
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert (job["spec"]["backoffLimit"], pod["restartPolicy"]) == (0, "Never")
    assert parses(container["command"])
    claims = {
        volume["name"]: volume["persistentVolumeClaim"]["claimName"]
        for volume in pod["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert claims["models"] == f"minilm-{made.version}" != claims["in-place"]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    words = container["command"]
    for option, volume in (
        ("--repository", "in-place"), ("--candidate", "models"), ("--samples", "samples"),
    ):  # fmt: skip
        assert words[words.index(option) + 1] == mounts[volume]
    # Nobody reaches a pod that holds what users sent.
    policy = objects["NetworkPolicy minilm-verdict"]["spec"]
    assert policy["podSelector"]["matchLabels"] == job["metadata"]["labels"]
    assert not {"ingress", "egress"} & set(policy)
    for changes, said in (
        ({"monitor_image": "watch:1"}, "needs --monitor-image, which runs"),
        (
            {"gateway": "public", "rollout": "argo"},
            "needs --monitor-image, which runs",
        ),
        ({**usual, "gateway": "public", "rollout": "argo", "baseline": new}, "another build"),
    ):
        with pytest.raises(UserError, match=said):
            make_manifests(new, "minilm", options(**{"baseline": old, **changes}), reports)


def test_kserve_and_compose_sample_too(tmp_path: Path) -> None:
    for name, changes in {"standard": {}, "knative": {"canary_percent": 20}}.items():
        made = manifests(tmp_path / name, target="kserve", **changes)
        objects = taken(kustomized(tmp_path / name / "out", made))
        (container,) = objects["ServingRuntime minilm"]["spec"]["containers"]
        assert {"name": "TRIPTYCH_SAMPLES", "value": "/samples"} in container["env"]
        assert "fsGroup" not in container["securityContext"]
        volumes = {each["name"] for each in objects["ServingRuntime minilm"]["spec"]["volumes"]}
        assert volumes == {"shm", "tmp", "samples"}
        group = objects["InferenceService minilm"]["spec"]["predictor"]["securityContext"]
        # Of both Knative knows the first alone.
        assert set(group) == {"fsGroup"} | (
            {"fsGroupChangePolicy"} if name == "standard" else set()
        )
        assert "Deployment minilm-watch" in objects
    made = manifests(tmp_path / "compose", target="compose")
    write_manifests(tmp_path / "compose/out", made.files)
    written = yaml.safe_load((tmp_path / "compose/out/compose.yaml").read_text())
    compose_schema().validate(written)
    assert check_manifests(tmp_path / "compose/out") == []
    assert written["volumes"] == {"samples": {}}
    server, watch = (written["services"][name] for name in ("triton", "watch"))
    assert server["volumes"][1] == watch["volumes"][1]
    assert (server["volumes"][1]["target"], server["user"]) == ("/samples", watch["user"])
    assert parses(watch["entrypoint"])
    fields = {**SAMPLING, "core": {"backend": "tensorrt"}}
    gpu = write_built(tmp_path / "gpu", engine=ENGINE, **fields)
    chosen = options(target="compose", monitor_image="watch:1")
    write_manifests(
        tmp_path / "gpu/out",
        make_manifests(gpu, "minilm", chosen, write_bench(tmp_path / "gpu/reports")).files,
    )
    compose_schema().validate(yaml.safe_load((tmp_path / "gpu/out/compose.yaml").read_text()))
