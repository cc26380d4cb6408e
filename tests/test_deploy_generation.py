"""`triptych deploy` of pipelines that generate text, from what a build leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from container_cases import ENSEMBLE
from deploy_cases import document, kustomized, options, taken
from generation_cases import write_pipeline
from triptych.cli import app
from triptych.deploy.folder import write_manifests
from triptych.deploy.generation import generation_manifests
from triptych.errors import UserError
from triptych.fleet.proxy import validate
from triptych.fleet.reasons import reasons_of
from triptych.generation.lock import built_spec
from triptych.pipeline.generation_spec import load_generation_spec

WEIGHTS_MIB = 2


def built(folder: Path, *overrides: str) -> Path:
    """A repository with the pipeline `talk` as `build` leaves it, as far as `deploy` reads it."""
    pipeline = write_pipeline(folder / "talk", folder / "model", backend="vllm")
    spec = load_generation_spec(pipeline, ["core.max_sequences=10", *overrides])
    repository = folder / "repository"
    (repository / "talk").mkdir(parents=True)
    (repository / "talk/config.pbtxt").write_text(ENSEMBLE.format(name="talk"))
    lock = {"spec": spec.model_dump(mode="json", exclude={"folder"}), "files": {}}
    (repository / "talk/triptych.lock.json").write_text(json.dumps(lock))
    weights = repository / "talk_core/1/weights"
    weights.mkdir(parents=True)
    (weights / "model.safetensors").write_bytes(bytes(WEIGHTS_MIB << 20))
    return repository


def made(repository: Path, affinity: str | None = None, **changes: Any) -> Any:
    spec = built_spec(repository, "talk")
    assert spec is not None
    return generation_manifests(repository, spec, options(name="talk", **changes), affinity)


def test_kubernetes_takes_it_and_a_pod_has_a_gpu_for_each_part(tmp_path: Path) -> None:
    repository = built(tmp_path, "core.tensor_parallel=2", "core.pipeline_parallel=2")
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
    cache = 'triptych_generation_kv_cache_share{namespace="default",pipeline="talk"}'
    assert f"(avg({cache}) > bool 0.9)" in triggers[1]["metadata"]["query"]
    assert all(reason for node in manifests.files.values() for *_, reason in reasons_of(node))


def test_streams_of_one_value_go_to_one_replica(tmp_path: Path) -> None:
    repository = built(tmp_path)
    for affinity, policy in ((None, "LEAST_REQUEST"), ("x-session", "RING_HASH")):
        manifests = made(repository, affinity)
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


def test_what_cannot_work_is_refused_and_the_command_line_writes_the_rest(tmp_path: Path) -> None:
    repository = built(tmp_path, "core.tensor_parallel=2")
    for changes, said in (
        ({"gpu": "NVIDIA-H100-MIG-1g.10gb"}, "must be whole GPUs"),
        ({"target": "compose"}, "must be kubernetes without --gateway"),
        ({"gateway": "infra/web"}, "must be kubernetes without --gateway"),
        ({"capacity_per_s": 5.0}, "scales by requests under way"),
    ):
        with pytest.raises(UserError) as caught:
            made(repository, **changes)
        assert said in caught.value.message, changes
    words = ["deploy", "talk", "--image", "triton-vllm:26.08", "--repository", str(repository)]
    done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "out"), "--affinity", "x-user"])
    assert done.exit_code == 0, done.output
    assert "x-user" in (tmp_path / "out/base/envoy.yaml").read_text()
    assert "kubectl apply -k" in done.stdout
