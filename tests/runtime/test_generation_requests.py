"""What a request for generated text says: its parameters, its prompt, its way between the steps."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from generation_cases import TEMPLATE, byte_pairs, metaspace
from triptych.runtime.generation_messages import CoreChunk, Opening, Order, Place
from triptych.runtime.prompts import ChatTemplate, Prompts
from triptych.runtime.request_errors import RequestError
from triptych.runtime.sampling_parameters import DEFAULTS, FLAGS, NUMBERS, check_sampling


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
    with pytest.raises(RequestError, match="best_of` is not known"):
        check_sampling("", DEFAULTS, room=10, parameters='{"best_of": 3}')
    with pytest.raises(RequestError, match=r"must be one of the pipeline's: a, b\. Given: 'c'"):
        check_sampling('{"adapter": "c"}', DEFAULTS, room=10, adapters=["a", "b"])
    for text, said in (
        ("[1]", "must be a JSON object"),
        ("{", "must be JSON"),
        ('{"max_tokens": 0}', "must be an integer from 1 to 1000000. Given: 0"),
        ('{"max_tokens": true}', "Given: True"),
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
            "and 200 levels. Given: {'items'",
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
