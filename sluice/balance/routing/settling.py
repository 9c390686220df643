"""Which engines a restarted router leaves alone until it knows what is held on them.

A router that was stopped and goes on is in the same place: meanwhile its clients have picked
engines without it.

Only clients know the leases of an earlier router. Until they have named them, a place of an
engine that looks free may be taken. Such an engine is *closed*: what is held there is charged as
it becomes known, and nothing is granted. It opens as soon as all of these hold:

- every client heard of has renewed, and once more if it named the engine before that registered;
- live clients have had `RECONNECT_SECONDS` to be heard of;
- the engine reports no more requests than are charged to it.

After one heartbeat of the clients it opens whatever is missing. An engine is taken for one of an
earlier router where it says so, or where a client turns up that knew another router.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from sluice.balance.routing.types import HEARTBEATS_PER_TTL

RECONNECT_SECONDS = 4.0  # 1 s between two streams of engines, and channels back off up to 2 s


@dataclass
class _Engine:
    """An engine that registered less than a heartbeat ago.

    leased_before: an earlier router may have leased it; unexplained: it runs requests that no
    charged lease accounts for, or has not said.
    """

    since: float
    leased_before: bool
    unexplained: bool


class Settling:
    """Closes engines after a restart. Times are of the pool's clock; `first_epoch` is its first."""

    def __init__(self, client_ttl: float, first_epoch: int) -> None:
        self._heartbeat = client_ttl / HEARTBEATS_PER_TTL
        self._first_epoch = first_epoch
        self._engines: dict[str, _Engine] = {}
        self._clients: set[str] = set()  # that have told what they know
        self._owing: dict[str, float] = {}  # those that have to renew, since when
        self._awaited: dict[str, frozenset[str]] = {}  # by client: engines it named in vain
        self._restart_until = -math.inf  # engines that register until then were leased before
        self._closed: set[str] = set()
        self._look_again = math.inf  # when time opens the next of them; in the past: now

    def add_engine(self, name: str, known_epoch: int, epoch: int, now: float) -> None:
        """Take an engine that is new here; `epoch` is the pool's now."""
        says_so = self._is_foreign(known_epoch, epoch)
        leased_before = says_so or now < self._restart_until
        self._engines[name] = _Engine(now, leased_before, unexplained=says_so)
        if leased_before or self._owing or self._awaited:
            self._look_again = -math.inf

    def remove_engine(self, name: str) -> None:
        self._engines.pop(name, None)
        self._look_again = -math.inf

    def note_report(self, name: str, *, unexplained: bool) -> None:
        engine = self._engines.get(name)
        if engine and engine.unexplained != unexplained:
            engine.unexplained = unexplained
            if engine.leased_before:
                self._look_again = -math.inf

    def add_client(self, name: str, known_epoch: int, epoch: int, now: float) -> None:
        """Take a client that is new here, and knew `known_epoch`, 0 for none."""
        self._clients.add(name)
        if self._is_foreign(known_epoch, epoch):
            self._owing[name] = now
            self._saw_restart(now)

    def note_renewal(
        self, name: str, awaited: Iterable[str], now: float, *, held_before: bool
    ) -> None:
        """Take all that a client holds. awaited: engines among it that are unknown;
        held_before: some of it is of an earlier router."""
        self._owing.pop(name, None)
        self._awaited.pop(name, None)
        if engines := frozenset(awaited):
            self._awaited[name] = engines
        if held_before:
            self._saw_restart(now)
        self._look_again = -math.inf

    def resume(self, engines: Iterable[str], now: float) -> None:
        """Take it that nothing was heard for a while: all clients have to renew, and `engines` are
        closed as after a restart."""
        self._owing = dict.fromkeys(self._clients, now)
        self._engines = {
            name: _Engine(now, leased_before=True, unexplained=True) for name in engines
        }
        self._restart_until = now + self._heartbeat
        self._look_again = -math.inf

    def remove_client(self, name: str) -> None:
        self._clients.discard(name)
        self._owing.pop(name, None)
        self._awaited.pop(name, None)
        self._look_again = -math.inf

    def owes(self, client: str, now: float) -> bool:
        """Whether the client has to renew before it is given anything."""
        since = self._owing.get(client)
        return since is not None and now < since + self._heartbeat

    def closed(self, now: float) -> set[str]:
        """Names of the engines that get no lease now; all are gone through only for news."""
        if now >= self._look_again:
            self._closed = self._find_closed(now)
            ends = [since + self._heartbeat for since in self._owing.values()]
            for since in [self._engines[name].since for name in self._closed]:
                ends += [since + RECONNECT_SECONDS, since + self._heartbeat]
            self._look_again = min((end for end in ends if end > now), default=math.inf)
        return self._closed

    def _find_closed(self, now: float) -> set[str]:
        self._engines = {
            name: engine
            for name, engine in self._engines.items()
            if now < engine.since + self._heartbeat
        }
        if not self._engines:
            return set()
        if any(self.owes(client, now) for client in self._owing):
            return set(self._engines)
        awaited = set().union(*self._awaited.values())
        return {
            name
            for name, engine in self._engines.items()
            if name in awaited
            or (
                engine.leased_before
                and (engine.unexplained or now < engine.since + RECONNECT_SECONDS)
            )
        }

    def is_own(self, known_epoch: int, epoch: int) -> bool:
        """Tell whether an epoch is of this router; `epoch` is the pool's now."""
        return self._first_epoch <= known_epoch <= epoch

    def _is_foreign(self, known_epoch: int, epoch: int) -> bool:
        return known_epoch != 0 and not self.is_own(known_epoch, epoch)

    def _saw_restart(self, now: float) -> None:
        self._restart_until = now + self._heartbeat
        for engine in self._engines.values():
            engine.leased_before = True
        self._look_again = -math.inf
