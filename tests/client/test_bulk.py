"""`triptych infer --file --out` against a real server: whole files, failed rows, breaks."""

import csv
import json
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from tests.support.client_toy import Toy, expected, texts_of_many_lengths, wait_until
from triptych.base.errors import UserError
from triptych.interface.bulk.files import open_rows
from triptych.interface.bulk.jobs import BulkOptions
from triptych.interface.bulk.run import BulkProgress, run
from triptych.interface.cli import app
from triptych.interface.cli.rows import InputRow, send_rows

pytestmark = pytest.mark.server


def infer(toy: Toy, *words: str | Path) -> Any:
    """What `triptych infer` does with these words at the toy's server."""
    return CliRunner().invoke(app, ["infer", *map(str, words), "--url", toy.url])


def ignore(_: BulkProgress) -> None:
    """Tell nobody."""


def test_rows_of_the_command_line_are_answered_and_printed(toy: Toy, tmp_path: Path) -> None:
    shown = infer(toy, "classifier", "-t", "a b", "-p", "candidate_labels=[billing, delivery]")
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.splitlines() == [
        "'a b'",
        "  label: billing  score: 0.5000",
        "  label: delivery  score: 0.5000",
    ]

    def ask(pipeline: str, *words: str | Path) -> Any:
        return json.loads(infer(toy, pipeline, *words, "--json").stdout)

    anna = {"entity": "simple", "text": "Anna", "start": 4, "end": 8, "score": 0.75}
    found = ask("tagger", "-t", "für Anna", "-t", "none")
    assert found == [{"entities": [anna]}, {"entities": []}]
    pairs = ("--text-pair", "now", "--text-pair", "where")
    answer = {"answer": "w", "score": 0.25, "start": 2, "end": 17}
    assert ask("reader", "-t", "w", *pairs)[0] == answer
    (tmp_path / "a.png").write_bytes(b"\xff\x00")
    (seen,) = ask("seer", "--image", tmp_path / "a.png", "-p", "top_k=2")
    assert seen["score"] == [1.0, 0.5]
    (vectors,) = ask("embedder", "-t", "a", "-p", "encoding=binary")
    assert (vectors["embedding"], len(vectors["embedding_int8"])) == ([], 1)
    file, counts = tmp_path / "rows.jsonl", [3, 1, 3, 2]
    lines = [{"text": f"t{i}", "parameters": {"top_k": k}} for i, k in enumerate(counts)]
    file.write_text("\n".join(map(json.dumps, lines)))
    rows = ask("classifier", "-f", file, "-p", "top_k=5")
    assert [len(row["label"]) for row in rows] == counts
    assert ask("classifier", "-t", "t2", "-p", "top_k=3") == [rows[2]]
    file.write_text("\n".join(map(json.dumps, [*lines, {"text": "refuse"}])))
    assert "row 4: `text` must not be refused" in str(
        infer(toy, "classifier", "-f", file).exception
    )


def test_inputs_that_are_not_the_pipelines_are_a_mistake(toy: Toy) -> None:
    for pipeline, given, message in (
        ("reader", ["text"], "`--text-pair` is required. Given: text. Give the inputs of `reader`"),
        ("classifier", ["text", "text_pair"], "`--text-pair` is not an input of `classifier`. Giv"),
        ("seer", ["text"], "`--image` is required. Given: text. .* each row: image"),
        ("tagger", ["image"], "`--text` is required. Given: image. .* each row: text"),
    ):
        for source, said in (("", message), ("rows.jsonl:4", r"^`rows\.jsonl:4` must")):
            row = InputRow(dict.fromkeys(given, "a"), "a", source)
            with pytest.raises(UserError, match=said):
                send_rows(pipeline, [row], url=toy.url, parameters={}, timeout_s=60.0)


def test_every_row_has_its_own_answer_in_its_place(toy: Toy, tmp_path: Path) -> None:
    texts = texts_of_many_lengths(1000, "bulk")
    table = pa.table({"id": range(1000), "body": texts})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=130)
    told: list[BulkProgress] = []
    out = tmp_path / "out.parquet"
    asked = BulkOptions("toy", toy.url, {"text": "body"}, file=tmp_path / "rows.parquet", out=out)
    done = run(asked, told.append)
    assert (done.rows, done.done, done.earlier, done.failed) == (1000, 1000, 0, 0)
    assert len(told) > 3
    found = pq.read_table(out)
    assert found.column_names == ["id", "body", "embedding"]
    assert found.select(["id", "body"]).equals(table)
    vectors = np.array(found["embedding"].to_pylist(), np.float32)
    np.testing.assert_allclose(vectors, [expected(text) for text in texts], atol=1e-6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.parquet", "rows.parquet"]


def test_rows_that_fail_are_told_of_and_stop_nothing(toy: Toy, tmp_path: Path) -> None:
    texts = [f"t{index}" for index in range(200)]
    bad = {3: "refuse", 70: "break", 199: "refuse me"}
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        rows = [[index, bad.get(index, text)] for index, text in enumerate(texts)]
        csv.writer(file).writerows([["id", "text"], *rows, ["short"]])
    out = tmp_path / "out.csv"
    done = infer(toy, "toy", "-f", tmp_path / "rows.csv", "-o", out, "--json")
    assert done.exit_code == 1, done.output
    assert f"failed: 4 of 201 rows; column `error` of {out} has the reasons" in done.stderr
    assert json.loads(done.stdout)["failed"] == 4
    with out.open(newline="") as file:
        found = list(csv.DictReader(file))
    assert len(found) == 201
    assert {index for index, row in enumerate(found) if row["error"]} == {*bad, 200}
    assert "must not be refused" in found[3]["error"]
    assert "the step is broken" in found[70]["error"]
    for index in (0, 4, 69, 71, 198):
        vector = json.loads(found[index]["embedding"])
        np.testing.assert_allclose(vector, expected(texts[index]), atol=1e-6)


def test_a_server_that_answers_no_row_ends_the_run(toy: Toy, tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("break\n" * 100)
    asked = BulkOptions("toy", toy.url, file=tmp_path / "rows.txt", out=tmp_path / "out.jsonl")
    with pytest.raises(UserError, match="the step is broken"):
        run(asked, ignore)
    assert not asked.out.exists()
    asked = replace(asked, url="127.0.0.1:9", timeout_s=120)
    with pytest.raises(UserError, match="triptych serve"):
        run(asked, ignore)


COMMAND = """
from triptych.interface.bulk import run
from triptych.interface.cli import main
run._PART_ROWS, run._PART_S = 100, 3600.0  # a part has 100 rows, however slow the machine is
main()
"""


def test_an_interrupted_or_killed_run_goes_on_and_loses_and_doubles_nothing(
    toy: Toy, tmp_path: Path
) -> None:
    file, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    folder = tmp_path / "out.jsonl.parts"
    rows = [{"n": n, "text": f"kept {n}."} for n in range(3000)]
    for row, name in ((1200, "killed"), (2400, "interrupted")):  # no run gets further
        rows[row]["text"] = f"hold:{name}"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["infer", "toy", "--url", toy.url, "-f", str(file), "-o", str(out)]
    for end, name in ((signal.SIGKILL, "killed"), (signal.SIGINT, "interrupted")):
        before = len([*folder.glob("*.part")])
        ended = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *words], stderr=subprocess.PIPE, text=True
        )
        wait_until(lambda: len([*folder.glob("*.part")]) > before, "a part that is kept")  # noqa: B023
        ended.send_signal(end)
        _, told = ended.communicate(timeout=300)
        toy.release(name)
        assert not out.exists()
    assert ended.returncode == 130, told
    assert re.search(r"interrupted: [\d,]+ rows are stored in .*run the same command", told)
    other = BulkOptions("toy", toy.url, pairs=["dimensions=4"], file=file, out=out)
    with pytest.raises(UserError, match="other parameters than in"):
        run(other, ignore)
    done = run(BulkOptions("toy", toy.url, file=file, out=out), ignore)
    assert 200 <= done.earlier < 3000
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["n"] for row in found] == list(range(3000))
    for row in found[::150]:
        np.testing.assert_allclose(row["embedding"], expected(row["text"]), atol=1e-6)
    assert len(toy.seen("kept 0.")) == 1  # what was kept is not asked again
    assert not folder.exists()
    with pytest.raises(UserError, match="already exists"):
        run(BulkOptions("toy", toy.url, file=file, out=out), ignore)


def test_each_input_has_its_column_or_one_value(toy: Toy, tmp_path: Path) -> None:
    (tmp_path / "rows.tsv").write_text("q\tpassage\nnow\twhere\nat\tthat\n")
    words = ("-f", tmp_path / "rows.tsv", "-o", tmp_path / "out.tsv")
    pair = ("--text-pair-column", "passage")
    done = infer(toy, "reader", *words, *pair, "--text", "at", "-p", "max_answer_len=1")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out.tsv").read_text().splitlines() == [
        "q\tpassage\tanswer\tscore\tstart\tend",
        "now\twhere\t\t0.25\t-1\t0",
        "at\tthat\ta\t0.25\t2\t3",
    ]
    (tmp_path / "out.tsv").unlink()
    done = infer(toy, "reader", *words, *pair)
    assert "--text-column" in str(done.exception)
    done = infer(toy, "reader", *words, *pair, "--image-column", "q")
    assert "`image` is not an input of `reader`" in str(done.exception)
    (tmp_path / "a.png").write_bytes(b"\xff\x00")
    (tmp_path / "rows.csv").write_text("image\na.png\nb.png\n")
    done = infer(toy, "seer", "-f", tmp_path / "rows.csv", "-o", tmp_path / "out.csv")
    assert done.exit_code == 1
    with (tmp_path / "out.csv").open(newline="") as file:
        seen, lost = csv.DictReader(file)
    assert seen["score"] == "1.0"
    assert seen["label"].endswith(" 0")
    assert "`image` must be a readable file" in lost["error"]


def test_rows_come_from_standard_input_with_parameters_from_a_column(
    toy: Toy, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    words = ["infer", "classifier", "--url", toy.url, "-f", "-", "-o", str(out), "--format", "csv"]
    words += ["--parameter-column", "top_k=wanted", "--empty", "refuse", "-p", "top_k=3"]
    rows = b"text,wanted\na,2\n,1\nb,\nc,[\n"
    done = CliRunner().invoke(app, words, input=rows)
    assert done.exit_code == 1, done.output
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [len(row.get("label", [])) for row in found] == [2, 0, 3, 0]
    assert found[1]["error"] == "`text` is empty"
    assert "`top_k` must be a plain value" in found[3]["error"]
    out.unlink()
    done = CliRunner().invoke(app, [*words, "--empty", "skip"], input=b"text,wanted\na,2\n,1\n")
    assert done.exit_code == 0, done.output
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert found[1] == {"text": "", "wanted": "1"}
    out = tmp_path / "out.csv"
    words[words.index("-o") + 1] = str(out)
    CliRunner().invoke(app, words, input=b"text,wanted\na,1\nb,2\n")
    with out.open(newline="") as file:
        one, two = (row["label"] for row in csv.DictReader(file))
    assert (one[-2:], len(json.loads(two))) == (" 0", 2)


def test_rows_of_jsonl_have_parameters_of_their_own(toy: Toy, tmp_path: Path) -> None:
    file, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    rows = [
        {"text": "a", "parameters": {"top_k": 2}},
        {"text": "b", "label": "mine", "parameters": {"candidate_labels": ["x", "y"]}},
        {"text": "c", "parameters": {"x": {}}},
        {"text": 7},
        {"text": "d"},
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    asked = BulkOptions("classifier", toy.url, pairs=["top_k=3"], file=file, out=out)
    done = run(asked, ignore)
    assert done.failed == 2
    found = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [len(row.get("score", [])) for row in found] == [2, 2, 0, 0, 3]
    assert (found[1]["label"], found[1]["classifier.label"]) == ("mine", ["x", "y"])
    assert "`parameters.x`" in found[2]["error"]
    assert found[3]["error"] == "`text` must be text. Given: 7"


def test_faulty_rows_keep_their_columns(tmp_path: Path) -> None:
    rows, text = tmp_path / "rows.jsonl", tmp_path / "rows.txt"
    rows.write_text('{"text": "a"}\n{"text": "b", "parameters": 7, "only_here": "x"}\nnothing\n')
    assert open_rows(rows).scan().columns == ["text", "parameters", "only_here"]
    text.write_bytes(b"a\nb\xff\n")
    (chunk,) = open_rows(text).chunks({"text": "text"}, 3, 0)
    assert chunk.columns["text"][0] == "a"
    assert isinstance(chunk.original, list)
    assert [row.values["text"] for row in chunk.original] == ["a", "b\udcff"]
    assert list(chunk.faults) == [1]
