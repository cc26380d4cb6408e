"""What the server itself counted: a pipeline's steps, and what each did between two moments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tritonclient import grpc

from triptych.bench.points import StepUse
from triptych.client.statistics import StepStatistics, read_statistics
from triptych.errors import UserError

STEPS = ("preprocess", "core", "postprocess")
_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Step:
    """A model that requests go through.

    Attributes:
        step: ``preprocess``, ``core``, ``postprocess``; the model's name where it is none of them.
        model: Triton's name.
        instances: that run it.
        max_delay_us: how long its batcher may hold a batch open.
    """

    step: str
    model: str
    instances: int
    max_delay_us: int


@dataclass(frozen=True)
class Batches:
    """Executions of one batch size: how many, and how long they took altogether."""

    executions: int
    total_us: float


@dataclass(frozen=True)
class Counts:
    """Sums of one model since the server loaded it.

    Attributes:
        statistics: see `StepStatistics`.
        total_us: time from arrival to answer of all requests together, those without error.
        batches: rows of a batch to the executions of that size.
    """

    statistics: StepStatistics
    total_us: float
    batches: Mapping[int, Batches]

    @property
    def mean_us(self) -> float:
        """Mean time of a request."""
        answered = self.statistics.requests
        return self.total_us / answered if answered else 0.0

    def __sub__(self, earlier: Counts) -> Counts:
        """What happened after `earlier` was taken; sizes that did not run are left out."""
        nothing = Batches(0, 0.0)
        batches = {
            rows: Batches(
                now.executions - earlier.batches.get(rows, nothing).executions,
                now.total_us - earlier.batches.get(rows, nothing).total_us,
            )
            for rows, now in self.batches.items()
        }
        return Counts(
            statistics=self.statistics - earlier.statistics,
            total_us=self.total_us - earlier.total_us,
            batches={rows: ran for rows, ran in batches.items() if ran.executions},
        )


class ServerCounts:
    """A pipeline on a server, asked for its counts.

    Args:
        grpc_url: ``host:port``.
        pipeline: an ensemble, or a model by itself.

    Attributes:
        pipeline: see above.
        steps: in the ensemble's order; the model itself where it is no ensemble.

    Raises:
        UserError: nothing answers there, or there is no such model.
    """

    def __init__(self, grpc_url: str, pipeline: str) -> None:
        # No proxy stands between this and the server, as for perf_analyzer.
        direct = [("grpc.enable_http_proxy", 0)]
        self.pipeline = pipeline
        self._url = grpc_url
        self._client = grpc.InferenceServerClient(grpc_url, channel_args=direct)
        config = self._config(pipeline)
        names = [step.model_name for step in config.ensemble_scheduling.step] or [pipeline]
        self.steps = tuple(
            _step(pipeline, config if name == pipeline else self._config(name))
            for name in dict.fromkeys(names)
        )

    def read(self) -> dict[str, Counts]:
        """The counts of the pipeline and of each step, by model.

        Raises:
            UserError: the server no longer answers.
        """
        names = dict.fromkeys([self.pipeline, *(step.model for step in self.steps)])
        return {name: read_counts(name, self._statistics(name)) for name in names}

    def close(self) -> None:
        """Ends the connection."""
        self._client.close()

    def _config(self, model: str) -> Any:
        return self._ask(self._client.get_model_config, model).config

    def _statistics(self, model: str) -> Any:
        return self._ask(self._client.get_inference_statistics, model)

    def _ask(self, ask: Callable[..., Any], model: str) -> Any:
        try:
            return ask(model, client_timeout=_TIMEOUT_S)
        except grpc.InferenceServerException as error:
            if str(error.status()).endswith(("NOT_FOUND", "INVALID_ARGUMENT")):
                raise UserError(
                    "pipeline",
                    "must be a model that the server has loaded",
                    given=f"{model}: {error.message()}",
                    remedy="Check its name, and the server's log",
                ) from error
            raise UserError(
                "url",
                "must be the gRPC address of a running server",
                given=f"{self._url}: {error.message()}",
                remedy="Start it with `triptych serve NAME`, or check host and port",
            ) from error


def read_counts(model: str, response: Any) -> Counts:
    """The sums over all versions in a ``ModelStatisticsResponse`` for `model`."""
    batches: dict[int, Batches] = {}
    for version in response.model_stats:
        for ran in version.batch_stats:
            before = batches.get(ran.batch_size, Batches(0, 0.0))
            took_ns = ran.compute_input.ns + ran.compute_infer.ns + ran.compute_output.ns
            batches[ran.batch_size] = Batches(
                before.executions + ran.compute_infer.count, before.total_us + took_ns / 1000
            )
    answered = [version.inference_stats.success for version in response.model_stats]
    return Counts(
        statistics=read_statistics(model, response),
        total_us=sum(success.ns for success in answered) / 1000,
        batches=batches,
    )


def step_use(step: Step, counts: Counts, share: float, seconds: float) -> StepUse:
    """What `step` did, as a value of the result.

    Args:
        step: whose.
        counts: between the two moments.
        share: of these counts that falls into the measured time; the rest is before and after.
        seconds: of the measured time.
    """
    statistics = counts.statistics
    took_s = sum(ran.total_us for ran in counts.batches.values()) / 1e6 * share
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
        batch_sizes={rows: counts.batches[rows].executions for rows in sorted(counts.batches)},
        queue_us=statistics.queue_us,
        compute_input_us=statistics.compute_input_us,
        compute_infer_us=statistics.compute_infer_us,
        compute_output_us=statistics.compute_output_us,
        busy=min(1.0, took_s / room_s) if room_s > 0 else None,
    )


def _step(pipeline: str, config: Any) -> Step:
    name = config.name.removeprefix(f"{pipeline}_")
    return Step(
        step=name if name in STEPS else config.name,
        model=config.name,
        instances=sum(
            group.count * (len(group.gpus) if group.kind == group.KIND_GPU else 1)
            for group in config.instance_group
        ),
        max_delay_us=config.dynamic_batching.max_queue_delay_microseconds,
    )
