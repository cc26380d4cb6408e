"""The verb `deploy`: manifests of a fleet."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
import yaml

from triptych.base.errors import UserError, closest
from triptych.deploy.options import (
    ENVOY_IMAGE,
    ROLLOUTS,
    TARGETS,
    DeployOptions,
    parse_mebibytes,
    parse_target,
)
from triptych.interface.cli.command import Formerly, verb
from triptych.interface.cli.options import (
    REPORTS,
    Folders,
    Json,
    Reports,
    output,
    print_json,
    progress,
)

OUT = Path("deploy")
SETTINGS_FILE = "deploy.yaml"
"""File beside pipeline.yaml with options of `deploy`."""


@dataclass(frozen=True, kw_only=True)
class DeployFlags:
    """Options of `deploy`, as on the command line and in `SETTINGS_FILE`.

    Most are fields of `deploy.options.DeployOptions`, with the same names.
    """

    image: Annotated[
        str | None,
        typer.Option(
            "--image",
            metavar="IMAGE",
            help="Serving image, with a tag or a digest. Default: triptych-serve:RELEASE, "
            "as built by `make image`.",
        ),
    ] = None
    target: Annotated[
        str, typer.Option(help=f"Platform of the manifests: {', '.join(TARGETS)}.")
    ] = DeployOptions.target
    repository_image: Annotated[
        str | None,
        typer.Option(
            metavar="IMAGE",
            help="Image that contains the model repository, without a tag. "
            "Default: a PersistentVolumeClaim.",
        ),
        Formerly("--models"),
    ] = None
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            metavar="NAME",
            help="Name of the Kubernetes objects. Default: the pipeline's name.",
        ),
        Formerly("--as"),
    ] = None
    namespace: Annotated[str, typer.Option(help="Namespace of the Kubernetes objects.")] = (
        DeployOptions.namespace
    )
    prometheus: Annotated[
        str, typer.Option(metavar="URL", help="Address at which KEDA reaches Prometheus.")
    ] = DeployOptions.prometheus
    triton: Annotated[
        str | None,
        typer.Option(metavar="YY.MM", help="Triton release in the image. Default: serving.triton."),
    ] = None
    rps_per_replica: Annotated[
        float | None,
        typer.Option(help="Requests/s that one replica sustains. Default: as measured by bench."),
        Formerly("--capacity"),
    ] = None
    cpu: Annotated[
        float | None,
        typer.Option(help="Number of CPU cores per replica. Default: as measured by bench."),
    ] = None
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory per replica, such as 1500Mi or 2Gi. Default: as measured by bench.",
        ),
    ] = None
    startup_seconds: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Seconds from scaling up until a new replica serves requests. "
            "Default: the measured load time of the models.",
        ),
        Formerly("--ready"),
    ] = None
    max_growth: Annotated[
        float,
        typer.Option(
            help="Maximum growth of the request rate within a minute: 0.5 for half as much again."
        ),
        Formerly("--growth"),
    ] = DeployOptions.max_growth
    peak_rps: Annotated[
        float | None,
        typer.Option(
            "--peak-rps",
            help="Maximum load in requests/s. Default: the load of 4 times the minimum replicas.",
        ),
        Formerly("--peak-rate"),
    ] = None
    max_grace_seconds: Annotated[
        int | None,
        typer.Option(
            metavar="SECONDS",
            help="Maximum termination grace period that the platform allows, in seconds. "
            "Default: no maximum.",
        ),
        Formerly("--grace"),
    ] = None
    gpu_product: Annotated[
        str | None,
        typer.Option(
            metavar="PRODUCT",
            help="GPU product in the labels of the nodes. Default: the engine's GPU.",
        ),
        Formerly("--gpu"),
    ] = None
    envoy_image: Annotated[
        str,
        typer.Option("--envoy-image", metavar="IMAGE", help="Image of the Envoy proxy."),
    ] = ENVOY_IMAGE
    gateway: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Gateway of the cluster that routes to the servers. Default: an Envoy Deployment.",
        ),
    ] = None
    rollout: Annotated[
        str | None,
        typer.Option(
            help=f"Controller of gradual rollouts: {', '.join(ROLLOUTS)}. Default: the Deployment."
        ),
    ] = None
    affinity_header: Annotated[
        str | None,
        typer.Option(
            metavar="HEADER",
            help="Header whose equal values select the same replica, for text generation. "
            "Default: none.",
        ),
        Formerly("--affinity"),
    ] = None
    canary_percent: Annotated[
        int | None,
        typer.Option(
            metavar="PERCENT",
            help="Percentage of requests for a new build (kserve). Default: no canary.",
        ),
        Formerly("--canary"),
    ] = None
    replicas: Annotated[
        int | None,
        typer.Option(
            help="Number of replicas on a host (compose). Default: enough for the SLO's throughput."
        ),
    ] = None
    monitor_image: Annotated[
        str | None,
        typer.Option(
            "--monitor-image",
            metavar="IMAGE",
            help="Image that runs `triptych monitor` on sampled rows. Default: no monitoring.",
        ),
        Formerly("--watch-image"),
    ] = None
    mirror: Annotated[
        str | None,
        typer.Option(
            metavar="REPOSITORY:SHARE",
            help="Candidate build that gets copies of a share (0 to 1) of the requests. "
            "Default: no candidate.",
        ),
    ] = None
    baseline: Annotated[
        Path | None,
        typer.Option(
            metavar="REPOSITORY",
            help="Repository of the active build that `shadow` compares a canary with. "
            "Default: no comparison.",
        ),
        Formerly("--replaces"),
    ] = None


@verb()
def deploy(
    context: typer.Context,
    pipeline: Annotated[str, typer.Argument(metavar="NAME", help="Name of the pipeline's folder.")],
    flags: DeployFlags,
    folders: Folders,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder to write. Default: deploy/NAME.")
    ] = None,
    reports: Reports = REPORTS,
    as_json: Json = False,
) -> None:
    """Generate manifests for Kubernetes, KServe or Docker Compose.

    Each number in them has a comment with its reason: the build, its SLO or what bench measured.
    Options can also be set in deploy.yaml beside pipeline.yaml, such as `peak_rps: 200`.
    """
    from triptych.base.releases import parse_release
    from triptych.deploy.folder import write_manifests
    from triptych.deploy.targets import make_manifests
    from triptych.repository.manifest import read_built_spec
    from triptych.serving.fleet.mirror_option import parse_mirror

    settings = {
        key: value
        for key, value in read_settings(folders.pipelines / pipeline / SETTINGS_FILE).items()
        if "DEFAULT" in str(context.get_parameter_source(key))
    }
    chosen = vars(replace(flags, **settings))
    triton, mirror, cpu, memory = map(chosen.pop, ("triton", "mirror", "cpu", "memory"))
    triton = triton or read_built_spec(folders.repository, pipeline).serving.triton
    options = DeployOptions(
        **{
            **chosen,
            "image": chosen["image"] or f"triptych-serve:{triton}",
            "name": chosen["name"] or pipeline,
            "release": parse_release(triton),
            "target": parse_target(chosen["target"]),
            "cpu_cores": cpu,
            "memory_mib": parse_mebibytes("--memory", memory),
            "mirrored": None if mirror is None else parse_mirror(mirror),
        }
    )
    manifests = make_manifests(folders.repository, pipeline, options, reports / pipeline)
    folder = out if out is not None else OUT / pipeline
    write_manifests(folder, manifests.files)
    if as_json:
        print_json({"out": str(folder), **manifests.as_dict()})
        return
    for file in manifests.files:
        progress("write", str(folder / file))
    output.print(manifests.command(folder), markup=False)


def read_settings(path: Path) -> dict[str, Any]:
    """Return the options that a file sets, by their names in `DeployFlags`; {} without a file.

    Raises:
        UserError: The file is no YAML mapping, or has an unknown key or a value of a wrong type.
    """
    if not path.is_file():
        return {}
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(
            str(path), "must be valid YAML", given=error, remedy="Correct the file"
        ) from error
    if not isinstance(settings, dict):
        raise UserError(
            str(path),
            "must be a mapping of options to values",
            given=type(settings).__name__,
            remedy="Write a line such as `peak_rps: 200`",
        )
    types = get_type_hints(DeployFlags)
    known = [field.name for field in fields(DeployFlags)]
    for key, value in settings.items():
        if key not in known:
            raise UserError(
                f"{path}: {key}",
                "is not an option of `triptych deploy`",
                given=value,
                remedy=f"{closest(str(key), known)}Use one of: {', '.join(known)}",
            )
        wanted = types[key]
        if wanted == (float | None) and type(value) is int:
            settings[key] = float(value)
        elif wanted == (Path | None) and isinstance(value, str):
            settings[key] = Path(value)
        elif not isinstance(value, wanted) or isinstance(value, bool):
            name = getattr(wanted, "__name__", None) or str(wanted).removesuffix(" | None")
            raise UserError(
                f"{path}: {key}",
                f"must be a value of type {name}",
                given=value,
                remedy=f"See --{str(key).replace('_', '-')} in `triptych deploy --help`",
            )
    return settings
