"""The pieces of text generation without a server: prompts, sampling, streamed text, the verdict."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from conftest import ROOT
from generation_cases import (
    TEMPLATE,
    TEXTS,
    byte_pairs,
    metaspace,
    write_adapter,
    write_pipeline,
    write_tiny_model,
)
from triptych.errors import UserError
from triptych.generation.adapters import WEIGHTS, read_adapter
from triptych.generation.checks import check_folder
from triptych.generation.inputs import Prompt
from triptych.generation.metrics import EVERY, LIMITS, METRICS, Answered, judge
from triptych.generation.reference import Reference
from triptych.generation.worker_gate import run_engine
from triptych.pipeline.generation_spec import load_generation_spec
from triptych.pipeline.spec import load_spec
from triptych.repository.records import GateResult
from triptych.runtime import engine_vllm
from triptych.runtime.chat_template import ChatTemplate
from triptych.runtime.engine_scripted import Engine
from triptych.runtime.faults import RequestError
from triptych.runtime.generation_engine import Delta, Load, Waiting
from triptych.runtime.generation_wire import CONTEXT_TOKENS, Chunk, Opening, Order, Place
from triptych.runtime.prompts import Prompts
from triptych.runtime.sampling_parameters import DEFAULTS, FLAGS, NUMBERS, check_sampling
from triptych.runtime.text2text_batches import next_batch
from triptych.runtime.text_stream import MOST_WAITING, StopStrings, TextStream
from triptych.tasks.metrics.generated import GENERATED, exact_match, rouge_l
from triptych.tasks.metrics.labelled import compare_labelled
from triptych.tasks.metrics.labels import LabelledRow
from triptych.tasks.metrics.outputs import Outputs


def streamed(stream: TextStream, ids: list[int], pieces: random.Random) -> list[str]:
    shown = []
    while ids:
        count = pieces.randint(1, 3)
        shown.append(stream.add(ids[:count]))
        ids = ids[count:]
    return [*shown, stream.finish()]


def test_streamed_text_is_the_whole_text_without_broken_characters() -> None:
    pieces = random.Random(7)
    for tokenizer in (byte_pairs(), metaspace()):
        for text in (*TEXTS, "  two  spaces ", "a\n\n b", "🙂🙂🙂", "x"):
            prompt = tokenizer.encode("The dog").ids
            answer = tokenizer.encode(text, add_special_tokens=False).ids
            # What comes behind the prompt, in one piece: here a first token keeps its space.
            before = tokenizer.decode(prompt)
            whole = tokenizer.decode([*prompt, *answer])[len(before) :]
            for _ in range(5):
                shown = streamed(TextStream(tokenizer, prompt[-CONTEXT_TOKENS:]), answer, pieces)
                assert "".join(shown) == whole, text
                assert not any("\ufffd" in piece for piece in shown), text


def test_bytes_that_are_no_text_are_shown_in_the_end_and_hold_nothing_up() -> None:
    tokenizer = byte_pairs()
    broken = tokenizer.encode("é", add_special_tokens=False).ids[0]
    stream = TextStream(tokenizer, [])
    assert stream.add([broken]) == ""
    assert stream.finish() == "\ufffd"
    stream = TextStream(tokenizer, [])
    assert "".join(stream.add([broken]) for _ in range(MOST_WAITING)) != ""


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


def test_sampling_parameters_are_checked_by_name_type_and_range() -> None:
    assert check_sampling("", DEFAULTS, room=10) == {**DEFAULTS, "max_tokens": 10}
    given = check_sampling('{"stop": "a", "seed": null}', {**DEFAULTS, "seed": 3}, room=500)
    assert (given["stop"], given["seed"], given["max_tokens"]) == (["a"], 3, 256)
    assert set(DEFAULTS) == {*NUMBERS, *FLAGS, "stop", "json_schema", "adapter"}
    named = check_sampling('{"adapter": "b"}', DEFAULTS, room=10, adapters=["a", "b"])
    assert named["adapter"] == "b"
    with pytest.raises(RequestError, match=r"must be one of the pipeline's: a, b\. Given: 'c'"):
        check_sampling('{"adapter": "c"}', DEFAULTS, room=10, adapters=["a", "b"])
    for text, said in (
        ("[1]", "must be a JSON object"),
        ("{", "must be JSON"),
        ('{"max_tokens": 0}', "must be an integer from 1 to 1000000. Given: 0"),
        ('{"max_tokens": true}', "Given: True"),
        ('{"max_tokens": 11}', "at most the 10 tokens that there is room for"),
        ('{"top_p": 0}', "must be a number above 0 to 1"),
        ('{"temperature": "hot"}', "must be a number from 0 to 2"),
        ('{"ignore_eos": 1}', "must be true or false. Given: 1"),
        ('{"n": 2}', "must be an integer from 1 to 1. Given: 2"),
        ('{"stop": [""]}', "of 1 to 256 characters"),
        ('{"json_schema": "object"}', "must be a JSON schema, an object of at most 32768"),
        (json.dumps({"json_schema": {"const": "a" * 40_000}}), "must be a JSON schema"),
        ('{"adapter": 1}', "must be a name of at most 64 characters"),
        ('{"adapter": "a"}', "must be left out: it has none"),
        ('{"max_token": 3}', "is not known; known are: adapter, frequency_penalty"),
    ):
        with pytest.raises(RequestError) as caught:
            check_sampling(text, DEFAULTS, room=10)
        assert said in str(caught.value), text


def test_a_prompt_has_one_beginning_and_room_for_an_answer(tmp_path: Path) -> None:
    tokenizer = byte_pairs()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    settings = {"special_tokens": special, "max_length": 64, "max_answer": None, "prefix": ""}
    prompts = Prompts(settings, tmp_path)
    plain = prompts.of_text("The dog")
    assert plain[0] == 0
    # A template that was rendered elsewhere begins like that already.
    assert prompts.of_text("<s>The dog") == plain
    chat = json.dumps([{"role": "user", "content": " Hi "}])
    assert prompts.of_messages(chat) == prompts.of_text("<s><user> Hi\n<assistant> ")
    for messages, said in (
        ("{", "must be JSON"),
        ("[]", "at least one message"),
        ('[{"role": "user"}]', "`messages[0]` must be an object with strings"),
        ('[{"role": "tool", "content": ""}]', "no such role: tool"),
        (json.dumps([{"role": "user", "content": "dog " * 99}]), "must have 1 to 63 tokens"),
    ):
        with pytest.raises(RequestError) as caught:
            prompts.of_messages(messages)
        assert said in str(caught.value), messages
    with pytest.raises(RequestError, match="the model has no chat template"):
        ChatTemplate(None, {}).render([{"role": "user", "content": "Hi"}])


def test_what_travels_between_the_steps_arrives() -> None:
    order = Order({**DEFAULTS, "stop": ["a"]}, False)
    assert Order.unpack(order.pack()) == order
    opening = Opening(True, ["ü"], [1, 2], 3)
    place = Place(3, 9)
    for chunk in (
        Chunk("k", "i", place, opening),
        Chunk("k", "i", place, None, "stop", 2, [[1, -0.5, []]]),
    ):
        assert Chunk.unpack(chunk.pack().encode()) == chunk


def test_the_scripted_engine_batches_reports_and_gives_up() -> None:
    loads: list[Load] = []
    settings = {"token_delay_ms": 1.0, "max_sequences": 1, "max_length": 10}
    sampling = {**DEFAULTS, "max_tokens": 3, "logprobs": 1}

    async def whole(answer: AsyncGenerator[Delta, None]) -> list[Delta]:
        return [delta async for delta in answer]

    async def run() -> list[Delta]:
        engine = Engine(settings, Path(), loads.append)
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
    assert loads[-1] == Load()


def test_texts_of_like_length_share_a_batch_and_none_waits_for_ever() -> None:
    assert next_batch([9, 1, 8, 2], "aaaa", most=2) == [2, 0]
    assert next_batch([5, 1, 5, 1], "abab", most=8) == [0, 2]
    assert next_batch([], [], most=2) == []
    # Short ones keep coming: a long one, or one of another kind, is among the next anyhow.
    for oldest in ((500, "a"), (5, "b")):
        waiting = [oldest, *[(5, "a")] * 40]
        chosen = next_batch([one for one, _ in waiting], [kind for _, kind in waiting], most=8)
        assert 0 in chosen
        assert len(chosen) == (8 if oldest[1] == "a" else 1)


def test_tokens_share_responses_but_the_first_and_the_last_never_wait() -> None:
    def shared(tokens: int, *sizes: int) -> list[Delta]:
        found, waiting = [], Waiting(tokens)
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


def test_mistakes_in_a_spec_are_named(tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path / "talk", tmp_path / "model")
    for override, said in (
        ("core.backend=onnxruntime", "'tensorrt_llm' or 'scripted'"),
        ("core.max_sequence=3", "Did you mean `max_sequences`?"),
        ("core.max_batched_tokens=16", "must be at least core.max_sequences"),
        ("core.token_delay_ms=-1", "greater than or equal to 0"),
        ("serving.stream_interval=0", "greater than or equal to 1"),
        ("parameters.max_tokens=0", "parameters.max_tokens must be an integer from 1"),
        ("parameters.stops=a", "parameters.stops is not known"),
        ("adapters={a/b: x}", "should match pattern"),
        ("adapters={a: {source: x, rank: 8}}", "Given: rank. Remove it"),
        ("parameters.adapter=a", "must be one of the adapters: there are none. Given: a"),
        ("serving.triton='24.01'", "serving.triton must be 24.10 or later"),
    ):
        with pytest.raises(UserError) as caught:
            load_generation_spec(folder, [override])
        assert said in caught.value.message, override
    with pytest.raises(UserError, match=r"`adapters` need core\.backend vllm"):
        load_generation_spec(folder, ["core.backend=tensorrt_llm", "adapters={a: x}"])
    with pytest.raises(UserError) as caught:
        load_spec(folder)
    assert "Given: text-generation. They can be tested, inspected" in caught.value.message


def test_an_adapter_is_a_plain_lora_of_the_models_sizes(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    sizes = {"self_attn.q_proj": (16, 16), "self_attn.v_proj": (16, 16), "mlp.down_proj": (32, 16)}
    modules = {f"model.layers.{n}.{name}": size for n in (0, 1) for name, size in sizes.items()}
    every = tuple(sizes)
    found = read_adapter("a", write_adapter(tmp_path / "a", model, modules=every), modules)
    assert (found.rank, found.scale) == (4, 2.0)
    rooted = write_adapter(tmp_path / "b", model, use_rslora=True)
    assert read_adapter("b", rooted, modules).scale == 4.0
    assert read_adapter("b", rooted, modules).sha256 != found.sha256
    other = {**modules, "model.layers.1.self_attn.v_proj": (16, 8)}
    gone = {name: size for name, size in modules.items() if not name.startswith("model.layers.1")}
    faults: tuple[tuple[dict[str, Any], dict[str, tuple[int, int]], str], ...] = (
        ({"peft_type": "IA3"}, modules, "must be an adapter of peft_type LORA. Given: IA3"),
        ({"use_dora": True, "bias": "all"}, modules, "Given: use_dora, bias. Merge it"),
        ({"init_lora_weights": "pissa"}, modules, "Given: init_lora_weights pissa"),
        ({"alpha_pattern": {"q_proj": 1}}, modules, "Given: alpha_pattern"),
        ({"r": 600}, modules, "a rank r from 1 to 512. Given: 600"),
        ({"r": 8}, modules, "lora_A of model.layers.0.self_attn.q_proj [8, 16]"),
        ({"lora_alpha": None}, modules, "a number as lora_alpha"),
        ({}, other, "lora_B of model.layers.1.self_attn.v_proj [8, 4]. Given: [16, 4]"),
        ({}, gone, "Given: model.layers.1.self_attn.q_proj. Did you mean"),
    )
    for number, (settings, known, said) in enumerate(faults):
        folder = write_adapter(tmp_path / f"bad{number}", model, **settings)
        with pytest.raises(UserError) as caught:
            read_adapter("a", folder, known)
        assert caught.value.field == "adapters.a"
        assert said in caught.value.message, caught.value.message
    tensor = np.zeros((4, 16), np.float32)
    for key, said in (
        ("base_model.model.lm_head.weight", "and no other tensors"),
        (f"base_model.model.{next(iter(modules))}.lora_A.weight", "Given: one of them for"),
    ):
        save_file({key: tensor}, tmp_path / "b" / WEIGHTS)
        with pytest.raises(UserError, match=said):
            read_adapter("b", tmp_path / "b", modules)
    (tmp_path / "b" / WEIGHTS).write_bytes(b"pickled")
    with pytest.raises(UserError, match="must have safetensors"):
        read_adapter("b", tmp_path / "b", modules)
    (tmp_path / "b" / WEIGHTS).unlink()
    with pytest.raises(UserError, match=f"b: no {WEIGHTS}. Name the folder"):
        read_adapter("b", tmp_path / "b", modules)


def test_vllm_has_room_for_all_adapters_and_a_spare_place_on_a_processor() -> None:
    assert engine_vllm.room_for_adapters({}, spare=True) == {}
    room = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 32}
    assert engine_vllm.room_for_adapters({"a": 8, "b": 17}, spare=False) == room
    assert engine_vllm.room_for_adapters({"a": 8, "b": 17}, spare=True) == {**room, "max_loras": 3}


def test_a_folder_is_checked_without_a_model(tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path / "talk", tmp_path / "model")
    assert [check.name for check in check_folder(folder)] == ["spec", "traffic"]
    (folder / "hooks.py").touch()
    (folder / "eval.jsonl").write_text('{"text_input": "a", "answers": ["b"]}')
    with (folder / "traffic.jsonl").open("a") as file:
        file.write('\n{"messages": [{"role": "user"}]}')
    found = {check.name: check for check in check_folder(folder)}
    assert (found["eval"].note, found["hooks"].severity) == ("1 rows", "warning")
    assert "traffic.jsonl:4: `messages[0]` must be" in found["messages"].note
    for row in ("{}", '{"text_input": "a"}', '{"text_input": "a", "answers": []}'):
        (folder / "eval.jsonl").write_text(row)
        with pytest.raises(UserError, match=r"eval\.jsonl:1"):
            check_folder(folder)


def test_the_reference_states_the_limits() -> None:
    text = (ROOT / "pipelines/reference.md").read_text(encoding="utf-8")
    for metric in METRICS:
        (row,) = re.findall(rf"(?m)^\| `{metric.name}` \|.*$", text)
        stated = [cell.strip() for cell in row.split("|")[3:-1]]
        limits = [{**EVERY, **limits}.get(metric.name) for limits in LIMITS.values()]
        assert [float(cell) if cell else None for cell in stated] == limits, metric.name


def test_texts_are_scored_as_published() -> None:
    # Lin 2004, section 3.1: with beta 1, ROUGE-L of the two candidates is 3/4 and 2/4.
    reference = "police killed the gunman"
    for candidate, score in (
        ("police kill the gunman", 0.75),
        ("the gunman kill police", 0.5),
        ("Police, KILLED the gunman!", 1.0),
        ("", 0.0),
        ("nobody", 0.0),
    ):
        assert rouge_l(candidate, reference) == pytest.approx(score), candidate
    assert rouge_l("!", "?") == 1.0
    for got, wanted, score in (
        (" The answer is: Paris. ", "answer is paris", 1.0),
        ("Paris is", "is Paris", 0.0),
        ("the", "a", 1.0),
        ("?", "!", 0.0),
        ("", " ", 1.0),
    ):
        assert exact_match(got, wanted) == score, (got, wanted)


def test_a_worse_engine_fails_on_right_answers_and_chance_does_not() -> None:
    rows = [LabelledRow(n, ({"text_input": "a"},), {}, (f"answer {n}", "x")) for n in range(60)]
    right = [{"text_output": np.array([f"answer {n}"])} for n in range(60)]
    wrong: list[Outputs] = [{"text_output": np.array(["none"])}] * 12
    one: list[Outputs] = [{"text_output": np.array(["none"])}]
    for metric in GENERATED.values():
        worse = compare_labelled(metric, rows, [*wrong, *right[12:]], right, max_drop=0.05)
        assert metric.name in worse.failure
        assert worse.candidate == pytest.approx(0.8)
        for got in (right, [*one, *right[1:]]):
            assert not compare_labelled(metric, rows, got, right, max_drop=0).failure
        judged = verdict_of(*good_answers(), labelled=worse)
        assert judged.failures == (worse.failure,)


def good_answers() -> tuple[Reference, Answered]:
    """A reference, and what answers like it."""
    ids = tuple(byte_pairs().encode("The dog", add_special_tokens=False).ids)
    likely = (-0.5,) * len(ids)
    wanted = Reference((0, 40, 41), ids, "The dog", (2.0,) * len(ids), likely)
    return wanted, Answered(
        prompts=[(0, 40, 41)],
        alone=[ids],
        together=[[ids]],
        forced=[likely],
        streamed=["The dog"],
        whole=["The dog"],
    )


def verdict_of(
    wanted: Reference, found: Answered, precision: str = "fp32", **more: Any
) -> GateResult:
    prompt = Prompt({"messages": '[{"role": "user", "content": "Hi"}]'}, (0, 40, 41))
    return judge(precision, [prompt], [wanted], found, byte_pairs(), **more)


def test_the_verdict_passes_what_is_right_and_names_each_fault() -> None:
    wanted, good = good_answers()
    assert verdict_of(wanted, good).passed
    other = (*wanted.ids[:-1], 5)
    count = len(other)
    numbers = {"logprob_difference", "p99_logprob_difference", "perplexity_ratio"}
    parted = {"exact_prefix", "margin_at_difference", "invariance"}
    faults: tuple[tuple[dict[str, Any], set[str]], ...] = (
        ({"prompts": [(0, 0, 40, 41)]}, {"prompt_agreement"}),
        ({"streamed": ["The  dog"]}, {"stream_agreement"}),
        ({"together": [good.alone, [other]]}, {"invariance"}),
        ({"alone": [other]}, parted),
        # No answer at all: nothing is known of log-probabilities.
        ({"alone": [()], "forced": [()]}, parted | numbers),
        ({"forced": [(-0.52,) * count]}, numbers),
        ({"forced": [(float("nan"),) * count]}, numbers),
    )
    for changed, metrics in faults:
        gate = verdict_of(wanted, replace(good, **changed))
        assert {one.metric for one in gate.verdicts if not one.passed} == metrics, changed
        assert not gate.passed
        assert len(gate.failures) == len(metrics)
    # Rounding may change a token where the reference was not sure, and only there.
    parting = replace(good, alone=[other])
    assert verdict_of(replace(wanted, margins=(0.04,) * count), parting, "bf16").passed
    assert not verdict_of(wanted, parting, "bf16").passed


def test_each_adapter_is_judged_by_itself() -> None:
    """One that differs does not hide among the answers of the model and of others."""
    wanted, good = good_answers()
    one = Prompt({"text_input": "Hi"}, (0, 40, 41))
    prompts = [one, one, replace(one, adapter="a"), replace(one, adapter="b")]
    doubled = {
        name: [*getattr(good, name)] * 4
        for name in ("prompts", "alone", "forced", "streamed", "whole")
    }
    found = Answered(**doubled, together=[[*good.alone] * 4])
    gate = judge("bf16", prompts, [wanted] * 4, found, byte_pairs())
    assert gate.passed
    assert len(gate.verdicts) == len(METRICS) + 2 * (len(METRICS) - len(EVERY))
    worse = (-0.58,) * len(wanted.ids)
    gate = judge(
        "bf16",
        prompts,
        [wanted] * 4,
        replace(found, forced=[*found.forced[:3], worse]),
        byte_pairs(),
    )
    failed = [verdict.metric for verdict in gate.verdicts if not verdict.passed]
    assert failed == ["logprob_difference[b]", "perplexity_ratio[b]"]
    assert "mean difference of log-probabilities (adapter b): 0.08" in gate.failures[0]


class FakeVllm(Engine):
    """In place of vLLM: the scripted engine; a token is as likely as its adapter's name is long."""

    async def score(
        self, key: str, prompt: list[int], answer: list[int], adapter: str
    ) -> list[float]:
        return [float(len(adapter))] * len(answer)


def test_the_gate_asks_each_prompt_of_its_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_vllm, "Engine", FakeVllm)
    order = {
        "engine": "engine_vllm",
        "weights": "",
        "settings": {"token_delay_ms": 0.0, "max_sequences": 4, "max_length": 10},
        "prompts": [[7, 8, 9], [7, 8, 9], [5, 6]],
        "adapters": ["", "sql", "sql"],
        "wanted": [[7], [9, 8], [6]],
        "max_tokens": [3, 2, 3],
        "labelled": [[[1, 2], 2, ""], [[1, 2], 2, "sql"]],
    }
    found = asyncio.run(run_engine(order))
    assert found["alone"] == found["together"] == [[7, 8, 9], [9, 8], [6, 5]]
    assert found["forced"] == [[0.0], [3.0, 3.0], [3.0]]
    assert found["labelled"] == [[1, 2], [2, 1]]
