"""The README tells the truth: its commands run, in its order, and every verb is in it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from conftest import ROOT

pytestmark = pytest.mark.build

README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "pipelines/README.md").read_text(encoding="utf-8")
PIPELINES = (ROOT / "pipelines/reference.md").read_text(encoding="utf-8")
COMMANDS = [
    line.split("  #")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
]
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def served() -> Iterator[None]:
    """`triptych serve` as the README starts it, after the build the README asks for."""
    assert run(["triptych", "build", "minilm"]).returncode == 0
    server = subprocess.Popen(
        ["triptych", "serve"], cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    assert server.stdout.readline().startswith("ready")
    yield
    server.send_signal(signal.SIGINT)
    server.communicate(timeout=60)
    assert server.returncode == 0


def test_the_two_commands_come_first() -> None:
    assert COMMANDS[:2] == ["make demo", "make test"]
    # What runs this very test.
    assert "make --jobs 2 test LONG=" in (ROOT / ".ci/run").read_text()


@pytest.mark.long
def test_make_demo_prints_a_readable_result() -> None:
    done = run(["make", "demo"])
    assert done.returncode == 0, done.stderr
    assert re.search(r"refund please +I want my money back\. +0\.\d+", done.stdout)
    for step in ("minilm_preprocess", "minilm_core", "minilm_postprocess", "server stopped"):
        assert step in done.stdout


@pytest.mark.parametrize(
    "command",
    [
        command
        for command in dict.fromkeys(COMMANDS[2:])
        # `make demo-chat` takes minutes: test_generation_vllm.py runs it.
        if command not in ("triptych serve", "make demo-chat")
        and not command.startswith(("source", "triptych tune"))
    ],
)
def test_each_command_of_the_readme_runs(command: str, served: None, tmp_path: Path) -> None:
    words = shlex.split(command.replace("--out ", f"--out {tmp_path}/"))
    if words[1] == "bench":  # in a tenth of the time
        words += ["--rounds", "1", "--window-seconds", "0.6"]
    done = run(words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout or words[1] == "build"


@pytest.mark.long
def test_the_tune_command_of_the_readme_runs(tmp_path: Path) -> None:
    """On a copy, since it writes beside the spec, and in a fraction of the time."""
    (command,) = [command for command in COMMANDS if command.startswith("triptych tune")]
    shutil.copytree(ROOT / "pipelines/minilm", tmp_path / "minilm")
    folders = ["--pipelines", str(tmp_path), "--repository", str(tmp_path / "repository")]
    folders += ["--reports", str(tmp_path / "reports")]
    done = run([*shlex.split(command), "--time-budget", "10s", "--clients", "8", *folders])
    assert done.returncode in (0, 1), done.stderr  # whether a busy machine keeps the promise or not
    assert "requests per second at which p99 <= 100 ms is just met" in done.stdout
    assert (tmp_path / "reports/minilm/tune/report.html").is_file()
    assert not list(tmp_path.glob(".tune-*"))


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_each_snippet_of_the_readme_runs(snippet: str, served: None) -> None:
    assert SNIPPETS
    done = run([sys.executable, "-c", snippet + "\nprint(vectors.shape)"])
    assert done.stdout.strip() == "(2, 384)", done.stderr


def test_a_request_without_the_client_is_as_shown(served: None) -> None:
    section = PIPELINES.split("## Without the client\n")[1].split("\n## ")[0]
    blocks = re.findall(r"```(sh|python)\n(.*?)```", section, re.DOTALL)
    commands = {"sh": ["bash", "-c"], "python": [sys.executable, "-c"]}
    by_http, by_grpc = (run([*commands[kind], text]) for kind, text in blocks)
    assert by_http.returncode == 0, by_http.stderr
    (output,) = json.loads(by_http.stdout)["outputs"]
    assert (output["name"], output["shape"]) == ("embedding", [1, 128])
    assert by_grpc.stdout.strip() == "(2, 128)", by_grpc.stderr


def verbs() -> list[str]:
    from triptych.interface.cli.command import VERBS

    return [name for names in VERBS.values() for name in names]


@pytest.mark.parametrize("verb", verbs())
def test_every_verb_has_help_and_is_in_the_readme(verb: str) -> None:
    done = run(["triptych", verb, "--help"])
    assert done.returncode == 0
    assert "--json" in done.stdout
    assert f"triptych {verb}" in README


def test_links_lead_somewhere() -> None:
    tracked = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True)
    for page in tracked.stdout.split():
        text = (ROOT / page).read_text(encoding="utf-8")
        for path in re.findall(r"\]\(([^)\s]+)\)", text):
            if path.startswith("https:"):
                continue
            file, _, heading = path.partition("#")
            target = (ROOT / page).parent / file if file else ROOT / page
            assert target.exists(), f"{page}: {path}"
            if heading:
                headings = re.findall(r"(?m)^#+ (.*)$", target.read_text(encoding="utf-8"))
                anchors = {re.sub(r"[^\w-]", "", h.lower().replace(" ", "-")) for h in headings}
                assert heading in anchors, f"{page}: {path}"


def test_the_guide_stays_short() -> None:
    assert len(GUIDE.splitlines()) <= 150


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_files_that_are_named_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for name in re.findall(r"`([\w./]+\.(?:py|md|yaml))`", text):
        if "NAME" not in name:
            places = [ROOT / name, ROOT / "build_scripts/triptych" / name]
            assert any(place.exists() for place in places), name


def test_make_targets_of_the_readme_exist() -> None:
    listed = run(["make", "help"]).stdout
    pages = README + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for target in set(re.findall(r"(?m)(?:`|^)make ([a-z-]+)", pages)):
        assert re.search(rf"^{target}\b", listed, re.MULTILINE), target


def test_every_field_of_the_spec_is_documented() -> None:
    from triptych.spec.spec import RESERVED, PipelineSpec

    def names(schema: dict[str, object], definitions: dict[str, dict[str, object]]) -> set[str]:
        found: set[str] = set()
        properties = schema.get("properties", {})
        assert isinstance(properties, dict)
        for name, value in properties.items():
            found.add(name)
            if "$ref" in value:
                found |= names(definitions[value["$ref"].rsplit("/", 1)[-1]], definitions)
        return found

    schema = PipelineSpec.model_json_schema()
    for name in names(schema, schema["$defs"]) - set(RESERVED):
        assert name in PIPELINES, name


LABELS = ("text-classification", "zero-shot-classification", "image-classification")


def table(heading: str) -> list[dict[str, str]]:
    """The rows of the first table below a heading of pipelines/reference.md, by its columns."""
    section = PIPELINES.split(f" {heading}\n", 1)[1]
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

    text = " ".join(PIPELINES.split())
    for words in (
        f"for the gate (at most {GATE_ROWS} rows)",
        f"for calibration (at most {CALIBRATION_ROWS})",
        f"Of images, at most {GATE_IMAGES} are for the gate",
        f"With fewer than {MIN_RECOMMENDED_ROWS} rows for the gate",
        f"({LABELED_ROWS:,} at most are run)",
    ):
        assert words in text, words


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "int8", "int8_dynamic", "fp8"])
def test_limits_are_those_of_the_gate(precision: str) -> None:
    from triptych.spec.tasks import TASKS
    from triptych.spec.tasks.accuracy import METRICS, TOLERANCES, thresholds

    rows = table("Metrics and limits")
    assert [row["metric"] for row in rows] == list(METRICS)
    (column,) = [name for name in rows[0] if precision in name.split(", ")]
    stated: dict[str, dict[str, float]] = {task: {} for task in TASKS}
    for row in rows:
        tasks = row["task"].replace("labels", ", ".join(LABELS)).split(", ")
        for task in TASKS if tasks == ["every"] else tasks:
            if row[column]:
                stated[task][row["metric"]] = float(row[column])
    assert precision in TOLERANCES
    for task, limits in stated.items():
        assert limits == thresholds(TASKS[task], precision, {}), task


@pytest.mark.parametrize("precision", ["fp16", "bf16", "int8", "int8_dynamic", "fp8"])
def test_limits_are_those_of_the_probe(precision: str) -> None:
    from triptych.spec.tasks import TASKS
    from triptych.spec.tasks.accuracy import probe_limits

    rows = table("Outside your traffic")
    (column,) = [name for name in rows[0] if precision in name.split(", ")]
    wanted: dict[str, float] = {}
    for task in TASKS.values():
        wanted |= probe_limits(task, precision, {})
    assert {row["metric"]: float(row[column]) for row in rows} == wanted


def choices(annotation: Any) -> set[Any]:
    """The values of a Literal, or of a union of them."""
    values = get_args(annotation)
    return set().union(*map(choices, values)) if values else {annotation}


def test_every_precision_is_in_the_table_with_where_it_runs() -> None:
    from triptych.base.errors import UserError
    from triptych.building.auto import RUNS
    from triptych.spec.fields import CoreSettings, check_runs

    rows = {row["precision"]: row for row in table("Precision")}
    assert set(rows) == choices(CoreSettings.model_fields["precision"].annotation)

    def runs(precision: str, backend: str, device: str) -> bool:
        if precision == "auto":
            return (backend, device) in RUNS
        try:
            check_runs(precision, backend, device)
        except UserError:
            return False
        return True

    columns = {
        "onnxruntime, cpu": ("onnxruntime", "cpu"),
        "onnxruntime, gpu": ("onnxruntime", "gpu"),
        "tensorrt": ("tensorrt", "gpu"),
    }
    for precision, row in rows.items():
        for column, place in columns.items():
            stated = row[column] == "yes"
            assert stated == runs(precision, *place), (precision, column)


@pytest.mark.parametrize("row", table("Labeled rows: eval.jsonl"), ids=lambda row: row["task"])
def test_labeled_rows_are_as_shown(row: dict[str, str], tmp_path: Path) -> None:
    from triptych.spec.tasks import TASKS
    from triptych.spec.tasks.eval_file import EVAL_FILE, read_labels

    shown = json.loads(row["a line"])
    other = {**shown, **{key: 0 for key in ("relevant", "score") if key in shown}}
    path = tmp_path / EVAL_FILE
    path.write_text(f"{json.dumps(shown)}\n{json.dumps(other)}\n", encoding="utf-8")
    task = TASKS[row["task"]]
    assert len(read_labels(path, task)) == 2
    assert task.labeled is not None
    assert task.labeled.name == row["measure"]


def test_every_task_has_its_labeled_row() -> None:
    from triptych.spec.tasks import TASKS

    assert {row["task"] for row in table("Labeled rows: eval.jsonl")} == set(TASKS)
