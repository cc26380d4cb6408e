"""Export a Hugging Face model to ``model.onnx`` in either layout.

`export_model` is the cached stage of a build. The file contains no path or name of this machine.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from triptych.base.cache import cached_stage, code_hash, key_of, versions_of
from triptych.base.errors import Progress, UserError
from triptych.base.onnx_graph import MODEL_FILE, hashes_of_graph, save_onnx
from triptych.base.tensors import LONGEST, ROW_OFFSET, ROW_SPAN, Tensor, made_by_server
from triptych.core.export.model_checks import check_model, check_unused
from triptych.core.export.operators import keep_padding, write_add, write_gelu, write_squeeze
from triptych.runtime.packing import MULTIPLE
from triptych.spec.model_info import ModelInfo
from triptych.spec.model_source import CODE as MODEL_CODE
from triptych.spec.plan import Plan
from triptych.spec.tasks.task import Core

OPSET = 18
RESULTS = ("last_hidden_state", "logits", "start_logits", "end_logits")
"""Fields that are read from a model's output, whatever its class."""


def load_model(folder: Path, auto_class: str) -> Any:
    """Return the model that `save_pretrained` wrote, in PyTorch, fp32 and evaluation mode.

    transformers' class `auto_class` loads it, with its head. For an encoder-decoder without a head,
    only the encoder is returned if transformers has an encoder class for it, if the full model
    needs decoder inputs, or if the full model lacks weights.

    Raises:
        UserError: transformers cannot load the model with that class, or weights are missing.
    """
    import torch
    import transformers
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    try:
        with quiet():
            model, report = _loader(folder, auto_class).from_pretrained(
                folder,
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                trust_remote_code=False,
            )
    except Exception as error:
        raise UserError(
            "model.source",
            f"is not a model that transformers can load ({auto_class})",
            given=_one_line(error),
            remedy="Check config.json and the weights",
        ) from error
    if report["mismatched_keys"]:
        raise _mismatch(model.config, sorted(report["mismatched_keys"])[0])
    model = model.eval()
    check_unused(model, report["unexpected_keys"])
    check_model(model)
    missing = _learned(model, report["missing_keys"])
    refused = bool(missing) and _matter(model, missing)
    if auto_class == "AutoModel" and getattr(model.config, "is_encoder_decoder", False):
        encoder = None if not refused and _runs(model) else _encoder_of(model)
        if encoder is not None:
            missing = _missing_of(encoder, model, missing)
            model, refused = encoder, bool(missing) and _matter(encoder, missing)
    if refused:
        raise UserError(
            "model.source",
            f"lacks weights of {type(model).__name__}",
            given=f"{len(missing)} missing: {', '.join(missing[:4])}",
            remedy="Choose a model fine-tuned for this task",
        )
    if isinstance(model, transformers.PreTrainedModel) and hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    return model


def model_class(folder: Path, auto_class: str) -> Any:
    """Return the class that transformers' class `auto_class` loads a folder with."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    return getattr(transformers, auto_class)._model_mapping[type(config)]


def _mismatch(config: Any, wrong: tuple[str, Any, Any]) -> UserError:
    """Return the error for weights whose size differs from the config."""
    name, held, wanted = wrong
    labels = list((config.id2label or {}).values())
    if wanted[0] == len(labels) != held[0]:
        return UserError(
            "id2label in config.json",
            "names another number of labels than the model's head has",
            given=f"{len(labels)} ({', '.join(map(str, labels))}), but `{name}` has {held[0]}",
            remedy=f"Name all {held[0]} there and in label2id, or train the head again",
        )
    return UserError(
        "config.json",
        "gives other sizes than the weights have",
        given=f"`{name}` has {list(held)}, and {list(wanted)} by config.json",
        remedy="Use config.json and weights of the same model",
    )


def _one_line(error: Exception) -> str:
    """Return an error's message without line breaks and terminal colors, cut to 300 characters."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m", "", str(error)).split())[:300]


def _loader(folder: Path, auto_class: str) -> Any:
    """Return the class to load with.

    For models without a head it is the encoder's class if there is one, as in
    sentence-transformers.
    """
    import transformers

    if auto_class == "AutoModel":
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if type(config) in transformers.MODEL_FOR_TEXT_ENCODING_MAPPING:
            return transformers.AutoModelForTextEncoding
    return getattr(transformers, auto_class)


def _learned(model: Any, missing: set[str]) -> list[str]:
    """Return those missing weights that training decides, unlike for example a table of sines."""
    import torch

    if not missing:
        return []
    with torch.device("meta"):
        unfilled = type(model)(model.config)
    frozen = {name for name, weight in unfilled.named_parameters() if not weight.requires_grad}
    return sorted(missing - frozen)


def _runs(model: Any) -> bool:
    """Check that an encoder-decoder runs on token ids alone."""
    import torch

    try:
        with torch.no_grad():
            model(input_ids=model.dummy_inputs["input_ids"])
    except Exception:  # a model may raise anything without its decoder's inputs
        return False
    return True


def _encoder_of(model: Any) -> Any:
    """Return the encoder of an encoder-decoder; None if it cannot run as a model of its own."""
    import transformers

    encoder = model.get_encoder()
    return encoder if isinstance(encoder, transformers.PreTrainedModel) else None


def _missing_of(encoder: Any, model: Any, missing: list[str]) -> list[str]:
    """Return the encoder's share of the model's missing weights, by their names in the encoder."""
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    lacking = {id(weights[name]) for name in missing if name in weights}
    own = (*encoder.named_parameters(), *encoder.named_buffers())
    return sorted(name for name, weight in own if id(weight) in lacking)


def _matter(model: Any, missing: list[str]) -> bool:
    """Check whether weights that the checkpoint lacks influence a result.

    The weights are set to NaN for the check. If no result becomes NaN, they are set to 0: for
    example a pooler that no head reads.
    """
    import torch

    if model.main_input_name != "input_ids":
        return True
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    chosen = [weights[name] for name in missing if name in weights]
    with torch.no_grad():
        for weight in chosen:
            weight.fill_(float("nan") if weight.is_floating_point() else 0)
        try:
            output = model(**model.dummy_inputs)
        except Exception:  # the model needs other inputs, so the check is not possible
            return True
        results = [output.get(name) for name in RESULTS if output.get(name) is not None]
        if not results or any(bool(result.isnan().any()) for result in results):
            return True
        for weight in chosen:
            weight.zero_()
    return False


def export_onnx(
    folder: Path,
    info: ModelInfo,
    core: Core,
    inputs: tuple[Tensor, ...],
    *,
    packed: bool,
    target: Path,
) -> None:
    """Write ``target/model.onnx``: the model in `folder` with its head and the outputs of `core`.

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
    from triptych.core.export.to_onnx import SIZES, compute_from_shapes, compute_from_values

    model = load_model(folder, core.auto_class)
    with quiet(), without_fixed_length(model), torch.no_grad():
        graph = _graph(model, info, core, inputs, folder, packed=packed)
        traced = (*inputs, *made_by_server(inputs)[:1], *SIZES) if packed else inputs
        examples, shapes = _examples(traced, packed=packed)
        names = [tensor.name for tensor in traced], [output.name for output in core.outputs]
        try:
            proto = convert(graph, examples, (shapes,), *names)
        except Exception as error:
            reason = f"{type(error).__name__}: {_one_line(error)}"
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
    elif packed:
        compute_from_values(proto, info.max_length)
    _declare(proto, (*inputs, *made_by_server(inputs), *core.outputs), packed=packed)
    target.mkdir(parents=True, exist_ok=True)
    save_onnx(proto, target / MODEL_FILE)


def convert(
    graph: Any,
    examples: tuple[Any, ...],
    shapes: tuple[Any, ...],
    inputs: Sequence[str],
    outputs: Sequence[str],
) -> Any:
    """Return a torch module as an `onnx.ModelProto` that computes the same in ONNX Runtime.

    Args:
        graph: Module.
        examples: Tensors to trace with.
        shapes: Axes that vary, for each parameter of `forward`.
        inputs: Name of each tensor.
        outputs: Names of its results.
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
    proto = exported.model_proto
    keep_padding(proto)
    return proto


def _graph(
    model: Any,
    info: ModelInfo,
    core: Core,
    inputs: tuple[Tensor, ...],
    folder: Path,
    *,
    packed: bool,
) -> Any:
    """Return the torch module to export, from the graph's inputs to its outputs."""
    from triptych.core.export.heads import CoreGraph, Returned

    activation = "softmax" if core.reads == "mask" else core.activation or info.activation
    kept = core.outputs[0].dims[0] if core.returns == "choices" else 0
    returned = Returned(core.returns, activation, kept=int(kept), flatten=packed and core.per_token)
    if core.reads == "image":
        from triptych.spec.image_core import ImageCore

        if info.image is None:
            raise UserError(
                "model.source",
                "has no image processor (preprocessor_config.json)",
                given=info.architecture,
                remedy="Save the model's image processor into the folder",
            )
        return CoreGraph(ImageCore(model, info.image), returned, (0,))
    from triptych.core.export.layout_check import find_text_core

    names = [tensor.name for tensor in inputs]
    # The order of the module's arguments; the stride and `SIZES` follow the inputs.
    order: list[int | None] = [names.index("input_ids"), names.index("row_length")]
    if packed:
        order += [names.index(ROW_OFFSET.name), *range(len(names), len(names) + 4)]
    for name in ("first_segment", "prompt_length"):
        order.append(names.index(name) if name in names else None)
    text_core = find_text_core(model, info, core, folder, packed=packed)
    return CoreGraph(text_core, returned, tuple(order))


def _examples(
    inputs: tuple[Tensor, ...], *, packed: bool
) -> tuple[tuple[Any, ...], tuple[dict[int, Any], ...]]:
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
        "first_segment": torch.tensor([[2], [3], [4]], dtype=torch.int32),
        "prompt_length": torch.tensor([[1], [2], [3]], dtype=torch.int32),
    }
    examples, shapes = [], []
    for tensor in inputs:
        example = known.get(tensor.name)
        if example is None:
            dtype = getattr(torch, tensor.dtype.lower())
            example = torch.zeros((3, *tensor.config_dims), dtype=dtype)
        examples.append(example)
        axes = enumerate(_axes(tensor, packed=packed))
        shapes.append({place: torch.export.Dim.DYNAMIC for place, i in axes if isinstance(i, str)})
    return tuple(examples), tuple(shapes)


def _axes(tensor: Tensor, *, packed: bool) -> list[int | str]:
    """Return the axes of a tensor in the graph; packed, tensors per token have no axis of rows."""
    alone = {"tokens", "span", "longest", "tile", "tiles"}.intersection(tensor.dims)
    return [*tensor.dims] if packed and alone else ["rows", *tensor.dims]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress the exporter's messages while the context is open; errors are raised."""
    previous = logging.root.manager.disable
    # A failed export logs the whole graph as an error, and raises.
    logging.disable(logging.ERROR)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)


def _declare(model: Any, tensors: tuple[Tensor, ...], *, packed: bool) -> None:
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
CODE = ("core/export/*.py", "base/onnx_graph.py")
REFUSAL_FILE = "cannot_pack.txt"


@dataclass(frozen=True)
class Exported:
    """Result of the export.

    Attributes:
        file: Path of the graph; the file does not exist if there is a `refusal`.
        key: Hash of everything that decided the graph, in hex.
        refusal: Reason why the model's rows cannot be packed; empty otherwise.
        files: SHA-256 hashes of the graph's files, by name.
    """

    file: Path
    key: str
    refusal: str = ""
    files: Mapping[str, str] = field(default_factory=dict)


def export_model(plan: Plan, model_folder: Path, progress: Progress) -> Exported:
    """Export the model in the plan's layout.

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

    def work(target: Path) -> None:
        from triptych.core.export.packing import CannotPack

        progress("export", f"{plan.info.architecture} to ONNX, {plan.layout} ...")
        try:
            export_onnx(
                model_folder,
                plan.info,
                plan.core,
                plan.core_inputs,
                packed=plan.packed,
                target=target,
            )
        except CannotPack as reason:
            (target / REFUSAL_FILE).write_text(str(reason), encoding="utf-8")
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
    graph = hashes_of_graph(files)
    size = sum((folder / name).stat().st_size for name in graph) / 1e6
    progress("export", f"{MODEL_FILE}, {size:.1f} MB{' (cached)' if cached else ''}")
    return Exported(folder / MODEL_FILE, key, files=graph)


TILE = Tensor("tile", "INT32", ("tile",))
TILES = Tensor("tiles", "INT32", ("tiles",))
SIZES = (LONGEST, TILE, TILES)

TILE_OVERHEAD = 16
"""Time to gather the keys and values of a tile, as a number of queries. Measured on a CPU with
AVX-512: gathering a key of 384 elements takes 0.3 to 0.4 us, and each query 25 ns."""

TENSORRT_TILE = 64
"""Number of queries in a tile for TensorRT, which cannot choose it for each batch."""


def compute_from_values(model: Any, max_length: int) -> None:
    """Compute the sizes from the values of ``row_length``, for ONNX Runtime.

    The candidates for W are powers of two and the longest row. For each, N is the sum over the rows
    of ``ceil(length / W)``, and the estimated time is ``N * (W + TILE_OVERHEAD)``. The candidate
    with the smallest time is used: one long row among many short ones is cut into tiles of their
    length.

    Args:
        model: An `onnx.ModelProto`; it is changed in place.
        max_length: Maximum number of tokens of a row.
    """
    from onnx import helper, numpy_helper

    sizes = [MULTIPLE]
    while sizes[-1] * 2 < max_length:
        sizes.append(sizes[-1] * 2)
    constants = {
        "one": np.array([1], np.int32),
        "less": np.array([MULTIPLE - 1], np.int32),
        "multiple": np.array([MULTIPLE], np.int32),
        "powers": np.array(sizes, np.int32),
        "overhead": np.array([TILE_OVERHEAD], np.int32),
        "first_axis": np.array([0], np.int64),
    }
    steps: list[tuple[str, list[str], list[str], dict[str, Any]]] = [
        ("ReduceMax", ["row_length"], ["most"], {"keepdims": 0}),
        ("Max", ["most", "one"], ["most_or_one"], {}),
        ("Add", ["most_or_one", "less"], ["raised"], {}),
        ("Div", ["raised", "multiple"], ["blocks"], {}),
        ("Mul", ["blocks", "multiple"], ["longest_size"], {}),
        ("Min", ["powers", "longest_size"], ["powers_within"], {}),
        ("Concat", ["powers_within", "longest_size"], ["choices"], {"axis": 0}),
        ("Sub", ["choices", "one"], ["choices_less_one"], {}),
        ("Max", ["row_length", "one"], ["row_or_one"], {}),
        ("Add", ["row_or_one", "choices_less_one"], ["raised_rows"], {}),
        ("Div", ["raised_rows", "choices"], ["tiles_of_rows"], {}),
        ("ReduceSum", ["tiles_of_rows", "first_axis"], ["tiles_of_choices"], {"keepdims": 0}),
        ("Add", ["choices", "overhead"], ["time_of_tile"], {}),
        ("Mul", ["tiles_of_choices", "time_of_tile"], ["time"], {}),
        ("ArgMin", ["time"], ["best"], {"axis": 0, "keepdims": 1}),
        ("Gather", ["choices", "best"], ["tile_size"], {}),
        ("Gather", ["tiles_of_choices", "best"], ["tiles_size"], {}),
    ]
    nothing = numpy_helper.from_array(np.zeros(1, np.float32))
    for tensor in SIZES:
        wide = f"{tensor.name}_shape"
        steps += [
            ("Cast", [f"{tensor.name}_size"], [wide], {"to": 7}),
            ("ConstantOfShape", [wide], [tensor.name], {"value": nothing}),
        ]
    known = {value.name for value in model.graph.input} | {tensor.name for tensor in SIZES}
    inside = {name: f"sizes.{name}" for name in constants}
    inside |= {name: f"sizes.{name}" for _, _, outputs, _ in steps for name in outputs}
    inside |= {name: name for name in known}
    nodes = [
        helper.make_node(
            operator,
            [inside[name] for name in inputs],
            [inside[name] for name in outputs],
            name=f"sizes.{index}.{operator}",
            **attributes,
        )
        for index, (operator, inputs, outputs, attributes) in enumerate(steps)
    ]
    _prepend(model, nodes, {inside[name]: value for name, value in constants.items()})


def compute_from_shapes(model: Any) -> None:
    """Compute the sizes from the shapes of inputs, for TensorRT.

    ``longest`` stays an input, which Triton provides. W is `TENSORRT_TILE`. N is ``T // W + B``,
    which is at least the number of tiles that the rows need.

    Args:
        model: An `onnx.ModelProto`; it is changed in place.
    """
    from onnx import helper, numpy_helper

    nothing = numpy_helper.from_array(np.zeros(1, np.float32))
    constants = {"sizes.tile": np.array([TENSORRT_TILE], np.int64)}
    steps: list[tuple[str, list[str], str, dict[str, Any]]] = [
        ("Shape", ["input_ids"], "sizes.tokens", {}),
        ("Shape", ["row_length"], "sizes.rows", {"start": 0, "end": 1}),
        ("Div", ["sizes.tokens", "sizes.tile"], "sizes.whole_tiles", {}),
        ("Add", ["sizes.whole_tiles", "sizes.rows"], "sizes.tiles", {}),
        ("ConstantOfShape", ["sizes.tile"], TILE.name, {"value": nothing}),
        ("ConstantOfShape", ["sizes.tiles"], TILES.name, {"value": nothing}),
    ]
    nodes = [
        helper.make_node(operator, inputs, [output], name=f"node.{output}", **attributes)
        for operator, inputs, output, attributes in steps
    ]
    _prepend(model, nodes, constants)


def _prepend(model: Any, nodes: list[Any], constants: dict[str, Any]) -> None:
    """Insert nodes before all others; values that the nodes compute are removed from the inputs."""
    from onnx import numpy_helper

    graph = model.graph
    computed = {name for node in nodes for name in node.output}
    inputs = [value for value in graph.input if value.name not in computed]
    old = list(graph.node)
    del graph.input[:]
    graph.input.extend(inputs)
    del graph.node[:]
    graph.node.extend([*nodes, *old])
    graph.initializer.extend(
        numpy_helper.from_array(value, name) for name, value in constants.items()
    )
