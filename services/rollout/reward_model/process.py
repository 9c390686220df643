"""Runs a reward model: its ports, the thread that it computes in, and a look at that thread."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING

from services.rollout.reward_model.batching import Batches, ModelThread
from services.rollout.reward_model.config import RewardModelConfig
from services.rollout.reward_model.server import ClassifyServer
from sluice import platform
from sluice.imports import import_named, keep_loaded
from sluice.runtime.server import REWARD_MODEL, Server

if TYPE_CHECKING:
    from services.rollout.reward_model.model import ValueModel

logger = logging.getLogger(__name__)

LOOKS_SECONDS = 1.0  # at the thread; oftener where little is allowed to it
WORK = "a batch of the reward model"


class RewardModelProcess:
    """Owns the servers and the model. `failure` is why it ended by itself."""

    def __init__(self, config: RewardModelConfig) -> None:
        """Raises ConfigError."""
        self._config = config
        self.server = Server(config.server)
        self.server.add_port(REWARD_MODEL)
        self.classify = ClassifyServer(config)
        self.thread = ModelThread()
        self._tasks: list[asyncio.Task[None]] = []
        self.failure = ""

    async def run(self) -> None:
        """Serves until a signal; one that comes while the model loads ends the loading."""
        try:
            await self.server.run(self.start)
        finally:
            await self.close()

    async def start(self) -> None:
        """Opens the ports, then loads the model. Raises ConfigError."""
        config = self._config
        await self.classify.start()
        self.server.further_addresses["classify_url"] = self.classify.url
        await self.server.start()
        try:
            model = await self.thread.call(partial(_load, config))
        except BaseException:
            await self.server.stop()
            raise
        logger.info("serves %s@%s", config.model_name, model.digest)
        batches = Batches(model.score, config.batch, self.thread)
        self._tasks = [
            asyncio.create_task(batches.run(), name="batches"),
            asyncio.create_task(self._watch(), name="watch"),
            asyncio.create_task(self._leave(), name="leave"),
        ]
        for task in self._tasks:
            self.server.depend_on(task)
        keep_loaded()
        self.classify.serve(model, batches)
        await self.server.set_serving()

    async def close(self) -> None:
        """Lets go of everything; the server has stopped before."""
        await self.classify.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _leave(self) -> None:
        """Ends the port while the other one drains."""
        await self.server.stopping.wait()
        await self.classify.close()

    async def _watch(self) -> None:
        """Says that nothing is served while the thread is stuck; ends the process in the end."""
        limit = self._config.stuck_seconds
        while not self.failure:
            await asyncio.sleep(min(LOOKS_SECONDS, limit / 4))
            if self.thread.busy_seconds > limit:
                await self._see_through(limit)

    async def _see_through(self, limit: float) -> None:
        began = self.thread.busy_seconds
        told = WORK, began, self.thread.where
        logger.error("%s takes %.0f s at %s: not ready until it ends", *told)
        self.classify.set_ready(False)
        await self.server.set_serving(False)

        def explain() -> str:
            return f"it stands at {self.thread.where}"

        with self.server.waits.waiting(
            WORK, on=["device"], timeout=2 * limit, explain=explain
        ) as wait:
            wait.began -= began
            while (seconds := self.thread.busy_seconds) > limit:
                if seconds > 2 * limit:
                    self.failure = f"{WORK} takes {seconds:.0f} s at {self.thread.where}"
                    logger.error("%s: the process ends", self.failure)
                    self.server.request_stop()
                    return
                await asyncio.sleep(min(LOOKS_SECONDS, limit / 4))
        if not self.server.stopping.is_set():
            logger.warning("%s has ended: ready again", WORK)
            self.classify.set_ready(True)
            await self.server.set_serving()


def _load(config: RewardModelConfig) -> ValueModel:
    """Raises ConfigError."""
    device = platform.current().device()
    if config.threads:
        import_named("torch:set_num_threads")(config.threads)
    kind: type[ValueModel] = import_named("services.rollout.reward_model.model:ValueModel")
    return kind(
        config.model,
        dtype=config.dtype,
        device=device,
        digest=config.digest,
        max_length=config.max_length,
    )
