"""Run an engine on prompts, alone and together; vLLM runs in its own Python environment.

Usage: ``python worker_gate.py RUNTIME ORDER.json RESULT.json``. RUNTIME is the folder of the
package ``triptych``. ORDER.json is an `EngineOrder`, RESULT.json an `EngineAnswers`.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from pathlib import Path
from typing import TypedDict


class EngineOrder(TypedDict):
    """Prompts for an engine, and what to tell of them."""

    engine: str  # module of `runtime`
    settings: dict[str, object]
    weights: str  # folder
    prompts: list[list[int]]  # token ids
    adapters: list[str]  # adapter of each prompt; empty for the model itself
    wanted: list[list[int]]  # token ids of the reference's answers
    max_tokens: list[int]  # maximum number of tokens of each answer
    labeled: list[tuple[list[int], int, str]]  # token ids, maximum number of tokens, adapter


class EngineAnswers(TypedDict):
    """Answers of an engine to an `EngineOrder`, as token ids."""

    alone: list[list[int]]
    together: list[list[int]]
    forced: list[list[float]]  # log-probabilities of the reference's tokens
    labeled: list[list[int]]


async def run_engine(order: EngineOrder) -> EngineAnswers:
    """Answer each prompt alone, then all prompts together, and return the results.

    The second half of the prompts starts while the first half runs.
    """
    from triptych.runtime.sampling_parameters import ADAPTER, DEFAULTS

    module = importlib.import_module(f"triptych.runtime.{order['engine']}")
    engine = module.Engine(order["settings"], Path(order["weights"]), lambda load: None)
    await engine.start()
    started = asyncio.Event()
    asked = list(zip(order["prompts"], order["max_tokens"], order["adapters"], strict=True))

    async def answer(
        key: str, prompt: list[int], most: int, adapter: str, *, tell: bool = False
    ) -> list[int]:
        ids: list[int] = []
        sampling = {**DEFAULTS, "temperature": 0.0, "max_tokens": most, ADAPTER: adapter}
        async for delta in engine.generate(key, prompt, sampling):
            ids += delta.token_ids
            if tell and len(ids) > 1:
                started.set()
        started.set()
        return ids

    async def join(key: str, prompt: list[int], most: int, adapter: str) -> list[int]:
        await started.wait()
        return await answer(key, prompt, most, adapter)

    alone = [await answer(f"alone-{i}", *one) for i, one in enumerate(asked)]
    started.clear()
    half = (len(asked) + 1) // 2
    together = await asyncio.gather(
        *(answer(f"first-{i}", *one, tell=True) for i, one in enumerate(asked[:half])),
        *(join(f"joined-{i}", *one) for i, one in enumerate(asked[half:])),
    )
    forced = [
        await engine.score(f"forced-{i}", prompt, ids, adapter)
        for i, ((prompt, _, adapter), ids) in enumerate(zip(asked, order["wanted"], strict=True))
    ]
    labeled = await asyncio.gather(
        *(answer(f"labeled-{i}", *one) for i, one in enumerate(order.get("labeled", [])))
    )
    engine.close()
    return {"alone": alone, "together": together, "forced": forced, "labeled": labeled}


def main(order_file: Path, result_file: Path) -> None:
    order = json.loads(order_file.read_bytes())
    result_file.write_text(json.dumps(asyncio.run(run_engine(order))), encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    main(Path(sys.argv[2]), Path(sys.argv[3]))
