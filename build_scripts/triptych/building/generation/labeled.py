"""`eval.jsonl` of a pipeline that generates text: labeled prompts, and their result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from triptych.base.errors import UserError
from triptych.building.generation.inputs import (
    GeneratingInputs,
    Prompt,
    make_prompt,
    read_prompt_lines,
)
from triptych.building.generation.reference import answer_tokens
from triptych.spec.tasks.eval_file import EVAL_FILE
from triptych.spec.tasks.labeled import LabeledResult, LabeledRow, compare_labeled
from triptych.spec.tasks.metrics_generated import GENERATED, OUTPUT, TEXTS

MAX_ROWS = 200
"""Maximum number of labeled rows that are answered."""


class LabeledPrompts(NamedTuple):
    """Rows of ``eval.jsonl`` and the prompt of each."""

    rows: tuple[LabeledRow, ...] = ()
    prompts: tuple[Prompt, ...] = ()


def read_labeled(inputs: GeneratingInputs) -> LabeledPrompts:
    """Read the first rows of the file; without a file, return none.

    Raises:
        UserError: A line is not a prompt with correct answers, or is too long for an answer.
    """
    path = inputs.spec.folder / EVAL_FILE
    if not path.is_file():
        return LabeledPrompts()
    rows, prompts = read_rows(path)[:MAX_ROWS], []
    for row in rows:
        place = f"{path}:{row.line}"
        prompt = make_prompt(inputs, row.requests[0], place)
        if answer_tokens(inputs, prompt) < 1:
            raise UserError(
                place,
                f"must have fewer than {inputs.max_length - 1} tokens",
                given=len(prompt.ids),
                remedy="Shorten the prompt, or raise core.max_model_len",
            )
        prompts.append(prompt)
    return LabeledPrompts(tuple(rows), tuple(prompts))


def read_rows(path: Path) -> list[LabeledRow]:
    """Read every row of ``eval.jsonl``.

    Raises:
        UserError: A line is not a prompt with correct answers, or the file is empty.
    """
    rows = []
    for number, sent, line in read_prompt_lines(path):
        try:
            truth = TEXTS.read(line.get(TEXTS.key), "")
        except ValueError as error:
            raise UserError(
                f"{path}:{number}",
                f"must have {TEXTS.rule} as `{TEXTS.key}`",
                given=repr(line.get(TEXTS.key))[:80],
                remedy=f'Write for example {{"text_input": "…", "{TEXTS.key}": {TEXTS.example}}}',
            ) from error
        rows.append(LabeledRow(number, (dict(sent),), {}, truth))
    return rows


def judge_labeled(
    inputs: GeneratingInputs, labeled: LabeledPrompts, got: Sequence[str], reference: Sequence[str]
) -> LabeledResult | None:
    """Compare texts with the reference's on labeled rows; return None without rows."""
    if not labeled.rows:
        return None
    accuracy = inputs.spec.accuracy
    return compare_labeled(
        GENERATED[accuracy.metric],
        labeled.rows,
        [{OUTPUT: np.array([text])} for text in got],
        [{OUTPUT: np.array([text])} for text in reference],
        max_drop=accuracy.max_drop,
    )
