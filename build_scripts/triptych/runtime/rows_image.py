"""Decode images to pixels, exactly as the model's own image processor does.

The core gets the pixels before rescaling: one byte per channel, a quarter of the size of floats.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# WebPImagePlugin is imported here so that Pillow does not load all plugins to find it.
from PIL import Image, ImageOps, UnidentifiedImageError, WebPImagePlugin  # noqa: F401

from .request_errors import RequestError
from .row_types import CoreRows, RowInputs

FIELD = "image"
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "WEBP")
"""Formats whose decoders start no other program, need no other file, and decode no more pixels than
their header says: an AVIF file of 2 KB decodes to 144 million and is then reduced to its header."""

MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX")
"""Pillow's modes with at most 8 bits per channel whose colors need no profile."""

IMAGES_A_REQUEST = 2
"""Maximum total pixels of a request's images, as a multiple of the limit of one image."""

IMAGES_AT_ONCE = 4
"""Maximum total pixels, decoded and resized, of the images in work in an instance, as a multiple of
the limit of one image: they bound its memory. Each core may have a thread."""

MAX_SCANS = 100
"""Maximum number of scans of a progressive JPEG, of which encoders write about 10. A scan of a few
bytes takes as long as a pass over all pixels."""
_SCAN = b"\xff\xda"
Job = partial["RequestError | None"]
_BIT_DEPTH = 24  # offset in a PNG file, after signature, header length, header name, two sizes
_ASPECT = "must not have an aspect ratio for which the resized image exceeds the pixel limit"


class Limits(NamedTuple):
    """Limits of an image: bytes as encoded, and pixels as sent and as resized."""

    image_bytes: int
    pixels: int


def open_image(data: bytes, limits: Limits, row: int) -> Image.Image:
    """Return an image, upright and in RGB; its header is checked before it is decoded.

    Must be called within `own_limits`.

    Raises:
        RequestError: The data are not an image of a supported kind within `limits`.
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
            "Send the bytes of the image file, not its path, its URL or its base64",
        )
    except Exception as error:  # damaged bytes make decoders raise anything
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        given = f"{len(data)} bytes that cannot be decoded: {reason}"
        fault = ("must be a complete image", given, "Send the complete file or save it again")
    raise RequestError(FIELD, *fault, row)


def to_pixels(image: Image.Image, info: Mapping[str, Any]) -> NDArray[np.uint8]:
    """Return the pixels of an RGB image for the core, UINT8 ``[height, width, channels]``.

    `info` are `ImageInfo` as plain data.
    """
    height, width = resized(info, image.height, image.width)
    if info["resize"] != "none":
        image = image.resize((width, height), Image.Resampling[info["resample"].upper()])
    pixels = np.asarray(image)
    if info["crop"] is not None:
        pixels = _crop(pixels, *info["crop"])
    return pixels[..., ::-1] if info["reverse_channels"] else pixels


def resized(info: Mapping[str, Any], height: int, width: int) -> tuple[int, int]:
    """Return height and width of an image after resizing, before the crop."""
    if info["resize"] == "exact":
        return info["edges"][0], info["edges"][1]
    if info["resize"] == "shorter":
        edge: int = info["edges"][0]
        longer = int(edge * max(height, width) / min(height, width))
        return (longer, edge) if width <= height else (edge, longer)
    return height, width


class ImageRowMaker:
    """Row maker with one core row per row: ``pixels`` UINT8 ``[n, height, width, channels]``."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        self._info: Mapping[str, object] = settings["image"]
        self._limits = Limits(settings["max_image_bytes"], settings["max_pixels"])
        self._shape = tuple(self._info[axis] for axis in ("height", "width", "channels"))
        self._threads = len(os.sched_getaffinity(0))
        self._pool = ThreadPoolExecutor(self._threads)  # starts a thread when it is first needed

    def make(self, requests: Sequence[RowInputs]) -> list[CoreRows | Exception]:
        """Return the pixels of every row; a request with an invalid image gets its first error."""
        with own_limits():
            return self._make(requests)

    def _make(self, requests: Sequence[RowInputs]) -> list[CoreRows | Exception]:
        sizes = self._read_sizes([request.columns[FIELD] for request in requests])
        too_large = [self._check_total(each) for each in sizes]
        pixels = [
            np.empty((len(request.columns[FIELD]), *self._shape), np.uint8) for request in requests
        ]
        jobs = [
            partial(self._fill, pixels[index], row, data)
            for index, request in enumerate(requests)
            for row, data in enumerate([] if too_large[index] else request.columns[FIELD])
        ]
        if len(jobs) == 1 or self._threads == 1:
            faults = [job() for job in jobs]
        else:  # Pillow decodes and resizes without Python's global lock
            kept = [size for i, each in enumerate(sizes) if not too_large[i] for size in each]
            groups = _group(jobs, map(self._work, kept), IMAGES_AT_ONCE * self._limits.pixels)
            faults = [fault for group in groups for fault in self._pool.map(_call, group)]
        answers: list[CoreRows | Exception] = []
        start = 0
        for fault, tensor in zip(too_large, pixels, strict=True):
            if fault is not None:
                answers.append(fault)
                continue
            own = faults[start : start + len(tensor)]
            first = next((error for error in own if error is not None), None)
            answers.append(first or CoreRows({"pixels": tensor}))
            start += len(tensor)
        return answers

    def _read_sizes(self, requests: Sequence[Sequence[bytes]]) -> list[list[tuple[int, int]]]:
        """Return height and width of each image; zeros if so few images exceed no limit."""
        if sum(map(len, requests)) <= IMAGES_A_REQUEST:
            return [[(0, 0)] * len(images) for images in requests]
        return [[*map(_read_size, images)] for images in requests]

    def _work(self, size: tuple[int, int]) -> int:
        """Return the pixels of an image, decoded and resized; 0 if it is refused by its header."""
        height, width = size
        if not 0 < height * width <= self._limits.pixels:
            return 0
        height, width = resized(self._info, height, width)
        return size[0] * size[1] + min(height * width, self._limits.pixels)

    def _check_total(self, sizes: Sequence[tuple[int, int]]) -> RequestError | None:
        """Return an error if the images of a request together delay other requests too long."""
        limit = IMAGES_A_REQUEST * self._limits.pixels
        total = sum(height * width for height, width in sizes)
        if len(sizes) <= IMAGES_A_REQUEST or total <= limit:
            return None
        rule = f"must have at most {limit} pixels in all rows of a request"
        return RequestError(FIELD, rule, f"{total} pixels", "Send fewer images in one request")

    def _fill(self, pixels: NDArray[np.uint8], row: int, data: bytes) -> RequestError | None:
        try:
            image = open_image(data, self._limits, row)
            height, width = resized(self._info, image.height, image.width)
            if height * width > self._limits.pixels:
                given = f"{image.width} x {image.height}, which becomes {width} x {height}"
                raise RequestError(
                    FIELD, _ASPECT, given, "Crop the image to the part that matters", row
                )
            pixels[row] = to_pixels(image, self._info)
        except RequestError as fault:
            return fault
        return None


def _read_size(data: bytes) -> tuple[int, int]:
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            return image.height, image.width
    except Exception:  # `open_image` rejects it later
        return 0, 0


def _group(jobs: Sequence[Job], work: Iterable[int], limit: int) -> Iterator[list[Job]]:
    """Yield the jobs in order, in lists whose work is at most `limit` or that have one job."""
    group, total = list[Job](), 0
    for job, pixels in zip(jobs, work, strict=True):
        if group and total + pixels > limit:
            yield group
            group, total = [], 0
        group.append(job)
        total += pixels
    yield group


def _call(job: Job) -> RequestError | None:
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
    """Return rule, given value and remedy of a fault in the header; None if it is valid."""
    size = f"{image.width} x {image.height}"
    if image.width * image.height > limits.pixels:
        remedy = "Send a smaller image or raise the pipeline's limit"
        return f"must have at most {limits.pixels} pixels", size, remedy
    # An MPO file is a photo with previews or depth maps after it: its first image is the photo.
    if image.format != "MPO" and getattr(image, "is_animated", False):
        return "must be a single image", "an animation", "Send one frame"
    if "progressive" in image.info and (scans := data.count(_SCAN)) > MAX_SCANS:
        return f"must have at most {MAX_SCANS} scans", f"{scans} scans", "Save the image again"
    deep = image.format == "PNG" and data[_BIT_DEPTH] > 8
    if deep or image.mode not in MODES:
        given = "16 bits per channel" if deep else f"Pillow's mode {image.mode}"
        remedy = "Convert it to RGB with 8 bits per channel; the file does not say how"
        return "must be in gray or RGB with at most 8 bits per channel", given, remedy
    return None


def _crop(pixels: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """Return the center of an image, padded with zeros if it is smaller; odd padding goes first."""
    missing = (max(0, height - pixels.shape[0]), max(0, width - pixels.shape[1]))
    if any(missing):
        pads = [((size + 1) // 2, size // 2) for size in missing]
        pixels = np.pad(pixels, [*pads, (0, 0)])
    top, left = (pixels.shape[0] - height) // 2, (pixels.shape[1] - width) // 2
    return pixels[top : top + height, left : left + width]
