"""The verb `gateway`, and the gateway that `serve` starts beside its server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from triptych.base.errors import UserError
from triptych.interface.cli.command import verb
from triptych.interface.cli.options import (
    REPOSITORY,
    Json,
    output,
    sigterm_as_interrupt,
    status,
    warn,
)

PORT = 8080
_MIB = 1 << 20

Aliases = Annotated[
    list[str] | None,
    typer.Option(
        "--alias",
        metavar="ALIAS=NAME",
        help="Another name of a pipeline in the HTTP APIs; may be repeated. Default: none.",
    ),
]


@verb()
def gateway(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME...", help="Names of pipelines. Default: all built ones of --repository."
        ),
    ] = None,
    url: Annotated[
        str, typer.Option(help="gRPC address of the Triton servers.")
    ] = "127.0.0.1:8001",
    repository: Annotated[
        Path,
        typer.Option(
            "--repository",
            "-r",
            help="Model repository of the servers: the tokenizers that count tokens. It may be "
            "missing if NAME is given.",
        ),
    ] = REPOSITORY,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of HTTP; 0 picks a free port.")
    ] = PORT,
    aliases: Aliases = None,
    timeout_s: Annotated[
        float, typer.Option(min=0.001, help="Maximum time of a request, in seconds.")
    ] = 60.0,
    max_body_mib: Annotated[
        int, typer.Option(min=1, max=1024, help="Maximum number of MiB in the body of a request.")
    ] = 8,
    max_items: Annotated[
        int, typer.Option(min=1, help="Maximum number of texts in a request.")
    ] = 10_000,
    as_json: Json = False,
) -> None:
    """Serve the HTTP APIs of OpenAI, Cohere, Jina and TEI.

    Requests are sent to pipelines of Triton servers over gRPC. Ctrl-C ends the gateway.
    """
    try:
        from triptych.gateway.http import RequestLimits
        from triptych.gateway.pipelines import Pipelines
        from triptych.gateway.serve import make_server
    except ImportError as error:
        raise UserError(
            "triptych gateway",
            "needs the packages of the extra `gateway`",
            given=error,
            remedy="Run `pip install 'triptych[gateway]'`",
        ) from error
    from triptych.serving.ports import is_loopback, reserve_ports

    pipelines = Pipelines(
        names or (),
        parse_aliases(aliases or ()),
        repository if repository.is_dir() else None,
        {"url": url, "timeout_s": timeout_s},
    )
    if port:  # else the gateway picks a free one
        reserve_ports(host, {"--port": port})
    if not is_loopback(host):
        warn(f"{host} can be reached from other machines, and the gateway accepts all clients")

    def announce(port: int) -> None:
        address = f"http://{host}:{port}"
        if as_json:
            print(json.dumps({"http": address, "pipelines": pipelines.names()}), flush=True)
        else:
            output.print(f"{address}/v1 is ready; stop with Ctrl-C", style="green", markup=False)

    limits = RequestLimits(body_bytes=max_body_mib * _MIB, items=max_items)
    server = make_server(pipelines, limits, host=host, port=port, on_ready=announce)
    with sigterm_as_interrupt():
        try:
            server.run()
        except KeyboardInterrupt:  # at the end, after the requests in flight
            status.print("stopped", markup=False)


def parse_aliases(pairs: Sequence[str]) -> dict[str, str]:
    """Return the name of a pipeline by its alias.

    Raises:
        UserError: A text is not ALIAS=NAME.
    """
    parsed = {}
    for pair in pairs:
        alias, equals, name = pair.partition("=")
        if not (alias and equals and name):
            raise UserError(
                "--alias",
                "must be ALIAS=NAME",
                given=pair,
                remedy="Write for example --alias text-embedding-3-small=minilm",
            )
        parsed[alias] = name
    return parsed


class GatewayProcess:
    """A gateway in a process of its own, beside the server of `serve`.

    Args:
        port: Port to listen on; None for no gateway.
        host: Address to listen on.
        repository: Repository of the server.
        models: Pipelines of the server; empty for all.
        aliases: Values of ``--alias``.

    Raises:
        UserError: The port is busy, or an alias is malformed.
    """

    def __init__(
        self,
        port: int | None,
        host: str,
        repository: Path,
        models: Sequence[str],
        aliases: Sequence[str] | None,
    ) -> None:
        parse_aliases(aliases or ())
        self._picked = port == 0
        if port is not None:
            from triptych.serving.ports import reserve_ports

            port = reserve_ports(host, {"--http-api": port})["--http-api"]
        self._port = port
        self._address = f"http://{host}:{port}"
        self._words = [
            *(sys.executable, "-m", "triptych.interface.cli", "gateway", *models),
            *("--repository", str(repository), "--host", host, "--port", str(port)),
            *(word for pair in aliases or () for word in ("--alias", pair)),
        ]
        self._process: subprocess.Popen[str] | None = None

    def start(self, grpc_url: str) -> dict[str, str]:
        """Start the gateway, unless it runs, wait until it listens, and return its address.

        Raises:
            UserError: It does not start.
        """
        if self._port is None:
            return {}
        if self._process is None:
            from triptych.serving.ports import release_ports

            release_ports([self._port] if self._picked else [])
            self._words += ["--url", grpc_url, "--json"]
            self._open()
        return {"api": self._address}

    def poll(self) -> None:
        """Start the gateway again if it ended.

        Raises:
            UserError: It does not start.
        """
        if self._process is not None and self._process.poll() is not None:
            warn(f"the gateway ended with status {self._process.returncode} and is started again")
            self._open()

    def end(self) -> None:
        """End the gateway after its requests in flight."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def _open(self) -> None:
        from triptych.serving.process import launched

        # In a session of its own, so that Ctrl-C at the terminal does not reach it.
        self._process = subprocess.Popen(
            launched(self._words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        if not self._process.stdout.readline().startswith('{"http"'):
            raise UserError(
                "--http-api",
                "must start the gateway",
                given=f"exit status {self._process.wait()}",
                remedy="See its message above",
            )
