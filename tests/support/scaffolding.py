"""Scaffolded pipelines for tests, and the command as a user runs it."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from triptych.core.own_scaffold import describe_model
from triptych.spec.kind import GENERATING
from triptych.spec.scaffold import scaffold
from triptych.spec.template import BUILT_IN, tasks

OWN_MODELS = [
    name for name in tasks() if "task: model\n" in (BUILT_IN / name / "pipeline.yaml").read_text()
]
"""Built-in templates of pipelines around an own model."""
ENCODERS = [name for name in tasks() if name not in (*GENERATING, *OWN_MODELS)]
"""Built-in templates of pipelines around an encoder."""


def write(pipelines: Path, task: str | None, name: str = "mine", **options: Any) -> Path:
    wanted = {"model": None, "with_hooks": False, "describe": describe_model, **options}
    scaffold(name, task=task, pipelines=pipelines, **wanted)
    return pipelines / name


def keep_rows(folder: Path, rows: int) -> Path:
    """Shorten the traffic of a pipeline: a build and its gate take as long as it has rows."""
    traffic = folder / "traffic.jsonl"
    lines = traffic.read_text(encoding="utf-8").splitlines(keepends=True)
    traffic.write_text("".join(lines[:rows]), encoding="utf-8")
    return folder


def run(*words: str | Path) -> Result:
    """Run the command in this process; a mistake is the `exception` of the result."""
    from triptych.interface.cli import app

    return CliRunner().invoke(app, [*map(str, words)])


def answer_of(folder: Path, url: str) -> dict[str, Any]:
    """The one answer of a server to the command that the specification of a pipeline names."""
    text = (folder / "pipeline.yaml").read_text(encoding="utf-8")
    (command,) = re.findall(r"# Try it: triptych (infer .*)", text)
    done = run(*shlex.split(command), "--url", url, "--json")
    assert done.exit_code == 0, done.output
    (answer,) = json.loads(done.stdout)
    return dict(answer)
