"""Rows with their reference answers for the accuracy gate on the device that serves.

A build makes up the rows, computes the answers of the original model, and keeps the rows that the
core answers within the limits here. So the check fails on no device for a reason of the rows alone.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypedDict

import numpy as np

from triptych.base.cache import cached_stage, code_hash
from triptych.base.errors import Progress, UserError
from triptych.container.device_check import (
    ROWS_FILE,
    Answer,
    Rules,
    ServingDevice,
    compare,
    find_device,
    make_key,
)
from triptych.container.machine import read_machine
from triptych.core.gate.answers import DecodedAnswer, core_answers, reference_answers
from triptych.core.gate.cached import hash_hooks
from triptych.core.gate.live import live_requests, refusals
from triptych.core.gate.runs import Incomparable, open_core
from triptych.core.gate.verify import MIN_ANSWER_AGREEMENT, rules_of
from triptych.core.inputs import PipelineInputs
from triptych.core.precision.stage import CheckedCore
from triptych.core.requests import GateRequest, hash_requests
from triptych.repository.lint.device import find_passed_checks
from triptych.repository.manifest import CompiledManifest
from triptych.repository.render import make_request
from triptych.serving.device import find_emulated_release

TRAFFIC_ROWS = 16
"""Maximum number of rows of the traffic, if `serving.device_check` allows them."""
MAX_NUMBERS = 50_000
"""Maximum number of elements of all answers, which are about 4 bytes each in the file."""
MAX_DIFFERENCE = 0.05
"""Limit of the largest difference if the precision has none, as of answers that functions make."""
DIGITS = 7


def write_device_rows(core: CheckedCore, progress: Progress) -> Path | None:
    """Return the file with rows of a pipeline; None if it has none.

    The rows are checked with the core on this device, also if another one has made the same file.
    """
    inputs = core.inputs
    setting = inputs.spec.serving.device_check
    unreadable = {"FP16", "BF16"}.intersection(t.dtype for t in inputs.plan.task.outputs)
    if setting == "none" or unreadable or core.gate.accepted:
        return None
    requests = [*inputs.make_device_rows()]
    if setting == "traffic":
        real = [request for request in inputs.requests if not request.edge]
        requests += [replace(request, edge=True) for request in real[:TRAFFIC_ROWS]]
    inputs = replace(inputs, requests=tuple(requests))
    rules = rules_of(inputs, core.gate.precision, core.gate.rounding)
    limits = Rules(
        floats={},
        json=rules.json_outputs,
        max_difference=rules.limits.get("max_difference", math.inf),
        edge_error=rules.limits.get("edge_error", math.inf),
        unlike=1 - MIN_ANSWER_AGREEMENT[rules.tolerance],
        strict=not rules.hooked,
    )
    if math.isinf(limits.max_difference) and math.isinf(limits.edge_error):
        limits = limits._replace(max_difference=MAX_DIFFERENCE)

    def work(target: Path) -> None:
        held = _make_rows(inputs, core, limits, progress)
        text = json.dumps(held, separators=(",", ":"), ensure_ascii=False).encode()
        content = b"" if held is None else gzip.compress(text, mtime=0)
        (target / ROWS_FILE).write_bytes(content)

    stage = {
        "artifact": core.files,
        "model": inputs.plan.info.sha256,
        "requests": hash_requests(requests),
        "parameters": repr(inputs.plan.parameters),
        "rules": limits,
        "hooks": hash_hooks(inputs),
        "device": _device(),
        "code": code_hash("building/device_rows.py", "container/device_check.py", "core/gate/*.py"),
    }
    file = cached_stage("device_rows", stage, work, progress).folder / ROWS_FILE
    return file if file.stat().st_size else None


def keep_passed_gate(manifest: CompiledManifest, progress: Progress) -> None:
    """Keep that this device checked a build, if emulated backends run its core as the gate did."""
    name, device = manifest.spec.name, _device()
    if manifest.spec.core.device == "cpu" and f"{name}/{ROWS_FILE}" in manifest.files:
        key = make_key({"files": manifest.files, "core_key": manifest.core_key}, device)
        note = f"{name} passed the accuracy gate in its build"
        if problem := find_passed_checks().add(key, device, note):
            progress("gate", f"not kept for `serve`: {problem}")


def _device() -> ServingDevice:
    return find_device(read_machine(), find_emulated_release(), on_gpu=False)


class DeviceRow(TypedDict):
    """Row of the file: a request in bytes of base64, with the answer of the reference."""

    preview: str
    request: str
    answer: Answer


def _make_rows(
    inputs: PipelineInputs, core: CheckedCore, limits: Rules, progress: Progress
) -> Mapping[str, object] | None:
    """Return the content of the file; None without rows that the core answers as the reference."""
    plan = inputs.plan
    answered = _answered(inputs, progress)
    requests = [request for request, _ in answered]
    sent = live_requests(plan, requests)
    refused = refusals(plan, inputs.tokenizer_folder, requests, sent)
    rows: list[DeviceRow] = [
        {
            "preview": request.preview,
            "request": base64.b64encode(make_request(plan, request.sent, live.parameters)).decode(),
            "answer": _record(answer),
        }
        for (request, answer), live, words in zip(answered, sent, refused, strict=True)
        if not words
    ]
    kept = [request for request, words in zip(requests, refused, strict=True) if not words]
    rules = limits._replace(floats=_scales([answer for _, answer in answered]))
    if inputs.chain is None and rows:
        run = open_core(core.file, plan, core.gate.precision)
        try:
            own = core_answers(replace(inputs, requests=tuple(kept)), run)
        except (Incomparable, UserError):
            own = [DecodedAnswer({}, "fails")] * len(rows)
        rows = [
            row
            for row, answer in zip(rows, own, strict=True)
            if not compare(row["answer"], _record(answer), rules)[0]
        ]
    chosen, numbers = [], 0
    for row in rows:
        numbers += sum(len(output["data"]) for output in row["answer"].values())
        if numbers <= MAX_NUMBERS:
            chosen.append(row)
    progress("gate", f"{len(chosen)} rows for a check on the device that serves")
    return {"rules": rules._asdict(), "rows": chosen} if chosen else None


def _answered(
    inputs: PipelineInputs, progress: Progress
) -> list[tuple[GateRequest, DecodedAnswer]]:
    """Return the requests that the original model and the user's functions answer."""
    requests = inputs.requests
    if not requests:
        return []
    try:
        answers = reference_answers(inputs, progress)
    except UserError:  # the functions need not support made-up rows
        half = len(requests) // 2
        if not half:
            return []
        parts = (replace(inputs, requests=part) for part in (requests[:half], requests[half:]))
        return [pair for part in parts for pair in _answered(part, progress)]
    pairs = zip(requests, answers, strict=True)
    return [(request, answer) for request, answer in pairs if not answer.refusal]


def _record(answer: DecodedAnswer) -> Answer:
    """Return an answer as the server writes it in JSON, without empty outputs."""
    return {
        name: {"shape": list(array.shape), "data": [_plain(value) for value in array.flat]}
        for name, array in answer.outputs.items()
        if array.size
    }


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, np.floating):
        return float(f"{value:.{DIGITS}g}")
    return value.item() if isinstance(value, np.generic) else value


def _scales(answers: Sequence[DecodedAnswer]) -> dict[str, float]:
    """Return the largest number of each output with fractional numbers, at least 1."""
    scales: dict[str, float] = {}
    for answer in answers:
        for name, array in answer.outputs.items():
            if np.issubdtype(array.dtype, np.floating):
                largest = float(np.abs(array).max(initial=0.0))
                scales[name] = max(scales.get(name, 1.0), largest)
    return scales
