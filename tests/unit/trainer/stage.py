"""The controller's trainer with one rank that answers as a test tells it to."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path

from services.trainer.config import TrainerConfig
from services.trainer.controller.launch import WorkerServer
from services.trainer.controller.passes import GradientsRequest
from services.trainer.controller.trainer import Trainer
from sluice.algo.spec import LossSpec
from sluice.api.trainer.v1 import trainer_service_pb2 as trainer_pb
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.config import parse_config
from sluice.runtime.waits import Waits
from tests.unit.trainer.ranks import ScriptedRank, ranks_config, until
from tests.unit.trainer.rows import make_samples

MODEL = {
    "model_type": "qwen3",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 50,
    "intermediate_size": 32,
}
SFT = LossSpec(name="sft")
Script = Callable[[str], Awaitable[pb.CommandResult]]


class Stage:
    """A trainer of one scripted rank. `script` answers by the name of the command."""

    def __init__(self, path: Path, **settings: object) -> None:
        (path / "config.json").write_text(json.dumps(MODEL))
        values = {
            "model": str(path),
            "store": str(path / "store"),
            "durable": False,
            "optim": {"max_consecutive_skips": 2},
            "max_batches": 2,
            "max_waiting_calls": 3,
            "ranks": ranks_config(count=1, max_restarts=3),
            **settings,
        }
        self.config = parse_config(TrainerConfig, values)
        self.waits = Waits()
        self.trainer = Trainer(self.config, self.waits)
        self.server = WorkerServer(self.config, self.trainer.ranks)
        self.commands: list[str] = []
        self.script: Script = self.succeed
        self.rank: ScriptedRank | None = None

    async def succeed(self, name: str) -> pb.CommandResult:
        return pb.CommandResult()

    async def connect(self) -> None:
        self.rank = ScriptedRank(self.server.address, 0, 1, answer=self._answer)
        await until(lambda: self.trainer.ranks.state == trainer_pb.Trainer.STATE_ACTIVE)

    async def upload(self, batch_id: str = "b") -> str:
        upload = self.trainer.batches.begin_upload()
        for sample in make_samples([[3, 4], [5]]):
            upload.add_sample(sample)
        return (await self.trainer.batches.upload(batch_id, upload.finish(), 3)).name

    def request(self, part_id: str, step: int = 0) -> GradientsRequest:
        return GradientsRequest(part_id, f"body of {part_id}", step, SFT, ())

    async def _answer(self, command: pb.FollowResponse) -> pb.CommandResult:
        name = command.WhichOneof("command") or ""
        self.commands.append(name)
        return await self.script(name)
