"""Answers of the original model: transformers in fp32, one prompt at a time.

Quantized weights are dequantized to fp32, because their original is not available.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from triptych.base.cache import MINUTES_ONCE, cached_stage, code_hash, versions_of
from triptych.base.errors import Progress, UserError
from triptych.building.generation.adapters import Adapter, merge
from triptych.building.generation.inputs import GeneratingInputs, GenerationInputs, Prompt
from triptych.building.generation.text2text import Text2TextInputs, without_advice
from triptych.building.generation.weights import load_model
from triptych.models.checks import check_unused
from triptych.models.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENS = 24
"""Maximum number of tokens in an answer of the reference."""
ADAPTER_PROMPTS = 2
"""Number of prompts for each adapter."""
_RESULT = "reference.json"


@dataclass(frozen=True)
class Reference:
    """One prompt and its answer by the original model."""

    # Token ids of the prompt, by the model's own tokenizer and chat template.
    prompt: tuple[int, ...]
    ids: tuple[int, ...]  # Token ids of the answer
    text: str  # Text of the answer, decoded as a whole after its prompt
    margins: tuple[float, ...]  # Difference of the two best logits at each token
    logprobs: tuple[float, ...]  # Log-probability of each token


def choose_prompts(inputs: GeneratingInputs, most: int) -> tuple[Prompt, ...]:
    """Return the first `most` prompts of the traffic that leave space for an answer.

    They are sent to the model itself. `ADAPTER_PROMPTS` prompts for each adapter follow, first the
    prompts that name the adapter in the traffic.

    Raises:
        UserError: No prompt leaves space for an answer.
    """
    fitting = [one for one in inputs.prompts if answer_tokens(inputs, one) > 0]
    if not fitting:
        raise UserError(
            "traffic.jsonl",
            f"must have a prompt of fewer than {inputs.max_length - 1} tokens",
            given=f"{len(inputs.prompts)} longer ones",
            remedy="Add shorter prompts, or raise core.max_model_len",
        )
    asked = [replace(one, adapter="") for one in fitting[:most]]
    for adapter in inputs.adapters:
        own = [one for one in fitting if one.adapter == adapter.name]
        others = [one for one in fitting if one.adapter != adapter.name]
        chosen = [*own, *others][:ADAPTER_PROMPTS]
        asked += [replace(one, adapter=adapter.name) for one in chosen]
    return tuple(asked)


def answer_tokens(inputs: GeneratingInputs, prompt: Prompt, most: int = TOKENS) -> int:
    """Return the maximum number of tokens in an answer to `prompt` that can be checked."""
    return min(most, inputs.room(prompt))


def reference_answers(
    inputs: GeneratingInputs,
    prompts: Sequence[Prompt],
    progress: Progress,
    *,
    most: int = TOKENS,
) -> tuple[Reference, ...]:
    """Return the original model's answers of at most `most` tokens each, cached.

    Raises:
        UserError: transformers does not run the model.
    """
    found: dict[int, Reference] = {}
    for name in dict.fromkeys(prompt.adapter for prompt in prompts):
        rows = [row for row, prompt in enumerate(prompts) if prompt.adapter == name]
        adapter = next((one for one in inputs.adapters if one.name == name), None)
        answers = _of_one_model(inputs, adapter, [prompts[row] for row in rows], progress, most)
        found |= dict(zip(rows, answers, strict=True))
    return tuple(found[row] for row in range(len(prompts)))


def _of_one_model(
    inputs: GeneratingInputs,
    adapter: Adapter | None,
    prompts: Sequence[Prompt],
    progress: Progress,
    most: int,
) -> list[Reference]:
    stops = list(inputs.model.info.stop_token_ids)
    tokens = [answer_tokens(inputs, one, most) for one in prompts]
    asked = [
        {"sent": one.sent, "ids": one.ids, "tokens": longest}
        for one, longest in zip(prompts, tokens, strict=True)
    ]
    key = {
        "model": inputs.model.info.sha256,
        "adapter": None if adapter is None else adapter.sha256,
        "stops": stops,
        "tokenizer": inputs.spec.tokenizer.source,
        "asked": asked,
        "search": inputs.search_key,
        "versions": versions_of("transformers", "torch", "tokenizers"),
        "code": code_hash(
            "building/generation/reference.py",
            "building/generation/adapters.py",
            "building/generation/weights.py",
        ),
    }

    def work(target: Path) -> None:
        merged = "" if adapter is None else f", adapter {adapter.name} merged"
        told = f"{len(prompts)} prompts through transformers in fp32{merged}"
        progress("gate", f"{told}: {MINUTES_ONCE}")
        found = _answers(inputs, adapter, prompts, tokens)
        (target / _RESULT).write_text(json.dumps([asdict(one) for one in found]), encoding="utf-8")

    stage = cached_stage("generation-reference", key, work, progress)
    content = (stage.folder / _RESULT).read_bytes()
    return TypeAdapter(list[Reference]).validate_json(content)


def weigh(
    inputs: GeneratingInputs,
    prompts: Sequence[Prompt],
    wanted: tuple[Reference, ...],
    got: Sequence[Sequence[int]],
) -> tuple[Reference, ...]:
    """Return the reference answers with the margins of the search that made the answers `got`."""
    match inputs:
        case Text2TextInputs():
            return _weigh_searches(inputs, prompts, wanted, got)
        case _:
            return wanted


def _answers(
    inputs: GeneratingInputs,
    adapter: Adapter | None,
    prompts: Sequence[Prompt],
    tokens: Sequence[int],
) -> list[Reference]:
    """Return the answers of the original model, of at most so many tokens each."""
    match inputs:
        case GenerationInputs():
            return _continue_prompts(inputs, adapter, prompts, tokens)
        case Text2TextInputs():
            return _answer_texts(inputs, prompts, tokens)
        case _:
            raise TypeError(type(inputs).__name__)


def _continue_prompts(
    inputs: GenerationInputs,
    adapter: Adapter | None,
    prompts: Sequence[Prompt],
    tokens: Sequence[int],
) -> list[Reference]:
    """Return the answers of a causal language model after merging the adapter into its weights."""
    import torch
    from transformers import GenerationConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    try:
        model = load_model(inputs.weights)
        tokenizer = load_tokenizer(inputs.weights, inputs.spec.tokenizer.source)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise UserError(
            "model.source",
            "must be a model that transformers can run",
            given=" ".join(str(error).split())[:300],
            remedy="Choose another model",
        ) from error
    if adapter is not None:
        merge(model, adapter)
    # Sampling settings of the model's own files, such as penalties, have no effect on a pipeline.
    model.generation_config = GenerationConfig()
    found = []
    for prompt, max_tokens in zip(prompts, tokens, strict=True):
        ids = torch.tensor([prompt.ids])
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=list(inputs.model.info.stop_token_ids) or None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        logits = torch.cat(made.logits).float()
        answer = made.sequences[0, len(prompt.ids) :]
        best = logits.topk(2).values
        found.append(
            Reference(
                prompt=_prompt_ids(tokenizer, prompt),
                ids=tuple(answer.tolist()),
                text=_text_behind(tokenizer, prompt.ids, answer.tolist()),
                margins=tuple((best[:, 0] - best[:, 1]).tolist()),
                logprobs=tuple(logits.log_softmax(-1).gather(1, answer[:, None])[:, 0].tolist()),
            )
        )
    return found


def _text_behind(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], answer: Sequence[int]
) -> str:
    """Return the text that `answer` adds to `prompt`; decoded alone, it may lose a first space."""
    before, both, alone = (
        tokenizer.decode(list(ids), skip_special_tokens=True)
        for ids in (prompt, [*prompt, *answer], answer)
    )
    text: str = both[len(before) :] if both.startswith(before) else alone
    return text


def _prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> tuple[int, ...]:
    if prompt.messages is None:
        text = prompt.sent["text_input"]
        # A text that begins with the BOS token must not get a second BOS token.
        begun = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
        return tuple(tokenizer(text, add_special_tokens=not begun)["input_ids"])
    ids = tokenizer.apply_chat_template(
        prompt.messages,
        tools=prompt.tools,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
    )
    return tuple(ids)


class Text2TextReference:
    """Original encoder-decoder model of a pipeline, with the pipeline's search."""

    def __init__(self, inputs: Text2TextInputs) -> None:
        import torch
        from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
        self._torch = torch
        self._prefix = inputs.spec.prefix
        self._least = int(inputs.search["min_new_tokens"])
        self._forced = len(inputs.answers.answer_begins)
        with without_advice():
            source = inputs.spec.tokenizer.source
            self._tokenizer = (
                load_tokenizer(inputs.original, source)
                if source == "file"
                else AutoTokenizer.from_pretrained(inputs.original)
            )
        model, report = AutoModelForSeq2SeqLM.from_pretrained(
            inputs.original, dtype=torch.float32, output_loading_info=True
        )
        check_unused(model, report["unexpected_keys"])
        self._model = model.eval()
        self._search = config = self._model.generation_config
        search = inputs.search
        config.do_sample = False
        config.num_beams = search["num_beams"]
        config.length_penalty = search["length_penalty"]
        config.no_repeat_ngram_size = search["no_repeat_ngram_size"]
        config.min_length = None
        config.early_stopping = search["early_stopping"]
        # The end of a search is not forced: the answer says that its length ended it.
        config.forced_eos_token_id = None
        self._never = [one[0] for one in config.bad_words_ids or () if len(one) == 1]

    def answer(self, prompt: Prompt, most: int) -> Reference:
        """Return the model's answer of at most `most` tokens."""
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
        """Return the log-probability of each token of an answer, and the logit margins.

        A token that every answer begins with has the log-probability 0.
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


def _answer_texts(
    inputs: Text2TextInputs, prompts: Sequence[Prompt], tokens: Sequence[int]
) -> list[Reference]:
    model = Text2TextReference(inputs)
    return [model.answer(one, most) for one, most in zip(prompts, tokens, strict=True)]


def _weigh_searches(
    inputs: Text2TextInputs,
    prompts: Sequence[Prompt],
    wanted: tuple[Reference, ...],
    got: Sequence[Sequence[int]],
) -> tuple[Reference, ...]:
    """Return the reference answers with margins for a search with several beams.

    The margin is the mean log-probability per token of the reference answer minus that of the
    answer `got`, and at least 0.
    """
    if inputs.search["num_beams"] == 1 or all(
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
