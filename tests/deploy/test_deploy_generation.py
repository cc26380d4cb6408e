"""`triptych deploy` of pipelines that generate text, from what a build leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from deploy_cases import (
    WEIGHTS_MIB,
    compose_schema,
    document,
    kustomized,
    options,
    taken,
    write_generation,
    write_talk_manifest,
)
from triptych.base.errors import UserError
from triptych.base.explained import reasons_of
from triptych.deploy.checks import check_manifests
from triptych.deploy.context import Manifests
from triptych.deploy.folder import write_manifests
from triptych.deploy.targets import known_of, make_manifests
from triptych.interface.cli import app
from triptych.repository.manifest import TextManifest, read_manifest
from triptych.serving.fleet.proxy import validate
from triptych.spec.generation_fields import Text2TextSpec


def made(repository: Path, **changes: Any) -> Manifests:
    return make_manifests(repository, "talk", options(name="talk", **changes), repository)


def test_kubernetes_takes_it_and_a_pod_has_a_gpu_for_each_part(tmp_path: Path) -> None:
    repository = write_generation(
        tmp_path, "core.tensor_parallel_size=2", "core.pipeline_parallel_size=2"
    )
    manifests = made(repository)
    found = taken(kustomized(tmp_path / "out", manifests))
    pod = found["Deployment talk"]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
    window = container["startupProbe"]
    assert window["periodSeconds"] * window["failureThreshold"] >= 3 * (120 + WEIGHTS_MIB / 100)
    assert "persistentVolumeClaim" in pod["volumes"][0]
    triggers = found["ScaledObject talk"]["spec"]["triggers"]
    assert [one["name"] for one in triggers] == ["requests", "kv-cache"]
    assert triggers[0]["metadata"]["threshold"] == "8"
    cache = 'triptych_generation_kv_cache_usage_ratio{namespace="default",pipeline="talk"}'
    assert f"(avg({cache}) > bool 0.9)" in triggers[1]["metadata"]["query"]
    assert all(reason for node in manifests.files.values() for *_, reason in reasons_of(node))


def test_streams_of_one_value_go_to_one_replica(tmp_path: Path) -> None:
    repository = write_generation(tmp_path)
    for affinity, policy in ((None, "LEAST_REQUEST"), ("x-session", "RING_HASH")):
        manifests = made(repository, affinity_header=affinity)
        write_manifests(tmp_path / "out", manifests.files)
        assert validate(tmp_path / "out/base/envoy.yaml") == ""
        config = document(manifests, "envoy.yaml")["static_resources"]
        grpc = config["clusters"][0]
        assert grpc["lb_policy"] == policy
        assert grpc["common_lb_config"]["healthy_panic_threshold"]["value"] == 0
        manager = config["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
        stream, whole = manager["route_config"]["virtual_hosts"][0]["routes"][:2]
        hashed = [{"header": {"header_name": affinity}}] if affinity else None
        assert stream["route"].get("hash_policy") == hashed
        assert "hash_policy" not in whole["route"]


def test_all_targets_take_it(tmp_path: Path) -> None:
    """Gateway, Argo Rollouts, both modes of KServe; two GPUs for each copy of the model."""
    repository = write_generation(
        tmp_path, "core.tensor_parallel_size=2", "serving.slo.ttft_p99=500ms"
    )
    own = known_of(repository, "talk", tmp_path)
    cases: dict[str, dict[str, Any]] = {
        "gateway": {"gateway": "infra/web"},
        "rollout": {"gateway": "infra/web", "rollout": "argo"},
        "kserve": {"target": "kserve", "repository_image": "models"},
        "knative": {"target": "kserve", "canary_percent": 20},
    }
    for name, changes in cases.items():
        manifests = made(repository, **changes)
        objects = taken(kustomized(tmp_path / name, manifests))
        assert check_manifests(tmp_path / name, known=own) == [], name
        rules = str(objects["PrometheusRule talk"])
        assert "triptych:generation_later_ttft_p99:ratio" in rules
        if name in ("kserve", "knative"):
            assert 'deployment=~"talk-predictor.*"' in rules
            runtime = objects["ServingRuntime talk"]["spec"]
            (container,) = runtime["containers"]
            volumes = {one["name"]: one["emptyDir"] for one in runtime["volumes"]}
            uri = objects["InferenceService talk"]["spec"]["predictor"]["model"]["storageUri"]
            assert uri.startswith("oci+native://models:" if name == "kserve" else "pvc://talk-")
        else:
            pod = objects["Deployment talk"]["spec"]["template"]["spec"]
            (container,) = pod["containers"]
            volumes = {one["name"]: one.get("emptyDir", {}) for one in pod["volumes"]}
            assert not [one for one in objects if "envoy" in one]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 2
        assert int(volumes["shm"]["sizeLimit"].removesuffix("Mi")) > 2048
        assert volumes["tmp"]["sizeLimit"] == "1024Mi"
        assert {"name": "HOME", "value": "/tmp"} in container["env"]
        window = container["startupProbe"]
        assert window["periodSeconds"] * window["failureThreshold"] >= 360
        if name == "knative":
            predictor = objects["InferenceService talk"]["spec"]["predictor"]
            assert (predictor["scaleMetric"], predictor["scaleTarget"]) == ("concurrency", 8)
            assert predictor["timeout"] > 25.6  # an answer of 256 tokens, 100 ms each
        elif name == "rollout":
            metrics = objects["AnalysisTemplate talk"]["spec"]["metrics"]
            assert [one["name"] for one in metrics] == ["failures", "slowttftp99"]
            assert objects["ScaledObject talk"]["spec"]["scaleTargetRef"]["kind"] == "Rollout"


def test_check_finds_other_gpus_and_names_of_metrics(tmp_path: Path) -> None:
    repository = write_generation(tmp_path, "core.tensor_parallel_size=2")
    text = yaml.safe_dump_all(kustomized(tmp_path / "out", made(repository)))
    (tmp_path / "spoilt").mkdir()
    spoilt = text.replace("nvidia.com/gpu: 2", "nvidia.com/gpu: 1").replace(
        "triptych_generation_waiting", "triptych_generation_wait"
    )
    (tmp_path / "spoilt/all.yaml").write_text(spoilt)
    found = check_manifests(tmp_path / "spoilt", known=known_of(repository, "talk", tmp_path))
    assert {one.id for one in found} == {"engine-gpu", "metric-known"}
    assert any("nvidia.com/gpu: 1; it has 2" in one.given for one in found)
    assert any("Did you mean `triptych_generation_waiting`?" in one.remedy for one in found)


def test_compose_gives_each_copy_its_gpus(tmp_path: Path) -> None:
    repository = write_generation(tmp_path, "core.tensor_parallel_size=2")
    manifests = made(repository, target="compose", affinity_header="x-user")
    write_manifests(tmp_path / "out", manifests.files)
    assert check_manifests(tmp_path / "out") == []
    written = yaml.safe_load((tmp_path / "out/compose.yaml").read_text())
    compose_schema().validate(written)
    assert validate(tmp_path / "out/envoy.yaml") == ""
    assert "RING_HASH" in (tmp_path / "out/envoy.yaml").read_text()
    servers = [one for name, one in written["services"].items() if name != "envoy"]
    ids = [
        one["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] for one in servers
    ]
    assert ids == [["0", "1"], ["2", "3"]]
    assert servers[0]["environment"]["HOME"] == "/tmp"
    assert servers[0]["ulimits"] == {"memlock": -1}
    assert servers[0]["volumes"][0]["source"].endswith("repository}")


def test_a_text_to_text_pipeline_is_on_processors(tmp_path: Path) -> None:
    repository = write_generation(tmp_path)
    model = read_manifest(repository, "talk", TextManifest).spec.model
    write_talk_manifest(
        repository, Text2TextSpec(task="text2text-generation", name="talk", model=model)
    )
    cases: tuple[dict[str, Any], ...] = ({}, {"gateway": "infra/web"}, {"target": "kserve"})
    for changes in cases:
        objects = taken(kustomized(tmp_path / "out", made(repository, **changes)))
        assert "nvidia.com" not in str(objects)
        assert "kv_cache_usage_ratio" not in str(objects)
        assert check_manifests(tmp_path / "out") == []
    with pytest.raises(UserError, match="only supported for an engine on a GPU"):
        made(repository, gpu_product="NVIDIA-L4")


def test_what_cannot_work_is_refused_and_the_command_line_writes_the_rest(tmp_path: Path) -> None:
    repository = write_generation(tmp_path, "core.tensor_parallel_size=2")
    for changes, said in (
        ({"gpu_product": "NVIDIA-H100-MIG-1g.10gb"}, "must be whole GPUs"),
        ({"gateway": "infra/web", "affinity_header": "x-user"}, "cannot hash a header"),
        ({"target": "kserve", "affinity_header": "x-user"}, "cannot hash a header"),
        ({"monitor_image": "watch:1"}, "its answers are not sampled"),
        ({"max_grace_seconds": 20}, "the longest answer"),
        ({"rps_per_replica": 5.0}, "scales by requests in flight"),
    ):
        with pytest.raises(UserError) as caught:
            made(repository, **changes)
        assert said in caught.value.message, changes
    words = ["deploy", "talk", "--image", "triton-vllm:26.08", "--repository", str(repository)]
    words += ["--out", str(tmp_path / "out"), "--affinity-header", "x-user"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "x-user" in (tmp_path / "out/base/envoy.yaml").read_text()
    assert "kubectl apply -k" in done.stdout
