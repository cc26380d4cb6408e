"""Variables of the server in a deployment, checked as the server itself checks them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from triptych.base.errors import UserError, closest
from triptych.container.manifests import STEP_SHM_MIB
from triptych.container.settings import CORES_VARIABLE, read_settings

OPTION = "--variable"
CACHE_SIZE, CACHE = "TRIPTYCH_RESPONSE_CACHE_MIB", "TRIPTYCH_RESPONSE_CACHE"
STEP_SHM = ("TRIPTYCH_STEP_SHM_MIB", "TRIPTYCH_STEP_SHM_GROWTH_MIB")
ALLOWED = (
    "TRIPTYCH_CORE_THREADS",
    "TRIPTYCH_CUDA_POOL_MIB",
    "TRIPTYCH_DEVICE_CHECK",
    "TRIPTYCH_FORWARD_HEADERS",
    "TRIPTYCH_GRPC_THREADS",
    "TRIPTYCH_LOAD_THREADS",
    "TRIPTYCH_LOCK_CHECK",
    "TRIPTYCH_LOCK_HASHES",
    "TRIPTYCH_MACHINE",
    "TRIPTYCH_MAX_REQUEST_MIB",
    "TRIPTYCH_PINNED_POOL_MIB",
    CACHE,
    CACHE_SIZE,
    *STEP_SHM,
    "TRIPTYCH_STATE",
    "TRIPTYCH_TRACE",
    "TRIPTYCH_TRACE_RATE",
)
"""Variables of the serving image that the option sets."""
_BY_MANIFESTS = "the manifests decide it"
_ENDS_BEFORE = "Envoy, the Gateway or KServe connects to the servers without TLS: end TLS there"
_IS_SECRET = "a manifest is no place for a secret: set it from a Secret in an overlay"
REFUSED = {
    **dict.fromkeys(
        (
            "TRIPTYCH_CONNECTION_AGE_S",
            CORES_VARIABLE,
            "TRIPTYCH_EXIT_TIMEOUT_S",
            "TRIPTYCH_GRPC_PORT",
            "TRIPTYCH_HOST",
            "TRIPTYCH_HTTP_PORT",
            "TRIPTYCH_METRICS_PORT",
            "TRIPTYCH_REPOSITORY",
            "TRIPTYCH_SAMPLES",
            "TRIPTYCH_SERVER",
            "TRIPTYCH_TRITON",
        ),
        _BY_MANIFESTS,
    ),
    **dict.fromkeys(("TRIPTYCH_RESTRICTED_KEY", "TRIPTYCH_RESTRICTED_KEY_FILE"), _IS_SECRET),
    **dict.fromkeys(
        (
            "TRIPTYCH_GRPC_TLS_CERTIFICATE_FILE",
            "TRIPTYCH_GRPC_TLS_CLIENT_CA_FILE",
            "TRIPTYCH_GRPC_TLS_KEY_FILE",
        ),
        _ENDS_BEFORE,
    ),
    "TRIPTYCH_CLIENT_SHM": "clients in other pods have no memory in common with the server",
}
"""Other variables, with the reason why the option does not set them."""


def read_variables(given: Sequence[str] | None) -> dict[str, str]:
    """Return variables, each given as ``NAME=VALUE``, by name.

    Raises:
        UserError: A variable is unknown or not for manifests, or the server would refuse its value.
    """
    variables = {}
    for text in given or ():
        name, _, value = text.partition("=")
        if name not in ALLOWED:
            reason = REFUSED.get(name, "the server has no such variable")
            known = closest(name, list(ALLOWED)) if name not in REFUSED else ""
            raise UserError(
                OPTION,
                "must be NAME=VALUE with a variable of the serving image that manifests can set",
                given=f"{name or 'no name'}; {reason}",
                remedy=f"{known}Use one of: {', '.join(ALLOWED)}",
            )
        variables[name] = value
    read_settings(variables)
    return variables


def step_shm_mib(variables: Mapping[str, str]) -> int:
    """Return the shared memory in MiB of a Python process of a step, besides the largest request.

    A region that is full grows by whole increments.
    """
    return max(STEP_SHM_MIB, *(int(variables.get(name, 0)) for name in STEP_SHM))
