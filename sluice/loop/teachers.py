"""Teachers of a run: whether they speak the student's language, and those that are trainers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from sluice.api.router.v1 import router_service_pb2 as router_pb
from sluice.api.trainer.v1 import trainer_service_pb2 as trainer_pb
from sluice.client import ClientCache, EngineClient, RemoteError, RouterClient, TrainerClient
from sluice.loop import trace
from sluice.loop.config import RunConfig
from sluice.loop.ledger import LedgerGroup
from sluice.loop.training import BLOB_LOST, is_lost, wait_for_trainer
from sluice.runtime.recovery import NotReadyError, wait_until_ready
from sluice.runtime.security import SecurityConfig
from sluice.samples.blobs import BlobReference
from sluice.samples.sample import top_columns
from sluice.samples.vocabulary import check_same

COLUMN = "teacher_logprobs"
ATTEMPTS = 5  # of a teacher that is lost meanwhile


class TeacherMissingError(Exception):
    """No engine of a teacher's pool came in time."""


class TrainerTeacher:
    """A trainer process that scores what a student sampled; it learns nothing."""

    def __init__(self, address: str, security: SecurityConfig, wait_seconds: float) -> None:
        self._client = TrainerClient(address, security, role="teacher")
        self._wait_seconds = wait_seconds

    async def describe(self) -> trainer_pb.Trainer:
        """Returns it once it takes work."""
        return await wait_for_trainer(self._client, self._wait_seconds)

    async def teach(
        self,
        student: TrainerClient,
        batch: str,
        groups: Sequence[LedgerGroup],
        batch_id: str,
        temperature: float | None,
        top_count: int = 0,
    ) -> None:
        """Gives the rows of these groups its log-probs, from the same blobs.

        And its `top_count` likeliest tokens at each place. Columns go from trainer to trainer
        through the store. A teacher that is lost on the way begins anew, as does one whose columns
        are lost there. Raises RemoteError.
        """
        columns = {"old_logprobs": COLUMN}
        if top_count:
            columns |= {name: name for name in top_columns(top_count)}
        for attempt in range(1, ATTEMPTS + 1):
            blobs: Sequence[BlobReference] = ()
            try:
                blobs = await self._score(
                    groups, f"{batch_id}-{attempt}", temperature, top_count, list(columns)
                )
                await student.take_columns(batch, blobs, columns)
                return
            except RemoteError as error:
                again = _is_lost_of(error, blobs) if blobs else _is_forgotten(error)
                if not again or attempt == ATTEMPTS:
                    raise
                await wait_for_trainer(self._client, self._wait_seconds)

    async def _score(
        self,
        groups: Sequence[LedgerGroup],
        batch_id: str,
        temperature: float | None,
        top_count: int,
        columns: Sequence[str],
    ) -> list[BlobReference]:
        blobs = [group.blob for group in groups if group.blob is not None]
        count = sum(group.sample_count for group in groups)
        batch = (await self._client.upload_batch(batch_id, count, blobs=blobs)).batch
        await self._client.compute_logprobs(batch, temperature=temperature, top_count=top_count)
        found = await self._client.refer_columns(batch, columns)
        await self._client.delete_batch(batch)
        return found

    async def close(self) -> None:
        await self._client.close()


def _is_forgotten(error: RemoteError) -> bool:
    """Whether a teacher went away, or came back without the rows or the columns of before."""
    return is_lost(error) or error.reason in ("BATCH_NOT_FOUND", "COLUMN_MISSING")


def _is_lost_of(error: RemoteError, blobs: Sequence[BlobReference]) -> bool:
    """Whether a student cannot read one of these."""
    digest = error.metadata.get("blob") or error.metadata.get("name")
    return error.reason in BLOB_LOST and digest in {blob.digest for blob in blobs}


class Teachers:
    """The teachers of a run. `teacher_of` names that of a group."""

    def __init__(
        self,
        config: RunConfig,
        router: RouterClient,
        teacher_of: Callable[[LedgerGroup], str],
    ) -> None:
        self._config, self._router, self._teacher_of = config, router, teacher_of
        self._engines = ClientCache(EngineClient, config.security)
        seconds = config.service_timeout_seconds
        self._trainers: Mapping[str, TrainerTeacher] = {
            name: TrainerTeacher(teacher.address, config.security, seconds)
            for name, teacher in config.teachers.items()
            if not teacher.pool
        }
        self.settings: dict[str, dict[str, str]] = {}  # of those that are trainers, once checked

    async def check(self, student: TrainerClient, note: Callable[[str], None]) -> None:
        """Wait for each teacher; notes those of which nobody can say what their token ids mean.

        Raises ConfigError for one with another vocabulary than the student's.
        """
        if not self._config.teachers:
            return
        seconds = self._config.service_timeout_seconds
        own = (await wait_for_trainer(student, seconds)).vocabulary
        for name in self._config.teachers:
            theirs = await self._vocabulary(name)
            check_same(f"teachers.{name}:", theirs, own)
            if not (own and theirs):
                who = f"teacher {name}" if own else "the trainer"
                note(f"{who} has no tokenizer.json: whether vocabularies agree is not known")

    async def teach(
        self,
        student: TrainerClient,
        batch: str,
        groups: Sequence[LedgerGroup],
        temperature: float | None,
    ) -> None:
        """Have the teachers that are trainers score their groups of a batch. Raises RemoteError."""
        shares: dict[str, list[LedgerGroup]] = {}
        for group in groups if self._trainers else ():
            shares.setdefault(self._teacher_of(group), []).append(group)
        await asyncio.gather(
            *(
                self._teach(name, student, batch, share, temperature)
                for name, share in shares.items()
                if name in self._trainers
            )
        )

    async def _teach(
        self,
        name: str,
        student: TrainerClient,
        batch: str,
        groups: Sequence[LedgerGroup],
        temperature: float | None,
    ) -> None:
        batch_id = f"{batch.rpartition('/')[2]}-{name}"
        with trace.span(trace.TRAINER, "teacher", name):
            await self._trainers[name].teach(
                student,
                batch,
                groups,
                batch_id,
                temperature,
                self._config.algorithm.teacher_top_count,
            )

    async def _vocabulary(self, name: str) -> str:
        pool = self._config.teachers[name].pool
        if not pool:
            trainer = await self._trainers[name].describe()
            self.settings[f"teacher {name}"] = {
                key: value
                for key, value in trainer.settings.items()
                if not key.startswith("optim.")  # it learns nothing
            }
            return trainer.vocabulary

        async def probe() -> str:
            engines = await self._router.list_engines(router_pb.ROLE_ENGINE)
            for engine in engines:
                if engine.pool == pool and engine.state == router_pb.ENGINE_STATE_ACTIVE:
                    return (await self._engines[engine.address].get()).vocabulary
            raise NotReadyError(f"router {self._router.address} knows none")

        seconds = self._config.service_timeout_seconds
        return await wait_until_ready(
            f"an engine of pool {pool}", probe, seconds, TeacherMissingError
        )

    async def close(self) -> None:
        await self._engines.close()
        await asyncio.gather(*(each.close() for each in self._trainers.values()))
