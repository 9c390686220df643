"""`python -m services.trainer.rank --config FILE --front HOST:PORT`: one rank of a trainer.

The main thread owns the device and executes commands in order; another one holds the stream.
Torch is imported only after the front has been told that this rank exists.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from pathlib import Path

from services.trainer.config import TrainerConfig
from services.trainer.rank.failures import FAILURES
from services.trainer.rank.stream import FrontStream
from sluice import logs, platform
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.config import parse_config, read_yaml
from sluice.runtime.errors import LoadingError
from sluice.runtime.server import die_with

logger = logging.getLogger(__name__)


def main() -> int:
    flags = _parse_flags()
    if flags.parent:
        die_with(flags.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the front, which ends its ranks
    config = parse_config(TrainerConfig, read_yaml(flags.config))
    logs.configure(config.log_level)
    rank = int(os.environ["RANK"])
    hello = pb.RankHello(
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        generation=flags.generation,
        process_id=os.getpid(),
        host=os.uname().nodename,
    )
    stream = FrontStream(flags.front, hello, config)
    stream.start()
    try:
        return _follow(config, stream)
    finally:
        stream.close()


def _follow(config: TrainerConfig, stream: FrontStream) -> int:
    try:
        platform.current()  # before anything else imports torch, which a broken plug-in breaks
    except platform.PlatformError as error:
        print(f"trainer rank: {error}", file=sys.stderr)
        _refuse(stream, error)
        return 2
    try:
        from services.trainer.rank.executor import Executor

        executor = Executor.load(config)
    except FAILURES as error:
        logger.error("the model cannot be loaded", exc_info=error)
        _refuse(stream, error)
        return 1
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
    return 1  # the front is gone: whoever started this rank may start it again


def _refuse(stream: FrontStream, error: Exception) -> None:
    """Tell the front why this rank never gets ready."""
    failure = LoadingError(f"{type(error).__name__}: {error}").to_status()
    stream.send(pb.FollowRequest(ready=pb.RankReady(error=failure)))


def _parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--config", type=Path, required=True, help="the front's configuration, YAML or JSON"
    )
    parser.add_argument("--front", required=True, help="host:port of the front's rank server")
    parser.add_argument("--generation", type=int, default=0)
    parser.add_argument("--parent", type=int, default=0, help="process to die with")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
