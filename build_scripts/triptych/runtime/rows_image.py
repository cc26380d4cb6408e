"""Encoded images to pixels, exactly as the model's own image processor makes them.

The core gets what comes before rescaling: a byte a channel, a quarter of what floats would take.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# WebPImagePlugin is named so that Pillow need not load every plugin it has to find that one.
from PIL import Image, ImageOps, UnidentifiedImageError, WebPImagePlugin  # noqa: F401

from .request_errors import RequestError
from .row_types import CoreRows, RowInputs

FIELD = "image"
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "WEBP")
"""Formats whose decoders start no other program and need no other file."""

MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX")
"""Kinds of pixel, 8 bits a channel at most, whose colors are not a matter of a profile."""

IMAGES_A_REQUEST = 2
"""Maximum total pixels of a request's images, as a multiple of the limit of one image."""

MAX_THREADS = 4
_BIT_DEPTH = 24  # place in a PNG file: signature, length and name of the header, two sizes
_ASPECT = "must not be so much longer than wide, or wider than long, that resizing makes it huge"


class Limits(NamedTuple):
    """Limits of an image: bytes as encoded, and pixels as sent and as resized."""

    image_bytes: int
    pixels: int


def open_image(data: bytes, limits: Limits, row: int) -> Image.Image:
    """Decode an image, upright and in RGB. Nothing is decoded before its header is in order.

    To be called within `own_limits`.

    Raises:
        RequestError: it is no image, or none whose pixels are clear and within `limits`.
    """
    if not data:
        raise RequestError(FIELD, "must not be empty", "0 bytes", "Send an encoded image", row)
    if len(data) > limits.image_bytes:
        rule = f"must have at most {limits.image_bytes} bytes"
        remedy = "Send a smaller image or raise the pipeline's limit"
        raise RequestError(FIELD, rule, f"{len(data)} bytes", remedy, row)
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            fault = _header_fault(image, data, limits)
            if fault is None:
                ImageOps.exif_transpose(image, in_place=True)
                image.load()
                return image if image.mode == "RGB" else image.convert("RGB")
    except UnidentifiedImageError:
        given = f"{len(data)} bytes that begin with {data[:12]!r}"
        fault = (
            f"must be an undamaged image in one of {', '.join(FORMATS)}",
            given,
            "Send the bytes of the image file itself, not its path, its address or base64 of it",
        )
    except Exception as error:  # a decoder raises whatever damaged bytes lead it to
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        given = f"{len(data)} bytes that cannot be decoded: {reason}"
        fault = ("must be a whole, undamaged image", given, "Send the whole file or save it again")
    raise RequestError(FIELD, *fault, row)


def to_pixels(image: Image.Image, facts: Mapping[str, Any]) -> NDArray[np.uint8]:
    """Return the pixels of an RGB image for the core, UINT8 ``[height, width, channels]``.

    `facts` are `ImageFacts` as plain data.
    """
    height, width = resized(facts, image.height, image.width)
    if facts["resize"] != "none":
        image = image.resize((width, height), Image.Resampling[facts["resample"].upper()])
    pixels = np.asarray(image)
    if facts["crop"] is not None:
        pixels = _crop(pixels, *facts["crop"])
    return pixels[..., ::-1] if facts["reverse_channels"] else pixels


def resized(facts: Mapping[str, Any], height: int, width: int) -> tuple[int, int]:
    """Return height and width of an image after resizing, before the crop."""
    if facts["resize"] == "exact":
        return facts["edges"][0], facts["edges"][1]
    if facts["resize"] == "shorter":
        edge: int = facts["edges"][0]
        longer = int(edge * max(height, width) / min(height, width))
        return (longer, edge) if width <= height else (edge, longer)
    return height, width


class ImageRowMaker:
    """Row maker with one core row per row: ``pixels`` UINT8 ``[n, height, width, channels]``."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        self._facts: Mapping[str, Any] = settings["image"]
        self._limits = Limits(settings["max_image_bytes"], settings["max_pixels"])
        self._shape = tuple(self._facts[axis] for axis in ("height", "width", "channels"))
        self._threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
        self._pool = ThreadPoolExecutor(self._threads)  # starts a thread when it is first needed

    def make(self, requests: Sequence[RowInputs]) -> list[CoreRows | Exception]:
        """Return the pixels of every row; a request with an invalid image gets its first error."""
        crowded = [self._crowded(request.columns[FIELD]) for request in requests]
        pixels = [
            np.empty((len(request.columns[FIELD]), *self._shape), np.uint8) for request in requests
        ]
        jobs = [
            partial(self._fill, pixels[index], row, data)
            for index, request in enumerate(requests)
            for row, data in enumerate([] if crowded[index] else request.columns[FIELD])
        ]
        with own_limits():
            if len(jobs) == 1 or self._threads == 1:
                faults = [job() for job in jobs]
            else:  # Pillow decodes and resizes without holding the interpreter
                faults = list(self._pool.map(_call, jobs))
        answers: list[CoreRows | Exception] = []
        start = 0
        for fault, tensor in zip(crowded, pixels, strict=True):
            if fault is not None:
                answers.append(fault)
                continue
            own = faults[start : start + len(tensor)]
            first = next((each for each in own if each is not None), None)
            answers.append(first or CoreRows({"pixels": tensor}, [], 0))
            start += len(tensor)
        return answers

    def _crowded(self, images: Sequence[bytes]) -> RequestError | None:
        """One request must not hold up all others with images that are each within the limit."""
        limit = IMAGES_A_REQUEST * self._limits.pixels
        if len(images) <= IMAGES_A_REQUEST:
            return None
        with own_limits():
            total = sum(map(_pixels_of, images))
        if total <= limit:
            return None
        rule = f"must have at most {limit} pixels in all rows of a request"
        return RequestError(FIELD, rule, f"{total} pixels", "Send fewer images in one request")

    def _fill(self, pixels: NDArray[np.uint8], row: int, data: bytes) -> RequestError | None:
        try:
            image = open_image(data, self._limits, row)
            height, width = resized(self._facts, image.height, image.width)
            if height * width > self._limits.pixels:
                given = f"{image.width} x {image.height}, which becomes {width} x {height}"
                raise RequestError(FIELD, _ASPECT, given, "Cut out the part that matters", row)
            pixels[row] = to_pixels(image, self._facts)
        except RequestError as fault:
            return fault
        return None


def _pixels_of(data: bytes) -> int:
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            return int(image.width * image.height)
    except Exception:  # it is refused in its turn
        return 0


def _call(job: partial[RequestError | None]) -> RequestError | None:
    return job()


@contextmanager
def own_limits() -> Iterator[None]:
    """Disable Pillow's size limit while the block runs, because `Limits` replaces it.

    The change affects the whole process, so one block must enclose all threads.
    """
    before = Image.MAX_IMAGE_PIXELS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Image.MAX_IMAGE_PIXELS = None
        try:
            yield
        finally:
            Image.MAX_IMAGE_PIXELS = before


def _header_fault(image: Image.Image, data: bytes, limits: Limits) -> tuple[str, str, str] | None:
    """Rule, given and remedy of what the header alone shows to be wrong."""
    size = f"{image.width} x {image.height}"
    if image.width * image.height > limits.pixels:
        remedy = "Send a smaller image or raise the pipeline's limit"
        return f"must have at most {limits.pixels} pixels", size, remedy
    # An MPO file is a photo with previews or depth maps after it: its first image is the photo.
    if image.format != "MPO" and getattr(image, "is_animated", False):
        return "must be a single image", "an animated one", "Send the frame that is meant"
    deep = image.format == "PNG" and data[_BIT_DEPTH] > 8
    if deep or image.mode not in MODES:
        given = "16 bits a channel" if deep else f"Pillow's mode {image.mode}"
        remedy = "Convert it to RGB with 8 bits a channel: how to is not clear from the file"
        return "must be in grey or RGB with at most 8 bits a channel", given, remedy
    return None


def _crop(pixels: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """Return the center of an image, padded with zeros if it is smaller; odd padding goes first."""
    missing = (max(0, height - pixels.shape[0]), max(0, width - pixels.shape[1]))
    if any(missing):
        pads = [((size + 1) // 2, size // 2) for size in missing]
        pixels = np.pad(pixels, [*pads, (0, 0)])
    top, left = (pixels.shape[0] - height) // 2, (pixels.shape[1] - width) // 2
    return pixels[top : top + height, left : left + width]
