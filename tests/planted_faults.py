"""Plant one fault at a time in a copy of the package and report which faults a test finds.

The faults (tests/support/code_faults.py) are small changes of the code, the same for the same
source. A fault first meets the pure tests and then the others, as far as they import the changed
module; the first test that fails ends its run. The failed tests then run without a fault: one that
fails again counts for nothing. Results are kept below .cache/planted_faults, so an interrupted run
goes on where it stopped; a changed test or a changed module is tried again. Caches should be warm:
run `make test` first. A fault that no test finds may be one that changes nothing: judge it.
"""

import argparse
import ast
import functools
import json
import multiprocessing
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(Path(__file__).resolve().parent / "support"))
from code_faults import PACKAGE, Fault, chosen_faults, hashed  # noqa: E402

FOLDER = ROOT / ".cache/planted_faults"
SOURCES = "build_scripts/triptych"
CONTRACTS = ("test_kinds", "test_golden", "test_golden_deploy", "test_step_errors")
"""Files with tests for all packages: they run after the tests of the package."""
BATCH = 40
"""Number of faults after which the tests that failed run without a fault."""
TIME_RAN_OUT = "time ran out"
FILE_IS_NOT_PURE = re.compile(r"(?m)^pytestmark = \[?\s*pytest\.mark\.(server|build|long)\b")
COMMAND = re.compile(r'with_name\("triptych"\)|triptych\.interface\.cli')
"""The text of a test that starts the command in a process of its own."""
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


class Tests:
    """The test files of a copy, and which of them ought to see a fault."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = {path.stem: path for path in sorted((root / "tests").rglob("*.py"))}
        listed = re.search(r"(?ms)^PURE = (\(.*?^\))", self.text("conftest"))  # in older tests
        names = ast.literal_eval(listed[1]) if listed else ()
        self.pure = {
            stem
            for stem in self.files
            if (stem[5:] in names if listed else not FILE_IS_NOT_PURE.search(self.text(stem)))
        }

    def text(self, stem: str) -> str:
        return self.files[stem].read_text(encoding="utf-8")

    @functools.cache  # noqa: B019
    def imports_of(self, path: Path) -> set[Path]:
        """Return the modules of the package and of the tests that a file imports."""
        found: set[Path | None] = set()
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
                place = self.root / "build_scripts" / name.replace(".", "/")
                found |= {place.with_suffix(".py"), place / "__init__.py", self.files.get(name)}
        if COMMAND.search(text):
            found |= set((self.root / SOURCES / "interface/cli").glob("*.py"))
        return {place for place in found if place and place.is_file()} - {self.files["conftest"]}

    @functools.cache  # noqa: B019
    def distances(self, test: Path) -> dict[Path, int]:
        """Return how many modules of the package lie on the way to each module that a test uses."""
        distances, reached = {test: 0}, [test]
        for path in reached:
            for imported in self.imports_of(path) - distances.keys():
                distances[imported] = distances[path] + (SOURCES in str(imported))
                reached.append(imported)
        return distances

    def for_fault(self, fault: Fault, stage: str) -> list[str]:
        """Return the test files for a fault, the closest first."""
        near, all_files = [], []
        name = fault.where.split(".")[-1].strip("_")
        for stem, path in self.files.items():
            is_pure = stem in self.pure
            if not stem.startswith("test_") or (stage == "pure" and not is_pure):
                continue
            text = self.text(stem)
            far = self.distances(path).get(self.root / SOURCES / fault.path, 99)
            if fault.package == "runtime" and stage == "others" and "server" in text:
                far = min(far, 9)  # a server imports the copy that lies in the repository
            own = path.parent.name in (fault.package, "tests")  # once, all files were in tests/
            file = path.relative_to(self.root).as_posix()
            place = (is_pure, not own, stem in CONTRACTS, far > 1, name not in text, far, len(text))
            if far < 99:
                all_files.append((place, file))
                if own or far == 1 or stem in CONTRACTS:
                    near.append((place, file))
        files = [file for _, file in sorted(near or all_files)]
        return files if stage == "pure" else files[:MAX_FILES]


class Copy:
    """A copy of the working tree in which one fault at a time is planted."""

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
        for name in ("planted_faults.py", "support/code_faults.py"):  # pytest loads this file
            (self.root / "plugin" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / "tests" / name, self.root / "plugin" / name)
        (self.root / ".cache").mkdir()
        for name in ("chromium", "prometheus", "perf_analyzer"):
            (self.root / ".cache" / name).symlink_to(ROOT / ".cache" / name)
        self.tests = Tests(self.root)

    def run(self, files: list[str], words: list[str], seconds: float, **chosen: Any) -> list[str]:
        """Run tests and return those that failed, or what happened to pytest."""
        cache = self.root / ".cache/triptych"  # what a fault builds must not be used again
        shutil.rmtree(cache, ignore_errors=True)
        if (ROOT / ".cache/triptych").is_dir() and "--pure" not in words:
            skip = shutil.ignore_patterns("*.lock", ".partial-*")
            shutil.copytree(ROOT / ".cache/triptych", cache, copy_function=os.link, ignore=skip)
        (self.root / "failed").unlink(missing_ok=True)
        variables = {
            "PYTHONPATH": f"{self.root / 'build_scripts'}{os.pathsep}{self.root / 'plugin'}",
            "TRIPTYCH_CACHE": str(cache),
            "PLANTED_FAULTS": json.dumps({"files": files, "words": words, **chosen}),
        }
        words = ["-q", "-p", "planted_faults", "-p", "no:cacheprovider", *words, *files]
        words += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of the libraries
        process = SERVER.Process(target=run_pytest, args=(str(self.root), variables, words))
        process.start()
        process.join(seconds)
        if process.exitcode is None:
            end(psutil.Process(process.pid))
            process.join()
            return [TIME_RAN_OUT]
        code = process.exitcode
        failed = self.root / "failed"
        names = failed.read_text(encoding="utf-8").splitlines() if failed.exists() else []
        if code == 2 and not names:
            raise InterruptedError("pytest was interrupted")
        return names or ([] if code in (0, 5) else [f"pytest ended with {code}"])


def run_pytest(folder: str, variables: dict[str, str], words: list[str]) -> None:
    """Run pytest in a copy: the target of a process that a server with the libraries forks."""
    os.setsid()
    os.chdir(folder)
    with Path("log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.update(variables)
    sys.pycache_prefix = ENVIRONMENT["PYTHONPYCACHEPREFIX"]
    sys.path[:0] = variables["PYTHONPATH"].split(os.pathsep)
    for name in ("planted_faults", "code_faults"):  # those of the copy
        sys.modules.pop(name, None)
    sys.exit(int(pytest.main(words)))


def end(process: Any) -> None:
    """End pytest with all that it has started. It has time to stop its servers by itself."""
    started = process.children(recursive=True)
    process.send_signal(signal.SIGINT)
    _, alive = psutil.wait_procs([process, *started], timeout=20)
    for other in alive:
        other.kill()
    psutil.wait_procs(alive, timeout=20)


def git(*words: str) -> str:
    return subprocess.check_output(["git", *words], cwd=ROOT, text=True).strip()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests of a run in a copy; leave out those that ran or that fail without a fault."""
    run = json.loads(os.environ["PLANTED_FAULTS"])
    conftest = sys.modules["conftest"]
    if "not long" in run["words"]:
        names = getattr(conftest, "PURE", None)  # in older tests
        seen = {i for i in items if conftest.is_pure(i) and (not names or i.path.stem[5:] in names)}
        items[:] = [item for item in items if item not in seen]
    if "only" in run:
        items[:] = [item for item in items if item.nodeid in run["only"]]
    items[:] = [item for item in items if item.nodeid not in run.get("broken", [])]
    order = {file: place for place, file in enumerate(run["files"])}
    items.sort(key=lambda item: order.get(item.nodeid.split("::")[0], 0))


def pytest_runtest_logreport(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.failed:
        with Path("failed").open("a", encoding="utf-8") as file:
            file.write(report.nodeid + "\n")


pytest_collectreport = pytest_runtest_logreport


class Run:
    """The results of one version of the tests: those of earlier runs, and the rest of the work."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        if options.tests:
            version = git("rev-parse", f"{options.tests}:tests")
        else:
            names = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "tests/data").rglob("*.yaml")]
            files = sorted({*names} - {Path(__file__).resolve()})
            version = hashed("".join(path.read_text(encoding="utf-8") for path in files))
        FOLDER.mkdir(parents=True, exist_ok=True)
        self.file = FOLDER / f"results-{version[:12]}.json"
        known = json.loads(self.file.read_text()) if self.file.exists() else {}
        self.broken: list[str] = known.get("broken", [])
        self.results: dict[str, dict[str, str]] = known.get("results", {})
        self.sound: list[str] = known.get("sound", [])
        self.late: dict[str, float] = known.get("late", {})
        faults = [fault for fault in chosen_faults() if options.only in ("", fault.package)]
        self.faults = faults[: options.faults or None]
        self.lock = threading.Lock()
        self.copies: queue.Queue[Copy] = queue.Queue()
        for number in range(options.workers):
            self.copies.put(Copy(number, options.tests))

    def save(self) -> None:
        known = {name: getattr(self, name) for name in ("broken", "sound", "late", "results")}
        self.file.with_suffix(".new").write_text(json.dumps(known, indent=1))
        self.file.with_suffix(".new").replace(self.file)

    def found_by(self, fault: Fault) -> str:
        return "".join(self.results.get(fault.key, {}).values())

    def work(self) -> None:
        """Run what has no result, until no test that fails without a fault has counted."""
        self.check_copy()
        for stage in STAGES:
            while rest := [f for f in self.faults if self.is_open(f, stage)]:
                with ThreadPoolExecutor(self.options.workers) as pool:
                    try:
                        list(pool.map(self.try_fault, rest[:BATCH], [stage] * BATCH))
                    except BaseException:
                        pool.shutdown(cancel_futures=True)
                        raise
                self.confirm(stage)

    def check_copy(self) -> None:
        """Check that pytest works in a copy: it would end without a failed test in any fault."""
        copy = self.copies.get()
        file = copy.tests.files["test_explained"].relative_to(copy.root).as_posix()
        if failed := copy.run([file], STAGES["pure"], self.options.seconds):
            raise RuntimeError(f"{failed} without a fault; see {copy.root / 'log'}")
        self.copies.put(copy)

    def is_open(self, fault: Fault, stage: str) -> bool:
        late = self.late.get(f"{fault.key} {stage}", self.options.seconds) < self.options.seconds
        is_new = stage not in self.results.get(fault.key, {})
        return not self.found_by(fault) and (is_new or late)

    def try_fault(self, fault: Fault, stage: str) -> None:
        copy = self.copies.get()
        module = copy.root / SOURCES / fault.path
        try:
            module.write_bytes(fault.planted())
            files = [f for f in copy.tests.for_fault(fault, stage) if f not in self.broken]
            words = ["-x", *STAGES[stage]]
            limit = self.options.seconds
            failed = copy.run(files, words, limit, broken=self.broken) if files else []
        finally:
            shutil.copy2(PACKAGE / fault.path, module)
            self.copies.put(copy)
        with self.lock:
            self.late.pop(f"{fault.key} {stage}", None)
            if failed == [TIME_RAN_OUT]:
                self.late[f"{fault.key} {stage}"] = limit
                failed = []
            self.results.setdefault(fault.key, {})[stage] = "".join(failed[:1])
            self.save()
            print(f"{stage:7} {len(files):2} files: {self.line_of(fault)}", flush=True)

    def confirm(self, stage: str) -> None:
        """Run the tests that failed again, without a fault; undo the results of those that fail."""
        names = {stages.get(stage, "") for stages in self.results.values()}
        doubted = sorted(name for name in names if name not in self.sound and ".py" in name)
        if not doubted:
            return
        copy = self.copies.get()
        files = sorted({name.partition("::")[0] for name in doubted})
        failed = copy.run(files, STAGES[stage], 60 * len(doubted), only=doubted)
        if failed:  # probably not alone in its file
            files = sorted({name.partition("::")[0] for name in failed if ".py" in name})
            failed += copy.run(files, STAGES[stage], 600)
        self.copies.put(copy)
        if TIME_RAN_OUT in failed:
            return
        self.broken = sorted({*self.broken, *failed})
        self.sound += [name for name in doubted if name not in failed]
        for stages in self.results.values():
            for stage in [stage for stage, name in stages.items() if name in failed]:
                del stages[stage]
        self.save()

    def line_of(self, fault: Fault) -> str:
        test = self.found_by(fault)
        late = [stage for stage in STAGES if f"{fault.key} {stage}" in self.late]
        note = f" ({TIME_RAN_OUT}: {', '.join(late)} tests)" if late else ""
        return f"found by {test}: {fault}" if test else f"NOT FOUND{note}: {fault}"

    def report(self) -> None:
        tried = [fault for fault in self.faults if fault.key in self.results]
        print("\n" + "\n".join(sorted(self.line_of(fault) for fault in tried)) + "\n")
        for package in (*sorted({fault.package for fault in tried}), ""):
            own = [fault for fault in tried if package in ("", fault.package)]
            found = sum(1 for fault in own if self.found_by(fault))
            print(f"{package or 'all':11} {found:3} of {len(own):3} found")
        print(f"left out, since they fail without a fault: {', '.join(self.broken) or 'none'}")


def main() -> None:
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


if __name__ == "__main__":
    main()
