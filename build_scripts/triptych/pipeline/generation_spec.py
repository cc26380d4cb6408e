"""What a user may write in ``pipeline.yaml`` of a pipeline that generates text.

>>> spec = load_generation_spec(Path("pipelines/chat"), overrides=["core.max_sequences=8"])
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from triptych.pipeline.slo import GenerationSlo
from triptych.pipeline.spec import load_as
from triptych.pipeline.spec_fields import Frozen, ModelSource, Positive, check_release
from triptych.releases import OLDEST
from triptych.runtime.sampling_parameters import find_fault

Device = Annotated[str, Field(pattern=r"^(GPU|MIG)-[0-9A-Za-z/-]+$")]
"""A GPU's UUID, as ``nvidia-smi -L`` says it."""

MiB = Annotated[int, Field(ge=1, le=1 << 20)]


class KvCache(Frozen):
    """Keys and values of the tokens that are under way.

    Attributes:
        memory_mib: that it may take; what running requests hold together must fit into it.
        precision: ``auto`` is that of what is computed, two bytes or four; ``fp8`` is one.
    """

    memory_mib: MiB = 1024
    precision: Literal["auto", "fp8"] = "auto"


class GenerationCore(Frozen):
    """The engine.

    Attributes:
        backend: ``vllm``, ``tensorrt_llm``; or ``scripted``, which has no model and repeats the
            prompt, for tests.
        precision: what is computed in; of ``int8`` and ``fp8``, products of 8-bit weights and
            activations, the rest in bf16: an ordinary model is converted. Weights that are
            quantised already are taken as they are: ``awq``, ``gptq``, ``int8``, ``fp8`` name what
            they must be, fp16 and bf16 what is computed in.
        max_sequences: requests that share a batch; others wait.
        max_batched_tokens: that the engine computes at a time: a longer prompt takes several turns,
            between which running answers go on.
        max_length: tokens of a prompt and its answer together; None takes the model's own limit.
        kv_cache: its memory.
        prefix_caching: whether prompts that begin alike share what was computed of it.
        tensor_parallel: GPUs that share each layer.
        pipeline_parallel: groups of GPUs that have some of the layers each.
        token_delay_ms: that the scripted engine takes for a token.
    """

    backend: Literal["vllm", "tensorrt_llm", "scripted"] = "vllm"
    precision: Literal["fp32", "fp16", "bf16", "int8", "fp8", "awq", "gptq"] = "bf16"
    max_sequences: Annotated[int, Field(ge=1, le=4096)] = 32
    max_batched_tokens: Annotated[int, Field(ge=16, le=1_000_000)] = 2048
    max_length: Annotated[int, Field(ge=2)] | None = None
    kv_cache: KvCache = KvCache()
    prefix_caching: bool = True
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    pipeline_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    token_delay_ms: Annotated[float, Field(ge=0, le=1000)] | None = None

    @property
    def parts(self) -> int:
        """GPUs that one copy of the model is on."""
        return self.tensor_parallel * self.pipeline_parallel

    @model_validator(mode="after")
    def _fits(self) -> GenerationCore:
        if self.max_batched_tokens < self.max_sequences:
            raise ValueError("core.max_batched_tokens must be at least core.max_sequences")
        if self.token_delay_ms is not None and self.backend != "scripted":
            raise ValueError("core.token_delay_ms is for the scripted backend")
        quantised = self.precision not in ("fp32", "fp16", "bf16")
        if self.backend == "tensorrt_llm" and (quantised or self.kv_cache.precision != "auto"):
            raise ValueError(
                "core.backend tensorrt_llm computes in fp32, fp16 or bf16 here: what it reads of "
                "quantised weights and KV caches was never tried"
            )
        return self


class GenerationQueue(Frozen):
    """How requests wait.

    Attributes:
        max_size: requests that may be under way; one more is refused at once (Unavailable).
    """

    max_size: Annotated[int, Field(ge=1, le=1_000_000)] = 256


class GenerationServing(Frozen):
    """How Triton runs the steps.

    Attributes:
        triton: the oldest release (``YY.MM``) the repository must load on.
        queue: how requests wait.
        preprocess_instances: processes that make token ids of prompts.
        gpus: of the engine, by number or UUID; None: those that the server sees.
        slo: what `bench` holds the pipeline to, where its options say nothing else.
    """

    triton: Annotated[str, Field(pattern=r"^\d\d\.(0[1-9]|1[0-2])$")] = str(OLDEST)
    queue: GenerationQueue = GenerationQueue()
    preprocess_instances: Annotated[int, Field(ge=1, le=64)] = 1
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
        parameters: sampling parameters of a request that does not give them itself.
        max_text_bytes: a longer prompt is refused unread.
    """

    name: str
    folder: Path = Path()
    model: ModelSource
    parameters: dict[str, Any] = Field(default_factory=dict)
    max_text_bytes: Positive = 1_048_576
    serving: GenerationServing = GenerationServing()

    @field_validator("parameters")
    @classmethod
    def _known(cls, given: dict[str, Any]) -> dict[str, Any]:
        for name, value in given.items():
            if fault := find_fault(name, value):
                raise ValueError(f"parameters.{name} {fault}")
        return given


class GenerationSpec(GeneratingSpec):
    """One pipeline that goes on with a text or a conversation, as declared."""

    task: Literal["text-generation"]
    core: GenerationCore = GenerationCore()
    accuracy: GenerationAccuracy = GenerationAccuracy()


def load_generation_spec(folder: Path, overrides: Sequence[str] = ()) -> GenerationSpec:
    """Read ``folder/pipeline.yaml``, then the overrides.

    Raises:
        UserError: a missing file, bad YAML, an unknown key or a value out of range.
    """
    return load_as(GenerationSpec, folder, overrides, {}, {})
