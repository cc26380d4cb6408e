"""A Triton model that repeats its input, and a client that sends it one text."""

import http.client
import json
from pathlib import Path
from typing import Any

from triptych.serving.server import Server

CONFIG = """
backend: "{backend}"
max_batch_size: 4
input [{{ name: "text" data_type: TYPE_STRING dims: [1] }}]
output [{{ name: "echo" data_type: TYPE_STRING dims: [1] }}]
instance_group [{{ kind: KIND_CPU }}]
"""


ENSEMBLE = """
platform: "ensemble"
max_batch_size: 4
input [{{ name: "text" data_type: TYPE_STRING dims: [1] }}]
output [{{ name: "out" data_type: TYPE_STRING dims: [1] }}]
ensemble_scheduling {{ step [{{
  model_name: "{step}" model_version: -1
  input_map {{ key: "text" value: "text" }}
  output_map {{ key: "{output}" value: "out" }}
}}] }}
"""
"""Config of an ensemble of one step."""

# `sleep:2:FILE` makes the file and takes two seconds, `env:NAME` answers with a variable,
# anything else comes back.
ECHO = """import os
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        pass

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        text = pb_utils.get_input_tensor_by_name(request, "text").as_numpy()
        verb, _, argument = text.item().decode().partition(":")
        if verb == "sleep":
            seconds, _, begun = argument.partition(":")
            open(begun, "w").close()
            time.sleep(float(seconds))
        if verb == "env":
            text = np.array([[os.environ.get(argument, "unset").encode()]], dtype=object)
        return pb_utils.InferenceResponse([pb_utils.Tensor("echo", text)])
"""


def write_model(
    repository: Path, name: str, code: str | None = ECHO, config: str = CONFIG, backend: str = ""
) -> Path:
    version = repository / name / "1"
    version.mkdir(parents=True)
    text = config.format(backend=backend or "python") if config is CONFIG else config
    (repository / name / "config.pbtxt").write_text(text)
    if code is not None:
        (version / "model.py").write_text(code)
    return repository


def ask(server: Server, text: str, model: str = "echo") -> str:
    """One request over HTTP; the answer's only string."""
    tensor = {"name": "text", "shape": [1, 1], "datatype": "BYTES", "data": [text]}
    host, port = server.http_url.split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    try:
        connection.request("POST", f"/v2/models/{model}/infer", json.dumps({"inputs": [tensor]}))
        answer: dict[str, Any] = json.loads(connection.getresponse().read())
    finally:
        connection.close()
    return str(answer["outputs"][0]["data"][0])
