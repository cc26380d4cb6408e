"""Run in the environment of generation: what the reference and the engine make of the same prompts.

Usage: ``python worker_gate.py RUNTIME ORDER.json RESULT.json``, with RUNTIME the folder that has
the package of the steps. The order: ``weights``, ``settings`` of the engine, ``prompts`` (token ids
each), ``messages`` (of each prompt, or null), ``max_tokens``. What the result holds says `gate`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def run_reference(order: Mapping[str, Any]) -> dict[str, Any]:
    """Transformers in fp32, greedy, one prompt at a time."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(order["weights"], dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(order["weights"])
    answers = []
    for prompt in order["prompts"]:
        ids = torch.tensor([prompt])
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=order["max_tokens"],
            eos_token_id=order["settings"]["stop_token_ids"] or None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        logits = torch.cat(made.logits)
        tokens = made.sequences[0, len(prompt) :]
        best = logits.topk(2).values
        answers.append(
            {
                "ids": tokens.tolist(),
                "text": tokenizer.decode(tokens, skip_special_tokens=True),
                "margins": (best[:, 0] - best[:, 1]).tolist(),
                "logprobs": logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0].tolist(),
            }
        )
    chats = [
        None
        if messages is None
        else tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for messages in order["messages"]
    ]
    return {"answers": answers, "chats": chats}


async def run_engine(order: Mapping[str, Any], wanted: Sequence[Mapping[str, Any]]) -> Any:
    """The engine, each prompt alone, then together, the second half joining while the first run.

    Args:
        order: see above.
        wanted: the reference's answers; the engine is asked how likely it finds their tokens.
    """
    from triptych.runtime.engine_vllm import Engine
    from triptych.runtime.sampling_parameters import DEFAULTS

    engine = Engine(order["settings"], Path(order["weights"]), lambda load: None)
    await engine.start()
    sampling = {**DEFAULTS, "temperature": 0.0, "max_tokens": order["max_tokens"]}
    started = asyncio.Event()

    async def answer(key: str, prompt: list[int], *, tell: bool = False) -> list[int]:
        ids: list[int] = []
        async for delta in engine.generate(key, prompt, sampling):
            ids += delta.token_ids
            if tell and len(ids) > 1:
                started.set()
        started.set()
        return ids

    async def join(key: str, prompt: list[int]) -> list[int]:
        await started.wait()
        return await answer(key, prompt)

    prompts = order["prompts"]
    alone = [await answer(f"alone-{i}", prompt) for i, prompt in enumerate(prompts)]
    started.clear()
    half = (len(prompts) + 1) // 2
    together = await asyncio.gather(
        *(answer(f"first-{i}", prompt, tell=True) for i, prompt in enumerate(prompts[:half])),
        *(join(f"joined-{i}", prompt) for i, prompt in enumerate(prompts[half:])),
    )
    forced = [
        (await engine.score(f"forced-{i}", [*prompt, *one["ids"]]))[len(prompt) - 1 :]
        for i, (prompt, one) in enumerate(zip(prompts, wanted, strict=True))
    ]
    engine.close()
    return {"alone": alone, "together": together, "forced": forced}


def main(order_file: Path, result_file: Path) -> None:
    """Run both, the reference first: its tokens are what the engine is asked about."""
    order = json.loads(order_file.read_bytes())
    reference = run_reference(order)
    engine = asyncio.run(run_engine(order, reference["answers"]))
    result_file.write_text(json.dumps({"reference": reference, "engine": engine}), encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    main(Path(sys.argv[2]), Path(sys.argv[3]))
