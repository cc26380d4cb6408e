"""What a test makes the fake TensorRT do, and what it remembers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Play:
    """Settings of one fake module.

    Attributes:
        no_gpu: builder and runtime do not come into being.
        log: messages (severity, text) told while an engine is built.
        build_fails: the builder gives None after `log`.
        parser_errors: each the fields of a ParserError; parsing fails with them.
        layer_types: ONNX node -> the type its kernel really has (``Float``, ``Half``, ...).
        fused: the inspector shows the whole graph as one layer.
        lost_profile: the last profile is not in the plan.
        stale: plans do not deserialize.
        miscompute: changes the outputs of a run.
        builds: what each build was asked for, in order.
    """

    no_gpu: bool = False
    log: list[tuple[str, str]] = field(default_factory=list)
    build_fails: bool = False
    parser_errors: list[dict[str, Any]] = field(default_factory=list)
    layer_types: dict[str, str] = field(default_factory=dict)
    fused: bool = False
    lost_profile: bool = False
    stale: bool = False
    miscompute: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    builds: list[dict[str, Any]] = field(default_factory=list)
