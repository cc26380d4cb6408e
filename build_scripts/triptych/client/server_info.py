"""Statistics of a pipeline's steps, and reloading of pipelines on a running server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from triptych.base.errors import UserError, closest
from triptych.base.step_names import STEP_SUFFIXES
from triptych.client.connection import read_target
from triptych.client.errors import (
    InferenceError,
    PipelineNotFoundError,
    ServerUnreachableError,
    status_error,
)

if TYPE_CHECKING:
    from tritonclient.grpc import service_pb2

_TIMEOUT_S = 120.0
_CONFIG_TIMEOUT_S = 10.0
_DIRECT = [("grpc.enable_http_proxy", 0)]


def reload_pipeline(url: str, pipeline: str, headers: Mapping[str, str]) -> None:
    """Load a pipeline again; the server loads each changed step once, and the ensemble at the end.

    Args:
        url: Address of the gRPC service.
        pipeline: Name of the ensemble.
        headers: Headers that the server requires for loading models.

    Raises:
        UserError: A model does not load.
    """
    from tritonclient.grpc import InferenceServerClient
    from tritonclient.utils import InferenceServerException

    with InferenceServerClient(url, channel_args=_DIRECT) as client:
        try:
            client.load_model(pipeline, headers=dict(headers), client_timeout=_TIMEOUT_S)
            is_ready = client.is_model_ready(pipeline, client_timeout=_TIMEOUT_S)
            problem = "" if is_ready else "not ready afterwards"
        except InferenceServerException as error:
            problem = str(error.message())
    if problem:
        raise UserError(pipeline, "must load", given=problem, remedy="See the server's log")


def check_served(url: str, pipeline: str) -> None:
    """Check that a server at `url` serves the pipeline.

    Raises:
        UserError: There is no response at `url`, or it does not serve the pipeline.
    """
    from tritonclient.grpc import InferenceServerClient
    from tritonclient.utils import InferenceServerException

    with InferenceServerClient(read_target(url).uri, channel_args=_DIRECT) as client:
        try:
            client.get_model_config(pipeline, client_timeout=_CONFIG_TIMEOUT_S)
        except InferenceServerException as error:
            code = str(error.status()).removeprefix("StatusCode.")
            failure = status_error(code, error.message(), url=url)
            raise request_failure(pipeline, url, failure) from error


def list_served(url: str) -> list[str]:
    """Return the names of the pipelines that a server has loaded, without their steps.

    The list is empty if the server does not answer or, as in production, restricts statistics.
    """
    from tritonclient.grpc import InferenceServerClient
    from tritonclient.utils import InferenceServerException

    with InferenceServerClient(read_target(url).uri, channel_args=_DIRECT) as client:
        try:
            loaded = client.get_inference_statistics(client_timeout=_CONFIG_TIMEOUT_S)
        except InferenceServerException:
            return []
    names = {model.name for model in loaded.model_stats}
    return sorted(name for name in names if not name.endswith(STEP_SUFFIXES))


def request_failure(pipeline: str, url: str, error: InferenceError, remedy: str = "") -> UserError:
    """Return the error of the command line for a request without a result.

    `remedy` replaces the usual one.
    """
    if isinstance(error, ServerUnreachableError):
        usual = error.remedy.replace("`triptych serve`", f"`triptych serve {pipeline}`")
        return UserError(
            "--url",
            "must be the gRPC address of a running server",
            given=f"{url}: {error.reason}",
            remedy=remedy or usual,
        )
    if isinstance(error, PipelineNotFoundError):
        served = list_served(url)
        listed = f"Pipelines there: {', '.join(served)}" if served else "Check the name"
        return UserError(
            f"{pipeline} at {url}",
            "is not served there",
            given=pipeline,
            remedy=f"{closest(pipeline, served)}{listed}",
        )
    return UserError(
        f"{pipeline} at {url}", "did not answer the request", given=error, remedy=remedy
    )


@dataclass(frozen=True)
class StepStatistics:
    """Sums since the server loaded the step; the difference of two covers the time between them.

    A ``…_us`` property without ``total`` is the mean per request, of the batch that it was in.

    Attributes:
        model: Name of the step's model.
        requests: Number of requests run, including those that a Python step rejected.
        failures: Number of requests that ended in an error of the server, such as a full queue.
        rows: Number of rows inferred, counting every row of a request.
        executions: Number of batches run.
        queue_total_us: Time that all requests together waited for a batch, in us.
        compute_input_total_us: Time to gather their inputs, in us.
        compute_infer_total_us: Time to run the model, in us.
        compute_output_total_us: Time to return their outputs, in us.
    """

    model: str
    requests: int
    failures: int
    rows: int
    executions: int
    queue_total_us: float
    compute_input_total_us: float
    compute_infer_total_us: float
    compute_output_total_us: float

    @property
    def mean_batch(self) -> float:
        """Mean number of rows per batch: 1.0 if nothing was batched; 0.0 if nothing ran."""
        return self.rows / self.executions if self.executions else 0.0

    @property
    def queue_us(self) -> float:
        return self._mean(self.queue_total_us)

    @property
    def compute_input_us(self) -> float:
        return self._mean(self.compute_input_total_us)

    @property
    def compute_infer_us(self) -> float:
        return self._mean(self.compute_infer_total_us)

    @property
    def compute_output_us(self) -> float:
        return self._mean(self.compute_output_total_us)

    def _mean(self, total_us: float) -> float:
        return total_us / self.requests if self.requests else 0.0

    def __sub__(self, earlier: StepStatistics) -> StepStatistics:
        """Return the statistics since `earlier`."""
        if earlier.model != self.model:
            return NotImplemented
        sums = {
            field.name: getattr(self, field.name) - getattr(earlier, field.name)
            for field in fields(self)
            if field.name != "model"
        }
        return StepStatistics(self.model, **sums)


def read_statistics(model: str, response: service_pb2.ModelStatisticsResponse) -> StepStatistics:
    """Return the sums over all versions in a ``ModelStatisticsResponse``."""
    versions = list(response.model_stats)
    inferences = [version.inference_stats for version in versions]

    def total_us(phase: str) -> float:
        return float(sum(getattr(inference, phase).ns for inference in inferences) / 1000)

    return StepStatistics(
        model=model,
        requests=sum(inference.success.count for inference in inferences),
        failures=sum(inference.fail.count for inference in inferences),
        rows=sum(version.inference_count for version in versions),
        executions=sum(version.execution_count for version in versions),
        queue_total_us=total_us("queue"),
        compute_input_total_us=total_us("compute_input"),
        compute_infer_total_us=total_us("compute_infer"),
        compute_output_total_us=total_us("compute_output"),
    )
