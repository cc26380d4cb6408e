"""Certificate of a server: its files and their check, for the gateway and Envoy."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from triptych.base.errors import UserError


@dataclass(frozen=True)
class ServerTls:
    """Certificate of a server.

    Attributes:
        certificate: PEM file of the certificate and its chain.
        key: PEM file of its private key.
        client_ca: PEM file of the authorities of client certificates, which are then required.
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None

    @property
    def paths(self) -> list[Path]:
        """All files."""
        return [self.certificate, self.key, *([self.client_ca] if self.client_ca else ())]

    def context(self) -> ssl.SSLContext:
        """Return a context for new connections.

        Raises:
            UserError: A file cannot be read, or certificate and key do not fit.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(self.certificate, self.key)
            if self.client_ca is not None:
                context.load_verify_locations(self.client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except OSError as error:  # ssl.SSLError is one
            raise UserError(
                "--tls-certificate",
                "must be a PEM file, with its key in --tls-key",
                given=f"{self.certificate} and {self.key} ({error.strerror or error})",
                remedy="Check the paths, and that both belong together",
            ) from error
        return context
