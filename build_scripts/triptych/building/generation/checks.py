"""`triptych test` of a pipeline that generates text, without a server or a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from triptych.building.generation.inputs import read_prompt_lines
from triptych.building.generation.labeled import read_rows
from triptych.building.pipeline_checks import Check
from triptych.runtime.hooking import HOOKS_FILE
from triptych.runtime.prompts import read_messages
from triptych.runtime.request_errors import RequestError
from triptych.spec.any_spec import load_any_spec
from triptych.spec.tasks.eval_file import EVAL_FILE
from triptych.spec.traffic import TRAFFIC_FILE


def check_folder(folder: Path) -> list[Check]:
    """Check the spec, the traffic and the labeled rows.

    Raises:
        UserError: A file is missing or wrong.
    """
    load_any_spec(folder)
    sent = {number: one for number, one, _ in read_prompt_lines(folder / TRAFFIC_FILE)}
    talks = {number: one["messages"] for number, one in sent.items() if "messages" in one}
    checks = [
        Check("spec"),
        Check("traffic", note=f"{len(sent)} prompts, {len(talks)} of them conversations"),
        *_check_talks(talks),
    ]
    if (folder / EVAL_FILE).is_file():
        checks.append(Check("eval", note=f"{len(read_rows(folder / EVAL_FILE))} rows"))
    if (folder / HOOKS_FILE).is_file():
        note = f"{HOOKS_FILE} is not read: a pipeline that generates text has no hooks"
        checks.append(Check("hooks", "warning", note))
    return checks


def _check_talks(talks: dict[int, str]) -> Iterator[Check]:
    for number, text in talks.items():
        try:
            read_messages(text)
        except RequestError as error:
            yield Check("messages", "error", f"{TRAFFIC_FILE}:{number}: {error}")
