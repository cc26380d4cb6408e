"""Run the preprocess step of every task: from requests to rows of the core."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from .counters import RowTokens
from .overflow import survive_overflow
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
    add_options,
    check_parameters,
    error_response,
    make_private,
    read_bytes,
    read_inputs,
    read_settings,
    read_texts,
    refuse_options,
    send,
)


class TritonPythonModel:
    """Step that converts the ensemble's inputs, each BYTES ``[n, 1]``, with the task's row maker.

    Options may come as request parameters or as optional inputs; see `triton_io.add_options`.
    The ensemble does not use the output ``direct_call`` BOOL ``[core rows, 1]``. A request for it,
    or for outputs without ``request_ticket``, was sent to this step itself and is not counted.

    ``request_ticket`` BYTES ``[core rows, 1]`` goes directly to postprocess. So does
    ``row_metadata`` BYTES ``[core rows, 1]`` if the task has one. Inputs are forwarded too if
    `hooks.after` takes them.
    """

    def initialize(self, args: Mapping[str, str]) -> None:
        folder = Path(__file__).parent
        settings = read_settings(folder)
        self._fields = settings["inputs"]
        self._encoded = settings["encoded_inputs"]
        self._max_text_bytes = settings["max_text_bytes"]
        self._rules = settings["request_parameters"]
        self._defaults = settings["parameters"]
        self._refuses_parameters = settings["refuses_parameters"]
        self._by_width = settings["layout"] == "bucketed"
        self._has_row_metadata = settings["has_row_metadata"]
        self._maker: RowMaker = find_class(settings["row_maker"])(settings, folder)
        # A step has only the modules that its pipeline uses.
        self._before: Any = None
        self._make_forwarded: Any = None
        if (folder / "hooks.py").is_file():
            hooking = import_module(".hooking", __package__)
            self._before = hooking.find_before(folder, self._fields, self._encoded)
            if "forwarded_inputs" in settings:
                self._make_forwarded = hooking.make_forwarded
        self._order: Callable[[dict[int, CoreRows]], list[int]] = list
        if self._by_width:
            self._order = partial(
                import_module(".bucketing", __package__).order_by_length,
                batch_tokens=settings["batch_tokens"],
                pad_token_id=settings.get("pad_token_id", 0),
            )
        self._flow: Any = None
        self._admit: Callable[..., Sequence[int]]
        if settings["flow_control"] == "triptych":
            self._flow = import_module(".flow_control", __package__).FlowControl(settings)
            self._admit = self._flow.admission.admit
        make_private()
        survive_overflow(args["model_config"])
        self._sampler: Any = None
        if "sample" in settings:
            sampling = import_module(".sampling", __package__)
            self._sampler = sampling.RowSampler(settings["sample"]["rate"])
            if self._flow is None:  # a sampled request needs a ticket
                counts = import_module(".in_flight", __package__).InFlight(settings["pipeline"])
                self._admit = partial(counts.admit, counts.take_slot())
        self._row_tokens = RowTokens(settings)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Return a response to every request; an invalid request gets its own error."""
        responses: list[Any] = [None] * len(requests)
        row_inputs: dict[int, RowInputs] = {}
        payloads: dict[int, tuple[str, bytes]] = {}
        # Triton's timeout of a request is in microseconds, and 0 without one.
        left_s = [request.timeout() / 1e6 or None for request in requests]
        counted: set[int] = set()
        if self._flow is not None:
            counted = {i for i, request in enumerate(requests) if _is_of_ensemble(request)}
            self._flow.admission.begin()
        for index, request in enumerate(requests):
            try:
                if index in counted:
                    self._flow.admission.check(left_s[index])
                row_inputs[index], payloads[index] = self._read(request)
            except Exception as error:
                responses[index] = error_response(error)
        made = self._maker.make(list(row_inputs.values())) if row_inputs else []
        answered: dict[int, CoreRows] = {}
        for index, core_rows in zip(row_inputs, made, strict=True):
            if isinstance(core_rows, Exception):
                responses[index] = error_response(core_rows)
            else:
                answered[index] = core_rows
        order = self._order(answered)
        respond = {
            i: partial(self._respond, answered[i], row_inputs[i], *payloads[i], i in counted)
            for i in order
        }
        held = [i for i in order if i in counted]
        ready = [(requests[i], answered[i].row_count, left_s[i], respond[i]) for i in held]
        taken = dict(zip(held, self._flow.backlog.take(ready) if held else (), strict=True))
        last_width = answered[order[-1]].width if order else 0
        for index in order:
            response = taken[index] if index in counted else respond[index]()
            if self._by_width and response is not None and answered[index].width != last_width:
                # Triton batches only adjacent requests of equal shape. A send takes a round trip,
                # so the most frequent shape is returned instead, after all others.
                send(requests[index].get_response_sender(), response)
            else:
                responses[index] = response
        self._count_tokens(answered)
        if counted:
            self._flow.admission.end()
        return responses

    def _count_tokens(self, answered: Mapping[int, CoreRows]) -> None:
        tensors = [rows.tensors for rows in answered.values()]
        # Rows of images have no length.
        self._row_tokens.count([each["row_length"] for each in tensors if "row_length" in each])

    def finalize(self) -> None:
        self._row_tokens.flush()

    def _read(self, request: Any) -> tuple[RowInputs, tuple[str, bytes]]:
        """Return the request for the row maker, and the payload of its ticket.

        The payload is the parameters, if some came as tensors, and the sample payload.
        """
        inputs, given, options = read_inputs(request), request.parameters(), ""
        if self._refuses_parameters:
            refuse_options(given, self._rules)
        if len(inputs) > len(self._fields):
            given = options = add_options(given, inputs, self._rules)
        parameters = check_parameters(given, self._rules, self._defaults)
        columns: dict[str, list[Any]] = {
            field: read_bytes(inputs, field)
            if field in self._encoded
            else read_texts(inputs, field, self._max_text_bytes)
            for field in self._fields
        }
        sample = b""
        if self._sampler is not None and _is_of_ensemble(request):
            sample = self._sampler.draw(columns, given)
        if self._before is not None:
            columns = self._before(columns)
        return RowInputs(columns, parameters), (options, sample)

    def _respond(
        self, core_rows: CoreRows, inputs: RowInputs, options: str, sample: bytes, counted: bool
    ) -> Any:
        count = core_rows.row_count
        tensors = [pb_utils.Tensor(name, value) for name, value in core_rows.tensors.items()]
        if self._has_row_metadata:
            metadata = np.array(core_rows.metadata, dtype=np.object_).reshape(-1, 1)
            tensors.append(pb_utils.Tensor("row_metadata", metadata))
        if self._make_forwarded is not None:
            forwarded = self._make_forwarded(inputs.columns, count)
            tensors += [pb_utils.Tensor(name, value) for name, value in forwarded.items()]
        payload = make_payload(options, sample)
        numbers = self._admit(count, payload) if counted or sample else NO_TICKET
        if not counted:
            tensors.append(pb_utils.Tensor("direct_call", np.ones((count, 1), np.bool_)))
        tensors.append(pb_utils.Tensor("request_ticket", write_ticket(numbers, payload, count)))
        return pb_utils.InferenceResponse(tensors)


def _is_of_ensemble(request: Any) -> bool:
    names = request.requested_output_names()
    return "request_ticket" in names and "direct_call" not in names
