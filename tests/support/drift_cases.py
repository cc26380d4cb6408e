"""A pipeline as if built for rows of other lengths, and such rows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from conftest import quiet, write_pipeline
from triptych.core.inputs import PipelineInputs, read_inputs
from triptych.operate.tune.new_traffic import NewTraffic
from triptych.spec.plan import Layout, make_plan
from triptych.spec.spec import load_spec
from triptych.spec.traffic import Lengths

MAX_LENGTH = 256


def read_minilm(folder: Path) -> PipelineInputs:
    """MiniLM with the traffic of tests, written into a new folder."""
    folder = write_pipeline(folder / "minilm")
    return read_inputs(load_spec(folder), quiet)


def built_for(inputs: PipelineInputs, lengths: Sequence[int], layout: Layout) -> PipelineInputs:
    """As if the pipeline's traffic had been of these lengths."""
    old = inputs.plan
    counted = Lengths.of(lengths, max_length=MAX_LENGTH)
    plan = make_plan(old.spec, old.facts, old.task, old.parameters, counted, layout=layout)
    return replace(inputs, plan=plan, traffic=({"text": ""},) * len(lengths))


def exact(lengths: Sequence[int]) -> NewTraffic:
    counted = Lengths.of(lengths, max_length=MAX_LENGTH)
    return NewTraffic("a test", counted, counted.mean)


def draw(mean: float, rows: int, seed: int) -> list[int]:
    """Lengths as texts have them: many short ones, a long tail."""
    chance = random.Random(seed)
    return [min(MAX_LENGTH, 3 + int(chance.expovariate(1 / mean))) for _ in range(rows)]
