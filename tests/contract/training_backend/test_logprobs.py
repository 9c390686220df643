"""Log-probabilities are those of one plain forward pass per sample."""

from __future__ import annotations

import pytest
import torch

from tests.contract.training_backend.cases import (
    PPO,
    Model,
    Oracle,
    StartBackend,
    build_model,
    ragged_rows,
)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_equal_to_plain_transformers(
    start_backend: StartBackend, model: Model, temperature: float
) -> None:
    rows = ragged_rows()
    backend = start_backend(model)
    found = backend.compute_logprobs([rows], model="policy", temperature=temperature)
    oracle = Oracle(model.load())
    assert found.keys() == {row.sample_id for row in rows}
    for row in rows:
        expected = oracle.logprobs(row, temperature).detach()
        assert found[row.sample_id].dtype == torch.float32
        torch.testing.assert_close(found[row.sample_id], expected, atol=1e-5, rtol=0)


def test_split_into_micro_batches_changes_nothing(
    start_backend: StartBackend, qwen3: Model
) -> None:
    rows = ragged_rows()
    backend = start_backend(qwen3)
    whole = backend.compute_logprobs([rows], model="policy", temperature=1.0)
    split = backend.compute_logprobs(
        [rows[:1], [], rows[1:6], rows[6:]], model="policy", temperature=1.0
    )
    for sample_id, values in whole.items():
        torch.testing.assert_close(split[sample_id], values, atol=1e-5, rtol=0)


def test_reference_model_stays_while_the_policy_moves(
    start_backend: StartBackend, qwen3: Model, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = build_model(tmp_path_factory.mktemp("other"), "qwen3", seed=5)
    rows = ragged_rows()
    backend = start_backend(qwen3, reference_model=str(other.directory))
    policy_before = backend.compute_logprobs([rows], model="policy", temperature=1.0)
    reference_before = backend.compute_logprobs([rows], model="reference", temperature=1.0)
    backend.forward_backward([rows], PPO)
    backend.step(normalizer=50.0, learning_rate=1e-2)
    policy_after = backend.compute_logprobs([rows], model="policy", temperature=1.0)
    reference_after = backend.compute_logprobs([rows], model="reference", temperature=1.0)
    expected = Oracle(other.load()).logprobs(rows[0]).detach()
    torch.testing.assert_close(reference_before["a/0"], expected, atol=1e-5, rtol=0)
    for row in rows:
        assert torch.equal(reference_before[row.sample_id], reference_after[row.sample_id])
        assert not torch.allclose(policy_before[row.sample_id], policy_after[row.sample_id])
