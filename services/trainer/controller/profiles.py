"""Profiles of ranks: one at a time, over the steps that follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.trainer.controller.incarnation import RankIncarnation
from services.trainer.controller.rank_group import RankGroup
from services.trainer.controller.state import Turns, in_turn
from sluice.api.common.v1 import profile_pb2
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.runtime.errors import InvalidFieldError

FIRST_RANK = (0,)


@dataclass(eq=False)
class _Profile:
    """The one that was asked for last, of the ranks that record it."""

    name: str
    of: RankIncarnation
    left: int
    files: set[str] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)


class TrainerProfiles:
    """Begins profiles, and tells of the last one. `directory` has one of each, by name."""

    def __init__(self, directory: Path, ranks: RankGroup, turns: Turns) -> None:
        self.turns = turns
        self._directory, self._ranks = directory, ranks
        self._last: _Profile | None = None

    @in_turn
    async def profile(
        self, name: str, ranks: Sequence[int], steps: int, options: profile_pb2.ProfileOptions
    ) -> profile_pb2.Profile:
        """Have ranks record from now on. Raises InvalidFieldError for ranks that are not there."""
        incarnation = self._ranks.incarnation
        chosen = tuple(ranks) or FIRST_RANK
        world = incarnation.world_size
        if len(set(chosen)) < len(chosen) or not all(0 <= rank < world for rank in chosen):
            raise InvalidFieldError("ranks", f"must be of 0 to {world - 1}, each named once")
        command = pb.ProfileCommand(name=name, step_count=steps, ranks=chosen, options=options)
        self._last = None  # an answer that fails leaves none that records
        await incarnation.run(pb.FollowResponse(profile=command))
        self._last = _Profile(name, incarnation, steps)
        return self._describe(self._last)

    def note_step(self, results: Sequence[pb.CommandResult]) -> None:
        """Take what ranks tell with the answers to a step."""
        last = self._last
        for told in (result.profile for result in results if result.HasField("profile")):
            if last is not None and told.name == last.name:
                last.left = told.left_count
                last.files.update(told.files)
                last.failures += [told.failure] if told.failure else []

    def describe(self) -> profile_pb2.Profile | None:
        """Return what became of the last one; None where there was none."""
        return None if self._last is None else self._describe(self._last)

    def _describe(self, profile: _Profile) -> profile_pb2.Profile:
        failure = "; ".join(profile.failures)
        if profile.left and profile.of.lost.done():
            failure = f"the ranks were lost: {profile.of.lost.result()}"
        return profile_pb2.Profile(
            name=profile.name,
            directory=str(self._directory / profile.name),
            left_count=profile.left,
            files=sorted(profile.files),
            failure=failure,
        )
