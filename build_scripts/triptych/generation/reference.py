"""What the original model says: transformers in fp32, greedy, one prompt at a time.

Of quantised weights the original is not there: they are taken as they are, dequantised to fp32.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from triptych.cache import cached_stage, code_hash, versions_of
from triptych.errors import Progress, UserError
from triptych.generation.dequantising import load_model
from triptych.generation.inputs import GenerationInputs, Prompt

TOKENS = 24
"""Of an answer, at most."""
_RESULT = "reference.json"


@dataclass(frozen=True)
class Reference:
    """One prompt and its answer.

    Attributes:
        prompt: its ids, as the model's own tokenizer and chat template make them.
        ids: of the answer.
        text: of the answer, decoded as a whole.
        margins: at each token, the difference of the two best logits.
        logprobs: of each token, the logarithm of its probability.
    """

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    text: str
    margins: tuple[float, ...]
    logprobs: tuple[float, ...]


def choose_prompts(inputs: GenerationInputs, most: int) -> tuple[Prompt, ...]:
    """The first prompts of the traffic that leave room to ask about an answer.

    Raises:
        UserError: none does.
    """
    # An engine that is asked how likely tokens are makes one more behind them.
    fitting = [one for one in inputs.prompts if answer_tokens(inputs, one) > 0]
    if not fitting:
        raise UserError(
            "traffic.jsonl",
            f"must have a prompt below {inputs.max_length - 1} tokens, to check an answer to",
            given=f"{len(inputs.prompts)} longer ones",
            remedy="Add shorter ones, or raise core.max_length",
        )
    return tuple(fitting[:most])


def answer_tokens(inputs: GenerationInputs, prompt: Prompt, most: int = TOKENS) -> int:
    """Tokens that an answer to `prompt` is asked for, so that it can be checked."""
    return min(most, inputs.max_length - len(prompt.ids) - 1)


def reference_answers(
    inputs: GenerationInputs,
    prompts: Sequence[Prompt],
    progress: Progress,
    *,
    most: int = TOKENS,
) -> tuple[Reference, ...]:
    """The original model's answers of `most` tokens each; from the cache where they are there.

    Raises:
        UserError: transformers does not run the model.
    """
    if not prompts:
        return ()
    stops = list(inputs.model.facts.stop_token_ids)
    asked = [
        {"sent": one.sent, "ids": one.ids, "tokens": answer_tokens(inputs, one, most)}
        for one in prompts
    ]
    key = {
        "model": inputs.model.facts.sha256,
        "stops": stops,
        "asked": asked,
        "versions": versions_of("transformers", "torch", "tokenizers"),
        "code": code_hash("generation/reference.py", "generation/dequantising.py"),
    }

    def work(target: Path) -> None:
        progress("gate", f"{len(prompts)} prompts through transformers in fp32 ...")
        found = _answer(inputs.weights, prompts, asked, stops)
        (target / _RESULT).write_text(json.dumps([asdict(one) for one in found]), encoding="utf-8")

    stage = cached_stage("generation-reference", key, work, progress)
    content = (stage.folder / _RESULT).read_bytes()
    return tuple(TypeAdapter(list[Reference]).validate_json(content))


def _answer(
    weights: Path,
    prompts: Sequence[Prompt],
    asked: Sequence[Mapping[str, Any]],
    stops: Sequence[int],
) -> list[Reference]:
    import torch
    from transformers import AutoTokenizer, GenerationConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    try:
        model = load_model(weights)
        tokenizer = AutoTokenizer.from_pretrained(weights)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise UserError(
            "model.source",
            "must be a model that transformers runs",
            given=" ".join(str(error).split())[:300],
            remedy="Choose another model",
        ) from error
    # Penalties and the like of the model's own files are no part of a pipeline.
    model.generation_config = GenerationConfig()
    found = []
    for prompt, order in zip(prompts, asked, strict=True):
        ids = torch.tensor([prompt.ids])
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=order["tokens"],
            eos_token_id=list(stops) or None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        logits = torch.cat(made.logits).float()
        tokens = made.sequences[0, len(prompt.ids) :]
        best = logits.topk(2).values
        found.append(
            Reference(
                prompt=_prompt_ids(tokenizer, prompt),
                ids=tuple(tokens.tolist()),
                text=tokenizer.decode(tokens, skip_special_tokens=True),
                margins=tuple((best[:, 0] - best[:, 1]).tolist()),
                logprobs=tuple(logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0].tolist()),
            )
        )
    return found


def _prompt_ids(tokenizer: Any, prompt: Prompt) -> tuple[int, ...]:
    if prompt.messages is None:
        text = prompt.sent["text_input"]
        # A text that begins as the tokenizer would begin it gets no second beginning.
        begun = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
        return tuple(tokenizer(text, add_special_tokens=not begun)["input_ids"])
    ids = tokenizer.apply_chat_template(
        prompt.messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return tuple(ids)
