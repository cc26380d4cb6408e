"""What the path around a core costs: the generated steps, beside an echo and a tutorial's ensemble.

The core only waits, as long as one on a GPU computes. All servers run from the beginning, and each
load goes to one after the other, in rounds: what disturbs the machine disturbs them alike.

Usage: ``python build_scripts/benchmarks/path.py [--full] [--beside OTHER/packed]``; every task
with ``--tasks``, instances of preprocess with ``--preprocess 1 2``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks import hops, path_bytes, path_cost, path_filled, tokenizing, tutorial
from benchmarks.ensemble import Ensemble
from benchmarks.model import CACHE, PIPELINE, build
from benchmarks.path_bytes import Passed
from benchmarks.path_cost import Cost
from benchmarks.path_table import Load, limits_text, middle_of, row, several_text, table
from benchmarks.path_tasks import TASKS, build_task
from benchmarks.tokenizing import Limit
from triptych.serving.bench.perf_analyzer import Request
from triptych.spec.traffic import read_traffic

_NAME = PIPELINE.name
_REPOSITORIES = CACHE / "path"


@dataclass(frozen=True)
class Source:
    """A built pipeline and what to ask it."""

    repository: Path
    pipeline: str
    requests: Sequence[Request]


@dataclass(frozen=True)
class Contender:
    """A server, and what to ask it.

    Attributes:
        server: of one model.
        requests: of one row each.
        trace: file for the times of all requests; None where there is none.
    """

    server: Ensemble
    requests: Sequence[Request]
    trace: Path | None = None


Costs = dict[tuple[Load, str], list[Cost]]
Windows = dict[str, dict[Load, list[tuple[int, int]]]]


def main() -> int:
    """Write the repositories, start all servers, measure in rounds, print and write the medians."""
    options = _parse()
    plain = [one.inputs["text"] for one in read_traffic(PIPELINE, ("text",))]
    texts = [" ".join(plain[i : i + options.joined]) for i in range(len(plain))]
    costs: Costs = {}
    limits: dict[int, list[Limit]] = {}
    passed: dict[str, list[Passed]] = {}
    windows: Windows = defaultdict(lambda: defaultdict(list))
    sources = _sources(texts, options)
    with ExitStack() as stack:
        contenders = {core: _contenders(core, sources, texts, options) for core in options.cores}
        for one in (one for each in contenders.values() for one in each):
            stack.enter_context(one.server)
        for one in contenders[options.cores[0]]:
            server = one.server
            name = f"{server.name}, {options.texts[-1]} texts"
            passed[name] = path_bytes.count(
                server.grpc_url, server.model, one.requests, options.texts[-1]
            )
        for number in range(options.rounds):
            for texts_a_request in options.texts:
                limits.setdefault(texts_a_request, []).append(
                    tokenizing.measure(texts, texts_a_call=texts_a_request, seconds=options.seconds)
                )
            for load in _loads(options):
                these = contenders[load.core]
                shift = number % len(these)
                for one in these[shift:] + these[:shift]:
                    server = one.server
                    began_ns = time.monotonic_ns()
                    cost = path_cost.measure(
                        server.grpc_url,
                        server.pid,
                        server.model,
                        one.requests,
                        clients=load.clients,
                        texts_a_request=load.texts,
                        seconds=options.seconds,
                    )
                    windows[server.name][load].append((began_ns, time.monotonic_ns()))
                    costs.setdefault((load, server.name), []).append(cost)
                    _say(f"round {number + 1}/{options.rounds}  {row(load, server.name, cost)}")
    medians = {key: middle_of(found) for key, found in costs.items()}
    print(table(medians))
    print(several_text(medians))
    print(limits_text(limits))
    print(path_bytes.table(passed))
    shares = _read_traces(contenders, windows)
    print(path_filled.table(shares))
    report = {
        "rounds": options.rounds,
        "seconds": options.seconds,
        "tokenizer": {texts: [asdict(one) for one in found] for texts, found in limits.items()},
        "bytes": {name: [asdict(step) for step in steps] for name, steps in passed.items()},
        "filled": [
            {"contender": name, **asdict(load), "filled": share}
            for (load, name), share in shares.items()
        ],
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
    parser.add_argument("--joined", type=int, default=1, help="texts of the traffic to one text")
    parser.add_argument(
        "--tasks",
        nargs="*",
        choices=[*TASKS],
        help="packed, in place of the other layouts; all by default",
    )
    parser.add_argument(
        "--preprocess", nargs="+", type=int, default=[1], help="instances, each a contender"
    )
    parser.add_argument(
        "--filled", action="store_true", help="trace every request: how full batches are"
    )
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


def _sources(texts: list[str], options: argparse.Namespace) -> dict[str, Source]:
    layouts = ("packed", "bucketed") if options.tasks is None else ("packed",)
    sources = {}
    for name in layouts:
        if _is_wanted(name, options):
            overrides = f"core.layout={name}", "core.device=gpu"
            sources[name] = Source(build(CACHE / f"gpu-{name}", *overrides), _NAME, texts)
    for task in TASKS if options.tasks == [] else options.tasks or ():
        if _is_wanted(task, options):
            sources[task] = Source(*build_task(task, texts))
    for path in options.beside:
        sources[f"beside {path.parent.name}/{path.name}"] = Source(path, _NAME, texts)
    return sources


def _contenders(
    core: str, sources: Mapping[str, Source], texts: Sequence[str], options: argparse.Namespace
) -> list[Contender]:
    """Servers that are not started yet; the echo, which has no core, goes with the first one."""
    folder, core_time = _REPOSITORIES / core, hops.CORES[core]
    contenders = []
    for number, (name, source) in enumerate(sources.items()):
        for count in options.preprocess:
            target = folder / f"{number}-{count}"
            named = name if count == 1 else f"{name} x{count}"
            hops.write_pipeline(
                source.repository, source.pipeline, target, core_time, preprocess=count
            )
            trace = target / "trace.json" if options.filled else None
            flags = path_filled.flags(trace) if trace else []
            server = Ensemble(named, target, source.pipeline, flags=flags)
            contenders.append(Contender(server, source.requests, trace))
    if _is_wanted("tutorial", options) and options.tasks is None:
        tutorial.write_repository(folder / "tutorial", core_time)
        server = Ensemble("tutorial", folder / "tutorial", tutorial.ENSEMBLE)
        contenders.append(Contender(server, texts))
    if _is_wanted("echo", options) and core == options.cores[0]:
        server = Ensemble("echo", hops.write_echo(folder / "echo"), hops.ECHO)
        contenders.append(Contender(server, texts))
    return contenders


def _read_traces(
    contenders: Mapping[str, Sequence[Contender]], windows: Windows
) -> dict[tuple[Load, str], float]:
    """Median over the rounds of how full batches were, where servers have traced."""
    shares = {}
    for one in (one for these in contenders.values() for one in these):
        if one.trace is None:
            continue
        core = f"{one.server.model}_core"
        config = hops.read_config(one.server.repository / core / "config.pbtxt")
        for load, spans in windows[one.server.name].items():
            most = max(1, config.max_batch_size // load.texts)
            found = path_filled.filled(one.trace, core, spans, most_requests=most)
            shares[load, one.server.name] = median(found)
    return shares


def _is_wanted(name: str, options: argparse.Namespace) -> bool:
    return not options.only or any(part in name for part in options.only)


def _record(load: Load, name: str, cost: Cost) -> dict[str, object]:
    return {"contender": name, **asdict(load), **asdict(cost)}


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
