"""The form of an alert, and the labels by which all that is recorded or raised is routed."""

from __future__ import annotations

from typing import Any

from triptych.base.explained import ExplainedValue
from triptych.deploy.options import DeployOptions

SHORTEST_FOR = "5m"


def who(pipeline: str, options: DeployOptions) -> dict[str, str]:
    """Labels of all that is recorded or raised of a pipeline."""
    return {"pipeline": pipeline, "namespace": options.namespace}


def alert(
    name: str,
    labels: dict[str, str],
    expression: str | ExplainedValue,
    summary: str,
    description: str,
    after: Any = None,
) -> dict[str, Any]:
    """An alert; `after` which time of being so."""
    return {
        "alert": name,
        "expr": expression,
        **({} if after is None else {"for": after}),
        "labels": labels,
        "annotations": {"summary": summary, "description": description},
    }


def camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("-"))
