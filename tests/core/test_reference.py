"""What the gate compares with: rows and results are those of the library that a user has."""

import ast
import inspect
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.checkpoint_files import change, write
from tests.support.mistakes import check_refused
from tests.support.project import quiet, write_pipeline
from tests.support.task_models import MODELS
from triptych.base.errors import Progress
from triptych.base.tensors import TokenRow
from triptych.core.gate.cached import Gate
from triptych.core.gate.reference import (
    OVERRIDES,
    check_tokens,
    load_as_user,
    pixel_values,
    reference_outputs,
)
from triptych.core.inputs import PipelineInputs, read_inputs
from triptych.core.precision.stage import full_precision
from triptych.core.requests import Sample, rows_of
from triptych.models.image_source import _load
from triptych.models.info import ImageInfo, Loader, ModelInfo
from triptych.models.loading import _own_settings, load_model
from triptych.models.source import read_model_info
from triptych.spec.spec import load_spec
from triptych.tasks.catalog import find_task
from triptych.tasks.task import Core

pytestmark = [pytest.mark.build, pytest.mark.filterwarnings("ignore")]

SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SHORT_TEXTS = [
    "hello",
    "a much longer text than that, with a few commas, too",
    "so?",
    "red and green",
]


def save(folder: Path, minilm: Path, kind: str, **config: Any) -> Path:
    """A tiny BERT with large weights, so that scores differ, and MiniLM's tokenizer."""
    import torch
    import transformers

    torch.manual_seed(3)
    settings = transformers.BertConfig(
        **SIZES, intermediate_size=64, initializer_range=0.4, **config
    )
    model = getattr(transformers, f"BertFor{kind}")(settings)
    model.base_model.embeddings.token_type_embeddings.weight.data[1] += 3
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(minilm).save_pretrained(folder)
    return folder


def pipeline(task: str, folder: Path, **settings: Any) -> Any:
    import transformers

    return transformers.pipeline(task, model=str(folder), device="cpu", **settings)


def token_rows(folder: Path, texts: list[Any]) -> list[Sample]:
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


ACTIVATIONS: list[tuple[dict[str, Any], str]] = [
    ({}, "softmax"),
    ({"num_labels": 3, "problem_type": "multi_label_classification"}, "sigmoid"),
    ({"num_labels": 1}, "sigmoid"),
    ({"num_labels": 1, "problem_type": "regression"}, "none"),
    ({"id2label": {0: "no", 1: "yes"}, "function_to_apply": "sigmoid"}, "softmax"),
    ({"num_labels": 3, "problem_type": "regression"}, "none"),
]
"""Settings of a model, and what its scores went through."""


def test_scores_of_texts_and_pairs_are_those_of_the_pipeline(
    tmp_path: Path, minilm_folder: Path
) -> None:
    pairs = [(text, "and a second text") for text in SHORT_TEXTS]
    asked = [*SHORT_TEXTS, *({"text": one, "text_pair": two} for one, two in pairs)]
    for number, (config, activation) in enumerate(ACTIVATIONS):
        folder = save(tmp_path / str(number), minilm_folder, "SequenceClassification", **config)
        facts, core = read(folder, "text-classification")
        assert (facts.activation, facts.segments) == (activation, 2)
        classify = pipeline("text-classification", folder)
        found = reference_outputs(folder, facts, core, token_rows(folder, [*SHORT_TEXTS, *pairs]))
        for text, (scores,) in zip(asked, found, strict=True):
            wanted = {answer["label"]: answer["score"] for answer in classify(text, top_k=None)}
            by_label = dict(zip(facts.labels, scores.tolist(), strict=True))
            assert by_label == pytest.approx(wanted, abs=1e-6), config
    # The types of the second text take part: without them the same tokens score otherwise.
    (row, *_) = token_rows(folder, pairs[:1])
    plain = TokenRow(tuple(row[0]), len(row[0]))
    (without,) = reference_outputs(folder, facts, core, [plain])
    assert np.abs(without[0] - found[len(SHORT_TEXTS)][0]).max() > 1e-3


def test_scores_of_tokens_are_those_of_the_pipeline(tmp_path: Path, minilm_folder: Path) -> None:
    """The activation in the config is for whole texts only."""
    config: dict[str, Any] = {"num_labels": 4, "problem_type": "multi_label_classification"}
    folder = save(tmp_path / "m", minilm_folder, "TokenClassification", **config)
    facts, core = read(folder, "token-classification", aggregation_strategy="average")
    tag = pipeline("token-classification", folder, ignore_labels=[])
    found = reference_outputs(folder, facts, core, token_rows(folder, SHORT_TEXTS))
    for text, (scores,) in zip(SHORT_TEXTS, found, strict=True):
        wanted = tag(text)
        best = scores[1:-1]  # the pipeline leaves the special tokens out
        assert [facts.labels[i] for i in best.argmax(1)] == [word["entity"] for word in wanted]
        assert best.max(1) == pytest.approx([word["score"] for word in wanted], abs=1e-6)


def test_a_row_has_one_mask(tmp_path: Path, minilm_folder: Path) -> None:
    folder = save(tmp_path / "m", minilm_folder, "MaskedLM")
    facts, core = read(folder, "fill-mask")
    assert (facts.mask_token, facts.mask_token_id, facts.unk_token_id) == ("[MASK]", 103, 100)
    for text in ("no mask", "[MASK] [MASK]"):
        rows = token_rows(folder, [text])
        check_refused("mask tokens", reference_outputs, folder, facts, core, rows)


def test_pixel_values_without_rescaling_or_normalizing() -> None:
    image = ImageInfo("none", (), "bilinear", None, False, None, None, None, height=1, width=3)
    info = ModelInfo("", "ViTForImageClassification", 32, 1, 0, image=image)
    pixels = np.array([[[0, 128, 255]]], dtype=np.uint8)
    assert pixel_values(pixels, info).tolist() == [[[0]], [[128]], [[255]]]
    with pytest.raises(ValueError, match="no image processor"):
        pixel_values(pixels, replace(info, image=None))


def test_every_setting_of_ours_is_listed_with_its_reason() -> None:
    """Settings are keywords of calls that load a model, and attributes that are set on it."""
    found = set()
    functions = (load_model, _own_settings, load_as_user, reference_outputs, check_tokens, _load)
    for function in functions:
        for node in ast.walk(ast.parse(inspect.getsource(function))):
            match node:
                case ast.Call(keywords=[*words]) if "trust_remote_code" in {w.arg for w in words}:
                    dicts = [w.value for w in words if isinstance(w.value, ast.Dict)]
                    found |= {w.arg for w in words if w.arg and not isinstance(w.value, ast.Dict)}
                    found |= {key.value for each in dicts for key in each.keys}  # type: ignore[union-attr]
                case ast.Return(value=ast.Dict(keys=keys)) if function is _own_settings:
                    found |= {key.value for key in keys}  # type: ignore[union-attr]
                case ast.Assign(targets=[ast.Attribute(attr=name)]):
                    found.add(name)
    listed = {re.split("[=(]", name)[0].rpartition(".")[2] for name in OVERRIDES}
    assert found - {"output_loading_info"} == listed - {
        "set_pooling_include_prompt",
        "truncation",
        "pixel_values",
    }


SENTENCE, TRANSFORMER = "config_sentence_transformers.json", "sentence_bert_config.json"
POOLING = "1_Pooling/config.json"
IDENTITY = "torch.nn.modules.linear.Identity"
LONG = "every word of this sentence counts " * 20
TEXTS = [
    f"{number} {text}"
    for number in range(2)
    for text in ("hello", "ΑΣ ΟΔΟΣ, İstanbul [SEP] and [MASK] and [sep]", "Red AND Green", LONG)
]
"""Two thirds of them are rows of the gate."""


def inputs_of(
    folder: Path, model: Path, task: str, progress: Progress = quiet, **spec: Any
) -> PipelineInputs:
    """What a build reads for `TEXTS`."""
    write_pipeline(folder, task=task, model={"source": str(model)}, **spec)
    pairs = {"text_pair": "And a second text"} if task == "reranking" else {}
    lines = [json.dumps({"text": text, **pairs}) for text in TEXTS]
    (folder / "traffic.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return read_inputs(load_spec(folder), progress)


def found_by(inputs: PipelineInputs) -> np.ndarray[Any, Any]:
    """The reference's results for the rows of a build."""
    plan, rows, loader = inputs.plan, rows_of(inputs.requests), inputs.plan.task.loader
    found = reference_outputs(inputs.model_folder, plan.info, plan.core, rows, loader=loader)
    return np.array(found)[:, 0]


def wanted_by(inputs: PipelineInputs, model: Path, task: str) -> np.ndarray[Any, Any]:
    """The results of the library that a user of the task has."""
    import transformers
    from sentence_transformers import CrossEncoder, SentenceTransformer

    texts = [tuple(map(str, request.inputs.values())) for request in inputs.requests]
    if task == "text-embedding":
        embedder = SentenceTransformer(str(model), device="cpu")
        return np.array(embedder.encode([text for (text,) in texts]))
    if task == "reranking":
        return np.array(CrossEncoder(str(model), device="cpu").predict(texts))[:, None]
    classify = transformers.pipeline(task, model=str(model), device="cpu")
    told = classify([text for (text,) in texts], top_k=None, truncation=True)
    return np.array(
        [[one["score"] for one in sorted(row, key=lambda one: one["label"])] for row in told]
    )


def check_equal(inputs: PipelineInputs, model: Path, task: str, what: object) -> None:
    """Check that a build's rows and results are those of the user's library."""
    check_tokens(inputs)
    found, wanted = found_by(inputs), wanted_by(inputs, model, task)
    assert found.shape == wanted.shape, what
    assert np.abs(found - wanted).max() <= 1e-5, what


def save_classifier(model: Path, **config: Any) -> None:
    """Put a random classifier in place of the model, with BERT's config and these settings."""
    import torch
    import transformers

    torch.manual_seed(2)
    settings = transformers.BertConfig.from_pretrained(model, initializer_range=0.4, **config)
    transformers.BertForSequenceClassification(settings).save_pretrained(model)


@pytest.fixture
def sentences(tmp_path: Path, tiny_model: Path, minilm_folder: Path) -> Path:
    """A folder as SentenceTransformer saves it; the tokenizer keeps capital letters apart."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Normalize, Pooling, Transformer

    modules = [Transformer(str(tiny_model)), Pooling(32), Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save(str(tmp_path / "m"))
    tokenizer = json.loads((tmp_path / "m/tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["normalizer"]["lowercase"] = False
    write(tmp_path / "m/tokenizer.json", tokenizer)
    change(tmp_path / "m/tokenizer_config.json", do_lower_case=False)
    return tmp_path / "m"


PROMPT: dict[str, object] = {"prompts": {"query": "Query: "}, "default_prompt_name": "query"}
SETTINGS: tuple[dict[str, dict[str, object]], ...] = (
    {SENTENCE: PROMPT, TRANSFORMER: {"do_lower_case": True, "max_seq_length": 40}},
    {
        SENTENCE: {"truncate_dim": 12, "prompts": {}, "default_prompt_name": "document"},
        TRANSFORMER: {"max_seq_length": 64},
        "tokenizer_config.json": {"model_max_length": 20},
        POOLING: {"pooling_mode": None},
    },
    {
        SENTENCE: {"truncate_dim": 99},
        POOLING: {"pooling_mode": None, "pooling_mode_mean_tokens": False},
    },
    {POOLING: {"pooling_mode": ["weightedmean", "cls", "max", "mean"]}},
)
"""Values that are put into the files of a model, all files of an entry at once."""


def test_settings_of_sentence_transformers_are_applied(sentences: Path, tmp_path: Path) -> None:
    for number, files in enumerate(SETTINGS):
        model = Path(shutil.copytree(sentences, tmp_path / f"model{number}"))
        for file, values in files.items():
            change(model / file, **values)
        inputs = inputs_of(tmp_path / f"pipeline{number}", model, "text-embedding")
        check_equal(inputs, model, "text-embedding", files)
        assert inputs.plan.info.embedding_size == found_by(inputs).shape[1], files


BERT = {**SIZES, "intermediate_size": 32, "initializer_range": 0.4}
GPT2 = {"n_embd": 32, "n_layer": 1, "n_head": 2, "initializer_range": 0.4}
T5 = {"d_model": 32, "d_ff": 32, "num_layers": 1, "num_heads": 2, "d_kv": 16}
LENGTHS: list[tuple[str, dict[str, Any], int, str]] = [
    ("BertModel", {**BERT, "max_position_embeddings": 130}, 130, ""),
    ("RobertaModel", {**BERT, "max_position_embeddings": 130, "pad_token_id": 1}, 128, ""),
    ("GPT2Model", {**GPT2, "n_positions": 700}, 700, ""),
    ("T5EncoderModel", T5, 512, "no file of the model limits its texts"),
]
"""Class and config of models whose tokenizer has no limit, the limit, and words of a warning."""


def test_the_length_of_a_text_is_that_of_sentence_transformers(
    model: Path, sentences: Path, tmp_path: Path
) -> None:
    import torch
    import transformers
    from sentence_transformers import SentenceTransformer

    change(model / "tokenizer_config.json", model_max_length=None)
    told: list[str] = []

    def tell(stage: str, line: str) -> None:
        told.extend([line] * ("cut after" in line))

    for name, settings, length, words in LENGTHS:
        (model / "config.json").unlink()
        torch.manual_seed(0)
        network = getattr(transformers, name)
        network(network.config_class(vocab_size=30522, **settings)).save_pretrained(model)
        inputs = inputs_of(tmp_path / name.lower(), model, "text-embedding", tell)
        assert inputs.plan.max_length == length, name
        assert [words in line for line in told] == [True] * bool(words), told
        user = SentenceTransformer(str(model), device="cpu")
        if name == "RobertaModel" or words:  # it fails for longer texts, or reads all of them
            user.max_seq_length = length
        wanted = user.encode([str(request.inputs["text"]) for request in inputs.requests])
        rows = [row for row in rows_of(inputs.requests) if isinstance(row, TokenRow)]
        assert max(len(row.ids) for row in rows) == length
        assert np.abs(found_by(inputs) - wanted).max() <= 1e-5 * max(1, wanted.max()), name
    # A model without a limit has that of the pipeline, beyond the usual one as well.
    limit = {"tokenizer": {"max_length": 900}}
    assert inputs_of(tmp_path / "p", model, "text-embedding", tell, **limit).plan.max_length == 900
    assert len(told) == 1
    change(sentences / TRANSFORMER, max_seq_length=700)
    inputs_of(tmp_path / "q", sentences, "text-embedding", tell)
    assert "cut after 512 tokens" in told[1]
    assert "after 700" in told[1]


def test_files_count_only_for_the_class_that_saved_them(sentences: Path, tmp_path: Path) -> None:
    """Another class of sentence-transformers converts the model; a pipeline reads no such file."""
    save_classifier(sentences, num_labels=1)
    change(sentences / TRANSFORMER, max_seq_length=20, do_lower_case=True)
    prompt = {"prompts": {"a": "A: "}, "default_prompt_name": "a", "truncate_dim": 12}
    classes = {"SentenceTransformer": "text-embedding", "CrossEncoder": "reranking"}
    for number, (saved_by, own_task) in enumerate(classes.items()):
        change(sentences / SENTENCE, model_type=saved_by, activation_fn=IDENTITY, **prompt)
        if saved_by == "CrossEncoder":
            modules = json.loads((sentences / "modules.json").read_text(encoding="utf-8"))
            write(sentences / "modules.json", modules[:1])
            change(sentences / TRANSFORMER, transformer_task="sequence-classification")
            change(sentences / TRANSFORMER, modality_config=None, module_output_name=None)
        for task in ("text-embedding", "reranking", "text-classification"):
            inputs = inputs_of(tmp_path / f"{task}{number}", sentences, task)
            check_equal(inputs, sentences, task, (saved_by, task))
            counts = task == own_task
            assert inputs.plan.max_length == (20 if counts else 512)
            assert dict(inputs.plan.info.prompts) == ({"a": "A: "} if counts else {})


def test_texts_in_a_chat_template_are_refused(sentences: Path, tmp_path: Path) -> None:
    (sentences / "modules.json").rename(sentences / "modules.txt")
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    (sentences / "chat_template.jinja").write_text(template)
    inputs = inputs_of(tmp_path / "q", sentences, "text-embedding")
    check_refused(["chat_template of the model", "SentenceTransformer"], check_tokens, inputs)
    # A model that was saved without a template in its settings reads texts alone.
    (sentences / "modules.txt").rename(sentences / "modules.json")
    change(sentences / TRANSFORMER, modality_config=None, module_output_name=None)
    check_tokens(inputs_of(tmp_path / "r", sentences, "text-embedding"))


def test_without_modules_json_no_setting_counts(model: Path, tmp_path: Path) -> None:
    change(model / SENTENCE, truncate_dim=12, prompts={"a": "b"}, default_prompt_name="a")
    change(model / TRANSFORMER, max_seq_length=10, do_lower_case=True)
    for architecture in ("BertModel", "BertForCausalLM"):
        change(model / "config.json", architectures=[architecture])
        inputs = inputs_of(tmp_path / architecture.lower(), model, "text-embedding")
        check_equal(inputs, model, "text-embedding", architecture)
    assert inputs.plan.info.pooling == ("lasttoken",)


REFUSED: list[tuple[str, dict[str, object]]] = [
    ("query_length", {"query_length": 8}),
    ("query_expansion", {"query_expansion": {"strategy": "fixed", "length": 8}}),
    ("processing_kwargs.text", {"processing_kwargs": {"text": {"max_length": 8}}}),
    ("processor_kwargs.padding_side", {"tokenizer_args": {"padding_side": "left"}}),
    ("model_kwargs.output_attentions", {"model_args": {"output_attentions": True}}),
    ("config_kwargs.hidden_act", {"config_args": {"hidden_act": "relu"}}),
    ("transformer_task", {"transformer_task": "fill-mask"}),
    ("new_setting", {"new_setting": 1}),
]


def test_other_settings_are_refused_by_name(sentences: Path) -> None:
    plain = (sentences / TRANSFORMER).read_bytes()
    for name, values in REFUSED:
        change(sentences / TRANSFORMER, **values)
        check_refused(f"{name} in {TRANSFORMER}", read_model_info, sentences)
        (sentences / TRANSFORMER).write_bytes(plain)
    harmless = {"model_args": {"torch_dtype": "float16", "trust_remote_code": True}}
    change(sentences / TRANSFORMER, unpad_inputs=False, query_length=None, **harmless)
    assert read_model_info(sentences).embedding_size == 32


LINES: dict[str, list[dict[str, object]]] = {
    "text-classification": [{"text": text} for text in TEXTS],
    "text-pair-classification": [{"text": text, "text_pair": text[::-1]} for text in TEXTS],
    "token-classification": [{"text": text} for text in TEXTS],
    "question-answering": [{"text": "Who [SEP] ?", "text_pair": text} for text in TEXTS],
    "zero-shot-classification": [
        {"text": text, "parameters": {"candidate_labels": ["a [SEP] b", "late"]}} for text in TEXTS
    ],
    "fill-mask": [{"text": f"[MASK] {text.replace('[MASK]', '[SEP]')}"} for text in TEXTS],
}
"""Lines of traffic for each template whose reference is a pipeline of transformers."""


def test_rows_are_compared_with_those_of_the_users_library(
    sentences: Path, tmp_path: Path, minilm_folder: Path
) -> None:
    change(sentences / TRANSFORMER, do_lower_case=True)
    inputs = inputs_of(tmp_path / "p", sentences, "text-embedding")
    change(sentences / TRANSFORMER, do_lower_case=False)
    check_refused("same tokens as in sentence-transformers", check_tokens, inputs)
    makers = dict(MODELS.values())
    for name, lines in LINES.items():
        task = "text-classification" if "pair" in name else name
        model = makers[task](tmp_path / name / "m", minilm_folder, TEXTS)
        change(model / "tokenizer_config.json", model_max_length=64)
        options: dict[str, object] = {"pairs": True} if "pair" in name else {}
        options |= {"core": {"max_batch_size": 64}}  # windows of a long context
        folder = write_pipeline(
            tmp_path / name / "p", task=task, model={"source": str(model)}, **options
        )
        (folder / "traffic.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
        spec = load_spec(folder)
        check_tokens(read_inputs(spec, quiet))
        # A setting that tokenizer.json cannot hold: special tokens in a text are texts.
        change(model / "tokenizer_config.json", split_special_tokens=True)
        inputs = read_inputs(spec, quiet)
        check_refused("same tokens as in a pipeline of transformers", check_tokens, inputs)
    spec = load_spec(write_pipeline(tmp_path / "embedding", pairs=True))
    check_refused("pairs` is only supported for", read_inputs, spec, quiet)


def test_types_of_tokens_are_compared(model: Path, tmp_path: Path) -> None:
    """A tokenizer of XLNet gives the last token a type of its own, which the model reads."""
    from transformers import XLNetConfig, XLNetForSequenceClassification

    config = XLNetConfig(vocab_size=30522, d_model=32, n_layer=1, n_head=2, d_inner=32)
    (model / "config.json").unlink()
    XLNetForSequenceClassification(config).save_pretrained(model)
    names = ["input_ids", "token_type_ids", "attention_mask"]
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": names}
    change(model / "tokenizer_config.json", **settings)
    check_tokens(inputs_of(tmp_path / "p", model, "text-classification"))
    tokenizer = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["post_processor"]["single"][-1]["SpecialToken"]["type_id"] = 2
    write(model / "tokenizer.json", tokenizer)
    inputs = inputs_of(tmp_path / "q", model, "text-classification")
    check_refused("tokens of type 0, of the prompt, attended, there", check_tokens, inputs)


def test_a_truncated_model_passes_a_gate_that_loads_its_reference_once(
    sentences: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(sentences / SENTENCE, truncate_dim=7)  # not in the cache
    change(sentences / TRANSFORMER, do_lower_case=True)
    inputs = inputs_of(tmp_path / "p", sentences, "text-embedding")
    assert inputs.plan.core.outputs[0].dims == (7,)
    loaded: list[Path] = []

    def count(folder: Path, loader: Loader) -> Any:
        loaded.append(folder)
        return load_as_user(folder, loader)

    monkeypatch.setattr("triptych.core.gate.reference.load_as_user", count)
    monkeypatch.setenv("TRIPTYCH_CACHE", str(tmp_path / "cache"))
    core = full_precision(inputs, quiet, "")
    assert len(loaded) == 2  # for the tokens and results in fp32, and for fp64
    gate = Gate(inputs, "fp32", quiet)
    gate.run(core.file, {"model.onnx": "another artifact"})
    gate.run(core.file, {"model.onnx": "one more"})
    assert len(loaded) == 3  # the tokens of a new gate; its results are in the cache


def test_classes_without_names_are_told(model: Path, tmp_path: Path) -> None:
    save_classifier(model, num_labels=3)
    lines: list[str] = []
    for names, warnings in ((None, 1), ({"0": "a", "1": "b", "2": "c"}, 0)):
        change(model / "config.json", id2label=names)
        change(model / "config.json", num_labels=None if names else 3)
        lines.clear()
        folder = tmp_path / f"p{warnings}"
        inputs_of(folder, model, "text-classification", lambda _, line: lines.append(line))
        found = [line for line in lines if "does not name its 3 classes" in line]
        assert len(found) == warnings, lines


def test_a_model_that_fails_in_its_own_library_ends_in_one_message(
    sentences: Path, model: Path, tmp_path: Path
) -> None:
    save_classifier(model, num_labels=3)
    for task, folder in (("text-embedding", sentences), ("text-classification", model)):
        inputs = inputs_of(tmp_path / task, folder, task)
        plain = (folder / "tokenizer_config.json").read_bytes()
        own = ["input_ids", "attention_mask", "position_ids"]  # no core has the last one
        change(folder / "tokenizer_config.json", model_input_names=own)
        check_refused("also reads `position_ids`", found_by, inputs)
        (folder / "tokenizer_config.json").write_bytes(plain)
        change(folder / "config.json", chunk_size_feed_forward=7)
        inputs = inputs_of(tmp_path / f"{task}-chunks", folder, task)
        check_refused(["fails in PyTorch on a row", "chunk size 7"], found_by, inputs)


def test_the_class_of_entailment_is_that_of_the_pipeline(model: Path, tmp_path: Path) -> None:
    import transformers

    save_classifier(model, id2label={0: "contradiction", 1: "neutral", 2: "entailment"})
    folder = write_pipeline(
        tmp_path / "p", task="zero-shot-classification", model={"source": str(model)}
    )
    line = {"text": "late", "parameters": {"candidate_labels": ["a", "b"]}}
    (folder / "traffic.jsonl").write_text(json.dumps(line))
    spec = load_spec(folder)
    for indexes, entailment in (
        ({"contradiction": 0, "neutral": 1, "entailment": 2}, 2),
        ({"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2}, -1),  # transformers takes the last one
        ({"entailment": 0, "neutral": 1, "contradiction": 2}, 0),
    ):
        change(model / "config.json", label2id=indexes)
        classify = transformers.pipeline("zero-shot-classification", model=str(model))
        assert classify.entailment_id == entailment
        if entailment:
            plan = read_inputs(spec, quiet).plan
            assert plan.task.settings(plan.info)["entailment"] == 2
        else:
            check_refused("label2id in config.json", read_inputs, spec, quiet)


def test_the_reference_reads_token_types_as_the_pipeline_does(model: Path, tmp_path: Path) -> None:
    """CTRL adds the vector of token 0 to each token of type 0; BERT's tokenizer makes types."""
    import torch
    import transformers

    config = transformers.CTRLConfig(
        vocab_size=30522, n_positions=512, n_embd=32, dff=64, n_layer=1, n_head=2, num_labels=3
    )
    torch.manual_seed(3)
    network = transformers.CTRLForSequenceClassification(config)
    torch.nn.init.normal_(network.classifier.weight, std=0.4)
    (model / "config.json").unlink()
    network.save_pretrained(model)
    change(model / "tokenizer_config.json", model_max_length=512)
    task = "text-classification"
    check_equal(inputs_of(tmp_path / "p", model, task), model, task, "CTRL")
