"""Preprocess of a pipeline around the user's own models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .own_model import OwnInputs
from .preprocess import Preprocess
from .triton_io import Inputs


class Own(Preprocess):
    """Preprocess whose inputs have the types that the user declared."""

    def initialize(self, args: Mapping[str, str]) -> None:
        super().initialize(args)
        self._inputs = OwnInputs(self.settings)

    def columns(self, inputs: Inputs) -> dict[str, Any]:
        return self._inputs.read(inputs)
