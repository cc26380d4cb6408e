"""Preprocess of requests with images."""

from __future__ import annotations

from .preprocess import Preprocess
from .triton_io import Inputs, read_bytes, read_texts


class Images(Preprocess):
    """Preprocess whose inputs are encoded images, and perhaps texts."""

    def columns(self, inputs: Inputs) -> dict[str, object]:
        encoded, limit = self.settings["encoded_inputs"], self.settings["max_text_bytes"]
        return {
            field: read_bytes(inputs, field)
            if field in encoded
            else read_texts(inputs, field, limit)
            for field in self.fields
        }
