"""Options of a deployment. All other numbers follow from the build and its measurements."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple
from urllib.parse import urlsplit

import typer

from triptych.base.errors import UserError
from triptych.base.explained import ExplainedValue
from triptych.base.releases import (
    OLDEST,
    TRITON_VERSIONS,
    Release,
    parse_release,
    releases_with,
)
from triptych.deploy.envoy import MirrorOption, parse_mirror
from triptych.deploy.variables import OPTION, read_variables

if TYPE_CHECKING:
    from triptych.spec.any_spec import AnySpec

TARGETS = ("kubernetes", "kserve", "compose", "ray")
"""Names of the targets. The module of this name in `deploy` has a function `make_files`."""
ROLLOUTS = ("argo",)
ENVOY_IMAGE = "envoyproxy/envoy:v1.40.0"
WATCH_EVERY = "1h"
"""Interval between two runs of the monitor."""
MAX_NAME_CHARACTERS = 54
"""Maximum length of a name, because the label ``keda-hpa-NAME`` is limited to 63 characters."""
RAY_CHARACTERS = 47
"""Maximum length of the name of a RayJob."""

_RELEASE_TAG = re.compile(r":(\d\d)\.(0[1-9]|1[0-2])\b")
_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_GATEWAY = re.compile(r"([a-z0-9-]{1,63}/)?[a-z0-9][a-z0-9.-]{0,252}")
_SECRET = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_REFERENCE = re.compile(r"[a-z0-9][\w.:/-]*?(:[\w][\w.-]*)?(@sha256:[0-9a-f]{64})?")


def parse_mebibytes(text: str) -> int:
    """Return the MiB of a size such as ``2Gi`` or ``1500Mi``.

    Raises:
        UserError: The text has another form.
    """
    found = re.fullmatch(r"(\d{1,9})(Mi|Gi)", text)
    if not found:
        raise UserError(
            "--memory", "must be a size, as 1500Mi or 2Gi", given=text, remedy="Correct the value"
        )
    return int(found[1]) * {"Mi": 1, "Gi": 1024}[found[2]]


@dataclass(frozen=True, kw_only=True)
class DeployOptions:
    """Options of a deployment, on the command line and in ``deploy.yaml`` beside pipeline.yaml."""

    image: Annotated[
        str,
        typer.Option(
            metavar="IMAGE",
            help="Serving image, with a tag or a digest. Default: triptych-serve:RELEASE, "
            "as built by `make image` in a clone of Triptych.",
        ),
    ] = ""
    target: Annotated[
        str, typer.Option(help=f"Platform of the manifests: {', '.join(TARGETS)}.")
    ] = TARGETS[0]
    repository_image: Annotated[
        str | None,
        typer.Option(
            metavar="IMAGE",
            help="Image that contains the model repository, without a tag, which is the hash of "
            "the build manifest. Default: a PersistentVolumeClaim.",
        ),
    ] = None
    name: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Name of the Kubernetes objects. Default: the pipeline's name."
        ),
    ] = ""
    namespace: Annotated[str, typer.Option(help="Namespace of the Kubernetes objects.")] = "default"
    prometheus: Annotated[
        str, typer.Option(metavar="URL", help="Address at which KEDA reaches Prometheus.")
    ] = "http://prometheus-operated.monitoring.svc:9090"
    triton: Annotated[
        str,
        typer.Option(
            metavar="YY.MM",
            help="Triton release in the image. Default: that of the image's tag, or serving.triton "
            "for an image with another tag; without --image, the newest release that can load the "
            "build.",
        ),
    ] = ""
    rps_per_replica: Annotated[
        float | None,
        typer.Option(help="Requests/s that one replica sustains. Default: as measured by bench."),
    ] = None
    cpu_cores: Annotated[
        float | None,
        typer.Option(
            "--cpu", help="Number of CPU cores per replica. Default: as measured by bench."
        ),
    ] = None
    memory_mib: Annotated[
        int | None,
        typer.Option(
            "--memory",
            parser=parse_mebibytes,
            metavar="SIZE",
            help="Memory per replica, such as 1500Mi or 2Gi. Default: as measured by bench.",
        ),
    ] = None
    startup_seconds: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Seconds from scaling up until a new replica serves requests. "
            "Default: the measured load time of the models.",
        ),
    ] = None
    max_growth: Annotated[
        float,
        typer.Option(
            help="Maximum growth of the request rate within a minute: 0.5 for half as much again."
        ),
    ] = 0.5
    peak_rps: Annotated[
        float | None,
        typer.Option(
            help="Maximum load in requests/s. Default: the load of 4 times the minimum replicas."
        ),
    ] = None
    max_grace_seconds: Annotated[
        int | None,
        typer.Option(
            metavar="SECONDS",
            help="Maximum termination grace period that the platform allows, in seconds. "
            "Default: no maximum.",
        ),
    ] = None
    gpu_product: Annotated[
        str | None,
        typer.Option(
            metavar="PRODUCT",
            help="GPU product in the labels of the nodes. Default: the engine's GPU.",
        ),
    ] = None
    run_as_user: Annotated[
        str,
        typer.Option(
            metavar="none",
            help="User of the containers: `none` leaves it to the cluster, as OpenShift requires. "
            "Default: 1000, and 101 for Envoy.",
        ),
    ] = ""
    envoy_image: Annotated[str, typer.Option(metavar="IMAGE", help="Image of the Envoy proxy.")] = (
        ENVOY_IMAGE
    )
    gateway: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Gateway of the cluster that routes to the servers. Default: an Envoy Deployment.",
        ),
    ] = None
    rollout: Annotated[
        str | None,
        typer.Option(
            help=f"Controller of gradual rollouts: {', '.join(ROLLOUTS)}. Default: a rolling "
            "update of the Deployment."
        ),
    ] = None
    affinity_header: Annotated[
        str | None,
        typer.Option(
            metavar="HEADER",
            help="Header whose equal values select the same replica, for text generation. "
            "Default: none.",
        ),
    ] = None
    canary_percent: Annotated[
        int | None,
        typer.Option(
            metavar="PERCENT",
            help="Percentage of requests for a new build (kserve). Default: no canary.",
        ),
    ] = None
    replicas: Annotated[
        int | None,
        typer.Option(
            help="Number of replicas on a host (compose), or of nodes (ray). Default: enough for "
            "the SLO's throughput, or one node."
        ),
    ] = None
    monitor_image: Annotated[
        str | None,
        typer.Option(
            metavar="IMAGE",
            help="Image that runs `triptych monitor` on sampled rows. Default: no monitoring.",
        ),
    ] = None
    http_api_image: Annotated[
        str | None,
        typer.Option(
            metavar="IMAGE",
            help="Image that runs `triptych gateway`, such as triptych-build:RELEASE. "
            "Default: no HTTP APIs.",
        ),
    ] = None
    http_api_tls: Annotated[
        str | None,
        typer.Option(
            metavar="SECRET",
            help="Secret with the certificate of the HTTP APIs, tls.crt and tls.key; with "
            "--target compose their folder. Default: no encryption.",
        ),
    ] = None
    envoy_tls: Annotated[
        str | None,
        typer.Option(
            metavar="SECRET",
            help="Secret with the certificate of Envoy, tls.crt and tls.key; with --target compose "
            "their folder. Default: no encryption.",
        ),
    ] = None
    envoy_client_ca: Annotated[
        str | None,
        typer.Option(
            metavar="SECRET",
            help="Secret with ca.crt, the authorities of the client certificates that Envoy then "
            "requires; with --target compose its folder. Default: none.",
        ),
    ] = None
    mirrored: Annotated[
        MirrorOption | None,
        typer.Option(
            "--mirror",
            parser=parse_mirror,
            metavar="REPOSITORY:SHARE",
            help="Candidate build that gets copies of a share (0 to 1) of the requests. "
            "Default: no candidate.",
        ),
    ] = None
    corpus: Annotated[
        str | None,
        typer.Option(
            metavar="URI",
            help="Files to infer, such as 's3://bucket/part-*.parquet' (ray). Default: none.",
        ),
    ] = None
    results: Annotated[
        str | None,
        typer.Option(metavar="URI", help="Folder of the results (ray). Default: none."),
    ] = None
    variables: Annotated[
        list[str] | None,
        typer.Option(
            OPTION,
            metavar="NAME=VALUE",
            help="Variable of the server, such as TRIPTYCH_CORE_THREADS=8; can be repeated. "
            "Default: none.",
        ),
    ] = None
    baseline: Annotated[
        Path | None,
        typer.Option(
            metavar="REPOSITORY",
            help="Repository of the active build that `shadow` compares a canary with. "
            "Default: no comparison.",
        ),
    ] = None

    @property
    def release(self) -> Release:
        """Triton release in the image."""
        return parse_release(self.triton)

    @property
    def server_variables(self) -> dict[str, str]:
        """Variables of the server that the user gives, by name."""
        return read_variables(self.variables)

    @property
    def environment(self) -> dict[str, ExplainedValue]:
        """Variables of the server that the user gives, as values of a manifest."""
        reason = f"given by the user ({OPTION})"
        return {
            name: ExplainedValue(value, reason) for name, value in self.server_variables.items()
        }

    @property
    def envoy(self) -> str | None:
        """Name of Envoy's Deployment; None without Envoy."""
        has_own = self.target == "kubernetes" and self.gateway is None
        return f"{self.name}-envoy" if has_own else None

    @property
    def envoy_secrets(self) -> dict[str, str | None]:
        """Secrets of Envoy by option."""
        return {"--envoy-tls": self.envoy_tls, "--envoy-client-ca": self.envoy_client_ca}

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
    given: object
    remedy: str


def release_of_image(image: str) -> Release | None:
    """Return the Triton release that is the tag of an image; None if the tag is no release."""
    found = _RELEASE_TAG.search(image)
    release = Release(int(found[1]), int(found[2])) if found else OLDEST
    return release if found and release >= OLDEST else None


def complete_options(
    options: DeployOptions, spec: AnySpec, tensorrt: str | None = None
) -> DeployOptions:
    """Return the options with the defaults that follow from the build.

    Args:
        options: Options of the user.
        spec: Spec of the build.
        tensorrt: Version of TensorRT that the build's engine needs; None without an engine.

    Raises:
        UserError: No cluster could accept an option.
    """
    triton = options.triton or _choose_release(options.image, spec.serving.triton, tensorrt)
    options = replace(
        options,
        image=options.image or f"triptych-{'ray' if options.target == 'ray' else 'serve'}:{triton}",
        name=options.name or spec.name,
        triton=triton,
    )
    parse_release(triton)
    read_variables(options.variables)
    for option, is_met, rule, given, remedy in _rules(options):
        if not is_met:
            raise UserError(option, rule, given=given, remedy=remedy)
    return options


def _choose_release(image: str, oldest: str, tensorrt: str | None) -> str:
    """Return the release of the image, or the newest one that can load the build without one.

    Every known defect is in all releases before its fix, so that the newest release has the fewest.
    """
    if image:
        return str(release_of_image(image) or oldest)
    usable = TRITON_VERSIONS if tensorrt is None else releases_with(tensorrt)
    return str(max([parse_release(oldest), *usable]))


def _rules(o: DeployOptions) -> list[_Rule]:
    return [
        _Rule(
            "--target",
            o.target in TARGETS,
            f"must be one of {', '.join(TARGETS)}",
            o.target,
            f"Use --target {TARGETS[0]}",
        ),
        _name("--name", o.name, RAY_CHARACTERS if o.target == "ray" else MAX_NAME_CHARACTERS),
        _name("--namespace", o.namespace, 63),
        *_image("--image", o.image, "Push the serving image, and name it with its tag"),
        *_image("--envoy-image", o.envoy_image, f"The usual one is {ENVOY_IMAGE}"),
        *_image(
            "--monitor-image",
            o.monitor_image,
            "It has Triptych with the extra local, and the tritonserver",
        ),
        *_image(
            "--http-api-image",
            o.http_api_image,
            "It is triptych-build, as built by `make image` in a clone of Triptych",
        ),
        _Rule(
            "--http-api-image",
            o.http_api_image is None or (o.gateway is None and o.canary_percent is None),
            "is not supported with --gateway or --canary-percent: its requests would not be split "
            "between builds",
            o.gateway or f"--canary-percent {o.canary_percent}",
            "Leave one of them out",
        ),
        _Rule(
            "--http-api-tls",
            o.http_api_tls is None or o.http_api_image is not None,
            "needs --http-api-image",
            o.http_api_tls,
            "Add the option, or leave --http-api-tls out",
        ),
        _Rule(
            "--envoy-client-ca",
            o.envoy_client_ca is None or o.envoy_tls is not None,
            "needs --envoy-tls",
            o.envoy_client_ca,
            "Add the option, or leave --envoy-client-ca out",
        ),
        *(
            _Rule(
                option,
                value is None or o.target == "compose" or bool(_SECRET.fullmatch(value)),
                "must be the name of a Secret",
                value,
                "See `kubectl get secrets`",
            )
            for option, value in (("--http-api-tls", o.http_api_tls), *o.envoy_secrets.items())
        ),
        *(
            _Rule(
                option,
                value is None or (o.target not in ("kserve", "ray") and o.gateway is None),
                "is only supported for an Envoy of its own",
                o.gateway or f"--target {o.target}",
                "Let the gateway of the cluster authenticate clients",
            )
            for option, value in o.envoy_secrets.items()
        ),
        *(
            _Rule(
                option,
                value is None or o.target in target.split(" or "),
                f"is only supported with --target {target}",
                f"--target {o.target}",
                "Leave it out",
            )
            for option, value, target in (
                ("--gateway", o.gateway, "kubernetes"),
                ("--rollout", o.rollout, "kubernetes"),
                ("--canary-percent", o.canary_percent, "kserve"),
                ("--replicas", o.replicas, "compose or ray"),
                ("--corpus", o.corpus, "ray"),
                ("--results", o.results, "ray"),
                ("--monitor-image", o.monitor_image, "kubernetes or kserve or compose"),
                ("--http-api-image", o.http_api_image, "kubernetes or kserve or compose"),
                ("--mirror", o.mirrored, "kubernetes"),
            )
        ),
        *(
            _Rule(
                option,
                o.target != "ray" or (value is not None and "@" not in value),
                "must be an address without credentials, which come from the pods' role",
                value and value.rpartition("@")[2],
                f"Write for example {option} s3://bucket/folder",
            )
            for option, value in (("--corpus", o.corpus), ("--results", o.results))
        ),
        _Rule(
            "--run-as-user",
            o.run_as_user in ("", "none") and not (o.run_as_user and o.target == "compose"),
            "must be none, with --target kubernetes, kserve or ray",
            f"{o.run_as_user}, --target {o.target}",
            "Leave it out: the images run as user 1000, and Envoy as 101",
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
            "must be the name of an image without a tag, which is the hash of the build manifest",
            o.repository_image,
            "Leave the tag out; its Dockerfile is `FROM scratch` and `COPY model_repository/ /`",
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
