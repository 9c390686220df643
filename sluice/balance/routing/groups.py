"""What is known of groups: how long their samples run."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sluice.balance.routing.masks import all_of, any_of

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

NO_GROUP = -1
_BLANK = np.array([[np.nan], [np.nan], [0.0], [0.0]])  # prior, started, tokens, finished
_IDLE_LIMIT = 16_384  # groups without leases that are remembered
_PACE_SHARE = 0.05  # of a new observation in the running means
_PRIOR_WEIGHT = 2.0  # a caller's expectation counts as this many finished samples


class GroupTable:
    """Groups by id, as slots of columns; forgotten when idle and without leases."""

    def __init__(self, idle_seconds: float) -> None:
        self._idle_seconds = idle_seconds
        self._slots: dict[str, int] = {}
        self._keys: list[str | None] = []
        self._free: list[int] = []
        self._idle: deque[int] = deque()  # slots whose last lease ended, oldest first
        self.mean_tokens = 0.0  # of recently finished samples, of any group
        self.seconds_per_token = 0.02  # of groups' first finished samples
        self._used = np.zeros(0)  # float64[slot]: last use; inf where the slot is free
        # float64[slot] each. prior: tokens the caller expects, NaN unknown; started: when the
        # first sample was bound, NaN before; tokens and finished: of samples that ended.
        self.prior: FloatArray
        self.started: FloatArray
        self.tokens: FloatArray
        self.finished: FloatArray
        self._adopt(np.zeros((4, 0)))
        self.live = np.zeros(0, dtype=np.int64)  # int64[slot]: leases queued or bound

    def __len__(self) -> int:
        return len(self._slots)

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

    def expect(self, slots: IntArray, tokens: FloatArray) -> None:
        """Take the caller's expectations of output tokens per sample; NaN says nothing."""
        told = (slots >= 0) & ~np.isnan(tokens)
        self.prior[slots[told]] = tokens[told]

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

    def hold(self, slots: IntArray) -> None:
        """Note leases granted to slots[i] (or NO_GROUP), bound or queued."""
        if self._slots:
            np.add.at(self.live, _grouped(slots), 1)

    def start(self, slots: IntArray, now: float) -> None:
        """Note that samples of these groups were bound; slots may be NO_GROUP."""
        if not self._slots:
            return
        slots = _grouped(slots)
        fresh = np.isnan(self.started[slots])
        if any_of(fresh):
            self.started[slots[fresh]] = now

    def finish(self, slots: IntArray, tokens: NDArray[Any] | None, now: float) -> None:
        """Note samples that ended; tokens[i] < 0 says nothing was learnt."""
        if not self._slots:
            return
        grouped = slots >= 0
        if not all_of(grouped):
            slots = slots[grouped]
            tokens = None if tokens is None else tokens[grouped]
        if not len(slots):
            return
        np.subtract.at(self.live, slots, 1)
        self._used[slots] = now
        self._idle.extend(dict.fromkeys(slots[self.live[slots] <= 0].tolist()))
        while len(self._idle) > _IDLE_LIMIT:
            self._forget(self._idle.popleft())
        if tokens is None:
            return
        learnt = tokens >= 0
        if not all_of(learnt):
            slots, tokens = slots[learnt], tokens[learnt]
        if not len(slots):
            return
        self._learn_pace(slots, tokens, now)
        np.add.at(self.tokens, slots, tokens)
        np.add.at(self.finished, slots, 1.0)

    def _learn_pace(self, slots: IntArray, tokens: NDArray[Any], now: float) -> None:
        share = 1.0 - (1.0 - _PACE_SHARE) ** len(tokens) if self.mean_tokens else 1.0
        self.mean_tokens += share * (float(tokens.sum()) / len(tokens) - self.mean_tokens)
        slot, count = int(slots[0]), float(tokens[0])  # one of a batch tells enough
        age = now - float(self.started[slot])
        if count > 0 and age > 0 and self.finished[slot] == 0:
            self.seconds_per_token += _PACE_SHARE * (age / count - self.seconds_per_token)

    def expire(self, now: float) -> int:
        """Forget groups that are idle and hold no lease; returns how many."""
        idle = np.flatnonzero((self._used <= now - self._idle_seconds) & (self.live <= 0))
        for slot in idle.tolist():
            self._forget(slot)
        return len(idle)

    def _forget(self, slot: int) -> None:
        """Free the slot of a group without leases."""
        key = self._keys[slot]
        if key is None or self.live[slot] > 0:
            return
        del self._slots[key]
        self._keys[slot] = None
        self._used[slot] = np.inf
        self._free.append(slot)

    def _take(self, keys: list[str]) -> None:
        while len(self._free) < len(keys):
            self._grow()
        taken = self._free[-len(keys) :] if keys else []
        del self._free[len(self._free) - len(keys) :]
        for key, slot in zip(keys, taken, strict=True):
            self._slots[key] = slot
            self._keys[slot] = key
        self._state[:, taken] = _BLANK
        self.live[taken] = 0

    def _grow(self) -> None:
        size = len(self._keys)
        more = max(64, size)
        self._keys += [None] * more
        self._free += range(size + more - 1, size - 1, -1)
        self._used = np.concatenate([self._used, np.full(more, np.inf)])
        self.live = np.concatenate([self.live, np.zeros(more, dtype=np.int64)])
        self._adopt(np.concatenate([self._state, np.repeat(_BLANK, more, axis=1)], axis=1))

    def _adopt(self, state: FloatArray) -> None:
        self._state = state
        self.prior, self.started, self.tokens, self.finished = state


def _grouped(slots: IntArray) -> IntArray:
    """Without NO_GROUP."""
    grouped = slots >= 0
    return slots if all_of(grouped) else slots[grouped]
