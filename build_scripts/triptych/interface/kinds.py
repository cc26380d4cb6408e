"""Plan text and demo page of each kind of pipeline; all dispatch by `Kind` of this package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from triptych.interface.cli.plan_text import (
    Described,
    describe_encoder,
    describe_text2text,
    describe_text_generation,
)
from triptych.interface.page.chat import ChatPage, TextPage
from triptych.interface.page.demo import open_demo_page
from triptych.interface.page.web import PageServer
from triptych.spec.kind import Kind


@dataclass(frozen=True)
class Face:
    """Functions that present pipelines of one kind.

    Attributes:
        describe: Returns the plan of the pipeline with these inputs, as plain data. The folder is
            the model repository, which may hold an earlier build.
        open_page: Makes the page of a served pipeline: its spec, folder, model repository and gRPC
            endpoint, the page's host and port, and the deadline of a request in seconds.
    """

    describe: Callable[[Any, Path], Described]
    open_page: Callable[[Any, Path, Path, str, str, int, float], PageServer]


def _open_chat(
    page: type[ChatPage], spec: Any, folder: Path, _repository: Path, *address: Any
) -> PageServer:
    return page(spec, folder, *address)


FACES: Mapping[Kind, Face] = {
    Kind.ENCODER: Face(describe_encoder, open_demo_page),
    Kind.MODEL: Face(describe_encoder, open_demo_page),
    Kind.TEXT_GENERATION: Face(describe_text_generation, partial(_open_chat, ChatPage)),
    Kind.TEXT2TEXT: Face(describe_text2text, partial(_open_chat, TextPage)),
}
