"""Verbs that describe: `list` pipelines with their builds and servers, `fields` of a spec."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from triptych.base.errors import UserError, closest
from triptych.interface.cli.command import verb
from triptych.interface.cli.options import Folders, Json, output, print_json, say

_DIGITS = 12


@verb("list")
def list_pipelines(
    folders: Folders,
    urls: Annotated[
        list[str] | None,
        typer.Option(
            "--url",
            metavar="ADDRESS",
            help="gRPC address of a server to ask; may be repeated. Default: the servers that run "
            "on this machine.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the pipelines, their builds, and the servers that serve them."""
    from triptych.client.server_info import list_served
    from triptych.container.manifests import MANIFEST_FILE, check_readable
    from triptych.serving.process import find_local_servers

    check_readable(folders.repository)
    asked = urls or list(find_local_servers())
    loaded = {url: list_served(url) for url in asked}
    found = _find_tasks(folders.pipelines)
    known = {path.parent.name for path in folders.repository.glob(f"*/{MANIFEST_FILE}")}
    names = sorted({*found, *known, *(name for there in loaded.values() for name in there)})
    listed: list[dict[str, Any]] = [
        {
            "pipeline": name,
            "task": found.get(name, ""),
            **_describe_build(folders.repository, name),
            "served": [url for url, there in loaded.items() if name in there],
        }
        for name in names
    ]
    if as_json:
        print_json(listed)
        return
    widths = [max((len(each[key]) for each in listed), default=0) for key in ("pipeline", "task")]
    for each in listed:
        built = f"built {each['built_at'].replace('T', ' ')} UTC" if each["build"] else "not built"
        parts = [built, each["precision"], each["build"][:_DIGITS]]
        served = f"served at {', '.join(each['served'])}" if each["served"] else "not served"
        line = ", ".join(part for part in [*parts, served] if part)
        say(output, f"{each['pipeline']:{widths[0]}}  {each['task']:{widths[1]}}  {line}")
    if not listed:
        output.print(f"no pipelines in {folders.pipelines}", markup=False)


@verb("fields")
def list_fields(
    field: Annotated[
        str | None,
        typer.Argument(help="Field, or group of fields such as `serving.queue`. Default: all."),
    ] = None,
    task: Annotated[str, typer.Option(help="Task of the pipeline.")] = "text-embedding",
    as_json: Json = False,
) -> None:
    """List the fields of pipeline.yaml with their values and meaning."""
    from triptych.spec.any_spec import SPECS
    from triptych.spec.field_table import describe_fields
    from triptych.spec.kind import MODEL, kind_of_task
    from triptych.spec.template import tasks

    known = (*tasks(), MODEL)
    if task not in known:
        raise UserError(
            "--task",
            f"must be one of {', '.join(known)}",
            given=task,
            remedy=f"{closest(task, known)}Name the `task` of pipeline.yaml",
        )
    every = list(describe_fields(SPECS[kind_of_task(task)]))
    found = [each for each in every if not field or f"{each.name}.".startswith(f"{field}.")]
    if not found:
        raise UserError(
            "FIELD",
            f"must be a field of pipeline.yaml for {task}",
            given=field,
            remedy=f"{closest(str(field), [each.name for each in every])}"
            "`triptych fields` lists all",
        )
    if as_json:
        print_json([each._asdict() for each in found])
        return
    for each in found:
        facts = [each.values, f"default: {each.default}"]
        say(output, f"{each.name}  ({'; '.join(filter(None, facts))})".replace("`", ""))
        say(output, f"    {each.meaning}")


def _find_tasks(folder: Path) -> dict[str, str]:
    """Return the task of each pipeline in a folder; that of a spec with a mistake is empty."""
    from triptych.spec.spec import SPEC_FILE, task_of

    tasks = {}
    for path in folder.glob(f"*/{SPEC_FILE}"):
        try:
            tasks[path.parent.name] = task_of(path.parent)
        except UserError:
            tasks[path.parent.name] = ""
    return tasks


def _describe_build(repository: Path, name: str) -> dict[str, str]:
    from triptych.repository.manifest import build_id
    from triptych.repository.store import read_build

    record = read_build(repository, name)
    if record is None:
        return {"build": "", "built_at": "", "precision": ""}
    return {
        "build": build_id(repository, name),
        "built_at": record.built_at[:19],
        "precision": record.gate.get("precision", ""),
    }
