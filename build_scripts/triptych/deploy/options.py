"""What a user decides of a deployment; all else follows from what was built and measured."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from triptych.base.errors import UserError
from triptych.base.releases import Release
from triptych.serving.fleet.mirrored import Mirrored

Target = Literal["kubernetes", "kserve", "compose"]
TARGETS: tuple[Target, ...] = ("kubernetes", "kserve", "compose")
ROLLOUTS = ("argo",)
ENVOY_IMAGE = "envoyproxy/envoy:v1.40.0"
WATCH_EVERY = "1h"
"""Between two looks at what the servers sample."""
MAX_NAME = 54
"""KEDA names its autoscaler ``keda-hpa-NAME``, and a label holds 63 characters."""

_OF_TARGET: dict[str, Target] = {
    "--gateway": "kubernetes",
    "--rollout": "kubernetes",
    "--canary": "kserve",
    "--replicas": "compose",
    "--mirror": "kubernetes",
}
"""Options that one target alone knows."""
_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_GATEWAY = re.compile(r"([a-z0-9-]{1,63}/)?[a-z0-9][a-z0-9.-]{0,252}")
_REFERENCE = re.compile(r"[a-z0-9][\w.:/-]*?(:[\w][\w.-]*)?(@sha256:[0-9a-f]{64})?")


@dataclass(frozen=True)
class Options:
    """Each is a field of the command line, checked by `check`.

    Attributes:
        image: the serving image, with a tag or a digest.
        models: image that holds the repository, without a tag: that is the lock's hash. None mounts
            a volume claim of that name.
        name: of all objects.
        namespace: they live in it; queries and alerts select it.
        prometheus: address that KEDA asks.
        release: of Triton in the image.
        capacity_per_s: requests a second of one replica; None takes what bench found.
        cpu_cores: of one replica; None takes what bench saw it use.
        memory_mib: likewise.
        ready_s: from the wish for a replica to its first answer, images and nodes included; None
            takes what bench saw of the models' load.
        growth: share by which the rate may grow within a minute.
        peak_per_s: most requests a second that are to be served; None for four times the fewest
            replicas.
        grace_s: most seconds that the platform lets a replica end; None for no limit.
        gpu: product of the GPU as its nodes are labeled, a MIG slice's profile included; None
            takes the engine's.
        target: what the manifests are for.
        envoy_image: the proxy's, with a tag or a digest.
        gateway: a Gateway, as ``NAME`` or ``NAMESPACE/NAME``, in place of a proxy of our own.
        rollout: what exchanges an old build by the new one, if not the Deployment itself.
        canary_percent: of the requests for the new build, for a start.
        replicas: on a host; None for as many as the promised throughput takes.
        watch_image: holds this package, PyTorch and the pipeline, and looks at what is sampled;
            None writes no watch.
        mirrored: a build that gets copies of some requests; None for none.
        replaces: repository of the build in place, which `shadow` holds the new one against; None
            asks it nothing.
        affinity: header of streams that belong to the same replica; None spreads all.
    """

    image: str
    name: str
    release: Release
    target: Target = "kubernetes"
    envoy_image: str = ENVOY_IMAGE
    namespace: str = "default"
    prometheus: str = "http://prometheus-operated.monitoring.svc:9090"
    models: str | None = None
    capacity_per_s: float | None = None
    cpu_cores: float | None = None
    memory_mib: int | None = None
    ready_s: float | None = None
    growth: float = 0.5
    peak_per_s: float | None = None
    grace_s: int | None = None
    gpu: str | None = None
    gateway: str | None = None
    rollout: str | None = None
    canary_percent: int | None = None
    replicas: int | None = None
    watch_image: str | None = None
    mirrored: Mirrored | None = None
    replaces: Path | None = None
    affinity: str | None = None

    @property
    def envoy(self) -> str | None:
        """The Deployment of the proxy in front of the servers; None where there is none of ours."""
        has_own = self.target == "kubernetes" and self.gateway is None
        return f"{self.name}-envoy" if has_own else None

    @property
    def workload(self) -> str:
        """The Deployment of the servers, whoever makes it."""
        return f"{self.name}-predictor" if self.target == "kserve" else self.name

    @property
    def monitoring_namespace(self) -> str | None:
        """Where Prometheus runs, if its address is a Service's: ``http://NAME.NAMESPACE.svc``."""
        parts = (urlsplit(self.prometheus).hostname or "").split(".")
        return parts[1] if parts[2:3] == ["svc"] else None


def check(options: Options) -> None:
    """Raises a `UserError` for the first option that no cluster could take."""
    for field, name in (("--as", options.name), ("--namespace", options.namespace)):
        most = MAX_NAME if field == "--as" else 63
        if not _NAME.fullmatch(name) or len(name) > most:
            raise UserError(
                field,
                f"must be a name that Kubernetes takes: lower-case letters, digits and `-`, a "
                f"letter first, {most} at most",
                given=name,
                remedy=f"Give another one: {field} {_like(name, most)}",
            )
    _check_image("--image", options.image, "Push what `make image` built, and name it with its tag")
    _check_image("--envoy-image", options.envoy_image, f"The usual one is {ENVOY_IMAGE}")
    if options.watch_image is not None:
        _check_image("--watch-image", options.watch_image, "docker/README.md says what it holds")
    _check_target(options)
    if options.models is not None and (
        not _REFERENCE.fullmatch(options.models) or _has_tag(options.models)
    ):
        raise UserError(
            "--models",
            "must be the name of an image without a tag, which is the hash of the lock",
            given=options.models,
            remedy="Leave the tag out; docker/README.md shows how the image is made",
        )
    for field, number in (
        ("--capacity", options.capacity_per_s),
        ("--cpu", options.cpu_cores),
        ("--memory", options.memory_mib),
        ("--ready", options.ready_s),
        ("--peak-rate", options.peak_per_s),
        ("--grace", options.grace_s),
        ("--canary", options.canary_percent),
        ("--replicas", options.replicas),
    ):
        if number is not None and not (math.isfinite(number) and number > 0):
            raise UserError(field, "must be above 0", given=number)
    if not 0 <= options.growth <= 10:
        raise UserError("--growth", "must be from 0 to 10, as 0.5 for half in a minute",
                        given=options.growth)  # fmt: skip
    if urlsplit(options.prometheus).scheme not in ("http", "https"):
        raise UserError(
            "--prometheus",
            "must be the address of a Prometheus, http:// or https://",
            given=options.prometheus,
        )


def target_of(text: str) -> Target:
    """The target of a name.

    Raises:
        UserError: there is none.
    """
    for target in TARGETS:
        if target == text:
            return target
    raise UserError("--target", f"must be one of {', '.join(TARGETS)}", given=text)


def mebibytes(field: str, text: str | None) -> int | None:
    """``2Gi`` or ``1500Mi`` in MiB.

    Raises:
        UserError: another form.
    """
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,9})(Mi|Gi)", text)
    if not found:
        raise UserError(field, "must be a size, as 1500Mi or 2Gi", given=text)
    return int(found[1]) * {"Mi": 1, "Gi": 1024}[found[2]]


def _check_target(options: Options) -> None:
    """Raises a `UserError` for an option that means nothing to the target, or without another."""
    given = {
        "--gateway": options.gateway,
        "--rollout": options.rollout,
        "--canary": options.canary_percent,
        "--replicas": options.replicas,
        "--mirror": options.mirrored,
    }
    for field, target in _OF_TARGET.items():
        if given[field] is not None and options.target != target:
            raise UserError(
                field,
                f"must be given with --target {target} only",
                given=f"--target {options.target}",
                remedy="Leave it out",
            )
    if options.affinity is not None and (options.gateway or options.target == "kserve"):
        raise UserError(
            "--affinity",
            "must be with an Envoy of our own: a GRPCRoute and KServe know no hash of a header",
            given=options.gateway or f"--target {options.target}",
            remedy="Leave one of them out",
        )
    if options.gateway is not None and not _GATEWAY.fullmatch(options.gateway):
        raise UserError(
            "--gateway", "must name a Gateway, as NAME or NAMESPACE/NAME", given=options.gateway
        )
    if options.rollout is not None and options.rollout not in ROLLOUTS:
        raise UserError("--rollout", f"must be one of {', '.join(ROLLOUTS)}", given=options.rollout)
    if options.rollout is not None and options.gateway is None:
        raise UserError(
            "--rollout",
            "must come with --gateway: a weighted route is what moves requests step by step",
            given="no gateway",
            remedy="Name the Gateway of your cluster, or leave --rollout out",
        )
    is_gradual = options.rollout is not None or options.canary_percent is not None
    if options.replaces is not None and not (is_gradual and options.watch_image is not None):
        raise UserError(
            "--replaces",
            "must come with --watch-image, and --rollout or --canary: the first runs the "
            "comparison, the others wait for it",
            given="only some of them",
        )
    if options.canary_percent is not None and options.canary_percent > 100:
        raise UserError("--canary", "must be a percentage, 1 to 100", given=options.canary_percent)


def _check_image(field: str, image: str, remedy: str) -> None:
    if not _REFERENCE.fullmatch(image):
        raise UserError(
            field, "must name an image, in your registry", given=repr(image), remedy=remedy
        )
    if image.endswith(":latest") or not _has_tag(image):
        raise UserError(
            field,
            "must have a tag that does not move, or a digest",
            given=image,
            remedy=f"Two replicas must not be of two releases. {remedy}",
        )


def _has_tag(image: str) -> bool:
    return "@" in image or ":" in Path(image).name


def _like(name: str, most: int) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:most].strip("-") or "NAME"
