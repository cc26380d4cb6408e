"""`triptych dev`: watch a pipeline's folder, then check and build the pipeline after a change."""

from __future__ import annotations

import ast
import hashlib
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from triptych.base.errors import Progress
from triptych.repository.history import rollback
from triptych.repository.manifest import (
    MANIFEST_FILE,
    build_id,
    print_manifest,
    read_manifest_data,
)
from triptych.repository.store import write_models
from triptych.runtime.hooking import HOOKS_FILE

if TYPE_CHECKING:
    from triptych.building.build import BuildOutcome
    from triptych.building.pipeline_checks import Check
    from triptych.repository.render import Content


REASON = "hooks.py was edited, and the accuracy gate has not run yet"
"""Reason in the build manifest of a build with an edited hook."""


@dataclass(frozen=True)
class Round:
    """Result of checking and building a pipeline once."""

    # Checks of the pipeline's files; empty if the files could not be read.
    checks: tuple[Check, ...]
    built: BuildOutcome | None  # Outcome of the build; None if a check or the build failed
    failure: Exception | None  # Exception that ended the round; None if there was none
    seconds: float  # Duration of the round in seconds

    @property
    def problems(self) -> list[Check]:
        """Checks with a warning or an error."""
        return [check for check in self.checks if check.severity != "ok"]


def rebuild(
    folder: Path,
    repository: Path,
    overrides: Sequence[str],
    progress: Progress,
    changed: Sequence[str] = (),
) -> Round:
    """Check the pipeline in `folder` and build it into `repository`.

    If only ``hooks.py`` has `changed`, the build in the repository gets it before the gate runs;
    if the gate or another stage then fails, the build before is put back.

    Returns every exception as `Round.failure`, so that `dev` continues after an error.
    """
    # They take seconds to load, in which a server can start.
    from triptych.building.pipeline import open_pipeline
    from triptych.building.stages import BuildOptions
    from triptych.spec.any_spec import load_compiled

    started = time.monotonic()
    checks: tuple[Check, ...] = ()
    built, failure, before = None, None, ""
    try:
        pipeline = open_pipeline(load_compiled(folder, overrides))
        # The files are checked as they are, without the overrides.
        checks = tuple(open_pipeline(load_compiled(folder)).check_files())
        if all(check.severity != "error" for check in checks):
            if list(changed) == [HOOKS_FILE]:
                before = write_unchecked(folder, repository)
            if before:
                progress("hooks", "the edit is served, unchecked; the gate runs behind it")
            built = pipeline.build(BuildOptions(repository=repository, progress=progress))
    except Exception as error:
        failure = error
    if before and built is None:
        rollback(repository, folder.name, before)
        progress("hooks", "the edit failed: the build before it is served again")
    return Round(checks, built, failure, time.monotonic() - started)


def write_unchecked(folder: Path, repository: Path) -> str:
    """Put the edited hooks of the pipeline in `folder` into its build, which is marked.

    The mark is a gate that was accepted for `REASON`. Nothing else of the build changes, so that
    the edit must keep the functions of the hooks and their parameters.

    Returns:
        Id of the replaced build, for `repository.history.rollback`; empty if nothing was written.
    """
    name = folder.name
    manifest = read_manifest_data(repository, name)
    places = [path for path in manifest.get("files", ()) if path.endswith(f"/{HOOKS_FILE}")]
    edited = folder / HOOKS_FILE
    if not places or not edited.is_file():
        return ""
    new, old = edited.read_bytes(), (repository / places[0]).read_bytes()
    if new == old or _signatures(new) != _signatures(old):
        return ""
    before = build_id(repository, name)
    models = {name, *(place.partition("/")[0] for place in places)}
    contents: dict[str, Content] = {
        path.relative_to(repository).as_posix(): path
        for model in models
        for path in (repository / model).rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }
    for place in places:
        manifest["files"][place] = hashlib.sha256(new).hexdigest()
        if not (repository / place).is_symlink():
            contents[place] = new
    manifest["gate"] = {**(manifest.get("gate") or {}), "accepted": REASON}
    contents[f"{name}/{MANIFEST_FILE}"] = print_manifest(manifest)
    return before if write_models(repository, contents, keeps_links=True) else ""


def _signatures(code: bytes) -> dict[str, str] | None:
    """Return the parameters of each function of a module; None if it does not parse."""
    try:
        nodes = ast.parse(code).body
    except (SyntaxError, ValueError):
        return None
    return {node.name: ast.dump(node.args) for node in nodes if isinstance(node, ast.FunctionDef)}


_SETTLE_S = 0.1
_MAX_SETTLE_S = 2.0
_TEMPORARY = (".swp", ".tmp", "~", ".pyc")
"""Suffixes of temporary files of editors and of Python."""

Stamps = dict[str, tuple[int, int]]


class Watch:
    """Poller for changes of files at any depth of `folder`, except hidden and temporary files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen = self._look()

    def changed(self) -> list[str]:
        """Return the paths of files that were added, removed or changed.

        Waits until the files stop changing, at most `_MAX_SETTLE_S`.
        """
        now = self._look()
        if now == self._seen:
            return []
        deadline = time.monotonic() + _MAX_SETTLE_S
        while time.monotonic() < deadline:  # an editor truncates a file before it writes it
            before = now
            time.sleep(_SETTLE_S)
            now = self._look()
            if now == before:
                break
        seen, self._seen = self._seen, now
        return sorted(name for name in {*seen, *now} if seen.get(name) != now.get(name))

    def _look(self) -> Stamps:
        found: Stamps = {}
        for root, folders, names in os.walk(self._folder):
            folders[:] = [name for name in folders if not name.startswith((".", "__pycache__"))]
            for name in names:
                if name.startswith(".") or name.endswith(_TEMPORARY):
                    continue
                path = Path(root, name)
                try:
                    status = path.stat()
                except OSError:  # removed in the meantime
                    continue
                shown = path.relative_to(self._folder).as_posix()
                found[shown] = (status.st_mtime_ns, status.st_size)
        return found


class DevBuilds:
    """Builds of a pipeline after each change of its files, in a thread beside its server.

    Args:
        folder: Folder of the pipeline.
        build: Builds the pipeline after a change of these files.
        show: Called with the changed files and the result of each build.
    """

    def __init__(
        self,
        folder: Path,
        build: Callable[[list[str]], Round],
        show: Callable[[list[str], Round], None],
    ) -> None:
        self._watch = Watch(folder)
        self._build = build
        self._show = show
        self._changed: set[str] = set()
        self._ended: queue.SimpleQueue[tuple[list[str], Round]] = queue.SimpleQueue()
        self.is_busy = False

    def poll(self) -> None:
        """Show the result of a build that has ended, and begin one if files have changed."""
        self._changed.update(self._watch.changed())
        if not self._ended.empty():
            self.is_busy = False
            self._show(*self._ended.get())
        if self._changed and not self.is_busy:
            self.start()

    def start(self) -> None:
        """Begin a build; no other build may be in progress."""
        changed = sorted(self._changed)
        self._changed.clear()
        self.is_busy = True

        def run() -> None:
            self._ended.put((changed, self._build(changed)))

        # The end of the server ends a build as well, which leaves the repository as it is.
        threading.Thread(target=run, daemon=True).start()
