"""Hybrid embeddings on a real tritonserver: equal to `BGEM3FlagModel` of FlagEmbedding."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from tests.support.project import (
    ROOT,
    build_into,
    one_at_a_time,
    quiet,
    selected_names,
    traffic_texts,
    write_pipeline,
)
from tests.support.served_command import gateway
from tests.support.served_models import ROBERTA, UNIGRAM, VECTORS, Served, each_of, save
from triptych.base.errors import UserError
from triptych.client import AsyncClient, Client, HybridEmbedding, InvalidRequestError, tasks
from triptych.client.plain import plain_outputs, without_padding
from triptych.core.inputs import read_inputs
from triptych.models.source import read_model_info
from triptych.models.token_layers import VECTORS_LAYER, WEIGHTS_LAYER, load_layer
from triptych.serving.server import Server
from triptych.spec.spec import load_spec
from triptych.tasks.catalog import find_task

pytestmark = pytest.mark.server
TEXTS = [
    *traffic_texts()[:12],
    "x",
    "漢字かな交じり文 and 🙂",
    "word " * 300,
    "  two  spaces ",
    "late late <mask> parcel, late",
]
LAYOUTS = ("packed", "bucketed")
NEEDED = ROOT / "tests/data/flag_embedding.txt"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in the form of BAAI/bge-m3, with random weights."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import (
        Normalize,
        Pooling,
        Transformer,
    )

    base = tmp_path_factory.mktemp("model")
    save(Served(VECTORS, "xlm-roberta", UNIGRAM, ROBERTA), base / "plain")
    encoder = Transformer(str(base / "plain"))
    size = encoder.get_embedding_dimension()
    modules = [encoder, Pooling(size, pooling_mode="cls"), Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save(str(base / "m3"))
    for name, out in ((WEIGHTS_LAYER, 1), (VECTORS_LAYER, size)):
        torch.save(torch.nn.Linear(size, out).state_dict(), base / "m3" / name)
    return base / "m3"


def write_hybrid(folder: Path, model: Path, **fields: Any) -> Path:
    rows = [{"text": text} for text in TEXTS]
    source = {"source": str(model)}
    return write_pipeline(folder, rows, task="hybrid-embedding", model=source, **fields)


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path
) -> Iterator[Server]:
    base = tmp_path_factory.mktemp("hybrid")
    names = {LAYOUTS[0], *selected_names(request)}
    for layout in [each for each in LAYOUTS if each in names]:
        folder = write_hybrid(base / "pipelines" / layout, model, core={"layout": layout})
        assert build_into(folder, base / "repository").gate.passed
    with Server(base / "repository") as server:
        yield server


def reference_of(model: Path) -> list[HybridEmbedding]:
    """Embeddings of each text alone, as FlagEmbedding computes them, by transformers."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    from triptych.client import SparseVector

    tokenizer, encoder = AutoTokenizer.from_pretrained(model), AutoModel.from_pretrained(model)
    weigh, project = (torch.load(model / name) for name in (WEIGHTS_LAYER, VECTORS_LAYER))
    special = {tokenizer.cls_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}
    found = []
    for text in TEXTS:
        inputs = tokenizer(text, truncation=True, max_length=128, return_tensors="pt")
        with torch.no_grad():
            hidden = encoder(**inputs).last_hidden_state[0]
            weights = (hidden @ weigh["weight"].T + weigh["bias"]).relu()[:, 0].tolist()
            vectors = hidden[1:] @ project["weight"].T + project["bias"]
        terms: dict[int, float] = {}
        for token, weight in zip(inputs["input_ids"][0].tolist(), weights, strict=True):
            if weight > 0 and token not in special:
                terms[token] = max(weight, terms.get(token, 0.0))
        found.append(
            HybridEmbedding(
                (hidden[0] / hidden[0].norm()).numpy(),
                SparseVector(np.array([*terms], np.int32), np.array([*terms.values()], np.float32)),
                (vectors / vectors.norm(dim=1, keepdim=True)).numpy(),
            )
        )
    return found


def farthest(found: Sequence[HybridEmbedding], wanted: Sequence[HybridEmbedding]) -> float:
    """The largest difference of a number; the terms must be the same."""
    largest = 0.0
    for own, other in zip(found, wanted, strict=True):
        assert own.sparse is not None
        assert other.sparse is not None
        assert (np.diff(own.sparse.values) <= 0).all()
        orders = [np.argsort(each.indices) for each in (own.sparse, other.sparse)]
        ids, others = own.sparse.indices[orders[0]], other.sparse.indices[orders[1]]
        assert ids.tolist() == others.tolist()
        for one, another in (
            (own.dense, other.dense),
            (own.vectors, other.vectors),
            (own.sparse.values[orders[0]], other.sparse.values[orders[1]]),
        ):
            assert one is not None
            assert another is not None
            assert one.shape == another.shape
            largest = max(largest, float(np.abs(one - another).max(initial=0)))
    return largest


@each_of(LAYOUTS, LAYOUTS[:1])
def test_embeddings_are_those_of_the_model(server: Server, model: Path, name: str) -> None:
    wanted = reference_of(model)
    with Client(name, url=server.grpc_url) as client:
        assert farthest(client.embed_hybrid(TEXTS), wanted) < 1e-5
        assert farthest([client.embed_hybrid([text])[0] for text in TEXTS], wanted) < 1e-5


@pytest.mark.long
def test_embeddings_are_those_of_flag_embedding(
    server: Server, model: Path, tmp_path: Path
) -> None:
    from triptych.client import SparseVector

    home = ROOT / ".cache/flag_embedding"
    with one_at_a_time("flag_embedding"):
        if not (home / "complete").exists():
            install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
            command = [*install, "--target", str(home), "-r", str(NEEDED)]
            subprocess.run(command, check=True, timeout=600)
            (home / "complete").touch()
    texts, target = tmp_path / "texts.json", tmp_path / "found.npz"
    texts.write_text(json.dumps(TEXTS), encoding="utf-8")
    script = ROOT / "tests/support/flag_embedding.py"
    environment = {**os.environ, "PYTHONPATH": str(home)}
    command = [sys.executable, str(script), str(model), str(texts), str(target)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = np.load(target)
    wanted = [
        HybridEmbedding(
            found["dense"][row],
            SparseVector(found[f"ids_{row}"], found[f"weights_{row}"]),
            found[f"vectors_{row}"],
        )
        for row in range(len(TEXTS))
    ]
    with Client(LAYOUTS[0], url=server.grpc_url) as client:
        assert farthest(client.embed_hybrid(TEXTS), wanted) < 1e-5


def test_a_client_gets_what_it_asks_for(server: Server) -> None:
    with Client("packed", url=server.grpc_url) as client:
        every = client.embed_hybrid(TEXTS)
        dense = client.embed_hybrid(TEXTS, outputs=["dense"])
        assert all(each.sparse is None and each.vectors is None for each in dense)
        assert (client.embed(TEXTS) == [each.dense for each in dense]).all()
        assert client.embed_hybrid([]) == []
        assert tasks.embed(TEXTS).requested_of(client.interface()) == ("embedding",)
        assert tasks.embed_sparse(TEXTS).requested_of(client.interface()) == tasks.TERMS
        for terms, vectors, own in zip(
            client.embed_sparse(TEXTS, max_active_dims=3),
            client.embed_multi_vector(TEXTS),
            every,
            strict=True,
        ):
            assert own.sparse is not None
            assert terms.indices.tolist() == own.sparse.indices[:3].tolist()
            assert own.vectors is not None
            assert (vectors == own.vectors).all()
        outputs: Any
        for outputs in ([], ["dense", "colbert"]):
            with pytest.raises(InvalidRequestError, match="outputs"):
                client.embed_hybrid(TEXTS, outputs=outputs)
        with pytest.raises(InvalidRequestError, match="max_active_dims"):
            client.embed_hybrid(TEXTS, max_active_dims=0)
        whole, alone = client.infer({"text": TEXTS}), client.infer({"text": TEXTS[:1]})
        first = without_padding({name: array[:1] for name, array in whole.items()})
        assert first["token_embedding"].shape[1] < whole["token_embedding"].shape[1]
        assert {name: array.shape for name, array in first.items()} == {
            name: array.shape for name, array in without_padding(alone).items()
        }
        rows = plain_outputs(client.interface(), client.infer({"text": TEXTS}))
        for row, own in enumerate(every):
            assert own.sparse is not None
            assert own.vectors is not None
            assert rows["token_id"][row] == own.sparse.indices.tolist()
            assert len(rows["token_embedding"][row]) == rows["token_count"][row]
            assert rows["token_count"][row] == len(own.vectors)

    async def ask() -> list[HybridEmbedding]:
        async with AsyncClient("packed", url=server.grpc_url) as client:
            return await client.embed_hybrid(TEXTS[:2])

    assert farthest(asyncio.run(ask()), every[:2]) < 1e-6


def test_the_gateway_has_each_kind(server: Server) -> None:
    with Client("packed", url=server.grpc_url) as client:
        wanted = client.embed_hybrid(TEXTS[:3])
    with gateway("packed", "--url", server.grpc_url) as url, httpx2.Client(base_url=url) as http:
        body = {"model": "packed", "input": TEXTS[:3]}
        data = http.post("/v1/embeddings", json=body).json()["data"]
        pooled = http.post("/pooling", json={**body, "task": "token_embed"}).json()["data"]
        sparse = http.post("/embed_sparse", json={"inputs": TEXTS[:3]}).json()
        cohere = http.post("/v2/embed", json={"model": "packed", "texts": TEXTS[:3]}).json()
        dense = np.array([each.dense for each in wanted])
        assert np.abs(dense - cohere["embeddings"]["float"]).max() < 1e-5
        tei = http.post("/embed", json={"inputs": TEXTS[:3]}).json()
        assert np.abs(dense - tei).max() < 1e-5
        for each, own, vectors, terms in zip(wanted, data, pooled, sparse, strict=True):
            assert each.dense is not None
            assert np.abs(each.dense - own["embedding"]).max() < 1e-5
            assert each.vectors is not None
            assert np.abs(each.vectors - vectors["data"]).max() < 1e-5
            assert each.sparse is not None
            assert [term["index"] for term in terms] == each.sparse.indices.tolist()


def test_models_without_the_layers_are_refused(tmp_path: Path, model: Path) -> None:
    import torch

    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    digest = read_model_info(copy).sha256
    assert load_layer(copy, VECTORS_LAYER, 32, 32).weight.shape == (32, 32)
    torch.save(torch.nn.Linear(32, 8).state_dict(), copy / VECTORS_LAYER)
    assert read_model_info(copy).sha256 != digest
    torch.save(torch.nn.Linear(32, 1), copy / WEIGHTS_LAYER)  # code of a class, not weights
    for name, sizes in ((VECTORS_LAYER, (32, 32)), (WEIGHTS_LAYER, (32, 1)), ("none.pt", (1, 1))):
        with pytest.raises(UserError, match=name):
            load_layer(copy, name, *sizes)
    (copy / "modules.json").unlink()
    with pytest.raises(UserError, match=r"modules\.json"):
        read_inputs(load_spec(write_hybrid(tmp_path / "p", copy)), quiet)


def test_the_worst_kind_decides() -> None:
    from tests.support.decoded_cases import EXAMPLES

    compare, wanted = find_task("hybrid-embedding").compare, EXAMPLES["hybrid-embedding"]
    queries = [""] * len(wanted)
    for name in ("embedding", "weight", "token_embedding"):
        broken = [{**row, name: -row[name]} for row in wanted]
        result = compare(broken, wanted, queries)
        assert result.values["min_cosine"] == pytest.approx(-1)
        assert min(result.badness) == pytest.approx(2)
