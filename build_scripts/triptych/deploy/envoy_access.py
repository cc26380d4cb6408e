"""Certificates and API keys of Envoy in manifests, from Secrets that are mounted as folders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from triptych.deploy.options import DeployOptions
from triptych.serving.fleet.access import AccessFiles, mounted_secrets

GATEWAY_PORT = 8011
"""Port of Envoy for the gateway alone, without TLS and keys, if Envoy has them elsewhere."""


class Mount(NamedTuple):
    """A Secret in the container of Envoy; for Compose `secret` is a folder."""

    name: str
    folder: str
    secret: str


def mounts(options: DeployOptions) -> Iterator[Mount]:
    """Yield the Secrets of Envoy."""
    for name, secret in options.envoy_secrets.items():
        if secret is not None:
            if options.target == "compose":
                secret = os.fspath(Path(secret).resolve()).replace("$", "$$")
            name = name.removeprefix("--envoy-")
            yield Mount(name, f"/run/triptych/{name}", secret)


def access_files(options: DeployOptions, folder: str) -> AccessFiles | None:
    """Return the files of Envoy's configuration, whose `folder` has those of `secret_files`."""
    if not any(options.envoy_secrets.values()):
        return None
    found = {mount.name: Path(mount.folder) for mount in mounts(options)}
    return AccessFiles(
        Path(folder),
        keys_folder=found.get("keys"),
        has_tls="tls" in found,
        has_client_ca="client-ca" in found,
        has_keys="keys" in found,
    )


def secret_files(options: DeployOptions) -> dict[str, Any]:
    """Return the files beside Envoy's configuration that name the certificates."""
    found = {mount.name: mount.folder for mount in mounts(options)}
    if "tls" not in found:
        return {}
    secrets = mounted_secrets(found["tls"], found.get("client-ca"))
    return {f"{name}.yaml": data for name, data in secrets.items()}


def gateway_port(options: DeployOptions) -> int | None:
    """Return the port of Envoy for the gateway alone; None if there is none."""
    has_both = options.http_api_image is not None and any(options.envoy_secrets.values())
    return GATEWAY_PORT if has_both else None
