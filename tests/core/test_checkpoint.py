"""Checkpoints whose files disagree: tokenizer.json with its class, the task with the head."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer
from transformers.models.auto import modeling_auto

from tests.support.checkpoint_files import change, write
from tests.support.mistakes import check_refused
from tests.support.project import quiet, traffic_texts, write_pipeline
from tests.support.task_models import MODELS
from tests.support.tokenizers_of_kinds import SPECIAL, train
from triptych.base.tensors import TokenRow
from triptych.core.checkpoint import check_architecture, check_rope
from triptych.core.gate.reference import check_tokens
from triptych.core.inputs import PipelineInputs, read_inputs
from triptych.models.fields import EncoderSource
from triptych.models.tokenizer import load_tokenizer, read_other_tokenizer, read_tokenizer
from triptych.spec.spec import load_spec

pytestmark = [pytest.mark.build, pytest.mark.filterwarnings("ignore")]

Content = dict[str, Any]


def set_normalizer(**values: object) -> Callable[[Content], None]:
    return lambda content: content["normalizer"].update(values)


def replace(content: Content) -> None:
    found = {"type": "Replace", "pattern": {"String": "o"}, "content": "a"}
    content["normalizer"] = {"type": "Sequence", "normalizers": [content["normalizer"], found]}


def digits(content: Content) -> None:
    alone = {"type": "Digits", "individual_digits": True}
    content["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [content["pre_tokenizer"], alone],
    }


def without_separator(content: Content) -> None:
    parts = content["post_processor"]
    parts["single"] = [part for part in parts["single"] if part != parts["single"][-1]]


IGNORED: dict[str, Callable[[Content], None]] = {
    "lowercase": set_normalizer(lowercase=False),
    "strip_accents": set_normalizer(strip_accents=False),
    "handle_chinese_chars": set_normalizer(handle_chinese_chars=False),
    "Replace": replace,
    "Digits": digits,
    "WhitespaceSplit": lambda content: content.update(pre_tokenizer={"type": "WhitespaceSplit"}),
    "without [SEP]": without_separator,
    "without post-processor": lambda content: content.update(post_processor=None),
    "max_input_chars_per_word": lambda content: content["model"].update(max_input_chars_per_word=4),
}
"""Parts of a tokenizer.json that the class of BERT in transformers 5 does not read."""


def change_file(model: Path, edit: Callable[[Content], None]) -> None:
    content = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    edit(content)
    write(model / "tokenizer.json", content)


def read(folder: Path, model: Path, task: str = "text-embedding", **tokenizer: str) -> Any:
    source = {"source": str(model)}
    spec = load_spec(write_pipeline(folder, task=task, model=source, tokenizer=tokenizer))
    return read_inputs(spec, quiet)


def check_ids(inputs: PipelineInputs, encode: Callable[[str], list[int]]) -> None:
    """Check that the rows of the gate have the ids of another tokenizer."""
    compared = 0
    for request in inputs.requests:
        (row,) = request.rows
        assert isinstance(row, TokenRow)
        if len(row.ids) < inputs.plan.max_length:
            compared += 1
            assert list(row.ids) == encode(str(request.inputs["text"]))
    assert compared > 20


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind == "lowercase" else pytest.param(kind, marks=pytest.mark.long)
        for kind in IGNORED
    ],
)
def test_a_file_that_says_something_else_than_the_class_is_refused(
    model: Path, tmp_path: Path, kind: str
) -> None:
    settings = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings = {name: value for name, value in settings.items() if name != "do_lower_case"}
    write(model / "tokenizer_config.json", settings)
    change_file(model, IGNORED[kind])
    words = ["tokenizer.source", "by the file", "by the class", "`file`", "[101, "]
    check_refused(words, read, tmp_path / "any", model)
    made = Tokenizer.from_file(str(model / "tokenizer.json"))
    made.no_padding()
    made.no_truncation()
    inputs = read(tmp_path / "file", model, source="file")
    check_ids(inputs, lambda text: made.encode(text).ids)
    if kind == "lowercase":
        check_tokens(inputs)  # with the reference of the gate
        own = AutoTokenizer.from_pretrained(model)
        inputs = read(tmp_path / "class", model, source="class")
        check_ids(inputs, lambda text: own(text)["input_ids"])
        change(model / "tokenizer_config.json", do_lower_case=True)  # which explains it
        read(tmp_path / "explained", model)


def test_word_pieces_under_the_class_of_roberta_are_refused(
    tmp_path: Path, minilm_folder: Path
) -> None:
    """As camembertv2 has it: the class splits each text into single characters."""
    task, make = MODELS["topics"]
    model = make(tmp_path / "m", minilm_folder, traffic_texts())
    change(model / "tokenizer_config.json", tokenizer_class="RobertaTokenizer")
    check_refused("by the class", read, tmp_path / "p", model, task)
    made = Tokenizer.from_file(str(model / "tokenizer.json"))
    made.no_padding()
    made.no_truncation()
    inputs = read(tmp_path / "file", model, task, source="file")
    check_ids(inputs, lambda text: made.encode(text).ids)
    check_tokens(inputs)


def test_files_that_a_class_wrote_are_equal(tmp_path: Path) -> None:
    texts = traffic_texts()
    for kind in ("PreTrainedTokenizerFast", *SPECIAL):
        folder = tmp_path / kind
        train(kind, texts).save_pretrained(folder)
        for settings in (None, {"tokenizer_class": kind, "model_max_length": 128}):
            if settings is not None:
                write(folder / "tokenizer_config.json", settings)
            assert read_other_tokenizer(folder, read_tokenizer(folder)) is None, kind


def test_settings_of_the_config_explain_a_difference(tmp_path: Path) -> None:
    texts = traffic_texts()
    for kind, prefix in (("RobertaTokenizer", True), ("XLMRobertaTokenizer", False)):
        folder = tmp_path / kind
        train(kind, texts).save_pretrained(folder)
        new = {"add_prefix_space": prefix, "extra_special_tokens": ["<new>"]}
        change(folder / "tokenizer_config.json", **new)
        served = read_tokenizer(folder)
        made = [Tokenizer.from_str(served), Tokenizer.from_file(str(folder / "tokenizer.json"))]
        made.append(Tokenizer.from_str(read_other_tokenizer(folder, served) or served))
        for text in ("where <new> is", texts[0]):
            ids, of_file, explained = (each.encode(text).ids for each in made)
            assert ids == explained != of_file, kind


def test_only_a_folder_with_a_file_has_one_as_its_source(tmp_path: Path) -> None:
    train("BertTokenizer", traffic_texts()).save_pretrained(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    names = sorted(content["model"]["vocab"], key=content["model"]["vocab"].__getitem__)
    (tmp_path / "vocab.txt").write_text("\n".join(names), encoding="utf-8")
    (tmp_path / "tokenizer.json").unlink()
    assert read_other_tokenizer(tmp_path, read_tokenizer(tmp_path)) is None
    check_refused("none of tokenizer.json", load_tokenizer, tmp_path, "file")


def test_a_context_before_the_question_is_refused(tmp_path: Path, minilm_folder: Path) -> None:
    """The pipeline of transformers 4 puts it there if the tokenizer pads on the left."""
    task, make = MODELS["answers"]
    model = make(tmp_path / "m", minilm_folder, traffic_texts())
    folder = write_pipeline(tmp_path / "p", task=task, model={"source": str(model)})
    line = json.dumps({"text": "Where is it?", "text_pair": "It is in the box."})
    (folder / "traffic.jsonl").write_text(line, encoding="utf-8")
    spec = load_spec(folder)
    check_tokens(read_inputs(spec, quiet))
    change(model / "tokenizer_config.json", padding_side="left")
    check_refused(["padding_side in tokenizer_config.json", "left"], read_inputs, spec, quiet)


ROPES: tuple[tuple[Content, int | None], ...] = (
    ({"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 16}, 16),
    (
        {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 16}},
        16,
    ),
    ({"rope_parameters": {"all": {"rope_type": "longrope"}}}, None),
    ({"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 16}}, None),
    ({"rope_scaling": None}, None),
)
"""Settings of config.json, and the longest text that no other text of a batch changes."""


def test_a_rope_type_by_which_texts_change_each_other_is_named(model: Path, tmp_path: Path) -> None:
    words = ["tokenizer.max_length", "rope type longrope", "Set it to 16"]
    for number, (settings, longest) in enumerate(ROPES):
        write(tmp_path / f"{number}/config.json", {"max_position_embeddings": 64, **settings})
        check_rope(tmp_path / f"{number}", longest or 64)
        if longest is not None:
            check_refused(words, check_rope, tmp_path / f"{number}", longest + 1)
    change(model / "config.json", **ROPES[0][0])
    check_refused(words, read, tmp_path / "pipeline", model)


HEADS = (
    "SEQUENCE_CLASSIFICATION AutoModelForSequenceClassification",
    "TOKEN_CLASSIFICATION AutoModelForTokenClassification",
    "QUESTION_ANSWERING AutoModelForQuestionAnswering",
    "MASKED_LM AutoModelForMaskedLM",
    "IMAGE_CLASSIFICATION AutoModelForImageClassification",
)
WRONG = (
    ("AlbertForSequenceClassification", "TokenClassification", "reranking or zero-shot"),
    ("LlamaForTokenClassification", "SequenceClassification", "Use task token-classification"),
    ("ModernBertForQuestionAnswering", "SequenceClassification", "Use task question-answering"),
    ("ModernBertForTokenClassification", "QuestionAnswering", "Use task token-classification"),
    ("RobertaForCausalLM", "MaskedLM", "Use task text-generation"),
    ("BertLMHeadModel", "MaskedLM", "Use task text-generation"),
    ("XLMForMultipleChoice", "SequenceClassification", "Use task text-embedding"),
    ("LxmertForPreTraining", "QuestionAnswering", "Use task text-embedding"),
    ("MBartForQuestionAnswering", "MaskedLM", "Use task question-answering"),
)
"""Class of a checkpoint that loads with another head without a missing weight: all such pairs of
transformers, one for each pair of heads."""


def test_every_class_of_a_task_fits_and_the_others_do_not() -> None:
    source = EncoderSource(source="x")
    for mapping, auto_class in map(str.split, HEADS):
        classes = getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").values()
        for named in classes:
            for architecture in [named] if isinstance(named, str) else named:
                check_architecture(auto_class, architecture, source)
                check_architecture("AutoModel", architecture, source)
    check_architecture("AutoModelForTokenClassification", "BertModel", source)
    for architecture, head, words in WRONG:
        auto_class = f"AutoModelFor{head}"
        expected = ["does not fit the class", architecture, words, "accept_architecture: true"]
        check_refused(expected, check_architecture, auto_class, architecture, source)
        accepted = EncoderSource(source="x", accept_architecture=True)
        check_architecture(auto_class, architecture, accepted)


@pytest.mark.parametrize("kind", ["Bert", "DistilBert"])
def test_a_classifier_of_texts_is_not_built_for_tokens(
    tmp_path: Path, minilm_folder: Path, kind: str
) -> None:
    model = MODELS["topics"][1](tmp_path / "m", minilm_folder, traffic_texts())
    change(model / "config.json", architectures=[f"{kind}ForSequenceClassification"])
    words = [f"{kind}ForSequenceClassification", "text-classification, reranking or zero-shot"]
    check_refused(words, read, tmp_path / "p", model, "token-classification")
    folder = tmp_path / "accepted"
    source = {"source": str(model), "accept_architecture": True}
    read_inputs(load_spec(write_pipeline(folder, task="token-classification", model=source)), quiet)
    read(tmp_path / "q", model, "text-classification")
