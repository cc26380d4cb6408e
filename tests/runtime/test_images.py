"""Encoded images to pixels, against the processors of transformers; and every kind of bad image."""

import io
import json
import random
import struct
import warnings
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFile

from triptych.base.errors import UserError
from triptych.models.image_core import ImageCore
from triptych.models.image_source import read_image_info
from triptych.models.info import ImageInfo
from triptych.runtime.request_errors import RequestError
from triptych.runtime.row_types import CoreRows, RowInputs
from triptych.runtime.rows_image import ImageRowMaker

pytestmark = pytest.mark.build

MAX_BYTES, MAX_PIXELS = 200_000, 1_000_000
FACTS = ImageInfo("shorter", (36,), "bicubic", (32, 32), False, 1 / 255, None, None, 32, 32)


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
    return images


def maker(facts: ImageInfo) -> ImageRowMaker:
    """A row maker with settings that have been through JSON."""
    settings = {"image": asdict(facts), "max_image_bytes": MAX_BYTES, "max_pixels": MAX_PIXELS}
    return ImageRowMaker(json.loads(json.dumps(settings)), Path())


def pixels_of(facts: ImageInfo, images: list[bytes]) -> NDArray[np.uint8]:
    """UINT8 `[n, height, width, channels]`."""
    (answer,) = maker(facts).make([RowInputs({"image": images}, {})])
    assert isinstance(answer, CoreRows), answer
    pixels = answer.tensors["pixels"]
    assert pixels.dtype == np.uint8
    assert pixels.shape == (len(images), facts.height, facts.width, facts.channels)
    return pixels


def fault_of(image: bytes) -> str:
    """What the sender of an image is told."""
    (answer,) = maker(FACTS).make([RowInputs({"image": [image]}, {})])
    assert isinstance(answer, RequestError), answer
    return str(answer)


def test_pixels_are_those_of_the_processor(tmp_path: Path) -> None:
    """The builds of tasks compare what a model makes of them with the pipeline of transformers."""
    import transformers as t
    from transformers.image_utils import load_image

    square, images = {"height": 32, "width": 32}, good_images()
    for name, processor in {
        "to one size": t.ViTImageProcessorPil(size=square, resample=2),
        "cropped": t.DeiTImageProcessorPil(size={"height": 38, "width": 40}, crop_size=32),
        "not normalized": t.ViTImageProcessorPil(size=square, do_normalize=False),
        "cropped by a share": t.ConvNextImageProcessorPil(size={"shortest_edge": 45}, crop_pct=0.9),
        "shorter edge": t.ConvNextImageProcessorPil(size={"shortest_edge": 64}),
    }.items():
        processor.save_pretrained(tmp_path / name)
        info = read_image_info(tmp_path / name)
        own = t.AutoImageProcessor.from_pretrained(tmp_path / name, backend="pil")
        core = ImageCore(torch.nn.Identity(), info)
        values = core.values(torch.from_numpy(pixels_of(info, list(images.values()))))
        for kind, row in zip(images, values.numpy(), strict=True):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Pillow's, of transparent palettes
                image = load_image(Image.open(io.BytesIO(images[kind])))
            (wanted,) = own(images=image, return_tensors="np")["pixel_values"]
            np.testing.assert_allclose(row, wanted, rtol=0, atol=2e-6, err_msg=f"{name}, {kind}")


def test_reads_what_processors_mean(tmp_path: Path) -> None:
    """The settings look alike; what they mean is found by trying."""
    import transformers as t

    processors = {
        "enlarged": t.LevitImageProcessorPil(size={"shortest_edge": 48}, crop_size=48),
        "crop_pct": t.PoolFormerImageProcessorPil(size={"shortest_edge": 50}, crop_size=40),
        "cut to size": t.ConvNextImageProcessorPil(size={"shortest_edge": 50}, crop_pct=0.8),
        "warped": t.ConvNextImageProcessorPil(),
        "padded": t.MobileViTImageProcessorPil(size={"shortest_edge": 40}, crop_size=47),
        "offset": t.EfficientNetImageProcessorPil(
            size={"height": 30, "width": 40}, rescale_factor=1 / 127.5, rescale_offset=True
        ),
        "bare": t.CLIPImageProcessorPil(
            do_resize=False, crop_size=40, do_rescale=False, do_normalize=False
        ),
    }
    facts = {}
    for name, processor in processors.items():
        processor.save_pretrained(tmp_path / name)
        facts[name] = read_image_info(tmp_path / name)
    for name, edges, crop in (
        ("enlarged", 54, 48), ("crop_pct", 55, 40), ("cut to size", 62, 50), ("padded", 40, 47)
    ):  # fmt: skip
        assert (facts[name].edges, facts[name].crop) == ((edges,), (crop, crop)), name
    assert (facts["warped"].resize, facts["warped"].edges) == ("exact", (384, 384))
    assert facts["padded"].reverse_channels
    assert facts["padded"].mean is None
    assert (facts["offset"].mean, facts["offset"].std) == ((1.5,) * 3, (0.25,) * 3)
    assert (facts["bare"].resize, facts["bare"].rescale_factor) == ("none", None)


def test_a_processor_that_does_more_is_refused(tmp_path: Path) -> None:
    import transformers as t

    processors = {
        "Perceiver": t.PerceiverImageProcessorPil(),
        "one height and one width": t.ViTImageProcessorPil(do_resize=False),
        "nothing else": t.Siglip2ImageProcessorPil(),
        "describe it completely": t.DonutImageProcessorPil(size={"height": 40, "width": 30}),
    }
    for part, processor in processors.items():
        processor.save_pretrained(tmp_path / part)
        with pytest.raises(UserError, match=part):
            read_image_info(tmp_path / part)
    with pytest.raises(UserError, match=r"preprocessor_config\.json"):
        read_image_info(tmp_path)


def test_a_bad_image_fails_its_own_request_alone() -> None:
    good, bad = encoded(picture(50, 40), "PNG"), b"no image"
    rows = [[good, good], [good, bad, b""], [good]]
    answers = maker(FACTS).make([RowInputs({"image": images}, {}) for images in rows])
    assert isinstance(answers[0], CoreRows)
    assert isinstance(answers[2], CoreRows)
    np.testing.assert_array_equal(answers[0].tensors["pixels"][1], pixels_of(FACTS, [good])[0])
    assert answers[0].width == 0
    assert isinstance(answers[1], RequestError)
    assert str(answers[1]).startswith("row 1: `image` must be")


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
        "cut jpeg": (jpeg[: len(jpeg) // 2], "must be a complete image"),
        "cut png": (png[: len(png) // 2], "must be a complete image"),
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


def chunk(kind: bytes, data: bytes) -> bytes:
    """A part of a PNG file."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_file(width: int, height: int, depth: int, kind: int, data: bytes) -> bytes:
    """A PNG file with `data` for its rows."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0))
    parts = (header, chunk(b"IDAT", zlib.compress(data)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def test_bad_images_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    for name, (image, part) in bad_images().items():
        message = fault_of(image)
        assert message.startswith("row 0: `image` must "), name
        assert part in message, name
    assert capfd.readouterr() == ("", "")


def test_a_bomb_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageFile.ImageFile, "load", None)  # what decodes an image
    for edge in (10_000, 20_000):  # Pillow warns of the first, raises at the second
        bomb = png_file(edge, edge, 1, 0, bytes((edge // 8 + 1) * edge))
        assert len(bomb) < 60_000
        assert f"Given: {edge} x {edge}" in fault_of(bomb)
    assert Image.MAX_IMAGE_PIXELS is not None  # Pillow's own limit holds again for others


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


def test_damaged_files_get_an_answer_or_a_reason(capfd: pytest.CaptureFixture[str]) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = {"exif": exif}
    chance = random.Random(5)
    for format, options in (
        ("JPEG", turned), ("PNG", turned), ("WEBP", turned), ("GIF", {}), ("BMP", {})
    ):  # fmt: skip
        whole = encoded(picture(40, 60), format, **options)
        images = [mutated(whole, chance) for _ in range(300)]
        if format == "PNG":
            images += [mended(image) for image in images]
        answers = maker(FACTS).make([RowInputs({"image": [image]}, {}) for image in images])
        refused = [answer for answer in answers if isinstance(answer, Exception)]
        assert all(isinstance(answer, RequestError) for answer in refused), format
        assert len(refused) > 10, format
    assert capfd.readouterr() == ("", "")
