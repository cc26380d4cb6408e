"""The demo page of a served pipeline, and a client that uses it as a browser does."""

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

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


@contextmanager
def open_events(client: Any, *given: object) -> Iterator[Any]:
    """The events of an answer to fields as they are, without files that a client would send."""
    calls = [call for call in client.config["dependencies"] if call["api_name"] == "answer"]
    session = secrets.token_hex(8)
    sent = {"data": given, "fn_index": calls[0]["id"], "session_hash": session}
    kind = {"Content-Type": "application/json"}
    join = Request(f"{client.src}gradio_api/queue/join", json.dumps(sent).encode(), kind)
    with urlopen(join, timeout=60) as reply:
        assert reply.status == 200
    with urlopen(f"{client.src}gradio_api/queue/data?session_hash={session}", timeout=60) as events:
        yield events
