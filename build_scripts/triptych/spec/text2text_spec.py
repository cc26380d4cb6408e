"""What a user may write in ``pipeline.yaml`` of a pipeline that summarises or translates.

>>> spec = load_text2text_spec(Path("pipelines/summaries"), overrides=["core.beams=4"])
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from triptych.spec.generation_spec import GeneratingSpec, check_chosen_adapter
from triptych.spec.spec import load_as
from triptych.spec.spec_fields import Frozen, Positive


class Text2TextCore(Frozen):
    """The engine. What says "None: the model's own" takes it from ``generation_config.json``.

    Attributes:
        precision: of the weights; with ``int8`` products are computed in it, the rest in fp32.
        max_sequences: texts that share a batch; a batch runs to its end.
        max_length: tokens of a text; None: the model's own.
        max_answer: tokens of an answer, at most.
        beams: of the search; 1 is greedy, and streams token by token. None: the model's own.
        length_penalty: above 0 prefers longer answers, with several beams. None: the model's own.
        no_repeat_ngram: no so many tokens come twice in an answer; 0 lets them. None: the
            model's own.
        min_answer: tokens of an answer, at least. None: the model's own.
        threads: that share the work of a batch; None: as many as there are cores, at most 4.
    """

    backend: Literal["ctranslate2"] = "ctranslate2"
    precision: Literal["fp32", "int8"] = "fp32"
    max_sequences: Annotated[int, Field(ge=1, le=4096)] = 32
    max_length: Positive | None = None
    max_answer: Positive = 512
    beams: Annotated[int, Field(ge=1, le=64)] | None = None
    length_penalty: Annotated[float, Field(ge=0, le=10)] | None = None
    no_repeat_ngram: Annotated[int, Field(ge=0, le=64)] | None = None
    min_answer: Annotated[int, Field(ge=0)] | None = None
    threads: Positive | None = None


class Text2TextSpec(GeneratingSpec):
    """One pipeline that makes one text of another, as declared.

    Attributes:
        prefix: what the model wants before each text, for example ``summarize: ``.
    """

    task: Literal["text2text-generation"]
    prefix: Annotated[str, Field(max_length=1000)] = ""
    core: Text2TextCore = Text2TextCore()


def load_text2text_spec(folder: Path, overrides: Sequence[str] = ()) -> Text2TextSpec:
    """Read ``folder/pipeline.yaml``, then the overrides.

    Raises:
        UserError: a missing file, bad YAML, an unknown key or a value out of range.
    """
    spec = load_as(Text2TextSpec, folder, overrides, {}, {})
    check_chosen_adapter(spec)
    return spec
