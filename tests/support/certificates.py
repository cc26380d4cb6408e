"""Certificates of an authority that exists for a test, and load while they are replaced."""

import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from client_toy import wait_until


def write_certificate(folder: Path, name: str, file: str = "server") -> None:
    """Write a certificate of the authority in `folder`, which is made first, and its key."""

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    if not (folder / "ca.pem").exists():
        openssl("req", "-x509", *new, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca")
    openssl("req", *new, "-keyout", "new.key", "-out", "new.csr", "-subj", f"/CN={name}")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    openssl(
        *("x509", "-req", "-in", "new.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"),
        *("-extfile", "names", "-out", "new.pem"),
    )
    for suffix in ("key", "pem"):
        (folder / f"new.{suffix}").replace(folder / f"{file}.{suffix}")


@dataclass
class Load:
    """Requests on one connection (`old`), and each on one of its own (`new`).

    Attributes:
        lost: Requests that failed.
    """

    answered: dict[str, int] = field(default_factory=lambda: {"old": 0, "new": 0})
    lost: list[str] = field(default_factory=list)

    def goes_on(self) -> None:
        """Wait until more requests of both kinds are answered."""
        before = self.answered.copy()
        wait_until(
            lambda: all(self.answered[kind] > before[kind] for kind in before), "requests go on"
        )


@contextmanager
def under_load(
    connect: Callable[[], AbstractContextManager[Callable[[], object]]],
) -> Iterator[Load]:
    """Send requests while the block runs; `connect` yields what sends one on a new connection."""
    load, over = Load(), threading.Event()

    def ask(kind: str) -> None:
        while not over.is_set():
            try:
                with connect() as send:
                    while not over.is_set():
                        send()
                        load.answered[kind] += 1
                        if kind == "new":
                            break
            except Exception as error:
                load.lost.append(repr(error))

    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(ask, kind) for kind in load.answered]
        try:
            yield load
        finally:
            over.set()
    for each in both:
        each.result()
