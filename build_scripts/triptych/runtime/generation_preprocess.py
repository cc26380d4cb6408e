"""Run the preprocess step of text generation: from text or messages to token ids."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

from .generation_messages import HEALTH, MAX_NAME, MIN_NAME, Order
from .generation_metrics import PreprocessErrors
from .prompts import Prompts
from .request_errors import RequestError
from .sampling_parameters import DEFAULTS, FIELD, check_sampling
from .triton_io import Inputs, error_response, make_private, read_inputs, read_settings, read_texts

ECHO = "exclude_input_in_output"
CANCEL = "cancel"


class TritonPythonModel:
    """Step that makes ``prompt_ids`` INT32 ``[tokens]`` and ``order`` BYTES ``[1]`` for the core.

    A missing input has the same meaning as an empty one.
    """

    def initialize(self, args: Mapping[str, str]) -> None:
        folder = Path(__file__).parent
        settings = read_settings(folder)
        self._prompts = Prompts(settings, folder)
        self._defaults = {**DEFAULTS, **settings["parameters"]}
        self._max_length: int = settings["max_length"]
        self._max_answer: int | None = settings["max_answer"]
        self._max_text_bytes: int = settings["max_text_bytes"]
        self._adapters: list[str] = settings["adapters"]
        self._levels: int = settings["priority_levels"]
        self._errors = PreprocessErrors(settings["pipeline"])
        make_private()

    def execute(
        self, requests: Sequence[pb_utils.InferenceRequest]
    ) -> list[pb_utils.InferenceResponse]:
        """Return a response to every request; an invalid request gets its own error."""
        return [self._respond(request) for request in requests]

    def _respond(self, request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
        try:
            inputs = read_inputs(request)
            cancel = self._text(inputs, CANCEL)
            if cancel:
                ids: list[int] = []
                order = _make_cancel_order(cancel)
            else:
                ids, order = self._make_order(inputs, request.parameters())
            return pb_utils.InferenceResponse(
                [
                    pb_utils.Tensor("prompt_ids", np.array(ids, np.int32)),
                    pb_utils.Tensor("order", np.array([order.pack()], np.object_)),
                ]
            )
        except Exception as error:
            self._errors.count("refused" if isinstance(error, RequestError) else "error")
            return error_response(error)

    def _make_order(self, inputs: Inputs, parameters: str) -> tuple[list[int], Order]:
        ids = self._prompt(self._text(inputs, "text_input"), self._text(inputs, "messages"))
        room = self._max_answer or self._max_length - len(ids)
        sampling = check_sampling(
            self._text(inputs, FIELD),
            self._defaults,
            room=room,
            adapters=self._adapters,
            levels=self._levels,
            parameters=parameters,
        )
        if not _flag(inputs, ECHO):
            raise RequestError(
                ECHO, "must be true, because answers exclude the prompt", "false", "Leave it out"
            )
        if not _flag(inputs, "return_logprobs"):
            sampling["logprobs"] = None
        is_health_check = HEALTH in json.loads(parameters)
        return ids, Order(sampling, _flag(inputs, "stream"), is_health_check=is_health_check)

    def _prompt(self, text: str, messages: str) -> list[int]:
        if bool(text) == bool(messages):
            raise RequestError(
                "text_input",
                "or `messages` is required, and only one of them is allowed",
                "both" if text else "neither",
                "Send one of them",
            )
        return self._prompts.of_text(text) if text else self._prompts.of_messages(messages)

    def _text(self, inputs: Inputs, field: str) -> str:
        if field not in inputs:
            return ""
        texts = read_texts(inputs, field, self._max_text_bytes, "max_text_bytes")
        if len(texts) != 1:
            raise RequestError(
                field, "must be one text", f"{len(texts)} texts", "Send a request for each text"
            )
        return texts[0]


def _make_cancel_order(name: str) -> Order:
    if not MIN_NAME <= len(name) <= MAX_NAME:
        raise RequestError(
            CANCEL,
            f"must be a request id of {MIN_NAME} to {MAX_NAME} characters; shorter ids may not be "
            "unique",
            f"{len(name)} characters",
            "Give requests random ids",
        )
    return Order({}, False, name)


def _flag(inputs: Inputs, field: str) -> bool:
    """Return the value of a flag, which is true if the request leaves it out."""
    return field not in inputs or bool(inputs[field].as_numpy().ravel()[0])
