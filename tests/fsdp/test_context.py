"""Rows cut over context ranks: whatever reads a whole row finds it, and what cannot is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fsdp.conftest import ExpectedByModel
from tests.fsdp.oracle import gradient_difference, logprob_difference, read_ranks
from tests.fsdp.test_start import copy_model
from tests.rank_pool import Pool

LOSSES: dict[str, dict[str, Any]] = {
    "gspo": {"name": "gspo", "clip_low": 0.2, "aggregation": "sample_mean"},
    "gmpo": {"name": "gmpo", "aggregation": "sample_mean"},
    "entropy": {"name": "ppo_clip", "clip_low": 0.2, "entropy_coefficient": 0.05},
    "sft": {"name": "sft"},
}


@pytest.mark.parametrize(
    ("world", "fsdp"),
    [
        (2, {"context": 2}),
        (2, {"context": 2, "cp_layout": "contiguous"}),
        (4, {"context": 2}),
    ],
)
def test_losses_of_whole_sequences_are_those_of_one_rank(
    pool: Pool, expected: ExpectedByModel, tmp_path: Path, world: int, fsdp: dict[str, Any]
) -> None:
    model, _ = expected("qwen3")
    given: dict[str, Any] = {"model": str(model.directory), "out": str(tmp_path), "losses": LOSSES}
    (alone,) = pool.run("surrogates", 1, **given)
    for answer in pool.run("surrogates", world, fsdp=fsdp, **given):
        for name in LOSSES:
            assert answer[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-4), name
    assert len({alone[name]["grad_norm"] for name in LOSSES}) == len(LOSSES)


@pytest.mark.fast
def test_the_comparison_sees_attention_without_the_exchange(
    pool: Pool, expected: ExpectedByModel, tmp_path: Path
) -> None:
    """Without the others' keys log-probs are wrong; where gradients stay, gradients alone."""
    model, oracle = expected("qwen3")
    for kind, logprobs_hold in (("own keys", False), ("own gradients", True)):
        out = tmp_path / kind
        out.mkdir()
        settings = {"kind": kind, "fsdp": {"context": 2}}
        pool.run("with_other_keys", 2, model=str(model.directory), out=str(out), **settings)
        difference = logprob_difference(read_ranks(out, "logprobs"), oracle.logprobs)
        assert difference <= 5e-6 if logprobs_hold else difference > 1e-2
        assert gradient_difference(read_ranks(out, "gradients"), oracle.gradients) > 1e-2


@pytest.mark.fast
def test_what_cannot_be_cut_over_context_ranks_is_refused_by_name(
    pool: Pool, expected: ExpectedByModel, tmp_path: Path
) -> None:
    model, _ = expected("qwen3")
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    measured = copy_model(model, tmp_path / "measured", rope_parameters=rope)
    settings = {"model": str(measured), "out": str(tmp_path), "fsdp": {"context": 2}}
    for answer in pool.run("attempt", 2, **settings):
        assert "fsdp.context above 1 with rope_type dynamic" in answer["error_message"]
    whole = {**settings, "fsdp": {}}
    short = {"max_tokens_per_micro_batch": 256}  # that the model was made for
    assert not pool.run("attempt", 2, **whole, trainer=short)[0]["error_message"]
    assert "to 256 at most" in pool.run("attempt", 2, **whole)[0]["error_message"]
    for answer in pool.run("attempt", 3, **{**settings, "model": str(model.directory)}):
        assert "3 ranks do not divide into fsdp.tensor 1" in answer["error_message"]
