"""Options of requests in a pipeline with a response cache."""

from __future__ import annotations

from collections.abc import Container

from .request_errors import RequestError
from .triton_io import own_parameters


def refuse_options(text: str, rules: Container[str]) -> None:
    """Raise a `RequestError` if a request (JSON text) has one of the parameters in `rules`.

    A response cache ignores parameters, so that later requests would get this request's response.
    """
    for name, value in own_parameters(text, rules).items() if len(text) > 2 else ():
        if name in rules:
            raise RequestError(
                f"parameter {name}",
                "is not accepted by a pipeline with a response cache, which ignores parameters",
                f"{value!r:.80}",
                f"Send it as the input tensor {name}",
            )
