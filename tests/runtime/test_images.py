"""Encoded images to pixels, against the processors of transformers; and every kind of bad image."""

import io
import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFile

from tests.support.image_files import (
    MAX_BYTES,
    MAX_PIXELS,
    bad_images,
    encoded,
    good_images,
    picture,
    png_file,
)
from tests.support.project import ROOT
from triptych.base.errors import UserError
from triptych.models.image_core import ImageCore
from triptych.models.image_source import read_image_info
from triptych.models.info import ImageInfo
from triptych.runtime.request_errors import RequestError
from triptych.runtime.row_types import CoreRows, RowInputs
from triptych.runtime.rows_image import ImageRowMaker, Job

pytestmark = pytest.mark.build

FACTS = ImageInfo("shorter", (36,), "bicubic", (32, 32), False, 1 / 255, None, None, 32, 32)


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


def test_images_of_a_batch_are_decoded_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of all threads is bounded; each row stays in its place, whatever group it is in."""
    images = [encoded(picture(900, 900, seed=n), "JPEG") for n in range(9)]
    expected = [pixels_of(FACTS, [image])[0] for image in images]
    many = maker(FACTS)
    monkeypatch.setattr(many, "_threads", 4)
    groups, run = list[int](), many._pool.map

    def run_counted(call: Callable[[Job], object], jobs: list[Job]) -> Iterator[object]:
        groups.append(len(jobs))
        return run(call, jobs)

    monkeypatch.setattr(many._pool, "map", run_counted)
    files = [*images[:4], b"no image", *images[4:]]
    answers = many.make([RowInputs({"image": [file]}, {}) for file in files])
    assert isinstance(answers.pop(4), RequestError)
    assert groups == [5, 4, 1]
    for answer, pixels in zip(answers, expected, strict=True):
        assert isinstance(answer, CoreRows)
        np.testing.assert_array_equal(answer.tensors["pixels"][0], pixels)


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 200), pytest.param(200, 10_000, marks=pytest.mark.long)]
)
def test_damaged_files_get_an_answer_or_a_reason(seed: int, count: int) -> None:
    """In a process of its own, whose end by a crash would show; see `image_files.fuzz`."""
    command = [sys.executable, "-m", "tests.support.image_files", str(seed), str(count)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout[-300:] + done.stderr[-3000:]
    assert int(done.stdout.split()[-1]) > count / 4
