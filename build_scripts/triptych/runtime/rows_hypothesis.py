"""Batch encoder of texts with the labels of a request."""

from __future__ import annotations

from .request_errors import RequestError
from .row_types import RowInputs
from .rows_text import Input, TokenRowMaker


class HypothesisRowMaker(TokenRowMaker):
    """Row maker of pairs of a text and a hypothesis, for each text and label."""

    strategy = "only_first"

    def inputs(self, request: RowInputs) -> list[Input]:
        for number, text in enumerate(request.columns["text"]):
            if not text:  # transformers also rejects empty texts, but not blank ones
                raise RequestError("text", "must not be empty", "''", "Send a text", number)
        labels = request.parameters.get("candidate_labels")
        if not labels:
            raise RequestError(
                "parameter candidate_labels",
                "must name the labels to choose from",
                "",
                'Send a JSON list such as ["a", "b"]',
            )
        template: str = request.parameters["hypothesis_template"]
        # transformers reads a doubled brace as one.
        if "{}" not in template or "{{" in template or "}}" in template:
            raise RequestError(
                "parameter hypothesis_template",
                "must have {} in place of the label, and no {{ or }}",
                repr(template)[:80],
                "Write for example 'This text is about {}.'",
            )
        texts = request.columns["text"]
        if len(texts) * len(labels) > self.max_core_rows:
            raise RequestError(
                "parameter candidate_labels",
                f"must need at most {self.max_core_rows} rows of the model for all texts",
                f"{len(texts)} texts x {len(labels)} labels",
                "Send fewer texts or labels, or raise core.max_batch_size in the pipeline",
            )
        limit: int = self.settings["max_text_bytes"]
        slots = template.count("{}")
        longest = max(len(template) + slots * len(label) for label in labels)
        if longest > limit:
            raise RequestError(
                "parameter candidate_labels and hypothesis_template",
                f"must make hypotheses of at most {limit} characters",
                f"a hypothesis of {longest} characters",
                "Shorten the labels or the template",
            )
        hypotheses = [template.replace("{}", label) for label in labels]
        return [(text, hypothesis) for text in texts for hypothesis in hypotheses]
