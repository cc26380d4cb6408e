"""Postprocess that writes sampled rows with their answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .postprocess import Postprocess, read_options
from .row_types import PAYLOAD, TICKET, Arrays
from .sample_writer import SampleWriter
from .triton_io import Inputs

if TYPE_CHECKING:
    from .in_flight import InFlight


class WritingSamples(Postprocess):
    """Postprocess that gives the answers of sampled requests to a `SampleWriter`.

    Attributes:
        marks: Marks of `Marked`; one proves that preprocess made the sample of its request.
    """

    marks: InFlight

    def initialize(self, args: Mapping[str, str]) -> None:
        super().initialize(args)
        self._samples = SampleWriter(self.settings, self.folder)

    def finalize(self) -> None:
        self._samples.close()

    def answer(self, inputs: Inputs, given: str) -> Arrays:
        sample = read_options(inputs)[1] if PAYLOAD in inputs else b""
        if sample and not (
            TICKET in inputs and self.marks.is_set(inputs[TICKET].as_numpy()[0].tolist())
        ):
            self._samples.count_forged()
            sample = b""
        result = super().answer(inputs, given)
        if sample:
            self._samples.put(sample, result)
        return result
