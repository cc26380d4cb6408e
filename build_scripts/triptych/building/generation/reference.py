"""What the original model says: transformers in fp32, one prompt at a time.

Of quantized weights the original is not there: they are taken as they are, dequantized to fp32.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from triptych.base.cache import cached_stage, code_hash, versions_of
from triptych.base.errors import Progress, UserError
from triptych.building.generation.adapters import Adapter, merge
from triptych.building.generation.inputs import GeneratingInputs, Prompt
from triptych.building.generation.text2text import Text2TextInputs
from triptych.building.generation.weights import load_model

TOKENS = 24
"""Of an answer, at most."""
ADAPTER_PROMPTS = 2
"""That each adapter is asked."""
_RESULT = "reference.json"


@dataclass(frozen=True)
class Reference:
    """One prompt and its answer.

    Attributes:
        prompt: its ids, as the model's own tokenizer and chat template make them.
        ids: of the answer.
        text: of the answer, decoded as a whole behind its prompt.
        margins: at each token, the difference of the two best logits.
        logprobs: of each token, the logarithm of its probability.
    """

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    text: str
    margins: tuple[float, ...]
    logprobs: tuple[float, ...]


def choose_prompts(inputs: GeneratingInputs, most: int) -> tuple[Prompt, ...]:
    """The first prompts of the traffic that leave room to ask about an answer, for the model.

    Behind them are those for each adapter: what the traffic asks it comes first.

    Raises:
        UserError: none does.
    """
    fitting = [one for one in inputs.prompts if answer_tokens(inputs, one) > 0]
    if not fitting:
        raise UserError(
            "traffic.jsonl",
            f"must have a prompt below {inputs.max_length - 1} tokens, to check an answer to",
            given=f"{len(inputs.prompts)} longer ones",
            remedy="Add shorter ones, or raise core.max_length",
        )
    asked = [replace(one, adapter="") for one in fitting[:most]]
    for adapter in inputs.adapters:
        own = [one for one in fitting if one.adapter == adapter.name]
        others = [one for one in fitting if one.adapter != adapter.name]
        chosen = [*own, *others][:ADAPTER_PROMPTS]
        asked += [replace(one, adapter=adapter.name) for one in chosen]
    return tuple(asked)


def answer_tokens(inputs: GeneratingInputs, prompt: Prompt, most: int = TOKENS) -> int:
    """Tokens that an answer to `prompt` is asked for, so that it can be checked."""
    return min(most, inputs.room(prompt))


def reference_answers(
    inputs: GeneratingInputs,
    prompts: Sequence[Prompt],
    progress: Progress,
    *,
    most: int = TOKENS,
) -> tuple[Reference, ...]:
    """The original model's answers of `most` tokens each; from the cache where they are there.

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
    stops = list(inputs.model.facts.stop_token_ids)
    asked = [
        {"sent": one.sent, "ids": one.ids, "tokens": answer_tokens(inputs, one, most)}
        for one in prompts
    ]
    search = [inputs.search, inputs.spec.prefix] if isinstance(inputs, Text2TextInputs) else None
    key = {
        "model": inputs.model.facts.sha256,
        "adapter": None if adapter is None else adapter.sha256,
        "stops": stops,
        "asked": asked,
        "search": search,
        "versions": versions_of("transformers", "torch", "tokenizers"),
        "code": code_hash(
            *("building/generation/reference.py", "building/generation/text2text_reference.py"),
            *("building/generation/adapters.py", "building/generation/weights.py"),
        ),
    }

    def work(target: Path) -> None:
        merged = "" if adapter is None else f", adapter {adapter.name} merged"
        progress("gate", f"{len(prompts)} prompts through transformers in fp32{merged} ...")
        if isinstance(inputs, Text2TextInputs):
            found = _answer_texts(inputs, prompts, asked)
        else:
            found = _answer(inputs.weights, adapter, prompts, asked, stops)
        (target / _RESULT).write_text(json.dumps([asdict(one) for one in found]), encoding="utf-8")

    stage = cached_stage("generation-reference", key, work, progress)
    content = (stage.folder / _RESULT).read_bytes()
    return TypeAdapter(list[Reference]).validate_json(content)


def weighed(
    inputs: GeneratingInputs,
    prompts: Sequence[Prompt],
    wanted: tuple[Reference, ...],
    got: Sequence[Sequence[int]],
) -> tuple[Reference, ...]:
    """`wanted`, with margins as the search has them that `got` something."""
    if not isinstance(inputs, Text2TextInputs):
        return wanted
    from triptych.building.generation.text2text_reference import weigh_searches

    return weigh_searches(inputs, prompts, wanted, got)


def _answer_texts(
    inputs: Text2TextInputs, prompts: Sequence[Prompt], asked: Sequence[Mapping[str, Any]]
) -> list[Reference]:
    from triptych.building.generation.text2text_reference import Text2TextReference

    model = Text2TextReference(inputs)
    return [model.answer(one, each["tokens"]) for one, each in zip(prompts, asked, strict=True)]


def _answer(
    weights: Path,
    adapter: Adapter | None,
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
    if adapter is not None:
        merge(model, adapter)
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
                text=_text_behind(tokenizer, prompt.ids, tokens.tolist()),
                margins=tuple((best[:, 0] - best[:, 1]).tolist()),
                logprobs=tuple(logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0].tolist()),
            )
        )
    return found


def _text_behind(tokenizer: Any, prompt: Sequence[int], answer: Sequence[int]) -> str:
    """What `answer` adds to the text of `prompt`: alone its first token may lose its space."""
    before, both, alone = (
        tokenizer.decode(list(ids), skip_special_tokens=True)
        for ids in (prompt, [*prompt, *answer], answer)
    )
    text: str = both[len(before) :] if both.startswith(before) else alone
    return text


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
