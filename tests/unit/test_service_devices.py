"""How services of one machine share its accelerators."""

from __future__ import annotations

import math
import socket
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from sluice import platform
from sluice.config import ConfigError, parse_config
from sluice.stack import ResourcesConfig, ServiceEntry, UpConfig
from sluice.supervise import Supervisor

MASK = "ASCEND_RT_VISIBLE_DEVICES"


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_DEVICE", "npu")
    monkeypatch.delenv(MASK, raising=False)


def test_replicas_share_their_devices_evenly() -> None:
    entry = ServiceEntry(kind="rollout", replicas=2, devices=(4, 5, 6, 7))
    assert [entry.environment(replica) for replica in range(2)] == [{MASK: "4,5"}, {MASK: "6,7"}]


def test_without_devices_a_service_sees_what_this_process_sees() -> None:
    assert ServiceEntry(kind="trainer").environment(0) == {}


def test_devices_count_among_those_visible_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MASK, "2,3")
    assert ServiceEntry(kind="trainer", devices=(1,)).environment(0) == {MASK: "3"}
    with pytest.raises(platform.PlatformError, match="shows 2 devices"):
        ServiceEntry(kind="trainer", devices=(2,)).environment(0)


def test_hidden_devices_stay_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MASK, "")
    assert platform.NPU.visible_devices([0]) == {}


def test_devices_that_cannot_be_shared_evenly_are_refused() -> None:
    with pytest.raises(ValidationError, match="3 devices cannot be shared by 2"):
        ServiceEntry(kind="rollout", replicas=2, devices=(0, 1, 2))


def supervisor(run_dir: Path, **services: dict[str, object]) -> Supervisor:
    return Supervisor(parse_config(UpConfig, {"run_dir": str(run_dir), "services": services}))


def test_resources_are_devices_of_their_own_counted_through_all_services(tmp_path: Path) -> None:
    engines = {"kind": "rollout", "replicas": 2, "resources": {"npus": 2}}
    trainer = {"kind": "trainer", "resources": {"npus": 4}}
    found = supervisor(tmp_path, engines=engines, router={"kind": "router"}, trainer=trainer)
    masks = {service.name: service.environment for service in found._services}
    assert masks == {
        "engines-0": {MASK: "0,1"},
        "engines-1": {MASK: "2,3"},
        "router": {},
        "trainer": {MASK: "4,5,6,7"},
    }


@pytest.mark.parametrize(
    ("entry", "match"),
    [
        ({"resources": {"cpus": 1e5}}, r"services\.a\.resources\.cpus"),
        ({"resources": {"memory_gib": 1e8}}, r"services\.a\.resources\.memory_gib"),
        ({"hosts": ["192.0.2.1"]}, r"services\.a\.hosts: 192\.0\.2\.1 is not this machine"),
        ({"hosts": ["../\0" + "x" * 5000]}, r"services\.a\.hosts"),
        ({"resources": {"npus": 1}, "devices": [0]}, "both say"),
        ({"resources": {"npus": 1, "gpus": 1}}, "one of them"),
        ({"resources": {"cpu": 1}}, r"resources\.cpu"),
        ({"strategy": "wide"}, "strategy"),
    ],
)
def test_what_this_machine_cannot_give_is_refused(
    tmp_path: Path, entry: dict[str, object], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        supervisor(tmp_path, a={"kind": "router", **entry})


def test_accelerators_are_refused_where_there_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_DEVICE", "cpu")
    with pytest.raises(ConfigError, match=r"resources\.gpus"):
        supervisor(tmp_path, a={"kind": "trainer", "resources": {"gpus": 1}})


def test_this_machine_may_be_named(tmp_path: Path) -> None:
    hosts = ["127.0.0.1", socket.gethostname()]
    supervisor(tmp_path, a={"kind": "router", "hosts": hosts, "strategy": "pack"})


@pytest.mark.parametrize("name", ["cpus", "gpus", "npus", "memory_gib"])
@pytest.mark.parametrize("value", [-1, math.nan, math.inf, 1e300])
def test_no_amount_is_endless_or_below_nothing(name: str, value: float) -> None:
    with pytest.raises(ValidationError):
        ResourcesConfig.model_validate({name: value})


@pytest.mark.parametrize(
    ("services", "message"),
    [
        ({}, "at least 1 item"),
        ({"a/b": {"kind": "router"}}, "'a/b': a name has letters"),
        ({"../b": {"kind": "router"}}, r"'\.\./b': a name has letters"),
        ({"x" * 5000: {"kind": "router"}}, "a name has letters"),
        ({"a": {"kind": "router", "replicas": 10**12}}, r"services\.a\.replicas"),
        ({"a": {"kind": "router", "devices": [-1]}}, r"services\.a\.devices\.0"),
    ],
)
def test_what_cannot_be_started_is_refused_by_its_key(services: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(UpConfig, {"run_dir": "r", "services": services})
