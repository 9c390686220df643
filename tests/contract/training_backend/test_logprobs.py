"""Log-probabilities are those of one plain forward pass per sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.training_backend.cases import (
    PPO,
    VOCABULARY,
    Model,
    Oracle,
    StartBackend,
    build_model,
    make_row,
    ragged_rows,
)
from tests.live_memory import LiveMemory


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


@pytest.mark.parametrize(("temperature", "count"), [(1.0, 5), (0.6, VOCABULARY)])
def test_likeliest_tokens_are_those_of_plain_transformers(
    start_backend: StartBackend, model: Model, temperature: float, count: int
) -> None:
    rows = ragged_rows()
    backend = start_backend(model)
    found = backend.compute_top_logprobs(
        [rows[:3], [], rows[3:]], model="policy", temperature=temperature, count=count
    )
    plain = backend.compute_logprobs([rows], model="policy", temperature=temperature)
    oracle = Oracle(model.load().double())
    assert found.keys() == {row.sample_id for row in rows}
    for row in rows:
        table = oracle.table(row, temperature).detach()
        best, ids = table.topk(count, dim=1)
        named = found[row.sample_id]
        assert named.top.dtype == torch.float32 and named.ids.dtype == torch.int32
        assert torch.equal(named.ids.long(), ids)
        close = {"atol": 1e-5, "rtol": 1e-5}
        torch.testing.assert_close(named.top.double(), best, **close)
        torch.testing.assert_close(named.logprobs, plain[row.sample_id], **close)
        assert not torch.allclose(named.top.double(), table.gather(1, ids.roll(1, 1)), **close)


def test_the_reference_model_names_its_own_tokens(
    start_backend: StartBackend, qwen3: Model, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = build_model(tmp_path_factory.mktemp("other"), "qwen3", seed=5)
    rows = ragged_rows()[:4]
    backend = start_backend(qwen3, reference_model=str(other.directory))
    options: Any = {"temperature": 1.0, "count": 4}
    reference = backend.compute_top_logprobs([rows], model="reference", **options)
    policy = backend.compute_top_logprobs([rows], model="policy", **options)
    oracle = Oracle(other.load().double())
    for row in rows:
        ids = oracle.table(row, 1.0).topk(4, dim=1)[1]
        assert torch.equal(reference[row.sample_id].ids.long(), ids)
        assert not torch.equal(policy[row.sample_id].ids.long(), ids)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_pass_keeps_the_log_probs_that_it_computes(
    start_backend: StartBackend, model: Model, temperature: float
) -> None:
    rows, loss = ragged_rows(), PPO.model_copy(update={"temperature": temperature})
    backend, oracle = start_backend(model), Oracle(model.load())
    batches = [rows[:4], [], rows[4:]]
    found = backend.forward_backward(batches, loss, keep_outputs=True)
    plain = start_backend(model).forward_backward(batches, loss)
    assert found.outputs.keys() == {row.sample_id for row in rows} and not plain.outputs
    assert (found.loss, found.metrics) == (plain.loss, plain.metrics)
    for row in rows:
        kept, expected = found.outputs[row.sample_id], oracle.logprobs(row, temperature).detach()
        assert kept.dtype == torch.float32 and not kept.requires_grad
        torch.testing.assert_close(kept, expected, atol=1e-5, rtol=0)


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


def test_another_reference_is_read_when_it_is_named(
    start_backend: StartBackend, qwen3: Model, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = build_model(tmp_path_factory.mktemp("other"), "qwen3", seed=5)
    rows, backend = ragged_rows()[:4], start_backend(qwen3)
    for directory, model in (("", qwen3), (str(other.directory), other), ("", qwen3)):
        backend.use_reference(directory)
        found = backend.compute_logprobs([rows], model="reference", temperature=1.0)
        oracle = Oracle(model.load())
        for row in rows:
            expected = oracle.logprobs(row).detach()
            torch.testing.assert_close(found[row.sample_id], expected, atol=1e-5, rtol=0)


def test_logits_are_in_memory_once_or_a_chunk_at_a_time(
    start_backend: StartBackend, tmp_path: Path
) -> None:
    vocabulary, length, count = 4000, 200, 12
    model = build_model(tmp_path / "model", "qwen3", vocab_size=vocabulary)
    rows = [make_row(f"{i}/0", [1, 2, i], [i] * length, seed=i) for i in range(count)]
    peaks = {}
    for logits in ("chunked", "whole"):
        backend = start_backend(model, operations={"logprobs": logits})
        with LiveMemory() as scored:
            backend.compute_logprobs([rows], model="policy", temperature=1.0)
        with LiveMemory() as trained:
            backend.forward_backward([rows], PPO)
        all_of_them = 4 * count * length * vocabulary
        peaks[logits] = scored.peak / all_of_them, trained.peak / all_of_them
    assert max(peaks["chunked"]) < 0.9, peaks
    assert max(peaks["whole"]) < 1.9, peaks
    assert min(peaks["whole"]) >= 1, "a pass without them would show"
