"""How long a process says that it has waited."""

import time
import weakref

from prometheus_client import REGISTRY

from sluice.api.common.v1 import wait_service_pb2 as pb
from sluice.runtime import waits as module
from sluice.runtime.waits import Waits, age_of
from sluice.runtime.wire import seconds_of


async def test_a_clock_that_is_set_back_changes_no_age_and_no_order(monkeypatch):
    monkeypatch.setattr(module, "_listed", weakref.WeakSet())  # not what other tests left
    waits, now = Waits(), time.time()
    with waits.waiting("the first"):
        monkeypatch.setattr(time, "time", lambda: now - 3600)
        with waits.waiting("the second"):
            oldest = REGISTRY.get_sample_value("sluice_oldest_wait_seconds")
            listed = await waits.ListWaits(pb.ListWaitsRequest(), None)
    assert oldest is not None and 0 <= oldest < 60
    assert [wait.what for wait in listed.waits] == ["the first", "the second"]
    assert all(0 <= age_of(wait) < 60 for wait in listed.waits)
    assert all(now - 3660 < seconds_of(wait.start_time) <= now - 3600 for wait in listed.waits)


async def test_an_age_is_that_of_who_waits_though_the_reader_s_clock_differs(monkeypatch):
    waits, now = Waits(), time.time()
    with waits.waiting("the other host"):
        (listed,) = (await waits.ListWaits(pb.ListWaitsRequest(), None)).waits
    monkeypatch.setattr(time, "time", lambda: now + 600)
    assert 0 <= age_of(listed) < 60
    listed.ClearField("age")  # as servers of an earlier release answer
    assert age_of(listed) > 540


async def test_a_wait_that_is_ended_twice_is_gone_and_others_stay():
    """An error in there, a callback of grpc's, would take the place of the call's own."""
    waits = Waits()
    call, other = waits.begin("TrainerService.UploadBatch"), waits.begin("a step")
    waits.end(call)
    waits.end(call)
    listed = (await waits.ListWaits(pb.ListWaitsRequest(), None)).waits
    assert [wait.what for wait in listed] == [other.what]
