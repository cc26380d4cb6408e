"""What each step of a pipeline has done, in Triton's own counts and times."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class StepStatistics:
    """Sums since the server loaded the step; two of them subtracted give what lay between.

    ``…_us`` without ``total`` is the mean of a request, in the batch that it was in.

    Attributes:
        model: name of the step's model.
        requests: requests run, among them those that a Python step itself refused.
        failures: requests that ended in an error of the server, such as a full queue.
        rows: rows inferred, counting every row of a request.
        executions: batches run.
        queue_total_us: time all requests together waited to be batched.
        compute_input_total_us: spent gathering their inputs.
        compute_infer_total_us: spent running the model.
        compute_output_total_us: spent handing out their outputs.
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
        """Rows a batch: 1.0 means that nothing was batched; 0.0 that nothing ran."""
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
        """What happened after `earlier` was taken."""
        if earlier.model != self.model:
            return NotImplemented
        sums = {
            field.name: getattr(self, field.name) - getattr(earlier, field.name)
            for field in fields(self)
            if field.name != "model"
        }
        return StepStatistics(self.model, **sums)


def read_statistics(model: str, response: Any) -> StepStatistics:
    """The sums over all versions in a ``ModelStatisticsResponse`` for `model`."""
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
