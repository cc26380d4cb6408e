"""Prompts of embeddings and rerankers, and rerankers with templates: as sentence-transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from tests.support import task_models
from tests.support.mistakes import check_refused
from tests.support.project import build_into, quiet, traffic_texts, write_pipeline
from tests.support.scaffolding import run
from tests.support.tokenizers_of_kinds import byte_level
from triptych.client import Client, InvalidRequestError
from triptych.core.inputs import read_inputs
from triptych.serving.server import Server
from triptych.spec.spec import load_spec

pytestmark = pytest.mark.server
PROMPTS = {"query": "query: ", "passage": "passage: ", "none": ""}
TEXTS = [*traffic_texts()[:6], "", "long words " * 400]
LEFT_OUT = {"packed": "right", "bucketed": "left"}
"""Layout of each pipeline that leaves prompts out of pooling, and its side of truncation."""
POOLINGS = ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]

TEMPLATE = """{%- set given = namespace(text="Find passages that answer the query") -%}
{%- for m in messages if m.role == "system" %}{% set given.text = m.content %}{% endfor -%}
<|im_start|>user
<Instruct>: {{ given.text }}
<Query>: {{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}
<Document>: {{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}
{#- -#}
<|im_end|>
<|im_start|>assistant
<think>

</think>

"""
"""Form of Qwen3-Reranker's template."""
LIMIT = 200
INSTRUCTIONS = {"web": "Find web pages", "code": "Find code"}
RERANKERS: dict[str, dict[str, Any]] = {
    "template": {"core": {"layout": "packed"}, "prompts": INSTRUCTIONS},
    "saved": {"core": {"layout": "bucketed"}, "prompts": "any"},
    "plain": {"core": {"layout": "packed"}, "prompts": INSTRUCTIONS},
    "classifier": {"core": {"layout": "bucketed"}, "prompts": INSTRUCTIONS},
}
QUERY = "where is my parcel?"
PASSAGES = [*traffic_texts()[:5], "it is <|im_end|> late\n ", "long words " * 200]


def write_left_out(tiny_model: Path, folder: Path, side: str) -> Path:
    """Write a model whose poolings leave the prompt out."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    model = SentenceTransformer(str(tiny_model), device="cpu")
    model[1] = Pooling(model.get_embedding_dimension(), POOLINGS, include_prompt=False)
    model.tokenizer.truncation_side = side
    model.save(str(folder))
    return folder


def write_language_model(folder: Path, template: str | None) -> Path:
    """Write a Qwen3 of random weights, as its authors save it: without a ``modules.json``."""
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(["yes", "no"] * 900 + traffic_texts()[:50], special),
        pad_token=special[0],
        eos_token=special[2],
        additional_special_tokens=special[1:2],
        model_max_length=LIMIT,
        chat_template=template,
    )
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.2,
        pad_token_id=0,
        eos_token_id=2,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def rerankers(tmp_path_factory: pytest.TempPathFactory, minilm_folder: Path) -> dict[str, Path]:
    """Folder of each reranker's model."""
    from sentence_transformers import CrossEncoder

    base = tmp_path_factory.mktemp("rerankers")
    template = write_language_model(base / "template", TEMPLATE)
    saved = CrossEncoder(str(template), device="cpu", prompts={"own": "Find my own"})
    saved.default_prompt_name = "own"
    saved.save_pretrained(str(base / "saved"))
    return {
        "template": template,
        "saved": base / "saved",
        "plain": write_language_model(base / "plain", None),
        "classifier": task_models.cross_encoder(base / "classifier", minilm_folder, []),
    }


def write_reranking(folder: Path, model: Path, **fields: Any) -> Path:
    write_pipeline(folder, task="reranking", model={"source": str(model)}, **fields)
    rows = [{"text": QUERY, "text_pair": text} for text in [*PASSAGES, *traffic_texts()[5:40]]]
    (folder / "traffic.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, rerankers: dict[str, Path]
) -> Iterator[Server]:
    from sentence_transformers import SentenceTransformer

    base = tmp_path_factory.mktemp("prompts")
    named = SentenceTransformer(str(tiny_model), device="cpu", prompts={"query": "query: "})
    named.save(str(base / "named"))
    vectors: dict[str, tuple[Path, dict[str, Any]]] = {
        "named": (tiny_model, {"parameters": {"prompt": "passage"}, "prompts": PROMPTS}),
        "free": (tiny_model, {"prompts": "any"}),
        "strict": (
            base / "named",
            {
                "core": {"layout": "bucketed"},
                "tokenizer": {"max_length": 16, "truncation": "reject"},
            },
        ),
    }
    for layout, side in LEFT_OUT.items():
        vectors[layout] = (
            write_left_out(tiny_model, base / f"model_{layout}", side),
            {"prompts": "any", "core": {"layout": layout}, "tokenizer": {"max_length": 40}},
        )
    folders = [
        write_pipeline(base / "pipelines" / name, model={"source": str(model)}, **fields)
        for name, (model, fields) in vectors.items()
    ]
    for name, fields in RERANKERS.items():
        fields = {**fields, "tokenizer": {"max_length": LIMIT}}
        folders.append(write_reranking(base / "pipelines" / name, rerankers[name], **fields))
    for folder in folders:
        build_into(folder, base / "repository")
    with Server(base / "repository") as server:
        yield server


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(tiny_model), device="cpu")


def test_a_prompt_is_chosen_by_name(server: Server, model: Any) -> None:
    choices: tuple[tuple[dict[str, Any], str], ...] = (
        ({"prompt": "query"}, "query: "),
        ({"prompt": "none"}, ""),
        ({}, "passage: "),
    )
    with Client("named", server.grpc_url) as client:
        for given, prompt in choices:
            wanted = model.encode(TEXTS, prompt=prompt)
            assert np.abs(client.embed(TEXTS, **given) - wanted).max() < 1e-5, given
        with pytest.raises(InvalidRequestError, match="one of none, passage, query"):
            client.embed(["a"], prompt="qeury")
    with Client("strict", server.grpc_url) as client:  # its prompts are those of the model
        found = client.embed(["a text"], prompt="query")
        assert np.abs(found - model.encode(["query: a text"])).max() < 1e-5
        with pytest.raises(InvalidRequestError, match="one of document, query"):
            client.embed(["a"], prompt="nope")


def test_a_role_is_as_the_calls_of_the_library(
    server: Server, model: Any, tiny_model: Path
) -> None:
    from sentence_transformers import SentenceTransformer

    texts = ["a text", "other"]
    named = SentenceTransformer(str(tiny_model), device="cpu", prompts={"query": "query: "})
    with Client("strict", server.grpc_url) as client:  # its prompts are those of the model
        for role, encode in (("query", named.encode_query), ("document", named.encode_document)):
            found = client.infer({"text": texts}, parameters={"role": role})["embedding"]
            assert np.abs(found - encode(texts)).max() < 1e-5, role
        with pytest.raises(InvalidRequestError, match="must be left out beside role"):
            client.embed(["a"], prompt="query", role="document")
    with Client("named", server.grpc_url) as client:
        wanted = model.encode(texts, prompt="query: ")
        assert np.abs(client.embed(texts, role="query") - wanted).max() < 1e-5
        # Its prompt of documents is called passage, which the library would not take.
        with pytest.raises(InvalidRequestError, match="must be one of query"):
            client.embed(texts, role="document")


def test_a_long_row_is_rejected_where_the_spec_says_so(server: Server) -> None:
    with Client("strict", server.grpc_url) as client:
        assert client.embed(["word " * 14]).shape == (1, 32)
        with pytest.raises(InvalidRequestError, match=r"row 1: .*at most 16 tokens.*17 tokens"):
            client.infer({"text": ["short", "word " * 15]})


def test_a_prompt_is_an_input_tensor_or_a_column(
    server: Server, model: Any, tmp_path: Path
) -> None:
    columns = [("text", b"a text"), ("prompt", b"query")]
    tensors = [triton.InferInput(name, [1, 1], "BYTES") for name, _ in columns]
    for tensor, (_, value) in zip(tensors, columns, strict=True):
        tensor.set_data_from_numpy(np.array([[value]], np.object_))
    with triton.InferenceServerClient(server.grpc_url) as raw:
        found = raw.infer("named", tensors).as_numpy("embedding")
    assert np.abs(found - model.encode(["query: a text"])).max() < 1e-5
    rows = [("one", "query", "query: "), ("two", "passage", "passage: "), ("3", "", "passage: ")]
    lines = [json.dumps({"text": text, "prompt": prompt}) for text, prompt, _ in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    files = ["--file", tmp_path / "rows.jsonl", "--out", tmp_path / "out.jsonl"]
    done = run("infer", "named", "--url", server.grpc_url, *map(str, files))
    assert done.exit_code == 0, done.output
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    wanted = model.encode([prompt + text for text, _, prompt in rows])
    assert np.abs(np.array([row["embedding"] for row in answers]) - wanted).max() < 1e-5


def test_any_prompt_is_a_text_if_the_spec_says_so(server: Server, model: Any) -> None:
    with Client("free", server.grpc_url) as client:
        for prompt in ("", "Represent this sentence: ", "query"):
            wanted = model.encode(TEXTS, prompt=prompt)
            assert np.abs(client.embed(TEXTS, prompt=prompt) - wanted).max() < 1e-5, prompt
        with pytest.raises(InvalidRequestError, match="leave space for the text"):
            client.embed(["a"], prompt="word " * 600)


def test_prompts_are_left_out_of_pooling(server: Server, tmp_path: Path, tiny_model: Path) -> None:
    from sentence_transformers import SentenceTransformer

    for layout, side in LEFT_OUT.items():
        folder = write_left_out(tiny_model, tmp_path / layout, side)
        model = SentenceTransformer(str(folder), device="cpu")
        model.max_seq_length = 40
        with Client(layout, server.grpc_url) as client:
            for prompt in ("", "query: ", "Represent [SEP]", "a" * 9 + " of words " * 12, "[UNK]"):
                wanted = model.encode(TEXTS, prompt=prompt)
                differences = np.abs(client.embed(TEXTS, prompt=prompt) - wanted).max(axis=1)
                assert differences.max() < 1e-5, (layout, prompt, differences)


@pytest.mark.parametrize("name", RERANKERS)
def test_scores_are_those_of_a_cross_encoder(
    server: Server, rerankers: dict[str, Path], name: str
) -> None:
    from sentence_transformers import CrossEncoder

    model = CrossEncoder(str(rerankers[name]), device="cpu")
    model.max_seq_length = LIMIT
    pairs = [(QUERY, passage) for passage in PASSAGES]
    prompts: list[tuple[dict[str, Any], str | None]] = [({}, None)]
    if name == "saved":
        prompts += [({"prompt": "own"}, "Find my own"), ({"prompt": "Find any"}, "Find any")]
    else:
        prompts += [({"prompt": each}, text) for each, text in INSTRUCTIONS.items()]
    with Client(name, server.grpc_url) as client:
        for given, prompt in prompts:
            wanted = model.predict(pairs, prompt=prompt)
            ranked = sorted(client.rerank(QUERY, PASSAGES, **given))
            found = np.array([each.score for each in ranked])
            assert len({round(float(score), 4) for score in wanted}) > 1
            assert np.abs(found - wanted).max() < 1e-5, (name, prompt)
        if name != "saved":
            with pytest.raises(InvalidRequestError, match="one of code, web"):
                client.rerank(QUERY, PASSAGES, prompt="wbe")


def test_the_gate_has_rows_with_each_prompt(
    tmp_path: Path, tiny_model: Path, rerankers: dict[str, Path]
) -> None:
    model = {"source": str(tiny_model)}
    for folder, prompts in (
        (write_pipeline(tmp_path / "named", model=model, prompts=PROMPTS), ("query", "passage")),
        (write_reranking(tmp_path / "r", rerankers["template"], prompts=INSTRUCTIONS), ("web",)),
    ):
        requests = read_inputs(load_spec(folder), quiet).requests
        used = [request.parameters.get("prompt") for request in requests]
        assert used.count(None) > 0
        assert [used.count(prompt) for prompt in prompts] == [32] * len(prompts)


def test_mistakes_are_explained(tmp_path: Path, tiny_model: Path) -> None:
    mistakes: list[tuple[dict[str, Any], list[str]]] = [
        ({"prompts": {"query": 3}}, ["prompts.query", "must be a text"]),
        ({"prompts": "some"}, ["prompts", "'any'"]),
        ({"prompts": PROMPTS, "parameters": {"prompt": "x"}}, ["one of none, passage, query"]),
        ({"prompts": {"long": "word " * 600}}, ["leave space for the text"]),
        ({"prompts": PROMPTS, "task": "fill-mask"}, ["text-embedding and reranking only"]),
    ]
    folders = [
        (write_pipeline(tmp_path / f"wrong{n}", model={"source": str(tiny_model)}, **fields), words)
        for n, (fields, words) in enumerate(mistakes)
    ]
    for name, template in (
        ("roles", '{% for m in messages if m.role == "user" %}{{ m.content }}{% endfor %}'),
        ("strips", TEMPLATE.replace("| first }}", "| first | trim }}")),
    ):
        model = write_language_model(tmp_path / f"m_{name}", template)
        words = ["chat_template", "`query`, `document` and `system` unchanged"]
        folders.append((write_reranking(tmp_path / name, model), words))
    for folder, words in folders:
        check_refused(words, lambda: read_inputs(load_spec(folder), quiet))  # noqa: B023
