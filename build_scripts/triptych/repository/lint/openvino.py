"""Checks of models for Triton's OpenVINO backend (src/openvino.cc of its repository).

The backend compiles a model for batches of `max_batch_size` rows. It refuses a batch unless the
first request of it has all of these rows. With ``ENABLE_BATCH_PADDING`` it adds rows of zeros, if
all other dimensions of the graph are static. With `max_batch_size: 0` each request runs alone, in
any shape that the graph accepts.
"""

from __future__ import annotations

from collections.abc import Iterator

from triptych.repository.lint.files import in_manifest
from triptych.repository.lint.snapshot import Flaw, Model, Repository, error, names, warning
from triptych.spec.openvino_parameters import KNOWN

_ALONE = "Set max_batch_size: 0 and write the batch as the first of dims: -1"


def openvino_models(repository: Repository) -> Iterator[Model]:
    """Yield the models with ``backend: "openvino"``."""
    return (model for model in repository.executed() if model.backend == "openvino")


def openvino_parameters(model: Model) -> Iterator[Flaw]:
    """Check the names of the parameters: unknown ones have no effect."""
    unknown = sorted(set(model.config.parameters) - set(KNOWN))
    if unknown:
        yield warning(
            "should have only parameters that the OpenVINO backend reads: it ignores others",
            names(unknown),
            f"Remove them; known: {names(KNOWN)}",
        )


def openvino_tensors(model: Model) -> Iterator[Flaw]:
    """Check that the backend has each input of a request, by itself."""
    config = model.config
    joined = sorted(model.ragged | model.added)
    if joined:
        yield error(
            "must not have ragged inputs or batch_input: the OpenVINO backend ignores both",
            names(joined),
            "Pad the rows, or use the onnxruntime backend",
        )
    optional = [tensor.name for tensor in config.input if tensor.optional]
    if optional:
        yield error(
            "must not have optional inputs: for a request without one, the OpenVINO backend uses "
            "the value of the request before",
            names(optional),
            "Remove optional: true",
        )


def openvino_batches(model: Model) -> Iterator[Flaw]:
    """Check that requests reach the backend in the only batch size that it runs."""
    config = model.config
    rows = config.max_batch_size
    if rows < 1:
        return
    padded = config.parameters["ENABLE_BATCH_PADDING"].string_value.lower() == "yes"
    if not padded:
        yield error(
            "must have max_batch_size: 0, or the OpenVINO backend refuses every batch whose first "
            f"request has not {rows} rows",
            f"max_batch_size {rows}",
            _ALONE,
        )
    elif model.varying:
        yield error(
            "must not pad batches of variable length: the OpenVINO backend copies such a batch "
            "into a tensor of its former size",
            f"ENABLE_BATCH_PADDING, and variable inputs {names(model.varying)}",
            _ALONE,
        )
    elif rows > 1:
        yield warning(
            "should not pad batches: each one computes all rows, and after a full batch the "
            "OpenVINO backend pads in memory that it has released",
            f"max_batch_size {rows}, ENABLE_BATCH_PADDING",
            _ALONE,
        )


def openvino_precision(model: Model) -> Iterator[Flaw]:
    """Check that a server does not compute some cores in fp32 and others in bf16.

    The variable for fp32 holds for the whole server. With it, a bf16 core of MiniLM takes 60 times
    as long on a processor with ``avx512_bf16``.
    """
    if not model.config.parameters["HINT_BF16"].string_value:
        return
    fp32 = sorted(
        name
        for name, other in model.repository.models.items()
        if in_manifest(other, "spec", "core", "backend") == "openvino"
        and in_manifest(other, "gate", "precision") == "fp32"
    )
    if fp32:
        yield error(
            "must not compute in bf16 beside OpenVINO cores in fp32: their server has no "
            "instructions for bf16, so this core is many times slower there",
            f"HINT_BF16; {names(fp32)} in fp32",
            "Serve them from different repositories, or build all in one precision",
        )
