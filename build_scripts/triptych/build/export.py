"""Hugging Face model -> ``model.onnx`` in either layout, and nothing of this machine in it."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from triptych.errors import UserError
from triptych.model_facts import ModelFacts

OPSET = 18
MODEL_FILE = "model.onnx"
LARGEST_PROTOBUF = 1_900_000_000


def load_encoder(folder: Path) -> Any:
    """The model's encoder in PyTorch, fp32, evaluation mode, without its task head.

    Raises:
        UserError: transformers cannot load it.
    """
    import torch
    from transformers import AutoModel
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    try:
        model = AutoModel.from_pretrained(folder, dtype=torch.float32)
    except Exception as error:
        raise UserError(
            "model.source",
            "must be a model transformers can load",
            given=" ".join(str(error).split())[:300],
            remedy="Check config.json and the weights",
        ) from error
    return model.eval()


def export_onnx(
    folder: Path, facts: ModelFacts, *, packed: bool, output: str, target: Path
) -> None:
    """Write ``target/model.onnx``: the model in `folder` with its pooling and normalisation.

    Graph inputs: packed ``input_ids`` INT32 ``[tokens]``, ``row_length`` INT32 ``[rows, 1]``,
    ``row_stride`` INT32 ``[rows]``; bucketed ``input_ids`` INT32 ``[rows, tokens]`` and
    ``row_length``. Output: `output` FP32 ``[rows, dim]``.

    Raises:
        UserError: the architecture cannot be exported.
    """
    import torch

    from triptych.build.packing import BucketedEncoder, PackedEncoder, SentenceHead

    encoder = load_encoder(folder)
    head = SentenceHead(facts, folder)
    layout = (PackedEncoder if packed else BucketedEncoder)(encoder, head).eval()
    dynamic = torch.export.Dim.DYNAMIC
    # Sizes differ from one another and from 0 and 1, else the exporter takes them for constants.
    lengths = torch.tensor([[4], [6], [7]], dtype=torch.int32)
    names = ["input_ids", "row_length"]
    if packed:
        names.append("row_stride")
        strides = torch.tensor([5, 6, 9], dtype=torch.int32)
        inputs: tuple[Any, ...] = (torch.ones(20, dtype=torch.int32), lengths, strides)
        shapes: tuple[Any, ...] = ({0: dynamic}, {0: dynamic}, {0: dynamic})
    else:
        inputs = (torch.ones((3, 9), dtype=torch.int32), lengths)
        shapes = ({0: dynamic, 1: dynamic}, {0: dynamic})
    try:
        with _quiet(), torch.no_grad():
            program: Any = torch.onnx.export(
                layout,
                inputs,
                dynamo=True,
                dynamic_shapes=shapes,
                input_names=names,
                output_names=[output],
                opset_version=OPSET,
                verbose=False,
            )
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            "model.source",
            f"must be an architecture that exports to ONNX ({facts.architecture})",
            given=f"{type(error).__name__}: {reason}",
            remedy="Try --set core.layout=bucketed, or another model",
        ) from error
    target.mkdir(parents=True, exist_ok=True)
    _save(program.model_proto, target / MODEL_FILE, packed=packed)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's chatter off the terminal; its errors are raised."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)


def _save(model: Any, path: Path, *, packed: bool) -> None:
    """Save with readable axis names and without traces of the machine that exported it."""
    import onnx

    axes: dict[str, str] = {}
    for value in (*model.graph.input, *model.graph.output):
        for index, axis in enumerate(value.type.tensor_type.shape.dim):
            if axis.dim_param:
                tokens = value.name == "input_ids" and index == (0 if packed else 1)
                axes[axis.dim_param] = "tokens" if tokens else "rows"
    for value in (*model.graph.input, *model.graph.output):
        for axis in value.type.tensor_type.shape.dim:
            if axis.dim_param:
                axis.dim_param = axes[axis.dim_param]
    # Shapes of inner values name the old axes, and metadata holds source paths.
    del model.graph.value_info[:]
    _strip(model)
    onnx.checker.check_model(model)
    large = model.ByteSize() > LARGEST_PROTOBUF
    onnx.save(
        model, path, save_as_external_data=large, location=f"{path.name}.data" if large else None
    )


def _strip(model: Any) -> None:
    model.producer_version = ""
    model.doc_string = ""
    del model.metadata_props[:]
    graphs = [model.graph, *model.functions]
    for graph in graphs:
        graph.doc_string = ""
        del graph.metadata_props[:]
        for node in graph.node:
            node.doc_string = ""
            del node.metadata_props[:]
    for value in (*model.graph.input, *model.graph.output, *model.graph.initializer):
        value.doc_string = ""
        del value.metadata_props[:]
