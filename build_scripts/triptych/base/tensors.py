"""Tensors declared once (name, dtype, symbolic axes) for export, configs and checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

DType = Literal[
    "BYTES", "BOOL", "UINT8", "UINT32", "INT8", "INT32", "INT64", "FP16", "FP32", "FP64"
]


@dataclass(frozen=True)
class Tensor:
    """A named tensor without its batch dimension."""

    name: str  # Name in Triton and in the ONNX graph
    dtype: DType  # Triton data type of the elements
    dims: tuple[int | str, ...]  # Size of each axis; a string names an axis of variable size
    # Content of the elements of a BYTES tensor.
    content: Literal["text", "json", "image", "bytes"] = "text"
    optional: bool = False  # Whether a request may leave out the input, or a response the output

    @property
    def config_type(self) -> str:
        """The ``data_type`` of a ModelConfig."""
        return "TYPE_STRING" if self.dtype == "BYTES" else f"TYPE_{self.dtype}"

    @property
    def config_dims(self) -> list[int]:
        """The ``dims`` of a ModelConfig: -1 for an axis of variable size."""
        return [-1 if isinstance(axis, str) else axis for axis in self.dims]


INPUT_IDS = Tensor("input_ids", "INT32", ("tokens",))
"""Token ids; packed: every row of the batch end to end, bucketed: one padded row."""

ROW_LENGTH = Tensor("row_length", "INT32", (1,))
"""Tokens of a row without its padding."""

FIRST_SEGMENT = Tensor("first_segment", "INT32", (1,))
"""Tokens of a row before its second segment: token types are 0 there and 1 from there on."""

PROMPT_LENGTH = Tensor("prompt_length", "INT32", (1,))
"""Tokens at the beginning of a row that are left out of pooling."""

ATTENDED_LENGTH = Tensor("attended_length", "INT32", (1,))
"""Tokens at the beginning of a row that its tokens attend to; the others only attend to them."""

ROW_METADATA = Tensor("row_metadata", "BYTES", (1,))
"""Goes past the core from preprocess to postprocess, a row each: see `runtime.row_metadata`."""

REQUEST_TICKET = Tensor("request_ticket", "INT64", (2,), optional=True)
"""Goes past the core from preprocess to postprocess: see `runtime.in_flight`."""

REQUEST_PAYLOAD = Tensor("request_payload", "BYTES", (1,), optional=True)
"""Goes with the ticket if a request has one: see `runtime.row_types.make_payload`."""

DIRECT_CALL = Tensor("direct_call", "BOOL", (1,))
"""Output of preprocess that the ensemble does not use: who asks for it called the step itself."""

ROW_OFFSET = Tensor("row_offset", "INT32", (1,))
"""Packed only: distance of a row's first token from where it would be if each row of its request
took as many tokens as ``row_stride`` says."""

ROW_STRIDE = Tensor("row_stride", "INT32", ())
"""Packed only, made by the server for each row: tokens of its request's `input_ids` divided by the
request's rows."""

ROW_SPAN = Tensor("row_span", "INT32", ("span",))
"""Packed cores that TensorRT runs only: zeros, in number at least the request's longest row rounded
up to a multiple of 16. TensorRT takes the size of the padded rows from a shape."""

LONGEST = Tensor("longest", "INT32", ("longest",))
"""Made by the server of the largest `ROW_SPAN` of a batch, whose size it has."""


def made_by_server(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the inputs that Triton makes for a core of these inputs, by its ``batch_input``."""
    stride = (ROW_STRIDE,) if ROW_OFFSET in inputs else ()
    return (*stride, LONGEST) if ROW_SPAN in inputs else stride


class TokenRow(NamedTuple):
    """One row as the core gets it, not padded."""

    ids: tuple[int, ...]  # Ids of its tokens
    first_segment: int  # Number of tokens before the second segment; of all without one
    prompt: int = 0  # Number of tokens at the beginning that are left out of pooling
    attended: int = 0  # Number of tokens at the beginning that others attend to; 0 for all
