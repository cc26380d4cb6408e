"""A generation's prompts through a served pipeline: alone, as wholes, beside others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from triptych.base.errors import UserError
from triptych.building.generation.inputs import GeneratingInputs, Prompt
from triptych.building.generation.reference import TOKENS, answer_tokens
from triptych.client import (
    AccessDenied,
    Client,
    Completion,
    InferenceError,
    PipelineNotFound,
    PipelineNotReady,
    ServerUnreachable,
)
from triptych.client.address import read_target
from triptych.runtime.sampling_parameters import ADAPTER, DEFAULTS

if TYPE_CHECKING:
    from triptych.client import Sampling

GREEDY = {
    **{name: value for name, value in DEFAULTS.items() if value is not None and name != "n"},
    "temperature": 0.0,
    "logprobs": 0,
}
"""Every parameter is given: a pipeline's own defaults are not what is checked."""

_NO_SERVER = (ServerUnreachable, AccessDenied, PipelineNotFound, PipelineNotReady)


@dataclass(frozen=True)
class Reply:
    """What one request got: an answer, or an error."""

    answer: Completion
    error: InferenceError | None = None


@dataclass(frozen=True)
class LiveRuns:
    """What came back, in the order of the prompts.

    Attributes:
        prompts: ids that the server's own first step makes of them.
        alone: streams, one after the other.
        whole: answers in one piece, one after the other.
        together: streams, many at once: from the first to the last, and from the last.
        labelled: wholes of the prompts with right answers, many at once.
    """

    prompts: Sequence[Sequence[int]]
    alone: Sequence[Reply]
    whole: Sequence[Reply]
    together: Sequence[Sequence[Reply]]
    labelled: Sequence[Reply]


def ask_live(
    inputs: GeneratingInputs,
    url: str,
    prompts: Sequence[Prompt],
    labelled: Sequence[Prompt],
    clients: int,
    *,
    timeout_s: float,
) -> LiveRuns:
    """Send every prompt in every way, greedily.

    Args:
        inputs: of the pipeline.
        url: ``host:port`` of the server's gRPC endpoint.
        prompts: of the gate.
        labelled: prompts with right answers.
        clients: requests under way at once where they are sent together.
        timeout_s: deadline of each request, in seconds.

    Raises:
        UserError: there is no server, or it does not serve this pipeline (any more).
    """
    spec = inputs.spec
    ids = [_prompt_ids(url, f"{spec.name}_preprocess", one, timeout_s) for one in prompts]
    with (
        Client(spec.name, url, timeout_s=timeout_s) as client,
        ThreadPoolExecutor(clients) as pool,
    ):

        def asked(prompts: Sequence[Prompt], most: int) -> list[_Asked]:
            return [_Asked(client, one, answer_tokens(inputs, one, most)) for one in prompts]

        gate, rows = asked(prompts, TOKENS), asked(labelled, spec.accuracy.max_tokens)
        try:
            return LiveRuns(
                prompts=ids,
                alone=[one.streamed() for one in gate],
                whole=[one.whole() for one in gate],
                together=(
                    list(pool.map(_Asked.streamed, gate)),
                    list(pool.map(_Asked.streamed, gate[::-1]))[::-1],
                ),
                labelled=list(pool.map(_Asked.whole, rows)),
            )
        except _NO_SERVER as error:
            raise UserError(
                f"{spec.name} at {url}", "must be served there", given=error, remedy="See --url"
            ) from error


class _Asked:
    """One prompt, as a client sends it again and again."""

    def __init__(self, client: Client, prompt: Prompt, max_tokens: int) -> None:
        self._client = client
        self._prompt = prompt
        self._order = cast(
            "Sampling", {**GREEDY, "max_tokens": max_tokens, ADAPTER: prompt.adapter}
        )

    def streamed(self) -> Reply:
        return self._reply(lambda: Completion.join(self._generation()))

    def whole(self) -> Reply:
        return self._reply(lambda: self._generation().whole())

    def _generation(self) -> Any:
        if self._prompt.messages is None:
            return self._client.generate(self._prompt.sent["text_input"], **self._order)
        return self._client.chat(self._prompt.messages, **self._order)

    def _reply(self, ask: Callable[[], Completion]) -> Reply:
        try:
            return Reply(ask())
        except _NO_SERVER:
            raise
        except InferenceError as error:
            return Reply(Completion("", (), "", None), error)


def _prompt_ids(url: str, model: str, prompt: Prompt, timeout_s: float) -> list[int]:
    """The ids that the server's own first step makes of a prompt."""
    from tritonclient.grpc import InferenceServerClient, InferInput
    from tritonclient.utils import InferenceServerException

    values = []
    for name, text in prompt.sent.items():
        value = InferInput(name, [1], "BYTES")
        values.append(value.set_data_from_numpy(np.array([text.encode()], np.object_)))
    direct = [("grpc.enable_http_proxy", 0)]
    try:
        with InferenceServerClient(read_target(url).uri, channel_args=direct) as client:
            answer = client.infer(model, values, client_timeout=timeout_s)
    except InferenceServerException as error:
        raise UserError(
            f"{model} at {url}",
            "must be served there, and take the traffic",
            given=error.message(),
            remedy="Start it with `triptych serve`, or name another server with --url",
        ) from error
    ids: list[int] = answer.as_numpy("prompt_ids").ravel().tolist()
    return ids
