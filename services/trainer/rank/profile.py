"""What this rank's operations cost, over some of its steps."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.profiler import ProfileError, ProfileOptions, Recording

logger = logging.getLogger(__name__)


class RankProfile:
    """Records commands from `begin` to the end of a number of steps, then writes files.

    Nothing of it fails a command: what goes wrong is logged and told as `failure`. The rank stands
    still while it writes.
    """

    def __init__(self, rank: int, directory: Path) -> None:
        """`directory` has one of each profile, by name."""
        self._rank, self._directory = rank, directory
        self._name, self._left = "", 0
        self._recording: Recording | None = None

    def begin(self, command: pb.ProfileCommand) -> None:
        """Record from now on, in place of what still records, if this rank is among those named."""
        self.drop()
        if self._rank in command.ranks:
            options = ProfileOptions(stacks=command.options.stacks, memory=command.options.memory)
            self._name, self._left = command.name, command.step_count
            self._recording = Recording(options)

    def drop(self) -> None:
        """Write nothing of what still records."""
        recording, self._recording = self._recording, None
        if recording is None:
            return
        try:
            recording.drop()
        except ProfileError:
            logger.exception("profile %s cannot be dropped", self._name)

    @contextmanager
    def command(self, name: str, result: pb.CommandResult) -> Iterator[None]:
        """Shows the block as a command of that name; tells in the answer to a step what is left."""
        if self._recording is None:
            yield
            return
        with self._recording.named(name):
            yield
        if name == "step" and not result.HasField("error"):
            self._note_step(result.profile)

    def _note_step(self, told: pb.RankProfile) -> None:
        self._left -= 1
        told.name, told.left_count = self._name, self._left
        if self._left:
            return
        recording, self._recording = self._recording, None
        assert recording is not None
        try:
            files = recording.write(self._directory / self._name, f"rank-{self._rank}")
        except ProfileError as error:  # the training goes on without it
            logger.exception("profile %s of rank %d was not written", self._name, self._rank)
            told.failure = f"rank {self._rank}: {error}"
        else:
            told.files.extend(files)
