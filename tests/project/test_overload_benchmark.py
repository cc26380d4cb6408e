"""The benchmark of overload: the accounting of its load generator, and its figure."""

import asyncio
import math
from collections.abc import Sequence
from time import monotonic
from xml.etree import ElementTree

import grpc  # type: ignore[import-untyped]
import pytest
from tritonclient.grpc import service_pb2

from benchmarks.harness import Series
from benchmarks.overload import draw
from benchmarks.overload_load import Load, LoadSending, Outcome, summarize

FAILED = grpc.StatusCode.INTERNAL
EXPIRED = grpc.StatusCode.DEADLINE_EXCEEDED
REFUSED = grpc.StatusCode.UNAVAILABLE


def outcomes(kind: str, *ended: tuple[int, float, float]) -> list[Outcome]:
    """Outcomes of a kind: client, time of the end, and duration."""
    return [Outcome(client, end_s - took_s, end_s, kind) for client, end_s, took_s in ended]


def test_what_a_load_counts() -> None:
    load = Load(clients=4, deadlines_s=[1.0, None], seconds=5.0, settle_s=1.0)
    found = summarize(
        load,
        [
            *outcomes("answered", (0, 0.9, 0.5)),  # before the load settled
            *outcomes("answered", (0, 1.0, 0.1), (1, 2.5, 2.0), (1, 3.0, 0.5), (3, 4.9, 0.2)),
            *outcomes("answered", (2, 5.0, 0.1)),  # after its end
            *outcomes("refused", (2, 1.5, 0.0), (2, 1.6, 0.0)),
            *outcomes("expired", (0, 2.0, 1.0)),
            *outcomes("failed", (0, 2.1, 0.1)),
        ],
    )
    assert found.answers == [1, 1, 1, 1, 1]
    assert found.refusals == [0, 2, 0, 0, 0]
    assert (found.goodput_per_s, found.refusals_per_s, found.expiries_per_s) == (1.0, 0.5, 0.25)
    assert found.p50_ms == pytest.approx(500)
    assert found.p99_ms == pytest.approx(2000)
    assert found.longest_s == pytest.approx(2)
    assert found.min_share == 0.0  # client 2
    assert found.deadline_shares == {"1: 1.0": 0.5, "2: none": 1.5}
    assert found.refusals_by_client == [0, 0.5, 2]
    fair = [*outcomes("answered", *((client, 2.0 + client, 0.1) for client in (0, 0, 1, 2)))]
    assert summarize(Load(clients=3, seconds=5.0, settle_s=1.0), fair).min_share == 0.75


def test_a_load_without_answers_has_no_latency_and_an_open_one_no_clients() -> None:
    found = summarize(Load(rate_per_s=9.0), outcomes("refused", (0, 5.0, 0.0), (1, 6.0, 0.0)))
    assert (found.p50_ms, found.p99_ms, found.longest_s) == (None, None, None)
    assert (found.min_share, found.refusals_by_client, found.refusals_per_s) == (None, [], 0.25)
    nothing = summarize(Load(clients=2), [])
    assert (nothing.min_share, nothing.deadline_shares) == (None, {"1: none": 0.0})


def test_a_load_must_be_possible() -> None:
    for wrong in ({}, {"clients": 2, "rate_per_s": 1.0}, {"clients": 2, "settle_s": 12.0}):
        with pytest.raises(ValueError, match="A load"):
            Load(**wrong)  # type: ignore[arg-type]


def send(load: Load, codes: Sequence[grpc.StatusCode | None]) -> tuple[LoadSending, list[bytes]]:
    """Send a request of client 1 of an open load to a server that ends its attempts so."""
    sending = LoadSending("minilm", load, {"text": "hello"}, None)
    received: list[tuple[bytes, float | None]] = []

    async def answer(request: bytes, timeout: float | None) -> bytes:
        received.append((request, timeout))
        code = codes[len(received) - 1]
        if code is not None:
            nothing = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(code, nothing, nothing, details="in words")
        return b""

    sending.connect([answer], monotonic())
    asyncio.run(sending.send_attempts(1))
    assert {timeout for _, timeout in received} <= {load.deadlines_s[1]}
    return sending, [request for request, _ in received]


def test_a_request_is_sent_again_until_it_is_answered() -> None:
    load = Load(rate_per_s=1.0, deadlines_s=[None, 0.5], pause_s=0.0, retries=3, rows=2)
    sending, received = send(load, [REFUSED, EXPIRED, None])
    assert [each.kind for each in sending.outcomes] == ["refused", "expired", "answered"]
    assert all(each.client == 1 and each.sent_s <= each.ended_s for each in sending.outcomes)
    (request,) = {
        service_pb2.ModelInferRequest.FromString(each).SerializeToString() for each in received
    }
    message = service_pb2.ModelInferRequest.FromString(request)
    assert list(message.inputs[0].shape) == [2, 1]
    assert "timeout" not in message.parameters
    sending, received = send(load, [FAILED] * 4)
    assert [each.kind for each in sending.outcomes] == ["failed"] * 4
    assert dict(sending.failures) == {"INTERNAL: in words": 4}


def test_the_server_receives_the_deadline_where_it_should() -> None:
    load = Load(rate_per_s=1.0, deadlines_s=[None, 0.5], sends_timeout=True)
    _, (received,) = send(load, [None])
    message = service_pb2.ModelInferRequest.FromString(received)
    assert message.parameters["timeout"].int64_param == 500_000


def test_the_figure_shows_each_load_that_has_a_value() -> None:
    def series(system: str, load: str, goodput: float, p99_ms: float) -> Series:
        return Series(system, load, [{"goodput": goodput, "p99_ms": p99_ms}] * 3)

    found = {
        "MiniLM": [series("default", "0.5", 0.5, 40.0), series("none", "0.5", 0.5, 30.0)],
        "emulated core": [
            series("default", "0.5", 0.5, 40.0),
            series("default", "20", 0.9, 900.0),
            series("none", "20", 0.0, math.nan),
        ],
    }
    figure = ElementTree.fromstring(draw(found, 1.0))
    space = "{http://www.w3.org/2000/svg}"
    texts = [element.text for element in figure.iter(f"{space}title")]
    assert sum("20 times the capacity" in (text or "") for text in texts) == 3
    assert len(figure.findall(f"{space}svg")) == 4
    assert b"href" not in ElementTree.tostring(figure)
