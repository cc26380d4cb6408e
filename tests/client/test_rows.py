"""Rows of `triptych infer`: from the words of the command line and files, and readable answers."""

from pathlib import Path
from typing import Any

import pytest

from triptych.base.errors import UserError
from triptych.client.rows import (
    InputRow,
    describe_answer,
    parse_parameters,
    read_input_rows,
)


def inputs_of(questions: list[InputRow]) -> list[dict[str, Any]]:
    return [question.inputs for question in questions]


def test_what_is_given_once_goes_with_every_row(tmp_path: Path) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("c\n\nd\n")
    texts = [{"text": text} for text in ("a", "b", "c", "", "d")]
    assert inputs_of(read_input_rows(["a", "b"], [], [], file)) == texts
    pairs = [{"text": "q", "text_pair": "1"}, {"text": "q", "text_pair": "2"}]
    assert inputs_of(read_input_rows(["q"], ["1", "2"], [], None)) == pairs
    pairs = [{"text": "q", "text_pair": "1"}, {"text": "r", "text_pair": "1"}]
    assert inputs_of(read_input_rows(["q", "r"], ["1"], [], None)) == pairs
    with pytest.raises(UserError, match="Given: --text 2, --text-pair 3") as caught:
        read_input_rows(["q", "r"], ["1", "2", "3"], [], None)
    assert caught.value.field == "--text, --text-pair"


def test_a_jsonl_file_has_the_inputs_by_name(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "a.png").write_bytes(b"\x89PNG")
    file = tmp_path / "inner" / "rows.jsonl"
    file.write_text(
        '{"text": "a\\u2028", "parameters": {"top_k": 2, "candidate_labels": ["x", "y"]}}\n\n'
        '{"image": "a.png"}\n',
        encoding="utf-8",
    )
    first, second = read_input_rows([], [], [], file)
    assert (first.inputs, first.source) == ({"text": "a\u2028"}, f"{file}:1")
    assert first.parameters == {"top_k": 2, "candidate_labels": '["x", "y"]'}
    assert (second.inputs, second.shown) == ({"image": b"\x89PNG"}, "a.png")
    assert second.source == f"{file}:3"
    file.write_text('{"text_pair": "p"}\n{"text_pair": "q"}')
    rows = read_input_rows(["query"], [], [], file)
    assert inputs_of(rows) == [{"text": "query", "text_pair": pair} for pair in "pq"]
    assert rows[0].shown == "query | p"


def test_a_line_that_is_no_row_is_named(tmp_path: Path) -> None:
    file, none = tmp_path / "rows.jsonl", list[str]()
    for line, options, field, said in (
        ("no json", none, "rows.jsonl:1", "must be a JSON object"),
        ('["text"]', none, "rows.jsonl:1", "must be a JSON object"),
        ('{"text": 7}', none, "rows.jsonl:1: text", "must be a string. Given: 7"),
        ('{"text": "a", "id": []}', none, "rows.jsonl:1: id", "other columns with --out"),
        ('{"text": "a", "parameters": 7}', none, ":1: parameters", "must be an object"),
        ('{"text": "a", "parameters": {"x": [7]}}', none, "parameters.x", "list of strings"),
        ('{"image": "nowhere.png"}', none, "rows.jsonl:1", "nowhere.png"),
        ('{"image": "nul\\u0000"}', none, "rows.jsonl:1", "must be a readable file"),
        ("\n\n", none, "rows.jsonl", "must have rows"),
        ('{"text": "a"}', ["b"], "--text", "cannot be combined with lines that have this input"),
        ('{"text": "a"}', ["b", "c"], "--text", "at most once beside a file of rows"),
    ):
        file.write_text(line)
        with pytest.raises(UserError) as caught:
            read_input_rows(options, [], [], file)
        assert caught.value.field.endswith(field), line
        assert said in caught.value.message, line
    for sources, field in (
        (([], [], [], None), "--text"),
        (([], [], [tmp_path / "nowhere.png"], None), "--image"),
        (([], [], [], tmp_path / "nowhere.txt"), "--file"),
    ):
        with pytest.raises(UserError) as caught:
            read_input_rows(*sources)
        assert caught.value.field == field


def test_parameters_are_read_as_yaml_and_lists_sent_as_json() -> None:
    pairs = [
        "top_k=3",
        "candidate_labels=[billing, delivery, yes, 1.50]",
        "multi_label=true",
        "name=a=b",
    ]
    assert parse_parameters(pairs) == {
        "top_k": 3,
        "candidate_labels": '["billing", "delivery", "yes", "1.50"]',
        "multi_label": True,
        "name": "a=b",
    }
    for wrong in ("x", "=1", "x=", "x={a: 1}", "x=[[a]]", "x=[a"):
        with pytest.raises(UserError, match="must be KEY=VALUE"):
            parse_parameters([wrong])


def test_answers_are_shown_side_by_side() -> None:
    assert describe_answer({"label": ["a", "b"], "score": [0.75, 0.25]}) == [
        "label: a  score: 0.7500",
        "label: b  score: 0.2500",
    ]
    found = [{"entity": "PER", "text": "Anna", "score": 0.5, "start": 0, "end": 4}] * 2
    line = "  entity: PER  text: Anna  score: 0.5000  start: 0  end: 4"
    assert describe_answer({"entities": found}) == ["entities:", line, line]
    assert describe_answer({"entities": []}) == ["entities: none"]
    assert describe_answer({"answer": "x", "score": 0.5}) == ["answer: x  score: 0.5000"]
    assert describe_answer({"embedding": [0.5] * 8, "embedding_int8": []}) == [
        f"embedding: [{', '.join(['0.5000'] * 6)}, …] (8 elements)"
    ]
    assert describe_answer({"embedding": [], "embedding_int8": [1, -2]}) == [
        "embedding_int8: [1, -2]"
    ]
