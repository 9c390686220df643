"""What ranks do with a model of every family."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.core_model_loading import revert_weight_conversion

from services.rollout.engine.config import EngineConfig
from services.rollout.engine.interface import Delta, Engine, PauseMode, create_engine
from services.trainer.backend import Mesh, MicroBatch, Row, TrainingBackend
from services.trainer.backends import families, recurrent, sparse
from services.trainer.backends.fsdp import expert_parallel, tensor_parallel
from services.trainer.backends.fsdp.expert_parallel import is_spread
from services.trainer.backends.fsdp.model import ShardedModel
from services.trainer.backends.fsdp.tensor_parallel import TensorRanks
from services.trainer.backends.reference.backend import ReferenceBackend
from services.trainer.config import TrainerConfig
from services.trainer.rank.publisher import RankPublisher
from sluice.algo.collectives import exchange_rows
from sluice.algo.key_choice import choose_keys
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.config import parse_config
from sluice.weights.checkpoint import companion_files
from sluice.weights.store import WeightStore
from tests.contract.engine.cases import complete, request_of
from tests.contract.training_backend.cases import PPO
from tests.fsdp import jobs
from tests.fsdp.jobs import (
    NORMALIZER,
    batches_of,
    clean_up,
    export,
    open_backend,
    rows_of,
    save_scores,
)
from tests.models.forced import with_experts

__all__ = [
    "attempt",
    "clean_up",
    "count_experts",
    "count_on_copies",
    "decay",
    "gradients",
    "gradients_of_copies",
    "move_biases",
    "move_biases_on_copies",
    "prove",
    "publish_computed",
    "replay",
    "resume",
    "roll_out",
    "save_midway",
    "two_calls",
]
attempt, resume, save_midway = jobs.attempt, jobs.resume, jobs.save_midway
replay = jobs.replay


def prove(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Log-probs and gradients of a batch, steps, then what is published and its log-probs.

    let_in: a family that is refused, to see what would come of it. left_out: a sum over tensor
    ranks, an exchange of expert ranks, or what sparse attention or recurrent layers do, likewise.
    """
    with pytest.MonkeyPatch.context() as patch:
        if name := arguments.get("let_in"):
            others = {n: reason for n, reason in families.REFUSED.items() if n != name}
            patch.setattr(families, "REFUSED", others)
        if name := arguments.get("left_out"):
            patch.setattr(*LEFT_OUT[name])
        return _prove(rank, world, arguments)


def count_experts(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Tokens that went to each expert, of all ranks, and what steps tell of them."""
    backend = open_backend(rank, world, arguments)
    run, batches = partial(jobs.run_step, backend, 0), batches_of(backend, rows_of(0))
    return counted(backend, run, batches, backend._ranks, backend._is_first)


def open_copy(rank: int, world: int, arguments: dict[str, Any]) -> ReferenceBackend:
    values = {"model": arguments["model"], "store": arguments["out"], "durable": False}
    config = parse_config(TrainerConfig, {**values, **arguments.get("trainer", {})})
    mesh = Mesh(rank=rank, world_size=world, data_rank=rank, data_size=world)
    return ReferenceBackend(config, mesh)


def count_on_copies(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """The same on the reference backend."""
    backend = open_copy(rank, world, arguments)
    batches = jobs.micro_batches(rows_of(0), rank, world)

    def run() -> None:
        for part in (batches[:1], batches[1:]):
            backend.forward_backward(part, PPO)

    return counted(backend, run, batches, backend._ranks)


def gradients(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Of a batch, in one call; of rows that bring experts where their `shape` is given.

    Then what the step tells.
    """
    backend, out = open_backend(rank, world, arguments), Path(arguments["out"])
    rows = rows_of(0)
    if "shape" in arguments:
        rows = with_experts(rows, arguments["shape"])
    batches = batches_of(backend, rows)
    if arguments.get("fsdp", {}).get("routing_replay"):  # of what this pass records
        backend.compute_logprobs(batches, model="policy", temperature=1.0)
    backend.forward_backward(batches, PPO, normalizer=NORMALIZER)
    export(backend, out / f"gradients-{rank}.safetensors", gradients=True)
    return told_by_step(backend)


def told_by_step(backend: TrainingBackend) -> dict[str, Any]:
    """What a step tells, and the next, which nothing has gone before."""
    first, behind = (backend.step(normalizer=NORMALIZER, learning_rate=0.0) for _ in range(2))
    return {"metrics": first.metrics, "behind": behind.metrics}


def two_calls(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Of other rows, the second counting for more of a step; passes before are forgotten."""
    backend = open_backend(rank, world, arguments)
    backend.forward_backward(batches_of(backend, rows_of(2)), PPO, normalizer=NORMALIZER)
    backend.discard_gradients()
    for step, weight in enumerate((1.0, 3.0)):
        backend.forward_backward(batches_of(backend, rows_of(step)), PPO, normalizer=weight)
    return told_by_step(backend)


def gradients_of_copies(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """The same on the reference backend; the sum is in one file."""
    backend, out = open_copy(rank, world, arguments), Path(arguments["out"])
    batches = jobs.micro_batches(rows_of(0), rank, world)
    backend.forward_backward(batches, PPO, normalizer=NORMALIZER)
    backend._reduce(backend._optimizer.gradients)
    if rank == 0:
        made = revert_weight_conversion(backend._policy.model, dict(backend._optimizer.views()))
        jobs.save(made, out / "gradients-0.safetensors")
    return told_by_step(backend)


def move_biases(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Steps of weights that stay, or not; then what is published, and a checkpoint."""
    backend = open_backend(rank, world, arguments)
    return moved(backend, partial(jobs.run_step, backend), arguments)


def move_biases_on_copies(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """The same on the reference backend."""
    backend = open_copy(rank, world, arguments)

    def run(step: int) -> None:
        backend.forward_backward(jobs.micro_batches(rows_of(step), rank, world), PPO)

    return moved(backend, run, arguments)


def decay(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """A step of no gradient, and what is published behind it."""
    return decayed(open_backend(rank, world, arguments), arguments)


def decayed(backend: TrainingBackend, arguments: dict[str, Any]) -> dict[str, Any]:
    out = Path(arguments["out"]) / "published"
    out.mkdir(parents=True, exist_ok=True)
    outcome = backend.step(normalizer=1.0, learning_rate=None)
    backend.write_shards(out)
    return {"skipped": outcome.skipped_reason}


def moved(
    backend: TrainingBackend, run: Callable[[int], object], arguments: dict[str, Any]
) -> dict[str, Any]:
    """`first`, `steps`: which; `checkpoint`: behind one. `rate`, `normalizer`: of them."""
    out, first, skipped = Path(arguments["out"]), arguments.get("first", 0), []
    if checkpoint := arguments.get("checkpoint"):
        backend.load_checkpoint(Path(checkpoint))
    for step in range(first, first + arguments.get("steps", 3)):
        run(step)
        normalizer, rate = arguments.get("normalizer", NORMALIZER), arguments.get("rate", 0.0)
        outcome = backend.step(normalizer=normalizer, learning_rate=rate)
        skipped.append(outcome.skipped_reason)
    for name in ("published", "checkpoint"):
        (out / name).mkdir(parents=True, exist_ok=True)
    backend.write_shards(out / "published")
    backend.save_checkpoint(out / "checkpoint")
    return {"skipped": skipped}


def counted(
    backend: Any,
    run: Callable[[], object],
    batches: Sequence[MicroBatch],
    ranks: Any,
    is_counted: bool = True,
) -> dict[str, Any]:
    """What a pass counts, what a step behind one like it tells, and one behind none.

    Passes that are forgotten, and those that only score, are not in it.
    """
    run()
    backend.discard_gradients()
    run()
    backend.compute_logprobs(batches, model="policy", temperature=1.0)
    counts = backend._expert_load.take(ranks, is_counted=is_counted)
    backend.discard_gradients()
    run()
    metrics = backend.step(normalizer=NORMALIZER, learning_rate=0.0).metrics
    behind = backend.step(normalizer=NORMALIZER, learning_rate=0.0).metrics
    return {"counts": counts, "metrics": metrics, "behind": behind}


def one_key_less(
    query: torch.Tensor,
    key: torch.Tensor,
    weight: torch.Tensor,
    count: int,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """What `choose_keys` returns, but for the last of them."""
    return choose_keys(query, key, weight, count - 1, mask)


def run_on(layer: Any, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
    """Run a recurrent layer over a pack as if it were one row."""
    made: torch.Tensor = layer.forward(hidden_states=hidden_states)
    return made


def publish_computed(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Publishes as a rank does; what layers of experts computed with just before, by HF names."""
    out, backend = Path(arguments["out"]), open_backend(rank, world, arguments)
    model, computed = backend._policy.model, dict[str, torch.Tensor]()

    def keep(path: str, module: Any, _: Any) -> None:
        for name in module._parameters:
            computed[f"{path}.{name}"] = getattr(module, name).detach().clone()

    for path, module in model.named_modules():
        if path.endswith(".experts"):
            module.register_forward_pre_hook(partial(keep, path))
    backend.compute_logprobs(batches_of(backend, rows_of(0)), model="policy", temperature=1.0)
    if rank == 0:
        jobs.save(revert_weight_conversion(model, computed), out / "computed.safetensors")
    publisher = RankPublisher(backend._config, backend)
    (out / "weights/staging").mkdir(parents=True, exist_ok=True)
    command = pb.PublishCommand(version=1, directory=str(out / "weights/staging"))
    publisher.publish(command, pb.CommandResult())
    return {}


def one_way(rows: torch.Tensor, ranks: Any, *, sent: list[int], taken: list[int]) -> torch.Tensor:
    """What `exchange_rows` returns, of which no gradient goes back to where a token came from."""
    found = exchange_rows(rows.detach(), ranks, sent=sent, taken=taken)
    return found.requires_grad_(torch.is_grad_enabled())


def of_first_experts(sharded: ShardedModel, tensor: torch.Tensor) -> bool:
    """What `is_counted` would be if expert ranks had the same."""
    assert sharded.experts is not None
    return not is_spread(tensor) or sharded.experts.collectives.rank == 0


LEFT_OUT: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "a key": (sparse, "choose_keys", one_key_less),
    "the choice": (sparse, "_choose", lambda *_, **__: ()),
    "rows apart": (recurrent, "_forward_rows", run_on),
    "heads": (tensor_parallel, "_sum_gradients", lambda *_: None),
    "told": (tensor_parallel, "_behind_cuts", lambda *_: {}),
    "vocabulary": (TensorRanks, "spread", lambda _, whole: whole),
    "way back": (expert_parallel, "exchange_rows", one_way),
    "norm of experts": (ShardedModel, "is_counted", of_first_experts),
    "norm": (ShardedModel, "is_counted", lambda *_: True),
}


def _prove(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    out, backend = Path(arguments["out"]), open_backend(rank, world, arguments)
    batches = batches_of(backend, rows_of(0))
    scored = backend.compute_logprobs(batches, model="policy", temperature=1.0)
    save_scores(backend, scored, out / f"logprobs-{rank}.safetensors")
    jobs.run_step(backend, 0)
    export(backend, out / f"gradients-{rank}.safetensors", gradients=True)
    backend.discard_gradients()
    steps = []
    for step in range(arguments["steps"]):
        loss = jobs.run_step(backend, step)
        outcome = backend.step(normalizer=NORMALIZER, learning_rate=None)
        steps.append({"loss": loss, "grad_norm": outcome.grad_norm})
    backend.write_shards(out / "published")
    scored = backend.compute_logprobs(batches, model="policy", temperature=1.0)
    save_scores(backend, scored, out / f"trained-{rank}.safetensors")
    return {"steps": steps}


ROUNDS, PROMPTS, SAMPLES, LENGTH = 3, 3, 4, 20
Sample = Callable[[Engine, int, int], Awaitable[list[Row]]]


def roll_out(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Three steps of GRPO: publish, have the engine take it, sample, score, train."""
    backend = open_backend(rank, world, arguments)
    return asyncio.run(roll_out_by(backend, Path(arguments["model"]), Path(arguments["out"])))


async def roll_out_by(
    backend: TrainingBackend, model: Path, out: Path, sample: Sample | None = None
) -> dict[str, Any]:
    """`sample`: of an engine, a step and a group, its rows; text alone where it is not given.

    mismatch: the largest difference of log-probs between engine and trainer; stale: the least
    that an engine would show which is one step behind.
    """
    sample = sample or _sample
    store = WeightStore(out / "weights", durable=False)
    engine = create_engine("reference", EngineConfig(threads=1, prefill_chunk_tokens=16))
    mismatches, stale, versions, norms = [], [], [], []
    await engine.start()
    try:
        for step in range(ROUNDS):
            staging = store.allocate(None)
            shards = backend.write_shards(staging.directory)
            record = store.commit(staging, shards, companion_files(model), step)
            await engine.prepare(record.version, record.digest, record.directory)
            await engine.commit(record.version, PauseMode.IN_PLACE)
            rows = [row for group in range(PROMPTS) for row in await sample(engine, step, group)]
            scored = backend.compute_logprobs([rows], model="policy", temperature=1.0)
            gaps = [scored[row.sample_id] - row.columns["rollout_logprobs"] for row in rows]
            mismatches.append(max(float(gap.abs().max()) for gap in gaps))
            backend.forward_backward([rows], PPO)
            outcome = backend.step(normalizer=PROMPTS * SAMPLES * LENGTH, learning_rate=1e-2)
            norms.append(outcome.grad_norm)
            versions.append(engine.status().version)
            stepped = backend.compute_logprobs([rows], model="policy", temperature=1.0)
            moved = [stepped[row.sample_id] - scored[row.sample_id] for row in rows]
            stale.append(max(float(gap.abs().max()) for gap in moved))
    finally:
        await engine.close()
    return {
        "mismatch": max(mismatches),
        "stale": min(stale),
        "versions": versions,
        "norms": norms,
    }


def advantages_of(samples: Sequence[Delta]) -> torch.Tensor:
    """Of the share of small tokens."""
    rewards = torch.tensor([sum(t < 26 for t in s.token_ids) / LENGTH for s in samples])
    return (rewards - rewards.mean()) / (rewards.std() + 1e-6)


async def _sample(engine: Engine, step: int, group: int) -> list[Row]:
    """A group of samples; its reward is the share of small tokens."""
    prompt = [*range(5, 5 + 9 * (group + 1))]
    request = request_of(f"{step}-{group}", prompt, SAMPLES, max_new_tokens=LENGTH)
    samples = await complete(engine, request)
    advantages = advantages_of(samples)
    return [
        Row(
            sample_id=f"{step}/{group}/{index}",
            group_id=f"{step}/{group}",
            token_ids=torch.tensor([*prompt, *sample.token_ids]),
            prompt_length=len(prompt),
            loss_mask=torch.ones(len(sample.token_ids), dtype=torch.bool),
            columns={
                "rollout_logprobs": torch.tensor(list(sample.logprobs)),
                "advantages": advantages[index].expand(len(sample.token_ids)).clone(),
            },
        )
        for index, sample in enumerate(samples)
    ]
