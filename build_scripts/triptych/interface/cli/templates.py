"""Verbs that write pipelines from templates: new, templates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from triptych.base.errors import UserError
from triptych.interface.cli.command import verb
from triptych.interface.cli.options import (
    PIPELINES,
    Json,
    Name,
    Pipelines,
    output,
    print_json,
    say,
)
from triptych.spec.template import PAIR, tasks

if TYPE_CHECKING:
    from triptych.spec.scaffold import Scaffold

Templates = Annotated[
    Path | None,
    typer.Option(
        "--templates",
        envvar="TRIPTYCH_TEMPLATES",
        help="Folder with templates of your own. Default: only built-in templates.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """Source of a new pipeline."""

    task: Annotated[
        str | None,
        typer.Argument(
            help=f"Task, or another built-in template (required without --template; `onnx` for an "
            f"ONNX file or a module): "
            f"{', '.join(sorted([*tasks(), PAIR]))}."
        ),
    ] = None
    template: Annotated[
        str | None,
        typer.Option(
            help="Template in place of TASK: a name that `triptych templates` lists, or a folder. "
            "Default: that of the task."
        ),
    ] = None
    templates: Templates = None
    model: Annotated[
        str | None,
        typer.Option(
            help="Model: a Hub id, package:NAME, a folder, or an ONNX file or FILE.py:NAME of a "
            "PyTorch module, whose inputs and outputs are declared. Default: the example of the "
            "template."
        ),
    ] = None
    hooks: Annotated[
        bool, typer.Option("--hooks", help="Add hooks.py for your own functions, with its tests.")
    ] = False
    from_repository: Annotated[
        Path | None,
        typer.Option(
            "--from-repository",
            help="Folder of a model repository that was written by hand, or of one of its "
            "ensembles: Python steps around an ONNX model. In place of TASK. Default: none.",
        ),
    ] = None


@verb()
def new(
    name: Name,
    source: SourceOptions,
    pipelines: Pipelines = PIPELINES,
    as_json: Json = False,
) -> None:
    """Write the folder of a new pipeline, and change no existing file."""
    made = _write(name, source, pipelines)
    if as_json:
        print_json(made.as_dict())
        return
    output.print(made.folder, style="bold", markup=False)
    for file in made.files:
        output.print(f"  {file}", markup=False)
    output.print("Edit pipeline.yaml and traffic.jsonl, then:")
    for command in made.commands:
        output.print(f"  {command}", markup=False)


@verb()
def templates(folder: Templates = None, as_json: Json = False) -> None:
    """List the templates for `new --template`, with a sentence each."""
    from triptych.spec.template import list_templates

    listed = list_templates(folder)
    if as_json:
        print_json([template.as_dict() for template in listed])
        return
    width = max(len(template.name) for template in listed)
    for each in listed:
        where = "" if each.is_built_in else f" ({each.folder})"
        say(output, f"{each.name:{width}}  {each.description}{where}")


def _write(name: str, source: SourceOptions, pipelines: Path) -> Scaffold:
    if source.from_repository is None:
        from triptych.core.own_scaffold import describe_model
        from triptych.spec.scaffold import scaffold

        return scaffold(
            name,
            task=source.task,
            model=source.model,
            with_hooks=source.hooks,
            pipelines=pipelines,
            describe=describe_model,
            template=source.template,
            templates=source.templates,
        )
    if given := source.task or source.template or source.model or ("--hooks" * source.hooks):
        raise UserError(
            "--from-repository",
            "takes the place of TASK, --template, --model and --hooks",
            given=given,
            remedy="Omit one of them",
        )
    from triptych.building.from_repository import new_from_repository

    return new_from_repository(name, source.from_repository, pipelines=pipelines)
