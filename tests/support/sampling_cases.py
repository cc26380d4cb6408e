"""A pipeline that samples every row, and what its server kept."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from client_toy import wait_until
from conftest import build_into, write_pipeline
from task_models import TOPICS
from triptych.runtime.sampling import list_files
from triptych.serving.bench.resources import fetch_metrics
from triptych.serving.server import Server

SECRET = "4711-0815-SECRET"
HOOKS = """
import os
import re
import time

if "CLOCK" in os.environ and not hasattr(time, "right"):
    # A fake: the clock of this step is wrong by the file's seconds.
    time.right = time.time_ns
    time.time_ns = lambda: time.right() + 10**9 * int(open(os.environ["CLOCK"]).read() or 0)


def redact(inputs, answer):
    if "drop me" in inputs["text"]:
        return None
    if "break" in inputs["text"]:
        raise KeyError(inputs["text"])
    if "end the writer" in inputs["text"]:
        raise SystemExit(inputs["text"])
    return {"text": re.sub("[0-9]{4}-[0-9]{4}-SECRET", "#", inputs["text"])}, answer
"""
AFTER = """

def after(rows):
    names = ["billing", "delivery", "returns", "technical", "account"]
    following = dict(zip(names, names[1:] + names[:1]))
    return [{**row, "label": [following[label] for label in row["label"]]} for row in rows]
"""
FAILS = """

def {name}(rows, inputs=None):
    if "{planted}" in str([rows, inputs]):
        raise {error}(str([rows, inputs]))
    return rows
"""
SAMPLE = {"rate": 1.0, "window_s": 0.2, "redact": "hooks.redact"}


def write_sampling(folder: Path, model: Path) -> Path:
    """A pipeline of the tiny classifier that samples every row."""
    serving = {"sample": SAMPLE}
    fields = {"task": "text-classification", "model": {"source": str(model)}, "serving": serving}
    made = write_pipeline(folder, **fields)
    (made / "hooks.py").write_text(HOOKS, encoding="utf-8")
    return made


def build_sampling(folder: Path, model: Path) -> Path:
    """A folder with `pipelines/` and `repository/`: `sampled`, and `stale` with old labels."""
    for name in ("sampled", "stale"):
        build_into(write_sampling(folder / "pipelines" / name, model), folder / "repository")
    settings = folder / "repository/stale_postprocess/1/settings.json"
    text = settings.read_text(encoding="utf-8")
    settings.unlink()  # it may be one file with others
    for topic in TOPICS:
        text = text.replace(topic, f"old {topic}")
    settings.write_text(text, encoding="utf-8")
    return folder


def counts(server: Server) -> Counter[str]:
    """``kept``, ``bytes`` and reasons of dropped rows to their counts on the metrics page."""
    return Counter(
        {
            labels.get("reason", name.removeprefix("triptych_sample_")): int(value)
            for name, labels, value in fetch_metrics(server.metrics_url)
            if name.startswith("triptych_sample_") and labels["pipeline"] == "sampled"
        }
    )


def wait_for_texts(folder: Path, texts: list[str]) -> None:
    """Until every text is in the folder: a request's parts are answered in any order."""
    wait_until(lambda: {row["inputs"]["text"] for row in records(folder)} >= set(texts), "the rows")


def rows_in(folder: Path) -> int:
    """As the names of a pipeline's files tell."""
    return sum(file.rows for file in list_files(folder, folder.name))


def records(folder: Path) -> list[dict[str, Any]]:
    """Every row in the folder."""
    return [
        json.loads(line)
        for file in list_files(folder, "sampled")
        for line in read_if_there(file.path).decode().split("\n")[1:-1]
    ]


def read_if_there(path: Path, since: float = 0.0) -> bytes:
    """The file's bytes; none where it is older, or who shares its folder removed it meanwhile."""
    try:
        return path.read_bytes() if path.stat().st_mtime >= since else b""
    except FileNotFoundError:
        return b""


def files_with(text: str, folder: Path, *, since: float = 0.0) -> list[Path]:
    """Files below the folder, changed since then, that hold the text."""
    paths = (Path(place, name) for place, _, names in os.walk(folder) for name in names)
    return [path for path in paths if text.encode() in read_if_there(path, since)]
