"""TLS, mTLS and the bearer token, for servers and for clients."""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc
from pydantic import model_validator

from sluice.config import Config, ConfigError


class TlsConfig(Config):
    """PEM files. With `ca` a server asks clients for certificates (mTLS) and a client trusts it.

    Without `client_certificates` a server with a `ca` takes callers that show none.
    """

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None
    client_certificates: bool = True

    @model_validator(mode="after")
    def _cert_and_key_go_together(self) -> TlsConfig:
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key go together")
        return self


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


def _load(context: ssl.SSLContext, tls: TlsConfig) -> None:
    """Give a context the files. Raises ConfigError naming the one that cannot be used."""
    if tls.cert is not None and tls.key is not None:
        _read(tls.cert, "cert"), _read(tls.key, "key")
        try:
            context.load_cert_chain(tls.cert, tls.key)
        except ssl.SSLError as error:
            raise ConfigError(
                f"security.tls: {tls.cert} and {tls.key} are no certificate and its key: {error}"
            ) from None
    if tls.ca is not None:
        _read(tls.ca, "ca")
        try:
            context.load_verify_locations(tls.ca)
        except ssl.SSLError as error:
            raise ConfigError(f"security.tls.ca: {tls.ca} holds no certificate: {error}") from None


def server_credentials(tls: TlsConfig) -> grpc.ServerCredentials:
    """Credentials of a server; it verifies clients when a `ca` is given.

    Raises ConfigError for files that are missing or do not fit together.
    """
    http_context(tls)  # says which file is wrong, where grpc would only fail to open the port
    key, cert, ca = _read(tls.key, "key"), _read(tls.cert, "cert"), _read(tls.ca, "ca")
    asks = ca is not None and tls.client_certificates
    return grpc.ssl_server_credentials([(key, cert)], ca if asks else None, asks)


def channel_credentials(tls: TlsConfig) -> grpc.ChannelCredentials:
    """Credentials of a client; it shows a certificate when it has one. Raises ConfigError."""
    _load(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), tls)
    return grpc.ssl_channel_credentials(
        root_certificates=_read(tls.ca, "ca"),
        private_key=_read(tls.key, "key"),
        certificate_chain=_read(tls.cert, "cert"),
    )


def http_context(tls: TlsConfig) -> ssl.SSLContext:
    """The same for the metrics port. Raises ConfigError."""
    if tls.cert is None or tls.key is None:
        raise ConfigError("security.tls: a server needs cert and key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load(context, tls)
    if tls.ca is not None and tls.client_certificates:
        context.verify_mode = ssl.CERT_REQUIRED
    return context
