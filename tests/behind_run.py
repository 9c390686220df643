"""A run whose weights are sent first and written behind, on ranks of any backend."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from sluice.api.common.v1 import sample_pb2
from sluice.client import EngineClient
from sluice.supervise import read_services
from sluice.weights.shards import load_verified
from sluice.weights.store import WeightStore
from tests.patience import PATIENCE
from tools.fault_cases import SCHEDULES, Fault
from tools.fault_run import FaultRun, save_first_checkpoint
from tools.fault_stack import Stack, behind_services, small_services

STEPS = 3
# A rank stands with the third version written, and does not say so before it is given up.
LOST = Fault("trainer", "rank1.weights_written", 3, "behind", stops=True)


def check_run(directory: Path, backend: dict[str, Any]) -> None:
    """Train on two ranks of `backend`, of which one stands while it writes, until it is lost.

    Engines sampled from a version that never was, so groups are dropped; all that the run trained
    on, and what engines serve at its end, is in the store with the digest that was promised.
    """

    def services(model: Path) -> dict[str, Any]:
        described = behind_services(model, like=small_services)
        trainer = described["trainer"]["config"]
        trainer |= {**backend, "ranks": trainer["ranks"] | {"count": 2}}
        return described

    stack = Stack(directory, services)
    stack.prepare()
    try:
        stack.start(PATIENCE)
        stack.initial_checkpoint = save_first_checkpoint(stack, PATIENCE)
        changes = {**SCHEDULES["behind"], "steps": STEPS}
        outcome = FaultRun(stack, "behind", PATIENCE, changes).run(LOST)
        served = asyncio.run(_served(stack))
    finally:
        stack.stop()
    assert (outcome.failure, outcome.lost, outcome.doubled, outcome.hung) == ("", 0, 0, False)
    assert outcome.dropped > 0
    store = WeightStore(directory / "store" / "weights")
    versions = store.versions()
    allocated = range(min(versions), max(versions) + 1)
    assert len(set(allocated) - set(versions)) == 1  # lost, and its number not given again
    record = store.get(served.version)
    assert record.digest == served.digest
    assert record.directory is not None
    assert list(load_verified(record.directory, store.manifest(served.version)))


async def _served(stack: Stack) -> sample_pb2.WeightVersion:
    address = read_services(stack.directory / "services.json")["rollout"]
    async with EngineClient(address) as engine:
        return (await engine.get()).weights
