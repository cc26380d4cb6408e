"""The served ensembles, both layouts, on a real tritonserver: right, fair, and hard to break."""

import json
import random
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from benchmarks.step_bytes import count_bytes
from checkpoint_files import write
from conftest import LAYOUTS, build_into, set_setting, traffic_texts, write_pipeline
from processes import eventually
from triptych.client import Client, Retry
from triptych.serving.server import Server

STRANGE = [
    "",
    " ",
    "\t\n  \u3000",
    "\x00",
    "a\x00b",
    "🙂",
    "👩‍👩‍👧‍👦 family",
    "مرحبا بالعالم",
    "שלום עולם",
    "漢字かな交じり文",
    "\\ud800 is an escape of a lone surrogate",
    "e\u0301 combining",
    "\u202eright to left override",
    "x" * 3000,
    "[CLS] [SEP] [MASK] [PAD]",
    "a " * 2000,
    "ﬁ ligature ½ ²",
    "\ufeffbom",
]
pytestmark = pytest.mark.server


@pytest.fixture(params=LAYOUTS)
def pipeline(request: pytest.FixtureRequest) -> str:
    return f"minilm_{request.param}"


@pytest.fixture
def client(pipeline: str, minilm_server: Any) -> Any:
    with Client(pipeline, minilm_server.grpc_url) as client:
        yield client


@pytest.fixture(scope="module")
def raw(minilm_server: Any) -> Any:
    with triton.InferenceServerClient(minilm_server.grpc_url) as raw:
        yield raw


@pytest.fixture(scope="module")
def expected(reference: Any) -> dict[str, Any]:
    """Text -> what sentence-transformers makes of it."""
    texts = [*traffic_texts()[:160], *STRANGE]
    return dict(zip(texts, reference.encode(texts, batch_size=16), strict=True))


def ask(raw: Any, pipeline: str, rows: list[bytes], **options: Any) -> Any:
    """One request of `rows` in Triton's own client."""
    tensor = triton.InferInput("text", [len(rows), 1], "BYTES")
    tensor.set_data_from_numpy(np.array(rows, dtype=np.object_).reshape(-1, 1))
    return raw.infer(pipeline, [tensor], client_timeout=60, **options).as_numpy("embedding")


def test_a_list_equals_sentence_transformers(client: Any, expected: dict[str, Any]) -> None:
    vectors = client.embed(list(expected))
    assert vectors.dtype == np.float32
    assert np.abs(vectors - np.stack(list(expected.values()))).max() < 1e-5


def test_concurrent_clients_get_the_reference(
    pipeline: str, minilm_server: Any, expected: dict[str, Any]
) -> None:
    texts = list(expected)
    random.Random(0).shuffle(texts)
    with Client(pipeline, minilm_server.grpc_url) as client, ThreadPoolExecutor(32) as pool:
        vectors = list(pool.map(lambda text: client.embed([text])[0], texts))
    for text, vector in zip(texts, vectors, strict=True):
        assert np.abs(vector - expected[text]).max() < 1e-5


def test_a_client_batch_of_mixed_lengths(raw: Any, pipeline: str, expected: dict[str, Any]) -> None:
    texts = list(expected)[:32]
    vectors = ask(raw, pipeline, [text.encode() for text in texts])
    assert np.abs(vectors - np.stack([expected[text] for text in texts])).max() < 1e-5
    backwards = ask(raw, pipeline, [text.encode() for text in texts[::-1]])
    assert np.abs(backwards[::-1] - vectors).max() < 1e-6


def test_alone_equals_in_batch(raw: Any, pipeline: str) -> None:
    rows = [text.encode() for text in traffic_texts()[:32]]
    alone = np.concatenate([ask(raw, pipeline, [row]) for row in rows])
    together = ask(raw, pipeline, rows)
    with ThreadPoolExecutor(32) as pool:
        beside = np.concatenate(list(pool.map(lambda row: ask(raw, pipeline, [row]), rows)))
    assert np.abs(alone - together).max() < 1e-6
    assert np.abs(alone - beside).max() < 1e-6


def test_the_bytes_of_each_step_are_counted(pipeline: str, minilm_server: Any) -> None:
    """The steps are called one by one, without the optional inputs of the pipeline."""
    counted = count_bytes(minilm_server.grpc_url, pipeline, ["a text", "another", "the last"], 2)
    assert [one.step for one in counted] == [
        f"{pipeline}_{step}" for step in ("preprocess", "core", "postprocess")
    ]
    assert counted[0].inputs == {"text": len("a text" + "another" + "the last") + 3 * 4}
    assert counted[2].outputs == {"embedding": 3 * 384 * 4}


def test_requests_really_share_batches(pipeline: str, minilm_server: Any) -> None:
    def core(client: Any) -> Any:
        return next(s for s in client.step_statistics() if s.model.endswith("_core"))

    sizes: list[float] = []  # a busy machine may share less at first
    with Client(pipeline, minilm_server.grpc_url, rows_per_request=1, max_in_flight=32) as client:
        while len(sizes) < 5 and max(sizes, default=0) <= 4:
            before = core(client)
            client.embed(["the same words in every text"] * 320)
            # The server counts a batch after its answers.
            assert eventually(lambda: core(client).rows - before.rows == 320)  # noqa: B023
            sizes.append(320 / (core(client).executions - before.executions))
    assert max(sizes) > 4, sizes


BAD_ROWS = [
    (b"\xff\xfe", ["row=0", "valid UTF-8", "0xff", "position 0"]),
    (b"ok \xed\xa0\x80", ["row=0", "valid UTF-8", "position 3"]),
    (b"x" * 5_000_000, ["row=0", "at most 131072 bytes", "5000000 bytes"]),
]


@pytest.mark.parametrize(("row", "words"), BAD_ROWS, ids=["utf8", "surrogate", "megabytes"])
def test_a_bad_row_fails_alone_among_neighbors(
    raw: Any, pipeline: str, expected: dict[str, Any], row: bytes, words: list[str]
) -> None:
    texts = list(expected)[:24]
    failures: list[InferenceServerException] = []

    def send(item: str | bytes) -> Any:
        try:
            return ask(raw, pipeline, [item if isinstance(item, bytes) else item.encode()])
        except InferenceServerException as error:
            failures.append(error)
            return None

    items: list[str | bytes] = [*texts[:12], row, *texts[12:]]
    with ThreadPoolExecutor(25) as pool:
        answers = list(pool.map(send, items))
    assert [error.status() for error in failures] == ["StatusCode.INVALID_ARGUMENT"]
    for word in words:
        assert word in str(failures[0].message())
    for item, answer in zip(items, answers, strict=True):
        if isinstance(item, str):
            assert np.abs(answer[0] - expected[item]).max() < 1e-5


def test_the_row_at_fault_is_named(raw: Any, pipeline: str) -> None:
    told = r"\[invalid_request row=2\] `text` must be valid UTF-8"
    with pytest.raises(InferenceServerException, match=told):
        ask(raw, pipeline, [b"a", b"b", b"\x80", b"d"])


BAD_PARAMETERS: Sequence[tuple[dict[str, Any], list[str]]] = (
    ({"dimensions": 0}, ["dimensions", "integer from 1 to 384", "0"]),
    ({"dimensions": 385}, ["dimensions", "385"]),
    ({"dimensions": "12"}, ["dimensions", "integer", "'12'"]),
    ({"dimensions": True}, ["dimensions", "integer", "True"]),
    ({"dimensons": 12}, ["dimensons", "not known", "Known parameters: dimensions"]),
)


def test_a_bad_parameter_is_refused(raw: Any, pipeline: str) -> None:
    for parameters, words in BAD_PARAMETERS:
        with pytest.raises(InferenceServerException) as caught:
            ask(raw, pipeline, [b"a"], parameters=parameters)
        assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
        for word in words:
            assert word in str(caught.value.message())


def test_dimensions_shorten_and_scale(client: Any, expected: dict[str, Any]) -> None:
    text = next(iter(expected))
    short = client.embed([text], dimensions=64)[0]
    want = expected[text][:64] / np.linalg.norm(expected[text][:64])
    assert short.shape == (64,)
    assert np.abs(short - want).max() < 1e-5


def test_encodings_are_those_of_sentence_transformers(
    client: Any, pipeline: str, minilm_repository: Path
) -> None:
    from sentence_transformers.util import quantize_embeddings

    texts = traffic_texts()[:40]
    step = minilm_repository / f"{pipeline}_postprocess/1"
    sizes = json.loads((step / "settings.json").read_text())["range_sizes"]
    ranges = np.load(step / "ranges.npy")
    ends = np.cumsum([384, *sizes])
    of_size = {size: ranges[:, end - size : end] for size, end in zip(sizes, ends[1:], strict=True)}
    for options, own in (({}, ranges[:, :384]), ({"dimensions": 256}, of_size[256])):
        floats = client.embed(texts, **options)
        for encoding in ("int8", "uint8", "binary", "ubinary"):
            found = client.embed(texts, encoding=encoding, **options)
            wanted = quantize_embeddings(floats, precision=encoding, ranges=own)
            assert found.dtype == wanted.dtype
            assert np.array_equal(found, wanted), (options, encoding)
    raw = client.embed(texts, dimensions=64, normalize_embeddings=False)
    assert np.array_equal(raw, client.embed(texts)[:, :64])
    assert client.infer({"text": texts[:2]}).keys() == {"embedding"}


def request(shape: list[int], dtype: str, data: Any, name: str = "text") -> triton.InferInput:
    tensor = triton.InferInput(name, shape, dtype)
    tensor.set_data_from_numpy(data)
    return tensor


BAD_TENSORS: dict[str, Callable[[], triton.InferInput]] = {
    "two columns": lambda: request([1, 2], "BYTES", np.array([[b"a", b"b"]], dtype=np.object_)),
    "no batch": lambda: request([1], "BYTES", np.array([b"a"], dtype=np.object_)),
    "int32": lambda: request([1, 1], "INT32", np.array([[1]], dtype=np.int32)),
    "other name": lambda: request([1, 1], "BYTES", np.array([[b"a"]], dtype=np.object_), "txt"),
    "33 rows": lambda: request([33, 1], "BYTES", np.array([[b"a"]] * 33, dtype=np.object_)),
    "no rows": lambda: request([0, 1], "BYTES", np.empty((0, 1), dtype=np.object_)),
}


def test_a_bad_tensor_is_refused(raw: Any, pipeline: str) -> None:
    for case, tensor in BAD_TENSORS.items():
        with pytest.raises(InferenceServerException) as caught:
            raw.infer(pipeline, [tensor()], client_timeout=60)
        assert caught.value.status() == "StatusCode.INVALID_ARGUMENT", case
        assert len(ask(raw, pipeline, [b"still well"])) == 1, case


@pytest.fixture(scope="module")
def strict_server(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, minilm_repository: Path
) -> Any:
    """A tiny pipeline that rejects long rows, with prompts; MiniLM with short queues."""
    base = tmp_path_factory.mktemp("strict")
    for part in minilm_repository.glob("minilm_packed*"):
        shutil.copytree(part, base / "repository" / part.name)
    set_setting(base / "repository", "minilm_packed_preprocess", "max_requests", 4)
    prompted = Path(shutil.copytree(tiny_model, base / "prompted"))
    prompts = {"prompts": {"query": "query: ", "passage": "passage: "}}
    write(prompted / "config_sentence_transformers.json", prompts)
    kinds = {"": "Transformer", "1_Pooling": "Pooling"}
    modules = [
        {"idx": idx, "name": str(idx), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for idx, (path, kind) in enumerate(kinds.items())
    ]
    write(prompted / "modules.json", modules)
    write(
        prompted / "1_Pooling/config.json",
        {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True},
    )
    reject = write_pipeline(
        base / "pipelines/reject",
        model={"source": str(prompted)},
        core={"layout": "bucketed", "max_batch_size": 4},
        tokenizer={"max_length": 16, "truncation": "reject"},
    )
    build_into(reject, base / "repository")
    with Server(base / "repository") as server:
        yield server


def test_a_long_row_is_rejected_where_the_spec_says_so(strict_server: Any) -> None:
    with triton.InferenceServerClient(strict_server.grpc_url) as raw:
        assert ask(raw, "reject", [b"word " * 14]).shape == (1, 32)
        with pytest.raises(
            InferenceServerException, match=r"row=1\] .*at most 16 tokens.*17 tokens"
        ):
            ask(raw, "reject", [b"short", b"word " * 15])


def test_a_prompt_is_chosen_by_name(strict_server: Any) -> None:
    with Client("reject", strict_server.grpc_url) as client:
        named = client.embed(["a text"], prompt_name="query")
        assert np.abs(named - client.embed(["query: a text"])).max() < 1e-6
        assert np.abs(named - client.embed(["a text"])).max() > 1e-3
    with (
        triton.InferenceServerClient(strict_server.grpc_url) as raw,
        pytest.raises(InferenceServerException, match="one of passage, query"),
    ):
        ask(raw, "reject", [b"a"], parameters={"prompt_name": "nope"})


def flood(raw: Any, pipeline: str, timeouts_s: list[float]) -> list[str]:
    """Send one long request per timeout, all at once; the outcome of each: ``ok`` or a status."""
    outcomes: list[str] = []
    done = threading.Event()

    def record(result: Any, error: InferenceServerException | None) -> None:
        outcomes.append("ok" if error is None else error.status())
        if len(outcomes) == len(timeouts_s):
            done.set()

    tensor = request([1, 1], "BYTES", np.array([[b"long text " * 100]], dtype=np.object_))
    for timeout_s in timeouts_s:
        raw.async_infer(pipeline, [tensor], record, client_timeout=timeout_s)
    assert done.wait(120), f"{len(timeouts_s) - len(outcomes)} requests are stuck"
    return outcomes


def test_overload_is_refused_at_once_and_nothing_hangs(strict_server: Any) -> None:
    """400 long requests at once where 4 may be under way: each is answered or refused."""
    with triton.InferenceServerClient(strict_server.grpc_url) as raw:
        outcomes = flood(raw, "minilm_packed", [60.0] * 400)
        assert set(outcomes) == {"ok", "StatusCode.UNAVAILABLE"}
        assert outcomes.count("ok") >= 4
        assert len(ask(raw, "minilm_packed", [b"served again"])) == 1


def test_clients_that_leave_in_an_overload_hurt_nobody(strict_server: Any) -> None:
    """Deadlines shorter than the work: what its client left must not fill the pipeline for ever."""
    with triton.InferenceServerClient(strict_server.grpc_url) as raw:
        short = [0.02 + 0.002 * (number % 50) for number in range(200)]
        assert "StatusCode.DEADLINE_EXCEEDED" in flood(raw, "minilm_packed", short)
    with Client("minilm_packed", strict_server.grpc_url, retry=Retry(attempts=20)) as client:
        assert len(client.embed(["served again"])) == 1
