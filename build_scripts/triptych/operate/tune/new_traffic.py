"""Token lengths of new traffic: of a sample of requests, or of what a server counted of its own.

The server counts rows in buckets (`triptych.runtime.lengths`). The mean is exact; a length is known
to its bucket only, whose ends are 1.26 times apart, or nearer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from triptych.base.errors import UserError
from triptych.core.inputs import PipelineInputs
from triptych.core.reader import RequestReader
from triptych.runtime.hooking import find_hook
from triptych.serving.bench.resources import MetricSample, read_metrics
from triptych.spec.plan import Plan
from triptych.spec.traffic import Lengths, read_traffic

ROW_TOKENS = "triptych_row_tokens"
"""What the names of the server's counters begin with."""

MOST = 2.0**53
"""A larger number does not count one by one any more."""

PARTS = 8
"""Lengths that the rows of one bucket are spread over."""


@dataclass(frozen=True)
class NewTraffic:
    source: str  # where it is from, in words
    lengths: Lengths
    """In tokens; approximate within a bucket where there are `edges`.

    Of counted rows, those at the limit stand for the truncated ones.
    """
    mean: float  # tokens of a row, exact
    edges: tuple[int, ...] = ()  # ends of the buckets, ascending; empty where all is exact
    rows_per_s: float | None = None  # rows of the model; None where that is not known
    notes: tuple[str, ...] = ()  # what to know before it is used
    take: str = ""  # what puts these rows into the pipeline's traffic; empty where nothing does


def read_lengths(
    inputs: PipelineInputs,
    path: Path,
    *,
    before: Path | None = None,
    seconds: float | None = None,
) -> NewTraffic:
    """Read a sample of requests (``.jsonl``, as ``traffic.jsonl``) or a saved metrics page.

    Args:
        inputs: the pipeline.
        path: of the sample, or of the page.
        before: an earlier page: only what was counted since then counts.
        seconds: between the two pages, or since the server's start; None takes the difference of
            the files' times where there are two.

    Raises:
        UserError: a file that cannot be read, or is of neither form.
    """
    if path.suffix == ".jsonl" and before is None:
        return tokenize_sample(inputs, path)
    pages = [_read_page(each) for each in (path, before) if each is not None]
    if before is not None and seconds is None:
        seconds = path.stat().st_mtime - before.stat().st_mtime
    earlier = pages[1] if before is not None else None
    return count_page(inputs.plan, pages[0], str(path), before=earlier, seconds=seconds)


def tokenize_sample(inputs: PipelineInputs, path: Path) -> NewTraffic:
    """Lengths of the requests in a ``.jsonl`` file, as `read_inputs` has them of the traffic.

    Raises:
        UserError: a line that is no request which the pipeline takes.
    """
    plan = inputs.plan
    _check_text(plan)
    names = [tensor.name for tensor in plan.task.inputs]
    rows = read_traffic(path.parent, names, file=path.name)
    before = find_hook(plan.spec.folder, "before")
    reader = RequestReader(plan.spec, plan.task, plan.facts, inputs.tokenizer_folder, before)
    lengths = reader.lengths(reader.read(str(path.resolve()), rows))
    return NewTraffic(f"{len(rows)} requests of {path}", lengths, lengths.mean)


def count_page(
    plan: Plan,
    page: Sequence[MetricSample],
    source: str,
    *,
    before: Sequence[MetricSample] | None = None,
    seconds: float | None = None,
) -> NewTraffic:
    """Lengths of the rows that a server counted on its metrics page.

    Args:
        plan: of the pipeline.
        page: samples of the page; those of several servers add up.
        source: the page's name.
        before: samples of an earlier page of the same servers, to count from there.
        seconds: in which the rows came.

    Raises:
        UserError: the page has no such counts, or they contradict each other.
    """
    _check_text(plan)
    if seconds is not None and not 0 < seconds < math.inf:
        raise UserError("seconds", "must be above 0", given=seconds)
    name = plan.spec.name
    rows, tokens = _read_histogram(page, name, source)
    notes: tuple[str, ...] = ()
    if before is not None:
        old_rows, old_tokens = _read_histogram(before, name, f"the page before {source}")
        if rows.keys() == old_rows.keys() and all(rows[le] >= old_rows[le] for le in rows):
            rows = {le: rows[le] - old_rows[le] for le in rows}
            tokens -= old_tokens
        else:  # counters only fall where a server began anew
            seconds = None
            notes = ("the server started anew between the pages: counted since then",)
    total = max(rows.values())
    if total <= 0:
        raise UserError(source, f"must count rows of {name}", given="none", remedy="Wait for some")
    spread = _spread(rows, plan.max_length)
    lengths = Lengths(spread, sum(spread.values()), spread.get(plan.max_length, 0))
    return NewTraffic(
        source=f"{total} rows counted by {source}",
        lengths=lengths,
        mean=tokens / total,
        edges=tuple(int(le) for le in rows if le < math.inf),
        rows_per_s=None if seconds is None else total / seconds,
        notes=notes,
    )


def _check_text(plan: Plan) -> None:
    if plan.lengths is None:
        raise UserError(
            plan.spec.name, "must have rows of tokens", given="images, which are all of one size"
        )


def _read_page(path: Path) -> list[MetricSample]:
    try:
        return read_metrics(path.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        raise UserError(
            str(path),
            "must be a file with new traffic (.jsonl) or a saved metrics page",
            given=error.strerror or error,
            remedy="Save one with `curl HOST:8002/metrics > FILE`",
        ) from error


def _read_histogram(
    page: Sequence[MetricSample], pipeline: str, source: str
) -> tuple[dict[float, int], float]:
    """Bucket's end to the rows up to it, ascending, and the tokens of all rows."""
    mine = [
        (name.removeprefix(ROW_TOKENS), labels, value)
        for name, labels, value in page
        if name.startswith(ROW_TOKENS) and labels.get("pipeline") == pipeline
    ]
    found: dict[float, list[float]] = {}
    for suffix, labels, value in mine:
        if suffix == "_bucket":
            found.setdefault(_end(labels), []).append(value)
    tokens = [value for suffix, _, value in mine if suffix == "_sum"]
    if not found or not tokens:
        raise UserError(
            source,
            f"must have the counters {ROW_TOKENS}_bucket and _sum of {pipeline}",
            given="none",
            remedy="Build the pipeline again if it is an old one, and serve it with metrics",
        )
    ends = sorted(found)
    values = [sum(found[end]) for end in ends]
    wrong = ""
    if not all(0 <= value <= MOST for value in (*values, *tokens)):  # which no NaN is
        wrong = "a value that is no count"
    elif not math.isinf(ends[-1]) or ends[0] < 1 or len(ends) < 2:
        wrong = f"buckets up to {', '.join(f'{end:g}' for end in ends)}"
    elif {len(one) for one in found.values()} != {len(tokens)}:
        wrong = "servers with unequal buckets"
    elif sum(tokens) > values[-1] * ends[-2]:
        wrong = "more tokens than so many rows can have"
    elif any(low > high for low, high in pairwise(values)):
        wrong = "a bucket with fewer rows than the one before it"
    if wrong:
        raise UserError(
            source,
            f"must have a whole histogram {ROW_TOKENS} of {pipeline}, up to +Inf",
            given=wrong,
            remedy="Save the page again, of servers of one build, without changes",
        )
    return {end: round(value) for end, value in zip(ends, values, strict=True)}, sum(tokens)


def _end(labels: Mapping[str, str]) -> float:
    """A bucket's upper end; 0, which none has, for what is no number."""
    try:
        end = float(labels.get("le", ""))
    except ValueError:
        return 0.0
    return 0.0 if math.isnan(end) else end


def _spread(rows: Mapping[float, int], max_length: int) -> dict[int, int]:
    """Length to rows, ascending: each bucket's rows evenly over a few lengths of the bucket."""
    counts: Counter[int] = Counter()
    low, below = 0, 0
    for end, up_to in rows.items():
        # A page saved amid a flush is a few rows ahead in its later buckets.
        inside, below = max(0, up_to - below), max(below, up_to)
        high = low if math.isinf(end) else int(end)
        parts = max(1, min(PARTS, high - low))
        for part in range(parts):
            length = low + (high - low) * (part + 1) // parts
            count = inside * (part + 1) // parts - inside * part // parts
            counts[min(length, max_length)] += count
        low = high
    return {length: count for length, count in sorted(counts.items()) if count}
