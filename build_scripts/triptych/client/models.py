"""Loading a pipeline of a running server again, in explicit model control."""

from __future__ import annotations

from collections.abc import Mapping

from triptych.errors import UserError

_TIMEOUT_S = 120.0


def reload_pipeline(url: str, pipeline: str, headers: Mapping[str, str]) -> None:
    """Load a pipeline again: the server finds which of its steps have changed, each is loaded once.

    Until all of them are ready the ones before serve. `headers` are those that the server asks of
    who loads models.

    Raises:
        UserError: a model does not load.
    """
    from tritonclient.grpc import InferenceServerClient
    from tritonclient.utils import InferenceServerException

    with InferenceServerClient(url) as client:
        try:
            client.load_model(pipeline, headers=dict(headers), client_timeout=_TIMEOUT_S)
        except InferenceServerException as error:
            raise UserError(
                pipeline, "must load", given=error.message(), remedy="See the server's log"
            ) from error
        if not client.is_model_ready(pipeline, client_timeout=_TIMEOUT_S):
            raise UserError(pipeline, "must be ready after it was loaded", given="not ready")
