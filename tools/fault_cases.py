"""What the fault matrix injects: faults inside of processes, and disturbances from outside.

A fault is a kill point (`sluice.faults.point`), `done.<Method>`: killed with the work of a call
done and its answer unsent, or `reply.<Method>`: only the answer is lost. A disturbance begins
while the loop stands still at such a point, so that it meets every run at the same place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

# Settings of a run, by schedule. Those that are deterministic have the same weights.
SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "sync": {},
    "colocated": {"placement": "colocated"},
    "colocated-sampled": {"placement": "colocated", "deterministic": False},  # without seeds
    "asynchronous": {"deterministic": False, "max_staleness": 3},
    "over-sampled": {"deterministic": False, "over_sampling": 1.5},
    "behind": {"deterministic": False, "weight_transport": "collective"},
    "behind-asynchronous": {
        "deterministic": False,
        "weight_transport": "collective",
        "max_staleness": 2,
    },
}


@dataclass(frozen=True)
class Fault:
    """`process` is a service of the stack, or `loop`; `passing` counts from the run's start.

    `stops`: it is stopped there (SIGSTOP) until somebody ends it, and not killed. `beside`: passing
    of `weights.announced` at which a rank is stopped until the fault has fired, for what others do
    only while a version is written.
    """

    process: str
    name: str
    passing: int = 1
    schedule: str = "sync"
    stops: bool = False
    beside: int = 0

    @property
    def is_kill(self) -> bool:
        return not self.name.startswith("reply.")

    @property
    def is_comparable(self) -> bool:
        """Whether the run has the weights of an undisturbed one, which is synchronous."""
        return SCHEDULES[self.schedule].get("deterministic", True)


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
    Fault("loop", "checkpoint_begun", 1),
    Fault("loop", "checkpoint_begun", 2),
    Fault("loop", "checkpoint", 1),
    Fault("loop", "checkpoint", 2),
    Fault("loop", "run_checkpoint", 2),
    Fault("loop", "run_checkpoints_removed", 3),
    Fault("loop", "blob.pinned", 4),
    Fault("trainer", "done.UploadBatch", 2),
    Fault("trainer", "done.ForwardBackward", 3),
    Fault("trainer", "done.StepOptimizer", 3),
    Fault("trainer", "weights.allocated", 3),
    Fault("trainer", "weights.announced", 3),  # a rank
    Fault("trainer", "weights.announced", 6, stops=True),
    Fault("trainer", "weights.allocated", 4, stops=True),
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
    Fault("trainer", "rank1.written", 2),
    Fault("trainer", "rank0.written", 2, stops=True),
    Fault("trainer", "checkpoint.files", 3, stops=True),
    Fault("trainer", "rank0.load", 1),
    Fault("engine-0", "weights.pinned", 3),
    Fault("engine-0", "engine.staged", 1, beside=3),
    Fault("engine-1", "engine.staged", 1, stops=True, beside=5),
    Fault("engine-0", "engine.prepared", 3),
    Fault("engine-1", "engine.swapped", 3),
    Fault("engine-1", "done.Generate", 3),
    Fault("episodes", "journal.opened", 2),
    Fault("episodes", "blob.written", 6),
    Fault("episodes", "blob.stored", 6),
    Fault("episodes", "blob.pinned", 3),
    Fault("episodes", "journal.recorded", 3),
    Fault("episodes", "journal.settled", 2),
    Fault("router", "done.StreamLeases", 3),
    Fault("router", "done.RegisterEngine", 4),
)
SCHEDULED = (
    Fault("loop", "generated", 14, "asynchronous"),
    Fault("loop", "consumed", 4, "asynchronous"),
    Fault("loop", "checkpoint_begun", 3, "asynchronous"),
    Fault("trainer", "rank0.step", 3, "asynchronous"),
    Fault("trainer", "rank1.written", 3, "asynchronous"),
    Fault("trainer", "checkpoint.files", 2, "asynchronous"),
    Fault("trainer", "weights.announced", 5, "asynchronous"),
    Fault("engine-0", "engine.staged", 1, "asynchronous", beside=7),
    Fault("engine-0", "engine.swapped", 3, "asynchronous"),
    Fault("episodes", "journal.recorded", 2, "asynchronous"),
    Fault("loop", "surplus", 3, "over-sampled"),
    Fault("episodes", "journal.settled", 3, "over-sampled"),
)
# Engines and ranks take turns: each hand-over is passed once before the first step, then by steps.
COLOCATED = (
    Fault("loop", "engines_asleep", 1, "colocated"),
    Fault("loop", "engines_asleep", 3, "colocated"),
    Fault("loop", "trainers_awake", 3, "colocated"),
    Fault("loop", "trainers_asleep", 1, "colocated"),
    Fault("loop", "trainers_asleep", 4, "colocated"),
    Fault("loop", "committed", 4, "colocated"),
    Fault("loop", "version", 3, "colocated"),
    Fault("trainer", "rank0.sleep", 2, "colocated"),
    Fault("trainer", "rank1.sleep", 3, "colocated", stops=True),
    Fault("trainer", "rank1.wake", 2, "colocated"),
    Fault("trainer", "rank0.wake", 3, "colocated", stops=True),
    Fault("trainer", "done.Sleep", 3, "colocated"),
    Fault("trainer", "done.Wake", 3, "colocated"),
    Fault("trainer", "done.Wake", 2, "colocated", stops=True),
    Fault("trainer", "reply.Sleep", 3, "colocated"),
    Fault("trainer", "reply.Wake", 3, "colocated"),
    Fault("trainer", "rank1.written", 2, "colocated"),
    Fault("engine-0", "done.Sleep", 3, "colocated"),
    Fault("engine-0", "done.Wake", 3, "colocated"),
    Fault("engine-1", "done.Sleep", 2, "colocated", stops=True),
    Fault("engine-1", "done.Wake", 3, "colocated", stops=True),
    Fault("engine-1", "done.Pause", 3, "colocated"),
    Fault("engine-0", "done.Resume", 3, "colocated"),
    Fault("engine-0", "reply.Sleep", 3, "colocated"),
    Fault("engine-1", "reply.Wake", 3, "colocated"),
    Fault("engine-0", "reply.Resume", 3, "colocated"),
    Fault("engine-1", "engine.prepared", 3, "colocated"),
    Fault("engine-0", "engine.swapped", 3, "colocated"),
    Fault("episodes", "journal.recorded", 3, "colocated"),
)
# ... of trainers and engines that do so in a way of their own, each on a stack of its kind: what
# ranks give up and take back, and what they publish in between.
HANDED_OVER = (
    Fault("trainer", "rank0.sleep", 3, "colocated"),
    Fault("trainer", "rank1.sleep", 2, "colocated", stops=True),
    Fault("trainer", "rank1.wake", 3, "colocated"),
    Fault("trainer", "rank0.wake", 2, "colocated", stops=True),
    Fault("trainer", "done.Sleep", 3, "colocated"),
    Fault("trainer", "done.Wake", 3, "colocated", stops=True),
    Fault("trainer", "rank1.publish", 3, "colocated"),
    Fault("trainer", "weights.announced", 4, "colocated", stops=True),
    Fault("trainer", "weights.manifest", 3, "colocated"),
    Fault("trainer", "rank0.step", 3, "colocated"),
)
SGLANG = (
    Fault("engine-0", "done.Sleep", 3, "colocated-sampled"),
    Fault("engine-0", "done.Wake", 3, "colocated-sampled"),
    Fault("engine-0", "done.Wake", 2, "colocated-sampled", stops=True),
    Fault("engine-0", "reply.Sleep", 3, "colocated-sampled"),
    Fault("engine-0", "reply.Wake", 3, "colocated-sampled"),
    Fault("engine-0", "engine.prepared", 3, "colocated-sampled"),
    Fault("engine-0", "engine.swapped", 3, "colocated-sampled"),
)
# Weights that are sent first and written behind: between the broadcast and the version. On a stack
# whose trainer does that.
BEHIND = (
    Fault("trainer", "weights.promised", 3, "behind-asynchronous"),
    Fault("trainer", "weights.sent", 3, "behind-asynchronous"),
    Fault("trainer", "weights.sent", 4, "behind-asynchronous", stops=True),
    Fault("trainer", "weights.behind", 4, "behind-asynchronous"),  # a rank
    Fault("trainer", "weights.behind", 6, "behind-asynchronous", stops=True),
    Fault("trainer", "rank1.weights_written", 3, "behind-asynchronous"),
    Fault("trainer", "weights.written", 3, "behind-asynchronous"),
    Fault("trainer", "weights.written", 4, "behind-asynchronous", stops=True),
    Fault("trainer", "weights.manifest", 4, "behind-asynchronous"),
    Fault("trainer", "weights.renamed", 4, "behind-asynchronous"),
    Fault("loop", "published", 3, "behind-asynchronous"),
    Fault("loop", "version", 3, "behind-asynchronous"),
    Fault("loop", "committed", 4, "behind-asynchronous"),
    Fault("loop", "checkpoint_begun", 2, "behind-asynchronous"),
    Fault("trainer", "weights.behind", 6, "behind", stops=True),
    Fault("trainer", "weights.written", 3, "behind"),
    Fault("loop", "published", 3, "behind"),
    Fault("engine-0", "transfer.received", 3, "behind-asynchronous"),
    Fault("engine-0", "engine.prepared", 3, "behind-asynchronous"),
    Fault("engine-1", "engine.swapped", 3, "behind-asynchronous"),
    Fault("engine-1", "engine.prepared", 3, "behind-asynchronous", stops=True),
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
    Fault("router", "reply.StreamLeases", 3),
    Fault("engine-0", "reply.PrepareWeights", 2),
    Fault("engine-1", "reply.CommitWeights", 2),
)
Kind = Literal[
    "kill", "stop", "pause", "kill again", "flip", "truncate", "full", "read-only", "stall", "cut"
]


@dataclass(frozen=True)
class Disturbance:
    """What is done to `target` at a passing of a point of the loop, and undone after `seconds`.

    kill, stop (until somebody replaces it), pause (SIGSTOP, then SIGCONT), kill again (whenever it
    is back, until the run is lost to it or got on): a process. flip, truncate: files of a kind
    (`tools.fault_damage.FILES`). full: no file of a process can grow. read-only: a directory.
    stall: a connection of two processes carries nothing; cut: it breaks and is refused.

    `killed` processes die with it, so that their next lives read what was damaged. `restart`: the
    loop too, so that the run is resumed.
    """

    kind: Kind
    target: str
    at: str = "generated"
    passing: int = 6
    seconds: float = 2.0
    killed: tuple[str, ...] = ()
    restart: bool = False
    timeout: float | None = None  # for services to be ready; None is that of all runs
    schedule: str = "sync"

    @property
    def needs_namespaces(self) -> bool:
        """Of the matrix's own: to mount, to have a socket drop what it gets."""
        is_socket = self.kind == "stall" and self.target.startswith("rank")
        return is_socket or self.kind == "read-only"

    def __str__(self) -> str:
        with_them = f" + {','.join(self.killed)}" if self.killed else ""
        schedule = "" if self.schedule == "sync" else f" {self.schedule}"
        return f"{self.kind} {self.target}{with_them}, {self.at} #{self.passing}{schedule}"


_SERVICES = ("router", "converter", "trainer", "engine-0", "engine-1", "episodes")
_RANKS = ("rank0", "rank1")
_ENVIRONMENT = ("environment", "keeper")  # which computes rewards, and the process that ends it
_PROCESSES = (*_SERVICES, *_RANKS, *_ENVIRONMENT, "supervisor", "loop")
_MOMENTS = (("generated", 6), ("uploaded", 3))  # while groups are sampled; while the trainer works


# every process at every point of a hand-over, in its order
HANDOVERS = (
    *(
        Disturbance(kind, process, at, 3, schedule="colocated")
        for at in ("engines_asleep", "trainers_awake", "published", "trainers_asleep", "committed")
        for process in ("trainer", "rank1", "engine-0", "router", "loop")
        for kind in ("kill", "pause")
    ),
)
SGLANG_HANDOVERS = (
    *(
        replace(each, schedule="colocated-sampled")
        for each in HANDOVERS
        if each.target in ("engine-0", "loop") and each.at != "trainers_awake"
    ),
)


def _signals() -> Iterable[Disturbance]:
    sampling, training = _MOMENTS
    for process in _PROCESSES:
        yield Disturbance("kill", process, *sampling)
        yield Disturbance("pause", process, *sampling)
    for process in (*_SERVICES, *_RANKS, "environment"):
        yield Disturbance("stop", process, *sampling)
    for process in ("trainer", *_RANKS, "engine-0", "supervisor", "loop"):
        yield Disturbance("kill", process, *training)
        yield Disturbance("pause", process, *training)
    for process in ("trainer", "rank1"):
        yield Disturbance("stop", process, *training)
    yield Disturbance("kill again", "rank0", "uploaded", 3)
    yield from HANDOVERS


def _files() -> Iterable[Disturbance]:
    kinds: tuple[Literal["flip", "truncate"], ...] = ("flip", "truncate")
    for kind in kinds:
        # what the run itself resumes from, and what it goes through again since then
        for target in ("ledger", "run checkpoint", "prompts", "ledger log", "metrics", "trace"):
            yield Disturbance(kind, target, "committed", 4, restart=True)
        for target in ("policy", "optimizer", "random state", "checkpoint record"):
            yield Disturbance(kind, target, "committed", 4, restart=True)
            # ... and what a trainer that lost its ranks, or itself, goes back to by itself
        yield Disturbance(kind, "policy", "uploaded", 3, killed=("rank0",))
        yield Disturbance(kind, "optimizer", "uploaded", 3, killed=("trainer",))
        yield Disturbance(kind, "blobs consumed", "consumed", 3, restart=True)
        yield Disturbance(kind, "blobs generated", "generated", 8)
        yield Disturbance(kind, "blobs generated", "generated", 6, restart=True)
        # what a version of weights is read from: by all engines at once, by one that comes back
        for target in ("weight shard", "weight manifest", "weight config"):
            yield Disturbance(kind, target, "published", 3, timeout=10.0)
            yield Disturbance(kind, target, "generated", 6, killed=("engine-0",))
        for target in ("journals", "blob pins"):
            yield Disturbance(kind, target, "generated", 6, killed=("episodes",))
        yield Disturbance(kind, "blob pins", "committed", 4, restart=True)
        # what `sluice up` begins with, and what it tells others
        for target in ("ports", "addresses", "service settings"):
            yield Disturbance(kind, target, "generated", 6, killed=("supervisor",))
    yield Disturbance("truncate", "services.json", "committed", 4, restart=True)


def _disks() -> Iterable[Disturbance]:
    for process in (*_SERVICES, *_RANKS, "environment", "supervisor", "loop", "all"):
        yield Disturbance("full", process, "generated", 6)
    for process in ("trainer", "rank0", "rank1", "loop", "all"):
        yield Disturbance("full", process, "stepped", 3)  # a version, then a checkpoint
    yield Disturbance("full", "supervisor", "generated", 6, killed=("engine-0",))
    for directory in ("weights", "checkpoints", "blobs", "blob_pins", "rollouts", "store", "run"):
        yield Disturbance("read-only", directory, "generated", 6)
        yield Disturbance("read-only", directory, "stepped", 3)
    yield Disturbance("read-only", "up", "generated", 6, killed=("engine-0",))


_PAIRS = (
    "loop-router",
    "loop-trainer",
    "loop-engine-0",
    "loop-engine-1",
    "loop-episodes",
    "episodes-router",
    "episodes-engine-0",
    "episodes-engine-1",
    "engine-0-router",
    "engine-1-router",
    *(f"supervisor-{service}" for service in _SERVICES),
    "rank0-trainer",
    "rank1-trainer",
    "rank0-rank1",
)

_AT_WORK = ("loop-trainer", "rank0-trainer", "rank0-rank1")  # parted while the trainer works too


def _partitions() -> Iterable[Disturbance]:
    kinds: tuple[Literal["stall", "cut"], ...] = ("stall", "cut")
    for kind in kinds:
        for pair in _PAIRS:
            for at, passing in _MOMENTS if pair in _AT_WORK else _MOMENTS[:1]:
                yield Disturbance(kind, pair, at, passing, seconds=3.0)
        yield Disturbance(kind, "loop-engine-0", "published", 3, seconds=3.0)


BEHIND_DISTURBANCES = (  # on the same stack
    *(
        Disturbance(kind, target, "published", 3, schedule="behind")
        for kind in ("kill", "pause")
        for target in ("trainer", "rank0", "engine-0", "loop")
    ),
    Disturbance("full", "rank0", "published", 3, schedule="behind"),
    Disturbance("full", "trainer", "published", 3, schedule="behind"),
)
DISTURBANCES = (*_signals(), *_files(), *_disks())
PARTITIONS = (*_partitions(),)  # on a stack whose connections go through forwarders

SHORT_DISTURBANCES = (
    Disturbance("kill", "supervisor"),
    Disturbance("pause", "trainer", "uploaded", 3),
    Disturbance("flip", "blobs consumed", "consumed", 3, restart=True),
    Disturbance("truncate", "ledger", "committed", 4, restart=True),
    Disturbance("full", "trainer", "stepped", 3),
)

SHORT = (
    Fault("trainer", "weights.announced", 4),
    Fault("loop", "consumed", 3),
    Fault("trainer", "done.StepOptimizer", 3),
    Fault("trainer", "rank0.step", 3),
    Fault("rollout", "journal.recorded", 3),
    Fault("router", "done.StreamLeases", 3),
    Fault("trainer", "reply.ForwardBackward", 2),
)
SHORT_COLOCATED = (
    Fault("loop", "trainers_asleep", 4, "colocated"),
    Fault("trainer", "rank0.sleep", 3, "colocated"),
    Fault("rollout", "done.Wake", 3, "colocated", stops=True),
)
SHORT_SCHEDULED = (
    Fault("loop", "consumed", 4, "asynchronous"),
    Fault("loop", "surplus", 3, "over-sampled"),
)
SHORT_BEHIND = (
    Fault("trainer", "weights.behind", 3, "behind", stops=True),  # a rank, while engines sample
    Fault("trainer", "weights.written", 3, "behind"),
    Fault("loop", "published", 3, "behind"),
)
