"""Replies of a served pipeline sorted: what can be compared, what is at fault, and how."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from triptych.core.gate.live_closeness import is_finite, shape_fault
from triptych.core.gate.live_send import Reply
from triptych.spec.tasks.accuracy import Tolerance
from triptych.spec.tasks.metrics_outputs import Outputs
from triptych.spec.tasks.task import Task

_NOT_FINITE = "answered with NaN or infinity"
_LONGEST_SHOWN = 160


@dataclass(frozen=True)
class LiveCase:
    """One request and what must come of it.

    Attributes:
        shown: short text for tables.
        query: what it is grouped by where rows are ranked.
        edge: generated, not of the traffic.
        wanted: what the reference answers.
        refusal: words of the error that the spec demands instead; empty where there is none.
    """

    shown: str
    query: str
    edge: bool
    wanted: Outputs
    refusal: str


@dataclass(frozen=True)
class Rules:
    """What the answers are held to.

    Attributes:
        task: of the pipeline.
        tolerance: that of the precision.
        limits: metric to limit.
        hooked: whether functions of the pipeline's own make the outputs: they may round, so that
            the numbers of two answers can be any distance apart.
    """

    task: Task
    tolerance: Tolerance
    limits: Mapping[str, float]
    hooked: bool

    @property
    def json_outputs(self) -> list[str]:
        return [tensor.name for tensor in self.task.outputs if tensor.content == "json"]


@dataclass(frozen=True)
class SortedReplies:
    """The replies to one way of sending: what can be compared, what is wrong, what became of all.

    Attributes:
        answers: place of a case to its answer, where it should have one.
        faults: kind of fault to the places and words of the replies that have it.
        counts: replies by what they are.
        finite: no NaN, no infinity.
    """

    answers: Mapping[int, Outputs]
    faults: Mapping[str, Sequence[tuple[int, str]]]
    counts: Counter[str]
    finite: bool


def sort_replies(
    cases: Sequence[LiveCase], replies: Sequence[Reply], rules: Rules
) -> SortedReplies:
    """Which of the replies, one a case, can be compared, and what is wrong with the others."""
    answers: dict[int, Outputs] = {}
    faults: dict[str, list[tuple[int, str]]] = {}
    counts: Counter[str] = Counter()
    finite = True
    for place, (case, reply) in enumerate(zip(cases, replies, strict=True)):
        counts[_fate(reply)] += 1
        fault = _fault_of(case, reply, rules)
        if fault is not None:
            kind, words = fault
            faults.setdefault(kind, []).append((place, words))
            finite &= kind != _NOT_FINITE
        if reply.outputs is not None and not case.refusal:
            answers[place] = reply.outputs
    return SortedReplies(answers, faults, counts, finite)


def _fate(reply: Reply) -> str:
    if reply.error is None:
        return "answered"
    return "refused" if reply.refused else type(reply.error).__name__


def _fault_of(case: LiveCase, reply: Reply, rules: Rules) -> tuple[str, str] | None:
    """Kind and words; None where the reply is as it must be."""
    if reply.outputs is None:
        said = "" if reply.error is None else reply.error.message
        if not reply.refused:
            return f"not answered ({_fate(reply)})", said
        if not case.refusal:
            return "refused", said
        if case.refusal not in said:
            return "refused in other words than the spec's", f"{said} (the spec: {case.refusal})"
        return None
    if case.refusal:
        return "answered, though the spec refuses them", case.refusal
    if not is_finite(reply.outputs, rules.json_outputs):
        return _NOT_FINITE, ""
    shape = shape_fault(reply.outputs, case.wanted)
    if shape and not rules.hooked:  # functions of the user's own may leave out what scores low
        return "answered in another form", shape
    return None


def describe_faults(cases: Sequence[LiveCase], view: SortedReplies, way: str) -> Iterator[str]:
    """One line for each kind of fault among the replies to one `way` of sending."""
    for kind, found in view.faults.items():
        place, words = found[0]
        count = f"{len(found)} requests were" if len(found) > 1 else "1 request was"
        first = f"{cases[place].shown!r:.{_LONGEST_SHOWN}}" + (f": {words}" if words else "")
        yield f"{way}: {count} {kind}; the first: {first}"
    if not view.answers:
        yield f"{way}: there is no answer that can be compared"
