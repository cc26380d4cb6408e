"""Services of Compose, in the words of a pod: most checks are of both."""

from __future__ import annotations

import re
from typing import Any

KIND = "ComposeService"
_UNITS = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30}
_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600}


def services_of(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Name to service; none where the document is not of Compose."""
    services = document.get("services")
    if "kind" in document or not isinstance(services, dict):
        return {}
    return {str(name): one for name, one in services.items() if isinstance(one, dict)}


def pod_of(service: dict[str, Any]) -> dict[str, Any]:
    """What a pod would say of the same container."""
    test = service.get("healthcheck")
    words = _words(test.get("test")) if isinstance(test, dict) else []
    probe: dict[str, Any] = {}
    if isinstance(test, dict) and words:
        timeout = _seconds(test.get("timeout", "30s"))
        probe = {"exec": {"command": words[1:]}, "timeoutSeconds": timeout}
    shm = service.get("shm_size")
    user = str(service.get("user", "")).partition(":")[0]
    options = _words(service.get("security_opt"))
    container = {
        "image": service.get("image", ""),
        "command": _words(service.get("entrypoint")),
        "args": _words(service.get("command")),
        "env": [{"name": key, "value": value} for key, value in _pairs(service.get("environment"))],
        **({"readinessProbe": probe} if probe else {}),
        "resources": {"limits": _limits(service)},
        "securityContext": {
            **({"runAsUser": user} if user else {}),
            "allowPrivilegeEscalation": not any("no-new-privileges" in one for one in options),
            "capabilities": {"drop": _words(service.get("cap_drop"))},
        },
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    volume = {"medium": "Memory", "sizeLimit": _bytes(shm)} if shm else {}
    return {
        "containers": [container],
        "volumes": [{"name": "shm", "emptyDir": volume}],
        "terminationGracePeriodSeconds": _seconds(service.get("stop_grace_period", "10s")),
    }


def _limits(service: dict[str, Any]) -> dict[str, Any]:
    deployed: Any = service.get("deploy")
    for key in ("resources", "limits"):
        deployed = deployed.get(key) if isinstance(deployed, dict) else None
    memory = deployed.get("memory") if isinstance(deployed, dict) else None
    memory = memory or service.get("mem_limit")
    return {"memory": _bytes(memory)} if memory else {}


def _words(value: object) -> list[str]:
    if isinstance(value, str):
        return value.split()
    return [str(word) for word in value] if isinstance(value, list) else []


def _pairs(value: object) -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [(str(key), str(each)) for key, each in value.items()]
    return [(key, each) for key, _, each in (word.partition("=") for word in _words(value))]


def _bytes(size: object) -> str:
    """``2gb`` and ``512m`` as bytes; a size of another form is 0."""
    found = re.fullmatch(r"(\d+)([bkmg]?)b?", str(size).lower())
    return str(int(found[1]) * _UNITS[found[2]]) if found else "0"


def _seconds(duration: object) -> float:
    """``1m30s`` in seconds."""
    parts = re.findall(r"(\d+(?:\.\d+)?)(ms|s|m|h)", str(duration))
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)
