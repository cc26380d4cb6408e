"""Endpoint for the pipelines of every task: rows of inputs to rows of outputs."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, Field

from triptych.client.plain import plain_outputs, request_parameter
from triptych.client.wire import Parameter
from triptych.gateway.errors import ApiError, invalid
from triptych.gateway.http import Body, Operation
from triptych.gateway.pipelines import Endpoints

IMAGE = "image"
_Row = dict[str, object]


class TaskRequest(Body):
    """Rows for a pipeline.

    Attributes:
        rows: Objects with a value for each input of the pipeline: a text, a number or nested lists
            of numbers; an image is base64 of its file.
        parameters: Request parameters of the pipeline, such as top_k.
    """

    rows: Annotated[list[_Row], Field(min_length=1, fail_fast=True)]
    parameters: dict[str, object] = Field(default_factory=dict)


class TaskResponse(BaseModel):
    """Outputs of each row, in the order of the request."""

    rows: list[dict[str, object]]


class PipelineInfo(BaseModel):
    """Interface of a pipeline."""

    name: str
    inputs: list[str]
    outputs: list[str]
    parameters: dict[str, object]
    max_batch_size: int


class Tasks(Endpoints):
    """Endpoints for pipelines by their name."""

    tag = "Pipelines"

    @Operation(
        "/v1/pipelines/{name}",
        TaskResponse,
        rows="rows",
        example={"rows": [{"text": "my delivery is late"}], "parameters": {"top_k": 3}},
    )
    async def infer(self, body: TaskRequest, name: str) -> dict[str, object]:
        """Send rows to a pipeline of any task but text generation."""
        self._limits.check_items("rows", len(body.rows))
        pipeline = self._pipelines.find(name)
        config = await pipeline.config()
        if config.generates:
            raise ApiError(
                400,
                "unsupported_task",
                f"`{name}` generates text. Call /v1/chat/completions or /v1/completions.",
            )
        inputs: dict[str, list[object]] = {each: [] for each in config.inputs}
        for index, row in enumerate(body.rows):
            if row.keys() != inputs.keys():
                raise invalid(
                    f"rows[{index}]",
                    f"must have exactly the inputs {', '.join(inputs)}",
                    ", ".join(row)[:200] or "none",
                    "Correct the names",
                )
            for each, column in inputs.items():
                column.append(_decode_image(row[each], index) if each == IMAGE else row[each])
        parameters = {each: _parameter(each, value) for each, value in body.parameters.items()}
        outputs = await pipeline.client.infer(inputs, parameters=parameters)
        self._items.labels(pipeline.name).inc(len(body.rows))
        await pipeline.spend_tokens(inputs)
        columns = plain_outputs(config, outputs)
        return {
            "rows": [
                {each: column[index] for each, column in columns.items()}
                for index in range(len(body.rows))
            ]
        }

    @Operation("/v1/pipelines/{name}", PipelineInfo)
    async def describe(self, name: str) -> dict[str, object]:
        """Return inputs, outputs and parameters of a pipeline."""
        pipeline = self._pipelines.find(name)
        config = await pipeline.config()
        step = await pipeline.step()
        rules: Mapping[str, object] = (
            {} if step is None else step.settings.get("request_parameters", {})
        )
        return {
            "name": pipeline.name,
            "inputs": list(config.inputs),
            "outputs": list(config.outputs),
            "parameters": rules or {each: {} for each in config.options},
            "max_batch_size": config.max_batch_size,
        }


def _decode_image(text: object, index: int) -> bytes:
    try:
        return base64.b64decode(str(text), validate=True)
    except (binascii.Error, ValueError):
        raise invalid(
            f"rows[{index}].{IMAGE}", "must be base64", "other text", "Encode the file"
        ) from None


def _parameter(name: str, value: object) -> Parameter:
    parameter = request_parameter(value)
    if parameter is None:
        raise invalid(
            f"parameters.{name}", "must be a plain value or a list of str", "another", "Convert it"
        )
    return parameter
