"""What the replicas sample, and who looks at it: one volume for all, and one pod that watches.

One place, and not one a pod with somebody beside it: the watch's test is of all rows since the
build (N watches would raise N times the false alarms), rows outlive the pod that answered them, and
the original model in PyTorch, larger than a replica, is loaded once.
"""

from __future__ import annotations

import math
from typing import Any

from triptych.base.cache import CACHE_VARIABLE
from triptych.base.explained import ExplainedValue
from triptych.container.settings import read_settings
from triptych.deploy.basis import Deployed
from triptych.deploy.monitoring import pod_monitor
from triptych.deploy.options import WATCH_EVERY, DeployOptions
from triptych.deploy.workload import (
    PORTS,
    USER,
    closed_policy,
    isolated,
    labels,
    metadata,
    metrics_ingress,
    models_volume,
    restricted,
)
from triptych.runtime.sample_files import FOLDER_VARIABLE
from triptych.spec.fields import Sample

MOUNT = "/samples"
REPORTS = f"{MOUNT}/.watch"
"""The looks so far lie beside the samples: without them each look would begin anew."""
CONTAINER = "watch"

_MIB, _STEP_MIB = 2**20, 64
_BASE_MIB = 1024
_OF_CORE = 4
_FOLDERS = 2
_CPU_MILLI = 500
_CACHE_MIB = 256
_TMP_MIB = 1024


def claim_name(options: DeployOptions) -> str:
    """Of the volume of all samples."""
    return f"{options.name}-samples"


def watch_name(options: DeployOptions) -> str:
    """Of all objects of the watch."""
    return f"{options.name}-watch"


def claim(options: DeployOptions, sample: Sample) -> dict[str, Any]:
    """The volume that all replicas write to and the watch reads."""
    kept_mib = _FOLDERS * sample.max_bytes / _MIB
    mib = math.ceil((kept_mib + _CACHE_MIB) / _STEP_MIB) * _STEP_MIB
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": metadata(options, claim_name(options)),
        "spec": {
            "accessModes": ExplainedValue(
                ["ReadWriteMany"],
                "replicas on all nodes write, and the watch reads what all of them answered: name "
                "a storageClassName that can (NFS, CephFS, EFS, Filestore) where the cluster's "
                "own cannot",
            ),
            "resources": {
                "requests": {
                    "storage": ExplainedValue(
                        f"{mib}Mi",
                        f"{_FOLDERS} x serving.sample.max_bytes ({sample.max_bytes} bytes): each "
                        "replica may be over it by a file of a tenth, and a candidate has a folder "
                        f"of its own; {_CACHE_MIB} MiB for the looks and what they computed once",
                    )
                }
            },
        },
    }


def sampling(
    pod: dict[str, Any], options: DeployOptions, sample: Sample | None, folder: str = MOUNT
) -> dict[str, Any]:
    """A pod template whose servers write samples into a folder, where they are to sample."""
    if sample is None:
        return pod
    (container,) = pod["spec"]["containers"]
    server = {
        **container,
        "env": [*container["env"], {"name": FOLDER_VARIABLE, "value": folder}],
        "volumeMounts": [*container["volumeMounts"], {"name": "samples", "mountPath": MOUNT}],
    }
    spec = {
        **pod["spec"],
        "securityContext": {**pod["spec"]["securityContext"], **group()},
        "containers": [server],
        "volumes": [*pod["spec"]["volumes"], volume(options)],
    }
    return {**pod, "spec": spec}


def volume(options: DeployOptions) -> dict[str, Any]:
    return {"name": "samples", "persistentVolumeClaim": {"claimName": claim_name(options)}}


def group() -> dict[str, Any]:
    """Of a pod's securityContext: what lets its user write to a new volume."""
    return {
        "fsGroup": ExplainedValue(
            USER,
            "the root of a new volume is root's. Files are for their user alone (0600), so the "
            "servers and the watch are one user. A driver that does not set groups (NFS): make "
            f"its root writable for {USER}",
        ),
        "fsGroupChangePolicy": ExplainedValue(
            "OnRootMismatch",
            "Always would let the group read each file again whenever a pod starts",
        ),
    }


def watch_command(pipeline: str) -> list[Any]:
    """What the image of the watch runs, all as long as the pod lives."""
    return [
        *("triptych", "watch", pipeline),
        *(
            "--every",
            ExplainedValue(WATCH_EVERY, "all looks are one test: more of them cost no false alarm"),
        ),
        *("--port", str(PORTS["metrics"]), "--host", "0.0.0.0"),
        *("--repository", str(read_settings({}).repository)),
        *("--samples", MOUNT, "--reports", REPORTS),
    ]


def watch_environment() -> dict[str, str]:
    """Of the image of the watch, whose file system is read-only and which reaches no network."""
    return {"HOME": "/tmp", CACHE_VARIABLE: f"{MOUNT}/.cache", "HF_HUB_OFFLINE": "1"}


def watch_memory_mib(basis: Deployed) -> ExplainedValue:
    """Of one look."""
    core = basis.repository / f"{basis.name}_core"
    size_mib = sum(file.stat().st_size for file in core.rglob("*") if file.is_file()) / _MIB
    mib = math.ceil((_BASE_MIB + _OF_CORE * size_mib) / _STEP_MIB) * _STEP_MIB
    return ExplainedValue(
        mib,
        f"{_BASE_MIB} MiB, and {_OF_CORE} times the core's files ({size_mib:.0f} MiB), whose "
        "weights may be a fourth of the original's: MiniLM's 90 MiB took 570. Not measured for "
        "this model: watch it",
    )


def watching(basis: Deployed, sample: Sample) -> dict[str, Any]:
    """The volume, and where there is an image for it the watch: file to document."""
    options = basis.options
    files = {"samples-claim.yaml": claim(options, sample)}
    if options.monitor_image is not None:
        files["watch-deployment.yaml"] = _deployment(basis)
        files["watch-network-policy.yaml"] = _policy(options)
        files["watch-pod-monitor.yaml"] = _monitor(options)
    return files


def watch_pod(basis: Deployed, container: dict[str, Any], *, version: str) -> dict[str, Any]:
    """A pod with the image of the watch, the repository of a build and the samples."""
    options = basis.options
    isolation = isolated(labels(options, watch_name(options)), USER)
    return {
        **{key: value for key, value in isolation.items() if key != "topologySpreadConstraints"},
        "securityContext": {**isolation["securityContext"], **group()},
        "containers": [
            {
                "image": options.monitor_image,
                "env": [{"name": key, "value": text} for key, text in watch_environment().items()],
                "securityContext": restricted(),
                **container,
                "volumeMounts": [
                    {
                        "name": "models",
                        "mountPath": str(read_settings({}).repository),
                        "readOnly": True,
                    },
                    {"name": "samples", "mountPath": MOUNT},
                    {"name": "tmp", "mountPath": "/tmp"},
                    *container.get("volumeMounts", ()),
                ],
            }
        ],
        "volumes": [
            models_volume(options, version),
            volume(options),
            {
                "name": "tmp",
                "emptyDir": {
                    "sizeLimit": ExplainedValue(
                        f"{_TMP_MIB}Mi", "scratch, also of servers for `shadow`"
                    )
                },
            },
        ],
    }


def _deployment(basis: Deployed) -> dict[str, Any]:
    options = basis.options
    own = labels(options, watch_name(options))
    memory = watch_memory_mib(basis)
    listens = {"tcpSocket": {"port": "metrics"}}
    container = {
        "name": CONTAINER,
        "command": watch_command(basis.name),
        "ports": [{"name": "metrics", "containerPort": PORTS["metrics"]}],
        "startupProbe": {**listens, "periodSeconds": 5, "failureThreshold": 24},
        "livenessProbe": {**listens, "periodSeconds": 30},
        "resources": {
            "requests": {
                "cpu": ExplainedValue(f"{_CPU_MILLI}m", "a look may take its time"),
                "memory": ExplainedValue(f"{memory.value}Mi", memory.reason),
            },
            "limits": {"memory": f"{memory.value}Mi"},
        },
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(options, watch_name(options)),
        "spec": {
            "replicas": ExplainedValue(
                1,
                "one that stays, and no CronJob: its gauges are scraped as the servers' are, while "
                "a pod that has ended would need a Pushgateway; an alarm is no failed Job, and a "
                "look that fails is told by the time of the last one",
            ),
            "strategy": {"type": ExplainedValue("Recreate", "two would write one timeline")},
            "selector": {"matchLabels": own},
            "template": {
                "metadata": {"labels": {**own, "app.kubernetes.io/version": basis.version}},
                "spec": watch_pod(basis, container, version=basis.version),
            },
        },
    }


def _policy(options: DeployOptions) -> dict[str, Any]:
    nobody = ExplainedValue([], "texts of users are in its samples: it calls nobody")
    ingress = [metrics_ingress(options)]
    return closed_policy(options, watch_name(options), ingress=ingress, egress=nobody)


def _monitor(options: DeployOptions) -> dict[str, Any]:
    name = watch_name(options)
    monitor = pod_monitor(options)
    spec = {**monitor["spec"], "selector": {"matchLabels": labels(options, name)}}
    return {**monitor, "metadata": metadata(options, name), "spec": spec}
