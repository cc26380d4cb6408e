"""Settings of the operator, read from ``TRIPTYCH_*`` variables; docker/server.md lists them."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from triptych.base.errors import UserError
from triptych.container.device_check import MODE_VARIABLE, DeviceCheckMode
from triptych.container.flags import GrpcTls, ServerFlags, Trace
from triptych.container.serving_machine import MAX_CORES

LockCheckMode = Literal["enforce", "warn", "off"]
Chosen = TypeVar("Chosen")

_MODES: dict[str, LockCheckMode] = {"enforce": "enforce", "warn": "warn", "off": "off"}
KEY_VARIABLE = "TRIPTYCH_RESTRICTED_KEY"
CORES_VARIABLE = "TRIPTYCH_CORES"
_YES_NO = {"true": True, "false": False}
# Triton cuts the flag at commas, colons and equals signs.
_KEY = re.compile(r"[A-Za-z0-9._~-]{16,}")
_PORT_MAX = 65535
_TRACE_RATE = 1000
_SHM_MAX_MIB = 65_536
_TLS_FILES = (
    "TRIPTYCH_GRPC_TLS_CERTIFICATE_FILE",
    "TRIPTYCH_GRPC_TLS_KEY_FILE",
    "TRIPTYCH_GRPC_TLS_CLIENT_CA_FILE",
)
# Escaped characters and sets of characters, which cannot begin an assertion.
_LITERAL = re.compile(r"\\[^1-9]|\[\^?\]?(\\.|[^\]])*\]")
_NOT_IN_RE2 = re.compile(r"\(\?(<?[=!]|P=|>|\()|\\[1-9]|[*+?}]\+")
_CORRECT = "Correct it, or remove it for the default"
# A cache and its settings, as in `redis,host=cache,port=6379`.
_CACHE = re.compile(r"[a-z0-9_]+(,[a-z0-9_]+=[^,\s]+)+")


class Settings(NamedTuple):
    """Checked settings; docker/server.md describes each."""

    repository: Path
    server: str
    host: str
    http_port: int
    grpc_port: int
    metrics_port: int
    lock_check: LockCheckMode
    lock_hashes: bool
    machine: str
    cores: int | None
    device_check: DeviceCheckMode
    state: Path | None  # Folder for what outlives the server; None without one
    options: ServerFlags

    @property
    def health_url(self) -> str:
        host = "127.0.0.1" if self.host == "0.0.0.0" else self.host
        return f"http://{host}:{self.http_port}"

    @property
    def metrics_url(self) -> str:
        """Address of the server's metrics, on this machine."""
        return f"{self.health_url.rpartition(':')[0]}:{self.metrics_port}/metrics"


def read_settings(
    variables: Mapping[str, str] = os.environ, *, repository: str | None = None
) -> Settings:
    """Return the settings of this environment; an empty variable counts as not set.

    `repository` replaces ``TRIPTYCH_REPOSITORY``.

    Raises:
        UserError: A variable has an invalid value.
    """
    given = {name: value for name, value in variables.items() if value}
    return Settings(
        repository=Path(repository or given.get("TRIPTYCH_REPOSITORY", "/models")).absolute(),
        server=given.get("TRIPTYCH_SERVER", "tritonserver"),
        host=given.get("TRIPTYCH_HOST", "0.0.0.0"),
        http_port=_number(given, "TRIPTYCH_HTTP_PORT", 8000, _PORT_MAX),
        grpc_port=_number(given, "TRIPTYCH_GRPC_PORT", 8001, _PORT_MAX),
        metrics_port=_number(given, "TRIPTYCH_METRICS_PORT", 8002, _PORT_MAX),
        lock_check=_choice(given, "TRIPTYCH_LOCK_CHECK", "enforce", _MODES),
        lock_hashes=_choice(given, "TRIPTYCH_LOCK_HASHES", "true", _YES_NO),
        machine=given.get("TRIPTYCH_MACHINE", ""),
        cores=_optional(given, CORES_VARIABLE, MAX_CORES),
        device_check=_choice(given, MODE_VARIABLE, "enforce", _MODES),
        state=find_state(given),
        options=_read_options(given),
    )


def find_state(given: Mapping[str, str]) -> Path | None:
    """Return the folder that outlives the server: the one that is set, else that of samples."""
    if state := given.get("TRIPTYCH_STATE"):
        return Path(state).absolute()
    samples = given.get("TRIPTYCH_SAMPLES")
    return Path(samples, ".device-checks").absolute() if samples else None


def _read_options(given: Mapping[str, str]) -> ServerFlags:
    default = ServerFlags(restricted_key=_read_key(given))
    return ServerFlags(
        restricted_key=default.restricted_key,
        pinned_pool_mib=_optional(given, "TRIPTYCH_PINNED_POOL_MIB"),
        cuda_pool_mib=_optional(given, "TRIPTYCH_CUDA_POOL_MIB"),
        grpc_threads=_number(given, "TRIPTYCH_GRPC_THREADS", default.grpc_threads, 128),
        max_request_mib=_optional(given, "TRIPTYCH_MAX_REQUEST_MIB", 2047),
        connection_age_s=_number(given, "TRIPTYCH_CONNECTION_AGE_S", default.connection_age_s),
        exit_timeout_s=_number(given, "TRIPTYCH_EXIT_TIMEOUT_S", default.exit_timeout_s),
        cache_mib=_optional(given, "TRIPTYCH_RESPONSE_CACHE_MIB"),
        cache=_read_cache(given),
        load_threads=_optional(given, "TRIPTYCH_LOAD_THREADS", 1024),
        step_shm_mib=_optional(given, "TRIPTYCH_STEP_SHM_MIB", _SHM_MAX_MIB),
        step_shm_growth_mib=_optional(given, "TRIPTYCH_STEP_SHM_GROWTH_MIB", _SHM_MAX_MIB),
        core_threads=_optional(given, "TRIPTYCH_CORE_THREADS", 1024),
        grpc_tls=_read_tls(given),
        forward_headers=_read_pattern(given),
        client_shm=_choice(given, "TRIPTYCH_CLIENT_SHM", "false", _YES_NO),
        trace=read_trace(given),
    )


def _read_key(given: Mapping[str, str]) -> str:
    """Return the key of the file or variable; a random key if it is empty or not set."""
    file = given.get("TRIPTYCH_RESTRICTED_KEY_FILE")
    name, key = KEY_VARIABLE, given.get(KEY_VARIABLE)
    if file:
        name = "TRIPTYCH_RESTRICTED_KEY_FILE"
        key = _read_file(name, file).decode("utf-8", "replace").strip()
    if not key:
        return secrets.token_urlsafe(32)
    if not _KEY.fullmatch(key):
        raise UserError(  # the key itself is not shown
            name,
            "must be 16 or more letters, digits, dots, dashes, underscores or tildes",
            remedy="Make one with `openssl rand -hex 32`",
        )
    return key


def read_trace(variables: Mapping[str, str]) -> Trace | None:
    """Return the target of traces in variables of the environment; None for no traces.

    Raises:
        UserError: A variable has an invalid value.
    """
    given = {name: value for name, value in variables.items() if value}
    target = given.get("TRIPTYCH_TRACE", "off")
    rate = _number(given, "TRIPTYCH_TRACE_RATE", _TRACE_RATE)
    if target == "off":
        return None
    if not target.startswith(("http://", "https://", "/")):
        raise UserError(
            "TRIPTYCH_TRACE",
            "must be off, the address of an OpenTelemetry collector or an absolute path",
            given=target,
            remedy="Write for example http://collector:4318/v1/traces",
        )
    return Trace(target, rate)


def _read_cache(given: Mapping[str, str]) -> tuple[str, ...]:
    name = "TRIPTYCH_RESPONSE_CACHE"
    text = given.get(name)
    if text is None:
        return ()
    if not _CACHE.fullmatch(text):
        raise UserError(
            name,
            "must be the name of a cache and its settings, NAME,KEY=VALUE,…",
            given=text,
            remedy="Write for example redis,host=cache,port=6379",
        )
    if "TRIPTYCH_RESPONSE_CACHE_MIB" in given:
        raise UserError(
            name,
            "must not be set with TRIPTYCH_RESPONSE_CACHE_MIB, the size of Triton's local cache",
            given=text,
            remedy="Remove one of the two",
        )
    return tuple(text.split(","))


def _read_tls(given: Mapping[str, str]) -> GrpcTls | None:
    """Return the files of TLS. An unreadable file is an error here, before the server starts."""
    certificate, key, authority = (_pem_file(given, name) for name in _TLS_FILES)
    if certificate is None or key is None:
        lone = next((name for name in _TLS_FILES if name in given), None)
        if lone is None:
            return None
        raise UserError(
            lone,
            f"must be set with both {_TLS_FILES[0]} and {_TLS_FILES[1]}",
            given=given[lone],
            remedy="Set both, or none of the three",
        )
    return GrpcTls(certificate, key, authority)


def _pem_file(given: Mapping[str, str], name: str) -> str | None:
    if name not in given:
        return None
    if b"-----BEGIN " not in _read_file(name, given[name]):
        remedy = "Convert it to PEM, or give another"
        raise UserError(name, "must be a PEM file", given=given[name], remedy=remedy)
    return str(Path(given[name]).absolute())


def _read_file(name: str, path: str) -> bytes:
    """Return the content of the file that a variable names."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        remedy = "Check the path and its permissions"
        raise UserError(name, "must be a readable file", given=path, remedy=remedy) from error


def _read_pattern(given: Mapping[str, str]) -> str | None:
    name = "TRIPTYCH_FORWARD_HEADERS"
    pattern = given.get(name)
    if pattern is None:
        return None
    try:
        re.compile(pattern)
    except re.error as error:
        rule = f"must be a regular expression ({error})"
        raise UserError(name, rule, given=pattern, remedy="Correct it") from error
    if found := _NOT_IN_RE2.search(_LITERAL.sub("x", pattern)):
        raise UserError(
            name,
            f"must be a regular expression of RE2, which Triton uses: it has no {found[0]}",
            given=pattern,
            remedy="Write it without lookahead, lookbehind, references and possessive repetition",
        )
    return pattern


def _number(given: Mapping[str, str], name: str, default: int, most: int = 2**31 - 1) -> int:
    text = given.get(name)
    if text is None:
        return default
    if not re.fullmatch(r"[0-9]{1,10}", text) or not 1 <= int(text) <= most:
        rule = f"must be a whole number from 1 to {most}"
        raise UserError(name, rule, given=text, remedy=_CORRECT)
    return int(text)


def _optional(given: Mapping[str, str], name: str, most: int = 2**31 - 1) -> int | None:
    return _number(given, name, 1, most) if name in given else None


def _choice(
    given: Mapping[str, str], name: str, default: str, choices: Mapping[str, Chosen]
) -> Chosen:
    """Return the value of the word that is set."""
    text = given.get(name, default)
    if text not in choices:
        rule = f"must be one of {', '.join(choices)}"
        raise UserError(name, rule, given=text, remedy=_CORRECT)
    return choices[text]
