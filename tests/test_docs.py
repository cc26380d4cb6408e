"""The README tells the truth: its commands run, in its order, and every verb is in it."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
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
    assert "make test" in (ROOT / ".ci/run").read_text()  # what runs this very test


def test_make_demo_prints_a_readable_result() -> None:
    done = run(["make", "demo"])
    assert done.returncode == 0, done.stderr
    assert re.search(r"refund please +I want my money back\. +0\.\d+", done.stdout)
    for step in ("minilm_preprocess", "minilm_core", "minilm_postprocess", "server stopped"):
        assert step in done.stdout


@pytest.mark.parametrize(
    "command",
    [c for c in COMMANDS[2:] if c != "triptych serve" and not c.startswith("source")],
)
def test_each_command_of_the_readme_runs(command: str, served: None) -> None:
    words = shlex.split(command)
    done = run(words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout or words[1] == "build"


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_each_snippet_of_the_readme_runs(snippet: str, served: None) -> None:
    assert SNIPPETS
    done = run([sys.executable, "-c", snippet + "\nprint(vectors.shape)"])
    assert done.stdout.strip() == "(2, 384)", done.stderr


def verbs() -> list[str]:
    from triptych.cli import app

    return [c.callback.__name__ for c in app.registered_commands if c.callback is not None]


@pytest.mark.parametrize("verb", verbs())
def test_every_verb_has_help_and_is_in_the_readme(verb: str) -> None:
    done = run(["triptych", verb, "--help"])
    assert done.returncode == 0
    assert "--json" in done.stdout
    assert f"triptych {verb}" in README


@pytest.mark.parametrize("path", re.findall(r"\]\(([^)]+)\)", README))
def test_links_lead_somewhere(path: str) -> None:
    assert (ROOT / path).exists()


def test_make_targets_of_the_readme_exist() -> None:
    listed = run(["make", "help"]).stdout
    for target in set(re.findall(r"make ([a-z-]+)", README)):
        assert re.search(rf"^{target}\b", listed, re.MULTILINE), target


def test_every_field_of_the_spec_is_documented() -> None:
    from triptych.spec import PipelineSpec

    text = (ROOT / "pipelines/README.md").read_text(encoding="utf-8")

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
    for name in names(schema, schema["$defs"]) - {"name", "folder"}:
        assert name in text, name
