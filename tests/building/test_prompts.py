"""Prompts of the spec and of requests, against sentence-transformers with the same prompts."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from typer.testing import CliRunner

from conftest import build_into, traffic_texts, write_pipeline
from mistakes import check_refused
from triptych.client import Client, InvalidRequestError
from triptych.core.inputs import read_inputs
from triptych.interface.cli import app
from triptych.serving.server import Server
from triptych.spec.spec import load_spec

pytestmark = pytest.mark.server
PROMPTS = {"query": "query: ", "passage": "passage: ", "none": ""}
TEXTS = [*traffic_texts()[:6], "", "long words " * 400]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Server]:
    base = tmp_path_factory.mktemp("prompts")
    model = {"source": str(tiny_model)}
    by_default = {"parameters": {"prompt": "passage"}, "prompts": PROMPTS}
    for name, spec in (("named", by_default), ("free", {"prompts": "any"})):
        build_into(write_pipeline(base / name, model=model, **spec), base / "repository")
    for layout, side in LEFT_OUT.items():
        folder = write_left_out(tiny_model, base / f"model_{layout}", side)
        fields = {"prompts": "any", "core": {"layout": layout}, "tokenizer": {"max_length": 40}}
        pipeline = write_pipeline(base / layout, model={"source": str(folder)}, **fields)
        build_into(pipeline, base / "repository")
    with Server(base / "repository") as server:
        yield server


LEFT_OUT = {"packed": "right", "bucketed": "left"}
"""Layout of each pipeline that leaves prompts out of pooling, and its side of truncation."""
POOLINGS = ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]


def write_left_out(tiny_model: Path, folder: Path, side: str) -> Path:
    """Write a model whose poolings leave the prompt out."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    model = SentenceTransformer(str(tiny_model), device="cpu")
    model[1] = Pooling(model.get_embedding_dimension(), POOLINGS, include_prompt=False)
    model.tokenizer.truncation_side = side
    model.save(str(folder))
    return folder


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(tiny_model), device="cpu")


def test_a_prompt_is_chosen_by_name(server: Server, model: Any) -> None:
    with Client("named", server.grpc_url) as client:
        choices: tuple[tuple[dict[str, Any], str], ...] = (
            ({"prompt": "query"}, "query: "),
            ({"prompt_name": "query"}, "query: "),
            ({"prompt": "none"}, ""),
            ({}, "passage: "),
        )
        for given, prompt in choices:
            wanted = model.encode(TEXTS, prompt=prompt)
            assert np.abs(client.embed(TEXTS, **given) - wanted).max() < 1e-5, given
        with pytest.raises(InvalidRequestError, match="one of none, passage, query"):
            client.embed(["a"], prompt="qeury")


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
    words = ["infer", "named", "--url", server.grpc_url, "--file", str(tmp_path / "rows.jsonl")]
    done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "out.jsonl")])
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


def test_the_gate_has_rows_with_each_prompt(tmp_path: Path, tiny_model: Path) -> None:
    model = {"source": str(tiny_model)}
    folder = write_pipeline(tmp_path / "named", model=model, prompts=PROMPTS)
    requests = read_inputs(load_spec(folder), lambda *_: None).requests
    used = [request.parameters.get("prompt") for request in requests]
    assert set(used) == {None, "query", "passage"}
    assert used.count("query") == used.count("passage") == 32


MISTAKES: list[tuple[dict[str, Any], list[str]]] = [
    ({"prompts": {"query": 3}}, ["prompts.query", "must be a text"]),
    ({"prompts": "some"}, ["prompts", "'any'"]),
    ({"prompts": PROMPTS, "parameters": {"prompt": "x"}}, ["one of none, passage, query"]),
    ({"prompts": {"long": "word " * 600}}, ["leave space for the text"]),
    ({"prompts": PROMPTS, "task": "fill-mask"}, ["prompts", "text-embedding and reranking only"]),
]


def test_mistakes_are_explained(tmp_path: Path, tiny_model: Path) -> None:
    model = {"source": str(tiny_model)}
    for number, (fields, words) in enumerate(MISTAKES):
        folder = write_pipeline(tmp_path / f"wrong{number}", model=model, **fields)
        check_refused(words, lambda: read_inputs(load_spec(folder), lambda *_: None))  # noqa: B023
