"""Engines that generate text, without a model: batches, what is given up, room for adapters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

from generation_cases import fake_engine
from triptych.runtime import engine_vllm
from triptych.runtime.engine_ctranslate2 import next_batch
from triptych.runtime.generation_messages import Delta, EngineLoad
from triptych.runtime.sampling_parameters import DEFAULTS


def test_the_fake_engine_batches_reports_and_gives_up() -> None:
    loads: list[EngineLoad] = []
    settings = {"token_delay_ms": 1.0, "max_sequences": 1, "max_length": 10}
    sampling = {**DEFAULTS, "max_tokens": 3, "logprobs": 1}

    async def whole(answer: AsyncGenerator[Delta, None]) -> list[Delta]:
        return [delta async for delta in answer]

    async def run() -> list[Delta]:
        engine = fake_engine()(settings, Path(), loads.append)
        await engine.start()
        first = engine.generate("a", [7, 8, 9, 10], sampling)
        begun = [await anext(first)]
        second = asyncio.ensure_future(whole(engine.generate("b", [5], sampling)))
        while not loads[-1].waiting:
            await asyncio.sleep(0)
        assert loads[-1].running == 1
        begun += await whole(first)
        assert (await second)[-1].finish == "stop"
        third = engine.generate("c", [1, 2, 3], sampling)
        await anext(third)
        await third.aclose()
        return begun

    deltas = asyncio.run(run())
    assert [delta.token_ids for delta in deltas] == [[7], [8], [9]]
    assert deltas[-1].finish == "length"
    assert deltas[1].logprobs == [[8, -1.0, [[8, -1.0]]]]
    assert loads[-1] == EngineLoad()


def test_texts_of_like_length_share_a_batch_and_none_waits_for_ever() -> None:
    assert next_batch([9, 1, 8, 2], "aaaa", max_prompts=2) == [2, 0]
    assert next_batch([5, 1, 5, 1], "abab", max_prompts=8) == [0, 2]
    assert next_batch([], [], max_prompts=2) == []
    # Short ones keep coming: a long one, or one of another kind, is among the next anyhow.
    for oldest in ((500, "a"), (5, "b")):
        waiting = [oldest, *[(5, "a")] * 40]
        chosen = next_batch(
            [one for one, _ in waiting], [kind for _, kind in waiting], max_prompts=8
        )
        assert 0 in chosen
        assert len(chosen) == (8 if oldest[1] == "a" else 1)


def test_vllm_has_room_for_all_adapters_and_a_spare_place_on_a_processor() -> None:
    assert engine_vllm.room_for_adapters({}, spare=True) == {}
    room = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 32}
    assert engine_vllm.room_for_adapters({"a": 8, "b": 17}, spare=False) == room
    assert engine_vllm.room_for_adapters({"a": 8, "b": 17}, spare=True) == {**room, "max_loras": 3}
