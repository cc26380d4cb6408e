"""Run in the environment of generation: a GGUF file to an ordinary Hugging Face folder in fp32.

Usage: ``python worker_gguf.py FILE.gguf FOLDER``. The weights are what the file's, dequantized,
say: the original's rounding to few bits stays in them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(file: Path, folder: Path) -> None:
    """Write config, weights, tokenizer and chat template of `file` into `folder`."""
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # Else it is saved as a quantized model, which it is no more.
    model.hf_quantizer = None
    model.config.quantization_config = None
    del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
