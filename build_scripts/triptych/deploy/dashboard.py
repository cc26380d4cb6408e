"""Layout of a Grafana dashboard with the panels of ``templates/dashboard.yaml.j2``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_SCHEMA = 39
_COLUMNS, _HEIGHT = 3, 8
_WIDTH = 24 // _COLUMNS
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}

Rows = Mapping[str, Sequence[Mapping[str, Any]]]
"""Panels of each row by its title: title, description, unit, queries by legend, limit."""


def lay_out(name: str, title: str, description: str, rows: Rows) -> dict[str, object]:
    """Return a dashboard as Grafana reads it, with the panels of each row in a grid."""
    panels: list[dict[str, object]] = []
    top = 0
    for row_title, row in rows.items():
        panels.append(
            {
                **_place(len(panels), 0, top, 24, 1),
                "type": "row",
                "title": row_title,
                "collapsed": False,
                "panels": [],
            }
        )
        top += 1
        for index, panel in enumerate(row):
            down, across = divmod(index, _COLUMNS)
            place = _place(len(panels), across * _WIDTH, top + down * _HEIGHT, _WIDTH, _HEIGHT)
            panels.append({**place, **_draw(panel)})
        top += -(-len(row) // _COLUMNS) * _HEIGHT
    return {
        "uid": f"triptych-{name}"[:40],
        "title": title,
        "description": description,
        "tags": ["triptych"],
        "schemaVersion": _SCHEMA,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Prometheus",
                    "type": "datasource",
                    "query": "prometheus",
                }
            ]
        },
        "panels": panels,
    }


def _place(number: int, x: int, y: int, width: int, height: int) -> dict[str, object]:
    return {"id": number + 1, "gridPos": {"x": x, "y": y, "w": width, "h": height}}


def _draw(panel: Mapping[str, Any]) -> dict[str, object]:
    defaults: dict[str, object] = {"unit": panel["unit"], "min": 0}
    limit = panel.get("limit")
    if limit is not None:
        steps = [{"color": "green", "value": None}, {"color": "red", "value": limit}]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
        defaults["custom"] = {"thresholdsStyle": {"mode": "line"}}
    return {
        "type": "timeseries",
        "title": panel["title"],
        "description": panel["description"],
        "datasource": _DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _DATASOURCE,
                "expr": expr,
                "legendFormat": legend,
            }
            for index, (legend, expr) in enumerate(panel["queries"].items())
        ],
    }
