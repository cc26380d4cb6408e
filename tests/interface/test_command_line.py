"""Help, version and settings of the command line."""

import io
import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

import triptych
from documentation.language import Documented, find_mistake
from tests.support.project import write_pipeline
from triptych.base.errors import UserError, counted
from triptych.deploy.options import DeployOptions
from triptych.interface.cli import app, options
from triptych.interface.cli.command import VERBS
from triptych.interface.cli.deploy import read_settings
from triptych.spec.template import tasks

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
UNIT = re.compile(
    r"[Ss]econds|requests/s|Requests/s|Number|number|Port|Price|Share|Percentage|[Mm]aximum growth"
    r"|Mi or|Priority level"
)


def refused(*words: str | Path) -> UserError:
    """Return the error of a command that refuses its words."""
    error = CliRunner().invoke(app, [*map(str, words)]).exception
    assert isinstance(error, UserError)
    return error


def shown(*words: str) -> str:
    """Return what a terminal of 80 columns shows."""
    done = CliRunner().invoke(app, words, env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
    assert done.exit_code == 0, done.output
    return done.output


def test_help_lists_the_verbs_in_groups_each_in_one_line() -> None:
    sections = re.findall(r"(?m)^(\w+):\n((?:  .+\n)+)", shown("--help"))
    listed = {name: [line.split()[0] for line in lines.splitlines()] for name, lines in sections}
    assert {name: verbs for name, verbs in listed.items() if name != "Options"} == {
        name: list(verbs) for name, verbs in VERBS.items()
    }
    assert sorted(COMMANDS) == sorted(name for verbs in VERBS.values() for name in verbs)
    assert max(map(len, shown("--help").splitlines())) <= 80
    assert "..." not in shown("--help").split("ARGS]...")[1]


def test_help_of_each_verb_and_option_is_a_sentence_or_phrase_that_stands_alone() -> None:
    for verb, command in COMMANDS.items():
        text = " ".join(command.help.split())
        assert re.fullmatch(r"[A-Z].*\.", text), (verb, text)
        assert not find_mistake(Documented("function", verb, 1, text)), (verb, text)
        for option in command.params:
            where = (verb, option.name)
            if option.name == "help":
                continue
            text = " ".join(option.help.split())
            assert re.fullmatch(r"(gRPC|[A-Z]).*\.", text), (where, text)
            assert not find_mistake(Documented("entry", option.name, 1, text)), (where, text)
            says_default = "Default: " in text
            if option.param_type_name == "option" and not option.is_flag:
                assert says_default == (option.default in (None, "")), (where, text)
            if re.search("int|float", str(option.type_descriptor)):
                assert UNIT.search(text), (where, text)


def test_help_is_as_wide_as_the_terminal_and_names_values_by_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program: Any = typer.main.get_command(app)
    outer = program.context_class(program, info_name="triptych", **program.context_settings)
    screens: dict[str, str] = {}
    for columns, maximum in ((70, 70), (100, 100), (200, 120)):
        monkeypatch.setenv("COLUMNS", str(columns))
        for verb, command in COMMANDS.items():
            context = command.context_class(command, parent=outer, info_name=verb)
            screens[verb] = command.get_help(context)
        widest = max(len(line) for screen in screens.values() for line in screen.splitlines())
        assert maximum - 10 <= widest <= maximum, columns
    types = {found for screen in screens.values() for found in re.findall(r"<[a-z][^>]*>", screen)}
    assert types == {
        "<development|production>",
        "<csv|tsv|jsonl|parquet|text>",
        "<send|skip|refuse>",
    }
    assert "--image PATH" in screens["infer"]


def test_new_lists_the_tasks(tmp_path: Path) -> None:
    listed = " ".join(shown("new", "--help").split()).replace("- ", "-")  # broken at hyphens
    for task in tasks():
        assert task in listed
    for words, said in (
        ([], ". Choose one of: audio-classification, "),
        (["rerank"], "Did you mean `reranking`? Choose"),
    ):
        assert said in refused("new", "a", *words, "--pipelines", tmp_path).message


def test_fields_describes_every_field_of_a_task() -> None:
    for task in (*tasks(), "model"):
        assert "\nserving.queue.max_in_flight  (integer, 1 to " in shown("fields", "--task", task)
    only = json.loads(shown("fields", "serving.queue", "--json"))
    assert {each["name"].rpartition(".")[0] for each in only} == {"serving.queue"}
    assert all(each["meaning"] for each in only)
    assert "`triptych fields` lists all" in refused("fields", "sampel").message
    assert "Name" in refused("fields", "--task", "nor").message


def test_settings_of_deploy_stand_in_a_file(tmp_path: Path) -> None:
    path, context = tmp_path / "deploy.yaml", typer.Context(COMMANDS["deploy"])
    assert read_settings(path, context) == {}
    path.write_text(
        "image: triptych-serve:26.08\npeak_rps: 200\nbaseline: active\nreplicas: 2\n"
        "variable: {TRIPTYCH_CORE_THREADS: 8, TRIPTYCH_LOCK_HASHES: false}\n"
    )
    options = DeployOptions(**read_settings(path, context))
    assert (options.peak_rps, options.baseline, options.replicas) == (200.0, Path("active"), 2)
    assert options.variables == ["TRIPTYCH_CORE_THREADS=8", "TRIPTYCH_LOCK_HASHES=false"]
    for text, field, said in (
        ("peak_rate: 200", ": peak_rate", "is not an option of `triptych deploy`. Given: 200."),
        ("peak_rps: many", ": peak_rps", "the option accepts. Given: many"),
        ("replicas: true", ": replicas", "the option accepts. Given: True"),
        ("- image", "", "must be a mapping of options to values. Given: list."),
        ("image: [", "", "must be valid YAML"),
    ):
        path.write_text(text)
        with pytest.raises(UserError) as caught:
            read_settings(path, context)
        assert caught.value.field == f"{path}{field}", text
        assert said in caught.value.message, text


def test_a_shell_completes_verbs_and_names_of_pipelines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pipeline(tmp_path / "pipelines/tickets")
    monkeypatch.chdir(tmp_path)
    for words, found in (("triptych roll", "rollback"), ("triptych build tick", "tickets")):
        asked = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
        asked["_TRIPTYCH_COMPLETE"] = "complete_bash"
        done = CliRunner().invoke(app, [], prog_name="triptych", env=asked)
        assert done.output.split() == [found], words


def test_list_shows_pipelines_and_builds_of_folders_and_servers(tmp_path: Path) -> None:
    write_pipeline(tmp_path / "p/tickets")
    (tmp_path / "p/broken").mkdir()
    (tmp_path / "p/broken/pipeline.yaml").write_text("[")
    words = ["list", "--pipelines", str(tmp_path / "p"), "-r", str(tmp_path / "r")]
    done = CliRunner().invoke(app, [*words, "--url", "127.0.0.1:9", "--json"])
    assert done.exit_code == 0, done.output
    nothing = {"build": "", "built_at": "", "precision": "", "served": []}
    assert json.loads(done.stdout) == [
        {"pipeline": "broken", "task": "", **nothing},
        {"pipeline": "tickets", "task": "text-embedding", **nothing},
    ]
    done = CliRunner().invoke(app, [*words, "--url", "127.0.0.1:9"])
    assert "tickets  text-embedding  not built, not served" in done.output


def test_an_interrupted_verb_says_what_was_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("triptych.spec.any_spec.load_any_spec", interrupt)
    done = CliRunner().invoke(app, ["build", "minilm"])
    assert done.exit_code == 130
    assert "interrupted: finished stages are cached, and the repository is as it was" in done.stderr


def test_functions_name_arguments_and_the_package_lists_its_names(tmp_path: Path) -> None:
    write_pipeline(tmp_path / "tickets")
    with pytest.raises(UserError, match=r"`overrides core\.precision` must be") as caught:
        triptych.build("tickets", pipelines=tmp_path, overrides={"core.precision": "int4"})
    assert "--" not in caught.value.message
    assert {"build", "serve", "Client", "__version__"} <= set(dir(triptych))
    assert triptych.__version__ == version("triptych")
    assert shown("--version") == f"triptych {version('triptych')}\n"


def test_long_verbs_show_their_time_and_how_far_a_loop_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "_INTERVAL_S", 0.0)
    for is_terminal in (True, False):
        screen = io.StringIO()
        terminal = options.Terminal(file=screen, force_terminal=is_terminal)
        monkeypatch.setattr(options, "status", terminal)
        with options.show_progress("gate", "building [mine]"):
            options.progress("export", "done")
            assert [*counted("ab", "rows", 2)] == ["a", "b"]
        assert "export   done" in screen.getvalue()
        if not is_terminal:
            assert re.search(r"gate +2 of 2 rows, .* rows/s, 0 s left", screen.getvalue())
        shown = re.search(r"building \[mine\].*\d:\d\d:\d\d", screen.getvalue())
        assert (shown is not None) == is_terminal
