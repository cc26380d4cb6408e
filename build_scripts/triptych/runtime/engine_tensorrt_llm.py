"""Run TensorRT-LLM as the engine of text generation, by its `LLM` on PyTorch.

Written from the source of its releases 1.0 to 1.2; never run on a GPU.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .generation_messages import Delta, EngineLoad, GenerationEngine, OnLoad, plain_logprobs
from .sampling_parameters import SCHEMA

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
JOB_PREFIXES = ("OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "OMPI_MCA_orte_", "PMIX_", "PMI_", "ORTE_")
"""Variables of an MPI job that runs Triton, which the engine's own workers must not join."""

KEPT_PREFIXES = ("PMIX_MCA_",)
STATS_S = 0.5
"""Seconds between two requests for the engine's load."""

NO_END = -1


class Engine(GenerationEngine):
    """Engine of TensorRT-LLM's `LLM`, with token ids instead of text."""

    def __init__(self, settings: Mapping[str, Any], folder: Path, on_load: OnLoad) -> None:
        self._settings = settings
        self._folder = folder
        self._on_load = on_load
        self._stop_ids: list[int] = list(settings["stop_token_ids"])
        self._llm: Any = None

    async def start(self) -> None:
        # Loading takes minutes, and the engine starts its own event loop.
        self._llm = await asyncio.get_running_loop().run_in_executor(None, self._load)
        self._watcher = asyncio.get_running_loop().create_task(self._watch())

    def _load(self) -> object:
        settings = self._settings
        for name in list(os.environ):
            if name.startswith(JOB_PREFIXES) and not name.startswith(KEPT_PREFIXES):
                del os.environ[name]
        if settings["gpus"] is not None:
            # Before the import, which opens the devices that its workers inherit.
            for name in ("CUDA_VISIBLE_DEVICES", "TRTLLM_VISIBLE_DEVICES"):
                os.environ[name] = ",".join(map(str, settings["gpus"]))
        from tensorrt_llm import LLM
        from tensorrt_llm.llmapi import KvCacheConfig

        return LLM(
            model=str(self._folder),
            skip_tokenizer_init=True,
            dtype=DTYPES[settings["precision"]],
            tensor_parallel_size=settings["tensor_parallel"],
            pipeline_parallel_size=settings["pipeline_parallel"],
            max_seq_len=settings["max_length"],
            max_batch_size=settings["max_sequences"],
            max_num_tokens=settings["max_batched_tokens"],
            enable_chunked_prefill=True,
            enable_iter_perf_stats=True,
            kv_cache_config=KvCacheConfig(
                enable_block_reuse=settings["prefix_caching"],
                max_tokens=(settings["kv_cache_mib"] << 20) // settings["kv_token_bytes"],
            ),
        )

    async def generate(
        self, key: str, prompt: Sequence[int], sampling: Mapping[str, Any]
    ) -> AsyncGenerator[Delta, None]:
        answer = self._llm.generate_async(
            {"prompt_token_ids": list(prompt)}, self._parameters(sampling), streaming=True
        )
        finished = False
        try:
            async for output in answer:
                new = output.outputs[0]
                ids = list(new.token_ids_diff)
                finished = bool(new.finish_reason)
                yield Delta(
                    ids,
                    new.finish_reason or "",
                    getattr(output, "cached_tokens", 0) or 0,
                    plain_logprobs(ids, new.logprobs_diff, sampling["logprobs"]),
                )
        finally:
            if not finished:
                answer.abort()

    def find_death(self) -> str:
        return "" if self._llm._check_health() else "its executor has shut down"

    def close(self) -> None:
        if self._llm is not None:
            self._watcher.cancel()
            self._llm.shutdown()

    def _parameters(self, sampling: Mapping[str, Any]) -> Any:
        from tensorrt_llm import SamplingParams

        if sampling[SCHEMA] is not None:
            raise ValueError(f"{SCHEMA} is not supported by this engine")
        greedy = not sampling["temperature"]
        logprobs = sampling["logprobs"]
        return SamplingParams(
            max_tokens=sampling["max_tokens"],
            min_tokens=sampling["min_tokens"] or None,
            ignore_eos=sampling["ignore_eos"],
            # The engine rejects a temperature of 0; top_k None means every token.
            temperature=None if greedy else sampling["temperature"],
            top_k=1 if greedy else sampling["top_k"] or None,
            top_p=None if greedy else sampling["top_p"],
            min_p=sampling["min_p"] or None,
            seed=sampling["seed"],
            repetition_penalty=sampling["repetition_penalty"],
            presence_penalty=sampling["presence_penalty"],
            frequency_penalty=sampling["frequency_penalty"],
            logprobs=None if logprobs is None else max(logprobs, 1),
            # Without a tokenizer, the engine has no default end token.
            end_id=self._stop_ids[0] if self._stop_ids else NO_END,
            pad_id=self._stop_ids[0] if self._stop_ids else 0,
            stop_token_ids=None if sampling["ignore_eos"] else self._stop_ids[1:] or None,
            detokenize=False,
        )

    async def _watch(self) -> None:
        while True:
            async for found in self._llm.get_stats_async(STATS_S):
                stats = json.loads(found) if isinstance(found, str) else found
                cache = stats.get("kvCacheStats") or {}
                blocks = cache.get("maxNumBlocks", 0)
                self._on_load(
                    EngineLoad(
                        stats.get("numActiveRequests", 0),
                        stats.get("numQueuedRequests", 0),
                        cache.get("usedNumBlocks", 0) / blocks if blocks else 0.0,
                    )
                )
            await asyncio.sleep(STATS_S)
