"""Write Envoy's configuration for replicas, with the reason of each number.

Requests about one server (statistics, shared memory, repository) have no route; clients send them
to that server. Steps of pipelines have none over HTTP. Envoy does not read the messages of gRPC, so
that clients that nobody trusts go through the HTTP gateway, which makes its own requests.
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from triptych.base.errors import UserError
from triptych.base.explained import ExplainedValue, render_yaml
from triptych.container.manifests import find_pipelines

if TYPE_CHECKING:
    from triptych.deploy.options import DeployOptions

_TEMPLATES = Path(__file__).with_name("templates")
_HEAP_MIB, _HEAP_REQUESTS = 512, 64
_COLLECTOR = "collector"
_GATEWAY_PORT = 8011
"""Port of gRPC for the HTTP gateway alone, without TLS, if Envoy has TLS elsewhere."""
_AUTHORITIES = "/etc/ssl/certs/ca-certificates.crt"
"""Certificates of authorities in Envoy's image."""
_TLS = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3"
_BUCKETS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 30_000)


@dataclass(frozen=True)
class ProxySettings:
    """Numbers of Envoy's configuration, each with its reason; units are in the names.

    `affinity` is an optional header of streams that selects their replica.
    """

    max_request_mib: ExplainedValue
    retry_percent: ExplainedValue
    latency_buckets_ms: ExplainedValue
    max_heap_mib: ExplainedValue
    affinity: ExplainedValue | None = None
    retries: ExplainedValue = ExplainedValue(
        2,
        "two replicas may stop at the same time; a request that crashes its server crashes at most "
        "three servers",
    )
    min_concurrent_retries: ExplainedValue = ExplainedValue(
        32, "always allowed: a percentage of few requests would round to zero"
    )
    host_selection_attempts: ExplainedValue = ExplainedValue(
        64,
        "a retry must go to another replica, but a dead replica looks idle: with two replicas, "
        "3 of 4 selections choose the idle one",
    )
    min_backoff_s: ExplainedValue = ExplainedValue(
        0.025, "Envoy adds jitter, up to ten times this; meanwhile a full queue may empty"
    )
    connect_s: ExplainedValue = ExplainedValue(
        1, "replicas are in the same network: one that connects later is not available"
    )
    check_interval_s: ExplainedValue = ExplainedValue(
        1,
        "also without traffic, when Envoy would check once per minute and the first request would "
        "find a dead replica",
    )
    check_timeout_s: ExplainedValue = ExplainedValue(
        3, "same as the health check of the image: a server under load answers late"
    )
    check_failures: ExplainedValue = ExplainedValue(
        3, "a single late answer does not remove a replica"
    )
    check_passes: ExplainedValue = ExplainedValue(
        1, "a server reports ready only when all of its models are ready"
    )
    eject_after: ExplainedValue = ExplainedValue(
        2,
        "refused or broken connections in a row. Statuses do not count: UNAVAILABLE may be a full "
        "queue, and INTERNAL may be an error of the request, which every replica returns",
    )
    eject_s: ExplainedValue = ExplainedValue(
        5, "then the replica is tried again; a passed health check ends the ejection earlier"
    )
    eject_percent: ExplainedValue = ExplainedValue(
        50, "a network failure between proxy and replicas must not eject all replicas"
    )
    server_keepalive_s: ExplainedValue = ExplainedValue(
        1,
        "a frozen server does not answer this ping of HTTP/2. Then the connection is closed, and "
        "its requests are retried on another replica; a failed health check closes no connection "
        "with a request in flight",
    )
    server_keepalive_timeout_s: ExplainedValue = ExplainedValue(
        3, "same as the health check; Triton answers pings in threads that do no inference"
    )
    keepalive_s: ExplainedValue = ExplainedValue(
        60, "same as the servers: connections of clients that vanished are closed"
    )
    keepalive_timeout_s: ExplainedValue = ExplainedValue(20, "see the interval")
    headers_timeout_s: ExplainedValue = ExplainedValue(
        10, "clients send the headers of a request at once"
    )
    request_timeout_s: ExplainedValue = ExplainedValue(
        60,
        "time to receive a request, until it is complete or answered: the largest one of most "
        "pipelines takes 60 s at 1 Mbit/s. Without it, unfinished requests are held for ever",
    )
    idle_request_s: ExplainedValue = ExplainedValue(
        600,
        "a request on which nothing was sent or received for this time was abandoned. The deadline "
        "of the client is usually shorter",
    )
    idle_stream_s: ExplainedValue = ExplainedValue(
        3600, "clients keep streams open between their requests, and a stream of text may pause"
    )
    idle_connection_s: ExplainedValue = ExplainedValue(
        600, "a connection without a request for this time; clients connect again"
    )
    max_client_connections: ExplainedValue = ExplainedValue(
        10_000,
        "connections of clients; further ones are refused, since each takes memory and a "
        "descriptor",
    )
    shrink_heap_ratio: ExplainedValue = ExplainedValue(
        0.7, "of the heap's limit, from which free memory is returned to the system"
    )
    min_idle_s: ExplainedValue = ExplainedValue(
        5, "time without a byte, after which a request is ended when the heap is full"
    )
    reset_streams_ratio: ExplainedValue = ExplainedValue(
        0.85,
        "of the heap's limit, from which the requests over HTTP/2 that hold most memory are ended: "
        "clients that send large requests slowly would use up all memory",
    )
    reject_ratio: ExplainedValue = ExplainedValue(
        0.95, "of the heap's limit, from which new requests are rejected as unavailable"
    )
    max_concurrent: ExplainedValue = ExplainedValue(
        1_000_000,
        "requests, pending requests and connections: the pipelines limit requests by what they can "
        "process. Envoy's default of 1024 would reject requests earlier",
    )
    max_mirrored: ExplainedValue = ExplainedValue(
        16,
        "mirrored requests in flight; further requests are not mirrored. Envoy buffers each one "
        "until the candidate answers, so a slow candidate would fill its memory",
    )
    dns_refresh_s: ExplainedValue = ExplainedValue(
        5,
        "a new replica is found within this time; a replica that stops keeps serving for longer",
    )


def proxy_settings(
    *,
    replicas: int,
    max_request_mib: int,
    limits_ms: Iterable[float] = (),
    affinity: str | None = None,
    max_heap_mib: ExplainedValue | None = None,
) -> ProxySettings:
    """Return the settings in front of a number of replicas.

    Args:
        replicas: Minimum number of replicas behind the proxy.
        max_request_mib: Maximum request size of the pipelines in MiB (`largest_request_mib`).
        limits_ms: Latency limits of the SLO in milliseconds (`Slo.limits_ms`).
        affinity: Header of streams; streams with the same value go to the same replica.
        max_heap_mib: Maximum heap of Envoy in MiB; None for one by `max_request_mib`.
    """
    limits = sorted(set(limits_ms))
    slo_text = ", ".join(f"{limit:g}" for limit in limits)
    return ProxySettings(
        affinity=None
        if affinity is None
        else ExplainedValue(
            affinity,
            "streams with the same value share a prompt prefix, which one replica then caches. "
            "Streams without the header go to any replica",
        ),
        max_heap_mib=max_heap_mib
        or ExplainedValue(
            _HEAP_MIB + _HEAP_REQUESTS * max_request_mib,
            f"MiB: {_HEAP_MIB} for connections and short requests, and {_HEAP_REQUESTS} of the "
            "largest requests",
        ),
        max_request_mib=ExplainedValue(
            max_request_mib,
            "MiB, same as the limit of the servers: no pipeline accepts a larger request. Envoy "
            "buffers a request until it is answered, so that it can be retried",
        ),
        retry_percent=ExplainedValue(
            min(100, max(20, math.ceil(200 / max(1, replicas - 1)))),
            f"percent of the requests in flight may be retries: twice the load that one failed "
            f"replica of {replicas} leaves to each other, at least 20. The limit prevents retries "
            "from multiplying overload",
        ),
        latency_buckets_ms=ExplainedValue(
            sorted({*map(float, _BUCKETS_MS), *limits}),
            "upper bounds of the latency histograms in ms"
            + (f"; {slo_text} are limits of serving.slo" if limits else ""),
        ),
    )


class Service(NamedTuple):
    """A protocol of the replicas, with the cluster's name in Envoy's statistics."""

    cluster: str
    is_grpc: bool


GRPC = Service("triton_grpc", is_grpc=True)
HTTP = Service("triton_http", is_grpc=False)
CANDIDATES = {
    GRPC: Service("candidate_grpc", is_grpc=True),
    HTTP: Service("candidate_http", is_grpc=False),
}


@dataclass(frozen=True)
class EndpointNames:
    """DNS name of the replicas, such as a headless Service; each address is a replica."""

    host: str
    grpc_port: int
    http_port: int


@dataclass(frozen=True)
class Mirror:
    """Candidate that gets copies of some requests; its responses are discarded."""

    share: float  # Ratio of the requests for inference, 0 to 1
    candidate: EndpointNames  # Address of the candidate


class MirrorOption(NamedTuple):
    """Repository of a candidate, and its share of the requests, above 0 and at most 1."""

    repository: Path
    share: float


def parse_mirror(text: str) -> MirrorOption:
    """Return the repository and the share of an option ``REPOSITORY:SHARE``.

    Raises:
        UserError: The form is wrong, or a pipeline of the repository has no `serving.sample`.
    """
    from triptych.repository.manifest import CompiledManifest, read_manifest  # a third of `--help`

    folder, _, share_text = text.rpartition(":")
    try:
        share = float(share_text)
    except ValueError:
        share = 0.0
    if not folder or not 0 < share <= 1:
        raise UserError(
            "--mirror",
            "must be a repository and a share of the requests, above 0 and at most 1",
            given=text,
            remedy="Write for example --mirror candidate:0.05",
        )
    repository = Path(folder)
    names = [pipeline.name for pipeline in find_pipelines(repository)]
    for name in names:
        if read_manifest(repository, name, CompiledManifest).spec.serving.sample is None:
            raise UserError(
                "--mirror",
                "requires pipelines with serving.sample, because answers to mirrored requests are "
                "only kept as samples",
                given=f"{name} without serving.sample",
                remedy=f"Run `triptych build {name} --set serving.sample.rate=1 --repository "
                f"{folder}`",
            )
    if not names:
        raise UserError(
            "--mirror",
            "must be a repository with a pipeline",
            given=folder,
            remedy="Build the candidate with `triptych build NAME --repository CANDIDATE_FOLDER`",
        )
    return MirrorOption(repository, share)


@dataclass(frozen=True)
class Listen:
    """Address and ports of Envoy.

    The metrics port serves only ``/metrics`` and ``/ready`` of the admin page. The drain port, on
    loopback, serves the pages with which a script drains Envoy; None for no such port. The gateway
    port serves gRPC without TLS, for the HTTP gateway alone; None for no such port.
    """

    host: str
    grpc_port: int
    http_port: int
    metrics_port: int
    drain_port: int | None = None
    gateway_port: int | None = None


class Route(NamedTuple):
    """Kind of request, selected by Envoy's match of its path."""

    match: dict[str, object]
    is_inference: bool = False
    is_stream: bool = False


_GRPC_ROUTES = (
    Route({"path": "/inference.GRPCInferenceService/ModelStreamInfer"}, is_stream=True),
    Route({"path": "/inference.GRPCInferenceService/ModelInfer"}, is_inference=True),
    Route(
        {
            "safe_regex": {
                "regex": "/inference.GRPCInferenceService/(ServerLive|ServerReady|ServerMetadata|"
                "ModelReady|ModelMetadata|ModelConfig)"
            }
        }
    ),
    Route({"prefix": "/grpc.health.v1.Health/"}),
)


def _http_routes(pipelines: Sequence[str]) -> tuple[Route, ...]:
    """Return the routes for HTTP, whose paths have the name of a pipeline."""
    names = "|".join(map(re.escape, sorted(pipelines)))
    model = f"/v2/models/({names})(/versions/[0-9]+)?"
    return (
        Route({"safe_regex": {"regex": f"{model}/generate_stream"}}, is_stream=True),
        Route({"safe_regex": {"regex": f"{model}/(infer|generate)"}}, is_inference=True),
        Route({"safe_regex": {"regex": f"/v2(/health/(live|ready))?|{model}(/(ready|config))?"}}),
    )


ADMIN_SOCKET = "@triptych-envoy-admin"
"""Name of the socket of Envoy's admin page in a container, whose network is its own."""


def bootstrap(
    settings: ProxySettings,
    listen: Listen,
    endpoints: EndpointNames,
    pipelines: Sequence[str],
    mirror: Mirror | None = None,
    *,
    admin_socket: str = ADMIN_SOCKET,
    tls: EnvoyTls | None = None,
    collector: str | None = None,
) -> object:
    """Return the configuration, with the reasons of its numbers (see `base.explained`).

    Args:
        settings: Numbers of the configuration.
        listen: Address and ports of Envoy.
        endpoints: Replicas.
        pipelines: Names that requests over HTTP may address. Steps of pipelines are not among them.
        mirror: Candidate that gets copies of requests; None without one.
        admin_socket: Path of the Unix socket of Envoy's admin page.
        tls: Files of certificates; None for plain text.
        collector: URL of a collector of OpenTelemetry, which gets a span of each request whose
            caller samples its trace; None for none.
    """
    clusters = [_cluster(service, service.cluster, endpoints) for service in (GRPC, HTTP)]
    if mirror is not None:
        clusters += [
            {**_cluster(service, other.cluster, mirror.candidate), "is_candidate": True}
            for service, other in CANDIDATES.items()
        ]
    listeners = [
        {
            "listener": name,
            "name": "grpc" if service.is_grpc else "http",
            "address": {"socket_address": {"address": listen.host, "port_value": port}},
            "routes": _GRPC_ROUTES if service.is_grpc else _http_routes(pipelines),
            "cluster": service.cluster,
            "candidate": CANDIDATES[service].cluster,
            "is_grpc": service.is_grpc,
            "transport_socket": None
            if tls is None or name == "gateway"
            else tls.transport_socket(is_grpc=service.is_grpc),
        }
        for name, service, port in (
            ("grpc", GRPC, listen.grpc_port),
            ("http", HTTP, listen.http_port),
            ("gateway", GRPC, listen.gateway_port),
        )
        if port is not None
    ]
    return render_yaml(
        _TEMPLATES / "envoy.yaml.j2",
        s=settings,
        mirror=mirror,
        listeners=listeners,
        clusters=clusters,
        admin_pages=list(_admin_pages(listen)),
        admin_socket=admin_socket,
        collector=collector,
        collector_cluster=None if collector is None else _collector_cluster(collector),
    )


def _admin_pages(listen: Listen) -> Iterator[dict[str, object]]:
    """Yield the template's data of the listeners for pages of the admin interface."""
    pages = {"/metrics": "/stats/prometheus", "/ready": "/ready"}
    yield {"name": "metrics", "host": listen.host, "port": listen.metrics_port, "paths": pages}
    if listen.drain_port is not None:
        pages = {path: path for path in ("/ready", "/stats", "/healthcheck/fail")}
        yield {"name": "drain", "host": "127.0.0.1", "port": listen.drain_port, "paths": pages}


def _cluster(service: Service, name: str, endpoints: EndpointNames) -> dict[str, object]:
    """Return the template's data of a cluster of `endpoints`."""
    port = endpoints.grpc_port if service.is_grpc else endpoints.http_port
    return {
        "name": name,
        "is_grpc": service.is_grpc,
        "is_candidate": False,
        "assignment": assigned(name, [(endpoints.host, port)]),
    }


def assigned(cluster: str, addresses: Iterable[tuple[str, int]]) -> dict[str, object]:
    """Return the part of a configuration with the hosts and ports of a cluster."""
    hosts = [
        {"endpoint": {"address": {"socket_address": {"address": host, "port_value": port}}}}
        for host, port in addresses
    ]
    return {"cluster_name": cluster, "endpoints": [{"lb_endpoints": hosts}]}


def _collector_cluster(url: str) -> dict[str, object]:
    """Return the cluster of a collector of OpenTelemetry, by its URL."""
    parts = urlsplit(url)
    host, is_encrypted = str(parts.hostname), parts.scheme == "https"
    cluster: dict[str, object] = {
        "name": _COLLECTOR,
        "type": "STRICT_DNS",
        "connect_timeout": "5s",
        "load_assignment": assigned(
            _COLLECTOR, [(host, parts.port or (443 if is_encrypted else 80))]
        ),
    }
    if is_encrypted:
        is_address = _is_address(host)
        cluster["transport_socket"] = {
            "name": "envoy.transport_sockets.tls",
            "typed_config": {
                "@type": f"{_TLS}.UpstreamTlsContext",
                **({} if is_address else {"sni": host}),
                "common_tls_context": {
                    "validation_context": {
                        "trusted_ca": {"filename": _AUTHORITIES},
                        "match_typed_subject_alt_names": [
                            {
                                "san_type": "IP_ADDRESS" if is_address else "DNS",
                                "matcher": {"exact": host},
                            }
                        ],
                    }
                },
            },
        }
    return cluster


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class EnvoyTls:
    """Certificates of Envoy in mounted Secrets, which it reads again when they change."""

    folder: str  # Folder of Envoy's configuration, which has the files of `files`
    certificates: str  # Folder of ``tls.crt`` and ``tls.key``, which Kubernetes replaces together
    # Folder of ``ca.crt``, the authorities of client certificates, which are then required; None
    # without it.
    client_ca: str | None = None

    def transport_socket(self, *, is_grpc: bool) -> dict[str, object]:
        """Return the settings of encryption of a listener."""
        common: dict[str, object] = {
            "tls_params": {"tls_minimum_protocol_version": "TLSv1_2"},
            "alpn_protocols": ["h2" if is_grpc else "http/1.1"],
            "tls_certificate_sds_secret_configs": [self._secret("certificate")],
        }
        if self.client_ca is not None:
            common["validation_context_sds_secret_config"] = self._secret("clients")
        return {
            "name": "envoy.transport_sockets.tls",
            "typed_config": {
                "@type": f"{_TLS}.DownstreamTlsContext",
                "require_client_certificate": self.client_ca is not None,
                "common_tls_context": common,
            },
        }

    def files(self) -> dict[str, object]:
        """Return the files beside Envoy's configuration that name the certificates."""
        certificate = _watched(
            self.certificates, certificate_chain="tls.crt", private_key="tls.key"
        )
        found = {"certificate": {"tls_certificate": certificate}}
        if self.client_ca is not None:
            clients = _watched(self.client_ca, trusted_ca="ca.crt")
            found["clients"] = {"validation_context": clients}
        return {
            f"{name}.yaml": {"resources": [{"@type": f"{_TLS}.Secret", "name": name, **value}]}
            for name, value in found.items()
        }

    def _secret(self, name: str) -> dict[str, object]:
        source = {
            "path": f"{self.folder}/{name}.yaml",
            "watched_directory": {"path": self.folder},
        }
        config = {"resource_api_version": "V3", "path_config_source": source}
        return {"name": name, "sds_config": config}


def _watched(folder: str, **files: str) -> dict[str, object]:
    sources = {name: {"filename": f"{folder}/{file}"} for name, file in files.items()}
    return {**sources, "watched_directory": {"path": folder}}


class Mount(NamedTuple):
    """A Secret in the container of Envoy; for Compose `secret` is a folder."""

    name: str
    folder: str
    secret: str


def mounts(options: DeployOptions) -> list[Mount]:
    """Return the Secrets of Envoy."""
    found = []
    for option, secret in options.envoy_secrets.items():
        if secret is not None:
            if options.target == "compose":
                secret = os.fspath(Path(secret).resolve()).replace("$", "$$")
            name = option.removeprefix("--envoy-")
            found.append(Mount(name, f"/run/triptych/{name}", secret))
    return found


def find_tls(options: DeployOptions, folder: str) -> EnvoyTls | None:
    """Return the certificates of Envoy, whose configuration is in `folder`; None without them."""
    found = {mount.name: mount.folder for mount in mounts(options)}
    return EnvoyTls(folder, found["tls"], found.get("client-ca")) if found else None


def gateway_port(options: DeployOptions) -> int | None:
    """Return the port of Envoy for the HTTP gateway alone; None if there is none."""
    has_both = options.http_api_image is not None and options.envoy_tls is not None
    return _GATEWAY_PORT if has_both else None
