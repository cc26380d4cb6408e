"""The card of a built pipeline: a Markdown file for people who find it in a repository."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator

from triptych.base.formatting import amount, figures
from triptych.base.tensors import Tensor
from triptych.models.fields import name_of_source
from triptych.repository.manifest import FIGURES_FILE
from triptych.repository.records import GateResult
from triptych.spec.model_fields import is_own
from triptych.spec.plan import Plan
from triptych.tasks.classes import CLASS_DECODER, CLASS_SCORES
from triptych.tasks.task import Rule

CARD_FILE = "README.md"
HTTP, GRPC = "127.0.0.1:8000", "127.0.0.1:8001"
"""Addresses of a server in the calls: those of `triptych serve` and of Triton by default."""
MAX_LABELS = 100
"""Maximum number of labels that the card lists."""
EXAMPLES = {"text": "Where is my parcel?", "text_pair": "It arrives on Monday."}
"""Values of inputs in the calls, by name; another text is the first one."""
_NUMPY = {"BYTES": "object", "BOOL": "bool", "FP32": "np.float32", "INT64": "np.int64"}
_LABELED = ("text-classification", "token-classification", "image-classification", "custom")
"""Tasks whose outputs have or score the labels of the model."""
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
        "model": name_of_source(plan.sources),
        "revision": spec.model.revision or "none given",
        "license of the model": license or "its files name none",
        "architecture": ", ".join(core.info.architecture for core in plan.cores),
        "SHA-256 of the model's files": ", ".join(core.info.sha256 for core in plan.cores),
        "precision": gate.precision,
        "layout": plan.layout + (f" ({unpacked})" if unpacked else ""),
        "oldest Triton": spec.serving.triton,
    }
    lines = [f"# {spec.name}", "", *_table(("", ""), about.items())]
    lines += ["", "## Call", "", *_calls(plan), "", "## Inputs and outputs", "", *_tensors(plan)]
    lines += ["", "## Accuracy", "", *_accuracy(gate, plan.original), "", "## Speed", "", _SPEED]
    lines += ["", "## Limits", "", *_limits(plan)]
    return ("\n".join(lines) + "\n").encode()


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield f"| {' | '.join(head)} |".replace("  ", " ")
    yield f"| {' | '.join(['---'] * len(head))} |"
    for row in rows:
        yield f"| {' | '.join(map(_cell, row))} |"


def _calls(plan: Plan) -> Iterator[str]:
    name, inputs = plan.spec.name, [t for t in plan.task.inputs if not t.optional]
    outputs = [tensor.name for tensor in plan.task.outputs if not tensor.optional]
    outputs = outputs or [plan.task.outputs[0].name]  # of which a request selects one
    parameters = {
        option: "delivery,payment"
        for option, rule in plan.task.parameters(plan.info).items()
        if rule.type == "list" and option not in plan.parameters
    }
    yield from ("With `curl`, at the HTTP address of the server:", "")
    if any(tensor.content in ("image", "bytes") for tensor in inputs):
        yield "JSON cannot hold the bytes of a file; use one of the clients below."
    else:
        body: dict[str, object] = {
            "inputs": [
                {
                    "name": tensor.name,
                    "datatype": tensor.dtype,
                    "shape": _shape(tensor),
                    "data": [_example(tensor, plan)] * math.prod(_shape(tensor)),
                }
                for tensor in inputs
            ],
            "outputs": [{"name": each} for each in outputs],
        } | ({"parameters": parameters} if parameters else {})
        text = json.dumps(body, ensure_ascii=False).replace("'", "'\\''")
        yield from ("```sh", f"curl http://{HTTP}/v2/models/{name}/infer --data '{text}'", "```")
    yield from ("", "With NVIDIA's `tritonclient`:", "", "```python", "import numpy as np")
    yield from ("import tritonclient.grpc as triton", "")
    yield from (f'client = triton.InferenceServerClient("{GRPC}")', "inputs = [")
    for tensor in inputs:
        yield f'    triton.InferInput("{tensor.name}", {_shape(tensor)}, "{tensor.dtype}"),'
    yield "]"
    for number, tensor in enumerate(inputs):
        kind = _NUMPY.get(tensor.dtype, "object")
        value = f"np.full({_shape(tensor)}, {_python(tensor, plan)}, {kind})"
        yield f"inputs[{number}].set_data_from_numpy({value})"
    given = f", parameters={json.dumps(parameters)}" if parameters else ""
    yield f'answer = client.infer("{name}", inputs{given})'
    yield f"print({', '.join(f'answer.as_numpy({json.dumps(each)})' for each in outputs)})"
    yield from ("```", "", "With Triptych's client:", "", "```python")
    yield from ("from triptych.client import Client", "")
    rows = ", ".join(f'"{tensor.name}": [{_row(tensor, plan)}]' for tensor in inputs)
    yield f'with Client("{name}", "{GRPC}") as client:'
    yield from (f"    print(client.infer({{{rows}}}{given}))", "```")


def _shape(tensor: Tensor) -> list[int]:
    return [1, *(1 if isinstance(axis, str) else axis for axis in tensor.dims)]


def _example(tensor: Tensor, plan: Plan) -> str | int | float | bool:
    if tensor.dtype == "BYTES":
        text = EXAMPLES.get(tensor.name, EXAMPLES["text"])
        mask = plan.info.mask_token
        return f"{text} {mask}" if mask and plan.spec.task == "fill-mask" else text
    return {"BOOL": True, "INT64": 1, "INT32": 1}.get(tensor.dtype, 0.5)


def _python(tensor: Tensor, plan: Plan) -> str:
    """Return the value of an element in Python."""
    if tensor.content in ("image", "bytes"):
        return 'open("FILE", "rb").read()'
    return repr(_example(tensor, plan))


def _row(tensor: Tensor, plan: Plan) -> str:
    """Return the value of a row in Python: an element, or nested lists of them."""
    value = _python(tensor, plan)
    if tensor.dims == (1,):
        return value
    for size in reversed(_shape(tensor)[1:]):
        value = f"[{value}] * {size}" if size != 1 else f"[{value}]"
    return value


def _tensors(plan: Plan) -> Iterator[str]:
    yield "A request has one or more rows; shapes are those of a row."
    yield ""
    rows = [
        (f"`{tensor.name}`", "input" + ", optional" * tensor.optional, *_type(tensor))
        for tensor in plan.task.inputs
    ]
    rows += [(f"`{tensor.name}`", "output", *_type(tensor)) for tensor in plan.task.outputs]
    yield from _table(("name", "", "type", "shape"), rows)
    rules = plan.task.parameters(plan.info)
    if rules:
        yield from ("", "Request parameters, which are also optional inputs:", "")
        rows = [
            (f"`{name}`", rule.type, _range(rule), _default(plan.parameters.get(name)))
            for name, rule in rules.items()
        ]
        yield from _table(("parameter", "type", "values", "default"), rows)
    labels = plan.info.labels
    if labels and plan.spec.task in _LABELED:
        shown = ", ".join(f"`{label}`" for label in labels[:MAX_LABELS])
        more = f", and {len(labels) - MAX_LABELS:,} more" if len(labels) > MAX_LABELS else ""
        yield from ("", f"Labels, by index: {shown}{more}.{_extension(plan)}")


def _extension(plan: Plan) -> str:
    """Return how a client gets the best labels without an option of Triptych."""
    if plan.task.decode != CLASS_DECODER:
        return ""
    if plan.spec.serving.class_scores:
        return f" A request of `{CLASS_SCORES}` with `class_count` returns the best of them."
    return " With `serving.class_scores: true` Triton's classification extension knows them."


def _type(tensor: Tensor) -> tuple[str, str]:
    words = {"image": ", an image file", "json": ", JSON", "bytes": ", a file", "text": ", UTF-8"}
    kind = tensor.dtype + (words[tensor.content] if tensor.dtype == "BYTES" else "")
    return kind, f"[{', '.join(map(str, tensor.dims))}]"


def _range(rule: Rule) -> str:
    if rule.choices:
        return ", ".join(f"`{each}`" for each in rule.choices)
    low = "" if rule.min is None else f"at least {rule.min:g}"
    high = "" if rule.max is None else f"at most {rule.max:g}"
    return ", ".join(filter(None, (low, high))) or "any"


def _default(value: object) -> str:
    if value is None:
        return "none"
    return f"`{', '.join(value) if isinstance(value, tuple | list) else json.dumps(value)}`"


def _accuracy(gate: GateResult, original: str) -> Iterator[str]:
    outcome = "passed" if gate.passed else f"failed, and accepted: {_cell(gate.accepted)}"
    compared = f"{amount(gate.rows, 'request')} of the traffic and {gate.edge_case_rows} edge cases"
    yield (
        f"The accuracy gate {outcome}. It compared {compared} with the original model in "
        f"{original} fp32."
    )
    yield ""
    rows = []
    for verdict in gate.verdicts:
        value, limit = figures(verdict.value, verdict.limit)
        rows.append((verdict.metric, value, "none" if verdict.limit is None else limit))
    yield from _table(("metric", "measured", "limit"), rows)


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
