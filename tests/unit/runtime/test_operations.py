"""Operations: each is listed once, whatever ends meanwhile; how many are kept, and of what."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
import weakref
from collections.abc import AsyncIterator

import pytest
from google.longrunning import operations_pb2 as pb
from google.protobuf import empty_pb2, wrappers_pb2

from sluice.runtime.errors import InvalidFieldError, QueueFullError
from sluice.runtime.operations import Operations
from tests.patience import PATIENCE

NUMBER = 25
DONE = pb.ListOperationsRequest(filter="done=true")


class Run:
    """Operations that end when they are told to."""

    def __init__(self, **limits: float) -> None:
        self.operations = Operations(**limits)
        self._ends: list[asyncio.Event] = []
        self.names: list[str] = []

    def start(self) -> None:
        end = asyncio.Event()
        self._ends.append(end)

        async def run() -> empty_pb2.Empty:
            await end.wait()
            return wrappers_pb2.BytesValue(value=bytes(1000))

        started = self.operations.start("work", empty_pb2.Empty(), run, empty_pb2.Empty)
        self.names.append(started.name)

    async def end(self, index: int) -> None:
        self._ends[index].set()
        name = self.names[index]
        while not (
            await self.operations.GetOperation(pb.GetOperationRequest(name=name), None)
        ).done:
            await asyncio.sleep(0)

    async def page(self, **fields: object) -> pb.ListOperationsResponse:
        return await self.operations.ListOperations(pb.ListOperationsRequest(**fields), None)


@pytest.fixture
async def run() -> AsyncIterator[Run]:
    run = Run()
    for _ in range(NUMBER):
        run.start()
    yield run
    await run.operations.close()


@pytest.mark.parametrize("size", [1, 7, NUMBER, 1 << 30])
async def test_a_walk_over_pages_meets_each_once(run: Run, size: int) -> None:
    met: list[str] = []
    token, pages = "", 0
    while True:
        answer = await run.page(page_size=size, page_token=token)
        met += [operation.name for operation in answer.operations]
        assert len(answer.operations) <= size
        await run.end((pages * 11) % NUMBER)  # those that end are listed before the others else
        token, pages = answer.next_page_token, pages + 1
        if not token:
            break
        if pages == 1:
            run.start()  # a late one comes last
    assert met == run.names[: len(met)]
    assert len(met) >= NUMBER


async def test_one_that_is_deleted_takes_none_of_the_others_along(run: Run) -> None:
    first = await run.page(page_size=5)
    await run.end(4)
    await run.operations.DeleteOperation(pb.DeleteOperationRequest(name=run.names[4]), None)
    second = await run.page(page_size=5, page_token=first.next_page_token)
    assert [operation.name for operation in second.operations] == run.names[5:10]


async def test_the_filter_says_which(run: Run) -> None:
    for index in (3, 8):
        await run.end(index)
    ended = await run.page(filter="done=true")
    assert [operation.name for operation in ended.operations] == [run.names[3], run.names[8]]
    running = await run.page(filter="done = false", name="operations")
    assert len(running.operations) == NUMBER - 2


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("page_size", [-1, -(1 << 31)]),
        ("page_token", ["x", "1", "../", "\x00", "9" * 5000, "deadbeef..1"]),
        ("filter", ["done", "name=a", "\x00", "x" * 5000]),
        ("name", ["other", "operations/", "../"]),
    ],
)
async def test_what_cannot_be_meant_is_refused(run: Run, field: str, values: list) -> None:
    for value in values:
        with pytest.raises(InvalidFieldError) as refused:
            await run.page(**{field: value})
        assert refused.value.metadata["field"] == field


async def test_a_token_is_of_one_process_and_one_filter(run: Run) -> None:
    token = (await run.page(page_size=3)).next_page_token
    with pytest.raises(InvalidFieldError, match="page_token"):
        await run.page(page_token=token, filter="done=false")
    other = Run()
    for _ in range(NUMBER):
        other.start()
    with pytest.raises(InvalidFieldError, match="page_token"):
        await other.page(page_token=token)
    await other.operations.close()


class NoDeadline:
    """The context of a call whose caller waits for as long as it takes."""

    def time_remaining(self) -> None:
        return None


async def test_a_wait_of_a_year_is_answered_by_what_is_known() -> None:
    run = Run(longest_wait=0.01)
    run.start()
    year = pb.WaitOperationRequest(name=run.names[0], timeout={"seconds": 365 * 86_400})
    async with asyncio.timeout(PATIENCE):
        answer = await run.operations.WaitOperation(year, NoDeadline())
    assert (answer.name, answer.done) == (run.names[0], False)
    await run.operations.close()


async def test_an_end_is_waited_for_as_long_as_is_said() -> None:
    run = Run()
    run.start()
    (name,) = run.names
    await run.operations.wait(name, 0.01)
    assert not run.operations.describe(name).done
    waiting = asyncio.create_task(run.operations.wait(name, PATIENCE))
    await run.end(0)
    await waiting
    assert run.operations.describe(name).done
    await run.operations.wait(name, 0.0)
    await run.operations.close()


async def test_of_those_that_have_ended_so_many_bytes_are_kept() -> None:
    run = Run(max_bytes=3500)
    for index in range(5):
        run.start()
        await run.end(index)
    kept = await run.page()
    assert [operation.name for operation in kept.operations] == run.names[2:]
    assert all(operation.response.ByteSize() > 1000 for operation in kept.operations)


async def test_of_an_ended_operation_what_came_of_it_is_kept_alone(run: Run) -> None:
    class Caller:
        """What the context of a call holds, such as its request."""

    held = contextvars.ContextVar[Caller]("held")

    async def call() -> weakref.ref[Caller]:
        caller = Caller()
        held.set(caller)
        run.start()
        await run.end(NUMBER)
        return weakref.ref(caller)

    caller = await asyncio.create_task(call())
    await asyncio.sleep(0)  # this task was woken by that one
    gc.collect()
    assert caller() is None
    answer = await run.page(filter="done=true")
    assert [operation.name for operation in answer.operations] == [run.names[NUMBER]]


async def test_beyond_so_many_that_run_none_is_begun_until_one_has_ended() -> None:
    run = Run(max_running=2)
    run.start()
    run.start()
    with pytest.raises(QueueFullError):
        run.start()
    await run.end(0)
    run.start()
    await run.operations.close()


async def test_what_a_caller_is_told_is_a_line_of_the_log_and_a_fault_a_trace(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As of calls: ranks that are killed under a publication are no fault of the service's."""
    caplog.set_level(logging.INFO)
    operations = Operations()
    for error in (QueueFullError("no room", limit=1, kind="ranks"), KeyError("a fault")):

        async def run(error: Exception = error) -> empty_pb2.Empty:
            raise error

        name = operations.start("work", empty_pb2.Empty(), run, empty_pb2.Empty).name
        while not operations.describe(name).done:
            await asyncio.sleep(0)
    told, fault = caplog.records
    assert (told.levelno, told.exc_info) == (logging.INFO, None)
    assert told.getMessage().endswith("QUEUE_FULL no room")
    assert fault.levelno == logging.ERROR and fault.exc_info


async def test_an_error_that_ends_several_lets_each_clean_up_and_holds_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Such as the loss of the ranks, which many wait for."""
    caplog.set_level(logging.ERROR)  # pytest keeps what is logged, with frames in it
    lost, cleaned = asyncio.get_running_loop().create_future(), asyncio.Event()
    operations = Operations()
    seen: list[weakref.ref[Held]] = []

    class Held:
        """What a frame has."""

    async def clean() -> empty_pb2.Empty:
        held = Held()
        seen.append(weakref.ref(held))
        try:
            await lost
        finally:
            await cleaned.wait()
        return empty_pb2.Empty()

    async def end() -> empty_pb2.Empty:
        held = Held()
        seen.append(weakref.ref(held))
        await lost
        return empty_pb2.Empty()

    _, name = [
        operations.start("work", empty_pb2.Empty(), run, empty_pb2.Empty).name
        for run in (end, clean)
    ]
    await asyncio.sleep(0)
    lost.set_exception(QueueFullError("lost", limit=1, kind="ranks"))
    while len((await operations.ListOperations(DONE, None)).operations) < 1:
        await asyncio.sleep(0)
    gc.collect()
    assert [one() is None for one in seen] == [True, False]
    cleaned.set()
    async with asyncio.timeout(PATIENCE):
        while not operations.describe(name).done:
            await asyncio.sleep(0)
    assert "lost" in operations.describe(name).error.message
    gc.collect()
    assert seen[1]() is None
