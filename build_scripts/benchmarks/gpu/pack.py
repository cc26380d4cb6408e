"""The GPU test as files for a machine without a network: ``python -m benchmarks.gpu.pack FOLDER``.

Downloads the pinned wheels of `python310.txt` and `python312.txt`, takes a Python 3.10 from here,
the project and what ``--build-only`` has left, and splits all of it (`carry.py`).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import carry
from benchmarks.gpu.subjects import HOME
from benchmarks.model import CACHE, ROOT
from triptych.serving.bench.perf_analyzer import DEFAULT_CACHE, VERSION, find_perf_analyzer

HERE = Path(__file__).parent
PLUGINS = "tensorrt/libnvinfer_plugin.so.8"
PLACEHOLDERS = ("libcublas.so.12", "libcublasLt.so.12", "libcudnn.so.8")
"""What TensorRT 8.6's plugins are linked with and nothing here calls: over 1 GB of wheels else.

TensorRT itself takes no tactics of theirs since 8.6, unless it is asked to.
"""

_PLATFORMS = ("_2_35", "_2_28", "_2_27", "_2_24", "_2_17", "2014", "2010", "1")
_LEFT_OUT = {"__pycache__", "test", "site-packages", "idlelib", "tkinter", "turtledemo"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pieces; says what to do with them."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu.pack", description=__doc__)
    parser.add_argument("folder", type=Path, help="for the pieces; must not be there")
    parser.add_argument("--python", default="python3.10", help="of version 3.10, with a libpython")
    parser.add_argument("--wheels", type=Path, default=CACHE / "gpu-wheels", help="kept here")
    parser.add_argument("--home", type=Path, default=HOME, help="of `benchmarks.gpu --build-only`")
    given = parser.parse_args(arguments)
    if given.folder.exists():
        parser.error(f"{given.folder} is there already: name a folder that is not, or remove it")
    if not (given.home / "expected").is_dir():
        parser.error(f"{given.home} has no graphs: run the GPU test with --build-only first")
    prefix = prefix_of(given.python)
    wheels = [*download(given.wheels, "3.10"), *download(given.wheels, "3.12")]
    with tempfile.TemporaryDirectory() as scratch:
        archives = [
            pack_python(prefix, Path(scratch) / "python310.tar"),
            pack_placeholders(wheels, Path(scratch)),
            pack_project(given.home, Path(scratch) / "project.tar"),
        ]
        # By name: a wheel that both Pythons take travels once.
        files = {path.name: path for path in [*archives, *wheels]}
        names = carry.split(list(files.values()), given.folder, stages())
    print(f"{len(names)} pieces in {given.folder}. To the GPU machine, one after the other:")
    print("  carry.py, manifest.json and a file of pieces/; there: python3 carry.py 000")
    print("Then, until no stage is left:  python3 carry.py --run")
    return 0


def download(folder: Path, version: str) -> list[Path]:
    """The wheels of one Python, each with the hash on record; those that are there are kept.

    Raises:
        CalledProcessError: pip found none, or one of another hash.
    """
    name = f"python{version.replace('.', '')}"
    target = folder / name
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    command += ["--only-binary=:all:", "--python-version", version, "--implementation", "cp"]
    command += [f"--platform=manylinux{platform}_x86_64" for platform in _PLATFORMS]
    command += ["--requirement", str(HERE / f"{name}.txt"), "--dest", str(target)]
    subprocess.run(command, check=True)
    return sorted(target.glob("*.whl"))


def prefix_of(python: str) -> Path:
    """Where a Python 3.10 is installed.

    Raises:
        SystemExit: it is another one, or none.
    """
    asked = "import sys; print('%d.%d' % sys.version_info[:2], sys.base_prefix)"
    try:
        said = subprocess.run([python, "-c", asked], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(
            f"a Python 3.10 must be here to travel along: {python} does not run ({error}). "
            "Name another: python -m benchmarks.gpu.pack FOLDER --python PATH"
        ) from None
    version, prefix = said.stdout.strip().split(" ", 1)
    if version != "3.10":
        raise SystemExit(f"{python} is Python {version}: TensorRT 8.6.0 has wheels up to 3.10")
    return Path(prefix)


def pack_python(prefix: Path, target: Path) -> Path:
    """A Python that runs from any folder, without the packages that are installed in it."""

    def wanted(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        parts = Path(entry.name).parts
        left_out = _LEFT_OUT.intersection(parts) or any(p.startswith("config-") for p in parts)
        return None if left_out else entry

    with tarfile.open(target, "w") as archive:
        names = ["bin/python3.10", "lib/python3.10"]
        names += [f"lib/{path.name}" for path in (prefix / "lib").glob("libpython3.10.so*")]
        for name in names:
            archive.add(prefix / name, f"python310/{name}", filter=wanted)
        (pip,) = (prefix / "lib/python3.10/ensurepip/_bundled").glob("pip-*.whl")
        archive.add(pip, "python310/pip.whl")
    return target


def pack_placeholders(wheels: Iterable[Path], scratch: Path) -> Path:
    """`PLACEHOLDERS` with every name that the plugins ask for; a call of one ends the process.

    Raises:
        CalledProcessError: there is no compiler here.
    """
    with zipfile.ZipFile(next(w for w in wheels if w.name.startswith("tensorrt-"))) as wheel:
        nm = ["nm", "-D", "--undefined-only", wheel.extract(PLUGINS, scratch)]
    asked = subprocess.run(nm, check=True, capture_output=True, text=True)
    symbols = [line.split()[-1].partition("@") for line in asked.stdout.splitlines()]
    target = scratch / "placeholders.tar"
    with tarfile.open(target, "w") as archive:
        for library in PLACEHOLDERS:
            code = ["#include <stdlib.h>"]
            code += [
                f"void {name}(void) {{ abort(); }}" for name, _, of in symbols if of == library
            ]
            command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(scratch / library)]
            command.append(f"-Wl,-soname,{library}")
            subprocess.run(command, input="\n".join([*code, ""]), text=True, check=True)
            archive.add(scratch / library, f"libraries/{library}")
    return target


def pack_project(home: Path, target: Path) -> Path:
    """What git has of the code and the pipeline, the graphs, and perf_analyzer.

    Raises:
        UserError: there is no perf_analyzer to be had.
    """
    analyzer = find_perf_analyzer(ROOT / DEFAULT_CACHE)
    listing = ["git", "ls-files", "-z", "build_scripts", "pipelines/minilm"]
    listed = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True)
    # Without links: those of perf_analyzer lead to this machine's libraries.
    with tarfile.open(target, "w", dereference=True) as archive:
        if analyzer.libraries is not None:
            archive.add(analyzer.binary.parent, str(DEFAULT_CACHE / VERSION))
        for name in filter(None, listed.stdout.split("\0")):
            archive.add(ROOT / name, f"project/{name}")
        archive.add(home, "graphs")
    return target


def stages() -> list[dict[str, Any]]:
    """What runs there: nothing without a GPU; TensorRT and the server; the others and the page."""
    ours = "{home}/project/build_scripts"
    python310 = "{home}/python310/bin/python3.10"
    old = {
        "PYTHONHOME": "{home}/python310",
        "PYTHONPATH": f"{{home}}/site310:{ours}",
        "LD_LIBRARY_PATH": "{home}/libraries:{home}/python310/lib",
    }
    new = {"PYTHONPATH": f"{{home}}/site312:{ours}"}
    measure = ["-m", "benchmarks.gpu", "--reuse", "--models", "minilm", "--precisions", "fp16"]
    measure += ["--home", "{home}/graphs", "--output"]
    engines, page = "{home}/results/engines.json", "{home}/results/gpu.json"

    def stage(name: str, command: list[str], minutes: int, **own: Any) -> dict[str, Any]:
        return {"name": name, "command": command, "minutes": minutes, "environment": {}, **own}

    return [
        stage("gpu", ["nvidia-smi", "-L"], 0, required="no GPU is here: nvidia-smi shows none"),
        stage(
            "install for Python 3.10",
            [python310, *_install("3.10")],
            2,
            required="pip of Python 3.10 has failed",
            environment={**old, "PYTHONPATH": "{home}/python310/pip.whl"},
        ),
        stage(
            "install for Python 3.12",
            ["python3", *_install("3.12")],
            2,
            required="pip has failed: python3 must be 3.12",
        ),
        stage("engines", [python310, *measure, engines, "--minutes", "7"], 8, environment=old),
        stage(
            "others",
            ["python3", *measure, page, "--minutes", "5", "--earlier", engines],
            6,
            environment=new,
        ),
    ]


def _install(version: str) -> list[str]:
    name = f"python{version.replace('.', '')}"
    command = ["-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    command += [
        "--find-links",
        "{home}/files",
        "--target",
        f"{{home}}/{name.replace('python', 'site')}",
    ]
    requirements = f"{{home}}/project/build_scripts/benchmarks/gpu/{name}.txt"
    return [*command, "--upgrade", "--require-hashes", "--requirement", requirements]


if __name__ == "__main__":
    raise SystemExit(main())
