"""A Job that asks `triptych shadow` whether a new build should take over: its exit code decides."""

from __future__ import annotations

from typing import Any

from triptych.base.explained import ExplainedValue
from triptych.container.settings import read_settings
from triptych.deploy.basis import Deployed
from triptych.deploy.options import DeployOptions
from triptych.deploy.samples import MOUNT, watch_memory_mib, watch_pod
from triptych.deploy.workload import closed_policy, labels, metadata, models_volume

IN_PLACE = "/in-place"
"""Where the build that the new one replaces is mounted."""
_MAX_S = 3600
_BUILDS = 2


def verdict_name(options: DeployOptions) -> str:
    """Of the Job's objects."""
    return f"{options.name}-verdict"


def verdict_command(pipeline: str) -> list[Any]:
    """What it runs, in the image of the watch; 0 is yes, anything else no."""
    return [
        *("triptych", "shadow", pipeline),
        *("--repository", IN_PLACE, "--candidate", str(read_settings({}).repository)),
        *("--samples", MOUNT),
        *(
            "--rounds",
            ExplainedValue(
                "0",
                "answers alone: latency beside strangers on a node is noise, and the rules judge "
                "it on live requests",
            ),
        ),
    ]


def verdict_spec(basis: Deployed) -> dict[str, Any]:
    """Spec of the Job."""
    options = basis.options
    if basis.in_place is None:
        raise ValueError("no build in place")
    resources, node = basis.placement()
    memory = watch_memory_mib(basis)
    server_mib = int(basis.sizes.memory_mib.value.removesuffix("Mi"))
    limit = ExplainedValue(
        f"{memory.value + _BUILDS * server_mib}Mi",
        f"a server of each build ({server_mib} MiB, as a replica), and the original model: "
        f"{memory.reason}",
    )
    shm_mib = _BUILDS * int(basis.sizes.shm_mib.value)
    container = {
        "name": "shadow",
        "command": verdict_command(basis.name),
        "resources": {
            "requests": {**resources["requests"], "memory": limit},
            "limits": {**resources["limits"], "memory": limit.value},
        },
        "volumeMounts": [
            {"name": "in-place", "mountPath": IN_PLACE, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    pod = watch_pod(basis, container, version=basis.version)
    pod["volumes"] += [
        models_volume(options, basis.in_place, "in-place"),
        {
            "name": "shm",
            "emptyDir": {
                "medium": "Memory",
                "sizeLimit": ExplainedValue(f"{shm_mib}Mi", "of two servers"),
            },
        },
    ]
    return {
        "backoffLimit": ExplainedValue(
            0,
            "exit code 1 is a verdict, which a second run would not change: the new build is "
            "worse, or too few rows are sampled to tell; 2 is a mistake. None of them may pass",
        ),
        "activeDeadlineSeconds": _MAX_S,
        "template": {
            "metadata": {"labels": labels(options, verdict_name(options))},
            "spec": {**pod, **node, "restartPolicy": "Never"},
        },
    }


def verdict_job(basis: Deployed) -> dict[str, Any]:
    """The Job by itself, for whoever waits for it before a share is raised."""
    options = basis.options
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            **metadata(options, f"{verdict_name(options)}-{basis.version}"),
            "namespace": options.namespace,
        },
        "spec": verdict_spec(basis),
    }


def verdict_policy(options: DeployOptions) -> dict[str, Any]:
    """Texts of users are in its samples: nobody asks it, and it asks nobody."""
    return closed_policy(options, verdict_name(options))
