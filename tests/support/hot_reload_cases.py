"""A small classifier whose hook names every label, and clients that ask it all the time."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from tests.support.project import traffic_texts, write_pipeline
from tests.support.task_models import text_classifier
from triptych.client import Client

HOOKS = """
import sys

def after(rows):
    return [{{**row, "label": ["{label}"] * len(row["label"])}} for row in rows]

if {at_load} and "triton_python_backend_utils" in sys.modules:
    raise KeyError("not on a server")
"""


def hooks(label: str, *, at_load: bool = False) -> str:
    return HOOKS.format(label=label, at_load=at_load)


def write_tickets(base: Path, minilm_folder: Path) -> Path:
    """The folder of a pipeline `tickets` in ``base/pipelines`` that labels all as FIRST."""
    model = text_classifier(base / "model", minilm_folder, traffic_texts())
    folder = write_pipeline(
        base / "pipelines/tickets", task="text-classification", model={"source": str(model)}
    )
    (folder / "hooks.py").write_text(hooks("FIRST"))
    return folder


class Asker:
    """Asks all the time, from the start of the context to its end, with so many clients at once."""

    def __init__(
        self,
        url: str,
        clients: int = 1,
        pause_s: float = 0.01,
        pipeline: str = "tickets",
        *,
        retries: bool = False,
    ) -> None:
        self._url = url
        self._pipeline = pipeline
        self._pause_s = pause_s
        self._options: dict[str, Any] = {"timeout_s": 60} if retries else {"retry": None}
        self._stop = threading.Event()
        self.failures: list[str] = []
        self.labels: list[str] = []
        self.answers = [0] * clients
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(clients)]

    def __enter__(self) -> Asker:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def wait_for(self, label: str, *, more: int = 0) -> None:
        """Wait until the last answer has a label, after at least so many more answers."""
        count, deadline = len(self.labels) + more, time.monotonic() + 120
        while len(self.labels) < max(count, 1) or self.labels[-1] != label:
            assert time.monotonic() < deadline, (label, self.labels[-3:], self.failures[-3:])
            time.sleep(0.05)

    def _ask(self, number: int) -> None:
        with Client(self._pipeline, self._url, **self._options) as client:
            while not self._stop.is_set():
                try:
                    self.labels.append(client.classify(["where is it"])[0][0].label)
                    self.answers[number] += 1
                except Exception as error:
                    self.failures.append(str(error))
                time.sleep(self._pause_s)
