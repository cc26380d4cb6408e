"""A Triton model that takes a known time for each request."""

from pathlib import Path

CONFIG = """
backend: "python"
max_batch_size: {max_batch_size}
input {{ name: "text" data_type: TYPE_STRING dims: [1] }}
output {{ name: "echo" data_type: TYPE_STRING dims: [1] }}
instance_group {{ kind: KIND_CPU count: 1 }}
{batching}
"""


ECHO = """
import time
from pathlib import Path
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.calls = 0

    def execute(self, requests):
        responses = []
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "text")
            {each}
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("echo", text.as_numpy())]))
        return responses
"""


def write_model(
    repository: Path, name: str, each: str = "pass", *, max_batch_size: int = 0, batching: str = ""
) -> None:
    (repository / name / "1").mkdir(parents=True)
    config = CONFIG.format(max_batch_size=max_batch_size, batching=batching)
    (repository / name / "config.pbtxt").write_text(config)
    (repository / name / "1" / "model.py").write_text(ECHO.format(each=each))
