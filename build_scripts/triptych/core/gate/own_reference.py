"""Answers of the user's own ``reference.py``, with which the gate compares an own model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from triptych.base.errors import UserError
from triptych.core.requests import GateRequest
from triptych.runtime.hooking import load_file
from triptych.runtime.own_model import call_function, make_array
from triptych.runtime.row_types import Arrays
from triptych.spec.model_fields import ModelSpec

REFERENCE_FILE = "reference.py"
FUNCTION = "answer"
_MODULE_NAME = "triptych_reference"

Reference = Callable[[GateRequest], Arrays]
"""Function that returns the outputs of the original for a request of one row."""


def find_reference(spec: ModelSpec) -> Reference | None:
    """Return the function `answer` of ``reference.py``; None if the pipeline has no such file.

    Raises:
        UserError: The file cannot be loaded, or has no such function.
    """
    path = spec.folder / REFERENCE_FILE
    if not path.is_file():
        return None
    function = _load(path)
    fields = {name: field.as_dict() for name, field in spec.outputs.items()}

    def answer(request: GateRequest) -> Arrays:
        arguments = {"rows": request.row_inputs.columns, "parameters": request.parameters}
        try:
            result = call_function(FUNCTION, function, arguments)
            if not isinstance(result, dict) or result.keys() != fields.keys():
                found = sorted(result) if isinstance(result, dict) else type(result).__name__
                raise ValueError(f"must return a dict with {list(fields)}, returned {found}")
            return {name: make_array(field, result[name]) for name, field in fields.items()}
        except Exception as error:  # the user's own code
            raise UserError(
                str(path),
                f"has a function `{FUNCTION}` that fails on {request.preview!r}",
                given=error,
                remedy="Correct the function",
            ) from error

    return answer


def _load(path: Path) -> Callable[..., Any]:
    try:
        function: Callable[..., Any] = getattr(load_file(path, _MODULE_NAME), FUNCTION)
    except (Exception, SystemExit) as error:
        raise UserError(
            str(path),
            f"must have a function `{FUNCTION}(rows, parameters)`",
            given=f"{type(error).__name__}: {error}",
            remedy="Correct the file, or remove it to compare with the model itself",
        ) from error
    return function


def answer_all(
    reference: Reference, requests: Sequence[GateRequest], usual: Sequence[Arrays]
) -> list[Arrays]:
    """Return the answers of a reference; for edge cases, which it need not support, the `usual`."""
    return [
        answer if request.edge else reference(request)
        for request, answer in zip(requests, usual, strict=True)
    ]
