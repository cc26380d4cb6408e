"""The typed gRPC client of a pipeline: texts in, arrays out; `Client` for threads, `AsyncClient`.

>>> with Client("minilm") as client:
...     vectors = client.embed(["a text", "another"])  # float32 [2, 384]
"""

from triptych.serving.client.asynchronous import AsyncClient
from triptych.serving.client.channel import KeepAlive, Tls
from triptych.serving.client.errors import (
    AccessDenied,
    Cancelled,
    DeadlineExceeded,
    InferenceError,
    InvalidRequest,
    Overloaded,
    PipelineFailed,
    PipelineNotFound,
    PipelineNotReady,
    ServerUnreachable,
)
from triptych.serving.client.results import Answer, Choice, Entity, Ranked
from triptych.serving.client.statistics import StepStatistics
from triptych.serving.client.sync import Client
from triptych.serving.client.wire import PipelineConfig
from triptych.serving.client.work import Retry

__all__ = [
    "AccessDenied",
    "Answer",
    "AsyncClient",
    "Cancelled",
    "Choice",
    "Client",
    "DeadlineExceeded",
    "Entity",
    "InferenceError",
    "InvalidRequest",
    "KeepAlive",
    "Overloaded",
    "PipelineConfig",
    "PipelineFailed",
    "PipelineNotFound",
    "PipelineNotReady",
    "Ranked",
    "Retry",
    "ServerUnreachable",
    "StepStatistics",
    "Tls",
]
