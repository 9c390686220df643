"""How a command ends: its exit code, and a line for each refusal."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Coroutine
from typing import Any

import grpc
import uvloop

from sluice import logs
from sluice.client import RemoteError
from sluice.config import ConfigError
from sluice.convert_command import CheckpointError
from sluice.durable import DirectoryError
from sluice.finding import UnfitError
from sluice.loop.evaluation import EvaluationError
from sluice.loop.fleet import NoEngineError
from sluice.loop.mixture import ScheduleError
from sluice.loop.run_directory import RunDirectoryError
from sluice.loop.training import MismatchError, TrainerBrokenError, TrainerLostError
from sluice.loop.workers import NoWorkerError, RolloutFailedError
from sluice.output import OutputError
from sluice.platform import PlatformError
from sluice.run_commands import UnansweredError
from sluice.runtime.errors import text_of
from sluice.runtime.processes import ending_signals
from sluice.supervise import ServiceDiedError

_EXPECTED = (
    CheckpointError,
    ConfigError,
    DirectoryError,
    EvaluationError,
    MismatchError,
    NoEngineError,
    NoWorkerError,
    OutputError,
    PlatformError,
    RemoteError,
    RolloutFailedError,
    RunDirectoryError,
    ScheduleError,
    ServiceDiedError,
    TrainerBrokenError,
    TrainerLostError,
    UnansweredError,
    UnfitError,
)


def exit_code(work: Coroutine[Any, Any, None]) -> int:
    """Run to the end: 0, 2 with one line a refusal on stderr, or 128 and the number of a signal."""
    code, received = 0, list[int]()
    try:
        uvloop.run(_ended_by_signals(work, received))
    except* _EXPECTED as errors:
        for error in _flatten(errors):
            refuse(f"{text_of(error)}{_advice(error)}")
        code = 2
    except* KeyboardInterrupt:
        code = 130
    except* asyncio.CancelledError:
        code = 128 + (received[0] if received else signal.SIGTERM)
    return code


async def _ended_by_signals(work: Coroutine[Any, Any, None], received: list[int]) -> None:
    """Every signal that ends cancels `work`, which ends what runs in the background in order."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None

    def end(number: int) -> None:
        received.append(number)
        task.cancel()

    for number in ending_signals():
        loop.add_signal_handler(number, end, number)
    await work


def refuse(text: str) -> None:
    """Say it on stderr, where what others sent does no harm."""
    print(logs.printable_lines(f"sluice: {text}"), file=sys.stderr)


def _advice(error: BaseException) -> str:
    """What to look at when nobody answered at all; a service's own refusals say it themselves."""
    if isinstance(error, RemoteError) and not error.reason:
        if error.code is grpc.StatusCode.UNAVAILABLE:
            return " (is the service up, at this address, and with TLS if this side has it?)"
        if error.code is grpc.StatusCode.UNIMPLEMENTED:
            return " (another service listens there, or one of another version)"
    return ""


def _flatten(group: BaseExceptionGroup) -> list[BaseException]:
    flat: list[BaseException] = []
    for error in group.exceptions:
        flat += _flatten(error) if isinstance(error, BaseExceptionGroup) else [error]
    return flat
