"""A trainer's state and an engine's off the device and back: seconds, and the memory that is free.

Nothing may have changed: gradients of the same rows before and after, tokens of the same request.
"""

from __future__ import annotations

import asyncio
import gc
import time
from pathlib import Path

from services.rollout.engine.config import EngineConfig
from services.rollout.engine.interface import Engine, Generation, PauseMode, Sampling, create_engine
from services.trainer.backend import TrainingBackend
from services.trainer.config import OptimConfig
from services.trainer.parking import ParkedTensors, create_parking
from sluice import platform
from sluice.algo.spec import LossSpec
from tools.accelerator_check.backends import alone, backend_of, even_rows, joined
from tools.accelerator_check.models import random_model, shape_of
from tools.accelerator_check.work import StepWork

FREED = 0.8  # of the state, at least; on a device whose allocator says what it holds
GIB = 2**30


def run(work: StepWork) -> None:
    """The trainer, then the engine."""
    model = random_model(work, "0.5b")
    rows = even_rows(shape_of(work, "0.5b").vocabulary, 2, 16, 48)
    with (
        alone(work.directory),
        backend_of(
            "reference", model, work.directory, half=True, optim=OptimConfig(learning_rate=1e-6)
        ) as backend,
    ):
        backend.forward_backward([rows], LossSpec(name="sft"))
        backend.step(normalizer=96.0, learning_rate=1e-6)
        _trainer(work, backend, rows)
    del backend
    gc.collect()
    platform.current().release_memory()
    asyncio.run(_engine(work, model))


def _trainer(work: StepWork, backend: TrainingBackend, rows: list) -> None:  # type: ignore[type-arg]
    current = platform.current()

    def logprobs() -> object:
        return joined(backend.compute_logprobs([rows], model="policy", temperature=1.0), rows)

    before = logprobs()
    held = backend.held_tensors()
    current.synchronize()
    full, began = current.memory().allocated, time.perf_counter()
    parking = create_parking(work.directory / "parking")
    parked = ParkedTensors.park([*held.state, *held.gradients], [], parking)
    current.release_memory()
    slept = time.perf_counter() - began
    freed, size, began = full - current.memory().allocated, parked.nbytes, time.perf_counter()
    parked.restore()
    current.synchronize()
    woke = time.perf_counter() - began
    work.record(
        trainer_state_gib=size / GIB,
        trainer_freed_gib=freed / GIB,
        trainer_sleep_s=slept,
        trainer_wake_s=woke,
    )
    if current is not platform.CPU and freed < FREED * size:
        work.fail(f"{freed / GIB:.2f} GiB are free, of a state of {size / GIB:.2f}")
    if not (logprobs() == before).all():  # type: ignore[attr-defined]
        work.fail("the trainer woke with other weights")


async def _engine(work: StepWork, model: Path) -> None:
    settings = {"model": str(model), "dtype": "bfloat16", "max_running": 4, "max_model_length": 128}
    engine = create_engine("reference", EngineConfig.model_validate(settings))
    current = platform.current()
    await engine.start()
    try:
        before = await _tokens(engine, "before")
        full, began = current.memory().allocated, time.perf_counter()
        await engine.pause(PauseMode.ABORT)
        await engine.sleep()
        slept, freed = time.perf_counter() - began, full - current.memory().allocated
        began = time.perf_counter()
        await engine.wake()
        await engine.resume()
        woke = time.perf_counter() - began
        after = await _tokens(engine, "after")
    finally:
        await engine.close()
    size = shape_of(work, "0.5b").parameters * 2
    work.record(engine_freed_gib=freed / GIB, engine_sleep_s=slept, engine_wake_s=woke)
    if current is not platform.CPU and freed < FREED * size:
        work.fail(f"{freed / GIB:.2f} GiB are free, of weights of {size / GIB:.2f}")
    if after != before:
        work.fail("the engine woke with other weights")


async def _tokens(engine: Engine, name: str) -> list[int]:
    tokens: list[int] = []
    sampling = Sampling(max_new_tokens=32, temperature=0)
    async for delta in engine.generate(
        Generation(request_id=name, prompt_token_ids=[1, 2, 3], sampling=sampling)
    ):
        tokens.extend(delta.token_ids)
    return tokens
