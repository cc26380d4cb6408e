"""Run CTranslate2 as the engine of encoder-decoder models, in batches of similar lengths."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .generation_messages import Delta, EngineLoad, GenerationEngine, OnLoad
from .sampling_parameters import DEFAULTS, PRIORITY, SCHEMA


def next_batch(lengths: Sequence[int], kinds: Sequence[Hashable], *, max_prompts: int) -> list[int]:
    """Return the queue indices of the next batch, shortest prompt first; empty if nothing waits.

    The batch contains the oldest prompt and prompts of similar length.

    Args:
        lengths: Number of tokens of each waiting prompt, oldest first.
        kinds: Kind of each prompt; only prompts of the oldest one's kind share its batch.
        max_prompts: Maximum number of prompts in a batch.
    """
    same_kind = [index for index, kind in enumerate(kinds) if kind == kinds[0]]
    order = sorted(same_kind, key=lambda index: lengths[index])
    if len(order) <= max_prompts:
        return order
    oldest = order.index(0)
    # Choose the range of sorted prompts that contains the oldest and has the least padding.
    starts = range(max(0, oldest - max_prompts + 1), min(oldest, len(order) - max_prompts) + 1)

    def padding(start: int) -> int:
        own = [lengths[index] for index in order[start : start + max_prompts]]
        return own[-1] * max_prompts - sum(own)

    best = min(starts, key=padding)
    return order[best : best + max_prompts]


VOCABULARY_FILE = "shared_vocabulary.json"
"""File of a converted model with its tokens in the order of their ids."""

WHOLE_SEARCH = 1e6
"""Patience (answers per beam) with which a search goes on to its maximum length."""

REPORT_S = 0.5
"""Seconds between two reports of the load while a batch is computed."""

COMPUTE_TYPES = {"fp32": "float32", "int8": "int8_float32"}
UNKNOWN = (
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "ignore_eos",
    PRIORITY,
    SCHEMA,
)
"""Sampling parameters that CTranslate2 does not support, or not per request."""

SHARED = ("temperature", "top_p", "top_k", "repetition_penalty")
"""Sampling parameters that all requests of a batch must share."""


class _Job:
    """A request; `deltas` gets its results, or an error.

    Attributes:
        kind: Batching key; only requests with the same key can share a batch.
        count: Number of tokens streamed so far.
        finished: Whether the last delta was queued.
        abandoned: Whether the caller no longer waits for the result.
    """

    def __init__(
        self, tokens: list[str], sampling: Mapping[str, Any], kind: tuple[object, ...]
    ) -> None:
        self.tokens = tokens
        self.sampling = sampling
        self.kind = kind
        self.deltas: asyncio.Queue[Delta | Exception] = asyncio.Queue()
        self.count = 0
        self.finished = self.abandoned = False


class Engine(GenerationEngine):
    """Engine of CTranslate2's `Translator`; requests wait for the next batch.

    With one beam, tokens are streamed; with several, they come at the end.
    """

    def __init__(self, settings: Mapping[str, Any], folder: Path, on_load: OnLoad) -> None:
        self._settings = settings
        self._folder = folder
        self._on_load = on_load
        self._beams: int = settings["num_beams"]
        self._end: int = settings["stop_token_ids"][0]
        self._waiting: list[_Job] = []
        self._running: list[_Job] = []
        self._some_wait = asyncio.Event()
        # A thread runs CTranslate2 outside the event loop, one batch at a time on all cores.
        self._thread = ThreadPoolExecutor(1, "ctranslate2")

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._loop.run_in_executor(self._thread, self._load)
        self._worker = self._loop.create_task(self._work())

    async def generate(
        self, key: str, prompt: Sequence[int], sampling: Mapping[str, Any]
    ) -> AsyncGenerator[Delta, None]:
        job = self._make_job(prompt, sampling)
        self._waiting.append(job)
        self._some_wait.set()
        self._report_load()
        finished = False
        try:
            while not finished:
                delta = await job.deltas.get()
                if isinstance(delta, Exception):
                    raise delta
                finished = bool(delta.finish)
                yield delta
        finally:
            job.abandoned = True
            if job in self._waiting:
                self._waiting.remove(job)
            self._report_load()

    async def score(
        self, key: str, prompt: Sequence[int], answer: Sequence[int], _adapter: str
    ) -> list[float]:
        """Return the log probability of each token of `answer`, given the prompt.

        Tokens that every answer begins with have the log probability 0.
        """

        def run() -> list[float]:
            ended = bool(answer) and answer[-1] == self._end
            target = self._find_tokens(answer[: len(answer) - ended])
            found = self._translator.score_batch(
                [self._find_tokens(prompt)], [target], max_input_length=0
            )
            # CTranslate2 always scores an end token after the target.
            logprobs = list(found[0].log_probs[: len(answer)])
            forced = min(len(self._settings["answer_begins"]), len(logprobs))
            return [0.0] * forced + logprobs[forced:]

        return await self._loop.run_in_executor(self._thread, run)

    def find_death(self) -> str:
        return f"its queue ended: {self._worker.exception()!r}" if self._worker.done() else ""

    def close(self) -> None:
        self._worker.cancel()
        for job in self._running:
            job.abandoned = True
        self._thread.shutdown()

    def _load(self) -> None:
        import ctranslate2

        self._translator = ctranslate2.Translator(
            str(self._folder),
            compute_type=COMPUTE_TYPES[self._settings["precision"]],
            intra_threads=self._settings["threads"],
        )
        vocabulary = (self._folder / VOCABULARY_FILE).read_text(encoding="utf-8")
        self._vocabulary: list[str] = json.loads(vocabulary)
        self._ids = {word: number for number, word in reversed(list(enumerate(self._vocabulary)))}

    def _find_tokens(self, ids: Sequence[int]) -> list[str]:
        return [self._vocabulary[token] for token in ids]

    def _make_job(self, prompt: Sequence[int], sampling: Mapping[str, Any]) -> _Job:
        refused = [name for name in UNKNOWN if sampling[name] != DEFAULTS[name]]
        if sampling["logprobs"]:
            refused.append("logprobs above 0")
        if refused:
            raise ValueError(f"{', '.join(refused)}: CTranslate2 has no such parameter")
        kind: tuple[object, ...] = tuple(sampling[name] for name in SHARED)
        # A beam search depends on its maximum length, so its result cannot be cut afterwards.
        if self._count_beams(sampling) > 1:
            kind = (*kind, sampling["max_tokens"])
        return _Job(self._find_tokens(prompt), sampling, kind)

    def _count_beams(self, sampling: Mapping[str, Any]) -> int:
        return 1 if sampling["temperature"] else self._beams

    async def _work(self) -> None:
        while True:
            await self._some_wait.wait()
            chosen = next_batch(
                [len(job.tokens) for job in self._waiting],
                [job.kind for job in self._waiting],
                max_prompts=self._settings["max_sequences"],
            )
            batch = [self._waiting[index] for index in chosen]
            self._waiting = [job for job in self._waiting if job not in batch]
            if not self._waiting:
                self._some_wait.clear()
            self._running = batch
            self._report_load()
            try:
                if batch:
                    work = self._loop.run_in_executor(self._thread, self._translate, batch)
                    while not (await asyncio.wait([work], timeout=REPORT_S))[0]:
                        self._report_load()
                    await work
            except Exception as error:
                for job in batch:
                    job.deltas.put_nowait(error)
            self._running = []
            self._report_load()

    def _translate(self, batch: Sequence[_Job]) -> None:
        """Answer a batch; runs on the engine's thread."""
        sampling, settings = batch[0].sampling, self._settings
        beams = self._count_beams(sampling)
        start = self._find_tokens(settings["answer_begins"])
        longest = max(job.sampling["max_tokens"] for job in batch)
        options: dict[str, Any] = {
            "target_prefix": [start] * len(batch) if start else None,
            "beam_size": beams,
            "patience": 1.0 if settings["early_stopping"] is True else WHOLE_SEARCH,
            "length_penalty": settings["length_penalty"],
            "no_repeat_ngram_size": settings["no_repeat_ngram_size"],
            "min_decoding_length": min(settings["min_new_tokens"], longest),
            "max_decoding_length": longest,
            "max_input_length": 0,
            "repetition_penalty": sampling["repetition_penalty"],
            "return_end_token": True,
        }
        if sampling["temperature"]:
            options["sampling_temperature"] = sampling["temperature"]
            options["sampling_topk"] = sampling["top_k"]
            options["sampling_topp"] = sampling["top_p"]
        if beams == 1:
            options["callback"] = lambda step: self._step(batch[step.batch_id], step)
            options["return_scores"] = True
        found = self._translator.translate_batch([job.tokens for job in batch], **options)
        for job, result in zip(batch, found, strict=True):
            if not job.finished:
                ids = [self._ids[word] for word in result.hypotheses[0]][job.count :]
                self._put(job, Delta(ids, "length" if ids and ids[-1] != self._end else "stop"))

    def _step(self, job: _Job, step: Any) -> bool:
        """Queue one new token; return whether to end the row."""
        job.count += 1
        ended = step.token_id == self._end
        job.finished = ended or job.count >= job.sampling["max_tokens"]
        finish = "" if not job.finished else "stop" if ended else "length"
        logprobs = None
        if job.sampling["logprobs"] is not None:
            logprobs = [[step.token_id, step.log_prob, []]]
        self._put(job, Delta([step.token_id], finish, logprobs=logprobs))
        return job.finished or job.abandoned

    def _put(self, job: _Job, delta: Delta) -> None:
        self._loop.call_soon_threadsafe(job.deltas.put_nowait, delta)

    def _report_load(self) -> None:
        running = sum(not job.abandoned for job in self._running)
        self._on_load(EngineLoad(running, len(self._waiting)))
