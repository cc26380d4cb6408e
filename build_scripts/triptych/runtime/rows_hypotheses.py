"""A core row for each text and label: the text, and the hypothesis that the label fits it."""

from __future__ import annotations

from .faults import RequestError
from .row_types import RowInputs
from .token_rows import Input, TokenRowMaker


class RowMaker(TokenRowMaker):
    """Pairs of a text and a hypothesis, text by text, label by label."""

    strategy = "only_first"

    def inputs(self, request: RowInputs) -> list[Input]:
        for number, text in enumerate(request.columns["text"]):
            if not text:  # transformers refuses it, too; a blank one it answers
                raise RequestError("text", "must not be empty", "''", "Send a text", number)
        labels = request.parameters.get("labels")
        if not labels:
            raise RequestError(
                "parameter labels",
                "must name the labels to choose from",
                "nothing",
                'Send \'["a", "b"]\'',
            )
        template: str = request.parameters["hypothesis_template"]
        if "{}" not in template:
            raise RequestError(
                "parameter hypothesis_template",
                "must have {} in place of the label",
                repr(template)[:80],
                "Write for example 'This text is about {}.'",
            )
        texts = request.columns["text"]
        if len(texts) * len(labels) > self.max_core_rows:
            raise RequestError(
                "parameter labels",
                f"must come to at most {self.max_core_rows} rows of the model with all texts",
                f"{len(texts)} texts x {len(labels)} labels",
                "Send fewer of them, or raise core.max_batch_size in the pipeline",
            )
        limit: int = self.settings["max_text_bytes"]
        places = template.count("{}")
        longest = max(len(template) + places * len(label) for label in labels)
        if longest > limit:
            raise RequestError(
                "parameter labels and hypothesis_template",
                f"must come to hypotheses of at most {limit} characters",
                f"one of {longest}",
                "Shorten them",
            )
        hypotheses = [template.replace("{}", label) for label in labels]
        return [(text, hypothesis) for text in texts for hypothesis in hypotheses]
