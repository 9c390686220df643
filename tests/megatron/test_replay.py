"""Experts chosen elsewhere are the experts that train: equal to a model forced to take them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from services.trainer.backend import Row
from sluice.algo.inputs import pack_rows
from sluice.algo.logprobs import token_logprobs
from sluice.algo.losses import compute_loss
from tests.megatron.comparison import (
    GRADIENT_TOLERANCE,
    LOGPROB_TOLERANCE,
    Tensors,
    logprob_difference,
    read_ranks,
    relative_difference,
)
from tests.megatron.models import routed_rows
from tests.megatron.oracle import split_experts
from tests.megatron.pool import Pool
from tests.megatron.settings import NORMALIZER, SPEC

LAYOUTS = [
    pytest.param(1, {"recompute": "full"}, id="recompute", marks=pytest.mark.fast),
    pytest.param(2, {"expert": 2}, id="EP2"),
    pytest.param(2, {"pipeline": 2, "virtual_pipeline": 2, "recompute": "full"}, id="PP2xVPP2"),
    pytest.param(2, {"context": 2}, id="CP2"),
    pytest.param(2, {"tensor": 2, "sequence_parallel": True}, id="TP2+SP"),
]


class ForcedModel:
    """transformers with the routers' choice taken out of their hands."""

    def __init__(self, directory: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, experts_implementation="eager"
        )
        self.chosen = torch.empty(0)
        routers = [m for n, m in self.model.named_modules() if n.endswith("mlp.gate")]
        for index, router in enumerate(routers):
            router.forward = self._route(router, index)

    def logprobs(self, row: Row, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        assert row.routed_experts is not None
        last = torch.zeros((len(row.token_ids) - len(row.routed_experts), 3, 1), dtype=torch.long)
        last = torch.cat((last, last + 1), dim=2)
        self.chosen = torch.cat((row.routed_experts.long(), last))
        logits = self.model(row.token_ids[None]).logits[0, row.prompt_length - 1 : -1]
        targets = row.token_ids[row.prompt_length :]
        return token_logprobs(logits, targets, temperature=temperature, entropy="gradient")

    def gradients(self, rows: list[Row]) -> Tensors:
        for row in rows:
            outputs, entropy = self.logprobs(row, SPEC.temperature or 1.0)
            loss = compute_loss(pack_rows([row], SPEC, outputs, entropy), SPEC).loss
            (loss / NORMALIZER).backward()
        named = self.model.named_parameters()
        return split_experts({n: p.grad for n, p in named if p.grad is not None})

    def _route(self, router: Any, index: int) -> Any:
        def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            logits = torch.nn.functional.linear(hidden, router.weight)
            chosen = self.chosen[:, index]
            return logits, logits.gather(1, chosen).softmax(-1), chosen

        return forward


@pytest.mark.parametrize(("world", "layout"), LAYOUTS)
def test_rollout_replay_equals_a_forced_model(
    world: int, layout: dict[str, Any], pool: Pool, expected: Any, tmp_path: Path
) -> None:
    moe = expected("qwen3_moe")
    layout = {"routing_replay": "rollout", "distributed_optimizer": False, **layout}
    pool.run("replay_rollout", world, model=str(moe.directory), layout=layout, out=str(tmp_path))

    forced, rows = ForcedModel(moe.directory), routed_rows()
    wanted = {row.sample_id: forced.logprobs(row, SPEC.temperature or 1.0)[0] for row in rows}
    found = read_ranks(tmp_path, "logprobs")
    assert logprob_difference(found, {n: t.detach() for n, t in wanted.items()}) < LOGPROB_TOLERANCE
    assert logprob_difference(found, moe.logprobs) > 0.1  # the experts are not the model's own
    gradients = read_ranks(tmp_path, "gradients")
    assert relative_difference(gradients, forced.gradients(rows)) < GRADIENT_TOLERANCE


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        pytest.param(1, {}, id="single", marks=pytest.mark.fast),
        pytest.param(4, {"tensor": 2, "sequence_parallel": True, "context": 2}, id="TP2+SPxCP2"),
        pytest.param(2, {"pipeline": 2, "virtual_pipeline": 2}, id="PP2xVPP2"),
    ],
)
def test_recorded_experts_outlive_the_weights(
    world: int, layout: dict[str, Any], pool: Pool, expected: Any, tmp_path: Path
) -> None:
    moe = expected("qwen3_moe")
    layout = {"routing_replay": "recorded", **layout}
    answers = pool.run(
        "replay_recorded", world, model=str(moe.directory), layout=layout, out=str(tmp_path)
    )
    for answer in answers:
        assert answer["first"] == pytest.approx(moe.steps[0].loss, abs=1e-5)
        assert abs(answer["free"] - answer["replayed"]) > 1e-4  # routers changed their minds
        assert answer["brought"] == pytest.approx(answer["replayed"], abs=1e-6)
        assert "recorded for other tokens" in answer["missing"][0]
        assert "no experts were recorded" in answer["missing"][1]
