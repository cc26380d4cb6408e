"""Models of a running server: one loaded again, and what one was configured with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from triptych.base.errors import UserError
from triptych.client.address import read_target

_TIMEOUT_S = 120.0
_ANSWER_S = 10.0


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


def read_settings(url: str, model: str) -> dict[str, Any]:
    """The parameters in a model's config, each a JSON text, as values; other texts are left out.

    Raises:
        UserError: nothing answers at `url`, or it does not serve the model.
    """
    from tritonclient.grpc import InferenceServerClient
    from tritonclient.utils import InferenceServerException

    direct = [("grpc.enable_http_proxy", 0)]
    with InferenceServerClient(read_target(url).uri, channel_args=direct) as client:
        try:
            config = client.get_model_config(model, client_timeout=_ANSWER_S).config
        except InferenceServerException as error:
            raise UserError(
                f"{model} at {url}",
                "must be served there",
                given=error.message(),
                remedy="Start it with `triptych serve`, or name another server with --url",
            ) from error
    found = {}
    for name, parameter in config.parameters.items():
        try:
            found[name] = json.loads(parameter.string_value)
        except ValueError:
            continue
    return found
