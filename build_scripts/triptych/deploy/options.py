"""Options of a deployment. All other numbers follow from the build and its measurements."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from triptych.base.errors import UserError
from triptych.base.releases import Release
from triptych.serving.fleet.mirror_option import MirrorOption

Target = Literal["kubernetes", "kserve", "compose"]
TARGETS: tuple[Target, ...] = ("kubernetes", "kserve", "compose")
ROLLOUTS = ("argo",)
ENVOY_IMAGE = "envoyproxy/envoy:v1.40.0"
WATCH_EVERY = "1h"
"""Interval between two runs of the monitor."""
MAX_NAME_CHARACTERS = 54
"""Maximum length of a name, because the label ``keda-hpa-NAME`` is limited to 63 characters."""

_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_GATEWAY = re.compile(r"([a-z0-9-]{1,63}/)?[a-z0-9][a-z0-9.-]{0,252}")
_REFERENCE = re.compile(r"[a-z0-9][\w.:/-]*?(:[\w][\w.-]*)?(@sha256:[0-9a-f]{64})?")


@dataclass(frozen=True)
class DeployOptions:
    """Options of the command line, checked by `check_options`.

    Attributes:
        image: Serving image, with a tag or a digest.
        name: Name of the objects.
        release: Triton release in the image.
        target: Kind of manifests.
        envoy_image: Image of the proxy, with a tag or a digest.
        namespace: Namespace of the objects; queries and alerts select it.
        prometheus: URL of Prometheus as KEDA reaches it.
        repository_image: Image that holds the repository, without a tag, since the tag is the
            hash of the lock. None mounts a volume claim.
        rps_per_replica: Maximum requests per second of a replica; None uses the measurement.
        cpu_cores: Number of cores of a replica; None uses the measurement.
        memory_mib: Memory of a replica; None uses the measurement.
        startup_seconds: Time from scaling up to the first answer, including image pulls and new
            nodes; None uses the measured load time of the models.
        max_growth: Maximum growth of the request rate per minute, as a ratio.
        peak_rps: Maximum requests per second; None allows four times the minimum replicas.
        max_grace_seconds: Maximum termination grace period of the platform; None for no limit.
        gpu_product: Product of the GPU as its nodes are labeled, with a MIG profile where it has
            one; None uses the GPU of the engine.
        gateway: Gateway of the cluster, as ``NAME`` or ``NAMESPACE/NAME``, in place of Envoy.
        rollout: Controller of progressive rollouts.
        canary_percent: Percentage of the requests for the new build (KServe).
        replicas: Replicas on a host (Compose); None uses the minimum for the SLO.
        monitor_image: Image with this package, PyTorch and the pipeline; None deploys no monitor.
        mirrored: Build that gets copies of some requests.
        baseline: Repository of the active build, which the new one is compared with.
        affinity_header: Request header; streams with equal values use the same replica.
    """

    image: str
    name: str
    release: Release
    target: Target = "kubernetes"
    envoy_image: str = ENVOY_IMAGE
    namespace: str = "default"
    prometheus: str = "http://prometheus-operated.monitoring.svc:9090"
    repository_image: str | None = None
    rps_per_replica: float | None = None
    cpu_cores: float | None = None
    memory_mib: int | None = None
    startup_seconds: float | None = None
    max_growth: float = 0.5
    peak_rps: float | None = None
    max_grace_seconds: int | None = None
    gpu_product: str | None = None
    gateway: str | None = None
    rollout: str | None = None
    canary_percent: int | None = None
    replicas: int | None = None
    monitor_image: str | None = None
    mirrored: MirrorOption | None = None
    baseline: Path | None = None
    affinity_header: str | None = None

    @property
    def envoy(self) -> str | None:
        """Name of Envoy's Deployment; None without Envoy."""
        has_own = self.target == "kubernetes" and self.gateway is None
        return f"{self.name}-envoy" if has_own else None

    @property
    def workload(self) -> str:
        """Name of the servers' Deployment, which KServe creates for its target."""
        return f"{self.name}-predictor" if self.target == "kserve" else self.name

    @property
    def monitoring_namespace(self) -> str | None:
        """Namespace of Prometheus, if its host is a Service: ``http://NAME.NAMESPACE.svc``."""
        parts = (urlsplit(self.prometheus).hostname or "").split(".")
        return parts[1] if parts[2:3] == ["svc"] else None

    @property
    def is_gradual(self) -> bool:
        """Whether a new build gets requests in steps."""
        return self.rollout is not None or self.canary_percent is not None


class _Rule(NamedTuple):
    """Condition that an option must meet."""

    option: str
    is_met: bool
    rule: str
    given: Any
    remedy: str


def check_options(options: DeployOptions) -> None:
    """Raise a `UserError` for the first option that no cluster could accept."""
    for option, is_met, rule, given, remedy in _rules(options):
        if not is_met:
            raise UserError(option, rule, given=given, remedy=remedy)


def _rules(o: DeployOptions) -> list[_Rule]:
    return [
        _name("--name", o.name, MAX_NAME_CHARACTERS),
        _name("--namespace", o.namespace, 63),
        *_image("--image", o.image, "Push what `make image` built, and name it with its tag"),
        *_image("--envoy-image", o.envoy_image, f"The usual one is {ENVOY_IMAGE}"),
        *_image("--monitor-image", o.monitor_image, "docker/README.md says what it holds"),
        *(
            _Rule(
                option,
                value is None or o.target == target,
                f"is only supported with --target {target}",
                f"--target {o.target}",
                "Leave it out",
            )
            for option, value, target in (
                ("--gateway", o.gateway, "kubernetes"),
                ("--rollout", o.rollout, "kubernetes"),
                ("--canary-percent", o.canary_percent, "kserve"),
                ("--replicas", o.replicas, "compose"),
                ("--mirror", o.mirrored, "kubernetes"),
            )
        ),
        _Rule(
            "--affinity-header",
            o.affinity_header is None or not (o.gateway or o.target == "kserve"),
            "is only supported with Envoy: a GRPCRoute and KServe cannot hash a header",
            o.gateway or f"--target {o.target}",
            "Leave one of them out",
        ),
        _Rule(
            "--gateway",
            o.gateway is None or bool(_GATEWAY.fullmatch(o.gateway)),
            "must name a Gateway, as NAME or NAMESPACE/NAME",
            o.gateway,
            "See `kubectl get gateways --all-namespaces`",
        ),
        _Rule(
            "--rollout",
            o.rollout in (None, *ROLLOUTS),
            f"must be one of {', '.join(ROLLOUTS)}",
            o.rollout,
            f"Use --rollout {ROLLOUTS[0]}, or leave it out",
        ),
        _Rule(
            "--rollout",
            o.rollout is None or o.gateway is not None,
            "needs --gateway: a weighted route moves the requests step by step",
            "no gateway",
            "Name the Gateway of your cluster, or leave --rollout out",
        ),
        _Rule(
            "--baseline",
            o.baseline is None or (o.is_gradual and o.monitor_image is not None),
            "needs --monitor-image, which runs the comparison, and --rollout or --canary-percent, "
            "which wait for it",
            "only some of them",
            "Add the missing option, or leave --baseline out",
        ),
        _Rule(
            "--repository-image",
            o.repository_image is None
            or (
                bool(_REFERENCE.fullmatch(o.repository_image)) and not _has_tag(o.repository_image)
            ),
            "must be the name of an image without a tag, which is the hash of the lock",
            o.repository_image,
            "Leave the tag out; docker/README.md shows how the image is made",
        ),
        *(
            _Rule(
                option,
                number is None or (math.isfinite(number) and number > 0),
                "must be above 0",
                number,
                "Correct the value, or leave it out",
            )
            for option, number in (
                ("--rps-per-replica", o.rps_per_replica),
                ("--cpu", o.cpu_cores),
                ("--memory", o.memory_mib),
                ("--startup-seconds", o.startup_seconds),
                ("--peak-rps", o.peak_rps),
                ("--max-grace-seconds", o.max_grace_seconds),
                ("--canary-percent", o.canary_percent),
                ("--replicas", o.replicas),
            )
        ),
        _Rule(
            "--canary-percent",
            o.canary_percent is None or o.canary_percent <= 100,
            "must be a percentage from 1 to 100",
            o.canary_percent,
            "Use for example --canary-percent 10",
        ),
        _Rule(
            "--max-growth",
            0 <= o.max_growth <= 10,
            "must be from 0 to 10",
            o.max_growth,
            "Use for example 0.5 for growth by half in a minute",
        ),
        _Rule(
            "--prometheus",
            urlsplit(o.prometheus).scheme in ("http", "https"),
            "must be the URL of a Prometheus, http:// or https://",
            o.prometheus,
            f"The usual one is {DeployOptions.prometheus}",
        ),
    ]


def parse_target(text: str) -> Target:
    """Return the target of a name.

    Raises:
        UserError: The name is unknown.
    """
    for target in TARGETS:
        if target == text:
            return target
    raise UserError(
        "--target",
        f"must be one of {', '.join(TARGETS)}",
        given=text,
        remedy=f"Use --target {TARGETS[0]}",
    )


def parse_mebibytes(option: str, text: str | None) -> int | None:
    """Return the MiB of a size such as ``2Gi`` or ``1500Mi``.

    Raises:
        UserError: The text has another form.
    """
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,9})(Mi|Gi)", text)
    if not found:
        raise UserError(
            option, "must be a size, as 1500Mi or 2Gi", given=text, remedy="Correct the value"
        )
    return int(found[1]) * {"Mi": 1, "Gi": 1024}[found[2]]


def _name(option: str, name: str, max_characters: int) -> _Rule:
    like = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:max_characters].strip("-") or "NAME"
    return _Rule(
        option,
        bool(_NAME.fullmatch(name)) and len(name) <= max_characters,
        "must be a name that Kubernetes accepts: lower-case letters, digits and `-`, a letter "
        f"first, at most {max_characters} characters",
        name,
        f"Use another name: {option} {like}",
    )


def _image(option: str, image: str | None, remedy: str) -> list[_Rule]:
    if image is None:
        return []
    return [
        _Rule(
            option,
            bool(_REFERENCE.fullmatch(image)),
            "must name an image in your registry",
            repr(image),
            remedy,
        ),
        _Rule(
            option,
            _has_tag(image) and not image.endswith(":latest"),
            "must have a tag that does not move, or a digest",
            image,
            f"Otherwise two replicas may run two releases. {remedy}",
        ),
    ]


def _has_tag(image: str) -> bool:
    return "@" in image or ":" in Path(image).name
