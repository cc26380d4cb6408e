"""The documents tell the truth: commands run, links lead somewhere, tables are correct."""

import ast
import contextlib
import json
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import typer.main
from typer.testing import CliRunner, Result

from tests.support.project import ROOT, write_pipeline
from tests.support.served_command import TRIPTYCH
from triptych.interface.cli import app, demo
from triptych.spec.eval_file import EVAL_FILE, read_labels
from triptych.tasks.catalog import TASKS

pytestmark = pytest.mark.build

README = (ROOT / "README.md").read_text(encoding="utf-8")
CLIENTS = (ROOT / "build_scripts/documentation/guides/clients.md").read_text(encoding="utf-8")
ACCURACY = (ROOT / "build_scripts/documentation/guides/accuracy.md").read_text(encoding="utf-8")
FAULTS = (ROOT / "docker/faults.md").read_text(encoding="utf-8")
PRECISION = (ROOT / "build_scripts/documentation/guides/precision.md").read_text(encoding="utf-8")
COMMANDS = [
    line.split("  #")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
]
VERBS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
GRPC, HTTP = "127.0.0.1:8001", "127.0.0.1:8000"
"""Addresses in the documents, which are the defaults of the commands."""


def triptych(*words: str) -> Result:
    """Run the command in this process, which has imported torch already."""
    return CliRunner().invoke(app, words)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A user's folder with the pipeline of the README, as the current folder."""
    folder = tmp_path_factory.mktemp("project")
    (ROOT / ".cache").mkdir(exist_ok=True)
    (folder / ".cache").symlink_to(ROOT / ".cache")  # perf_analyzer is fetched once
    queue = {"max_backlog_ms": 3_600_000}  # a server that is paused rejects no request of `bench`
    write_pipeline(folder / "pipelines/minilm", serving={"queue": queue})
    with contextlib.chdir(folder):
        done = triptych("build", "minilm")
        assert done.exit_code == 0, done.output
        yield folder


@pytest.fixture(scope="module")
def served(project: Path) -> Iterator[dict[str, str]]:
    """Each address in the documents with that of `triptych serve`, which has free ports."""
    command = [TRIPTYCH, "serve", "--grpc-port=0", "--http-port=0", "--metrics-port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline().startswith("ready")
            listed = (server.stdout.readline().split() for _ in range(3))
            grpc, http, _ = (endpoint.removeprefix("http://") for _, endpoint in listed)
            yield {GRPC: grpc, HTTP: http}
            server.send_signal(signal.SIGINT)
            server.wait(timeout=300)
            assert server.returncode == 0
        finally:
            server.kill()


def with_addresses(text: str, served: dict[str, str]) -> str:
    """Return a text of the documents for the server that runs."""
    for stated, address in served.items():
        text = text.replace(stated, address)
    return text


def _messages(path: Path) -> Iterator[str]:
    """Yield the texts of a module that are no docstrings, those of an f-string as one."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {id(e.value) for e in ast.walk(tree) if isinstance(e, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inside |= {id(part) for part in node.values}
            yield "".join(str(p.value) for p in node.values if isinstance(p, ast.Constant))
        elif isinstance(node, ast.Constant) and id(node) not in inside:
            yield str(node.value)


def test_messages_name_nothing_that_only_a_clone_has() -> None:
    package = ROOT / "build_scripts/triptych"
    for path in package.rglob("*.py"):
        for text in _messages(path):
            found = re.search(
                r"\b(docker|pipelines|guides)/[\w/]*\.md|pip install .?triptych", text
            )
            assert not found, (path, text)
            assert "`make " not in text or "clone of Triptych" in text, (path, text)
    for path in package.rglob("templates/*/pipeline.yaml"):
        assert not re.search(r"\.md|README|make ", path.read_text(encoding="utf-8")), path


def test_the_demo_prints_a_readable_result(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["make", "--dry-run", "--always-make", "demo"]
    recipe = subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout
    assert "triptych build minilm\n" in recipe
    assert "python -m triptych.interface.cli.demo model_repository minilm\n" in recipe
    demo.main(project / "model_repository", "minilm")
    said = capsys.readouterr().out
    assert re.search(r"refund please +I want my money back\. +0\.\d+", said)
    for step in ("minilm_preprocess", "minilm_core", "minilm_postprocess", "server stopped"):
        assert step in said


def test_each_command_of_the_readme_runs(served: dict[str, str]) -> None:
    # The fixtures build and serve; test_generation_vllm.py runs `make demo-chat`.
    elsewhere = ("triptych build minilm", "triptych serve", "source", "make")
    for command in dict.fromkeys(COMMANDS):
        _, *words = shlex.split(with_addresses(command, served))
        if command.startswith("triptych tune"):  # tests/operate runs it: minutes
            options = VERBS["tune"].make_context("tune", words[1:]).params
            assert (options["name"], options["slo"]) == ("minilm", ["p99=100ms"])
        elif not command.startswith(elsewhere):
            words += ["--url", served[GRPC]] if words[0] == "infer" else []
            if words[0] == "bench":  # in a fraction of the time
                words += ["-c", "2", "--rounds", "1", "--window-seconds", "0.3"]
            done = triptych(*words)
            assert done.exit_code == 0, (command, done.output)
            assert done.stdout, command


def test_default_addresses_are_those_of_the_documents() -> None:
    infer, serve = (
        {option.name: option.default for option in VERBS[verb].params}
        for verb in ("infer", "serve")
    )
    addresses = (f"{serve['host']}:{serve[f'{kind}_port']}" for kind in ("grpc", "http"))
    assert [infer["url"], *addresses] == [GRPC, GRPC, HTTP]


def test_snippets_of_the_readme_and_requests_without_the_client_are_as_shown(
    served: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    snippets = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert snippets
    for snippet in snippets:
        space: dict[str, Any] = {}
        exec(with_addresses(snippet, served), space)
        assert space["vectors"].shape == (2, 384)
    capsys.readouterr()
    section = CLIENTS.split("## Without the client\n")[1].split("\n#")[0]
    blocks = re.findall(r"```(sh|python)\n(.*?)```", section, re.DOTALL)
    by_http, by_grpc, _ = (with_addresses(text, served) for _, text in blocks)
    done = subprocess.run(["bash", "-c", by_http], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (output,) = json.loads(done.stdout)["outputs"]
    assert (output["name"], output["shape"]) == ("embedding", [1, 128])
    exec(by_grpc, {})
    assert capsys.readouterr().out.strip() == "(2, 128)"


def test_files_that_are_named_exist() -> None:
    for page in ("ARCHITECTURE.md", "CONTRIBUTING.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        for name in re.findall(r"`([\w./]+\.(?:py|md|yaml))`", text):
            if "NAME" not in name:
                places = [ROOT / name, ROOT / "build_scripts/triptych" / name]
                assert any(place.exists() for place in places), name


def test_make_targets_of_the_readme_exist() -> None:
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True).stdout
    pages = README + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for target in set(re.findall(r"(?m)(?:`|^)make ([a-z-]+)", pages)):
        assert re.search(rf"^{target}\b", listed, re.MULTILINE), target


def table(page: str, heading: str) -> list[dict[str, str]]:
    """Return the rows of the first table below a heading of a page, by its columns."""
    section = page.split(f" {heading}\n", 1)[1]
    lines = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)
    assert lines
    cells = [
        [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        for line in lines[0].splitlines()
    ]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def test_numbers_of_rows_are_those_of_the_gate() -> None:
    from triptych.core.gate_rows import CALIBRATION_ROWS, GATE_IMAGES, GATE_ROWS
    from triptych.core.inputs import LABELED_ROWS
    from triptych.core.requests import MIN_RECOMMENDED_ROWS

    text = " ".join(ACCURACY.split())
    for words in (
        f"for the gate (at most {GATE_ROWS} rows)",
        f"for calibration (at most {CALIBRATION_ROWS})",
        f"Of images, at most {GATE_IMAGES} are for the gate",
        f"With fewer than {MIN_RECOMMENDED_ROWS} rows for the gate",
        f"({LABELED_ROWS:,} at most are run)",
    ):
        assert words in text, words


def test_situations_of_servers_name_tests_that_exist() -> None:
    files = (ROOT / "tests").rglob("test_*.py")
    defined = {name for file in files for name in re.findall(r"def (test_\w+)\(", file.read_text())}
    rows = [row for row in table(FAULTS, "Situations") if row["what happens"]]
    assert len(rows) > 40
    for row in rows:
        named = set(re.findall(r"test_\w+", row["tested by"]))
        assert named, row
        assert named <= defined, row


def test_every_precision_is_in_the_table_with_where_it_runs() -> None:
    from triptych.base.errors import UserError
    from triptych.spec.backends import BACKENDS, Precision
    from triptych.spec.fields import check_runs

    def runs(precision: str, backend: str, device: str) -> bool:
        if precision == "auto":
            return device in BACKENDS[backend].tried
        try:
            check_runs(precision, backend, device)
        except UserError:
            return False
        return True

    rows = {row["precision"]: row for row in table(PRECISION, "Precision")}
    assert set(rows) == {*get_args(Precision), "auto"}
    places = {"openvino": ("openvino", "cpu"), "tensorrt": ("tensorrt", "gpu")}
    places |= {f"onnxruntime, {device}": ("onnxruntime", device) for device in ("cpu", "gpu")}
    for precision, row in rows.items():
        for column, place in places.items():
            assert (row[column] == "yes") == runs(precision, *place), (precision, column)


def test_labeled_rows_are_as_shown(tmp_path: Path) -> None:
    rows = table(ACCURACY, "Labeled rows: eval.jsonl")
    assert {row["task"] for row in rows} == set(TASKS)
    for row in rows:
        shown = json.loads(row["a line"])
        other = {**shown, **{key: 0 for key in ("relevant", "score") if key in shown}}
        path = tmp_path / EVAL_FILE
        path.write_text(f"{json.dumps(shown)}\n{json.dumps(other)}\n", encoding="utf-8")
        task = TASKS[row["task"]]
        assert len(read_labels(path, task)) == 2, row
        assert task.labeled is not None
        assert task.labeled.name == row["measure"]
