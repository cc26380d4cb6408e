"""`triptych new`: whole folders or none, and templates that are pipelines as they stand."""

import json
import re
import runpy
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from conftest import ROOT
from mistakes import check_refused
from scaffolding import ENCODERS, run, write
from triptych.base.errors import UserError
from triptych.building import pipeline_checks
from triptych.building.pipeline_checks import Check
from triptych.core.inputs import task_of
from triptych.runtime.hooking import load_hooks
from triptych.spec.generation_fields import load_generation_spec, load_text2text_spec
from triptych.spec.kind import GENERATION, TEXT2TEXT
from triptych.spec.model_info import ModelInfo
from triptych.spec.scaffold import Scaffold, scaffold
from triptych.spec.spec import load_spec
from triptych.spec.tasks import TASKS
from triptych.spec.template import BUILT_IN
from triptych.spec.traffic import read_traffic

NAMED = {"text-pair-classification": "text-classification"}
"""Templates with another name than their task: text-classification has one for pairs, too."""
README = "".join(
    (ROOT / page).read_text(encoding="utf-8") + "\n## \n"
    for page in ("pipelines/tasks.md", "pipelines/hooks.md", "pipelines/generation.md")
)
FACTS = ModelInfo(
    sha256="",
    architecture="Any",
    hidden_size=8,
    max_length=64,
    pad_token_id=0,
    prompts={"query": "q: "},
    labels=("contradiction", "entailment"),
    mask_token="<mask>",
    mask_token_id=4,
)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def _model(folder: Path) -> Path:
    """Make a folder with the files that `new --model` requires."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"n_positions": 256}')
    (folder / "model.safetensors").touch()
    return folder


def test_the_template_for_text_generation_is_a_pipeline(tmp_path: Path) -> None:
    made = scaffold("talk", task=GENERATION, model=None, with_hooks=False, pipelines=tmp_path)
    assert made.commands[0].startswith("triptych build talk")
    spec = load_generation_spec(tmp_path / "talk", ["core.max_num_seqs=8"])
    assert spec.core.max_num_seqs == 8
    # A local model is looked at: this one takes less, and has no template for chats.
    model = _model(tmp_path / "base")
    made = scaffold("tale", task=GENERATION, model=str(model), with_hooks=False, pipelines=tmp_path)
    assert made.commands[-1] == 'triptych infer tale --prompt "What is the capital of France?"'
    assert load_generation_spec(tmp_path / "tale").core.max_model_len == 256
    rows = map(json.loads, (tmp_path / "tale/traffic.jsonl").read_text().splitlines())
    assert [list(row) for row in rows] == [["text_input"]] * 8
    commented = (tmp_path / "talk/pipeline.yaml").read_text().replace("\n#   ", "\n  ")
    (tmp_path / "talk/pipeline.yaml").write_text(
        commented.replace("\n# parameters", "\nparameters")
    )
    assert load_generation_spec(tmp_path / "talk").parameters["max_tokens"] == 256


def test_the_template_for_two_texts_is_a_pipeline(tmp_path: Path) -> None:
    scaffold("brief", task=TEXT2TEXT, model="me/mine", with_hooks=False, pipelines=tmp_path)
    path = tmp_path / "brief/pipeline.yaml"
    path.write_text(re.sub(r"(?m)^  # (?=\w+: )(?!revision)", "  ", path.read_text()))
    spec = load_text2text_spec(tmp_path / "brief")
    assert (spec.model.source, spec.core.max_length, spec.core.num_beams) == ("me/mine", 512, 1)


def run_tests_here(folder: Path) -> Check:
    """Run the tests that come with hooks in this process: another takes a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "hooks", load_hooks(folder))
        tests = runpy.run_path(str(folder / "test_hooks.py"))
    for name in tests["ROWS"]:
        tests["test_each_row_is_treated_alone_and_keeps_its_fields"](name)
    return Check("tests", note="1 passed")


@pytest.mark.parametrize("task", ENCODERS)
def test_a_template_passes_every_check_with_its_hooks_and_leaves_nothing(
    tmp_path: Path, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path, task, with_hooks=True)
    if task != "custom":
        monkeypatch.setattr(pipeline_checks, "run_tests", run_tests_here)
    before = contents(tmp_path)
    checks = pipeline_checks.check_pipeline(folder)
    assert [check for check in checks if check.severity != "ok"] == []
    assert checks[-1].name == "tests"
    assert re.search(r"[1-9] passed", checks[-1].note)
    assert contents(tmp_path) == before

    spec = load_spec(folder)
    declared = task_of(spec)
    assert declared.name == spec.task == NAMED.get(task, task)
    rows = read_traffic(folder, [tensor.name for tensor in declared.inputs])
    assert len({json.dumps(row.inputs) for row in rows}) == len(rows)
    assert len(rows) >= (4 if "image" in rows[0].inputs else 10)
    for path, content in before.items():
        assert path.endswith(".png") or not re.search(rb"@\w+@", content), path


def test_each_template_and_its_request_parameters_are_in_the_documentation(tmp_path: Path) -> None:
    for task in ENCODERS:
        folder = write(tmp_path, task, task)
        text = (folder / "pipeline.yaml").read_text(encoding="utf-8")
        inputs = {tensor.name for tensor in task_of(load_spec(folder)).inputs}
        (own,) = re.findall(r"# Try it: (triptych infer .*)", text)
        news = re.findall(rf"(?m)^triptych new (\w+) {task}\n(triptych infer .*)$", README)
        ((shown_name, shown),) = news
        for name, command in ((task, own), (shown_name, shown)):
            words = shlex.split(command)
            options = {word[2:].replace("-", "_") for word in words if word.startswith("--")}
            assert (words[2], options - {"parameter"}) == (name, inputs), command
        base = NAMED.get(task, task)
        pattern = rf"(?ms)^##+ (?:{base}|Outputs of your own)\n(.*?)^##"
        section = re.findall(pattern, README)[0]
        rules = TASKS[base].parameters(FACTS) if base in TASKS else {}
        for name, rule in rules.items():
            assert f"{name}:" in text
            assert f"`{name}`" in section
            if name != "top_k" and rule.default is not None:  # top_k's depends on the labels
                assert f"{name}: {json.dumps(rule.default).strip(chr(34))}" in text


def test_what_exists_is_never_overwritten(tmp_path: Path) -> None:
    folder = write(tmp_path, "reranking")
    before = contents(tmp_path)
    check_refused("are never overwritten", write, tmp_path, "fill-mask")
    assert contents(tmp_path) == before
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    check_refused("are never overwritten", write, tmp_path, "fill-mask", "link")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", folder.name]


KILLED = """
import os, signal, sys
from pathlib import Path
from triptych.spec.scaffold import scaffold

def audit(event, arguments):
    if event == "open" and str(arguments[0]).endswith(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(audit)
scaffold("mine", task="image-classification", model=None, with_hooks=True,
         pipelines=Path("pipelines"))
"""


def test_killed_half_way_it_leaves_no_pipeline(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, ".new/traffic.jsonl"], cwd=tmp_path)
    assert done.returncode == -9
    pipelines = tmp_path / "pipelines"
    assert (pipelines / ".new/pipeline.yaml").is_file()  # it was in the middle
    assert not (pipelines / "mine").exists()
    write(pipelines, "reranking", "other")
    assert [path.name for path in pipelines.iterdir()] == ["other"]
    assert sorted(contents(pipelines / "other")) == ["pipeline.yaml", "traffic.jsonl"]


def test_a_folder_of_a_model_is_found_from_wherever_the_command_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _model(tmp_path / "models/small one")
    (tmp_path / "real").mkdir()
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/linked").symlink_to(tmp_path / "real")
    for pipelines in ("pipelines", "deep/linked"):
        words = ("new", "mine", "reranking", "--pipelines", pipelines)
        done = run(*words, "--model", "models/small one")
        assert done.exit_code == 0, done.output
        folder = tmp_path / pipelines / "mine"
        source = load_spec(folder).model.source
        assert not Path(source).is_absolute()
        assert (folder / source).samefile(tmp_path / "models/small one")
    # Any other source is written as it is given.
    absolute = str(tmp_path / "models/small one")
    for model in (absolute, "owner/name", "package:module/model", "123", "a: b # c"):
        folder = write(tmp_path, "custom", f"n{len(list(tmp_path.iterdir()))}", model=model)
        assert load_spec(folder).model.source == model


def test_traffic_gets_the_mask_token_of_a_local_model(tmp_path: Path) -> None:
    _model(tmp_path / "model")
    for name, token in (("text", "[MASK]"), ("object", {"content": "[MASK]", "lstrip": True})):
        (tmp_path / "model/tokenizer_config.json").write_text(json.dumps({"mask_token": token}))
        folder = write(tmp_path, "fill-mask", name, model=str(tmp_path / "model"))
        texts = [row.inputs["text"] for row in read_traffic(folder, ["text"])]
        assert all(text.count("[MASK]") == 1 for text in texts), token


MISTAKES: list[tuple[list[str], str]] = [
    (["new", "Mine", "reranking"], "lower-case letters"),
    (["new", "../mine", "reranking"], "--pipelines"),
    (["new", "..", "reranking"], "lower-case letters"),
    (["new", "", "reranking"], "name without a path"),
    (["new", "mine", "translation"], "question-answering, reranking"),
    (["new", "mine", ".."], "Choose one of: audio-classification, chain, custom"),
    (["new", "mine", "reranking", "--model", "./gone"], "no such folder"),
    (["new", "mine", "reranking", "--model", "."], "without config.json"),
    (["new", "mine", "reranking", "--pipelines", "file"], "writable folder"),
    (["test", "mine"], "Pipelines here: none"),
]


def test_a_mistake_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    for words, expected in MISTAKES:
        error = run(*words).exception
        assert isinstance(error, UserError), words
        assert expected in error.message, words
        assert not list(tmp_path.rglob("mine")), words


def test_the_commands_it_prints_are_the_next_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = json.loads(
        run("new", "mine", "image-classification", "--pipelines", "my own", "--json").stdout
    )
    assert set(made) == {field.name for field in fields(Scaffold)}
    assert made["files"] == sorted(contents(tmp_path / "my own/mine"))
    test, _, _, infer = (shlex.split(command) for command in made["commands"])
    assert test == ["triptych", "test", "mine", "--pipelines", "my own"]
    assert infer[:4] == ["triptych", "infer", "mine", "--image"]
    assert (tmp_path / infer[4]).is_file()
    assert run(*test[1:]).exit_code == 0


def test_templates_are_packed_with_the_package() -> None:
    files = [str(path) for path in BUILT_IN.rglob("*") if path.is_file()]
    command = ["git", "check-ignore", "--no-index", *files]
    ignored = subprocess.run(command, cwd=ROOT, capture_output=True)
    assert ignored.returncode == 1, ignored.stdout  # hatchling leaves out what git ignores
