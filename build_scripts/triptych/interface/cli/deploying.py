"""The verb that writes manifests: `deploy`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer

from triptych.base.errors import UserError
from triptych.deploy.options import ROLLOUTS, TARGETS, DeployOptions, parse_mebibytes, parse_target
from triptych.interface.cli.options import (
    REPORTS,
    REPOSITORY,
    Json,
    Repository,
    app,
    output,
    print_json,
    progress,
)
from triptych.interface.cli.tables import tell_findings

OUT = Path("deploy")


@app.command()
def deploy(
    name: Annotated[
        str | None, typer.Argument(help="Pipeline: the name of its folder. --check needs none.")
    ] = None,
    image: Annotated[
        str | None,
        typer.Option("--image", metavar="IMAGE", help="The serving image, with its tag."),
    ] = None,
    target: Annotated[
        str, typer.Option(help=f"What for: {', '.join(TARGETS)}.")
    ] = DeployOptions.target,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder to write; without it deploy/NAME.")
    ] = None,
    repository: Repository = REPOSITORY,
    reports: Annotated[Path, typer.Option("--reports", help="Folder of the reports.")] = REPORTS,
    models: Annotated[
        str | None,
        typer.Option(
            metavar="IMAGE", help="Holds the repository, no tag; without it a volume claim does."
        ),
    ] = None,
    object_name: Annotated[
        str | None, typer.Option("--as", metavar="NAME", help="Of the objects, if not NAME.")
    ] = None,
    namespace: Annotated[
        str, typer.Option(help="Where the objects live.")
    ] = DeployOptions.namespace,
    prometheus: Annotated[
        str, typer.Option(metavar="URL", help="Prometheus, as KEDA reaches it.")
    ] = DeployOptions.prometheus,
    triton: Annotated[
        str | None,
        typer.Option(metavar="TAG", help="Release in the image; without it serving.triton."),
    ] = None,
    capacity: Annotated[
        float | None,
        typer.Option(help="Requests a second that one replica holds; else what bench found."),
    ] = None,
    cpu: Annotated[float | None, typer.Option(help="Cores of a replica; else as measured.")] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="As 2Gi; else as measured.")
    ] = None,
    ready: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="From the wish for a replica to its first answer."),
    ] = None,
    growth: Annotated[
        float, typer.Option(help="Share by which the rate may grow within a minute.")
    ] = DeployOptions.max_growth,
    peak_rate: Annotated[
        float | None, typer.Option("--peak-rate", help="Requests a second to be served at most.")
    ] = None,
    grace: Annotated[
        int | None, typer.Option(metavar="SECONDS", help="That the platform lets a replica end.")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="PRODUCT", help="GPU, as its nodes are labeled; else the engine's."),
    ] = None,
    envoy_image: Annotated[
        str, typer.Option("--envoy-image", metavar="IMAGE", help="The proxy in front.")
    ] = DeployOptions.envoy_image,
    gateway: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Gateway of the cluster, in place of that proxy."),
    ] = None,
    rollout: Annotated[
        str | None,
        typer.Option(help=f"Who exchanges builds step by step: {', '.join(ROLLOUTS)}."),
    ] = None,
    affinity: Annotated[
        str | None,
        typer.Option(metavar="HEADER", help="Of streams: equal values, the same replica."),
    ] = None,
    canary: Annotated[
        int | None,
        typer.Option(metavar="PERCENT", help="Of the requests for a new build (KServe)."),
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(help="On the host (compose); else as many as are promised.")
    ] = None,
    watch_image: Annotated[
        str | None,
        typer.Option("--watch-image", metavar="IMAGE", help="Looks at what the servers sample."),
    ] = None,
    mirror: Annotated[
        str | None,
        typer.Option(metavar="REPOSITORY:SHARE", help="Build that gets copies of requests."),
    ] = None,
    replaces: Annotated[
        Path | None,
        typer.Option(metavar="REPOSITORY", help="Build in place: a canary must answer as well."),
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write nothing: say what will hurt in manifests."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write manifests for a fleet, numbers with reasons; or check some.

    They come from the lock, the promise (serving.slo) and what bench measured.
    """
    if check is not None:
        _check(check, triton, None if name is None else (repository, name, reports / name), as_json)
    if name is None or image is None:
        raise UserError(
            "NAME" if name is None else "--image",
            "must be given but for --check",
            remedy="As in `triptych deploy minilm --image triptych-serve:26.08`",
        )
    from triptych.base.releases import parse_release
    from triptych.deploy.folder import write_manifests
    from triptych.deploy.targets import manifests_of
    from triptych.repository.manifest import read_built_spec
    from triptych.serving.fleet.mirrored import mirrored_of

    built = read_built_spec(repository, name)
    release = triton or built.serving.triton
    options = DeployOptions(
        image=image,
        name=name if object_name is None else object_name,
        release=parse_release(release),
        namespace=namespace,
        prometheus=prometheus,
        repository_image=models,
        rps_per_replica=capacity,
        cpu_cores=cpu,
        memory_mib=parse_mebibytes("--memory", memory),
        startup_seconds=ready,
        max_growth=growth,
        peak_rps=peak_rate,
        max_grace_seconds=grace,
        gpu_product=gpu,
        target=parse_target(target),
        envoy_image=envoy_image,
        gateway=gateway,
        rollout=rollout,
        canary_percent=canary,
        replicas=replicas,
        monitor_image=watch_image,
        mirrored=None if mirror is None else mirrored_of(mirror),
        baseline=replaces,
        affinity_header=affinity,
    )
    manifests = manifests_of(repository, name, options, reports / name)
    folder = out if out is not None else OUT / name
    write_manifests(folder, manifests.files)
    if as_json:
        print_json({"out": str(folder), **manifests.as_dict()})
        return
    for file in manifests.files:
        progress("write", str(folder / file))
    output.print(manifests.command(folder), markup=False)


def _check(
    folder: Path, triton: str | None, pipeline: tuple[Path, str, Path] | None, as_json: bool
) -> NoReturn:
    """Print the findings on manifests; exits as `lint` does."""
    from triptych.base.releases import parse_release
    from triptych.deploy.checks import check_manifests
    from triptych.deploy.targets import known_of

    known = None if pipeline is None else known_of(*pipeline)
    release = None if triton is None else parse_release(triton)
    found = check_manifests(folder, release=release, known=known)
    tell_findings(found, as_json)
