"""The typed gRPC client of a pipeline: texts in, arrays out; `Client` for threads, `AsyncClient`.

>>> with Client("minilm") as client:
...     vectors = client.embed(["a text", "another"])  # float32 [2, 384]
"""

from triptych.client.asynchronous import AsyncClient
from triptych.client.channel import KeepAlive, Tls
from triptych.client.errors import (
    AccessDenied,
    Cancelled,
    DeadlineExceeded,
    InferenceError,
    InvalidRequest,
    NeighbourFailed,
    Overloaded,
    PipelineFailed,
    PipelineNotFound,
    PipelineNotReady,
    ServerUnreachable,
)
from triptych.client.generation import Chunk, Completion, Sampling, Usage
from triptych.client.retry import Retry
from triptych.client.server_info import StepStatistics
from triptych.client.streams import AsyncGeneration, Generation
from triptych.client.sync import Client
from triptych.client.tasks import Answer, Choice, Entity, Ranked
from triptych.client.wire import PipelineConfig

__all__ = [
    "AccessDenied",
    "Answer",
    "AsyncClient",
    "AsyncGeneration",
    "Cancelled",
    "Choice",
    "Chunk",
    "Client",
    "Completion",
    "DeadlineExceeded",
    "Entity",
    "Generation",
    "InferenceError",
    "InvalidRequest",
    "KeepAlive",
    "NeighbourFailed",
    "Overloaded",
    "PipelineConfig",
    "PipelineFailed",
    "PipelineNotFound",
    "PipelineNotReady",
    "Ranked",
    "Retry",
    "Sampling",
    "ServerUnreachable",
    "StepStatistics",
    "Tls",
    "Usage",
]
