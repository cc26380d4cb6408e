"""How an ensemble wires its steps: who produces and who consumes each of its tensors."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from triptych.lint.snapshot import Model, Repository


@dataclass(frozen=True)
class Step:
    """One step of an ensemble.

    Attributes:
        index: position in the config, from 0.
        model_name: the model it runs.
        model: that model; None when it is missing or its config unreadable.
        inputs: the model's input -> the ensemble's tensor.
        outputs: the model's output -> the ensemble's tensor.
    """

    index: int
    model_name: str
    model: Model | None
    inputs: dict[str, str]
    outputs: dict[str, str]

    @property
    def label(self) -> str:
        """How messages call it."""
        return f"step {self.index} ({self.model_name or 'no model_name'})"


@dataclass(frozen=True)
class Wiring:
    """The dataflow of one ensemble.

    Attributes:
        ensemble: the model with `ensemble_scheduling`.
        steps: in the order of the config.
        producers: the ensemble's tensor -> the steps that write it.
        consumers: the ensemble's tensor -> the steps that read it.
        inputs: names of the ensemble's own inputs.
        outputs: names of the ensemble's own outputs.
    """

    ensemble: Model
    steps: tuple[Step, ...]
    producers: dict[str, list[Step]]
    consumers: dict[str, list[Step]]
    inputs: frozenset[str]
    outputs: frozenset[str]

    @property
    def tensors(self) -> frozenset[str]:
        """Every tensor that has a source: the ensemble's inputs and what the steps write."""
        return self.inputs | self.producers.keys()

    def stages(self) -> list[list[Step]]:
        """The steps in the order they can run: those of one stage run at the same time.

        Steps that wait for each other in a circle, or behind one, are in none.
        """
        ready, waiting = set(self.inputs), list(self.steps)
        stages: list[list[Step]] = []
        while True:
            # A tensor without any source is another fault: it blocks nothing here.
            stage = [
                step
                for step in waiting
                if all(t in ready or t not in self.producers for t in step.inputs.values())
            ]
            if not stage:
                return stages
            stages.append(stage)
            ready.update(tensor for step in stage for tensor in step.outputs.values())
            waiting = [step for step in waiting if step not in stage]


def wiring_of(repository: Repository, ensemble: Model) -> Wiring:
    """The wiring of `ensemble`, a model with a readable config."""
    steps = tuple(
        _step(repository, index, step)
        for index, step in enumerate(ensemble.config.ensemble_scheduling.step)
    )
    producers: dict[str, list[Step]] = defaultdict(list)
    consumers: dict[str, list[Step]] = defaultdict(list)
    for step in steps:
        for tensor in step.outputs.values():
            producers[tensor].append(step)
        for tensor in step.inputs.values():
            consumers[tensor].append(step)
    return Wiring(
        ensemble=ensemble,
        steps=steps,
        producers=dict(producers),
        consumers=dict(consumers),
        inputs=frozenset(tensor.name for tensor in ensemble.config.input),
        outputs=frozenset(tensor.name for tensor in ensemble.config.output),
    )


def wirings(repository: Repository) -> list[Wiring]:
    """The wiring of every ensemble of the repository."""
    return [wiring_of(repository, ensemble) for ensemble in repository.ensembles()]


def _step(repository: Repository, index: int, step: Any) -> Step:
    model = repository.models.get(step.model_name)
    return Step(
        index=index,
        model_name=step.model_name,
        model=model if model is not None and model.config is not None else None,
        inputs=dict(step.input_map),
        outputs=dict(step.output_map),
    )
