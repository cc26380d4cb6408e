"""The verb that writes manifests: `deploy`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from triptych.cli.options import (
    REPORTS,
    REPOSITORY,
    Json,
    Name,
    Repository,
    app,
    output,
    print_json,
    progress,
)
from triptych.deploy.options import TARGETS, Options, mebibytes
from triptych.errors import UserError

OUT = Path("deploy")


@app.command()
def deploy(
    name: Name,
    image: Annotated[
        str, typer.Option("--image", metavar="IMAGE", help="The serving image, with its tag.")
    ],
    target: Annotated[str, typer.Option(help=f"What for: {', '.join(TARGETS)}.")] = TARGETS[0],
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
    namespace: Annotated[str, typer.Option(help="Where the objects live.")] = Options.namespace,
    prometheus: Annotated[
        str, typer.Option(metavar="URL", help="Prometheus, as KEDA reaches it.")
    ] = Options.prometheus,
    envoy: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Deployment of an Envoy in front; it tells latencies."),
    ] = None,
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
    ] = Options.growth,
    peak_rate: Annotated[
        float | None, typer.Option("--peak-rate", help="Requests a second to be served at most.")
    ] = None,
    grace: Annotated[
        int | None, typer.Option(metavar="SECONDS", help="That the platform lets a replica end.")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="PRODUCT", help="GPU, as its nodes are labelled; else the engine's."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write manifests for a cluster, each number with its reason.

    They come from the lock, the promise (serving.slo) and what bench measured.
    """
    from triptych.deploy.folder import write_manifests
    from triptych.deploy.kubernetes import kubernetes_manifests
    from triptych.releases import parse_release
    from triptych.repository.lock import read_lock

    if target not in TARGETS:
        raise UserError("--target", f"must be one of {', '.join(TARGETS)}", given=target)
    release = triton or read_lock(repository, name).spec.serving.triton
    options = Options(
        image=image,
        name=name if object_name is None else object_name,
        release=parse_release(release),
        namespace=namespace,
        prometheus=prometheus,
        models=models,
        envoy=envoy,
        capacity_per_s=capacity,
        cpu_cores=cpu,
        memory_mib=mebibytes("--memory", memory),
        ready_s=ready,
        growth=growth,
        peak_per_s=peak_rate,
        grace_s=grace,
        gpu=gpu,
    )
    manifests = kubernetes_manifests(repository, name, options, reports / name)
    folder = out if out is not None else OUT / name
    write_manifests(folder, manifests.files)
    if as_json:
        print_json({"out": str(folder), **manifests.as_dict()})
        return
    for file in manifests.files:
        progress("write", str(folder / file))
    output.print(f"kubectl apply -k {folder / manifests.overlay}", markup=False)
