"""Likeliest tokens and losses over them, however model and rows are cut: float64 transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from services.trainer.backend import Row
from tests.megatron.comparison import GRADIENT_TOLERANCE, Tensors, read_ranks, relative_difference
from tests.megatron.conftest import ExpectedByFamily
from tests.megatron.models import VOCAB, taught_rows
from tests.megatron.settings import NAMED, NORMALIZER, TAUGHT
from tests.rank_pool import Pool

fast = pytest.mark.fast
LAYOUTS = [
    pytest.param("qwen3", 1, {}, id="single"),
    pytest.param("qwen3", 2, {"tensor": 2}, id="TP2", marks=fast),
    pytest.param("qwen3", 2, {"tensor": 2, "sequence_parallel": True}, id="TP2+SP"),
    pytest.param("qwen3", 2, {"pipeline": 2}, id="PP2"),
    pytest.param("qwen3", 2, {"context": 2}, id="CP2-zigzag", marks=fast),
    pytest.param("qwen3", 2, {"context": 2, "cp_layout": "contiguous"}, id="CP2-contiguous"),
    pytest.param("qwen3_tied", 2, {"tensor": 2}, id="tied-TP2"),
    pytest.param("qwen3", 2, {}, id="DP2"),
    pytest.param("qwen2", 4, {"tensor": 4}, id="TP4"),
    pytest.param("qwen3", 4, {"tensor": 2, "context": 2}, id="TP2xCP2", marks=fast),
    pytest.param("qwen3", 4, {"context": 2, "pipeline": 2}, id="CP2xPP2"),
    pytest.param(
        "qwen3",
        4,
        {"tensor": 2, "sequence_parallel": True, "pipeline": 2, "virtual_pipeline": 2},
        id="TP2+SPxPP2xVPP2",
    ),
]


class Plain:
    """A checkpoint in float64, one sample at a time."""

    def __init__(self, directory: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()

    def table(self, row: Row) -> torch.Tensor:
        logits = self.model(row.token_ids[None]).logits[0, row.prompt_length - 1 : -1]
        table: torch.Tensor = (logits / (TAUGHT.temperature or 1.0)).log_softmax(-1)
        return table

    def loss(self, rows: list[Row]) -> torch.Tensor:
        """JSD of the tokens named and of all others together, written out."""
        total = torch.zeros((), dtype=torch.float64)
        for row in rows:
            ids = row.columns[f"teacher_top_ids/{NAMED}"].long()
            q = row.columns[f"teacher_top_logprobs/{NAMED}"].double().exp()
            p = self.table(row).gather(1, ids).exp()
            q, p = (torch.cat([each, 1 - each.sum(1, keepdim=True)], dim=1) for each in (q, p))
            middle = 0.5 * (p + q)
            jsd = 0.5 * (q * (q / middle).log() + p * (p / middle).log()).sum(1)
            total = total + row.loss_weight * jsd[row.loss_mask].sum()
        return total

    def gradients(self, rows: list[Row]) -> tuple[float, Tensors]:
        self.model.zero_grad()
        loss = self.loss(rows) / NORMALIZER
        loss.backward()
        named = self.model.named_parameters()
        return loss.item(), {n: p.grad.float() for n, p in named if p.grad is not None}


@pytest.mark.parametrize(("family", "world", "layout"), LAYOUTS)
def test_named_tokens_and_their_gradients_are_those_of_one_process(
    family: str,
    world: int,
    layout: dict[str, Any],
    pool: Pool,
    expected: ExpectedByFamily,
    tmp_path: Path,
) -> None:
    directory, rows = expected.directory(family), taught_rows(NAMED)
    plain = Plain(directory)
    loss, gradients = plain.gradients(rows)
    count = VOCAB if world == 1 else 9
    answers = pool.run(
        "taught",
        world,
        model=str(directory),
        out=str(tmp_path),
        count=count,
        layout={"distributed_optimizer": False, **layout},
    )
    named = read_ranks(tmp_path, "named")
    assert named.keys() == {f"{r.sample_id}/{k}" for r in rows for k in ("logprobs", "ids", "top")}
    for row in rows:
        best, ids = plain.table(row).detach().topk(count, dim=1)
        assert torch.equal(named[f"{row.sample_id}/ids"].long(), ids)
        torch.testing.assert_close(
            named[f"{row.sample_id}/top"].double(), best, atol=1e-4, rtol=1e-5
        )
        given = plain.table(row).gather(1, row.token_ids[row.prompt_length :, None])[:, 0]
        found = named[f"{row.sample_id}/logprobs"].double()
        torch.testing.assert_close(found, given.detach(), atol=1e-4, rtol=1e-5)
    found_gradients = read_ranks(tmp_path, "gradients")
    assert relative_difference(found_gradients, gradients) <= GRADIENT_TOLERANCE
    assert answers[0]["loss"] == pytest.approx(loss, rel=1e-5)
    # of other tokens it is another loss, and another gradient
    for row in rows:
        row.columns[f"teacher_top_ids/{NAMED}"][:] = row.columns[f"teacher_top_ids/{NAMED}"].flip(1)  # type: ignore[index]
    wrong, others = plain.gradients(rows)
    assert wrong != pytest.approx(loss, rel=1e-3)
    assert relative_difference(found_gradients, others) > 10 * GRADIENT_TOLERANCE
