"""Options that come as input tensors: read, compared with parameters, or refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from triptych.client import InvalidRequestError
from triptych.client.wire import Parameter, infer_request
from triptych.runtime.cached_options import refuse_options
from triptych.runtime.request_errors import RequestError
from triptych.runtime.triton_io import add_options, check_parameters

RULES: dict[str, dict[str, Any]] = {
    "top_k": {"type": "int", "min": 1, "max": 9},
    "multi_label": {"type": "bool"},
    "share": {"type": "float"},
    "encoding": {"type": "str", "choices": ["float", "int8"]},
    "candidate_labels": {"type": "list"},
}


class FakeTensor:
    def __init__(self, *rows: list[Any], dtype: Any = np.object_) -> None:
        self._rows = np.array(rows, dtype)

    def as_numpy(self) -> Any:
        return self._rows


def read(parameters: str = "{}", /, **tensors: Any) -> Any:
    return check_parameters(add_options(parameters, tensors, RULES), RULES, {})


def test_values_are_those_of_parameters() -> None:
    found = read(
        text=FakeTensor([b"not an option"]),
        top_k=FakeTensor([3], [3], dtype=np.int32),
        multi_label=FakeTensor([True], dtype=np.bool_),
        share=FakeTensor([0.5], dtype=np.float32),
        encoding=FakeTensor([b"int8"]),
    )
    assert found == {"top_k": 3, "multi_label": True, "share": 0.5, "encoding": "int8"}
    assert [type(value) for value in found.values()] == [int, bool, float, str]
    # A list has an element for each item, or one like the parameter.
    for row, expected in (
        ([b"a, b", b"c"], ["a, b", "c"]),
        ([b"a, b"], ["a", "b"]),
        ([b'["a, b"]'], ["a, b"]),
    ):
        assert read(candidate_labels=FakeTensor(row, row)) == {"candidate_labels": expected}
    # A parameter of the same value is accepted.
    three = FakeTensor([3], dtype=np.int32)
    assert read('{"top_k": 3, "encoding": "int8"}', top_k=three) == {"top_k": 3, "encoding": "int8"}
    labels = FakeTensor([b"a", b"b"])
    found = read('{"candidate_labels": "a,b"}', candidate_labels=labels)
    assert found == {"candidate_labels": ["a", "b"]}


REFUSED: list[tuple[str, dict[str, FakeTensor], str]] = [
    (
        '{"top_k": 2}',
        {"top_k": FakeTensor([3], dtype=np.int32)},
        r"`input top_k` must have the value of the request parameter .* 3, and 2 as parameter",
    ),
    (
        '{"candidate_labels": "a,c"}',
        {"candidate_labels": FakeTensor([b"a", b"b"])},
        "`input candidate_labels` must have the value",
    ),
    (
        "{}",
        {"top_k": FakeTensor([3], [2], dtype=np.int32)},
        "`input top_k` must have the same value in all rows",
    ),
    ("{}", {"top_k": FakeTensor([0], dtype=np.int32)}, "an integer from 1 to 9"),
    ("{}", {"encoding": FakeTensor([b"int4"])}, "`input encoding` must be one of float, int8"),
    ("{}", {"encoding": FakeTensor([b"\xff"])}, "`input encoding` must be valid UTF-8"),
    ("{}", {"candidate_labels": FakeTensor([])}, "`input candidate_labels` must not be empty"),
]


def test_a_wrong_or_contradicting_option_is_refused() -> None:
    for text, tensors, message in REFUSED:
        with pytest.raises(RequestError, match=message) as caught:
            read(text, **tensors)
        assert caught.value.message.startswith("[invalid_request")


def test_a_pipeline_with_a_cache_refuses_parameters() -> None:
    for text in ("{}", '{"triton_x": 1, "trace-parent": 1, "other": 1}'):
        refuse_options(text, RULES)
    with pytest.raises(RequestError, match="input tensor candidate_labels"):
        refuse_options('{"candidate_labels": "a"}', RULES)


def test_the_client_sends_the_bytes_that_the_step_reads() -> None:
    options = {"top_k": "INT32", "multi_label": "BOOL", "share": "FP32", "encoding": "BYTES"}
    parameters: dict[str, Parameter] = {"top_k": 3, "multi_label": True, "share": 2}
    request = infer_request(
        "p", {"text": [b"x", b"y"]}, [0, 1], {**parameters, "encoding": "a", "timeout": 5}, options
    )
    assert list(request.parameters) == ["timeout"]
    raw = dict(zip((each.name for each in request.inputs), request.raw_input_contents, strict=True))
    assert {(each.name, each.datatype) for each in request.inputs} == {
        ("text", "BYTES"), *options.items()
    }  # fmt: skip
    assert all(list(each.shape) == [2, 1] for each in request.inputs)
    for name, dtype, value in (
        ("top_k", np.int32, 3), ("multi_label", np.bool_, True), ("share", np.float32, 2)
    ):  # fmt: skip
        assert np.frombuffer(raw[name], dtype).tolist() == [value, value]
    assert raw["encoding"] == b"\1\0\0\0a" * 2
    wrong: tuple[tuple[str, Parameter], ...] = (
        ("top_k", "3"),
        ("top_k", True),
        ("top_k", 2**40),
        ("multi_label", 1),
        ("encoding", 1),
        ("encoding", "\ud800"),
    )
    for name, given in wrong:
        with pytest.raises(InvalidRequestError, match=f"`(parameter )?{name}`"):
            infer_request("p", {"text": [b"x"]}, [0], {name: given}, options)


def test_parameters_of_the_transport_are_ignored_and_misspelled_options_are_not() -> None:
    carried = {
        "content_type": "str",
        "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "x_request_id": "7",
        "x-forwarded-for": "127.0.0.1",
        "triton_enable_empty_final_response": True,
    }
    assert check_parameters(json.dumps({**carried, "top_k": 2}), RULES, {}) == {"top_k": 2}
    for name in ("topk", "top-k", "normalize", "content_types"):
        with pytest.raises(RequestError, match=f"parameter {name}` is not known"):
            check_parameters(json.dumps({name: 2}), RULES, {})


def test_a_rule_with_one_bound_names_it() -> None:
    for rule, value, words in (
        ({"type": "int", "min": 1}, 0, "an integer of at least 1"),
        ({"type": "float", "max": 0.5}, 0.6, "a number of at most 0.5"),
        ({"type": "int", "min": 1, "max": 9}, 10, "an integer from 1 to 9"),
    ):
        with pytest.raises(RequestError, match=f"must be {words}. Given: {value}"):
            check_parameters(json.dumps({"size": value}), {"size": rule}, {})
