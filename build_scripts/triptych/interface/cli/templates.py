"""Verbs that write pipelines from templates: new, templates, update."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from triptych.base.errors import UserError
from triptych.interface.cli.command import verb
from triptych.interface.cli.options import (
    EXIT_FINDINGS,
    PIPELINES,
    Json,
    Name,
    Pipelines,
    output,
    print_json,
    say,
    status,
)
from triptych.spec.scaffold import tasks

Templates = Annotated[
    Path | None,
    typer.Option(
        "--templates",
        envvar="TRIPTYCH_TEMPLATES",
        help="Folder with templates of your own. Default: only built-in templates.",
    ),
]
Answers = Annotated[
    list[str] | None,
    typer.Option(
        "--answer",
        metavar="KEY=VALUE",
        help="Answer a question of the template; may be repeated. Default: its own answers.",
    ),
]
Ref = Annotated[
    str | None,
    typer.Option(
        metavar="VERSION",
        help="Tag, branch or commit of the template in git. Default: its latest tag.",
    ),
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust", help="Run the tasks, migrations and Jinja extensions of the template here."
    ),
]


@verb()
def new(
    name: Name,
    task: Annotated[
        str | None,
        typer.Argument(
            help=f"Task, or another built-in template (required without --template; `onnx` for an "
            f"ONNX file or a module): "
            f"{', '.join(tasks())}."
        ),
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(
            help="Template in place of TASK: a name that `triptych templates` lists, a folder, or "
            "a git address (gh:OWNER/NAME, git+https://...). Default: that of the task."
        ),
    ] = None,
    answers: Answers = None,
    ref: Ref = None,
    trust: Trust = False,
    templates: Templates = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model: a Hub id, package:NAME, a folder, or an ONNX file or FILE.py:NAME of a "
            "PyTorch module, whose inputs and outputs are declared. Default: the example of the "
            "template."
        ),
    ] = None,
    hooks: Annotated[
        bool, typer.Option("--hooks", help="Add hooks.py for your own functions, with its tests.")
    ] = False,
    pipelines: Pipelines = PIPELINES,
    as_json: Json = False,
) -> None:
    """Write the folder of a new pipeline, and change no existing file."""
    from triptych.core.own_scaffold import describe_model
    from triptych.spec.scaffold import scaffold
    from triptych.spec.template import TemplateChoice

    choice = None
    options = {"--answer": answers, "--ref": ref, "--trust": trust}
    if template is not None:
        choice = TemplateChoice(
            template=template,
            folder=templates,
            answers=_parse_answers(answers),
            ref=ref,
            trust=trust,
        )
    else:
        for option in (option for option, value in options.items() if value):
            raise UserError(
                option,
                "is only supported with --template",
                given=f"{option} without --template",
                remedy="Name the template with --template, or omit the option",
            )
    made = scaffold(
        name,
        task=task,
        model=model,
        with_hooks=hooks,
        pipelines=pipelines,
        describe=describe_model,
        choice=choice,
    )
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


@verb()
def update(
    name: Name,
    answers: Answers = None,
    ref: Ref = None,
    trust: Trust = False,
    pipelines: Pipelines = PIPELINES,
    as_json: Json = False,
) -> None:
    """Merge a later version of its template into a pipeline.

    The folder must be in git, with all changes committed. The update itself is not committed.
    """
    from triptych.spec.template import update as update_pipeline

    done = update_pipeline(pipelines / name, answers=_parse_answers(answers), ref=ref, trust=trust)
    if as_json:
        print_json(done.as_dict())
    else:
        say(output, f"{done.folder}: {done.template}, {done.before} to {done.after}")
        for file in done.files:
            mark = "conflict" if file in done.conflicts else "changed"
            say(output, f"  {mark:9} {file}")
        if not done.files:
            say(output, "  up to date")
    if done.conflicts:
        say(
            status,
            "failed: the template and you changed the same lines. Edit the files with conflicts: "
            "each place has your lines, those of the last template, and those of the new one.",
            "red",
        )
    raise typer.Exit(EXIT_FINDINGS if done.conflicts else 0)


def _parse_answers(texts: Sequence[str] | None) -> dict[str, str]:
    answers = {}
    for text in texts or ():
        key, separator, value = text.partition("=")
        if not separator or not key:
            raise UserError(
                "--answer",
                "must have the form KEY=VALUE",
                given=text,
                remedy="Example: --answer labels=3",
            )
        answers[key] = value
    return answers
