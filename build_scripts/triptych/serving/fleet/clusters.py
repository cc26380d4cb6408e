"""Clusters of Envoy: replicas, and services elsewhere such as a collector of traces."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

_AUTHORITIES = "/etc/ssl/certs/ca-certificates.crt"
"""Certificates of authorities in Envoy's image, and on Debian and Ubuntu."""
_TLS = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext"


def assigned(cluster: str, addresses: Iterable[tuple[str, int]]) -> dict[str, Any]:
    """Return the part of a configuration with the hosts and ports of a cluster."""
    hosts = [
        {"endpoint": {"address": {"socket_address": {"address": host, "port_value": port}}}}
        for host, port in addresses
    ]
    return {"cluster_name": cluster, "endpoints": [{"lb_endpoints": hosts}]}


def service_at(name: str, url: str) -> dict[str, Any]:
    """Return the cluster `name` of a service elsewhere, by the URL of a page of it.

    Its certificate is checked with the authorities of `SSL_CERT_FILE`, or those of the system.
    """
    parts = urlsplit(url)
    host, is_encrypted = str(parts.hostname), parts.scheme == "https"
    cluster: dict[str, Any] = {
        "name": name,
        "type": "STRICT_DNS",
        "connect_timeout": "5s",
        "load_assignment": assigned(name, [(host, parts.port or (443 if is_encrypted else 80))]),
    }
    if is_encrypted:
        authorities = os.environ.get("SSL_CERT_FILE", _AUTHORITIES)
        is_address = _is_address(host)
        cluster["transport_socket"] = {
            "name": "envoy.transport_sockets.tls",
            "typed_config": {
                "@type": _TLS,
                **({} if is_address else {"sni": host}),
                "common_tls_context": {
                    "validation_context": {
                        "trusted_ca": {"filename": authorities},
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
