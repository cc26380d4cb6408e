"""Encoded images to pixels to logits, against transformers' own; and every kind of bad image."""

import io
import json
import random
import struct
import warnings
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFile

from triptych.base.errors import UserError
from triptych.runtime.request_errors import RequestError
from triptych.runtime.row_types import CoreRows, RowInputs
from triptych.runtime.rows_image import ImageRowMaker
from triptych.spec.image_core import ImageCore
from triptych.spec.image_source import read_image_info
from triptych.spec.model_info import ImageInfo

pytestmark = pytest.mark.build

CLASSES = 7
MAX_BYTES, MAX_PIXELS = 200_000, 1_000_000
FACTS = ImageInfo("shorter", (36,), "bicubic", (32, 32), False, 1 / 255, None, None, 32, 32)


class Made(NamedTuple):
    """A random-weight model, and what was read of its processor's files."""

    model: Any
    folder: Path
    facts: ImageInfo


def architectures() -> dict[str, tuple[Any, Any]]:
    """Config and processor by name."""
    import transformers as t

    square = {"height": 32, "width": 32}
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "image_size": 32,
        "patch_size": 8,
    }
    windows = {"depths": [1, 1], "num_heads": [2, 2], "window_size": 4, "patch_size": 4}
    stages = {"hidden_sizes": [8, 16], "depths": [1, 1]}
    return {
        "vit": (t.ViTConfig(**vision), t.ViTImageProcessorPil(size=square, resample=2)),
        "deit": (
            t.DeiTConfig(**vision, architectures=["DeiTForImageClassification"]),
            t.DeiTImageProcessorPil(size={"height": 38, "width": 40}, crop_size=32),
        ),
        "swin": (
            t.SwinConfig(embed_dim=16, image_size=32, **windows),
            t.ViTImageProcessorPil(size=square, do_normalize=False),
        ),
        "resnet": (
            t.ResNetConfig(embedding_size=8, **stages),
            t.ConvNextImageProcessorPil(size={"shortest_edge": 45}, crop_pct=0.9),
        ),
        "convnext": (
            t.ConvNextConfig(num_stages=2, **stages),
            t.ConvNextImageProcessorPil(size={"shortest_edge": 64}),
        ),
    }


@pytest.fixture(scope="module", params=("vit", "deit", "swin", "resnet", "convnext"))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    from transformers import AutoModelForImageClassification

    name = request.param
    config, processor = architectures()[name]
    config.num_labels = CLASSES
    torch.manual_seed(3)
    model = AutoModelForImageClassification.from_config(config).eval()
    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)][-1]
    with torch.no_grad():  # else every image gets much the same scores
        linear.weight *= 60
    folder = tmp_path_factory.mktemp(name)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return Made(model, folder, read_image_info(folder))


def picture(height: int, width: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Patches of color, sharp and smooth."""
    small = np.random.default_rng(seed).integers(0, 256, (9, 7, 4), dtype=np.uint8)
    image = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
    return (image if mode.endswith("A") else image.convert("RGB")).convert(mode)


def encoded(image: Image.Image, format: str, **options: Any) -> bytes:
    """The image's file."""
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


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


def test_scores_are_those_of_the_pipeline(made: Made) -> None:
    from transformers import AutoImageProcessor, pipeline

    processor = AutoImageProcessor.from_pretrained(made.folder, backend="pil")
    classify = pipeline("image-classification", model=made.model, image_processor=processor)
    images = good_images()
    core = ImageCore(made.model, made.facts).eval()
    with torch.no_grad():
        logits = core(torch.from_numpy(pixels_of(made.facts, list(images.values()))))
    scores = torch.softmax(logits, -1).numpy()
    assert np.ptp(scores, axis=0).max() > 0.05  # the images do matter
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the pipeline's, of transparent palettes
        answers = [
            classify(Image.open(io.BytesIO(data)), top_k=CLASSES) for data in images.values()
        ]
    for name, answer, row in zip(images, answers, scores, strict=True):
        expected = {choice["label"]: choice["score"] for choice in answer}
        wanted = [expected[made.model.config.id2label[index]] for index in range(CLASSES)]
        np.testing.assert_allclose(row, wanted, rtol=0, atol=1e-4, err_msg=name)


def test_values_are_the_processors_to_a_millionth(made: Made) -> None:
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(made.folder, backend="pil")
    pixels = np.arange(256, dtype=np.uint8).repeat(3).reshape(1, 16, 16, 3)
    as_is = {"do_resize": False, "do_center_crop": False, "return_tensors": "np"}
    expected = processor(images=pixels[0], **as_is)["pixel_values"]
    values = ImageCore(torch.nn.Identity(), made.facts).values(torch.from_numpy(pixels))
    np.testing.assert_allclose(values.numpy(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "made", [pytest.param("swin", marks=pytest.mark.long), "resnet"], indirect=True
)
def test_exports_with_any_batch_size(made: Made, tmp_path: Path) -> None:
    """The builds of image-classification export a ViT."""
    import onnxruntime

    core = ImageCore(made.model, made.facts).eval()
    pixels = torch.from_numpy(pixels_of(made.facts, list(good_images().values())[:5]))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        program: Any = torch.onnx.export(
            core,
            (pixels[:3],),
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim.DYNAMIC},),
            input_names=["pixels"],
            output_names=["logits"],
            verbose=False,
        )
        wanted = core(pixels).numpy()
    program.save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    assert session.get_inputs()[0].type == "tensor(uint8)"
    for batch in (1, 5):
        (logits,) = session.run(None, {"pixels": pixels[:batch].numpy()})
        np.testing.assert_allclose(logits, wanted[:batch], rtol=1e-4, atol=1e-4)


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
    assert (facts["enlarged"].edges, facts["enlarged"].crop) == ((54,), (48, 48))
    assert (facts["crop_pct"].edges, facts["crop_pct"].crop) == ((55,), (40, 40))
    assert (facts["cut to size"].edges, facts["cut to size"].crop) == ((62,), (50, 50))
    assert (facts["warped"].resize, facts["warped"].edges) == ("exact", (384, 384))
    assert (facts["padded"].edges, facts["padded"].crop) == ((40,), (47, 47))
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
    assert (answers[0].metadata, answers[0].width) == ([], 0)
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


@pytest.mark.parametrize("name", bad_images())
def test_bad_images_are_refused(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    image, part = bad_images()[name]
    message = fault_of(image)
    assert message.startswith("row 0: `image` must ")
    assert part in message
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "edge", [10_000, 20_000]
)  # Pillow warns of the first, raises at the second
def test_a_bomb_is_refused_before_it_is_decoded(edge: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = png_file(edge, edge, 1, 0, bytes((edge // 8 + 1) * edge))
    assert len(bomb) < 60_000
    monkeypatch.setattr(ImageFile.ImageFile, "load", None)  # what decodes an image
    assert f"Given: {edge} x {edge}" in fault_of(bomb)
    assert Image.MAX_IMAGE_PIXELS is not None  # Pillow's own limit holds again for others


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Some bytes changed, left out, doubled or cut off."""
    damaged = bytearray(data)
    for _ in range(chance.randint(1, 8)):
        place = chance.randrange(len(damaged))
        length = chance.randint(1, 20)
        way = chance.randrange(5)
        if way == 0:
            del damaged[place : place + length]
        elif way == 1:
            damaged[place:place] = damaged[place : place + length]
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


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
def test_damaged_files_get_an_answer_or_a_reason(
    format: str, capfd: pytest.CaptureFixture[str]
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    options: dict[str, Any] = {"exif": exif} if format in ("JPEG", "PNG", "WEBP") else {}
    whole = encoded(picture(40, 60), format, **options)
    chance = random.Random(5)
    images = [mutated(whole, chance) for _ in range(300)]
    if format == "PNG":
        images += [mended(image) for image in images]
    answers = maker(FACTS).make([RowInputs({"image": [image]}, {}) for image in images])
    refused = [answer for answer in answers if isinstance(answer, Exception)]
    assert all(isinstance(answer, RequestError) for answer in refused)
    assert len(refused) > 10
    assert capfd.readouterr() == ("", "")
