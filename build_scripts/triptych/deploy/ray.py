"""`triptych deploy --target ray`: a RayJob of KubeRay that infers a corpus, and then ends."""

from __future__ import annotations

import shlex

from triptych.base.errors import UserError
from triptych.base.explained import ExplainedValue, render_files
from triptych.base.extras import tested_versions
from triptych.deploy.context import DeploymentContext, Manifests
from triptych.deploy.kubernetes import APPLY, TEMPLATES, template_values

_HEAD_MIB, _NODE_MIB, _STORE_MIB, _SCRATCH_MIB = 2048, 1024, 96, 8192


def make_files(c: DeploymentContext) -> Manifests:
    """Return the files of the target.

    Raises:
        UserError: A replica has several GPUs, or its rows per second are unknown.
    """
    if c.gpus > 1 or c.peak_per_s is None:
        raise UserError(
            "--target ray",
            "is only supported for a pipeline that returns tensors, on a CPU or on one GPU",
            given=f"{c.pipeline} with {c.gpus} GPUs",
            remedy="Deploy it with --target kubernetes, and run `triptych infer --ray --url`",
        )
    options, values = c.options, template_values(c)
    nodes, rate = options.replicas or 1, c.peak_per_s.value
    words = [
        *("triptych", "infer", c.pipeline, "--ray", "auto", "--repository", values["repository"]),
        *("--file", options.corpus or "", "--out", options.results or ""),
    ]
    memory, shm = c.sizes.memory_mib, c.sizes.shm_mib
    server_mib = int(memory.value.removesuffix("Mi"))
    why = "the default" if options.replicas is None else "given by the user"
    values |= {
        "entrypoint": shlex.join(words),
        "ray_version": tested_versions()["ray"],
        "rate": ExplainedValue(f"{rate:.4g}", c.peak_per_s.reason),
        "nodes": ExplainedValue(
            nodes,
            f"{why} (--replicas): {nodes} x {rate:.4g} rows/s, a million rows in "
            f"{1e6 / nodes / rate / 60:.3g} min",
        ),
        "store_bytes": str(_STORE_MIB << 20),
        "store_mib": ExplainedValue(_STORE_MIB, "Ray's object store, which no rows pass through"),
        "scratch_mib": ExplainedValue(
            _SCRATCH_MIB, "not measured: a part while it is written, and Ray's logs"
        ),
        "head_mib": ExplainedValue(
            _HEAD_MIB, "measured: Ray's processes on the head and the command use 900 MiB"
        ),
        "node_mib": ExplainedValue(
            server_mib + _NODE_MIB + _STORE_MIB,
            f"{server_mib} MiB for the server ({memory.reason}), {_STORE_MIB} for Ray's object "
            f"store, {_NODE_MIB} for processes: measured, Ray's use 300 MiB, the one that reads "
            "and writes 160 and a part's rows",
        ),
        "shm_mib": ExplainedValue(
            shm.value + _STORE_MIB, f"{_STORE_MIB} MiB for Ray's object store; {shm.reason}"
        ),
    }
    return Manifests(render_files(TEMPLATES / "ray.yaml.j2", **values), c.version, "", APPLY)
