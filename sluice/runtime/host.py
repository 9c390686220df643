"""What a process needs of its host: room on the disks it writes, certificates that are valid."""

from __future__ import annotations

import binascii
import os
import re
import ssl
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import Metric

from sluice.config import ConfigError
from sluice.runtime.metrics import Reading, StateCollector
from sluice.runtime.security import TlsConfig

DISK_FREE = Reading(
    "sluice_disk_free_bytes",
    "Room for this process where it writes: store, weights, cache, run or roots.",
    ("use",),
)
DISK_SIZE = Reading("sluice_disk_size_bytes", "Size of the file system it is on.", ("use",))
CERTIFICATE_END = Reading(
    "sluice_certificate_end_timestamp_seconds",
    "When the certificate that this process serves, or one of the authorities it trusts, ends.",
    ("use",),
)

ASK_SECONDS = 2.0  # a file system that answers later (a network one that hangs) is left out
_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_SEQUENCE, _VERSION, _UTC_TIME, _TIME = 0x30, 0xA0, 0x17, 0x18  # tags of DER


class HostCollector(StateCollector):
    """Reads room on disks whenever metrics are scraped; certificates are those of the start."""

    def __init__(
        self,
        disks: Mapping[str, Sequence[Path]],
        tls: TlsConfig | None,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        """`disks` are directories by use; of several, the one with the least room is shown."""
        self._disks = disks
        self._ends = {} if tls is None else certificate_ends(tls)
        self._room: dict[str, tuple[int, int]] = {}
        self._asking: threading.Thread | None = None
        self._lock = threading.Lock()  # scrapes come together
        super().__init__(registry)

    def collect(self) -> Iterator[Metric]:
        free, size, ends = DISK_FREE.family(), DISK_SIZE.family(), CERTIFICATE_END.family()
        for use, (available, total) in self._ask().items():
            free.add_metric((use,), available)
            size.add_metric((use,), total)
        for use, end in self._ends.items():
            ends.add_metric((use,), end)
        yield from (family for family in (free, size, ends) if family.samples)

    def _ask(self) -> dict[str, tuple[int, int]]:
        """Room by use; without those of a file system that does not answer in time."""
        if not self._disks:
            return {}
        with self._lock:
            if self._asking is None or not self._asking.is_alive():  # one waits at most
                self._room = {}
                self._asking = threading.Thread(
                    target=self._read_all, args=(self._room,), name="disks", daemon=True
                )
                self._asking.start()
            asking, room = self._asking, self._room
        asking.join(ASK_SECONDS)
        return dict(room)

    def _read_all(self, room: dict[str, tuple[int, int]]) -> None:
        for use, paths in self._disks.items():
            found = [each for path in paths if (each := disk_room(path)) is not None]
            if found:
                room[use] = min(found)


def disk_room(path: Path) -> tuple[int, int] | None:
    """Bytes that a process without privilege may still write, and all bytes, where `path` will be.

    None where the file system tells neither.
    """
    for place in (path, *path.absolute().parents):
        try:
            found = os.statvfs(place)
        except FileNotFoundError:
            continue
        except OSError:
            return None
        size = found.f_blocks * found.f_frsize
        return (found.f_bavail * found.f_frsize, size) if size else None
    return None


def certificate_ends(tls: TlsConfig) -> dict[str, float]:
    """When the files of `cert` and `ca` end: of each its earliest end, in seconds since 1970.

    Raises ConfigError for a file without a certificate.
    """
    found = {}
    for use, path in (("cert", tls.cert), ("ca", tls.ca)):
        if path is None:
            continue
        try:
            texts = _PEM.findall(path.read_bytes())
            found[use] = min(_end_of(ssl.PEM_cert_to_DER_cert(text.decode())) for text in texts)
        except (OSError, ValueError, IndexError, binascii.Error) as error:
            raise ConfigError(f"security.tls.{use}: {path} holds no certificate: {error}") from None
    return found


def _end_of(der: bytes) -> float:
    """The `notAfter` of a certificate; https://www.rfc-editor.org/rfc/rfc5280#section-4.1.

    Raises ValueError and IndexError for what is none.
    """
    _, certificate, _ = _element(der)
    _, rest, _ = _element(certificate)
    tag, _, after = _element(rest)
    if tag == _VERSION:  # which certificates of the first version leave out
        rest = after
    for _ in range(3):  # serial number, algorithm, issuer
        _, _, rest = _element(rest)
    tag, validity, _ = _element(rest)
    if tag != _SEQUENCE:
        raise ValueError("no validity where it should be")
    _, _, end = _element(validity)
    tag, text, _ = _element(end)
    form = {_UTC_TIME: "%y%m%d%H%M%SZ", _TIME: "%Y%m%d%H%M%SZ"}.get(tag)
    if form is None:
        raise ValueError("its end is no time")
    when = datetime.strptime(text.decode(), form)
    if tag == _UTC_TIME and when.year >= 2050:  # two digits are of 1950 to 2049
        when = when.replace(year=when.year - 100)
    return when.replace(tzinfo=UTC).timestamp()


def _element(der: bytes) -> tuple[int, bytes, bytes]:
    """The first element of DER: its tag, what is in it, and what comes after it."""
    length, start = der[1], 2
    if length & 0x80:
        start += length & 0x7F
        length = int.from_bytes(der[2:start], "big")
    if len(der) < start + length:
        raise ValueError("cut off")
    return der[0], der[start : start + length], der[start + length :]
