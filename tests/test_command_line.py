"""What the command line says of itself: help, version, the order of verbs, tasks."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from triptych.base.errors import UserError
from triptych.interface.cli import ORDER, app
from triptych.spec.scaffold import tasks
from triptych.spec.traffic import read_traffic


def shown(*words: str) -> str:
    """What a terminal of 80 columns shows."""
    done = CliRunner().invoke(app, words, env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
    assert done.exit_code == 0, done.output
    return done.output


def test_help_lists_the_verbs_in_order_and_cuts_nothing() -> None:
    lines = shown("--help").split("Commands:\n")[1].splitlines()
    assert [line.split()[0] for line in lines] == ORDER
    assert not [line for line in lines if "..." in line]
    assert max(map(len, lines)) <= 80


def test_the_version_is_that_of_the_package() -> None:
    assert shown("--version") == f"triptych {version('triptych')}\n"


def test_new_lists_the_tasks(tmp_path: Path) -> None:
    listed = " ".join(shown("new", "--help").split()).replace("- ", "-")  # broken at hyphens
    for task in tasks():
        assert task in listed
    for words, said in (
        (["new", "a"], "Given: nothing. Choose one of: custom, "),
        (["new", "a", "--task", "rerank"], "Did you mean `reranking`? Choose"),
    ):
        error = CliRunner().invoke(app, [*words, "--pipelines", str(tmp_path)]).exception
        assert isinstance(error, UserError)
        assert said in error.message


def test_a_line_of_traffic_is_named_with_its_field(tmp_path: Path) -> None:
    for line, field, said in (
        ('{"text": "a"', ":2", "must be a JSON object"),
        ('{"text": 7}', ":2: text", "must be a string. Given: 7"),
        ('{"texts": "a"}', ":2: text", "Given: nothing. Did you mean `texts`? Write {"),
        ('{"text": "a", "parameters": []}', ":2: parameters", "must be an object. Given: []"),
    ):
        (tmp_path / "traffic.jsonl").write_text('{"text": "a"}\n' + line)
        with pytest.raises(UserError) as caught:
            read_traffic(tmp_path, ["text"])
        assert caught.value.field.endswith(f"traffic.jsonl{field}"), line
        assert said in caught.value.message
