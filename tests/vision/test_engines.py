"""What engines say of what they sampled is what trainers say of it, on either side."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import torch

from services.rollout.engine.config import EngineConfig
from services.rollout.engine.interface import Engine, PauseMode, create_engine
from services.trainer.backend import Mesh, Row
from services.trainer.backends.reference.backend import ReferenceBackend
from services.trainer.config import TrainerConfig
from sluice.config import parse_config
from sluice.weights.store import WeightStore
from tests.imported import import_checkpoint
from tests.megatron.comparison import read_ranks
from tests.rank_pool import Pool
from tests.sglang_servers import PYTHON
from tests.vision.asking import check, followed, request, rows_and_images, sample
from tests.vision.cases import (
    MAX_LOGPROB_DIFF,
    SERVED,
    Model,
    Oracle,
    build_model,
    record,
    speak,
)

Start = Callable[[str, Path], Awaitable[Engine]]
ENGINES = [pytest.param("reference"), pytest.param("sglang", marks=pytest.mark.sglang)]


@pytest.fixture(scope="module", params=SERVED)
def spoken(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return speak(build_model(tmp_path_factory.mktemp("spoken"), request.param))


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    started: list[Engine] = []

    async def begin(backend: str, directory: Path) -> Engine:
        own = {"sglang": {"python": str(PYTHON), "stop_seconds": 0.5}}
        config = EngineConfig(
            backend=backend,  # type: ignore[arg-type]
            model=str(directory),
            max_model_length=200,
            threads=1,
            **(own if backend == "sglang" else {}),  # type: ignore[arg-type]
        )
        engine = create_engine(backend, config)
        started.append(engine)
        await engine.start()
        return engine

    yield begin
    for engine in started:
        await engine.close()


@pytest.mark.parametrize("backend", ENGINES)
async def test_engine_trainers_and_transformers_say_the_same(
    backend: str, spoken: Model, start: Start, pool: Pool, cut_ranks: Pool, tmp_path: Path
) -> None:
    """Text, an image, two, one in a later turn, one twice; then the same under other weights."""
    layout, oracle = f"{backend} engine", Oracle(spoken)
    engine = await start(backend, spoken.directory)
    rows, said = list[Row](), dict[str, torch.Tensor]()
    for row, images in rows_and_images(spoken):
        deltas = await sample(engine, request(row, images, sample_count=3))
        check(oracle, row, layout, deltas)
        for delta in deltas:
            name = f"{row.group_id}/{delta.index}"
            length = len(delta.token_ids)
            blank = {key: torch.zeros(length) for key in row.columns}
            mask = torch.ones(length, dtype=torch.bool)
            rows.append(
                followed(row, delta)._replace(sample_id=name, loss_mask=mask, columns=blank)
            )
            said[name] = torch.tensor(list(delta.logprobs))
    values = {"model": str(spoken.directory), "store": str(tmp_path), "durable": False}
    trainer = ReferenceBackend(parse_config(TrainerConfig, values), Mesh(rank=0, world_size=1))
    agree(said, trainer.compute_logprobs([rows], model="policy", temperature=1.0), layout)
    torch.save(rows, tmp_path / "rows.pt")
    pool.run(
        "vision_scored",
        2,
        model=str(spoken.directory),
        out=str(tmp_path),
        rows=str(tmp_path / "rows.pt"),
        layout={"tensor": 2, "sequence_parallel": True},
    )
    agree(said, read_ranks(tmp_path, "scored"), layout)
    (tmp_path / "fsdp").mkdir()
    settings = {"model": str(spoken.directory), "rows": str(tmp_path / "rows.pt")}
    cut_ranks.run("score", 2, out=str(tmp_path / "fsdp"), **settings)
    agree(said, read_ranks(tmp_path / "fsdp", "scored"), layout)


def agree(said: dict[str, torch.Tensor], scored: dict[str, torch.Tensor], layout: str) -> None:
    assert said.keys() == scored.keys()
    for name, logprobs in said.items():
        difference = (scored[name] - logprobs).abs().max().item()
        assert record("logprob", difference, layout) <= MAX_LOGPROB_DIFF, name


@pytest.mark.sglang
async def test_sglang_sees_anew_with_new_weights(
    spoken: Model, start: Start, tmp_path: Path
) -> None:
    """To the figures of transformers, of images that it was shown before the swap."""
    store = WeightStore(tmp_path / "weights", durable=False)
    family = spoken.load().config.model_type
    other = speak(build_model(tmp_path / "other", family, seed=1))
    stored = import_checkpoint(store, other.directory, None, 0)
    assert stored.directory is not None
    engine, oracle = await start("sglang", spoken.directory), Oracle(other)
    shown = rows_and_images(spoken)[1:4]
    for row, images in shown:
        await sample(engine, request(row, images, request_id=f"before {row.sample_id}"))
    await engine.prepare(stored.version, stored.digest, stored.directory)
    await engine.commit(stored.version, PauseMode.WAIT)
    for row, images in shown:
        found = await sample(engine, request(row, images, request_id=f"after {row.sample_id}"))
        check(oracle, row, "sglang engine", found)
