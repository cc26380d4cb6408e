"""Rows that break a step, asked for by chunks side by side; the server is a fake that fails all."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from triptych.client import PipelineConfig, PipelineFailedError
from triptych.client.bulk.formats import ERROR, RowChunk
from triptych.client.bulk.jobs import BatchLock, TensorSender

CONFIG = PipelineConfig(16, ("text",), {"label": (np.object_, (1,))}, ("step",))


class BrokenByOne:
    """Stands for a client whose server runs all that is under way as one batch.

    A text `break` fails the whole of it, as an exception in Triton's `execute` does.
    """

    def __init__(self) -> None:
        self._under_way: list[Sequence[str]] = []
        self._broken: set[int] = set()

    async def infer_each(
        self, inputs: Mapping[str, Sequence[str]], **_: Any
    ) -> list[dict[str, Any]]:
        texts = inputs["text"]
        self._under_way.append(texts)
        if any("break" in each for each in self._under_way):
            self._broken.update(map(id, self._under_way))
        await asyncio.sleep(0.0005 * len(texts))
        self._under_way.remove(texts)
        if id(texts) in self._broken:
            self._broken.discard(id(texts))
            raise PipelineFailedError("the step is broken")
        return [{"label": np.array([text.encode()], np.object_)} for text in texts]


@pytest.mark.parametrize("bad", [{5}, {0, 1, 9, 31}])
def test_a_row_that_breaks_a_step_fails_no_row_of_a_chunk_beside(bad: set[int]) -> None:
    client, lock = BrokenByOne(), BatchLock()
    sender = TensorSender(client, CONFIG, lock, Path())  # type: ignore[arg-type]  # a fake
    texts = ["break" if row in bad else f"t{row}" for row in range(32)]
    chunks = [RowChunk(32 * at, 32, {"text": texts}, None) for at in range(3)]

    async def send_all() -> list[Any]:
        return await asyncio.gather(*map(sender.send, chunks))

    for answers in asyncio.run(send_all()):
        assert {row for row, error in enumerate(answers[ERROR]) if error} == bad
        found = [label for row, label in enumerate(answers["label"]) if row not in bad]
        assert found == [text for text in texts if text != "break"]
