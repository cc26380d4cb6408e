"""The gateway beside a real server, with the unchanged `openai` client and plain HTTP."""

import asyncio
import base64
import json
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import psutil
import pytest
from tokenizers import Tokenizer

from tests.support.client_toy import Toy, wait_until
from tests.support.gateway_environment import run_with_clients, run_with_node
from tests.support.hostile_bodies import send_hostile
from tests.support.otlp_receiver import check_trace, otlp_receiver
from tests.support.project import ROOT, build_into, traffic_texts, write_pipeline
from tests.support.served_command import endpoints_of, gateway, serving
from tests.support.task_models import MODELS
from triptych.client import Client
from triptych.gateway.errors import ApiError
from triptych.gateway.http import Body, EndpointApp, Operation, Shared
from triptych.gateway.tei import check_not_normalized

pytestmark = pytest.mark.server
TEXTS = traffic_texts()[:100]
PROMPTS = {"query": "query: ", "passage": "passage: "}
NAMES = {"minilm": "text-embedding", "ranks": "reranking", "topics": "text-classification"}
RESTATED = "127.0.0.1:8080"
"""Address of the gateway in the documents."""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, minilm_folder: Path) -> Path:
    """MiniLM with prompts, a reranker and a classifier."""
    base = tmp_path_factory.mktemp("gateway")
    for name, task in NAMES.items():
        spec: dict[str, Any] = {"prompts": PROMPTS} if name == "minilm" else {"task": task}
        if name in MODELS:
            made = MODELS[name][1](base / "models" / name, minilm_folder, traffic_texts())
            spec["model"] = {"source": str(made)}
            spec["core"] = {"layout": {"ranks": "bucketed", "topics": "packed"}[name]}
        folder = write_pipeline(base / "pipelines" / name, **spec)
        query = {"text": "refund"} if name == "ranks" else {}
        rows = [{"text_pair" if query else "text": text, **query} for text in TEXTS[:40]]
        (folder / "traffic.jsonl").write_text("\n".join(map(json.dumps, rows)))
        build_into(folder, base / "repository")
    return base / "repository"


@pytest.fixture(scope="module")
def served(repository: Path) -> Iterator[dict[str, Any]]:
    """Addresses of `triptych serve --http-api`, which ends its gateway with its server."""
    words = ("--http-api", "0", "--alias", "text-embedding-3-small=minilm")
    with otlp_receiver() as (url, spans), pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIPTYCH_TRACE", url)
        patch.setenv("TRIPTYCH_TRACE_RATE", "1000000")
        with serving(repository, "--profile", "production", *words) as run:
            yield {**endpoints_of(run), "serve_pid": run.pid, "spans": spans}
            beside = gateway_of(run.pid)
            run.send_signal(signal.SIGTERM)
            assert run.wait(timeout=300) == 0
            assert not beside.is_running()


def gateway_of(pid: int) -> psutil.Process:
    """The process of the gateway that `triptych serve` with this id has started."""
    children = psutil.Process(pid).children()
    (beside,) = (each for each in children if "triptych.interface.cli" in each.cmdline())
    return beside


@pytest.fixture(scope="module")
def api(served: dict[str, Any]) -> Iterator[openai.OpenAI]:
    url = f"{served['api']}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def http(served: dict[str, Any]) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=served["api"], timeout=60) as client:
        yield client


def test_the_openai_client_embeds_as_the_grpc_client_does(
    served: dict[str, Any], api: openai.OpenAI, http: httpx2.Client, repository: Path
) -> None:
    with Client("minilm", served["grpc"]) as client:
        wanted = client.embed(TEXTS)
        queries = client.embed(TEXTS[:3], prompt="query", dimensions=64)

    def embed(texts: Any, **words: Any) -> Any:
        made = api.embeddings.create(**{"model": "minilm", "input": texts, **words})
        assert [each.index for each in made.data] == list(range(len(made.data)))
        return made, np.array([each.embedding for each in made.data], np.float32)

    made, vectors = embed(TEXTS, model="text-embedding-3-small")
    assert np.abs(vectors - wanted).max() < 1e-5
    assert made.model == "text-embedding-3-small"
    tokenizer = Tokenizer.from_file(str(repository / "minilm_preprocess/1/tokenizer.json"))
    tokenizer.no_padding()
    tokens = sum(len(each.ids) for each in tokenizer.encode_batch(TEXTS))
    assert made.usage.prompt_tokens == made.usage.total_tokens == tokens
    for kind, same in (("query", True), ("passage", False)):
        body = {"input_type": kind, "truncate_prompt_tokens": -1}
        _, vectors = embed(TEXTS[:3], dimensions=64, encoding_format="float", extra_body=body)
        assert vectors.shape == (3, 64)
        assert bool(np.abs(vectors - queries).max() < 1e-5) is same
    rows = http.post("/tei/minilm/tokenize", json={"inputs": TEXTS[:3]}).json()
    ids = [[token["id"] for token in row] for row in rows]
    for given, count in ((ids, 3), (ids[0], 1), (TEXTS[0], 1)):
        _, vectors = embed(given)
        assert vectors.shape == (count, 384)
        assert np.abs(vectors - wanted[:count]).max() < 1e-5


def test_one_trace_has_gateway_ensemble_and_steps(served: dict[str, Any]) -> None:
    check_trace(served["api"], "minilm", served["spans"])


def test_the_openai_client_raises_its_own_errors(api: openai.OpenAI) -> None:
    bad, long = openai.BadRequestError, "c" * 200_000
    cases: list[tuple[type[openai.APIStatusError], str, str | None, dict[str, Any]]] = [
        (openai.NotFoundError, "model_not_found", "model", {"model": "minilm_core"}),
        (bad, "unsupported_task", "model", {"model": "ranks"}),
        # Ids of another tokenizer have none of the special tokens of this one.
        (bad, "invalid_value", "input", {"input": [15339, 1917]}),
        (bad, "invalid_value", "input[1]", {"input": [[101, 102], [1]]}),
        (bad, "invalid_value", "input[2]", {"input": ["a", "b", long]}),
        (bad, "invalid_value", "input", {"input": long}),
        (bad, "invalid_value", None, {"dimensions": 9999}),
        (bad, "invalid_value", "input_type", {"extra_body": {"input_type": "poem"}}),
    ]
    for kind, code, param, words in cases:
        with pytest.raises(kind) as caught:
            api.embeddings.create(**{"model": "minilm", "input": "a", **words})
        assert (caught.value.code, caught.value.param) == (code, param), caught.value
    assert [each.id for each in api.models.list()] == [*NAMES, "text-embedding-3-small"]
    assert api.models.retrieve("text-embedding-3-small").id == "text-embedding-3-small"
    with pytest.raises(openai.NotFoundError):
        api.models.retrieve("gpt-4")


def test_rerank_apis_sort_as_the_grpc_client_does(
    served: dict[str, Any], http: httpx2.Client
) -> None:
    documents = TEXTS[:50]
    with Client("ranks", served["grpc"]) as client:
        wanted = client.rerank("refund", documents)
    body = {"model": "ranks", "query": "refund", "documents": documents}
    for path in ("/v1/rerank", "/v2/rerank"):
        made = http.post(path, json={**body, "top_n": 7}).json()
        assert [each["index"] for each in made["results"]] == [each.index for each in wanted[:7]]
        assert made["results"][0]["relevance_score"] == pytest.approx(wanted[0].score, abs=1e-5)
        assert made["usage"]["total_tokens"] > 50 * 4
    of_root = http.post("/rerank", json={**body, "top_n": 7}).json()
    assert of_root["results"] == made["results"]
    assert set(of_root) == set(made)
    objects = [{"text": text} for text in documents]
    made = http.post("/v1/rerank", json={**body, "documents": objects, "return_documents": True})
    best = made.json()["results"][0]
    assert best["document"]["text"] == documents[best["index"]]
    ranks = http.post("/rerank", json={"query": "refund", "texts": documents, "return_text": True})
    assert [each["index"] for each in ranks.json()] == [each.index for each in wanted]
    assert ranks.json()[0]["text"] == documents[wanted[0].index]
    wrong = http.post("/v2/rerank", json={**body, "documents": ["a", "b" * 200_000]})
    assert wrong.status_code == 400
    assert wrong.json()["message"].startswith("`documents[1]` must have at most ")


def test_cohere_embeds_each_type_as_the_grpc_client_does(
    served: dict[str, Any], http: httpx2.Client
) -> None:
    texts = TEXTS[:7]
    body = {"model": "minilm", "texts": texts, "input_type": "search_query"}
    with Client("minilm", served["grpc"]) as client:
        wanted = {
            kind: client.embed(texts, prompt="query", encoding=kind)
            for kind in ("float", "int8", "uint8", "binary", "ubinary")
        }

    def embed(path: str = "/v2/embed", **fields: Any) -> Any:
        return http.post(path, json=body | fields).json()

    for path in ("/v2/embed", "/v1/embed"):
        for kinds in (["binary"], ["int8", "ubinary"], ["ubinary", "float"], [*wanted]):
            made = embed(path, embedding_types=kinds)
            assert list(made["embeddings"]) == kinds
            assert made["response_type"] == "embeddings_by_type"
            for kind in kinds:
                vectors = np.array(made["embeddings"][kind])
                assert vectors.shape == wanted[kind].shape
                if kind == "float":
                    assert np.abs(vectors - wanted[kind]).max() < 1e-5
                else:  # an element near a border may fall on its other side
                    assert (vectors == wanted[kind]).mean() > 0.99
    plain = embed("/v1/embed", truncate="NONE", max_tokens=100_000)
    assert plain["response_type"] == "embeddings_floats"
    assert plain["texts"] == texts
    assert np.abs(np.array(plain["embeddings"]) - wanted["float"]).max() < 1e-5
    made = embed(output_dimension=64, embedding_types=["base64", "float"])["embeddings"]
    (first, *_), (short, *_) = made["base64"], made["float"]
    assert np.frombuffer(base64.b64decode(first), "<f4").tolist() == pytest.approx(short)
    for fields, message in (
        ({"texts": None, "images": ["data:image/png;base64,"]}, "`images`: is not supported"),
        ({"inputs": [{"content": []}]}, "`inputs`: is not supported"),
        ({"texts": []}, "`texts`"),
        ({"texts": ["a", "b" * 200_000]}, "texts[1]: "),
        ({"texts": ["a", "refund " * 2000], "truncate": "NONE"}, "texts[1]: "),
        ({"truncate": "START"}, "`truncate`"),
        ({"input_type": "poem"}, "`input_type` is no prompt"),
        ({"max_tokens": 3}, "`max_tokens` must not be below"),
        ({"embedding_types": ["int4"]}, "`embedding_types[0]`"),
        ({"model": "ranks"}, "`model` must name a pipeline for text-embedding"),
    ):
        assert embed(**fields)["message"].startswith(message), fields


def test_tei_endpoints_answer_as_the_grpc_client_does(
    served: dict[str, Any], http: httpx2.Client
) -> None:
    with Client("minilm", served["grpc"]) as client:
        vectors = client.embed(TEXTS[:5])
    for path in ("/embed", "/", "/tei/minilm/embed", "/tei/minilm"):
        made = http.post(path, json={"inputs": TEXTS[:5], "truncate": True}).json()
        assert np.abs(np.array(made) - vectors).max() < 1e-5
    assert len(http.post("/embed", json={"inputs": TEXTS[0]}).json()) == 1
    with Client("topics", served["grpc"]) as client:
        choices = client.classify(TEXTS[:2], top_k=5)
    one = http.post("/predict", json={"inputs": TEXTS[0]}).json()
    assert [each["label"] for each in one] == [each.label for each in choices[0]]
    batch = http.post("/predict", json={"inputs": [[text] for text in TEXTS[:2]]}).json()
    assert batch[0] == one
    assert [each["label"] for each in batch[1]] == [each.label for each in choices[1]]
    (tokens,) = http.post("/tei/minilm/tokenize", json={"inputs": "Ünïcode text"}).json()
    assert [each["text"] for each in tokens if not each["special"]][-1] == "text"
    assert [each["special"] for each in tokens][:: len(tokens) - 1] == [True, True]
    info = http.get("/tei/topics/info").json()
    assert info["model_type"]["classifier"]["id2label"]["1"] == "delivery"
    assert info["max_input_length"] == 512
    assert http.get("/health").status_code == 200
    ambiguous = http.get("/info")
    assert (ambiguous.status_code, ambiguous.json()["error_type"]) == (404, "Validation")
    wrong = http.post("/embed", json={"inputs": ["a", "b" * 200_000]})
    assert (wrong.status_code, wrong.json()["error_type"]) == (422, "Validation")


def test_tei_does_what_a_request_asks_or_refuses_it(http: httpx2.Client) -> None:
    def post(path: str, **body: Any) -> Any:
        response = http.post(path, json=body)
        return response.json() if response.status_code == 200 else response.json()["error"]

    text, long = TEXTS[0], "word " * 600
    of_root: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("minilm", "embed", {"inputs": text}),
        ("minilm", "similarity", {"inputs": {"source_sentence": text, "sentences": TEXTS[1:4]}}),
        ("topics", "predict", {"inputs": text, "truncate": False}),
        ("ranks", "rerank", {"query": "refund", "texts": TEXTS[:3], "truncate": False}),
    )
    for name, endpoint, body in of_root:
        assert post(f"/tei/{name}", **body) == post(f"/{endpoint}", **body), name
    vectors = np.array(post("/embed", inputs=TEXTS[:4]))
    likes = post("/similarity", inputs={"source_sentence": text, "sentences": TEXTS[1:4]})
    assert np.abs(np.array(likes) - vectors[1:] @ vectors[0]).max() < 1e-5
    cases: tuple[tuple[str, dict[str, Any], str], ...] = (
        ("/embed", {"inputs": [text, long]}, "inputs[1]"),
        ("/embed", {"inputs": long, "prompt_name": "query"}, "inputs[0]"),
        ("/predict", {"inputs": [[text], [long]]}, "inputs[1]"),
        ("/rerank", {"query": "refund", "texts": [text, long]}, "texts[1]"),
    )
    for path, body, at in cases:
        error = post(path, **body, truncate=False)
        assert error.startswith(f"{at}: "), error
        assert "leave out `truncate`" in error
        assert isinstance(post(path, **body, truncate=True), list)
    assert "`normalize` must be true" in post("/embed", inputs=text, normalize=False)
    assert "`texts[1]`: String should have at least 1 char" in post(
        "/rerank", query="a", texts=["b", ""]
    )
    assert "`query`: String should have at least 1 char" in post("/rerank", query="", texts=["b"])
    assert "`texts[1]` must not be empty" in post("/rerank", query="a", texts=["b", " "])
    assert "`query` must not be empty" in post("/rerank", query=" ", texts=["b"])
    assert "`query`: Field required" in post("/tei/ranks", inputs=text)


def test_an_empty_text_has_the_same_vector_alone_and_in_lists(http: httpx2.Client) -> None:
    vectors = [http.post("/embed", json={"inputs": given}).json()[-1] for given in ("", ["a", ""])]
    for given in ("", ["a", ""]):
        made = http.post("/v1/embeddings", json={"model": "minilm", "input": given}).json()
        vectors.append(made["data"][-1]["embedding"])
    assert np.abs(np.array(vectors) - vectors[0]).max() < 1e-6


def test_every_pipeline_has_an_endpoint_with_its_own_inputs(http: httpx2.Client) -> None:
    described = http.get("/v1/pipelines/topics").json()
    assert described["inputs"] == ["text"]
    assert described["parameters"]["top_k"]["max"] == 5
    rows = [{"text": text} for text in TEXTS[:40]]
    made = http.post("/v1/pipelines/topics", json={"rows": rows, "parameters": {"top_k": 2}})
    answers = made.json()["rows"]
    assert len(answers) == 40
    assert all(len(each["label"]) == len(each["score"]) == 2 for each in answers)
    wrong = http.post("/v1/pipelines/topics", json={"rows": [rows[0], {"texts": "a"}]})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "rows[1]")


def test_the_examples_of_the_documents_are_answered(
    served: dict[str, Any], http: httpx2.Client
) -> None:
    text = (ROOT / "build_scripts/documentation/guides/gateway.md").read_text(encoding="utf-8")
    text = text.replace(RESTATED, served["api"].removeprefix("http://"))
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in re.sub(r"\\\n\s*", "", block).splitlines()]
    commands = [line for line in lines if line.startswith("curl")]
    assert len(commands) >= 4
    for command in commands:
        done = subprocess.run(command, shell=True, capture_output=True, timeout=60, check=True)
        assert "error" not in json.loads(done.stdout), done.stdout
    snippets = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (snippet,) = (each for each in snippets if served["api"] in each)
    space: dict[str, Any] = {}
    exec(snippet, space)
    assert len(space["vectors"]) == 2
    tasks = {"rerank": "ranks", "predict": "topics"}
    for path, methods in http.get("/openapi.json").json()["paths"].items():
        name = tasks.get(path.rpartition("/")[2], "minilm")
        if "post" in methods and not path.endswith(
            ("/tokenize", "completions", "_sparse", "_all", "/pooling")
        ):
            (content,) = methods["post"]["requestBody"]["content"].values()
            body = content["example"]
            if "model" in body:
                body["model"] = name
            called = "topics" if path.startswith("/v1/pipelines") else name
            response = http.post(re.sub(r"\{\w+\}", called, path), json=body)
            assert response.status_code == 200, (path, response.text)


def test_the_gateway_of_serve_is_started_again(served: dict[str, Any], http: httpx2.Client) -> None:
    before = gateway_of(served["serve_pid"])
    before.kill()
    before.wait(60)

    def answers() -> bool:
        try:
            return bool(http.get("/health").status_code == 200)
        except httpx2.TransportError:
            return False

    wait_until(answers, "the gateway is started again")


def test_hostile_json_in_any_field_gets_a_short_error(http: httpx2.Client) -> None:
    for path, name in (
        ("/v1/embeddings", "minilm"),
        ("/v2/embed", "minilm"),
        ("/v2/rerank", "ranks"),
        *((path, "topics") for path in ("/embed", "/predict", "/rerank")),
        ("/tei/{name}/tokenize", "topics"),
        ("/v1/pipelines/{name}", "topics"),
    ):
        assert send_hostile(http, path, name) > 100, path


@pytest.mark.long
def test_generated_requests_fit_the_published_documents(served: dict[str, Any]) -> None:
    run_with_clients("gateway_properties.py", served["api"], "^(?!.*completions)")


@pytest.mark.long
def test_suites_of_others_pass(served: dict[str, Any]) -> None:
    triton = served["http"], served["grpc"]
    assert " passed" in run_with_clients("gateway_suites.py", served["api"], "texts", *triton)


@pytest.mark.long
def test_clients_for_node_work_unchanged(served: dict[str, Any]) -> None:
    found = run_with_node("gateway_clients.mjs", served["api"], "texts")
    assert len(found) == 4
    assert np.abs(np.array(found["openai"]) - found["vercel"]).max() < 1e-5
    v1, v2 = ([each["index"] for each in found[f"cohere_{name}"]] for name in ("v1", "v2"))
    assert sorted(v1) == [0, 1, 2]
    assert v1 == v2


@pytest.fixture(scope="module")
def toy_api(toy: Toy) -> Iterator[str]:
    """The address of a gateway of the toy pipelines, without their repository."""
    with gateway("toy", "single", "narrow", "--url", toy.url, "--timeout-s", "600") as address:
        yield address


def test_limits_of_the_server_are_errors_of_the_api(toy: Toy, toy_api: str) -> None:
    async def send() -> None:
        url = f"{toy_api}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:

            def embed(model: str, *texts: str) -> asyncio.Task[Any]:
                made = client.embeddings.create(model=model, input=list(texts))
                return asyncio.ensure_future(made)

            held = [embed("narrow", "hold:narrow") for _ in range(8)]
            done, _ = await asyncio.wait(held, return_when=asyncio.FIRST_COMPLETED)
            for refused in (task.exception() for task in done):
                assert isinstance(refused, openai.RateLimitError), refused
                assert int(refused.response.headers["retry-after"]) >= 1
            toy.release("narrow", "narrow_step")
            without = await embed("toy", "a", "b")
            assert len(without.data) == 2  # without a repository there is no usage
            with pytest.raises(openai.InternalServerError) as caught:
                await embed("single", "break")
            assert caught.value.status_code == 500
            await asyncio.gather(*held, return_exceptions=True)

    asyncio.run(send())


def test_vectors_without_normalization_are_those_of_a_model_that_does_not_normalize() -> None:
    vectors = np.array([[3.0, 4.0], [0.0, 2.0]])
    check_not_normalized(vectors, None)
    for given, dimensions in ((vectors, 1), (np.array([[0.6, 0.8]]), None)):
        with pytest.raises(ApiError, match="`normalize` must be true"):
            check_not_normalized(given, dimensions)


def test_no_work_begins_for_a_client_that_disconnected_before() -> None:
    """Under overload a gateway reads requests whose clients have left meanwhile."""
    begun, received = [], iter([{"type": "http.request", "body": b"{}"}])

    async def work(_: Body) -> str:
        begun.append(True)
        return "answer"

    async def receive() -> dict[str, Any]:
        return next(received, {"type": "http.disconnect"})

    async def send(_: Any) -> None:
        raise AssertionError("there is nobody to answer")

    operation = Operation("/work", handler=work, body=Body)
    shared = Shared()
    scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
    asyncio.run(EndpointApp(operation, shared)(scope, receive, send))
    assert not begun
    value = shared.metrics.registry.get_sample_value
    assert value("triptych_gateway_requests_total", {"endpoint": "/work", "status": "499"}) == 1


def test_a_client_that_disconnects_cancels_its_work(toy: Toy, toy_api: str) -> None:
    """Triton finishes what a step executes; what waits is dropped, and the rest is never sent."""
    body = json.dumps({"model": "single", "input": ["hold:abandoned"] * 40})
    head = "POST /v1/embeddings HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    host, port = toy_api.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
        toy.wait_begun("hold:abandoned", "single_step")
    left = 'endpoint="/v1/embeddings",status="499"} 1.0'
    with httpx2.Client(base_url=toy_api, timeout=300) as client:
        wait_until(lambda: left in client.get("/metrics").text, "the work is canceled")
        toy.release("abandoned", "single_step")
        after = {"model": "single", "input": ["after"] * 2}
        assert client.post("/v1/embeddings", json=after).status_code == 200
    assert len(toy.wait_seen("abandoned", "single_step")) <= 8
