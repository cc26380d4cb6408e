"""The models of an own pipeline in the order in which they run, and the functions between them.

Build stages take one model at a time: its rows, and the rest of the pipeline as the decoder of its
results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from triptych.base.arrays import Array
from triptych.base.cache import key_of
from triptych.base.tensors import Tensor
from triptych.core.export.own_graph import OwnGraph, RunGraph
from triptych.core.requests import GateRequest, make_record
from triptych.models.info import ModelNames, OwnStage
from triptych.runtime.own_model import OwnDecoder, OwnRowMaker
from triptych.runtime.own_step import PASSED, OwnStep, unpack_arrays
from triptych.runtime.request_errors import RequestError
from triptych.runtime.row_types import Arrays, Metadata, Parameters

Runs = Mapping[str, RunGraph]
"""Function that runs each model, by its name."""


def name_arrays(graphs: Mapping[str, OwnGraph]) -> tuple[ModelNames, ...]:
    """Return the names of the arrays of models that get them from one function.

    Inputs of equal name, type and shape are one array. Other names that several models have are
    written ``MODEL.NAME``.
    """

    def names(model: str, *, inputs: bool) -> dict[str, str]:
        known = [t for g in graphs.values() for t in (g.inputs if inputs else g.outputs)]
        found = {}
        for tensor in graphs[model].inputs if inputs else graphs[model].outputs:
            same = [other for other in known if other.name == tensor.name]
            forms = {(other.dtype, *other.config_dims) for other in same}
            is_one = len(forms) == 1 if inputs else len(same) == 1
            found[tensor.name] = tensor.name if is_one else f"{model}.{tensor.name}"
        return found

    return tuple(
        ModelNames(model, names(model, inputs=True), names(model, inputs=False)) for model in graphs
    )


def arrays_of(
    graphs: Mapping[str, OwnGraph], models: Sequence[ModelNames]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return the inputs and the outputs of models that get their arrays from one function."""
    inputs, outputs = dict[str, Tensor](), dict[str, Tensor]()
    for names in models:
        graph = graphs[names.model]
        for tensor in graph.inputs:
            inputs.setdefault(
                names.inputs[tensor.name], replace(tensor, name=names.inputs[tensor.name])
            )
        for tensor in graph.outputs:
            outputs[names.outputs[tensor.name]] = replace(tensor, name=names.outputs[tensor.name])
    return tuple(inputs.values()), tuple(outputs.values())


def name_passed(tensors: dict[str, Array]) -> Tensor:
    """Rename the tensor with the arrays that a function passes on, and return its declaration."""
    packed = tensors.pop(PASSED)
    names = key_of("passed", {"names": sorted(unpack_arrays(packed))})
    tensor = Tensor(f"{PASSED}_{names[:8]}", "UINT8", ("bytes",))
    tensors[tensor.name] = packed
    return tensor


def run_models(runs: Runs, models: Sequence[ModelNames], arrays: Arrays) -> dict[str, Array]:
    """Return the results of models on the arrays of a function, by the names of the arrays."""
    results: dict[str, Array] = {}
    for names in models:
        found = runs[names.model]({name: arrays[array] for name, array in names.inputs.items()})
        results |= {array: found[name] for name, array in names.outputs.items()}
    return results


@dataclass(frozen=True)
class Chain:
    """Models and functions of an own pipeline with several models."""

    stages: tuple[OwnStage, ...]  # Functions and their models
    maker: OwnRowMaker  # Batch encoder of the first function
    steps: tuple[OwnStep, ...]  # Functions between models, in the order of the stages
    decoder: OwnDecoder  # Decoder that calls `postprocess`
    originals: Runs  # Functions that run the models of the user, in place of the cores, by name
    key: str  # Hash of the models

    def find(self, model: str) -> tuple[int, ModelNames]:
        """Return the index of a model's stage, and the names of its arrays."""
        return next(
            (index, names)
            for index, stage in enumerate(self.stages)
            for names in stage.models
            if names.model == model
        )

    def requests(
        self, model: str, requests: Sequence[GateRequest], runs: Runs | None = None
    ) -> list[GateRequest]:
        """Return requests with the rows of a model, and with all else that goes past it.

        Args:
            model: Name of the model.
            requests: Requests of one row each.
            runs: Models to run before and beside it. None: the user's models.

        Raises:
            RequestError: A function rejects a request.
            RuntimeError: A function fails.
        """
        runs = self.originals if runs is None else runs
        index, names = self.find(model)
        stage = self.stages[index]
        arrays_in = {tensor.name for tensor in stage.own.inputs}
        others = [other for other in stage.models if other.model != model]
        found = []
        for request in requests:
            arrays = self._arrays(request, index, runs)
            past = {name: value for name, value in arrays.items() if name not in arrays_in}
            past |= run_models(runs, others, arrays)
            found.append(replace(request, rows=rows_of_model(arrays, names), past_core=past))
        return found

    def accepted(self, requests: Sequence[GateRequest]) -> list[GateRequest]:
        """Return those `requests` that the functions accept, with the rows of the first model."""
        found = []
        for request in requests:
            with suppress(RequestError, RuntimeError):
                found += self.requests(self.stages[0].models[0].model, [request])
        return found

    def behind(self, model: str) -> _Behind:
        """Return the decoder of a model's results: the rest of the pipeline, as the user's."""
        return _Behind(self, *self.find(model))

    def answer(self, request: GateRequest) -> Arrays:
        """Return the outputs for a request, with the user's models."""
        arrays = self._arrays(request, 0, self.originals)
        return self.finish(0, self._results(0, arrays, self.originals), request.parameters)

    def finish(self, index: int, results: Arrays, parameters: Parameters) -> Arrays:
        """Return the outputs of the pipeline from the results of a stage, with the user's models.

        Args:
            index: Index of the stage.
            results: Results of its models, and the arrays that went past them.
            parameters: Parameters of the request.
        """
        for place, step in enumerate(self.steps[index:], start=index + 1):
            arrays = step.decode(results, (), parameters)
            results = self._results(place, arrays, self.originals)
        return self.decoder.decode(results, (), parameters)

    def _arrays(self, request: GateRequest, index: int, runs: Runs) -> Arrays:
        """Return what the function of a stage makes for a request."""
        (made,) = self.maker.make([request.row_inputs])
        if isinstance(made, Exception):
            raise made
        arrays: Arrays = made.tensors
        for place, step in enumerate(self.steps[:index]):
            arrays = step.decode(self._results(place, arrays, runs), (), request.parameters)
        return arrays

    def _results(self, index: int, arrays: Arrays, runs: Runs) -> dict[str, Array]:
        stage = self.stages[index]
        past = {tensor.name: arrays[tensor.name] for tensor in stage.own.past_core}
        return {**run_models(runs, stage.models, arrays), **past}


@dataclass(frozen=True)
class _Behind:
    """The rest of a pipeline behind a model, in the form of a decoder."""

    chain: Chain
    index: int
    names: ModelNames

    def decode(self, outputs: Arrays, metadata: Metadata, parameters: Parameters) -> Arrays:
        """Return the outputs of the pipeline."""
        named = {self.names.outputs.get(name, name): value for name, value in outputs.items()}
        return self.chain.finish(self.index, named, parameters)


def rows_of_model(arrays: Arrays, names: ModelNames) -> tuple[NDArray[np.void], ...]:
    """Return the core rows of a model from the arrays of its function."""
    own = {name: arrays[array] for name, array in names.inputs.items()}
    count = len(next(iter(own.values())))
    return tuple(
        make_record({name: value[row] for name, value in own.items()}) for row in range(count)
    )
