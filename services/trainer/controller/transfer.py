"""Sends published weights to engines, and goes on without those that fail."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from services.trainer import metrics
from services.trainer.config import TransferConfig
from services.trainer.controller.incarnation import RankIncarnation
from services.trainer.controller.rank_group import RankGroup
from sluice.api.common.v1 import sample_pb2
from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.client import ClientCache, EngineClient, RemoteError
from sluice.runtime.security import SecurityConfig
from sluice.runtime.waits import Waits
from sluice.runtime.wire import duration_of

logger = logging.getLogger(__name__)

BROKEN = "TRANSFER_BROKEN"
NOT_JOINED = "TRANSFER_GROUP_NOT_JOINED"
GIVE_UP_SECONDS = 1.0  # that members have to end once another one has failed
ANSWER_SECONDS = 5.0  # that an engine has, beyond the deadline of a transfer, to say what came


@dataclass(frozen=True)
class Target:
    """An engine, by name and host:port."""

    engine_id: str
    address: str


@dataclass(frozen=True, kw_only=True)
class Shipment:
    """A version, and the files in the manifest that each rank published (none for some)."""

    weights: sample_pb2.WeightVersion
    rank_files: Sequence[Sequence[str]]
    pause_mode: engine_pb.PauseMode


@dataclass(frozen=True)
class _Group:
    """Members that have met, and what joining takes."""

    name: str
    incarnation: RankIncarnation
    members: tuple[Target, ...]
    senders: tuple[engine_pb.TransferSender, ...]
    first_ranks: tuple[int, ...]
    world_size: int
    backend: str


class WeightSender:
    """Makes groups of the ranks and engines, and keeps one while its members stay the same.

    Callers hold the lock of the ranks.
    """

    def __init__(
        self, config: TransferConfig, security: SecurityConfig, ranks: RankGroup, waits: Waits
    ) -> None:
        self._config = config
        self._ranks, self._waits = ranks, waits
        self._clients = ClientCache(EngineClient, security)
        self._group: _Group | None = None

    async def close(self) -> None:
        await self._clients.close()

    async def send(
        self, shipment: Shipment, targets: Sequence[Target]
    ) -> dict[str, RemoteError | None]:
        """By engine: None where the version is prepared, else why it is not.

        An engine that died, stalled or received something else is left out, and the others are
        tried again without it. Raises RankLostError.
        """
        outcomes: dict[str, RemoteError | None] = {}
        pending = {target.engine_id for target in targets}
        left = list(targets)

        def explain() -> str:
            return "; ".join(f"without {name}: {why}" for name, why in outcomes.items() if why)

        with self._waits.waiting(
            f"transfer of weight version {shipment.weights.version}",
            on=lambda: sorted(pending),
            timeout=self._config.timeout_seconds * self._config.attempts,
            explain=explain,
        ):
            for _ in range(self._config.attempts):
                ready = await self._look(shipment.weights, left, outcomes)
                pending.intersection_update(target.engine_id for target in ready)
                if not ready:
                    break
                found = await self._attempt(shipment, ready, pending)
                outcomes.update(found)
                left = [target for target in ready if _may_be_innocent(found[target.engine_id])]
                if not left:
                    break
                self._group = None
        for engine_id, error in outcomes.items():
            if error is not None:
                metrics.TRANSFER_FAILURES.labels(_cause(error)).inc()
                logger.warning(
                    "engine %s is left out of version %d: %s",
                    engine_id,
                    shipment.weights.version,
                    error,
                )
        return outcomes

    async def _look(
        self,
        weights: sample_pb2.WeightVersion,
        targets: Sequence[Target],
        outcomes: dict[str, RemoteError | None],
    ) -> dict[Target, engine_pb.GetEngineResponse]:
        """Find the engines that answer, can take part and lack the version.

        Why the others do not take part goes to `outcomes`: None for those that have it, from a
        try that failed elsewhere. They would join, and then receive nothing from stuck senders.
        """

        ready = {}
        seconds = self._config.answer_seconds  # more than a client's own of GetEngine

        async def look(target: Target) -> None:
            client = self._clients[target.address]
            try:
                async with asyncio.timeout(seconds):
                    found = await client.get(seconds)
                    if found.weights == weights or weights.version in found.prepared_versions:
                        outcomes[target.engine_id] = None
                    else:
                        await client.check_transfer(weights)
                        ready[target] = found
            except TimeoutError:
                outcomes[target.engine_id] = _speechless(seconds)
            except RemoteError as error:
                outcomes[target.engine_id] = error if error.reason else _mute(error)

        await asyncio.gather(*map(look, targets))
        return {target: ready[target] for target in targets if target in ready}

    async def _attempt(
        self,
        shipment: Shipment,
        ready: Mapping[Target, engine_pb.GetEngineResponse],
        pending: set[str],
    ) -> dict[str, RemoteError | None]:
        """Try once with `ready`; who has the version leaves `pending`."""
        group = await self._group_of(ready)
        if not group.senders:
            return dict.fromkeys((t.engine_id for t in ready), _refusal("a trainer without ranks"))
        command = pb.SendWeightsCommand(
            transfer_group=group.name,
            version=shipment.weights.version,
            bucket_bytes=self._config.bucket_bytes,
            timeout=duration_of(self._config.timeout_seconds),
        )

        async def receive(target: Target, first_rank: int) -> RemoteError | None:
            try:
                await self._receive(shipment, group, target, first_rank, ready[target])
            except RemoteError as error:
                return error
            except TimeoutError:
                return _late(self._config.timeout_seconds)
            pending.discard(target.engine_id)
            return None

        began = time.monotonic()
        sending = asyncio.create_task(
            group.incarnation.run(pb.FollowResponse(send_weights=command))
        )
        receiving = [
            asyncio.create_task(receive(target, first_rank))
            for target, first_rank in zip(group.members, group.first_ranks, strict=True)
        ]
        try:
            results = await _settle(sending, receiving)
        finally:
            for task in (sending, *receiving):
                task.cancel()
            await asyncio.gather(*receiving, return_exceptions=True)
        sent = sum(result.sent_bytes for result in results)
        metrics.TRANSFERRED_BYTES.inc(sent)
        metrics.TRANSFER_RATE.set(sent / (time.monotonic() - began))
        found = {
            target.engine_id: _silent() if task.cancelled() else task.result()
            for target, task in zip(group.members, receiving, strict=True)
        }
        broken = {f"rank {i}": r.transfer_failure for i, r in enumerate(results)}
        if not any([*found.values(), *broken.values()]):
            self._group = group
        return _with_causes(found, broken)

    async def _group_of(self, ready: Mapping[Target, engine_pb.GetEngineResponse]) -> _Group:
        """Return the group there is, if these are its members and still in it; else a new one."""
        old, members = self._group, tuple(ready)
        incarnation = self._ranks.incarnation
        if (
            old is not None
            and (old.members, old.incarnation) == (members, incarnation)
            and all(found.transfer_group == old.name for found in ready.values())
        ):
            return old
        self._group = None
        counts = [found.transfer_rank_count for found in ready.values()]
        first_ranks = tuple(1 + sum(counts[:index]) for index in range(len(counts)))
        command = pb.OpenTransferCommand(
            transfer_group=f"weights-{secrets.token_hex(6)}",
            world_size=1 + sum(counts),
            timeout=duration_of(self._config.timeout_seconds),
        )
        results = await incarnation.run(pb.FollowResponse(open_transfer=command))
        senders = tuple(
            engine_pb.TransferSender(
                address=result.transfer_address, group=f"{command.transfer_group}-{rank}"
            )
            for rank, result in enumerate(results)
            if result.transfer_address
        )
        return _Group(
            name=command.transfer_group,
            incarnation=incarnation,
            members=members,
            senders=senders,
            first_ranks=first_ranks,
            world_size=command.world_size,
            backend=max(result.transfer_backend for result in results),
        )

    async def _receive(
        self,
        shipment: Shipment,
        group: _Group,
        target: Target,
        first_rank: int,
        known: engine_pb.GetEngineResponse,
    ) -> None:
        client = self._clients[target.address]
        timeout = duration_of(self._config.timeout_seconds)
        async with asyncio.timeout(self._config.timeout_seconds + ANSWER_SECONDS):
            if known.transfer_group != group.name:
                await client.join_transfer_group(
                    engine_pb.JoinTransferGroupRequest(
                        transfer_group=group.name,
                        senders=group.senders,
                        first_rank=first_rank,
                        world_size=group.world_size,
                        backend=group.backend,
                        timeout=timeout,
                    )
                )
            transfer = engine_pb.WeightTransfer(
                transfer_group=group.name,
                senders=[
                    engine_pb.SentFiles(file_names=files) for files in shipment.rank_files if files
                ],
                bucket_bytes=self._config.bucket_bytes,
                timeout=timeout,
                mode=shipment.pause_mode,
            )
            await client.prepare_weights(shipment.weights, transfer)


async def _settle(
    sending: asyncio.Task[list[pb.CommandResult]], receiving: Sequence[asyncio.Task[Any]]
) -> list[pb.CommandResult]:
    """Wait until all have ended; or, once one has failed, all that do so soon after the sending.

    Behind a member that is gone others may wait for their deadline, which helps nobody. Returns
    what the senders answered, or raises why they could not.
    """
    pending: set[asyncio.Task[Any]] = {sending, *receiving}
    is_broken = False
    while pending:
        done, pending = await asyncio.wait(
            pending,
            timeout=GIVE_UP_SECONDS if is_broken else None,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if not done and sending.done():
            break
        is_broken = is_broken or any(_has_failed(task, sending) for task in done)
    return sending.result()


def _has_failed(task: asyncio.Task[Any], sending: asyncio.Task[Any]) -> bool:
    if task.cancelled() or task.exception() is not None:
        return True
    if task is sending:
        return any(result.transfer_failure for result in task.result())
    return task.result() is not None


def _with_causes(
    found: Mapping[str, RemoteError | None], broken: Mapping[str, str]
) -> dict[str, RemoteError | None]:
    """Tell those whose group broke who may have broken it: `broken` is what senders say."""
    causes = [f"{name}: {error}" for name, error in found.items() if error and not _is_torn(error)]
    causes += [f"{name}: {failure}" for name, failure in broken.items() if failure]
    if not causes:
        return dict(found)
    return {
        name: RemoteError(
            error.code, error.reason, f"{error.message} ({'; '.join(causes)})", error.metadata
        )
        if error and _is_torn(error)
        else error
        for name, error in found.items()
    }


def _mute(error: RemoteError) -> RemoteError:
    """Say what it is that grpc alone has a word for."""
    return RemoteError(error.code, "", f"the engine does not answer: {error.message}", {})


def _speechless(seconds: float) -> RemoteError:
    code = grpc.StatusCode.DEADLINE_EXCEEDED
    return RemoteError(code, "", f"the engine does not answer within {seconds:g} s", {})


def _silent() -> RemoteError:
    what = "it still waited when the group had broken"
    return RemoteError(grpc.StatusCode.ABORTED, BROKEN, what, {})


def _cause(error: RemoteError) -> str:
    """Return the label of an error in metrics."""
    name = error.reason or error.code.name
    return name if name in metrics.TRANSFER_CAUSES else "OTHER"


def _is_torn(error: RemoteError) -> bool:
    return error.reason in (BROKEN, NOT_JOINED)


def _may_be_innocent(error: RemoteError | None) -> bool:
    """Tell whether the fault may be another member's, which a new group would leave out."""
    return error is not None and _is_torn(error)


def _late(seconds: float) -> RemoteError:
    code = grpc.StatusCode.DEADLINE_EXCEEDED
    return RemoteError(code, "", f"did not receive the weights within {seconds:g} s", {})


def _refusal(what: str) -> RemoteError:
    code = grpc.StatusCode.FAILED_PRECONDITION
    return RemoteError(code, "NO_TRANSFER", f"{what} takes no part in transfers", {})
