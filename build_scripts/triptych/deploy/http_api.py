"""Values of the HTTP gateway in manifests (``--http-api-image``)."""

from __future__ import annotations

from triptych.base.explained import ExplainedValue
from triptych.deploy.context import DeploymentContext
from triptych.deploy.numbers import PRE_STOP_S
from triptych.gateway import GRACE_S, MAX_BODY_MIB, PORT

_KEYS, _TLS = "/run/triptych/keys", "/run/triptych/tls"
_BASE_MIB, _BODIES, _COPIES = 256, 8, 4
_MARGIN_S = 5
_FILES = (
    *("deployment", "scaler", "service", "replicas", "disruption-budget", "network-policy"),
    *("pod-monitor", "rule"),
)


def http_api_values(c: DeploymentContext, repository: str, grpc_port: int) -> dict[str, object]:
    """Return the values of the gateway in the templates of all targets.

    Args:
        c: Deployment context.
        repository: Folder of the repository in a container.
        grpc_port: Port of gRPC of proxy and servers.
    """
    options = c.options
    host = {
        "kubernetes": options.name,
        "kserve": f"dns:///{options.name}-replicas",
        "compose": "envoy",
        "ray": "",
    }[options.target]
    tls = ["--tls-certificate", f"{_TLS}/tls.crt", "--tls-key", f"{_TLS}/tls.key"]
    return {
        "port": PORT,
        "keys_folder": _KEYS,
        "tls_folder": _TLS,
        "files": [f"http-api-{name}.yaml" for name in _FILES],
        "command": [
            *("python3", "-m", "triptych.interface.cli", "gateway", c.pipeline),
            *("--url", f"{host}:{grpc_port}"),
            *("--repository", repository),
            *("--host", "0.0.0.0", "--port", str(PORT)),
            *("--max-body-mib", str(MAX_BODY_MIB)),
            *("--keys", f"{_KEYS}/keys.yaml"),
            *(tls if options.http_api_tls is not None else ()),
            "--access-log",
        ],
        "env": {
            "HOME": "/tmp",
            **{
                name: value
                for name, value in options.server_variables.items()
                if name.startswith("TRIPTYCH_TRACE")
            },
        },
        "health": ["python3", "-c", health_script(PORT, has_tls=options.http_api_tls is not None)],
        "pre_stop": ExplainedValue(
            ["sleep", str(PRE_STOP_S)],
            "before SIGTERM, so that endpoints and balancers no longer use this pod",
        ),
        "exit_s": ExplainedValue(
            GRACE_S + _MARGIN_S,
            f"{GRACE_S} s in which requests in flight are answered, and {_MARGIN_S} s to end",
        ),
        "grace_s": ExplainedValue(
            PRE_STOP_S + GRACE_S + _MARGIN_S,
            f"{PRE_STOP_S} s of preStop, {GRACE_S} s in which requests in flight are "
            f"answered, and {_MARGIN_S} s to end",
        ),
        "memory_mib": ExplainedValue(
            _BASE_MIB + _BODIES * MAX_BODY_MIB * _COPIES,
            f"{_BASE_MIB} MiB, of which its modules take 90 and the rest is for a tokenizer; and "
            f"{_BODIES} requests of {MAX_BODY_MIB} MiB (--max-body-mib) in {_COPIES} forms: bytes, "
            "JSON, tensors and the response. Not measured under load: observe it",
        ),
    }


def health_script(port: int, *, has_tls: bool) -> str:
    """Return a Python script that fails if `/health` on a port of this container does."""
    scheme, more = "http", ""
    if has_tls:
        # On loopback, and the certificate is of another name.
        scheme, more = "https", ", context=ssl._create_unverified_context()"
    url = f"{scheme}://127.0.0.1:{port}/health"
    return f"import ssl, urllib.request; urllib.request.urlopen('{url}'{more})"
