"""How the examples reach services that ask for TLS and a token."""

from __future__ import annotations

import argparse
import ssl
import urllib.request
from pathlib import Path

from sluice.runtime.security import SecurityConfig, TlsConfig


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Let a program be told what `security:` of `sluice up` says."""
    parser.add_argument("--token-file", type=Path, help="holds the bearer token")
    parser.add_argument("--ca", type=Path, help="PEM of the CA whose services are trusted")
    parser.add_argument("--cert", type=Path, help="PEM of our own certificate, for mTLS")
    parser.add_argument("--key", type=Path, help="PEM of its key")


def security_of(flags: argparse.Namespace) -> SecurityConfig:
    """Return what the flags say; without any, neither TLS nor a token."""
    files = {name: getattr(flags, name) for name in ("ca", "cert", "key")}
    tls = TlsConfig(**files) if any(files.values()) else None
    return SecurityConfig(tls=tls, token_file=flags.token_file)


def read_metrics_page(address: str, security: SecurityConfig) -> str:
    """Read `/metrics` of a service, which asks for the same as its gRPC port."""
    context, tls, token = None, security.tls, security.token()
    if tls is not None:
        context = ssl.create_default_context(cafile=tls.ca)
        if tls.cert is not None:
            context.load_cert_chain(tls.cert, tls.key)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    scheme = "http" if tls is None else "https"
    request = urllib.request.Request(f"{scheme}://{address}/metrics", headers=headers)
    with urllib.request.urlopen(request, timeout=10, context=context) as page:
        text: str = page.read().decode()
    return text
