"""Room on disks and ends of certificates, against the system's own figures and cryptography's."""

from __future__ import annotations

import datetime
import os
import shutil
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography import x509
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client import REGISTRY, CollectorRegistry

from sluice.config import ConfigError
from sluice.runtime import host
from sluice.runtime.host import HostCollector, certificate_ends, disk_room
from sluice.runtime.security import SecurityConfig, TlsConfig
from sluice.runtime.server import Server, ServerConfig
from tests.patience import PATIENCE
from tools.make_certificates import Authority

DAY = datetime.timedelta(days=1)


@pytest.fixture(autouse=True)
def disks_have_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "ASK_SECONDS", PATIENCE)


def shown(registry: CollectorRegistry, name: str, use: str) -> float | None:
    return registry.get_sample_value(name, {"use": use})


def test_room_is_what_the_system_tells_and_of_several_the_least(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    places = {"store": [tmp_path / "not" / "yet", Path("/proc")], "run": [tmp_path]}
    collector = HostCollector(places, None, registry)
    size = shutil.disk_usage(tmp_path)
    for use in ("store", "run"):
        free = shown(registry, "sluice_disk_free_bytes", use)
        assert free is not None and abs(free - size.free) < size.total / 10
        assert shown(registry, "sluice_disk_size_bytes", use) == size.total
    assert shown(registry, "sluice_certificate_end_timestamp_seconds", "cert") is None
    collector.close()
    assert not list(registry.collect())


def test_a_full_disk_shows_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(tmp_path)
    fields = list(real)
    fields[4] = 0  # f_bavail; f_bfree, which only root may use, is left
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(fields))
    assert disk_room(tmp_path) == (0, real.f_blocks * real.f_frsize)


def test_scrapes_that_come_together_all_show_it(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    HostCollector({"store": [tmp_path], "run": [tmp_path]}, None, registry)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            found = pool.map(
                lambda _: shown(registry, "sluice_disk_size_bytes", "run"), range(2000)
            )
            assert {*found} == {shutil.disk_usage(tmp_path).total}
    finally:
        sys.setswitchinterval(before)


def test_a_file_system_that_hangs_holds_no_scrape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, hangs, asked = threading.Event(), threading.Event(), []

    def hang(path: Path) -> tuple[int, int]:
        asked.append(path)
        begun.set()
        assert hangs.wait(PATIENCE)
        return (1, 2)

    monkeypatch.setattr(host, "ASK_SECONDS", 0.01)
    monkeypatch.setattr(host, "disk_room", hang)
    registry = CollectorRegistry()
    HostCollector({"store": [tmp_path]}, None, registry)
    for _ in range(5):
        assert shown(registry, "sluice_disk_free_bytes", "store") is None
    assert begun.wait(PATIENCE)
    assert len(asked) == 1  # threads do not pile up
    hangs.set()
    monkeypatch.setattr(host, "ASK_SECONDS", PATIENCE)
    assert shown(registry, "sluice_disk_free_bytes", "store") == 1


@example(days=-25_200, seconds=0)  # two digits that are of the last century
@given(st.integers(-365 * 70, 365 * 75), st.integers(0, 86399))
def test_ends_are_those_that_cryptography_reads(days: int, seconds: int) -> None:
    valid = datetime.timedelta(days=days, seconds=seconds)
    with tempfile.TemporaryDirectory() as name:
        cert, key = Authority().issue(Path(name), "a", valid=valid)
        found = certificate_ends(TlsConfig(cert=cert, key=key))
        oracle = x509.load_pem_x509_certificate(cert.read_bytes()).not_valid_after_utc
    assert found == {"cert": oracle.timestamp()}


def test_the_earliest_of_a_chain_counts(tmp_path: Path) -> None:
    authority = Authority()
    ca = authority.write(tmp_path / "ca.pem")
    long, _ = authority.issue(tmp_path, "long", valid=90 * DAY)
    short, key = authority.issue(tmp_path, "short", valid=3 * DAY)
    both = tmp_path / "both.pem"
    both.write_bytes(long.read_bytes() + b"a comment\n" + short.read_bytes())
    registry = CollectorRegistry()
    HostCollector({}, TlsConfig(cert=both, key=key, ca=ca), registry)
    end = x509.load_pem_x509_certificate(short.read_bytes()).not_valid_after_utc.timestamp()
    name = "sluice_certificate_end_timestamp_seconds"
    assert shown(registry, name, "cert") == end
    ca_end = x509.load_pem_x509_certificate(ca.read_bytes()).not_valid_after_utc.timestamp()
    assert shown(registry, name, "ca") == ca_end


@pytest.mark.parametrize("damage", ["empty", "cut", "base64", "der"])
def test_what_is_no_certificate_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    cert, key = Authority().issue(tmp_path, "a")
    text = cert.read_text()
    cert.write_text(
        {
            "empty": "",
            "cut": text[: len(text) // 2],
            "base64": text.replace("MII", "M!I", 1).replace(text[60:70], "?" * 10, 1),
            "der": "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n",
        }[damage]
    )
    with pytest.raises(ConfigError, match=r"security\.tls\.cert"):
        certificate_ends(TlsConfig(cert=cert, key=key))


async def test_a_server_shows_both_for_as_long_as_it_runs(tmp_path: Path) -> None:
    authority = Authority()
    ca = authority.write(tmp_path / "ca.pem")
    cert, key = authority.issue(tmp_path, "a")
    security = SecurityConfig(tls=TlsConfig(cert=cert, key=key, ca=ca))
    server = Server(ServerConfig(security=security, drain_seconds=0))
    server.disks["roots"] = [tmp_path]
    await server.start()
    wanted = {"sluice_disk_free_bytes": "roots", "sluice_disk_size_bytes": "roots"}
    wanted["sluice_certificate_end_timestamp_seconds"] = "cert"
    assert all(shown(REGISTRY, name, use) for name, use in wanted.items())
    await server.stop()
    assert not any(shown(REGISTRY, name, use) for name, use in wanted.items())
