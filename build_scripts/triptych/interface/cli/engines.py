"""The verb that runs where TensorRT is: `engine`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from triptych.interface.cli.options import (
    REPOSITORY,
    Json,
    Names,
    Repository,
    app,
    fail,
    output,
    print_json,
    progress,
    status,
)
from triptych.interface.cli.shown import print_failed_gate


@app.command()
def engine(
    names: Names,
    repository: Repository = REPOSITORY,
    rehearse: Annotated[
        bool,
        typer.Option("--rehearse", help="Only try them, with TensorRT for RTX and without a GPU."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Build TensorRT engines on this GPU, checked before they count."""
    from triptych.core.engine.stage import EngineFailure, build_engine

    if rehearse:
        _rehearse(names, repository, as_json=as_json)
        return
    results = []
    for name in names:
        status.print(name, style="bold", markup=False)
        try:
            built = build_engine(repository, name, progress)
        except EngineFailure as failure:
            print_failed_gate(status, failure.gate)
            fail(as_json, {"pipeline": name, "gate": failure.gate.as_dict()}, str(failure))
        results.append(built.as_dict())
        if not as_json:
            record = built.record
            made = f"TensorRT {record.tensorrt}, {record.gpu}, {record.precision}"
            state = "written" if built.changed else "up to date"
            output.print(f"{built.owner}_core: {made}: {state}", markup=False)
    if as_json:
        print_json(results)


def _rehearse(names: list[str], repository: Path, *, as_json: bool) -> None:
    from triptych.core.engine.rehearsal import describe
    from triptych.core.engine.stage import rehearse_engine

    results = []
    for name in names:
        status.print(name, style="bold", markup=False)
        done = rehearse_engine(repository, name, progress)
        results.append(done.as_dict())
        if not as_json:
            output.print(f"{done.owner}_core: {describe(done.record)}", markup=False)
    if as_json:
        print_json(results)
