"""Run the pipeline's model in PyTorch fp32 on padded batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from triptych.base.tensors import TokenRow
from triptych.core.gate.reference import pixel_values
from triptych.core.requests import Sample
from triptych.models.info import ModelInfo
from triptych.models.loading import load_model
from triptych.tasks.heads import RowMembership, SentenceHead
from triptych.tasks.task import Core


class TorchModel:
    """Model that returns vectors if the core pools, otherwise logits, without decoding.

    Token models, including those for fill-mask, return logits of every token.

    Args:
        folder: Folder that `save_pretrained` wrote.
        info: Information about the model.
        core: Definition of the pipeline's core.
        compiled: Whether `torch.compile` compiles the model, with dynamic shapes.

    Raises:
        UserError: Transformers cannot load the model.
    """

    def __init__(self, folder: Path, info: ModelInfo, core: Core, *, compiled: bool) -> None:
        self._info = info
        self._core = core
        self._model: Any = load_model(folder, core.auto_class)
        self._head = SentenceHead(info, folder).eval() if core.reads == "pooled" else None
        if compiled:
            self._model = torch.compile(self._model, dynamic=True)

    def __call__(self, samples: Sequence[Sample]) -> tuple[Any, ...]:
        """Run one padded batch; return FP32 tensors ``[rows, ...]``, two for spans.

        Args:
            samples: Token rows, or pixels of one size.
        """
        with torch.inference_mode():
            rows = [sample for sample in samples if isinstance(sample, TokenRow)]
            if not rows:
                values = np.stack([pixel_values(np.asarray(one), self._info) for one in samples])
                return (self._model(pixel_values=torch.from_numpy(values)).logits,)
            inputs = self._padded(rows)
            output = self._model(**inputs)
            if self._head is not None:
                return (self._head(output.last_hidden_state, _places(inputs, rows)),)
            if self._core.returns == "spans":
                return output.start_logits, output.end_logits
            return (output.logits,)

    def _padded(self, rows: Sequence[TokenRow]) -> dict[str, torch.Tensor]:
        shape = (len(rows), max(1, *(len(row.ids) for row in rows)))
        ids = np.full(shape, self._info.pad_token_id, dtype=np.int64)
        mask, types = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        for number, row in enumerate(rows):
            ids[number, : len(row.ids)] = row.ids
            mask[number, : len(row.ids)] = 1
            types[number, row.first_segment : len(row.ids)] = 1
        inputs = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
        if types.any():
            inputs["token_type_ids"] = torch.from_numpy(types)
        return inputs


def _places(inputs: dict[str, torch.Tensor], rows: Sequence[TokenRow]) -> RowMembership:
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    return RowMembership(
        ids=ids,
        position=torch.arange(ids.shape[1])[None],
        member=mask.bool(),
        length=mask.sum(dim=1, keepdim=True),
        prompt=torch.tensor([[row.prompt] for row in rows]),
    )
