"""Postprocess of a task with metadata of its rows, such as the offsets of tokens."""

from __future__ import annotations

from .postprocess import Postprocess
from .row_metadata import unpack_metadata, unpack_rows
from .row_types import Arrays, Parameters
from .triton_io import Inputs, read_bytes


class Tokens(Postprocess):
    """Postprocess that decodes the results of each token, or of rows with their metadata."""

    def decode(self, inputs: Inputs, results: Arrays, parameters: Parameters) -> Arrays:
        metadata = [unpack_metadata(data) for data in read_bytes(inputs, "row_metadata")]
        lengths = [len(row_metadata.kinds) for row_metadata in metadata]
        packed = self.settings.get("packed_tokens", ())
        results = {
            name: unpack_rows(value, lengths) if name in packed else value
            for name, value in results.items()
        }
        outputs: Arrays = self.decoder.decode(results, metadata, parameters)
        return outputs
