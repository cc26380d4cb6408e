"""Run in the environment of generation: transformers' `generate`, one prompt at a time.

Usage: ``python generation_transformers.py FOLDER TOKENS``, with FOLDER of the model. Each line of
the input is a list of token ids. For each new token a line with its id comes out, and one without
anything at the end of an answer: greedy, in fp32, of at most TOKENS tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


class Lines:
    """What `generate` calls a streamer: it is told the prompt, then each token, then the end."""

    def __init__(self) -> None:
        self._is_prompt = True

    def put(self, ids: Any) -> None:
        """Print one new token."""
        if not self._is_prompt:
            print(ids.ravel()[0].item(), flush=True)
        self._is_prompt = False

    def end(self) -> None:
        """Print the end."""
        print(flush=True)


def main(folder: Path, tokens: int) -> None:
    """Answer until the input ends."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    print(flush=True)  # ready
    for line in sys.stdin:
        ids = torch.tensor([json.loads(line)])
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=tokens,
            streamer=Lines(),
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
