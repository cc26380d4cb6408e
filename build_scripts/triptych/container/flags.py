"""The flags that a production server is started with: one list for `serve` and for the image."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from triptych.base.releases import Release, flags_newer_than

# Header that opens the restricted services: as it is over HTTP, behind the prefix over gRPC.
RESTRICTED_HEADER = "triptych-key"
# Health, metadata, inference and model-config stay open: probes need the first, clients the others
# (a client reads the largest batch from the config). These are for operators.
SHARED_MEMORY = "shared-memory"
RESTRICTED = (
    SHARED_MEMORY,
    "model-repository",
    "statistics",
    "trace",
    "logging",
)
# Shut in the development profile, too: with them a client reads and writes the steps' own memory,
# has the requests of others logged, or loads code. Statistics are for `bench`.
CLOSED = tuple(service for service in RESTRICTED if service != "statistics")
ALLOW_CLIENT_SHM = "--allow-client-shm=true"
FREE_REQUESTS = "--grpc-infer-allocation-pool-size=0"
"""Flag of every server; without it the memory of the eight largest gRPC requests is never freed."""
KEEP_ALIVE = (
    # Notice clients that vanished, and keep idle connections open through NAT and balancers.
    "--grpc-keepalive-time=60000",
    "--grpc-keepalive-timeout=20000",
    "--grpc-keepalive-permit-without-calls=1",
    # With the default of 2 an idle connection is pinged twice and never again.
    "--grpc-http2-max-pings-without-data=0",
    # A client that pings more often loses its connection with all requests in flight as soon as
    # none of them gets an answer for four pings. Envoy pings every second (`deploy.envoy`).
    "--grpc-http2-min-recv-ping-interval-without-data=500",
)
"""Flags of every server: pings of gRPC in both directions."""
RATE_LIMIT = "--rate-limit=execution_count"
USE_TLS = "--grpc-use-ssl=1"
CACHE_MIB = 256
"""Default size of the response cache, for all pipelines of a server that have one."""
_MIB = 2**20


class Trace(NamedTuple):
    """Target of traces, an ``http[s]://`` collector or a file, and the requests per trace."""

    target: str
    rate: int

    @property
    def collector(self) -> str | None:
        """URL of the collector; None for a file."""
        return None if self.target.startswith("/") else self.target


class GrpcTls(NamedTuple):
    """PEM files of the server's certificate, its key and, if clients need one, their authority."""

    certificate: str
    key: str
    client_authority: str | None = None


@dataclass(frozen=True)
class ServerFlags:
    """Settings of the operator (docker/server.md) and of the repository, as flags of the server.

    Sizes are in MiB; None leaves Triton's default. Each of the `gpus` gets a CUDA pool. Clients
    that send `restricted_key` may use the restricted services; a random key closes them. `cache` is
    the name of a cache and its settings, in place of Triton's local one of `cache_mib`.
    """

    restricted_key: str
    gpus: tuple[int, ...] = ()
    pinned_pool_mib: int | None = None
    cuda_pool_mib: int | None = None
    grpc_threads: int = 4
    max_request_mib: int | None = None
    connection_age_s: int = 1800
    exit_timeout_s: int = 30
    client_shm: bool = False
    cache_mib: int | None = None
    cache: tuple[str, ...] = ()
    load_threads: int | None = None
    step_shm_mib: int | None = None
    step_shm_growth_mib: int | None = None
    core_threads: int | None = None
    grpc_tls: GrpcTls | None = None
    forward_headers: str | None = None
    rate_limit: bool = False
    version_compatible: bool = False
    trace: Trace | None = None


def production_flags(release: Release, options: ServerFlags) -> list[str]:
    """Return the flags that the release of the server supports."""
    return [flag for flag in _flags(options) if not flags_newer_than([flag], release)]


def restricted_flags(services: Sequence[str], key: str) -> Iterator[str]:
    """Yield flags that close services to clients without the key; see `conceal_keys`."""
    rule = f"{','.join(services)}:{RESTRICTED_HEADER}={key}"
    yield f"--grpc-restricted-protocol={rule}"
    yield f"--http-restricted-api={rule}"


def uses_rate_limiter(repository: Path) -> bool:
    """Whether a model's config asks for the rate limiter, which Triton ignores by default."""
    return any(mentions(model, "rate_limiter") for model in repository.glob("*"))


def cache_flags(
    repository: Path, size_mib: int | None = None, cache: Sequence[str] = ()
) -> list[str]:
    """Return the flags of the response cache, without which Triton ignores `response_cache`.

    Only for servers that never reload: the key of a cached response has the version of a model, but
    not its build.
    """
    if not any(mentions(model, RESPONSE_CACHE) for model in repository.glob("*")):
        return []
    if cache:
        name, *settings = cache
        return [f"--cache-config={name},{setting}" for setting in settings]
    return [f"--cache-config=local,size={(size_mib or CACHE_MIB) * _MIB}"]


_PATH = re.compile(
    r"--(?:[\w-]+-(?:repository|store|directory|file|cert|key)|trace-config=\w+,file)"
)


def absolute_paths(flags: Sequence[str]) -> list[str]:
    """Return flags of the operator for a server with another working directory."""
    made: list[str] = []
    for flag in flags:
        name, equals, value = flag.rpartition("=")
        named = name if equals else made[-1] if made else ""
        if _PATH.fullmatch(named) and "://" not in value:  # a repository may be in an object store
            flag = f"{name}{equals}{Path(value).absolute()}"
        made.append(flag)
    return made


RESPONSE_CACHE = "response_cache"
"""Field of a config that enables the cache."""


def mentions(model: Path, field: str) -> bool:
    """Return whether the config in the folder of a model has a field of this name."""
    config = model / "config.pbtxt"
    return config.is_file() and field in config.read_text(encoding="utf-8", errors="replace")


def _flags(options: ServerFlags) -> Iterator[str]:
    # Loading models on request would run code of any user who can write to the repository.
    yield "--model-control-mode=none"
    # A half-loaded server must not look like a started one.
    yield "--exit-on-error=true"
    yield "--strict-readiness=true"
    # The configs are complete: what is served is what was linted, not what a backend guesses.
    yield "--disable-auto-complete-config"
    # Answer what is in flight, then go; the orchestrator's own limit must be longer.
    yield f"--exit-timeout-secs={options.exit_timeout_s}"
    if options.rate_limit:
        yield RATE_LIMIT
    if options.version_compatible:
        # Such plans contain host code, which the backend rejects without this flag.
        yield "--backend-config=tensorrt,version-compatible=true"
    yield from restricted_flags(RESTRICTED, options.restricted_key)
    yield from _resource_flags(options)
    yield from _tls_flags(options.grpc_tls)
    if options.forward_headers is not None:
        yield f"--grpc-header-forward-pattern={options.forward_headers}"
        yield f"--http-header-forward-pattern={options.forward_headers}"
    # Before a step gets it, and its shared memory grows for good. gRPC has no such flag.
    if options.max_request_mib is not None:
        yield f"--http-max-input-size={options.max_request_mib * _MIB}"
    yield FREE_REQUESTS
    if options.client_shm:
        yield ALLOW_CLIENT_SHM
    yield from KEEP_ALIVE
    # A connection stays on one replica, so clients must reconnect to find a new replica. Without
    # a grace period, Triton's default, a connection ends after the last of its requests.
    yield f"--grpc-max-connection-age={options.connection_age_s * 1000}"
    # Two threads, the default, take in all requests: too few for many short ones.
    yield f"--grpc-infer-thread-count={options.grpc_threads}"
    # One response a request: without a bound a slow reader makes the server hold all of them.
    yield "--grpc-max-response-pool-size=16"
    if options.pinned_pool_mib is not None:
        yield f"--pinned-memory-pool-byte-size={options.pinned_pool_mib * _MIB}"
    if options.cuda_pool_mib is not None:
        for gpu in options.gpus:
            yield f"--cuda-memory-pool-byte-size={gpu}:{options.cuda_pool_mib * _MIB}"
    yield from _observation(options.trace)


def _resource_flags(options: ServerFlags) -> Iterator[str]:
    if options.load_threads is not None:
        yield f"--model-load-thread-count={options.load_threads}"
    if options.step_shm_mib is not None:
        size = options.step_shm_mib * _MIB
        yield f"--backend-config=python,shm-default-byte-size={size}"
    if options.step_shm_growth_mib is not None:
        size = options.step_shm_growth_mib * _MIB
        yield f"--backend-config=python,shm-growth-byte-size={size}"
    if options.core_threads is not None:
        # One pool for all sessions of ONNX Runtime; `core.threads` of a pipeline is then ignored.
        yield "--backend-config=onnxruntime,enable-global-threadpool=1"
        yield f"--backend-config=onnxruntime,intra_op_thread_count={options.core_threads}"
        yield "--backend-config=onnxruntime,inter_op_thread_count=1"


def _tls_flags(tls: GrpcTls | None) -> Iterator[str]:
    if tls is None:
        return
    yield USE_TLS
    yield f"--grpc-server-cert={tls.certificate}"
    yield f"--grpc-server-key={tls.key}"
    if tls.client_authority is not None:
        yield "--grpc-use-ssl-mutual=1"
        yield f"--grpc-root-cert={tls.client_authority}"


def _observation(trace: Trace | None) -> Iterator[str]:
    # Percentiles by model and step; counters alone give means.
    yield "--metrics-config=summary_latencies=true"
    # Unlike summaries, histograms can be added up over replicas.
    yield "--metrics-config=histogram_latencies=true"
    if trace is None:
        # Traces may hold what users sent.
        yield "--trace-config=level=OFF"
        return
    yield "--trace-config=level=TIMESTAMPS"
    yield f"--trace-config=rate={trace.rate}"
    if trace.target.startswith(("http://", "https://")):
        yield "--trace-config=mode=opentelemetry"
        yield f"--trace-config=opentelemetry,url={trace.target}"
    else:
        yield "--trace-config=mode=triton"
        yield f"--trace-config=triton,file={trace.target}"
        # Else everything is written when the server exits, and held until then.
        yield "--trace-config=triton,log-frequency=100"
