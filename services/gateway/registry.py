"""All models and checkpoints of a gateway: begun, found, unloaded, removed when they expire."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time

from services.gateway import metrics
from services.gateway.config import GatewayConfig
from services.gateway.errors import GoneError, JournalDamagedError, RefusedError
from services.gateway.journal import Checkpoint, GatewayJournal, Model, TrainingRequest
from services.gateway.models import TrainedModel, find_training, pin_owner, remove_checkpoint
from services.gateway.samplers import Engines
from services.gateway.trainer import AdapterTrainer
from sluice.runtime.errors import RemoteError
from sluice.weights.store import WeightStore

logger = logging.getLogger(__name__)

SWEEP_SECONDS = 10.0
SILENT_LOOKS = 12  # without a word of a session whose samples run: then they are ended


class ModelRegistry:
    """Models by id; those of sessions that ended are unloaded."""

    def __init__(
        self,
        config: GatewayConfig,
        journal: GatewayJournal,
        trainer: AdapterTrainer,
        engines: Engines,
    ) -> None:
        self._config, self.journal = config, journal
        self._trainer, self._engines = trainer, engines
        self._models: dict[str, TrainedModel] = {}
        self._beginning = asyncio.Lock()
        self._is_deaf = False  # signs of life came that the journal did not take
        self._samples: dict[str, set[asyncio.Task[bytes]]] = {}  # that run, by session
        self._silent: dict[str, int] = {}  # looks since a word of a session whose samples run
        self._weights = WeightStore(config.weights_location)

    async def start(self) -> None:
        """Go on with the models that were trained when the gateway ended."""
        await self.journal.note_seen()  # nobody could send a sign of life meanwhile
        for model in self.journal.loaded_models():
            try:
                self._start(model)
            except JournalDamagedError as error:
                logger.error("%s", error)

    async def close(self) -> None:
        for model in self._models.values():
            await model.close("is left to the next gateway")

    def _start(self, model: Model) -> None:
        trained = TrainedModel(model, self.journal, self._trainer, self._engines, self._config)
        self._models[model.id] = trained
        trained.start()
        metrics.MODELS.set(len(self._models))

    async def begin(self, model: Model, create: TrainingRequest) -> None:
        """Begin a model, or find the one that the same request began. Raises RefusedError."""
        async with self._beginning:
            if (known := self.journal.model(model.id)) is None:
                await self.journal.add_model(model, create)
                self._start(self.journal.model(model.id) or model)
                return
        first = self.journal.request(known.id, 0)
        if first is not None and first.digest != create.digest:
            raise RefusedError(f"model {known.id} was begun by another request")

    def model(self, model_id: str) -> TrainedModel:
        """Raises GoneError and JournalDamagedError."""
        found = self._models.get(model_id)
        if found is None:
            known = self.journal.model(model_id)
            if known is not None and known.unloaded is None:
                self.journal.state(model_id)  # which it did not begin with
            why = "is not known" if known is None else f"is unloaded: {known.unloaded or 'by now'}"
            raise GoneError(f"model {model_id[:80]!r} {why}")
        return found

    def training(self, path: str) -> Checkpoint:
        """Raises RefusedError."""
        return find_training(self.journal, path)

    async def note_seen(self, session_id: str) -> None:
        """A sign of life of a session. Raises sqlite3.OperationalError."""
        try:
            await self.journal.note_seen(session_id)
        except sqlite3.OperationalError:
            self._is_deaf = True
            raise

    def hear(self, session_id: str) -> None:
        """A word of a session: somebody is there for its samples."""
        if session_id in self._samples:
            self._silent[session_id] = 0

    def add_sample(self, session_id: str, task: asyncio.Task[bytes]) -> None:
        """What samples for a session ends with it."""
        running = self._samples.setdefault(session_id, set())
        running.add(task)
        self.hear(session_id)

        def ended(task: asyncio.Task[bytes]) -> None:
            running.discard(task)
            if not running and self._samples.get(session_id) is running:
                del self._samples[session_id], self._silent[session_id]

        task.add_done_callback(ended)

    def _end_samples(self, session_id: str) -> None:
        for task in self._samples.get(session_id, ()):
            task.cancel()

    async def finish_session(self, session_id: str, why: str) -> None:
        """End a session; its models are unloaded, and what samples for it ends."""
        await self.journal.finish_session(session_id, why)
        self._end_samples(session_id)
        for model in self.journal.models_of(session_id):
            if model.unloaded is None:
                await self._unload(model, f"its session ended: {why}")

    async def _unload(self, model: Model, why: str) -> None:
        """Raises nothing for a trainer or a store that fails now: the next look tries again."""
        trained = self._models.pop(model.id, None)
        if trained is not None:
            await trained.close(f"is unloaded: {why}")
        metrics.MODELS.set(len(self._models))
        try:
            await self._trainer.delete_adapter(model.adapter)
        except RemoteError as error:
            if error.reason != "ADAPTER_NOT_FOUND":
                logger.warning("model %s is not unloaded yet: %s", model.id, error)
                return
        try:
            for name in self._unneeded(model):
                await asyncio.to_thread(remove_checkpoint, self._config, name)
            for sampler in self.journal.snapshots(model):
                owner = pin_owner(sampler.id)
                await asyncio.to_thread(self._weights.unpin, sampler.version, owner)
        except OSError as error:
            logger.warning("model %s is not unloaded yet: %s", model.id, error)
            return
        await self.journal.unload(model.id, why)

    def _unneeded(self, model: Model) -> list[str]:
        """Checkpoints that nobody needs without the model."""
        try:
            state = self.journal.state(model.id)
        except JournalDamagedError as error:
            logger.error("%s: its checkpoint stays in the store", error)
            return []
        return [*state.unnamed, state.checkpoint] if state.owns else [*state.unnamed]

    async def delete_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Remove what a path names, unless a model would go back to it, and forget the path.

        Raises OSError where that cannot be removed; the path is known then, and it can be again.
        """
        trained = self._models.get(checkpoint.model)
        if checkpoint.kind == "sampler":
            owner = pin_owner(checkpoint.path)
            await asyncio.to_thread(self._weights.unpin, checkpoint.version, owner)
        elif trained is None or not await trained.adopt(checkpoint.checkpoint):
            await asyncio.to_thread(remove_checkpoint, self._config, checkpoint.checkpoint)
        await self.journal.remove_checkpoint(checkpoint)

    async def sweep(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                await self.look()
            except sqlite3.OperationalError as error:  # a full disk has room again
                logger.error("%s: %s", self._config.journal, error)

    async def look(self) -> None:
        """End sessions without a sign of life, and remove what has expired.

        What cannot be removed for now is told, and tried again the next time.
        """
        if self._is_deaf:
            await self.journal.note_seen()
            self._is_deaf = False
        since = time.time() - self._config.tinker.session_seconds
        for session_id in self.journal.silent_sessions(since):
            logger.warning("session %s sent no sign of life", session_id)
            await self.finish_session(session_id, "no sign of life")
        for session_id in self._silent:
            self._silent[session_id] += 1
            if self._silent[session_id] == SILENT_LOOKS:
                logger.warning("session %s is silent: what samples for it ends", session_id)
                self._end_samples(session_id)
        for model in self.journal.loaded_models():
            if end := self.journal.session_end(model.session):
                await self._unload(model, f"its session ended: {end}")
        for checkpoint in self.journal.expired_checkpoints():
            try:
                await self.delete_checkpoint(checkpoint)
            except OSError as error:
                logger.warning("%s is not removed yet: %s", checkpoint.path, error)
