"""What a user may write in ``pipeline.yaml`` of a pipeline that generates text.

>>> spec = load_generation_spec(Path("pipelines/chat"), overrides=["core.max_num_seqs=8"])

What a user may write in ``pipeline.yaml`` of a pipeline that summarizes or translates.

>>> spec = load_text2text_spec(Path("pipelines/summaries"), overrides=["core.num_beams=4"])
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from triptych.base.errors import UserError, closest
from triptych.base.releases import OLDEST
from triptych.runtime.sampling_parameters import ADAPTER, MAX_NAME_CHARACTERS, find_fault
from triptych.spec.fields import Frozen, ModelSource, Positive, check_release
from triptych.spec.kind import Kind
from triptych.spec.slo import GenerationSlo
from triptych.spec.spec import load_as, with_present_names
from triptych.spec.tuned import TUNABLE_GENERATION, read_tuned

Device = Annotated[str, Field(pattern=r"^(GPU|MIG)-[0-9A-Za-z/-]+$")]
"""A GPU's UUID, as ``nvidia-smi -L`` says it."""

AdapterName = Annotated[
    str, Field(pattern=rf"^[A-Za-z0-9][A-Za-z0-9_.-]{{0,{MAX_NAME_CHARACTERS - 1}}}$")
]
AdapterSource = Annotated[
    ModelSource,
    BeforeValidator(lambda given: {"source": given} if isinstance(given, str) else given),
]
"""A model's source; the text alone will do."""

MiB = Annotated[int, Field(ge=1, le=1 << 20)]


class KvCache(Frozen):
    """Keys and values of the tokens that are under way.

    Attributes:
        memory_mib: that it may take; what running requests hold together must fit into it.
        dtype: ``auto`` is that of what is computed, two bytes or four; ``fp8`` is one.
    """

    memory_mib: MiB = 1024
    dtype: Literal["auto", "fp8"] = "auto"


class GenerationCore(Frozen):
    """The engine.

    Attributes:
        backend: ``vllm``, ``tensorrt_llm``; or ``scripted``, which has no model and repeats the
            prompt, for tests.
        precision: what is computed in; of ``int8`` and ``fp8``, products of 8-bit weights and
            activations, the rest in bf16: an ordinary model is converted. Weights that are
            quantized already are taken as they are: ``awq``, ``gptq``, ``int8``, ``fp8`` name what
            they must be, fp16 and bf16 what is computed in.
        max_num_seqs: requests that share a batch; others wait.
        max_num_batched_tokens: that the engine computes at a time: a longer prompt takes several
            turns, between which running answers go on.
        max_model_len: tokens of a prompt and its answer together; None takes the model's own limit.
        kv_cache: its memory.
        enable_prefix_caching: whether prompts that begin alike share what was computed of it.
        tensor_parallel_size: GPUs that share each layer.
        pipeline_parallel_size: groups of GPUs that have some of the layers each.
        token_delay_ms: that the scripted engine takes for a token.
    """

    LENGTH_FIELD: ClassVar = "max_model_len"

    backend: Literal["vllm", "tensorrt_llm", "scripted"] = "vllm"
    precision: Literal["fp32", "fp16", "bf16", "int8", "fp8", "awq", "gptq"] = "bf16"
    max_num_seqs: Annotated[int, Field(ge=1, le=4096)] = 32
    max_num_batched_tokens: Annotated[int, Field(ge=16, le=1_000_000)] = 2048
    max_model_len: Annotated[int, Field(ge=2)] | None = None
    kv_cache: KvCache = KvCache()
    enable_prefix_caching: bool = True
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    pipeline_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    token_delay_ms: Annotated[float, Field(ge=0, le=1000)] | None = None

    @property
    def parts(self) -> int:
        """GPUs that one copy of the model is on."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @model_validator(mode="after")
    def _fits(self) -> GenerationCore:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError("core.max_num_batched_tokens must be at least core.max_num_seqs")
        if self.token_delay_ms is not None and self.backend != "scripted":
            raise ValueError("core.token_delay_ms is for the scripted backend")
        quantized = self.precision not in ("fp32", "fp16", "bf16")
        if self.backend == "tensorrt_llm" and (quantized or self.kv_cache.dtype != "auto"):
            raise ValueError(
                "core.backend tensorrt_llm computes in fp32, fp16 or bf16 here: what it reads of "
                "quantized weights and KV caches was never tried"
            )
        return self


class GenerationQueue(Frozen):
    """How requests wait.

    Attributes:
        max_in_flight: requests that may be under way; one more is refused at once (Unavailable).
    """

    max_in_flight: Annotated[int, Field(ge=1, le=1_000_000)] = 256


class GenerationServing(Frozen):
    """How Triton runs the steps.

    Attributes:
        triton: the oldest release (``YY.MM``) the repository must load on.
        queue: how requests wait.
        preprocess_instances: processes that make token ids of prompts.
        stream_interval: fewest tokens of a streamed response; the first and the last never wait.
        gpus: of the engine, by number or UUID; None: those that the server sees.
        slo: what `bench` holds the pipeline to, where its options say nothing else.
    """

    triton: Annotated[str, Field(pattern=r"^\d\d\.(0[1-9]|1[0-2])$")] = str(OLDEST)
    queue: GenerationQueue = GenerationQueue()
    preprocess_instances: Annotated[int, Field(ge=1, le=64)] = 1
    stream_interval: Annotated[int, Field(ge=1, le=1024)] = 1
    gpus: list[Annotated[int, Field(ge=0)] | Device] | None = None
    slo: GenerationSlo = GenerationSlo()

    @model_validator(mode="after")
    def _is_supported(self) -> GenerationServing:
        check_release(self.triton)
        return self


class GenerationAccuracy(Frozen):
    """How ``eval.jsonl`` is judged.

    Attributes:
        metric: of its answers.
        max_drop: how much worse than the original the model may be.
        max_tokens: of an answer, at most.
    """

    metric: Literal["exact_match", "rouge_l"] = "rouge_l"
    max_drop: Annotated[float, Field(ge=0, le=1)] = 0.0
    max_tokens: Annotated[int, Field(ge=1, le=4096)] = 64


class GeneratingSpec(Frozen):
    """What pipelines that generate text have in common.

    Attributes:
        name: of its folder.
        folder: where it was read; a lock does not keep it.
        tuned: fields whose values come from ``tuned.yaml``, and so from measurements.
        parameters: sampling parameters of a request that does not give them itself.
        max_text_bytes: a longer prompt is refused unread.
        accuracy: how ``eval.jsonl`` is judged.
    """

    name: str
    folder: Path = Path()
    tuned: dict[str, bool | int | str] = Field(default_factory=dict)
    model: ModelSource
    parameters: dict[str, Any] = Field(default_factory=dict)
    max_text_bytes: Positive = 1_048_576
    serving: GenerationServing = GenerationServing()
    accuracy: GenerationAccuracy = GenerationAccuracy()

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """Names that requests may give as `adapter`."""
        return ()

    @property
    def own_parameters(self) -> dict[str, Any]:
        """Sampling parameters whose defaults are not those of every pipeline."""
        return self.parameters

    @property
    def has_kv_cache(self) -> bool:
        """Whether the engine has a KV cache of planned size."""
        return False

    @property
    def gpus_per_copy(self) -> int:
        """Number of GPUs that one copy of the model needs; 0 for an engine on the CPU."""
        return 0

    @model_validator(mode="before")
    @classmethod
    def _rename(cls, given: Any) -> Any:
        return with_present_names(given)

    @field_validator("parameters")
    @classmethod
    def _known(cls, given: dict[str, Any]) -> dict[str, Any]:
        for name, value in given.items():
            if fault := find_fault(name, value):
                raise ValueError(f"parameters.{name} {fault}")
        return given


class GenerationSpec(GeneratingSpec):
    """One pipeline that goes on with a text or a conversation, as declared.

    Attributes:
        adapters: LoRA adapters by the name that requests give them.
    """

    task: Literal["text-generation"]
    adapters: dict[AdapterName, AdapterSource] = Field(default_factory=dict)
    core: GenerationCore = GenerationCore()

    @property
    def adapter_names(self) -> tuple[str, ...]:
        return tuple(self.adapters)

    @property
    def kind(self) -> Kind:
        return Kind.TEXT_GENERATION

    @property
    def has_kv_cache(self) -> bool:
        return True

    @property
    def gpus_per_copy(self) -> int:
        return 0 if self.core.backend == "scripted" else self.core.parts


def load_generation_spec(
    folder: Path, overrides: Sequence[str] = (), *, untuned: bool = False
) -> GenerationSpec:
    """Read ``folder/pipeline.yaml``, then ``tuned.yaml`` where there is one, then the overrides.

    Args:
        folder: the pipeline's.
        overrides: ``KEY=VALUE`` each: dotted keys, YAML values.
        untuned: leave ``tuned.yaml`` out.

    Raises:
        UserError: a missing file, bad YAML, an unknown key or a value out of range.
    """
    found = None if untuned else read_tuned(folder, TUNABLE_GENERATION)
    tuned = {} if found is None else found.overrides
    spec = load_as(GenerationSpec, folder, overrides, tuned, {"tuned": tuned})
    if spec.adapters and spec.core.backend == "tensorrt_llm":
        raise UserError(
            "adapters",
            "need core.backend vllm: TensorRT-LLM gets none here",
            given=", ".join(spec.adapters),
            remedy="Choose vllm, or merge the adapter into the model",
        )
    check_chosen_adapter(spec)
    return spec


def check_chosen_adapter(spec: GeneratingSpec) -> None:
    """Raises a `UserError` where `parameters` name an adapter that the pipeline does not have."""
    chosen = spec.parameters.get(ADAPTER)
    if chosen and chosen not in spec.adapter_names:
        raise UserError(
            f"parameters.{ADAPTER}",
            f"must be one of the adapters: {', '.join(spec.adapter_names) or 'there are none'}",
            given=chosen,
            remedy=f"{closest(chosen, spec.adapter_names)}Correct it, or leave it out",
        )


class Text2TextCore(Frozen):
    """The engine. What says "None: the model's own" takes it from ``generation_config.json``.

    Attributes:
        precision: of the weights; with ``int8`` products are computed in it, the rest in fp32.
        max_num_seqs: texts that share a batch; a batch runs to its end.
        max_length: tokens of a text; None: the model's own.
        max_new_tokens: tokens of an answer, at most.
        num_beams: of the search; 1 is greedy, and streams token by token. None: the model's own.
        length_penalty: above 0 prefers longer answers, with several beams. None: the model's own.
        no_repeat_ngram_size: no so many tokens come twice in an answer; 0 lets them. None: the
            model's own.
        min_new_tokens: tokens of an answer, at least. None: the model's own.
        threads: that share the work of a batch; None: as many as there are cores, at most 4.
    """

    LENGTH_FIELD: ClassVar = "max_length"

    backend: Literal["ctranslate2"] = "ctranslate2"
    precision: Literal["fp32", "int8"] = "fp32"
    max_num_seqs: Annotated[int, Field(ge=1, le=4096)] = 32
    max_length: Positive | None = None
    max_new_tokens: Positive = 512
    num_beams: Annotated[int, Field(ge=1, le=64)] | None = None
    length_penalty: Annotated[float, Field(ge=0, le=10)] | None = None
    no_repeat_ngram_size: Annotated[int, Field(ge=0, le=64)] | None = None
    min_new_tokens: Annotated[int, Field(ge=0)] | None = None
    threads: Positive | None = None


class Text2TextSpec(GeneratingSpec):
    """One pipeline that makes one text of another, as declared.

    Attributes:
        prefix: what the model wants before each text, for example ``summarize: ``.
    """

    task: Literal["text2text-generation"]
    prefix: Annotated[str, Field(max_length=1000)] = ""
    core: Text2TextCore = Text2TextCore()

    @property
    def kind(self) -> Kind:
        return Kind.TEXT2TEXT

    @property
    def own_parameters(self) -> dict[str, Any]:
        # Of a summary or a translation, the most likely one is wanted.
        return {"temperature": 0.0, **self.parameters}


def load_text2text_spec(
    folder: Path, overrides: Sequence[str] = (), *, untuned: bool = False
) -> Text2TextSpec:
    """Read ``folder/pipeline.yaml``, then the overrides.

    `untuned` has no effect: no field of such a pipeline can be tuned.

    Raises:
        UserError: a missing file, bad YAML, an unknown key or a value out of range.
    """
    spec = load_as(Text2TextSpec, folder, overrides, {}, {})
    check_chosen_adapter(spec)
    return spec
