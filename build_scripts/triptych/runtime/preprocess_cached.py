"""Preprocess of a pipeline with a response cache."""

from __future__ import annotations

import triton_python_backend_utils as pb_utils

from .cached_options import refuse_options
from .preprocess import Job, Preprocess


class Cached(Preprocess):
    """Preprocess that refuses options which the cache would ignore."""

    def read(self, index: int, request: pb_utils.InferenceRequest) -> Job:
        refuse_options(request.parameters(), self.rules)
        return super().read(index, request)
