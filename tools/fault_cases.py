"""What the fault matrix injects: process, fault, and at which passing it fires.

A fault is a kill point (`sluice.faults.point`), `done.<Method>`: killed with the work of a call
done and its answer unsent, or `reply.<Method>`: only the answer is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Settings of a run, by schedule. Only the first one's weights can be compared.
SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "sync": {},
    "asynchronous": {"deterministic": False, "max_staleness": 3},
    "over-sampled": {"deterministic": False, "over_sampling": 1.5},
}


@dataclass(frozen=True)
class Fault:
    """`process` is a service of the stack, or `loop`; `passing` counts from the run's start."""

    process: str
    name: str
    passing: int = 1
    schedule: str = "sync"

    @property
    def is_kill(self) -> bool:
        return not self.name.startswith("reply.")


# The run: 5 steps, run checkpoints at 0, 2, 4 and 5. The first of them, and the first publication,
# come before the steps.
KILLS = (
    Fault("loop", "issued", 3),
    Fault("loop", "generated", 10),
    Fault("loop", "uploaded", 2),
    Fault("loop", "gradients", 3),
    Fault("loop", "stepped", 3),
    Fault("loop", "consumed", 4),
    Fault("loop", "published", 1),
    Fault("loop", "published", 4),
    Fault("loop", "version", 3),
    Fault("loop", "committed", 4),
    Fault("loop", "checkpoint", 1),
    Fault("loop", "checkpoint", 2),
    Fault("loop", "run_checkpoint", 2),
    Fault("loop", "run_checkpoints_removed", 3),
    Fault("loop", "blob.pinned", 4),
    Fault("trainer", "done.UploadBatch", 2),
    Fault("trainer", "done.ForwardBackward", 3),
    Fault("trainer", "done.StepOptimizer", 3),
    Fault("trainer", "weights.allocated", 3),
    Fault("trainer", "weights.manifest", 3),
    Fault("trainer", "weights.renamed", 4),
    Fault("trainer", "weights.trashed", 1),
    Fault("trainer", "checkpoint.files", 2),
    Fault("trainer", "checkpoint.record", 2),
    Fault("trainer", "checkpoint.renamed", 2),
    Fault("trainer", "rank0.add_rows", 2),
    Fault("trainer", "rank1.forward_backward", 2),
    Fault("trainer", "rank0.step", 3),
    Fault("trainer", "rank1.step", 3),
    Fault("trainer", "rank0.publish", 3),
    Fault("trainer", "rank1.save", 2),
    Fault("trainer", "rank0.load", 1),
    Fault("engine-0", "weights.pinned", 3),
    Fault("engine-0", "engine.prepared", 3),
    Fault("engine-1", "engine.swapped", 3),
    Fault("engine-1", "done.Generate", 3),
    Fault("episodes", "journal.opened", 2),
    Fault("episodes", "blob.written", 6),
    Fault("episodes", "blob.stored", 6),
    Fault("episodes", "blob.pinned", 3),
    Fault("episodes", "journal.recorded", 3),
    Fault("episodes", "journal.settled", 2),
    Fault("router", "done.AcquireLeases", 3),
    Fault("router", "done.RegisterEngine", 4),
)
SCHEDULED = (
    Fault("loop", "generated", 14, "asynchronous"),
    Fault("loop", "consumed", 4, "asynchronous"),
    Fault("trainer", "rank0.step", 3, "asynchronous"),
    Fault("engine-0", "engine.swapped", 3, "asynchronous"),
    Fault("episodes", "journal.recorded", 2, "asynchronous"),
    Fault("loop", "surplus", 3, "over-sampled"),
    Fault("episodes", "journal.settled", 3, "over-sampled"),
)
LOST_REPLIES = (
    Fault("trainer", "reply.UploadBatch", 2),
    Fault("trainer", "reply.ForwardBackward", 2),
    Fault("trainer", "reply.StepOptimizer", 2),
    Fault("trainer", "reply.PublishWeights", 3),
    Fault("trainer", "reply.SaveCheckpoint", 2),
    Fault("trainer", "reply.DeleteBatch", 2),
    Fault("trainer", "reply.ComputeAdvantages", 2),
    Fault("trainer", "reply.LoadCheckpoint", 1),
    Fault("trainer", "reply.WaitOperation", 4),
    Fault("episodes", "reply.Rollout", 6),
    Fault("engine-0", "reply.Generate", 2),
    Fault("router", "reply.AcquireLeases", 3),
    Fault("engine-0", "reply.PrepareWeights", 2),
    Fault("engine-1", "reply.CommitWeights", 2),
)
SHORT = (
    Fault("loop", "consumed", 3),
    Fault("trainer", "done.StepOptimizer", 3),
    Fault("trainer", "rank0.step", 3),
    Fault("rollout", "journal.recorded", 3),
    Fault("router", "done.AcquireLeases", 3),
    Fault("trainer", "reply.ForwardBackward", 2),
)
SHORT_SCHEDULED = (
    Fault("loop", "consumed", 4, "asynchronous"),
    Fault("loop", "surplus", 3, "over-sampled"),
)
