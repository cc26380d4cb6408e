"""The typed gRPC client of a pipeline: texts in, arrays out; `Client` for threads, `AsyncClient`.

>>> with Client("minilm") as client:
...     vectors = client.embed(["a text", "another"])  # float32 [2, 384]
"""

from triptych.client.answers import (
    Answer,
    Choice,
    Entity,
    HybridEmbedding,
    Ranked,
    SparseVector,
    TokenChoice,
    maxsim,
    sparse_matrix,
)
from triptych.client.asynchronous import AsyncClient
from triptych.client.connection import KeepAlive, Tls
from triptych.client.errors import (
    AccessDeniedError,
    BatchFailedError,
    CanceledError,
    DeadlineExceededError,
    InferenceError,
    InvalidRequestError,
    OverloadedError,
    PipelineFailedError,
    PipelineNotFoundError,
    PipelineNotReadyError,
    ServerUnreachableError,
)
from triptych.client.generation import Chunk, Completion, Sampling, Usage
from triptych.client.retry import Retry
from triptych.client.server_info import StepStatistics
from triptych.client.streams import AsyncGeneration, Generation
from triptych.client.sync import Client
from triptych.client.wire import PipelineConfig

__all__ = [
    "AccessDeniedError",
    "Answer",
    "AsyncClient",
    "AsyncGeneration",
    "BatchFailedError",
    "CanceledError",
    "Choice",
    "Chunk",
    "Client",
    "Completion",
    "DeadlineExceededError",
    "Entity",
    "Generation",
    "HybridEmbedding",
    "InferenceError",
    "InvalidRequestError",
    "KeepAlive",
    "OverloadedError",
    "PipelineConfig",
    "PipelineFailedError",
    "PipelineNotFoundError",
    "PipelineNotReadyError",
    "Ranked",
    "Retry",
    "Sampling",
    "ServerUnreachableError",
    "SparseVector",
    "StepStatistics",
    "Tls",
    "TokenChoice",
    "Usage",
    "maxsim",
    "sparse_matrix",
]
