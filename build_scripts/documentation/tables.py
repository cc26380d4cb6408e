"""Reference tables of the documentation, generated from the code.

Usage: ``make tables`` writes every table again, between the marks of its name in the pages.
Those of `SITE_ONLY` are written when the site is built.
"""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import typer.main
from prometheus_client.metrics_core import Metric as Family
from pydantic import BaseModel

from triptych.base.files import write_files
from triptych.client.errors import InferenceError, status_error
from triptych.gateway.http import GatewayMetrics
from triptych.interface.cli import app
from triptych.interface.cli.command import VERBS
from triptych.operate.monitor.metrics import RunCollector
from triptych.runtime import engine_errors, generation_metrics, rejections, request_errors
from triptych.runtime.counters import RowTokens
from triptych.spec.field_table import as_prose, describe_fields, first_sentence
from triptych.spec.generation_fields import GenerationSpec, Text2TextSpec
from triptych.spec.model_fields import ModelSpec
from triptych.spec.spec import EncoderSpec
from triptych.tasks.accuracy import METRICS, TOLERANCES, probe_limits, thresholds
from triptych.tasks.catalog import TASKS
from triptych.tasks.task import Task

ROOT = Path(__file__).resolve().parents[2]
GUIDES = "build_scripts/documentation/guides"
"""Folder of the guides."""
Rows = Iterable[Sequence[str]]


def render_table(head: Sequence[str], rows: Rows) -> str:
    """Return a Markdown table; the text of a cell may have several lines and `|`."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


# --- fields of pipeline.yaml


def list_fields(spec: type[BaseModel], *, leave_out: Iterable[str] = ()) -> str:
    """Return the table of the fields that a file of this spec can set."""
    rows = (
        (
            f"`{field.name}`",
            field.values,
            field.default,
            field.meaning,
        )
        for field in describe_fields(spec)
        if field.name.split(".")[0] not in leave_out
    )
    return render_table(("field", "value", "default", "meaning"), rows)


def list_own_fields() -> str:
    """Return the table of the fields that only own models have."""
    return list_fields(ModelSpec, leave_out=("core", "serving", "accuracy"))


# --- commands


def list_commands() -> str:
    """Return a section for each command with its usage, arguments and options."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    parts: list[str] = []
    for group, names in VERBS.items():
        parts.append(f"## {group}")
        for name in names:
            parts += [f"### triptych {name}", *_describe_command(commands[name])]
    return "\n\n".join(parts)


def _describe_command(command: Any) -> Iterator[str]:
    paragraphs = re.split(r"\n\s*\n", (command.help or "").replace("\b", "").strip())
    yield from (as_prose(" ".join(paragraph.split())) for paragraph in paragraphs)
    rows = []
    for parameter in command.params:
        if getattr(parameter, "hidden", False) or parameter.name == "help":
            continue
        if parameter.param_type_name == "argument":
            names = f"`{parameter.metavar or parameter.name.upper()}`"
        else:
            names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
        rows.append((names, _describe_option(parameter)))
    yield render_table(("argument or option", "meaning"), rows)


def _describe_option(parameter: Any) -> str:
    text = " ".join((parameter.help or "").split())
    default = parameter.default
    if parameter.required:
        text += " Required."
    elif isinstance(default, bool | int | float | str) and default is not False and default != "":
        text += f" Default: `{str(default).lower() if default is True else default}`."
    return text


# --- errors


def list_error_codes() -> str:
    """Return the table of the codes that steps put before their messages."""
    rows = []
    for kind in (
        request_errors.RequestError,
        rejections.Overloaded,
        rejections.Stopping,
        engine_errors.EngineFailed,
        engine_errors.EngineDied,
        request_errors.InternalError,
    ):
        code = kind.code
        status = {"INVALID_ARG": "INVALID_ARGUMENT"}.get(kind.status, kind.status)
        error = status_error(status, f"[{code}] text", url="")
        name = type(error).__name__
        rows.append(
            (f"`[{code}]`", status, f"`{name}`", as_prose(first_sentence(kind.__doc__ or "")))
        )
    return render_table(("code", "gRPC status", "exception of the client", "meaning"), rows)


def list_exceptions() -> str:
    """Return the table of the client's exceptions."""
    rows = [
        (f"`{kind.__name__}`", as_prose(first_sentence(kind.__doc__ or "")))
        for base in InferenceError.__subclasses__()
        for kind in (base, *base.__subclasses__())
    ]
    return render_table(("exception", "meaning"), rows)


# --- metrics of the accuracy gate


def list_limits() -> str:
    """Return the table of the metrics of the gate with their limits by precision."""

    def limits(task: Task, precision: str) -> Mapping[str, float]:
        return thresholds(task, precision, {})

    rows = _limit_rows(list(METRICS), tuple(TOLERANCES), limits)
    head = ("metric", "task", *_columns(TOLERANCES), "meaning")
    return render_table(
        head, ((f"`{name}`", tasks, *cells, METRICS[name].says) for name, tasks, *cells in rows)
    )


def list_probe_limits() -> str:
    """Return the table of the limits outside the traffic."""
    precisions = tuple(precision for precision in TOLERANCES if precision != "fp32")

    def limits(task: Task, precision: str) -> Mapping[str, float]:
        return probe_limits(task, precision, {})

    rows = _limit_rows(list(METRICS), precisions, limits)
    return render_table(
        ("metric", *_columns(precisions)),
        ((f"`{name}`", *cells) for name, _, *cells in rows if any(cells)),
    )


def _columns(precisions: Iterable[str]) -> list[str]:
    groups: dict[str, list[str]] = {}
    for precision in precisions:
        groups.setdefault(TOLERANCES[precision], []).append(precision)
    return [", ".join(group) for group in groups.values()]


def _limit_rows(
    names: Sequence[str],
    precisions: Sequence[str],
    limits: Callable[[Task, str], Mapping[str, float]],
) -> Iterator[Sequence[str]]:
    for name in names:
        tasks = [
            task
            for task in TASKS.values()
            if name in ("edge_error", *(metric.name for metric in task.metrics))
        ]
        tasks = tasks or [*TASKS.values()]
        cells = []
        for column in _columns(precisions):
            found = {limits(task, column.split(", ")[0]).get(name) for task in tasks}
            (limit,) = found
            cells.append("" if limit is None else f"{limit:g}")
        whose = "every" if len(tasks) == len(TASKS) else ", ".join(task.name for task in tasks)
        yield name, whose, *cells


# --- metrics for Prometheus


def list_server_metrics() -> str:
    """Return the table of the custom metrics of Triton's metrics page."""
    families = _record_families()
    from triptych.runtime import sample_writer  # imports Triton's module

    RowTokens({"pipeline": "NAME", "token_bounds": [1]})
    for name, description, values in sample_writer.METRICS:
        labels = {"reason": [*values]} if len(values) > 1 else {}
        families.append((name, "COUNTER", description, labels))
    made = generation_metrics.GenerationMetrics("NAME", generation_metrics.make_time_bounds({}))
    made.send({})
    generation_metrics.PreprocessErrors("NAME")
    rows = []
    for name, kind, description, labels in families:
        if re.search("_(count|sum)$", name):
            continue
        is_histogram = name.endswith("_bucket")
        kind = "histogram" if is_histogram else kind.lower()
        named = (
            ""
            if is_histogram
            else "; ".join(
                f"`{label}`: {', '.join(f'`{value}`' for value in values)}"
                for label, values in labels.items()
            )
        )
        name = name.removesuffix("_bucket")
        rows.append((f"`{name}`", kind, named, description.removesuffix(" (bucket)")))
    return render_table(("metric", "kind", "labels besides `pipeline`", "meaning"), rows)


def _record_families() -> list[tuple[str, str, str, dict[str, list[str]]]]:
    """Put a module in place of Triton's; return a list that gets each metric that is made."""
    families: list[tuple[str, str, str, dict[str, list[str]]]] = []

    class MetricFamily:
        COUNTER, GAUGE = "COUNTER", "GAUGE"

        def __init__(self, name: str, description: str, kind: str) -> None:
            self.labels: dict[str, list[str]] = {}
            families.append((name, kind, description, self.labels))

        def Metric(self, labels: Mapping[str, str]) -> object:
            for label, value in labels.items():
                if label != "pipeline":
                    self.labels.setdefault(label, []).append(value)
            return SimpleNamespace()

    module = types.ModuleType("triton_python_backend_utils")
    module.MetricFamily = MetricFamily  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    return families


def list_gateway_metrics() -> str:
    """Return the table of the metrics of the gateway."""
    return _list_families(GatewayMetrics().registry.collect())


def list_monitor_metrics() -> str:
    """Return the table of the gauges of `triptych monitor`."""
    run: Any = SimpleNamespace(
        pipeline="NAME", tests=[], at=0.0, rows=0, alarms=[], drifts=[], metrics=[]
    )
    families = RunCollector(run).collect()
    return _list_families(one for one in families if "Deprecated" not in one.documentation)


def _list_families(families: Iterable[Family]) -> str:
    rows = []
    for family in families:
        name = family.name + ("_total" if family.type == "counter" else "")
        rows.append((f"`{name}`", family.type, family.documentation.rstrip(".")))
    return render_table(("metric", "kind", "meaning"), rows)


# --- pages

TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "fields of encoders": (f"{GUIDES}/fields.md", lambda: list_fields(EncoderSpec)),
    "fields of own models": (f"{GUIDES}/fields.md", list_own_fields),
    "fields of text-generation": (f"{GUIDES}/fields.md", lambda: list_fields(GenerationSpec)),
    "fields of text2text-generation": (f"{GUIDES}/fields.md", lambda: list_fields(Text2TextSpec)),
    "commands": (f"{GUIDES}/commands.md", list_commands),
    "error codes": (f"{GUIDES}/errors.md", list_error_codes),
    "exceptions": (f"{GUIDES}/errors.md", list_exceptions),
    "limits": (f"{GUIDES}/accuracy.md", list_limits),
    "limits outside the traffic": (f"{GUIDES}/accuracy.md", list_probe_limits),
    "metrics of the server": ("docker/metrics.md", list_server_metrics),
    "metrics of the gateway": ("docker/metrics.md", list_gateway_metrics),
    "metrics of monitor": ("docker/metrics.md", list_monitor_metrics),
}
"""Page and function of each table, by the name in its marks."""

SITE_ONLY = (f"{GUIDES}/fields.md", f"{GUIDES}/commands.md")
"""Pages whose tables are on the site and not in the repository."""


def fill_page(page: str, text: str) -> str:
    """Return the text of a page with its tables written again.

    Raises:
        ValueError: The marks of a table are missing.
    """
    for name, (place, make) in TABLES.items():
        if place == page:
            begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
            if begin not in text or end not in text:
                raise ValueError(f"{page} has no marks of the table {name!r}")
            before, after = text.split(begin)[0], text.split(end)[1]
            text = f"{before}{begin}\n\n{make()}\n\n{end}{after}"
    return text


def main() -> None:
    """Write the tables of all pages that have them in the repository."""
    for page in {page for page, _ in TABLES.values()} - {*SITE_ONLY}:
        path = ROOT / page
        text = path.read_text(encoding="utf-8")
        if (filled := fill_page(page, text)) != text:
            write_files(path.parent, {path.name: filled})


if __name__ == "__main__":
    main()
