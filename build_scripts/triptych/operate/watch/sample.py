"""Reading what servers sampled: rows of files as they were written, whatever lies beside them.

Sampled rows as requests of the pipeline, and what the original model answers to them.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.base.errors import Progress, UserError
from triptych.core.gate.answers import Answer, reference_answers
from triptych.core.inputs import PipelineInputs
from triptych.core.reader import RequestReader
from triptych.core.samples import GateRequest
from triptych.runtime.hooking import HOOKS_FILE, find_hook
from triptych.runtime.sample_files import list_files, remove_old


@dataclass(frozen=True)
class SampledRow:
    """One row that a server answered.

    Attributes:
        place: ``FILE:LINE``, which tells nothing of the text.
        build: id of the build that answered.
        at: when it came, in seconds since 1970.
        inputs: as they were sent, or as the pipeline's `redact` left them.
        parameters: of its request.
        answer: the outputs, ``[1, …]`` each.
        redacted: whether `redact` changed it: then the answer is not one to these inputs.
    """

    place: str
    build: str
    at: float
    inputs: Mapping[str, str | bytes]
    parameters: Mapping[str, Any]
    answer: Mapping[str, NDArray[Any]]
    redacted: bool


@dataclass(frozen=True)
class Sample:
    """What a folder holds of a pipeline.

    Attributes:
        rows: oldest file first.
        known: names of all files that are there now.
        damaged: lines and files that cannot be read.
    """

    rows: tuple[SampledRow, ...]
    known: tuple[str, ...]
    damaged: int


def read_sample(
    samples: Path, pipeline: str, *, keep_hours: float, known: frozenset[str] = frozenset()
) -> Sample:
    """The pipeline's rows in the files that are not `known`; files that are too old are deleted.

    Raises:
        UserError: there is no such folder.
    """
    folder = samples / pipeline
    if not folder.is_dir():
        raise UserError(
            str(folder),
            "must be a folder with samples",
            given="none",
            remedy="Build with serving.sample, serve, and name the server's folder with --samples",
        )
    remove_old(folder, pipeline, keep_hours)
    names = [file.path.name for file in list_files(folder, pipeline)]
    found = read_files(samples, pipeline, [name for name in names if name not in known])
    return replace(found, known=tuple(names))


def read_files(samples: Path, pipeline: str, names: Sequence[str]) -> Sample:
    """The rows of some of the pipeline's files; one that is gone counts as damaged."""
    rows: list[SampledRow] = []
    damaged = 0
    for name in names:
        try:
            lines = (samples / pipeline / name).read_bytes().split(b"\n")
            build = str(json.loads(lines[0])["build"])
        except (OSError, ValueError, KeyError, TypeError):
            damaged += 1
            continue
        for number, line in enumerate(lines[1:], start=2):
            try:
                if line:
                    rows.append(_read_row(f"{name}:{number}", build, json.loads(line)))
            except (ValueError, KeyError, TypeError, AttributeError):
                damaged += 1
    return Sample(tuple(rows), tuple(names), damaged)


def _read_row(place: str, build: str, data: Mapping[str, Any]) -> SampledRow:
    return SampledRow(
        place=place,
        build=build,
        at=float(data["at"]),
        inputs={
            name: value if isinstance(value, str) else base64.b64decode(value["base64"])
            for name, value in data["inputs"].items()
        },
        parameters={
            name: value
            for name, value in data["parameters"].items()
            if not name.startswith("triton_") and "-" not in name  # of the transport
        },
        answer={name: _read_array(array) for name, array in data["answer"].items()},
        redacted=bool(data["redacted"]),
    )


def _read_array(data: Mapping[str, Any]) -> NDArray[Any]:
    if "texts" in data:
        texts = np.empty(len(data["texts"]), dtype=np.object_)
        texts[:] = [text.encode() for text in data["texts"]]
        return texts.reshape(data["shape"])
    values = np.frombuffer(base64.b64decode(data["base64"]), dtype=np.dtype(data["dtype"]))
    return values.reshape(data["shape"])


def reader_of(inputs: PipelineInputs) -> RequestReader:
    plan = inputs.plan
    before = find_hook(plan.spec.folder, "before")
    return RequestReader(plan.spec, plan.task, plan.facts, inputs.tokenizer_folder, before)


def requests_of(reader: RequestReader, rows: Sequence[SampledRow]) -> list[GateRequest | None]:
    """The request of each row with its core rows; None where the pipeline refuses it."""
    read = [reader.read_sent(row.inputs, row.parameters, row.place) for row in rows]
    taken = reader.accepted([request for request in read if request is not None])
    by_place = {request.shown: request for request in taken}
    return [by_place.get(row.place) for row in rows]


def answers_to(
    inputs: PipelineInputs, requests: Sequence[GateRequest], progress: Progress
) -> Sequence[Answer]:
    """What the original model answers; nothing of it gets into the cache.

    Raises:
        UserError: a function of the pipeline's fails on one of them.
    """
    if not requests:
        return ()
    # As made-up ones, what `after` refuses is told, not raised.
    edges = tuple(replace(request, edge=True) for request in requests)
    try:
        return reference_answers(replace(inputs, requests=edges), progress, keep=False)
    except UserError:  # whose words may be a text
        raise UserError(
            str(inputs.plan.spec.folder / HOOKS_FILE),
            "must take what the model makes of the rows",
            given="a row that it fails on",
            remedy="Try `triptych build`: it says on what kind of row",
        ) from None
