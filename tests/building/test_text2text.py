"""Summarizing and translating: random T5, BART and Marian, as transformers has them, and served."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tests.support.builds import build
from tests.support.checkpoint_files import change
from tests.support.demo_pages import ask, open_demo
from tests.support.generation_cases import Streams, responses_of
from tests.support.generation_served import wait_until
from tests.support.mistakes import check_refused
from tests.support.project import quiet
from tests.support.text2text_cases import TEXTS, write_model, write_pipeline
from triptych.building.generation.gate import check_generation
from triptych.building.generation.live import verify_generation
from triptych.building.generation.reference import reference_answers
from triptych.building.generation.text2text import Text2TextInputs, read_text2text, without_advice
from triptych.core.gate.cached import GateFailure
from triptych.core.gate.verify import LiveOptions, describe_verification
from triptych.interface.cli.plan_text import describe_text2text
from triptych.repository.records import GateResult
from triptych.runtime.prompts import PIECES_FILE, SourcePieces
from triptych.serving.endpoint import Endpoint
from triptych.serving.server import Server
from triptych.spec.generation_fields import load_text2text_spec

pytestmark = pytest.mark.server
CORES: dict[str, dict[str, object]] = {
    "t5": {"max_num_seqs": 2},
    "bart": {"num_beams": 3, "min_new_tokens": 30},  # more than the gate asks for
    "marian": {"no_repeat_ngram_size": 2},
}
LABELED = "marian"


def write_labels(inputs: Text2TextInputs) -> None:
    """``eval.jsonl``: half of the texts with what the original answers, half with another word."""
    answers = reference_answers(inputs, inputs.prompts, quiet, most=inputs.spec.core.max_new_tokens)
    rows = [
        {**prompt.sent, "answers": [one.text if place % 2 else "another"]}
        for place, (prompt, one) in enumerate(zip(inputs.prompts, answers, strict=True))
    ]
    (inputs.spec.folder / "eval.jsonl").write_text("\n".join(map(json.dumps, rows)))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built: so fp32 is the reference token by token, alone, among others, and streamed."""
    base = tmp_path_factory.mktemp("text2text")
    for kind, core in CORES.items():
        folder = write_pipeline(base / kind, write_model(kind, base / "models" / kind), **core)
        inputs = read_text2text(load_text2text_spec(folder), quiet)
        if kind == LABELED:
            write_labels(inputs)
        built = build(inputs, base / "repository", quiet)
        assert built.gate is not None
        assert (built.gate.labeled is not None) == (kind == LABELED)
        measured = {verdict.metric: verdict.value for verdict in built.gate.verdicts}
        assert measured["exact_prefix"] == measured["prompt_agreement"] == 1.0, kind
    return base / "repository"


def test_what_was_built_is_in_order(repository: Path) -> None:
    """`test_kinds` has what holds of every kind."""
    lock = json.loads((repository / "bart/triptych.lock.json").read_bytes())
    assert set(lock["versions"]) >= {"ctranslate2", "transformers"}
    inputs = read_text2text(load_text2text_spec(repository.parent / "t5"), quiet)
    described = describe_text2text(inputs)
    assert described["core"]["answers"] == "1 beam; streamed token by token"
    assert "seed" not in described["sampling_parameters"]


def test_answers_stream_and_are_the_same_alone_and_together(server: Server) -> None:
    for kind in CORES:
        streams = Streams(server.grpc_url, kind)
        alone = [streams.ask(text_input=text) for text in TEXTS]
        with ThreadPoolExecutor(len(TEXTS)) as pool:
            asked = [pool.submit(streams.ask, text_input=text, stream=False) for text in TEXTS]
            whole = [one.result() for one in asked]
        assert [(one.text, one.ids) for one in alone] == [(one.text, one.ids) for one in whole]
        assert not any(one.error for one in alone)
        assert all(one.finish in ("stop", "length") for one in alone)
        # Several beams have no answer before the search has ended.
        pieces = [len(one.chunks) > 1 or len(one.ids) < 2 for one in alone]
        assert all(pieces) if kind != "bart" else {len(one.chunks) for one in alone} == {1}
        streams.close()


def test_marians_ids_and_texts_are_its_own_tokenizers(repository: Path) -> None:
    """It has no fast form: pieces of sentencepiece, a vocabulary that lacks some, two languages."""
    from transformers import MarianTokenizer

    with without_advice():
        original = MarianTokenizer.from_pretrained(repository.parent / "models/marian")
    steps = [repository / f"marian_{step}/1" for step in ("preprocess", "postprocess")]
    finding, decoding = (Tokenizer.from_file(str(step / "tokenizer.json")) for step in steps)
    pieces = SourcePieces(finding, steps[0] / PIECES_FILE)
    spaces, marks = ["  ", "\u3000", "\t\n", "\u2581"], [">>fra<<", ">>x<<", "<<", "</s>", "<unk>"]
    letters = [*"adehloTÜß3(\u65e5\u00b2", "e\u0301", "\U0001f642", "\u200d", "\0", *spaces, *marks]
    draw = random.Random(7)
    texts = ["".join(draw.choices(letters, k=draw.randint(1, 24))) for _ in range(500)]
    for text in [*TEXTS, *(f">>fra<<{text}" for text in texts), *texts]:
        assert pieces.encode(text) == original(text)["input_ids"], text
    for _ in range(500):
        ids = draw.choices(range(len(original)), k=draw.randint(0, 9))
        text = decoding.decode(ids, skip_special_tokens=True)
        assert text == original.decode(ids, skip_special_tokens=True), ids


def test_a_request_at_fault_is_refused_alone(server: Server) -> None:
    streams = Streams(server.grpc_url, "t5")
    bad: tuple[tuple[dict[str, object], str], ...] = (
        ({"text_input": "dog " * 600}, "must have 1 to 128 tokens. Given"),
        ({"text_input": "a", "sampling_parameters": {"max_tokens": 41}}, "at most 40, the number"),
        ({"text_input": "a", "sampling_parameters": {"seed": 1}}, "no such parameter"),
        ({"messages": [{"role": "user", "content": "b"}]}, "models with a chat template"),
    )
    with ThreadPoolExecutor(4) as pool:
        good = [pool.submit(streams.ask, text_input=text) for text in TEXTS]
        for values, said in bad:
            assert said in streams.ask(**values).error, values
        assert not any(one.result().error for one in good)
    short = streams.ask(text_input=TEXTS[0], sampling_parameters={"max_tokens": 3, "logprobs": 0})
    assert (len(short.ids), short.finish, len(short.logprobs)) == (3, "length", 3)
    sampled = streams.ask(text_input=TEXTS[0], sampling_parameters={"temperature": 2.0})
    assert sampled.ids
    call = streams.open({"text_input": TEXTS[0]})
    next(responses_of(call))
    call.cancel()
    wait_until(server, "t5", running=0, waiting=0)
    streams.close()


def test_it_is_held_to_its_gate_where_it_is_served(server: Server, repository: Path) -> None:
    def verified(kind: str, *overrides: str) -> GateResult:
        inputs = read_text2text(load_text2text_spec(repository.parent / kind, overrides), quiet)
        options = LiveOptions(
            repository, nullcontext(Endpoint(server.grpc_url)), quiet, clients=4, timeout_s=120.0
        )
        return verify_generation(inputs, options)

    for kind in CORES:
        found = verified(kind)
        assert found.passed, [line for line, _ in describe_verification(found)]
        figures = {verdict.metric: verdict.value for verdict in found.verdicts}
        assert figures["exact_prefix"] == figures["invariance"] == 1.0
        # Of a search that chooses among beams, or may not repeat itself, the server has no such.
        assert ("logprob_difference" in figures) == (kind == "t5")
        assert (found.labeled is not None) == (kind == LABELED)
    assert found.labeled is not None
    assert 0 < found.labeled.candidate < 1
    # Not what is served: another prefix.
    other = verified("t5", "prefix=dog ")
    assert {"prompt_agreement", "exact_prefix"} <= {
        verdict.metric for verdict in other.verdicts if not verdict.passed
    }


def test_a_page_answers_each_text_for_itself(server: Server, repository: Path) -> None:
    folder = repository.parent / "t5"
    spec = load_text2text_spec(folder)
    with open_demo(spec, folder, repository, server.grpc_url) as page:
        _, tokens = ask(page, TEXTS[1], 7, "")
    prompt = len(read_text2text(spec, quiet).prompts[1].ids)
    assert tokens.startswith(f"{prompt} prompt tokens, 7 tokens (length); first token after ")


def test_models_in_the_manner_of_t5_pass_their_gate(tmp_path: Path) -> None:
    """Logits that are scaled where the model does not scale them choose the same greedy tokens."""
    for kind in ("flan", "mt5"):
        folder = write_pipeline(tmp_path / kind, write_model(kind, tmp_path / f"model-{kind}"))
        inputs = read_text2text(load_text2text_spec(folder), quiet)
        assert check_generation(inputs, quiet).passed, kind


def test_an_adapter_beside_the_weights_is_refused(tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path / "sum", write_model("t5", tmp_path / "model"))
    name, file = "decoder.block.0.layer.0.SelfAttention.q.lora_A.weight", "model.safetensors"
    weights = load_file(tmp_path / "model" / file)
    weights[name] = weights["shared.weight"][:4].clone()
    save_file(weights, tmp_path / "model" / file, metadata={"format": "pt"})
    inputs = read_text2text(load_text2text_spec(folder), quiet)
    check_refused(["Merge the adapter", name], check_generation, inputs, quiet)


def test_models_and_settings_that_will_not_do_are_named(tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path / "sum", write_model("t5", tmp_path / "model"))
    for override, said in (
        ("core.num_beams=0", "at least 1"),
        ("core.precision=fp8", "'fp32' or 'int8'"),
        ("core.kv_cache.memory_mib=4", "core.kv_cache"),
    ):
        check_refused(said, load_text2text_spec, folder, [override])
    too_long = load_text2text_spec(folder, ["core.max_length=129"])
    check_refused("the model's own limit of 128", read_text2text, too_long, quiet)
    search = tmp_path / "model/generation_config.json"
    own = json.loads(search.read_bytes())
    for changed in ({"repetition_penalty": 1.3}, {"decoder_start_token_id": 5}):
        search.write_text(json.dumps({**own, **changed}))
        words = f"no {next(iter(changed))} in its generation_config"
        check_refused(words, read_text2text, load_text2text_spec(folder), quiet)
    search.write_text(json.dumps({**own, "max_length": 30, "do_sample": True}))
    told: list[str] = []
    for parts in (["has do_sample"], ["ends an answer after 29 tokens", "has do_sample"]):
        told.clear()
        spec = load_text2text_spec(folder)
        read_text2text(spec, lambda stage, line: told.extend([line] * (stage == "WARNING")))
        assert [part in line for part, line in zip(parts, told, strict=True)] == [True] * len(parts)
        change(folder / "pipeline.yaml", core={"threads": 1})  # no max_new_tokens
    config = json.loads((tmp_path / "model/config.json").read_bytes())
    config["architectures"] = ["M2M100ForConditionalGeneration"]
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    words = "an encoder-decoder model of a supported class"
    check_refused(words, read_text2text, load_text2text_spec(folder), quiet)


def test_a_search_ends_as_the_model_asks_or_the_difference_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference is what transformers answers with the model's own early_stopping."""
    monkeypatch.setattr("tests.support.text2text_cases.END_BIAS", 5.0)
    model = write_model("bart", tmp_path / "model")
    folder = write_pipeline(tmp_path / "bart", model)
    draw = random.Random(3)
    words = " ".join(TEXTS).split()
    texts = [" ".join(draw.choices(words, k=draw.randint(1, 12))) for _ in range(24)]
    rows = [json.dumps({"text_input": text}) for text in texts]
    (folder / "traffic.jsonl").write_text("\n".join(rows))
    lines: list[str] = []
    for beams, early, told in ((1, False, 0), (3, False, 1), (3, True, 0), (3, "never", 0)):
        lines.clear()
        own = {"early_stopping": early, "forced_bos_token_id": None}
        change(model / "generation_config.json", **own)
        spec = load_text2text_spec(folder, [f"core.num_beams={beams}"])
        inputs = read_text2text(spec, lambda stage, line: lines.append(line))
        assert sum("early_stopping" in line for line in lines) == told, (beams, early)
        assert ("search" in describe_text2text(inputs)["core"]) == bool(told)
        with pytest.raises(GateFailure, match="never or true") if told else nullcontext():
            gate = check_generation(inputs, quiet)
            found = {verdict.metric: verdict.value for verdict in gate.verdicts}
            assert found["exact_prefix"] == 1.0, (beams, early)
    change(model / "generation_config.json", bad_words_ids=[[5, 6]])
    check_refused("must have no bad_words_ids", read_text2text, spec, quiet)
