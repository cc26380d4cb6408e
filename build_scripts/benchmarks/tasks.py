"""Every task served, against transformers' own pipeline on the same requests: agreement and speed.

Usage: ``python build_scripts/benchmarks/tasks.py --rounds 3 --seconds 6``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import transformers

from benchmarks import own_pipeline
from benchmarks.images import photographs
from benchmarks.model import CACHE, PIPELINE
from benchmarks.zoo import EXHIBITS, Exhibit, requests_of, write_model
from triptych.building.build import build
from triptych.client import Client
from triptych.core.inputs import read_inputs
from triptych.serving.bench import perf_analyzer
from triptych.serving.server import Server
from triptych.spec.spec import load_spec
from triptych.spec.traffic import read_traffic

CLIENTS = 16
CHECKED = 64
BATCH_SIZE = 16
LAYOUTS: tuple[str, ...] = ("packed", "bucketed")


def main() -> int:
    """Build, check, measure in turns, print the table, write it as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0, help="of load for a measurement")
    parser.add_argument("--only", nargs="+", default=[], help="parts of the names to measure")
    parser.add_argument("--output", type=Path, default=CACHE / "tasks.json")
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    texts = [row.inputs["text"] for row in read_traffic(PIPELINE, ("text",))]
    images = photographs()
    wanted = [e for e in EXHIBITS if not options.only or any(o in e.name for o in options.only)]
    print("| task | layout | architecture | agreement | served/s | pipeline/s | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    lines = []
    for exhibit in wanted:
        for line in _measure(exhibit, texts, images, options):
            lines.append(line)
            print(
                f"| {line['task']} | {line['layout']} | {line['architecture']} "
                f"| {line['agreement']} | {line['served_per_s']:.0f} "
                f"| {line['pipeline_per_s']:.0f} | {line['ratio']:.2f} |",
                flush=True,
            )
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(lines, indent=2), encoding="utf-8")
    return 0


def _measure(
    exhibit: Exhibit, texts: list[str], images: list[bytes], options: argparse.Namespace
) -> list[dict[str, Any]]:
    model = write_model(exhibit, CACHE / "zoo" / "models" / exhibit.name)
    requests = requests_of(exhibit, texts, images)
    layouts = LAYOUTS if exhibit.architecture == "Bert" else LAYOUTS[:1]
    if exhibit.task == "image-classification":
        layouts = ("",)
    repository = CACHE / "zoo" / "repositories" / exhibit.name
    built = {
        layout: build(
            read_inputs(load_spec(_pipeline(exhibit, model, layout, requests)), _quiet),
            repository,
            _quiet,
        )
        for layout in layouts
    }
    own = own_pipeline.load(exhibit, model, batch_size=BATCH_SIZE)
    expected = own(requests[:CHECKED])
    served: dict[str, list[float]] = {layout: [] for layout in layouts}
    rates: list[float] = []
    agreement = {}
    for number in range(options.rounds):
        for layout in layouts:
            name = _name(exhibit, layout)
            with Server(repository, models=[name]) as server:
                if number == 0:
                    agreement[layout] = _agreement(exhibit, server, name, requests, expected)
                result = perf_analyzer.run(
                    server.grpc_url,
                    name,
                    requests,
                    concurrency=CLIENTS,
                    window_s=options.seconds / 3,
                    warmup_requests=2 * CLIENTS,
                )
            served[layout].append(result.throughput_per_s)
        rates.append(own_pipeline.rate(own, requests, seconds=options.seconds))
    return [
        {
            "task": exhibit.task,
            "layout": built[layout].plan.layout
            + (" (fell back)" if built[layout].unpacked else ""),
            "architecture": exhibit.architecture,
            "agreement": agreement[layout],
            "served_per_s": median(served[layout]),
            "pipeline_per_s": median(rates),
            "ratio": median(served[layout]) / median(rates),
            "served_rounds": served[layout],
            "pipeline_rounds": rates,
        }
        for layout in layouts
    ]


def _name(exhibit: Exhibit, layout: str) -> str:
    return f"{exhibit.name}_{layout}" if layout else exhibit.name


def _pipeline(
    exhibit: Exhibit, model: Path, layout: str, requests: Sequence[dict[str, Any]]
) -> Path:
    folder = CACHE / "zoo" / "pipelines" / _name(exhibit, layout)
    folder.mkdir(parents=True, exist_ok=True)
    spec: dict[str, Any] = {
        "task": exhibit.task,
        "model": {"source": str(model)},
        "parameters": dict(exhibit.parameters),
    }
    if layout:
        spec["core"] = {"layout": layout}
    (folder / "pipeline.yaml").write_text(json.dumps(spec), encoding="utf-8")
    rows = []
    for number, request in enumerate(requests):
        if "image" in request:
            (folder / f"{number}.jpg").write_bytes(request["image"])
            rows.append({"image": f"{number}.jpg"})
        else:
            rows.append(request)
    lines = "\n".join(json.dumps(row) for row in rows)
    (folder / "traffic.jsonl").write_text(lines, encoding="utf-8")
    return folder


def _agreement(
    exhibit: Exhibit,
    server: Server,
    name: str,
    requests: Sequence[dict[str, Any]],
    expected: Sequence[Any],
) -> str:
    checked = requests[:CHECKED]
    columns = {key: [request[key] for request in checked] for key in checked[0]}
    with Client(name, server.grpc_url, timeout_s=120) as client:
        outputs = client.infer(columns)
    same, difference = own_pipeline.compare(exhibit, outputs, expected)
    return f"{same:.0%}, scores to {difference:.0e}"


def _quiet(stage: str, line: str) -> None:
    if stage == "layout":
        print(f"  {stage} {line}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
