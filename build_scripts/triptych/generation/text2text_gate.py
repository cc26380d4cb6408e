"""Whether CTranslate2 answers as transformers does: the figures of `gate`, for two texts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from tokenizers import Tokenizer

from triptych.cache import cached_stage, code_hash, versions_of
from triptych.errors import Progress
from triptych.generation.gate import PROMPTS, answered, told_and_held
from triptych.generation.inputs import Prompt
from triptych.generation.metrics import judge
from triptych.generation.reference import TOKENS, Reference
from triptych.generation.text2text import Text2TextInputs
from triptych.repository.records import GateResult
from triptych.runtime.engine_ctranslate2 import Engine
from triptych.runtime.sampling_parameters import DEFAULTS

LIMITS_OF_OTHER_SEARCH: Mapping[str, float | None] = {
    "exact_prefix": None,
    "margin_at_difference": 0.25,
}
"""Where several beams may not repeat themselves. CTranslate2 shares out the probability of what is
forbidden, transformers does not: scores of beams add up otherwise, and another may win."""

_RESULT = "result.json"


def check_text2text(inputs: Text2TextInputs, progress: Progress, *, accept: str = "") -> GateResult:
    """Run reference and engine on the first prompts of the traffic; the verdict.

    Raises:
        GenerationGateFailure: a limit is broken, and that is not accepted.
    """
    prompts = inputs.prompts[:PROMPTS]
    key = {
        "model": inputs.model.facts.sha256,
        "settings": inputs.engine_settings,
        "prompts": [[prompt.sent, prompt.ids] for prompt in prompts],
        "prefix": inputs.spec.prefix,
        "max_tokens": _max_tokens(inputs),
        "versions": versions_of("ctranslate2", "transformers", "torch"),
        "code": code_hash(
            "generation/text2text_gate.py",
            "runtime/engine_ctranslate2.py",
            "runtime/text2text_batches.py",
        ),
    }

    def work(target: Path) -> None:
        progress("gate", f"{len(prompts)} texts through transformers and CTranslate2 ...")
        (target / _RESULT).write_text(json.dumps(_measure(inputs, prompts)), encoding="utf-8")

    stage = cached_stage("text2text-gate", key, work, progress)
    result = json.loads((stage.folder / _RESULT).read_bytes())
    wanted = TypeAdapter(list[Reference]).validate_python(result["wanted"])
    tokenizer = Tokenizer.from_file(str(inputs.model.tokenizer))
    gate = judge(
        inputs.spec.core.precision,
        prompts,
        wanted,
        answered(prompts, wanted, result["engine"], tokenizer, context_tokens=0),
        tokenizer,
        other_limits=LIMITS_OF_OTHER_SEARCH if _searches_otherwise(inputs) else {},
        accept=accept,
    )
    return told_and_held(inputs.spec.name, gate, progress)


def _searches_otherwise(inputs: Text2TextInputs) -> bool:
    return inputs.search["beams"] > 1 and bool(inputs.search["no_repeat_ngram"])


def _max_tokens(inputs: Text2TextInputs) -> int:
    return min(TOKENS, inputs.spec.core.max_answer)


def _measure(inputs: Text2TextInputs, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """``wanted`` of each prompt, and what ``engine`` made of it, as `answered` takes it."""
    reference = _Reference(inputs)
    wanted = [reference.answer(prompt.ids) for prompt in prompts]
    engine = asyncio.run(_run_engine(inputs, prompts, wanted))
    answers = []
    for prompt, ids, got in zip(prompts, wanted, engine["alone"], strict=True):
        logprobs, margins = reference.score(prompt.ids, ids)
        if inputs.search["beams"] > 1:
            # What matters is not one token: how much likelier the reference finds its own answer.
            other, _ = reference.score(prompt.ids, got)
            likelier = sum(logprobs) / len(logprobs) - sum(other) / max(len(other), 1)
            margins = [max(likelier, 0.0)] * len(ids)
        answers.append(
            {
                "prompt": reference.prompt(prompt.sent["text_input"]),
                "ids": ids,
                "text": reference.text(ids),
                "margins": margins,
                "logprobs": logprobs,
            }
        )
    return {"wanted": answers, "engine": engine}


class _Reference:
    """The model in transformers, in fp32, one text at a time."""

    def __init__(self, inputs: Text2TextInputs) -> None:
        import torch
        from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

        self._torch = torch
        self._prefix = inputs.spec.prefix
        self._tokenizer = AutoTokenizer.from_pretrained(inputs.original)
        self._model = AutoModelForSeq2SeqLM.from_pretrained(
            inputs.original, dtype=torch.float32
        ).eval()
        self._search = config = self._model.generation_config
        search = inputs.search
        config.do_sample = False
        config.num_beams = search["beams"]
        config.length_penalty = search["length_penalty"]
        config.no_repeat_ngram_size = search["no_repeat_ngram"]
        config.min_length = None
        config.min_new_tokens = search["min_answer"] or None
        config.max_new_tokens = _max_tokens(inputs)
        # CTranslate2 ends a search when it has as many answers as beams, and forces no end.
        config.early_stopping = search["beams"] > 1
        config.forced_eos_token_id = None
        self._never = [one[0] for one in config.bad_words_ids or () if len(one) == 1]

    def prompt(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(self._prefix + text)["input_ids"]
        return ids

    def answer(self, prompt: Sequence[int]) -> list[int]:
        ids = self._torch.tensor([list(prompt)])
        made = self._model.generate(ids, attention_mask=self._torch.ones_like(ids))
        tokens: list[int] = made[0, 1:].tolist()
        return tokens

    def text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def score(
        self, prompt: Sequence[int], answer: Sequence[int]
    ) -> tuple[list[float], list[float]]:
        """For each token of an answer its log-probability, and the lead of the likeliest one."""
        torch = self._torch
        start = self._search.decoder_start_token_id
        with torch.no_grad():
            logits = self._model(
                input_ids=torch.tensor([list(prompt)]),
                decoder_input_ids=torch.tensor([[start, *answer[:-1]]]),
            ).logits[0]
        logits[:, self._never] = -torch.inf
        best = logits.topk(2).values
        tokens = torch.tensor(list(answer))
        logprobs = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        return logprobs.tolist(), (best[:, 0] - best[:, 1]).tolist()


async def _run_engine(
    inputs: Text2TextInputs, prompts: Sequence[Prompt], wanted: Sequence[Sequence[int]]
) -> Mapping[str, Any]:
    engine = Engine(inputs.engine_settings, inputs.weights, lambda load: None)
    await engine.start()
    sampling = {**DEFAULTS, "temperature": 0.0, "max_tokens": _max_tokens(inputs)}

    async def answer(prompt: Prompt) -> list[int]:
        return [
            token
            async for delta in engine.generate("", prompt.ids, sampling)
            for token in delta.token_ids
        ]

    result = {
        "alone": [await answer(prompt) for prompt in prompts],
        "together": await asyncio.gather(*map(answer, prompts)),
        "forced": [
            await engine.score(prompt.ids, ids) for prompt, ids in zip(prompts, wanted, strict=True)
        ],
    }
    engine.close()
    return result
