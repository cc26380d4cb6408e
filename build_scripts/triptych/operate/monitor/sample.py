"""Read the rows that servers sampled, and compute the original model's answers to them."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from triptych.base.errors import Progress, UserError
from triptych.core.gate.answers import DecodedAnswer, reference_answers
from triptych.core.inputs import PipelineInputs
from triptych.core.own_reader import OwnReader
from triptych.core.reader import RequestReader
from triptych.core.requests import GateRequest
from triptych.runtime.hooking import HOOKS_FILE
from triptych.runtime.sampling import list_files, remove_old
from triptych.spec.model_fields import is_own

Item = TypeVar("Item")


@dataclass(frozen=True)
class SampledRow:
    """A row that a server answered."""

    location: str  # ``FILE:LINE``, which reveals nothing about the text
    build: str  # Id of the build that answered
    # Inputs as sent, or as the pipeline's `redact` changed them; bytes for a file.
    inputs: Mapping[str, Any]
    parameters: Mapping[str, Any]  # Parameters of the request
    answer: Mapping[str, NDArray[Any]]  # Outputs by name, each of shape ``[1, ...]``
    redacted: bool  # Whether `redact` changed the inputs. The answer then belongs to other inputs.

    @property
    def is_exact(self) -> bool:
        """Whether inputs and answer are those of the model: not redacted, and not in 8 bits."""
        names = (name for name in self.answer if name.startswith("embedding_"))
        return not self.redacted and not any(self.answer[name].size for name in names)


@dataclass(frozen=True)
class TrafficSample:
    """Sampled rows of a pipeline."""

    rows: tuple[SampledRow, ...]  # Rows, oldest file first
    known: tuple[str, ...]  # Names of all sample files that exist now
    damaged: int  # Number of lines and files that cannot be read
    forged: int  # Number of requests whose samples the servers rejected as forged


def read_sample(
    samples: Path,
    pipeline: str,
    progress: Progress,
    *,
    keep_hours: float,
    known: frozenset[str] = frozenset(),
) -> TrafficSample:
    """Return the rows of the sample files that are not `known`; delete files that are too old.

    Forged samples are reported to `progress`.

    Raises:
        UserError: The folder does not exist.
    """
    folder = samples / pipeline
    if not folder.is_dir():
        raise UserError(
            str(folder),
            "does not exist, so there are no samples",
            given="no folder",
            remedy="Set serving.sample, build, serve, and give the server's folder with --samples",
        )
    remove_old(folder, pipeline, keep_hours)
    names = [file.path.name for file in list_files(folder, pipeline)]
    sample = read_files(samples, pipeline, [name for name in names if name not in known])
    if sample.forged:
        progress(
            "samples",
            f"{sample.forged} requests with forged samples, which do not count: a client sends "
            f"requests to {pipeline}_postprocess itself",
        )
    return replace(sample, known=tuple(names))


def read_files(samples: Path, pipeline: str, names: Sequence[str]) -> TrafficSample:
    """Return the rows of the named sample files; a missing file counts as damaged."""
    rows: list[SampledRow] = []
    damaged = forged = 0
    for name in names:
        try:
            lines = (samples / pipeline / name).read_bytes().split(b"\n")
            head = json.loads(lines[0])
            build = str(head["build"])
            forged += int(head.get("forged", 0))
        except (OSError, ValueError, KeyError, TypeError):
            damaged += 1
            continue
        for number, line in enumerate(lines[1:], start=2):
            try:
                if line:
                    rows.append(_read_row(f"{name}:{number}", build, json.loads(line)))
            except (ValueError, KeyError, TypeError, AttributeError):
                damaged += 1
    return TrafficSample(tuple(rows), tuple(names), damaged, forged)


def _read_row(location: str, build: str, data: Mapping[str, Any]) -> SampledRow:
    return SampledRow(
        location=location,
        build=build,
        inputs={
            name: base64.b64decode(value["base64"]) if isinstance(value, dict) else value
            for name, value in data["inputs"].items()
        },
        parameters={
            name: value
            for name, value in data["parameters"].items()
            if not name.startswith("triton_") and "-" not in name  # Triton's own parameters
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


Reader = RequestReader | OwnReader


def make_reader(inputs: PipelineInputs) -> Reader:
    plan = inputs.plan
    if is_own(plan.spec):
        return OwnReader(plan.spec, plan.task, plan.info, inputs.chain)
    before = inputs.find_hook("before")
    return RequestReader(plan.encoder_spec, plan.task, plan.info, inputs.tokenizer_folder, before)


def read_requests(reader: Reader, rows: Sequence[SampledRow]) -> list[GateRequest | None]:
    """Return the request of each row with its core rows; None if the pipeline refuses the row."""
    read = [reader.read_sent(row.inputs, row.parameters, row.location) for row in rows]
    accepted = reader.accepted([request for request in read if request is not None])
    by_location = {request.preview: request for request in accepted}
    return [by_location.get(row.location) for row in rows]


def answer_requests(
    inputs: PipelineInputs, requests: Sequence[GateRequest], progress: Progress
) -> Sequence[DecodedAnswer]:
    """Return the original model's answers, without writing them to the cache.

    Raises:
        UserError: A hook of the pipeline fails on one of the requests.
    """
    if not requests:
        return ()
    # For edge cases, a refusal by the hook `after` is recorded in the answer instead of raised.
    edges = tuple(replace(request, edge=True) for request in requests)
    try:
        return reference_answers(replace(inputs, requests=edges), progress, keep=False)
    except UserError:  # its message may contain a user's text
        raise UserError(
            str(inputs.plan.spec.folder / HOOKS_FILE),
            "must accept the model's outputs for the sampled rows",
            given="a row on which a hook fails",
            remedy="Run `triptych build`; its error describes the row",
        ) from None


def exclude_health_checks(inputs: PipelineInputs, rows: Sequence[SampledRow]) -> list[SampledRow]:
    """Return the rows of users, without those that have the input of the health check."""
    health_check = {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in inputs.shortest_row.items()
    }
    # A sampled row of the user's own model has the defaults of other inputs, too.
    return [r for r in rows if health_check != {n: r.inputs.get(n) for n in health_check}]


def take_evenly(rows: Sequence[Item], max_rows: int) -> list[Item]:
    """Return at most `max_rows` of the rows, evenly spaced."""
    indices = np.linspace(0, len(rows) - 1, min(max_rows, len(rows))).astype(int)
    return [rows[index] for index in indices]
