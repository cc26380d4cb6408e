"""Servers of tests, the marks of their processes and shared memory, waits and repeated calls."""

import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from triptych.serving.orphan_cleanup import PROCESS_TAG_VARIABLE, SHM
from triptych.serving.server import Server

CORE_IS_A_PROCESS = shutil.which("tritonserver") is None
"""Whether the core is a Python process: in the local replacement of ONNX Runtime's backend."""


@contextmanager
def serving_http(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Answer requests on this machine by a handler; the address of the server."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def running(
    server: Server, on_progress: Callable[[str], object] = lambda _: None
) -> Iterator[Server]:
    """Run a server, and end it without the seconds that Triton takes to unload its models."""
    try:
        server.start()
        server.wait_ready(on_progress=on_progress)
        yield server
    finally:
        server.stop(grace_s=0.0)


def mark_of(pid: int) -> str:
    """The server's mark, as everybody on the machine can see it."""
    environ = Path(f"/proc/{pid}/environ")
    wanted = f"\0{PROCESS_TAG_VARIABLE}="
    assert eventually(lambda: wanted in environ.read_text())  # empty while a program is replaced
    return environ.read_text().partition(wanted)[2].partition("\0")[0]


def regions(mark: str) -> list[str]:
    return [path.name for path in SHM.glob(f"{mark}*")]


def eventually(holds: Callable[[], bool], within_s: float = 60.0) -> bool:
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@contextmanager
def repeated(*calls: Callable[[], object]) -> Iterator[Counter[str]]:
    """Repeat each call in a thread of its own while the block runs.

    Yields:
        How often each result was returned, as text; an error counts as its text.
    """
    over, lock, results = threading.Event(), threading.Lock(), Counter[str]()

    def repeat(call: Callable[[], object]) -> None:
        while not over.is_set():
            try:
                result = str(call())
            except Exception as error:
                result = repr(error)
            with lock:
                results[result] += 1

    with ThreadPoolExecutor(len(calls)) as pool:
        for call in calls:
            pool.submit(repeat, call)
        try:
            yield results
        finally:
            over.set()
