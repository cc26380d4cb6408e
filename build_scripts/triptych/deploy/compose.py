"""`triptych deploy --target compose`: replicas behind Envoy on one host with Docker."""

from __future__ import annotations

import os
from typing import Any

from triptych.base.explained import ExplainedValue
from triptych.container.health import COMMAND
from triptych.container.settings import read_settings
from triptych.deploy import envoy
from triptych.deploy.basis import Deployed, Manifests
from triptych.deploy.numbers import PROBE_FAILURES, PROBE_S, PROBE_TIMEOUT_S, TMP_MIB
from triptych.deploy.samples import (
    CONTAINER,
    MOUNT,
    watch_command,
    watch_environment,
    watch_memory_mib,
)
from triptych.deploy.workload import PORTS, USER
from triptych.runtime.sample_files import FOLDER_VARIABLE

SERVERS, PROXY = "triton", "envoy"
"""Names of the services; the first is the host name behind which Docker's DNS has all replicas."""
SAMPLES = "samples"
"""The volume of what they sample, whose owner is that of the folder in the image."""
_FILE = "compose.yaml"
_PUBLISHED = {"grpc": "TRIPTYCH_GRPC", "http": "TRIPTYCH_HTTP", "metrics": "TRIPTYCH_METRICS"}
_PROXY_SHARES = 2048
_WATCH_PORT = 8003


def compose_manifests(basis: Deployed) -> Manifests:
    """The files.

    Raises:
        UserError: something cannot work; says what and what to do.
    """
    options = basis.options
    basis.overlay()  # an engine that is not built, or of another GPU
    services = {**_servers(basis), PROXY: _proxy(basis)}
    document = {
        "name": options.name,
        "services": services,
        "configs": {PROXY: {"file": "./envoy.yaml"}},
    }
    if basis.sample is not None:
        document["volumes"] = {SAMPLES: {}}
        if options.monitor_image is not None:
            services[CONTAINER] = _watch(basis)
    files = {_FILE: document, "envoy.yaml": envoy.configuration(basis, SERVERS)}
    return Manifests(files, basis.version, _FILE, "docker compose --file {} up --detach")


def _servers(basis: Deployed) -> dict[str, Any]:
    """One service of many containers; on GPUs one service for each, since each has its own."""
    count = _replicas(basis)
    gpus = basis.gpus
    if not gpus:
        server = _server(basis)
        server["deploy"] = {"replicas": count, **server["deploy"]}
        return {SERVERS: server}
    services = {}
    for number in range(count.value):
        server = _server(basis)
        own = [str(number * gpus + index) for index in range(gpus)]
        device = {"driver": "nvidia", "device_ids": own, "capabilities": ["gpu"]}
        server["deploy"]["resources"]["reservations"] = {
            "devices": ExplainedValue([device], count.reason if number == 0 else "a GPU of its own")
        }
        server["networks"] = {
            "default": {
                "aliases": ExplainedValue(
                    [SERVERS], "Envoy finds all replicas behind this one name"
                )
            }
        }
        services[f"{SERVERS}-{number}"] = server
    return services


def _server(basis: Deployed) -> dict[str, Any]:
    options, sizes = basis.options, basis.sizes
    samples = [] if basis.sample is None else [_samples()]
    return {
        "image": options.image,
        "user": f"{USER}:{USER}",
        "environment": {
            "TRIPTYCH_EXIT_TIMEOUT_S": sizes.exit_timeout_s,
            "TRIPTYCH_CONNECTION_AGE_S": ExplainedValue(
                str(sizes.connection_age_s.value), sizes.connection_age_s.reason
            ),
            **({FOLDER_VARIABLE: MOUNT} if samples else {}),
            **basis.environment,
        },
        "labels": {
            "triptych.version": ExplainedValue(
                basis.version,
                "the start of the lock's SHA-256: with a new build `up` makes new containers",
            )
        },
        "volumes": [_models(basis), *samples],
        "shm_size": ExplainedValue(f"{sizes.shm_mib.value}m", sizes.shm_mib.reason),
        "read_only": True,
        "tmpfs": [f"/tmp:size={sizes.tmp_mib.value}m,uid={USER},gid={USER},mode=0700"],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        **_locked_memory(basis),
        "init": ExplainedValue(False, "the server itself is process 1 and heeds SIGTERM"),
        "restart": "unless-stopped",
        "stop_grace_period": ExplainedValue(f"{sizes.grace_s.value}s", sizes.grace_s.reason),
        "healthcheck": ExplainedValue(
            {
                "test": ["CMD", *COMMAND],
                "start_period": ExplainedValue(f"{sizes.start_s.value}s", sizes.start_s.reason),
                "interval": f"{PROBE_S}s",
                "timeout": f"{PROBE_TIMEOUT_S}s",
                "retries": PROBE_FAILURES,
            },
            "as in the image; Docker shows it, and takes nothing out for it: Envoy's own checks do",
        ),
        "deploy": {
            "resources": {
                "limits": {
                    "memory": ExplainedValue(
                        f"{_mebibytes(sizes.memory_mib.value)}M", sizes.memory_mib.reason
                    )
                }
            }
        },
    }


def _proxy(basis: Deployed) -> dict[str, Any]:
    options, exit_s = basis.options, int(basis.sizes.exit_timeout_s.value)
    script = envoy.drain_script(1, exit_s)
    ready = envoy.ready_script()
    return {
        "image": options.envoy_image,
        "command": envoy.arguments(workers=2),
        "user": f"{envoy.USER}:{envoy.USER}",
        "configs": [{"source": PROXY, "target": f"{envoy.CONFIG_FOLDER}/envoy.yaml"}],
        "ports": ExplainedValue(
            [f"127.0.0.1:${{{_PUBLISHED[name]}:-{PORTS[name]}}}:{PORTS[name]}" for name in PORTS],
            "this machine only: put a gateway that knows who may ask in front",
        ),
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "restart": "unless-stopped",
        "pre_stop": [
            {
                "command": ExplainedValue(
                    ["bash", "-c", _escaped(script)],
                    f"until nothing is under way, {exit_s} s at most: on SIGTERM it ends at once",
                )
            }
        ],
        "stop_grace_period": "5s",
        "healthcheck": {
            "test": ["CMD", "bash", "-c", _escaped(ready)],
            "interval": f"{PROBE_S}s",
            "timeout": f"{PROBE_TIMEOUT_S}s",
            "retries": PROBE_FAILURES,
        },
        "cpu_shares": ExplainedValue(
            _PROXY_SHARES, "twice a server's, which take all cores there are: it must not wait"
        ),
        "deploy": {"resources": {"limits": {"memory": envoy.memory_limit(basis, "M")}}},
    }


def _watch(basis: Deployed) -> dict[str, Any]:
    memory = watch_memory_mib(basis)
    return {
        "image": basis.options.monitor_image,
        "user": f"{USER}:{USER}",
        "entrypoint": watch_command(basis.name),
        "environment": watch_environment(),
        "volumes": [_models(basis), _samples()],
        "ports": ExplainedValue(
            [f"127.0.0.1:${{TRIPTYCH_WATCH:-{_WATCH_PORT}}}:{PORTS['metrics']}"],
            "gauges for Prometheus; this machine only",
        ),
        "read_only": True,
        "tmpfs": [f"/tmp:size={TMP_MIB}m,uid={USER},gid={USER},mode=0700"],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "restart": "unless-stopped",
        "deploy": {
            "resources": {"limits": {"memory": ExplainedValue(f"{memory.value}M", memory.reason)}}
        },
    }


def _samples() -> dict[str, Any]:
    return {"type": "volume", "source": SAMPLES, "target": MOUNT}


def _models(basis: Deployed) -> dict[str, Any]:
    target = str(read_settings({}).repository)
    if basis.options.repository_image is not None:
        reference = f"{basis.options.repository_image}:{basis.version}"
        return {
            "type": "image",
            "source": ExplainedValue(reference, "wants Docker 28 and Compose 2.35 or later"),
            "target": target,
        }
    folder = _escaped(os.fspath(basis.repository.resolve()))
    return {
        "type": "bind",
        "source": ExplainedValue(
            f"${{TRIPTYCH_REPOSITORY:-{folder}}}", "the repository of this build, on the host"
        ),
        "target": target,
        "read_only": True,
        "bind": {
            "create_host_path": ExplainedValue(False, "a folder that is not there is a mistake")
        },
    }


def _locked_memory(basis: Deployed) -> dict[str, Any]:
    if not basis.gpus:
        return {}
    return {"ulimits": {"memlock": ExplainedValue(-1, "pinned pools are locked memory")}}


def _replicas(basis: Deployed) -> ExplainedValue:
    given = basis.options.replicas
    cores = basis.cores
    count, why = (
        (basis.sizes.fewest.value, basis.sizes.fewest.reason)
        if given is None
        else (given, "given by hand (--replicas)")
    )
    return ExplainedValue(
        count,
        f"{why}. All on one host: {cores.reason} each keeps {cores.value:.2g} cores busy, "
        f"{count * cores.value:.2g} in all, and has no limit of them: containers share alike",
    )


def _mebibytes(quantity: str) -> int:
    return int(quantity.removesuffix("Mi"))


def _escaped(text: str) -> str:
    """As Compose takes it: what follows a dollar sign would be a variable."""
    return text.replace("$", "$$")
