"""The demo page of a served pipeline, and a client that uses it as a browser does."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gradio_client

from triptych.interface.cli.options import Folders
from triptych.interface.cli.serve import describe_page
from triptych.interface.demo_page import open_page
from triptych.serving.ports import reserve_ports
from triptych.spec.any_spec import AnySpec


@contextmanager
def open_demo(spec: AnySpec, folder: Path, repository: Path, url: str) -> Iterator[Any]:
    """A client of the page, whose address is its `src`."""
    folders = Folders(pipelines=folder.parent, repository=repository)
    pipeline = describe_page(spec, folders, url, 60.0)
    with (
        reserve_ports("127.0.0.1", {"--port": 0}) as ports,
        open_page(pipeline, "127.0.0.1", ports["--port"]) as address,
        open_client(address) as client,
    ):
        yield client


@contextmanager
def open_client(address: str) -> Iterator[Any]:
    client = gradio_client.Client(address, verbose=False, analytics_enabled=False)
    try:
        yield client
    finally:
        client.close()


def ask(client: Any, *given: object) -> Any:
    """What the page shows after these fields were submitted."""
    job = client.submit(*given, api_name="/answer")
    shown = job.result(timeout=60)
    return job.outputs()[-1] if job.outputs() else shown
