"""Vectors of tokens on a real tritonserver: equal to `MultiVectorEncoder`, in each saved form."""

import asyncio
import json
import re
import shutil
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import numpy as np
import pytest

from tests.support.demo_pages import ask, open_demo
from tests.support.mistakes import check_refused
from tests.support.project import build_into, quiet, traffic_texts, write_pipeline
from tests.support.scaffolding import run
from tests.support.served_command import gateway
from tests.support.served_models import (
    DISTIL,
    MODERN,
    OFFSET,
    ROBERTA,
    UNIGRAM,
    VECTORS,
    Served,
    each_of,
    save,
    write_chosen,
)
from triptych.base.errors import UserError
from triptych.base.max_similarity import WITHOUT_VECTORS
from triptych.client import AsyncClient, Client, InvalidRequestError, maxsim
from triptych.core.inputs import read_inputs
from triptych.models.older import in_current_form
from triptych.runtime.request_errors import RequestError
from triptych.runtime.row_metadata import unpack_metadata
from triptych.runtime.row_types import Row, RowInputs
from triptych.runtime.rows_passages import QueryPassageRowMaker
from triptych.serving.server import Server
from triptych.spec.spec import load_spec
from triptych.tasks.catalog import find_task

pytestmark = pytest.mark.server
TEXTS = [*traffic_texts()[:12], "x", "!!! ...", "漢字 and 🙂", "word " * 60, "  two  spaces ", ""]
Array = np.ndarray[Any, Any]
EXPANDED = {"strategy": "fixed", "length": 24}


class Kind(NamedTuple):
    """A model: its transformer (None for MiniLM), settings of it, and layout."""

    served: Served | None
    settings: dict[str, Any]
    layout: str = "packed"
    skipped: str = string.punctuation
    residual: bool = False


KINDS = {
    "bert": Kind(None, {"query_expansion": EXPANDED, "document_length": 40}),
    "distil": Kind(
        Served(VECTORS, "distilbert", "BertTokenizer", DISTIL),
        {"query_expansion": {**EXPANDED, "strategy": "min"}},
        "bucketed",
    ),
    "modern": Kind(
        Served(VECTORS, "modernbert", "PreTrainedTokenizerFast", MODERN),
        {"query_expansion": {"strategy": "min", "length": 12}, "query_length": 40},
    ),
    "xlm": Kind(
        Served(VECTORS, "xlm-roberta", UNIGRAM, ROBERTA),
        {"query_expansion": {**EXPANDED, "attend": True}},
        skipped="",
    ),
    "mpnet": Kind(
        Served(VECTORS, "mpnet", "MPNetTokenizer", OFFSET), {"query_length": 9}, residual=True
    ),
}
EVERYDAY = ("bert", "distil")
RERANKER = "passages"


def write_model(kind: Kind, folder: Path, minilm: Path) -> Path:
    """Write a model with real or random weights and a random projection to 16 numbers."""
    import torch
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.base.modules.dense import Dense
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    plain = minilm if kind.served is None else save(kind.served, folder / "plain")
    torch.manual_seed(1)
    of_tokens = {"module_input_name": "token_embeddings"}
    transformer = Transformer(str(plain), **kind.settings)
    size = transformer.get_embedding_dimension()
    dense = Dense(
        size, 16, activation_function=torch.nn.Identity(), use_residual=kind.residual, **of_tokens
    )
    mask = MultiVectorMask(skiplist_words=list(kind.skipped))
    MultiVectorEncoder(
        modules=[transformer, dense, mask, Normalize(**of_tokens)],
        prompts={"query": "[Q] ", "document": "[D] "},
        device="cpu",
    ).save(str(folder / "model"))
    return folder / "model"


def as_pylate(model: Path, target: Path) -> Path:
    """Write a model in the form of PyLate 3: without the modules after the projection."""
    shutil.copytree(model, target)
    listed = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Dense", "type": "pylate.models.Dense.Dense"},
    ]
    top = {"model_type": "ColBERT", "query_prefix": "[unused0]", "document_prefix": "[unused1]"}
    lengths = {"query_length": 24, "document_length": 40, "skiplist_words": ["!", "."]}
    dense = json.loads((model / "1_Dense" / "config.json").read_text())
    dense = {name: dense[name] for name in dense if not name.startswith("module_")}
    for name, content in (
        ("modules.json", listed),
        ("config_sentence_transformers.json", {**top, **lengths}),
        ("sentence_bert_config.json", {"max_seq_length": 100}),
        ("1_Dense/config.json", dense),
    ):
        (target / name).write_text(json.dumps(content))
    return target


def as_stanford(model: Path, target: Path) -> Path:
    """Write a model in the form of Stanford's ColBERT: one file of weights, and metadata."""
    from safetensors.torch import load_file, save_file

    target.mkdir()
    weights = {
        f"bert.{name}": each for name, each in load_file(model / "model.safetensors").items()
    }
    weights["linear.weight"] = load_file(model / "1_Dense" / "model.safetensors")["linear.weight"]
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"]}))
    metadata = {"query_maxlen": 24, "doc_maxlen": 40, "attend_to_mask_tokens": True}
    (target / "artifact.metadata").write_text(json.dumps(metadata))
    for path in model.glob("tokenizer*.json"):
        shutil.copy(path, target)
    return target


OLDER = {"pylate": as_pylate, "stanford": as_stanford}
"""Forms in which PyLate 3 and Stanford's ColBERT save a model."""


def write_vectors(folder: Path, model: Path, task: str, **fields: Any) -> Path:
    rows = [{"text": text} for text in TEXTS]
    if task == "late-interaction-reranking":
        rows = [{"text": TEXTS[0], "text_pair": text} for text in TEXTS]
    source = {"source": str(model)}
    return write_pipeline(folder, rows, task=task, model=source, **fields)


@pytest.fixture(scope="module")
def models(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, minilm_folder: Path
) -> dict[str, Path]:
    """Folder of each model that a selected test needs."""
    base = tmp_path_factory.mktemp("models")

    def write(name: str) -> Path:
        if name in OLDER:
            return OLDER[name](base / EVERYDAY[0] / "model", base / name)
        return write_model(KINDS[name], base / name, minilm_folder)

    return write_chosen(request, (*KINDS, *OLDER), EVERYDAY[0], write)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Iterator[Server]:
    base = tmp_path_factory.mktemp("multi_vector")

    def build(name: str, model: Path, task: str, **fields: Any) -> None:
        folder = write_vectors(base / "pipelines" / name, model, task, **fields)
        assert build_into(folder, base / "repository").gate.passed

    for name, model in models.items():
        layout = KINDS[name].layout if name in KINDS else "packed"
        build(name, model, "multi-vector-embedding", core={"layout": layout})
    build(RERANKER, models[EVERYDAY[0]], "late-interaction-reranking")
    with Server(base / "repository") as server:
        yield server


def reference_of(model: Path, role: str, texts: list[str] = TEXTS) -> list[Array]:
    from sentence_transformers import MultiVectorEncoder

    encoder = MultiVectorEncoder(str(model), device="cpu")
    encode = encoder.encode_query if role == "query" else encoder.encode_document
    return [encode([text], convert_to_numpy=True)[0] for text in texts]


@each_of((*KINDS, *OLDER), EVERYDAY)
def test_vectors_are_those_of_the_library(
    server: Server, models: dict[str, Path], name: str
) -> None:
    with Client(name, url=server.grpc_url) as client:
        for role in ("query", "document"):
            wanted = reference_of(models[name], role)
            together = client.embed_multi_vector(TEXTS, role=role)
            alone = [client.embed_multi_vector([text], role=role)[0] for text in TEXTS]
            for got in (together, alone):
                assert [each.shape for each in got] == [each.shape for each in wanted]
                pairs = zip(got, wanted, strict=True)
                assert max(np.abs(a - b).max(initial=0.0) for a, b in pairs) < 1e-5
        document = client.embed_multi_vector(TEXTS)
    pairs = zip(document, together, strict=True)
    assert all((a == b).all() for a, b in pairs)  # the default role


@pytest.mark.parametrize("name", EVERYDAY[:1])
def test_encodings_are_those_of_the_library(
    server: Server, models: dict[str, Path], name: str
) -> None:
    from sentence_transformers.util.quantization import quantize_embeddings

    wanted = np.concatenate(reference_of(models[name], "document"))
    with Client(name, url=server.grpc_url) as client:
        halves = np.concatenate(client.embed_multi_vector(TEXTS, encoding="float16"))
        assert halves.dtype == np.float16
        assert np.abs(halves - wanted).max() < 1e-3
        for encoding in ("binary", "ubinary"):
            bits = np.concatenate(client.embed_multi_vector(TEXTS, encoding=encoding))
            expected = quantize_embeddings(wanted, encoding)
            assert (bits.dtype, bits.shape) == (expected.dtype, expected.shape)
            assert (bits == expected).mean() > 0.99  # a number near 0 may have either sign
        steps = {e: np.concatenate(client.embed_multi_vector(TEXTS, encoding=e)) for e in
                 ("int8", "uint8")}  # fmt: skip
        assert (steps["int8"].astype(int) + 128 == steps["uint8"]).all()
        assert steps["int8"].shape == wanted.shape
        floats = np.concatenate(client.embed_multi_vector(TEXTS))
        order = np.argsort(floats, axis=0, kind="stable")
        assert (
            np.diff(np.take_along_axis(steps["uint8"].astype(int), order, 0), axis=0) >= 0
        ).all()
        for parameters in ({"role": "passage"}, {"encoding": "int4"}, {"prompt": "query"}):
            with pytest.raises(InvalidRequestError, match=next(iter(parameters))):
                client.infer({"text": ["a"]}, parameters=parameters)
        assert client.embed_multi_vector([]) == []
        with pytest.raises(InvalidRequestError, match="token_id"):
            client.embed_sparse(["a"])

    async def ask() -> list[Array]:
        async with AsyncClient(name, url=server.grpc_url) as client:
            return await client.embed_multi_vector(TEXTS[:2])

    assert (np.concatenate(asyncio.run(ask())) == floats[: sum(map(len, asyncio.run(ask())))]).all()


def test_scores_are_those_of_the_library(server: Server, models: dict[str, Path]) -> None:
    from sentence_transformers.util.similarity import maxsim as reference

    model = models[EVERYDAY[0]]
    queries, passages = reference_of(model, "query"), reference_of(model, "document")
    wanted = reference(queries, passages).numpy()
    assert np.abs(maxsim(queries, passages) - wanted).max() < 1e-4
    assert maxsim(queries, []).shape == (len(TEXTS), 0)
    nothing = [*passages[:1], passages[0][:0]]
    assert maxsim(queries[:1], nothing)[0, 1] == WITHOUT_VECTORS
    with Client(RERANKER, url=server.grpc_url) as client:
        for place in (0, len(TEXTS) - 1):
            ranked = client.rerank(TEXTS[place], TEXTS)
            scores = np.array([each.score for each in sorted(ranked)])
            assert np.abs(scores - wanted[place]).max() < 1e-4
        # Rows of one request may have different queries.
        pairs = client.infer({"text": TEXTS[:8], "text_pair": TEXTS[:8][::-1]})
        diagonal = [wanted[place, 7 - place] for place in range(8)]
        assert np.abs(pairs["score"][:, 0] - diagonal).max() < 1e-4


def test_rows_of_files_have_no_more_vectors_than_tokens(server: Server, tmp_path: Path) -> None:
    lines = [json.dumps({"text": text}) for text in TEXTS[:5]]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    name = EVERYDAY[0]
    out = tmp_path / "vectors.jsonl"
    run("infer", name, "--url", server.grpc_url, "--file", tmp_path / "rows.jsonl", "--out", out)
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    counts = [row["token_count"] for row in rows]
    assert [len(row["embedding"]) for row in rows] == counts
    assert len(set(counts)) > 1


@pytest.mark.long
def test_the_page_shows_which_tokens_match(server: Server) -> None:
    name, (query, document) = EVERYDAY[0], TEXTS[:2]
    folder = server.repository.parent / "pipelines" / name
    with open_demo(load_spec(folder), folder, server.repository, server.grpc_url) as page:
        drawn, _, times, raw = ask(page, query, document, "", "")
        assert ask(page, query, "", "", "")[0] is None
        assert ask(page, query, document, "", "int8")[0] is None
    with Client(name, url=server.grpc_url) as client:
        vectors = client.embed_multi_vector([query], role="query")
        others = client.embed_multi_vector([document], role="document")
    assert f"MaxSim score: <b>{maxsim(vectors, others)[0, 0]:.4f}</b>" in drawn
    rows = re.findall("<tr><th>(.*?)</th>", drawn)
    assert rows[:2] == ["query", "[CLS]"]
    assert rows[-1] == "[MASK]"
    assert len(rows) == 1 + len(vectors[0])
    assert drawn.count('class="best"') == len(vectors[0])
    assert drawn.count("--share") == len(vectors[0]) * len(others[0])
    assert [len(row["embedding"]) for row in raw] == [len(vectors[0]), len(others[0])]
    assert "means over 2 requests" in times


def test_the_gateway_has_the_vectors_as_tei_and_vllm_have_them(server: Server) -> None:
    name, texts = EVERYDAY[0], TEXTS[:5]
    with Client(name, url=server.grpc_url) as client:
        wanted = client.embed_multi_vector(texts)
        queries = client.embed_multi_vector(texts, role="query")
    with (
        gateway(name, RERANKER, "--url", server.grpc_url) as url,
        httpx2.Client(base_url=url) as http,
    ):
        asked = {"inputs": texts, "prompt_name": "query", "truncate": True}
        for path in ("/embed_all", f"/tei/{name}/embed_all"):
            rows = http.post(path, json=asked).json()
            pairs = zip(rows, queries, strict=True)
            assert max(np.abs(np.array(a) - b).max() for a, b in pairs) < 1e-6
        asked = {"model": name, "input": texts, "task": "token_embed"}
        answer = http.post("/pooling", json=asked).json()
        found = [each["data"] for each in answer["data"]]
        assert [each["object"] for each in answer["data"]] == ["pooling"] * len(texts)
        pairs = zip(found, wanted, strict=True)
        assert max(np.abs(np.array(a) - b).max() for a, b in pairs) < 1e-6
        for path, body, field in (
            ("/embed_all", {"inputs": texts, "prompt_name": "passage"}, "prompt_name"),
            ("/pooling", {**asked, "task": "classify"}, "task"),
            ("/pooling", {**asked, "model": RERANKER}, "multi-vector-embedding"),
            ("/v1/embeddings", {"model": name, "input": texts}, "text-embedding"),
        ):
            wrong = http.post(path, json=body)
            assert wrong.status_code in (400, 422), wrong.text
            assert field in wrong.text
        ranks = http.post("/rerank", json={"query": texts[0], "texts": texts}).json()
        assert len(ranks) == len(texts)


def test_an_error_of_a_query_names_the_first_row_that_has_it(
    tmp_path: Path, models: dict[str, Path]
) -> None:
    task, reject = "late-interaction-reranking", {"truncation": "reject"}
    folder = write_vectors(tmp_path / "strict", models[EVERYDAY[0]], task, tokenizer=reject)
    (folder / "traffic.jsonl").write_text('{"text": "a", "text_pair": "b"}\n', encoding="utf-8")
    inputs = read_inputs(load_spec(folder), quiet)
    assert inputs.tokenizer_file is not None

    def made(queries: list[str], **settings: int) -> list[Row] | Exception:
        maker = QueryPassageRowMaker(
            {**inputs.plan.row_settings, "layout": "packed", **settings},
            Path(inputs.tokenizer_file or "").parent,
        )
        columns = {"text": queries, "text_pair": ["c"] * len(queries)}
        (rows,) = maker.token_rows([RowInputs(columns, {})])
        return rows

    error = made(["a", "a", "word " * 60])
    assert isinstance(error, RequestError)
    assert error.numbers == {"row": 2}
    assert isinstance(made(["a", "b"], max_core_rows=3), RequestError)
    rows = made(["a", "a"], max_core_rows=3)
    assert isinstance(rows, list)
    assert [unpack_metadata(row.metadata).row for row in rows] == [-1, 0, 0]


def test_settings_of_a_model_are_applied_or_refused(
    tmp_path: Path, models: dict[str, Path], minilm_folder: Path
) -> None:
    source, task = models[EVERYDAY[0]], "multi-vector-embedding"

    def changed(file: str, **values: object) -> Path:
        model = tmp_path / f"{file.replace('/', '_')}_{'_'.join(values)}"
        shutil.copytree(source, model)
        (model / file).write_text(json.dumps({**json.loads((model / file).read_text()), **values}))
        return write_vectors(model / "pipeline", model, task)

    transformer, mask = "sentence_bert_config.json", "2_MultiVectorMask/config.json"
    for message, folder in (
        ("keep_only_token_ids", changed(mask, keep_only_token_ids=[5])),
        ("length of 1 to", changed(transformer, query_expansion={"length": 9999})),
        ("MultiVectorMask", write_vectors(tmp_path / "plain", minilm_folder, task)),
    ):
        check_refused(message, read_inputs, load_spec(folder), quiet)
    both = changed(mask, skiplist_tasks=["query", "document"], skiplist_words=["a", "zzzz"])
    roles = read_inputs(load_spec(both), quiet).plan.info.roles
    assert len(roles["query"].skipped) == len(roles["document"].skipped) == 1
    short = write_vectors(tmp_path / "short", source, task, tokenizer={"max_length": 20})
    with pytest.raises(UserError, match=r"tokenizer\.max_length"):
        read_inputs(load_spec(short), quiet)
    means = changed("config_sentence_transformers.json", similarity_fn_name="meanmaxsim")
    info = read_inputs(load_spec(means), quiet).plan.info
    assert find_task("late-interaction-reranking").settings(info)["mean_scores"]
    assert in_current_form(source, "MultiVectorEncoder", quiet) == source
