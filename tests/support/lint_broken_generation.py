"""What lint must catch of a core that generates text."""

from __future__ import annotations

import json

from lint_cases import error, info, warning
from lint_repositories import Edit, put, solo

TOKENIZER = {
    "post_processor": {
        "type": "Sequence",
        "processors": [
            {"type": "ByteLevel"},
            {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}],
            },
        ],
    }
}


def settings(**values: object) -> Edit:
    """A step with these parameters."""
    texts = [
        f'parameters {{ key: "{name}" value {{ string_value: {json.dumps(json.dumps(value))} }} }}'
        for name, value in values.items()
    ]
    return solo(" ".join(texts))


def kv_cache(max_length: int, request_tokens: int) -> Edit:
    """A core with room for 1024 tokens."""
    return settings(
        kv_token_bytes=1024,
        kv_cache_mib=1,
        max_length=max_length,
        max_sequences=4,
        request_tokens=request_tokens,
    )


BROKEN_GENERATION = (
    error("engine-gpus", "solo", "MIG-5a", settings(gpus=["MIG-5a"])),
    error(
        "engine-gpus",
        "solo",
        "2 parts on MIG-5a, MIG-6b",
        settings(tensor_parallel=2, gpus=["MIG-5a", "MIG-6b"]),
    ),
    error("engine-gpus", "solo", "4 parts, gpus 0, 1", settings(pipeline_parallel=4, gpus=[0, 1])),
    error("engine-gpus", "solo", "KIND_CPU", settings(tensor_parallel=2)),
    info(
        "precision-gpus",
        "solo",
        "core.precision bf16, core.kv_cache.dtype fp8",
        settings(precision="bf16", kv_cache_precision="fp8"),
    ),
    info(
        "precision-gpus",
        "solo",
        "core.precision int8",
        settings(precision="int8", kv_cache_precision="auto"),
    ),
    error("kv-cache", "solo", "1024 tokens", kv_cache(1025, 1)),
    warning("kv-cache", "solo", "3 such requests", kv_cache(1024, 300)),
    warning(
        "duplicate-bos-token",
        "solo/1/chat_template.jinja",
        "<s>; bos_token is not named",
        settings(special_tokens={"eos_token": "</s>"}),
        put("solo/1/tokenizer.json", json.dumps(TOKENIZER)),
        put("solo/1/chat_template.jinja", "<s>{{ messages[0]['content'] }}"),
    ),
)
