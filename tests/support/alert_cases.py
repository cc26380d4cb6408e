"""Deployments with their rules and dashboards: one for each promise and source of latencies."""

from pathlib import Path
from typing import Any, NamedTuple

from deploy_cases import options, write_built, write_generation
from triptych.base.explained import plain
from triptych.deploy.targets import make_manifests

BY_HAND: dict[str, Any] = {"rps_per_replica": 20.0, "cpu_cores": 1.0, "memory_mib": 2048}
SOURCES = {
    "summary": ({"p50_ms": 5.0}, {"p99_ms": 80.0}),
    "histogram": ({"p99_ms": 80.0}, {"p99_9_ms": 30_000.0}),
    "envoy": ({"p50_ms": 5.0}, {"p99_ms": 80.0}),
}
"""Promises by source of the latencies: Triton 24.10, Triton 26.08, an Envoy in front."""


RULES = ("base/prometheus-rule.yaml", "base/http-api-rule.yaml")


class Case(NamedTuple):
    """A deployment: its rules, and how its metrics look at a share of slow requests."""

    name: str
    promise: dict[str, float]
    watched: str
    documents: dict[str, Any]

    @property
    def groups(self) -> list[dict[str, Any]]:
        rules = [name for name in RULES if name in self.documents]
        return [group for name in rules for group in self.documents[name]["spec"]["groups"]]

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
    repository = write_built(folder, serving=serving, **built)
    chosen = options(
        triton=release,
        gateway=None if watched == "envoy" else "edge",
        monitor_image="watch:1" if samples else None,
        **BY_HAND,
    )
    made = make_manifests(repository, "minilm", chosen, folder / "none")
    documents = {file: plain(document) for file, document in made.files.items()}
    return Case(f"{'-'.join(promise)}-{watched}", promise, watched, documents)


def deployed_gateway(folder: Path) -> Case:
    """A deployment with the HTTP gateway."""
    chosen = options(http_api_image="triptych-build:26.11", **BY_HAND)
    made = make_manifests(write_built(folder), "minilm", chosen, folder / "none")
    documents = {file: plain(document) for file, document in made.files.items()}
    return Case("gateway", {}, "envoy", documents)


def deployed_cases(base: Path) -> list[Case]:
    """One for each of `SOURCES` and its promises."""
    return [
        deployed(base / f"{watched}-{number}", promise, watched)
        for watched, promises in SOURCES.items()
        for number, promise in enumerate(promises)
    ]


def deployed_talk(folder: Path) -> Case:
    """A pipeline that generates text: ten places in each replica's batch, on a GPU."""
    limits = ("serving.slo.ttft_p99=500ms", "serving.slo.itl_p99=50ms", "serving.slo.e2e_p50=8s")
    repository = write_generation(folder, *limits)
    made = make_manifests(repository, "talk", options(name="talk"), repository)
    documents = {file: plain(document) for file, document in made.files.items()}
    return Case("talk", {}, "core", documents)
