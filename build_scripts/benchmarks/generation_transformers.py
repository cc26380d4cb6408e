"""Answer prompts with transformers' `generate`, greedy and in fp32, one after the other.

Usage: ``python generation_transformers.py MODEL_FOLDER TOKENS``, in the environment of generation.
Each input line is a list of token ids. Each new token is printed as a line with its id, and the
end of an answer, after at most TOKENS tokens, as an empty line.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


class TokenPrinter:
    """A streamer of `generate`: receives the prompt, then each token, then the end."""

    def __init__(self) -> None:
        self._is_prompt = True

    def put(self, ids: Any) -> None:
        """Print one new token; ignore the prompt."""
        if not self._is_prompt:
            print(ids.ravel()[0].item(), flush=True)
        self._is_prompt = False

    def end(self) -> None:
        """Print the empty line of the end."""
        print(flush=True)


def main(folder: Path, tokens: int) -> None:
    """Answer until the input ends."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    print(flush=True)  # the empty line says that the model is loaded
    for line in sys.stdin:
        ids = torch.tensor([json.loads(line)])
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=tokens,
            streamer=TokenPrinter(),
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
