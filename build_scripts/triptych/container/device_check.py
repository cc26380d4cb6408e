"""The accuracy gate on the device that serves: synthetic rows with the answers of the reference.

The gate ran where the pipeline was built. At the first start on another device, the server answers
the rows in `ROWS_FILE` of each pipeline before it counts as ready. Another processor, GPU, driver
or release is another device. A passed result is kept outside the repository, so that later starts
do not repeat it.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import http.client
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from triptych.container.machine import Machine
from triptych.container.manifests import ManifestError, find_pipelines, read_manifest_file

ROWS_FILE = "device_check.json.gz"
"""File in an ensemble's folder with rows, their reference answers and the limits of differences."""

MODE_VARIABLE = "TRIPTYCH_DEVICE_CHECK"
DeviceCheckMode = Literal["enforce", "warn", "off"]
Answer = Mapping[str, Any]
"""Outputs of one row by name, each with its `shape` and its elements in `data`."""

_SCORES = "score"
_CLIENTS = 8
_HASH = 24
_TIMEOUT_S = 120.0


class ServingDevice(NamedTuple):
    """Device that computes a core, as text; not `is_known` if a part could not be read."""

    text: str
    is_known: bool


class Rules(NamedTuple):
    """Limits of the differences from the reference."""

    # Scale of each output with fractional numbers: the largest of the reference, at least 1.
    floats: Mapping[str, float]
    json: Sequence[str]  # Outputs whose elements are JSON texts
    max_difference: float  # Limit of the largest difference of a number by that scale
    edge_error: float  # Limit of a row's relative error; infinite for none
    unlike: float  # Share of the rows that may have other labels or texts than the reference
    # Whether every number has to be within the limits. If functions of the pipeline round the
    # outputs, rows with other numbers count as `unlike`.
    strict: bool


def find_device(machine: Machine, release: str, *, on_gpu: bool) -> ServingDevice:
    """Return the device of a core on a machine whose server is of `release`."""
    parts: dict[str, object] = {
        "release": release,
        "processor": machine.processor,
        "instruction_sets": machine.instruction_sets,
    }
    known = [release, machine.processor]
    if on_gpu:
        gpus = [str(gpu) for gpu in machine.gpus]
        parts |= {"gpus": gpus, "driver": machine.driver, "tensorrt": machine.tensorrt}
        known += [*(gpu.name for gpu in machine.gpus), machine.driver or "", *gpus[:1]]
        known += [] if gpus else [""]
    return ServingDevice(json.dumps(parts), all(known))


class PipelineCheck(NamedTuple):
    """Check of one pipeline."""

    pipeline: str
    file: Path  # Its `ROWS_FILE`
    digest: str  # SHA-256 of the file by the build manifest, in hex; empty if the build has no rows
    device: ServingDevice  # Device that computes its core
    key: str  # Hashes of the build and of the device, as of `make_key`

    def run(self, url: str) -> str:
        """Send the rows to the server at `url`; return the fault in one sentence, if any."""
        try:
            content = self.file.read_bytes()
        except OSError as error:
            return f"{self.file.name} cannot be read ({error.strerror})"
        if hashlib.sha256(content).hexdigest() != self.digest:
            return f"{self.file.name} differs from the build manifest"
        target = urlsplit(url).netloc, f"/v2/models/{self.pipeline}/infer"
        with ThreadPoolExecutor(_CLIENTS) as pool:
            # Any error is a fault: a check that ends without a result must not count as passed.
            try:
                held = json.loads(gzip.decompress(content))
                rules, rows = Rules(**held["rules"]), held["rows"]
                sent = [pool.submit(_ask, *target, row["request"]) for row in rows]
                return find_difference(rows, [future.result() for future in sent], rules)
            except Exception as error:
                pool.shutdown(cancel_futures=True)
                return f"the rows could not be checked ({type(error).__name__}: {error})"


def find_difference(
    rows: Sequence[Mapping[str, Any]], answers: Sequence[Answer], rules: Rules
) -> str:
    """Return how the answers to `rows` differ from the reference; empty if they are within limits.

    Each row has its reference `answer` and a `preview`.
    """
    unlike: list[tuple[str, str]] = []
    wrong: list[tuple[str, str]] = []
    for row, answer in zip(rows, answers, strict=True):
        fault, is_number = compare(row["answer"], answer, rules)
        if fault:
            (wrong if is_number and rules.strict else unlike).append((row["preview"], fault))
    faults = wrong or (unlike if len(unlike) > rules.unlike * len(rows) else [])
    if not faults:
        return ""
    preview, fault = faults[0]
    return f"{len(faults)} of {len(rows)} answers are wrong; that to {preview!r}: {fault}"


def compare(wanted: Answer, got: Answer, rules: Rules) -> tuple[str, bool]:
    """Return the fault of an answer and whether it is of numbers; an empty text for none."""
    if missing := [name for name in wanted if name not in got]:
        return f"{missing[0]} is missing", True
    largest = squares = size = 0.0
    parts = zip(
        _parts(wanted, rules), _parts({name: got[name] for name in wanted}, rules), strict=True
    )
    for (name, others, numbers), (_, got_others, got_numbers) in parts:
        if others != got_others or len(numbers) != len(got_numbers):
            return f"{name} is not that of the reference", False
        for own, right in zip(got_numbers, numbers, strict=True):
            off = abs(own - right)
            if not math.isfinite(off):
                return f"{name} has NaN or infinity", True
            largest = max(largest, off / rules.floats.get(name, 1.0))
            squares, size = squares + off * off, size + right * right
    if largest > rules.max_difference:
        return f"differs by {largest:.2g}, the limit is {rules.max_difference:.2g}", True
    error = math.sqrt(squares / max(size, 1.0))
    if error > rules.edge_error:
        return f"has a relative error of {error:.2g}, the limit is {rules.edge_error:.2g}", True
    return "", False


def _parts(answer: Answer, rules: Rules) -> Iterator[tuple[str, object, list[float]]]:
    """Yield the name of each output, what has to be equal in it, and its fractional numbers.

    Scores that are named by another output are in the order of the names, because the order of
    equal scores is free.
    """
    order: Sequence[int] = ()
    shape = answer.get(_SCORES, {}).get("shape")
    for output in answer.values():
        names = output["data"]
        if output["shape"] == shape and all(isinstance(name, str) for name in names):
            if len(set(names)) == len(names):
                order = sorted(range(len(names)), key=names.__getitem__)
            break
    for name, output in answer.items():
        values = output["data"]
        if order and output["shape"] == shape:
            values = [values[index] for index in order]
        if name in rules.json:
            numbers: list[float] = []
            yield name, [_without_numbers(json.loads(text), numbers) for text in values], numbers
        elif name in rules.floats:
            yield name, output["shape"], [_number(value) for value in values]
        else:
            yield name, [output["shape"], values], []


def _without_numbers(value: object, numbers: list[float]) -> object:
    """Return a value of JSON with its fractional numbers moved into `numbers`."""
    if isinstance(value, dict):
        return {name: _without_numbers(each, numbers) for name, each in sorted(value.items())}
    if isinstance(value, list):
        return [_without_numbers(each, numbers) for each in value]
    if isinstance(value, float):
        numbers.append(value)
        return ""
    return value


def _number(value: Any) -> float:
    return float("nan") if value is None else float(value)


def _ask(host: str, path: str, request: str) -> Answer:
    """Return the server's answer to a request of one row.

    Raises:
        OSError: The server does not answer, or answers with an error.
    """
    body = base64.b64decode(request)
    headers = {"Inference-Header-Content-Length": str(body.index(b"\n") + 1)}
    connection = http.client.HTTPConnection(host, timeout=_TIMEOUT_S)
    try:
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        content = answer.read()
    finally:
        connection.close()
    if answer.status != http.HTTPStatus.OK:
        raise OSError(f"HTTP {answer.status}: {content[:200].decode('utf-8', 'replace')}")
    return {output["name"]: output for output in json.loads(content)["outputs"]}


def unchecked_mark(port: int) -> Path:
    """Return the file that exists until the server of an HTTP port of this user was checked."""
    return Path(f"/dev/shm/triptych-unchecked-{os.getuid()}-{port}")


def find_checks(
    repository: Path, machine: Machine, release: str, models: Sequence[str] = ()
) -> list[PipelineCheck]:
    """Return the check of each pipeline with a build manifest, or of the `models` among them."""
    found = []
    for pipeline in find_pipelines(repository):
        if models and pipeline.name not in models:
            continue
        with suppress(ManifestError, LookupError, TypeError, AttributeError):  # by the lock check
            manifest = read_manifest_file(pipeline.manifest_file)
            device = find_device(
                machine, release, on_gpu=manifest["spec"]["core"].get("device") == "gpu"
            )
            file = repository / pipeline.name / ROWS_FILE
            digest = manifest["files"].get(f"{pipeline.name}/{ROWS_FILE}", "")
            key = make_key(manifest, device)
            found.append(PipelineCheck(pipeline.name, file, digest, device, key))
    return found


def make_key(manifest: Mapping[str, object], device: ServingDevice) -> str:
    """Return the name of the file of a passed check: hashes of the build and of the device."""
    return f"{_hash_build(manifest)}-{hashlib.sha256(device.text.encode()).hexdigest()[:_HASH]}"


def _hash_build(manifest: Mapping[str, Any]) -> str:
    build = json.dumps([dict(manifest["files"]), manifest.get("core_key")], sort_keys=True)
    return hashlib.sha256(build.encode()).hexdigest()[:_HASH]


class PassedChecks:
    """Passed checks of this user, kept in a folder from start to start.

    Attributes:
        folder: The folder; it need not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def has(self, check: PipelineCheck) -> bool:
        """Whether this build passed on this device; False if the device's name is not known."""
        file = self.folder / check.key
        with suppress(OSError):
            # In a folder of all users, such as /dev/shm, another user may have made the file.
            return check.device.is_known and file.lstat().st_uid in (os.geteuid(), 0)
        return False

    def find_devices(self, manifest: Mapping[str, object]) -> list[dict[str, object]]:
        """Return the parts of each device on which a build passed, as of `find_device`."""
        devices = []
        for file in sorted(self.folder.glob(f"{_hash_build(manifest)}-*")):
            with suppress(OSError, ValueError, IndexError):
                devices.append(json.loads(file.read_text(encoding="utf-8").splitlines()[1]))
        return devices

    def add(self, key: str, device: ServingDevice, note: str) -> str:
        """Keep a passed check; return why it cannot be kept, if it cannot."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, partial = tempfile.mkstemp(dir=self.folder, prefix=".")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(f"{note}\n{device.text}\n")
            Path(partial).replace(self.folder / key)
        except OSError as error:
            return f"{self.folder}: {error.strerror}"
        return ""


class DeviceChecks:
    """Checks of a server that have not passed on this device.

    Args:
        checks: Checks of the served pipelines.
        passed: Checks that passed earlier.
        mode: Whether a failure refuses the start or is a warning; ``off`` checks nothing.
        tell: Called with each line for the operator.

    Attributes:
        refusal: Reason why the server must not serve; empty if it may.
        pending: Checks that are left.
    """

    def __init__(
        self,
        checks: Sequence[PipelineCheck],
        passed: PassedChecks,
        mode: DeviceCheckMode,
        tell: Callable[[str], object],
    ) -> None:
        self._passed, self._mode, self._tell = passed, mode, tell
        self._thread: Thread | None = None
        self.refusal = ""
        self.pending = [
            check for check in checks if check.digest and mode != "off" and not passed.has(check)
        ]

    def run(self, url: str) -> None:
        """Check the server at `url`, which has loaded its models."""
        for check in self.pending:
            name, started = check.pipeline, time.monotonic()
            fault = check.run(url)
            seconds = time.monotonic() - started
            if fault:
                line = f"{name} fails the accuracy gate on this device: {fault}"
                if self._mode == "enforce":
                    self.refusal = line
                    return
                self._tell(f"warning: {line}")
                continue
            note = f"{name} passed the accuracy gate on this device in {seconds:.1f} s"
            self._tell(note)
            if not check.device.is_known:
                self._tell(
                    f"warning: {name} is checked at each start, because a part of the device's "
                    f"name cannot be read: {check.device.text}"
                )
            elif problem := self._passed.add(check.key, check.device, note):
                self._tell(
                    f"warning: {name} is checked at each start, because the result cannot be kept "
                    f"({problem}): set TRIPTYCH_STATE to a folder that this user can write to"
                )
        self.pending = []

    def is_done(self, url: str) -> bool:
        """Whether nothing is left; the first call starts `run` in a thread."""
        if self._thread is None and self.pending:
            self._thread = Thread(target=self.run, args=[url], daemon=True)
            self._thread.start()
        return self._thread is None or not self._thread.is_alive()
