"""Engines that generate text, without a model: batches, and room for adapters."""

from triptych.runtime import engine_vllm
from triptych.runtime.engine_ctranslate2 import next_batch


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
