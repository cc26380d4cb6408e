"""`triptych deploy --target compose`: replicas behind Envoy on one host with Docker."""

from __future__ import annotations

import os
from pathlib import Path

from triptych.base.explained import ExplainedValue, render_files
from triptych.deploy.context import DeploymentContext, Manifests
from triptych.deploy.kubernetes import (
    TEMPLATES,
    drain_script,
    envoy_files,
    ready_script,
    template_values,
)

SERVERS = "triton"
"""Service of the servers, and the host name behind which Docker's DNS has all replicas."""
_FILE = "compose.yaml"


def make_files(c: DeploymentContext) -> Manifests:
    """Return the files of the target."""
    replicas = _count_replicas(c)
    servers: dict[str, list[str]] = {SERVERS: []}
    if c.gpus:
        # One service for each replica, since each has GPUs of its own.
        servers = {
            f"{SERVERS}-{number}": [str(number * c.gpus + index) for index in range(c.gpus)]
            for number in range(replicas.value)
        }
    values = template_values(c)
    memory = c.sizes.memory_mib
    proxy = {
        "drain": _escape(drain_script(1, int(c.sizes.exit_timeout_s.value))),
        "ready": _escape(ready_script()),
    }
    environment = {
        name: ExplainedValue(_escape(each.value), each.reason)
        for name, each in c.environment.items()
    }
    values |= {
        "environment": environment,
        "servers": servers,
        "replicas": replicas,
        "folder": f"${{TRIPTYCH_REPOSITORY:-{_escape(os.fspath(c.repository.resolve()))}}}",
        "memory_mib": ExplainedValue(memory.value.removesuffix("Mi"), memory.reason),
        "proxy": {**values["proxy"], **proxy},
        "http_api_tls": _escape(os.fspath(Path(c.options.http_api_tls or "").resolve())),
    }
    files = render_files(TEMPLATES / "compose.yaml.j2", **values)
    files |= envoy_files(c, SERVERS)
    return Manifests(files, c.version, _FILE, "docker compose --file {} up --detach")


def _count_replicas(c: DeploymentContext) -> ExplainedValue:
    given, least = c.options.replicas, c.sizes.min_replicas
    count = least.value if given is None else given
    why = least.reason if given is None else "given by the user (--replicas)"
    return ExplainedValue(
        count,
        f"{why}. All on one host: {c.cores.reason} each keeps {c.cores.value:.2g} cores busy, "
        f"{count * c.cores.value:.2g} in all, and has no limit of them: containers share equally",
    )


def _escape(text: str) -> str:
    """Return a text with dollar signs escaped, because Compose expands variables."""
    return text.replace("$", "$$")
