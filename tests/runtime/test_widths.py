"""Which requests of a bucketed batch are padded further, to share a batch of the core."""

import numpy as np

from triptych.repository.render import batch_tokens
from triptych.runtime.bucketing import choose_padded_lengths, widen_rows
from triptych.runtime.row_types import CoreRows


def request(width: int, rows: int = 1) -> CoreRows:
    ids = np.arange(1, rows * width + 1, dtype=np.int32).reshape(rows, width)
    return CoreRows(
        {"input_ids": ids, "row_length": np.full((rows, 1), width, np.int32)}, [], width
    )


def test_a_request_is_widened_where_that_costs_less_than_a_batch() -> None:
    several = [request(48), request(16), request(80), request(16)]
    for requests, tokens, expected in (
        (several, 0, [48, 16, 80, 16]),  # a processor: padding is never worth it
        (several, 64, [48, 48, 80, 48]),  # 2 x 32 tokens; 3 x 32 more would be 96
        (several, 96, [80, 80, 80, 80]),
        ([request(16), request(80), request(80)], 63, [16, 80, 80]),  # 64 tokens are dearer
        ([request(16, rows=4), request(48)], 127, [16, 48]),  # rows count
        ([request(16, rows=4), request(48)], 128, [48, 48]),
    ):
        assert choose_padded_lengths(requests, batch_tokens=tokens) == expected


def test_a_widened_request_keeps_its_tokens_and_lengths() -> None:
    narrow = request(3, rows=2)
    wide = widen_rows(narrow, 5, 7)
    assert wide.tensors["input_ids"].tolist() == [[1, 2, 3, 7, 7], [4, 5, 6, 7, 7]]
    assert wide.tensors["input_ids"].dtype == np.int32
    assert (wide.width, wide.row_count) == (5, 2)
    assert wide.tensors["row_length"] is narrow.tensors["row_length"]
    assert widen_rows(narrow, 3, 7) is narrow


def test_what_a_batch_costs_goes_by_the_model() -> None:
    assert [batch_tokens("gpu", hidden) for hidden in (384, 768, 1024, 0)] == [1024, 512, 384, 512]
    assert batch_tokens("cpu", 384) == 0
