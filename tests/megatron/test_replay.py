"""Experts chosen elsewhere are the experts that train: equal to a model forced to take them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from services.trainer.backend import Row
from sluice.algo.logprobs import token_logprobs
from sluice.algo.losses import compute_loss, pack_rows
from sluice.client import RemoteError, TrainerClient
from sluice.samples.sample import Sample
from tests.megatron.comparison import (
    GRADIENT_TOLERANCE,
    LOGPROB_TOLERANCE,
    Tensors,
    logprob_difference,
    read_ranks,
    relative_difference,
)
from tests.megatron.models import routed_rows
from tests.megatron.oracle import checkpoint_names
from tests.megatron.settings import NORMALIZER, SPEC
from tests.rank_pool import Pool
from tests.service.trainer.harness import ACTIVE, running_trainer, until

LAYOUTS = [
    pytest.param(1, {"recompute": "full"}, id="recompute", marks=pytest.mark.fast),
    pytest.param(2, {"expert": 2}, id="EP2"),
    pytest.param(2, {"pipeline": 2, "virtual_pipeline": 2, "recompute": "full"}, id="PP2xVPP2"),
    pytest.param(2, {"context": 2}, id="CP2"),
    pytest.param(2, {"context": 2, "cp_layout": "contiguous"}, id="CP2-contiguous"),
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
        found = {n: p.grad for n, p in named if p.grad is not None}
        return checkpoint_names(self.model, found)

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
    ("family", "world", "layout"),
    [
        pytest.param("qwen3_moe", 1, {}, id="single", marks=pytest.mark.fast),
        pytest.param(
            "qwen3_moe",
            4,
            {"tensor": 2, "sequence_parallel": True, "context": 2},
            id="TP2+SPxCP2",
        ),
        pytest.param("qwen3_moe", 2, {"pipeline": 2, "virtual_pipeline": 2}, id="PP2xVPP2"),
        pytest.param("deepseek_v3", 1, {}, id="deepseek-single"),
        pytest.param("glm_moe_dsa_shared", 2, {"pipeline": 2}, id="glm5-shared-PP2"),
    ],
)
def test_recorded_experts_outlive_the_weights(
    family: str, world: int, layout: dict[str, Any], pool: Pool, expected: Any, tmp_path: Path
) -> None:
    moe = expected(family)
    layout = {"routing_replay": "recorded", **layout}
    answers = pool.run(
        "replay_recorded", world, model=str(moe.directory), layout=layout, out=str(tmp_path)
    )
    for answer in answers:
        assert answer["first"] == pytest.approx(moe.steps[0].loss, rel=1e-6, abs=1e-5)
        assert abs(answer["free"] - answer["replayed"]) > 1e-4  # routers changed their minds
        assert answer["brought"] == pytest.approx(answer["replayed"], rel=1e-6, abs=1e-6)
        assert "recorded for other tokens" in answer["missing"][0]
        assert "no experts were recorded" in answer["missing"][1]
        assert "algorithm.loss.old_logprobs: old" in answer["missing"][1]


def sampled(row: Row) -> Sample:
    """The row as a rollout gives it: experts of every token but the last."""
    assert row.routed_experts is not None
    experts = row.routed_experts[: len(row.token_ids) - 1].numpy().astype(np.int16)
    return Sample(
        sample_id=row.sample_id,
        group_id=row.group_id,
        token_ids=row.token_ids.numpy().astype(np.int32),
        prompt_length=row.prompt_length,
        columns={"reward": 0.0},
        routed_experts=experts,
    )


@pytest.mark.fast
async def test_experts_of_the_rollout_reach_the_ranks(expected: Any, tmp_path: Path) -> None:
    """Through the API and the blob store; log-probs are those of the forced model."""
    directory, rows = expected("qwen3_moe").directory, routed_rows()
    settings = {"dtype": "float32", "routing_replay": "rollout"}
    trainer = running_trainer(
        tmp_path / "trainer", directory, backend="megatron", megatron=settings
    )
    with trainer as running:
        async with running.client() as client:
            await until(client, lambda now: now.state == ACTIVE)
            samples = [sampled(row) for row in rows]
            batch = (await client.upload_batch("all", len(samples), samples=samples)).batch
            await client.compute_logprobs(batch)
            found = await client.get_columns(batch, ["old_logprobs"])
            refused = await refusal_without(client, samples)
    forced = ForcedModel(directory)
    wanted = {row.sample_id: forced.logprobs(row, 1.0)[0].detach() for row in rows}
    told = {name: torch.from_numpy(columns["old_logprobs"]) for name, columns in found.items()}
    assert logprob_difference(told, wanted) < LOGPROB_TOLERANCE
    assert (refused.code.name, refused.reason) == ("FAILED_PRECONDITION", "ROUTING_MISSING")
    assert rows[1].sample_id in str(refused)


async def refusal_without(client: TrainerClient, samples: list[Sample]) -> RemoteError:
    """How a batch is refused in which one sample lacks its experts."""
    lacking = [samples[0], replace(samples[1], routed_experts=None)]
    batch = (await client.upload_batch("lacking", 2, samples=lacking)).batch
    with pytest.raises(RemoteError) as caught:
        await client.compute_logprobs(batch)
    return caught.value
