"""Every family of transformers in every task: built as a user builds it, equal to transformers.

``pytest tests/core/test_families.py -m long --rewrite`` puts the results on record, which
``build_scripts/documentation/guides/families.md`` shows.
"""

import functools
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image
from transformers.models.auto import modeling_auto

from tests.support.family_table import (
    LIMIT,
    NOT_MEASURED,
    Result,
    read_record,
    short,
    turn,
    write_record,
)
from tests.support.project import quiet, share_export_registry, traffic_texts
from tests.support.tokenizers_of_kinds import LONGEST, train
from triptych.base.errors import UserError
from triptych.core.gate.cached import GateFailure
from triptych.core.gate.runs import open_core
from triptych.core.inputs import PipelineInputs, read_inputs
from triptych.core.precision.stage import full_precision
from triptych.core.reader import RequestReader
from triptych.core.requests import GateRequest, rows_of
from triptych.spec.spec import load_spec
from triptych.spec.traffic import TRAFFIC_FILE, read_traffic
from triptych.tasks.results import RowOutputs

BLIND = 1e-3
"""Least difference of the reference's results for different rows, so that a fault would show."""
MAX_PARAMETERS = 30_000_000
"""A family whose smallest config has more parameters is not built."""

TASKS: Mapping[str, tuple[str, str, int]] = {
    "text-classification": ("AutoModelForSequenceClassification", "SEQUENCE_CLASSIFICATION", 3),
    "reranking": ("AutoModelForSequenceClassification", "SEQUENCE_CLASSIFICATION", 1),
    "token-classification": ("AutoModelForTokenClassification", "TOKEN_CLASSIFICATION", 3),
    "question-answering": ("AutoModelForQuestionAnswering", "QUESTION_ANSWERING", 2),
    "text-embedding": ("AutoModel", "TEXT_ENCODING", 0),
    "image-classification": ("AutoModelForImageClassification", "IMAGE_CLASSIFICATION", 3),
}
"""Task to the class that loads its models, the name in transformers' mapping, and the labels."""
PAIRS = ("reranking", "question-answering")
IMAGE_SIZE = 64

UNSET = ("num_key_value_heads", "head_dim", "num_experts_per_tok")
"""Settings that are small where they have no value, too."""
LAYERS = [
    *("n_layers", "num_layers", "n_layer", "num_hidden_layers"),
    *("encoder_layers", "decoder_layers", "num_decoder_layers"),
]
WORDS: Mapping[int, str] = {
    32: "hidden_size d_model dim n_embd embed_dim embedding_size emb_dim projection_dim d_inner"
    " word_embed_proj_dim dim_model moe_intermediate_size shared_expert_intermediate_size"
    " pooler_hidden_size",
    64: "intermediate_size hidden_dim ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim"
    " ffn_hidden_size dim_ff",
    2: "num_attention_heads n_heads n_head num_heads attention_heads encoder_attention_heads"
    " decoder_attention_heads num_key_value_heads num_kv_heads multi_query_group_num num_experts"
    " num_local_experts n_routed_experts type_vocab_size",
    16: "head_dim d_kv kv_channels attention_head_size q_lora_rank kv_lora_rank v_head_dim"
    " qk_nope_head_dim qk_rope_head_dim",
    1: f"{' '.join(LAYERS)} num_experts_per_tok n_group topk_group moe_topk",
    LONGEST + 2: "max_position_embeddings n_positions max_seq_len",
    IMAGE_SIZE: "image_size",
    0: "first_k_dense_replace",
}
SMALL = {name: value for value, names in WORDS.items() for name in names.split()}
"""Names of settings that many families share, and the small value of each."""
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "reformer": {
        "axial_pos_embds_dim": (16, 16),
        "axial_pos_shape": (8, 16),
        "attn_layers": ["local", "lsh"],
        "attention_head_size": 16,
    },
    "axk2": {"mlp_layer_types": ["dense"]},
    "esm": {"vocab_size": 700, "is_folding_model": False},
    "gpt_neo": {"attention_types": [[["global"], 1]], "attention_layers": ["global"]},
    "luke": {"entity_vocab_size": 8},
    "gptj": {"rotary_dim": 8},
    "perceiver": {"num_latents": 8, "d_latents": 32, "num_blocks": 1},
    "swin": {"window_size": 2},
    "xlnet": {"d_head": 16},
}
"""Settings of single families that must fit the small sizes."""
TOKENS: Mapping[str, str] = {
    **{f"{name}_token_id": name for name in ("pad", "cls", "sep", "mask", "unk")},
    "bos_token_id": "cls",
    "eos_token_id": "sep",
}
"""Special tokens of a config, and of the tokenizer."""
SPREAD = ("initializer_range", "init_std", "initializer_factor")

LETTERS = "Where is my parcel"
TEXTS = [text for text in traffic_texts() if len(text.split()) > 4]
SHORT, MIDDLE, LONG = "Where?", " ".join(TEXTS[:3]), " ".join(TEXTS[3:9])
ROWS = (SHORT, MIDDLE, LONG)


def pairs() -> list[tuple[str, str]]:
    """Every family with every task that transformers has a class for, in a fixed order."""
    found = []
    for task, (_, name, _) in TASKS.items():
        families = set(getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES"))
        if task == "text-embedding":
            # Models with a head for texts embed texts, too.
            for other in ("SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION", "MASKED_LM"):
                families |= set(getattr(modeling_auto, f"MODEL_FOR_{other}_MAPPING_NAMES"))
            families &= set(modeling_auto.MODEL_MAPPING_NAMES)
        found += [(family, task) for family in sorted(families)]
    return found


@functools.cache
def word_pieces() -> Any:
    """The tokenizer of every family of texts: of the kind that BERT has, with few pieces."""
    return train("BertTokenizer", traffic_texts())


class CannotBuild(Exception):
    """A family of which no small random model can be made, with the reason."""


def shrink(config: Any, tokenizer: Any) -> None:
    """Set the sizes in a config and in the configs within it to small ones, in place.

    The ids of special tokens become those of the tokenizer.
    """
    # A config with stages has a name for each layer, and a width and heads for each stage.
    fixed = LAYERS if hasattr(config, "stage_names") else []
    if isinstance(getattr(config, "num_heads", None), (list, tuple)):
        fixed = [*fixed, "embed_dim", "hidden_size"]
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PretrainedConfig):
            shrink(value, tokenizer)
        elif name not in fixed:
            setattr(config, name, small_value(name, value, tokenizer))
    kinds = vars(config).get("layer_types")
    if kinds and not fixed:
        config.layer_types = list(dict.fromkeys(kinds))
        config.num_hidden_layers = len(config.layer_types)


def small_value(name: str, value: Any, tokenizer: Any) -> Any:
    """Return the value of a setting in a small config."""
    if name == "vocab_size":
        return len(tokenizer)
    if name in TOKENS:
        return getattr(tokenizer, f"{TOKENS[name]}_token_id")
    if name in UNSET and value is None:
        return SMALL[name]
    if name in SMALL and isinstance(value, int) and not isinstance(value, bool):
        return min(value, SMALL[name])
    return 0.1 if name in SPREAD and isinstance(value, float) and value < 0.1 else value


def config_of(family: str, labels: int, tokenizer: Any) -> Any:
    """Return a small config of the family, which fits the tokenizer."""
    config = transformers.AutoConfig.for_model(family)
    shrink(config, tokenizer)
    for name, value in SETTINGS.get(family, {}).items():
        setattr(config, name, value)
    if labels:
        names = [f"label {number}" for number in range(labels)]
        config.num_labels = labels  # that of PVT does not follow from the names
        config.id2label = dict(enumerate(names))
        config.label2id = {name: number for number, name in enumerate(names)}
    return config


def save(family: str, task: str, folder: Path) -> None:
    """Write a small random model of a family with its tokenizer or image processor.

    Raises:
        CannotBuild: The sizes do not fit each other, or the model is large nevertheless.
    """
    auto_class, _, labels = TASKS[task]
    loader = getattr(transformers, auto_class)
    tokenizer = word_pieces()
    torch.manual_seed(0)
    try:
        config = config_of(family, labels, tokenizer)
        names = getattr(modeling_auto, f"MODEL_FOR_{TASKS[task][1]}_MAPPING_NAMES").get(family)
        config.architectures = [names[0] if isinstance(names, tuple) else names]
        with torch.device("meta"):
            size = sum(weight.numel() for weight in loader.from_config(config).parameters())
        if size > MAX_PARAMETERS:
            raise CannotBuild(f"the smallest config has {size / 1e6:.0f} million parameters")
        model = loader.from_config(config).eval()
        model.save_pretrained(folder)
        transformers.AutoConfig.from_pretrained(folder)
    except CannotBuild:
        raise
    except Exception as error:  # a family may raise anything for sizes that it does not expect
        raise CannotBuild(f"{type(error).__name__}: {error}") from error
    if task == "image-classification":
        size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
        settings = {"image_processor_type": "ViTImageProcessor", "size": size}
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))
        return
    types = "token_type_ids" in inspect.signature(model.forward).parameters
    types &= (getattr(config, "type_vocab_size", 0) or 0) > 1
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if types else [])]
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_input_names": names}))


def write_pipeline(task: str, folder: Path) -> Path:
    """Write the pipeline of the model in ``folder/model``; returns its folder."""
    pipeline = folder / "pipeline"
    pipeline.mkdir()
    spec: dict[str, Any] = {"task": task, "model": {"source": str(folder / "model")}}
    if task != "image-classification":
        # All models have one tokenizer.json, of which some classes ignore parts.
        spec["tokenizer"] = {"source": "class"}
    (pipeline / "pipeline.yaml").write_text(json.dumps(spec))
    lines: list[dict[str, str]] = [{"text": text} for text in ROWS]
    if task in PAIRS:
        lines = [{"text": LETTERS, "text_pair": text} for text in ROWS]
    if task == "image-classification":
        random, lines = np.random.default_rng(0), []
        for width, height in ((64, 64), (37, 90), (200, 120)):
            pixels = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
            lines.append({"image": f"{width}x{height}.png"})
            Image.fromarray(pixels).save(pipeline / f"{width}x{height}.png")
    (pipeline / "traffic.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return pipeline


def reference(task: str, model: Path, pipeline: Path) -> Iterator[Sequence[NDArray[Any]]]:
    """Yield what the core returns for each row, by transformers, loaded as a user loads it."""
    if task == "text-embedding":
        from sentence_transformers import SentenceTransformer

        encoder = SentenceTransformer(str(model), device="cpu")
        for text in ROWS:
            yield (encoder.encode([text])[0],)
        return
    loaded = getattr(transformers, TASKS[task][0]).from_pretrained(model).eval()
    for feed in feeds(task, model, pipeline):
        with torch.inference_mode():
            output = loaded(**feed)
        if task == "question-answering":
            yield output.start_logits[0].numpy(), output.end_logits[0].numpy()
        elif task == "reranking":
            yield (output.logits[0].sigmoid().numpy(),)
        else:
            yield (output.logits[0].softmax(-1).numpy(),)


def feeds(task: str, model: Path, pipeline: Path) -> Iterator[Any]:
    """Yield the inputs of the model for each row."""
    if task == "image-classification":
        processor = transformers.AutoImageProcessor.from_pretrained(model)
        for line in (pipeline / "traffic.jsonl").open():
            yield processor(Image.open(pipeline / json.loads(line)["image"]), return_tensors="pt")
        return
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    for row in ROWS:
        texts = (LETTERS, row) if task in PAIRS else (row,)
        if task != "question-answering":
            yield tokenizer(*texts, truncation=True, return_tensors="pt")
            continue
        long = {"truncation": "only_second", "stride": LONGEST // 2}  # a context of many windows
        windows = tokenizer(*texts, return_overflowing_tokens=True, **long)
        del windows["overflow_to_sample_mapping"]
        for columns in zip(*windows.values(), strict=True):
            yield {name: torch.tensor([ids]) for name, ids in zip(windows, columns, strict=True)}


def distance(left: Sequence[NDArray[Any]], right: Sequence[NDArray[Any]]) -> float:
    """Return the largest difference of two rows of the reference, in their common tokens."""
    size = min(len(left[0]), len(right[0]))
    return max(float(np.abs(a[:size] - b[:size]).max()) for a, b in zip(left, right, strict=True))


def difference(got: RowOutputs, want: Sequence[NDArray[Any]], names: Sequence[str]) -> float:
    """Return the largest difference of a row; a chosen class that is not the best counts, too."""
    values = [got[name] for name in names]
    if len(values) > len(want):  # ids and scores of the chosen classes
        ids, scores = values
        ids = ids if want[0].ndim == 1 else ids[:, None]
        scores = scores if want[0].ndim == 1 else scores[:, None]
        values = [np.take_along_axis(want[0], ids.astype(np.int64), -1) - scores]
        best = -np.sort(-want[0], axis=-1)[..., : ids.shape[-1]]
        values.append(best - scores)
        return max(float(np.abs(value).max()) for value in values)
    sizes = [value.shape == right.shape for value, right in zip(values, want, strict=True)]
    if not all(sizes):
        return float("inf")
    return max(float(np.abs(v - r).max()) for v, r in zip(values, want, strict=True))


def measure(family: str, task: str, folder: Path) -> Result:
    """Build a small random model of a family, and compare its core with transformers.

    Each of three rows of different lengths runs alone, and all run in one batch. The rows are those
    that a server makes of the texts. `folder` is an empty folder for the model.
    """
    model = folder / "model"

    def result(outcome: str, fault: object) -> Result:
        return Result(family, task, outcome, message=short(str(fault).replace(str(model), "MODEL")))

    try:
        save(family, task, model)
    except CannotBuild as reason:
        return result("not built", reason)
    pipeline = write_pipeline(task, folder)
    try:
        wanted = list(reference(task, model, pipeline))
    except Exception as error:  # a family may raise anything for sizes that do not fit
        fault = f"transformers cannot run it: {type(error).__name__}: {error}"
        return result("not built", fault)
    if max(distance(want, other) for want in wanted for other in wanted) < BLIND:
        return result("not built", "the reference has the same result for rows of different texts")
    share_export_registry()
    try:
        inputs = read_inputs(load_spec(pipeline, ()), quiet)
        core = full_precision(inputs, quiet, "")
    except (GateFailure, UserError) as error:
        return result("refused", error)
    rows = rows_of(read_rows(inputs, pipeline))
    run = open_core(core.file, core.plan)
    batched = run(rows)
    names = [tensor.name for tensor in core.plan.core.outputs]
    apart = 0.0
    for row, together, want in zip(rows, batched, wanted, strict=True):
        for got in (together, run([row])[0]):
            apart = max(apart, difference(got, want, names))
    outcome = "served" if apart <= LIMIT else "differs"
    return Result(family, task, outcome, core.plan.layout, apart)


def read_rows(inputs: PipelineInputs, pipeline: Path) -> list[GateRequest]:
    """Return the requests of the traffic, as the preprocess step makes rows of them."""
    plan = inputs.plan
    reader = RequestReader(plan.encoder_spec, plan.task, plan.info, inputs.tokenizer_folder, None)
    names = [tensor.name for tensor in plan.task.inputs]
    return list(reader.read(TRAFFIC_FILE, read_traffic(pipeline, names)))


pytestmark = [pytest.mark.build, pytest.mark.filterwarnings("ignore")]
EVERYDAY = 1
"""Number of served families that `make test` and CI check in turn: an export takes seconds. Only
all long tests (``make test-long``) measure the others."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    every = pairs()
    if "family" not in metafunc.fixturenames:
        return
    served = {(row.family, row.task) for row in read_record() if row.outcome == "served"}
    known = [index for index, pair in enumerate(every) if pair in served]
    now = [known[index] for index in turn(len(known), EVERYDAY)]
    in_parts = "/" in metafunc.config.getoption("--long")
    others = [index for index in range(len(every)) if index not in now and not in_parts]
    marked = [pytest.param(*every[index], marks=pytest.mark.long) for index in others]
    metafunc.parametrize(("family", "task"), [*(every[index] for index in now), *marked])


def test_the_record_has_every_family_in_every_task() -> None:
    assert {(row.family, row.task) for row in read_record()} == set(pairs())


def test_a_family_is_equal_to_the_reference_or_refused(
    tmp_path: Path, family: str, task: str, rewrite: bool
) -> None:
    result = measure(family, task, tmp_path)
    if rewrite:
        write_record([result])
    (known,) = (row for row in read_record() if (row.family, row.task) == (family, task))
    if known.outcome != NOT_MEASURED:
        assert (result.outcome, result.layout) == (known.outcome, known.layout), result
    if result.outcome == "served":
        assert result.difference is not None
        assert result.difference <= LIMIT
    else:
        assert result.outcome == "differs" or result.message
