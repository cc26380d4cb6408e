"""The verb `gateway`, and the gateway that `serve` starts beside its server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from triptych.base.errors import UserError
from triptych.base.extras import imports_of_extra
from triptych.base.files import check_writable, os_errors_as_user_errors, write_files
from triptych.gateway import MAX_BODY_MIB, MAX_ITEMS, PORT
from triptych.interface.cli.command import verb
from triptych.interface.cli.options import (
    REPOSITORY,
    ConnectionOptions,
    Json,
    output,
    print_json,
    sigterm_as_interrupt,
    status,
    warn,
)

_MIB = 1 << 20

KEYS_FILE = Path("keys.yaml")


@dataclass(frozen=True, kw_only=True)
class GatewayOptions:
    """Options of `gateway` that `serve` has, too."""

    aliases: Annotated[
        list[str] | None,
        typer.Option(
            "--alias",
            metavar="ALIAS=NAME",
            help="Another name of a pipeline in the HTTP APIs; may be repeated. Default: none.",
        ),
    ] = None
    cors: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="Origin of web pages that may call the HTTP APIs, such as https://example.com, or "
            "* for all; may be repeated. Default: none.",
        ),
    ] = None
    keys: Annotated[
        Path | None,
        typer.Option(
            help="File of API keys that clients need; see `triptych key`. It is read again when it "
            "changes. Default: no keys."
        ),
    ] = None
    tls_certificate: Annotated[
        Path | None,
        typer.Option(
            help="PEM file of the server's certificate. It is read again when it changes. "
            "Default: no encryption."
        ),
    ] = None
    tls_key: Annotated[
        Path | None, typer.Option(help="PEM file of the key of --tls-certificate. Default: none.")
    ] = None
    client_ca: Annotated[
        Path | None,
        typer.Option(
            help="PEM file of the authorities of client certificates, which are then required. "
            "Default: none."
        ),
    ] = None
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Serve other machines without keys and client certificates.",
        ),
    ] = False
    access_log: Annotated[
        bool,
        typer.Option(
            "--access-log",
            help="Write a line of JSON for each request of the HTTP APIs to stderr, without texts.",
        ),
    ] = False

    def check(self, host: str) -> None:
        """Check the options for a gateway that listens on `host`.

        Raises:
            UserError: An alias is malformed, a file of TLS is missing, or every client is served.
        """
        from triptych.serving.ports import is_loopback

        parse_aliases(self.aliases or ())
        for origin in self.cors or ():
            if not re.fullmatch(r"\*|https?://[^/\s]+", origin):
                raise UserError(
                    "--cors",
                    "must be * or an origin: http or https, host and port",
                    given=origin,
                    remedy="Write for example --cors https://example.com",
                )
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise UserError(
                "--tls-certificate, --tls-key",
                "must be given together",
                given="one of them",
                remedy="Give the other one, too",
            )
        if self.client_ca is not None and self.tls_certificate is None:
            raise UserError(
                "--client-ca",
                "is only supported with --tls-certificate",
                given=self.client_ca,
                remedy="Give --tls-certificate and --tls-key",
            )
        if is_loopback(host):
            return
        if self.keys is None and self.client_ca is None and not self.insecure:
            raise UserError(
                "--host",
                "must be this machine without keys and client certificates",
                given=host,
                remedy="Give --keys or --client-ca, or --insecure behind a proxy that "
                "authenticates clients",
            )
        if self.tls_certificate is None:
            warn(f"texts and keys are sent to {host} without encryption: give --tls-certificate")

    def words(self) -> list[str]:
        """Return the options as words of a command line."""
        words = [word for pair in self.aliases or () for word in ("--alias", pair)]
        words += [word for origin in self.cors or () for word in ("--cors", origin)]
        for name in ("keys", "tls_certificate", "tls_key", "client_ca"):
            path = getattr(self, name)
            words += [] if path is None else [f"--{name.replace('_', '-')}", str(path)]
        flags = [name for name in ("insecure", "access_log") if getattr(self, name)]
        return words + [f"--{name.replace('_', '-')}" for name in flags]


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    """Limits of the requests to the gateway."""

    timeout_s: Annotated[
        float, typer.Option(min=0.001, help="Maximum time of a request, in seconds.")
    ] = 60.0
    max_body_mib: Annotated[
        int, typer.Option(min=1, max=1024, help="Maximum number of MiB in the body of a request.")
    ] = MAX_BODY_MIB
    max_items: Annotated[int, typer.Option(min=1, help="Maximum number of texts in a request.")] = (
        MAX_ITEMS
    )


@dataclass(frozen=True, kw_only=True)
class ListenOptions:
    """Address of the gateway."""

    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of HTTP; 0 picks a free port.")
    ] = PORT


@verb()
def gateway(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME...", help="Names of pipelines. Default: all built ones of --repository."
        ),
    ] = None,
    *,
    options: GatewayOptions,
    connection: ConnectionOptions,
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
    listen: ListenOptions,
    limits: LimitOptions,
    as_json: Json = False,
) -> None:
    """Serve the HTTP APIs of OpenAI, Cohere, Jina and TEI.

    Requests are sent to pipelines of Triton servers over gRPC. Ctrl-C ends the gateway.
    """
    with imports_of_extra("gateway", "triptych gateway"):
        from triptych.gateway.http import RequestLimits, Shared
        from triptych.gateway.keys import Keys
        from triptych.gateway.pipelines import Pipelines
        from triptych.gateway.serve import ServerTls, make_server
        from triptych.gateway.traces import RequestTracer, export_to
    from triptych.container.settings import read_trace
    from triptych.serving.ports import reserve_ports

    options.check(listen.host)
    trace = read_trace(os.environ)
    connection.apply()
    pipelines = Pipelines(
        names or (),
        parse_aliases(options.aliases or ()),
        repository if repository.is_dir() else None,
        {"url": url, "timeout_s": limits.timeout_s},
    )
    if listen.port:  # else the gateway picks a free one
        with reserve_ports(listen.host, {"--port": listen.port}):
            pass  # it is free
    tls = None
    if options.tls_certificate is not None and options.tls_key is not None:
        tls = ServerTls(options.tls_certificate, options.tls_key, options.client_ca)

    def announce(port: int) -> None:
        address = f"http{'s' if tls else ''}://{listen.host}:{port}"
        if as_json:
            print(json.dumps({"http": address, "pipelines": pipelines.names()}), flush=True)
        else:
            output.print(f"{address}/v1 is ready; stop with Ctrl-C", style="green", markup=False)

    shared = Shared(
        limits=RequestLimits(body_bytes=limits.max_body_mib * _MIB, items=limits.max_items),
        keys=None if options.keys is None else Keys(options.keys),
        log=partial(print, file=sys.stderr, flush=True) if options.access_log else None,
        origins=options.cors or (),
        tracer=RequestTracer()
        if trace is None or trace.collector is None
        else export_to(trace.collector, trace.rate),
    )
    server = make_server(
        pipelines, shared, host=listen.host, port=listen.port, on_ready=announce, tls=tls
    )
    with sigterm_as_interrupt():
        try:
            server.run()
        except KeyboardInterrupt:  # at the end, after the requests in flight
            status.print("stopped", markup=False)


@dataclass(frozen=True, kw_only=True)
class KeyOptions:
    """Rights and limits of a key."""

    pipelines: Annotated[
        list[str] | None,
        typer.Option(
            "--pipeline",
            help="Pipeline that the key may use; may be repeated. Default: all pipelines.",
        ),
    ] = None
    max_requests: Annotated[
        float | None,
        typer.Option(min=0.001, help="Maximum number of requests per second. Default: no limit."),
    ] = None
    max_items: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="Maximum number of texts, pairs, images and answers per second. "
            "Default: no limit.",
        ),
    ] = None
    max_tokens: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="Maximum number of tokens per second in the gateway, of prompts and answers. "
            "Default: no limit.",
        ),
    ] = None
    priority: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Priority level of the key's requests in the gateway, 1 for the first. Pipelines "
            "without levels ignore it. Default: that of the pipeline.",
        ),
    ] = None


@verb()
def key(
    action: Annotated[
        Literal["new", "remove"],
        typer.Argument(metavar="ACTION", help="Action: new adds a key, remove revokes one."),
    ],
    name: Annotated[str, typer.Argument(help="Name of the key.")],
    *,
    keys: Annotated[Path, typer.Option(help="File of keys, with their hashes.")] = KEYS_FILE,
    rights: KeyOptions,
    as_json: Json = False,
) -> None:
    """Add an API key of the gateway, or revoke one.

    A new key is printed once. The file has only its hash. Gateways read the file again within a
    second.
    """
    from triptych.gateway.keys import KeyEntry, KeyFile, make_key, print_keys, read_keys

    content = read_keys(keys) if keys.exists() else KeyFile()
    entries = content.keys
    if (name in entries) == (action == "new"):
        raise UserError(
            "NAME",
            "must be that of a new key" if action == "new" else "must be that of a key",
            given=name,
            remedy=f"Keys in {keys}: {', '.join(entries) or 'none'}",
        )
    made, digest = make_key()
    if action == "new":
        entries[name] = KeyEntry(
            sha256=digest,
            pipelines=rights.pipelines,
            requests_per_s=rights.max_requests,
            items_per_s=rights.max_items,
            tokens_per_s=rights.max_tokens,
            priority=rights.priority,
        )
    else:
        del entries[name]
    check_writable(keys.parent, "--keys")
    with os_errors_as_user_errors(keys.parent):
        write_files(keys.parent, {keys.name: print_keys(content)}, is_private=True)
    if as_json:
        print_json({"name": name, "key": made if action == "new" else None})
    else:
        output.print(made if action == "new" else f"{name} is revoked", markup=False)


def check_access(host: str, access: GatewayOptions, *, has_http_api: bool) -> str:
    """Check who may send requests, and return the address on which Triton listens.

    Raises:
        UserError: Other machines are served without keys and client certificates, or an option
            needs the gateway.
    """
    from triptych.serving.ports import is_loopback

    if has_http_api:
        access.check(host)
        # Triton itself does not authenticate clients: only the gateway may reach it.
        return host if access.insecure else "127.0.0.1"
    if words := replace(access, insecure=False).words():
        raise UserError(
            words[0],
            "is only supported with --http-api",
            given=" ".join(words),
            remedy="Add --http-api PORT, whose gateway encrypts and authenticates, unlike Triton",
        )
    if not is_loopback(host) and not access.insecure:
        raise UserError(
            "--host",
            "must be this machine, because Triton does not authenticate clients",
            given=host,
            remedy="Add --http-api with --keys or --client-ca, or --insecure behind a proxy that "
            "authenticates clients",
        )
    return host


def parse_aliases(pairs: Sequence[str]) -> dict[str, str]:
    """Return the name of a pipeline by its alias.

    Raises:
        UserError: A text is not ALIAS=NAME.
    """
    from triptych.interface.cli.rows import parse_pairs

    example = "text-embedding-3-small=minilm"
    return parse_pairs("--alias", pairs, lambda name: name or None, "ALIAS=NAME", example)


class GatewayProcess:
    """A gateway in a process of its own, beside the server of `serve`.

    Args:
        port: Port to listen on; None for no gateway.
        host: Address to listen on.
        repository: Repository of the server.
        models: Pipelines of the server; empty for all.
        options: Options of the gateway.

    Raises:
        UserError: The port is busy.
    """

    def __init__(
        self,
        port: int | None,
        host: str,
        repository: Path,
        models: Sequence[str],
        options: GatewayOptions,
    ) -> None:
        self._reserved = ExitStack()  # until the gateway starts
        if port is not None:
            from triptych.serving.ports import reserve_ports

            reserving = reserve_ports(host, {"--http-api": port})
            port = self._reserved.enter_context(reserving)["--http-api"]
        self._port = port
        self._address = f"http{'s' if options.tls_certificate else ''}://{host}:{port}"
        self._words = [
            *(sys.executable, "-m", "triptych.interface.cli", "gateway", *models),
            *("--repository", str(repository), "--host", host, "--port", str(port)),
            *options.words(),
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
            self._reserved.close()
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
