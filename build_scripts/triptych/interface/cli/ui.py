"""The verb `ui`: a page in the browser that asks a pipeline."""

from __future__ import annotations

import json
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from triptych.interface.cli.generating import load_any_spec
from triptych.interface.cli.options import (
    PIPELINES,
    REPOSITORY,
    Json,
    LoadTimeout,
    Name,
    Pipelines,
    Port,
    Repository,
    app,
    output,
    progress,
    status,
)
from triptych.interface.cli.running import run, stoppable, warn

if TYPE_CHECKING:
    from triptych.interface.page.web import PageServer
    from triptych.spec.generation_spec import GenerationSpec
    from triptych.spec.spec import PipelineSpec
    from triptych.spec.text2text_spec import Text2TextSpec


@app.command()
def ui(
    name: Name,
    url: Annotated[
        str | None,
        typer.Option(help="gRPC endpoint of a server; without it one is started and stopped."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address that the page listens on.")] = "127.0.0.1",
    port: Port = 7860,
    pipelines: Pipelines = PIPELINES,
    repository: Repository = REPOSITORY,
    timeout_s: LoadTimeout = 120.0,
    request_timeout_s: Annotated[
        float, typer.Option(min=0.001, help="Deadline of each request.")
    ] = 30.0,
    as_json: Json = False,
) -> None:
    """Open a page in the browser to try a pipeline on.

    It shows answers as the task has them, and where their time went. Ctrl-C ends it.
    """
    from triptych.interface.page.chat import ChatPage
    from triptych.interface.page.page import DemoPage, open_pipeline
    from triptych.repository.store import complete
    from triptych.serving.endpoint import check_built
    from triptych.serving.exchange import Exchange
    from triptych.serving.ports import claim_ports, is_loopback
    from triptych.serving.production import check_and_make_flags
    from triptych.serving.server import Server
    from triptych.spec.spec import PipelineSpec

    if url is None:
        check_built(repository, name)
        complete(repository)
        check_and_make_flags(repository, production=False)
    port = claim_ports(host, {"--port": port})["--port"]  # before a server is started for nothing
    spec = _built_or_written(name, repository, pipelines)
    if not is_loopback(host):
        warn(f"{host} is reached from other machines, and the page asks nobody who they are")
    with ExitStack() as opened:

        def open_page(grpc_url: str, pid: int | None) -> None:
            folder = pipelines / name
            made: PageServer
            if isinstance(spec, PipelineSpec):
                pipeline = open_pipeline(spec, folder, grpc_url, request_timeout_s)
                made = DemoPage(pipeline, host, port)
            else:
                made = ChatPage(spec, folder, grpc_url, host, port, timeout_s=request_timeout_s)
            page = opened.enter_context(made)
            if as_json:
                print(json.dumps({"page": page.url, "grpc": grpc_url, "pid": pid}), flush=True)
            else:
                output.print(f"open {page.url} to try {name}; stop with Ctrl-C", style="green")

        if url is not None:
            with stoppable():
                open_page(url, None)
                try:
                    signal.pause()
                except KeyboardInterrupt:
                    status.print("stopped", markup=False)
            return
        server = Server(repository, models=[name])
        exchange = Exchange(
            server, only=name, on_exchange=lambda line: progress("serve", line), on_problem=warn
        )
        pages: list[str] = []

        def announce() -> None:
            if not pages:  # a server that died comes back at the same address
                pages.append(server.grpc_url)
                open_page(server.grpc_url, server.pid)

        run(server, announce, timeout_s=timeout_s, meanwhile=exchange.look)


def _built_or_written(
    name: str, repository: Path, pipelines: Path
) -> PipelineSpec | GenerationSpec | Text2TextSpec:
    """The spec of what is built; where that is elsewhere, what the pipeline's folder says."""
    from triptych.repository.lock import find_lock

    lock = find_lock(repository, name)
    return load_any_spec(pipelines / name, ()) if lock is None else lock.spec
