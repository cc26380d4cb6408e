"""The card of a built pipeline: a Markdown file for people who find it in a repository."""

from __future__ import annotations

from triptych.base.formatting import amount, figures
from triptych.repository.manifest import FIGURES_FILE
from triptych.repository.records import GateResult
from triptych.spec.model_fields import is_own
from triptych.spec.plan import Plan

CARD_FILE = "README.md"
_SPEED = (
    f"`triptych bench` measures this build and writes the figures to {FIGURES_FILE}; the next "
    "build removes them."
)


def render_card(plan: Plan, gate: GateResult, *, license: str, unpacked: str) -> bytes:
    """Return the card; equal inputs give equal bytes, because it has no date.

    Args:
        plan: Plan of the pipeline.
        gate: Gate result of its core.
        license: License of the model as its own card names it; empty if it names none.
        unpacked: Reason why the layout is not packed; empty if it is, or was not requested.
    """
    spec = plan.spec
    about = {
        "task": spec.task,
        "inputs": ", ".join(tensor.name for tensor in plan.task.inputs),
        "outputs": ", ".join(tensor.name for tensor in plan.task.outputs),
        "model": plan.sources,
        "revision": spec.model.revision or "none given",
        "license of the model": license or "its files name none",
        "architecture": ", ".join(core.info.architecture for core in plan.cores),
        "SHA-256 of the model's files": ", ".join(core.info.sha256 for core in plan.cores),
        "precision": gate.precision,
        "layout": plan.layout + (f" ({unpacked})" if unpacked else ""),
        "oldest Triton": spec.serving.triton,
    }
    lines = [f"# {spec.name}", "", "| | |", "| --- | --- |"]
    lines += [f"| {name} | {_cell(value)} |" for name, value in about.items()]
    lines += ["", "## Accuracy", "", *_accuracy(gate, plan.original), "", "## Speed", "", _SPEED]
    lines += ["", "## Limits", "", *_limits(plan)]
    return ("\n".join(lines) + "\n").encode()


def _accuracy(gate: GateResult, original: str) -> list[str]:
    outcome = "passed" if gate.passed else f"failed, and accepted: {_cell(gate.accepted)}"
    compared = f"{amount(gate.rows, 'request')} of the traffic and {gate.edge_case_rows} edge cases"
    lines = [
        f"The accuracy gate {outcome}. It compared {compared} with the original model in "
        f"{original} fp32.",
        "",
        "| metric | measured | limit |",
        "| --- | --- | --- |",
    ]
    for verdict in gate.verdicts:
        value, limit = figures(verdict.value, verdict.limit)
        limit = "none" if verdict.limit is None else limit
        lines.append(f"| {verdict.metric} | {value} | {limit} |")
    return lines


def _limits(plan: Plan) -> list[str]:
    spec = plan.spec
    lines = [f"- At most {amount(plan.request_rows, 'row')} per request."]
    if is_own(spec):
        lines += [
            f"- A value of `{name}` of at most {field.max_bytes:,} bytes."
            for name, field in spec.inputs.items()
        ]
    elif plan.lengths is None:
        lines.append(
            f"- An image of at most {spec.image.max_bytes:,} bytes and {spec.image.max_pixels:,} "
            "pixels."
        )
    else:
        longer = "truncated" if spec.tokenizer.truncation == "truncate" else "rejected"
        lines += [
            f"- At most {plan.max_length:,} tokens per row of the model; longer texts are {longer},"
            " unless the task reads them in windows.",
            f"- At most {spec.tokenizer.max_text_bytes:,} bytes per text; more are rejected.",
        ]
    return [
        *lines,
        "- The gate proves that this build gives the same results as the original model. See the "
        "original model for its quality and its training data.",
    ]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
