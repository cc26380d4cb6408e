"""What an engine makes of prompts, alone and together; vLLM's is run in its own environment.

Usage: ``python worker_gate.py RUNTIME ORDER.json RESULT.json``, with RUNTIME the folder that has
the package of the steps. The order: ``engine``, a module of `runtime`, its ``weights`` and
``settings``; for each prompt its token ids in ``prompts``, the reference's answer in ``wanted``,
its most tokens in ``max_tokens`` and its adapter in ``adapters``; ``labeled`` prompts, each with
its most tokens and its adapter. What the result holds says `gate`.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


async def run_engine(order: Mapping[str, Any]) -> dict[str, Any]:
    """Each prompt alone, then all, the second half joining while the first run.

    The engine is also asked how likely it finds the reference's tokens.
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

    async def join(key: str, *one: Any) -> list[int]:
        await started.wait()
        return await answer(key, *one)

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
