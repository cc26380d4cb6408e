"""Small random-weight models with vectors of images, with their own image processors."""

import json
from pathlib import Path
from typing import Any

import torch

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "initializer_range": 0.1,
}
PATCHES = {**SMALL, "image_size": 32, "patch_size": 8}
SIZE = {"size": {"height": 32, "width": 32}}
PROCESSORS: dict[str, dict[str, Any]] = {
    "vit": {"image_processor_type": "ViTImageProcessor", **SIZE},
    "dinov2": {
        "image_processor_type": "BitImageProcessor",
        "size": {"shortest_edge": 36},
        "crop_size": {"height": 32, "width": 32},
        "resample": 3,
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    },
    "convnext": {
        "image_processor_type": "ConvNextImageProcessor",
        "size": {"shortest_edge": 32},
        "crop_pct": 0.875,
    },
    "clip": {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 32},
        "crop_size": {"height": 32, "width": 32},
    },
    "siglip": {"image_processor_type": "SiglipImageProcessor", "resample": 3, **SIZE},
}


def save_image_model(kind: str, folder: Path, seed: int = 5) -> Path:
    """Save a model of a kind in `KINDS` with its processor, and return its folder."""
    import transformers

    torch.manual_seed(seed)
    model = KINDS[kind]().eval()
    model.save_pretrained(folder)
    settings = PROCESSORS[kind.partition("_")[0]]
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    processor.save_pretrained(folder)
    if kind in TOKENIZERS:
        TOKENIZERS[kind]().save_pretrained(folder)
    return folder


def _vit(*, head: bool = False) -> Any:
    from transformers import ViTConfig, ViTForImageClassification, ViTModel

    config = ViTConfig(**PATCHES)
    return ViTForImageClassification(config) if head else ViTModel(config)


def _dinov2() -> Any:
    from transformers import Dinov2Config, Dinov2Model

    return Dinov2Model(Dinov2Config(**PATCHES, mlp_ratio=2))


def _dinov3() -> Any:
    from transformers import DINOv3ViTConfig, DINOv3ViTModel

    return DINOv3ViTModel(DINOv3ViTConfig(**PATCHES, num_register_tokens=4))


def _convnext() -> Any:
    from transformers import ConvNextConfig, ConvNextModel

    config = ConvNextConfig(
        hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], image_size=32, initializer_range=0.1
    )
    return ConvNextModel(config)


TEXTS = {**SMALL, "vocab_size": 800, "max_position_embeddings": 64}
"""Settings of the text side."""


def _clip_tokenizer() -> Any:
    """Return a tokenizer of CLIP whose tokens are characters."""
    from transformers import CLIPTokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = sorted(bytes_to_unicode().values())
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), *CLIP_MARKS]
    return CLIPTokenizer(
        vocab={token: number for number, token in enumerate(tokens)},
        merges=[],
        model_max_length=TEXTS["max_position_embeddings"],
    )


def _siglip_tokenizer() -> Any:
    """Return a tokenizer of SigLIP 2, which lower-cases, whose tokens are bytes and letters."""
    from transformers import Siglip2Tokenizer

    special = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnopqrstuvwxyz"]
    return Siglip2Tokenizer(
        vocab={token: number for number, token in enumerate(tokens)},
        merges=[],
        model_max_length=TEXTS["max_position_embeddings"],
        padding_side="right",
        model_input_names=["input_ids"],
    )


TOKENIZERS = {"clip": _clip_tokenizer, "siglip": _siglip_tokenizer}

CLIP_MARKS = ("<|startoftext|>", "<|endoftext|>")


def _clip() -> Any:
    from transformers import CLIPConfig, CLIPModel

    texts = {**TEXTS, "bos_token_id": 512, "pad_token_id": 513, "eos_token_id": 513}
    config = CLIPConfig(text_config=texts, vision_config=PATCHES, projection_dim=24)
    return CLIPModel(config)


def _siglip() -> Any:
    from transformers import SiglipConfig, SiglipModel

    texts = {**TEXTS, "projection_size": 32}
    return SiglipModel(SiglipConfig(text_config=texts, vision_config=PATCHES))


KINDS = {
    "dinov2": _dinov2,
    "vit": _vit,
    "vit_dinov3": _dinov3,  # its own processor needs torchvision
    "vit_head": lambda: _vit(head=True),
    "convnext": _convnext,
    "clip": _clip,
    "siglip": _siglip,
}
"""A name that begins with that of a processor, and what makes the model."""
