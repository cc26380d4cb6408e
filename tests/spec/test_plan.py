"""The plan: bucket edges are optimal, and every number follows from its inputs alone."""

import itertools
import random
from pathlib import Path

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


def test_edges_equal_those_of_an_exhaustive_search() -> None:
    longest = 14
    for seed, multiple in itertools.product(range(25), (1, 4)):
        chance = random.Random(seed)
        count = chance.randint(1, 4)
        rows = [chance.randint(1, longest) for _ in range(chance.randint(1, 30))]
        lengths = Lengths.of(rows, max_length=longest)
        inner = [edge for edge in range(1, longest) if edge % multiple == 0]
        best = min(
            padded_tokens(lengths, (*choice, longest))
            for size in range(count)
            for choice in itertools.combinations(inner, size)
        )
        edges = choose_edges(lengths, longest, count=count, multiple=multiple)
        assert padded_tokens(lengths, edges) == best, (seed, multiple)
        assert len(edges) <= count
        assert list(edges) == sorted(set(edges))
        assert all(edge % multiple == 0 for edge in edges[:-1])


def plan_of(spec: PipelineSpec, lengths: Lengths) -> Plan:
    return make_plan(spec, FACTS, TEXT_EMBEDDING, {}, lengths)


def test_the_plan_follows_from_its_inputs_alone(tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path / "a")
    bucketed = load_spec(folder, ["core.layout=bucketed", "core.bucket_count=2"])
    lengths = Lengths.of([3, 9, 9, 40, 70], max_length=64)
    first, second = (plan_of(bucketed, lengths) for _ in range(2))
    assert first == second
    assert first.bucket_edges[-1] == first.max_length == 64
    assert 0 < first.padding_share < 1
    assert [w.tokens for w in first.warm_ups] == list(first.bucket_edges)
    packed = plan_of(load_spec(folder, ["tokenizer.max_length=16"]), lengths)
    assert (packed.max_length, packed.bucket_edges, packed.padding_share) == (16, (), 0)
    # Edges on a GPU suit tensor cores.
    spec = load_spec(folder, ["core.layout=bucketed", "core.device=gpu"])
    lengths = Lengths.of([3, 9, 11, 21, 40, 50], max_length=64)
    assert all(edge % 8 == 0 for edge in plan_of(spec, lengths).bucket_edges)
