"""`triptych verify` of a pipeline that generates text: the gate through a live ensemble."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from tokenizers import Tokenizer

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
from triptych.errors import Progress, UserError
from triptych.gate.verify import Endpoint
from triptych.generation.gate import PROMPTS
from triptych.generation.inputs import GenerationInputs, Prompt
from triptych.generation.lock import built_gate
from triptych.generation.metrics import Answered, common_length, judge
from triptych.generation.reference import (
    Reference,
    answer_tokens,
    choose_prompts,
    reference_answers,
)
from triptych.repository.plain import plain_data
from triptych.repository.records import GateResult
from triptych.runtime.sampling_parameters import DEFAULTS

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
class LiveGeneration:
    """What the live gate found, and where.

    Attributes:
        pipeline: its name.
        url: ``host:port`` of the server's gRPC endpoint.
        clients: requests under way at once where they were sent together.
        seconds: that the requests took.
        accepted: why the build was let pass a failed gate; empty where it was not.
        scripted: whether there is no model behind it.
        gate: figures, failures and rows.
        faults: requests that failed, and answers that end for another reason than the reference's.
    """

    pipeline: str
    url: str
    clients: int
    seconds: float
    accepted: str
    scripted: bool
    gate: GateResult
    faults: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether the pipeline served is right."""
        return not (self.faults or self.gate.failures)

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``: a figure that is no number is null."""
        fields = {**asdict(self), "gate": None, "passed": self.passed}
        plain: dict[str, Any] = plain_data(fields)
        return {**plain, "gate": self.gate.as_dict()}


def verify_generation(
    inputs: GenerationInputs,
    repository: Path,
    server: AbstractContextManager[Endpoint],
    progress: Progress,
    *,
    clients: int,
    timeout_s: float,
) -> LiveGeneration:
    """Send the gate's prompts to the served pipeline and compare with the reference.

    Each is asked alone, as a stream and as a whole, and twice among the others.

    Args:
        inputs: of the pipeline.
        repository: folder of the models: its lock tells the precision that was built.
        server: that serves the pipeline; entered once all else is ready.
        progress: told what becomes of each stage.
        clients: requests under way at once where they are sent together.
        timeout_s: deadline of each request, in seconds.

    Raises:
        UserError: there is no server, or it does not serve this pipeline (any more).
    """
    spec = inputs.spec
    built = built_gate(repository, spec.name)
    prompts = choose_prompts(inputs, PROMPTS)
    tokenizer = Tokenizer.from_file(str(inputs.model.tokenizer))
    scripted = spec.core.backend == "scripted"
    wanted = (
        tuple(_scripted(inputs, one, tokenizer) for one in prompts)
        if scripted
        else reference_answers(inputs, prompts, progress)
    )
    orders = [{**GREEDY, "max_tokens": answer_tokens(inputs, prompt)} for prompt in prompts]
    with server as reached:
        url = reached.grpc_url
        progress("verify", f"{len(prompts)} prompts, alone and {clients} at a time ...")
        began = time.monotonic()
        ids = [_prompt_ids(url, f"{spec.name}_preprocess", one, timeout_s) for one in prompts]
        with Client(spec.name, url, timeout_s=timeout_s) as client:
            asked = [_Asked(client, *one) for one in zip(prompts, orders, strict=True)]
            try:
                alone = [one.streamed() for one in asked]
                whole = [one.whole() for one in asked]
                with ThreadPoolExecutor(clients) as pool:
                    forwards = list(pool.map(lambda one: one.streamed(), asked))
                    backwards = list(pool.map(lambda one: one.streamed(), asked[::-1]))[::-1]
            except _NO_SERVER as error:
                raise UserError(
                    f"{spec.name} at {url}", "must be served there", given=error, remedy="See --url"
                ) from error
        seconds = time.monotonic() - began
    found = _answered(wanted, ids, alone, whole, (forwards, backwards))
    precision = built.get("precision") or spec.core.precision
    every = [*alone, *whole, *forwards, *backwards]
    return LiveGeneration(
        pipeline=spec.name,
        url=url,
        clients=clients,
        seconds=seconds,
        accepted=built.get("accepted", ""),
        scripted=scripted,
        gate=judge(precision, prompts, wanted, found, tokenizer),
        faults=tuple(_faults(inputs, wanted, every)),
    )


def describe_generation(result: LiveGeneration) -> Iterator[tuple[str, str]]:
    """The lines that show a result, each with its style: figures, what is wrong."""
    gate = result.gate
    yield f"{result.pipeline} at {result.url}, held to the limits of {gate.precision}", "bold"
    for verdict in gate.verdicts:
        limit = "" if verdict.limit is None else f"limit {verdict.limit:g}"
        state = "ok" if verdict.passed else "FAILED"
        line = f"  {verdict.metric:24} {verdict.value:>12.5g}  {limit:14} {state if limit else ''}"
        yield line.rstrip(), "" if verdict.passed else "red"
    yield (
        f"  {gate.rows} prompts, each alone as a stream and as a whole, and twice beside others"
        f" ({result.clients} at a time), in {result.seconds:.1f} s",
        "",
    )
    if result.scripted:
        yield "  note: the scripted engine has no model; it must repeat the prompt", "yellow"
    if result.accepted:
        yield f"  note: built although the gate failed, since: {result.accepted}", "yellow"
    for row in gate.worst if gate.failures else ():
        yield f"  {row.shown!r}", ""
        yield f"    wanted {row.wanted!r}", ""
        yield f"    got    {row.got!r}", ""
    failures = (*result.faults, *gate.failures)
    for failure in failures:
        yield f"failed: {failure}", "red"
    if not failures:
        yield "passed", "green"


@dataclass(frozen=True)
class _Reply:
    """What one request got: an answer, or an error."""

    answer: Completion
    error: InferenceError | None = None


class _Asked:
    """One prompt, as a client sends it again and again."""

    def __init__(self, client: Client, prompt: Prompt, order: Mapping[str, Any]) -> None:
        self._client = client
        self._prompt = prompt
        self._order = cast("Sampling", order)

    def streamed(self) -> _Reply:
        return self._reply(lambda: Completion.join(self._generation()))

    def whole(self) -> _Reply:
        return self._reply(lambda: self._generation().whole())

    def _generation(self) -> Any:
        if self._prompt.messages is None:
            return self._client.generate(self._prompt.sent["text_input"], **self._order)
        return self._client.chat(self._prompt.messages, **self._order)

    def _reply(self, ask: Callable[[], Completion]) -> _Reply:
        try:
            return _Reply(ask())
        except _NO_SERVER:
            raise
        except InferenceError as error:
            return _Reply(Completion("", (), "", None), error)


def _answered(
    wanted: Sequence[Reference],
    ids: Sequence[Sequence[int]],
    alone: Sequence[_Reply],
    whole: Sequence[_Reply],
    together: Sequence[Sequence[_Reply]],
) -> Answered:
    """What the server said, as the gate judges it.

    A live server tells how likely it found its own tokens: those are the reference's up to where
    the two part.
    """
    parted = [common_length(w.ids, a.answer.token_ids) for w, a in zip(wanted, alone, strict=True)]
    same = [(w, a) for w, a, n in zip(wanted, alone, parted, strict=True) if n == len(w.ids)]
    return Answered(
        prompts=ids,
        alone=[one.answer.token_ids for one in alone],
        together=[[one.answer.token_ids for one in run] for run in together],
        forced=[
            [token["logprob"] for token in one.answer.logprobs[:length]]
            for one, length in zip(alone, parted, strict=True)
        ],
        streamed=[*(one.answer.text for one in alone), *(a.answer.text for _, a in same)],
        whole=[*(one.answer.text for one in whole), *(w.text for w, _ in same)],
    )


def _faults(
    inputs: GenerationInputs, wanted: Sequence[Reference], replies: Sequence[_Reply]
) -> Iterator[str]:
    """What the metrics do not show; `replies` are those of every run, one run after the other."""
    failed = [str(one.error) for one in replies if one.error is not None]
    if failed:
        yield f"{len(failed)} of {len(replies)} requests: {failed[0]}"
    stops = inputs.model.facts.stop_token_ids
    ends = 0
    for place, one in enumerate(replies):
        reference = wanted[place % len(wanted)]
        if one.answer.token_ids == reference.ids and inputs.spec.core.backend != "scripted":
            ends += one.answer.finish_reason != ("stop" if reference.ids[-1] in stops else "length")
    if ends:
        yield f"{ends} answers have another finish_reason than their last token tells"


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


def _scripted(inputs: GenerationInputs, prompt: Prompt, tokenizer: Tokenizer) -> Reference:
    """What the scripted engine must answer."""
    ids = prompt.ids[: answer_tokens(inputs, prompt)]
    return Reference(
        prompt=prompt.ids,
        ids=ids,
        text=tokenizer.decode(list(ids), skip_special_tokens=True),
        margins=(np.inf,) * len(ids),
        logprobs=tuple(-float(place) for place in range(len(ids))),
    )
