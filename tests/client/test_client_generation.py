"""`Client.generate` and `Client.chat`: chunks and the whole, many at once, cancelled, refused."""

import asyncio
import csv
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest
from typer.testing import CliRunner

from tests.support.client_toy import wait_until, write_model
from triptych.client import (
    AsyncClient,
    AsyncGeneration,
    CanceledError,
    Chunk,
    Client,
    Completion,
    DeadlineExceededError,
    Generation,
    InvalidRequestError,
    PipelineFailedError,
    PipelineNotFoundError,
    Retry,
    ServerUnreachableError,
    Usage,
    streams,
)
from triptych.interface.cli import app
from triptych.serving.server import Server

CHAT = """
import json, queue, threading, time
from pathlib import Path
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

class TritonPythonModel:
    # One thread sends all answers, a step of each in turn, as an engine with batches does.

    def initialize(self, args):
        self.seen = Path(args["model_repository"]) / "seen.jsonl"
        self.orders = queue.SimpleQueue()
        self.cancelled = set()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def execute(self, requests):
        for request in requests:
            cancel = pb_utils.get_input_tensor_by_name(request, "cancel")
            if cancel is not None:
                self.cancelled.add(cancel.as_numpy()[0].decode())
                request.get_response_sender().send(flags=FINAL)
                continue
            inputs = {name: pb_utils.get_input_tensor_by_name(request, name).as_numpy()[0]
                      for name in ("text_input", "messages", "sampling_parameters", "stream")}
            texts = {name: value.decode() for name, value in inputs.items() if name != "stream"}
            self.orders.put(self.answer(request.get_response_sender(), texts, inputs["stream"],
                                        request.request_id()))

    def run(self):
        running, ending = [], False
        while running or not ending:
            while not self.orders.empty() or not (running or ending):
                order = self.orders.get()
                ending = ending or order is None
                running += [order] if order else []
            running = [answer for answer in running if next(answer, self) is not self]
            time.sleep(0.02 * any("slowly" in answer.gi_frame.f_locals["words"]
                                  for answer in running))

    def answer(self, sender, texts, stream, name):
        words = ()
        if bool(texts["text_input"]) == bool(texts["messages"]):
            return self.refuse(sender, "`text_input` or `messages` must be given, and not both.")
        prompt = texts["text_input"] or json.loads(texts["messages"])[-1]["content"]
        sampling = json.loads(texts["sampling_parameters"] or "{}")
        if sampling.get("temperature", 0) > 2:
            return self.refuse(sender, "`temperature` must be a number from 0 to 2.")
        words, sent, whole = prompt.split()[:sampling.get("max_tokens", 1000)], 0, []
        cancelled = cut = False
        for number, word in enumerate(words):
            if word == "break":
                error = pb_utils.TritonError("it broke")
                sender.send(pb_utils.InferenceResponse([], error=error), flags=FINAL)
                return
            last = number == len(words) - 1
            whole.append(word + ("" if last else " "))
            if stream or last:
                ids = range(number + 1 - len(whole), number + 1)
                finish = ("length" if len(words) < len(prompt.split()) else "stop") if last else ""
                usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": len(words)}
                logprobs = [{"token_id": one, "logprob": -1.0} for one in ids]
                self.send(sender, "".join(whole), ids, finish, json.dumps(usage) if last else "",
                          json.dumps(logprobs) if "logprobs" in sampling else "", last)
                sent, whole = sent + 1, []
            held = True
            while held and not (cut or cancelled):
                yield
                # After its last response a sender must not be asked: 24.10 would crash
                # (server#7332).
                cut = not last and sender.is_cancelled()
                cancelled = not last and name in self.cancelled and "deaf" not in words
                held = word == "hold"
            if cut or cancelled:
                sender.send(flags=FINAL)
                break
        with self.seen.open("a") as file:
            seen = {**texts, "stream": bool(stream), "sent": sent, "cancelled": cancelled,
                    "cut": cut}
            file.write(json.dumps(seen) + "\\n")

    def refuse(self, sender, words):
        words = f"[invalid_request] {words}"
        error = pb_utils.TritonError(words, pb_utils.TritonError.INVALID_ARG)
        sender.send(pb_utils.InferenceResponse([], error=error), flags=FINAL)

    def send(self, sender, text, ids, finish, usage, logprobs, last):
        texts = {"text_output": text, "finish_reason": finish, "usage": usage, "logprobs": logprobs}
        tensors = [pb_utils.Tensor(name, np.array([value.encode()], np.object_))
                   for name, value in texts.items()]
        tensors.append(pb_utils.Tensor("token_ids", np.array(list(ids), np.int32)))
        index = ids[0] + ("a-gap" in text)
        tensors.append(pb_utils.Tensor("index", np.array([index], np.uint32)))
        sender.send(pb_utils.InferenceResponse(tensors), flags=FINAL if last else 0)

    def finalize(self):
        self.orders.put(None)
        self.thread.join()
"""

CHAT_CONFIG = """
backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: true }
input [{ name: "text_input" data_type: TYPE_STRING dims: [1] optional: true },
       { name: "messages" data_type: TYPE_STRING dims: [1] optional: true },
       { name: "sampling_parameters" data_type: TYPE_STRING dims: [1] optional: true },
       { name: "stream" data_type: TYPE_BOOL dims: [1] optional: true },
       { name: "cancel" data_type: TYPE_STRING dims: [1] optional: true }]
output [{ name: "text_output" data_type: TYPE_STRING dims: [1] },
        { name: "token_ids" data_type: TYPE_INT32 dims: [-1] },
        { name: "index" data_type: TYPE_UINT32 dims: [1] },
        { name: "finish_reason" data_type: TYPE_STRING dims: [1] },
        { name: "usage" data_type: TYPE_STRING dims: [1] },
        { name: "logprobs" data_type: TYPE_STRING dims: [1] }]
instance_group { kind: KIND_CPU count: 1 }
"""


@dataclass(frozen=True)
class ToyChat:
    """The running server; its pipeline is called ``chat``."""

    url: str
    repository: Path

    def seen(self, containing: str) -> dict[str, Any]:
        """What the toy wrote down of the request with this string; nothing until it has ended."""
        file = self.repository / "chat" / "seen.jsonl"
        lines = file.read_text().rpartition("\n")[0].splitlines() if file.exists() else ()
        return next((json.loads(line) for line in lines if containing in line), {})

    def wait_seen(self, containing: str) -> dict[str, Any]:
        """The same, once it has ended."""
        wait_until(lambda: self.seen(containing), f"the end of {containing!r}")
        return self.seen(containing)


pytestmark = pytest.mark.server

ENDLESS = "slowly " + "word " * 20 + "hold on"
"""Words, 20 ms each, and one that is held until the request is canceled."""

Ask = Callable[..., tuple[list[Chunk], Completion]]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyChat]:
    repository = tmp_path_factory.mktemp("chat")
    write_model(repository / "chat", CHAT_CONFIG, CHAT)
    with Server(repository) as server:
        yield ToyChat(server.grpc_url, repository)
        os.kill(server.pid, signal.SIGKILL)  # to end politely takes Triton seconds


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that gives a busy server time to end what is left, and does not cut its call."""
    monkeypatch.setattr(streams, "LATE_S", 300.0)
    monkeypatch.setattr(streams, "GIVE_UP_S", 300.0)


@pytest.fixture(params=["sync", "async"])
def ask(request: pytest.FixtureRequest, toy: ToyChat) -> Ask:
    """What one call gives with a client of either kind: as chunks, and as the whole."""

    def run(
        method: str, *args: Any, pipeline: str = "chat", url: str = toy.url, **kwargs: Any
    ) -> tuple[list[Chunk], Completion]:
        async def in_loop() -> tuple[list[Chunk], Completion]:
            async with AsyncClient(pipeline, url) as client:
                call = getattr(client, method)
                chunks = [chunk async for chunk in call(*args, **kwargs)]
                return chunks, await call(*args, **kwargs).whole()

        if request.param == "async":
            return asyncio.run(in_loop())
        with Client(pipeline, url) as client:
            call = getattr(client, method)
            return list(call(*args, **kwargs)), call(*args, **kwargs).whole()

    return run


def test_chunks_are_the_whole_in_pieces(ask: Ask, toy: ToyChat) -> None:
    chunks, whole = ask("generate", "to be or não 😀", logprobs=0)
    assert [(each.text, each.token_ids, each.index) for each in chunks] == [
        (text, (number,), number) for number, text in enumerate(["to ", "be ", "or ", "não ", "😀"])
    ]
    ends = [(each.finish_reason, each.usage) for each in chunks]
    assert ends == [("", None)] * 4 + [("stop", Usage(5, 5))]
    assert chunks[1].logprobs == ({"token_id": 1, "logprob": -1.0},)
    assert whole == Completion.join(chunks)
    assert toy.wait_seen("to be or n")["stream"] is True


def test_a_conversation_and_its_sampling_reach_the_pipeline(ask: Ask, toy: ToyChat) -> None:
    mark = f"mark-{time.monotonic()}"
    messages = [{"role": "system", "content": "short"}, {"role": "user", "content": f"{mark} b c"}]
    sampling = {"max_tokens": 2, "temperature": 0.5, "stop": ["x", "y"], "seed": 3}
    _, whole = ask("chat", messages, **sampling)
    assert (whole.text, whole.finish_reason) == (f"{mark} b", "length")
    assert whole.usage == Usage(3, 2)
    seen = toy.wait_seen(mark)
    assert seen["text_input"] == ""
    assert json.loads(seen["messages"]) == messages
    assert json.loads(seen["sampling_parameters"]) == sampling


def test_what_is_wrong_is_refused_in_words(ask: Ask) -> None:
    not_plain = [{"role": "user", "content": b"bytes"}]
    invalid, hot = InvalidRequestError, {"temperature": 9.0}
    given: Any
    for method, given, options, kind, message in (
        ("generate", "a", hot, invalid, "must be a number from 0 t"),
        ("generate", "", {}, invalid, "must be given, and not both"),
        ("generate", "\ud800", {}, invalid, "lone surrogate"),
        ("chat", not_plain, {}, invalid, "`messages` must be plain data"),
        ("generate", "a", {"pipeline": "nothing"}, PipelineNotFoundError, "not found"),
        ("generate", "a b break c", {}, PipelineFailedError, "it broke"),
        ("generate", "a b a-gap c", {}, PipelineFailedError, "Given: token 3 after 2"),
    ):
        with pytest.raises(kind, match=message):
            ask(method, given, **options)


@pytest.mark.usefixtures("patient")
def test_closing_cancels_at_the_server(toy: ToyChat) -> None:
    with Client("chat", toy.url) as client:
        for how in ("close", "with", "drop", "thread"):
            mark = f"{how}-{time.monotonic()}"
            generation = client.generate(f"{mark} {ENDLESS}", timeout_s=600)
            assert next(generation).text == f"{mark} "
            if how == "close":
                generation.close()
                assert list(generation) == []
                with pytest.raises(CanceledError, match="has ended"):
                    generation.whole()
            elif how == "with":
                with generation:
                    next(generation)
            elif how == "drop":
                del generation
            else:
                threading.Timer(0.1, generation.close).start()
                assert len(list(generation)) <= 22  # up to the word that is held
            seen = toy.wait_seen(mark)
            assert (seen["cancelled"], seen["cut"]) == (True, False), how
        assert client.generate("still open").whole().text == "still open"


def test_what_has_said_its_last_is_not_cancelled(toy: ToyChat) -> None:
    """24.10 may abort where a cancel meets the end of a stream."""
    with Client("chat", toy.url) as client:
        for _ in range(10):
            with client.generate("to be") as generation:
                next(generation)
                call = generation._call
                list(generation)
            assert call.code() is grpc.StatusCode.OK

    async def leave_at_the_end() -> None:
        async with AsyncClient("chat", toy.url) as client:
            for _ in range(10):
                async with client.generate("to be") as generation:
                    await anext(generation)
                    call = generation._call
                    await generation.whole()
                assert await call.code() is grpc.StatusCode.OK

    asyncio.run(leave_at_the_end())
    assert not streams._ENDING


def exceed_deadline(ask: Ask, toy: ToyChat, words: str) -> dict[str, Any]:
    """Let a deadline pass after the first chunk; returns what the toy wrote down."""
    for timeout_s in (0.3, 3, 60):  # until there is a chunk by then
        mark = f"{timeout_s}-{words}"
        with pytest.raises(
            DeadlineExceededError, match=rf"deadline of {timeout_s:g} s passed after \d+ chunks"
        ) as caught:
            ask("generate", f"{mark} {ENDLESS}", timeout_s=timeout_s)
        if " after 0 chunks" not in str(caught.value):
            break
    return toy.wait_seen(mark)


def test_who_leaves_does_not_wait_for_a_server_that_does_not_hear(
    ask: Ask, toy: ToyChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = f"deaf-{time.monotonic()}"
    monkeypatch.setattr(streams, "GIVE_UP_S", 600.0)
    client = Client("chat", toy.url, timeout_s=None)
    left = client.generate(f"{mark} deaf {ENDLESS}")
    next(left)
    call = left._call
    left.close()
    assert not toy.seen(mark)  # it goes on at the server
    call.cancel()  # or closing the client would wait for it
    client.close()
    assert toy.wait_seen(mark)["cut"]
    assert exceed_deadline(ask, toy, f"late-{mark} deaf")["cut"]
    monkeypatch.setattr(streams, "GIVE_UP_S", 0.2)
    with Client("chat", toy.url, timeout_s=None) as client:
        left = client.generate(f"cut-{mark} deaf {ENDLESS}")
        next(left)
        left.close()
    assert toy.wait_seen(f"cut-{mark}")["cut"]


@pytest.mark.usefixtures("patient")
def test_a_task_that_is_cancelled_cancels_at_the_server(toy: ToyChat) -> None:
    mark = f"task-{time.monotonic()}"

    async def cancel() -> None:
        async with AsyncClient("chat", toy.url) as client:

            async def read(generation: AsyncGeneration) -> None:
                async for chunk in generation:
                    if chunk.text == "slowly ":
                        begun.set()

            begun = asyncio.Event()
            task = asyncio.create_task(read(client.generate(f"{mark} {ENDLESS}", timeout_s=600)))
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            begun.clear()
            closed = client.generate(f"closed-{mark} {ENDLESS}", timeout_s=600)
            task = asyncio.create_task(read(closed))
            await begun.wait()
            await closed.close()
            await task
            assert (await client.generate("still open").whole()).text == "still open"

    asyncio.run(cancel())
    for name in (mark, f"closed-{mark}"):
        seen = toy.wait_seen(f'"{name} ')
        assert (seen["cancelled"], seen["cut"]) == (True, False)


@pytest.mark.usefixtures("patient")
def test_a_deadline_and_a_closed_client_end_a_generation(ask: Ask, toy: ToyChat) -> None:
    mark = f"late-{time.monotonic()}"
    seen = exceed_deadline(ask, toy, mark)
    assert (seen["cancelled"], seen["cut"]) == (True, False)
    client = Client("chat", toy.url, timeout_s=600)
    generation = client.generate(f"closed-{mark} {ENDLESS}")
    next(generation)
    client.close()
    assert toy.wait_seen(f"closed-{mark}")["cut"] is False
    with pytest.raises(CanceledError):
        list(generation)
    with pytest.raises(CanceledError, match="is closed"):
        client.generate("a").whole()


def test_a_program_may_end_with_a_generation_under_way(toy: ToyChat) -> None:
    mark = f"exit-{time.monotonic()}"
    program = f"""
from triptych.client import Client
client = Client("chat", {toy.url!r})
generation = client.generate({f"{mark} {ENDLESS}"!r}, timeout_s=600)
print(next(generation).text)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    seen = toy.wait_seen(mark)
    assert seen["cancelled"] or seen["cut"]


def test_many_run_at_once_from_one_client(toy: ToyChat) -> None:
    prompts = [f"number {index} slowly " + "x " * 10 for index in range(24)]

    async def many() -> list[Completion]:
        async with AsyncClient("chat", toy.url) as client:
            return await asyncio.gather(*(client.generate(one).whole() for one in prompts))

    assert [whole.text for whole in asyncio.run(many())] == [one.strip() for one in prompts]
    with Client("chat", toy.url) as client:
        generations: list[Generation] = [client.generate(one) for one in prompts]
        firsts = [next(generation) for generation in generations]
        assert len(firsts) == 24  # all have begun before one has ended
        pairs = zip(firsts, generations, strict=True)
        texts = [first.text + one.whole().text for first, one in pairs]
    assert texts == [one.strip() for one in prompts]


def test_what_has_not_begun_is_sent_again(ask: Ask) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(ServerUnreachableError, match=r"Tried 5 times.*`retry` allows 5"):
            ask("generate", "a", url=url)
        with (
            Client("chat", url, retry=Retry(attempts=2)) as client,
            pytest.raises(ServerUnreachableError, match="Tried 2 times"),
        ):
            client.generate("a").whole()


def test_the_command_streams_to_the_terminal(toy: ToyChat) -> None:
    words = ["infer", "chat", "--chat", "one [bold]two\x1b three", "--url", toy.url]
    done = CliRunner().invoke(app, words)
    assert done.exception is None, done.output
    assert "one [bold]two[U+001B] three\n" in done.stdout
    assert "3 prompt tokens, 3 tokens (stop), first after " in done.output
    done = CliRunner().invoke(app, [*words, "--parameter", "max_tokens=1", "--json"])
    answer = json.loads(done.stdout)
    assert (answer["text"], answer["finish_reason"]) == ("one", "length")
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 1, "cached_tokens": 0}
    for wrong, said in (
        (["--parameter", "temperature=9"], "`temperature` must be a number"),
        (["--text", "a"], "cannot be combined"),
        (["--parameter", "stop=[a, b]", "--url", "127.0.0.1:1"], "nothing listens there"),
    ):
        done = CliRunner().invoke(app, [*words, *wrong])
        assert said in str(done.exception), wrong


def test_a_file_of_prompts_and_conversations_gets_its_answers_beside(
    toy: ToyChat, tmp_path: Path
) -> None:
    chat = [{"role": "user", "content": "so they say"}]
    rows: list[dict[str, Any]] = [
        {"n": 0, "text_input": "to be or"},
        {"n": 1, "messages": chat, "sampling_parameters": {"max_tokens": 2}},
        {"n": 2, "text_input": "a", "parameters": {"temperature": 9}},
        {"n": 3, "text_input": "a b break c"},
        {"n": 4, "text_input": 7},
        {"n": 5, "text_input": "a", "messages": chat},
        *({"n": n, "text_input": f"row {n}"} for n in range(6, 200)),
    ]
    file, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["infer", "chat", "--url", toy.url, "-f", str(file), "-o", str(out)]
    done = CliRunner().invoke(app, [*words, "-p", "max_tokens=3"])
    assert done.exit_code == 1
    assert "4 of 200 rows" in done.output
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["n"] for row in found] == list(range(200))
    whole = {"text_output": "to be or", "finish_reason": "stop"}
    assert found[0] == {**rows[0], **whole, "prompt_tokens": 3, "completion_tokens": 3}
    assert (found[1]["text_output"], found[1]["finish_reason"]) == ("so they", "length")
    told = ("from 0 to 2", "it broke", "must be text. Given: 7", "not both")
    for row, said in zip(found[2:6], told, strict=True):
        assert said in row["error"]
    assert [row["text_output"] for row in found[6:]] == [f"row {n}" for n in range(6, 200)]

    file, out = tmp_path / "rows.csv", tmp_path / "out.csv"
    file.write_text('question,messages\nwhy so,"[{""content"": ""as is""}]"\n')
    words = ["infer", "chat", "--url", toy.url, "-f", str(file), "-o", str(out)]
    for more, said in (
        (["--text-column", "questions"], "Did you mean `question`?"),
        (["--text-pair", "a"], "is not supported for a pipeline that generates text"),
        (["-p", "max_tokens"], "must be KEY=VALUE"),
    ):
        assert said in str(CliRunner().invoke(app, [*words, *more]).exception)
    assert CliRunner().invoke(app, words).exception is None
    (one,) = csv.DictReader(out.read_text().splitlines())
    names = ("question", "text_output", "completion_tokens")
    assert [one[name] for name in names] == ["why so", "as is", "2"]
