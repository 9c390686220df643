"""What leases belong to: groups of samples of one prompt, and sessions, which are conversations.

Both are rows by key, taken when a key is new and freed once it idles without a lease.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sluice.balance.routing.types import FloatArray, IntArray, all_true, any_true

NO_GROUP = NO_SESSION = -1
UNPLACED = -1
_BLANK = np.array([[np.nan], [np.nan], [0.0], [0.0]])  # prior, started, tokens, finished
_IDLE_LIMIT = 16_384  # groups without leases that are remembered
_PACE_SHARE = 0.05  # of a new observation in the running means
_ZERO = np.zeros(1, dtype=np.int64)
_HANDFUL = 32  # up to so many a list is faster than vector operations
_PRIOR_WEIGHT = 2.0  # a caller's expectation counts as this many finished samples


class _KeyedTable:
    """Keeps rows (slots) by key, in columns that grow."""

    def __init__(self, idle_seconds: float) -> None:
        self._idle_seconds = idle_seconds
        self._slots: dict[str, int] = {}
        self._keys: list[str | None] = []
        self._free: list[int] = []
        self._used = np.zeros(0)  # float64[slot]: last use; inf where it has no key
        self.live = np.zeros(0, dtype=np.int64)  # int64[slot]: leases, queued or bound

    def __len__(self) -> int:
        return len(self._slots)

    def expire(self, now: float) -> int:
        """Forget what idles for longer than the limit and has no lease; returns how many."""
        idle = np.flatnonzero((self._used <= now - self._idle_seconds) & (self.live <= 0))
        for slot in idle.tolist():
            self._forget(slot)
        return len(idle)

    def forget_unused(self, slots: IntArray) -> None:
        """Forget those of `slots` (negative ones aside) that never had a lease: a caller who was
        refused may come back under other keys."""
        for slot in np.unique(slots[slots >= 0]).tolist():
            if self._keys[slot] is not None and not self.live[slot] and self._is_new(slot):
                self._forget(slot)

    def _is_new(self, slot: int) -> bool:
        """Whether nothing was learnt of the slot by leases."""
        raise NotImplementedError

    def _take(self, keys: Sequence[str]) -> list[int]:
        """Returns slots for new keys."""
        while len(self._free) < len(keys):
            self._grow(max(64, len(self._keys)))
        rest = len(self._free) - len(keys)
        taken, self._free[rest:] = self._free[rest:], []
        for key, slot in zip(keys, taken, strict=True):
            self._slots[key] = slot
            self._keys[slot] = key
        return taken

    def _forget(self, slot: int) -> None:
        """Free the slot, at once or when its last lease is given back."""
        key = self._keys[slot]
        assert key is not None
        del self._slots[key]
        self._keys[slot] = None
        self._used[slot] = np.inf
        if not self.live[slot]:
            self._free.append(slot)

    def _grow(self, more: int) -> None:
        size = len(self._keys)
        self._keys += [None] * more
        self._free += range(size + more - 1, size - 1, -1)
        self._used = np.concatenate([self._used, np.full(more, np.inf)])
        self.live = np.concatenate([self.live, np.zeros(more, dtype=np.int64)])


class GroupTable(_KeyedTable):
    """Learns how long the samples of each group run."""

    def __init__(self, idle_seconds: float) -> None:
        super().__init__(idle_seconds)
        self._idle: OrderedDict[int, None] = OrderedDict()  # slots by the end of their last lease
        self.mean_tokens = 0.0  # of recently finished samples, of any group
        self.seconds_per_token = 0.02  # of groups' first finished samples
        # float64[slot] each. prior: tokens the caller expects, NaN unknown; started: when the
        # first sample was bound, NaN before; tokens and finished: of samples that ended.
        self.prior: FloatArray
        self.started: FloatArray
        self.tokens: FloatArray
        self.finished: FloatArray
        self._adopt(np.zeros((4, 0)))

    def slots(self, keys: Sequence[str], now: float) -> tuple[IntArray, bool]:
        """int64[n]: slots of `keys`, taken where new; NO_GROUP for an empty key. And whether
        all are new."""
        known = list(map(self._slots.get, keys))
        all_new = known.count(None) == len(known)
        if None in known:
            new = keys if all_new else [k for k, s in zip(keys, known, strict=True) if s is None]
            self._take([key for key in dict.fromkeys(new) if key])
            known = [self._slots[key] if key else NO_GROUP for key in keys]
        slots = np.array(known, dtype=np.int64)
        self._used[slots if "" not in keys else slots[slots >= 0]] = now
        return slots, all_new

    def slot(self, key: str, now: float) -> int:
        """`slots` of one key that is not empty."""
        slot = self._slots.get(key)
        if slot is None:
            (slot,) = self._take([key])
        self._used[slot] = now
        return slot

    def expect_of(self, slot: int, tokens: float) -> None:
        """`expect` of one group."""
        if not math.isnan(tokens):
            self.prior[slot] = tokens

    def expect(self, slots: IntArray, tokens: FloatArray) -> None:
        """Take the caller's expectations of output tokens per sample; NaN says nothing."""
        has_length = (slots >= 0) & ~np.isnan(tokens)
        self.prior[slots[has_length]] = tokens[has_length]

    def knows_any(self, slots: IntArray) -> bool:
        """Whether anything is expected of any of these groups."""
        return bool(self.finished[slots].any() or not np.isnan(self.prior[slots]).all())

    def expected(self, slots: IntArray) -> FloatArray:
        """float64[n]: expected output tokens, from siblings and the caller; NaN unknown."""
        prior = self.prior[slots]
        weight = np.where(np.isnan(prior), 0.0, _PRIOR_WEIGHT)
        total = weight * np.nan_to_num(prior) + self.tokens[slots]
        count = weight + self.finished[slots]
        return np.where(count > 0, total / np.maximum(count, 1e-9), np.nan)

    def expected_of(self, slot: int) -> float:
        """`expected` of one group, without vectors."""
        prior, total = float(self.prior[slot]), float(self.tokens[slot])
        count = float(self.finished[slot])
        if not math.isnan(prior):
            total += _PRIOR_WEIGHT * prior
            count += _PRIOR_WEIGHT
        return total / count if count > 0 else math.nan

    def hold(self, slots: IntArray) -> None:
        """Note leases granted to slots[i] (or NO_GROUP), bound or queued."""
        if not self._slots:
            return
        one = _only(slots)
        if one is None:
            np.add.at(self.live, _grouped(slots), 1)
        elif one != NO_GROUP:
            self.live[one] += len(slots)

    def start(self, slots: IntArray, now: float) -> None:
        """Note that samples of these groups were bound; slots may be NO_GROUP."""
        if not self._slots:
            return
        one = _only(slots)
        if one is None:
            slots = _grouped(slots)
            self.started[slots[np.isnan(self.started[slots])]] = now
        else:
            self.start_one(one, now)

    def start_one(self, slot: int, now: float) -> None:
        """`start` of one sample; the slot may be NO_GROUP."""
        if slot != NO_GROUP and math.isnan(self.started[slot]):
            self.started[slot] = now

    def finish(self, slots: IntArray, tokens: NDArray[Any] | None, now: float) -> None:
        """Note samples that ended; tokens[i] < 0 says nothing was learnt."""
        if not self._slots or not len(slots):
            return
        one = _only(slots)
        if one is None:
            self._finish_many(slots, tokens, now)
        elif one != NO_GROUP:
            self.finish_one(one, len(slots), () if tokens is None else tokens.tolist(), now)

    def finish_one(self, slot: int, count: int, tokens: Sequence[int], now: float) -> None:
        """Note `count` samples of one group, as most calls bring: cheaper without vectors."""
        self.live[slot] -= count
        self._used[slot] = now
        if self.live[slot] <= 0:
            self._idles(slot)
        if has_length := [number for number in tokens if number >= 0]:
            total = float(sum(has_length))
            self._learn_pace(slot, float(has_length[0]), total, len(has_length), now)
            self.tokens[slot] += total
            self.finished[slot] += len(has_length)

    def _finish_many(self, slots: IntArray, tokens: NDArray[Any] | None, now: float) -> None:
        grouped = slots >= 0
        if not all_true(grouped):
            slots = slots[grouped]
            tokens = None if tokens is None else tokens[grouped]
        if not len(slots):
            return
        begins, slots, counts = _runs(slots)
        np.subtract.at(self.live, slots, counts)
        self._used[slots] = now
        for slot in slots[self.live[slots] <= 0].tolist():
            self._idles(slot)
        if tokens is not None:
            self._learn(begins, slots, counts, tokens, now)

    def _learn(
        self, begins: IntArray, slots: IntArray, counts: IntArray, tokens: NDArray[Any], now: float
    ) -> None:
        """Take the lengths of samples that ended, in runs of one slot each."""
        has_length = tokens >= 0
        if not all_true(has_length):
            if not any_true(has_length):
                return
            counts = np.add.reduceat(has_length, begins, dtype=np.int64)
            tokens = np.where(has_length, tokens, 0)
        sums = np.add.reduceat(tokens, begins, dtype=np.float64)
        first = int(has_length.argmax())  # one tells enough of the pace
        slot = int(slots[begins.searchsorted(first, side="right") - 1])
        length, total = float(tokens[first]), float(np.add.reduce(sums))
        self._learn_pace(slot, length, total, int(np.add.reduce(counts)), now)
        np.add.at(self.tokens, slots, sums)
        np.add.at(self.finished, slots, counts)

    def _learn_pace(self, slot: int, length: float, total: float, count: int, now: float) -> None:
        """Take `count` samples with `total` tokens together, one of `slot` with `length`."""
        share = 1.0 - (1.0 - _PACE_SHARE) ** count if self.mean_tokens else 1.0
        self.mean_tokens += share * (total / count - self.mean_tokens)
        age = now - float(self.started[slot])
        if length > 0 and age > 0 and self.finished[slot] == 0:
            self.seconds_per_token += _PACE_SHARE * (age / length - self.seconds_per_token)

    def _is_new(self, slot: int) -> bool:
        return not self.finished[slot] and math.isnan(self.started[slot])

    def _idles(self, slot: int) -> None:
        self._idle[slot] = None
        self._idle.move_to_end(slot)
        while len(self._idle) > _IDLE_LIMIT:
            self._forget(next(iter(self._idle)))

    def _forget(self, slot: int) -> None:
        self._idle.pop(slot, None)  # another group may take it
        if self._keys[slot] is not None and self.live[slot] <= 0:
            super()._forget(slot)

    def _take(self, keys: Sequence[str]) -> list[int]:
        taken = super()._take(keys)
        self._state[:, taken if len(taken) != 1 else slice(taken[0], taken[0] + 1)] = _BLANK
        return taken

    def _grow(self, more: int) -> None:
        super()._grow(more)
        self._adopt(np.concatenate([self._state, np.repeat(_BLANK, more, axis=1)], axis=1))

    def _adopt(self, state: FloatArray) -> None:
        self._state = state
        self.prior, self.started, self.tokens, self.finished = state


class SessionTable(_KeyedTable):
    """Keeps a conversation on the (engine, dp rank) that holds its KV cache.

    A session counts on one target until it ends or idles without a lease.
    """

    def __init__(self, idle_seconds: float) -> None:
        super().__init__(idle_seconds)
        self._target = np.zeros(0, dtype=np.int64)
        self.active = np.zeros(0, dtype=np.int64)  # int64[target]: sessions on it

    def widen(self, target_count: int) -> None:
        """Make room for more targets."""
        more = np.zeros(target_count - len(self.active), dtype=np.int64)
        self.active = np.concatenate([self.active, more])

    def open(self, key: str, now: float) -> int:
        """The slot of `key`, taken if new; a new session is UNPLACED."""
        slot = self._slots.get(key)
        if slot is None:
            (slot,) = self._take([key])
        self._used[slot] = now
        return slot

    def target(self, slot: int) -> int:
        return int(self._target[slot])

    def place(self, slot: int, target: int) -> None:
        """Move a session to `target` (UNPLACED takes it off)."""
        previous = self._target[slot]
        if previous != UNPLACED:
            self.active[previous] -= 1
        if target != UNPLACED:
            self.active[target] += 1
        self._target[slot] = target

    def hold(self, slots: IntArray) -> None:
        """Note leases granted in sessions (or NO_SESSION); none idles while it has one."""
        if self._keys and len(chosen := slots[slots >= 0]):
            np.add.at(self.live, chosen, 1)

    def let_go(self, slots: IntArray, now: float) -> None:
        """Note leases given back; slots may hold NO_SESSION."""
        if not self._keys or not len(chosen := slots[slots >= 0]):
            return
        np.subtract.at(self.live, chosen, 1)
        for slot in set(chosen.tolist()):
            if self._keys[slot] is not None:
                self._used[slot] = now
            elif not self.live[slot]:  # it ended while this lease was out
                self._free.append(slot)

    def end(self, key: str) -> bool:
        """Forget a session; False if unknown. Its leases stay charged until given back."""
        slot = self._slots.get(key)
        if slot is not None:
            self._forget(slot)
        return slot is not None

    def clear_target(self, first: int, stop: int) -> None:
        """Take all sessions off targets [first, stop), whose cache is gone."""
        moved = np.flatnonzero((self._target >= first) & (self._target < stop))
        self._target[moved] = UNPLACED
        self.active[first:stop] = 0

    def _is_new(self, slot: int) -> bool:
        return self.target(slot) == UNPLACED

    def _forget(self, slot: int) -> None:
        self.place(slot, UNPLACED)
        super()._forget(slot)

    def _grow(self, more: int) -> None:
        super()._grow(more)
        self._target = np.concatenate([self._target, np.full(more, UNPLACED, dtype=np.int64)])


def _grouped(slots: IntArray) -> IntArray:
    """Without NO_GROUP."""
    grouped = slots >= 0
    return slots if all_true(grouped) else slots[grouped]


def _only(slots: IntArray) -> int | None:
    """The slot that a handful all have; None where they differ, or are many."""
    if not 0 < len(slots) <= _HANDFUL:
        return None
    first, *others = slots.tolist()
    return first if others.count(first) == len(others) else None


def _runs(slots: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """(begins, slots, counts) of the runs of equal slots; siblings mostly stand together, so
    there are fewer than slots to go through."""
    begins = np.concatenate([_ZERO, (slots[1:] != slots[:-1]).nonzero()[0] + 1])
    counts = np.empty(len(begins), dtype=np.int64)
    counts[-1] = len(slots) - begins[-1]
    np.subtract(begins[1:], begins[:-1], out=counts[:-1])
    return begins, slots[begins], counts
