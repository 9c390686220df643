import asyncio

import pytest

from sluice.api.trainer.v1 import trainer_service_pb2 as pb
from sluice.runtime.errors import RequestIdReusedError
from sluice.runtime.idempotency import RequestLog

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
