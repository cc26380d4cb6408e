"""A run with another Python on the same machine, taken into the report of this one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.engine_speed import Speed
from benchmarks.gpu.ledger import Entry, Ledger
from benchmarks.gpu.machine import PARTS
from benchmarks.gpu.report import Findings
from benchmarks.gpu.served import Loop, Served


@dataclass(frozen=True)
class Earlier:
    """What that run wrote.

    Attributes:
        report: its JSON.
    """

    report: dict[str, Any]

    @classmethod
    def read(cls, path: Path | None) -> Earlier | None:
        """The report at `path`; None where there is none."""
        if path is None or not path.is_file():
            return None
        return cls(json.loads(path.read_text(encoding="utf-8")))

    @property
    def lacks(self) -> dict[str, str]:
        """Parts that it could not run either."""
        return dict(self.report["machine"]["lacks"])

    def add_to(self, found: Findings, ledger: Ledger) -> None:
        """Its figures, engines, failures and notes; what it could not run, this run tells."""
        facts = self.report["machine"]["facts"]
        ledger.note(
            f"Engines by Python {facts['Python']} with TensorRT {facts['TensorRT']}, the others by "
            f"Python {found.machine.facts['Python']}: one after the other, not in turns"
        )
        found.speeds[:0] = [Speed(**speed) for speed in self.report["speeds"]]
        found.served[:0] = [
            Served(
                one["model"],
                one["precision"],
                one["layout"],
                tuple(Loop(**loop) for loop in one["closed"]),
                Loop(**one["poisson"]),
            )
            for one in self.report["served"]
        ]
        records = {record["name"]: record for record in self.report["pipelines"]}
        for built in found.built:
            record = records.get(built.subject.name, {"engine": None, "parity": None})
            built.engine, built.parity = record["engine"], record["parity"]
        ledger.failed[:0] = [Entry(**entry) for entry in self.report["failed"]]
        machine = {f"{part} ({what})" for part, what in PARTS.items()}
        ledger.not_run[:0] = [
            Entry(**entry) for entry in self.report["not_run"] if entry["what"] not in machine
        ]
        for note in self.report["notes"]:
            ledger.note(note)
