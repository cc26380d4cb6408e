"""Triton models that stop, fail or die at a chosen place."""

from pathlib import Path

CONFIG = """backend: "python"
max_batch_size: 4
input [{ name: "text" data_type: TYPE_STRING dims: [1] }]
output [{ name: "echo" data_type: TYPE_STRING dims: [1] }]
instance_group [{ kind: KIND_CPU }]
"""


MODEL = """import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        pass

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        text = pb_utils.get_input_tensor_by_name(request, "text").as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("echo", text)])
"""


def write_model(repository: Path, name: str, code: str | None, config: str = CONFIG) -> Path:
    version = repository / name / "1"
    version.mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(config)
    if code is not None:
        (version / "model.py").write_text(code)
    return repository


def initializing_with(statement: str) -> str:
    return MODEL.replace("        pass", f"        {statement}")


STOP_ONCE = """
import os, signal, time

def stop_once(mark):
    if os.path.exists(mark):
        return
    open(mark, "w").close()
    if not os.fork():
        time.sleep(2.5)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)
"""


STOPPING = 'stop_once(__file__ + ".stopped")'


STOPPED_IN_INITIALIZE = STOP_ONCE + initializing_with(STOPPING)
