"""Tables of measurements, and the page of results that is generated from the published ones.

Usage: ``python build_scripts/benchmarks/results.py`` writes ``RESULTS.md`` again from the files in
``results/``. With names it first runs these benchmarks: ``results.py compare soak``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from triptych.base.files import write_files
from triptych.container.machine import find_driver, find_gpus
from triptych.serving.bench.bench import describe_machine

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
PUBLISHED = FOLDER / "results"
PAGE = FOLDER / "RESULTS.md"
MAX_QUIET_LOAD = 0.5
"""Maximum load average, in processes, at the start of a measurement on a quiet machine."""
_PACKAGES = ("nvidia-pytriton", "onnxruntime", "torch", "transformers", "tokenizers", "numpy")
_STARTED_AT, _LOAD_AT_START = time.gmtime(), os.getloadavg()[0]


@dataclass(frozen=True)
class Table:
    """A Markdown table with a title; each row has a cell for each column of the head."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __str__(self) -> str:
        lines = [f"**{self.title}**", "", self._line(self.head), "| --- " * len(self.head) + "|"]
        return "\n".join([*lines, *map(self._line, self.rows)])

    def _line(self, cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |"


def describe(title: str, tables: Sequence[Table], notes: Sequence[str]) -> dict[str, Any]:
    """Return a result with its tables, and when, where and how this process measured it."""
    versions = {"Python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    gpus = ", ".join(map(str, find_gpus()))
    hardware = {**describe_machine(), "GPU": f"{gpus}, driver {find_driver()}" if gpus else "none"}
    return {
        "title": title,
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", _STARTED_AT),
        "machine": hardware,
        "load_average_at_start": round(_LOAD_AT_START, 2),
        "versions": versions,
        "command": _command(),
        "notes": list(notes),
        "tables": [asdict(table) for table in tables],
    }


def publish(name: str, result: dict[str, Any]) -> None:
    """Store a result of `describe` below ``results/`` and write the page again."""
    write_files(PUBLISHED, {f"{name}.json": json.dumps(result, indent=1) + "\n"})
    write_page()


def write_page() -> None:
    """Write the page of all published results; readers see the old page or the new one."""
    results = [json.loads(path.read_text("utf-8")) for path in sorted(PUBLISHED.glob("*.json"))]
    write_files(PAGE.parent, {PAGE.name: render_page(results)})


def render_page(results: Sequence[dict[str, Any]]) -> str:
    """Return the page: a section for each result with its date, machine, versions and command."""
    lines = ["# Results", "", "`make results` generates this page from `results/*.json`.", ""]
    for result in results:
        lines += [f"## {result['title']}", ""]
        hardware = "; ".join(f"{name}: {value}" for name, value in result["machine"].items())
        versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
        lines += [f"- Date: {result['measured_at']}", f"- Machine: {hardware}"]
        lines += [f"- Versions: {versions}", f"- Renew: `{result['command']}`"]
        load = result["load_average_at_start"]
        if load > MAX_QUIET_LOAD:
            lines.append(
                "- Measured while other work ran on the machine, so the figures are only rough "
                f"(load average {load:g} at the start)"
            )
        lines += [*(f"- {note}" for note in result["notes"]), ""]
        for table in result["tables"]:
            lines += [str(Table(**table)), ""]
    return "\n".join(lines)


def _command() -> str:
    program = Path(sys.argv[0]).resolve()
    words = [str(program.relative_to(ROOT))] if program.is_relative_to(ROOT) else [program.name]
    if program.name == "__main__.py":
        words = ["-m", f"benchmarks.{program.parent.name}"]
    return shlex.join(["python", *words, *sys.argv[1:]])


def main() -> int:
    """Run the named benchmarks, then write the page; return the highest exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="benchmarks to run first, for example compare")
    codes = [0]
    for name in parser.parse_args().names:
        command = [sys.executable, str(FOLDER / f"{name}.py"), "--publish"]
        codes.append(subprocess.run(command, cwd=ROOT, check=False).returncode)
    write_page()
    return max(codes)


if __name__ == "__main__":
    raise SystemExit(main())
