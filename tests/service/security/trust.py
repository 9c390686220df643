"""Credentials: the right ones, and one set for each way of being wrong."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

from sluice.runtime.security import SecurityConfig, TlsConfig
from tools.make_certificates import Authority

PASSED = datetime.timedelta(days=-1)


@dataclass(frozen=True)
class Trust:
    """`right` is what the servers and their clients have.

    The callers of `strangers` fail in the handshake, those of `tokenless` after it.
    """

    authority: Authority
    directory: Path
    right: SecurityConfig
    strangers: dict[str, SecurityConfig]
    tokenless: dict[str, SecurityConfig]

    def issue(self, name: str, hosts: tuple[str, ...]) -> SecurityConfig:
        """The right ones, with a certificate for other hosts."""
        cert, key = self.authority.issue(self.directory, name, hosts)
        return with_tls(self.right, TlsConfig(cert=cert, key=key, ca=self.directory / "ca.pem"))


def with_tls(security: SecurityConfig, tls: TlsConfig | None) -> SecurityConfig:
    return security.model_copy(update={"tls": tls})


def create_trust(directory: Path) -> Trust:
    ours, theirs = Authority(), Authority("another authority")
    ca, other_ca = ours.write(directory / "ca.pem"), theirs.write(directory / "other-ca.pem")
    cert, key = ours.issue(directory, "service")
    other_cert, other_key = theirs.issue(directory, "stranger")
    old_cert, old_key = ours.issue(directory, "expired", valid=PASSED)
    for name, text in (("token", "open sesame\n"), ("wrong-token", "open barley\n")):
        (directory / name).write_text(text)
    tls = TlsConfig(cert=cert, key=key, ca=ca)
    right = SecurityConfig(tls=tls, token_file=directory / "token")
    wrong_token = right.model_copy(update={"token_file": directory / "wrong-token"})
    return Trust(
        authority=ours,
        directory=directory,
        right=right,
        strangers={
            "no TLS": with_tls(right, None),
            "no certificate": with_tls(right, TlsConfig(ca=ca)),
            "another CA's certificate": with_tls(
                right, TlsConfig(cert=other_cert, key=other_key, ca=ca)
            ),
            "expired certificate": with_tls(right, TlsConfig(cert=old_cert, key=old_key, ca=ca)),
            "trusts another CA": with_tls(right, TlsConfig(cert=cert, key=key, ca=other_ca)),
        },
        tokenless={
            "no token": right.model_copy(update={"token_file": None}),
            "wrong token": wrong_token,
        },
    )
