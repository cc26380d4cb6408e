"""Run the preprocess step of every task: from requests to rows of the core."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from .row_types import (
    NO_TICKET,
    TICKET,
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
    read_bytes,
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
        rows: Estimated number of model rows.
        is_counted: Whether flow control applies to the request.
        left_s: Seconds until the deadline; None if there is none.
        sender: Triton's sender of the response, if the response is not returned with the batch.
        since: Time of arrival by `time.monotonic`, if flow control applies to the request.
        is_newest: Whether flow control chose the request as the newest one.
    """

    request: pb_utils.InferenceRequest
    index: int
    inputs: RowInputs
    options: str
    sample: bytes
    rows: int
    is_counted: bool
    left_s: float | None
    sender: Any = None
    width: int = 0
    since: float = 0.0
    is_newest: bool = False


class TritonPythonModel:
    """Step that converts the ensemble's inputs, each BYTES ``[n, 1]``, with the task's row maker.

    Options may come as request parameters or as optional inputs; see `triton_io.add_options`.
    The ensemble does not use the output ``direct_call`` BOOL ``[core rows, 1]``. A request for it,
    or for outputs without ``request_ticket``, was sent to this step itself and is not counted.

    The tensors of `row_types.write_ticket` go directly to postprocess if the request has a ticket,
    a sample, or options as inputs. So does ``row_metadata`` BYTES ``[core rows, 1]`` if the task
    has one. Inputs are forwarded too if `hooks.after` takes them.
    """

    def initialize(self, args: Mapping[str, str]) -> None:
        folder = Path(__file__).parent
        settings = read_settings(folder, args["model_config"])
        self._fields = settings["inputs"]
        self._encoded = settings["encoded_inputs"]
        self._max_text_bytes = settings["max_text_bytes"]
        self._required = settings.get("required_inputs", len(self._fields))
        is_own = "own_inputs" in settings
        self._read_columns: Callable[[Inputs], dict[str, Any]] = (
            find_class("own_model.OwnInputs")(settings).read if is_own else self._read_texts
        )
        self._rules = settings["request_parameters"]
        self._defaults = settings["parameters"]
        self._by_width = settings["layout"] == "bucketed"
        self._has_row_metadata = settings["has_row_metadata"]
        self._maker: RowMaker = find_class(settings["row_maker"])(settings, folder)
        # A step has only the modules that its pipeline uses.
        self._before: Any = None
        self._make_forwarded: Any = None
        if (folder / "hooks.py").is_file():
            hooking = import_module(".hooking", __package__)
            self._before = hooking.find_before(folder, settings)
            if "forwarded_inputs" in settings:
                self._make_forwarded = hooking.make_forwarded
        self._refuse: Any = None
        if settings["refuses_parameters"]:
            self._refuse = import_module(".cached_options", __package__).refuse_options
        self._order: Callable[[dict[int, CoreRows]], list[int]] = list
        if self._by_width:
            self._order = partial(
                import_module(".bucketing", __package__).order_by_length,
                batch_tokens=settings["batch_tokens"],
                pad_token_id=settings.get("pad_token_id", 0),
            )
        self._flow: Any = None
        self._admit: Callable[[int, Job], Sequence[int]]
        if settings["flow_control"] == "triptych":
            module = import_module(".flow_control", __package__)
            self._flow = module.FlowControl(settings, self._make, _send)
            self._admit = self._flow.admit
        make_private()
        if settings["free_dimensions"]:
            import_module(".overflow", __package__).survive_overflow(args["model_config"])
        self._sampler: Any = None
        if "sample" in settings:
            sampling = import_module(".sampling", __package__)
            self._sampler = sampling.RowSampler(settings["sample"]["rate"])
            if self._flow is None:  # a sampled request needs a ticket
                module = import_module(".in_flight", __package__)
                marks = module.InFlight(settings["pipeline"], settings["core_instances"])
                self._admit = lambda rows, job: marks.admit(rows)
        self._row_tokens: Any = None
        if "token_bounds" in settings:  # rows of images have no length
            self._row_tokens = find_class("counters.RowTokens")(settings)
        self._rows_read = self._rows_made = 1  # in all requests so far
        self._making = threading.Lock()

    def execute(
        self, requests: Sequence[pb_utils.InferenceRequest]
    ) -> list[pb_utils.InferenceResponse | None]:
        """Return a response to every request; an invalid request gets its own error."""
        responses: list[pb_utils.InferenceResponse | None] = [None] * len(requests)
        jobs: list[Job] = []
        for index, request in enumerate(requests):
            try:
                jobs.append(self._read(index, request))
            except Exception as error:
                responses[index] = error_response(error)
        direct = [job for job in jobs if not job.is_counted]
        results = self._make(direct) if direct else []
        if counted := [job for job in jobs if job.is_counted]:
            results += self._flow.take(counted)
        last_width = results[-1][0].width if results else 0
        for job, result in results:
            if self._by_width and job.sender is None and job.width != last_width:
                # Triton batches only adjacent requests of equal shape. A send takes a round trip,
                # so the most frequent shape is returned instead, after all others.
                job.sender = job.request.get_response_sender()
            if job.sender is None:
                responses[job.index] = _response(result)
            else:
                _send(job, result)
        return responses

    def _make(
        self, jobs: Sequence[Job]
    ) -> list[tuple[Job, pb_utils.InferenceResponse | Exception]]:
        """Return each job with its response for the core or its error, in the order to send."""
        results: list[tuple[Job, pb_utils.InferenceResponse | Exception]] = []
        rows: dict[int, CoreRows] = {}
        with self._making:  # flow control has a thread of its own
            for index, made in enumerate(self._maker.make([job.inputs for job in jobs])):
                if isinstance(made, Exception):
                    results.append((jobs[index], made))
                else:
                    rows[index], jobs[index].width = made, made.width
            results += [(jobs[i], self._respond(jobs[i], rows[i])) for i in self._order(rows)]
            if self._row_tokens is not None:
                self._row_tokens.count([made.tensors["row_length"] for made in rows.values()])
        return results

    def finalize(self) -> None:
        if self._row_tokens is not None:
            self._row_tokens.flush()

    def _read(self, index: int, request: pb_utils.InferenceRequest) -> Job:
        inputs, given, options = read_inputs(request), request.parameters(), ""
        if self._refuse is not None:
            self._refuse(given, self._rules)
        if len(inputs) > self._required:
            given = options = add_options(given, inputs, self._rules)
        parameters = check_parameters(given, self._rules, self._defaults)
        columns = self._read_columns(inputs)
        sample = b""
        names = request.requested_output_names()
        is_whole = TICKET in names and "direct_call" not in names
        if self._sampler is not None and is_whole:
            sample = self._sampler.draw(columns, given)
        if self._before is not None:
            columns = self._before(columns)
        count = len(columns[self._fields[0]])
        return Job(
            request,
            index,
            RowInputs(columns, parameters),
            options,
            sample,
            rows=count * self._rows_made // self._rows_read or 1,
            is_counted=self._flow is not None and is_whole,
            left_s=request.timeout() / 1e6 or None,  # in microseconds, and 0 without a deadline
        )

    def _read_texts(self, inputs: Inputs) -> dict[str, object]:
        return {
            field: read_bytes(inputs, field)
            if field in self._encoded
            else read_texts(inputs, field, self._max_text_bytes)
            for field in self._fields
        }

    def _respond(self, job: Job, core_rows: CoreRows) -> pb_utils.InferenceResponse:
        count = core_rows.row_count
        self._rows_read += len(job.inputs.columns[self._fields[0]])
        self._rows_made += count
        tensors = dict(core_rows.tensors)
        if self._has_row_metadata:
            metadata = np.array(core_rows.metadata, dtype=np.object_)
            tensors["row_metadata"] = metadata.reshape(-1, 1)
        if self._make_forwarded is not None:
            tensors |= self._make_forwarded(job.inputs.columns, count)
        payload = make_payload(job.options, job.sample)
        is_admitted = job.is_counted or job.sample
        ticket = self._admit(count, job) if is_admitted else NO_TICKET
        if not job.is_counted:
            tensors["direct_call"] = np.ones((count, 1), np.bool_)
        tensors |= write_ticket(ticket, payload, count)
        return pb_utils.InferenceResponse([pb_utils.Tensor(*each) for each in tensors.items()])


def _response(result: pb_utils.InferenceResponse | Exception) -> pb_utils.InferenceResponse:
    return error_response(result) if isinstance(result, Exception) else result


def _send(job: Job, result: pb_utils.InferenceResponse | Exception) -> None:
    send(job.sender, _response(result))
