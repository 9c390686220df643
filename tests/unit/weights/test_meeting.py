"""The place where a sender of weights meets its receivers."""

from __future__ import annotations

import asyncio
import datetime
import gc

import pytest
import torch.distributed as dist

from sluice.address import split_address
from sluice.runtime.wire import check_address
from sluice.weights.transfer.group import Meeting, Receiver
from sluice.weights.transfer.plan import Membership


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]"])
def test_a_meeting_is_found_by_its_address(host: str) -> None:
    """A host may be a name, and one of IPv6 only."""
    meeting = Meeting(host, 2, 60)
    check_address(meeting.address, "address")
    found, port = split_address(meeting.address)
    assert found == host.strip("[]")
    wait = datetime.timedelta(seconds=60)
    where = (found, int(port), 2)
    store = dist.TCPStore(*where, is_master=False, timeout=wait, wait_for_workers=False)
    store.set("here", "yes")
    assert store.get("here") == b"yes"
    meeting.close()


async def test_who_gives_up_a_meeting_leaves_no_error_behind() -> None:
    """Its thread goes on until nobody came, and that nobody asks for any more."""
    unheard: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
    receiver = Receiver()
    nobody = Membership(address="127.0.0.1:9", group="g", rank=1, world_size=2, backend="gloo")
    joining = asyncio.create_task(receiver.join([nobody], 0.5))
    await asyncio.sleep(0)  # the thread has it
    joining.cancel()
    await asyncio.gather(joining, return_exceptions=True)
    await asyncio.to_thread(receiver._thread.shutdown, wait=True)
    await asyncio.sleep(0)
    del joining
    gc.collect()
    assert unheard == []
    receiver._closed.cancel()
