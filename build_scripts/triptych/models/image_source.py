"""Read a model's image processor as `ImageInfo`, verified against the processor itself."""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from triptych.base.errors import UserError
from triptych.models.info import ImageInfo, Resize
from triptych.models.text import read_json

if TYPE_CHECKING:
    from transformers import BaseImageProcessor

MAX_DIFFERENCE = 1e-5
"""Maximum difference from the processor's result, relative to its largest element above 1."""

_FIELD = "model.source"
_REMEDY = "Choose a model whose image processor resizes, crops, rescales and normalizes, no more"
_CHANNELS = 3
_ENLARGED = 256 / 224  # by which a processor may resize to more than `size` without a setting
_SEED = 20
_PROBES = (  # height, width, mode: odd, tall, wide, smaller than any crop; every kind of pixel
    (1, 1, "RGB"),
    (2, 3, "RGB"),
    (480, 641, "RGB"),
    (501, 37, "RGB"),
    (37, 501, "RGBA"),
    (225, 223, "L"),
    (301, 200, "P"),
    (97, 131, "LA"),
    (130, 130, "1"),
    (389, 517, "RGB"),
)
_RULE = "must have an image processor "


class _Probe(NamedTuple):
    """Test image as the runtime opens it, with the processor's result for the same bytes."""

    name: str
    image: object
    expected: NDArray[np.float32]


class _Geometry(NamedTuple):
    """Interpretation of a processor's settings about sizes; see `ImageInfo`."""

    resize: Resize
    edges: tuple[int, ...]
    crop: tuple[int, int] | None


def read_image_info(folder: Path) -> ImageInfo:
    """Read the settings of the image processor in `folder` and verify them.

    Processors interpret the same setting differently. Each plausible interpretation is tried until
    one reproduces the processor's results for images of many kinds.

    Raises:
        UserError: There is no processor, its results vary in size, or no interpretation matches.
    """
    processor = _load(folder)
    name = type(processor).__name__
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        probes = [_probe(processor, *probe) for probe in _PROBES]
    info = _info(processor, *_size(name, probes))
    closest: tuple[float, str] | None = None
    for geometry in dict.fromkeys(_geometries(processor)):
        reading = replace(info, **geometry._asdict())
        furthest = _furthest(reading, probes)
        if furthest[0] <= MAX_DIFFERENCE:
            return reading
        closest = furthest if closest is None else min(closest, furthest)
    differs = (
        "" if closest is None else f", closest interpretation {closest[0]:.3g} off at {closest[1]}"
    )
    raise UserError(
        _FIELD,
        _RULE + "whose settings describe it completely",
        given=f"{name}{differs}",
        remedy=_REMEDY,
    )


def _load(folder: Path) -> BaseImageProcessor:
    from transformers import AutoImageProcessor

    try:
        return AutoImageProcessor.from_pretrained(
            folder, backend="pil", trust_remote_code=False, local_files_only=True
        )
    except Exception as error:
        if "sampling_rate" in read_json(folder / "preprocessor_config.json", default={}):
            raise UserError(
                _FIELD,
                "must be a text or image model",
                given="an audio model, by preprocessor_config.json",
                remedy="Choose another model",
            ) from error
        raise UserError(
            _FIELD,
            _RULE + "that transformers can load and run on Pillow",
            given=" ".join(str(error).split())[:300],
            remedy="Check preprocessor_config.json, or choose another model",
        ) from error


def _probe(processor: BaseImageProcessor, height: int, width: int, mode: str) -> _Probe:
    from PIL import Image
    from transformers.image_utils import load_image

    from triptych.runtime.rows_image import Limits, open_image

    name = f"a {width} x {height} image of mode {mode}"
    slope = np.linspace(0, 160, height * width * 4).reshape(height, width, 4)
    noise = np.random.default_rng(_SEED).integers(0, 96, slope.shape)
    source = Image.fromarray((slope + noise).astype(np.uint8))
    if not mode.endswith("A"):
        source = source.convert("RGB")
    file = io.BytesIO()
    source.convert(mode).save(file, "PNG")
    own = type(processor).__name__
    try:
        result = dict(processor(images=load_image(Image.open(file)), return_tensors="np"))
    except Exception as error:
        given = f"{own}, {name}: {' '.join(str(error).split())[:200]}"
        rule = _RULE + "that takes images of every size"
        raise UserError(_FIELD, rule, given=given, remedy=_REMEDY) from error
    if set(result) != {"pixel_values"}:
        given = f"{own}, which makes {', '.join(sorted(result))}"
        rule = _RULE + "that makes pixel_values and nothing else"
        raise UserError(_FIELD, rule, given=given, remedy=_REMEDY)
    image = open_image(file.getvalue(), Limits(sys.maxsize, sys.maxsize), 0)
    return _Probe(name, image, np.asarray(result["pixel_values"]))


def _size(name: str, probes: Sequence[_Probe]) -> tuple[int, int]:
    """Return height and width of every result."""
    shapes = list(dict.fromkeys(probe.expected.shape for probe in probes))
    if len(shapes) > 1 or len(shapes[0]) != 4 or shapes[0][:2] != (1, _CHANNELS):
        raise UserError(
            _FIELD,
            f"must have an image processor that makes [{_CHANNELS}, height, width] of an image, "
            "with one height and one width for all images",
            given=f"{name}, which makes {', '.join(str(list(shape[1:])) for shape in shapes[:3])}",
            remedy="Set a size or crop_size with height and width in preprocessor_config.json",
        )
    return shapes[0][2], shapes[0][3]


def _setting(processor: object, name: str) -> Any:
    return getattr(processor, name, None)


def _info(processor: object, height: int, width: int) -> ImageInfo:
    """Return all settings except the geometry."""
    from PIL import Image

    setting = partial(_setting, processor)
    mean, std = np.zeros(_CHANNELS), np.ones(_CHANNELS)
    if setting("do_normalize"):
        mean, std = mean + setting("image_mean"), std * setting("image_std")
    if setting("do_rescale") and setting("rescale_offset"):
        mean = mean + 1  # subtracted right after rescaling, before any mean
    if setting("include_top"):
        std = std * setting("image_std")
    normalizes = bool(mean.any() or (std != 1).any())
    resample = setting("resample")
    return ImageInfo(
        resize="none",
        edges=(),
        resample=Image.Resampling(2 if resample is None else int(resample)).name.lower(),
        crop=None,
        reverse_channels=bool(setting("do_flip_channel_order")),
        rescale_factor=float(setting("rescale_factor")) if setting("do_rescale") else None,
        mean=tuple(mean.tolist()) if normalizes else None,
        std=tuple(std.tolist()) if normalizes else None,
        height=height,
        width=width,
        channels=_CHANNELS,
    )


def _geometries(processor: object) -> Iterator[_Geometry]:
    setting = partial(_setting, processor)
    size, crop_size = (dict(setting(key) or {}) for key in ("size", "crop_size"))
    crop: tuple[int, int] | None = None
    if setting("do_center_crop") and crop_size.get("height") and crop_size.get("width"):
        crop = (crop_size["height"], crop_size["width"])
    if not setting("do_resize"):
        yield _Geometry("none", (), crop)
        return
    height, width, edge = (size.get(key) for key in ("height", "width", "shortest_edge"))
    if height and width:
        yield _Geometry("exact", (height, width), crop)
        edge = edge or (height if height == width else None)
    if edge:
        yield _Geometry("exact", (edge, edge), crop)
        enlarged = [edge, int(_ENLARGED * edge)]
        if setting("crop_pct"):
            enlarged.append(int(edge / setting("crop_pct")))
        for shorter in enlarged:
            yield _Geometry("shorter", (shorter,), crop)
            yield _Geometry("shorter", (shorter,), (edge, edge))


def _furthest(info: ImageInfo, probes: Sequence[_Probe]) -> tuple[float, str]:
    """Return the largest difference from the processor's results, and the name of its probe."""
    from triptych.models.image_core import model_input
    from triptych.runtime.rows_image import to_pixels

    largest = (0.0, "")
    for probe in probes:
        pixels = np.ascontiguousarray(to_pixels(probe.image, asdict(info)))
        if pixels.shape != (info.height, info.width, info.channels):
            return float("inf"), probe.name
        difference = np.abs(model_input(pixels[None], info) - probe.expected).max()
        scale = max(1.0, float(np.abs(probe.expected).max()))
        largest = max(largest, (float(difference) / scale, probe.name))
    return largest
