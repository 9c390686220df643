"""Models that are trained: the requests of each one after another, each done once.

A model is an adapter of the trainer. Requests come with a place in their order, and a client that
got no answer sends one again. What the trainer loses with its process, or its ranks, is made anew:
the adapter goes back to its last checkpoint, and the requests since are done again, in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import shutil
import sqlite3
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import xxhash
from pydantic import ValidationError

from services.gateway import metrics
from services.gateway.config import GatewayConfig
from services.gateway.datums import encode_output, parse_pass
from services.gateway.errors import (
    OF_SERVICES,
    GoneError,
    JournalDamagedError,
    OutOfOrderError,
    RefusedError,
    SkippedStepError,
    UnfitEnginesError,
    is_own_fault,
)
from services.gateway.journal import (
    Checkpoint,
    GatewayJournal,
    Model,
    ModelState,
    SamplerRecord,
    TrainingRequest,
    to_its_end,
    with_answer,
)
from services.gateway.requests import LoadWeights, OptimStep, SaveForSampler, SaveWeights
from services.gateway.samplers import Engines
from services.gateway.trainer import AdamParams, AdapterTrainer
from sluice import faults
from sluice.api.trainer.v1 import trainer_service_pb2 as pb
from sluice.place import directory_of
from sluice.runtime import waits
from sluice.runtime.errors import QueueFullError, RemoteError, ServiceError
from sluice.runtime.recovery import Backoff, NotReadyError, is_passing
from sluice.weights.errors import WeightStoreError
from sluice.weights.store import WeightStore

logger = logging.getLogger(__name__)

JSON, PROTO = "application/json", "application/x-protobuf"
NAMES = uuid.UUID("6c1f6a0e-2f2c-4c39-9a57-6f4c1f3a7e11")  # of request ids
# What a trainer says that has not the state which this gateway left it in.
LOST = frozenset(
    {
        "ADAPTER_NOT_FOUND",
        "STEP_MISMATCH",
        "PARTS_MISMATCH",
        "NO_GRADIENTS",
        "GRADIENTS_INCOMPLETE",
        "BATCH_NOT_FOUND",
        "COLUMN_MISSING",
        "SKIPPED_TOO_OFTEN",
    }
)
MOST_RECOVERIES = 3  # of one request: it may be what breaks the trainer
PAUSES = Backoff(first=0.1, longest=2.0)
NAME_LENGTH = 256


class LostError(Exception):
    """The trainer has not the state that requests have led to."""


@dataclass(frozen=True)
class Done:
    """What a request came to: its answer, and what else it changes."""

    state: ModelState
    media: str
    answer: bytes
    checkpoint: Checkpoint | None = None
    sampler: SamplerRecord | None = None
    error: ServiceError | None = None  # though the state has changed
    saved: str = ""  # a checkpoint that has a name once this is kept
    replaced: tuple[str, ...] = ()  # others that nobody needs then


class TrainedModel:
    """One model, from its creation or from what the journal has of it."""

    def __init__(
        self,
        model: Model,
        journal: GatewayJournal,
        trainer: AdapterTrainer,
        engines: Engines,
        config: GatewayConfig,
    ) -> None:
        self.model, self._journal, self._trainer = model, journal, trainer
        self._engines, self._config = engines, config
        self._state = journal.state(model.id)
        self._passed = -1  # no request is taken up to here
        self._suspect = self._state.done >= 0  # of whom nobody knows what the trainer did since
        self._changed = asyncio.Event()
        self._changing = asyncio.Lock()  # of what requests there are
        self._keeping = asyncio.Lock()  # of the state, here and in the journal
        self._answered = asyncio.Event()
        self._waiting = journal.waiting(model.id)
        metrics.WAITING.inc(self._waiting)
        self._weights = WeightStore(config.weights_location)
        self._task: asyncio.Task[None] | None = None
        self._failure = ""  # of this process: another one begins with the request again
        self._is_damaged = False

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"model {self.model.adapter}")
        self._task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        """A request that this process cannot do ends its model, and no other."""
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("model %s failed", self.model.id, exc_info=error)
            self._is_damaged = isinstance(error, JournalDamagedError)
            why = error if self._is_damaged else "the gateway's log says more"
            self._failure = f"model {self.model.id} failed: {why}"
            self._answered.set()

    def _check_alive(self) -> None:
        if self._failure:
            raise (JournalDamagedError if self._is_damaged else GoneError)(self._failure)

    async def close(self, why: str) -> None:
        """Do no more; who waits for an answer is told why."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._failure = self._failure or f"model {self.model.id} {why}"
        self._answered.set()
        metrics.WAITING.dec(self._waiting)
        self._waiting = 0

    async def submit(self, request: TrainingRequest) -> None:
        """Take a request, or the repeat of one. Raises RefusedError, GoneError, QueueFullError."""
        self._check_alive()
        async with self._changing:
            known = self._journal.request(self.model.id, request.seq)
            if known is not None:
                if known.digest != request.digest:
                    raise RefusedError(f"seq_id {request.seq} was that of another request")
                return
            if request.seq <= max(self._state.done, self._passed):
                raise GoneError(
                    f"request {request.seq} comes too late, or its answer is not kept any more"
                )
            is_next = request.seq == self._state.done + 1
            if self._waiting >= self._config.tinker.max_waiting and not is_next:
                raise QueueFullError(f"{self._waiting} requests of the model wait")
            try:
                await self._journal.add_request(request)
                self._waiting += 1
                metrics.WAITING.inc()
            finally:
                if is_next or self._waiting == 1:
                    self._changed.set()

    async def answer(self, seq: int, seconds: float) -> TrainingRequest | None:
        """A request that is done; None where it is not, so long from now.

        Raises GoneError and JournalDamagedError.
        """
        if seq > self._state.done and self._journal.request(self.model.id, seq) is None:
            raise GoneError(f"there is no request {seq}")
        try:
            async with asyncio.timeout(seconds):
                while seq > self._state.done:
                    self._check_alive()
                    await self._answered.wait()
        except TimeoutError:
            return None
        found = self._journal.request(self.model.id, seq)
        if found is None or found.answer is None:
            raise GoneError(f"there is no answer to request {seq}")
        return found

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            request = self._journal.request(self.model.id, self._state.done + 1)
            if request is None:
                await self._await_next()
                continue
            began = time.monotonic()
            done = await self._perform(request)
            await self._finish(request, done)
            metrics.REQUEST_SECONDS.labels(request.kind).observe(time.monotonic() - began)
            await self._checkpoint(request)

    async def _await_next(self) -> None:
        """Until the next request may have come; those behind it do not wait for ever."""
        if not self._waiting:
            await self._changed.wait()
            return
        seconds, adapter = self._config.tinker.order_seconds, self.model.adapter
        with (
            contextlib.suppress(TimeoutError),
            waits.waiting(
                f"client of {adapter} to send request {self._state.done + 1}",
                timeout=seconds,
                explain=lambda: f"{self._waiting} requests behind it wait",
            ),
        ):
            async with asyncio.timeout(seconds):
                await self._changed.wait()
            return
        await self._pass_over(self._state.done + 1)

    async def _pass_over(self, missing: int) -> None:
        """Fail the requests that wait for one which does not come; nor is it taken any more."""
        async with self._changing:
            if self._journal.request(self.model.id, missing) is not None:
                return
            waiting = self._journal.waiting_behind(self.model.id, missing)
            self._passed = waiting[-1].seq
        why = OutOfOrderError(
            f"request {missing} of {self.model.id} did not come in "
            f"{self._config.tinker.order_seconds:g} s (tinker.order_seconds): nothing is done of "
            "those behind it"
        )
        logger.warning("%s", why)
        for request in waiting:
            await self._finish(request, Done(self._state, "", _failure(why, user=True)))

    async def _finish(self, request: TrainingRequest, done: Done) -> None:
        outcome = "done" if done.media else "failed"
        if done.error is not None:
            outcome = "done"  # what it changed stays, and is done again in a recovery
        answered = with_answer(request, outcome, done.media or JSON, done.answer)
        kept = self._config.tinker.kept_answers
        async with self._keeping:
            before, state = self._state, replace(done.state, done=request.seq)
            if before.checkpoint == state.checkpoint:  # adopted, perhaps, while it was done
                state = replace(state, owns=before.owns or state.owns)
            state = _without_names(before, state, done.saved, *done.replaced)
            await self._keep(
                lambda: self._journal.finish(answered, state, kept, done.checkpoint, done.sampler)
            )
            self._state = state
        if done.saved:
            await self._tidy()
        self._waiting -= 1
        metrics.WAITING.dec()
        failed = outcome == "failed" or done.error is not None
        metrics.REQUESTS.labels(request.kind, "failed" if failed else "done").inc()
        answered_event, self._answered = self._answered, asyncio.Event()
        answered_event.set()

    async def _keep(self, write: Callable[[], Awaitable[None]]) -> None:
        """Write to the journal, as often as it takes: a disk that is full has room again."""
        failures = 0
        with waits.waiting(f"model {self.model.adapter}: journal to take what was done"):
            while True:
                try:
                    return await write()
                except sqlite3.OperationalError as error:
                    failures += 1
                    logger.error("model %s: %s: %s", self.model.id, self._config.journal, error)
                    await asyncio.sleep(PAUSES.seconds(failures))

    async def _perform(self, request: TrainingRequest) -> Done:
        """Do a request, as often as it takes; what is wrong with it is its answer."""
        try:
            with waits.waiting(
                f"{request.kind} {self.model.adapter}/{request.seq}", on=["trainer"]
            ):
                done = await self._persist(await self._journal.with_body(request))
        except (ServiceError, RemoteError) as error:
            logger.info("request %s/%d: %s", self.model.id, request.seq, error)
            return Done(self._state, "", _failure(error, user=is_own_fault(error)))
        if done.error is not None:
            return replace(done, media=JSON, answer=_failure(done.error, user=True))
        return done

    async def _persist(self, request: TrainingRequest) -> Done:
        """Do a request through failures that pass. Raises ServiceError and RemoteError."""
        deadline = time.monotonic() + self._config.tinker.recovery_seconds
        failures = recoveries = 0
        while True:
            try:
                if self._suspect:
                    await self._restore(request)
                return await self._do(request, self._state)
            except LostError as error:
                recoveries += 1
                self._suspect = True
                if recoveries > MOST_RECOVERIES:
                    raise ServiceError(f"the trainer loses the model each time: {error}") from None
                logger.warning("model %s: %s", self.model.id, error)
            except RemoteError as error:
                if is_own_fault(error):
                    raise
                failures += 1
                self._suspect = True
                lasting = not is_passing(error) and error.reason not in OF_SERVICES
                if time.monotonic() > deadline or (lasting and failures > MOST_RECOVERIES):
                    raise
                logger.info("model %s: %s; trying again", self.model.id, error)
                await asyncio.sleep(PAUSES.seconds(failures))

    async def _do(self, request: TrainingRequest, state: ModelState) -> Done:
        """Raises LostError where the trainer is not in `state`."""
        work: Callable[[TrainingRequest, ModelState], Awaitable[Done]] = getattr(
            self, f"_{request.kind}"
        )
        try:
            return await work(request, state)
        except RemoteError as error:
            if error.reason in LOST:
                raise LostError(str(error)) from error
            raise
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise RefusedError(f"{where}: {first['msg']}") from None

    def _id(self, request: TrainingRequest, state: ModelState, what: str = "") -> str:
        return str(uuid.uuid5(NAMES, f"{self.model.id}/{state.lineage}/{request.seq}/{what}"))

    async def _check(self, state: ModelState) -> pb.TrainedAdapter:
        """The adapter. Raises LostError unless the trainer has it as it was left."""
        found = await self._trainer.find(self.model.adapter)
        if found is None:
            raise LostError("the trainer has lost the adapter")
        if not _is_at(found, state):
            raise LostError(f"the trainer is at step {found.step}, not at {state.step}")
        return found

    async def _create(self, request: TrainingRequest, state: ModelState) -> Done:
        try:
            await self._trainer.create(self.model, self._id(request, state))
        except RemoteError as error:
            if error.reason != "ADAPTER_EXISTS":  # begun by a try whose answer was lost
                raise
        answer = {"model_id": self.model.id, "type": "create_model"}
        body = json.loads(request.body or b"{}")
        if "path" not in body:
            return Done(state, JSON, _json(answer))
        done = await self._load(request, state)
        return done

    async def _forward(self, request: TrainingRequest, state: ModelState) -> Done:
        asked = await asyncio.to_thread(parse_pass, request.body or b"")
        await self._check(state)
        batch = await self._upload(request, asked.samples)
        try:
            logprobs = await self._logprobs(batch, len(asked.samples))
            await self._check(state)  # the weights were those that it was asked of
        finally:
            await self._drop(batch)
        total = asked.loss.total(asked.samples, logprobs)
        return Done(state, PROTO, encode_output(logprobs, {"loss:sum": total}))

    async def _forward_backward(self, request: TrainingRequest, state: ModelState) -> Done:
        asked, part = await asyncio.to_thread(parse_pass, request.body or b""), str(request.seq)
        batch = await self._upload(request, asked.samples)
        try:
            loss = await self._trainer.add_gradients(
                batch,
                asked.loss.spec,
                state.step,
                part,
                self.model.adapter,
                self._id(request, state),
            )
            logprobs = await self._logprobs(batch, len(asked.samples), is_passed=True)
        finally:
            await self._drop(batch)
        answer = encode_output(logprobs, {"loss:sum": loss})
        return Done(replace(state, parts=(*state.parts, part)), PROTO, answer)

    async def _upload(self, request: TrainingRequest, samples: Any) -> str:
        adapter = self.model.adapter
        return await self._trainer.upload(f"{adapter}-{request.seq}", samples, adapter)

    async def _logprobs(self, batch: str, count: int, *, is_passed: bool = False) -> list[Any]:
        read = self._trainer.passed_logprobs if is_passed else self._trainer.logprobs
        try:
            return await read(batch, count, self.model.adapter)
        except KeyError:  # the ranks came anew in between
            raise LostError("the log-probs of a pass are gone") from None

    async def _drop(self, batch: str) -> None:
        try:
            await self._trainer.delete_batch(batch)
        except RemoteError as error:  # it goes with the adapter
            logger.info("batch %s is not deleted: %s", batch, error)

    async def _optim_step(self, request: TrainingRequest, state: ModelState) -> Done:
        body = OptimStep.model_validate_json(request.body or b"")
        if body.adam_params is None:
            raise RefusedError("optimizer_params: adam_params alone are taken here")
        params = AdamParams(**body.adam_params.model_dump(exclude={"type"}))
        if not state.parts:
            raise RefusedError("optim_step: there is no gradient; call forward_backward before")
        after = replace(state, step=state.step + 1, parts=())
        try:
            taken = await self._trainer.take_step(
                state.step,
                state.parts,
                params,
                self.model.adapter,
                self._id(request, state),
            )
        except RemoteError as error:
            found = await self._trainer.find(self.model.adapter)
            if error.reason == "STEP_MISMATCH" and found and _is_at(found, after):
                return Done(after, JSON, _json({"metrics": {"step": after.step}}))
            raise
        if taken.outcome == pb.StepOptimizerResponse.OUTCOME_SKIPPED:
            why = SkippedStepError(f"no step was taken: {taken.skipped_reason}")
            return Done(after, JSON, b"", error=why)
        told = {
            "step": float(after.step),
            "grad_norm": taken.grad_norm,
            "learning_rate": taken.learning_rate,
            **taken.metrics,
        }
        return Done(after, JSON, _json({"metrics": told}))

    async def _save(self, request: TrainingRequest, state: ModelState) -> Done:
        body = SaveWeights.model_validate_json(request.body or b"")
        name = _checked_name(body.path if body.path is not None else f"{request.seq:06d}")
        path = f"tinker://{self.model.id}/weights/{name}"
        old = self._journal.checkpoint(path)
        if old is not None and not body.overwrite:
            raise RefusedError(f"{path} exists: give another name, or overwrite")
        saved = await self._save_checkpoint(request, state)
        replaced = set() if old is None else {old.checkpoint}
        if state.parts:  # they would be lost with what is before it: it is none to go back to
            if state.checkpoint in replaced:
                state, replaced = replace(state, owns=True), set()
        else:
            state = replace(
                state,
                checkpoint=saved,
                checkpoint_seq=request.seq,
                checkpoint_step=state.step,
                owns=False,
            )
        checkpoint = self._describe(
            path, "training", body.ttl_seconds, body.user_metadata, checkpoint=saved
        )
        answer = {"path": path, "type": "save_weights"}
        return Done(
            state,
            JSON,
            _json(answer),
            checkpoint=checkpoint,
            saved=saved,
            replaced=tuple(replaced),
        )

    async def _save_checkpoint(self, request: TrainingRequest, state: ModelState) -> str:
        """What it is called is in the journal before it is there."""
        await self._check(state)
        checkpoint_id = f"tinker-{self.model.adapter}-{request.seq}-{secrets.token_hex(4)}"
        unnamed = (*self._state.unnamed, f"checkpoints/{checkpoint_id}")
        await self._change_state(unnamed=unnamed)
        saved = await self._trainer.save_checkpoint(checkpoint_id, adapter=self.model.adapter)
        faults.point("gateway.saved")
        if saved.step != state.step:
            raise LostError(f"the checkpoint is of step {saved.step}, not of {state.step}")
        return str(saved.checkpoint)

    async def _publish(self, request: TrainingRequest, state: ModelState) -> Done:
        body = SaveForSampler.model_validate_json(request.body or b"")
        if body.kind != "snapshot":
            raise RefusedError(f"kind {body.kind!r} is not served here: snapshots alone are")
        sampler_id = f"{self.model.session}:sample:{body.sampling_session_seq_id}"
        if body.path is None and self._journal.sampler(sampler_id) is not None:
            raise RefusedError(taken_sampler(body.sampling_session_seq_id))
        await self._check(state)
        published = await self._trainer.publish(self.model.adapter, self._id(request, state))
        if published.step != state.step:
            raise LostError(f"weights of step {published.step} were published, not {state.step}")
        weights = published.weights
        checkpoint = None
        if body.path is not None:
            path = f"tinker://{self.model.id}/sampler_weights/{_checked_name(body.path)}"
            await self._pin(weights.version, path)
            checkpoint = self._describe(
                path,
                "sampler",
                body.ttl_seconds,
                body.user_metadata,
                version=weights.version,
                digest=weights.digest,
            )
            answer = {"path": path, "type": "save_weights_for_sampler"}
            return Done(state, JSON, _json(answer), checkpoint=checkpoint)
        if body.sampling_session_seq_id is None:
            raise RefusedError("path, or sampling_session_seq_id, is missing")
        sampler = SamplerRecord(
            id=sampler_id,
            session=self.model.session,
            created=time.time(),
            adapter=self.model.adapter,
            version=weights.version,
            digest=weights.digest,
        )
        await self._pin(weights.version, sampler.id)
        await self._release_snapshots()
        try:
            await self._engines.bring_up(sampler)
        except (NotReadyError, UnfitEnginesError) as error:  # whoever samples gives or is told it
            logger.warning("sampler %s: no engine has its weights by now: %s", sampler.id, error)
        answer = {"sampling_session_id": sampler.id, "type": "save_weights_for_sampler"}
        return Done(state, JSON, _json(answer), sampler=sampler)

    async def _release_snapshots(self) -> None:
        """Let the store remove the weights of samplers beyond the newest so many."""
        kept = self._config.tinker.kept_snapshots - 1  # and the one that comes
        for old in self._journal.snapshots(self.model, kept, 2):  # the others went before
            try:
                await asyncio.to_thread(self._weights.unpin, old.version, pin_owner(old.id))
            except OSError as error:
                logger.warning("version %d stays in the store: %s", old.version, error)

    async def _pin(self, version: int, name: str) -> None:
        try:
            await asyncio.to_thread(self._weights.pin, version, pin_owner(name))
        except (WeightStoreError, OSError) as error:
            raise ServiceError(f"version {version} is not kept by the store: {error}") from None

    def _describe(
        self,
        path: str,
        kind: str,
        ttl_seconds: int | None,
        user_metadata: dict[str, str] | None,
        **named: Any,
    ) -> Checkpoint:
        model, now = self.model, time.time()
        return Checkpoint(
            path=path,
            model=model.id,
            kind=kind,
            created=now,
            expires=None if ttl_seconds is None else now + ttl_seconds,
            adapter=model.adapter,
            rank=model.rank,
            alpha=model.alpha,
            targets=model.targets,
            train_attn=model.train_attn,
            train_mlp=model.train_mlp,
            user_metadata=user_metadata,
            **named,
        )

    async def _load(self, request: TrainingRequest, state: ModelState) -> Done:
        body = LoadWeights.model_validate_json(request.body or b"")
        source = find_training(self._journal, body.path)
        own = source.adapter == self.model.adapter
        step = await self._trainer.load(
            source.checkpoint,
            self.model.adapter,
            self._id(request, state, "load"),
            saved_adapter="" if own else source.adapter,
            weights_only=not body.optimizer,
        )
        answer = {"path": body.path, "model_id": self.model.id, "type": "load_weights"}
        return Done(replace(state, step=step, parts=()), JSON, _json(answer))

    async def _checkpoint(self, request: TrainingRequest) -> None:
        """Save where to go back to, once so many steps were taken since the last time.

        And behind a load, so that what was loaded need not stay.
        """
        state, every = self._state, self._config.tinker.checkpoint_steps
        if not every or state.parts or state.checkpoint_seq == state.done:
            return
        loaded = request.kind == "load" or (request.kind == "create" and state.step > 0)
        if not loaded and state.step - state.checkpoint_step < every:
            return
        try:
            saved = await self._save_checkpoint(request, state)
        except (RemoteError, LostError) as error:  # the next step tries again
            self._suspect = True
            logger.warning("model %s has no new checkpoint: %s", self.model.id, error)
            return
        async with self._keeping:
            before = self._state
            after = replace(
                state,
                checkpoint=saved,
                checkpoint_seq=state.done,
                checkpoint_step=state.step,
                owns=True,
            )
            self._state = _without_names(before, after, saved)
            await self._keep(lambda: self._journal.keep_state(self.model.id, self._state))
        await self._tidy()

    async def _change_state(self, **changes: Any) -> None:
        async with self._keeping:
            self._state = replace(self._state, **changes)
            await self._keep(lambda: self._journal.keep_state(self.model.id, self._state))

    async def _tidy(self) -> None:
        """Remove checkpoints that nothing names; what cannot be is told, and tried again.

        Behind another one, that is: the trainer is not writing them any more, nor goes back there.
        """
        left = []
        for name in self._state.unnamed:
            loop = asyncio.get_running_loop()
            removing = loop.run_in_executor(None, remove_checkpoint, self._config, name)
            try:
                await to_its_end(removing)
            except OSError as error:
                left.append(name)
                logger.warning("checkpoint %s stays in the store: %s", name, error)
        self._state = replace(self._state, unnamed=tuple(left))  # in the journal with what is next

    async def adopt(self, checkpoint: str) -> bool:
        """Take over a checkpoint that nobody else knows of any more, if the model needs it."""
        async with self._keeping:
            if self._state.checkpoint != checkpoint:
                return False
            self._state = replace(self._state, owns=True)
            await self._journal.keep_state(self.model.id, self._state)
            return True

    async def _restore(self, request: TrainingRequest) -> None:
        """Bring the trainer to where requests have led, unless it is there.

        It may be a request further: the one that is under way, whose answer was lost.
        """
        state, adapter = self._state, self.model.adapter
        if request.seq == 0:
            self._suspect = False
            return
        found = await self._trainer.find(adapter)
        if found is not None and not found.gradients_incomplete:
            behind = replace(state, parts=(*state.parts, str(request.seq)))
            stepped = replace(state, step=state.step + 1, parts=())
            further = {"forward_backward": behind, "optim_step": stepped}.get(request.kind, state)
            if _is_at(found, state) or _is_at(found, further):
                self._suspect = False
                return
        await self._change_state(lineage=state.lineage + 1)
        state = self._state
        metrics.RECOVERIES.inc()
        since = self._journal.done_between(self.model.id, state.checkpoint_seq, state.done)
        since = [each for each in since if each.kind in CHANGING]
        logger.warning(
            "model %s: the trainer has lost it; back to %s, and %d requests again",
            self.model.id,
            state.checkpoint or "its begin",
            len(since),
        )
        await self._begin_again(found is not None, state)
        at = replace(state, step=state.checkpoint_step, parts=())
        for each in since:
            again = await self._journal.with_body(each)
            at = replace((await self._do(again, at)).state, lineage=state.lineage)
            metrics.REPLAYED.inc()
        if (at.step, at.parts) != (state.step, state.parts):
            raise ServiceError(f"the model was brought to step {at.step}, not to {state.step}")
        self._suspect = False

    async def _begin_again(self, is_there: bool, state: ModelState) -> None:
        adapter, again = self.model.adapter, f"{self.model.id}/{state.lineage}/begin"
        if is_there and not state.checkpoint:
            await self._trainer.delete_adapter(adapter)
            is_there = False
        if not is_there and (state.checkpoint or not self._is_created_by_request(state)):
            try:
                await self._trainer.create(self.model, str(uuid.uuid5(NAMES, f"{again}/create")))
            except RemoteError as error:
                if error.reason != "ADAPTER_EXISTS":
                    raise
        if state.checkpoint:
            await self._trainer.load(
                state.checkpoint, adapter, str(uuid.uuid5(NAMES, f"{again}/load"))
            )

    def _is_created_by_request(self, state: ModelState) -> bool:
        """Whether the requests that are done again begin with the first."""
        return state.checkpoint_seq < 0


def _without_names(before: ModelState, after: ModelState, saved: str, *replaced: str) -> ModelState:
    """What `after` leaves without a name, once `saved` has one."""
    names = [*before.unnamed, *replaced]
    if before.owns and before.checkpoint != after.checkpoint:
        names.append(before.checkpoint)
    return replace(after, unnamed=tuple(name for name in names if name != saved))


CHANGING = ("create", "forward_backward", "optim_step", "load")


def _is_at(found: pb.TrainedAdapter, state: ModelState) -> bool:
    parts = sorted(found.part_ids) == sorted(state.parts)
    return found.step == state.step and parts and not found.gradients_incomplete


def find_training(journal: GatewayJournal, path: str) -> Checkpoint:
    """Raises RefusedError for a path that names no state to train on from."""
    checkpoint = journal.checkpoint(path)
    if checkpoint is None:
        raise RefusedError(f"path {path[:300]!r} names no checkpoint that is kept here")
    if checkpoint.kind != "training":
        raise RefusedError(
            f"path {path[:300]!r} has weights to sample from: of save_state are those to train on"
        )
    return checkpoint


def taken_sampler(number: int | None) -> str:
    return f"sampling_session_seq_id {number} was that of another sampler"


def pin_owner(name: str) -> str:
    """Who keeps the weights of a sampler, or of a path: a file's name, though these may be long."""
    return f"tinker-{xxhash.xxh3_128_hexdigest(name.encode())}"


def remove_checkpoint(config: GatewayConfig, name: str) -> None:
    """Remove a checkpoint from a store that is a directory, its record first.

    Raises OSError for one that is there and cannot be removed.
    """
    root = directory_of(config.store)
    if root is None or not name:
        return
    directory = root / name
    (directory / "checkpoint.json").unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(directory)


def _checked_name(name: str) -> str:
    """Raises RefusedError for what cannot be the last part of a path."""
    wrong = not name or "/" in name or not name.isprintable() or len(name) > NAME_LENGTH
    if wrong or name in (".", ".."):
        raise RefusedError(
            f"path {name[:80]!r}: a name has 1 to {NAME_LENGTH} printable characters and no slash"
        )
    return name


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _failure(error: Exception, *, user: bool) -> bytes:
    return _json({"error": str(error)[:2000], "category": "user" if user else "server"})
