"""TLS, mTLS and the bearer token, for servers and for clients."""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc

from sluice.config import Config, ConfigError


class TlsConfig(Config):
    """PEM files. With `ca` a server asks clients for certificates (mTLS) and a client trusts it."""

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None


class SecurityConfig(Config):
    """How a process proves itself and whom it trusts; the same for its server and clients."""

    tls: TlsConfig | None = None
    token_file: Path | None = None

    def token(self) -> str | None:
        """The bearer token. Raises ConfigError when the file is missing or empty."""
        if self.token_file is None:
            return None
        try:
            token = self.token_file.read_text().strip()
        except OSError as error:
            raise ConfigError(f"security.token_file: {error}") from None
        if not token:
            raise ConfigError(f"security.token_file: {self.token_file} is empty")
        return token


def _read(path: Path | None, name: str) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        raise ConfigError(f"security.tls.{name}: {error}") from None


def server_credentials(tls: TlsConfig) -> grpc.ServerCredentials:
    """Credentials of a server; it verifies clients when a `ca` is given."""
    key, cert, ca = _read(tls.key, "key"), _read(tls.cert, "cert"), _read(tls.ca, "ca")
    if key is None or cert is None:
        raise ConfigError("security.tls: a server needs cert and key")
    return grpc.ssl_server_credentials([(key, cert)], ca, require_client_auth=ca is not None)


def channel_credentials(tls: TlsConfig) -> grpc.ChannelCredentials:
    """Credentials of a client; it shows a certificate when it has one."""
    return grpc.ssl_channel_credentials(
        root_certificates=_read(tls.ca, "ca"),
        private_key=_read(tls.key, "key"),
        certificate_chain=_read(tls.cert, "cert"),
    )


def http_context(tls: TlsConfig) -> ssl.SSLContext:
    """The same for the metrics port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if tls.cert is None or tls.key is None:
        raise ConfigError("security.tls: a server needs cert and key")
    context.load_cert_chain(tls.cert, tls.key)
    if tls.ca is not None:
        context.load_verify_locations(tls.ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context
