"""Sparse embeddings on a real tritonserver: equal to `SparseEncoder` of sentence-transformers."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from tests.support.mistakes import check_refused
from tests.support.project import build_into, quiet, traffic_texts, write_pipeline
from tests.support.served_command import gateway
from tests.support.served_models import (
    MASKS,
    MODERN,
    OFFSET,
    ROBERTA,
    UNIGRAM,
    Served,
    each_of,
    save,
    write_chosen,
)
from tests.support.task_models import masked_model
from triptych.client import (
    AsyncClient,
    Client,
    InvalidRequestError,
    SparseVector,
    sparse_matrix,
)
from triptych.core.inputs import read_inputs
from triptych.models.older import in_current_form
from triptych.models.source import read_license, read_model_info
from triptych.serving.server import Server
from triptych.spec.spec import load_spec
from triptych.tasks.catalog import find_task
from triptych.tasks.catalog.sparse_embedding import MAX_TERMS, TILE

pytestmark = [
    pytest.mark.server,
    pytest.mark.filterwarnings("ignore:Tokenizer does not support real words:UserWarning"),
]
TEXTS = [*traffic_texts()[:12], "x", "漢字かな交じり文 and 🙂", "word " * 300, "  two  spaces "]
KINDS: dict[str, tuple[Served | None, dict[str, str], str]] = {
    # Its vocabulary has 15 tiles.
    "bert": (None, {}, "packed"),
    "modern": (
        Served(MASKS, "modernbert", "PreTrainedTokenizerFast", MODERN),
        {"activation_function": "log1p_relu"},
        "packed",
    ),
    "distil": (
        Served(
            MASKS, "distilbert", "BertTokenizer",
            {"dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 64},
        ),
        {"pooling_strategy": "sum"},
        "bucketed",
    ),
    "xlm": (Served(MASKS, "xlm-roberta", UNIGRAM, ROBERTA), {"pooling_strategy": "sum"}, "packed"),
    "mpnet": (Served(MASKS, "mpnet", "MPNetTokenizer", OFFSET), {}, "bucketed"),
}  # fmt: skip
"""Masked model, settings of SpladePooling, and layout."""
EVERYDAY = ("bert", "distil")
ROUTED = ("modern", "distil")
"""Models whose queries have their weights in a table."""


def write_model(name: str, folder: Path, minilm: Path) -> Path:
    """Write a random SPLADE model of which few terms are active."""
    import torch
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Router, Transformer
    from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    served, settings, _ = KINDS[name]
    plain = folder / "masked"
    if served is None:
        masked_model(plain, minilm, traffic_texts())
    else:
        save(served, plain)
    model = AutoModelForMaskedLM.from_pretrained(plain)
    tokenizer = AutoTokenizer.from_pretrained(plain)
    words = model.get_output_embeddings()
    encoded = [tokenizer(text, return_tensors="pt", truncation=True) for text in TEXTS]
    with torch.no_grad():
        largest = torch.stack([model(**each).logits[0].amax(0) for each in encoded])
        active = 200 / max(largest.shape[1], 1500)
        # Cut short: processors add up in other orders.
        scale = (2.0 / largest.std()).bfloat16()
        words.weight.mul_(scale)
        words.bias.fill_(
            -(scale * largest)
            .flatten()
            .kthvalue(int((1 - active) * largest.numel()))
            .values.bfloat16()
        )
    model.save_pretrained(plain)
    modules = [Transformer(str(plain), transformer_task="fill-mask"), SpladePooling(**settings)]
    if name in ROUTED:
        weights = torch.rand(len(tokenizer.get_vocab())) * 8 - 1
        static = SparseStaticEmbedding(tokenizer, weights, frozen=True)
        modules = [Router.for_query_document([static], modules)]
    encoder = SparseEncoder(modules=modules, device="cpu", prompts={"query": "find: "})
    encoder.save(str(folder / "splade"))
    return folder / "splade"


def write_sparse(folder: Path, model: Path, **fields: Any) -> Path:
    rows = [{"text": text} for text in TEXTS]
    source = {"source": str(model)}
    return write_pipeline(folder, rows, task="sparse-embedding", model=source, **fields)


@pytest.fixture(scope="module")
def models(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, minilm_folder: Path
) -> dict[str, Path]:
    """Folder of each model that a selected test needs."""
    base = tmp_path_factory.mktemp("models")

    def write(name: str) -> Path:
        return write_model(name, base / name, minilm_folder)

    return write_chosen(request, KINDS, EVERYDAY[0], write)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Iterator[Server]:
    base = tmp_path_factory.mktemp("sparse")
    for name, model in models.items():
        fields = {"core": {"layout": KINDS[name][2]}}
        built = build_into(
            write_sparse(base / "pipelines" / name, model, **fields), base / "repository"
        )
        assert built.gate.passed
    with Server(base / "repository") as server:
        yield server


def reference_of(model: Path, **options: Any) -> np.ndarray[Any, Any]:
    """Return the weights that the library gives each text for all terms, FP32."""
    from sentence_transformers import SparseEncoder

    encoder = SparseEncoder(str(model), device="cpu")
    rows = [
        encoder.encode([text], convert_to_sparse_tensor=False, **options)[0].numpy()
        for text in TEXTS
    ]
    return np.stack(rows)


def dense(vectors: list[SparseVector], size: int) -> np.ndarray[Any, Any]:
    rows = np.zeros((len(vectors), size), np.float32)
    for row, vector in zip(rows, vectors, strict=True):
        assert len(set(vector.indices.tolist())) == len(vector.indices)
        assert (np.diff(vector.values) <= 0).all()
        assert (vector.values > 0).all()
        row[vector.indices] = vector.values
    return rows


def test_vectors_have_the_forms_of_libraries_and_stores() -> None:
    vectors = [
        SparseVector(np.array([7, 2], np.int32), np.array([1.5, 0.5], np.float32)),
        SparseVector(np.empty(0, np.int32), np.empty(0, np.float32)),
    ]
    assert vectors[0].for_qdrant() == {"indices": [7, 2], "values": [1.5, 0.5]}
    assert vectors[0].for_elasticsearch() == {"7": 1.5, "2": 0.5}
    matrix = sparse_matrix(vectors, 9)
    assert (matrix.shape, matrix.dtype) == ((2, 9), np.float32)
    assert matrix.toarray().tolist() == [[0, 0, 0.5, 0, 0, 0, 0, 1.5, 0], [0] * 9]
    assert sparse_matrix([], 9).shape == (0, 9)


@each_of(KINDS, EVERYDAY)
def test_vectors_are_those_of_the_library(
    server: Server, models: dict[str, Path], name: str
) -> None:
    wanted = reference_of(models[name])
    assert (wanted > 0).sum(1).min() > 0
    assert (wanted > 0).sum(1).max() <= MAX_TERMS
    assert (name == "bert") == (wanted.shape[1] > TILE)
    scale = max(1.0, float(wanted.max()))
    with Client(name, url=server.grpc_url) as client:
        together = dense(client.embed_sparse(TEXTS), wanted.shape[1])
        alone = dense([client.embed_sparse([text])[0] for text in TEXTS], wanted.shape[1])
    assert np.abs(together - wanted).max() < 1e-5 * scale
    assert np.abs(alone - wanted).max() < 1e-5 * scale


@each_of([name for name in KINDS if name in ROUTED], EVERYDAY)
def test_queries_have_the_weights_of_the_table(
    server: Server, models: dict[str, Path], name: str
) -> None:
    from sentence_transformers import SparseEncoder

    encoder = SparseEncoder(str(models[name]), device="cpu")
    wanted = encoder.encode_query(TEXTS, convert_to_sparse_tensor=False).numpy()
    assert wanted.min() < 0 < wanted.max()
    few = encoder.encode_query(TEXTS, convert_to_sparse_tensor=False, max_active_dims=3).numpy()
    with Client(name, url=server.grpc_url) as client:
        together = client.embed_sparse(TEXTS, role="query")
        alone = [client.embed_sparse([text], role="query")[0] for text in TEXTS]
        highest = client.embed_sparse(TEXTS, role="query", max_active_dims=3)
        empty = client.embed_sparse([""], role="query")
    of_prompt = encoder.encode_query([""], convert_to_sparse_tensor=False).numpy()
    cases = ((together, wanted), (alone, wanted), (highest, few), (empty, of_prompt))
    for vectors, rows in cases:
        assert (sparse_matrix(vectors, wanted.shape[1]).toarray() == rows).all()
    assert of_prompt.any()


def test_the_gateway_has_the_sparse_vectors_of_tei(server: Server) -> None:
    name = EVERYDAY[0]
    with Client(name, url=server.grpc_url) as client:
        wanted = client.embed_sparse(TEXTS)
    with gateway(name, "--url", server.grpc_url) as url, httpx2.Client(base_url=url) as http:
        for path in ("/embed_sparse", f"/tei/{name}/embed_sparse"):
            rows = http.post(path, json={"inputs": TEXTS, "truncate": True}).json()
            assert [[each["index"] for each in row] for row in rows] == [
                each.indices.tolist() for each in wanted
            ]
            values = np.array([each["value"] for row in rows for each in row])
            assert np.abs(values - np.concatenate([each.values for each in wanted])).max() < 1e-5
        assert len(http.post("/embed_sparse", json={"inputs": TEXTS[0]}).json()) == 1
        assert http.get("/info").json()["model_type"] == {"embedding": {"pooling": "splade"}}
        wrong = http.post("/embed", json={"inputs": TEXTS})
        assert (wrong.status_code, wrong.json()["error_type"]) == (404, "Validation")


@pytest.mark.parametrize("name", EVERYDAY[:1])
def test_parameters_choose_the_terms(server: Server, models: dict[str, Path], name: str) -> None:
    wanted = reference_of(models[name], max_active_dims=7)
    every = reference_of(models[name])
    with Client(name, url=server.grpc_url) as client:
        few = client.embed_sparse(TEXTS, max_active_dims=7)
        assert np.abs(dense(few, wanted.shape[1]) - wanted).max() < 1e-4
        above = client.embed_sparse(TEXTS, threshold=0.5)
        assert [len(row.indices) for row in above] == (every > 0.5).sum(1).tolist()
        none = client.embed_sparse(TEXTS[:2], threshold=1e6)
        assert [len(row.indices) for row in none] == [0, 0]
        assert client.embed_sparse([]) == []
        whole = client.infer({"text": TEXTS[:2]})
        assert whole["token_id"].dtype == np.int32
        assert whole["weight"].dtype == np.float32
        for parameters in (
            {"max_active_dims": 0},
            {"max_active_dims": MAX_TERMS + 1},
            {"threshold": -1.0},
            {"threshold": float("nan")},
            {"prompt": "unknown"},
            {"top_k": 3},
        ):
            with pytest.raises(InvalidRequestError, match=next(iter(parameters))):
                client.infer({"text": ["a"]}, parameters=parameters)
        with pytest.raises(InvalidRequestError, match="embedding"):
            client.embed(TEXTS[:1])

    async def ask() -> list[SparseVector]:
        async with AsyncClient(name, url=server.grpc_url) as client:
            return await client.embed_sparse(TEXTS, max_active_dims=7)

    again = asyncio.run(ask())
    assert all((a.indices == b.indices).all() for a, b in zip(again, few, strict=True))


def test_settings_of_a_model_are_applied_or_refused(
    tmp_path: Path, models: dict[str, Path]
) -> None:
    import shutil

    task, model = find_task("sparse-embedding"), tmp_path / "model"
    shutil.copytree(models["bert"], model)
    config = model / "config_sentence_transformers.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_active_dims": 40}))
    info = read_model_info(model, loader=task.loader, modules=task.modules)
    assert task.parameters(info)["max_active_dims"].default == 40
    inputs = read_inputs(load_spec(write_sparse(tmp_path / "p", model)), quiet)
    assert inputs.plan.parameters["max_active_dims"] == 40
    listed = model / "modules.json"
    modules = json.loads(listed.read_text())
    normalize = "sentence_transformers.sentence_transformer.modules.Normalize"
    static = "sentence_transformers.sparse_encoder.modules.SparseStaticEmbedding"
    for more, message in ((normalize, "other modules"), (static, "a weight for each token")):
        added = {"idx": 2, "name": "2", "path": "2_More", "type": more}
        listed.write_text(json.dumps([*modules, added]))
        folder = tmp_path / message.replace(" ", "_")
        check_refused(message, read_inputs, load_spec(write_sparse(folder, model)), quiet)
    check_refused("sparse-embedding", read_model_info, models["bert"])


@pytest.mark.parametrize("name", EVERYDAY[1:])
def test_a_router_that_is_not_served_is_refused(
    tmp_path: Path, models: dict[str, Path], name: str
) -> None:
    import shutil

    import torch
    from safetensors.torch import save_file

    source = {"model": {"source": str(models[name])}}
    folder = write_pipeline(tmp_path / "dense", [{"text": "a"}], task="text-embedding", **source)
    check_refused("query: SparseStaticEmbedding; document: ", read_inputs, load_spec(folder), quiet)
    model = tmp_path / "model"
    shutil.copytree(models[name], model)
    (model / "README.md").write_text("---\nlicense: mit\n---\n")
    assert read_license(in_current_form(model, "SparseEncoder", quiet)) == "mit"
    router = model / "router_config.json"
    given = json.loads(router.read_text())
    (static,) = given["structure"]["query"]
    pooled = {**given["structure"], "query": given["structure"]["document"]}
    own = {**given["types"], static: "mine.SparseStaticEmbedding"}
    for number, change in enumerate(({"structure": pooled}, {"types": own})):
        router.write_text(json.dumps({**given, **change}))
        spec = load_spec(write_sparse(tmp_path / f"route_{number}", model))
        check_refused("must not have a Router", read_inputs, spec, quiet)
    router.write_text(json.dumps(given))
    save_file({"weight": torch.tensor([torch.nan])}, model / static / "model.safetensors")
    check_refused("model that sentence-transformers can load", read_inputs, spec, quiet)


def test_a_tie_of_the_last_term_is_no_difference() -> None:
    one = {"token_id": np.array([[5, 2, 9]]), "weight": np.array([[1.5, 1.0, 0.5]])}
    tied = {"token_id": np.array([[5, 2, 4]]), "weight": np.array([[1.5, 1.0, 0.500001]])}
    other = {"token_id": np.array([[5, 3, 9]]), "weight": np.array([[1.5, 1.0, 0.5]])}
    fewer = {"token_id": np.array([[5, 2]]), "weight": np.array([[1.5, 1.0]])}
    compare = find_task("sparse-embedding").compare
    assert compare([tied], [one], ["a"]).values["term_overlap"] == 1.0
    for wrong in (other, fewer):
        found = compare([wrong], [one], ["a"])
        assert found.values["term_overlap"] < 0.9
        assert found.values["min_cosine"] < 0.97
