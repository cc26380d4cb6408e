"""Requests for generated text and their answers, without a model: prompts, streams, batches."""

import asyncio
import importlib
import json
import random
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.support.generation_cases import TEMPLATE, TEXTS, byte_pairs, metaspace
from triptych.runtime import engine_vllm
from triptych.runtime.engine_ctranslate2 import next_batch
from triptych.runtime.engine_queue import EngineQueue
from triptych.runtime.generation_messages import (
    CONTEXT_TOKENS,
    CoreChunk,
    Delta,
    Opening,
    Order,
    PendingTokens,
    Place,
)
from triptych.runtime.prompts import ChatTemplate, Prompts
from triptych.runtime.request_errors import RequestError
from triptych.runtime.sampling_parameters import DEFAULTS, FLAGS, NUMBERS, check_sampling
from triptych.runtime.text_stream import MAX_WAITING, StopStrings, TextStream


def test_sampling_parameters_are_checked_by_name_type_and_range() -> None:
    assert check_sampling("", DEFAULTS, room=10) == {**DEFAULTS, "max_tokens": 10}
    given = check_sampling('{"stop": "a", "seed": null}', {**DEFAULTS, "seed": 3}, room=500)
    assert (given["stop"], given["seed"], given["max_tokens"]) == (["a"], 3, 256)
    assert set(DEFAULTS) == {*NUMBERS, *FLAGS, "stop", "json_schema", "adapter"}
    named = check_sampling('{"adapter": "b"}', DEFAULTS, room=10, adapters=["a", "b"])
    assert named["adapter"] == "b"
    assert check_sampling('{"priority": 3}', DEFAULTS, room=10, levels=3)["priority"] == 3
    with pytest.raises(RequestError, match=r"`sampling_parameters: priority` must be at most 3"):
        check_sampling('{"priority": 4}', DEFAULTS, room=10, levels=3)
    # Triton's own parameters, as vLLM's backend takes them; what is for others is left alone.
    beside = '{"max_tokens": 3, "top_k": 4, "triton_enable_empty_final_response": true, "x-a": ""}'
    given = check_sampling('{"top_k": 5}', DEFAULTS, room=10, parameters=beside)
    assert (given["max_tokens"], given["top_k"]) == (3, 5)
    # As its backend takes them from genai-perf: numbers and flags as texts.
    texts = '{"max_tokens": "7", "temperature": "0.5", "ignore_eos": "True", "seed": "1e999"}'
    with pytest.raises(RequestError, match="seed` must be an integer"):
        check_sampling(texts, DEFAULTS, room=10)
    given = check_sampling(texts.replace("1e999", "3"), DEFAULTS, room=10)
    read = [given[name] for name in ("max_tokens", "temperature", "ignore_eos", "seed")]
    assert read == [7, 0.5, True, 3]
    assert list(map(type, read)) == [int, float, bool, int]
    with pytest.raises(RequestError, match="best_of` is not known"):
        check_sampling("", DEFAULTS, room=10, parameters='{"best_of": 3}')
    with pytest.raises(RequestError, match=r"one of the pipeline's: a, b\. Given: .c"):
        check_sampling('{"adapter": "c"}', DEFAULTS, room=10, adapters=["a", "b"])
    for text, said in (
        ("[1]", "must be a JSON object"),
        ("{", "must be JSON"),
        ('{"max_tokens": 0}', "must be an integer from 1 to 1000000. Given: 0"),
        ('{"max_tokens": true}', "Given: true"),
        ('{"max_tokens": 11}', "must be at most 10, the number of tokens that fit"),
        ('{"top_p": 0}', "must be a number above 0 to 1"),
        ('{"temperature": "hot"}', "must be a number from 0 to 2"),
        ('{"ignore_eos": 1}', "must be true or false. Given: 1"),
        ('{"n": 2}', "must be an integer from 1 to 1. Given: 2"),
        ('{"stop": [""]}', "of 1 to 256 characters"),
        ('{"json_schema": "object"}', "must be a JSON schema, an object of at most 32768"),
        (json.dumps({"json_schema": {"const": "a" * 40_000}}), "must be a JSON schema"),
        (
            '{"json_schema": ' + '{"items":' * 200 + "{}" + "}" * 201,
            'and 200 levels. Given: {"items"',
        ),
        ('{"adapter": 1}', "must be a name of at most 64 characters"),
        ('{"adapter": "a"}', "must be left out, because the pipeline has no adapters"),
        ('{"priority": 1}', "must be left out, because the pipeline has no priority levels"),
        ('{"max_token": 3}', "is not known; known parameters: adapter, frequency_penalty"),
    ):
        with pytest.raises(RequestError) as caught:
            check_sampling(text, DEFAULTS, room=10)
        assert said in str(caught.value), text


def prompts_of(tokenizer: Tokenizer, folder: Path, **changes: object) -> Prompts:
    """What preprocess reads of a model with this tokenizer and the template of the tests."""
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    settings = {
        "special_tokens": {"bos_token": "<s>", "eos_token": "</s>"},
        "max_length": 64,
        "max_answer": None,
        "prefix": "",
        "vocabulary": 300,
        "message_special_tokens": "text",
    }
    return Prompts({**settings, **changes}, folder)


def test_a_prompt_has_one_beginning_and_room_for_an_answer(tmp_path: Path) -> None:
    tokenizer = byte_pairs()
    prompts = prompts_of(tokenizer, tmp_path)
    plain = prompts.of_text("The dog")
    assert plain[0] == 0
    # A template that was rendered elsewhere begins like that already.
    assert prompts.of_text("<s>The dog") == plain
    chat = json.dumps([{"role": "user", "content": " Hi "}])
    assert prompts.of_messages(chat) == prompts.of_text("<s><user> Hi\n<assistant> ")
    parts = [{"type": "text", "text": " Hi"}, {"type": "text", "text": "you "}]
    in_parts = prompts.of_messages(json.dumps([{"role": "user", "content": parts}]))
    assert in_parts == prompts.of_text("<s><user> Hi\nyou\n<assistant> ")
    picture = [{"role": "user", "content": [parts[0], {"type": "image_url", "image_url": {}}]}]
    for messages, said in (
        (json.dumps(picture), "`messages[0].content[1]` must be {"),
        ('[{"role": "user", "content": null}]', "`messages[0]` must be an object with strings"),
        ("{", "must be JSON"),
        ("[]", "at least one message"),
        ('[{"role": "user"}]', "`messages[0]` must be an object with strings"),
        ('[{"role": "critic", "content": ""}]', "no such role: critic"),
        ('[{"role": "' + "x" * 999 + '", "content": ""}]', f"role: {'x' * 186}. Check"),
        ('{"messages": [{"role": "user", "content": ""}], "tools": {}}', "`tools` must be a list"),
        ('{"tools": []}', "at least one message"),
        (json.dumps([{"role": "user", "content": "dog " * 99}]), "must have 1 to 63 tokens"),
        ('[{"role": "user", "content": "\\ud800"}]', "without lone surrogates. Given: '\\ud800'"),
    ):
        with pytest.raises(RequestError) as caught:
            prompts.of_messages(messages)
        assert said in str(caught.value), messages
    # What cannot fit is not tokenized first; what can is.
    widest = max(tokenizer.get_vocab(), key=len).replace("Ġ", " ")
    assert len(prompts.of_text(widest * 62)) == 63
    with pytest.raises(RequestError, match=f"a token has at most {len(widest)}"):
        prompts.of_text(widest * 63 + " ")
    # Many a tokenizer was given tokens that the weights were not: vLLM reads on behind them.
    narrow = prompts_of(tokenizer, tmp_path, vocabulary=max(plain))
    with pytest.raises(RequestError, match="has a token of the tokenizer that the model does not"):
        narrow.of_text("The dog")
    tools = [{"type": "function", "function": {"name": "a</s>"}}]
    with_tools = prompts_of(tokenizer, tmp_path, max_length=256).of_messages(
        json.dumps({"messages": json.loads(chat), "tools": tools})
    )
    text = tokenizer.decode(with_tools, skip_special_tokens=False)
    assert text.startswith(f"<s>{json.dumps(tools)}")
    assert 1 not in with_tools  # a special token in a tool is text
    for source in ("<tool_call>", "{{ tools }}", "{{ tools }}<tool_call><function=a>"):
        with pytest.raises(RequestError, match="whose chat template has tools"):
            ChatTemplate(source, {}).render([], tools)
    with pytest.raises(RequestError, match=r"template accepts\. Given: TypeError: "):
        ChatTemplate("{{ messages[0].name + ':' }}", {}).render([{"name": 1}])  # type: ignore[dict-item]
    with pytest.raises(RequestError, match="only supported for models with a chat template"):
        ChatTemplate(None, {}).render([{"role": "user", "content": "Hi"}])


def test_developers_are_the_system_for_a_template_that_does_not_know_them() -> None:
    messages = [{"role": "developer", "content": "Hi"}]
    role = "{{ messages[0].role }}"
    assert ChatTemplate(role, {}).render(messages) == "system"
    assert ChatTemplate(role + "{# developer #}", {}).render(messages) == "developer"
    assert messages[0]["role"] == "developer"


def test_special_tokens_in_messages_are_texts(tmp_path: Path) -> None:
    tokenizer = byte_pairs()
    prompts = prompts_of(tokenizer, tmp_path)
    tokens = prompts_of(tokenizer, tmp_path, message_special_tokens="token")
    control = {tokenizer.token_to_id("<s>"), tokenizer.token_to_id("</s>")}

    def ids(maker: Prompts, content: str) -> list[int]:
        return maker.of_messages(json.dumps([{"role": "user", "content": content}]))

    for content in ("a</s>b", "</s>", "<s></s><s>", "<</s>/s>", "\ue0000\ue001 </s>", "\ue000"):
        found = ids(prompts, content)
        assert sum(token in control for token in found) == 1, content  # the template's own
        assert f"<user> {content}\n" in tokenizer.decode(found, skip_special_tokens=False)
    assert ids(tokens, "a</s>b") == tokens.of_text("<s><user> a</s>b\n<assistant> ")
    assert tokenizer.token_to_id("</s>") in ids(tokens, "a</s>b")
    assert ids(prompts, "The dog") == ids(tokens, "The dog")


def test_special_tokens_as_texts_make_no_space_and_no_token(tmp_path: Path) -> None:
    """The pieces are those of a tokenizer without the token, in the manner of sentencepiece."""
    pieces = [(character, -2.0) for character in sorted({*TEMPLATE, *"\u2581abusermistant<>/"})]
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *pieces], 0))
    for name, tokenizer in (("pairs", metaspace()), ("unigram", unigram)):
        for scheme in ("always", "first", "never"):
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
            tokenizer.add_special_tokens(["<s>", "</s>"])
            without = Tokenizer.from_str(tokenizer.to_str().replace('"</s>"', '"no such text"'))
            folder = tmp_path / name / scheme
            folder.mkdir(parents=True)
            prompts = prompts_of(tokenizer, folder, max_length=999, vocabulary=999)
            for content in ("a</s>b", "</s> a", "a </s></s>", "<s>"):
                sent = json.dumps([{"role": "user", "content": content}])
                found = prompts.of_messages(sent)
                text = f"<user> {content}\n<assistant> "
                if "<s>" not in content:
                    wanted = without.encode(f"<s>{text}", add_special_tokens=False).ids
                    assert found == wanted, (name, scheme, content)
                tokens = [tokenizer.id_to_token(number) for number in found]
                assert tokens.count("<s>") == 1, (name, scheme, content)
                assert "</s>" not in tokens, (name, scheme, content)


def test_what_travels_between_the_steps_arrives() -> None:
    order = Order({**DEFAULTS, "stop": ["a"]}, False)
    assert Order.unpack(order.pack()) == order
    opening = Opening(True, ["ü"], [1, 2], 3)
    place = Place(3, 9)
    for chunk in (
        CoreChunk("k", "i", place, opening),
        CoreChunk("k", "i", place, None, "stop", 2, [[1, -0.5, []]]),
    ):
        assert CoreChunk.unpack(chunk.pack().encode()) == chunk


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
                stream, shown, left = TextStream(tokenizer, prompt[-CONTEXT_TOKENS:]), [], answer
                while left:
                    count = pieces.randint(1, most)
                    shown.append(stream.add(left[:count]))
                    left = left[count:]
                shown.append(stream.finish())
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


class SlowToEnd:
    """An engine that gives no token, and takes a while to end a request."""

    ended = 0

    async def generate(self, *_: object) -> AsyncGenerator[Delta, None]:
        try:
            await asyncio.Event().wait()
            yield Delta([])
        finally:
            await asyncio.sleep(0.02)
            self.ended += 1


def test_a_request_that_is_canceled_twice_ends_once_and_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("triptych.runtime.engine", "triton_python_backend_utils"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    module: Any = importlib.import_module("triptych.runtime.generation_core")
    sent: list[dict[str, Any]] = []

    async def cancel_twice() -> SlowToEnd:
        core = object.__new__(module.TritonPythonModel)
        engine = SlowToEnd()
        vars(core).update(
            _loop=asyncio.get_running_loop(), _queue=EngineQueue(1), _engine=engine, _death=None,
            _tasks={}, _streams={}, _keys={}, _early={}, _outbox=SimpleQueue(), _unsettled=0,
            _in_flight=SimpleNamespace(acknowledged=lambda: 1, wait=lambda *_: None),
            _metrics=SimpleNamespace(count_end=lambda _: None),
            _send=lambda _, **chunk: sent.append(chunk),
        )  # fmt: skip
        stream = module._RequestStream(None, Opening(True, [], [], 1), "")
        core._streams[stream.key] = stream
        core._begin(stream, [1], Order({"priority": None}, True))
        task = core._tasks[stream.key]
        await asyncio.sleep(0.01)
        for _ in range(2):
            core._cancel(stream.key)
            await asyncio.sleep(0.01)
        await task
        return engine

    assert asyncio.run(cancel_twice()).ended == 1
    assert sent == [{"finish": "cancelled"}]
