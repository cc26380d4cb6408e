"""What an original encoder-decoder model says: transformers in fp32, with the pipeline's search."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from triptych.building.generation.inputs import Prompt
from triptych.building.generation.reference import Reference
from triptych.building.generation.text2text import Text2TextInputs, without_advice


class Text2TextReference:
    """The model of a pipeline, one text at a time."""

    def __init__(self, inputs: Text2TextInputs) -> None:
        import torch
        from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
        self._torch = torch
        self._prefix = inputs.spec.prefix
        self._least = int(inputs.search["min_answer"])
        self._forced = len(inputs.answers.answer_begins)
        with without_advice():
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
        # CTranslate2 ends a search when it has as many answers as beams, and forces no end.
        config.early_stopping = search["beams"] > 1
        config.forced_eos_token_id = None
        self._never = [one[0] for one in config.bad_words_ids or () if len(one) == 1]

    def answer(self, prompt: Prompt, most: int) -> Reference:
        """The model's answer, of `most` tokens at most."""
        ids = self._torch.tensor([prompt.ids])
        mask = self._torch.ones_like(ids)
        least = min(self._least, most) or None
        made = self._model.generate(
            ids, attention_mask=mask, min_new_tokens=least, max_new_tokens=most
        )
        tokens = made[0, 1:].tolist()
        logprobs, margins = self.score(prompt, tokens)
        return Reference(
            prompt=tuple(self._tokenizer(self._prefix + prompt.sent["text_input"])["input_ids"]),
            ids=tuple(tokens),
            text=self._tokenizer.decode(tokens, skip_special_tokens=True),
            margins=tuple(margins),
            logprobs=tuple(logprobs),
        )

    def score(self, prompt: Prompt, answer: Sequence[int]) -> tuple[list[float], list[float]]:
        """For each token of an answer its log-probability, and the lead of the likeliest one.

        A token that every answer begins with is certain.
        """
        torch = self._torch
        start = self._search.decoder_start_token_id
        with torch.no_grad():
            logits = self._model(
                input_ids=torch.tensor([prompt.ids]),
                decoder_input_ids=torch.tensor([[start, *answer[:-1]]]),
            ).logits[0]
        logits[:, self._never] = -torch.inf
        best = logits.topk(2).values
        tokens = torch.tensor(list(answer), dtype=torch.int64)
        logprobs = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0].tolist()
        forced = min(self._forced, len(answer))
        return [0.0] * forced + logprobs[forced:], (best[:, 0] - best[:, 1]).tolist()


def weigh_searches(
    inputs: Text2TextInputs,
    prompts: Sequence[Prompt],
    wanted: tuple[Reference, ...],
    got: Sequence[Sequence[int]],
) -> tuple[Reference, ...]:
    """`wanted`, with margins that suit a search by several beams.

    What matters of such a search is not one token, but how much likelier a token the reference
    finds its own answer than the one that was `got`.
    """
    if inputs.search["beams"] == 1 or all(
        one.ids == tuple(ids) for one, ids in zip(wanted, got, strict=True)
    ):
        return wanted
    reference = Text2TextReference(inputs)

    def likelier(prompt: Prompt, one: Reference, ids: Sequence[int]) -> float:
        other, _ = reference.score(prompt, ids)
        return max(fmean(one.logprobs) - (fmean(other) if other else -math.inf), 0.0)

    return tuple(
        replace(one, margins=(likelier(prompt, one, ids),) * len(one.ids))
        for prompt, one, ids in zip(prompts, wanted, got, strict=True)
    )
