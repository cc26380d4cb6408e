"""TensorRT's timing cache: kernels measured once are not measured again by the next build.

One file for each release and kind of GPU: another's times are refused, or wrong.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from triptych.base.cache import cache_root
from triptych.base.files import write_files
from triptych.core.engine.gpu import BuildGpu

FOLDER = "timing"


def timing_file(version: str, gpu: BuildGpu) -> Path:
    """Where the times of a release of TensorRT on a kind of GPU are kept."""
    name = f"{version}-{gpu.name}-{gpu.compute_capability}"
    return cache_root() / FOLDER / f"{re.sub(r'[^A-Za-z0-9.]+', '_', name)}.cache"


def attach(config: Any, file: Path) -> bool:
    """Give a builder's config the times in `file`, or an empty cache; whether there were any."""
    stored = file.read_bytes() if file.is_file() else b""
    cache = config.create_timing_cache(stored)
    if cache is not None and config.set_timing_cache(cache, False):
        return bool(stored)
    # What is not readable, or from elsewhere, is measured again.
    config.set_timing_cache(config.create_timing_cache(b""), False)
    return False


def save(config: Any, file: Path) -> None:
    """Put the config's times into `file`, with those another build has put there meanwhile.

    Raises:
        OSError: it cannot be written; what was there stays.
    """
    cache = config.get_timing_cache()
    if cache is None:
        return
    if file.is_file() and (other := config.create_timing_cache(file.read_bytes())) is not None:
        cache.combine(other, False)
    write_files(file.parent, {file.name: bytes(cache.serialize())})
