"""The verb `deploy`: manifests of a fleet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from triptych.base.errors import UserError, closest
from triptych.deploy.options import DeployOptions
from triptych.interface.cli.command import verb
from triptych.interface.cli.options import (
    REPORTS,
    Folders,
    Json,
    Reports,
    output,
    print_json,
    progress,
    say,
)

OUT = Path("deploy")
SETTINGS_FILE = "deploy.yaml"
"""File beside pipeline.yaml with options of `deploy`."""


@verb()
def deploy(
    context: typer.Context,
    pipeline: Annotated[str, typer.Argument(metavar="name", help="Name of the pipeline's folder.")],
    options: DeployOptions,
    folders: Folders,
    out: Annotated[Path | None, typer.Option(help="Folder to write. Default: deploy/NAME.")] = None,
    reports: Reports = REPORTS,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="List the known defects of the Triton release.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Generate manifests for Kubernetes, KServe, Docker Compose or KubeRay.

    Capacity, memory and scaling follow from serving.slo and from a result of `bench
    --find-max-rate`; numbers that are missing are assumed, and marked with what replaces them.
    Each number in the manifests has a comment with its reason. Options can also be set in
    deploy.yaml beside pipeline.yaml, such as `peak_rps: 200`.
    """
    from triptych.base.formatting import amount
    from triptych.deploy.folder import write_manifests
    from triptych.deploy.targets import make_manifests
    from triptych.interface.cli.tables import print_finding

    settings = read_settings(folders.pipelines / pipeline / SETTINGS_FILE, context)
    options = replace(
        options,
        **{
            field: value
            for field, value in settings.items()
            if "DEFAULT" in str(context.get_parameter_source(field))
        },
    )
    manifests = make_manifests(folders.repository, pipeline, options, reports / pipeline)
    folder = out if out is not None else OUT / pipeline
    write_manifests(folder, manifests.files)
    if as_json:
        print_json({"out": str(folder), **manifests.as_dict()})
        return
    for file in manifests.files:
        progress("write", str(folder / file))
    if verbose:
        for finding in manifests.known_defects:
            print_finding(output, finding.as_dict())
    elif defects := manifests.known_defects:
        said = f"Triton {manifests.triton} has {amount(len(defects), 'known defect')} that this "
        say(output, f"{said}pipeline meets; --verbose lists each with its workaround", "yellow")
    for assumption in manifests.assumptions:
        say(output, str(assumption), "yellow")
    output.print(manifests.command(folder), markup=False)


def _as_given(value: object) -> str | list[str]:
    """Return a value of the file as on the command line; a mapping as ``NAME=VALUE`` texts."""
    if isinstance(value, dict):
        return [f"{name}={_as_given(each)}" for name, each in value.items()]
    return str(value).lower() if isinstance(value, bool) else str(value)


def read_settings(path: Path, context: typer.Context) -> dict[str, Any]:
    """Return the fields of `DeployOptions` that a file sets; {} without a file.

    Args:
        path: YAML file with values by the names of options: ``peak_rps: 200``. That of
            ``--variable`` is a mapping.
        context: Context of the verb, with the names and types of its options.

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
    fields = DeployOptions.__dataclass_fields__
    known = {
        parameter.opts[0].removeprefix("--").replace("-", "_"): parameter
        for parameter in context.command.params
        if parameter.name in fields
    }
    values = {}
    for key, value in settings.items():
        if key not in known:
            raise UserError(
                f"{path}: {key}",
                "is not an option of `triptych deploy`",
                given=value,
                remedy=f"{closest(str(key), list(known))}Use one of: {', '.join(known)}",
            )
        parameter = known[key]
        try:
            values[str(parameter.name)] = parameter.process_value(context, _as_given(value))
        except typer.BadParameter as error:
            raise UserError(
                f"{path}: {key}",
                "must be a value that the option accepts",
                given=f"{value} ({error.message.rstrip('.')})",
                remedy=f"See {parameter.opts[0]} in `triptych deploy --help`",
            ) from error
    return values
