"""Rows of `triptych infer`, of the command line and of files, and what is written beside them."""

import asyncio
import csv
import datetime
import decimal
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from triptych.base.errors import UserError
from triptych.client import InvalidRequestError, PipelineConfig, PipelineFailedError
from triptych.client.images import encode_images
from triptych.client.wire import encode_rows, has_typed_rows
from triptych.interface.bulk.files import (
    ERROR,
    AnswerColumn,
    RowChunk,
    Table,
    check_columns,
    name_columns,
    open_rows,
)
from triptych.interface.bulk.jobs import BatchLock, BulkOptions, TensorSender
from triptych.interface.bulk.run import Parts, open_table
from triptych.interface.bulk.sending import BatchSizeTuner
from triptych.interface.bulk.writers import open_writer
from triptych.interface.cli.rows import InputRow, describe_answer, parse_parameters, read_input_rows


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


def test_a_series_of_pandas_has_its_rows_in_order() -> None:
    series = pandas.Series(["a", "b"], index=[3, 1])
    assert not has_typed_rows({"text": series})
    assert encode_rows({"text": series}).columns == {"text": [b"a", b"b"]}


def test_one_image_in_place_of_a_list_is_refused() -> None:
    pixels = np.zeros((8, 8, 3), np.uint8)
    wrong: tuple[Any, ...] = (b"GIF89a", "a.png", Path("a.png"), Image.fromarray(pixels), pixels)
    for one in (*wrong, pixels[:, :, 0]):
        with pytest.raises(InvalidRequestError, match="must be a sequence of images"):
            encode_images(one)
    several: Any = np.stack([pixels, pixels])
    assert len(encode_images(several)) == 2


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
    for texts, value, said in (
        ([], "image", "must be INPUT=VALUE. Given: image. Write for example --input image="),
        (["a"], "image=a.png", "cannot be combined with other inputs"),
    ):
        with pytest.raises(UserError) as caught:
            read_input_rows(texts, [], [], None, values=[value])
        assert caught.value.field == "--input"
        assert said in caught.value.message


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
    assert describe_answer({"embedding": [[0.5] * 8] * 3, "box": [[1, 2]] * 2}) == [
        f"embedding: [{', '.join(['0.5000'] * 6)}, …] (8 elements), the first of 3",
        "box: [[1, 2], [1, 2]]",
    ]
    assert describe_answer({"embedding": [], "embedding_int8": [1, -2]}) == [
        "embedding_int8: [1, -2]"
    ]


COLUMNS = [
    AnswerColumn("label", "label", np.object_, (0,)),
    AnswerColumn("score", "score", np.float32, (1,)),
    AnswerColumn("entities", "entities"),
    AnswerColumn("error", ERROR),
]


def answered(table: Table, out: Path, column: str, size: int = 2) -> list[Any]:
    """Every row gets the same answer, but those that are none; the texts that were read."""
    texts: list[Any] = []
    parts, done, failed = Parts(out), 0, 0
    scan = table.scan()
    writer = open_writer(table, scan, out, COLUMNS, json_cells=False)
    with parts.locked({}):
        for chunk in table.chunks({"text": column}, size, 0):
            texts += chunk.columns["text"]
            faults = [chunk.faults.get(row) for row in range(chunk.count)]

            def each(value: Any, faults: list[str | None] = faults) -> list[Any]:
                return [None if fault else value for fault in faults]

            answers = {"label": each(["ü", "b"]), "score": each(0.5), "entities": each([{"a": 1}])}
            failed += len(chunk.faults)
            encoded = writer.encode(chunk, COLUMNS, {**answers, ERROR: faults})
            parts.add(done, chunk.count, 0, writer.pack([encoded]))
            done += chunk.count
        with parts.output() as file:
            writer.join(parts.done().paths, COLUMNS if failed else COLUMNS[:-1], file)
    assert not parts.folder.exists()
    return texts


@pytest.mark.parametrize(
    ("suffix", "separator", "end"),
    [(".csv", ",", "\n"), (".csv", ";", "\r\n"), (".tsv", "\t", "\n")],
)
def test_cells_stay_as_they_are(tmp_path: Path, suffix: str, separator: str, end: str) -> None:
    path, out = tmp_path / f"rows{suffix}", tmp_path / f"out{suffix}"
    rows = [
        ["007", f'a{separator} "quoted"\nline', "1.50"],
        ["9" * 30, "", "null"],
        ["x", "\u2028=1", "ÿ"],
    ]
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.writer(file, delimiter=separator, lineterminator=end)
        writer.writerows([["id", "body", "n"], *rows])
    table = open_table(path, out)
    assert tuple(table.scan()) == (3, ["id", "body", "n"])
    assert answered(table, out, "body") == [row[1] for row in rows]
    raw = out.read_bytes().decode()
    assert raw.startswith(separator.join(["id", "body", "n", "label", "score"]))
    assert raw.endswith(end)
    with out.open(encoding="utf-8", newline="") as file:
        header, *found = csv.reader(file, delimiter=separator)
    assert header[3:] == ["label", "score", "entities"]  # without a failed row no column of errors
    assert found == [[*row, '["ü", "b"]', "0.5", '[{"a": 1}]'] for row in rows]


def test_a_row_of_another_width_fails_alone_and_keeps_its_cells(tmp_path: Path) -> None:
    path, out = tmp_path / "rows.csv", tmp_path / "out.csv"
    path.write_text("id,text\n1\n\n2,b\n3,c,d\n")
    assert answered(open_table(path, out), out, "text") == [None, "b", None]
    with out.open(newline="") as file:
        _, short, whole, long = csv.reader(file)
    assert short == ["1", "", "", "", "", "must have 2 cells, as the header. Given: 1"]
    assert whole[:2] == ["2", "b"]
    assert long[:2] == ["3", "c"]
    assert long[5:] == ["must have 2 cells, as the header. Given: 3", "d"]


def test_objects_keep_their_bytes(tmp_path: Path) -> None:
    path, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    lines = [
        '{"id": 1e400, "text": "a", "x": 1.10, "big": ' + "9" * 40 + "}",
        '{"text":"\\ud83d\\ude00"}',
        "{}",
    ]
    path.write_text("\n\n".join([*lines, "no json", "[1]", '{"parameters": 7}']))
    table = open_table(path, out)
    assert table.scan().rows == 6
    assert answered(table, out, "text") == ["a", "😀", None, None, None, None]
    found = out.read_text(encoding="utf-8").splitlines()
    answer = '"label": ["ü", "b"], "score": 0.5, "entities": [{"a": 1}]}'
    assert found[0] == f"{lines[0][:-1]}, {answer}"
    assert found[1] == f"{lines[1][:-1]}, {answer}"
    assert found[2] == f"{{{answer}"
    assert json.loads(found[3])["line"] == "no json"
    assert json.loads(found[4])["error"].startswith("must be a JSON object")
    assert json.loads(found[5]) == {
        "parameters": 7,
        "error": "`parameters` must be an object. Given: 7",
    }


def test_parquet_columns_keep_their_types(tmp_path: Path) -> None:
    path, out = tmp_path / "rows.parquet", tmp_path / "out.parquet"
    table = pa.table(
        {
            "id": pa.array([decimal.Decimal(n) for n in range(5)]),
            "when": [datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)] * 5,
            "kind": pa.array(list("aabba")).dictionary_encode(),
            "tree": [{"a": [1]}] * 5,
            "text": ["a", None, "b", "c", "d"],
        }
    ).replace_schema_metadata({"mine": "kept"})
    pq.write_table(table, path, row_group_size=3)
    assert answered(open_table(path, out), out, "text") == ["a", None, "b", "c", "d"]
    found = pq.read_table(out)
    assert found.select(table.column_names).equals(table)
    assert found.schema.metadata[b"mine"] == b"kept"
    assert found.schema.field("label").type == pa.list_(pa.string())
    assert found["score"].to_pylist() == [0.5] * 5
    assert found.schema.field("score").type == pa.float32()
    assert found["entities"][0].as_py() == '[{"a": 1}]'
    rest = list(open_table(path, tmp_path / "x.parquet").chunks({"text": "text"}, 2, 3))
    assert [value for chunk in rest for value in chunk.columns["text"]] == ["c", "d"]


def test_damaged_pages_of_parquet_are_no_other_format(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [f"text {row}" for row in range(5000)]}), path)
    content = bytearray(path.read_bytes())
    content[100:2000] = bytes(1900)
    path.write_bytes(content)
    with pytest.raises(UserError, match="cannot be read"):
        list(open_table(path, tmp_path / "x.parquet").chunks({"text": "text"}, 1000, 0))


def test_a_file_that_is_none_is_a_mistake(tmp_path: Path) -> None:
    for name, content, said in (
        ("a.csv", b"", "must begin with a header of unique"),
        ("b.csv", b"a,a\n", "twice: a"),
        ("c.csv", b'text\n"a\nb\n', "c.csv:3"),
        ("d.csv", b"te\xfft\na\n", "byte 0xff at position 2"),
        ("f.parquet", b"PAR1", "must be a parquet file"),
        ("g.csv", b"PK\x03\x04rest", "such as .xlsx"),
        ("h.jsonl", "{}".encode("utf-16"), "Add --encoding utf-16"),
        ("i.jsonl", b"PAR1", "Give it the extension .parquet"),
        ("j.jsonl", b"{}\0", "bytes of value 0"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError) as caught:
            open_table(tmp_path / name, tmp_path / f"out{name[1:]}").scan()
        assert said in caught.value.message, name
    with pytest.raises(UserError, match=r"must end with .*\.parquet or \.npy"):
        open_table(tmp_path / "rows.csv", tmp_path / "out.txt")
    with pytest.raises(UserError, match="name of an encoding"):
        open_table(tmp_path / "rows.csv", tmp_path / "out.csv", encoding="klingon")
    with pytest.raises(UserError, match="readable"):
        open_table(tmp_path / "nowhere.csv", tmp_path / "out.csv")
    (tmp_path / "rows.csv").write_text("id,texts\n1,a\n")
    scan = open_table(tmp_path / "rows.csv", tmp_path / "out.csv").scan()
    with pytest.raises(
        UserError, match=r"Did you mean `texts`\? Give the column with --text-column"
    ):
        check_columns({"text": "text"}, scan.columns, tmp_path / "rows.csv")


def test_a_row_of_other_bytes_fails_alone_and_keeps_them(tmp_path: Path) -> None:
    for suffix, content in (
        (".csv", b"id,text\n1,a\n2,b\xff\n3,\xc3\xbc\n"),
        (".jsonl", b'{"text": "a"}\n\n{"text": "b\xff"}\n{"text": "\xc3\xbc"}\n'),
        (".txt", b"a\nb\xff\n\xc3\xbc\n"),
    ):
        path = tmp_path / f"rows{suffix}"
        out = tmp_path / f"out{'.jsonl' if suffix == '.txt' else suffix}"
        path.write_bytes(content)
        assert answered(open_table(path, out), out, "text") == ["a", None, "ü"]
        found = out.read_text(encoding="utf-8").splitlines()
        (broken,) = [line for line in found if "udcff" in line]
        assert "must be text in utf-8. Given: byte 0xff at position" in broken
        assert sum("0.5" in line for line in found) == 2
        out.unlink()
        latin = open_table(path, out, encoding="latin-1")
        assert answered(latin, out, "text") == ["a", "bÿ", "Ã¼"]
        assert "bÿ" in out.read_text(encoding="utf-8")
        out.unlink()


def test_rows_are_written_in_another_format(tmp_path: Path) -> None:
    files = {kind: tmp_path / f"rows.{kind}" for kind in ("csv", "jsonl", "parquet", "txt")}
    files["csv"].write_text("id;text\n007;a\n;ü\n", encoding="utf-8")
    lines = '{"id": 7, "text": "a", "tags": ["x"]}\n{"text": "ü"}\n'
    files["jsonl"].write_text(lines, encoding="utf-8")
    table = pa.table({"id": [7, None], "text": ["a", "ü"], "image": [b"\xff", None]})
    pq.write_table(table, files["parquet"])
    files["txt"].write_text("a,b\n\n{}\n")

    def written(source: str, suffix: str, texts: list[str]) -> list[dict[str, Any]]:
        out = tmp_path / f"{source}.{suffix}"
        assert answered(open_table(files[source], out), out, "text") == texts
        if suffix == "parquet":
            return list(pq.read_table(out).to_pylist())
        with out.open(encoding="utf-8", newline="") as file:
            if suffix == "jsonl":
                return [json.loads(line) for line in file]
            return list(csv.DictReader(file, delimiter="\t"))

    first, second = written("csv", "parquet", ["a", "ü"])
    assert (first["id"], second["id"], first["label"]) == ("007", "", ["ü", "b"])
    assert "error" not in first
    rows = written("jsonl", "parquet", ["a", "ü"])
    assert [(row["id"], row["tags"]) for row in rows] == [("7", '["x"]'), (None, None)]
    first, second = written("parquet", "jsonl", ["a", "ü"])
    assert (first["image"], second["id"], second["score"]) == ("/w==", None, 0.5)
    rows = written("txt", "jsonl", ["a,b", "", "{}"])
    assert [(row["text"], row["score"]) for row in rows] == [("a,b", 0.5), ("", 0.5), ("{}", 0.5)]
    answer = {"label": '["ü", "b"]', "score": "0.5", "entities": '[{"a": 1}]'}
    empty = {"id": "", "text": "ü"}
    for source, own in (
        ("csv", ({"id": "007", "text": "a"}, empty)),
        ("jsonl", ({"id": "7", "text": "a", "tags": '["x"]'}, {**empty, "tags": ""})),
        ("parquet", ({"id": "7", "text": "a", "image": "/w=="}, {**empty, "image": ""})),
    ):
        assert written(source, "tsv", ["a", "ü"]) == [{**row, **answer} for row in own]


def test_vectors_are_one_array(tmp_path: Path) -> None:
    path, out = tmp_path / "rows.txt", tmp_path / "out.npy"
    path.write_text("a\nb\nc\n")
    vector = AnswerColumn("embedding", "embedding", np.float32, (0,))
    table = open_table(path, out)
    scan = table.scan()
    writer = open_writer(table, scan, out, [vector], json_cells=False)
    answers: list[list[Any]] = [[None], [[1.0, 2.0]], [[3.0, 4.0]]]
    for number, answer in enumerate(answers):
        chunk = RowChunk(1, {}, [])
        part = writer.pack([writer.encode(chunk, [vector], {"embedding": answer})])
        (tmp_path / f"{number}").write_bytes(part)
    with out.open("wb") as file:
        writer.join([tmp_path / f"{number}" for number in range(3)], [vector], file)
    found = np.load(out)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.array([[np.nan] * 2, [1, 2], [3, 4]], np.float32))
    both = [AnswerColumn("embedding_int8", "embedding_int8", np.int8, (0,)), vector]
    writer = open_writer(table, scan, out, both, json_cells=False)
    part = writer.encode(chunk, both, {"embedding": [[1.0]], "embedding_int8": [[]]})
    assert np.load(io.BytesIO(writer.pack([part]))).tolist() == [[1.0]]
    with pytest.raises(UserError, match="have another encoding"):
        writer.pack([[[]]])
    with pytest.raises(UserError, match="has not exactly one output of vectors"):
        open_writer(
            table, scan, out, [AnswerColumn("score", "score", np.float32)], json_cells=False
        )
    with pytest.raises(UserError, match=r"out\.parquet or out\.npy, or add --json-cells"):
        open_writer(table, scan, tmp_path / "out.csv", [vector], json_cells=False)


def test_answers_take_no_column_of_the_file() -> None:
    names = [column.name for column in name_columns("p", COLUMNS, ["label", "error"])]
    assert names == ["p.label", "score", "entities", "p.error"]
    with pytest.raises(UserError, match=r"`score` and `p\.score`"):
        name_columns("p", COLUMNS, ["score", "p.score"])


def test_parts_are_of_one_run_and_no_row_is_in_two(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "out.csv")
    with parts.locked({"file": ["a", 1], "columns": {}}):
        parts.add(0, 3, 1, b"a")
        parts.add(3, 2, 0, b"b")
        parts.add(9, 1, 1, b"lost: what came before it is not there")
        with pytest.raises(UserError, match="another run"), Parts(tmp_path / "out.csv").locked({}):
            pass
    with parts.locked({"file": ["a", 1], "columns": {}}):
        assert [path.read_bytes() for path in parts.done().paths] == [b"a", b"b"]
        assert parts.done()[:2] == (5, 1)
    with pytest.raises(UserError, match="other file than"), parts.locked({"file": ["b", 1]}):
        pass
    (tmp_path / "out.csv").touch()
    with pytest.raises(UserError, match="already exists"), parts.locked({}):
        pass
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link.csv.parts").symlink_to(tmp_path / "elsewhere")
    linked = Parts(tmp_path / "link.csv")
    with pytest.raises(UserError, match="is a symbolic link"), linked.locked({}):
        pass
    assert not [*(tmp_path / "elsewhere").iterdir()]


def test_the_size_of_requests_is_that_of_the_best_trial() -> None:
    batch_sizes, now, tried = BatchSizeTuner(32), 0.0, []
    while batch_sizes.chosen is None:
        sizes = [batch_sizes.start(now) for _ in range(3)]
        assert batch_sizes.start(now) is None  # a trial is for itself
        assert len(set(sizes)) == 1
        tried.append(sizes[0])
        now += {2: 3.0, 4: 1.0, 8: 2.0}[sizes[0] or 0] * (1 if len(tried) > 3 else 9)
        for _ in range(3):
            batch_sizes.end(100, now)
    assert tried == [2, 4, 8, 2, 4, 8]
    assert batch_sizes.chosen == batch_sizes.start(now) == 4
    assert BatchSizeTuner(1).start(0.0) == 1


class BrokenByOne:
    """Stands for a client whose server runs all that is under way as one batch.

    A text `break` fails the whole of it, as an exception in Triton's `execute` does.
    """

    def __init__(self) -> None:
        self._under_way: list[Sequence[str]] = []
        self._broken: set[int] = set()

    async def infer_each(
        self, inputs: Mapping[str, Sequence[str]], **_: Any
    ) -> list[dict[str, Any]]:
        texts = inputs["text"]
        self._under_way.append(texts)
        if any("break" in each for each in self._under_way):
            self._broken.update(map(id, self._under_way))
        await asyncio.sleep(0.0005 * len(texts))
        self._under_way.remove(texts)
        if id(texts) in self._broken:
            self._broken.discard(id(texts))
            raise PipelineFailedError("the step is broken")
        return [{"label": np.array([text], np.object_)} for text in texts]


@pytest.mark.parametrize("bad", [{5}, {0, 1, 9, 31}])
def test_a_row_that_breaks_a_step_fails_no_row_of_a_chunk_beside(bad: set[int]) -> None:
    config = PipelineConfig(16, ("text",), {"label": (np.object_, (1,))}, ("step",))
    client, lock = BrokenByOne(), BatchLock()
    sender = TensorSender(client, config, lock, Path())  # type: ignore[arg-type]  # a fake
    texts = ["break" if row in bad else f"t{row}" for row in range(32)]
    chunks = [RowChunk(32, {"text": texts}, [])] * 3

    async def send_all() -> list[Any]:
        return await asyncio.gather(*map(sender.send, chunks))

    for answers in asyncio.run(send_all()):
        assert {row for row, error in enumerate(answers[ERROR]) if error} == bad
        found = [label for row, label in enumerate(answers["label"]) if row not in bad]
        assert found == [text for text in texts if text != "break"]


def test_a_folder_has_a_row_for_each_file(tmp_path: Path) -> None:
    for name in ("b.png", "a.jpg", ".hidden"):
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "inner").mkdir()
    table = open_rows(tmp_path)
    assert (table.scan().rows, table.scan().columns) == (2, ["image"])
    (chunk,) = table.chunks({"image": "image"}, 8, 0)
    assert chunk.columns["image"] == ["a.jpg", "b.png"]
    options = BulkOptions(pipeline="p", url="u", file=tmp_path, out=tmp_path / "out.jsonl")
    assert options.folder == tmp_path
