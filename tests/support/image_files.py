"""Image files of every kind, whole and broken, and a fuzzer of the row maker of images.

``python -m tests.support.image_files SEED COUNT`` runs the fuzzer, which prints the seed of
each batch.
"""

import io
import random
import resource
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from triptych.runtime.request_errors import RequestError
from triptych.runtime.row_types import CoreRows, RowInputs
from triptych.runtime.rows_image import IMAGES_AT_ONCE, ImageRowMaker

MAX_BYTES, MAX_PIXELS = 200_000, 1_000_000


def encoded(image: Image.Image, format: str, **options: Any) -> bytes:
    """The image's file."""
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def picture(height: int, width: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Patches of color, sharp and smooth."""
    small = np.random.default_rng(seed).integers(0, 256, (9, 7, 4), dtype=np.uint8)
    image = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
    return (image if mode.endswith("A") else image.convert("RGB")).convert(mode)


def good_images() -> dict[str, bytes]:
    """One of every kind that is accepted."""
    see_through = picture(50, 50).quantize(16)
    see_through.info["transparency"] = bytes(range(16))
    images = {
        "jpeg": encoded(picture(480, 640), "JPEG"),
        "progressive": encoded(picture(77, 201), "JPEG", progressive=True, quality=30),
        "grey-jpeg": encoded(picture(301, 90, "L"), "JPEG"),
        "mpo": encoded(
            picture(64, 64), "MPO", save_all=True, append_images=[picture(64, 64, seed=9)]
        ),
        "png": encoded(picture(33, 31), "PNG"),
        "one-pixel": encoded(picture(1, 1), "PNG"),
        "see-through": encoded(see_through, "PNG"),
        "webp": encoded(picture(120, 80), "WEBP"),
        "webp-alpha": encoded(picture(80, 120, "RGBA"), "WEBP", lossless=True),
        "gif": encoded(picture(40, 70, "P"), "GIF"),
        "bmp": encoded(picture(40, 41), "BMP"),
    }
    images |= {
        mode: encoded(picture(70, 55, mode), "PNG") for mode in ("1", "L", "LA", "P", "RGBA")
    }
    for way in range(2, 9):
        exif = Image.Exif()
        exif[0x0112] = way  # how it is to be turned
        images[f"turned-{way}"] = encoded(picture(60, 90, seed=way), "JPEG", exif=exif)
    for format in ("PNG", "WEBP"):
        images[f"turned-{format}"] = encoded(picture(60, 90), format, exif=exif)
    return images


def bad_images() -> dict[str, tuple[bytes, str]]:
    """Bytes and a part of what their sender is told, by name."""
    frames = {"save_all": True, "append_images": [picture(20, 20, seed=1)]}
    jpeg, png = encoded(picture(90, 90), "JPEG"), encoded(picture(90, 90), "PNG")
    deep = np.arange(400, dtype=np.uint16).reshape(20, 20)
    empty_gif = bytearray(encoded(picture(4, 4, "P"), "GIF"))
    empty_gif[6:10] = bytes(4)  # of the screen
    frame = empty_gif.rindex(b",")
    empty_gif[frame + 5 : frame + 9] = bytes(4)
    return {
        "empty": (b"", "must not be empty"),
        "path": (b"cat.jpg", "Send the bytes of the image file"),
        "pdf": (b"%PDF-1.7 and more", "begin with b'%PDF-1.7 and'"),
        "eps": (encoded(picture(9, 9), "EPS"), "BMP, GIF, JPEG, PNG, WEBP"),
        "tiff": (encoded(picture(9, 9), "TIFF"), "BMP, GIF, JPEG, PNG, WEBP"),
        "avif": (encoded(picture(9, 9), "AVIF"), "BMP, GIF, JPEG, PNG, WEBP"),
        "heif": (b"\0\0\0\x1cftypheic\0\0\0\0mif1heic", "BMP, GIF, JPEG, PNG, WEBP"),
        "cut jpeg": (jpeg[: len(jpeg) // 2], "must be a complete image"),
        "cut png": (png[: len(png) // 2], "must be a complete image"),
        **{
            f"cut {format}": (data[: len(data) // 2], "must be a complete image")
            for format in ("GIF", "BMP", "WEBP")
            for data in [encoded(picture(90, 90, "L"), format)]
        },
        "many scans": (many_scans(200), "Given: 206 scans"),
        "long": (jpeg + bytes(MAX_BYTES), f"at most {MAX_BYTES} bytes"),
        "large": (encoded(Image.new("1", (1001, 1000)), "PNG"), "Given: 1001 x 1000"),
        "animated gif": (encoded(picture(20, 20, "P"), "GIF", **frames), "a single image"),
        "animated png": (encoded(picture(20, 20), "PNG", **frames), "a single image"),
        "animated webp": (encoded(picture(20, 20), "WEBP", **frames), "a single image"),
        "cmyk": (encoded(picture(20, 20, "CMYK"), "JPEG"), "mode CMYK"),
        "16-bit gray": (encoded(Image.fromarray(deep), "PNG"), "16 bits per channel"),
        "16-bit color": (png_file(2, 2, 16, 2, bytes(2 * (1 + 2 * 6))), "16 bits per channel"),
        "long strip": (encoded(picture(2, 3000), "PNG"), "which becomes 54000 x 36"),
        "no pixels": (bytes(empty_gif), "undamaged image"),
    }


def many_scans(count: int) -> bytes:
    """A progressive JPEG file whose last scan, of a few bytes, comes `count` times more."""
    file = encoded(Image.new("L", (900, 900), 90), "JPEG", progressive=True)
    last = file[file.rindex(b"\xff\xda") : -2]
    return file[:-2] + last * count + file[-2:]


def chunk(kind: bytes, data: bytes) -> bytes:
    """A part of a PNG file."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_file(width: int, height: int, depth: int, kind: int, data: bytes) -> bytes:
    """A PNG file with `data` for its rows."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0))
    parts = (header, chunk(b"IDAT", zlib.compress(data)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Some bytes changed, left out, doubled or cut off."""
    damaged = bytearray(data)
    for _ in range(chance.randint(1, 8)):
        place = chance.randrange(len(damaged))
        end = place + chance.randint(1, 20)
        way = chance.randrange(5)
        if way == 0:
            del damaged[place:end]
        elif way == 1:
            damaged[place:place] = damaged[place:end]
        elif way == 2 and place > 200:
            del damaged[place:]
        else:
            damaged[place] = chance.randrange(256)
    return bytes(damaged)


def mended(data: bytes) -> bytes:
    """A damaged PNG file with checksums that fit, so that the damage gets past them."""
    file, place = bytearray(data), 8
    while place + 12 <= len(file):
        (length,) = struct.unpack_from(">I", file, place)
        end = place + 8 + length
        if end + 4 > len(file):
            break
        struct.pack_into(">I", file, end, zlib.crc32(file[place + 4 : end]))
        place = end + 4
    return bytes(file)


ROWS = 20
"""Damaged files in a batch of the fuzzer, each a request of its own, beside one whole file."""


def fuzz(seed: int, count: int) -> int:
    """Give a row maker `count` damaged files; return the refused ones.

    Raises:
        AssertionError: Another row changed, an error is not the sender's, or memory grew by
            more than the images that may be in work.
    """
    settings = {
        "image": {
            "resize": "exact", "edges": [32, 32], "resample": "bicubic", "crop": None,
            "reverse_channels": False, "height": 32, "width": 32, "channels": 3,
        },
        "max_image_bytes": MAX_BYTES,
        "max_pixels": MAX_PIXELS,
    }  # fmt: skip
    maker = ImageRowMaker(settings, Path())
    corpus = [*good_images().values(), *(data for data, _ in bad_images().values())]
    corpus = [file for file in corpus if len(file) > 100]
    good = corpus[0]
    (alone,) = maker.make([RowInputs({"image": [good]}, {})])
    assert isinstance(alone, CoreRows)
    refused, before = 0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for first in range(seed, seed + count, ROWS):
        print(first, flush=True)
        files = []
        for number in range(first, min(first + ROWS, seed + count)):
            chance = random.Random(number)
            file = mutated(chance.choice(corpus), chance)
            files.append(mended(file) if chance.random() < 0.5 and file[1:4] == b"PNG" else file)
        *answers, last = maker.make([RowInputs({"image": [file]}, {}) for file in [*files, good]])
        assert isinstance(last, CoreRows)
        np.testing.assert_array_equal(last.tensors["pixels"], alone.tensors["pixels"])
        errors = [answer for answer in answers if isinstance(answer, Exception)]
        assert all(isinstance(error, RequestError) for error in errors), errors
        refused += len(errors)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib * 1024 < 8 * IMAGES_AT_ONCE * MAX_PIXELS + 2**26, f"{grown_kib} KiB"
    return refused


if __name__ == "__main__":
    print("refused", fuzz(*map(int, sys.argv[1:])))
