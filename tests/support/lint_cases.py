"""Cases for the tests of lint: what one looks like, and the edits that many of them share."""

from __future__ import annotations

from dataclasses import dataclass

from lint_repositories import Edit, put, replace

ENS, PRE = "minilm", "minilm_preprocess"
CORE, POST = "minilm_core", "minilm_postprocess"
PLAN_FILE = "minilm_core/1/model.plan"
ONNX_FILE = "minilm_core/1/model.onnx"
LIMIT = "max_queue_size: 1024"
DELAY = "max_queue_delay_microseconds: 500"
CACHED = "response_cache { enable: true }"
BATCHING = "dynamic_batching { }"
PRIORITIES = "priority_levels: 2 default_priority_level: 1"
INPUT_IDS = 'key: "input_ids" value { data_type: TYPE_INT32 dims: [16] zero_data: true }'
IDS_FROM_FILE = INPUT_IDS.replace("zero_data: true", 'input_data_file: "ids"')

LEAN = (
    'parameters { key: "execution_context_allocation_strategy" '
    'value { string_value: "ON_PROFILE_CHANGE" } }'
)


@dataclass(frozen=True)
class Broken:
    """Edits of a good repository, and what the one check that catches them says.

    `file` is a model's name where the fault is in its config.
    """

    check: str
    file: str
    given: str
    edits: tuple[Edit, ...]
    severity: str
    layout: str
    triton: str


@dataclass(frozen=True)
class Fine:
    """Edits that leave the repository without an error or a warning, and why they do."""

    why: str
    edits: tuple[Edit, ...]
    layout: str
    triton: str


def error(
    check: str, file: str, given: str, *edits: Edit, layout: str = "packed", triton: str = "24.10"
) -> Broken:
    return Broken(check, file, given, edits, "error", layout, triton)


def warning(
    check: str, file: str, given: str, *edits: Edit, layout: str = "packed", triton: str = "24.10"
) -> Broken:
    return Broken(check, file, given, edits, "warning", layout, triton)


def info(check: str, file: str, given: str, *edits: Edit) -> Broken:
    return Broken(check, file, given, edits, "info", "packed", "24.10")


def fine(why: str, *edits: Edit, layout: str = "packed", triton: str = "24.10") -> Fine:
    return Fine(why, edits, layout, triton)


def warm(new: str) -> Edit:
    """Another first input of the core's warm-up."""
    return replace(CORE, INPUT_IDS, new)


def more_outputs(model: str, text: str) -> Edit:
    return replace(model, "output [", f"output [{{ {text} }}, ")


def model_py(model: str, text: bytes | str) -> Edit:
    return put(f"{model}/1/model.py", text)


def batching(text: str) -> str:
    return f"max_batch_size: 4 dynamic_batching {{ {text} }}"


def policy(text: str) -> str:
    return f"default_queue_policy {{ {text} }}"


def post_policy(text: str) -> Edit:
    """A queue policy for the postprocess step."""
    return replace(POST, BATCHING, f"dynamic_batching {{ {policy(text)} }}")
