"""Fields of ``pipeline.yaml`` of pipelines that generate text, and their loaders.

>>> spec = load_generation_spec(Path("pipelines/chat"), overrides=["core.max_num_seqs=8"])
>>> spec = load_text2text_spec(Path("pipelines/summaries"), overrides=["core.num_beams=4"])
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from triptych.base.errors import UserError, closest
from triptych.base.releases import OLDEST
from triptych.models.fields import Frozen, ModelSource, TokenizerChoice
from triptych.runtime.sampling_parameters import (
    ADAPTER,
    MAX_NAME_CHARACTERS,
    PRIORITY,
    find_fault,
)
from triptych.spec.fields import ConfigTexts, Positive, PriorityLevels, ReleaseName, Versions
from triptych.spec.slo import GenerationSlo
from triptych.spec.spec import load_as, load_tunable
from triptych.spec.tuned import TUNABLE_GENERATION

Device = Annotated[str, Field(pattern=r"^(GPU|MIG)-[0-9A-Za-z/-]+$")]
"""UUID of a GPU as ``nvidia-smi -L`` prints it."""

AdapterName = Annotated[
    str, Field(pattern=rf"^[A-Za-z0-9][A-Za-z0-9_.-]{{0,{MAX_NAME_CHARACTERS - 1}}}$")
]
AdapterSource = Annotated[
    ModelSource,
    BeforeValidator(lambda given: {"source": given} if isinstance(given, str) else given),
]
"""Source of a LoRA adapter; the source as text is enough."""

MiB = Annotated[int, Field(ge=1, le=1 << 20)]


class KvCache(Frozen):
    """Memory for keys and values of the tokens in flight.

    Attributes:
        memory_mib: Size in MiB. All running requests together must fit.
        dtype: ``auto`` uses the data type of the computation, ``fp8`` one byte per number.
    """

    memory_mib: MiB = 1024
    dtype: Literal["auto", "fp8"] = "auto"


GENERATION_BACKENDS = {"vllm": True, "tensorrt_llm": True}
"""Engines that `core.backend` may name, and whether each runs on GPUs."""


class GenerationCore(Frozen):
    """Options of the engine for text generation. Names are those of vLLM's engine arguments.

    Attributes:
        backend: Name of the engine: ``vllm`` or ``tensorrt_llm``.
        precision: Precision of the computation. ``int8`` and ``fp8`` compute products of 8-bit
            weights and activations and the rest in bf16; unquantized weights are converted.
            Quantized weights are used as they are: ``awq``, ``gptq``, ``int8`` and ``fp8`` must
            match them, ``fp16`` and ``bf16`` set the precision of the computation.
        max_num_seqs: Maximum number of requests in a batch; further requests wait.
        max_num_batched_tokens: Maximum number of tokens computed in one step. A longer prompt
            takes several steps, between which running requests continue.
        max_model_len: Maximum number of tokens of a prompt and its response. None: the model's
            limit.
        enable_prefix_caching: Whether prompts with a common prefix share its computation.
        tensor_parallel_size: Number of GPUs that share each layer.
        pipeline_parallel_size: Number of groups of GPUs, each with a part of the layers.
    """

    LENGTH_FIELD: ClassVar = "max_model_len"

    backend: str = "vllm"
    precision: Literal["fp32", "fp16", "bf16", "int8", "fp8", "awq", "gptq"] = "bf16"
    max_num_seqs: Annotated[int, Field(ge=1, le=4096)] = 32
    max_num_batched_tokens: Annotated[int, Field(ge=16, le=1_000_000)] = 2048
    max_model_len: Annotated[int, Field(ge=2)] | None = None
    kv_cache: KvCache = KvCache()
    enable_prefix_caching: bool = True
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    pipeline_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1

    @property
    def parts(self) -> int:
        """Number of GPUs for one copy of the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @field_validator("backend")
    @classmethod
    def _known(cls, given: str) -> str:
        if given not in GENERATION_BACKENDS:
            raise ValueError(f"core.backend must be one of {', '.join(GENERATION_BACKENDS)}")
        return given

    @model_validator(mode="after")
    def _fits(self) -> GenerationCore:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                "core.max_num_batched_tokens must be at least core.max_num_seqs "
                f"({self.max_num_seqs})"
            )
        quantized = self.precision not in ("fp32", "fp16", "bf16")
        if self.backend == "tensorrt_llm" and (quantized or self.kv_cache.dtype != "auto"):
            raise ValueError(
                "core.backend tensorrt_llm only supports fp32, fp16 and bf16: quantized weights "
                "and KV caches were never tested with it"
            )
        return self


class GenerationQueue(Frozen):
    """Limits on waiting requests.

    Attributes:
        max_in_flight: Maximum number of requests in flight. Further requests are rejected with
            UNAVAILABLE.
    """

    max_in_flight: Annotated[int, Field(ge=1, le=1_000_000)] = 256


class GenerationServing(Frozen):
    """Options of the steps on the server.

    Attributes:
        triton: Oldest release (``YY.MM``) that must be able to load the repository.
        preprocess_instances: Number of processes that tokenize prompts.
        stream_interval: Minimum number of tokens in a streamed response; the first and the last
            response are sent at once.
        gpus: GPUs of the engine, by number or UUID. None: all GPUs that the server sees.
        slo: SLO that `bench` and `tune` use unless their options give one.
        config: Further settings of Triton by step (``ensemble``, ``preprocess``, ``core``,
            ``postprocess``), as text in the format of ``config.pbtxt``.
        versions: Version numbers of the ensemble, ``[1]`` if none are given. The largest answers
            requests that name none.
        priority: Priority levels of requests that wait for a place in the engine's batch. None for
            none: first come, first served.
    """

    triton: ReleaseName = str(OLDEST)
    queue: GenerationQueue = GenerationQueue()
    preprocess_instances: Annotated[int, Field(ge=1, le=64)] = 1
    stream_interval: Annotated[int, Field(ge=1, le=1024)] = 1
    gpus: list[Annotated[int, Field(ge=0)] | Device] | None = None
    slo: GenerationSlo = GenerationSlo()
    config: ConfigTexts = Field(default_factory=dict)
    versions: Versions = Field(default_factory=lambda: [1])
    priority: PriorityLevels | None = None


class GenerationAccuracy(Frozen):
    """Evaluation on ``eval.jsonl``.

    Attributes:
        metric: Measure of a response against the reference answers.
        max_drop: Maximum loss of the measure against the original model.
        max_tokens: Maximum number of tokens in a response.
    """

    metric: Literal["exact_match", "rouge_l"] = "rouge_l"
    max_drop: Annotated[float, Field(ge=0, le=1)] = 0.0
    max_tokens: Annotated[int, Field(ge=1, le=4096)] = 64


class GeneratingSpec(Frozen):
    """Fields that all pipelines for text generation have.

    Attributes:
        folder: Folder of the pipeline; not part of a build manifest.
        tuned: Fields whose values come from ``tuned.yaml``.
        parameters: Default sampling parameters of requests.
        max_text_bytes: Maximum size of a prompt in bytes; longer prompts are rejected unread.
    """

    name: str
    folder: Path = Path()
    tuned: dict[str, bool | int | str] = Field(default_factory=dict)
    model: ModelSource
    tokenizer: TokenizerChoice = TokenizerChoice()
    parameters: dict[str, Any] = Field(default_factory=dict)
    max_text_bytes: Positive = 1_048_576
    serving: GenerationServing = GenerationServing()
    accuracy: GenerationAccuracy = GenerationAccuracy()

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """Names that requests may give as `adapter`."""
        return ()

    @property
    def priority_levels(self) -> int:
        """Number of priority levels; 0 if there are none."""
        return self.serving.priority.levels if self.serving.priority else 0

    @property
    def own_parameters(self) -> dict[str, object]:
        """Sampling parameters whose defaults are not those of every pipeline."""
        if (priority := self.serving.priority) is None:
            return self.parameters
        return {**self.parameters, PRIORITY: priority.default or priority.levels}

    @property
    def has_kv_cache(self) -> bool:
        """Whether the engine has a KV cache of planned size."""
        return False

    @property
    def gpus_per_copy(self) -> int:
        """Number of GPUs that one copy of the model needs; 0 for an engine on the CPU."""
        return 0

    @field_validator("parameters")
    @classmethod
    def _known(cls, given: dict[str, Any]) -> dict[str, Any]:
        for name, value in given.items():
            if fault := find_fault(name, value):
                raise ValueError(f"parameters.{name} {fault}")
        return given


class GenerationSpec(GeneratingSpec):
    """Spec of a pipeline that continues a prompt or a conversation.

    Attributes:
        task: Always ``text-generation``.
        adapters: LoRA adapters by the name that requests give.
        message_special_tokens: Meaning of special tokens in chat messages: ``text`` or ``token``.
    """

    task: Literal["text-generation"]
    message_special_tokens: Literal["text", "token"] = "text"
    adapters: dict[AdapterName, AdapterSource] = Field(default_factory=dict)
    core: GenerationCore = GenerationCore()

    @property
    def adapter_names(self) -> tuple[str, ...]:
        return tuple(self.adapters)

    @property
    def has_kv_cache(self) -> bool:
        return True

    @property
    def gpus_per_copy(self) -> int:
        return self.core.parts if GENERATION_BACKENDS[self.core.backend] else 0


def load_generation_spec(
    folder: Path, overrides: Sequence[str] = (), *, untuned: bool = False
) -> GenerationSpec:
    """Read ``folder/pipeline.yaml``, then ``tuned.yaml`` if it exists, then the overrides.

    Args:
        folder: Folder of the pipeline.
        overrides: ``KEY=VALUE`` each: dotted keys, YAML values.
        untuned: Whether to ignore ``tuned.yaml``.

    Raises:
        UserError: The file is missing or not YAML, a key is unknown or a value out of range.
    """
    spec = load_tunable(GenerationSpec, folder, overrides, TUNABLE_GENERATION, untuned=untuned)
    if spec.adapters and spec.core.backend == "tensorrt_llm":
        raise UserError(
            "adapters",
            "are only supported for core.backend vllm",
            given=f"{', '.join(spec.adapters)}, with tensorrt_llm",
            remedy="Use vllm, or merge the adapter into the model",
        )
    _check_parameters(spec)
    return spec


def _check_parameters(spec: TextSpec) -> None:
    """Raise a `UserError` if priorities, or the adapter in `parameters`, are not supported."""
    backend, chosen = spec.core.backend, spec.parameters.get(ADAPTER)
    if spec.serving.priority is not None and backend in ("tensorrt_llm", "ctranslate2"):
        raise UserError(
            "serving.priority",
            "is only supported for core.backend vllm",
            given=f"{spec.priority_levels} levels, with {backend}",
            remedy="Remove the field",
        )
    if PRIORITY in spec.parameters:
        raise UserError(
            f"parameters.{PRIORITY}",
            "is the level of requests that give none, which is serving.priority.default",
            given=str(spec.parameters[PRIORITY]),
            remedy="Set serving.priority: {levels: …, default: …} instead",
        )
    if chosen and chosen not in spec.adapter_names:
        raise UserError(
            f"parameters.{ADAPTER}",
            "is not an adapter of the pipeline",
            given=chosen,
            remedy=f"{closest(chosen, spec.adapter_names)}Adapters: "
            f"{', '.join(spec.adapter_names) or 'none'}",
        )


class Text2TextCore(Frozen):
    """Options of the engine for text2text. Names are those of transformers.

    A search option that is None takes the value in the model's ``generation_config.json``.

    Attributes:
        precision: Precision of the weights; ``int8`` computes products in int8, the rest in fp32.
        max_num_seqs: Maximum number of texts in a batch. A batch runs to its end.
        max_length: Maximum number of tokens in an input text. None: the model's limit.
        max_new_tokens: Maximum number of tokens in a response.
        num_beams: Number of beams; 1 searches greedily and streams token by token.
        length_penalty: Exponent for the length of a response with several beams; values above 0
            prefer longer responses.
        no_repeat_ngram_size: Size of n-grams that must not repeat in a response; 0 allows all.
        min_new_tokens: Minimum number of tokens in a response.
        early_stopping: End of a search with several beams. True: when as many responses as beams
            have ended. ``never``: when no better response can follow. False: as transformers
            estimates it, which CTranslate2 follows by ``never``.
        threads: Number of threads per batch. None: the number of cores, at most 4.
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
    early_stopping: bool | Literal["never"] | None = None
    threads: Positive | None = None


class Text2TextSpec(GeneratingSpec):
    """Spec of a pipeline that generates a text from a text: a summary, a translation.

    Attributes:
        task: Always ``text2text-generation``.
        prefix: Text that the model expects before each input, for example ``summarize: ``.
    """

    task: Literal["text2text-generation"]
    prefix: Annotated[str, Field(max_length=1000)] = ""
    core: Text2TextCore = Text2TextCore()

    @property
    def own_parameters(self) -> dict[str, object]:
        # Of a summary or a translation, the most likely one is wanted.
        return {"temperature": 0.0, **self.parameters}


TextSpec = GenerationSpec | Text2TextSpec
"""Spec of a pipeline that generates text."""


def load_text2text_spec(folder: Path, overrides: Sequence[str] = ()) -> Text2TextSpec:
    """Read ``folder/pipeline.yaml``, then the overrides.

    Raises:
        UserError: The file is missing or not YAML, a key is unknown or a value out of range.
    """
    spec = load_as(Text2TextSpec, folder, overrides, {}, {})
    _check_parameters(spec)
    return spec
