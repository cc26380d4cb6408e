"""Run the preprocess step of every task: from requests to rows of the core."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from .row_types import (
    NO_TICKET,
    CoreRows,
    RowInputs,
    RowMaker,
    find_class,
    make_payload,
    write_ticket,
)
from .triton_io import (
    Inputs,
    add_options,
    check_parameters,
    error_response,
    make_private,
    read_inputs,
    read_settings,
    read_texts,
    send,
)


@dataclass(eq=False)
class Job:
    """A request on its way through the step.

    Attributes:
        index: Place in the batch.
        options: Parameters of the request as JSON, if some came as tensors.
        sample: Sample payload; empty if no row is sampled.
        sender: Triton's sender of the response, if the response is not returned with the batch.
        width: Padded length of its rows, in the bucketed layout.
    """

    request: pb_utils.InferenceRequest
    index: int
    inputs: RowInputs
    options: str
    sample: bytes = b""
    sender: Any = None
    width: int = 0


Results = list[tuple[Job, "pb_utils.InferenceResponse"]]
"""Jobs with their responses for the core, in the order to send."""


class Preprocess:
    """Step that converts the ensemble's inputs with the task's row maker.

    Options may come as request parameters or as optional inputs; see `triton_io.add_options`. The
    latter go directly to postprocess. The ``model.py`` of a pipeline adds the classes in
    ``preprocess_*.py`` that it uses.
    """

    job_type: type[Job] = Job

    def initialize(self, args: Mapping[str, str]) -> None:
        self.folder = Path(__file__).parent
        self.settings = settings = read_settings(self.folder, args["model_config"])
        self.fields: list[str] = settings["inputs"]
        self.rules: Mapping[str, Mapping[str, object]] = settings["request_parameters"]
        self._defaults: Mapping[str, object] = settings["parameters"]
        self._required: int = settings.get("required_inputs", len(self.fields))
        self._maker: RowMaker = find_class(settings["row_maker"])(settings, self.folder)
        self._row_tokens: Any = None
        if "token_bounds" in settings:  # rows of images have no length
            self._row_tokens = find_class("counters.RowTokens")(settings)
        make_private()

    def execute(
        self, requests: Sequence[pb_utils.InferenceRequest]
    ) -> list[pb_utils.InferenceResponse | None]:
        """Return a response to every request; an invalid request gets its own error."""
        responses: list[pb_utils.InferenceResponse | None] = [None] * len(requests)
        jobs: list[Job] = []
        for index, request in enumerate(requests):
            try:
                jobs.append(self.read(index, request))
            except Exception as error:
                responses[index] = error_response(error)
        for job, response in self.take(jobs):
            if job.sender is None:
                responses[job.index] = response
            else:
                send(job.sender, response)
        return responses

    def finalize(self) -> None:
        if self._row_tokens is not None:
            self._row_tokens.flush()

    def read(self, index: int, request: pb_utils.InferenceRequest) -> Job:
        """Return the job of a request.

        Raises:
            RequestError: The request is invalid.
        """
        inputs, given, options = read_inputs(request), request.parameters(), ""
        if len(inputs) > self._required:
            given = options = add_options(given, inputs, self.rules)
        parameters = check_parameters(given, self.rules, self._defaults)
        return self.job_type(request, index, RowInputs(self.columns(inputs), parameters), options)

    def columns(self, inputs: Inputs) -> dict[str, Any]:
        """Return one value per row for each input of a request."""
        limit = self.settings["max_text_bytes"]
        return {field: read_texts(inputs, field, limit) for field in self.fields}

    def take(self, jobs: list[Job]) -> Results:
        """Return the jobs to respond to now, with their responses."""
        return self.make(jobs) if jobs else []

    def make(self, jobs: Sequence[Job]) -> Results:
        """Return all jobs with their responses."""
        results: Results = []
        rows: dict[int, CoreRows] = {}
        for index, made in enumerate(self._maker.make([job.inputs for job in jobs])):
            if isinstance(made, Exception):
                results.append((jobs[index], error_response(made)))
            else:
                rows[index] = made
        for index in self.order(jobs, rows):
            tensors = self.tensors(jobs[index], rows[index])
            pairs = [pb_utils.Tensor(*each) for each in tensors.items()]
            results.append((jobs[index], pb_utils.InferenceResponse(pairs)))
        if self._row_tokens is not None:
            self._row_tokens.count([made.tensors["row_length"] for made in rows.values()])
        return results

    def order(self, jobs: Sequence[Job], rows: dict[int, CoreRows]) -> Iterable[int]:
        """Return the order in which jobs are sent; `rows` are those of each by its index."""
        return rows

    def tensors(self, job: Job, core_rows: CoreRows) -> dict[str, NDArray[Any]]:
        """Return the tensors of a job for the core, and those that go past it."""
        count, payload = core_rows.row_count, make_payload(job.options, job.sample)
        return {**core_rows.tensors, **write_ticket(self.ticket(job, count), payload, count)}

    def ticket(self, job: Job, count: int) -> Sequence[int]:
        """Return the ticket of a job with `count` model rows."""
        return NO_TICKET
