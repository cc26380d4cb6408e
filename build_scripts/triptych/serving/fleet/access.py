"""Access to Envoy: certificates, API keys and their limits, replaced while Envoy runs.

Envoy's own filter for API keys needs them in plain text, so a script compares their hashes. Envoy's
own filter limits the rates. Envoy reads both, and the certificate, again when the files change.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych.base.api_keys import KeyEntry, KeyFile, file_stamps, read_keys
from triptych.base.files import write_files
from triptych.base.server_tls import ServerTls

_SCRIPT = Path(__file__).with_name("templates") / "keys.lua"
_EXTENSIONS = "type.googleapis.com/envoy.extensions"
_LUA = f"{_EXTENSIONS}.filters.http.lua.v3.Lua"
_LIMIT = f"{_EXTENSIONS}.filters.http.local_ratelimit.v3.LocalRateLimit"
_KINDS = {"keys": _LUA, "requests": _LIMIT, "items": _LIMIT}
_TLS = f"{_EXTENSIONS}.transport_sockets.tls.v3"
_RATE_S = 1000
"""Time in seconds by which a rate is written as a whole number."""
_ALWAYS = {"default_value": {"numerator": 100, "denominator": "HUNDRED"}}


@dataclass(frozen=True)
class AccessFiles:
    """The files of an access in a folder, as Envoy's configuration names them.

    Attributes:
        folder: Folder of the files.
        keys_folder: Folder of the files of keys, if it is another one.
        has_tls: Whether there is a certificate.
        has_client_ca: Whether clients need a certificate.
        has_keys: Whether clients need a key.
    """

    folder: Path
    keys_folder: Path | None = None
    has_tls: bool = False
    has_client_ca: bool = False
    has_keys: bool = False

    def filters(self, *names: str) -> list[dict[str, Any]]:
        """Return filters whose settings are files: ``keys``, ``requests`` or ``items``."""
        return [
            {
                "name": name,
                "config_discovery": {
                    "config_source": self._source(name, self.keys_folder or self.folder),
                    "type_urls": [_KINDS[name]],
                },
            }
            for name in names
            if self.has_keys
        ]

    def transport_socket(self, *, is_grpc: bool) -> dict[str, Any] | None:
        """Return the settings of encryption of a listener; None for plain text."""
        if not self.has_tls:
            return None
        common: dict[str, Any] = {
            "tls_params": {"tls_minimum_protocol_version": "TLSv1_2"},
            "alpn_protocols": ["h2" if is_grpc else "http/1.1"],
            "tls_certificate_sds_secret_configs": [self._secret("certificate")],
        }
        if self.has_client_ca:
            common["validation_context_sds_secret_config"] = self._secret("clients")
        return {
            "name": "envoy.transport_sockets.tls",
            "typed_config": {
                "@type": f"{_TLS}.DownstreamTlsContext",
                "require_client_certificate": self.has_client_ca,
                "common_tls_context": common,
            },
        }

    def _secret(self, name: str) -> dict[str, Any]:
        return {"name": name, "sds_config": self._source(name, self.folder)}

    def _source(self, name: str, folder: Path) -> dict[str, Any]:
        source = {"path": f"{folder}/{name}.yaml", "watched_directory": {"path": str(folder)}}
        return {"resource_api_version": "V3", "path_config_source": source}


class Access:
    """Certificates and keys of Envoy; the files of the user are read again when they change.

    Args:
        tls: Certificate and authorities of clients; None for plain text.
        keys: File of API keys; None for no keys.

    Attributes:
        refused: Names of keys with limits that Envoy cannot count.

    Raises:
        UserError: A file cannot be read, or is invalid.
    """

    def __init__(self, tls: ServerTls | None = None, keys: Path | None = None) -> None:
        self._tls = tls
        self._keys = keys
        self._paths: list[Path] = []
        self.refused: list[str] = []
        self._content = self._read()
        self._stamps = file_stamps(self._paths)

    def files(self, folder: Path) -> AccessFiles:
        """Return the names of the files that `write` writes into `folder`."""
        has_ca = self._tls is not None and self._tls.client_ca is not None
        return AccessFiles(
            folder,
            has_tls=self._tls is not None,
            has_client_ca=has_ca,
            has_keys=self._keys is not None,
        )

    def write(self, folder: Path) -> None:
        """Write the files that Envoy reads, for this user only."""
        write_files(folder, self._content, is_private=True)

    def renew(self, folder: Path) -> None:
        """Write the files again if those of the user have changed.

        Raises:
            UserError: One of them has a mistake, so that nothing changes.
        """
        stamps = file_stamps(self._paths)
        if stamps is not None and stamps != self._stamps:
            self._stamps = stamps
            try:
                self._content = self._read()
            except OSError:  # a file is being replaced
                self._stamps = None
                return
            self.write(folder)

    def _read(self) -> dict[str, str]:
        found: dict[str, Any] = {}
        paths = [] if self._tls is None else self._tls.paths
        if self._tls is not None:
            self._tls.context()
            found |= _secrets(self._tls)
        if self._keys is not None:
            file = read_keys(self._keys)
            paths = [*paths, self._keys]
            found |= key_filters(file)
            self.refused = [name for name, entry in file.keys.items() if entry.tokens_per_s]
        self._paths = paths
        lists = {name: [data] for name, data in found.items()}
        return {f"{name}.yaml": json.dumps({"resources": data}) for name, data in lists.items()}


def _secrets(tls: ServerTls) -> dict[str, Any]:
    """Return the certificate, and the authorities of clients, by name."""

    def content(path: Path) -> dict[str, str]:
        return {"inline_string": path.read_text(encoding="utf-8", errors="replace")}

    ca = tls.client_ca
    return _named_secrets(
        {"certificate_chain": content(tls.certificate), "private_key": content(tls.key)},
        None if ca is None else {"trusted_ca": content(ca)},
    )


def mounted_secrets(certificates: str, client_ca: str | None) -> dict[str, Any]:
    """Return the certificate, and the authorities of clients, as files of mounted Secrets.

    Args:
        certificates: Folder of ``tls.crt`` and ``tls.key``, which Kubernetes replaces together.
        client_ca: Folder of ``ca.crt``; None without it.
    """

    def content(folder: str, **files: str) -> dict[str, Any]:
        sources = {name: {"filename": f"{folder}/{file}"} for name, file in files.items()}
        return {**sources, "watched_directory": {"path": folder}}

    secrets = _named_secrets(
        content(certificates, certificate_chain="tls.crt", private_key="tls.key"),
        None if client_ca is None else content(client_ca, trusted_ca="ca.crt"),
    )
    return {name: {"resources": [secret]} for name, secret in secrets.items()}


def _named_secrets(certificate: Any, clients: Any) -> dict[str, Any]:
    found = {"certificate": {"tls_certificate": certificate}}
    if clients is not None:
        found["clients"] = {"validation_context": clients}
    return {
        name: {"@type": f"{_TLS}.Secret", "name": name, **value} for name, value in found.items()
    }


def key_filters(file: KeyFile) -> dict[str, Any]:
    """Return the filters of keys and limits by name."""
    keys = [_permissions(*each) for each in file.keys.items()]
    filters = {
        "keys": {
            "@type": _LUA,
            "default_source_code": {
                "inline_string": f"local KEYS = {_lua(keys)}\n{_SCRIPT.read_text(encoding='utf-8')}"
            },
        },
        "requests": _limit("requests", file, lambda entry: entry.requests_per_s),
        "items": _limit("items", file, lambda entry: entry.items_per_s),
    }
    kind = "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig"
    return {
        name: {"@type": kind, "name": name, "typed_config": config}
        for name, config in filters.items()
    }


def _permissions(name: str, entry: KeyEntry) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": name,
        "pipelines": entry.pipelines and f"|{'|'.join(entry.pipelines)}|",
        "requests": entry.requests_per_s,
        "items": entry.items_per_s,
    }
    if entry.tokens_per_s is not None:
        found["gateway_only"] = "tokens"
    found["words"] = struct.unpack(">8i", bytes.fromhex(entry.sha256))
    return {key: value for key, value in found.items() if value is not None}


def _limit(unit: str, file: KeyFile, rate_of: Callable[[KeyEntry], float | None]) -> dict[str, Any]:
    """Return a filter that limits the requests, or the items, of each caller in a second."""
    # Set by the scripts; a request without it, such as one without items, has no limit.
    name = _metadata(unit, {"requests": "name", "items": "counted"}[unit])
    hits = {"hits_addend": {"format": "%DYNAMIC_METADATA(triptych:count)%"}}
    return {
        "@type": _LIMIT,
        "stat_prefix": unit,
        "filter_enabled": _ALWAYS,
        "filter_enforced": _ALWAYS,
        "enable_x_ratelimit_headers": "DRAFT_VERSION_03",
        "rate_limited_as_resource_exhausted": True,
        # Marks the response for the script, which removes it.
        "response_headers_to_add": [{"header": {"key": "x-key-limited", "value": unit}}],
        "always_consume_default_token_bucket": False,
        "rate_limits": [{"actions": [name], **(hits if unit == "items" else {})}],
        "descriptors": [
            {"entries": [{"key": unit, "value": key}], "token_bucket": _bucket(rate)}
            for key, entry in file.keys.items()
            if (rate := rate_of(entry)) is not None
        ],
    }


def _metadata(descriptor: str, field: str) -> dict[str, Any]:
    key = {"key": "triptych", "path": [{"key": field}]}
    return {"metadata": {"descriptor_key": descriptor, "metadata_key": key}}


def _bucket(rate: float) -> dict[str, Any]:
    """Return a bucket that holds the tokens of one second."""
    return {
        "max_tokens": max(1, math.ceil(rate)),
        "tokens_per_fill": max(1, round(rate * _RATE_S)),
        "fill_interval": f"{_RATE_S}s",
    }


def _lua(value: Any) -> str:
    """Return a constant in Lua."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"[{_lua(key)}] = {_lua(item)}" for key, item in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "{" + ", ".join(map(_lua, value)) + "}"
    if isinstance(value, str):  # a byte that is no letter could end the string
        return '"' + "".join(f"\\{byte:03d}" for byte in value.encode()) + '"'
    return repr(value)
