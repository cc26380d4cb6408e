"""Server-side counts of a pipeline's steps between two points in time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tritonclient import grpc

from triptych.client.errors import status_error
from triptych.client.server_info import StepStatistics, read_statistics, request_failure
from triptych.serving.bench.results import StepUse

if TYPE_CHECKING:
    from tritonclient.grpc.model_config_pb2 import ModelConfig
    from tritonclient.grpc.service_pb2 import ModelStatisticsResponse

STEPS = ("preprocess", "core", "postprocess")
_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class ServedStep:
    """A model on the path of requests; see `StepUse`."""

    step: str
    model: str
    instances: int
    max_delay_us: int


@dataclass(frozen=True)
class Counts:
    """Cumulative statistics of one model since the server loaded it."""

    statistics: StepStatistics
    total_us: float  # total time from arrival to answer of successful requests
    busy_us: float  # total time of executions
    batch_sizes: Mapping[int, int]  # executions by batch size

    @property
    def mean_us(self) -> float:
        answered = self.statistics.requests
        return self.total_us / answered if answered else 0.0

    def __sub__(self, earlier: Counts) -> Counts:
        """Return the counts since `earlier`, without batch sizes that did not run."""
        return Counts(
            statistics=self.statistics - earlier.statistics,
            total_us=self.total_us - earlier.total_us,
            busy_us=self.busy_us - earlier.busy_us,
            batch_sizes=Counter(self.batch_sizes) - Counter(earlier.batch_sizes),
        )


class ServerCounts:
    """Reader of a pipeline's counts on a server.

    Args:
        grpc_url: gRPC address, ``host:port``.
        pipeline: Name of an ensemble or a single model.

    Attributes:
        steps: Steps in the order of the ensemble, or the single model.

    Raises:
        UserError: The server does not answer, or the model does not exist.
    """

    def __init__(self, grpc_url: str, pipeline: str) -> None:
        # No proxy is used, as for perf_analyzer.
        direct = [("grpc.enable_http_proxy", 0)]
        self._pipeline = pipeline
        self._url = grpc_url
        self._client = grpc.InferenceServerClient(grpc_url, channel_args=direct)
        config = self._config(pipeline)
        names = [step.model_name for step in config.ensemble_scheduling.step] or [pipeline]
        self.steps = tuple(
            _step(pipeline, config if name == pipeline else self._config(name))
            for name in dict.fromkeys(names)
        )

    def read(self) -> dict[str, Counts]:
        """Return the counts of the pipeline and of each step, by model.

        Raises:
            UserError: The server does not answer.
        """
        names = dict.fromkeys([self._pipeline, *(step.model for step in self.steps)])
        ask = self._client.get_inference_statistics
        return {name: _read_counts(name, self._ask(ask, name)) for name in names}

    def close(self) -> None:
        self._client.close()

    def _config(self, model: str) -> ModelConfig:
        return self._ask(self._client.get_model_config, model).config

    def _ask(self, ask: Callable[..., Any], model: str) -> Any:
        try:
            return ask(model, client_timeout=_TIMEOUT_S)
        except grpc.InferenceServerException as error:
            code = str(error.status()).removeprefix("StatusCode.")
            failure = status_error(code, error.message(), url=self._url)
            raise request_failure(model, self._url, failure) from error


def step_use(step: ServedStep, counts: Counts, share: float, seconds: float) -> StepUse:
    """Return the use of a step as part of the result.

    Args:
        step: Step.
        counts: Counts between the two points in time.
        share: Share of the counts within the measured time.
        seconds: Duration of the measured time.
    """
    statistics = counts.statistics
    room_s = step.instances * seconds
    return StepUse(
        step=step.step,
        model=step.model,
        instances=step.instances,
        max_delay_us=step.max_delay_us,
        requests=statistics.requests,
        failures=statistics.failures,
        rows=statistics.rows,
        executions=statistics.executions,
        batch_sizes=dict(sorted(counts.batch_sizes.items())),
        queue_us=statistics.queue_us,
        compute_input_us=statistics.compute_input_us,
        compute_infer_us=statistics.compute_infer_us,
        compute_output_us=statistics.compute_output_us,
        busy=min(1.0, counts.busy_us / 1e6 * share / room_s) if room_s > 0 else None,
    )


def _read_counts(model: str, response: ModelStatisticsResponse) -> Counts:
    """Return the sums over all versions in a ``ModelStatisticsResponse`` for `model`."""
    sizes: Counter[int] = Counter()
    busy_ns = total_ns = 0
    for version in response.model_stats:
        total_ns += version.inference_stats.success.ns
        for ran in version.batch_stats:
            sizes[ran.batch_size] += ran.compute_infer.count
            busy_ns += ran.compute_input.ns + ran.compute_infer.ns + ran.compute_output.ns
    return Counts(read_statistics(model, response), total_ns / 1000, busy_ns / 1000, sizes)


def _step(pipeline: str, config: ModelConfig) -> ServedStep:
    name = config.name.removeprefix(f"{pipeline}_")
    if config.name.startswith(f"{pipeline}."):  # of one of several models
        name = config.name.removeprefix(f"{pipeline}.")
    elif name not in STEPS:
        name = config.name
    return ServedStep(
        step=name,
        model=config.name,
        instances=sum(
            group.count * (len(group.gpus) if group.kind == group.KIND_GPU else 1)
            for group in config.instance_group
        ),
        max_delay_us=config.dynamic_batching.max_queue_delay_microseconds,
    )
