"""Episode workers that registered: the loop finds them here; they get no leases."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from sluice.api.router.v1 import router_service_pb2 as pb
from sluice.runtime.wire import timestamp_of

_FORGET_AFTER = 10  # TTLs without a heartbeat


@dataclass
class _Worker:
    engine: pb.Engine
    last_seen: float
    draining: bool = False


class EpisodeRegistry:
    """Keeps workers by id: one silent for `ttl` seconds is lost, and forgotten some time after."""

    def __init__(self, ttl: float, clock: Callable[[], float]) -> None:
        self.ttl = ttl
        self.epoch = time.time_ns()  # of this router
        self._clock = clock
        self._workers: dict[str, _Worker] = {}

    def holder(self, engine: pb.Engine, known_epoch: int) -> pb.Engine | None:
        """Return the live process that took the name of one that had registered here before it.

        None where there is none. `known_epoch` is the last one that it was told.
        """
        known = self._workers.get(engine.engine_id)
        if known is None or known.engine.incarnation == engine.incarnation:
            return None
        return known.engine if known_epoch == self.epoch and self._is_alive(known) else None

    def former(self, engine: pb.Engine) -> str:
        """Return the incarnation of the process that a worker takes the place of; empty if none."""
        known = self._workers.get(engine.engine_id)
        former = "" if known is None else known.engine.incarnation
        return "" if former == engine.incarnation else former

    def register(self, engine: pb.Engine) -> pb.EngineState:
        known = self._workers.get(engine.engine_id)
        restarted = known is None or known.engine.incarnation != engine.incarnation
        draining = known is not None and known.draining and not restarted
        worker = _Worker(engine, self._clock(), draining)
        self._workers[engine.engine_id] = worker
        return self._state(worker)

    def drain(self, engine_id: str, draining: bool) -> pb.Engine | None:
        """Stop or resume giving rollouts to a worker; returns it, None if unknown."""
        worker = self._workers.get(engine_id)
        if worker is None:
            return None
        worker.draining = draining
        return self._to_proto(worker)

    def list(self, pool: str) -> list[pb.Engine]:
        """Workers of a pool; empty means all."""
        return [
            self._to_proto(worker)
            for worker in self._workers.values()
            if pool in ("", worker.engine.pool)
        ]

    def expire(self) -> None:
        limit = self._clock() - self.ttl * _FORGET_AFTER
        for engine_id in [key for key, w in self._workers.items() if w.last_seen < limit]:
            del self._workers[engine_id]

    def _is_alive(self, worker: _Worker) -> bool:
        return self._clock() - worker.last_seen <= self.ttl

    def _state(self, worker: _Worker) -> pb.EngineState:
        if not self._is_alive(worker):
            return pb.ENGINE_STATE_LOST
        return pb.ENGINE_STATE_DRAINING if worker.draining else pb.ENGINE_STATE_ACTIVE

    def _to_proto(self, worker: _Worker) -> pb.Engine:
        engine = pb.Engine()
        engine.CopyFrom(worker.engine)
        engine.state = self._state(worker)
        age = self._clock() - worker.last_seen
        engine.heartbeat_time.CopyFrom(timestamp_of(time.time() - age))
        return engine
