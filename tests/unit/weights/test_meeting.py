"""The place where a sender of weights meets its receivers."""

from __future__ import annotations

import datetime

import pytest
import torch.distributed as dist

from sluice.weights.transfer.group import Meeting


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_a_meeting_is_found_by_its_address(host: str) -> None:
    """A host may be a name, and one of IPv6 only."""
    meeting = Meeting(host, 2, 60)
    found, _, port = meeting.address.rpartition(":")
    assert found == host
    wait = datetime.timedelta(seconds=60)
    where = (found, int(port), 2)
    store = dist.TCPStore(*where, is_master=False, timeout=wait, wait_for_workers=False)
    store.set("here", "yes")
    assert store.get("here") == b"yes"
    meeting.close()
