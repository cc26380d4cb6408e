"""What the gate compares: the reference against transformers' pipelines, and a run of a graph."""

import ast
import inspect
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mistakes import check_refused
from triptych.base.tensors import FIRST_SEGMENT, INPUT_IDS, ROW_LENGTH, ROW_OFFSET, Tensor, TokenRow
from triptych.core.export.to_onnx import load_model
from triptych.core.gate.reference import (
    OVERRIDES,
    check_tokens,
    load_as_user,
    pixel_values,
    reference_outputs,
)
from triptych.core.gate.runs import open_onnx
from triptych.core.requests import Sample
from triptych.spec.image_source import _load
from triptych.spec.model_info import ModelInfo
from triptych.spec.model_source import read_model_info
from triptych.spec.tasks import find_task
from triptych.spec.tasks.task import Core

pytestmark = pytest.mark.build

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXTS = ["hello", "a much longer text than that, with a few commas, too", "so?", "red and green"]


def save(
    folder: Path, minilm: Path, kind: str, *, types_matter: bool = False, **config: Any
) -> Path:
    """A tiny BERT with large weights, so that scores differ, and MiniLM's tokenizer."""
    import torch
    import transformers

    torch.manual_seed(3)
    settings = transformers.BertConfig(
        **SIZES, intermediate_size=64, initializer_range=0.4, **config
    )
    model = getattr(transformers, f"BertFor{kind}")(settings)
    if types_matter:
        model.base_model.embeddings.token_type_embeddings.weight.data[1] += 3
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(minilm).save_pretrained(folder)
    return folder


def pipeline(task: str, folder: Path, **settings: Any) -> Any:
    import transformers

    return transformers.pipeline(task, model=str(folder), device="cpu", **settings)


def rows_of(folder: Path, texts: list[Any]) -> list[Sample]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows: list[Sample] = []
    for text in texts:
        encoded = tokenizer(*(text if isinstance(text, tuple) else (text,)))
        types = encoded["token_type_ids"]
        rows.append(TokenRow(tuple(encoded["input_ids"]), types.count(0)))
    return rows


def read(folder: Path, task: str, **parameters: Any) -> tuple[ModelInfo, Core]:
    facts = read_model_info(folder, loader=find_task(task).loader)
    return facts, find_task(task).core(facts, parameters)


def by_label(scores: Any, labels: tuple[str, ...]) -> dict[str, float]:
    return dict(zip(labels, scores.tolist(), strict=True))


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        ({"num_labels": 3}, "softmax"),
        ({}, "softmax"),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, "sigmoid"),
        ({"num_labels": 1}, "sigmoid"),
        ({"num_labels": 1, "problem_type": "regression"}, "none"),
        ({"num_labels": 3, "problem_type": "regression"}, "none"),
        ({"id2label": {0: "no", 1: "yes"}, "function_to_apply": "sigmoid"}, "softmax"),
    ],
)
def test_scores_of_texts_and_pairs_are_those_of_the_pipeline(
    tmp_path: Path, minilm_folder: Path, config: dict[str, Any], activation: str
) -> None:
    folder = save(
        tmp_path / "m", minilm_folder, "SequenceClassification", types_matter=True, **config
    )
    facts, core = read(folder, "text-classification")
    assert (facts.activation, facts.segments) == (activation, 2)
    classify = pipeline("text-classification", folder)
    pairs = [(text, "and a second text") for text in TEXTS]
    asked = [*TEXTS, *({"text": one, "text_pair": two} for one, two in pairs)]
    found = reference_outputs(folder, facts, core, rows_of(folder, [*TEXTS, *pairs]))
    for text, (scores,) in zip(asked, found, strict=True):
        wanted = {answer["label"]: answer["score"] for answer in classify(text, top_k=None)}
        assert by_label(scores, facts.labels) == pytest.approx(wanted, abs=1e-6)
    # The types of the second text take part: without them the same tokens score otherwise.
    rows = rows_of(folder, pairs[:1])
    plain = [TokenRow(tuple(row[0]), len(row[0])) for row in rows]
    (without,) = reference_outputs(folder, facts, core, plain)
    assert np.abs(without[0] - found[len(TEXTS)][0]).max() > 1e-3


def test_scores_of_pairs_are_those_of_a_cross_encoder(tmp_path: Path, minilm_folder: Path) -> None:
    import torch
    from sentence_transformers import CrossEncoder

    plain = save(tmp_path / "m", minilm_folder, "SequenceClassification", num_labels=1)
    pairs = [("what is it", text) for text in TEXTS]
    for kind in ("Identity", "Sigmoid"):
        encoder = CrossEncoder(str(plain), device="cpu", activation_fn=getattr(torch.nn, kind)())
        folder = tmp_path / kind
        encoder.save_pretrained(str(folder))
        facts, core = read(folder, "reranking")
        assert core.activation == {"Identity": "none", "Sigmoid": "sigmoid"}[kind]
        found = reference_outputs(folder, facts, core, rows_of(folder, pairs))
        again = CrossEncoder(str(folder), device="cpu").predict(pairs)
        assert np.array(found)[:, 0, 0] == pytest.approx(again, abs=1e-5)


def test_logits_have_no_activation(tmp_path: Path, minilm_folder: Path) -> None:
    labels = {0: "contradiction", 1: "neutral", 2: "entailment"}
    folder = save(tmp_path / "m", minilm_folder, "SequenceClassification", id2label=labels)
    classify = pipeline("text-classification", folder, function_to_apply="none")
    facts, core = read(folder, "zero-shot-classification")
    assert core.returns == "logits"
    found = reference_outputs(folder, facts, core, rows_of(folder, TEXTS))
    for text, (logits,) in zip(TEXTS, found, strict=True):
        wanted = {answer["label"]: answer["score"] for answer in classify(text, top_k=None)}
        assert by_label(logits, facts.labels) == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("aggregation", ["simple", "average"])
def test_scores_of_tokens_are_those_of_the_pipeline(
    tmp_path: Path, minilm_folder: Path, aggregation: str
) -> None:
    # Another activation in the config, which is for whole texts only, must not reach the tokens.
    folder = save(
        tmp_path / "m",
        minilm_folder,
        "TokenClassification",
        num_labels=4,
        problem_type="multi_label_classification",
    )
    facts, core = read(folder, "token-classification", aggregation_strategy=aggregation)
    tag = pipeline("token-classification", folder, ignore_labels=[])
    found = reference_outputs(folder, facts, core, rows_of(folder, TEXTS))
    for text, (scores,) in zip(TEXTS, found, strict=True):
        wanted = tag(text)
        best = scores[1:-1]  # the pipeline leaves the special tokens out
        assert [facts.labels[i] for i in best.argmax(1)] == [word["entity"] for word in wanted]
        assert best.max(1) == pytest.approx([word["score"] for word in wanted], abs=1e-6)


def test_scores_at_the_mask_are_those_of_the_pipeline(tmp_path: Path, minilm_folder: Path) -> None:
    folder = save(tmp_path / "m", minilm_folder, "MaskedLM")
    facts, core = read(folder, "fill-mask")
    assert (facts.mask_token, facts.mask_token_id, facts.unk_token_id) == ("[MASK]", 103, 100)
    texts = ["the [MASK] is red", "[MASK]", "so much for a longer text with a [MASK]."]
    found = reference_outputs(folder, facts, core, rows_of(folder, texts))
    fill = pipeline("fill-mask", folder, top_k=5)
    for text, (scores,) in zip(texts, found, strict=True):
        wanted = fill(text)
        best = np.argsort(-scores)[:5]
        assert best.tolist() == [word["token"] for word in wanted]
        assert scores[best] == pytest.approx([word["score"] for word in wanted], abs=1e-6)
    for text in ("no mask", "[MASK] [MASK]"):
        rows = rows_of(folder, [text])
        check_refused("mask tokens", reference_outputs, folder, facts, core, rows)


def test_spans_are_the_models_own_logits(tmp_path: Path, minilm_folder: Path) -> None:
    import torch
    from transformers import AutoModelForQuestionAnswering, AutoTokenizer

    folder = save(tmp_path / "m", minilm_folder, "QuestionAnswering", types_matter=True)
    pair = ("what is it?", "it is red and green")
    facts, core = read(folder, "question-answering")
    ((start, end),) = reference_outputs(folder, facts, core, rows_of(folder, [pair]))
    with torch.inference_mode():
        output = AutoModelForQuestionAnswering.from_pretrained(folder).eval()(
            **AutoTokenizer.from_pretrained(folder)(*pair, return_tensors="pt")
        )
    assert start == pytest.approx(output.start_logits[0].numpy(), abs=1e-6)
    assert end == pytest.approx(output.end_logits[0].numpy(), abs=1e-6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("modes", [("mean",), ("max", "cls"), ("lasttoken",), ("weightedmean",)])
def test_vectors_are_those_of_sentence_transformers(
    tmp_path: Path, tiny_model: Path, modes: tuple[str, ...]
) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Dense, Normalize, Pooling, Transformer

    pooled = Pooling(32, pooling_mode=modes)
    head = [Dense(32 * len(modes), 16), Normalize()] if len(modes) > 1 else []
    model = SentenceTransformer(modules=[Transformer(str(tiny_model)), pooled, *head], device="cpu")
    model.save(str(tmp_path / "m"))
    facts, core = read(tmp_path / "m", "text-embedding")
    found = reference_outputs(tmp_path / "m", facts, core, rows_of(tmp_path / "m", TEXTS))
    assert np.array(found)[:, 0] == pytest.approx(model.encode(TEXTS), abs=1e-5)


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    folder = tmp_path_factory.mktemp("vision") / "m"
    torch.manual_seed(1)
    config = ViTConfig(
        **SIZES, intermediate_size=64, image_size=16, patch_size=4, num_labels=5,
        initializer_range=0.4,
    )  # fmt: skip
    ViTForImageClassification(config).save_pretrained(folder)
    mean, std = [0.2, 0.5, 0.7], [0.3, 0.4, 0.5]
    size = {"height": 16, "width": 16}
    ViTImageProcessor(size=size, image_mean=mean, image_std=std).save_pretrained(folder)
    return folder


def test_scores_of_images_are_those_of_the_pipeline(vision_model: Path) -> None:
    from PIL import Image

    rng = np.random.default_rng(5)
    images = [rng.integers(0, 256, (16, 16, 3), dtype=np.uint8) for _ in range(3)]
    facts, core = read(vision_model, "image-classification")
    assert facts.hidden_size == 0
    classify = pipeline("image-classification", vision_model, top_k=5)
    found = reference_outputs(vision_model, facts, core, images)
    for image, (scores,) in zip(images, found, strict=True):
        wanted = {answer["label"]: answer["score"] for answer in classify(Image.fromarray(image))}
        assert by_label(scores, facts.labels) == pytest.approx(wanted, abs=1e-5)


def test_pixel_values_without_rescaling_or_normalizing(vision_model: Path) -> None:
    facts = read_model_info(vision_model)
    assert facts.image is not None
    pixels = np.array([[[0, 128, 255]]], dtype=np.uint8)
    plain = replace(facts, image=replace(facts.image, rescale_factor=None, mean=None, std=None))
    assert pixel_values(pixels, plain).tolist() == [[[0]], [[128]], [[255]]]
    with pytest.raises(ValueError, match="no image processor"):
        pixel_values(pixels, replace(facts, image=None))


def test_every_setting_of_ours_is_listed_with_its_reason() -> None:
    """Settings are keywords of calls that load a model, and attributes that are set on it."""
    found = set()
    for function in (load_model, load_as_user, reference_outputs, check_tokens, _load):
        module = inspect.getsource(inspect.getmodule(function) or function)
        (tree,) = (
            node
            for node in ast.walk(ast.parse(module))
            if isinstance(node, ast.FunctionDef) and node.name == function.__name__
        )
        for node in ast.walk(tree):
            match node:
                case ast.Call(keywords=[*words]) if "trust_remote_code" in {w.arg for w in words}:
                    dicts = [w.value for w in words if isinstance(w.value, ast.Dict)]
                    found |= {w.arg for w in words if not isinstance(w.value, ast.Dict)}
                    found |= {key.value for each in dicts for key in each.keys}  # type: ignore[union-attr]
                case ast.Assign(targets=[ast.Attribute(attr=name)]):
                    found.add(name)
    listed = {re.split("[=(]", name)[0].rpartition(".")[2] for name in OVERRIDES}
    assert found - {"output_loading_info"} == listed - {
        *("set_pooling_include_prompt", "truncation", "pixel_values"),
    }


def echo(folder: Path, *, packed: bool) -> Path:
    """A graph that returns its inputs: what each row was, and every place of the batch."""
    import onnx
    from onnx import TensorProto, helper

    def value(name: str, *axes: int | str) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.INT32, axes)

    places = ("tokens",) if packed else ("rows", "tokens")
    inputs = [value("input_ids", *places), value("row_length", "rows", 1)]
    inputs.append(value("first_segment", "rows", 1))
    columns = ["row_length", "first_segment"]
    nodes = [helper.make_node("Identity", ["input_ids"], ["token"])]
    if packed:
        inputs += [value("row_offset", "rows", 1), value("row_stride", "rows")]
        nodes.append(helper.make_node("Constant", [], ["one"], value_ints=[1]))
        nodes.append(helper.make_node("Unsqueeze", ["row_stride", "one"], ["stride"]))
        columns += ["row_offset", "stride"]
    nodes.append(helper.make_node("Concat", columns, ["row"], axis=1))
    outputs = [value("row", "rows", len(columns)), value("token", *places)]
    graph = helper.make_graph(nodes, "echo", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    path = folder / "echo.onnx"
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("per_token", [True, False])
def test_rows_run_as_the_server_passes_them(tmp_path: Path, packed: bool, per_token: bool) -> None:
    rows = [TokenRow(tuple(range(10 * i + 1, 10 * i + 3 + i)), 2 + i % 2) for i in range(6)]
    width = 4 if packed else 2
    offset = (ROW_OFFSET,) if packed else ()
    inputs = (INPUT_IDS, ROW_LENGTH, FIRST_SEGMENT, *offset)
    output = (
        Tensor("token", "INT32", ("tokens",)) if per_token else Tensor("row", "INT32", (width,))
    )
    core = Core("AutoModel", "tokens", "token_scores" if per_token else "logits", (output,))
    run = open_onnx(
        echo(tmp_path, packed=packed),
        core,
        inputs,
        pad_token_id=999,
    )
    results = run(rows)
    assert all(list(result) == [output.name] for result in results)
    if per_token:
        assert [tuple(result["token"].tolist()) for result in results] == [row.ids for row in rows]
        return
    for row, result in zip(rows, results, strict=True):
        assert result["row"].tolist()[:2] == [len(row.ids), row.first_segment]
    if packed:
        # Requests of one, three and two rows of 2 to 7 tokens.
        placed = [tuple(result["row"][2:].tolist()) for result in results]
        assert placed == [(0, 2), (0, 4), (-1, 4), (-1, 4), (0, 7), (-1, 7)]


def test_images_run_as_one_batch(tmp_path: Path) -> None:
    import onnx
    from onnx import TensorProto, helper

    shape = ("rows", 2, 2, 3)
    given = helper.make_tensor_value_info("pixels", TensorProto.UINT8, shape)
    returned = helper.make_tensor_value_info("seen", TensorProto.UINT8, shape)
    node = helper.make_node("Identity", ["pixels"], ["seen"])
    graph = helper.make_graph([node], "echo", [given], [returned])
    opset = helper.make_opsetid("", 18)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=10), tmp_path / "m.onnx")
    pixels = Tensor("pixels", "UINT8", (2, 2, 3))
    core = Core("AutoModel", "image", "logits", (Tensor("seen", "UINT8", (2, 2, 3)),))
    run = open_onnx(tmp_path / "m.onnx", core, (pixels,), pad_token_id=0)
    images: list[Sample] = [np.full((2, 2, 3), i, dtype=np.uint8) for i in range(3)]
    assert [int(row["seen"].max()) for row in run(images)] == [0, 1, 2]
