"""All derived numbers of a pipeline: a pure function of (spec, model facts, traffic lengths)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from triptych.model_facts import ModelFacts
from triptych.spec import PipelineSpec
from triptych.tasks import Task, find_task
from triptych.tensors import INPUT_IDS, ROW_LENGTH, Tensor
from triptych.traffic import Lengths

TENSOR_CORE_MULTIPLE = 8
"""Padded lengths on a GPU are multiples of this: tensor cores work on blocks of 8."""


@dataclass(frozen=True)
class WarmUp:
    """One request the server makes before it reports ready: `rows` rows of `tokens` tokens."""

    rows: int
    tokens: int


@dataclass(frozen=True)
class Plan:
    """Everything the repository is written from.

    Attributes:
        spec: the declaration it follows.
        facts: of the model.
        task: what is decoded.
        lengths: of the traffic, in tokens.
        max_length: tokens a row may have.
        bucket_edges: padded lengths, ascending, the last one `max_length`; empty when packed.
        core_inputs: of the core's config, without the batch dimension.
        core_outputs: what the core returns a row.
        outputs: of the ensemble.
        request_parameters: what a request may ask for, as rules for the preprocess step.
        warm_ups: of the core.
        reasons: number to why it is what it is, for `inspect`.
    """

    spec: PipelineSpec
    facts: ModelFacts
    task: Task
    lengths: Lengths
    max_length: int
    bucket_edges: tuple[int, ...]
    core_inputs: tuple[Tensor, ...]
    core_outputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    request_parameters: Mapping[str, Mapping[str, object]]
    warm_ups: tuple[WarmUp, ...]
    reasons: Mapping[str, str]

    @property
    def packed(self) -> bool:
        """Rows share a batch end to end, without padding."""
        return self.spec.core.layout == "packed"

    def step(self, name: str) -> str:
        """Triton's name of the model that is this pipeline's step `name`."""
        return f"{self.spec.name}_{name}"

    @property
    def padding_share(self) -> float:
        """Computed tokens that are padding, over all computed tokens, for the traffic."""
        if self.packed:
            return 0.0
        computed = sum(bucket_of(n, self.bucket_edges) * c for n, c in self.lengths.counts.items())
        return 1.0 - self.lengths.mean * self.lengths.rows / computed


def max_length_of(spec: PipelineSpec, facts: ModelFacts) -> int:
    """Tokens a row may have: the spec's limit, else the model's own."""
    return min(spec.tokenizer.max_length or facts.max_length, facts.max_length)


def make_plan(spec: PipelineSpec, facts: ModelFacts, lengths: Lengths) -> Plan:
    """Derive every number the repository needs."""
    task = find_task(spec.task)
    max_length = max_length_of(spec, facts)
    packed = spec.core.layout == "packed"
    edges: tuple[int, ...] = ()
    if not packed:
        multiple = TENSOR_CORE_MULTIPLE if spec.core.device == "gpu" else 1
        edges = choose_edges(lengths, max_length, count=spec.core.bucket_count, multiple=multiple)
    warm_lengths = edges or tuple(sorted({lengths.quantile(0.5), lengths.quantile(0.99)}))
    return Plan(
        spec=spec,
        facts=facts,
        task=task,
        lengths=lengths,
        max_length=max_length,
        bucket_edges=edges,
        core_inputs=(INPUT_IDS, ROW_LENGTH),
        core_outputs=task.core_outputs(facts),
        outputs=task.outputs(facts),
        request_parameters=task.request_parameters(facts),
        warm_ups=tuple(WarmUp(rows=1, tokens=tokens) for tokens in warm_lengths),
        reasons=_reasons(spec, facts, lengths, max_length, edges),
    )


def bucket_of(length: int, edges: tuple[int, ...]) -> int:
    """The smallest edge that holds `length` tokens."""
    return next(edge for edge in edges if edge >= length)


def choose_edges(
    lengths: Lengths, max_length: int, *, count: int, multiple: int = 1
) -> tuple[int, ...]:
    """The at most `count` padded lengths that minimise the traffic's expected padded tokens.

    Exact, by dynamic programming over the histogram: an optimal edge is always an observed
    length (rounded up to `multiple`), so only those and `max_length` are candidates.

    Args:
        lengths: of the traffic, in tokens, none above `max_length`.
        max_length: the last edge, whatever the traffic shows: any row must have a bucket.
        count: most edges wanted.
        multiple: edges other than the last are multiples of this.
    """
    rounded: dict[int, int] = {}
    for length, rows in lengths.counts.items():
        edge = min(-(-length // multiple) * multiple, max_length)
        rounded[edge] = rounded.get(edge, 0) + rows
    rounded.setdefault(max_length, 0)
    candidates = np.array(sorted(rounded))
    rows_up_to = np.concatenate([[0], np.cumsum([rounded[c] for c in candidates])])
    # best[j]: computed tokens of all rows in the first j candidates, with the edges so far.
    best = np.full(len(candidates) + 1, np.inf)
    best[0] = 0.0
    choices: list[NDArray[np.intp]] = []
    for _ in range(min(count, len(candidates))):
        # cost[i, j]: candidates i..j-1 padded to candidate j-1, after the best of the first i.
        cost = best[:, None] + (rows_up_to[None, 1:] - rows_up_to[:, None]) * candidates[None, :]
        cost[np.tril_indices(len(candidates), k=-1, m=len(candidates))] = np.inf
        cost[-1] = np.inf
        choices.append(cost.argmin(axis=0))
        best = np.concatenate([[np.inf], cost.min(axis=0)])
    edges = []
    end = len(candidates)
    for choice in reversed(choices):
        edges.append(int(candidates[end - 1]))
        end = int(choice[end - 1])
    return tuple(sorted(edges))


def _reasons(
    spec: PipelineSpec,
    facts: ModelFacts,
    lengths: Lengths,
    max_length: int,
    edges: tuple[int, ...],
) -> dict[str, str]:
    own = spec.tokenizer.max_length
    if own is None or own >= facts.max_length:
        limit = f"the model's own limit ({facts.max_length})"
    else:
        limit = f"tokenizer.max_length in the spec (the model allows {facts.max_length})"
    reasons = {
        "max_length": limit,
        "max_batch_size": "core.max_batch_size; about "
        f"{spec.core.max_batch_size * lengths.mean:.0f} tokens in a full batch of this traffic",
        "queue": "no delay by default, since a busy core gathers a batch by itself",
    }
    if edges:
        spans = ", ".join(f"{low + 1}-{high}" for low, high in pairwise((0, *edges)))
        reasons["bucket_edges"] = f"fewest padded tokens over {lengths.rows} rows: {spans}"
    return reasons
