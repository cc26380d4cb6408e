"""Load of clients that give up: goodput, refusals, waits and shares of one load on one server.

In a closed load each client sends one request after the other. In an open load requests arrive at
random times (Poisson), whatever became of those before. A client waits for its deadline, which only
ends its call, as `client_timeout` of tritonclient does. It sends again after a pause if its request
was refused or expired. The load runs on the processors of the server, so requests are serialized
once, and responses are not parsed.

An address that begins with ``http://`` is the embeddings endpoint of a gateway. A request for a
stream counts as answered with its first response, and its client receives the rest before it
sends again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from statistics import fmean
from typing import Any, NamedTuple

import aiohttp
import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2

from triptych.client.wire import generation_request, infer_request

TEXT = "my parcel has not arrived, and nobody has answered me since last week " * 3
CAPACITY_CLIENTS = 32
_SERVICE = "/inference.GRPCInferenceService/"
_STATUSES = {
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_CHANNELS = 8
_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),  # a connection for each channel
    ("grpc.enable_retries", 0),
    ("grpc.max_receive_message_length", -1),
]
_CONNECT_S = 10.0
_TICK_S = 0.05
_REFUSED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED
Call = Callable[..., Awaitable[Any]]
_ANSWERED, _REFUSAL, _EXPIRED, _FAILED = "answered", "refused", "expired", "failed"


@dataclass(frozen=True)
class Load:
    """Requests to send.

    Attributes:
        clients: Number of clients of a closed load, or None for an open load.
        rate_per_s: Mean number of new requests per second of an open load.
        deadlines_s: Seconds after which a client gives up, given to clients in turn; None waits
            without limit.
        pause_s: Seconds between a failed request and the next attempt.
        retries: Maximum number of further attempts for a request of an open load.
        sends_timeout: Whether the server receives the deadline as Triton's parameter `timeout`.
        rows: Number of rows in a request.
        streams: Whether requests are for streams of a pipeline that generates text.
        seconds: Duration; requests in flight at its end are canceled and not counted.
        settle_s: Seconds at the start that count only in the lists of each second.
        seed: Seed of the arrivals.
    """

    clients: int | None = None
    rate_per_s: float = 0.0
    deadlines_s: Sequence[float | None] = (None,)
    pause_s: float = 0.05
    retries: int = 0
    sends_timeout: bool = False
    rows: int = 1
    streams: bool = False
    seconds: float = 12.0
    settle_s: float = 4.0
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.clients is None) != (self.rate_per_s > 0):
            raise ValueError("A load needs either a number of clients or a rate.")
        if not 0 <= self.settle_s < self.seconds:
            raise ValueError("A load must last longer than it takes to settle.")


class Outcome(NamedTuple):
    """End of one attempt; times in seconds since the start of the load."""

    client: int
    sent_s: float
    ended_s: float
    kind: str


@dataclass(frozen=True)
class LoadSummary:
    """Outcome of a load; all values but the lists of each second are counted after it settled.

    Attributes:
        answers: Answers in each second. A client whose deadline has passed receives no answer.
        refusals: Refusals in each second.
        goodput_per_s: Answers per second.
        p50_ms: Median of the time until an answer; None without answers, as are the other times.
        longest_s: Longest time until an answer.
        min_share: Answers of the client with the fewest by the mean of all clients; None in an open
            load, or without answers.
        deadline_shares: Answers of the mean client of each deadline by the mean of all clients.
        refusals_by_client: Minimum, mean and maximum number of refusals of a client; empty in an
            open load.
        failures: Number of other errors by their first text, in the whole load.
        load_cores: Processor time of this process by the duration, in processors.
        lag_s: Longest delay of this process after it should have run. Latencies contain it, and the
            summary is of no use if it is more than a small part of a deadline.
    """

    answers: list[int]
    refusals: list[int]
    goodput_per_s: float
    refusals_per_s: float
    expiries_per_s: float
    p50_ms: float | None
    p99_ms: float | None
    longest_s: float | None
    min_share: float | None
    deadline_shares: dict[str, float]
    refusals_by_client: list[float]
    failures: dict[str, int] = field(default_factory=dict)
    load_cores: float = 0.0
    lag_s: float = 0.0


def summarize(load: Load, outcomes: Sequence[Outcome], **more: Any) -> LoadSummary:
    """Return the summary of the outcomes of a load.

    Args:
        more: Attributes of the summary that do not follow from the outcomes.
    """
    counted = [each for each in outcomes if load.settle_s <= each.ended_s < load.seconds]
    seconds = load.seconds - load.settle_s

    def each_second(kind: str) -> list[int]:
        count = Counter(int(each.ended_s) for each in outcomes if each.kind == kind)
        return [count[second] for second in range(math.ceil(load.seconds))]

    def per_s(kind: str) -> float:
        return sum(each.kind == kind for each in counted) / seconds

    answers = [each for each in counted if each.kind == _ANSWERED]
    waits_s = sorted(each.ended_s - each.sent_s for each in answers)

    def wait(ratio: float, unit: float = 1.0) -> float | None:
        index = min(int(ratio * len(waits_s)), len(waits_s) - 1)
        return unit * waits_s[index] if waits_s else None

    classes = len(load.deadlines_s)
    by_class = Counter(each.client % classes for each in answers)
    shares = {
        f"{number + 1}: {deadline or 'none'}": by_class[number] * classes / (len(answers) or 1)
        for number, deadline in enumerate(load.deadlines_s)
    }
    min_share, refused = None, []
    if load.clients is not None:
        by_client = Counter(each.client for each in answers)
        if answers:
            fewest = min(by_client[client] for client in range(load.clients))
            min_share = fewest * load.clients / len(answers)
        refusals = Counter(each.client for each in counted if each.kind == _REFUSAL)
        numbers = [refusals[client] for client in range(load.clients)]
        refused = [min(numbers), fmean(numbers), max(numbers)]
    return LoadSummary(
        answers=each_second(_ANSWERED),
        refusals=each_second(_REFUSAL),
        goodput_per_s=per_s(_ANSWERED),
        refusals_per_s=per_s(_REFUSAL),
        expiries_per_s=per_s(_EXPIRED),
        p50_ms=wait(0.5, 1e3),
        p99_ms=wait(0.99, 1e3),
        longest_s=wait(1.0),
        min_share=min_share,
        deadline_shares=shares,
        refusals_by_client=refused,
        **more,
    )


def run(
    url: str,
    model: str,
    load: Load,
    *,
    inputs: dict[str, str] | None = None,
    on_second: Callable[[str], None] | None = None,
) -> LoadSummary:
    """Send the load to a model of a server and return its summary.

    Args:
        inputs: Text of each input of a row; by default a sentence as the input ``text``.
        on_second: Receives a line about each second.
    """
    sending = LoadSending(model, load, inputs or {"text": TEXT}, on_second)
    return _runner().run(sending.send_all(url))


def capacity(url: str, model: str, *, rows: int = 1, seconds: float = 8.0, **more: Any) -> float:
    """Return the answers per second of 32 clients without a deadline."""
    load = Load(clients=CAPACITY_CLIENTS, rows=rows, seconds=seconds, settle_s=seconds / 4)
    return run(url, model, load, **more).goodput_per_s


def waits_alone(
    url: str, model: str, seconds: float, *, inputs: dict[str, str] | None = None
) -> list[float]:
    """Return the seconds until each answer to one client without a deadline, in order."""
    load = Load(clients=1, seconds=seconds, settle_s=0.0)
    sending = LoadSending(model, load, inputs or {"text": TEXT}, None)
    _runner().run(sending.send_all(url))
    return [each.ended_s - each.sent_s for each in sending.outcomes if each.kind == _ANSWERED]


@cache
def _runner() -> asyncio.Runner:
    """Return the event loop of all loads: gRPC cannot change from one loop to another."""
    return asyncio.Runner()


class LoadSending:
    """Clients of one load.

    Attributes:
        outcomes: Ended attempts.
        failures: Number of errors that are neither refusals nor expired deadlines, by their text.
    """

    def __init__(
        self,
        model: str,
        load: Load,
        inputs: dict[str, str],
        on_second: Callable[[str], None] | None,
    ) -> None:
        self._load, self._on_second = load, on_second
        self._embeddings = {"model": model, "input": list(inputs.values()) * load.rows}
        self._requests = []
        for deadline_s in load.deadlines_s:
            columns = {name: [text.encode()] * load.rows for name, text in inputs.items()}
            timeout = {} if deadline_s is None else {"timeout": round(1e6 * deadline_s)}
            parameters = timeout if load.sends_timeout else {}
            if load.streams:
                texts = {name: text.encode() for name, text in inputs.items()}
                request = generation_request(model, texts, stream=True, name="")
            else:
                request = infer_request(model, columns, range(load.rows), parameters, {})
            self._requests.append(request.SerializeToString())
        self.outcomes: list[Outcome] = []
        self.failures: Counter[str] = Counter()
        self._lag_s = 0.0

    async def send_all(self, url: str) -> LoadSummary:
        """Send the load to a server and return its summary."""
        async with AsyncExitStack() as stack:
            calls = await stack.enter_async_context(self._open_calls(url))
            used_s = time.process_time()
            self.connect(calls, time.monotonic())
            work = [self._watch()]
            if self._load.clients is None:
                work.append(self._arrive())
            else:
                work += [self._repeat(client) for client in range(self._load.clients)]
            tasks = {asyncio.ensure_future(each) for each in work}
            _, left = await asyncio.wait(tasks, timeout=self._load.seconds)
            for task in left:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            errors = [each for each in ended if isinstance(each, Exception)]
            if errors:
                raise errors[0]
            cores = (time.process_time() - used_s) / self._load.seconds
        failures = dict(self.failures)
        more = {"failures": failures, "load_cores": cores, "lag_s": self._lag_s}
        return summarize(self._load, self.outcomes, **more)

    @asynccontextmanager
    async def _open_calls(self, url: str) -> AsyncIterator[list[Call]]:
        """Connect to a server while the block runs; yield the calls for `connect`."""
        if url.startswith("http://"):
            self._requests = [json.dumps(self._embeddings).encode()] * len(self._requests)
            connector = aiohttp.TCPConnector(limit=0)
            headers = {"content-type": "application/json"}
            async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
                yield [partial(_post, session, url)]
            return
        async with AsyncExitStack() as stack:
            calls: list[Call] = []
            for _ in range(_CHANNELS):
                channel = grpc.aio.insecure_channel(url, options=_OPTIONS)
                await stack.enter_async_context(channel)
                await asyncio.wait_for(channel.channel_ready(), _CONNECT_S)
                if self._load.streams:
                    calls.append(partial(_begin_stream, channel))
                else:
                    calls.append(channel.unary_unary(f"{_SERVICE}ModelInfer"))
            yield calls

    def connect(self, calls: Sequence[Call], began: float) -> None:
        """Send requests by these calls from now on, in turn by client; times are from `began`.

        A call may return a coroutine that receives the rest of its answer.
        """
        self._calls, self._began = calls, began

    def _now_s(self) -> float:
        return time.monotonic() - self._began

    async def _attempt(self, client: int) -> bool:
        """Send a request of a client once, record its outcome, and return whether it failed."""
        turn = client % len(self._requests)
        sent_s, kind, rest = self._now_s(), _ANSWERED, None
        deadline_s, call = self._load.deadlines_s[turn], self._calls[client % len(self._calls)]
        try:
            rest = await call(self._requests[turn], timeout=deadline_s)
            if deadline_s is not None and self._now_s() - sent_s > deadline_s:
                kind = _EXPIRED  # it came in time, and this process was late
        except grpc.aio.AioRpcError as error:
            kind = _FAILED
            if error.code() in _REFUSED:
                kind = _REFUSAL
            elif error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                kind = _EXPIRED
            else:
                self.failures[f"{error.code().name}: {error.details()}"[:200]] += 1
        self.outcomes.append(Outcome(client, sent_s, self._now_s(), kind))
        if asyncio.iscoroutine(rest):
            await rest
        return kind != _ANSWERED

    async def _repeat(self, client: int) -> None:
        while True:
            if await self._attempt(client):
                await asyncio.sleep(self._load.pause_s)

    async def _arrive(self) -> None:
        drawn, due_s, client = random.Random(self._load.seed), 0.0, 0
        async with asyncio.TaskGroup() as group:
            while True:
                due_s += drawn.expovariate(self._load.rate_per_s)
                await asyncio.sleep(due_s - self._now_s())
                group.create_task(self.send_attempts(client))
                client += 1

    async def send_attempts(self, client: int) -> None:
        """Send a request of a client of an open load until it is answered."""
        for number in range(1 + self._load.retries):
            if number:
                await asyncio.sleep(self._load.pause_s)
            if not await self._attempt(client):
                return

    async def _watch(self) -> None:
        """Measure how late this process is, and report each second."""
        counted, reported = 0, 0
        while True:
            due_s = self._now_s() + _TICK_S
            await asyncio.sleep(_TICK_S)
            now_s = self._now_s()
            if now_s > self._load.settle_s:
                self._lag_s = max(self._lag_s, now_s - due_s)
            if self._on_second is None or int(now_s) == reported:
                continue
            reported = int(now_s)
            new = Counter(each.kind for each in self.outcomes[counted:])
            counted = len(self.outcomes)
            kinds = ", ".join(f"{new[k]:6} {k}" for k in (_ANSWERED, _REFUSAL, _EXPIRED, _FAILED))
            self._on_second(f"{reported:4} s  {kinds}")


async def _post(
    session: aiohttp.ClientSession, url: str, body: bytes, *, timeout: float | None
) -> bytes:
    """Send a request over HTTP; raise the error of gRPC that its status stands for."""
    try:
        async with asyncio.timeout(timeout), session.post(url, data=body) as response:
            content = await response.read()
    except TimeoutError:
        raise _error(grpc.StatusCode.DEADLINE_EXCEEDED) from None
    except aiohttp.ClientError as error:
        raise _error(grpc.StatusCode.UNKNOWN, repr(error)) from error
    if response.status != 200:
        code = _STATUSES.get(response.status, grpc.StatusCode.UNKNOWN)
        raise _error(code, content.decode())
    return content


async def _begin_stream(
    channel: grpc.aio.Channel, request: bytes, *, timeout: float | None
) -> Coroutine[Any, Any, None]:
    """Send a request for a stream; return what receives the rest after the first response."""
    stream = channel.stream_stream(f"{_SERVICE}ModelStreamInfer")()
    try:
        async with asyncio.timeout(timeout):
            await stream.write(request)
            await stream.done_writing()
            first = await stream.read()
    except TimeoutError:
        stream.cancel()
        raise _error(grpc.StatusCode.DEADLINE_EXCEEDED) from None
    fault = service_pb2.ModelStreamInferResponse.FromString(first or b"").error_message
    if fault:
        codes = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNKNOWN
        raise _error(codes["[overloaded" not in fault], fault)

    async def receive_rest() -> None:
        while await stream.read():
            pass

    return receive_rest()


def _error(code: grpc.StatusCode, text: str = "") -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, nothing, nothing, details=text)


def main() -> None:
    """Send the load of the command line and print its summary as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    url_help = "gRPC address of the server, as 127.0.0.1:8001, or http://…/v1/embeddings"
    parser.add_argument("url", help=url_help)
    parser.add_argument("model")
    parser.add_argument("--clients", type=int, help="closed load with this number of clients")
    parser.add_argument("--rate", type=float, default=0.0, help="open load, requests per second")
    deadline_help = "seconds until a client gives up, or `none`; several are given in turn"
    parser.add_argument("--deadlines", nargs="+", default=["none"], help=deadline_help)
    parser.add_argument("--pause-ms", type=float, default=50.0, help="before the next attempt")
    parser.add_argument("--retries", type=int, default=0, help="of a request of an open load")
    timeout_help = "send the deadline as Triton's `timeout`, too"
    parser.add_argument("--send-timeout", action="store_true", help=timeout_help)
    parser.add_argument("--rows", type=int, default=1, help="rows in a request")
    parser.add_argument("--streams", action="store_true", help="of generated text")
    parser.add_argument("--seconds", type=float, default=12.0, help="duration of the load")
    parser.add_argument("--settle", type=float, default=4.0, help="seconds not counted")
    parser.add_argument("--text", default=TEXT, help="text of a row")
    parser.add_argument("--quiet", action="store_true", help="print no line about each second")
    capacity_help = "only measure the rate of 32 clients without a deadline"
    parser.add_argument("--capacity", action="store_true", help=capacity_help)
    options = parser.parse_args()
    if options.capacity:
        inputs = {"text": options.text}
        print(capacity(options.url, options.model, rows=options.rows, inputs=inputs))
        return
    load = Load(
        clients=options.clients,
        rate_per_s=options.rate,
        deadlines_s=[None if each == "none" else float(each) for each in options.deadlines],
        pause_s=options.pause_ms / 1e3,
        retries=options.retries,
        sends_timeout=options.send_timeout,
        rows=options.rows,
        streams=options.streams,
        seconds=options.seconds,
        settle_s=options.settle,
    )
    on_second = None if options.quiet else lambda line: print(line, file=sys.stderr, flush=True)
    inputs = {"text": options.text}
    print(
        json.dumps(
            asdict(run(options.url, options.model, load, inputs=inputs, on_second=on_second))
        )
    )


if __name__ == "__main__":
    main()
