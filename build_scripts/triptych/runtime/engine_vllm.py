"""Run vLLM as the engine, with continuous batching, paged KV cache and prefix cache."""

from __future__ import annotations

import locale
import os
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .generation_messages import (
    ADAPTERS_FOLDER,
    TOKENIZER_FILE,
    Delta,
    EngineLoad,
    GenerationEngine,
    OnLoad,
    plain_logprobs,
)
from .sampling_parameters import ADAPTER, PRIORITY, SCHEMA

PACKAGES_VARIABLE = "TRIPTYCH_GENERATION_PACKAGES"
"""Variable for a folder with vLLM and its dependencies, if the step's Python lacks them."""

PRIVATE = {"VLLM_HOST_IP": "127.0.0.1", "VLLM_NO_USAGE_STATS": "1"}
"""Variables that keep the communication of vLLM's processes on this machine."""

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of `max_lora_rank` that vLLM accepts."""

DTYPES = {"fp32": "float32", "fp16": "float16"}
"""Data type of the computation by precision; other precisions compute in bfloat16."""


class Engine(GenerationEngine):
    """Engine of vLLM's `AsyncLLM`, with token ids instead of text."""

    def __init__(self, settings: Mapping[str, Any], folder: Path, on_load: OnLoad) -> None:
        self._settings = settings
        self._folder = folder
        self._on_load = on_load
        self._engine: Any = None
        self._adapters: dict[str, Any] = {}
        self._stop_ids: list[int] = list(settings["stop_token_ids"])

    async def start(self) -> None:
        _find_packages()
        _check_installed()
        if self._settings["gpus"] is not None:
            # vLLM reads the variable when it finds devices, and its processes inherit it.
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self._settings["gpus"]))
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        settings = self._settings
        if current_platform.is_cpu():
            # On a CPU, compilation needs a compiler and minutes, which small models never regain.
            # `enforce_eager` disables graphs; the variable disables the rest in all processes.
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        arguments = AsyncEngineArgs(
            model=str(self._folder),
            dtype=DTYPES.get(settings["precision"], "bfloat16"),
            max_model_len=settings["max_length"],
            max_num_seqs=settings["max_sequences"],
            max_num_batched_tokens=settings["max_batched_tokens"],
            kv_cache_memory_bytes=settings["kv_cache_mib"] << 20,
            kv_cache_dtype=settings["kv_cache_precision"],
            enable_prefix_caching=settings["prefix_caching"],
            scheduling_policy="priority" if settings["priority_levels"] else "fcfs",
            tensor_parallel_size=settings["tensor_parallel"],
            pipeline_parallel_size=settings["pipeline_parallel"],
            # The engine works on token ids, so only a schema needs the tokenizer.
            skip_tokenizer_init=not (self._folder / TOKENIZER_FILE).is_file(),
            # One backend for all requests accepts or rejects a schema regardless of earlier ones.
            # A model that may write white space anywhere in JSON may never end it.
            structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
            # The defaults are the pipeline's parameters, not those of the model's file.
            generation_config="vllm",
            enforce_eager=current_platform.is_cpu(),
            enable_log_requests=False,
            **room_for_adapters(settings["adapters"], spare=current_platform.is_cpu()),
        )
        self._engine = AsyncLLM.from_engine_args(
            arguments, stat_loggers=[_load_listener(self._on_load)]
        )
        await self._load_adapters()

    async def _load_adapters(self) -> None:
        """Load all adapters before the first request, so that an invalid one fails the start."""
        for number, name in enumerate(self._settings["adapters"], 1):
            from vllm.lora.request import LoRARequest

            path = str(self._folder / ADAPTERS_FOLDER / name)
            self._adapters[name] = LoRARequest(name, number, path)
            await self._engine.add_lora(self._adapters[name])

    async def generate(
        self, key: str, prompt: Sequence[int], sampling: Mapping[str, Any]
    ) -> AsyncGenerator[Delta, None]:
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        own = ("stop", SCHEMA, ADAPTER, PRIORITY)
        given = {name: value for name, value in sampling.items() if name not in own}
        schema = sampling[SCHEMA]
        parameters = SamplingParams(
            **given,
            structured_outputs=None if schema is None else StructuredOutputsParams(json=schema),
            stop_token_ids=[] if sampling["ignore_eos"] else self._stop_ids,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        tokens = TokensPrompt(prompt_token_ids=list(prompt))
        adapter = self._adapters.get(sampling[ADAPTER])
        outputs = self._engine.generate(
            tokens, parameters, key, lora_request=adapter, priority=sampling[PRIORITY] or 0
        )
        try:
            async for output in outputs:
                answer = output.outputs[0]
                if answer.finish_reason == "error":
                    if schema is not None:
                        raise ValueError(f"{SCHEMA}: the schema does not compile")
                    raise RuntimeError("vLLM aborted the answer")
                yield Delta(
                    list(answer.token_ids),
                    answer.finish_reason or "",
                    output.num_cached_tokens or 0,
                    plain_logprobs(answer.token_ids, answer.logprobs, sampling["logprobs"]),
                )
        except _refusals() as error:
            raise ValueError(str(error)) from error
        finally:
            await outputs.aclose()

    async def score(
        self, key: str, prompt: Sequence[int], answer: Sequence[int], adapter: str
    ) -> list[float]:
        """Return the log probability of each token of `answer`, given the earlier tokens."""
        from vllm import SamplingParams, TokensPrompt

        parameters = SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False
        )
        found: Any = None
        async for output in self._engine.generate(
            TokensPrompt(prompt_token_ids=[*prompt, *answer]),
            parameters,
            key,
            lora_request=self._adapters.get(adapter),
        ):
            found = output.prompt_logprobs or found
        pairs = zip(answer, found[len(prompt) :], strict=True)
        return [float(logprobs[token].logprob) for token, logprobs in pairs]

    def find_death(self) -> str:
        return "a process of vLLM died" if self._engine.errored else ""

    def close(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()


def room_for_adapters(ranks: Mapping[str, int], *, spare: bool) -> dict[str, object]:
    """Return the engine's arguments that keep all adapters in memory at once.

    Args:
        ranks: Rank of each adapter.
        spare: Whether to add an empty slot. On a CPU, vLLM applies the adapter of the last slot to
            rows without one if other rows of the batch have adapters (vllm#48421).
    """
    if not ranks:
        return {}
    rank = min(rank for rank in RANKS if rank >= max(ranks.values()))
    return {"enable_lora": True, "max_loras": len(ranks) + spare, "max_lora_rank": rank}


def _check_installed() -> None:
    if find_spec("vllm") is None:
        raise RuntimeError(
            "vLLM is not installed. Set TRIPTYCH_GENERATION_ENV to "
            f"an environment with vLLM on Python {sys.version_info[0]}.{sys.version_info[1]} "
            "(`make setup-generation` in a clone of Triptych makes one); in a container, use an "
            "image with vLLM."
        )


def _refusals() -> tuple[type[Exception], ...]:
    """Return the exceptions that vLLM raises for invalid requests, which depend on its release."""
    from vllm import exceptions

    return ValueError, getattr(exceptions, "VLLMClientError", ValueError)


def _find_packages() -> None:
    """Let this process and its children import vLLM, and use the UTF-8 locale that vLLM needs."""
    for name, value in PRIVATE.items():
        os.environ.setdefault(name, value)
    locale.setlocale(locale.LC_ALL, "C.UTF-8")
    folder = os.environ.get(PACKAGES_VARIABLE)
    if folder:
        sys.path.insert(0, folder)
        paths = [folder, os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)


def _load_listener(on_load: OnLoad) -> object:
    """Return a factory of vLLM loggers that report the scheduler's load after each step."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class LoadListener(StatLoggerBase):  # type: ignore[misc]  # vLLM has its own environment
        def __init__(self, vllm_config: object, engine_index: int = 0) -> None:
            pass

        def record(self, scheduler_stats: Any, *_others: Any, **_named: Any) -> None:
            if scheduler_stats is not None:
                on_load(
                    EngineLoad(
                        scheduler_stats.num_running_reqs,
                        scheduler_stats.num_waiting_reqs,
                        scheduler_stats.kv_cache_usage,
                    )
                )

        def log_engine_initialized(self) -> None:
            pass

    return LoadListener
