"""Compare generated text with transformers on many prompts, in several precisions.

The prompts are the pipeline's traffic, then texts of the gate's probe, every second one as a
conversation. Metrics and limits are those of the accuracy gate.

Usage: ``python build_scripts/benchmarks/generation_exact.py [--prompts 64] [--tokens 24]
[--precisions fp32 bf16 bf16+fp8kv]``, after ``make setup-generation``; the part after ``+`` is the
precision of the KV cache. Exit code 1: a limit is exceeded.
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.harness import finish, make_parser, progress
from benchmarks.model import CHAT
from benchmarks.results import Table
from triptych.building.generation.gate import METRICS, measure
from triptych.building.generation.inputs import (
    GenerationInputs,
    Prompt,
    make_prompt,
    read_generation,
)  # fmt: skip
from triptych.building.generation.reference import TOKENS, answer_tokens
from triptych.core.gate_rows import probe_texts
from triptych.spec.generation_fields import load_generation_spec


def main() -> int:
    """Measure each precision; return 1 if one exceeds a limit."""
    parser = make_parser(__doc__, "generation_exact", "Generated text and transformers'")
    parser.add_argument("--pipeline", type=Path, default=CHAT)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="maximum tokens of an answer")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    options = parser.parse_args()
    found = {}
    for precision in options.precisions:
        weights, _, cache = precision.partition("+")
        overrides = [f"core.precision={weights}", f"core.kv_cache.dtype={cache[:3] or 'auto'}"]
        inputs = read_generation(load_generation_spec(options.pipeline, overrides), progress)
        prompts = _make_prompts(inputs, options.prompts)
        found[precision] = gate = measure(inputs, prompts, progress, most=options.tokens)
        for row in gate.worst:
            progress(precision, f"{row.preview!r}: {row.expected!r}, not {row.actual!r}")
    rows = []
    for metric in METRICS:
        values = [gate.value(metric.name) for gate in found.values()]
        rows.append((metric.name, *("-" if v is None else f"{v:.4g}" for v in values)))
    names = [f"{name}, {gate.rows} prompts" for name, gate in found.items()]
    table = Table(f"At most {options.tokens} tokens an answer", ("metric", *names), rows)
    finish(options, [table], {precision: gate.as_dict() for precision, gate in found.items()})
    return 1 if any(gate.failures for gate in found.values()) else 0


def _make_prompts(inputs: GenerationInputs, count: int) -> list[Prompt]:
    """Return the first `count` prompts that leave tokens for an answer."""
    sent = [
        {"text_input": row.text}
        if index % 2
        else {"messages": json.dumps([{"role": "user", "content": f"{row.question}\n{row.text}"}])}
        for index, row in enumerate(probe_texts())
    ]
    prompts = [*inputs.prompts, *(make_prompt(inputs, one, "probe") for one in sent)]
    return [one for one in prompts if answer_tokens(inputs, one) > 0][:count]


if __name__ == "__main__":
    raise SystemExit(main())
