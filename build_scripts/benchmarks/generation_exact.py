"""Text generation held to transformers on many prompts, in several precisions: the gate's figures.

The pipeline's traffic first, then texts of the general probe, every second one as a conversation.

Usage: ``python build_scripts/benchmarks/generation_exact.py [--prompts 64] [--tokens 24]
[--precisions fp32 bf16 bf16+fp8kv]``, after ``make setup-generation``; behind a ``+`` the KV
cache's. Exit code 1: a limit is broken.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.model import CACHE
from triptych.building.generation.gate import METRICS, measure
from triptych.building.generation.inputs import (
    GenerationInputs,
    Prompt,
    make_prompt,
    read_generation,
)
from triptych.building.generation.reference import TOKENS, answer_tokens
from triptych.core.gate_rows import probe_texts
from triptych.repository.records import GateResult
from triptych.spec.generation_fields import load_generation_spec

PIPELINE = Path(__file__).parents[2] / "pipelines/chat"


def main() -> int:
    """Measure each precision, print and write the figures."""
    options = _parse()
    found = {}
    for precision in options.precisions:
        own, _, cache = precision.partition("+")
        overrides = [f"core.precision={own}", f"core.kv_cache.precision={cache[:3] or 'auto'}"]
        spec = load_generation_spec(options.pipeline, overrides)
        inputs = read_generation(spec, _say)
        prompts = _prompts(inputs, options.prompts)
        found[precision] = gate = measure(inputs, prompts, _say, most=options.tokens)
        for row in gate.worst:
            _say(precision, f"{row.shown!r}: {row.wanted!r}, not {row.got!r}")
        print(_table(found))
    plain = {precision: gate.as_dict() for precision, gate in found.items()}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    return 1 if any(gate.failures for gate in found.values()) else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pipeline", type=Path, default=PIPELINE)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of an answer, at most")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--output", type=Path, default=CACHE / "generation_exact.json")
    return parser.parse_args()


def _prompts(inputs: GenerationInputs, most: int) -> list[Prompt]:
    """The first `most` prompts that leave room for an answer."""
    sent = [
        {"text_input": row.text}
        if place % 2
        else {"messages": json.dumps([{"role": "user", "content": f"{row.question}\n{row.text}"}])}
        for place, row in enumerate(probe_texts())
    ]
    prompts = [*inputs.prompts, *(make_prompt(inputs, one, "probe") for one in sent)]
    return [one for one in prompts if answer_tokens(inputs, one) > 0][:most]


def _table(found: dict[str, GateResult]) -> str:
    gates = list(found.values())
    head = ["metric", *(f"{name}, {gate.rows} prompts" for name, gate in found.items())]
    lines: list[Sequence[str]] = [head, ["---"] * len(head)]
    for metric in METRICS:
        values = [gate.value(metric.name) for gate in gates]
        lines.append([metric.name, *("-" if v is None else f"{v:.4g}" for v in values)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _say(stage: str, line: str) -> None:
    print(f"{stage:9} {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
