"""What `watch --apply` does with a look's proposal, and what it tells of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from triptych.base.errors import UserError
from triptych.interface.cli.options import output, progress, status
from triptych.interface.cli.running import stoppable
from triptych.interface.cli.shown import print_built, print_failed_gate

if TYPE_CHECKING:
    from triptych.operate.watch.found import Look


def apply_look(
    look: Look,
    samples: Path,
    pipelines: Path,
    repository: Path,
    watched: Path,
    *,
    most: int,
    as_json: bool,
) -> dict[str, Any] | None:
    """Build what a look proposes and put it in place; None where it proposes nothing.

    Args:
        look: just taken.
        samples: folder of what servers sampled.
        pipelines: folder of the pipelines.
        repository: folder of the models.
        watched: folder of the pipeline's timeline.
        most: rows of the new traffic.
        as_json: whether standard output is for the result alone.

    Returns:
        ``build``, ``replaced`` and more of what is in place, or ``failure``: why all is as it was.
    """
    from triptych.core.engine.stage import EngineFailure
    from triptych.core.gate.cached import GateFailure
    from triptych.core.inputs import read_inputs
    from triptych.operate.watch.apply import apply_proposal, describe_applied, hindrance
    from triptych.operate.watch.sample import read_files
    from triptych.operate.watch.timeline import read_timeline
    from triptych.repository.lint.rendered import LintFailure
    from triptych.spec.spec import load_spec

    if look.drift is None or look.drift.proposal is None:
        return None
    inputs = read_inputs(load_spec(pipelines / look.pipeline), progress).as_built(repository)
    last = read_files(samples, look.pipeline, read_timeline(watched).last)
    rows = [row for row in last.rows if row.build == look.build]
    failure = hindrance(inputs, look, rows, repository)
    if not failure:
        try:
            with stoppable():
                done = apply_proposal(inputs, look, rows, repository, progress, most=most)
        except (GateFailure, EngineFailure) as error:
            print_failed_gate(status, error.gate)
            failure = str(error)
        except LintFailure as error:
            failure = str(error)
        except UserError as error:
            failure = error.message
        else:
            print_built(status, done.built)
            for line in describe_applied(done):
                (status if as_json else output).print(line, markup=False)
            return done.as_dict()
    status.print(f"not applied, all is as it was: {failure}", style="red", markup=False)
    return {"failure": failure}
