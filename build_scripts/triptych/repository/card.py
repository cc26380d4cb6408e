"""The card of a built pipeline, for people who find it in a repository: Markdown."""

from __future__ import annotations

from triptych.base.formatting import amount, figures
from triptych.repository.manifest import FIGURES_FILE
from triptych.repository.records import GateResult
from triptych.spec.plan import Plan

CARD_FILE = "README.md"
_SPEED = (
    f"[{FIGURES_FILE}]({FIGURES_FILE}) has the figures, once `triptych bench` has measured this "
    "very build; the next build takes them away."
)


def render_card(plan: Plan, gate: GateResult, *, license: str, unpacked: str) -> bytes:
    """The same inputs give the same bytes: there is no date in it.

    Args:
        plan: of the pipeline.
        gate: what was measured of its core.
        license: of the model, as its own card names it; empty where it names none.
        unpacked: why the layout is not packed; empty where it is, or was not asked for.
    """
    spec, facts = plan.spec, plan.facts
    about = {
        "task": spec.task,
        "inputs": ", ".join(tensor.name for tensor in plan.task.inputs),
        "outputs": ", ".join(tensor.name for tensor in plan.task.outputs),
        "model": spec.model.source,
        "revision": spec.model.revision or "none given",
        "license of the model": license or "its files name none",
        "architecture": facts.architecture,
        "SHA-256 of the model's files": facts.sha256,
        "precision": gate.precision,
        "layout": plan.layout + (f" ({unpacked})" if unpacked else ""),
        "oldest Triton": spec.serving.triton,
    }
    lines = [f"# {spec.name}", "", "| | |", "| --- | --- |"]
    lines += [f"| {name} | {_cell(value)} |" for name, value in about.items()]
    lines += ["", "## Accuracy", "", *_accuracy(gate), "", "## Speed", "", _SPEED]
    lines += ["", "## Limits", "", *_limits(plan)]
    return ("\n".join(lines) + "\n").encode()


def _accuracy(gate: GateResult) -> list[str]:
    verdict = "passed" if gate.passed else f"failed, and accepted: {_cell(gate.accepted)}"
    compared = f"{amount(gate.rows, 'request')} of the traffic and {gate.edge_rows} made-up ones"
    lines = [
        f"The accuracy gate {verdict}. Compared with the original model in PyTorch fp32 were "
        f"{compared}.",
        "",
        "| metric | measured | limit |",
        "| --- | --- | --- |",
    ]
    for one in gate.verdicts:
        value, limit = figures(one.value, one.limit)
        lines.append(f"| {one.metric} | {value} | {limit if one.limit is not None else 'none'} |")
    return lines


def _limits(plan: Plan) -> list[str]:
    spec = plan.spec
    lines = [f"- At most {amount(plan.request_rows, 'row')} a request."]
    if plan.lengths is None:
        lines.append(
            f"- An image of at most {spec.image.max_bytes:,} bytes and {spec.image.max_pixels:,} "
            "pixels."
        )
    else:
        longer = "cut off" if spec.tokenizer.truncation == "truncate" else "refused"
        lines += [
            f"- {plan.max_length:,} tokens a row of the model; what is longer is {longer}, unless "
            "the task reads it in windows.",
            f"- {spec.tokenizer.max_text_bytes:,} bytes a text; a longer one is refused.",
        ]
    return [
        *lines,
        "- How good the model itself is, and what it was trained on, is for its authors to say: "
        "the gate proves that this build answers as the original does.",
    ]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
