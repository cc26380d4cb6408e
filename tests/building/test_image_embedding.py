"""Vectors of images on a real tritonserver, equal to those of transformers."""

import asyncio
import io
import json
import shutil
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from gradio_client import handle_file
from gradio_client.exceptions import AppError
from numpy.typing import NDArray

from tests.support.demo_pages import ask, open_demo
from tests.support.image_models import KINDS, TOKENIZERS, save_image_model
from tests.support.mistakes import refusal
from tests.support.own_models import monitor_samples
from tests.support.project import build_into, selected_names, traffic_texts
from tests.support.task_reference import image_bytes
from triptych.client import AsyncClient, Client, InvalidRequestError
from triptych.gateway.app import make_app
from triptych.gateway.http import Shared
from triptych.gateway.pipelines import Pipelines
from triptych.runtime.sampling import FOLDER_VARIABLE
from triptych.serving.server import Server
from triptych.spec.spec import load_spec

pytestmark = [pytest.mark.server, pytest.mark.build]
IMAGES = image_bytes()
TEXTS = [*traffic_texts()[:12], "", "a <|endoftext|> within", "word " * 90, "Ärger 漢字 🙂"]
EVERYDAY = ("clip",)
"""Models that are served in each run; the others are for the long tests."""
POOLINGS = {"vit_head": "cls"}
CASES = [pytest.param(name, marks=() if name in EVERYDAY else pytest.mark.long) for name in KINDS]


def write_pipeline(folder: Path, kind: str, images: Sequence[bytes] = IMAGES, **more: Any) -> Path:
    """Write a model of a kind and a pipeline with images as traffic; return its folder."""
    folder.mkdir(parents=True)
    spec = {"task": "image-embedding", "model": {"source": "model"}, **more}
    (folder / "pipeline.yaml").write_text(json.dumps(spec))
    save_image_model(kind, folder / "model")
    for number, data in enumerate(images):
        (folder / f"{number}.img").write_bytes(data)
    rows = [json.dumps({"image": f"{number}.img"}) for number in range(len(images))]
    (folder / "traffic.jsonl").write_text("\n".join(rows))
    return folder


def write_texts(folder: Path, model: Path, **more: Any) -> Path:
    """Write a pipeline for the texts of a model with texts as traffic; return its folder."""
    folder.mkdir(parents=True)
    spec = {"task": "text-embedding", "model": {"source": str(model)}, **more}
    (folder / "pipeline.yaml").write_text(json.dumps(spec))
    rows = [json.dumps({"text": text}) for text in TEXTS]
    (folder / "traffic.jsonl").write_text("\n".join(rows))
    return folder


@pytest.fixture(scope="module")
def repository(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("images")
    for kind in [each for each in KINDS if each in selected_names(request)]:
        paired: dict[str, Any] = {"pair_with": f"{kind}_text"} if kind in TOKENIZERS else {}
        folder = write_pipeline(base / "pipelines" / kind, kind, **paired)
        built = build_into(folder, base / "repository")
        assert built.plan.info.pooling == (POOLINGS.get(kind, "pooler"),)
        if kind in TOKENIZERS:
            texts = write_texts(base / f"pipelines/{kind}_text", folder / "model", pair_with=kind)
            assert build_into(texts, base / "repository").plan.layout == "packed"
    return base / "repository"


def reference(folder: Path, images: Sequence[bytes]) -> NDArray[np.float32]:
    """Return the vectors that transformers computes of images one by one."""
    import torch
    from PIL import Image
    from transformers import AutoImageProcessor, AutoModel
    from transformers.image_utils import load_image

    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    model = AutoModel.from_pretrained(folder).eval()
    vectors = []
    with torch.inference_mode():
        for data in images:
            image = load_image(Image.open(io.BytesIO(data)))
            inputs = processor(images=image, return_tensors="pt")
            if hasattr(model, "get_image_features"):
                vector = model.get_image_features(**inputs).pooler_output
            elif folder.parent.name in POOLINGS:
                vector = model(**inputs).last_hidden_state[:, 0]
            else:
                vector = model(**inputs).pooler_output
            vectors.append(vector.flatten().numpy())
    return np.stack(vectors)


@pytest.mark.parametrize("name", CASES)
def test_vectors_are_those_of_transformers(server: Server, repository: Path, name: str) -> None:
    from PIL import Image

    wanted = reference(repository.parent / "pipelines" / name / "model", IMAGES)
    with Client(name, server.grpc_url) as client:
        together = client.embed_images(IMAGES)
        alone = [client.embed_images([data])[0] for data in IMAGES]
        unit = client.embed_images(IMAGES, normalize_embeddings=True)
        short = client.embed_images(IMAGES, dimensions=8)
        signs = client.embed_images(IMAGES, encoding="ubinary")
        first = repository.parent / "pipelines" / name / "0.img"
        opened = Image.open(io.BytesIO(IMAGES[1]))
        forms = client.embed_images([first, str(first), opened, np.asarray(opened)])
        assert client.embed_images([]).shape == (0, wanted.shape[1])
        results = client.embed_images_each([IMAGES[0], b"no image", IMAGES[1]])
        with pytest.raises(InvalidRequestError, match="row 1: `image` must be str or bytes"):
            client.embed_images([IMAGES[0], 3])
    difference = max(np.abs(each - wanted).max() for each in (together, np.stack(alone)))
    print(f"{name}: {difference:.1e}")
    assert difference <= 1e-5
    lengths = np.linalg.norm(wanted, axis=1, keepdims=True)
    assert np.abs(unit - wanted / lengths).max() <= 1e-5
    assert short.shape == (len(IMAGES), 8)
    assert (signs == np.packbits(wanted > 0, axis=1)).mean() > 0.99
    assert np.abs(forms - wanted[[0, 0, 1, 1]]).max() <= 1e-5
    assert [isinstance(each, Exception) for each in results] == [False, True, False]
    good = [each for each in results if not isinstance(each, Exception)]
    assert np.abs(np.stack(good) - wanted[:2]).max() <= 1e-5
    similar = wanted @ wanted.T / (lengths * lengths.T)
    assert similar.min() < 0.999  # the model tells images apart


@pytest.mark.parametrize("name", [case for case in CASES if case.values[0] in TOKENIZERS])
def test_texts_have_vectors_in_the_space_of_the_images(
    server: Server, repository: Path, name: str
) -> None:
    import torch
    from transformers import AutoModel, AutoTokenizer

    folder = repository.parent / "pipelines" / name / "model"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    padding = "max_length" if name == "siglip" else False
    wanted = []
    with torch.inference_mode():
        for text in TEXTS:
            inputs = tokenizer(text, truncation=True, padding=padding, return_tensors="pt")
            wanted.append(model.get_text_features(**inputs).pooler_output[0].numpy())
        padded = tokenizer(TEXTS, truncation=True, padding=padding or True, return_tensors="pt")
        batch = model.get_text_features(**padded).pooler_output.numpy()
    with Client(f"{name}_text", server.grpc_url) as client:
        together = client.embed(TEXTS)
        alone = [client.embed([text])[0] for text in TEXTS]
    with Client(name, server.grpc_url) as client:
        assert client.embed_images(IMAGES[:1]).shape[1] == together.shape[1]
    difference = max(np.abs(each - wanted).max() for each in (together, np.stack(alone), batch))
    print(f"{name}_text: {difference:.1e}")
    assert difference <= 1e-5


@pytest.mark.parametrize("name", [case for case in CASES if case.values[0] in TOKENIZERS])
def test_labels_of_the_caller_have_the_scores_of_transformers(
    server: Server, repository: Path, name: str
) -> None:
    from PIL import Image
    from transformers import AutoImageProcessor, pipeline

    folder = repository.parent / "pipelines" / name / "model"
    reference = pipeline(
        "zero-shot-image-classification",
        str(folder),
        image_processor=AutoImageProcessor.from_pretrained(folder, backend="pil"),
        device="cpu",
    )
    labels, template = ["a cat", "ein Hund", "", "a cat"], "Look: {}!"
    opened = [Image.open(io.BytesIO(data)) for data in IMAGES[:4]]
    cases: list[tuple[list[str], dict[str, Any]]] = [
        (labels, {}),
        (labels, {"hypothesis_template": template}),
        ([f"label {number}" for number in range(1000)], {}),
    ]
    largest = 0.0
    with Client(name, server.grpc_url) as client:
        for given, options in cases:
            wanted = reference(opened, candidate_labels=given, **options)
            got = client.classify_images_zero_shot(IMAGES[:4], given, **options)
            for some, other in zip(got, wanted, strict=True):
                assert len(some) == len(other) == len(given)
                assert [each.score for each in some] == sorted((s for _, s in some), reverse=True)
                own = {each.label: each.score for each in some}
                largest = max(largest, *(abs(own[each["label"]] - each["score"]) for each in other))
        again = client.classify_images_zero_shot_each([b"no image", IMAGES[0]], labels)
        assert isinstance(again[0], InvalidRequestError)
        assert again[1] == client.classify_images_zero_shot(IMAGES[:1], labels)[0]
        assert client.classify_images_zero_shot([], labels) == []
        assert client.classify_images_zero_shot_each([], labels) == []
        for wrong in ([], None, "cat", ["a", 3], ["x"] * 10_001):
            with pytest.raises(InvalidRequestError, match="`candidate_labels` must be a list of 1"):
                client.classify_images_zero_shot(IMAGES[:1], wrong)  # type: ignore[arg-type]
        for bad in ("a photo", "{} {0}", "{{}}"):
            with pytest.raises(InvalidRequestError, match="`hypothesis_template` must have"):
                client.classify_images_zero_shot(IMAGES[:1], labels, hypothesis_template=bad)
    print(f"{name}: {largest:.1e}")
    assert largest <= 1e-5

    async def ask() -> object:
        async with AsyncClient(name, server.grpc_url) as other:
            return await other.classify_images_zero_shot(IMAGES[:1], labels)

    assert asyncio.run(ask()) == again[1:]


@pytest.mark.long
@pytest.mark.parametrize("name", EVERYDAY)
def test_the_page_compares_images_and_chooses_labels(
    server: Server, repository: Path, name: str
) -> None:
    folder, labels = repository.parent / "pipelines" / name, ["a cat", "ein Hund"]
    files = [handle_file(folder / f"{number}.img") for number in range(2)]
    with open_demo(load_spec(folder), folder, repository, server.grpc_url) as page:
        shown, lines, *_ = ask(page, files[0], files[1], "\n".join(labels), "", *[""] * 3)
        alone, one, *_ = ask(page, files[0], None, "", "", *[""] * 3)
        with pytest.raises(AppError, match="`hypothesis_template` must have"):
            ask(page, files[0], None, "a cat", "a photo", *[""] * 3)
    with Client(name, server.grpc_url) as client:
        (wanted,) = client.classify_images_zero_shot(IMAGES[:1], labels)
        first, second = client.embed_images(IMAGES[:2], normalize_embeddings=True)
    assert shown["label"] == wanted[0].label
    found = {each["label"]: each["confidence"] for each in shown["confidences"]}
    assert found == pytest.approx(dict(wanted), abs=1e-6)
    similar = float(lines.partition("both vectors: ")[2].split()[0])
    assert similar == pytest.approx(float(first @ second), abs=1e-4)
    assert not alone
    assert "both vectors" not in one


def test_the_gateway_takes_images_as_data_urls(server: Server) -> None:
    files = IMAGES[:3]
    urls = [f"data:image/png;base64,{b64encode(data).decode()}" for data in files]
    forms: list[list[object]] = [
        [{"image": url} for url in urls],
        [{"type": "image_url", "image_url": {"url": url}} for url in urls],
    ]
    with Client("clip", server.grpc_url) as client:
        wanted = client.embed_images(files)

    async def post(given: object) -> httpx2.Response:
        pipelines = Pipelines(["clip"], {}, None, {"url": server.grpc_url})
        transport = httpx2.ASGITransport(make_app(pipelines, Shared()))
        async with httpx2.AsyncClient(transport=transport, base_url="http://gateway") as http:
            return await http.post("/v1/embeddings", json={"model": "clip", "input": given})

    for form in forms:
        data = asyncio.run(post(form)).json()["data"]
        assert np.abs([each["embedding"] for each in data] - wanted).max() <= 1e-6
    for url in ("http://127.0.0.1/a.png", "data:image/png;base64,§", "data:text/plain;base64,aa=="):
        answer = asyncio.run(post([forms[0][0], {"image": url}]))
        assert (answer.status_code, "input[1]" in answer.text) == (400, True), answer.text


@pytest.mark.long
@pytest.mark.parametrize("form", ["0_CLIPModel", "CLIPModel", "Transformer"])
def test_a_pair_of_sentence_transformers_has_its_vectors(tmp_path: Path, form: str) -> None:
    from PIL import Image
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    plain, model = save_image_model("clip", tmp_path / "plain"), tmp_path / "model"
    if form == "0_CLIPModel":  # of versions before 5.4
        shutil.copytree(plain, model / form)
        kind = "sentence_transformers.models.CLIPModel"
        listed = [{"idx": 0, "name": "0", "path": form, "type": kind}]
        (model / "modules.json").write_text(json.dumps(listed))
    else:
        module = getattr(modules, form)(str(plain))
        SentenceTransformer(modules=[module], device="cpu").save(str(model))
    folders, source = tmp_path / "pipelines", {"source": str(model)}
    for folder in (
        write_pipeline(folders / "pictures", "clip", pair_with="words", model=source),
        write_texts(folders / "words", model, pair_with="pictures"),
    ):
        assert build_into(folder, tmp_path / "repository").gate.passed
    encoder = SentenceTransformer(str(model), device="cpu")
    opened = [Image.open(io.BytesIO(data)).convert("RGB") for data in IMAGES[:2]]
    with Server(tmp_path / "repository") as server:
        with Client("words", server.grpc_url) as client:
            assert np.abs(client.embed(TEXTS) - encoder.encode(TEXTS)).max() <= 1e-5
        with Client("pictures", server.grpc_url) as client:
            assert np.abs(client.embed_images(opened) - encoder.encode(opened)).max() <= 1e-5
            assert len(client.classify_images_zero_shot(opened, ["a", "b"])) == 2


@pytest.mark.long
def test_monitor_compares_images(tmp_path: Path) -> None:
    sampling = {"sample": {"rate": 1.0, "window_s": 0.2}}
    folder = write_pipeline(tmp_path / "pipelines/vit", "vit", serving=sampling)
    build_into(folder, tmp_path / "repository")
    environment = {FOLDER_VARIABLE: str(tmp_path / "samples")}
    with (
        Server(tmp_path / "repository", environment=environment) as server,
        Client("vit", server.grpc_url) as client,
    ):
        client.embed_images(IMAGES)
        found = monitor_samples(tmp_path, "vit", len(IMAGES))
    assert found["rows"] >= len(IMAGES) - 1  # without that of the health check
    assert (found["lengths"], found["distributions"]) == (None, [])


def test_a_pooling_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    for kind, pooling, rule in (
        ("vit_head", "pooler", "must be one of cls, mean"),
        ("convnext", "cls", "must be one of pooler, mean"),
        ("clip", "mean", "must be one of pooler"),
    ):
        folder = write_pipeline(tmp_path / kind, kind, image={"pooling": pooling})
        error = refusal(build_into, folder, tmp_path / "repository")
        assert (error.field, error.given) == ("image.pooling", pooling)
        assert error.rule.startswith(rule)


def test_a_mask_that_hides_padding_which_the_model_reads_is_refused(tmp_path: Path) -> None:
    folder = save_image_model("siglip", tmp_path / "model")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["model_input_names"] = ["input_ids", "attention_mask"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    texts = write_texts(tmp_path / "texts", folder)
    error = refusal(build_into, texts, tmp_path / "repository")
    assert error.field == "model_input_names in tokenizer_config.json"
    texts = write_texts(tmp_path / "short", save_image_model("siglip", tmp_path / "other"))
    error = refusal(build_into, texts, tmp_path / "repository", "tokenizer.max_length=32")
    assert (error.field, error.rule[:10]) == ("tokenizer.max_length", "must be 64")
