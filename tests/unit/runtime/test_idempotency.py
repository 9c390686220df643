import asyncio
import contextvars
import gc
import weakref

import pytest

from sluice.api.trainer.v1 import trainer_service_pb2 as pb
from sluice.runtime.errors import RequestIdReusedError
from sluice.runtime.idempotency import RequestLog, RequestTable, to_its_end

REQUEST = pb.DeleteBatchRequest(batch="batches/a")


async def test_repeats_share_one_run_even_in_flight():
    log, runs, gate = RequestLog(), [], asyncio.Event()

    async def run():
        runs.append(1)
        await gate.wait()
        return len(runs)

    calls = [asyncio.create_task(log.once("a", REQUEST, run)) for _ in range(3)]
    await asyncio.sleep(0)
    calls[0].cancel()
    gate.set()
    assert await asyncio.gather(*calls[1:]) == [1, 1]
    assert await log.once("a", REQUEST, run) == 1


async def test_same_id_with_another_body_is_refused():
    log = RequestLog()

    async def run():
        return 1

    await log.once("a", REQUEST, run)
    with pytest.raises(RequestIdReusedError):
        await log.once("a", pb.DeleteBatchRequest(batch="batches/b"), run)


async def test_work_without_an_await_runs_once_too():
    log, runs = RequestLog(), []

    def fail() -> int:
        raise KeyError("not this time")

    with pytest.raises(KeyError):
        log.once_now("a", REQUEST, fail)
    for _ in range(2):
        assert log.once_now("a", REQUEST, lambda: len(runs) or runs.append(1) or 7) == 7
    assert await log.once("a", REQUEST, asyncio.Event().wait) == 7
    with pytest.raises(RequestIdReusedError):
        log.once_now("a", pb.DeleteBatchRequest(batch="batches/b"), fail)
    assert log.once_now("", REQUEST, lambda: 8) == 8


async def test_failures_are_not_remembered():
    log = RequestLog()

    async def fail():
        raise RuntimeError

    async def succeed():
        return 7

    with pytest.raises(RuntimeError):
        await log.once("a", REQUEST, fail)
    await asyncio.sleep(0)
    assert await log.once("a", REQUEST, succeed) == 7


async def test_finished_calls_beyond_capacity_are_forgotten():
    log, runs = RequestLog(capacity=2), []

    async def run():
        runs.append(1)

    for name in ("a", "b", "c", "a"):
        await log.once(name, REQUEST, run)
    assert len(runs) == 4


async def test_finished_answers_beyond_the_bytes_are_forgotten():
    log, runs = RequestLog(max_bytes=3000), []

    async def run():
        runs.append(1)
        return pb.DiscardGradientsResponse(part_ids=["x" * 1000])

    for name in ("a", "b", "c", "c", "a"):
        await log.once(name, REQUEST, run)
    log.once_now("d", REQUEST, lambda: pb.DiscardGradientsResponse(part_ids=["x" * 2900]))
    for name in ("d", "a"):
        await log.once(name, REQUEST, run)
    assert len(runs) == 5


async def test_of_a_finished_call_the_answer_alone_is_kept():
    class Caller:
        """What the context of a call holds, such as its request."""

    log, held = RequestLog(), contextvars.ContextVar[Caller]("held")

    async def succeed():
        return 7

    async def call() -> weakref.ref[Caller]:
        caller = Caller()
        held.set(caller)
        await log.once("a", REQUEST, succeed)
        return weakref.ref(caller)

    caller = await asyncio.create_task(call())
    await asyncio.sleep(0)  # this task was woken by that one
    gc.collect()
    assert caller() is None
    assert await log.once("a", REQUEST, asyncio.Event().wait) == 7


def test_a_table_forgets_what_is_done_by_weight_and_never_what_is_not():
    table: RequestTable[str] = RequestTable(5, weigh=len)
    table.add("running", "digest", "a long value that is not done")
    for name in ("aaa", "bb", "c"):
        table.add(name, "digest", name)
        table.done(name, name)
    assert [table.find(name, "digest") for name in ("aaa", "bb", "c")] == [None, "bb", "c"]
    assert table.get("running") is not None
    with pytest.raises(RequestIdReusedError):
        table.find("bb", "another digest")


def test_a_table_tells_the_value_of_an_id_from_a_later_one():
    table: RequestTable[list[int]] = RequestTable(1)
    first = table.add("a", "digest", [1])
    second = table.add("a", "digest", [1])
    table.done("a", first)
    table.discard("a", first)
    assert table.find("a", "digest") is second
    table.done("a", second)
    table.discard("a", second)
    assert list(table) == []
    for number in range(3):  # what was discarded weighs no more
        value = table.add(str(number), "digest", [number])
        table.done(str(number), value)
        assert list(table) == [[number]]


async def test_what_must_not_be_left_half_done_ends_however_often_it_is_cancelled() -> None:
    begun, may_end, done = asyncio.Event(), asyncio.Event(), list[str]()

    async def work() -> None:
        begun.set()
        await may_end.wait()
        done.append("all of it")

    caller = asyncio.create_task(to_its_end(work()))
    await begun.wait()
    for _ in range(3):
        caller.cancel()
        await asyncio.wait([caller], timeout=0)
        assert not caller.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert done == ["all of it"]


def test_what_grows_after_it_is_kept_weighs_as_it_did():
    table: RequestTable[list[int]] = RequestTable(5, weigh=len)
    grows = [1]
    table.keep("a", "digest", grows)
    grows += [1] * 4
    table.keep("b", "digest", [2] * 2)
    table.discard("a")
    table.keep("c", "digest", [3] * 3)
    assert list(table) == [[2] * 2, [3] * 3]
    table.keep("d", "digest", [4])
    assert list(table) == [[3] * 3, [4]]
