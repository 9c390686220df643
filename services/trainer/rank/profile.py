"""What this rank's operations cost, over some of its steps."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.profiler import ProfileError, ProfileOptions, Recording

logger = logging.getLogger(__name__)


class RankProfile:
    """Records commands from the next one to the end of a number of steps, then writes files.

    Nothing of it fails a command: what goes wrong is logged and told as `failure`. So is why it
    ends early where the host's memory would not do for more of it: what there is is written then.
    The rank stands still while it writes.
    """

    def __init__(self, rank: int, directory: Path) -> None:
        """`directory` has one of each profile, by name."""
        self._rank, self._directory = rank, directory
        self._order = pb.ProfileCommand()  # without steps where there is nothing to record
        self._recording: Recording | None = None
        self._failure = ""
        self._files: list[str] = []  # written, and not told yet
        self._steps = 0  # recorded, and whole

    def begin(self, command: pb.ProfileCommand) -> None:
        """Record from the next command on, in place of what still records.

        Nothing where this rank is not among those named.
        """
        self.drop()
        if self._rank in command.ranks:
            self._order.CopyFrom(command)

    def drop(self) -> None:
        """Write nothing of what still records."""
        recording, self._recording, self._failure = self._recording, None, ""
        self._files, self._steps = [], 0
        self._order.Clear()
        if recording is None:
            return
        try:
            recording.drop()
        except ProfileError:
            logger.exception("a profile of rank %d cannot be dropped", self._rank)

    @contextmanager
    def command(self, name: str, result: pb.CommandResult) -> Iterator[None]:
        """Shows the block as a command of that name; tells in the answer to a step what is left."""
        if not self._order.step_count:
            yield
            return
        if self._recording is None and not self._failure:
            self._record()
        with nullcontext() if self._recording is None else self._recording.named(name):
            yield
        is_step = name == "step" and not result.HasField("error")
        self._steps += is_step
        if is_step and self._steps == self._order.step_count:
            self._write()
        elif self._recording is not None and (why := self._recording.too_large()):
            self._write()
            self._fail(f"ended early, after {self._steps} of {self._order.step_count} steps: {why}")
        if is_step:
            self._note_step(result.profile)

    def _record(self) -> None:
        # Not before there is a command: torch records the calls of other threads, too.
        options = self._order.options
        try:
            self._recording = Recording(
                ProfileOptions(stacks=options.stacks, memory=options.memory)
            )
        except ProfileError as error:
            self._fail(str(error), error)

    def _write(self) -> None:
        recording, self._recording = self._recording, None
        if recording is None:
            return
        try:
            directory = self._directory / self._order.name
            self._files = recording.write(directory, f"rank-{self._rank}")
        except ProfileError as error:
            self._fail(str(error), error)

    def _note_step(self, told: pb.RankProfile) -> None:
        told.name, told.left_count = self._order.name, self._order.step_count - self._steps
        if told.left_count and not self._failure:
            return
        told.files.extend(self._files)
        told.failure, told.left_count = self._failure, 0
        self.drop()

    def _fail(self, why: str, error: ProfileError | None = None) -> None:
        """Note what the training goes on without; what was first is told."""
        logger.error("profile %s of rank %d: %s", self._order.name, self._rank, why, exc_info=error)
        self._failure = self._failure or f"rank {self._rank}: {why}"
