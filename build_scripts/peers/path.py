"""What the path around a core costs: the generated steps, beside an echo and a tutorial's ensemble.

The core only waits, as long as one on a GPU computes. All servers run from the beginning, and each
load goes to one after the other, in rounds: what disturbs the machine disturbs them alike.

Usage: ``.venv/bin/python build_scripts/peers/path.py [--full] [--beside OTHER/packed]``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

from peers import hops, path_cost, tokenizing, tutorial
from peers.ensemble import Ensemble
from peers.model import CACHE, PIPELINE, build
from peers.path_cost import CLIENT, Cost
from peers.tokenizing import Limit
from triptych.pipeline.traffic import read_traffic

_NAME = PIPELINE.name
_REPOSITORIES = CACHE / "path"
_DIGITS = 3


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


Costs = dict[tuple[Load, str], list[Cost]]


def main() -> int:
    """Write the repositories, start all servers, measure in rounds, print and write the medians."""
    options = _parse()
    texts = [row.inputs["text"] for row in read_traffic(PIPELINE, ("text",))]
    costs: Costs = {}
    limits: dict[int, list[Limit]] = {}
    sources = {
        layout: build(CACHE / f"gpu-{layout}", f"core.layout={layout}", "core.device=gpu")
        for layout in ("packed", "bucketed")
        if _is_wanted(layout, options)
    }
    sources |= {f"beside {path.parent.name}/{path.name}": path for path in options.beside}
    with ExitStack() as stack:
        servers = {
            core: [stack.enter_context(one) for one in _contenders(core, sources, options)]
            for core in options.cores
        }
        for number in range(options.rounds):
            for texts_a_request in options.texts:
                limits.setdefault(texts_a_request, []).append(
                    tokenizing.measure(texts, texts_a_call=texts_a_request, seconds=options.seconds)
                )
            for load in _loads(options):
                contenders = servers[load.core]
                shift = number % len(contenders)
                for server in contenders[shift:] + contenders[:shift]:
                    cost = path_cost.measure(
                        server.grpc_url,
                        server.pid,
                        server.model,
                        texts,
                        clients=load.clients,
                        texts_a_request=load.texts,
                        seconds=options.seconds,
                    )
                    costs.setdefault((load, server.name), []).append(cost)
                    _say(f"round {number + 1}/{options.rounds}  {_row(load, server.name, cost)}")
    medians = {key: _median(found) for key, found in costs.items()}
    print(_table(medians))
    print(_limits(limits))
    report = {
        "rounds": options.rounds,
        "seconds": options.seconds,
        "tokenizer": {texts: [asdict(one) for one in found] for texts, found in limits.items()},
        "medians": [_record(load, name, cost) for (load, name), cost in medians.items()],
        "measurements": [
            _record(load, name, cost) for (load, name), found in costs.items() for cost in found
        ],
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    _say(f"written: {options.output}")
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--full", action="store_true", help="every core, 1 to 256 clients")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seconds", type=float, help="of one measurement")
    parser.add_argument("--cores", nargs="+", choices=[*hops.CORES])
    parser.add_argument("--texts", nargs="+", type=int, default=[1, 16], help="in a request")
    parser.add_argument("--clients", nargs="+", type=int)
    parser.add_argument("--only", nargs="+", default=[], help="parts of the names to measure")
    parser.add_argument(
        "--beside",
        nargs="+",
        type=Path,
        default=[],
        help="repositories with the same pipeline, built by another state of this tree",
    )
    parser.add_argument("--output", type=Path, default=CACHE / "path.json")
    options = parser.parse_args()
    full = options.full
    options.rounds = options.rounds or (3 if full else 1)
    options.seconds = options.seconds or (4.5 if full else 3.0)
    options.cores = options.cores or ([*hops.CORES] if full else ["zero", "MiniLM"])
    options.clients = options.clients or ([1, 8, 32, 256] if full else [1, 32])
    return options


def _loads(options: argparse.Namespace) -> list[Load]:
    return [
        Load(core, texts, clients)
        for core in options.cores
        for texts in options.texts
        for clients in options.clients
    ]


def _contenders(
    core: str, sources: Mapping[str, Path], options: argparse.Namespace
) -> list[Ensemble]:
    """Servers that are not started yet; the echo, which has no core, goes with the first one."""
    folder, time = _REPOSITORIES / core, hops.CORES[core]
    contenders = []
    for number, (name, source) in enumerate(sources.items()):
        target = hops.write_pipeline(source, _NAME, folder / str(number), time)
        contenders.append(Ensemble(name, target, _NAME))
    if _is_wanted("tutorial", options):
        tutorial.write_repository(folder / "tutorial", time)
        contenders.append(Ensemble("tutorial", folder / "tutorial", tutorial.ENSEMBLE))
    if _is_wanted("echo", options) and core == options.cores[0]:
        contenders.append(Ensemble("echo", hops.write_echo(folder / "echo"), hops.ECHO))
    return contenders


def _is_wanted(name: str, options: argparse.Namespace) -> bool:
    return not options.only or any(part in name for part in options.only)


def _median(found: Sequence[Cost]) -> Cost:
    """Each figure's own median."""

    def middle(name: str) -> Any:
        values = [getattr(one, name) for one in found]
        if isinstance(values[0], dict):
            return {key: median(value[key] for value in values) for key in values[0]}
        return median(values)

    return Cost(**{field.name: middle(field.name) for field in fields(Cost)})


def _record(load: Load, name: str, cost: Cost) -> dict[str, object]:
    return {"contender": name, **asdict(load), **asdict(cost)}


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


def _row(load: Load, name: str, cost: Cost) -> str:
    return " | ".join(_cells(load, name, cost))


def _table(medians: Mapping[tuple[Load, str], Cost]) -> str:
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


def _limits(limits: Mapping[int, Sequence[Limit]]) -> str:
    """Median rate and cost of the tokenizer alone, a line for each number of texts in a call."""
    return "\n".join(
        f"\ntokenizer alone, {texts} a call: "
        f"{median(one.texts_per_s for one in found):.0f} texts/s, "
        f"{median(one.core_ms for one in found):.{_DIGITS}f} core-ms a text"
        for texts, found in limits.items()
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
