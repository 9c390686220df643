"""Trains and serves a tiny Qwen3 in one process, and prints which large libraries that took.

`python -m tests.unit.lean_models DIRECTORY LIBRARY...`
"""

from __future__ import annotations

import sys
from pathlib import Path

from examples.models.tiny_qwen3 import build_tiny_qwen3


def train(model: Path, directory: Path) -> None:
    import torch

    from services.trainer.backend import Mesh, Row
    from services.trainer.backends.reference.backend import ReferenceBackend
    from services.trainer.config import TrainerConfig
    from sluice.algo.spec import LossSpec

    config = TrainerConfig(model=str(model), store=str(directory))
    backend = ReferenceBackend(config, Mesh(rank=0, world_size=1))
    ones = torch.ones(3)
    columns = {"rollout_logprobs": -ones, "advantages": ones}
    row = Row(
        sample_id="g/0",
        group_id="g",
        token_ids=torch.arange(6),
        prompt_length=3,
        loss_mask=ones.bool(),
        columns=columns,
    )
    backend.forward_backward([[row]], LossSpec(name="ppo_clip", clip_low=0.2))
    assert backend.step(normalizer=3.0, learning_rate=None).grad_norm > 0
    (directory / "checkpoint").mkdir()
    backend.save_checkpoint(directory / "checkpoint")
    backend.load_checkpoint(directory / "checkpoint")
    (directory / "shards").mkdir()
    assert backend.write_shards(directory / "shards")


def serve(model: Path) -> None:
    import torch

    from services.rollout.engine.config import EngineConfig
    from services.rollout.engine.interface import Generation, Sampling
    from services.rollout.engine.reference.core import EngineCore
    from services.rollout.engine.reference.loading import open_model

    core = EngineCore(EngineConfig(model=str(model), max_running=8, max_model_length=16))
    core.serve(*open_model(model, torch.float32, torch.device("cpu")))
    sampling = Sampling(max_new_tokens=4)
    prompt = [1, 2, 3]
    generation = Generation(
        request_id="g", prompt_token_ids=prompt, sampling=sampling, sample_count=2
    )
    core.submit("g", generation)
    while core.has_work:
        core.step()
    assert core.take_outbox()


def compile_one() -> float:
    """What is compiled after all is compiled by the real Dynamo."""
    import torch

    return float(torch.compile(lambda x: x * 2 + 1, backend="eager")(torch.ones(())))


def main() -> None:
    directory, libraries = Path(sys.argv[1]), sys.argv[2:]
    model = build_tiny_qwen3(directory / "model")
    train(model, directory)
    serve(model)
    print(*(name for name in libraries if name in sys.modules))
    assert compile_one() == 3.0
    print(*(name for name in libraries if name in sys.modules))


if __name__ == "__main__":
    main()
