"""The largest request that the pipelines of a repository can use."""

from __future__ import annotations

import json
import re
from pathlib import Path

from triptych.container.locks import find_pipelines

MAX_MIB = 64
"""Of a repository with anything else than such pipelines; Triton's own limit."""
TEXTS_A_REQUEST = 8
"""As in ``runtime/triton_io.py``: so many longest texts fit into one request."""
STEP_SHM_MIB = 64
"""Shared memory for each Python process of a step, besides the largest request."""

_ESCAPE = 6  # a byte as JSON may spell it: \u0041
_REST_MIB = 1  # names, shapes, parameters
_MIB = 2**20
_ROWS = re.compile(r"^max_batch_size:\s*(\d+)", re.MULTILINE)
_PARAMETER = re.compile(r'key: "(\w+)"\s*value \{\s*string_value: ("(?:[^"\\]|\\.)*")')


def largest_request_mib(repository: Path) -> int:
    """Size of the largest request in MiB, as JSON, that no pipeline would refuse for its size."""
    found = [_largest_bytes(repository / p.name, p.steps) for p in find_pipelines(repository)]
    bounded = [size for size in found if size is not None]
    if not found or len(bounded) < len(found):
        return MAX_MIB
    return min(-(-max(bounded) // _MIB) + _REST_MIB, MAX_MIB)


def _largest_bytes(ensemble: Path, steps: tuple[str, ...]) -> int | None:
    """None where the first step is not ours, or its config says nothing of sizes."""
    try:
        rows = int(_ROWS.findall(_config(ensemble))[0])
        settings = {
            name: json.loads(json.loads(text))
            for name, text in _PARAMETER.findall(_config(ensemble.parent / steps[0]))
            if name in ("inputs", "encoded_inputs", "max_text_bytes", "max_image_bytes")
        }
        images = len(settings["encoded_inputs"])
        texts = len(settings["inputs"]) - images
        text_bytes = texts * TEXTS_A_REQUEST * settings["max_text_bytes"] * _ESCAPE
        return int(text_bytes + (images and images * rows * settings["max_image_bytes"]))
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _config(model: Path) -> str:
    return (model / "config.pbtxt").read_text(encoding="utf-8")
