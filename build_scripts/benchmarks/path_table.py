"""The table of `path.py`: a line for each load and contender, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import median
from typing import Any

from benchmarks.path_cost import CLIENT, Cost
from benchmarks.tokenizing import Limit

_DIGITS = 3
_CORES = 16


@dataclass(frozen=True)
class Load:
    """How contenders are asked.

    Attributes:
        core: of `hops.CORES`.
        texts: in a request.
        clients: that each have one request under way.
    """

    core: str
    texts: int
    clients: int


def middle_of(found: Sequence[Cost]) -> Cost:
    """Each figure's own median."""

    def middle(name: str) -> Any:
        values = [getattr(one, name) for one in found]
        if isinstance(values[0], dict):
            return {key: median(value[key] for value in values) for key in values[0]}
        return median(values)

    return Cost(**{field.name: middle(field.name) for field in fields(Cost)})


def _cells(load: Load, name: str, cost: Cost) -> list[str]:
    core_ms = cost.core_ms
    steps = [step for step in core_ms if step not in (CLIENT, "server")]
    parts = " + ".join(f"{step} {core_ms[step]:.{_DIGITS}f}" for step in steps)
    return [
        name,
        load.core,
        str(load.texts),
        str(load.clients),
        f"{cost.texts_per_s:.0f}",
        f"{sum(core_ms.values()):.{_DIGITS}f}",
        f"{core_ms['server']:.{_DIGITS}f}",
        parts,
        f"{core_ms[CLIENT]:.{_DIGITS}f}",
        f"{sum(cost.switches.values()):.2f}",
        f"{cost.p50_ms - cost.core_batch_ms:.2f}",
        f"{cost.p99_ms - cost.core_batch_ms:.2f}",
        f"{cost.core_batch_rows:.1f}",
    ]


def row(load: Load, name: str, cost: Cost) -> str:
    return " | ".join(_cells(load, name, cost))


def table(medians: Mapping[tuple[Load, str], Cost]) -> str:
    head = [
        "contender",
        "core",
        "texts a request",
        "clients",
        "texts/s",
        "core-ms a text",
        "server",
        "steps",
        "client",
        "switches a text",
        "p50 above the core, ms",
        "p99 above the core, ms",
        "rows a batch",
    ]
    lines = [head, ["---"] * len(head)]
    lines += [_cells(load, name, cost) for (load, name), cost in medians.items()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def several_text(medians: Mapping[tuple[Load, str], Cost]) -> str:
    """What more instances of preprocess bring, a line for each load and contender with them."""
    lines = []
    for (load, name), cost in medians.items():
        alone, _, count = name.rpartition(" x")
        one = medians.get((load, alone))
        if one is None:
            continue
        core_ms = sum(cost.core_ms.values())
        served_ms = core_ms - cost.core_ms[CLIENT]
        preprocess = cost.core_ms["preprocess"] / served_ms
        rise = cost.texts_per_s / one.texts_per_s
        lines.append(
            f"\n{name}, {load.core}, {load.texts} texts, {load.clients} clients: {rise:.2f} times "
            f"the rate of one, {rise / int(count):.2f} an instance; the client took "
            f"{cost.core_ms[CLIENT] / core_ms:.0%} of the processor. By processor time without it "
            f"{_CORES} cores carry {_CORES * 1e3 / served_ms:.0f} texts/s, "
            f"{_CORES * preprocess:.1f} of them in preprocess"
        )
    return "".join(lines)


def limits_text(limits: Mapping[int, Sequence[Limit]]) -> str:
    """Median rate and cost of the tokenizer alone, a line for each number of texts in a call."""
    return "\n".join(
        f"\ntokenizer alone, {texts} a call: "
        f"{median(one.texts_per_s for one in found):.0f} texts/s, "
        f"{median(one.core_ms for one in found):.{_DIGITS}f} core-ms a text"
        for texts, found in limits.items()
    )
