"""Which requests decide whether an artifact ships, and which core rows it may be fitted to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from triptych.core.edge_cases import edge_images, edge_texts
from triptych.core.feeds import Sample
from triptych.core.probe import probe_requests
from triptych.core.reader import RequestReader
from triptych.core.samples import FEW_ROWS, GateRequest, hash_inputs

GATE_ROWS = 400
GATE_IMAGES = 64
CALIBRATION_ROWS = 512


@dataclass(frozen=True)
class GateRows:
    """What decides whether an artifact ships, and what it may be fitted to.

    Attributes:
        requests: for the gate, made-up ones first.
        calibration: core rows of the traffic that the gate does not use.
        probe: requests that every core of lower precision is judged on besides; none of images.
    """

    requests: tuple[GateRequest, ...]
    calibration: tuple[Sample, ...]
    probe: tuple[GateRequest, ...]

    def __str__(self) -> str:
        gate = sum(not request.edge for request in self.requests)
        few = f"; {FEW_ROWS} or more for the gate are better" if gate < FEW_ROWS else ""
        return (
            f"{gate} for the gate, {len(self.requests) - gate} more made up, "
            f"{len(self.calibration)} rows for calibration{few}"
        )


def split_traffic(
    inputs: Sequence[Mapping[str, str | bytes]], *, most: int = GATE_ROWS
) -> tuple[list[int], list[int]]:
    """Places of the rows of gate and of calibration: two thirds and one, by a hash of the inputs.

    Equal inputs are on the same side, and a row stays on its side whatever is added to the
    traffic. The gate has at least one row. Of more than `most`, it has those with the lowest
    hashes, once each. Calibration is in the order of the hashes: any part of it is as good.
    """
    hashes = [int(hash_inputs(row), 16) for row in inputs]
    first = {value: place for place, value in reversed(list(enumerate(hashes)))}
    gate = sorted(value for value in first if value % 3) or sorted(first)
    taken = set(gate)
    rest = sorted((value, place) for place, value in enumerate(hashes) if value not in taken)
    return sorted(first[value] for value in gate[:most]), [place for _, place in rest]


def gate_rows(
    reader: RequestReader, requests: Sequence[GateRequest], *, images: bool, mask_token: str = ""
) -> GateRows:
    """The rows of a pipeline's gate and calibration.

    Args:
        reader: of the pipeline.
        requests: of the traffic, with core rows.
        images: whether the task reads images.
        mask_token: put before made-up texts, where the task needs it.
    """
    if images:
        gate, rest = split_traffic([request.sent for request in requests], most=GATE_IMAGES)
        edges = edge_images(reader, requests[0])
        probe: tuple[GateRequest, ...] = ()
    else:
        gate, rest = split_traffic([request.inputs for request in requests])
        edges = edge_texts(reader, requests[gate[0]], mask_token=mask_token)
        probe = probe_requests(reader, requests[gate[0]], mask_token=mask_token)
    calibration = (row for place in rest for row in requests[place].rows)
    return GateRows(
        (*edges, *(requests[place] for place in gate)),
        tuple(islice(calibration, CALIBRATION_ROWS)),
        probe,
    )
