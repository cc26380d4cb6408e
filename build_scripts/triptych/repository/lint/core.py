"""Checks that a compiled core and its config match.

They include ragged inputs and inputs that the server adds. Cores that generate text must fit their
GPUs and their KV cache, and prompts must have one BOS token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from triptych.repository.lint.snapshot import (
    GRAPH_BACKENDS,
    Flaw,
    Graph,
    Model,
    Repository,
    TypedTensor,
    dims_text,
    enum_name,
    error,
    exists,
    fits,
    info,
    names,
    warning,
)

if TYPE_CHECKING:
    from tritonclient.grpc.model_config_pb2 import (
        BatchInput,
        BatchOutput,
        ModelInput,
        ModelOutput,
    )

# Number of dims of the tensor that the server makes for a kind of batch_input.
_RANKS = {"BATCH_ITEM_SHAPE": 2}


def onnx_readable(repository: Repository) -> Iterator[Flaw]:
    """Check that ONNX files can be read.

    Without the onnx package their checks are skipped, which is reported.
    """
    skipped = [
        model.name
        for model in repository.executed()
        if model.backend == "onnxruntime" or model.waits_for_engine
    ]
    if skipped and not repository.reads_graphs:
        yield info(
            "compares configs with ONNX files only if the package onnx is installed",
            f"not compared: {names(skipped)}",
            "pip install onnx",
        )
    for graph in (graph for model in repository.executed() for graph in model.graphs):
        if graph.problem:
            remedy = "Build the pipeline again"
            yield error("must be an ONNX file", graph.problem, remedy, graph.file)


def onnx_data(model: Model) -> Iterator[Flaw]:
    """Check that the external weights of an ONNX file are beside it."""
    for graph in model.graphs:
        folder = (model.repository.root / graph.file).parent
        missing = [name for name in graph.data_files if not exists(folder / name)]
        if missing:
            yield error(
                "must have its external weights beside it",
                f"missing: {names(missing)}",
                "Copy them along with the ONNX file, or build the pipeline again",
                graph.file,
            )


def onnx_tensors(model: Model) -> Iterator[Flaw]:
    """Check that names, dtypes and dims of the config are those of the ONNX file."""
    for graph in (graph for graph in model.graphs if not graph.problem):
        for kind, there in (("input", graph.inputs), ("output", graph.outputs)):
            for tensor in getattr(model.config, kind):
                for rule, given in _tensor_faults(model, kind, tensor, there):
                    remedy = f"Correct the {kind} here, or export {graph.file} again"
                    yield error(rule, f"{kind} {tensor.name}: {given}", remedy)
        sequence = model.config.sequence_batching
        fed = {*model.inputs, *model.added, *(state.input_name for state in sequence.state)}
        fed.update(control.name for control in sequence.control_input)
        unfed = set(graph.inputs) - fed
        if model.config.input and unfed:
            yield error(
                "must feed every input of the ONNX file",
                f"{graph.file} needs {names(unfed)} too; declared: {names(fed)}",
                "Add it to input, or to batch_input if the server makes it",
            )


def _tensor_faults(
    model: Model, kind: str, tensor: ModelInput | ModelOutput, there: dict[str, TypedTensor]
) -> Iterator[tuple[str, str]]:
    found = there.get(tensor.name)
    if found is None:
        yield f"must declare {kind}s that the ONNX file has", f"not in it; it has: {names(there)}"
        return
    declared = enum_name(tensor, "data_type")
    if declared != found.data_type:
        yield f"must have the ONNX file's dtype ({found.data_type})", declared
    scattered = {name for output in model.config.batch_output for name in output.target_name}
    if found.dims is None or tensor.name in scattered:
        return
    if kind == "input" and tensor.allow_ragged_batch:
        if found.dims != (-1,):
            yield "must be [-1] in the ONNX file to be ragged", dims_text(found.dims)
        return
    dims = tuple(tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims)
    batched = model.config.max_batch_size > 0
    without_batch = found.dims[1:] if batched else found.dims
    if batched and found.dims[:1] != (-1,):
        rule = "must have a variable first dimension in the ONNX file when max_batch_size is set"
        yield rule, dims_text(found.dims)
    # The backend accepts a narrower input than the graph's, but compares outputs exactly.
    elif dims != without_batch and not (kind == "input" and fits(dims, without_batch)):
        yield (
            "must have the ONNX file's dims" + (", without the batch" if batched else ""),
            f"{dims_text(dims)}, the ONNX file has {dims_text(found.dims)}",
        )


def batch_input(model: Model) -> Iterator[Flaw]:
    """Check that tensors the server adds are made from a ragged input and read by the graph."""
    config = model.config
    for index, added in enumerate(config.batch_input):
        for rule, given in _added_faults(model, added):
            remedy = "Correct the batch_input, or the input it is made from"
            yield error(rule, f"batch_input {index}: {given}", remedy)
    for index, split in enumerate(config.batch_output):
        for rule, given in _split_faults(model, split):
            remedy = "Correct the batch_output, or the input it follows"
            yield error(rule, f"batch_output {index}: {given}", remedy)
    # Joined rows need their lengths; the Python backend never joins rows.
    unmarked = model.ragged - {name for added in config.batch_input for name in added.source_input}
    if unmarked and model.backend in GRAPH_BACKENDS:
        yield warning(
            "should tell the graph where each row of a ragged input ends",
            f"no batch_input made from {names(unmarked)}",
            "Add a batch_input of kind BATCH_ITEM_SHAPE_FLATTEN with the ragged input as "
            "source_input",
        )


def _source_faults(
    model: Model, added: BatchInput | BatchOutput, kind: str
) -> Iterator[tuple[str, str]]:
    for name in added.source_input:
        if name in model.inputs and name not in model.ragged:
            rule = f"must have a ragged input as source_input of {kind}"
            yield rule, f"{name} is without allow_ragged_batch: true"


def _added_faults(model: Model, added: BatchInput) -> Iterator[tuple[str, str]]:
    kind, data_type = enum_name(added, "kind"), enum_name(added, "data_type")
    yield from _source_faults(model, added, kind)
    if not added.target_name:
        yield "must have a target_name", "none"
    both = set(model.inputs) & set(added.target_name)
    if both:
        yield "must not make an input that requests contain", names(both)
    for graph in model.graphs:
        for name in added.target_name if not graph.problem else ():
            yield from _target_faults(name, graph, data_type, _RANKS.get(kind, 1), kind)


def _target_faults(
    name: str, graph: Graph, data_type: str, rank: int, kind: str
) -> Iterator[tuple[str, str]]:
    found = graph.inputs.get(name)
    if found is None:
        rule = "must make an input that the ONNX file has"
        yield rule, f"{name} is none; inputs: {names(graph.inputs)}"
        return
    if found.data_type != data_type:
        yield f"must have the ONNX file's dtype ({found.data_type})", f"{name} {data_type}"
    if found.dims is not None and len(found.dims) != rank:
        rule = f"must have {rank} dims in the ONNX file for {kind}"
        yield rule, f"{name} {dims_text(found.dims)}"


def _split_faults(model: Model, split: BatchOutput) -> Iterator[tuple[str, str]]:
    yield from _source_faults(model, split, enum_name(split, "kind"))
    if len(split.target_name) > 1:
        rule = "must have one target_name: Triton only fills the first of several outputs"
        yield rule, names(split.target_name)


_SLICE = "MIG-"
_MIB = 1 << 20
_TOKENIZER, _TEMPLATE = "tokenizer.json", "chat_template.jinja"


def engine_gpus(model: Model) -> Iterator[Flaw]:
    """Check that a model on several GPUs has one whole GPU per part and places itself."""
    settings = model.settings
    gpus = settings.get("gpus") or []
    parts = settings.get("tensor_parallel", 1) * settings.get("pipeline_parallel", 1)
    slices = [gpu for gpu in gpus if str(gpu).startswith(_SLICE)]
    if slices and parts > 1:
        yield error(
            "must not split a model over slices of GPUs: a slice cannot access another's memory",
            f"{parts} parts on {', '.join(map(str, gpus))}",
            "Use whole GPUs, or tensor_parallel_size: 1 and pipeline_parallel_size: 1",
        )
    elif slices:
        yield error(
            "must not name a slice by its UUID: vLLM crashes on one in CUDA_VISIBLE_DEVICES "
            "(vllm-project/vllm#41848)",
            ", ".join(slices),
            "Give the container only that slice, and remove serving.gpus",
        )
    if gpus and len(gpus) != parts:
        yield error(
            "must have a GPU for each part of the model "
            "(tensor_parallel_size x pipeline_parallel_size)",
            f"{parts} parts, gpus {', '.join(map(str, gpus))}",
            "Name as many GPUs in serving.gpus",
        )
    kinds = {enum_name(group, "kind") for group in model.config.instance_group}
    if parts > 1 and kinds != {"KIND_MODEL"}:
        yield error(
            "must be KIND_MODEL: the engine, not Triton, places a model on several GPUs",
            ", ".join(sorted(kinds)) or "no instance_group",
            "Write instance_group [{ count: 1 kind: KIND_MODEL }]",
        )


def precision_gpus(model: Model) -> Iterator[Flaw]:
    """Report the GPUs that compute in 8 bits.

    vLLM reports unsupported GPUs only when it starts, or silently uses another precision. See
    https://docs.vllm.ai/en/latest/features/quantization/
    """
    settings = model.settings
    if "kv_cache_precision" not in settings:
        return
    if settings.get("precision") == "fp8" or settings["kv_cache_precision"] == "fp8":
        yield info(
            "fp8 is for GPUs of compute capability 8.9 or later (Ada, Hopper, Blackwell): on older "
            "ones vLLM computes with fp8 weights in bf16, and may refuse an fp8 KV cache",
            _eight_bits(settings),
            "Use such GPUs, for example L4, L40S or H100; on older ones use int8",
        )
    if settings.get("precision") == "int8":
        yield info(
            "int8 is for GPUs of compute capability 8.0 to 9.0 (Ampere to Hopper): vLLM refuses "
            "it on Blackwell, and bf16, which the rest is computed in, on older ones",
            _eight_bits(settings),
            "Use such GPUs; on newer ones use fp8",
        )


def _eight_bits(settings: Mapping[str, object]) -> str:
    return (
        f"core.precision {settings.get('precision')}, core.kv_cache.dtype "
        f"{settings['kv_cache_precision']}"
    )


def kv_cache(model: Model) -> Iterator[Flaw]:
    """Check that the KV cache holds one request of full length, and a batch of common ones."""
    settings = model.settings
    token_bytes, memory_mib = settings.get("kv_token_bytes"), settings.get("kv_cache_mib")
    if not token_bytes or not memory_mib:
        return
    holds = memory_mib * _MIB // token_bytes
    longest, together = settings.get("max_length", 0), settings.get("max_sequences", 0)
    if holds < longest:
        yield error(
            f"must hold one request of core.max_model_len {longest}: "
            f"{-(-longest * token_bytes // _MIB)} MiB, or the engine does not start",
            f"core.kv_cache.memory_mib {memory_mib}, {holds} tokens",
            "Raise core.kv_cache.memory_mib, or lower core.max_model_len",
        )
    usual = settings.get("request_tokens", 0)
    if holds < usual * together:
        yield warning(
            f"should hold core.max_num_seqs {together} requests as the traffic has them, of "
            f"{usual} tokens each: who finds no room is thrown out of the batch and computed again",
            f"core.kv_cache.memory_mib {memory_mib}, {holds // usual} such requests",
            f"Raise it to {-(-usual * together * token_bytes // _MIB)}, or lower "
            "core.max_num_seqs or parameters.max_tokens",
        )


def duplicate_bos_token(model: Model) -> Iterator[Flaw]:
    """Check that chat template and tokenizer do not both add a BOS token."""
    known = model.settings.get("special_tokens", {})
    for folder in model.served_folders:
        first = _first_added(folder / _TOKENIZER)
        template = _text(folder / _TEMPLATE)
        if first and first in template and known.get("bos_token") != first:
            yield warning(
                "should name the BOS token that both the chat template and the tokenizer add: "
                "a text that was rendered elsewhere gets it twice",
                f"{first}; bos_token {known.get('bos_token', 'is not named')}",
                "Name it as bos_token in the model's tokenizer_config.json and build again",
                f"{model.name}/{folder.name}/{_TEMPLATE}",
            )


def _first_added(tokenizer: Path) -> str:
    """Return the token that a tokenizer adds in front of every text; empty if there is none."""
    # A tokenizer of another form has no such token; what loads it reports its faults.
    with suppress(ValueError, AttributeError, TypeError, LookupError, RecursionError):
        pending = [json.loads(_text(tokenizer) or "{}").get("post_processor")]
        while pending:
            processor = pending.pop() or {}
            pending += processor.get("processors", [])
            single = processor.get("single") or [{}]
            if "SpecialToken" in single[0]:
                return str(single[0]["SpecialToken"]["id"])
    return ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
