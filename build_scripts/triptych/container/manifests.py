"""Build manifests of a repository, read with the standard library alone; checks of its files."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from triptych.base.errors import UserError
from triptych.container.processor import FP32_LIMIT

MANIFEST_FILE = "triptych.lock.json"
# Of one ensemble's config: enough to find its steps without a parser of protobuf text.
_IS_ENSEMBLE = re.compile(r'^\s*platform:\s*"ensemble"', re.MULTILINE)
_STEP = re.compile(r'model_name:\s*"([^"]+)"')


class ManifestError(Exception):
    """Build manifest that cannot be used."""


def read_manifest_file(path: Path) -> dict[str, Any]:
    """Return the build manifest in a file as plain data, whatever its kind and schema.

    Raises:
        ManifestError: The file does not exist, cannot be read or holds no JSON object.
    """
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ManifestError(str(error)) from error
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{type(error).__name__}: {error}") from error
    if not isinstance(content, dict):
        raise ManifestError(f"is {type(content).__name__}, not a JSON object")
    return content


def check_readable(repository: Path) -> None:
    """Check that this user can read the models; a file that cannot be read may look absent.

    Raises:
        UserError: A folder, or a file other than a document, exists and cannot be read.
    """
    tested = [(repository, os.R_OK | os.X_OK)]
    for folder, folders, files in os.walk(repository):
        folders[:] = [name for name in folders if name[0] != "." and name != "lost+found"]
        tested += [(Path(folder, name), os.R_OK | os.X_OK) for name in folders]
        tested += [(Path(folder, name), os.R_OK) for name in files if not name.endswith(".md")]
    closed = [p for p, mode in tested if os.access(p, os.F_OK) and not os.access(p, mode)]
    if closed:
        raise UserError(
            str(min(closed)),
            f"cannot be read by user {os.geteuid()}",
            given=f"{len(closed)} such files and folders" if len(closed) > 1 else "",
            remedy=f"Run `chmod -R a+rX {repository}` as its owner, or run this as that user",
        )


class EngineTarget(NamedTuple):
    """GPU, TensorRT and graph that the engine of one pipeline was built for.

    `version_compatible` plans also run on newer releases of TensorRT; `hardware` is ``none``,
    ``ampere_plus`` or ``same_compute_capability``.
    """

    tensorrt: str
    gpu: str
    compute_capability: tuple[int, int]
    driver: str
    version_compatible: bool
    hardware: str
    plan_sha256: str
    onnx_sha256: str


class StartupManifest(NamedTuple):
    """Fields of a build manifest that the startup check needs."""

    files: Mapping[str, str]  # SHA-256 in hex of each file by path relative to the repository
    needs_engine: bool = False  # Whether the pipeline's own core runs on TensorRT
    engine: EngineTarget | None = None  # Engine of the core; None if it has not been built
    # Ids of the GPUs that the core runs on; None for all that the server sees.
    gpus: tuple[int, ...] | None = ()
    # Instruction sets of the processor with which the precision was measured.
    instruction_sets: tuple[str, ...] = ()
    # Throughput of the chosen precision by that of fp32, where both were measured.
    slowdown: float | None = None
    fp32_by_openvino: bool = False  # Whether OpenVINO must compute the core in fp32
    # Name of the machine that ``config.pbtxt`` is planned for; empty if none was given.
    machine: str = ""
    pair_with: str = ""  # Pipeline that must have the same vector space; empty if there is none
    space: str = ""  # Vector space of its vectors


class ServedPipeline(NamedTuple):
    """Ensemble with the models that it calls, or another folder with a build manifest."""

    name: str
    steps: tuple[str, ...]
    repository: Path

    @property
    def core(self) -> str:
        return f"{self.name}_core"

    @property
    def manifest_file(self) -> Path:
        return self.repository / self.name / MANIFEST_FILE

    @property
    def plan_file(self) -> str:
        """Path of its engine relative to the repository; the file may not exist."""
        return f"{self.core}/1/model.plan"

    @property
    def graph_file(self) -> str:
        """Path of the graph that the engine is built from, relative to the repository."""
        return f"{self.core}/1/model.onnx"

    def read_manifest(self) -> StartupManifest | None:
        """Return its build manifest; None if it has none.

        Raises:
            ManifestError: It cannot be read, or lacks fields.
        """
        if not self.manifest_file.exists():
            return None
        content = read_manifest_file(self.manifest_file)
        try:
            return _parse(content, self.name)._replace(
                machine=_machine(content),
                pair_with=content["spec"].get("pair_with", ""),
                space=content.get("space", ""),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ManifestError(f"{type(error).__name__}: {error}") from error


def find_pipelines(repository: Path) -> list[ServedPipeline]:
    """Return the ensembles of the repository and other folders with a build manifest, by name.

    Raises:
        OSError: The repository cannot be read.
    """
    steps: dict[str, tuple[str, ...]] = {
        manifest.parent.name: () for manifest in repository.glob(f"*/{MANIFEST_FILE}")
    }
    for config in repository.glob("*/config.pbtxt"):
        text = config.read_text(encoding="utf-8", errors="replace")
        if _IS_ENSEMBLE.search(text):
            steps[config.parent.name] = tuple(_STEP.findall(text))
    return [ServedPipeline(name, steps[name], repository) for name in sorted(steps)]


def _parse(manifest: Mapping[str, Any], pipeline: str) -> StartupManifest:
    core = manifest["spec"]["core"]
    files = {str(path): str(digest) for path, digest in manifest["files"].items()}
    if f"{pipeline}/config.pbtxt" not in files:
        raise ValueError("it does not list the files of this pipeline")
    # A shared core is checked with the pipeline that owns it.
    if core.get("shared_from") or core.get("share"):
        return StartupManifest(files)
    if core["backend"] != "tensorrt":
        by_openvino = core["backend"] == "openvino"
        return StartupManifest(
            files,
            instruction_sets=tuple(manifest.get("instruction_sets", ())),
            slowdown=_slowdown(manifest.get("gate", {})),
            fp32_by_openvino=by_openvino and manifest["gate"]["precision"] == "fp32",
        )
    record = None
    if (engine := manifest["engine"]) is not None:
        major, minor = map(int, engine["compute_capability"].split("."))
        record = EngineTarget(
            *(str(engine["tensorrt"]), str(engine["gpu"]), (major, minor), str(engine["driver"])),
            version_compatible=bool(engine["version_compatible"]),
            hardware=str(engine["hardware"]),
            plan_sha256=str(engine["plan_sha256"]),
            onnx_sha256=str(engine["onnx_sha256"]),
        )
    gpus = manifest["spec"]["serving"]["gpus"]
    numbers = None if gpus == "all" else tuple(map(int, gpus))
    return StartupManifest(files, True, record, numbers)


def _machine(manifest: Mapping[str, Any]) -> str:
    """Return the name of `serving.machine`, which may be a name or numbers."""
    given = manifest["spec"]["serving"].get("machine") or ""
    if isinstance(given, dict):
        return f"{given['gpu']}x{given['cores']}" if given["gpu"] else f"cpu{given['cores']}"
    return str(given)


def _slowdown(gate: Mapping[str, Any]) -> float | None:
    """Return the throughput of the chosen precision by that of fp32 on the same backend."""
    trials = gate.get("candidates", ())
    for chosen in (trial for trial in trials if trial["status"] == "chosen"):
        for trial in trials:
            same_backend = trial.get("backend") == chosen.get("backend")
            if same_backend and trial["precision"] == "fp32" and trial["throughput_per_s"]:
                return float(chosen["throughput_per_s"] / trial["throughput_per_s"])
    return None


def read_manifests(repository: Path) -> dict[ServedPipeline, StartupManifest]:
    """Return the build manifests of a repository that can be read."""
    manifests = {}
    for pipeline in find_pipelines(repository):
        with suppress(ManifestError):
            if (manifest := pipeline.read_manifest()) is not None:
                manifests[pipeline] = manifest
    return manifests


def core_variables(repository: Path) -> dict[str, str]:
    """Return the environment variables of a server that the cores of the repository need."""
    manifests = read_manifests(repository).values()
    return FP32_LIMIT if any(manifest.fp32_by_openvino for manifest in manifests) else {}


_CHUNK_BYTES = 2**20
_BYTE_CODE = "__pycache__"
IS_BYTE_CODE = "holds byte code, which Python runs in place of the files that are checked"
"""Fault of a folder in which Python keeps the byte code of a step."""
_OF_NOTHING = hashlib.sha256().hexdigest()


def find_wrong_files(
    repository: Path, manifests: Mapping[ServedPipeline, StartupManifest], *, hashes: bool
) -> dict[ServedPipeline, dict[str, str]]:
    """Return the faults of each pipeline's files by path; the text continues the path.

    With `hashes`, files are hashed, several at a time; without, they must only exist.
    """
    listed = {
        (path, digest) for manifest in manifests.values() for path, digest in manifest.files.items()
    }
    with ThreadPoolExecutor() as pool:
        verdicts = pool.map(lambda one: _find_fault(repository, *one, hashes=hashes), listed)
        faults = dict(zip(listed, verdicts, strict=True))
    return {
        pipeline: {
            **{path: faults[path, digest] for path, digest in manifest.files.items()},
            **_extra_files(repository, manifest),
        }
        for pipeline, manifest in manifests.items()
    }


def _find_fault(repository: Path, path: str, digest: str, *, hashes: bool) -> str:
    """Return the fault of a file; empty if it has none."""
    file = repository / path
    try:
        if not file.is_file():
            return "is missing"
        if digest != _OF_NOTHING and not file.stat().st_size:
            return "is empty"
        if hashes and _sha256(file) != digest:
            return "is not the file that the build manifest describes"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return ""


def _extra_files(repository: Path, manifest: StartupManifest) -> dict[str, str]:
    """Return the faults of what else is in version folders, from which Triton and steps load."""
    faults = {}
    for model in sorted({path.partition("/")[0] for path in manifest.files}):
        for version in sorted((repository / model).glob("[0-9]*")):
            for file in sorted(version.rglob("*")):
                path = file.relative_to(repository).as_posix()
                if file.name == _BYTE_CODE:
                    faults[path] = IS_BYTE_CODE
                elif file.parent.name == _BYTE_CODE or file.name.startswith("."):
                    continue
                elif path not in manifest.files and (file.is_symlink() or not file.is_dir()):
                    faults[path] = "is not in the build manifest"
    return faults


def remove_byte_code(repository: Path) -> list[Path]:
    """Remove the byte code that Python wrote beside the steps; return folders that remain.

    Python runs it in place of a file of the same time and size, whatever that file contains. The
    embedded Python of a step ignores the variables that would keep it from writing byte code.
    """
    folders = list(repository.glob(f"*/[0-9]*/**/{_BYTE_CODE}"))
    for folder in folders:
        if folder.is_symlink():
            folder.unlink(missing_ok=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return [folder for folder in folders if os.path.lexists(folder)]


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


MAX_MIB = 64
"""Limit of a repository with other models, which is Triton's default."""
TEXTS_A_REQUEST = 8
"""Number of longest texts that fit into one request, as in ``runtime/triton_io.py``."""
STEP_SHM_MIB = 64
"""Shared memory for each Python process of a step, besides the largest request."""

_ESCAPE = 6  # a byte as JSON may spell it: \u0041
_REST_MIB = 1  # names, shapes, parameters
_MIB = 2**20
_ROWS = re.compile(r"^max_batch_size:\s*(\d+)", re.MULTILINE)


def largest_request_mib(repository: Path, pipeline: str | None = None) -> int:
    """Return the size in MiB, as JSON, of the largest request that a pipeline accepts.

    Args:
        repository: Repository with the pipelines.
        pipeline: The only pipeline that is served; None for all of the repository.
    """
    found = [
        _largest_bytes(repository / served.name, served.steps)
        for served in find_pipelines(repository)
        if pipeline in (None, served.name)
    ]
    bounded = [size for size in found if size is not None]
    if not found or len(bounded) < len(found):
        return MAX_MIB
    return min(-(-max(bounded) // _MIB) + _REST_MIB, MAX_MIB)


def _largest_bytes(ensemble: Path, steps: tuple[str, ...]) -> int | None:
    """Return the bytes of the largest request; None if the first step does not limit it."""
    try:
        rows = int(_ROWS.findall((ensemble / "config.pbtxt").read_text(encoding="utf-8"))[0])
        settings = json.loads(_settings_file(ensemble.parent / steps[0]).read_bytes())
        images = len(settings.get("encoded_inputs", ()))
        texts = len(settings["inputs"]) - images
        text_bytes = texts * TEXTS_A_REQUEST * settings["max_text_bytes"] * _ESCAPE
        return int(text_bytes + (images and images * rows * settings["max_image_bytes"]))
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _settings_file(step: Path) -> Path:
    """Return the settings of a step's newest version, the one that Triton serves."""
    versions = sorted(int(folder.name) for folder in step.iterdir() if folder.name.isdecimal())
    return step / str(versions[-1]) / "settings.json"
