"""Two small pipelines of the fake engine, what the metrics page tells of them, and a real one."""

import os
import re
import shutil
import time
import urllib.request
from pathlib import Path
from typing import Any

from tests.support.builds import build
from tests.support.generation_cases import TEXTS, write_adapter, write_pipeline, write_tiny_model
from tests.support.project import ROOT, quiet
from triptych.building.generation.inputs import read_generation
from triptych.serving.server import Server
from triptych.spec.generation_fields import load_generation_spec

LONG = TEXTS[0] * 4
DEADLINE_S = 120.0
CALLS = """\
{%- if tools %}
{{ '<|im_start|>system
Call a function as <tool_call>{"name": FUNCTION, "arguments": OBJECT}</tool_call>.<|im_end|>
<|im_start|>user
get_height(mountain)
How high is Mount Everest?<|im_end|>
<|im_start|>assistant
<tool_call>{"name": "get_height", "arguments": {"mountain": "Mount Everest"}}</tool_call><|im_end|>
<|im_start|>user
add(a, b)
What is add(7, 5)? Use the tool.<|im_end|>
<|im_start|>assistant
<tool_call>{"name": "add", "arguments": {"a": 7, "b": 5}}</tool_call><|im_end|>
' }}
{%- endif %}
{%- for message in messages %}
{{ '<|im_start|>' + message.role + '
' }}
{%- if tools and loop.last and message.role == 'user' %}
{%- for tool in tools %}
{{ tool.function.name + '(' + ((tool.function.parameters or {}).properties or {}) | join(', ') + ')
' }}
{%- endfor %}
{%- endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls %}
{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>
' }}
{%- endfor %}
{{- '<|im_start|>assistant
' }}
"""
"""Template that shows SmolLM2 two calls, because it was not trained to call tools."""
PROMISE = ("serving.slo.ttft_p99=120ms", "serving.slo.itl_p99=250ms", "serving.slo.e2e_p50=2s")


def build_both(base: Path) -> Path:
    """The repository with `quick`, which has an adapter, and `slow`: two places, 20 ms a token."""
    model = write_tiny_model(base / "model")
    write_adapter(base / "adapters/terse", model)
    cases: tuple[tuple[str, dict[str, str], tuple[str, ...], dict[str, Any]], ...] = (
        ("quick", {"terse": "../adapters/terse"}, (), {}),
        ("slow", {}, PROMISE, {"token_delay_ms": 20.0, "max_num_seqs": 2}),
    )
    for name, adapters, promised, core in cases:
        folder = write_pipeline(base / name, model, adapters, **core)
        inputs = read_generation(load_generation_spec(folder, promised), quiet)
        build(inputs, base / "repository", quiet)
        assert not build(inputs, base / "repository", quiet).changed
    return base / "repository"


def build_caller(base: Path) -> Path:
    """The repository with the example `chat`, whose chat template is `CALLS`."""
    folder, model = base / "chat", base / "model"
    shutil.copytree(ROOT / "pipelines/chat", folder)
    weights = read_generation(load_generation_spec(folder), quiet).weights
    shutil.copytree(weights, model, copy_function=os.symlink)
    (model / "chat_template.jinja").unlink()
    (model / "chat_template.jinja").write_text(CALLS)
    inputs = read_generation(load_generation_spec(folder, [f"model.source={model}"]), quiet)
    build(inputs, base / "repository", quiet)
    return base / "repository"


def gauges(server: Server, pipeline: str) -> dict[str, float]:
    with urllib.request.urlopen(server.metrics_url) as page:
        text = page.read().decode()
    form = rf'triptych_generation_(\w+)\{{pipeline="{pipeline}"\}} (\S+)'
    return {name: float(value) for name, value in re.findall(form, text)}


def wait_until(server: Server, pipeline: str, above_0: str = "", **wanted: float) -> float:
    """Seconds until the gauges have these values, which they get one after the other."""
    began = time.monotonic()
    while True:
        found = gauges(server, pipeline)
        if all(found.get(name) == value for name, value in wanted.items()) and (
            not above_0 or found.get(above_0, 0.0) > 0
        ):
            return time.monotonic() - began
        assert time.monotonic() < began + DEADLINE_S, (wanted, found)
        time.sleep(0.02)
