"""A typed call without its I/O, and the methods that the two clients make of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from numpy.typing import NDArray

from triptych.client.errors import InvalidRequest
from triptych.client.wire import Parameter, PipelineConfig, Rows

RowOutputs = dict[str, NDArray[Any]]
Outputs = Mapping[str, NDArray[Any]]

Whole = TypeVar("Whole")
Row = TypeVar("Row")


@dataclass(frozen=True)
class TaskCall(Generic[Whole, Row]):
    """What a call sends, and what it makes of the answer.

    Attributes:
        inputs: as `Client.infer` takes them.
        parameters: of the request.
        outputs: those that it reads.
        read: all outputs, [rows, …] each, to the result of the call.
        read_row: index and outputs of one row to that row's result.
        timeout_s: deadline of the whole call; None takes the client's own.
        stand_in: the only row of `inputs` is not the caller's, who gave none.
    """

    inputs: Rows
    parameters: Mapping[str, Parameter]
    outputs: tuple[str, ...]
    read: Callable[[Outputs], Whole]
    read_row: Callable[[int, RowOutputs], Row]
    timeout_s: float | None
    stand_in: bool = False

    def whole(self, outputs: Outputs) -> Whole:
        """The result of the call.

        Raises:
            InvalidRequest: the pipeline lacks an output; it is of another task.
        """
        self._raise_if_lacking(outputs)
        return self.read(outputs)

    def each(self, rows: Sequence[RowOutputs | InvalidRequest]) -> list[Row | InvalidRequest]:
        """For each row its result, or why it was refused.

        Raises:
            InvalidRequest: the pipeline lacks an output; it is of another task.
        """
        results: list[Row | InvalidRequest] = []
        for index, row in enumerate(rows):
            if isinstance(row, InvalidRequest):
                results.append(row)
            else:
                self._raise_if_lacking(row)
                results.append(self.read_row(index, row))
        return results

    def misfit(self, config: PipelineConfig) -> InvalidRequest | None:
        """Why a pipeline of this interface cannot answer the call; None where it can."""
        try:
            self._raise_if_lacking(config.outputs)
        except InvalidRequest as error:
            return error
        if set(self.inputs) == set(config.inputs):
            return None
        return InvalidRequest(
            f"The pipeline must have the input {_quoted(self.inputs)} for this call. "
            f"Given: {', '.join(config.inputs)} (outputs: {', '.join(sorted(config.outputs))}). "
            "Make the call that fits its task."
        )

    def _raise_if_lacking(self, outputs: Mapping[str, object]) -> None:
        for name in self.outputs:
            if name not in outputs:
                raise InvalidRequest(
                    f"The pipeline must have the output `{name}` for this call. "
                    f"Given: {', '.join(sorted(outputs))}. Make the call that fits its task."
                )


def dress_methods(
    client: str,
    make: Callable[..., TaskCall[Any, Any]],
    whole: Callable[..., Any],
    each: Callable[..., Any],
) -> None:
    """Give `whole` and `each`, methods of `client`, the name, signature and words of `make`."""
    name = make.__name__
    signature = inspect.signature(make)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    signature = signature.replace(
        parameters=[own, *signature.parameters.values()], return_annotation=signature.empty
    )
    each_words = (
        f"For each row what `{name}` returns of it, or why the row was refused.\n\n"
        f"Arguments and errors are those of `{name}`, but a refused row does not raise."
    )
    for method, method_name, words in (
        (whole, name, inspect.getdoc(make)),
        (each, f"{name}_each", each_words),
    ):
        method.__name__ = method_name
        method.__qualname__ = f"{client}.{method_name}"
        method.__doc__ = words
        method.__signature__ = signature  # type: ignore[attr-defined]


def _quoted(names: Sequence[str] | Rows) -> str:
    return ", ".join(f"`{name}`" for name in names)
