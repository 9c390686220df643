"""What ranks of the Megatron backend do with models of the families that only tests/models has."""

from __future__ import annotations

import asyncio
import unittest.mock
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from services.trainer.backend import MicroBatch, Row
from services.trainer.backends.megatron import backend as megatron_backend  # adapts Megatron
from services.trainer.backends.megatron import batch, delta_net, indexer
from services.trainer.backends.megatron.backend import MegatronBackend
from sluice.algo.delta_rule import PackChunks
from tests.contract.training_backend.cases import PPO
from tests.fsdp.jobs import NORMALIZER, OPTIM, rows_of
from tests.megatron import jobs
from tests.megatron.jobs import (
    clean_up,
    main_gradient,
    open_error,
    resume,
    save_midway,
    save_tensors,
)
from tests.models.jobs import counted, decayed, moved, one_key_less, roll_out_by, told_by_step

assert megatron_backend
__all__ = [
    "clean_up",
    "continue_from",
    "count_experts",
    "decay",
    "gradients",
    "move_biases",
    "open_error",
    "predict",
    "prove",
    "resume",
    "roll_out",
    "save_midway",
]


def open_backend(rank: int, world: int, arguments: dict[str, Any]) -> MegatronBackend:
    trainer = {"optim": OPTIM, **arguments.get("trainer", {})}
    return jobs.open_backend(rank, world, {**arguments, "trainer": trainer})


def count_experts(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Tokens that went to each expert, of all ranks, and what steps tell of them."""
    backend = open_backend(rank, world, arguments)
    try:
        run, batches = partial(_run_step, backend, 0), batches_of(rows_of(0), backend)
        return counted(backend, run, batches, backend._groups.world)
    finally:
        backend.close()


def move_biases(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Steps of weights that stay, or not; then what is published, and a checkpoint."""
    backend = open_backend(rank, world, arguments)
    try:
        return moved(backend, partial(_run_step, backend), arguments)
    finally:
        backend.close()


def decay(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """A step of no gradient, and what is published behind it."""
    backend = open_backend(rank, world, arguments)
    try:
        return decayed(backend, arguments)
    finally:
        backend.close()


def gradients(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Of a batch, in one call; then what a step tells."""
    backend, out = open_backend(rank, world, arguments), Path(arguments["out"])
    try:
        batches = batches_of(rows_of(0), backend)
        if arguments["layout"].get("routing_replay"):  # of what this pass records
            backend.compute_logprobs(batches, model="policy", temperature=1.0)
        backend.forward_backward(batches, PPO, normalizer=NORMALIZER)
        backend._stepper.reduce(1.0)
        trained = [tensor for tensor in backend._policy.tensors if tensor.parameter.requires_grad]
        save_tensors(trained, out / f"gradients-{rank}.safetensors", main_gradient)
        backend.discard_gradients()  # a step reduces once
        backend.forward_backward(batches, PPO, normalizer=NORMALIZER)
        return told_by_step(backend)
    finally:
        backend.close()


def batches_of(rows: list[Row], backend: MegatronBackend) -> list[MicroBatch]:
    """Whole groups by data rank, in three micro-batches, of which the last is empty."""
    mesh = backend.mesh
    groups = sorted({row.group_id for row in rows})
    mine = [row for row in rows if groups.index(row.group_id) % mesh.data_size == mesh.data_rank]
    half = (len(mine) + 1) // 2
    return [mine[:half], mine[half:], []]


def _run_step(backend: MegatronBackend, step: int) -> float:
    batches = batches_of(rows_of(step), backend)
    sums = [backend.forward_backward(part, PPO) for part in (batches[:1], batches[1:])]
    total = sum(each.loss for each in sums) if backend.mesh.reports else 0.0
    whole = torch.tensor(total, dtype=torch.float64)
    dist.all_reduce(whole)
    return float(whole)


def prove(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Log-probs and gradients of a batch, steps, then what is published and its log-probs.

    broken: what of the layers is made wrong, see `_break`.
    """
    out = Path(arguments["out"])
    backend = open_backend(rank, world, arguments)
    try:
        with _break(arguments.get("broken")):
            return _prove(backend, rank, out, arguments["steps"])
    finally:
        backend.close()


def _prove(backend: MegatronBackend, rank: int, out: Path, count: int) -> dict[str, Any]:
    _score(backend, rank, out / "logprobs")
    _run_step(backend, 0)
    backend._stepper.reduce(1.0)
    trained = [tensor for tensor in backend._policy.tensors if tensor.parameter.requires_grad]
    save_tensors(trained, out / f"gradients-{rank}.safetensors", main_gradient)
    backend.discard_gradients()
    steps = []
    for step in range(count):
        loss = _run_step(backend, step)
        outcome = backend.step(normalizer=NORMALIZER, learning_rate=None)
        steps.append({"loss": loss, "grad_norm": outcome.grad_norm})
    backend.write_shards(out / "published")
    (out / "checkpoint").mkdir(exist_ok=True)
    backend.save_checkpoint(out / "checkpoint")
    _score(backend, rank, out / "trained")
    return {"steps": steps}


def _score(backend: MegatronBackend, rank: int, stem: Path) -> None:
    batches = batches_of(rows_of(0), backend)
    scored = backend.compute_logprobs(batches, model="policy", temperature=1.0)
    if backend.mesh.reports and scored:
        save_file(scored, f"{stem}-{rank}.safetensors")


def _break(what: str | None) -> AbstractContextManager[object]:
    if what is None:
        return nullcontext()
    if what == "keys":  # one less is chosen
        return unittest.mock.patch.object(indexer, "choose_keys", one_key_less)
    if what == "norm":  # each tensor rank keeps the gradient that its own heads give
        return unittest.mock.patch.object(
            delta_net, "copy_to_tensor_model_parallel_region", lambda weight: weight
        )
    right = PackChunks.lay_out

    def lay_out(lengths: list[int], device: torch.device) -> PackChunks:
        """A pack whose rows are one to the rule, or to the convolution."""
        apart, whole = right(lengths, device), right([sum(lengths)], device)
        if what == "convolution":
            return PackChunks(apart.size, apart.counts, apart.tokens, apart.places, whole.positions)
        return PackChunks(whole.size, whole.counts, whole.tokens, whole.places, apart.positions)

    return unittest.mock.patch.object(PackChunks, "lay_out", lay_out)


def continue_from(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Log-probs by a checkpoint, and the norm of the next step."""
    backend, out = open_backend(rank, world, arguments), Path(arguments["out"])
    backend.load_checkpoint(Path(arguments["checkpoint"]))
    _score(backend, rank, out / "resumed")
    _run_step(backend, 0)
    outcome = backend.step(normalizer=NORMALIZER, learning_rate=None)
    backend.close()
    return {"grad_norm": outcome.grad_norm}


def roll_out(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Three steps of GRPO: publish, have the engine take it, sample, score, train."""
    backend = open_backend(rank, world, arguments)
    try:
        made = roll_out_by(backend, Path(arguments["model"]), Path(arguments["out"]))
        return asyncio.run(made)
    finally:
        backend.close()


def predict(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Gradients of a batch and steps of a policy with a layer of multi-token prediction.

    broken: "rows" lets it look from one row of a pack into the next.
    """
    out = Path(arguments["out"])
    backend = open_backend(rank, world, arguments)
    try:
        with _across_rows() if arguments.get("broken") == "rows" else nullcontext():
            return _predict(backend, rank, out, arguments)
    finally:
        backend.close()


def _predict(
    backend: MegatronBackend, rank: int, out: Path, arguments: dict[str, Any]
) -> dict[str, Any]:
    if checkpoint := arguments.get("checkpoint"):
        backend.load_checkpoint(Path(checkpoint))
    if arguments.get("records"):
        _score(backend, rank, out / "recorded")
    first = _guess(backend, 0, arguments.get("parts", 3))
    backend._stepper.reduce(1.0)  # type: ignore[union-attr]
    trained = [tensor for tensor in backend._policy.tensors if tensor.parameter.requires_grad]
    save_tensors(trained, out / f"gradients-{rank}.safetensors", main_gradient)
    backend.discard_gradients()
    losses, norms = [], []
    for step in range(arguments["steps"]):
        losses.append(_guess(backend, step))
        norms.append(backend.step(normalizer=NORMALIZER, learning_rate=None).grad_norm)
    after = _guess(backend, 0)
    backend.discard_gradients()
    (out / "published").mkdir(exist_ok=True)
    backend.write_shards(out / "published")
    (out / "checkpoint").mkdir(exist_ok=True)
    backend.save_checkpoint(out / "checkpoint")
    _score(backend, rank, out / "trained")
    return {"loss": first, "losses": losses, "norms": norms, "after": after}


def _guess(backend: MegatronBackend, step: int, parts: int = 3) -> list[float]:
    """Forward and backward on the rows of a step; sum and weight of the metric on all ranks."""
    batches = batches_of(rows_of(step), backend)
    if parts != len(batches):  # every row by itself
        rows = [row for rows in batches for row in rows]
        batches = [[row] for row in rows] + [[]] * (20 - len(rows))
    total = torch.zeros(2, dtype=torch.float64)
    for part in (batches[:1], batches[1:]):
        sums = backend.forward_backward(part, PPO)
        if backend.mesh.reports:
            total += torch.tensor(sums.metrics.get("mtp_loss", (0.0, 0.0)), dtype=torch.float64)
    dist.all_reduce(total)
    return [float(value) for value in total]


def _across_rows() -> AbstractContextManager[object]:
    def shift(rows: list[torch.Tensor], by: int) -> list[torch.Tensor]:
        if not rows:
            return []
        whole = torch.cat(rows)
        moved = torch.cat((whole[by:], whole.new_zeros(min(by, len(whole)))))
        return list(moved.split([len(values) for values in rows]))

    return unittest.mock.patch.object(batch, "_shift", shift)
