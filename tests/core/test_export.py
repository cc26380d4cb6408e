"""The exported graphs, both layouts, against sentence-transformers and against themselves."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import architectures as models
from conftest import LAYOUTS, share_export_registry
from mistakes import refusal
from triptych.base.tensors import INPUT_IDS, ROW_LENGTH, ROW_OFFSET, TokenRow
from triptych.core.export.layout_check import find_text_core
from triptych.core.export.to_onnx import convert, export_onnx
from triptych.core.gate.reference import reference_outputs
from triptych.core.gate.runs import RunBatch, open_onnx
from triptych.core.requests import Sample
from triptych.spec.model_info import ModelInfo
from triptych.spec.model_source import read_model_info
from triptych.spec.tasks import find_task
from triptych.spec.tasks.catalog import TEXT_EMBEDDING

pytestmark = pytest.mark.build

INPUTS = {
    "bucketed": (INPUT_IDS, ROW_LENGTH),
    "packed": (INPUT_IDS, ROW_LENGTH, ROW_OFFSET),
}


def token_row(ids: Sequence[int]) -> TokenRow:
    return TokenRow(tuple(ids), len(ids))


ROWS: list[Sample] = [token_row(ids) for ids in ([11, 12], [11, 72, 12], [11, *range(20, 60), 12])]
POOLINGS = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
CORE = models.HEADS["embedding"]


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory, minilm_folder: Path) -> Path:
    """Poolings need no more of an encoder."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertModel

    folder = tmp_path_factory.mktemp("one") / "model"
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    BertModel(BertConfig(**sizes, num_hidden_layers=1)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(minilm_folder).save_pretrained(folder)
    return folder


def modules_for(folder: Path, pooling: tuple[str, ...], *, dense: bool) -> Any:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Dense, Normalize, Pooling, Transformer

    width = 32 * len(pooling)
    modules: list[Any] = [Transformer(str(folder)), Pooling(32, pooling_mode=pooling)]
    if dense:
        modules += [Dense(width, 16), Normalize()]
    return SentenceTransformer(modules=modules, device="cpu")


def vectors_of(run: RunBatch, rows: Sequence[Sample]) -> Any:
    return np.stack([outputs["sentence_embedding"] for outputs in run(rows)])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("pooling", "dense", "layout"),
    [
        (POOLINGS, False, "packed"),
        (("max", "cls"), True, "bucketed"),
        pytest.param(POOLINGS, False, "bucketed", marks=pytest.mark.long),
        pytest.param(("max", "cls"), True, "packed", marks=pytest.mark.long),
    ],
)
def test_every_pooling_equals_sentence_transformers(
    one_layer: Path, tmp_path: Path, layout: str, pooling: tuple[str, ...], dense: bool
) -> None:
    share_export_registry()
    reference = modules_for(one_layer, pooling, dense=dense)
    reference.save(str(tmp_path / "model"))
    folder = tmp_path / "model"
    facts = read_model_info(folder)
    core = TEXT_EMBEDDING.core(facts, {})
    packed, inputs = layout == "packed", INPUTS[layout]
    export_onnx(folder, facts, core, inputs, packed=packed, target=tmp_path / "onnx")
    run = open_onnx(tmp_path / "onnx/model.onnx", core, inputs, pad_token_id=facts.pad_token_id)
    texts = ["a", "hello there", "a much longer text " * 5, "one more text of a few words", "?"]
    rows = [token_row(reference.tokenizer(text)["input_ids"]) for text in texts]
    expected = reference.encode(texts)
    assert np.abs(vectors_of(run, rows) - expected).max() < 1e-5
    plain = reference_outputs(folder, facts, core, rows)
    assert np.abs(np.stack([row[0] for row in plain]) - expected).max() < 1e-5


class Artifact(NamedTuple):
    """An export of a random BERT, which other tests use, too: not to be written to."""

    folder: Path
    facts: ModelInfo
    layout: str

    @property
    def path(self) -> Path:
        return self.folder / "onnx/model.onnx"

    def open(self, *, pad_token_id: int = 0) -> RunBatch:
        inputs = models.LAYOUT_INPUTS[self.layout]
        return open_onnx(self.path, CORE, inputs, pad_token_id=pad_token_id)


@pytest.fixture(scope="module", params=LAYOUTS)
def artifact(request: pytest.FixtureRequest) -> Artifact:
    return Artifact(*models.exported("bert", "embedding", request.param), request.param)


@pytest.mark.long
def test_an_export_again_is_the_same_to_the_byte(artifact: Artifact, tmp_path: Path) -> None:
    packed, inputs = artifact.layout == "packed", models.LAYOUT_INPUTS[artifact.layout]
    export_onnx(artifact.folder, artifact.facts, CORE, inputs, packed=packed, target=tmp_path)
    assert (tmp_path / "model.onnx").read_bytes() == artifact.path.read_bytes()


def test_what_a_pad_holds_changes_nothing(artifact: Artifact) -> None:
    tight = vectors_of(artifact.open(), ROWS)
    assert np.abs(vectors_of(artifact.open(pad_token_id=7), ROWS) - tight).max() < 1e-6
    if artifact.layout != "packed":
        return
    import onnxruntime

    session = onnxruntime.InferenceSession(artifact.path)
    ids = np.full((3, 50), 119, dtype=np.int32)
    lengths = np.zeros((3, 1), dtype=np.int32)
    for index, row in enumerate(ROWS):
        assert isinstance(row, TokenRow)
        ids[index, : len(row.ids)], lengths[index] = row.ids, len(row.ids)
    feed = {"row_length": lengths, "row_stride": np.full(3, 50, dtype=np.int32)}
    feed["first_segment"] = lengths
    feed["row_offset"] = np.zeros((3, 1), dtype=np.int32)
    padded = session.run(None, {"input_ids": ids.ravel(), **feed})[0]
    assert np.abs(padded - tight).max() < 1e-6


def test_the_graph_uses_standard_operators_and_tells_nothing_of_this_machine(
    artifact: Artifact,
) -> None:
    import onnx

    model, content = onnx.load(artifact.path), artifact.path.read_bytes()
    assert {node.domain for node in model.graph.node} == {""}
    assert str(Path.cwd()).encode() not in content
    assert str(Path(onnx.__file__).parents[2]).encode() not in content


@pytest.mark.filterwarnings("ignore")
def test_onnx_runtime_computes_operators_as_torch_does() -> None:
    """A batch of one keeps its axis, a padding before a pooling its zeros, a norm its epsilon."""
    import onnxruntime
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


@pytest.mark.filterwarnings("ignore")
def test_a_convolution_over_padding_is_named(tmp_path: Path) -> None:
    """The classifier of one layer reads four tokens beyond the first."""
    import torch
    from transformers import ConvBertConfig, ConvBertForSequenceClassification

    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
    torch.manual_seed(0)
    config = ConvBertConfig(**sizes, num_hidden_layers=1, vocab_size=99, initializer_range=0.1)
    model = ConvBertForSequenceClassification(config).eval()
    facts = ModelInfo("", "ConvBertForSequenceClassification", 32, 64, 0, labels=("a", "b"))
    core = find_task("text-classification").core(facts, {})
    with torch.no_grad():
        error = refusal(find_text_core, model, facts, core, tmp_path, packed=False)
    assert "whose convolution `convbert.encoder.layer.0.attention" in error.message
