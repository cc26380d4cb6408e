"""The packed layout: indices, sizes, and operations that compute on packed tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn
from torch.nn import functional

from triptych.base.tensors import INPUT_IDS, ROW_LENGTH, ROW_OFFSET, ROW_SPAN, TokenRow
from triptych.core.export.packed_batch import PackedBatch
from triptych.core.export.packed_ops import PackedOperations
from triptych.core.export.places import (
    SIZES,
    TENSORRT_TILE,
    TILE_OVERHEAD,
    compute_from_shapes,
    compute_from_values,
)
from triptych.core.requests import core_feed, row_starts
from triptych.runtime.packing import pack_rows
from triptych.runtime.packing_spans import MULTIPLE, make_row_span
from triptych.runtime.row_metadata import unpack_rows

pytestmark = pytest.mark.build

PACKED = (INPUT_IDS, ROW_LENGTH, ROW_OFFSET)
LENGTHS = ([1], [16], [17, 1, 40], [256, *[16] * 31], [256] * 4, [5, 64, 3, 3, 120, 7])


def token_rows(lengths: Sequence[int]) -> list[TokenRow]:
    """Rows whose tokens all differ."""
    starts = np.cumsum([0, *lengths]).tolist()
    return [
        TokenRow(tuple(range(start + 1, start + length + 1)), length)
        for start, length in zip(starts, lengths, strict=False)
    ]


@pytest.mark.parametrize("lengths", LENGTHS)
def test_rows_of_a_request_come_end_to_end_and_results_go_back(lengths: list[int]) -> None:
    rows = [list(row.ids) for row in token_rows(lengths)]
    ids, offset = pack_rows(rows, 0)
    count, stride = ids.shape
    assert 0 <= ids.size - sum(lengths) < count
    flat = ids.reshape(-1)
    for index, row in enumerate(rows):
        start = index * stride + int(offset[index, 0])
        assert flat[start : start + len(row)].tolist() == row
    back = unpack_rows(ids[..., None], lengths)
    assert back.shape == (count, max(lengths), 1)
    for slots, row in zip(back[..., 0], rows, strict=True):
        assert slots.tolist() == row + [0] * (max(lengths) - len(row))
    span = make_row_span(lengths)
    longest = -(-max(lengths) // MULTIPLE) * MULTIPLE
    assert longest <= span.size < longest + count


def sizes_of(lengths: Sequence[int], *, from_shapes: bool) -> dict[str, int]:
    """The sizes that a graph computes for a batch."""

    def value(name: str, *axes: int | str) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.INT32, axes)

    nodes = [helper.make_node("Shape", [size.name], [f"{size.name}_is"]) for size in SIZES]
    outputs = [
        helper.make_tensor_value_info(f"{size.name}_is", TensorProto.INT64, [1]) for size in SIZES
    ]
    inputs = [value("input_ids", "tokens"), value("row_length", "rows", 1)]
    inputs += [value(size.name, size.name) for size in SIZES]
    graph = helper.make_graph(nodes, "sizes", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    if from_shapes:
        compute_from_shapes(model)
    else:
        compute_from_values(model, 512)
    onnx.checker.check_model(model)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    feed = {
        "input_ids": np.zeros(sum(lengths), np.int32),
        "row_length": np.array(lengths, np.int32)[:, None],
    }
    if from_shapes:
        feed["longest"] = np.zeros(512, np.int32)
    found = session.run(None, {one.name: feed[one.name] for one in session.get_inputs()})
    return {size.name: int(result[0]) for size, result in zip(SIZES, found, strict=True)}


@pytest.mark.parametrize("lengths", LENGTHS)
def test_tiles_are_chosen_that_cost_least(lengths: list[int]) -> None:
    longest = -(-max(lengths) // MULTIPLE) * MULTIPLE
    tiles = {
        width: sum(-(-length // width) for length in lengths)
        for width in (longest, *(width for width in (16, 32, 64, 128, 256) if width < longest))
    }
    sizes = sizes_of(lengths, from_shapes=False)
    assert sizes["longest"] == longest
    assert sizes["tiles"] == tiles[sizes["tile"]]
    costs = {width: count * (width + TILE_OVERHEAD) for width, count in tiles.items()}
    assert costs[sizes["tile"]] == min(costs.values())
    # Sizes from shapes alone hold every tile.
    sizes = sizes_of(lengths, from_shapes=True)
    needed = sum(-(-length // TENSORRT_TILE) for length in lengths)
    assert sizes["longest"] == 512  # as the server makes it
    assert sizes["tile"] == TENSORRT_TILE
    assert needed <= sizes["tiles"] <= needed + len(lengths)


def batch_of(lengths: Sequence[int], *, tile: int = MULTIPLE, spare: int = 0) -> PackedBatch:
    """A batch of requests of several rows, with `spare` tiles more than are needed."""
    rows = token_rows(lengths)
    feed = core_feed(rows, PACKED, pad_token_id=0)
    tensors = {name: torch.from_numpy(array) for name, array in feed.items()}
    longest = -(-max(lengths) // MULTIPLE) * MULTIPLE
    tiles = sum(-(-length // tile) for length in lengths) + spare
    sizes = [torch.zeros(size) for size in (longest, tile, tiles)]
    names = ("input_ids", "row_length", "row_offset", "row_stride")
    return PackedBatch(*(tensors[name] for name in names), *sizes)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("tile", "spare"), [(16, 0), (32, 3), (512, 0)])
def test_each_arrangement_holds_every_token_in_its_place(
    lengths: list[int], tile: int, spare: int
) -> None:
    batch, rows = batch_of(lengths, tile=tile, spare=spare), token_rows(lengths)
    padded = batch.tokens[batch.token_of_slot]
    queries = batch.tokens[batch.token_of_query]
    keys = batch.tokens[batch.token_of_key]
    bias = batch.key_bias(-1.0)
    for index, (row, start) in enumerate(zip(rows, row_starts(rows, PACKED), strict=True)):
        ids, size = list(row.ids), len(row.ids)
        assert padded[index].tolist() == ids + ids[-1:] * (padded.shape[1] - size)
        places = torch.arange(start, start + size)
        assert padded.reshape(-1)[batch.slot_of_token[places]].tolist() == ids
        assert queries.reshape(-1)[batch.query_of_token[places]].tolist() == ids
        own = {int(query) // tile for query in batch.query_of_token[places]}
        assert len(own) == -(-size // tile)
        for one in own:
            assert keys[one, :size].tolist() == ids
            assert bias[one].tolist() == [0.0] * size + [-1.0] * (bias.shape[1] - size)


class Mixed(nn.Module):
    """Operations as encoders use them, on padded rows."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(2000, 8), nn.Embedding(512, 8)
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, ids: Tensor, valid: Tensor) -> Tensor:
        batch, slots = ids.shape
        positions = torch.arange(slots)[None, :]
        hidden = self.norm(self.words(ids) + self.places(positions))
        hidden = hidden * valid[:, :, None]
        wide = functional.gelu(self.up(hidden))
        heads = wide.view(batch, slots, 3, 8).transpose(1, 2)
        angle = positions[..., None].float().cos()[:, None]
        turned = torch.cat((-heads[..., 4:], heads[..., :4]), -1) * angle + heads
        back = turned.transpose(1, 2).reshape(batch, slots, 24)
        one, two, three = back.chunk(3, -1)
        scale = (one * one).mean(-1, keepdim=True).clamp(min=0.1).rsqrt()
        flat = torch.addmm(self.down.bias, back.view(-1, 24), self.down.weight.T)
        scores = one @ two.transpose(1, 2) - 1e4 * (1 - valid[:, None, :])
        mixed = torch.matmul(scores.softmax(-1), three)
        joined: Tensor = self.down(torch.cat((mixed, two, three), -1))
        return joined + scale + flat.view(batch, slots, 8)


@pytest.mark.parametrize("lengths", LENGTHS[2:])
def test_operations_on_packed_tokens_give_what_they_give_on_padded_rows(lengths: list[int]) -> None:
    torch.manual_seed(0)
    batch, module = batch_of(lengths), Mixed().eval()
    valid = (torch.arange(batch.max_length)[None, :] < batch.length).float()
    mode = PackedOperations(batch)
    with torch.no_grad():
        ids = mode.spread(batch.tokens.long()[None], 1)
        wanted = module(mode.values(ids), valid)
        with mode:
            stands = module(ids, valid)
            summed = stands.cumsum(1)  # no rule knows it
        found = mode.values(stands)
    for index, length in enumerate(lengths):
        assert torch.allclose(found[index, :length], wanted[index, :length], atol=1e-5)
    packed = mode.find(stands)
    assert packed is not None
    assert packed.packed.shape == (1, batch.token_count, 8)
    assert mode.find(summed) is None
    assert torch.equal(summed, torch.cumsum(found, 1))


def test_a_packed_core_for_tensorrt_is_told_the_longest_row_by_a_shape() -> None:
    rows = token_rows([3, 40, 7, 5])
    feed = core_feed(rows, (*PACKED, ROW_SPAN), pad_token_id=0)
    # A request of one row, and one of three whose longest row has 40 tokens.
    assert feed["row_span"].size == 16 + 48
    assert feed["longest"].size == 48
