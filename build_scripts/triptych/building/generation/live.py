"""`triptych verify` of a pipeline that generates text: run the gate on a served pipeline.

Every prompt is sent alone as a stream, alone as a whole, and twice among the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import numpy as np

from triptych.base.errors import UserError
from triptych.building.generation.gate import (
    PROMPTS,
    Answered,
    common_length,
    judge,
    judge_labeled,
    read_labeled,
)
from triptych.building.generation.inputs import GeneratingInputs, Prompt
from triptych.building.generation.reference import (
    TOKENS,
    Reference,
    answer_tokens,
    choose_prompts,
    reference_answers,
    weigh,
)
from triptych.building.generation.render import ENGINES
from triptych.client import Client, Completion, Generation, InferenceError
from triptych.client.connection import read_target
from triptych.core.gate.live import NO_SERVER
from triptych.core.gate.verify import LiveOptions
from triptych.repository.manifest import BuildManifest, find_manifest
from triptych.repository.records import GateResult, LiveRun
from triptych.runtime.sampling_parameters import ADAPTER, DEFAULTS

if TYPE_CHECKING:
    from triptych.client import Sampling


GREEDY = {
    **{name: value for name, value in DEFAULTS.items() if value is not None and name != "n"},
    "temperature": 0.0,
    "logprobs": 0,
}
"""Sampling parameters of every request. All are given, so that defaults have no effect."""


@dataclass(frozen=True)
class PromptReply:
    """Response to one request: an answer, or an error."""

    answer: Completion
    error: InferenceError | None = None


@dataclass(frozen=True)
class PromptRuns:
    """Responses in the order of the prompts."""

    prompts: Sequence[Sequence[int]]  # Token ids of the prompts, from the server's preprocess
    alone: Sequence[PromptReply]  # Streams, one by one
    whole: Sequence[PromptReply]  # Complete answers, one by one
    # Concurrent streams, from the first prompt to the last and in reverse order.
    together: Sequence[Sequence[PromptReply]]
    labeled: Sequence[PromptReply]  # Complete answers to the labeled prompts, concurrently


def ask_live(
    inputs: GeneratingInputs,
    url: str,
    prompts: Sequence[Prompt],
    labeled: Sequence[Prompt],
    clients: int,
    *,
    timeout_s: float,
) -> PromptRuns:
    """Send every prompt in every way, with greedy decoding.

    Args:
        inputs: Inputs of the pipeline.
        url: ``host:port`` of the server's gRPC endpoint.
        prompts: Prompts of the gate.
        labeled: Labeled prompts.
        clients: Number of concurrent requests in the runs with concurrency.
        timeout_s: Deadline of each request in seconds.

    Raises:
        UserError: No server answers, or it does not serve this pipeline.
    """
    spec = inputs.spec
    ids = [_prompt_ids(url, f"{spec.name}_preprocess", one, timeout_s) for one in prompts]
    with (
        Client(spec.name, url, timeout_s=timeout_s) as client,
        ThreadPoolExecutor(clients) as pool,
    ):

        def asked(prompts: Sequence[Prompt], most: int) -> list[_PromptSession]:
            return [
                _PromptSession(client, one, answer_tokens(inputs, one, most)) for one in prompts
            ]

        gate, rows = asked(prompts, TOKENS), asked(labeled, spec.accuracy.max_tokens)
        try:
            return PromptRuns(
                prompts=ids,
                alone=[one.streamed() for one in gate],
                whole=[one.whole() for one in gate],
                together=(
                    list(pool.map(_PromptSession.streamed, gate)),
                    list(pool.map(_PromptSession.streamed, gate[::-1]))[::-1],
                ),
                labeled=list(pool.map(_PromptSession.whole, rows)),
            )
        except NO_SERVER as error:
            raise UserError(
                f"{spec.name} at {url}",
                "must be served at this address",
                given=error,
                remedy="Start the server, or name another one with --url",
            ) from error


class _PromptSession:
    """One prompt, as a client sends it several times."""

    def __init__(self, client: Client, prompt: Prompt, max_tokens: int) -> None:
        self._client = client
        self._prompt = prompt
        self._order = cast(
            "Sampling", {**GREEDY, "max_tokens": max_tokens, ADAPTER: prompt.adapter}
        )

    def streamed(self) -> PromptReply:
        return self._reply(lambda: Completion.join(self._generation()))

    def whole(self) -> PromptReply:
        return self._reply(lambda: self._generation().whole())

    def _generation(self) -> Generation:
        if self._prompt.messages is None:
            return self._client.generate(self._prompt.sent["text_input"], **self._order)
        return self._client.chat(
            self._prompt.messages, tools=self._prompt.tools or (), **self._order
        )

    def _reply(self, ask: Callable[[], Completion]) -> PromptReply:
        try:
            return PromptReply(ask())
        except NO_SERVER:
            raise
        except InferenceError as error:
            return PromptReply(Completion("", (), "", None), error)


def _prompt_ids(url: str, model: str, prompt: Prompt, timeout_s: float) -> list[int]:
    """Return the token ids of a prompt, from the server's preprocess."""
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
            "must be served at this address and accept the traffic",
            given=error.message(),
            remedy="Start it with `triptych serve`, or name another server with --url",
        ) from error
    ids: list[int] = answer.as_numpy("prompt_ids").ravel().tolist()
    return ids


def verify_generation(inputs: GeneratingInputs, options: LiveOptions) -> GateResult:
    """Send the gate's prompts to the served pipeline and compare with the reference.

    Raises:
        UserError: No server answers, or it does not serve this pipeline.
    """
    spec, progress, clients = inputs.spec, options.progress, options.clients
    manifest = find_manifest(options.repository, spec.name, BuildManifest)
    built = None if manifest is None else manifest.gate
    prompts, labeled = choose_prompts(inputs, PROMPTS), read_labeled(inputs)
    tokenizer = inputs.model.decoding()
    fake = ENGINES[spec.core.backend].fake

    def reference(prompts: Sequence[Prompt], most: int) -> tuple[Reference, ...]:
        if fake is not None:
            return tuple(
                fake.answer(inputs, one, answer_tokens(inputs, one, most)) for one in prompts
            )
        return reference_answers(inputs, prompts, progress, most=most)

    wanted = reference(prompts, TOKENS)
    right = reference(labeled.prompts, spec.accuracy.max_tokens)
    with options.server as reached:
        progress("verify", f"{len(prompts)} prompts, alone and {clients} at a time ...")
        began = time.monotonic()
        runs = ask_live(
            inputs,
            reached.grpc_url,
            prompts,
            labeled.prompts,
            clients,
            timeout_s=options.timeout_s,
        )
        seconds = time.monotonic() - began
    precision = inputs.judged_as if built is None else built.precision
    texts = [one.answer.text for one in runs.labeled]
    wanted = weigh(inputs, prompts, wanted, [one.answer.token_ids for one in runs.alone])
    other_limits = inputs.other_limits(live=True)
    gate = judge(
        precision,
        prompts,
        wanted,
        _answered(wanted, runs, other_limits),
        tokenizer,
        other_limits=other_limits,
        labeled=judge_labeled(inputs, labeled, texts, [one.text for one in right]),
    )
    faults = tuple(_faults(inputs, wanted, runs))
    live = LiveRun(
        faults=faults,
        pipeline=spec.name,
        url=reached.grpc_url,
        clients=clients,
        seconds=seconds,
        sent=(
            f"{gate.rows} prompts, each alone as a stream and as a whole, and twice with others "
            f"({clients} at a time), in {seconds:.1f} s",
        ),
    )
    return replace(
        gate,
        failures=(*faults, *gate.failures),
        live=live,
        accepted="" if built is None else built.accepted,
    )


def _answered(
    wanted: Sequence[Reference], runs: PromptRuns, other_limits: Mapping[str, float | None]
) -> Answered:
    """Return the server's answers in the form that the gate checks.

    A server gives the log-probabilities of its own tokens, which are the reference's tokens up to
    the first difference. A search that changes probabilities (`other_limits`) gives none.
    """
    told = "logprob_difference" not in other_limits
    alone = [one.answer for one in runs.alone]
    parted = [common_length(w.ids, a.token_ids) for w, a in zip(wanted, alone, strict=True)]
    same = [(w, a) for w, a, n in zip(wanted, alone, parted, strict=True) if n == len(w.ids)]
    return Answered(
        prompts=runs.prompts,
        alone=[one.token_ids for one in alone],
        together=[[one.answer.token_ids for one in run] for run in runs.together],
        forced=[
            [token["logprob"] for token in one.logprobs[:length]] if told else []
            for one, length in zip(alone, parted, strict=True)
        ],
        streamed=[*(one.text for one in alone), *(a.text for _, a in same)],
        whole=[*(one.answer.text for one in runs.whole), *(w.text for w, _ in same)],
    )


def _faults(
    inputs: GeneratingInputs, wanted: Sequence[Reference], runs: PromptRuns
) -> Iterator[str]:
    """Yield failed requests and wrong finish reasons, which no metric shows."""
    passes = (runs.alone, runs.whole, *runs.together)
    every = [reply for one in (*passes, runs.labeled) for reply in one]
    failed = [str(one.error) for one in every if one.error is not None]
    if failed:
        yield f"{len(failed)} of {len(every)} requests: {failed[0]}"
    if ENGINES[inputs.spec.core.backend].fake is not None:
        return
    stops = inputs.model.info.stop_token_ids
    ends = sum(
        reply.answer.finish_reason != ("stop" if reference.ids[-1] in stops else "length")
        for one in passes
        for reference, reply in zip(wanted, one, strict=True)
        if reply.answer.token_ids == reference.ids
    )
    if ends:
        yield f"{ends} answers have a finish_reason that does not fit their last token"
