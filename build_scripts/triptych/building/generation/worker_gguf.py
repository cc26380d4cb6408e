"""Convert a GGUF file to an ordinary Hugging Face folder in fp32.

Usage, in the Python environment of vLLM: ``python worker_gguf.py FILE.gguf FOLDER``. The weights
are dequantized and keep the rounding errors of the GGUF file.
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
    # Without this, transformers would save the dequantized model as a quantized one.
    model.hf_quantizer = None
    model.config.quantization_config = None
    del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
