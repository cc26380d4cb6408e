"""The house rules that a machine can hold: imports downwards, heavy libraries in their owners."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT

PACKAGE = ROOT / "build_scripts/triptych"
MODULES = sorted(PACKAGE.rglob("*.py"))
LAYERS = (
    ("cli", "demo"),
    ("shown",),
    ("scaffold", "hook_tests"),
    ("tuning",),
    ("choose",),
    ("assemble", "verify", "bench", "engines"),
    ("race",),
    ("precise", "engine_files"),
    ("workshop",),
    ("gating",),
    ("reference_rows", "baselines"),
    ("prepare",),
    ("gate_rows", "asks"),
    ("load",),
    ("quality",),
    ("serving",),
    ("repository",),
    ("build",),
    ("device",),
    ("runtime",),
    ("describe", "describe_gpu"),
    ("plan", "gpu_plan", "expected_cost"),
    ("tasks", "engine_plan"),
    ("traffic", "spec", "spec_fields", "model_facts", "image_facts", "tensors"),
    ("slo", "tuned"),
    ("container",),
    ("yaml_text", "pages", "versions"),
    ("errors",),
)
"""Top to bottom: a module imports from its own layer or below."""

HEAVY = {
    "torch": {
        "baselines/torch_model.py",
        "build/export.py",
        "build/heads.py",
        "build/image_core.py",
        "build/packing.py",
        "build/proof.py",
        "quality/reference.py",
    },
    "transformers": {
        "build/export.py",
        "build/heads.py",
        "build/image_source.py",
        "build/source.py",
    },
    "PIL": {"build/image_source.py", "runtime/rows_image.py"},
    "tensorrt": {"build/engine/", "device/", "serving/backends"},
    "cuda": {"build/engine/", "device/", "serving/backends"},
    "onnx": {
        "build/engine/",
        "build/export.py",
        "build/operators.py",
        "build/precision/",
        "repository/lint/graph.py",
    },
    "onnxruntime": {"build/precision/", "quality/artifact.py", "serving/backends"},
    "huggingface_hub": {"build/source.py"},
    "sentence_transformers": set(),
}
RUNTIME_MAY_IMPORT = {"numpy", "tokenizers", "triton_python_backend_utils", "PIL"}


def layer_of(name: str) -> int:
    return next(index for index, names in enumerate(LAYERS) if name in names)


def imports_of(path: Path) -> set[str]:
    """Dotted names of everything a module imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found.add(node.module)
    return found


def identify(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("path", MODULES, ids=identify)
def test_imports_point_downwards(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if own == "__init__":
        return
    for name in imports_of(path):
        top, _, rest = name.partition(".")
        if top == "triptych" and rest:
            assert layer_of(rest.split(".")[0]) >= layer_of(own), f"{path} imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=identify)
def test_heavy_libraries_stay_with_their_owners(path: Path) -> None:
    tops = {name.partition(".")[0] for name in imports_of(path)}
    for library, owners in HEAVY.items():
        if library in tops:
            assert any(identify(path).startswith(owner) for owner in owners), library


@pytest.mark.parametrize("path", sorted((PACKAGE / "runtime").glob("*.py")), ids=identify)
def test_the_runtime_needs_nothing_a_container_lacks(path: Path) -> None:
    tops = {name.partition(".")[0] for name in imports_of(path)}
    assert tops <= RUNTIME_MAY_IMPORT | set(sys.stdlib_module_names)


@pytest.mark.parametrize("path", MODULES, ids=identify)
def test_a_module_says_what_it_owns_and_stays_small(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(text))
    assert len(text.splitlines()) <= 400


LIGHT = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "transformers", "onnx", "onnxruntime", "onnxscript",
                                      "huggingface_hub", "safetensors", "pytriton"}:
            raise ImportError(name + " is not installed here")
sys.meta_path.insert(0, Refuse())
sys.argv = ["triptych", *sys.argv[1:]]
from triptych.cli import main
main()
"""


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["build", "--help"], ["serve", "--help"], ["lint", "{repository}"]],
    ids=lambda arguments: arguments[0],
)
def test_help_and_lint_work_without_the_heavy_libraries(
    arguments: list[str], minilm_repository: Path
) -> None:
    filled = [word.format(repository=minilm_repository) for word in arguments]
    done = subprocess.run(
        [sys.executable, "-c", LIGHT, *filled], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_nothing_names_a_path_of_one_machine() -> None:
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    for name in tracked:
        text = (ROOT / name).read_text(encoding="utf-8", errors="replace")
        for word in ("/" + "root/", "/" + "work/", "/" + "home/"):
            assert word not in text, f"{name} names {word}"
