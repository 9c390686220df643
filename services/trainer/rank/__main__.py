"""`python -m services.trainer.rank --config FILE --controller HOST:PORT`: one rank of a trainer.

The main thread owns the device and executes commands in order; another one holds the stream.
Torch is imported only after the controller has been told that this rank exists.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import grpc
import uvloop

from services.trainer.config import TrainerConfig
from services.trainer.rank import FAILURES, is_refusal
from sluice import logs, platform
from sluice.address import check_address
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.api.trainer.v1 import worker_service_pb2_grpc as pb_grpc
from sluice.config import load_config, parse_config, read_yaml
from sluice.imports import keep_loaded, run_process, uncollected
from sluice.runtime.channel import create_channel
from sluice.runtime.errors import LoadingError, has_lost_status
from sluice.runtime.processes import end_with_parent
from sluice.runtime.stacks import standing

logger = logging.getLogger(__name__)

STREAM_SECONDS = 365 * 86400.0  # heartbeats, not the deadline, bound the stream
CONNECT_TRIES = 5  # while it is lost how the stream of a rank that loads has ended
EXIT_SECONDS = 5.0  # the device thread has so long to end once the controller is gone


def main() -> int:
    flags = parse_flags(sys.argv[1:])
    if flags.parent:
        end_with_parent(flags.parent)
    # A Ctrl-C is for the controller, which ends its ranks; that the terminal was closed, too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if flags.parent:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    config = read_config(flags)
    logs.configure(config.log_level)
    rank = int(os.environ["RANK"])
    hello = pb.RankHello(
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        generation=flags.incarnation,
        process_id=os.getpid(),
        host=os.uname().nodename,
    )
    stream = ControllerStream(flags.controller, hello, config)
    stream.start()
    try:
        return _follow(config, stream)
    finally:
        stream.close()


def _follow(config: TrainerConfig, stream: ControllerStream) -> int:
    try:
        # before anything else imports torch, which a broken plug-in breaks
        platform.current().keep_memory()
    except platform.PlatformError as error:
        print(f"trainer rank: {error}", file=sys.stderr)
        _refuse(stream, error)
        return 2
    launched = config.ranks.launch == "external"
    try:
        with uncollected():
            from services.trainer.rank.executor import Executor

        executor = Executor.load(config, stream.send, stream.meeting if launched else None)
    except FAILURES as error:
        told = is_refusal(error)  # the controller's log has it in a line
        if told and launched:  # a log of its own
            logger.error("the model cannot be loaded: %s: %s", type(error).__name__, error)
        logger.log(
            logging.DEBUG if told else logging.ERROR, "the model cannot be loaded", exc_info=error
        )
        _refuse(stream, error)
        return 1
    keep_loaded()
    stream.set_activity("")
    stream.send(pb.FollowRequest(ready=executor.describe()))
    for command in stream.commands():
        name = command.WhichOneof("command") or ""
        if name == "shutdown":
            executor.close()
            return 0
        stream.set_activity(name)
        result = executor.execute(command)
        stream.set_activity("")
        stream.send(pb.FollowRequest(result=result))
    return 1  # the controller is gone: whoever started this rank may start it again


def _refuse(stream: ControllerStream, error: Exception) -> None:
    """Tell the controller why this rank never gets ready."""
    failure = LoadingError(f"{type(error).__name__}: {error}").to_status()
    stream.send(pb.FollowRequest(ready=pb.RankReady(error=failure)))


def read_config(flags: argparse.Namespace) -> TrainerConfig:
    """Read the settings: those in the file, which has all of them where the controller wrote it.

    A rank that others start (`external`) reads its environment besides, as the controller does.
    Raises ConfigError.
    """
    if flags.parent:
        return parse_config(TrainerConfig, read_yaml(flags.config))
    return load_config(TrainerConfig, ["--config", str(flags.config)])


def _address(text: str) -> str:
    try:
        check_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def parse_flags(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the flags; `--front` and `--generation` are the names of the release before."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--config", type=Path, required=True, help="the controller's configuration, YAML or JSON"
    )
    parser.add_argument(
        *("--controller", "--front"),
        required=True,
        type=_address,
        help="host:port of its server for ranks",
    )
    parser.add_argument(
        *("--incarnation", "--generation"), type=int, default=0, help="counts starts of all ranks"
    )
    parser.add_argument("--parent", type=int, default=0, help="process to die with")
    return parser.parse_args(arguments)


class ControllerStream:
    """Sends answers and heartbeats, hands out commands in order.

    The process ends itself when the controller goes away, even if the device thread hangs.
    """

    def __init__(self, address: str, hello: pb.RankHello, config: TrainerConfig) -> None:
        self._address, self._hello, self._config = address, hello, config
        self._commands: queue.SimpleQueue[pb.FollowResponse | None] = queue.SimpleQueue()
        self._activity = "loading"
        self._has_spoken = False  # the device thread has
        self._meeting: Future[str] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._outgoing: asyncio.Queue[pb.FollowRequest | None] = asyncio.Queue()
        self._started = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="controller-stream", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._started.wait(EXIT_SECONDS)

    def meeting(self) -> str:
        """Wait for the name under which this rank meets the others of its launch.

        Raises LoadingError where the controller does not take it in.
        """
        try:
            return self._meeting.result(self._config.ranks.start_timeout)
        except TimeoutError:
            raise LoadingError("the controller does not take this rank in") from None

    def commands(self) -> Iterator[pb.FollowResponse]:
        """Yield commands in order, until the stream ends."""
        while (command := self._commands.get()) is not None:
            yield command

    def set_activity(self, activity: str) -> None:
        self._activity = activity

    def send(self, event: pb.FollowRequest) -> None:
        """Queue an event; from the device thread, or one that works for it."""
        self._has_spoken = True
        if self._loop is not None and not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):  # closed in between: the controller is gone
                self._loop.call_soon_threadsafe(self._outgoing.put_nowait, event)

    def close(self) -> None:
        """Send what is queued and end the stream."""
        self._closing.set()
        if self._loop is not None and not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._outgoing.put_nowait, None)
        self._thread.join(EXIT_SECONDS)

    def _run(self) -> None:
        try:
            uvloop.run(self._follow())
        except grpc.aio.AioRpcError as error:
            logger.error("the controller is gone: %s: %s", error.code().name, error.details())
        finally:
            self._started.set()
            self._commands.put(None)
            if not self._meeting.done():
                self._meeting.set_exception(LoadingError("the controller is gone"))
            if not self._closing.wait(
                EXIT_SECONDS
            ):  # the device thread hangs, e.g. in a collective
                os._exit(1)

    async def _follow(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._started.set()
        config = self._config
        channel = create_channel(self._address, config.server.security, name=config.controller_name)
        heart = asyncio.create_task(self._beat())
        try:
            stub = pb_grpc.WorkerServiceStub(channel)
            for tries_left in reversed(range(CONNECT_TRIES)):
                try:
                    return await self._take_commands(stub.Follow(timeout=STREAM_SECONDS))
                except grpc.aio.AioRpcError as error:
                    # One that has said more than hello is known there, and must not join anew.
                    if not tries_left or self._has_spoken or not has_lost_status(error):
                        raise
        finally:
            heart.cancel()
            await asyncio.gather(heart, return_exceptions=True)
            await channel.close()

    async def _take_commands(self, call: grpc.aio.StreamStreamCall) -> None:
        sending = asyncio.create_task(self._send_events(call))
        try:
            async for command in call:
                if not command.HasField("welcome"):
                    self._commands.put(command)
                elif not self._meeting.done():
                    self._meeting.set_result(command.welcome.meeting)
                elif self._meeting.result() != command.welcome.meeting:
                    logger.error("the others of this rank's launch are gone")
                    return
        finally:  # the next call sends what this one did not take
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _send_events(self, call: grpc.aio.StreamStreamCall) -> None:
        try:
            await call.write(pb.FollowRequest(hello=self._hello))
            while (event := await self._outgoing.get()) is not None:
                await call.write(event)
            await call.done_writing()
        except Exception:
            call.cancel()  # whoever reads must not wait for a rank that is mute
            raise

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._config.ranks.heartbeat_seconds)
            activity = self._activity
            where = standing(threading.main_thread().ident) if activity else ""
            beat = pb.RankHeartbeat(activity=activity, where=where)
            self._outgoing.put_nowait(pb.FollowRequest(heartbeat=beat))


if __name__ == "__main__":
    run_process(main)
