"""Train an example pipeline's model and measure it on the held-out data.

Usage: ``python build_scripts/examples/train.py ticket_routing`` (or ``pii``).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from examples.example import Example, Record
from examples.fitting import base_model, fit, pin_randomness
from examples.pii import PII
from examples.ticket_routing import TICKET_ROUTING

# torch reads the variable when it is loaded. Threads that spin while they wait slow down a busy
# machine many times.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

PIPELINES = Path(__file__).parents[2] / "pipelines"
EXAMPLES = {"ticket_routing": TICKET_ROUTING, "pii": PII}


def read_records(path: Path) -> list[Record]:
    """Return the lines of a jsonl file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def train(name: str, output: Path, steps: int | None = None) -> dict[str, Any]:
    """Train an example and write its model and ``quality.json`` to `output`.

    An existing model is replaced once the new one is complete.

    Args:
        name: Key of `EXAMPLES`.
        steps: Maximum number of optimizer steps; None for the whole schedule.

    Returns:
        Quality on the held-out data, as in ``quality.json``.
    """
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    example = EXAMPLES[name]
    data = PIPELINES / name / "data"
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as scratch:
        folder = Path(scratch) / "model"
        _train_into(folder, example, read_records(data / "train.jsonl"), steps)
        quality = example.measure(str(folder), read_records(data / "test.jsonl"))
        (folder / "quality.json").write_text(json.dumps(quality, indent=2) + "\n", encoding="utf-8")
        if output.exists():
            output.rename(Path(scratch) / "old")
        folder.rename(output)
    return quality


def _train_into(folder: Path, example: Example, records: list[Record], steps: int | None) -> None:
    import transformers

    pin_randomness(example.schedule.seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base_model())
    # The base model's own settings would cut and pad every text to 128 tokens.
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    model = getattr(transformers, example.auto_class).from_pretrained(
        base_model(),
        num_labels=len(example.labels),
        id2label=dict(enumerate(example.labels)),
        label2id={label: index for index, label in enumerate(example.labels)},
        hidden_dropout_prob=example.schedule.dropout,
        attention_probs_dropout_prob=example.schedule.dropout,
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    fit(model, example.encode(tokenizer, records), example.schedule, steps)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    """Train the example that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=sorted(EXAMPLES))
    parser.add_argument("--output", type=Path, help="model folder; pipelines/NAME/model by default")
    parser.add_argument("--steps", type=int, help="maximum number of optimizer steps")
    options = parser.parse_args()
    output = options.output or PIPELINES / options.name / "model"
    begun = time.perf_counter()
    quality = train(options.name, output, options.steps)
    weights = hashlib.sha256((output / "model.safetensors").read_bytes()).hexdigest()
    print(json.dumps(quality, indent=2))
    print(f"{output}: trained and measured in {time.perf_counter() - begun:.0f} s")
    print(f"sha256 of the weights: {weights}")


if __name__ == "__main__":
    main()
