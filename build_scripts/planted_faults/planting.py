"""Plant one fault at a time in a copy of the project and report which faults a test finds.

The faults (code_faults.py) are small changes of the code, the same for the same source. A fault
first meets the pure tests and then the others, as far as they import the changed module; the first
test that fails ends its run. The failed tests then run without a fault: one that fails again counts
for nothing. Results are kept below .cache/planted_faults, so an interrupted run goes on where it
stopped; a changed test or a changed module is tried again. Caches should be warm: run `make test`
first. A fault that no test finds may be one that changes nothing: judge it.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from queue import Queue
from typing import Any

import psutil
import pytest

from planted_faults.code_faults import PACKAGE, Fault, chosen_faults

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".cache/planted_faults"
SOURCES = "build_scripts/triptych"
CONTRACTS = ("test_kinds", "test_golden", "test_golden_deploy", "test_step_errors")
"""Files with tests for all packages: they run after the tests of the package."""
COMMAND = re.compile(r'with_name\("triptych"\)|triptych\.interface\.cli')
"""The text of a test that starts the command in a process of its own."""
FILE_IS_NOT_PURE = re.compile(r"(?m)^pytestmark = \[?\s*pytest\.mark\.(server|build|long)\b")
FAILED = re.compile(r"(?m)^(?:FAILED|ERROR) (\S+\.py(?:::\S+?(?:\[.*?\])?)?)(?: - |$)")
SERVER = multiprocessing.get_context("forkserver")
LIBRARIES = """
numpy onnx onnxruntime onnxscript pydantic pytest tokenizers torch transformers typer
tritonclient.grpc
"""
"""Imported once, by the process that forks the processes of pytest."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPYCACHEPREFIX": str(ROOT / ".cache/bytecode"),
    "TOKENIZERS_PARALLELISM": "false",
}
"""Read by the libraries and by Python when they start."""
MAX_FILES = 8
"""Number of test files that are not pure and meet a fault: the closest ones."""
STAGES: dict[str, list[str]] = {"pure": ["--pure"], "others": ["-m", "not long"]}


def git(*words: str) -> str:
    return subprocess.check_output(["git", *words], cwd=ROOT, text=True).strip()


class Copy:
    """A copy of the project in which one fault at a time is planted."""

    def __init__(self, number: int, revision: str) -> None:
        self.root = FOLDER / f"copy{number}"
        shutil.rmtree(self.root, ignore_errors=True)
        for name in git("ls-files", "-co", "--exclude-standard").split("\n"):
            if (ROOT / name).is_file() and not (revision and name.startswith("tests/")):
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)
        if revision:
            archive = f"git archive {revision} tests | tar -x -C '{self.root}'"
            subprocess.run(archive, shell=True, cwd=ROOT, check=True)
        (self.root / ".cache").mkdir()
        for name in ("chromium", "prometheus", "perf_analyzer"):
            (self.root / ".cache" / name).symlink_to(ROOT / ".cache" / name)
        self.files = {path.stem: path for path in sorted((self.root / "tests").rglob("test_*.py"))}

    @functools.cache  # noqa: B019
    def imports_of(self, path: Path) -> set[Path]:
        """Return the modules of the package and of the tests that a file imports."""
        found: set[Path] = set()
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                parts = path.relative_to(self.root / "build_scripts").parts if node.level else ()
                module = ".".join((*parts[:-1], node.module or "")).strip(".")
                names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
            else:
                continue
            for name in names:
                folder = self.root if name.startswith("tests.") else self.root / "build_scripts"
                place = folder / name.replace(".", "/")
                found |= {place.with_suffix(".py"), place / "__init__.py"}
        if COMMAND.search(text):
            found |= set((self.root / SOURCES / "interface/cli").glob("*.py"))
        return {place for place in found if place.is_file()}

    @functools.cache  # noqa: B019
    def distances(self, test: Path) -> dict[Path, int]:
        """Return how many modules of the package lie on the way to each module that a test uses."""
        distances, reached = {test: 0}, [test]
        for path in reached:
            for imported in self.imports_of(path) - distances.keys():
                distances[imported] = distances[path] + (SOURCES in str(imported))
                reached.append(imported)
        return distances

    def files_for(self, fault: Fault, stage: str) -> list[str]:
        """Return the test files for a fault, the closest first."""
        near, all_files = [], []
        name = fault.where.split(".")[-1].strip("_")
        for stem, path in self.files.items():
            text = path.read_text(encoding="utf-8")
            if stage == "pure" and FILE_IS_NOT_PURE.search(text):
                continue
            far = self.distances(path).get(self.root / SOURCES / fault.path, 99)
            if fault.package == "runtime" and stage == "others" and "server" in text:
                far = min(far, 9)  # a server imports the copy that lies in the repository
            if far < 99:
                own, is_contract = path.parent.name == fault.package, stem in CONTRACTS
                place = (not own, is_contract, far > 1, name not in text, far, len(text))
                all_files.append((place, path.relative_to(self.root).as_posix()))
                near += all_files[-1:] if own or far == 1 or is_contract else []
        files = [file for _, file in sorted(near or all_files)]
        return files if stage == "pure" else files[:MAX_FILES]

    def run(self, words: list[str], seconds: float) -> list[str]:
        """Run pytest and return the tests that failed, or what happened to pytest.

        Raises:
            TimeoutError: The tests took too long; they were ended.
        """
        cache = self.root / ".cache/triptych"  # what a fault builds must not be used again
        shutil.rmtree(cache, ignore_errors=True)
        if (ROOT / ".cache/triptych").is_dir() and "--pure" not in words:
            skip = shutil.ignore_patterns("*.lock", ".partial-*")
            shutil.copytree(ROOT / ".cache/triptych", cache, copy_function=os.link, ignore=skip)
        words = ["-q", "-rfE", "--no-header", "-p", "no:cacheprovider", *words]
        words += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of the libraries
        process = SERVER.Process(target=run_pytest, args=(str(self.root), str(cache), words))
        process.start()
        process.join(seconds)
        if process.exitcode is None:
            end(psutil.Process(process.pid))
            process.join()
            raise TimeoutError
        if process.exitcode == pytest.ExitCode.INTERRUPTED:
            raise KeyboardInterrupt
        failed = FAILED.findall((self.root / "log").read_text(encoding="utf-8", errors="replace"))
        is_fine = process.exitcode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        return failed or ([] if is_fine else [f"pytest ended with {process.exitcode}"])


def run_pytest(folder: str, cache: str, words: list[str]) -> None:
    """Run pytest in a copy: the target of a process that a server with the libraries forks."""
    os.setsid()
    os.chdir(folder)
    with Path("log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sources = str(Path(folder, "build_scripts"))
    os.environ.update(PYTHONPATH=sources, TRIPTYCH_CACHE=cache, COLUMNS="1000")
    sys.pycache_prefix = ENVIRONMENT["PYTHONPYCACHEPREFIX"]
    sys.path[:0] = [sources]
    sys.exit(int(pytest.main(words)))


def end(process: Any) -> None:
    """End pytest with all that it has started. It has time to stop its servers by itself."""
    started = process.children(recursive=True)
    process.send_signal(signal.SIGINT)
    _, alive = psutil.wait_procs([process, *started], timeout=20)
    for other in alive:
        other.kill()
    psutil.wait_procs(alive, timeout=20)


class Run:
    """The results of one version of the tests: those of earlier runs, and the rest of the work."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.seconds = options.seconds
        if options.tests:
            version = git("rev-parse", f"{options.tests}:tests")
        else:
            files = sorted(p for p in (ROOT / "tests").rglob("*.*") if p.suffix in (".py", ".yaml"))
            version = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
        FOLDER.mkdir(parents=True, exist_ok=True)
        self.file = FOLDER / f"results-{version[:12]}.json"
        known = json.loads(self.file.read_text()) if self.file.exists() else {}
        self.broken: list[str] = known.get("broken", [])
        self.results: dict[str, dict[str, str]] = known.get("results", {})
        faults = [fault for fault in chosen_faults() if options.only in ("", fault.package)]
        self.faults = faults[: options.faults or None]
        self.copies: Queue[Copy] = Queue()
        for number in range(options.workers):
            self.copies.put(Copy(number, options.tests))
        self.pool = ThreadPool(options.workers)

    def save(self) -> None:
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps({"broken": self.broken, "results": self.results}, indent=1))
        new.replace(self.file)

    def found_by(self, fault: Fault) -> str:
        return "".join(self.results.get(fault.key, {}).values())

    def work(self) -> None:
        """Run what has no result; then confirm the tests that failed, and repeat."""
        for stage in STAGES:
            while rest := [
                fault
                for fault in self.faults
                if not self.found_by(fault) and stage not in self.results.get(fault.key, {})
            ]:
                for fault, found in self.pool.imap(partial(self.try_fault, stage), rest):
                    self.results.setdefault(fault.key, {})[stage] = found
                    self.save()
                    print(self.line_of(fault), flush=True)
                self.confirm(stage)

    def try_fault(self, stage: str, fault: Fault) -> tuple[Fault, str]:
        """Return the fault with the test of a stage that finds it; "" if none does."""
        copy = self.copies.get()
        module = copy.root / SOURCES / fault.path
        files = [file for file in copy.files_for(fault, stage) if file not in self.broken]
        left_out = [word for name in self.broken for word in ("--deselect", name)]
        try:
            module.write_bytes(fault.planted())
            words = ["-x", *STAGES[stage], *files, *left_out]
            failed = copy.run(words, self.seconds) if files else []
        except TimeoutError:
            print(f"time ran out: {fault}", flush=True)
            failed = []
        finally:
            shutil.copy2(PACKAGE / fault.path, module)
            self.copies.put(copy)
        return fault, "".join(failed[:1])

    def confirm(self, stage: str) -> None:
        """Run the tests that failed again, without a fault; undo the results of those that fail."""
        names = {stages.get(stage, "") for stages in self.results.values()}
        doubted = sorted(name for name in names if ".py" in name)
        copy = self.copies.get()
        try:
            failed = copy.run([*STAGES[stage], *doubted], 60 * len(doubted)) if doubted else []
        finally:
            self.copies.put(copy)
        self.broken = sorted({*self.broken, *failed})
        for stages in self.results.values():
            if stages.get(stage) in failed:
                del stages[stage]
        self.save()

    def line_of(self, fault: Fault) -> str:
        test = self.found_by(fault)
        return f"found by {test}: {fault}" if test else f"NOT FOUND: {fault}"

    def report(self) -> None:
        tried = [fault for fault in self.faults if fault.key in self.results]
        print("\n" + "\n".join(sorted(self.line_of(fault) for fault in tried)) + "\n")
        for package in (*sorted({fault.package for fault in tried}), ""):
            own = [fault for fault in tried if package in ("", fault.package)]
            found = sum(1 for fault in own if self.found_by(fault))
            print(f"{package or 'all':11} {found:3} of {len(own):3} found")
        print(f"left out, since they fail without a fault: {', '.join(self.broken) or 'none'}")


def main() -> None:
    """Read the options, try the faults and print the report."""
    plain = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    add = parser.add_argument
    add("--only", default="", metavar="PACKAGE", help="faults of this package only")
    add("--faults", type=int, default=0, metavar="N", help="the first N faults: packages in turn")
    add("--tests", default="", metavar="REVISION", help="use tests/ of this git revision")
    add("--workers", type=int, default=2, help="number of copies that run at a time (2)")
    add("--seconds", type=float, default=600, help="limit of a fault's pure and other tests (600)")
    add("--list", action="store_true", help="only print the faults")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    if options.list:
        print(*chosen_faults(), sep="\n")
        return
    os.environ |= ENVIRONMENT
    SERVER.set_forkserver_preload(LIBRARIES.split())
    run = Run(options)
    try:
        run.work()
    finally:
        run.report()
