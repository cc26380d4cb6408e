"""Exported cores of many architectures against other libraries; checkpoints that are refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.support import architectures as models
from tests.support.architectures import OTHERS, SHARED
from tests.support.checkpoint_files import change
from tests.support.mistakes import check_refused, refusal
from tests.support.project import ROOT, share_export_registry
from triptych.base.tensors import INPUT_IDS, ROW_LENGTH, ROW_OFFSET, TokenRow
from triptych.core.export.packing import CannotPack
from triptych.core.export.to_onnx import convert, export_onnx
from triptych.core.gate.reference import reference_outputs
from triptych.core.gate.runs import open_onnx
from triptych.core.requests import Sample
from triptych.models.loading import load_model
from triptych.models.source import read_model_info
from triptych.tasks.catalog import text_embedding

pytestmark = pytest.mark.build

TOLERANCE = 2e-6
CASES = [*SHARED, *(pytest.param(*case, marks=pytest.mark.long) for case in OTHERS)]


@pytest.mark.parametrize(("name", "head", "layout"), CASES)
def test_every_row_equals_transformers_on_it_alone(name: str, head: str, layout: str) -> None:
    core, packed = models.HEADS[head], layout == "packed"
    folder, facts = models.exported(name, head, layout)
    rows = models.random_rows()
    rows += models.with_special(rows, transformers.AutoConfig.from_pretrained(folder))
    path = folder / "onnx/model.onnx"
    expected = models.expected_outputs(folder, facts, core, rows)
    run, samples = models.open_core(path, facts, core, layout), [*map(models.token_row, rows)]
    batch = run(samples)
    for found, wanted in zip(batch, expected, strict=True):
        for output, target in zip(core.outputs, wanted, strict=True):
            value = found[output.name]
            assert value.dtype == {"INT32": np.int32, "FP32": np.float32}[output.dtype]
            assert value.shape == target.shape
            assert np.abs(value - target).max() < TOLERANCE * max(1.0, np.abs(target).max())
    check_declared(path, head, packed=packed)
    if packed:  # the same bits alone and in a batch
        for row, found in zip(samples, batch, strict=True):
            (alone,) = run([row])
            assert all(np.array_equal(found[name], alone[name]) for name in found)
    # Rows of zeros, whatever they stand for, come to numbers, too.
    zeros = run([models.token_row([0, 0]), models.token_row([0, 0, 0])])
    assert all(np.isfinite(value).all() for row in zeros for value in row.values())


def check_declared(path: Path, head: str, *, packed: bool) -> None:
    """Inputs and outputs are what Triton's config will say, sizes that are fixed as numbers.

    The file has no operator of ONNX Runtime's own, and no path of this machine.
    """
    graph = onnx.load(path, load_external_data=False).graph
    assert {node.domain for node in graph.node} == {""}
    for folder in (ROOT, Path(onnx.__file__).parents[2]):
        assert str(folder).encode() not in path.read_bytes()
    axes = {
        value.name: [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
    }
    tokens = ["tokens"] if packed else ["rows", "tokens"]
    expected = {"input_ids": tokens, "row_length": ["rows", 1], "first_segment": ["rows", 1]}
    if packed:
        expected |= {"row_offset": ["rows", 1], "row_stride": ["rows"]}
    for output in models.HEADS[head].outputs:
        per_token = output.dims[0] == "tokens"
        expected[output.name] = [*tokens, *output.dims[1:]] if per_token else ["rows", *output.dims]
    assert axes == expected
    assert list(axes) == list(expected)


def test_a_model_that_reads_its_padding_ends_in_one_message(tmp_path: Path) -> None:
    """The classifier of one layer of convolution reads four tokens beyond the first."""
    core = models.HEADS["classification"]
    facts = models.save_model("convbert", core.auto_class, tmp_path)
    packed = models.LAYOUT_INPUTS["packed"]
    with pytest.raises(CannotPack, match=r"rows of a batch differ by \S+ from the same rows alone"):
        export_onnx(tmp_path, facts, core, packed, packed=True, target=tmp_path / "onnx")
    assert not (tmp_path / "onnx").exists()
    error = refusal(
        export_onnx, tmp_path, facts, core, models.INPUTS, packed=False, target=tmp_path
    )
    assert error.field == "model.source"
    assert "padding" in error.message
    assert f"{facts.architecture}, whose convolution `convbert.encoder.layer.0" in error.message


POOLINGS = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", ["packed", pytest.param("bucketed", marks=pytest.mark.long)])
def test_every_pooling_equals_sentence_transformers(
    tiny_model: Path, tmp_path: Path, layout: str
) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Dense, Normalize, Pooling, Transformer

    share_export_registry()
    pooled = Pooling(32, pooling_mode=POOLINGS)
    head = [Dense(32 * len(POOLINGS), 16), Normalize()]
    modules = [Transformer(str(tiny_model)), pooled, *head]
    reference = SentenceTransformer(modules=modules, device="cpu")
    folder = tmp_path / "model"
    reference.save(str(folder))
    facts = read_model_info(folder)
    core = text_embedding.TASK.core(facts, {})
    packed = layout == "packed"
    inputs = (INPUT_IDS, ROW_LENGTH, *([ROW_OFFSET] if packed else []))
    export_onnx(folder, facts, core, inputs, packed=packed, target=tmp_path / "onnx")
    run = open_onnx(tmp_path / "onnx/model.onnx", core, inputs, pad_token_id=facts.pad_token_id)
    texts = ["a", "hello there", "a much longer text " * 5, "one more text of a few words", "?"]
    encoded = [reference.tokenizer(text)["input_ids"] for text in texts]
    rows: list[Sample] = [TokenRow(tuple(ids), len(ids)) for ids in encoded]
    expected = reference.encode(texts)
    vectors = np.stack([outputs["sentence_embedding"] for outputs in run(rows)])
    assert np.abs(vectors - expected).max() < 1e-5
    plain = reference_outputs(folder, facts, core, rows, loader="SentenceTransformer")
    assert np.abs(np.stack([row[0] for row in plain]) - expected).max() < 1e-5


@pytest.mark.long
def test_an_export_again_is_the_same_to_the_byte(tmp_path: Path) -> None:
    folder, facts = models.exported("bert", "embedding", "packed")
    core, inputs = models.HEADS["embedding"], models.LAYOUT_INPUTS["packed"]
    export_onnx(folder, facts, core, inputs, packed=True, target=tmp_path)
    path = folder / "onnx/model.onnx"
    assert (tmp_path / "model.onnx").read_bytes() == path.read_bytes()


@pytest.mark.filterwarnings("ignore")
def test_onnx_runtime_computes_operators_as_torch_does() -> None:
    """A batch of one keeps its axis, a padding before a pooling its zeros, a norm its epsilon."""
    import torch
    from torch.nn.functional import max_pool2d, pad

    class Network(torch.nn.Module):
        def forward(self, *tensors: Any) -> Any:
            (pixels,) = tensors
            pooled = max_pool2d(pad(pixels, (1, 1, 1, 1)), 3, 2).flatten(1)
            none = (pooled * 0 + 1e-9).rsqrt() * 0
            return pooled + pixels.amax((2, 3)).squeeze()[:, None] + none

    example = -torch.rand(3, 1, 4, 4) - 1
    proto = convert(Network(), (example,), (({0: torch.export.Dim("rows")},),), ["pixels"], ["max"])
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    for count in (3, 1):
        pixels = example[:count]
        wanted = max_pool2d(pad(pixels, (1, 1, 1, 1)), 3, 2).flatten(1) + pixels.amax((2, 3))
        (found,) = session.run(None, {"pixels": pixels.numpy()})
        assert np.abs(found - wanted.numpy()).max() < 1e-6, count


SEQUENCES = "AutoModelForSequenceClassification"
SEQ2SEQ = {
    "d_model": 32,
    "vocab_size": models.VOCABULARY,
    "max_position_embeddings": 96,
    **{f"{side}_layers": 1 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 2 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 48 for side in ("encoder", "decoder")},
    **{"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2},
}
T5 = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_heads": 2, "vocab_size": 120}
SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
LINEAR: dict[str, Any] = {
    **{"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8},
    **{"linear_num_value_heads": 2, "linear_num_key_heads": 2, "layer_types": ["linear_attention"]},
    **{"shared_expert_intermediate_size": 8, "num_key_value_heads": 2, "head_dim": 8},
}
SPARSE = {"block_size": 4, "num_random_blocks": 1, "max_position_embeddings": 96}


def test_weights_that_a_head_lacks_are_refused_unless_nothing_reads_them(tmp_path: Path) -> None:
    for saved, asked in (
        ("AutoModel", SEQUENCES),
        ("AutoModelForMaskedLM", "AutoModelForQuestionAnswering"),
        ("AutoModelForTokenClassification", SEQUENCES),
    ):
        models.save_model("bert", saved, tmp_path / saved)
        check_refused("lacks weights of BertFor", load_model, tmp_path / saved, asked)
    encoder = load_model(tmp_path / "AutoModelForMaskedLM", "AutoModel")
    assert not encoder.pooler.dense.weight.detach().any()
    image = "AutoModelForImageClassification"
    check_refused(image, load_model, tmp_path / "AutoModel", image)


def test_a_config_that_is_not_that_of_the_weights_is_refused(tmp_path: Path) -> None:
    models.save_model("bert", SEQUENCES, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    held = len(config.get("id2label", "ab"))
    names = [f"label {number}" for number in range(held + 1)]
    cases: tuple[tuple[dict[str, Any], list[str]], ...] = (
        ({"id2label": dict(enumerate(names))}, [f"{held + 1} ({', '.join(names)})", f"has {held}"]),
        ({"intermediate_size": 8}, ["other sizes than the weights have", "by config.json"]),
    )
    for changes, words in cases:
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
        check_refused(words, load_model, tmp_path, SEQUENCES)
    images = transformers.PvtConfig(image_size=64, id2label={0: "a", 1: "b"}, num_labels=5)
    transformers.PvtForImageClassification(images).save_pretrained(tmp_path / "pvt")
    words = ["id2label in config.json", "2 labels, and num_labels is 5"]
    check_refused(words, load_model, tmp_path / "pvt", "AutoModelForImageClassification")


def test_a_config_that_asks_for_tuples_changes_nothing(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=9
    )
    transformers.BertModel(config).save_pretrained(tmp_path)
    change(tmp_path / "config.json", return_dict=False, torchscript=True)
    model = load_model(tmp_path, "AutoModel")
    assert model(torch.tensor([[1, 2]])).last_hidden_state.shape == (1, 2, 8)


def test_a_weight_that_is_no_number_is_named(tmp_path: Path) -> None:
    models.save_model("bert", "AutoModel", tmp_path)
    broken = transformers.AutoModel.from_pretrained(tmp_path)
    broken.embeddings.word_embeddings.weight.data[7, 3] = torch.nan
    broken.save_pretrained(tmp_path)
    words = ["1 of", "embeddings.word_embeddings.weight", "NaN"]
    check_refused(words, load_model, tmp_path, "AutoModel")


def add_weights(folder: Path, *names: str) -> None:
    """Add a weight of each name to the checkpoint in a folder."""
    file = folder / "model.safetensors"
    weights = load_file(file) | {name: torch.ones(2, 3) for name in names}
    save_file(weights, file, metadata={"format": "pt"})


IGNORED = {
    "encoder.layer.0.attention.self.distance_embedding.weight": ["BertModel does not use"],
    "bert.encoder.layer.0.attention.self.query.lora_A.weight": ["Merge the adapter", "query.lora"],
    "bert.encoder.layer.1.attention.self.query.weight": ["1 of them: bert.encoder.layer.1"],
    "embeddings.other.weight": ["save_pretrained` of the class"],
}
ALLOWED = (
    "cls.predictions.bias",
    "cls.seq_relationship.weight",
    "classifier.out_proj.weight",
    "bert.embeddings.position_ids",
    "vision_model.encoder.layers.0.mlp.fc1.weight",
    "decoder.block.0.layer.0.SelfAttention.q.weight",
    "logit_scale",
)


def test_weights_of_the_base_model_that_its_class_ignores_are_refused(tmp_path: Path) -> None:
    for number, (name, words) in enumerate(IGNORED.items()):
        models.save_model("bert", "AutoModel", tmp_path / str(number))
        add_weights(tmp_path / str(number), name)
        check_refused([name, *words], load_model, tmp_path / str(number), "AutoModel")
    models.save_model("bert", "AutoModel", tmp_path)
    add_weights(tmp_path, *ALLOWED)
    assert load_model(tmp_path, "AutoModel").encoder.layer[0].output.dense.weight.abs().max() > 0
    models.save_model("bert", SEQUENCES, tmp_path)
    add_weights(tmp_path, "classifier.lora_B.weight")
    check_refused(["classifier.lora_B.weight"], load_model, tmp_path, SEQUENCES)
    load_model(tmp_path, "AutoModel")  # without the head


def test_a_kind_of_positions_that_a_class_ignores_is_refused(tmp_path: Path) -> None:
    for kind in ("relative_key", "relative_key_query", "alibi"):
        models.save_model("bert", SEQUENCES, tmp_path, position_embedding_type=kind)
        for auto_class in ("AutoModel", SEQUENCES):
            words = ["position_embedding_type in config.json", kind, "transformers 4.57"]
            check_refused(words, load_model, tmp_path, auto_class)
    models.save_model("bert", SEQUENCES, tmp_path, position_embedding_type="absolute")
    load_model(tmp_path, SEQUENCES)
    models.save_model("roberta", SEQUENCES, tmp_path, position_embedding_type="relative_key")
    check_refused("RobertaForSequenceClassification of this", load_model, tmp_path, SEQUENCES)
    # The weights of the checkpoint are named first, with the same remedy.
    name = "roberta.encoder.layer.0.attention.self.distance_embedding.weight"
    add_weights(tmp_path, name)
    check_refused([name, "transformers 4.57"], load_model, tmp_path, SEQUENCES)
    sizes: dict[str, Any] = {**SIZES, "vocab_size": 33, "mask_token_id": 4, "pad_token_id": 1}
    for kind in ("rotary", "relative_key"):
        config = transformers.EsmConfig(**sizes, position_embedding_type=kind)
        transformers.EsmModel(config).save_pretrained(tmp_path / kind)
        add_weights(tmp_path / kind, "embeddings.position_embeddings.weight")
    load_model(tmp_path / "rotary", "AutoModel")  # with a table that this kind does not read
    check_refused(["EsmModel", "relative_key"], load_model, tmp_path / "relative_key", "AutoModel")


@pytest.mark.parametrize(
    ("kind", "settings", "weights", "encoder_decoder", "loaded"),
    [
        ("t5", T5, "all", True, "T5EncoderModel"),
        ("t5", T5, "encoder", False, "T5EncoderModel"),  # as T5EncoderModel itself writes it
        ("bart", SEQ2SEQ, "all", True, "BartModel"),  # runs as a whole, as sentence-transformers
        ("bart", SEQ2SEQ, "encoder", True, "BartEncoder"),
        ("marian", SEQ2SEQ, "all", True, "MarianEncoder"),
    ],
)
def test_of_an_encoder_decoder_the_part_that_embeds_is_loaded(
    tmp_path: Path, kind: str, settings: Any, weights: str, encoder_decoder: bool, loaded: str
) -> None:
    config = transformers.AutoConfig.for_model(kind, **settings)
    model = transformers.AutoModelForSeq2SeqLM.from_config(config).eval()
    kept = model.state_dict()
    if weights == "encoder":
        kept = {name: value for name, value in kept.items() if "decoder" not in name}
    model.save_pretrained(tmp_path, state_dict=kept)
    change(tmp_path / "config.json", is_encoder_decoder=encoder_decoder)
    found = load_model(tmp_path, "AutoModel")
    assert type(found).__name__ == loaded
    ids = torch.tensor([[7, 9, 8, 2]])
    if loaded != "BartModel":
        want = model.get_encoder()(input_ids=ids).last_hidden_state
        assert torch.equal(found(input_ids=ids).last_hidden_state, want)


def test_an_encoder_without_its_weights_is_refused(tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model("marian", **SEQ2SEQ)
    model = transformers.AutoModelForSeq2SeqLM.from_config(config)
    kept = {name: value for name, value in model.state_dict().items() if "fc1" not in name}
    model.save_pretrained(tmp_path, state_dict=kept)
    words = ["MarianEncoder", "2 missing: layers.0.fc1"]
    check_refused(words, load_model, tmp_path, "AutoModel")


def test_models_that_a_row_of_tokens_does_not_decide_are_refused(tmp_path: Path) -> None:
    for number, (config, words) in enumerate(
        (
            (transformers.BigBirdConfig(**SIZES, **SPARSE), ["attention_type", "original_full"]),
            (transformers.LayoutLMConfig(**SIZES), ["`bbox`", "texts alone"]),
            (transformers.Qwen3NextConfig(**SIZES, **LINEAR), ["chunks", "Qwen3NextGatedDelta"]),
        )
    ):
        folder = tmp_path / str(number)
        transformers.AutoModel.from_config(config).save_pretrained(folder)
        check_refused(words, load_model, folder, "AutoModel")
    change(tmp_path / "0/config.json", attention_type="original_full")
    assert load_model(tmp_path / "0", "AutoModel").config.attention_type == "original_full"


def test_a_model_of_sound_is_refused_in_words(tmp_path: Path) -> None:
    sizes = {key: value for key, value in SEQ2SEQ.items() if "position" not in key}
    config = transformers.WhisperConfig(num_mel_bins=16, **sizes)
    transformers.WhisperModel(config).save_pretrained(tmp_path)
    words = ["texts or images", "WhisperModel, which takes input_feat"]
    check_refused(words, load_model, tmp_path, "AutoModel")
    transformers.WhisperFeatureExtractor(feature_size=16).save_pretrained(tmp_path)
    check_refused(["text or image model", "audio model"], read_model_info, tmp_path)
