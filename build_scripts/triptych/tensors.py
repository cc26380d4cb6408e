"""Tensors as declared once: name, dtype and symbolic axes, for export, configs and checks alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

DType = Literal["BYTES", "BOOL", "UINT8", "UINT32", "INT8", "INT32", "INT64", "FP32"]


@dataclass(frozen=True)
class Tensor:
    """A named tensor without its batch dimension.

    Attributes:
        name: as Triton and the ONNX graph know it.
        dtype: Triton's name of the element type.
        dims: one entry an axis; a string names an axis of variable size.
        content: what the elements of a BYTES tensor hold.
    """

    name: str
    dtype: DType
    dims: tuple[int | str, ...]
    content: Literal["text", "json", "image"] = "text"

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

CARRY = Tensor("carry", "BYTES", (1,))
"""Goes past the core from preprocess to postprocess, a row each: see `runtime.carry`."""

TICKET = Tensor("ticket", "INT64", (4,))
"""Goes past the core from preprocess to postprocess: see `runtime.in_flight`."""

SAMPLED_TICKET = Tensor("ticket", "INT64", ("numbers",))
"""The same where requests are sampled: see `runtime.sampling`."""

ROW_STRIDE = Tensor("row_stride", "INT32", ())
"""Packed only, made by the server: places each row occupies in `input_ids`, pads included."""


class TokenRow(NamedTuple):
    """One row as the core gets it, not padded.

    Attributes:
        ids: its tokens.
        first_segment: tokens before the second segment; all of them where there is only one.
    """

    ids: tuple[int, ...]
    first_segment: int
