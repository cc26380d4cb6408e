"""The plan: bucket edges are optimal, and every number follows from its inputs alone."""

import itertools
import random
from pathlib import Path

import pytest

from conftest import write_pipeline
from triptych.spec.model_info import ModelInfo
from triptych.spec.plan import Plan, bucket_of, choose_edges, make_plan
from triptych.spec.spec import PipelineSpec, load_spec
from triptych.spec.tasks.catalog import TEXT_EMBEDDING
from triptych.spec.traffic import Lengths

FACTS = ModelInfo(
    sha256="0", architecture="BertModel", hidden_size=8, max_length=64, pad_token_id=0
)


def padded_tokens(lengths: Lengths, edges: tuple[int, ...]) -> int:
    return sum(bucket_of(length, edges) * rows for length, rows in lengths.counts.items())


@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("seed", range(25))
def test_edges_equal_those_of_an_exhaustive_search(seed: int, multiple: int) -> None:
    chance = random.Random(seed)
    longest, count = 14, chance.randint(1, 4)
    lengths = Lengths.of(
        [chance.randint(1, longest) for _ in range(chance.randint(1, 30))], max_length=longest
    )
    inner = [edge for edge in range(1, longest) if edge % multiple == 0]
    best = min(
        padded_tokens(lengths, (*choice, longest))
        for size in range(count)
        for choice in itertools.combinations(inner, size)
    )
    edges = choose_edges(lengths, longest, count=count, multiple=multiple)
    assert padded_tokens(lengths, edges) == best
    assert len(edges) <= count
    assert list(edges) == sorted(set(edges))
    assert all(edge % multiple == 0 for edge in edges[:-1])


def plan_of(spec: PipelineSpec, lengths: Lengths) -> Plan:
    return make_plan(spec, FACTS, TEXT_EMBEDDING, {}, lengths)


def test_the_plan_is_a_pure_function(tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path / "a")
    spec = load_spec(folder, ["core.layout=bucketed", "core.bucket_count=2"])
    lengths = Lengths.of([3, 9, 9, 40, 70], max_length=64)
    first, second = (plan_of(spec, lengths) for _ in range(2))
    assert first == second
    assert first.bucket_edges[-1] == first.max_length == 64
    assert 0 < first.padding_share < 1
    assert [w.tokens for w in first.warm_ups] == list(first.bucket_edges)


def test_the_spec_may_tighten_the_limit_only(tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path / "a")
    lengths = Lengths.of([3], max_length=16)
    assert (
        make_plan(
            load_spec(folder, ["tokenizer.max_length=16"]), FACTS, TEXT_EMBEDDING, {}, lengths
        ).max_length
        == 16
    )
    assert plan_of(load_spec(folder), lengths).max_length == 64


def test_edges_on_a_gpu_suit_tensor_cores(tmp_path: Path) -> None:
    spec = load_spec(write_pipeline(tmp_path / "a"), ["core.layout=bucketed", "core.device=gpu"])
    lengths = Lengths.of([3, 9, 11, 21, 40, 50], max_length=64)
    assert all(edge % 8 == 0 for edge in plan_of(spec, lengths).bucket_edges)


def test_packed_has_no_edges_and_no_padding(tmp_path: Path) -> None:
    lengths = Lengths.of([3, 9], max_length=64)
    plan = plan_of(load_spec(write_pipeline(tmp_path / "a")), lengths)
    assert plan.bucket_edges == ()
    assert plan.padding_share == 0
