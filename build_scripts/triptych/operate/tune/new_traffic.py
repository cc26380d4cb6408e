"""Token lengths of new traffic, from a sample of requests or from a server's metrics page.

The server counts rows in a histogram (`triptych.runtime.lengths`). The mean is exact. Lengths are
known up to their bucket; bucket bounds differ by a factor of at most 1.26.
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
from triptych.serving.bench.resources import MetricSample, read_metrics
from triptych.spec.plan import Plan
from triptych.spec.traffic import Lengths, read_traffic

ROW_TOKENS = "triptych_row_tokens"
"""Prefix of the server's metric names."""

MAX_COUNT = 2.0**53
"""Largest count that a float represents exactly."""

PARTS = 8
"""Number of lengths over which the rows of a bucket are distributed."""


@dataclass(frozen=True)
class NewTraffic:
    source: str  # description of the source
    lengths: Lengths
    """Lengths in tokens, approximate within a bucket if there are `edges`.

    Counted rows at the limit represent truncated rows.
    """
    mean: float  # exact mean number of tokens per row
    edges: tuple[int, ...] = ()  # upper bounds of the buckets, ascending; empty for exact lengths
    rows_per_s: float | None = None  # model rows per second; None if unknown
    notes: tuple[str, ...] = ()  # notes for the user
    take: str = ""  # instruction to add these rows to the traffic; empty without one


def read_lengths(
    inputs: PipelineInputs,
    path: Path,
    *,
    before: Path | None = None,
    seconds: float | None = None,
) -> NewTraffic:
    """Read a sample of requests (``.jsonl``, as ``traffic.jsonl``) or a saved metrics page.

    Args:
        inputs: Inputs of the pipeline.
        path: Path of the sample or page.
        before: Earlier page, whose counts are subtracted.
        seconds: Time between the two pages, or since the server's start. None takes the difference
            of the files' modification times if there are two.

    Raises:
        UserError: A file cannot be read or has another format.
    """
    if path.suffix == ".jsonl" and before is None:
        return tokenize_sample(inputs, path)
    pages = [_read_page(each) for each in (path, before) if each is not None]
    if before is not None and seconds is None:
        seconds = path.stat().st_mtime - before.stat().st_mtime
    earlier = pages[1] if before is not None else None
    return count_page(inputs.plan, pages[0], str(path), before=earlier, seconds=seconds)


def tokenize_sample(inputs: PipelineInputs, path: Path) -> NewTraffic:
    """Return the lengths of the requests in a ``.jsonl`` file, tokenized like the traffic.

    Raises:
        UserError: A line is not a request that the pipeline accepts.
    """
    plan = inputs.plan
    _check_text(plan)
    names = [tensor.name for tensor in plan.task.inputs]
    rows = read_traffic(path.parent, names, file=path.name)
    before = inputs.find_hook("before")
    reader = RequestReader(plan.encoder_spec, plan.task, plan.info, inputs.tokenizer_folder, before)
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
    """Return the lengths of the rows that servers counted on a metrics page.

    Args:
        plan: Plan of the pipeline.
        page: Samples of the page; samples of several servers are added.
        source: Name of the page.
        before: Samples of an earlier page of the same servers, which are subtracted.
        seconds: Duration in which the rows arrived.

    Raises:
        UserError: The page lacks the counts, or they are inconsistent.
    """
    _check_text(plan)
    if seconds is not None and not 0 < seconds < math.inf:
        raise UserError(
            "seconds",
            "must be above 0",
            given=seconds,
            remedy="Give the time between the two pages",
        )
    name = plan.spec.name
    rows, tokens = _read_histogram(page, name, source)
    notes: tuple[str, ...] = ()
    if before is not None:
        old_rows, old_tokens = _read_histogram(before, name, f"the page before {source}")
        if rows.keys() == old_rows.keys() and all(rows[le] >= old_rows[le] for le in rows):
            rows = {le: rows[le] - old_rows[le] for le in rows}
            tokens -= old_tokens
        else:  # counters only decrease after a restart
            seconds = None
            notes = ("the server restarted between the pages; only rows since then count",)
    total = max(rows.values())
    if total <= 0:
        raise UserError(
            source, f"has no rows of {name}", given="0 rows", remedy="Wait for requests"
        )
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
    if plan.info.own is not None:
        raise UserError(
            plan.spec.name,
            "must be a transformer for texts: the cost of a row of another graph is not known",
            given="task: model",
            remedy="Put the new requests into traffic.jsonl, build again, which plans padded "
            "sizes for them, and compare the builds with `triptych bench-diff`",
        )
    if plan.lengths is None:
        raise UserError(
            plan.spec.name,
            "is only supported for texts, because all images have the same size",
            given="images",
            remedy="Use a pipeline for texts",
        )


def _read_page(path: Path) -> list[MetricSample]:
    try:
        return read_metrics(path.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        raise UserError(
            str(path),
            "must be a readable file with new traffic (.jsonl) or a saved metrics page",
            given=error.strerror or error,
            remedy="Save one with `curl HOST:8002/metrics > FILE`",
        ) from error


def _read_histogram(
    page: Sequence[MetricSample], pipeline: str, source: str
) -> tuple[dict[float, int], float]:
    """Return the cumulative rows by upper bound, ascending, and the tokens of all rows."""
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
            f"lacks the counters {ROW_TOKENS}_bucket and _sum of {pipeline}",
            given="no counters",
            remedy="Build the pipeline again with this release, and serve it with metrics",
        )
    ends = sorted(found)
    values = [sum(found[end]) for end in ends]
    wrong = ""
    if not all(0 <= value <= MAX_COUNT for value in (*values, *tokens)):  # False for NaN
        wrong = "a value that is not a count"
    elif not math.isinf(ends[-1]) or ends[0] < 1 or len(ends) < 2:
        wrong = f"buckets up to {', '.join(f'{end:g}' for end in ends)}"
    elif {len(one) for one in found.values()} != {len(tokens)}:
        wrong = "servers with unequal buckets"
    elif sum(tokens) > values[-1] * ends[-2]:
        wrong = "more tokens than the rows can have"
    elif any(low > high for low, high in pairwise(values)):
        wrong = "a bucket with fewer rows than the one before it"
    if wrong:
        raise UserError(
            source,
            f"has an inconsistent histogram {ROW_TOKENS} of {pipeline}",
            given=wrong,
            remedy="Save the page again, from servers of one build, without edits",
        )
    return {end: round(value) for end, value in zip(ends, values, strict=True)}, sum(tokens)


def _end(labels: Mapping[str, str]) -> float:
    """Return a bucket's upper bound; 0 if it is not a number."""
    try:
        end = float(labels.get("le", ""))
    except ValueError:
        return 0.0
    return 0.0 if math.isnan(end) else end


def _spread(rows: Mapping[float, int], max_length: int) -> dict[int, int]:
    """Distribute each bucket's rows evenly over `PARTS` lengths; return rows by length."""
    counts: Counter[int] = Counter()
    low, below = 0, 0
    for end, up_to in rows.items():
        # A page saved during an update may have a few more rows in later buckets.
        inside, below = max(0, up_to - below), max(below, up_to)
        high = low if math.isinf(end) else int(end)
        parts = max(1, min(PARTS, high - low))
        for part in range(parts):
            length = low + (high - low) * (part + 1) // parts
            count = inside * (part + 1) // parts - inside * part // parts
            counts[min(length, max_length)] += count
        low = high
    return {length: count for length, count in sorted(counts.items()) if count}
