"""The served ensembles, both layouts, on a real tritonserver: right, fair, and hard to break."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from benchmarks.step_bytes import count_bytes
from tests.support.processes import eventually
from tests.support.project import LAYOUTS, traffic_texts
from triptych.client import Client

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
    texts = [*traffic_texts()[:60], *STRANGE]
    return dict(zip(texts, reference.encode(texts, batch_size=16), strict=True))


def ask(raw: Any, pipeline: str, rows: list[bytes], **options: Any) -> Any:
    """One request of `rows` in Triton's own client."""
    tensor = triton.InferInput("text", [len(rows), 1], "BYTES")
    tensor.set_data_from_numpy(np.array(rows, dtype=np.object_).reshape(-1, 1))
    return raw.infer(pipeline, [tensor], client_timeout=60, **options).as_numpy("embedding")


def test_rows_equal_sentence_transformers_in_any_company(
    client: Any, raw: Any, pipeline: str, expected: dict[str, Any]
) -> None:
    """In one list, one by one, each beside 31 others, and in a batch in either order."""
    texts, wanted = list(expected), np.stack(list(expected.values()))
    vectors = client.embed(texts)
    assert vectors.dtype == np.float32
    assert np.abs(vectors - wanted).max() < 1e-5
    rows = [text.encode() for text in texts[-32:]]
    together = ask(raw, pipeline, rows)
    alone = np.concatenate([ask(raw, pipeline, [row]) for row in rows])
    with ThreadPoolExecutor(32) as pool:
        beside = np.concatenate(list(pool.map(lambda row: ask(raw, pipeline, [row]), rows)))
    assert np.abs(together - wanted[-32:]).max() < 1e-5
    for found in (alone, beside, ask(raw, pipeline, rows[::-1])[::-1]):
        assert np.abs(found - together).max() < 1e-6


def test_the_bytes_of_each_step_are_counted(pipeline: str, minilm_server: Any) -> None:
    """The steps are called one by one, without the optional inputs of the pipeline."""
    counted = count_bytes(minilm_server.grpc_url, pipeline, ["a text", "another", "the last"], 2)
    assert [one.step for one in counted] == [
        f"{pipeline}_{step}" for step in ("preprocess", "core", "postprocess")
    ]
    assert counted[0].inputs == {"text": len("a text" + "another" + "the last") + 3 * 4}
    assert counted[2].outputs == {"embedding": 3 * 384 * 4}


def test_requests_really_share_batches(pipeline: str, minilm_server: Any) -> None:
    def read_core(client: Client) -> Any:
        return next(s for s in client.step_statistics() if s.model.endswith("_core"))

    with Client(pipeline, minilm_server.grpc_url, rows_per_request=1, max_in_flight=32) as client:

        def measure() -> float:
            """Return the mean size of the batches of 320 rows."""
            before = read_core(client)
            client.embed(["the same words in every text"] * 320)
            # The server counts a batch after its answers.
            assert eventually(lambda: read_core(client).rows - before.rows >= 320)
            now = read_core(client)
            return float((now.rows - before.rows) / (now.executions - before.executions))

        # A busy machine may share less at first.
        assert eventually(lambda: measure() > 4, within_s=120.0)


BAD_ROWS: dict[bytes, list[str]] = {
    b"\xff\xfe": ["row=0", "valid UTF-8", "0xff", "position 0"],
    b"ok \xed\xa0\x80": ["row=0", "valid UTF-8", "position 3"],
    b"x" * 5_000_000: ["row=0", "at most 131072 bytes", "5000000 bytes"],
}


def test_a_bad_row_fails_alone_among_neighbors(
    raw: Any, pipeline: str, expected: dict[str, Any]
) -> None:
    texts = list(expected)[:24]
    with ThreadPoolExecutor(27) as pool:
        sent = [pool.submit(ask, raw, pipeline, [text.encode()]) for text in texts[:12]]
        bad = {row: pool.submit(ask, raw, pipeline, [row]) for row in BAD_ROWS}
        sent += [pool.submit(ask, raw, pipeline, [text.encode()]) for text in texts[12:]]
        for row, words in BAD_ROWS.items():
            with pytest.raises(InferenceServerException) as caught:
                bad[row].result()
            assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
            assert all(word in str(caught.value.message()) for word in words), words
        for text, answer in zip(texts, sent, strict=True):
            assert np.abs(answer.result()[0] - expected[text]).max() < 1e-5
    told = r"\[invalid_request row=2\] `text` must be valid UTF-8"
    with pytest.raises(InferenceServerException, match=told):
        ask(raw, pipeline, [b"a", b"b", b"\x80", b"d"])


def test_an_encoding_has_the_ranges_of_its_size(
    client: Any, pipeline: str, minilm_repository: Path
) -> None:
    """`test_decoders` has every encoding and size."""
    from sentence_transformers.util import quantize_embeddings

    texts = traffic_texts()[:12]
    step = minilm_repository / f"{pipeline}_postprocess/1"
    sizes = json.loads((step / "settings.json").read_text())["range_sizes"]
    end = 384 + sum(sizes[: sizes.index(256) + 1])
    own = np.load(step / "ranges.npy")[:, end - 256 : end]
    found = client.embed(texts, encoding="int8", dimensions=256)
    floats = client.embed(texts, dimensions=256)
    wanted = quantize_embeddings(floats, precision="int8", ranges=own)
    assert np.array_equal(found, wanted)
    assert client.infer({"text": texts[:2]}).keys() == {"embedding"}
