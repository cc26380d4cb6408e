"""Verbs for the build history: history, rollback."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

import typer

from triptych.base.errors import UserError
from triptych.interface.cli.command import verb
from triptych.interface.cli.options import (
    REPOSITORY,
    Json,
    Name,
    Repository,
    output,
    print_json,
)

_DIGITS = 12


@verb()
def history(
    name: Name,
    repository: Repository = REPOSITORY,
    keep: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Number of replaced builds to keep; older ones are removed. Default: remove none.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the active build and the builds that it replaced.

    The last five replaced builds are kept next to the repository, for `triptych rollback`.
    """
    from triptych.base.formatting import amount
    from triptych.repository.manifest import build_id
    from triptych.repository.store import history_folder, list_history, measure_history_bytes, prune

    if keep is not None:
        prune(repository, name, keep)
    builds = []
    if in_place := build_id(repository, name):
        builds.append(_describe(repository, name, in_place, ""))
    kept = list_history(repository, name)
    builds += [_describe(build.folder, name, build.build, build.replaced_at) for build in kept]
    if not builds:
        raise UserError(
            name,
            f"is not built in {repository} and has no build history",
            given="no build",
            remedy=f"Run `triptych build {name}` first",
        )
    taken = measure_history_bytes(repository, name)
    if as_json:
        print_json({"builds": builds, "kept_bytes": taken})
        return
    for build in builds:
        state = f"replaced {build['replaced_at'][:19]} UTC" if build["replaced_at"] else "active"
        line = f"{build['build'][:_DIGITS]}  built {build['built_at']} UTC, {state}"
        output.print(line, style="" if build["replaced_at"] else "bold", markup=False)
        output.print(f"  {build['precision'] or 'no precision'}, {build['gate']}", markup=False)
        output.print(f"  bench: {build['bench'] or 'not measured'}", markup=False)
        if build["slo"]:
            output.print(f"  {build['slo']}", markup=False)
    where = f" in {history_folder(repository)}" if kept else ""
    output.print(
        f"{amount(len(kept), 'replaced build')}{where}, {taken / 1e6:.1f} MB", markup=False
    )


@verb()
def rollback(
    name: Name,
    build: Annotated[
        str | None,
        typer.Argument(help="First digits of the build's ID. Default: the last replaced build."),
    ] = None,
    repository: Repository = REPOSITORY,
    as_json: Json = False,
) -> None:
    """Activate a replaced build again.

    The active build joins the history. A server started by `serve` reloads the pipeline. Pipelines
    that share the core are rolled back too, unless they already use the core of that build.
    """
    from triptych.repository.history import rollback

    done = rollback(repository, name, build)
    if as_json:
        print_json({"builds": done.builds, "replaced": done.replaced, "changed": done.changed})
        return
    for pipeline, now in done.builds.items():
        before = done.replaced[pipeline]
        kept = f"; {before[:_DIGITS]} is in the history" if before else ""
        output.print(f"{pipeline}: build {now[:_DIGITS]} is active again{kept}", markup=False)
    output.print(f"`triptych build {name}` builds the pipeline's folder again.", markup=False)


def _describe(folder: Path, pipeline: str, build: str, replaced_at: str) -> dict[str, Any]:
    from triptych.repository.manifest import FIGURES_FILE
    from triptych.repository.store import read_build

    record = read_build(folder, pipeline)
    gate = {} if record is None else record.gate
    figures = folder / pipeline / FIGURES_FILE
    text = figures.read_text(encoding="utf-8", errors="replace") if figures.is_file() else ""
    parts = [part for part in text.split("\n\n") if not part.startswith("#")]
    lines = list(takewhile(lambda part: not part.startswith("|"), parts))
    return {
        "build": build,
        "built_at": "" if record is None else record.built_at[:19],
        "replaced_at": replaced_at,
        "precision": gate.get("precision", ""),
        "gate": "build manifest not readable" if record is None else _verdict(gate),
        "verdicts": {verdict["metric"]: verdict["value"] for verdict in gate.get("verdicts", ())},
        "bench": "".join(lines[:1]).removeprefix("Best: ").strip(),
        "slo": "".join(lines[1:2]).strip(),
    }


def _verdict(gate: Mapping[str, Any]) -> str:
    if not gate:
        return "not checked"
    if gate["failures"]:
        return f"failed, accepted: {gate.get('accepted', '')}"
    limited = [v for v in gate["verdicts"] if None not in (v["limit"], v["value"])]
    return "passed" + "".join(
        f", {v['metric']} {v['value']:.4g} (limit {v['limit']:g})" for v in limited
    )
