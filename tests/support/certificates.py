"""Certificates of an authority that exists for a test, and load meanwhile."""

import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.processes import eventually, repeated


def write_certificate(folder: Path, name: str, file: str = "server") -> None:
    """Write a certificate of the authority in `folder`, which is made first, and its key."""

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    if not (folder / "ca.pem").exists():
        openssl("req", "-x509", *new, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca")
    openssl(
        *("req", "-x509", *new, "-keyout", "new.key", "-out", "new.pem", "-subj", f"/CN={name}"),
        *("-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "subjectAltName=IP:127.0.0.1"),
    )
    for suffix in ("key", "pem"):
        (folder / f"new.{suffix}").replace(folder / f"{file}.{suffix}")


@dataclass
class Load:
    """How often requests on one connection (`old`), and on new ones (`new`), ended how."""

    results: Counter[str]

    @property
    def lost(self) -> list[str]:
        """Errors of the requests that failed."""
        return [result for result in self.results if result not in ("old", "new")]

    def goes_on(self) -> None:
        """Wait until more requests of both kinds are answered."""
        before = self.results.copy()
        assert eventually(lambda: all(self.results[kind] > before[kind] for kind in ("old", "new")))


@contextmanager
def under_load(
    connect: Callable[[], AbstractContextManager[Callable[[], object]]],
) -> Iterator[Load]:
    """Send requests while the block runs; `connect` yields what sends one on a new connection."""
    with connect() as send:

        def send_again() -> str:
            send()
            return "old"

        def send_anew() -> str:
            with connect() as send_first:
                send_first()
            return "new"

        with repeated(send_again, send_anew) as results:
            yield Load(results)
