"""The fields of ``pipeline.yaml``, group by group: frozen, every default in this one place.

The precisions a core can have, and which backend computes in which.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from triptych.base.errors import UserError
from triptych.base.releases import OLDEST
from triptych.spec.slo import Slo

Precision = Literal["fp32", "fp16", "bf16", "int8", "int8_dynamic", "fp8"]
"""Of the core's weights and activations. ``int8``: activation ranges are fixed at build, by
calibration rows; ``int8_dynamic``: each token has a range of its own, found while serving."""


_REFUSED: dict[tuple[str, str], dict[str, str]] = {
    ("onnxruntime", "cpu"): {
        "bf16": "ONNX Runtime has no bf16 kernels for a CPU; int8 is the fast one there",
        "fp8": "no CPU computes in fp8, and ONNX Runtime takes it for int8; int8 is the fast one",
    },
    ("tensorrt", "gpu"): {
        "int8_dynamic": "TensorRT has ranges fixed when it builds; int8 finds them by calibration",
    },
    ("onnxruntime", "gpu"): {
        "fp8": "ONNX Runtime takes fp8 for int8 where it fuses; fp16 is the fast one there",
    },
}
"""Backend and device to the precisions that would not be served right there, and why."""


def check_runs(precision: str, backend: str, device: str) -> None:
    """The backend computes in `precision` on the device.

    Raises:
        UserError: it does not.
    """
    reason = _REFUSED.get((backend, device), {}).get(precision)
    if reason is not None:
        raise UserError(
            "core.precision",
            f"must be one that {backend} runs on a {device}",
            given=precision,
            remedy=reason[0].upper() + reason[1:],
        )


MAX_WAIT_MS = (1000, 5000)
"""A request waits so long where a shorter latency is promised, and where none is."""

Positive = Annotated[int, Field(ge=1)]
Distance = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]


class Frozen(BaseModel):
    """Values that nothing changes, and no fields but those declared."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def check_release(triton: str) -> None:
    """Raises a `ValueError` where a release (``YY.MM``) is older than any that is supported."""
    if triton < str(OLDEST):  # two digits each: texts are ordered as releases are
        raise ValueError(f"serving.triton must be {OLDEST} or later")


class ModelSource(Frozen):
    """Where the model's files come from.

    Attributes:
        source: ``package:<module>/<folder>``, a local folder (relative to the pipeline's own
            folder, or absolute), or a Hub id ``owner/name``.
        revision: commit, tag or branch of a Hub id.
    """

    source: str
    revision: str | None = None


class Tokenizer(Frozen):
    """Limits on what is tokenized.

    Attributes:
        max_length: tokens a row may have, special tokens included; None takes the model's own.
        truncation: what becomes of a longer row.
        max_text_bytes: a longer text is refused whole, so that one request cannot hold up a batch.
    """

    max_length: Annotated[int, Field(ge=3)] | None = None
    truncation: Literal["truncate", "reject"] = "truncate"
    max_text_bytes: Positive = 131_072


class Image(Frozen):
    """Limits on what is decoded, so that one request cannot hold up or exhaust the server.

    Attributes:
        max_bytes: a larger file is refused.
        max_pixels: an image that would be larger when decoded is refused before it is.
    """

    max_bytes: Positive = 20_000_000
    max_pixels: Positive = 50_000_000


class Engine(Frozen):
    """How TensorRT builds the core's engine, and how it is run; see ``core.backend: tensorrt``.

    Attributes:
        workspace_mib: scratch memory a kernel may use, in MiB; None leaves it to TensorRT.
        optimization_level: 0 builds fastest, 5 searches longest; None takes TensorRT's own.
        opt_batch_size: rows that kernels are chosen for; None takes a full batch.
        version_compatible: the plan also runs on newer releases of TensorRT, if slower.
        hardware: other GPUs that the plan runs on, if slower.
        refit: weights can be replaced in the plan.
        weight_streaming: weights may stay in host memory where the GPU is too small for them.
        tf32: fp32 multiplications may round their inputs to 10 bits of mantissa.
        cuda_graphs: launch each planned shape as one recorded graph; bucketed only.
        context_memory: scratch memory of a profile is held ``static`` for the largest, or found
            anew ``on_profile_change``: less memory for many profiles, on servers from 25.05.
    """

    workspace_mib: Positive | None = None
    optimization_level: Annotated[int, Field(ge=0, le=5)] | None = None
    opt_batch_size: Positive | None = None
    version_compatible: bool = False
    hardware: Literal["none", "ampere_plus", "same_compute_capability"] = "none"
    refit: bool = False
    weight_streaming: bool = False
    tf32: bool = False
    cuda_graphs: bool = True
    context_memory: Literal["static", "on_profile_change"] = "static"


class Core(Frozen):
    """The compiled model.

    Attributes:
        backend: Triton's name of what runs it.
        device: ``gpu`` asks Triton for KIND_GPU instances; ``tensorrt`` runs there only.
        precision: of weights and activations. ``int8_dynamic`` finds the range of each token while
            serving, ``int8`` has them fixed by calibration; ``auto`` builds and measures all that
            run here and takes the fastest that passes the gate.
        layout: how rows of different length share a batch; a model whose rows cannot be packed
            without changing results is built bucketed. ``auto`` takes what the traffic's rows are
            expected to cost less in.
        shared_from: pipeline of the same repository and model whose core serves this one, too.
        max_batch_size: rows Triton may put into one batch, and a client into one request.
        max_batch_mib: memory in MiB that the largest batch may take beside the weights; the plan
            lowers the number of rows until a batch of rows of the maximum length stays within it.
        bucket_count: number of padded lengths of the bucketed layout.
        threads: Number of threads that share the work of one operator, in each instance
            (``intra_op_thread_count`` of the backend). None: one per physical core.
        accelerator: of ONNX Runtime on a GPU: its own CUDA kernels, or TensorRT where it takes the
            model's operators, built when the model loads.
        engine: how TensorRT builds and runs its engine.
    """

    backend: Literal["onnxruntime", "tensorrt"] = "onnxruntime"
    device: Literal["cpu", "gpu"] = "cpu"
    precision: Precision | Literal["auto"] = "fp32"
    layout: Literal["packed", "bucketed", "auto"] = "packed"
    max_batch_size: Annotated[int, Field(ge=1, le=1024)] = 32
    max_batch_mib: Annotated[int, Field(ge=1, le=1_000_000)] = 2048
    bucket_count: Annotated[int, Field(ge=1, le=32)] = 6
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    shared_from: str | None = None
    accelerator: Literal["cuda", "tensorrt"] = "cuda"
    engine: Engine = Engine()

    @model_validator(mode="before")
    @classmethod
    def _gpu_for_tensorrt(cls, given: Any) -> Any:
        """TensorRT runs on nothing else: who asks for it need not say so."""
        if isinstance(given, dict) and given.get("backend") == "tensorrt":
            return {"device": "gpu", **given}
        return given

    @model_validator(mode="after")
    def _fits(self) -> Core:
        if self.backend == "tensorrt" and self.device != "gpu":
            raise ValueError("the tensorrt backend runs on a gpu only: leave core.device out")
        if self.device == "gpu" and self.threads is not None:
            raise ValueError("core.threads is only supported for a core on the cpu")
        if self.accelerator != "cuda" and (self.backend, self.device) != ("onnxruntime", "gpu"):
            raise ValueError("core.accelerator is for the onnxruntime backend on a gpu")
        if self.backend != "tensorrt" and self.engine != Engine():
            raise ValueError("core.engine is for the tensorrt backend")
        return self


class Instances(Frozen):
    """Instances of each step; each is a process of its own for Python steps."""

    preprocess: Annotated[int, Field(ge=1, le=64)] = 1
    core: Positive = 1
    postprocess: Positive = 1


class Queue(Frozen):
    """How requests wait.

    Attributes:
        max_delay_us: how long the core may hold a batch open for more rows.
        max_in_flight: requests that may be under way; one more is refused at once (Unavailable).
        max_backlog_ms: how long the requests under way may take at the rate measured; one more is
            refused at once (Unavailable). None: see `Serving.longest_wait_ms`.
        timeout_ms: a request that has waited longer for the core is refused; None waits on. Give
            the core two instances then: a lone one with such a policy wakes up late.
    """

    max_delay_us: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    max_in_flight: Annotated[int, Field(ge=1, le=1_000_000)] = 1024
    max_backlog_ms: Annotated[int, Field(ge=1, le=3_600_000)] | None = None
    timeout_ms: Annotated[int, Field(ge=1, le=3_600_000)] | None = None


class Transfers(Frozen):
    """How tensors get to a GPU core and back.

    Attributes:
        pinned_input: gather a batch in memory that the GPU copies from directly.
        pinned_output: the same for results.
        output_copy_stream: copy results back on a stream of their own, beside the next batch.
        gather_kernel_buffer_threshold: from so many buffers on, one kernel gathers a batch instead
            of a copy each; 0 for never, None takes the plan's.
        eager_batching: gather the next batch while one runs; smaller batches, shorter waits.
    """

    pinned_input: bool = True
    pinned_output: bool = True
    output_copy_stream: bool = True
    gather_kernel_buffer_threshold: Annotated[int, Field(ge=0, le=1024)] | None = None
    eager_batching: bool = False


class Resource(Frozen):
    """Something that instances of several models share, as Triton's rate limiter counts it.

    Attributes:
        name: the same for all who share it.
        count: that an instance of the core needs to run.
        shared: one pool for the whole server, instead of one a device (``global``).
    """

    name: Annotated[str, Field(min_length=1)]
    count: Positive = 1
    shared: bool = False


class RateLimiter(Frozen):
    """When the core may run, where the server limits rates (``--rate-limit``).

    Attributes:
        resources: that an instance needs.
        priority: 1 runs first; a model of 2 gets half the turns of one of 1.
    """

    resources: list[Resource] = []
    priority: Annotated[int, Field(ge=1, le=1000)] = 1


class Sample(Frozen):
    """Which rows the server keeps with their answers, for `watch` and `traffic`.

    They lie where the server's environment says (``TRIPTYCH_SAMPLES``), in files of its own user.

    Attributes:
        rate: share of the rows.
        max_rows: in the folder; the oldest make room.
        max_bytes: of the folder, likewise; a window of time holds a tenth of either, at most.
        retention_hours: after which a row is deleted.
        window_s: seconds that a file is of.
        redact: ``hooks.redact`` for a function of the pipeline's own, called on each row before it
            is written: it returns inputs and answer, or None to drop the row.
    """

    rate: Share = 0.001
    max_rows: Positive = 20_000
    max_bytes: Positive = 256 << 20
    retention_hours: Annotated[float, Field(gt=0, le=8760)] = 72.0
    window_s: Annotated[float, Field(gt=0, le=3600)] = 60.0
    redact: Literal["hooks.redact"] | None = None


class Serving(Frozen):
    """How Triton runs the steps.

    Attributes:
        triton: the oldest release (``YY.MM``) the repository must load on. 24.10 is the embedded
            server's; fields newer than it are left out.
        gpus: device ids when ``core.device`` is ``gpu``; `instances.core` run on each.
        transfers: to and from the GPU.
        rate_limiter: turns that the core takes with other models; None for no limit.
        max_inflight_requests: requests that each step works on at a time; None for no limit. Needs
            a server of 25.11 or later.
        slo: what `bench` and `tune` hold the pipeline to, where their options say nothing else.
        sample: rows that are kept for `watch`; None for none.
    """

    triton: Annotated[str, Field(pattern=r"^\d\d\.(0[1-9]|1[0-2])$")] = str(OLDEST)
    instances: Instances = Instances()
    gpus: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] = [0]
    queue: Queue = Queue()
    transfers: Transfers = Transfers()
    rate_limiter: RateLimiter | None = None
    max_inflight_requests: Positive | None = None
    slo: Slo = Slo()
    sample: Sample | None = None

    @property
    def longest_wait_ms(self) -> float:
        """`queue.max_backlog_ms`, else what is promised, within `MAX_WAIT_MS`."""
        least, most = MAX_WAIT_MS
        promised = max(self.slo.limits_us.values(), default=most * 1e3) / 1e3
        return self.queue.max_backlog_ms or max(promised, least)

    @model_validator(mode="after")
    def _is_supported(self) -> Serving:
        check_release(self.triton)
        return self


class Accuracy(Frozen):
    """Overrides of the gate's limits, by the metrics of `tasks.accuracy`; None keeps the default.

    Attributes:
        max_drop: how much worse than the original the model may be on ``eval.jsonl``.
    """

    max_difference: Distance | None = None
    batch_sensitivity: Distance | None = None
    edge_error: Distance | None = None
    min_cosine: Share | None = None
    mean_cosine: Share | None = None
    nearest_neighbor_agreement: Share | None = None
    mean_neighbor_loss: Distance | None = None
    max_neighbor_loss: Distance | None = None
    similarity_rank_correlation: Share | None = None
    label_agreement: Share | None = None
    max_probability_difference: Distance | None = None
    confidence_shift: Distance | None = None
    entity_f1: Share | None = None
    exact_match: Share | None = None
    answer_f1: Share | None = None
    rank_correlation: Share | None = None
    top1_agreement: Share | None = None
    top_k_overlap: Share | None = None
    max_drop: Annotated[float, Field(ge=0, le=1)] = 0.0


class CustomOutput(Frozen):
    """An output of a custom task.

    Attributes:
        name: as the client reads it.
        dtype: Triton's name of the element type.
        dims: one entry an axis, without the batch; -1 for one of variable size.
    """

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
    dtype: Literal["BYTES", "FP32", "INT8", "INT32", "INT64", "BOOL"]
    dims: Annotated[list[Annotated[int, Field(ge=-1, le=1_000_000)]], Field(min_length=1)] = [1]


class Custom(Frozen):
    """A task of the pipeline's own: `decode` in its ``hooks.py`` makes the outputs.

    Attributes:
        inputs: ``text``, or ``text`` and ``text_pair``.
        auto_class: class of transformers that loads the model with its head.
        head_input: what of the encoder's result the head works on.
        core_output: what leaves the core.
        outputs: of the ensemble.
    """

    inputs: Annotated[list[Literal["text", "text_pair"]], Field(min_length=1)] = ["text"]
    auto_class: Annotated[str, Field(pattern=r"^Auto[A-Za-z]+$")]
    head_input: Literal["row", "tokens", "pooled"] = "row"
    core_output: Literal["logits", "scores", "token_scores", "vector"] = "scores"
    outputs: Annotated[list[CustomOutput], Field(min_length=1)]
