"""`triptych deploy --target kserve`: a Kustomize folder with an overlay for each mode of KServe."""

from __future__ import annotations

from triptych.base.explained import render_files
from triptych.deploy.context import DeploymentContext, Manifests
from triptych.deploy.kubernetes import APPLY, TEMPLATES, template_values


def make_files(c: DeploymentContext) -> Manifests:
    """Return the files of the target."""
    values = template_values(c)
    files = render_files(TEMPLATES / "kserve.yaml.j2", **values)
    base = [path.removeprefix("base/") for path in files if path.startswith("base/")]
    files |= render_files(TEMPLATES / "kustomization.yaml.j2", **values, resources=base)
    mode = "standard" if c.options.canary_percent is None else "knative"
    return Manifests(files, c.version, f"overlays/{mode}", APPLY)
