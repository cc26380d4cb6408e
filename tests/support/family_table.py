"""The results of families on record, and the page of documentation that shows them."""

import json
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support.project import ROOT

RECORD = ROOT / "tests/data/families.jsonl"
PAGE = ROOT / "build_scripts/documentation/guides/families.md"
LIMIT = 1e-5
"""Largest difference from the reference in fp32 with which a family counts as served."""
NOT_MEASURED = "not measured"
OUTCOMES = ("served", "differs", "refused", "not built", NOT_MEASURED)


class Result(NamedTuple):
    """Outcome of a family in a task.

    Attributes:
        family: Name of the model type in transformers.
        task: Task of the pipeline.
        outcome: One of `OUTCOMES`. ``differs`` is a core that passed the gate and differs from the
            reference by more than `LIMIT`; ``not built`` means that no small model could be made;
            ``not measured`` means that the result is not on record yet.
        layout: Layout of the core; empty if there is none.
        difference: Largest difference from the reference; None if there is no core.
        message: Reason of a refusal, or of a model that could not be made.
    """

    family: str
    task: str
    outcome: str
    layout: str = ""
    difference: float | None = None
    message: str = ""


def read_record(path: Path = RECORD) -> list[Result]:
    """Return the results on record, one JSON list a line, sorted by family and task."""
    return [Result(*json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def write_record(results: Sequence[Result]) -> None:
    """Put results on record, in place of earlier ones of the same family and task."""
    known = {(result.family, result.task): result for result in [*read_record(), *results]}
    lines = [json.dumps(list(known[pair]), ensure_ascii=False) for pair in sorted(known)]
    RECORD.write_text("\n".join(lines) + "\n", encoding="utf-8")
    PAGE.write_text(render_page(read_record()), encoding="utf-8")


def render_page(results: Sequence[Result]) -> str:
    """Return the page of documentation in Markdown, with a line for each result."""
    count = Counter(result.outcome for result in results)
    shown = [result for result in results if result.outcome != NOT_MEASURED]
    families = len({result.family for result in shown})
    left = count[NOT_MEASURED]
    lines = [
        "# Model families",
        "",
        "A test builds a small model with random weights of each family (model type of",
        "transformers), runs three rows of different lengths through its core, each alone and all",
        "in one batch, and compares the results with transformers on each row alone; embeddings",
        f"with sentence-transformers. The largest allowed difference is {LIMIT:g} in fp32.",
        "`make test` checks one family, another one after each commit, and `make test-long` checks",
        "all of them.",
        "",
        f"The table has {len(shown)} results of {families} families:",
        "",
        f"- {count['served']} are served, with the largest difference in the table.",
        f"- {count['differs']} pass the accuracy gate and differ by more than the limit.",
        f"- {count['refused']} are refused by `build`, with the message in the table.",
        f"- {count['not built']} are not checked: no small model could be made, as the table says.",
        *(["", f"{left} more results are not measured yet."] if left else []),
        "",
        "| family | task | result | largest difference | message |",
        "| --- | --- | --- | --- | --- |",
    ]
    for result in shown:
        outcome = f"{result.outcome}, {result.layout}" if result.layout else result.outcome
        far = "" if result.difference is None else f"{result.difference:.0e}"
        cells = (result.family, result.task, outcome, far, result.message.replace("|", "\\|"))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def short(message: str) -> str:
    """Return a message in one line of at most 200 characters."""
    line = " ".join(message.split())
    return line if len(line) <= 200 else line[:199] + "…"


def turn(count: int, size: int) -> list[int]:
    """Return `size` indexes below `count`; the next commit has the following ones."""
    command = ["git", "rev-list", "--count", "HEAD"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    commits = int(answer.stdout) if answer.returncode == 0 else 0
    return [(commits * size + index) % count for index in range(size)]
