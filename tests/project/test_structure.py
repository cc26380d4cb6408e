"""Structure of the package: imports run downward, heavy libraries stay with their owners."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

from tests.support.project import ROOT

PACKAGE = ROOT / "build_scripts/triptych"
MODULES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
LAYERS = (
    "interface",
    "deploy",
    "operate",
    "gateway",
    "building",
    "serving",
    "core",
    "repository",
    "client",
    "spec",
    "tasks",
    "models",
    "container",
    "runtime",
    "base",
)
"""Top to bottom: a package imports from those below it."""

HEAVY = {
    "torch": {
        "core/export/",
        "core/gate/reference.py",
        "building/generation/",
        "models/checks.py",
        "models/image_core.py",
        "models/image_vectors.py",
        "models/loading.py",
        "models/token_layers.py",
        "tasks/catalog/hybrid_embedding.py",
        "tasks/catalog/multi_vector_embedding.py",
        "tasks/catalog/sparse_embedding.py",
        "tasks/catalog/text_embedding.py",
        "tasks/heads.py",
        "tasks/task.py",
    },
    "transformers": {
        "core/export/",
        "building/generation/",
        "models/checks.py",
        "models/image_source.py",
        "models/loading.py",
        "models/source.py",
        "models/tokenizer.py",
        "tasks/heads.py",
        "tasks/task.py",
    },
    "vllm": {"runtime/engine_vllm.py"},
    "tensorrt_llm": {"runtime/engine_tensorrt_llm.py"},
    "ctranslate2": {"building/generation/text2text.py", "runtime/engine_ctranslate2.py"},
    "PIL": {"client/images.py", "models/image_source.py", "runtime/rows_image.py"},
    "tensorrt": {"core/engine/", "serving/backends"},
    "cuda": {"core/engine/", "serving/backends"},
    "onnx": {"core/engine/", "core/export/", "base/onnx_", "repository/lint/", "core/precision/"},
    "onnxruntime": {"base/onnx_", "core/precision/", "serving/backends"},
    "openvino": {"core/openvino.py"},
    "huggingface_hub": {"models/source.py"},
    "pyarrow": {"interface/bulk/"},
    "ray": {"interface/bulk/cluster.py"},
    "sentence_transformers": {"core/gate/reference.py", "models/older.py"},
    "opentelemetry": {"gateway/traces.py"},
    "starlette": {"gateway/app.py", "gateway/http.py"},
    "uvicorn": {"gateway/serve.py", "interface/demo_page.py"},
    "fastapi": {"interface/demo_page.py"},
    "gradio": {"interface/demo_page.py"},
}
"""Libraries that take long to import or are not always installed, and the modules that may."""

RUNTIME_MAY_IMPORT = {
    *("numpy", "tokenizers", "triton_python_backend_utils", "PIL"),
    *("jinja2", "vllm"),  # steps that generate text, which need NVIDIA's image with vLLM
    *("ctranslate2", "tensorrt_llm"),  # the same of other engines
}
GONE_IN_312 = {"asynchat", "asyncore", "distutils", "imp", "smtpd"}


@functools.cache
def imports_of(path: Path) -> set[str]:
    """Dotted names of everything a module imports, wherever in it, if it is Python 3.10."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 10))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found.add(node.module)
    return found


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def package_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_packages_import_from_packages_below_them() -> None:
    wrong = [
        f"{name_of(path)} imports {name}"
        for path in MODULES
        if path.parent != PACKAGE
        for name in imports_of(path)
        if name.startswith("triptych.")
        and LAYERS.index(name.split(".")[1]) < LAYERS.index(package_of(path))
    ]
    assert not wrong
    assert {package_of(path) for path in MODULES if path.parent != PACKAGE} == {*LAYERS}
    table = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert re.findall(r"(?m)^\| `(\w+)` \|", table.split("## A request")[0]) == list(LAYERS)


def test_heavy_libraries_stay_with_their_owners() -> None:
    wrong = []
    for path in MODULES:
        tops = {name.partition(".")[0] for name in imports_of(path)}
        for library in tops & HEAVY.keys():
            if not any(name_of(path).startswith(owner) for owner in HEAVY[library]):
                wrong.append(f"{name_of(path)} imports {library}")
        allowed = RUNTIME_MAY_IMPORT | set(sys.stdlib_module_names)
        if package_of(path) == "runtime":
            wrong += [f"{name_of(path)} imports {name}" for name in tops - allowed]
    assert not wrong


def test_the_stages_of_a_build_hide_nothing_from_mypy() -> None:
    files = sorted((PACKAGE / "building").rglob("*.py"))
    hidden = [path.name for path in files if re.search(r"\bAny\b", path.read_text("utf-8"))]
    assert not hidden


FIRST = """
import sys
from importlib import import_module
for name in sys.argv[1:]:
    for loaded in [each for each in sys.modules if each.partition(".")[0] == "triptych"]:
        del sys.modules[loaded]
    import_module(name)
"""


def test_a_module_of_the_tasks_can_be_the_first_that_is_imported() -> None:
    files = [name_of(path).removesuffix(".py").removesuffix("/__init__") for path in MODULES]
    tasks = ["triptych." + file.replace("/", ".") for file in files if file.startswith("tasks")]
    assert "triptych.tasks.catalog" in tasks
    subprocess.run([sys.executable, "-c", FIRST, *tasks], check=True)


def test_the_package_stays_within_its_budget() -> None:
    budget = re.search(r"at most ([\d,]+) lines of Python", (ROOT / "CONTRIBUTING.md").read_text())
    assert budget
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES)
    assert lines <= int(budget[1].replace(",", ""))


def test_a_module_says_what_it_owns_and_stays_small() -> None:
    for path in (*MODULES, *TESTS):
        text = path.read_text(encoding="utf-8")
        assert re.match(r'(#.*\n)*"""\S', text), path
        assert len(text.splitlines()) <= 650, path
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    for name in tracked:
        if (ROOT / name).is_file():
            text = (ROOT / name).read_text(encoding="utf-8", errors="replace")
            for word in ("/" + "root/", "/" + "work/", "/" + "home/"):
                assert word not in text, f"{name} names {word}"


def test_what_is_copied_elsewhere_runs_on_the_python_that_is_there() -> None:
    """3.10 in the image of Triton 24.10, 3.12 in newer ones; vermin looks at names, too."""
    for path in MODULES:
        assert not {name.partition(".")[0] for name in imports_of(path)} & GONE_IN_312, path


LIGHT = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "transformers", "onnx", "onnxruntime", "onnxscript",
                                      "huggingface_hub", "openvino", "safetensors", "pytriton",
                                      "starlette", "uvicorn"}:
            raise ImportError(name + " is not installed here")
sys.meta_path.insert(0, Refuse())
from triptych.interface.cli import app
for words in (["--help"], ["build", "--help"], ["serve", "--help"], ["lint", sys.argv[1]]):
    if "lint" in words:  # until here, what takes a third of a second to import stays away
        assert not {"numpy", "triptych.spec.spec"} & set(sys.modules)
    assert not app(words, standalone_mode=False), words  # the exit code
"""


def test_help_and_lint_work_without_the_heavy_libraries(minilm_repository: Path) -> None:
    words = [sys.executable, "-c", LIGHT, str(minilm_repository)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("--help") >= 3
