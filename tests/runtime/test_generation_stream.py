"""Generated text as it is streamed, and the batches of engines, without a model."""

import random

from generation_cases import TEXTS, byte_pairs, metaspace
from triptych.runtime import engine_vllm
from triptych.runtime.engine_ctranslate2 import next_batch
from triptych.runtime.generation_messages import CONTEXT_TOKENS, Delta, PendingTokens
from triptych.runtime.text_stream import MAX_WAITING, StopStrings, TextStream


def streamed(stream: TextStream, ids: list[int], pieces: random.Random, most: int) -> list[str]:
    shown = []
    while ids:
        count = pieces.randint(1, most)
        shown.append(stream.add(ids[:count]))
        ids = ids[count:]
    return [*shown, stream.finish()]


def test_streamed_text_is_the_whole_text_without_broken_characters() -> None:
    pieces = random.Random(7)
    for tokenizer in (byte_pairs(), metaspace()):
        for text in (*TEXTS, "  two  spaces ", "a\n\n b", "🙂🙂🙂", "x", TEXTS[2] * 20):
            prompt = tokenizer.encode("The dog").ids
            answer = tokenizer.encode(text, add_special_tokens=False).ids
            # What comes behind the prompt, in one piece: here a first token keeps its space.
            before = tokenizer.decode(prompt)
            whole = tokenizer.decode([*prompt, *answer])[len(before) :]
            for most in (1, 2, 3, 9, 100):
                stream = TextStream(tokenizer, prompt[-CONTEXT_TOKENS:])
                shown = streamed(stream, answer, pieces, most)
                assert "".join(shown) == whole, text
                assert not any("\ufffd" in piece for piece in shown), text


def test_bytes_that_are_no_text_are_shown_in_the_end_and_hold_nothing_up() -> None:
    tokenizer = byte_pairs()
    broken = tokenizer.encode("é", add_special_tokens=False).ids[0]
    stream = TextStream(tokenizer, [])
    assert stream.add([broken]) == ""
    assert stream.finish() == "\ufffd"
    stream = TextStream(tokenizer, [])
    assert "".join(stream.add([broken]) for _ in range(MAX_WAITING)) != ""


def test_text_ends_before_a_stop_string_wherever_it_is_split() -> None:
    for text, stops, whole in (
        ("one two three", ["two"], "one "),
        ("one two three", ["wo t", "three"], "one t"),
        ("one two", ["two!"], "one two"),
        ("ababac", ["abac"], "ab"),
        ("aaa", ["b", "aaaa"], "aaa"),
    ):
        for size in (1, 2, 3, 50):
            stop = StopStrings(stops)
            shown = ""
            for start in range(0, len(text), size):
                shown += stop.add(text[start : start + size])
                assert not any(one in shown for one in stops)
                if stop.stopped:
                    break
            shown += "" if stop.stopped else stop.finish()
            assert shown == whole, (text, stops, size)


def test_tokens_share_responses_but_the_first_and_the_last_never_wait() -> None:
    def shared(tokens: int, *sizes: int) -> list[Delta]:
        found, waiting = [], PendingTokens(tokens)
        for place, size in enumerate(sizes):
            ids = [10 * place + one for one in range(size)]
            end = "stop" if place + 1 == len(sizes) else ""
            waiting.add(Delta(ids, end, place, [[one, -1.0, []] for one in ids]))
            assert waiting.ends == bool(end)
            if waiting.enough:
                found.append(waiting.take())
        return found

    for tokens, sizes, wanted in (
        (1, (1, 1, 1), [1, 1, 1]),
        (3, (1, 1, 1, 1, 1, 1, 1, 1), [1, 3, 3, 1]),
        (3, (1, 2, 2, 1), [1, 4, 1]),
        (3, (0, 1, 1, 0), [1, 1]),  # an engine may end an answer without a token more
        (100, (1, 1, 1), [1, 2]),
    ):
        found = shared(tokens, *sizes)
        assert [len(one.token_ids) for one in found] == wanted, (tokens, sizes)
        assert [one.finish for one in found[:-1]] == [""] * (len(found) - 1)
        assert found[-1].finish == "stop"
        assert found[-1].cached_tokens == len(sizes) - 1
        for one in found:
            assert [each[0] for each in one.logprobs or ()] == one.token_ids
    assert Delta([1]).then(Delta([2])).logprobs is None


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
