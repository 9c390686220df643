"""The controller's trainer: one policy, or several adapters of one base; batches and ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from services.trainer.config import TrainerConfig
from services.trainer.controller.adapters import TrainerAdapters
from services.trainer.controller.algorithms import Algorithms
from services.trainer.controller.checkpoints import TrainerCheckpoints
from services.trainer.controller.incarnation import RankIncarnation
from services.trainer.controller.launch import LocalLauncher
from services.trainer.controller.memory_cuts import MemoryCuts
from services.trainer.controller.passes import TrainerPasses
from services.trainer.controller.planning import (
    BareRow,
    DryPlan,
    Planner,
    PlanOptions,
    describe_bare,
    limits_of,
    packing_of,
)
from services.trainer.controller.profiles import TrainerProfiles
from services.trainer.controller.publication import Publisher
from services.trainer.controller.rank_group import Launcher, RankGroup
from services.trainer.controller.sleep import TrainerSleep
from services.trainer.controller.state import TrainerState, Turns
from services.trainer.controller.uploads import TrainerBatches
from services.trainer.description import longest_row
from services.trainer.rows import read_shape
from sluice.api.trainer.v1 import trainer_service_pb2 as trainer_pb
from sluice.balance.planner import GroupTooLargeError
from sluice.runtime.errors import InvalidFieldError
from sluice.runtime.waits import Waits
from sluice.samples.vocabulary import vocabulary_digest
from sluice.weights.store import WeightStore


class Trainer:
    """Takes work for the policy: on `batches`, by `passes`, for `checkpoints`, by `publisher`.

    Of `adapters` beside it each has steps, gradients, checkpoints and versions of its own.

    What needs the ranks runs in the order of the calls, one at a time, and goes on when its
    caller goes away. Methods raise the errors that clients see.
    """

    def __init__(self, config: TrainerConfig, waits: Waits) -> None:
        self.config = config
        self.vocabulary = vocabulary_digest(Path(config.model))
        self.state = state = TrainerState(optim=config.optim)
        self.turns = turns = Turns(config.max_waiting_calls, waits)
        launcher = LocalLauncher(config) if config.ranks.launch == "local" else Launcher()
        self.ranks = ranks = RankGroup(config.ranks, launcher, waits, self._restore)
        limits = limits_of(config, trainer_pb.ParallelLayout())
        self._planner = planner = Planner(read_shape(config.model), limits)
        self.batches = TrainerBatches(config, state, ranks, planner, turns)
        algorithms = Algorithms(config, ranks)
        self.profiles = TrainerProfiles(config.profiles, ranks, turns)
        weights = WeightStore(config.weights_location, durable=config.durable)
        self.publisher = Publisher(config, weights, state, ranks, turns, waits)
        self.passes = TrainerPasses(
            state,
            ranks,
            planner,
            algorithms,
            turns,
            cuts=MemoryCuts(config, planner),
            on_step=self.profiles.note_step,
            find_reference=self.publisher.reference_directory,
        )
        self.checkpoints = TrainerCheckpoints(
            config, state, ranks, self.batches, self.publisher, turns
        )
        self.adapters = TrainerAdapters(config, state, ranks, self.batches, turns)
        self.sleep = TrainerSleep(state, ranks, self.checkpoints, turns)

    @property
    def max_row_tokens(self) -> int:
        """Return how long a row may be; 0 where any is taken, or before the mesh is known."""
        is_known = self.ranks.state == trainer_pb.Trainer.STATE_ACTIVE
        return longest_row(self.batches.limits) if is_known else 0

    async def start(self, controller: str) -> None:
        """Launch the ranks and wait until they are active or have failed."""
        await asyncio.to_thread(self.batches.unpin_all)
        await asyncio.to_thread(self.publisher.sweep)
        self.ranks.start(controller)
        await self.ranks.wait_settled()

    async def close(self) -> None:
        await self.ranks.close()
        await self.checkpoints.close()
        await self.turns.close()
        await self.publisher.close()

    async def plan(
        self,
        name: str,
        sample_ids: Sequence[str],
        bare: Sequence[BareRow],
        options: PlanOptions,
    ) -> DryPlan:
        """Plan how rows of a batch, or bare ones, would run; runs nothing, so needs no turn."""
        assert self.ranks.incarnation  # before, the degrees of the mesh are not known
        limits = options.apply(self._planner.limits)
        if bare:
            facts = describe_bare(bare)
            owners, selection = self._planner.own(facts), np.arange(len(bare))
        else:
            batch = self.state.batches.get(name)
            facts, owners, selection = batch.facts, batch.owners, batch.select(sample_ids)
        solve = self._planner.solve
        try:
            plan = await asyncio.to_thread(solve, facts, owners, selection, limits)
        except GroupTooLargeError as error:
            raise InvalidFieldError("max_micro_batches", str(error)) from None
        return DryPlan(facts, plan, self._planner.packing.shares_prompts)

    async def _restore(self, ranks: RankIncarnation) -> None:
        """Bring fresh ranks to where the lost ones were saved last.

        What still runs for those, such as the end of a save, comes first: it changes state too.
        """
        await self.turns.wait_and_run("restore", lambda: self._restore_into(ranks))

    async def _restore_into(self, ranks: RankIncarnation) -> None:
        planner, batches = self._planner, self.batches
        limits = limits_of(self.config, self.ranks.layout)
        planner.settle(limits, packing_of(self.config, limits.context_size))
        batches.limits = replace(batches.limits, max_tokens=limits.cap)
        for policy in self.state.policies:
            if policy.adapter:
                await self.adapters.begin(ranks, policy)
            await self.checkpoints.restore(ranks, policy)
        for batch in self.state.batches.all():
            batch.forget_derived()
            await batches.register(ranks, batch)
        await self.sleep.resume(ranks)
