"""Texts on record below `tests/data`: a test fails where one of them changed."""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Mapping

from conftest import ROOT


def assert_recorded(folder: str, texts: Mapping[str, str], *, rewrite: bool) -> None:
    """Compare texts with the files of the same names in `tests/data/FOLDER`.

    After an intended change, ``pytest FILE --rewrite`` writes these files again; the diff shows
    what changed.
    """
    recorded = ROOT / "tests/data" / folder
    if rewrite:
        shutil.rmtree(recorded, ignore_errors=True)
        recorded.mkdir(parents=True)
        for name, text in texts.items():
            (recorded / name).write_text(text, encoding="utf-8")
    known = {path.name: path.read_text(encoding="utf-8") for path in recorded.iterdir()}
    assert sorted(known) == sorted(texts)
    changed = [
        line
        for name, text in texts.items()
        for line in difflib.unified_diff(
            known[name].splitlines(), text.splitlines(), f"{folder}/{name}", "now", lineterm="", n=0
        )
    ]
    assert not changed, "\n".join(changed[:40])
