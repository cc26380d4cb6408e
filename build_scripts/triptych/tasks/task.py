"""What a task is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from triptych.model_facts import ModelFacts
from triptych.tensors import Tensor


@dataclass(frozen=True)
class Thresholds:
    """What the accuracy gate demands of an artifact.

    Attributes:
        min_cosine: of each row with the reference.
        max_difference: largest difference of any element, relative to the largest element of the
            reference where that is above 1.
    """

    min_cosine: float
    max_difference: float


@dataclass(frozen=True)
class Task:
    """One kind of inference.

    Attributes:
        name: as the spec writes it.
        inputs: of the ensemble, without the batch dimension.
        core_outputs: what the core returns per row, from the model's facts.
        outputs: of the ensemble, from the model's facts.
        postprocess: file of `triptych.runtime` that decodes, copied as the step's ``model.py``.
        request_parameters: what a request may ask for: name to rule. A rule is what
            ``stub_io.check_parameters`` reads: ``type``, and ``min``/``max`` or ``choices``.
        thresholds: of the accuracy gate, for fp32.
    """

    name: str
    inputs: tuple[Tensor, ...]
    core_outputs: Callable[[ModelFacts], tuple[Tensor, ...]]
    outputs: Callable[[ModelFacts], tuple[Tensor, ...]]
    postprocess: str
    request_parameters: Callable[[ModelFacts], Mapping[str, Mapping[str, object]]]
    thresholds: Thresholds
