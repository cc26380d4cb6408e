"""Fields of ``pipeline.yaml`` by group, with their defaults, and precisions by backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, create_model, model_validator

from triptych.base.errors import UserError
from triptych.base.releases import OLDEST
from triptych.container.serving_machine import MAX_CORES, ServingMachine, parse_machine
from triptych.models.fields import Frozen, TokenizerChoice
from triptych.models.image_vectors import ImagePooling
from triptych.spec.backends import BACKENDS, BackendName, DeviceName, Precision
from triptych.spec.slo import Slo
from triptych.tasks.accuracy import METRICS


def check_runs(precision: str, backend: str, device: str) -> None:
    """Check that a backend can compute in a precision on a device.

    Raises:
        UserError: It cannot.
    """
    reason = BACKENDS[backend].refused.get(device, {}).get(precision)
    if reason is not None:
        raise UserError(
            "core.precision",
            f"is not supported by {backend} on a {device}",
            given=precision,
            remedy=reason[0].upper() + reason[1:],
        )


MAX_WAIT_MS = (1000, 5000)
"""Expected longest wait without `Queue.max_backlog_ms`: its minimum if the SLO limits latency, else
its value."""

MAX_GPUS = 8
"""GPUs of a large server, where `Serving.gpus` is ``all``."""
TRITON_AS_NONE = (
    "triton, built as none: with one instance of the core, a queue policy of Triton delays lone "
    "requests by up to 500 ms"
)

Positive = Annotated[int, Field(ge=1)]
Distance = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]


def _check_release(triton: str) -> str:
    if triton < str(OLDEST):  # two digits each: texts are ordered as releases are
        raise ValueError(f"must be {OLDEST} or later")
    return triton


ReleaseName = Annotated[
    str, Field(pattern=r"^\d\d\.(0[1-9]|1[0-2])$"), AfterValidator(_check_release)
]
"""A supported release of Triton, as ``YY.MM``."""


class Tokenizer(TokenizerChoice):
    """Tokenizer of the model, and limits on tokenized text.

    Attributes:
        max_length: Maximum number of tokens in a row, including special tokens. None: the model's
            own limit.
        truncation: Whether a longer row is truncated or its request rejected.
        max_text_bytes: Maximum size of a text in bytes. Longer texts are rejected before they are
            tokenized, so that one request cannot delay a batch.
    """

    max_length: Annotated[int, Field(ge=3)] | None = None
    truncation: Literal["truncate", "reject"] = "truncate"
    max_text_bytes: Positive = 131_072


class Image(Frozen):
    """Limits on decoded images, so that one request cannot exhaust the server, and their vectors.

    Attributes:
        max_bytes: Maximum size of an image file in bytes.
        max_pixels: Maximum number of pixels, checked before the image is decoded.
        pooling: Vector of an image, in image-embedding: that of the model's pooler, of its first
            token (``cls``), or the mean. None: the first of them that the model has.
    """

    max_bytes: Positive = 20_000_000
    max_pixels: Positive = 50_000_000
    pooling: ImagePooling | None = None


class EngineSettings(Frozen):
    """Build and run options of a TensorRT engine (``core.backend: tensorrt``).

    Attributes:
        workspace_mib: Maximum scratch memory of a kernel in MiB. None: TensorRT decides.
        optimization_level: Builder effort from 0 (fastest build) to 5. None: TensorRT's default.
        opt_batch_size: Number of rows that kernels are optimized for. None: a full batch.
        version_compatible: Whether newer TensorRT releases can run the engine, possibly slower.
        hardware: Other GPUs that can run the engine, possibly slower.
        refit: Whether weights of the engine can be replaced.
        weight_streaming: Whether weights may stay in host memory if the GPU has too little.
        tf32: Whether fp32 multiplications may round their inputs to 10 bits of mantissa.
        cuda_graphs: Whether each planned shape is launched as a recorded CUDA graph. Applies to
            the bucketed layout only.
        context_memory: Allocation of scratch memory: ``static``, for the largest profile, or
            ``on_profile_change``, which needs less for many profiles and a server from 25.05.
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


class SessionOptions(Frozen):
    """Options of ONNX Runtime's session in each instance of a core on a CPU.

    Attributes:
        inter_threads: Number of operators that run at the same time, if the graph has branches
            (``inter_op_thread_count``). Above 1 the session runs in parallel mode.
        memory_arena: Use of memory after a batch: ``shrink`` frees what a large batch
            needed, ``keep`` reuses it for the next one, ``none`` allocates without an arena.
        memory_pattern: Whether memory is planned once for each shape. Saves time only if few
            shapes occur.
    """

    inter_threads: Annotated[int, Field(ge=1, le=1024)] = 1
    memory_arena: Literal["shrink", "keep", "none"] = "shrink"
    memory_pattern: bool = False


class AcceleratorOptions(Frozen):
    """Options of ONNX Runtime on a GPU: of its CUDA kernels, and of the TensorRT accelerator.

    Attributes:
        memory_limit_mib: Maximum GPU memory of the CUDA kernels in MiB. None: no limit.
        arena: Growth of the GPU memory of the CUDA kernels: ``power_of_two`` or ``as_requested``.
        convolution_search: Choice of cuDNN's algorithm for convolutions: ``exhaustive``,
            ``heuristic`` or ``default``.
        workspace_mib: Maximum scratch memory of TensorRT's kernels in MiB. None: ONNX Runtime's
            default.
        engine_cache: Whether built engines and timings are kept in `core.accelerator_cache`.
        optimization_level: Effort of TensorRT's builder from 0 to 5. None: its default.
        min_subgraph_size: Minimum number of operators that TensorRT takes over. None: 1.
        share_context_memory: Whether the engines of a graph share their scratch memory.
        layer_norm_fp32: Whether TensorRT computes layer norms of an fp16 core in fp32.
        tf32: Whether fp32 multiplications may round their inputs to 10 bits of mantissa, which
            the accuracy gate, on a CPU, does not see. The TensorRT accelerator always does.
    """

    memory_limit_mib: Positive | None = None
    arena: Literal["power_of_two", "as_requested"] = "power_of_two"
    convolution_search: Literal["exhaustive", "heuristic", "default"] = "exhaustive"
    workspace_mib: Positive | None = None
    engine_cache: bool = True
    optimization_level: Annotated[int, Field(ge=0, le=5)] | None = None
    min_subgraph_size: Positive | None = None
    share_context_memory: bool = False
    layer_norm_fp32: bool = False
    tf32: bool = False

    @property
    def of_tensorrt(self) -> bool:
        """Whether an option of the TensorRT accelerator differs from its default."""
        usual = AcceleratorOptions(
            memory_limit_mib=self.memory_limit_mib,
            arena=self.arena,
            convolution_search=self.convolution_search,
            tf32=self.tf32,
        )
        return self != usual


class CoreSettings(Frozen):
    """Options of the compiled model.

    Attributes:
        backend: Name of the Triton backend.
        device: ``gpu`` uses instances of KIND_GPU; ``tensorrt`` supports no other device, and
            ``openvino`` only ``cpu``.
        precision: Precision of weights and activations. ``int8`` has activation ranges fixed by
            calibration rows at build; ``int8_dynamic`` computes a range for each token while
            serving. ``auto`` builds and measures every precision that runs on this machine, and
            uses the fastest one that passes the gate; without a `backend` those of OpenVINO, too.
        layout: Batch layout of rows of different length. A model whose rows cannot be packed
            without changing results is built bucketed. ``auto`` uses the layout with the lower
            expected cost for the traffic.
        shared_from: Pipeline of the same repository and model whose core this pipeline uses.
        max_batch_size: Maximum number of rows in a batch, and in one request.
        max_batch_mib: Maximum memory of the largest batch in MiB, without the weights. The plan
            lowers the number of rows until a batch of rows of maximum length fits.
        bucket_count: Number of padded lengths in the bucketed layout; 32 by default for
            ``openvino``.
        threads: Number of threads that share the work of one operator, in each instance
            (``intra_op_thread_count`` of ONNX Runtime's backend; all instances together have
            ``INFERENCE_NUM_THREADS`` of OpenVINO's). None: one per physical core.
        session: Further options of ONNX Runtime on a CPU.
        accelerator: Kernels of ONNX Runtime on a GPU: its own CUDA kernels, or TensorRT for the
            operators that TensorRT supports, built when the model loads.
        accelerator_cache: Absolute path of the server's folder in which the TensorRT accelerator
            keeps the engines and timings that it has built. Without a volume there, each new
            container builds them again.
        accelerator_options: Further options of ONNX Runtime on a GPU.
        engine: Options of the TensorRT engine.
    """

    backend: BackendName = "onnxruntime"
    device: DeviceName = "cpu"
    precision: Literal[Precision, "auto"] = "fp32"
    layout: Literal["packed", "bucketed", "auto"] = "packed"
    max_batch_size: Annotated[int, Field(ge=1, le=1024)] = 32
    max_batch_mib: Annotated[int, Field(ge=1, le=1_000_000)] = 2048
    bucket_count: Annotated[int, Field(ge=1, le=32)] = BACKENDS["onnxruntime"].bucket_count
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    session: SessionOptions = SessionOptions()
    shared_from: str | None = None
    accelerator: Literal["cuda", "tensorrt"] = "cuda"
    accelerator_cache: Annotated[str, Field(pattern=r"^/[^\x00]*$")] = "/tmp/triptych-engines"
    accelerator_options: AcceleratorOptions = AcceleratorOptions()
    engine: EngineSettings = EngineSettings()

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_backend(cls, given: Any) -> Any:
        """Set the defaults that depend on the backend."""
        known = BACKENDS.get(str(given.get("backend"))) if isinstance(given, dict) else None
        if known is None:
            return given
        usual = {"device": known.devices[0], "layout": known.layouts[0]}
        return {**usual, "bucket_count": known.bucket_count, **given}

    @model_validator(mode="after")
    def _fits(self) -> CoreSettings:
        known = BACKENDS[self.backend]
        for name, value, allowed in (
            ("device", self.device, known.devices),
            ("layout", self.layout, known.layouts),
        ):
            if value not in allowed:
                raise ValueError(
                    f"core.{name} must be {' or '.join(allowed)} for the {self.backend} backend: "
                    f"remove core.{name}"
                )
        if self.device == "gpu" and self.threads is not None:
            raise ValueError("core.threads is only supported for device cpu")
        session_runs = (self.backend, self.device) == ("onnxruntime", "cpu")
        if not session_runs and self.session != SessionOptions():
            raise ValueError("core.session is only supported for onnxruntime on device cpu")
        on_gpu = (self.backend, self.device) == ("onnxruntime", "gpu")
        if self.accelerator != "cuda" and not on_gpu:
            raise ValueError(
                "core.accelerator is only supported for the onnxruntime backend on a gpu"
            )
        options = self.accelerator_options
        if options != AcceleratorOptions() and not on_gpu:
            raise ValueError(
                "core.accelerator_options is only supported for the onnxruntime backend on a gpu"
            )
        if options.of_tensorrt and self.accelerator != "tensorrt":
            raise ValueError(
                "core.accelerator_options has options of TensorRT, which need core.accelerator: "
                "tensorrt"
            )
        if self.backend != "tensorrt" and self.engine != EngineSettings():
            raise ValueError("core.engine is only supported for the tensorrt backend")
        return self


class Instances(Frozen):
    """Number of instances of each step. Each instance of a Python step is a process.

    Attributes:
        preprocess: Number of processes that turn requests into tensors.
        core: Number of instances of the compiled model, on each GPU if `core.device` is ``gpu``.
        postprocess: Number of processes that turn tensors into results.
    """

    preprocess: Annotated[int, Field(ge=1, le=64)] = 1
    core: Positive = 1
    postprocess: Positive = 1


class MachineNumbers(Frozen):
    """A machine in numbers.

    Attributes:
        gpu: Name of the GPU, such as ``h200``; None for a machine without one.
        cores: Number of processor cores that the server may use.
        memory_gib: Memory of the GPU in GiB. None: that of its model.
    """

    gpu: str | None = None
    cores: Annotated[int, Field(ge=1, le=MAX_CORES)]
    memory_gib: Annotated[float, Field(gt=0, le=10_000)] | None = None


class Queue(Frozen):
    """Limits on waiting requests.

    Attributes:
        max_delay_us: Maximum time in µs that the core waits for more rows of a batch.
        max_in_flight: Maximum number of requests in flight. Further requests are rejected with
            UNAVAILABLE.
        max_backlog_ms: Maximum time in ms that a request waits in preprocess before it is rejected
            with UNAVAILABLE. None: no limit. Under overload it is not needed: see `flow_control`.
        timeout_ms: Maximum time in ms that a request waits for the core before it is rejected.
            None: no limit. Use two instances of the core with it: with one instance Triton
            notices expired requests late.
    """

    max_delay_us: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    max_in_flight: Annotated[int, Field(ge=1, le=1_000_000)] = 1024
    max_backlog_ms: Annotated[int, Field(ge=1, le=3_600_000)] | None = None
    timeout_ms: Annotated[int, Field(ge=1, le=3_600_000)] | None = None


class Transfers(Frozen):
    """Transfer of tensors to a core on a GPU and back.

    Attributes:
        pinned_input: Whether a batch is gathered in memory that the GPU copies from directly.
        pinned_output: Whether results are copied to such memory.
        output_copy_stream: Whether results are copied on a CUDA stream of their own, in parallel
            with the next batch.
        gather_kernel_buffer_threshold: Minimum number of buffers that are gathered by one kernel
            instead of one copy each. 0: never. None: chosen by the plan.
        eager_batching: Whether the next batch is gathered while one runs, which gives smaller
            batches and shorter waits.
    """

    pinned_input: bool = True
    pinned_output: bool = True
    output_copy_stream: bool = True
    gather_kernel_buffer_threshold: Annotated[int, Field(ge=0, le=1024)] | None = None
    eager_batching: bool = False


class Resource(Frozen):
    """A resource shared by instances of several models, as Triton's rate limiter counts it.

    Attributes:
        name: Name that all models of the resource use.
        count: Amount that an instance of the core needs to run.
        shared: Whether the server has one pool instead of one per device (``global``).
    """

    name: Annotated[str, Field(min_length=1)]
    count: Positive = 1
    shared: bool = False


class RateLimiter(Frozen):
    """Order of the core's executions, if the server limits rates (``--rate-limit``).

    Attributes:
        resources: Resources that an instance needs.
        priority: 1 runs first; a model of priority 2 runs half as often as one of priority 1.
    """

    resources: list[Resource] = []
    priority: Annotated[int, Field(ge=1, le=1000)] = 1


class PriorityLevels(Frozen):
    """Priority levels of requests that wait for the core.

    Attributes:
        levels: Number of levels; requests of level 1 go first.
        default: Level of a request without ``priority``. None: the last level.
    """

    levels: Annotated[int, Field(ge=2, le=1000)]
    default: Positive | None = None

    @model_validator(mode="after")
    def _fits(self) -> PriorityLevels:
        if self.default is not None and self.default > self.levels:
            raise ValueError(f"serving.priority.default must be at most levels ({self.levels})")
        return self


class SamplingSettings(Frozen):
    """Rows that the server stores with their outputs, for monitoring and as traffic.

    They are written below the folder that ``TRIPTYCH_SAMPLES`` names in the server's environment,
    in files that only the server's user can read.

    Attributes:
        rate: Fraction of rows that are sampled.
        max_rows: Maximum number of rows in the folder; the oldest are removed.
        max_bytes: Maximum size of the folder in bytes; the oldest files are removed. One window
            may use a tenth of `max_rows` and of `max_bytes`.
        retention_hours: Age in hours at which a row is deleted.
        window_s: Length of the time window of one file, in seconds.
        redact: ``hooks.redact`` to call that function of the pipeline for each row before it is
            written. It returns inputs and outputs, or None to drop the row.
    """

    rate: Share = 0.001
    max_rows: Positive = 20_000
    max_bytes: Positive = 256 << 20
    retention_hours: Annotated[float, Field(gt=0, le=8760)] = 72.0
    window_s: Annotated[float, Field(gt=0, le=3600)] = 60.0
    redact: Literal["hooks.redact"] | None = None


ConfigTexts = dict[Annotated[str, Field(pattern="^(ensemble|preprocess|core|postprocess)$")], str]
"""Text in the format of ``config.pbtxt`` by step, merged into the generated config."""


Versions = Annotated[list[Annotated[int, Field(ge=1, le=2**31 - 1)]], Field(min_length=1)]
"""Version numbers under which the ensemble of a build answers."""


class Serving(Frozen):
    """Options of the steps on the server.

    Attributes:
        triton: Oldest release (``YY.MM``) that must be able to load the repository. Fields that
            this release does not know are left out. 24.10 is the release of the local server.
        machine: Machine that serves: a name such as ``h200x16`` (an H200 and 16 cores) or ``cpu8``,
            or its numbers. Instances, ``core.threads`` and, on a GPU, ``core.max_batch_size`` that
            are not set are planned for it. None: the same numbers for every machine.
        variants: Names of further machines that a build has a plan for, beside that of `machine`. A
            server uses the one for its GPU and cores. None: usual machines; an empty list: none.
        gpus: Device ids if ``core.device`` is ``gpu``; `instances.core` run on each. ``all``: each
            GPU that the server sees.
        rate_limiter: Order of executions with other models; None for no limit.
        priority: Priority levels of requests; None for none. Give the core two instances or more:
            with one, Triton notices requests late.
        max_inflight_requests: Maximum number of requests that each step processes at a time. None:
            no limit. Needs a server of 25.11 or later.
        slo: SLO that `bench` and `tune` use unless their options give one.
        sample: Rows that are sampled for monitoring; None for none.
        device_check: Rows in the repository that a server answers at its first start on a device
            that the accuracy gate never saw. ``synthetic``: rows that `build` makes up.
            ``traffic``: also rows of the traffic, which everybody with the repository can then
            read. ``none``: no rows, and no check.
        config: Further settings of Triton by step (``ensemble``, ``preprocess``, ``core``,
            ``postprocess``), as text in the format of ``config.pbtxt``.
        versions: Version numbers of the ensemble. The largest answers
            requests that name none. The steps have version 1.
        flow_control: Order of the requests under overload. ``triptych``: first those that will
            most likely be answered before their clients give up. ``triton``: that of arrival; the
            core's queue rejects requests that exceed `queue.max_in_flight` or wait for longer than
            `queue.timeout_ms`, by default the largest latency limit of the SLO or 5000. With one
            instance of the core, Triton would delay single requests, and ``triton`` is built as
            ``none``. ``none``: that of arrival, without limits.
        response_cache: Whether the server answers a request with the same inputs as an earlier one
            from its cache, without the steps. Options must then be sent as inputs. Only for
            pipelines with one output; text-embedding then has the encoding ``float`` alone.
        class_scores: Whether a classification also returns the scores of all labels, in the order
            of the model's labels, for Triton's classification extension.
        python_env: Whether the repository has the Python packages of its steps, for images of
            Triton without them. Adds about 20 MB for each Python version to preprocess and to
            postprocess. A list also names packages that ``hooks.py`` imports, which must be
            installed where the pipeline is built; what they require is added.
    """

    triton: ReleaseName = str(OLDEST)
    machine: str | MachineNumbers | None = None
    variants: list[str] | None = None
    instances: Instances = Instances()
    gpus: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | Literal["all"] = [0]
    queue: Queue = Queue()
    transfers: Transfers = Transfers()
    rate_limiter: RateLimiter | None = None
    priority: PriorityLevels | None = None
    max_inflight_requests: Positive | None = None
    slo: Slo = Slo()
    sample: SamplingSettings | None = None
    device_check: Literal["synthetic", "traffic", "none"] = "synthetic"
    config: ConfigTexts = Field(default_factory=dict)
    versions: Versions = [1]
    flow_control: Literal["triptych", "triton", "none"] = "triptych"
    response_cache: bool = False
    class_scores: bool = False
    python_env: bool | Annotated[list[str], Field(min_length=1)] = False

    @property
    def served_by(self) -> ServingMachine | None:
        """The machine of `machine`, with the memory of its GPU's model unless it has its own."""
        if self.machine is None or isinstance(self.machine, str):
            return None if self.machine is None else parse_machine(self.machine)
        given = self.machine
        made = parse_machine(ServingMachine(given.gpu or "", given.cores).name)
        return made if given.memory_gib is None else made._replace(memory_gib=given.memory_gib)

    @property
    def queue_policy_of_triton(self) -> bool:
        """Whether the core has a queue policy. With one instance it would delay lone requests."""
        has_several = self.instances.core * self.gpu_count > 1
        return self.queue.timeout_ms is not None or (self.flow_control == "triton" and has_several)

    @property
    def gpu_count(self) -> int:
        """Maximum number of GPUs that the core uses if it runs on GPUs."""
        return MAX_GPUS if self.gpus == "all" else len(self.gpus)

    @property
    def longest_wait_ms(self) -> float:
        """Expected longest wait: `queue.max_backlog_ms`, else the largest limit of the SLO."""
        lowest, without_slo = MAX_WAIT_MS
        largest = max(self.slo.limits_us.values(), default=without_slo * 1e3) / 1e3
        return self.queue.max_backlog_ms or max(largest, lowest)

    @property
    def gpus_of_replica(self) -> int:
        """Number of GPUs that a replica is given: those in `gpus`, or one for ``all``."""
        return 1 if self.gpus == "all" else len(self.gpus)

    @model_validator(mode="after")
    def _is_supported(self) -> Serving:
        _ = self.served_by  # an unknown machine is an error
        for name in self.variants or ():
            parse_machine(name, "serving.variants")
        if self.flow_control == "none" and self.queue.timeout_ms is not None:
            raise ValueError("queue.timeout_ms is not supported with flow_control none")
        if self.flow_control != "triptych" and self.queue.max_backlog_ms is not None:
            raise ValueError(
                f"queue.max_backlog_ms is not supported with flow_control {self.flow_control}"
            )
        return self


if TYPE_CHECKING:
    _Limits = Frozen
else:
    _Limits = create_model(
        "_Limits",
        __base__=Frozen,
        **{
            metric.name: ((Share if metric.better == "higher" else Distance) | None, None)
            for metric in METRICS.values()
        },
    )


class Accuracy(_Limits):
    """Limits of the accuracy gate by metric, in place of the defaults of the tasks.

    Attributes:
        max_drop: Maximum loss of the labeled measure on ``eval.jsonl`` against the original model.
    """

    max_drop: Annotated[float, Field(ge=0, le=1)] = 0.0


class CustomOutput(Frozen):
    """An output of a custom task.

    Attributes:
        name: Name that clients read.
        dtype: Triton data type of the elements.
        dims: Size of each axis without the batch; -1 for a variable size.
    """

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
    dtype: Literal["BYTES", "FP32", "INT8", "INT32", "INT64", "BOOL"]
    dims: Annotated[list[Annotated[int, Field(ge=-1, le=1_000_000)]], Field(min_length=1)] = [1]


class Custom(Frozen):
    """A task whose outputs are computed by `decode` in the pipeline's ``hooks.py``.

    Attributes:
        inputs: ``text``, or ``text`` and ``text_pair``.
        auto_class: Class of transformers that loads the model with its head.
        head_input: Part of the encoder's result that the head uses.
        core_output: Output of the core.
        outputs: Outputs of the ensemble.
    """

    inputs: Annotated[list[Literal["text", "text_pair"]], Field(min_length=1)] = ["text"]
    auto_class: Annotated[str, Field(pattern=r"^Auto[A-Za-z]+$")]
    head_input: Literal["row", "tokens", "pooled"] = "row"
    core_output: Literal["logits", "scores", "token_scores", "vector"] = "scores"
    outputs: Annotated[list[CustomOutput], Field(min_length=1)]
