"""What ranks of the fsdp backend do that are shown images: they answer JSON and leave tensors."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from services.rollout.engine.interface import Engine
from services.trainer.backend import MicroBatch, Row
from services.trainer.backends.fsdp.backend import FsdpBackend
from services.trainer.backends.fsdp.optimizer import local_part
from services.trainer.rank import FAILURES
from sluice.algo.spec import LossSpec
from tests.contract.engine.cases import complete
from tests.fsdp.jobs import NORMALIZER, attempt, clean_up, export, open_backend, save
from tests.models.forced import with_experts
from tests.models.jobs import LENGTH, SAMPLES, advantages_of, roll_out_by
from tests.vision.asking import followed, request
from tests.vision.cases import PPO, Model, draw_image, make_row, mixed_rows

__all__ = ["attempt", "clean_up", "critic", "parts", "prove", "replay", "roll_out", "score"]


def rows_of(arguments: dict[str, Any], step: int = 0) -> list[Row]:
    return mixed_rows(Model(Path(arguments["model"])).rules, step)


def micro_batches(rows: Sequence[Row], rank: int, world: int) -> list[MicroBatch]:
    """Whole groups by rank, in three micro-batches, the last without rows.

    Of several ranks the last has the rows of text, and no image at all.
    """
    seeing = sorted({row.group_id for row in rows} - {"text"})
    owner = {group: index % max(world - 1, 1) for index, group in enumerate(seeing)}
    owner["text"] = world - 1
    mine = [row for row in rows if owner[row.group_id] == rank]
    half = (len(mine) + 1) // 2
    return [mine[:half], mine[half:], []]


def replay(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Log-probs and gradients by the experts that rows bring."""
    out, backend = Path(arguments["out"]), open_backend(rank, world, arguments)
    rows = with_experts(rows_of(arguments), arguments["shape"])
    scored = backend.compute_logprobs(
        micro_batches(rows, rank, world), model="policy", temperature=1.0
    )
    save(scored, out / f"logprobs-{rank}.safetensors")
    run_step(backend, rows)
    export(backend, out / f"gradients-{rank}.safetensors", gradients=True)
    return {}


def exchange(rows: Sequence[Row]) -> list[Row]:
    """Rows whose images are shown in the other's place, where two are of one size."""
    by_size: dict[int, set[bytes]] = {}
    for row in rows:
        for span in row.media:
            by_size.setdefault(span.token_count, set()).add(row.images[span.digest])
    others = dict[bytes, bytes]()
    for each in map(sorted, by_size.values()):
        others |= dict(zip(each, [*each[1:], each[0]], strict=True))
    return [
        row._replace(images={digest: others[png] for digest, png in row.images.items()})
        for row in rows
    ]


def run_step(backend: FsdpBackend, rows: Sequence[Row], spec: LossSpec = PPO) -> float:
    """Forward and backward in two calls; the loss of all ranks."""
    batches = micro_batches(rows, backend.mesh.rank, backend.mesh.world_size)
    sums = [backend.forward_backward(part, spec) for part in (batches[:1], batches[1:])]
    total = torch.tensor(sum(each.loss for each in sums), dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def prove(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Log-probs, also with images exchanged, and gradients; steps; what is published after them."""
    out, backend = Path(arguments["out"]), open_backend(rank, world, arguments)
    for name, rows in (
        ("logprobs", rows_of(arguments)),
        ("exchanged", exchange(rows_of(arguments))),
    ):
        batches = micro_batches(rows, rank, world)
        scored = backend.compute_logprobs(batches, model="policy", temperature=1.0)
        save(scored, out / f"{name}-{rank}.safetensors")
    run_step(backend, rows_of(arguments))
    export(backend, out / f"gradients-{rank}.safetensors", gradients=True)
    backend.discard_gradients()
    steps = []
    for step in range(arguments["steps"]):
        loss = run_step(backend, rows_of(arguments, step))
        outcome = backend.step(normalizer=NORMALIZER, learning_rate=None)
        steps.append({"loss": loss, "grad_norm": outcome.grad_norm})
    (out / "published").mkdir(exist_ok=True)
    backend.write_shards(out / "published")
    export(backend, out / f"weights-{rank}.safetensors")
    batches = micro_batches(rows_of(arguments), rank, world)
    scored = backend.compute_logprobs(batches, model="policy", temperature=1.0)
    save(scored, out / f"trained-{rank}.safetensors")
    named = backend._policy.parameters()
    seen = {name: p for name, p in named.items() if "visual" in name}
    return {
        "steps": steps,
        "tower_held": sum(local_part(p).numel() for p in seen.values()),
        "tower": sum(p.numel() for p in seen.values()),
    }


def parts(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """A step, a checkpoint, and another step; or that from a checkpoint."""
    out, backend = Path(arguments["out"]), open_backend(rank, world, arguments)

    def step(name: str) -> None:
        run_step(backend, rows_of(arguments))
        assert not backend.step(normalizer=1.0, learning_rate=None).skipped_reason
        export(backend, out / f"{name}-{rank}.safetensors")

    if "checkpoint" not in arguments:
        step("weights")
        (out / "checkpoint").mkdir(exist_ok=True)
        backend.save_checkpoint(out / "checkpoint")
        step("second")
        return {}
    try:
        backend.load_checkpoint(Path(arguments["checkpoint"]))
    except FAILURES as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    step(arguments["name"])
    return {"refused": ""}


def score(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Log-probs of rows that an engine has sampled."""
    out, backend = Path(arguments["out"]), open_backend(rank, world, arguments)
    batches = micro_batches(torch.load(arguments["rows"], weights_only=False), rank, world)
    scored = backend.compute_logprobs(batches, model="policy", temperature=1.0)
    save(scored, out / f"scored-{rank}.safetensors")
    return {}


def critic(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Two steps of a new value head; then its weights, values, and the gradients of a third."""
    out, loss = Path(arguments["out"]), LossSpec(name="value")
    trainer = {**arguments.get("trainer", {}), "head": "value"}
    backend = open_backend(rank, world, {**arguments, "trainer": trainer})
    rows = rows_of(arguments)
    batches = micro_batches(rows, rank, world)
    before = backend.compute_values(batches)
    for _ in range(2):
        run_step(backend, rows, loss)
        assert not backend.step(normalizer=NORMALIZER, learning_rate=None).skipped_reason
    export(backend, out / f"weights-{rank}.safetensors")
    save(backend.compute_values(batches), out / f"values-{rank}.safetensors")
    total = run_step(backend, rows, loss)
    export(backend, out / f"gradients-{rank}.safetensors", gradients=True)
    return {
        "before": max((float(each.abs().max()) for each in before.values()), default=0.0),
        "loss": total,
    }


def roll_out(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Three steps of GRPO over prompts that show no image, one, and two."""
    backend, model = open_backend(rank, world, arguments), Model(Path(arguments["model"]))
    wide, tall = draw_image(model.rules, 1, 2, 3), draw_image(model.rules, 2, 3, 1)

    async def sample(engine: Engine, step: int, group: int) -> list[Row]:
        images = [wide, tall][:group]
        asked = make_row(f"{step}-{group}/0", [5, *images, 4], [1], seed=group)
        fields: dict[str, Any] = {"sample_count": SAMPLES, "request_id": asked.group_id}
        samples = await complete(engine, request(asked, images, length=LENGTH, **fields))
        advantages = advantages_of(samples)
        return [
            followed(asked, delta)._replace(
                sample_id=f"{asked.group_id}/{index}",
                loss_mask=torch.ones(len(delta.token_ids), dtype=torch.bool),
                columns={
                    "rollout_logprobs": torch.tensor(list(delta.logprobs)),
                    "advantages": advantages[index].expand(len(delta.token_ids)).clone(),
                },
            )
            for index, delta in enumerate(samples)
        ]

    return asyncio.run(roll_out_by(backend, model.directory, Path(arguments["out"]), sample))
