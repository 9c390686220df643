"""Devices that trainers and engines share: one of both has them at a time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from sluice import faults
from sluice.client import TrainerClient
from sluice.loop import trace
from sluice.loop.fleet import EngineFleet


class SharedDevices:
    """Hands the devices from engines to trainers and back; who had them sleeps first.

    Whoever has them when a run begins, or when a trainer is lost, is not known: `to_trainers` then
    asks all, and all may be asked again.
    """

    def __init__(self, fleet: EngineFleet, trainers: Sequence[TrainerClient], seconds: float):
        """`seconds`: that engines have to fall asleep."""
        self._fleet, self._trainers, self._seconds = fleet, trainers, seconds
        self._trainers_have_them: bool | None = None

    @property
    def are_with_engines(self) -> bool:
        return self._trainers_have_them is False

    def forget(self) -> None:
        """Note that services went away and came back: who has the devices is not known."""
        self._trainers_have_them = None

    async def to_trainers(self) -> None:
        """Have engines sleep, then trainers wake; free where trainers have the devices.

        Raises NoEngineError where an engine does not fall asleep in time, ConfigError where it
        cannot, and RemoteError for a trainer that does not wake.
        """
        if self._trainers_have_them:
            return
        with trace.span(trace.LOOP, "engines sleep"):
            await self._fleet.sleep(self._seconds)
        faults.point("engines_asleep")
        with trace.span(trace.TRAINER, "wake"):
            for trainer in self._trainers:
                await trainer.wake()
        faults.point("trainers_awake")
        self._trainers_have_them = True

    async def to_engines(self, bring: Callable[[], Awaitable[None]]) -> None:
        """Have trainers sleep, then engines woken and given weights by `bring`.

        Free where engines have the devices.
        """
        if self.are_with_engines:
            return
        self.forget()  # until all is done
        with trace.span(trace.TRAINER, "sleep"):
            for trainer in self._trainers:
                await trainer.sleep()
        faults.point("trainers_asleep")
        await bring()
        self._trainers_have_them = False
