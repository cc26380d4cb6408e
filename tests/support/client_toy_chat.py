"""A toy that streams as the task text-generation does: no model, a script in the prompt."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from client_toy import wait_until, write_model
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
            yield
            # After its last response a sender must not be asked: 24.10 would crash (server#7332).
            cut = not last and sender.is_cancelled()
            cancelled = not last and name in self.cancelled and "deaf" not in words
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

    def seen(self, containing: str) -> dict[str, Any] | None:
        """What the toy wrote down of the request with this string; None until it has ended."""
        file = self.repository / "chat" / "seen.jsonl"
        for line in file.read_text().splitlines() if file.exists() else ():
            if containing in line and line.endswith("}"):
                seen: dict[str, Any] = json.loads(line)
                return seen
        return None

    def wait_seen(self, containing: str) -> dict[str, Any]:
        """The same, once it has ended."""
        wait_until(lambda: self.seen(containing), f"the end of {containing!r}")
        return self.seen(containing) or {}


@contextmanager
def serve_toy_chat(repository: Path) -> Iterator[ToyChat]:
    """Serve the toy from a folder that is made for it."""
    write_model(repository / "chat", CHAT_CONFIG, CHAT)
    with Server(repository) as server:
        yield ToyChat(server.grpc_url, repository)
        os.kill(server.pid, signal.SIGKILL)  # to go politely takes Triton seconds
