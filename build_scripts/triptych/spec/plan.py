"""Plan of a pipeline: numbers derived from the spec, the model and the lengths of the traffic.

The memory of the largest batch is estimated from the shapes of the core.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from triptych.base.errors import UserError
from triptych.base.tensors import (
    ATTENDED_LENGTH,
    DIRECT_CALL,
    FIRST_SEGMENT,
    INPUT_IDS,
    PROMPT_LENGTH,
    REQUEST_PAYLOAD,
    REQUEST_TICKET,
    ROW_LENGTH,
    ROW_METADATA,
    ROW_OFFSET,
    ROW_SPAN,
    Tensor,
)
from triptych.container.serving_machine import ServingMachine, parse_machine
from triptych.models.info import ModelInfo, OwnStage
from triptych.runtime.hooking import FORWARDED_PREFIX
from triptych.runtime.packing_spans import count_slots
from triptych.spec.backends import BACKENDS, CoreBackend
from triptych.spec.engine_plan import (
    USUAL_HEAD_SIZE,
    USUAL_WIDENING,
    EnginePlan,
    RowCost,
    engine_plan,
    graph_sizes,
    row_cost,
)
from triptych.spec.fields import CoreSettings
from triptych.spec.model_fields import PREPROCESS, CompiledSpec, is_own
from triptych.spec.padded_lengths import bucket_of, choose_edges
from triptych.spec.placement import MachinePlan, place, without
from triptych.spec.spec import EncoderSpec
from triptych.spec.traffic import Lengths
from triptych.tasks.prompts import PROMPT
from triptych.tasks.task import Core, Task

MEASURED_SHARE = 1.1
"""Ratio of the memory of ONNX Runtime to that of the live tensors. Measured with BERT, RoBERTa
and MiniLM in fp32, batches of 8 and 32 rows of 128 to 512 tokens: 1.0 to 1.17.
"""


SCORE_TENSORS = {True: 2, False: 4}
"""Number of live tensors of attention scores, for packed rows (True) and padded rows (False).
PyTorch's own attention, used by the bucketed layout, needs more for scaling and masks.
"""


def batch_mib(
    info: ModelInfo, core: CoreSettings, *, rows: int, tokens: int, packed: bool = False
) -> float:
    """Return the memory in MiB of a batch of rows of equal length, without the weights.

    Live tensors are either `SCORE_TENSORS` and four tensors of the hidden size, or three of the
    feed-forward size and two of the hidden size. Measured on a CPU, encoders with other attention
    need more: 1.5 times if masks or a bias differ between layers (ModernBERT, MPNet, Qwen3), 4
    times with DeBERTa's relative positions.
    """
    # On a CPU, activations are fp32.
    size = 4 if core.device == "cpu" or core.precision == "fp32" else 2
    slots, hidden = count_slots(tokens), info.hidden_size
    heads = info.heads or max(1, hidden // USUAL_HEAD_SIZE)
    widened = info.intermediate_size or USUAL_WIDENING * hidden
    attention = rows * slots * (SCORE_TENSORS[packed] * heads * slots + 4 * hidden)
    forward = rows * slots * (3 * widened + 2 * hidden)
    return MEASURED_SHARE * size * max(attention, forward) / 2**20


USUAL_MACHINES = {
    "cpu": ("cpu1", "cpu2", "cpu4", "cpu8", "cpu16", "cpu32"),
    "gpu": ("l4x4", "l4x8", "l4x16", "h100x8", "h100x16", "h100x32"),
}
"""Machines that a build has plans for, by the device of the core."""

TENSOR_CORE_MULTIPLE = 8
"""Multiple of padded lengths on a GPU: tensor cores work on blocks of 8."""

GATHER_BUFFERS = 8
"""Minimum number of buffers for which one gather kernel starts faster than copies."""

Layout = Literal["packed", "bucketed", "fixed"]
"""Layout of a batch. ``packed``: rows end to end without padding (sequence packing). ``bucketed``:
rows padded to planned lengths. ``fixed``: rows of equal shape (images).
"""


@dataclass(frozen=True)
class WarmUp:
    """Request that the server computes before it is ready: `rows` rows of `tokens` tokens each."""

    rows: int
    tokens: int


@dataclass(frozen=True)
class Plan:
    """Numbers from which the repository is written.

    Attributes:
        parameters: Request parameters with the pipeline's defaults.
        lengths: Token lengths of the traffic's model rows; None for images.
        max_length: Maximum number of tokens in a model row.
        max_batch_size: Maximum number of rows in a batch of the core.
        request_rows: Maximum number of rows in a request.
        bucket_edges: Padded lengths in ascending order, ending with `max_length`; empty unless the
            layout is bucketed.
        core_inputs: Inputs in the core's config, without the batch dimension.
        engine: Plan of the TensorRT engine, built ahead or inside ONNX Runtime; None without one.
        cost: Expected cost of a row in both layouts; None for images.
        forwards_inputs: Whether inputs of requests go past the core, for `hooks.after`.
        stages: Functions and models of an own pipeline with several models; else empty. The plan is
            that of the first model.
        others: Plans of the other models.
        placement: Plan for the machine that serves; None without `serving.machine`.
    """

    spec: CompiledSpec
    info: ModelInfo
    task: Task
    parameters: Mapping[str, Any]
    layout: Layout
    lengths: Lengths | None
    max_length: int
    max_batch_size: int
    request_rows: int
    bucket_edges: tuple[int, ...]
    core_inputs: tuple[Tensor, ...]
    core: Core
    warm_ups: tuple[WarmUp, ...]
    engine: EnginePlan | None
    cost: RowCost | None
    forwards_inputs: bool = False
    stages: tuple[OwnStage, ...] = ()
    others: tuple[Plan, ...] = ()
    placement: MachinePlan | None = None

    @property
    def asked(self) -> CompiledSpec:
        """The spec without the numbers that were planned for a machine."""
        if self.placement is None:
            return self.spec
        core, serving = without(self.spec.core, self.placement), self.placement.asked.serving
        return self.spec.model_copy(update={"core": core, "serving": serving})

    def on(self, machine: ServingMachine) -> Plan | None:
        """Return the plan of the same core on another machine; None if it cannot run there.

        The largest batch may be lower, but holds the largest request.
        """
        try:
            placement = placed(
                self.asked,
                self.info,
                self.lengths,
                machine=machine,
                max_length=self.max_length,
                most=self.max_batch_size,
            )
        except UserError:
            return None
        others = [other.on(machine) for other in self.others]
        spec = self.spec.model_copy(update=placement.changes)
        rows = min(self.max_batch_size, spec.core.max_batch_size)
        if rows < self.largest_request or None in others:
            return None
        engine = self.engine
        if engine is not None:
            graphs = [graph for graph in engine.graph_specs if graph.batch_size <= rows]
            engine = replace(engine, graph_specs=tuple(graphs))
        return replace(
            self,
            spec=spec,
            max_batch_size=rows,
            warm_ups=tuple(replace(each, rows=min(each.rows, rows)) for each in self.warm_ups),
            engine=engine,
            others=tuple(other for other in others if other is not None),
            placement=placement,
        )

    @property
    def variants(self) -> dict[str, Plan]:
        """Plans for other machines by their names, smallest first, without repetition."""
        serving, own = self.spec.serving, self.spec.serving.served_by
        names = USUAL_MACHINES[self.spec.core.device] if serving.variants is None else None
        machines = [parse_machine(name) for name in names or serving.variants or ()]
        wanted = sorted(set(machines) - {own}, key=lambda machine: machine.order)
        plans = {machine.name: self.on(machine) for machine in wanted}
        lost = [name for name, plan in plans.items() if plan is None]
        if lost and serving.variants is not None:
            raise UserError(
                "serving.variants",
                "must be machines with the GPU and the memory that the core needs",
                given=lost[0],
                remedy="Remove it",
            )
        return {name: plan for name, plan in plans.items() if plan is not None}

    @property
    def largest_request(self) -> int:
        """Maximum number of model rows of a request, which is the same on every machine."""
        return _largest_request(self.asked, self.info, self.task, self.max_batch_size)

    @property
    def cores(self) -> tuple[Plan, ...]:
        """The plan of each core, in the order in which they run."""
        return (self, *self.others)

    @property
    def model(self) -> str:
        """Name of the model, of several in one ensemble; else empty."""
        return self.spec.core_name.partition(".")[2]

    def instances_of(self, step: str) -> str:
        """Return the field of `serving.instances` for a step; between models as of preprocess."""
        return step if hasattr(self.spec.serving.instances, step) else PREPROCESS

    def instances(self, step: str) -> int:
        """Return the number of instances of a step."""
        return int(getattr(self.spec.serving.instances, self.instances_of(step)))

    @property
    def sources(self) -> str:
        """The models as the spec names them."""
        return ", ".join(core.spec.model.source for core in self.cores)

    @property
    def encoder_spec(self) -> EncoderSpec:
        """Spec of an encoder.

        Raises:
            TypeError: The model is the user's own.
        """
        if is_own(self.spec):
            raise TypeError(f"{self.spec.name} is no encoder")
        return self.spec

    @property
    def original(self) -> str:
        """Name of the library that runs the original model, with which the gate compares."""
        is_graph = is_own(self.spec) and self.spec.model.onnx is not None
        return "ONNX Runtime" if is_graph else "PyTorch"

    @property
    def packed(self) -> bool:
        return self.layout == "packed"

    @property
    def request_inputs(self) -> tuple[Tensor, ...]:
        """Inputs of the ensemble: those of the task, and an optional one for each parameter."""
        rules = self.task.parameters(self.info)
        return (*self.task.inputs, *(rule.tensor(name) for name, rule in rules.items()))

    @property
    def past_core(self) -> tuple[Tensor, ...]:
        """Tensors that preprocess sends to postprocess without passing through the core."""
        row_metadata = (ROW_METADATA,) if self.task.has_row_metadata else ()
        inputs = self.task.inputs if self.forwards_inputs else ()
        own = () if self.info.own is None else self.info.own.past_core
        return (
            REQUEST_TICKET,
            REQUEST_PAYLOAD,
            *row_metadata,
            *(replace(t, name=FORWARDED_PREFIX + t.name) for t in inputs),
            *own,
        )

    @property
    def preprocess_outputs(self) -> tuple[Tensor, ...]:
        made = self.core_inputs if self.info.own is None else self.info.own.inputs
        return (*made, *self.past_core, DIRECT_CALL)

    def step(self, name: str) -> str:
        """Return the Triton model name of a step: a core, or one that calls a function."""
        if name == "core":
            return f"{self.spec.core.shared_from or self.spec.core_name}_core"
        ends = ("preprocess", "postprocess")
        return f"{self.spec.name}_{name}" if name in ends else f"{self.spec.name}.{name}_step"

    @property
    def builds_engine(self) -> bool:
        """Whether the core is a TensorRT engine that the engine stage builds."""
        return self.spec.core.backend == "tensorrt"

    @property
    def backend(self) -> CoreBackend:
        """Properties of the core's backend."""
        return BACKENDS[self.spec.core.backend]

    @property
    def gather_threshold(self) -> int:
        """Minimum number of buffers for the gather kernel; 0 for never."""
        threshold = self.spec.serving.transfers.gather_kernel_buffer_threshold
        return GATHER_BUFFERS if threshold is None else threshold

    @property
    def rows_at_once(self) -> int:
        """Number of rows that all instances of the core compute at once in full batches."""
        serving = self.spec.serving
        on_gpus = serving.gpu_count if self.spec.core.device == "gpu" else 1
        return self.max_batch_size * serving.instances.core * on_gpus

    @property
    def row_settings(self) -> dict[str, object]:
        return row_settings(self.spec, self.info, self.task, max_core_rows=self.largest_request)

    @property
    def batch_mib(self) -> float | None:
        """Estimated memory in MiB of the largest batch, without the weights; None for images."""
        if self.lengths is None:
            return None
        rows, tokens = self.max_batch_size, self.max_length
        return batch_mib(self.info, self.spec.core, rows=rows, tokens=tokens, packed=self.packed)

    @property
    def reasons(self) -> dict[str, str]:
        """Reason of each number, for `inspect`."""
        spec, task, allowed = self.spec, self.task, self.info.max_length
        own = None if is_own(spec) else spec.tokenizer.max_length
        if own is not None and own < allowed:
            limit = f"tokenizer.max_length in the spec (the model allows {allowed})"
        elif self.max_length < allowed:
            limit = f"usual for {task.name} (the model allows {allowed})"
        else:
            limit = f"the model's own limit ({allowed})"
        field = "core.max_batch_size"
        planned = {} if self.placement is None else self.placement.values
        full = planned[field].reason if field in planned else field
        if self.max_batch_size < spec.core.max_batch_size:
            full += (
                f" allows {spec.core.max_batch_size}; more rows of {self.max_length} tokens would "
                f"need more than core.max_batch_mib, {spec.core.max_batch_mib} MiB"
            )
        if self.lengths is not None:
            tokens = self.max_batch_size * self.lengths.mean
            full += f"; about {tokens:.0f} tokens in a full batch of this traffic"
        room = "as many as a batch holds"
        if self.largest_request < self.max_batch_size:
            room = "the same on every machine"
        if task.model_rows > 1:
            room = f"each becomes up to {task.model_rows} rows of the model"
        elif task.request_rows is not None:
            room = "more would hold up other requests"
        return self._reasons_of_shapes() | {
            "max_length": limit,
            "max_batch_size": full,
            "request_rows": room,
            "queue": "no delay by default, since a busy core gathers a batch by itself"
            if self.backend.batches
            else "the backend runs each request alone",
            "gather_kernel_buffer_threshold": (
                "a kernel gathers this number of buffers or more; fewer are copied one by one"
            ),
        }

    def _reasons_of_shapes(self) -> dict[str, str]:
        reasons = {}
        if self.bucket_edges and self.lengths is not None:
            spans = ", ".join(f"{a + 1}-{b}" for a, b in pairwise((0, *self.bucket_edges)))
            rows = self.lengths.rows
            reasons["bucket_edges"] = f"fewest padded tokens over {rows} rows: {spans}"
        if self.engine is not None and self.engine.graph_specs:
            captured = len(self.engine.graph_specs)
            shapes = len(self.bucket_edges or (0,)) * len(graph_sizes(self.max_batch_size))
            reasons["cuda_graphs"] = "every planned length and number of rows"
            if captured < shapes:
                reasons["cuda_graphs"] = (
                    f"{captured} of {shapes} shapes, those that save most time per row: frequent "
                    "lengths and few rows. Each graph takes memory and load time; other shapes "
                    "run without"
                )
        return reasons

    @property
    def padding_share(self) -> float:
        """Fraction of computed tokens that are padding, for the traffic."""
        if self.lengths is None or not self.bucket_edges:
            return 0.0
        computed = sum(bucket_of(n, self.bucket_edges) * c for n, c in self.lengths.counts.items())
        return 1.0 - self.lengths.mean * self.lengths.rows / computed


def max_length_of(spec: EncoderSpec, info: ModelInfo, task: Task) -> int:
    """Return the maximum number of tokens in a row, by the spec, the task and the model."""
    return min(spec.tokenizer.max_length or task.max_length or info.max_length, info.max_length)


def core_rows_of(spec: EncoderSpec, info: ModelInfo, task: Task) -> int:
    """Return the maximum number of model rows of a request, before the layout is known."""
    if info.image is not None:
        return spec.core.max_batch_size
    return max_rows(spec, info, max_length_of(spec, info, task))


def _largest_request(spec: CompiledSpec, info: ModelInfo, task: Task, most: int) -> int:
    rows = spec.core.max_batch_size if is_own(spec) else core_rows_of(spec, info, task)
    return min(most, rows)


def placed(
    spec: CompiledSpec,
    info: ModelInfo,
    lengths: Lengths | None,
    *,
    machine: ServingMachine,
    max_length: int = 0,
    most: int | None = None,
) -> MachinePlan:
    """Return the plan of a spec for a machine; see `place`."""
    row_mib = None
    if lengths is not None and spec.core.device == "gpu":
        row_mib = batch_mib(info, spec.core, rows=1, tokens=max_length)
    return place(spec, info, lengths, machine, row_mib=row_mib, most=most)


def max_rows(spec: EncoderSpec, info: ModelInfo, max_length: int) -> int:
    """Return the maximum number of rows in a batch within the spec's limits on rows and memory.

    Triton's batcher counts rows, not tokens, so every row of a batch may have `max_length` tokens.
    The result is at least 1, and the same for both layouts, because the layout is chosen later.
    """
    core = spec.core
    within = int(core.max_batch_mib / batch_mib(info, core, rows=1, tokens=max_length))
    return min(core.max_batch_size, max(1, within))


def inputs_of(info: ModelInfo, task: Task) -> tuple[Tensor, ...]:
    """Return the core's inputs, without those that the server adds."""
    if info.image is not None:
        image = info.image
        return (Tensor("pixels", "UINT8", (image.height, image.width, image.channels)),)
    if task.pairs and info.segments > 1:
        return INPUT_IDS, ROW_LENGTH, FIRST_SEGMENT
    if not info.include_prompt and PROMPT in task.parameters(info):
        return INPUT_IDS, ROW_LENGTH, PROMPT_LENGTH
    if not all(role.attended for role in info.roles.values()):
        return INPUT_IDS, ROW_LENGTH, ATTENDED_LENGTH
    return INPUT_IDS, ROW_LENGTH


def row_settings(
    spec: CompiledSpec, info: ModelInfo, task: Task, *, max_core_rows: int
) -> dict[str, object]:
    """Return the settings of the task's batch encoder, except the padded lengths.

    A request may become `max_core_rows` rows.
    """
    settings: dict[str, object] = {
        "inputs": [tensor.name for tensor in task.inputs],
        "max_core_rows": max_core_rows,
        "max_text_bytes": spec.max_text_bytes,
        **task.settings(info),
    }
    if is_own(spec):
        return settings | {"max_core_rows": spec.max_rows(PREPROCESS)}
    if info.image is not None:
        return settings | {
            "image": asdict(info.image),
            "max_image_bytes": spec.image.max_bytes,
            "max_pixels": spec.image.max_pixels,
        }
    if PROMPT_LENGTH in inputs_of(info, task):
        settings["prompt_end_ids"] = list(info.special_ids)
    return settings | {
        "lowercase": info.lowercase,
        "max_length": max_length_of(spec, info, task),
        "overflow": spec.tokenizer.truncation,
        "pad_token_id": info.pad_token_id,
        "pairs": task.pairs,
        "segments": FIRST_SEGMENT in inputs_of(info, task),
        "unk_token_id": info.unk_token_id,
        "vocabulary": info.vocabulary,
    }


def make_plan(
    spec: EncoderSpec,
    info: ModelInfo,
    task: Task,
    parameters: Mapping[str, object],
    lengths: Lengths | None,
    *,
    layout: Layout | None = None,
) -> Plan:
    """Return the plan for the token lengths of the traffic (None for images).

    `layout` overrides the spec's layout, for models that cannot be packed.
    """
    max_length = max_length_of(spec, info, task)
    asked, placement, machine = spec, None, spec.serving.served_by
    if machine is not None:
        placement = placed(spec, info, lengths, machine=machine, max_length=max_length)
        spec = spec.model_copy(update=placement.changes)
    core, on_gpu = spec.core, spec.core.device == "gpu"
    chosen: Layout = "fixed"
    edges: tuple[int, ...] = ()
    cost: RowCost | None = None
    if lengths is not None:
        multiple = TENSOR_CORE_MULTIPLE if on_gpu else 1
        edges = choose_edges(lengths, max_length, count=spec.core.bucket_count, multiple=multiple)
        cost = expected_cost(spec, info, lengths, edges, max_length)
        named = core.layout
        chosen = layout or (cost.cheaper if named == "auto" else named)
        edges = edges if chosen == "bucketed" else ()
    packed = chosen == "packed"
    most = spec.core.max_batch_size if lengths is None else max_rows(spec, info, max_length)
    largest = _largest_request(asked, info, task, most)
    inputs = inputs_of(info, task)
    engine = None
    by_tensorrt = "tensorrt" in (spec.core.backend, spec.core.accelerator)
    if packed:
        inputs += (ROW_OFFSET, ROW_SPAN) if by_tensorrt else (ROW_OFFSET,)
    if by_tensorrt:
        engine = engine_plan(spec, inputs, lengths, edges, max_length, most)
    return Plan(
        spec=spec,
        info=info,
        task=task,
        parameters=parameters,
        layout=chosen,
        lengths=lengths,
        max_length=max_length,
        max_batch_size=most,
        request_rows=min(max(1, largest // task.model_rows), task.request_rows or largest),
        bucket_edges=edges,
        core_inputs=inputs,
        core=task.core(info, parameters),
        warm_ups=make_warm_ups(lengths, edges, most if on_gpu else 1),
        engine=engine,
        cost=cost,
        placement=placement,
    )


def expected_cost(
    spec: EncoderSpec,
    info: ModelInfo,
    lengths: Lengths,
    edges: tuple[int, ...],
    max_length: int,
) -> RowCost:
    """Return the expected cost of a row of the traffic, packed and padded to `edges`."""
    core, on_gpu = spec.core, spec.core.device == "gpu"
    rows = max_rows(spec, info, max_length)
    return row_cost(
        info,
        lengths,
        edges,
        on_gpu=on_gpu,
        rows=rows,
        longest=lengths.quantile(0.5 ** (1 / rows)),  # median of the longest row of a batch
        graphs=core.backend == "tensorrt" and core.engine.cuda_graphs,
    )


def make_warm_ups(lengths: Lengths | None, edges: tuple[int, ...], most: int) -> tuple[WarmUp, ...]:
    """Return warm-ups of 1 and `most` rows for each padded length, or for a median and a long row.

    Args:
        lengths: Token lengths of the traffic; None for rows without tokens.
        edges: Padded lengths; empty for other layouts than the bucketed one.
        most: Maximum number of rows.
    """
    tokens = edges or (1,)
    if lengths is not None and not edges:
        tokens = tuple(sorted({lengths.quantile(0.5), lengths.quantile(0.99)}))
    return tuple(WarmUp(rows, each) for each in tokens for rows in sorted({1, most}))
