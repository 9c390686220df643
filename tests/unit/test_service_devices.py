"""How services of one machine share its accelerators."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from sluice import platform
from sluice.supervise import ServiceEntry

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
