"""Under which licence a model's own files say that it is."""

from __future__ import annotations

import re
from pathlib import Path

from triptych.base.yaml_text import parse_yaml

CARD = "README.md"
_HEAD = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)


def read_licence(folder: Path) -> str:
    """The `license` of the card in a model's folder, as it names it; empty where it names none."""
    try:
        head = _HEAD.match((folder / CARD).read_text(encoding="utf-8").replace("\r\n", "\n"))
        fields = parse_yaml(head[1]) if head else None
    except (OSError, ValueError, RecursionError):
        return ""
    if not isinstance(fields, dict):
        return ""
    found = fields.get("license_name") or fields.get("license") or ""
    return ", ".join(map(str, found)) if isinstance(found, list) else str(found)
