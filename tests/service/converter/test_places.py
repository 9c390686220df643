"""Conversions in places: one that does not stop at once keeps its own."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from google.longrunning import operations_pb2

from services.converter.servicer import ConverterConfig, ConverterServicer
from sluice.api.converter.v1 import converter_service_pb2 as pb
from sluice.runtime.server import Server
from sluice.weights.convert import placed
from sluice.weights.convert.work import Control
from sluice.weights.errors import CancelledConversionError
from tests.patience import PATIENCE


class Conversions:
    """In place of `convert`: the first goes on until it is let go, then sees that it is stopped."""

    def __init__(self, root: Path) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self._root = root
        (root / "source").mkdir()
        config = ConverterConfig(roots=[root])
        self.server = Server(config.server)
        self.servicer = ConverterServicer(config, self.server)

    def convert(self, source: Path, target: Path, options: Any, control: Control) -> None:
        self.begun.set()
        assert self.go_on.wait(PATIENCE)
        raise CancelledConversionError(f"{target.name} was stopped")

    async def start(self, name: str) -> str:
        request = pb.ConvertCheckpointRequest(
            request_id=name,
            source=str(self._root / "source"),
            target=str(self._root / name),
            target_format=pb.FORMAT_HF,
        )
        return str((await self.servicer.ConvertCheckpoint(request, None)).name)

    async def cancel(self, name: str) -> None:
        request = operations_pb2.CancelOperationRequest(name=name)
        await self.server.operations.CancelOperation(request, None)

    async def states(self) -> list[int]:
        found = await self.servicer.ListConversions(pb.ListConversionsRequest(), None)
        return [item.metadata.state for item in found.conversions]

    async def until(self, expected: list[int]) -> None:
        async with asyncio.timeout(PATIENCE):
            while await self.states() != expected:
                await asyncio.sleep(0.01)


@pytest_asyncio.fixture
async def conversions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Conversions]:
    made = Conversions(tmp_path)
    monkeypatch.setattr(placed, "convert", made.convert)
    yield made
    made.go_on.set()
    await made.server.operations.close()
    made.servicer.close()


QUEUED, RUNNING = pb.CONVERSION_STATE_QUEUED, pb.CONVERSION_STATE_RUNNING
CANCELLED, FAILED = pb.CONVERSION_STATE_CANCELLED, pb.CONVERSION_STATE_FAILED


async def test_two_cancels_free_no_place_while_the_thread_goes_on(
    conversions: Conversions,
) -> None:
    """Else more would run than are to, and the next one on this target find it locked."""
    unheard: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unheard.append(context))
    first = await conversions.start("first")
    await conversions.start("second")
    await conversions.until([RUNNING, QUEUED])
    assert await asyncio.to_thread(conversions.begun.wait, PATIENCE)
    for _ in range(2):
        await conversions.cancel(first)
        for _ in range(10):  # the task comes to what it waits for next
            await asyncio.sleep(0)
    assert await conversions.states() == [CANCELLED, QUEUED]
    conversions.go_on.set()
    await conversions.until([CANCELLED, FAILED])
    gc.collect()
    assert unheard == [], "what the first one raised concerns nobody"
