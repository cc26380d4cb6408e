"""`triptych.Predictor` against real servers: typed columns, rows that fail, batches of any form."""

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import triptych
from tests.support.client_toy import Toy, expected, texts_of_many_lengths
from triptych.serving.server import Server

pytestmark = pytest.mark.server


@pytest.fixture
def predictor(toy: Toy) -> Iterator[triptych.Predictor]:
    with triptych.Predictor("toy", url=toy.url) as predictor:
        yield predictor


def test_vectors_are_those_of_the_original_model(minilm_server: Server, reference: Any) -> None:
    texts = ["a late parcel", "", "the invoice is wrong " * 40]
    with triptych.Predictor("minilm_packed", url=minilm_server.grpc_url) as predictor:
        found = predictor({"id": np.arange(3), "text": np.array(texts)})
        assert found.column_names == ["id", "text", "embedding", "error"]
        assert found["embedding"].type == pa.list_(pa.float32(), 384)
        assert (found["id"].to_pylist(), found["error"].null_count) == ([0, 1, 2], 3)
        vectors = found["embedding"].combine_chunks().flatten().to_numpy().reshape(3, 384)
        np.testing.assert_allclose(vectors, reference.encode(texts), atol=1e-5)


def test_a_batch_of_several_chunks_keeps_its_rows_and_order(predictor: triptych.Predictor) -> None:
    texts = texts_of_many_lengths(700, "predictor")
    for rows in (texts, texts[:1], [], texts[:300]):
        found = predictor(pa.table({"text": pa.array(rows, pa.string())}))
        vectors = np.array(found["embedding"].to_pylist(), np.float32).reshape(-1, 8)
        np.testing.assert_allclose(
            vectors, np.reshape([expected(text) for text in rows], (-1, 8)), atol=1e-6
        )


def test_a_row_that_fails_has_its_reason_and_others_their_results(
    predictor: triptych.Predictor,
) -> None:
    found = predictor({"text": np.array(["a", None, "refuse", "break", "b"], object)})
    reasons = found["error"].to_pylist()
    assert reasons[0] is None
    assert reasons[4] is None
    assert reasons[1] == "`text` must be text. Given: null"
    assert "must not be refused" in reasons[2]
    assert "the step is broken" in reasons[3]
    assert [row is None for row in found["embedding"].to_pylist()] == [False, *[True] * 3, False]
    numbers = predictor({"text": np.array([1.5, 2.5])})
    assert numbers["error"][0].as_py() == "`text` must be text. Given: 1.5"


def test_entities_are_nested_lists_also_where_none_is_found(toy: Toy) -> None:
    with triptych.Predictor("tagger", url=toy.url, columns={"text": "body"}) as predictor:
        found, none = (
            predictor({"body": np.array([text])})["entities"] for text in ("für Anna", "none")
        )
        anna = {"entity": "simple", "text": "Anna", "start": 4, "end": 8, "score": 0.75}
        assert found.type == none.type
        assert (found.to_pylist(), none.to_pylist()) == ([[anna]], [[]])


def test_mistakes_are_told_by_their_column(toy: Toy, predictor: triptych.Predictor) -> None:
    with pytest.raises(triptych.UserError, match=r"`text` is not a column .* columns={'text': "):
        predictor({"body": np.array(["a"])})
    with pytest.raises(triptych.UserError, match="`text` has values of several types"):
        predictor({"text": np.array(["a", 3], object)})
    with pytest.raises(triptych.UserError, match="different lengths"):
        predictor({"text": np.array(["a", "b"]), "id": np.arange(3)})
    with pytest.raises(triptych.UserError, match="is not served there"):
        triptych.Predictor("nothing", url=toy.url)
    with pytest.raises(triptych.UserError, match="cannot be combined"):
        triptych.Predictor("toy", url=toy.url, repository="model_repository")


def test_a_pickled_predictor_has_connections_of_its_own(predictor: triptych.Predictor) -> None:
    batch = {"text": np.array(["a", "b"])}
    with pickle.loads(pickle.dumps(predictor)) as copy:
        assert copy(batch).equals(predictor(batch))


@pytest.mark.build
@pytest.mark.long
def test_a_predictor_serves_a_repository_until_it_is_closed(minilm_repository: Path) -> None:
    with triptych.Predictor(
        "minilm_packed", repository=minilm_repository, parameters={"dimensions": 16}
    ) as predictor:
        assert predictor({"text": np.array(["a"])})["embedding"].type == pa.list_(pa.float32(), 16)
        url = predictor._session.options.url
    with pytest.raises(triptych.UserError, match="--url"):
        triptych.Predictor("minilm_packed", url=url, timeout_s=1.0)
