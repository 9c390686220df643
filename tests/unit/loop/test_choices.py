"""What a dispatcher asks for, takes and drops is what scans over all groups would say.

`Plain` is the rule, written as it reads: every answer looks at every group. Random schedules of
finished, late, filtered and hopeless groups, lost blobs, crashes and returns to earlier steps are
played to both.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

import pytest

from sluice.api.rollout.v1 import rollout_service_pb2 as pb
from sluice.loop import dispatcher
from sluice.loop.config import FilterConfig
from sluice.loop.dispatcher import DispatcherConfig, RolloutDispatcher
from sluice.loop.filters import GroupFilters
from sluice.loop.ledger import Ledger, LedgerGroup
from sluice.loop.policy_run import step_means

STEPS = 9


def test_an_episode_of_several_samples_counts_once_in_the_mean_reward():
    details = [pb.SampleDetails(episode=episode) for episode in (0, 0, 0, 1)]
    group = pb.FinishedGroup(rewards=[0.0, 0.3, 0.6, 1.0], details=details)
    assert dispatcher.episode_rewards(group) == pytest.approx([0.3, 1.0])
    alone = pb.FinishedGroup(rewards=[0.0, 1.0, 1.0])
    assert dispatcher.episode_rewards(alone) == [0.0, 1.0, 1.0]
    assert dispatcher.episode_rewards(pb.FinishedGroup()) == []


def test_groups_whose_episodes_have_several_samples_speak_no_louder():
    def group(name: str, samples: int, reward: float) -> LedgerGroup:
        return LedgerGroup(
            position=0,
            group_id="g",
            state="generated",
            issue_step=0,
            environment=name,
            sample_count=samples,
            reward_mean=reward,
            response_tokens=10 * samples,
        )

    groups = [group("a", 2, 0.0), group("a", 6, 1.0)]  # one sample an episode, and three
    episodes = {"a": 2, "b": 4}
    assert step_means(groups, episodes.__getitem__) == (0.5, 10.0)
    assert step_means([*groups, group("b", 4, 1.0)], episodes.__getitem__) == (0.75, 10.0)


HOPELESS = 3  # INVALID_ARGUMENT


@dataclass
class Row:
    """A group: its state in the ledger, and whether somebody works on it."""

    position: int
    issue_step: int
    state: str = "issued"
    flying: bool = True
    spared: bool = False
    oldest_step: int = 0
    consumed_step: int = 0


class Plain:
    """A dispatcher over rows that outlive it."""

    def __init__(self, rows: dict[int, Row], config: DispatcherConfig) -> None:
        self.rows, self.config = rows, config
        self.step, self.consumed = -1, 0
        self.depth = 1 + config.max_staleness
        self.asked: set[tuple[int, int]] = set()  # (position, step of its issue), since last seen
        self.settled: set[tuple[int, int]] = set()  # maybe before a worker heard of them
        for row in rows.values():
            row.flying = row.spared = False

    def having(self, state: str) -> list[Row]:
        return [row for row in self.rows.values() if row.state == state]

    def flying(self) -> list[Row]:
        return [row for row in self.having("issued") if row.flying]

    def limit(self) -> int:
        """Where the run has had all it may have; dropped groups do not count."""
        config = self.config
        ahead = (1 + config.max_staleness) * config.groups_per_step
        left = max(0, config.steps - self.step) * config.groups_per_step
        room = math.ceil((config.over_sampling - 1) * ahead) + self.consumed + min(ahead, left)
        dropped = {row.position for row in self.having("dropped")}
        position = 0
        while room:
            room -= position not in dropped
            position += 1
        return position

    def usable(self) -> list[Row]:
        limit = self.limit()
        return [row for row in self.having("generated") if row.position < limit]

    def fill(self, step: int) -> None:
        if step != self.step:
            self.step, self.consumed = step, len(self.having("consumed"))
        for row in self.having("generated"):
            if row.oldest_step < step - self.config.max_staleness:
                self.settle(row)
        limit = self.limit()
        for row in self.having("issued"):
            if not row.flying and row.position < limit:
                row.flying, row.issue_step = True, step
                self.asked.add((row.position, step))
        held = len(self.flying()) + len(self.usable())
        wanted = self.depth * self.config.groups_per_step * self.config.over_sampling
        first = len(self.rows)
        for position in range(first, min(limit, first + math.ceil(wanted) - held)):
            self.rows[position] = Row(position, step)
            self.asked.add((position, step))

    def settle(self, row: Row) -> None:
        row.flying = False
        self.settled.add((row.position, row.issue_step))
        if self.config.drops_surplus or self.config.over_sampling == 1:
            row.state = "dropped"
        else:
            row.state, row.spared = "issued", True

    def choose(self, step: int) -> list[int] | None:
        size = self.config.groups_per_step
        ready = sorted(self.usable(), key=lambda row: (row.oldest_step, row.position))
        chosen, left = ready[:size], ready[size:]
        if len(chosen) < size:
            return None
        surplus = self.config.over_sampling > 1
        flying = [row for row in self.flying() if row.spared or not surplus]
        for later in range(1 if surplus else self.config.max_staleness + 1):
            oldest = step + later - self.config.max_staleness
            late = [row for row in flying if row.issue_step <= oldest]
            old = [row for row in left if row.oldest_step <= oldest]
            if late and len(late) + len(old) > later * size:
                return None
        return sorted(row.position for row in chosen)

    def take(self, step: int, chosen: Sequence[int], *, waited: bool) -> None:
        for position in chosen:
            self.rows[position].state = "taken"
            self.rows[position].spared = False
        most = 1 + self.config.max_staleness
        if waited:
            self.depth = min(self.depth + 1, most)
        elif len(self.usable()) >= self.config.groups_per_step:
            self.depth = max(self.depth - 1, min(2, most))
        if self.config.over_sampling > 1:
            allowed = step + 1 - self.config.max_staleness
            late = [row for row in self.flying() if row.issue_step < allowed]
            stale = [row for row in self.having("generated") if row.oldest_step < allowed]
            for row in (*late, *stale):
                self.settle(row)


class Script:
    """Stands where episode workers are: a call answers what it is told to, and lists its groups."""

    def __init__(self) -> None:
        self.calls: dict[str, tuple[set[str], asyncio.Queue[pb.RolloutResponse | None]]] = {}

    def split(self, groups):
        return [share for share in (groups[0::2], groups[1::2]) if share]

    async def ask(self, request: pb.RolloutRequest) -> AsyncIterator[pb.RolloutResponse]:
        owed = {group.group_id for group in request.groups}
        queue: asyncio.Queue[pb.RolloutResponse | None] = asyncio.Queue()
        self.calls[request.request_id] = owed, queue
        while (response := await queue.get()) is not None:
            yield response

    async def cancel(self, request_id: str, group_ids: Sequence[str]) -> None:
        """Deaf: cancelled groups are answered all the same, too late."""

    def answer(self, group_id: str, response: pb.RolloutResponse) -> None:
        for owed, queue in self.calls.values():
            if group_id in owed:
                owed.remove(group_id)
                queue.put_nowait(response)
                if not owed:
                    queue.put_nowait(None)


class Play:
    """One run, over several lives."""

    def __init__(self, seed: int, ledger: Ledger) -> None:
        self.random, self.ledger = random.Random(seed), ledger
        pick = self.random.choice
        self.config = DispatcherConfig(
            groups_per_step=pick([1, 2, 3, 5]),
            max_staleness=pick([0, 1, 2, 4]),
            attempts=1,
            over_sampling=pick([1.0, 1.0, 1.3, 2.0]),
            drops_surplus=pick([False, True]),
            steps=STEPS,
        )
        self.trouble = pick([0.0, 0.1, 0.3])  # groups that are filtered or hopeless
        self.patience = pick([1, 3, 40])  # how many finish at once
        self.filters = GroupFilters([FilterConfig(name="reward_std")])
        self.rows: dict[int, Row] = {}
        self.step, self.version = 0, 0
        self.numbers = itertools.count()
        self.publish()
        self.live()

    def publish(self) -> None:
        self.version += 1
        self.ledger.record_version(self.version, "d", self.step)

    def live(self) -> None:
        """A process begins."""
        self.script, self.asked = Script(), set[tuple[int, int]]()
        self.plain = Plain(self.rows, self.config)
        self.feed = RolloutDispatcher(
            self.config, self.ledger, self.script, self.request, filters=self.filters
        )

    def request(self, groups, trial):
        self.asked |= {(group.position, group.issue_step) for group in groups}
        return pb.RolloutRequest(
            request_id=str(next(self.numbers)),
            groups=[pb.GroupRequest(group_id=group.group_id) for group in groups],
        )

    async def turns(self) -> None:
        for _ in range(40):  # of the event loop: what an answer sets off takes fewer
            await asyncio.sleep(0)

    def check(self) -> None:
        assert self.asked - self.plain.settled == self.plain.asked - self.plain.settled
        for seen in (self.asked, self.plain.asked, self.plain.settled):
            seen.clear()
        assert self.feed.in_flight_count == len(self.plain.flying())
        assert self.feed.ready_count == len(self.plain.having("generated"))
        for state in ("issued", "consumed"):
            mine = {row.position for row in self.plain.having(state)}
            assert {group.position for group in self.ledger.groups(state)} == mine
        dropped = {row.position for row in self.plain.having("dropped")}
        assert set(self.ledger.dropped()) == dropped

    async def happen(self) -> None:
        """Some groups finish, or one turns out hopeless."""
        await self.turns()
        flying = self.plain.flying()
        self.random.shuffle(flying)
        if flying and self.random.random() < self.trouble:
            row = flying[0]
            row.state = "dropped"
            failed = pb.FailedGroup(group_id=f"g{row.position:07}", error={"code": HOPELESS})
            self.script.answer(failed.group_id, pb.RolloutResponse(failed=failed))
        else:
            for row in flying[: self.random.randint(1, self.patience)]:
                self.finish(row)
        await self.turns()

    def finish(self, row: Row) -> None:
        row.oldest_step = self.random.randint(row.issue_step, self.step)
        filtered = self.random.random() < self.trouble / 2
        row.state = "dropped" if filtered else "generated"
        version = next(v for v in itertools.count(1) if self.step_of(v) == row.oldest_step)
        rewards = [0.0, float(not filtered)]
        finished = pb.FinishedGroup(
            group_id=f"g{row.position:07}",
            blob={"digest": f"{row.position:032x}", "size_bytes": 1},
            rewards=rewards,
            raw_rewards=rewards,
            response_lengths=[3, 3],
            min_version=version,
            max_version=self.version,
        )
        self.script.answer(finished.group_id, pb.RolloutResponse(finished=finished))

    def step_of(self, version: int) -> int:
        return self.ledger.step_of_version(version)

    async def take(self) -> None:
        """One step, unless the process is killed before."""
        await self.feed.fill(self.step)
        self.plain.fill(self.step)
        taking, waited = asyncio.create_task(self.feed.take(self.step)), False
        await self.turns()
        while (expected := self.plain.choose(self.step)) is None:
            assert not taking.done(), taking
            self.check()
            if self.random.random() < 0.02:
                taking.cancel()
                await asyncio.gather(taking, return_exceptions=True)
                await self.feed.close()
                return self.live()
            waited = True
            await self.happen()
            self.plain.fill(self.step)
        assert taking.done()
        groups = taking.result()
        assert [group.position for group in groups] == expected
        self.plain.take(self.step, expected, waited=waited)
        if self.random.random() < 0.1:  # of one the blob is gone
            self.feed.put_back(groups)
            lost = self.random.choice(groups)
            assert self.feed.lose_blob(lost.blob.digest)
            for position in expected:
                self.rows[position].state = "generated"
            self.rows[lost.position].state = "issued"
            self.rows[lost.position].flying = False
            return None
        self.ledger.consume([group.group_id for group in groups], self.step + 1)
        self.step += 1
        for position in expected:
            self.rows[position].state = "consumed"
            self.rows[position].consumed_step = self.step
        self.publish()
        return None

    async def go_back(self) -> None:
        await self.feed.close()
        self.step = self.random.randint(max(0, self.step - 3), self.step)
        self.ledger.roll_back(self.step)
        for row in self.rows.values():
            if row.state == "consumed" and row.consumed_step > self.step:
                row.state = "generated"
        self.publish()
        self.live()


@pytest.mark.parametrize("seed", range(24))
async def test_choices_are_those_of_scans_over_all_groups(tmp_path, seed, monkeypatch) -> None:
    monkeypatch.setattr(dispatcher, "TOGETHER_SECONDS", 0)
    ledger = Ledger(tmp_path / "ledger.sqlite")
    play = Play(seed, ledger)
    returns = play.random.choice([0, 0, 2])
    while play.step < STEPS:
        await play.take()
        if play.random.random() < 0.5:
            await play.happen()  # while the trainer works
        if returns and play.random.random() < 0.2:
            returns -= 1
            await play.go_back()
    await play.feed.close()
    sizes = {row.consumed_step: 0 for row in play.plain.having("consumed")}
    for row in play.plain.having("consumed"):
        sizes[row.consumed_step] += 1
        assert row.consumed_step - 1 - row.oldest_step <= play.config.max_staleness
    assert sizes == {step: play.config.groups_per_step for step in range(1, STEPS + 1)}
    ledger.close()


async def test_a_staleness_beyond_all_steps_is_not_counted_through(tmp_path, monkeypatch) -> None:
    """Every finished group asks whether others would grow too old: that looks at what is there."""
    monkeypatch.setattr(dispatcher, "TOGETHER_SECONDS", 0)
    looks, count_until = itertools.count(), dispatcher.GroupsByStep.count_until

    def counted(groups: dispatcher.GroupsByStep, step: int) -> int:
        next(looks)
        return count_until(groups, step)

    monkeypatch.setattr(dispatcher.GroupsByStep, "count_until", counted)
    ledger = Ledger(tmp_path / "ledger.sqlite")
    play = Play(0, ledger)
    play.trouble, size = 0.0, 2
    play.config = replace(
        play.config, max_staleness=100_000, groups_per_step=size, over_sampling=1.0
    )
    play.live()
    await play.feed.fill(0)
    play.plain.fill(0)
    taking = asyncio.create_task(play.feed.take(0))
    while not taking.done():
        play.finish(play.plain.flying()[0])
        await play.turns()
    assert len(taking.result()) == size
    assert next(looks) < 1000
    await play.feed.close()
    ledger.close()
