"""Certificates and tokens of an authority that exists for a test, and load meanwhile."""

import json
import ssl
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jwt
from jwt.algorithms import RSAAlgorithm

from processes import eventually, repeated


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


def sign_token(folder: Path, **claims: Any) -> str:
    """Return a token with a signature of `folder`/rsa.key, which is made first with its JWKS."""
    file = folder / "rsa.key"
    if not file.exists():
        subprocess.run(["openssl", "genrsa", "-out", file, "2048"], check=True, capture_output=True)
        private: Any = RSAAlgorithm(RSAAlgorithm.SHA256).prepare_key(file.read_bytes())
        key = RSAAlgorithm.to_jwk(private.public_key(), as_dict=True)
        (folder / "jwks.json").write_text(json.dumps({"keys": [{**key, "kid": "1"}]}))
    claims = {"exp": int(time.time()) + 600, **claims}
    return jwt.encode(claims, file.read_bytes(), algorithm="RS256", headers={"kid": "1"})


@contextmanager
def jwks_server(folder: Path, *, has_tls: bool = False) -> Iterator[tuple[str, list[str]]]:
    """Yield the URL of `folder`/jwks.json, and the paths that were asked for."""
    asked: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            asked.append(self.path)

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder)) as server:
        if has_tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(folder / "server.pem", folder / "server.key")
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http{'s' * has_tls}://127.0.0.1:{server.server_port}/jwks.json", asked
        server.shutdown()


def wrong_tokens(folder: Path, other: Path, claims: dict[str, Any]) -> dict[str, str]:
    """Return tokens like that of `claims` that are not valid; `other` is for another key."""
    token = sign_token(folder, **claims)
    return {
        "another key": sign_token(other, **claims),
        "another audience": sign_token(folder, **{**claims, "aud": "other"}),
        "another issuer": sign_token(folder, **{**claims, "iss": "https://other.example"}),
        "expired": sign_token(folder, **claims, exp=int(time.time()) - 600),
        "no signature": token.rpartition(".")[0] + ".",
        "changed": token.replace(".", ".e", 1),
        "not for this header": ".".join(["e30", *token.split(".")[1:]]),
    }
