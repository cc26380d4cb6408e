"""Loading models of a running server again, in explicit model control."""

from __future__ import annotations

from collections.abc import Sequence

from triptych.errors import UserError

_TIMEOUT_S = 120.0


def reload_models(url: str, pipeline: str, changed: Sequence[str]) -> None:
    """Load the models that changed, and after its steps the ensemble `pipeline`.

    Raises:
        UserError: a model does not load.
    """
    from tritonclient.grpc import InferenceServerClient
    from tritonclient.utils import InferenceServerException

    steps = [name for name in changed if name != pipeline]
    with InferenceServerClient(url) as client:
        for name in (*steps, pipeline):
            try:
                client.load_model(name, client_timeout=_TIMEOUT_S)
            except InferenceServerException as error:
                raise UserError(
                    name, "must load", given=error.message(), remedy="See the server's log"
                ) from error
        if not client.is_model_ready(pipeline, client_timeout=_TIMEOUT_S):
            raise UserError(
                pipeline, "must be ready after its steps were loaded", given="not ready"
            )
