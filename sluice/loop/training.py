"""The trainer as a loop drives it: one step, the critic beside it, the way back when it is lost."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc

from sluice import faults
from sluice.api.trainer.v1 import trainer_service_pb2 as pb
from sluice.client import RemoteError, TrainerClient, new_request_id
from sluice.config import ConfigError
from sluice.loop import trace
from sluice.loop.config import AlgorithmConfig, CriticConfig
from sluice.loop.ledger import LedgerGroup
from sluice.loop.metrics import TRAINER_LOST
from sluice.loop.run_samples import KEPT_COLUMNS
from sluice.runtime.errors import text_of
from sluice.runtime.recovery import NotReadyError, wait_until_ready
from sluice.runtime.security import SecurityConfig
from sluice.runtime.wire import seconds_of
from sluice.samples.blobs import BlobReference

logger = logging.getLogger(__name__)

Work = Callable[[], Awaitable[None]]
Teach = Callable[[TrainerClient, str, Sequence[LedgerGroup], float | None], Awaitable[None]]

TRAINER_LOSSES = 12  # in a row without a step in between: of ranks in three lives of its process
DOUBTFUL_LOSSES = 2  # of one kind in a row: the next time it is no trainer that was lost

# What a trainer answers whose ranks or controller went away and came back at an earlier state.
_LOST = {
    "RANK_LOST",
    "LOADING",
    "STEP_MISMATCH",
    "BATCH_NOT_FOUND",
    "OPERATION_NOT_FOUND",
    "COLUMN_MISSING",
    "GRADIENTS_INCOMPLETE",
    "PARTS_MISMATCH",
    "NO_GRADIENTS",
}
_CHECKPOINT_LOST = {"CHECKPOINT_DAMAGED", "CHECKPOINT_NOT_FOUND"}
MISMATCH = "rollout_mismatch"  # of trainer and engines: metrics whose names begin so
BLOB_LOST = {"BLOB_NOT_FOUND", "DIGEST_MISMATCH"}


class TrainerBrokenError(Exception):
    """The trainer cannot go on; the message carries its reason."""


class MismatchError(Exception):
    """Trainer and engines give the same tokens log-probs too far apart for rounding."""


class TrainerLostError(Exception):
    """The trainer is not where this run left it."""


class CheckpointLostError(Exception):
    """What a trainer restored is not what the run checkpoint says."""


def is_checkpoint_lost(error: RemoteError | CheckpointLostError) -> bool:
    """Tells a checkpoint that will never load again from a trainer that cannot load it now."""
    return isinstance(error, CheckpointLostError) or error.reason in _CHECKPOINT_LOST


def layout_of(trainer: pb.Trainer) -> dict[str, int]:
    """Returns the degrees of parallelism that are set."""
    return {field.name: value for field, value in trainer.layout.ListFields()}


def check_step(step: int, expected: int, what: str) -> None:
    """Raises TrainerLostError for a trainer that restarted: it has forgotten its last steps."""
    if step != expected:
        raise TrainerLostError(f"{what} of step {step}, this run is at {expected}")


def lost_blob(error: RemoteError, groups: Sequence[LedgerGroup]) -> str | None:
    """Returns the digest of the blob of `groups` that is lost to the trainer, if that is the error.

    It cannot be read, or is of a temperature that the run had before it was resumed with another.
    """
    if error.reason == "TEMPERATURE_MISMATCH":
        group_id = error.metadata.get("sample_id", "").rpartition("/")[0]
        blobs = [group.blob for group in groups if group.blob and group.group_id == group_id]
        return blobs[0].digest if blobs else None
    if error.reason not in BLOB_LOST:
        return None
    return error.metadata.get("blob") or error.metadata.get("name")


async def active_trainer(client: TrainerClient) -> pb.Trainer:
    """Returns the trainer. Raises NotReadyError while it loads, TrainerBrokenError for good."""
    trainer = await client.get()
    if trainer.state == pb.Trainer.STATE_FAILED:
        raise TrainerBrokenError(f"{client.where} failed: {trainer.failure}")
    if trainer.state != pb.Trainer.STATE_ACTIVE:
        raise NotReadyError(why_not_active(trainer))
    return trainer


def why_not_active(trainer: pb.Trainer) -> str:
    """What a trainer that takes no work says of itself and its ranks."""
    said = [pb.Trainer.State.Name(trainer.state)]
    if trainer.restart_count:
        said.append(f"its ranks were lost {trainer.restart_count} times: {trainer.failure}")
    now = time.time()
    for rank in trainer.ranks:
        age = max(0.0, now - seconds_of(rank.heartbeat_time))
        at = f" at {rank.where}" if rank.where else ""
        said.append(f"rank {rank.rank} in {rank.activity or 'idle'}{at}, heard of {age:.0f} s ago")
    if not trainer.ranks:
        said.append("no rank has reported yet")
    return "; ".join(said)


async def describe_trainer(client: TrainerClient, seconds: float) -> pb.Trainer:
    """Returns the trainer once it answers, whatever its state. Raises TrainerBrokenError."""
    return await wait_until_ready(client.where, client.get, seconds, TrainerBrokenError)


async def wait_for_trainer(client: TrainerClient, seconds: float) -> pb.Trainer:
    """Returns the trainer once it takes work. Raises TrainerBrokenError."""
    what = client.where
    return await wait_until_ready(what, lambda: active_trainer(client), seconds, TrainerBrokenError)


def check_lengths(who: str, trainer: pb.Trainer, longest: int, response: int) -> str:
    """Says why a sample of engines that go to `longest` tokens may end the run; empty: none may.

    Raises ConfigError where a `response` as long as the run asks for would, whatever its prompt.
    """
    limit = trainer.max_row_tokens
    if not limit or longest <= limit:
        return ""
    remedy = (
        f"raise its max_tokens_per_micro_batch, set its oversize_policy, or set "
        f"engine.max_model_length to {limit}"
    )
    takes = f"the {who} takes {limit} tokens of a sample at most"
    if response >= limit:
        raise ConfigError(f"sampling.max_new_tokens: {response}, and {takes}: {remedy}")
    return f"{takes}, and engines go to {longest}: a longer one ends the run; {remedy}"


class TrainerRecovery:
    """Does work on a trainer; where the trainer is lost on the way, does `restore` instead."""

    def __init__(self, trainer: TrainerClient, restore: Work, wait_seconds: float) -> None:
        self._trainer, self._restore, self._wait_seconds = trainer, restore, wait_seconds
        self._losses = 0  # since the last step
        self._doubtful = Counter[str]()  # of these, by what they may be instead

    def note_step(self) -> None:
        """Ends the row of losses: a step was made."""
        self._losses = 0
        self._doubtful.clear()

    async def run(self, work: Work) -> None:
        """Raises what is no loss of the trainer, and the last of too many losses in a row."""
        while True:
            try:
                await work()
                return
            except (RemoteError, TrainerLostError) as error:
                if isinstance(error, RemoteError) and not self._may_be_lost(error):
                    raise
                self._losses += 1
                TRAINER_LOST.inc()
                if self._losses > TRAINER_LOSSES:
                    raise
                logger.warning("%s; going back to the last run checkpoint", text_of(error))
                await wait_for_trainer(self._trainer, self._wait_seconds)
            work = self._restore

    def _may_be_lost(self, error: RemoteError) -> bool:
        if not is_lost(error):
            return False
        if error.reason == "COLUMN_MISSING":  # or a loss function reads what nobody gives
            doubt = error.metadata.get("columns", "")
        elif error.is_late:  # or a call takes longer than it may
            doubt = "deadline"
        else:
            return True
        self._doubtful[doubt] += 1
        return self._doubtful[doubt] <= DOUBTFUL_LOSSES


def is_lost(error: RemoteError) -> bool:
    """Tells a trainer that went away, or stood still, from one that refuses."""
    is_away = error.is_late or error.code is grpc.StatusCode.UNAVAILABLE
    return is_away or error.reason in _LOST


def check_critic(trainer: pb.Trainer, where: str) -> None:
    """Raises ConfigError for a trainer, at `where`, that has no value head."""
    if trainer.head != "value":
        raise ConfigError(f"critic: the trainer at {where} has no head: value")


@dataclass(frozen=True)
class SavingCheckpoint:
    """A checkpoint of an optimizer step that a trainer writes beside other work."""

    step: int
    answer: Awaitable[pb.SaveCheckpointResponse]

    async def name(self) -> str:
        """Waits until it is durable. Raises TrainerLostError where it is of another step."""
        saved = await self.answer
        check_step(saved.step, self.step, "checkpoint")
        return saved.checkpoint


@dataclass(frozen=True)
class CriticStep:
    """The answers to one optimizer step of the critic."""

    gradients: pb.ForwardBackwardResponse
    step: pb.StepOptimizerResponse


class Critic:
    """A trainer with a value head, and where it is."""

    def __init__(
        self, address: str, config: CriticConfig, security: SecurityConfig, wait_seconds: float
    ) -> None:
        self.config = config
        self.optimizer_step = 0
        self.client = TrainerClient(address, security, role="critic")
        self._wait_seconds = wait_seconds

    async def begin(self) -> None:
        """Goes on from what the trainer holds. Raises ConfigError if it has no value head."""
        trainer = await wait_for_trainer(self.client, self._wait_seconds)
        check_critic(trainer, self.client.address)
        self.optimizer_step = trainer.step

    async def load(self, checkpoint: str, step: int | None) -> None:
        """Goes back to a checkpoint. Raises CheckpointLostError where it is of another step."""
        await wait_for_trainer(self.client, self._wait_seconds)
        loaded = await self.client.load_checkpoint(checkpoint)
        if step is not None and loaded.step != step:
            raise CheckpointLostError(
                f"{checkpoint} of the critic is of optimizer step {loaded.step}, not {step}"
            )
        self.optimizer_step = loaded.step

    async def describe(self) -> pb.Trainer:
        return await wait_for_trainer(self.client, self._wait_seconds)

    async def begin_checkpoint(self, checkpoint_id: str) -> SavingCheckpoint:
        """Has the state of now saved beside what follows."""
        answer = await self.client.begin_checkpoint(checkpoint_id)
        return SavingCheckpoint(self.optimizer_step, answer)

    async def upload(self, batch_id: str, sample_count: int, blobs: Sequence[BlobReference]) -> str:
        """Uploads the rows of the actor's batch, from the same blobs."""
        return (await self.client.upload_batch(batch_id, sample_count, blobs=blobs)).batch

    async def give_values(self, batch: str, actor: TrainerClient, actor_batch: str) -> None:
        """Estimates values and gives them to the actor, whose advantages need them."""
        await self.client.compute_values(batch)
        await actor.put_columns(actor_batch, await self.client.get_columns(batch, ["values"]))

    async def fetch_returns(self, batch: str, actor: TrainerClient, actor_batch: str) -> None:
        """Fetches the returns, which values should have been, from the actor's advantages."""
        await self.client.put_columns(batch, await actor.get_columns(actor_batch, ["returns"]))

    async def learn(self, batch: str, part_id: str, sample_ids: Sequence[str]) -> CriticStep:
        """Makes an optimizer step towards the returns of these samples, or of all by default."""
        with trace.span(trace.CRITIC, "forward_backward"):
            gradients = await self.client.forward_backward(
                batch,
                self.config.loss,
                expected_step=self.optimizer_step,
                part_id=part_id,
                sample_ids=sample_ids,
            )
        with trace.span(trace.CRITIC, "optimizer"):
            step = await self.client.step_optimizer(self.optimizer_step, [part_id])
        self.optimizer_step = step.step
        return CriticStep(gradients, step)

    @asynccontextmanager
    async def learning(
        self, batch: str, part_id: str, sample_ids: Sequence[str]
    ) -> AsyncIterator[asyncio.Task[CriticStep]]:
        """Runs `learn` while the block trains the actor: they sit on different devices."""
        learning = asyncio.create_task(self.learn(batch, part_id, sample_ids), name="critic")
        try:
            yield learning
            await learning
        finally:
            learning.cancel()
            await asyncio.gather(learning, return_exceptions=True)

    async def delete_batch(self, batch: str) -> None:
        await self.client.delete_batch(batch)

    async def close(self) -> None:
        await self.client.close()


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """The result of a training step; `optimizer_step` counts the trainer's steps after it."""

    optimizer_step: int
    metrics: dict[str, float] = field(default_factory=dict)
    skipped_reasons: tuple[str, ...] = ()
    columns: dict[str, dict[str, Any]] = field(default_factory=dict)  # of those looked at


@dataclass(frozen=True, kw_only=True)
class _StepRows:
    """The rows of a step, on the actor and on the critic."""

    name: str
    critic_name: str = ""


async def train_step(
    trainer: TrainerClient,
    algorithm: AlgorithmConfig,
    groups: Sequence[LedgerGroup],
    *,
    optimizer_step: int,
    name: str,
    seed: int = 0,
    critic: Critic | None = None,
    critic_alone: bool = False,
    max_mismatch: float = 0.0,
    teach: Teach | None = None,
    looked_at: Sequence[LedgerGroup] = (),
    reference_version: int = 0,
) -> StepReport:
    """Trains on finished groups: `epochs` x `mini_batches` optimizer steps over references alone.

    All compare with what was known before the first of them. `seed` and `name` decide which groups
    are a mini-batch in which epoch.

    With critic_alone the actor learns nothing. Raises RemoteError; then gradients may or
    may not have been added, and the caller goes back to a run checkpoint. Raises MismatchError,
    with no step made, for groups of the trainer's own weights whose log-probs are further from
    the engines' than `max_mismatch` (0: any are near enough). `teach` gives rows what a
    teacher that is a trainer makes of them. The report has the columns of the groups
    `looked_at`. `reference_version` is that of the weights that a KL is to, 0 the trainer's own.
    """
    batch_id = f"{name}-{new_request_id()[:8]}"  # a step tried again is another batch
    batch = await _upload(trainer, critic, groups, batch_id)
    faults.point("uploaded")
    if teach is not None:
        await teach(trainer, batch.name, groups, algorithm.loss.temperature)
    needed = await _needed_columns(trainer, algorithm)
    metrics = await _add_columns(trainer, algorithm, needed, batch, critic, reference_version)
    reports = []
    critic_steps: list[CriticStep] = []
    for part, share in enumerate(mini_batches(groups, algorithm, f"{seed}/{name}")):
        sample_ids = [] if len(share) == len(groups) else _sample_ids(share)
        part_id = f"{batch_id}-{part}"
        async with AsyncExitStack() as stack:
            if critic is not None:
                learning = critic.learning(batch.critic_name, part_id, sample_ids)
                task = await stack.enter_async_context(learning)
            if not critic_alone:
                with trace.span(trace.TRAINER, "forward_backward"):
                    gradients = await trainer.forward_backward(
                        batch.name,
                        algorithm.loss,
                        expected_step=optimizer_step,
                        part_id=part_id,
                        sample_ids=sample_ids,
                    )
                faults.point("gradients")
                if part == 0 and _is_beyond(gradients, max_mismatch):
                    await trainer.discard_gradients()
                    raise MismatchError(_explain(gradients, max_mismatch, algorithm))
                with trace.span(trace.TRAINER, "optimizer"):
                    step = await trainer.step_optimizer(optimizer_step, [part_id])
                faults.point("stepped")
                optimizer_step = step.step
                reports.append((gradients, step))
        if critic is not None:
            critic_steps.append(task.result())
    columns: dict[str, dict[str, Any]] = {}
    if looked_at:
        with trace.span(trace.TRAINER, "columns"):
            columns = await trainer.get_columns(
                batch.name, KEPT_COLUMNS, sample_ids=_sample_ids(looked_at)
            )
    await trainer.delete_batch(batch.name)
    if critic is not None:
        await critic.delete_batch(batch.critic_name)
        metrics |= _critic_metrics(critic_steps)
    has_old = "old_logprobs" in needed
    return replace(_report(optimizer_step, metrics, reports, has_old=has_old), columns=columns)


async def measure_rows(
    trainer: TrainerClient,
    algorithm: AlgorithmConfig,
    blob: BlobReference,
    sample_count: int,
    *,
    name: str,
) -> dict[str, float]:
    """What the trainer's weights make of rows of whole groups; nothing is learned.

    Of supervised rows `loss` (nats a token) and `tokens`, else what a step tells ahead of its pass.
    Raises RemoteError.
    """
    batch_id = f"{name}-{new_request_id()[:8]}"
    batch = (await trainer.upload_batch(batch_id, sample_count, blobs=[blob])).batch
    temperature = algorithm.loss.temperature
    if algorithm.is_supervised:
        told = await trainer.compute_logprobs(batch, temperature=temperature)
        metrics = {"loss": -told.mean, "tokens": float(told.token_count)}
    else:
        needed = await _needed_columns(trainer, algorithm)
        metrics = await _add_columns(trainer, algorithm, needed, _StepRows(name=batch), None, 0)
    await trainer.delete_batch(batch)
    return metrics


async def _upload(
    trainer: TrainerClient, critic: Critic | None, groups: Sequence[LedgerGroup], batch_id: str
) -> _StepRows:
    blobs = [group.blob for group in groups if group.blob is not None]
    sample_count = sum(group.sample_count for group in groups)
    with trace.span(trace.TRAINER, "upload"):
        name = (await trainer.upload_batch(batch_id, sample_count, blobs=blobs)).batch
    if critic is None:
        return _StepRows(name=name)
    return _StepRows(name=name, critic_name=await critic.upload(batch_id, sample_count, blobs))


async def _needed_columns(trainer: TrainerClient, algorithm: AlgorithmConfig) -> set[str]:
    needed = set(algorithm.columns)
    if algorithm.plugins:
        described = await trainer.describe_algorithm(algorithm.loss, algorithm.advantage)
        needed |= {*described.loss_columns, *described.advantage_columns}
    return needed


async def _add_columns(
    trainer: TrainerClient,
    algorithm: AlgorithmConfig,
    needed: set[str],
    batch: _StepRows,
    critic: Critic | None,
    reference_version: int,
) -> dict[str, float]:
    temperature = algorithm.loss.temperature
    if "old_logprobs" in needed:
        with trace.span(trace.TRAINER, "old_logprobs"):
            await trainer.compute_logprobs(batch.name, temperature=temperature)
    if "reference_logprobs" in needed:
        with trace.span(trace.TRAINER, "reference_logprobs"):
            await trainer.compute_logprobs(
                batch.name,
                reference=True,
                temperature=temperature,
                reference_version=reference_version,
            )
    if algorithm.is_supervised:
        return {}
    if critic is None and "values" in needed:  # of the trainer itself, whose head gives them
        await trainer.compute_values(batch.name)
    if critic is not None:
        with trace.span(trace.CRITIC, "values"):
            await critic.give_values(batch.critic_name, trainer, batch.name)
    with trace.span(trace.TRAINER, "advantages"):
        advantages = await trainer.compute_advantages(batch.name, algorithm.advantage)
    if critic is not None:
        with trace.span(trace.CRITIC, "returns"):
            await critic.fetch_returns(batch.critic_name, trainer, batch.name)
    return {
        "reward_mean": advantages.reward_mean,
        "advantage_abs_mean": advantages.advantage_abs_mean,
        "silent_groups": float(advantages.silent_group_count),
        **advantages.metrics,
    }


def _is_beyond(gradients: pb.ForwardBackwardResponse, max_mismatch: float) -> bool:
    """Whether the first pass over groups tells of more than rounding; a NaN does."""
    mismatch = gradients.metrics.get("rollout_mismatch", 0.0)
    return max_mismatch > 0 and not mismatch <= max_mismatch


def _explain(
    gradients: pb.ForwardBackwardResponse, max_mismatch: float, algorithm: AlgorithmConfig
) -> str:
    mismatch = gradients.metrics["rollout_mismatch"]
    return (
        f"log-probs of trainer and engines are {mismatch:.3g} nats a token apart at the first "
        f"on-policy step (max_mismatch {max_mismatch:g}), which no rounding explains. Likeliest "
        f"causes: the engines sample at another temperature than the loss "
        f"({algorithm.loss.temperature or 1:g}); they serve other weights than the trainer's, or "
        "stale ones; tokenizer or model family are not the same. No step was made"
    )


def mini_batches(
    groups: Sequence[LedgerGroup], algorithm: AlgorithmConfig, lot: str
) -> Iterator[Sequence[LedgerGroup]]:
    """Yields for each optimizer step its groups; an epoch's shares are as even as can be.

    The first epoch takes the groups as they come, the others in an order that `lot` draws.
    """
    count, order = algorithm.mini_batches, list(groups)
    bounds = [len(order) * i // count for i in range(count + 1)]
    for epoch in range(algorithm.epochs):
        if epoch:
            order = list(groups)
            random.Random(f"{lot}/{epoch}").shuffle(order)
        yield from (order[a:b] for a, b in itertools.pairwise(bounds) if b > a)


def _sample_ids(groups: Sequence[LedgerGroup]) -> list[str]:
    return [f"{group.group_id}/{i}" for group in groups for i in range(group.sample_count)]


def _report(
    optimizer_step: int,
    metrics: dict[str, float],
    reports: list[tuple[pb.ForwardBackwardResponse, pb.StepOptimizerResponse]],
    *,
    has_old: bool,
) -> StepReport:
    """`has_old`: the mismatch is of log-probs from before the first step, in every pass."""
    if not reports:  # the critic alone has learned
        return StepReport(optimizer_step=optimizer_step, metrics=metrics)
    metrics |= _weighted([gradients for gradients, _ in reports])
    if not has_old:  # later passes have in it how far the policy has moved since
        first = reports[0][0].metrics
        metrics = {k: v for k, v in metrics.items() if not k.startswith(MISMATCH)}
        metrics |= {name: value for name, value in first.items() if name.startswith(MISMATCH)}
    metrics["tokens"] = float(sum(gradients.token_count for gradients, _ in reports))
    metrics |= _step_means([step for _, step in reports])
    metrics["learning_rate"] = reports[-1][1].learning_rate
    skipped = tuple(step.skipped_reason for _, step in reports if step.skipped_reason)
    return StepReport(optimizer_step=optimizer_step, metrics=metrics, skipped_reasons=skipped)


def _critic_metrics(critic_steps: Sequence[CriticStep]) -> dict[str, float]:
    metrics = _weighted([each.gradients for each in critic_steps])
    metrics = {name.removeprefix("value_"): value for name, value in metrics.items()}
    metrics |= _step_means([each.step for each in critic_steps])
    return {f"critic_{name}": value for name, value in metrics.items()}


_LARGEST = {"memory_peak_gib"}


def _step_means(steps: Sequence[pb.StepOptimizerResponse]) -> dict[str, float]:
    """What steps tell of themselves; a step that tells nothing counts for nothing."""
    told = defaultdict[str, list[float]](list)
    for step in steps:
        for name, value in {"grad_norm": step.grad_norm, **step.metrics}.items():
            told[name].append(value)
    return {
        name: max(values) if name in _LARGEST else sum(values) / len(values)
        for name, values in told.items()
    }


def _weighted(passes: Sequence[pb.ForwardBackwardResponse]) -> dict[str, float]:
    """Returns means over all passes: the loss by tokens, the rest by what each pass measured."""
    sums, weights = defaultdict[str, float](float), defaultdict[str, float](float)
    for each in passes:
        for name, value in {"loss": each.loss, **each.metrics}.items():
            weight = each.metric_weights.get(name, float(each.token_count))
            sums[name] += value * weight
            weights[name] += weight
    return {name: sums[name] / max(1.0, weights[name]) for name in sums}
