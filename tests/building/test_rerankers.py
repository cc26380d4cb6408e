"""Rerankers that generate text, and prompts of pairs, against `CrossEncoder`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import task_models
from conftest import build_into, traffic_texts, write_pipeline
from mistakes import check_refused
from small_tokenizers import byte_level
from triptych.client import Client, InvalidRequestError
from triptych.core.inputs import read_inputs
from triptych.serving.server import Server
from triptych.spec.spec import load_spec

pytestmark = pytest.mark.server

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
PROMPTS = {"web": "Find web pages", "code": "Find code"}
PIPELINES: dict[str, dict[str, Any]] = {
    "template": {"core": {"layout": "packed"}, "prompts": PROMPTS},
    "saved": {"core": {"layout": "bucketed"}, "prompts": "any"},
    "plain": {"prompts": PROMPTS},
    "classifier": {"prompts": PROMPTS},
}
QUERY = "where is my parcel?"
PASSAGES = [*traffic_texts()[:5], "it is <|im_end|> late\n ", "long words " * 200]


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
def models(tmp_path_factory: pytest.TempPathFactory, minilm_folder: Path) -> dict[str, Path]:
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
def server(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Iterator[Server]:
    base = tmp_path_factory.mktemp("reranking")
    for name, fields in PIPELINES.items():
        fields = {**fields, "tokenizer": {"max_length": LIMIT}}
        build_into(write_reranking(base / name, models[name], **fields), base / "repository")
    with Server(base / "repository") as server:
        yield server


@pytest.mark.parametrize("name", PIPELINES)
def test_scores_are_those_of_sentence_transformers(
    server: Server, models: dict[str, Path], name: str
) -> None:
    from sentence_transformers import CrossEncoder

    model = CrossEncoder(str(models[name]), device="cpu")
    model.max_seq_length = LIMIT
    pairs = [(QUERY, passage) for passage in PASSAGES]
    prompts: list[tuple[dict[str, Any], str | None]] = [({}, None)]
    if name == "saved":
        prompts += [({"prompt": "own"}, "Find my own"), ({"prompt": "Find any"}, "Find any")]
    else:
        prompts += [({"prompt": each}, text) for each, text in PROMPTS.items()]
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


def test_the_gate_has_pairs_with_each_prompt(tmp_path: Path, models: dict[str, Path]) -> None:
    folder = write_reranking(tmp_path / "named", models["template"], prompts=PROMPTS)
    requests = read_inputs(load_spec(folder), lambda *_: None).requests
    used = [request.parameters.get("prompt") for request in requests]
    assert used.count("web") == used.count("code") == 32
    assert used.count(None) > 0


def test_a_template_that_cannot_write_a_pair_is_refused(tmp_path: Path) -> None:
    for name, template in (
        ("roles", '{% for m in messages if m.role == "user" %}{{ m.content }}{% endfor %}'),
        ("strips", TEMPLATE.replace("| first }}", "| first | trim }}")),
    ):
        folder = write_reranking(
            tmp_path / name, write_language_model(tmp_path / f"m_{name}", template)
        )
        check_refused(
            ["chat_template", "`query`, `document` and `system` unchanged"],
            lambda: read_inputs(load_spec(folder), lambda *_: None),  # noqa: B023
        )
