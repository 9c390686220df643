"""A private certificate authority and one certificate per process, to try TLS out.

    python tools/make_certificates.py DIRECTORY NAME [NAME ...]

writes ca.pem, and NAME.pem with NAME.key for each name: valid for NAME, localhost and 127.0.0.1,
as server and as client, for 30 days. The authority's own key is not kept.
"""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LOCAL = ("localhost", "127.0.0.1")
VALID = datetime.timedelta(days=30)


@dataclass(frozen=True)
class Authority:
    """Signs certificates."""

    name: str = "sluice trial authority"
    key: ec.EllipticCurvePrivateKey = field(
        default_factory=lambda: ec.generate_private_key(ec.SECP256R1())
    )

    def write(self, path: Path) -> Path:
        """Write the authority's own certificate."""
        public = self.key.public_key()
        certificate = (
            _builder(self.name, self.name, public, VALID)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .sign(self.key, hashes.SHA256())
        )
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return path

    def issue(
        self,
        directory: Path,
        name: str,
        hosts: Sequence[str] | None = None,
        valid: datetime.timedelta = VALID,
    ) -> tuple[Path, Path]:
        """Write `name`.pem and `name`.key for `hosts`; a negative `valid` has passed already."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [_general_name(host) for host in ((name, *LOCAL) if hosts is None else hosts)]
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        certificate = (
            _builder(name, self.name, key.public_key(), valid)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(issuer, critical=False)
            .sign(self.key, hashes.SHA256())
        )
        cert_path, key_path = directory / f"{name}.pem", directory / f"{name}.key"
        cert_path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        key_path.touch(mode=0o600)
        key_path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return cert_path, key_path


def _builder(
    subject: str, issuer: str, key: ec.EllipticCurvePublicKey, valid: datetime.timedelta
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - abs(valid) - datetime.timedelta(hours=1))  # clocks differ
        .not_valid_after(now + valid)
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("directory", type=Path)
    parser.add_argument("names", nargs="+", metavar="NAME", help="host name of a process")
    flags = parser.parse_args()
    flags.directory.mkdir(parents=True, exist_ok=True)
    authority = Authority()
    authority.write(flags.directory / "ca.pem")
    for name in flags.names:
        authority.issue(flags.directory, name)
    print(f"{flags.directory}: ca.pem and {len(flags.names)} certificates")
    return 0


if __name__ == "__main__":
    sys.exit(main())
