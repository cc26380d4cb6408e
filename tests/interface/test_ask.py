"""`triptych infer`: the command line's words to rows, and answers to JSON or readable lines."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from client_play import PLAYED
from client_toy import Toy, infer, serve_toy
from triptych.base.errors import UserError
from triptych.client.rows import (
    InputRow,
    describe_answer,
    parse_parameters,
    read_input_rows,
    send_rows,
)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toy]:
    """A server with the pipelines of every task."""
    with serve_toy(tmp_path_factory.mktemp("played"), tuple(PLAYED)) as served:
        yield served


def inputs_of(questions: list[InputRow]) -> list[dict[str, Any]]:
    return [question.inputs for question in questions]


def answers(toy: Toy, pipeline: str, questions: list[InputRow], **parameters: Any) -> Any:
    return send_rows(pipeline, questions, url=toy.url, parameters=parameters, timeout_s=60.0)


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


@pytest.mark.parametrize(
    ("line", "options", "field", "said"),
    [
        ("no json", [], "rows.jsonl:1", "must be a JSON object"),
        ('["text"]', [], "rows.jsonl:1", "must be a JSON object"),
        ('{"text": 7}', [], "rows.jsonl:1: text", "must be a string. Given: 7"),
        ('{"text": "a", "id": []}', [], "rows.jsonl:1: id", "other columns with --out"),
        ('{"text": "a", "parameters": 7}', [], "rows.jsonl:1: parameters", "must be an object"),
        ('{"text": "a", "parameters": {"x": [7]}}', [], "parameters.x", "list of strings"),
        ('{"image": "nowhere.png"}', [], "rows.jsonl:1", "nowhere.png"),
        ('{"image": "nul\\u0000"}', [], "rows.jsonl:1", "must be a readable file"),
        ("\n\n", [], "rows.jsonl", "must have rows"),
        ('{"text": "a"}', ["b"], "--text", "cannot be combined with lines that have this input"),
        ('{"text": "a"}', ["b", "c"], "--text", "at most once beside a file of rows"),
    ],
)
def test_a_line_that_is_no_row_is_named(
    tmp_path: Path, line: str, options: list[str], field: str, said: str
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(line)
    with pytest.raises(UserError) as caught:
        read_input_rows(options, [], [], file)
    assert caught.value.field.endswith(field)
    assert said in caught.value.message


def test_inputs_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    for options, field in (
        (([], [], [], None), "--text"),
        (([], [], [tmp_path / "nowhere.png"], None), "--image"),
        (([], [], [], tmp_path / "nowhere.txt"), "--file"),
    ):
        with pytest.raises(UserError) as caught:
            read_input_rows(*options)
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


@pytest.mark.server
def test_every_output_comes_back_as_plain_data(toy: Toy, tmp_path: Path) -> None:
    found = answers(toy, "tagger", read_input_rows(["für Anna", "none"], [], [], None))
    anna = {"entity": "simple", "text": "Anna", "start": 4, "end": 8, "score": 0.75}
    assert found == [{"entities": [anna]}, {"entities": []}]
    answered = answers(toy, "reader", read_input_rows(["w"], ["now", "where"], [], None))
    assert answered[0] == {"answer": "w", "score": 0.25, "start": 2, "end": 17}
    image = tmp_path / "a.png"
    image.write_bytes(b"\xff\x00")
    (seen,) = answers(toy, "seer", read_input_rows([], [], [image], None), top_k=2)
    assert seen["score"] == [1.0, 0.5]
    (vectors,) = answers(toy, "embedder", read_input_rows(["a"], [], [], None), encoding="binary")
    assert vectors["embedding"] == []
    assert len(vectors["embedding_int8"]) == 1


@pytest.mark.server
def test_rows_with_parameters_of_their_own_keep_their_order(toy: Toy, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    counts = [3, 1, 3, 2]
    lines = [{"text": f"t{i}", "parameters": {"top_k": k}} for i, k in enumerate(counts)]
    file.write_text("\n".join(map(json.dumps, [*lines, {"text": "refuse"}])))
    questions = read_input_rows([], [], [], file)
    rows = answers(toy, "classifier", questions[:4], top_k=5)
    assert [len(row["label"]) for row in rows] == counts
    (alone,) = answers(toy, "classifier", read_input_rows(["t2"], [], [], None), top_k=3)
    assert rows[2] == alone
    with pytest.raises(UserError, match="row 4: `text` must not be refused"):
        answers(toy, "classifier", questions)


@pytest.mark.server
@pytest.mark.parametrize(
    ("pipeline", "given", "message"),
    [
        ("reader", ["text"], "`--text-pair` is required. Given: text. Give the inputs of `reader`"),
        (
            "classifier",
            ["text", "text_pair"],
            "`--text-pair` is not an input of `classifier`. Given: ",
        ),
        ("seer", ["text"], "`--image` is required. Given: text. .* each row: image"),
        ("tagger", ["image"], "`--text` is required. Given: image. .* each row: text"),
    ],
)
def test_inputs_that_are_not_the_pipelines_are_a_mistake(
    toy: Toy, pipeline: str, given: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        answers(toy, pipeline, [InputRow(dict.fromkeys(given, "a"), "a")])
    row = InputRow(dict.fromkeys(given, "a"), "a", "rows.jsonl:4")
    with pytest.raises(UserError, match=r"^`rows\.jsonl:4` must"):
        answers(toy, pipeline, [row])


@pytest.mark.server
def test_the_command_asks_and_prints(toy: Toy) -> None:
    words = ("--text", "a b", "--parameter", "candidate_labels=[billing, delivery]")
    shown = infer(toy, "classifier", *words)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.splitlines() == [
        "'a b'",
        "  label: billing  score: 0.5000",
        "  label: delivery  score: 0.5000",
    ]
    done = infer(toy, "reranker", "-t", "n", "--text-pair", "nn", "--text-pair", "o", "--json")
    assert json.loads(done.stdout) == [{"score": 2.0}, {"score": 0.0}]
    refused = infer(toy, "reranker", "--text", "q", "--json")
    assert refused.returncode == 2
    assert json.loads(refused.stdout)["error"]["field"] == "--text-pair"
