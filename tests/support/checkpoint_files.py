"""Writers of JSON files in a checkpoint's folder, and of changes to them."""

import json
from pathlib import Path


def write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def change(path: Path, **values: object) -> None:
    """Set values of a JSON object in a file; None removes one."""
    content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    merged = {**content, **values}
    write(path, {name: value for name, value in merged.items() if value is not None})
