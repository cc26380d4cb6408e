"""Export a Hugging Face model to ``model.onnx`` in either layout.

`export_model` is the cached stage of a build. The file contains no path or name of this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triptych.base.cache import MINUTES_ONCE, cached_stage, code_hash, key_of, versions_of
from triptych.base.errors import Progress, UserError
from triptych.base.onnx_graph import MODEL_FILE, hashes_of_graph, save_onnx
from triptych.base.tensors import ROW_OFFSET, ROW_SPAN, Tensor, made_by_server
from triptych.core.export.fusion import join_operators, rewrite, sizes_of_values
from triptych.core.export.operators import keep_padding, write_add, write_gelu, write_squeeze
from triptych.core.export.places import (
    PLACES,
    SIZES,
    WHERE,
    compute_from_shapes,
    compute_from_values,
    compute_places,
)
from triptych.models.info import ModelInfo
from triptych.models.loading import load_model, one_line, quiet
from triptych.models.source import CODE as MODEL_CODE
from triptych.spec.plan import Plan
from triptych.tasks.task import Core, HeadContext, MakeHead, sentence_head

if TYPE_CHECKING:
    import onnx
    import torch
    from torch import nn
    from transformers import PreTrainedModel

    from triptych.core.export.layout_check import ModuleLayout

OPSET = 18


def export_onnx(
    folder: Path,
    info: ModelInfo,
    core: Core,
    inputs: tuple[Tensor, ...],
    *,
    packed: bool,
    target: Path,
    gathered: bool = False,
    head: MakeHead = sentence_head,
) -> bool:
    """Write ``target/model.onnx``: the model in `folder` with its head and the outputs of `core`.

    Returns whether the graph has MultiHeadAttention, which only a `gathered` one has.

    The graph's inputs are `inputs` in order and, if packed, those that Triton provides. Packed,
    ``input_ids`` is INT32 ``[tokens]``, the rows of each request end to end, and an output per
    token is ``[tokens, ...]``. Bucketed, both are ``[rows, tokens, ...]``. Everything else is
    ``[rows, ...]``.

    Raises:
        CannotPack: The layout is packed, and the rows of this model cannot be separated; bucketed
            may work.
        UserError: The model cannot be loaded, run or exported.
    """
    import torch

    from triptych.core.export.packing import CannotPack, without_fixed_length

    model = load_model(folder, core.auto_class)
    with quiet(), without_fixed_length(model), torch.no_grad():
        layout: ModuleLayout = "gathered" if gathered else "packed" if packed else "bucketed"
        made = head(HeadContext(model, info, folder)) if core.has_task_head else None
        graph = _graph(model, info, core, inputs, made, layout)
        traced = inputs
        if packed:
            computed = PLACES if gathered else SIZES
            traced = (*inputs, *made_by_server(inputs)[:1], *computed)
        examples, shapes = _examples(traced, packed=packed)
        names = [tensor.name for tensor in traced], [output.name for output in core.outputs]
        try:
            proto = convert(graph, examples, (shapes,), *names, gathered=gathered)
        except Exception as error:
            reason = f"{type(error).__name__}: {one_line(error)}"
            if packed:
                raise CannotPack(f"its packed form does not export ({reason})") from error
            raise UserError(
                "model.source",
                f"is an architecture that does not export to ONNX ({info.architecture})",
                given=reason,
                remedy="Choose another model",
            ) from error
    if packed and ROW_SPAN in inputs:
        compute_from_shapes(proto)
    elif packed and not gathered:
        compute_from_values(proto, info.max_length)
    _declare(proto, (*inputs, *made_by_server(inputs), *core.outputs), packed=packed)
    target.mkdir(parents=True, exist_ok=True)
    save_onnx(proto, target / MODEL_FILE)
    return any(node.op_type == "MultiHeadAttention" for node in proto.graph.node)


def convert(
    graph: nn.Module,
    examples: tuple[torch.Tensor, ...],
    shapes: tuple[object, ...],
    inputs: Sequence[str],
    outputs: Sequence[str],
    *,
    gathered: bool = False,
) -> onnx.ModelProto:
    """Return a torch module as an `onnx.ModelProto` that computes the same in ONNX Runtime.

    Args:
        examples: Tensors to trace with.
        shapes: Axes that vary, for each parameter of `forward`.
        inputs: Name of each tensor.
        outputs: Names of its results.
        gathered: Whether `places.PLACES` are inputs of the module, which the graph computes. It
            then has operators of ONNX Runtime.
    """
    import torch

    exported: Any = torch.onnx.export(
        torch.export.export(graph.eval(), examples, dynamic_shapes=shapes, strict=False),
        dynamo=True,
        input_names=list(inputs),
        output_names=list(outputs),
        opset_version=OPSET,
        custom_translation_table={
            torch.ops.aten.add.Tensor: write_add,
            torch.ops.aten.gelu.default: write_gelu,
            torch.ops.aten.squeeze.default: write_squeeze,
        },
        verbose=False,
    )
    if gathered:
        join_operators(exported.model)
    proto: onnx.ModelProto = exported.model_proto
    keep_padding(proto)
    if gathered:
        compute_places(proto)
        rewrite(proto, sizes_of_values(exported.model))
    return proto


def _graph(
    model: PreTrainedModel,
    info: ModelInfo,
    core: Core,
    inputs: tuple[Tensor, ...],
    head: nn.Module | None,
    layout: ModuleLayout,
) -> nn.Module:
    """Return the torch module to export, from the graph's inputs to its outputs."""
    from triptych.core.export.outputs import CoreGraph, Returned

    activation = "softmax" if core.reads == "mask" else core.activation or info.activation
    kept = core.outputs[0].dims[0] if core.returns == "choices" else 0
    packed = layout != "bucketed"
    flatten = [packed and own for own in core.per_token]
    returned = Returned(core.returns, activation, kept=int(kept), flatten=flatten)
    if core.reads == "image":
        from triptych.models.image_core import ImageCore

        if info.image is None:
            raise UserError(
                "model.source",
                "has no image processor (preprocessor_config.json)",
                given=info.architecture,
                remedy="Save the model's image processor into the folder",
            )
        pooling = info.pooling[0] if core.returns == "vector" else ""
        return CoreGraph(ImageCore(model, info.image, pooling), returned, (0,))
    from triptych.core.export.layout_check import find_text_core

    names = [tensor.name for tensor in inputs]
    # The order of the module's arguments; the stride and `SIZES` follow the inputs.
    order: list[int | None] = [names.index("input_ids"), names.index("row_length")]
    if layout == "gathered":  # behind the stride
        order += range(len(names) + 1, len(names) + 1 + len(PLACES))
    elif packed:
        order += [names.index(ROW_OFFSET.name), *range(len(names), len(names) + 4)]
    for name in ("first_segment", "prompt_length", "attended_length"):
        order.append(names.index(name) if name in names else None)
    text_core = find_text_core(model, info, core, head, layout)
    return CoreGraph(text_core, returned, tuple(order))


def _examples(
    inputs: tuple[Tensor, ...], *, packed: bool
) -> tuple[tuple[torch.Tensor, ...], tuple[dict[int, object], ...]]:
    """Return inputs to trace with, and their axes that vary."""
    import torch

    # The exporter would treat equal sizes, and sizes of 0 and 1, as constants.
    known = {
        "input_ids": torch.ones(20 if packed else (3, 9), dtype=torch.int32),
        "row_length": torch.tensor([[4], [6], [7]], dtype=torch.int32),
        "row_offset": torch.tensor([[0], [-1], [0]], dtype=torch.int32),
        "row_stride": torch.tensor([5, 6, 9], dtype=torch.int32),
        "row_span": torch.zeros(16, dtype=torch.int32),
        "longest": torch.zeros(16, dtype=torch.int32),
        "tile": torch.zeros(12, dtype=torch.int32),
        "tiles": torch.zeros(4, dtype=torch.int32),
        "padded_ids": torch.ones(3, 7, dtype=torch.int32),
        "positions_in_row": torch.zeros(7, dtype=torch.int32),
        "token_of_slot": torch.zeros(3, 7, dtype=torch.int32),
        "slot_of_token": torch.zeros(17, 2, dtype=torch.int64),
        "place_of_token": torch.zeros(17, 1, dtype=torch.int64),
        "first_segment": torch.tensor([[2], [3], [4]], dtype=torch.int32),
        "prompt_length": torch.tensor([[1], [2], [3]], dtype=torch.int32),
        "attended_length": torch.tensor([[3], [6], [5]], dtype=torch.int32),
    }
    unknown = torch.export.Dim.DYNAMIC
    # Operations on padded rows depend on sizes that are known to be equal.
    shared = ("rows", "longest", "row_tokens") if WHERE in inputs else ()
    sizes = {name: torch.export.Dim(name) for name in shared}
    examples, shapes = [], []
    for tensor in inputs:
        example = known.get(tensor.name)
        if example is None:
            dtype = getattr(torch, tensor.dtype.lower())
            example = torch.zeros((3, *tensor.config_dims), dtype=dtype)
        examples.append(example)
        axes = enumerate(_axes(tensor, packed=packed))
        shapes.append({place: sizes.get(i, unknown) for place, i in axes if isinstance(i, str)})
    return tuple(examples), tuple(shapes)


def _axes(tensor: Tensor, *, packed: bool) -> list[int | str]:
    """Return the axes of a tensor in the graph; packed, tensors per token have no axis of rows."""
    alone = {"tokens", "span", "longest", "tile", "tiles", "row_tokens"}.intersection(tensor.dims)
    return [*tensor.dims] if packed and alone else ["rows", *tensor.dims]


def _declare(model: onnx.ModelProto, tensors: tuple[Tensor, ...], *, packed: bool) -> None:
    """Declare inputs and outputs as `tensors`, because Triton compares shapes and types exactly.

    Raises:
        ValueError: The exported graph differs.
    """
    import onnx

    values = (*model.graph.input, *model.graph.output)
    for value, tensor in zip(values, tensors, strict=True):
        axes = _axes(tensor, packed=packed)
        found = value.type.tensor_type
        sizes = [axis.dim_value if axis.HasField("dim_value") else "?" for axis in found.shape.dim]
        fits = len(sizes) == len(axes) and all(
            size == "?" if isinstance(axis, str) else size in (axis, "?")
            for size, axis in zip(sizes, axes, strict=True)
        )
        dtype = onnx.TensorProto.DataType.Value({"FP32": "FLOAT"}.get(tensor.dtype, tensor.dtype))
        if value.name != tensor.name or found.elem_type != dtype or not fits:
            raise ValueError(
                f"{tensor.name} {tensor.dtype} {axes} was exported as {value.name} "
                f"{onnx.TensorProto.DataType.Name(found.elem_type)} {sizes}"
            )
        value.CopyFrom(onnx.helper.make_tensor_value_info(tensor.name, dtype, axes))


LIBRARIES = ("torch", "transformers", "onnx", "onnxscript", "tokenizers")
CODE = ("core/export/*.py", "base/onnx_graph.py", "tasks/heads.py", "tasks/catalog/*.py")
REFUSAL_FILE = "cannot_pack.txt"
ATTENTION_FILE = "attention.txt"


@dataclass(frozen=True)
class Exported:
    """Result of the export."""

    file: Path  # Path of the graph; the file does not exist if there is a `refusal`
    key: str  # Hash of everything that decided the graph, in hex
    refusal: str = ""  # Reason why the model's rows cannot be packed; empty otherwise
    # Operators that compute attention for a GPU, with the reason; empty for a CPU.
    attention: str = ""
    # SHA-256 hashes of the graph's files, by name.
    files: Mapping[str, str] = field(default_factory=dict)


def plain_reason(plan: Plan) -> str | None:
    """Return why a core for a GPU keeps to operators of the ONNX standard; empty if it need not.

    None if the core is not one of ONNX Runtime for a GPU in the packed layout.
    """
    core = plan.spec.core
    if not plan.packed or (core.backend, core.device) != ("onnxruntime", "gpu"):
        return None
    if core.accelerator != "cuda":
        return f"the accelerator {core.accelerator} knows no other operators"
    if core.precision not in ("fp32", "fp16"):
        return f"other operators are not converted to {core.precision}"
    return ""


def export_model(
    plan: Plan, model_folder: Path, progress: Progress, *, plain: str = ""
) -> Exported:
    """Export the model in the plan's layout.

    Args:
        plain: Reason to use operators of the ONNX standard alone; empty if there is none.

    Raises:
        UserError: The model does not run with the task's head.
    """
    inputs: dict[str, object] = {
        "facts": plan.info.of_core,
        "layout": plan.layout,
        "core": asdict(plan.core),
        "inputs": [tensor.name for tensor in plan.core_inputs],
        "versions": versions_of(*LIBRARIES),
        "code": code_hash(*CODE, *MODEL_CODE),
    }

    reason = plain_reason(plan)
    if reason is not None:
        reason = reason or plain
        inputs["plain"] = reason

    def work(target: Path) -> None:
        from triptych.core.export.packing import CannotPack

        told = f"{plan.info.architecture} to ONNX, {plan.layout}"
        progress("export", f"{told}; with the gate {MINUTES_ONCE}")
        write = partial(
            export_onnx,
            model_folder,
            plan.info,
            plan.core,
            plan.core_inputs,
            packed=plan.packed,
            target=target,
            head=plan.task.head,
        )
        try:
            if reason is None:
                write()
            else:
                text = attention_for_gpu(write, reason) + "\n"
                (target / ATTENTION_FILE).write_text(text, encoding="utf-8")
        except CannotPack as refusal:
            (target / REFUSAL_FILE).write_text(str(refusal), encoding="utf-8")
        except (IndexError, KeyError, RuntimeError, TypeError, AttributeError) as error:
            reason_text = " ".join(str(error).split())[:300]
            raise UserError(
                "model.source",
                f"is a model that does not run with this task's head ({plan.core.auto_class})",
                given=f"{plan.info.architecture}: {type(error).__name__}: {reason_text}",
                remedy="Choose a model fine-tuned for this task",
            ) from error

    folder, cached, files = cached_stage("export", inputs, work, progress)
    key = key_of("export", inputs)
    note = folder / REFUSAL_FILE
    if note.is_file():
        return Exported(folder / MODEL_FILE, key, note.read_text(encoding="utf-8"))
    known = folder / ATTENTION_FILE
    attention = known.read_text(encoding="utf-8").strip() if known.is_file() else ""
    graph = hashes_of_graph(files)
    size = sum((folder / name).stat().st_size for name in graph) / 1e6
    progress("export", f"{MODEL_FILE}, {size:.1f} MB{' (cached)' if cached else ''}")
    return Exported(folder / MODEL_FILE, key, attention=attention, files=graph)


def attention_for_gpu(write: Callable[..., bool], reason: str) -> str:
    """Write a graph for ONNX Runtime on a GPU; return how it computes attention.

    Args:
        write: Writes the graph, `gathered` or not; returns whether it has MultiHeadAttention.
        reason: Reason to use operators of the ONNX standard alone; empty if there is none.
    """
    from triptych.core.export.packing import CannotPack

    if not reason:
        try:
            if write(gathered=True):
                return PADDED
            return OWN_OPERATORS
        except CannotPack as error:
            reason = str(error)
    write()
    return f"as on a CPU, because {reason}"


PADDED = "MultiHeadAttention of ONNX Runtime, on rows padded to the longest"
OWN_OPERATORS = (
    "operators of the model's own code, on rows padded to the longest, because the model does not "
    "look its attention up in transformers' registry, or MultiHeadAttention does not compute it"
)
