"""TensorRT-LLM as the engine, held against a fake of its `LLM`: it cannot run without a GPU.

The fake takes what the source of 1.0 to 1.2 takes (llmapi/llm.py, llmapi/llm_args.py,
sampling_params.py, executor/result.py), refuses anything else, and repeats the prompt.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from triptych.runtime.engine_tensorrt_llm import Engine
from triptych.runtime.generation_messages import Delta, EngineLoad
from triptych.runtime.sampling_parameters import DEFAULTS

LLM_ARGUMENTS = {
    *("model", "tokenizer", "skip_tokenizer_init", "trust_remote_code", "dtype", "revision"),
    *("tensor_parallel_size", "pipeline_parallel_size", "gpus_per_node", "kv_cache_config"),
    *("max_batch_size", "max_num_tokens", "max_seq_len", "enable_chunked_prefill"),
    "enable_iter_perf_stats",
}
KV_CACHE_ARGUMENTS = {"enable_block_reuse", "max_tokens", "free_gpu_memory_fraction", "dtype"}
SAMPLING_ARGUMENTS = {
    *("end_id", "pad_id", "max_tokens", "bad", "stop", "stop_token_ids", "n", "top_k", "top_p"),
    *("min_p", "seed", "temperature", "repetition_penalty", "presence_penalty", "logprobs"),
    *("frequency_penalty", "detokenize", "prompt_logprobs", "ignore_eos", "min_tokens"),
}
SETTINGS = {
    "precision": "bf16",
    "max_length": 64,
    "max_sequences": 4,
    "max_batched_tokens": 128,
    "kv_cache_mib": 1,
    "kv_token_bytes": 1024,
    "prefix_caching": True,
    "tensor_parallel": 2,
    "pipeline_parallel": 1,
    "gpus": [0, 1],
    "stop_token_ids": [2, 7],
}


def taking(known: set[str], **given: Any) -> SimpleNamespace:
    assert set(given) <= known, set(given) - known
    return SimpleNamespace(**given)


class FakeResult:
    """As `RequestOutput`: yields itself, its outputs growing; `abort` ends it."""

    cached_tokens = 1

    def __init__(self, prompt: list[int], sampling: Any) -> None:
        self._ids, self._sampling = prompt[: sampling.max_tokens], sampling
        self.aborted = False
        self.outputs: list[Any] = []

    def abort(self) -> None:
        self.aborted = True

    async def __aiter__(self) -> AsyncIterator[FakeResult]:
        for count, token in enumerate(self._ids, 1):
            await asyncio.sleep(0)
            logprobs = [{token: SimpleNamespace(logprob=-0.5, rank=1)}]
            output = {
                "token_ids": self._ids[:count],
                "token_ids_diff": [token],
                "logprobs_diff": logprobs if self._sampling.logprobs else [],
                "finish_reason": "length" if count == len(self._ids) else None,
            }
            self.outputs = [SimpleNamespace(**output)]
            yield self


class FakeLLM:
    made: FakeLLM

    def __init__(self, **given: Any) -> None:
        self.given = taking(LLM_ARGUMENTS, **given)
        self.visible = os.environ.get("TRTLLM_VISIBLE_DEVICES")
        self.results: list[FakeResult] = []
        self.asked: list[Any] = []
        self.closed = False
        FakeLLM.made = self

    def generate_async(
        self, inputs: Any, sampling_params: Any = None, *, streaming: bool = False
    ) -> FakeResult:
        assert streaming
        self.asked.append(sampling_params)
        self.results.append(FakeResult(inputs["prompt_token_ids"], sampling_params))
        return self.results[-1]

    async def get_stats_async(self, timeout: float) -> AsyncIterator[Any]:
        cache = {"usedNumBlocks": 3, "maxNumBlocks": 12}
        yield {"numActiveRequests": 2, "numQueuedRequests": 1, "kvCacheStats": cache}

    def shutdown(self) -> None:
        self.closed = True

    def _check_health(self) -> bool:
        return not self.closed


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    package, llmapi = ModuleType("tensorrt_llm"), ModuleType("tensorrt_llm.llmapi")
    vars(package).update(
        LLM=FakeLLM, SamplingParams=lambda **given: taking(SAMPLING_ARGUMENTS, **given)
    )
    vars(llmapi)["KvCacheConfig"] = lambda **given: taking(KV_CACHE_ARGUMENTS, **given)
    monkeypatch.setitem(sys.modules, "tensorrt_llm", package)
    monkeypatch.setitem(sys.modules, "tensorrt_llm.llmapi", llmapi)
    for name in ("CUDA_VISIBLE_DEVICES", "TRTLLM_VISIBLE_DEVICES", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.setenv(name, "9")


@pytest.mark.usefixtures("fake")
def test_it_is_asked_as_its_source_takes_it() -> None:
    loads: list[EngineLoad] = []

    async def run() -> list[Delta]:
        engine = Engine(SETTINGS, Path("model"), loads.append)
        await engine.start()
        sampling = {**DEFAULTS, "max_tokens": 2, "temperature": 0.0, "logprobs": 0}
        whole = [delta async for delta in engine.generate("a", [5, 6, 8], sampling)]
        sampled = {**DEFAULTS, "temperature": 0.7, "top_p": 0.9, "seed": 3, "max_tokens": 3}
        left = engine.generate("b", [5, 6, 8], sampled)
        await anext(left)
        await left.aclose()
        assert engine.find_death() == ""
        engine.close()
        assert engine.find_death() == "its executor has shut down"
        return whole

    whole = asyncio.run(run())
    assert whole == [Delta([5], "", 1, [[5, -0.5, []]]), Delta([6], "length", 1, [[6, -0.5, []]])]
    made = FakeLLM.made
    assert made.closed
    assert made.visible == "0,1"
    assert "OMPI_COMM_WORLD_RANK" not in os.environ
    assert made.given.kv_cache_config.max_tokens == 1024
    assert [result.aborted for result in made.results] == [False, True]
    greedy, sampled = made.asked
    assert (greedy.top_k, greedy.temperature, greedy.logprobs) == (1, None, 1)
    assert (sampled.top_k, sampled.temperature, sampled.top_p) == (None, 0.7, 0.9)
    assert (greedy.end_id, greedy.stop_token_ids) == (2, [7])
    assert loads[0] == EngineLoad(2, 1, 0.25)
