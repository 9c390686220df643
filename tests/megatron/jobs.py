"""What ranks do in the tests: they answer JSON and leave tensors in files."""

from __future__ import annotations

import math
import resource
import unittest.mock
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from services.trainer.backend import Mesh, Row
from services.trainer.backends.chunks import CheckpointWriteError
from services.trainer.backends.megatron import backend as megatron_backend
from services.trainer.backends.megatron import (
    checkpoint,
    model,
    model_config,
    offloaded_adamw,
    parallel,
    stepping,
)
from services.trainer.backends.megatron.backend import MegatronBackend
from services.trainer.backends.megatron.checkpoint import UnfitCheckpointError
from services.trainer.backends.megatron.config import MegatronConfig
from services.trainer.backends.megatron.layout import mesh_of
from services.trainer.backends.megatron.replay import RoutingReplay
from services.trainer.backends.megatron.weights import (
    LocalTensor,
    export_tensors,
    local_tensors,
)
from services.trainer.backends.reference.backend import ReferenceBackend
from services.trainer.config import RanksConfig, TrainerConfig
from services.trainer.errors import RoutingMissingError
from services.trainer.parking import FileParking, ParkedTensors
from services.trainer.rank import FAILURES, executor
from sluice import platform
from sluice.algo.collectives import CollectiveMismatchError
from sluice.algo.spec import LossSpec
from sluice.weights.errors import WeightStoreError
from sluice.weights.rules.rule import Pack, ShardAxis
from tests.contract.training_backend.cases import check_kept
from tests.held_memory import held_parts
from tests.lazy_device import lazy_device
from tests.megatron import former, providers
from tests.megatron.models import make_rows, micro_batches, routed_rows, taught_rows
from tests.megatron.mutants import exchanged, mutants
from tests.megatron.settings import NAMED, NORMALIZER, OPTIM, SPEC, STEPS, TAUGHT
from tests.rank_pool import JOB_SECONDS
from tests.two_memories import two_memories

KINDS = ("logprobs", "ids", "top")


def clean_up() -> None:
    while parallel._users:  # of a job that failed
        parallel.stop()


def open_backend(rank: int, world: int, arguments: dict[str, Any]) -> MegatronBackend:
    layout = MegatronConfig(**{"dtype": "float32", **arguments["layout"]})
    config = TrainerConfig(
        model=arguments["model"],
        store=Path(arguments["out"]),
        backend="megatron",
        megatron=layout,
        durable=False,
        **{"optim": OPTIM, **arguments.get("trainer", {})},
    )
    return MegatronBackend(config, mesh_of(layout, rank, world))


def gather_gradients(
    backend: MegatronBackend, step: int, spec: LossSpec = SPEC, rows: list[Row] | None = None
) -> float:
    """Forward and backward on the rows of `step`, in two calls; the loss of all data ranks."""
    mesh = backend.mesh
    batches = micro_batches(rows or make_rows(step), mesh.data_rank, mesh.data_size)
    parts = [backend.forward_backward(part, spec) for part in (batches[:1], batches[1:])]
    total = torch.tensor(sum(p.loss for p in parts) if mesh.reports else 0.0, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / NORMALIZER


def run_steps(backend: MegatronBackend, first: int, count: int) -> list[dict[str, Any]]:
    steps = []
    for step in range(first, first + count):
        loss = gather_gradients(backend, step)
        outcome = backend.step(normalizer=NORMALIZER, learning_rate=None)
        steps.append(
            {"loss": loss, "grad_norm": outcome.grad_norm, "skipped": outcome.skipped_reason}
        )
    return steps


def parity(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Log-probs and gradients of one batch, then five steps, then the weights."""
    out = Path(arguments["out"])
    backend = open_backend(rank, world, arguments)
    mesh = backend.mesh
    batches = micro_batches(make_rows(), mesh.data_rank, mesh.data_size)
    scored = backend.compute_logprobs(batches, model="policy", temperature=SPEC.temperature or 1.0)
    if mesh.reports:
        save_file(scored, out / f"logprobs-{rank}.safetensors")
    check_kept(backend, batches, SPEC, scored)
    backend._stepper.reduce(NORMALIZER)
    trained = [tensor for tensor in backend._policy.tensors if tensor.parameter.requires_grad]
    save_tensors(trained, out / f"gradients-{rank}.safetensors", main_gradient)
    backend.discard_gradients()
    steps = run_steps(backend, 0, STEPS)
    save_export(backend, out / f"weights-{rank}.safetensors")
    gradients = {str(main_gradient(tensor).dtype) for tensor in trained}
    parameters = {str(tensor.parameter.dtype) for tensor in trained}
    backend.close()
    return {
        "steps": steps,
        "bytes_read": backend._policy.bytes_read,
        "gradients": sorted(gradients),
        "parameters": sorted(parameters),
    }


def scored_by_both(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Log-probs of the policy, and of the reference, which is the same model."""
    backend = open_backend(rank, world, arguments)
    batches = micro_batches(make_rows(), backend.mesh.data_rank, backend.mesh.data_size)
    for name in ("policy", "reference"):
        temperature = SPEC.temperature or 1.0
        scored = backend.compute_logprobs(batches, model=name, temperature=temperature)
        if backend.mesh.reports:
            save_file(scored, Path(arguments["out"]) / f"{name}-{rank}.safetensors")
    backend.close()
    return {}


def copied_beside(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """`parity` on a device that makes its copies only when it is waited for."""
    device = lazy_device()
    with unittest.mock.patch.object(platform, "current", lambda: device):
        answer = parity(rank, world, arguments)
    return {**answer, "journal": device.journal}


def offloaded(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Steps with a schedule of learning rates in small blocks, a sleep among them; the weights.

    `host` are bytes of pinned memory, `device` those that sleep takes from the device, `trained`
    the elements of this rank's parameters.
    """
    out = Path(arguments["out"])
    device = lazy_device()
    with (
        two_memories(device) as host,
        unittest.mock.patch.object(offloaded_adamw, "BLOCK_BYTES", 1 << 16),
    ):
        backend = open_backend(rank, world, arguments)
        trained = [t.parameter for t in backend._policy.tensors if t.parameter.requires_grad]
        found: dict[str, Any] = {"host": host.nbytes, "steps": []}
        for step in range(STEPS):
            if step == 2:
                held = backend.held_tensors()
                parked = ParkedTensors.park(held.state, held.gradients, FileParking(out))
                found["device"] = parked.nbytes
                parked.restore()
            loss, rate = gather_gradients(backend, step), 1e-3 * (step + 1)
            with host.watched():
                outcome = backend.step(normalizer=NORMALIZER, learning_rate=rate)
            found["steps"].append([loss, outcome.grad_norm, outcome.skipped_reason])
        save_export(backend, out / f"weights-{rank}.safetensors")
        backend.close()
    return {**found, "trained": sum(parameter.numel() for parameter in trained)}


def taught(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """The likeliest tokens of rows, then the gradients of what a teacher named."""
    out = Path(arguments["out"])
    backend = open_backend(rank, world, arguments)
    mesh, rows = backend.mesh, taught_rows(NAMED)
    batches = micro_batches(rows, mesh.data_rank, mesh.data_size)
    temperature = TAUGHT.temperature or 1.0
    named = backend.compute_top_logprobs(
        batches, model="policy", temperature=temperature, count=arguments["count"]
    )
    if mesh.reports:
        parts = {
            f"{name}/{kind}": getattr(each, kind) for name, each in named.items() for kind in KINDS
        }
        save_file(parts, out / f"named-{rank}.safetensors")
    loss = gather_gradients(backend, 0, TAUGHT, rows)
    backend._stepper.reduce(NORMALIZER)
    trained = [tensor for tensor in backend._policy.tensors if tensor.parameter.requires_grad]
    save_tensors(trained, out / f"gradients-{rank}.safetensors", main_gradient)
    backend.close()
    return {"loss": loss}


def small_steps(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """The weights at the start, behind one step and behind the last, all on the same rows."""
    out = Path(arguments["out"])
    optim = {"learning_rate": arguments["rate"], "max_grad_norm": 0.0}
    backend = open_backend(rank, world, {**arguments, "trainer": {"optim": optim}})
    save_export(backend, out / "start.safetensors")
    for step in range(arguments["steps"]):
        backend.forward_backward([make_rows()[:2]], LossSpec(name="sft"))
        assert not backend.step(normalizer=NORMALIZER, learning_rate=None).skipped_reason
        if step == 0:
            save_export(backend, out / "first.safetensors")
    save_export(backend, out / "last.safetensors")
    backend.close()
    return {}


def vision(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Log-probs and gradients of rows with images, a step, and the weights behind it.

    With several data ranks the rows of text alone are on the last.
    """
    from tests.vision.cases import PPO, Model, mixed_rows

    out = Path(arguments["out"])
    backend, rows = (
        open_backend(rank, world, arguments),
        mixed_rows(Model(Path(arguments["model"])).rules),
    )
    mesh = backend.mesh
    if mesh.data_size > 1:
        last = mesh.data_rank == mesh.data_size - 1
        rows = [row for row in rows if row.group_id.startswith("text") == last]
    batches = [rows[:4], rows[4:], []]
    scored = backend.compute_logprobs(batches, model="policy", temperature=1.0)
    if mesh.reports:
        save_file(scored, out / f"logprobs-{rank}.safetensors")
    for part in (batches[:2], batches[2:]):
        backend.forward_backward(part, PPO)
    backend._stepper.reduce(1.0)
    save_export(backend, out / f"gradients-{rank}.safetensors", main_gradient)
    backend.discard_gradients()
    backend.forward_backward(batches, PPO)
    outcome = backend.step(normalizer=NORMALIZER, learning_rate=None)
    save_export(backend, out / f"weights-{rank}.safetensors")
    (out / "checkpoint").mkdir(exist_ok=True)
    backend.save_checkpoint(out / "checkpoint")
    again = backend.compute_logprobs(batches, model="policy", temperature=1.0)
    if mesh.reports:
        save_file(again, out / f"trained-{rank}.safetensors")
    backend.close()
    return {"grad_norm": outcome.grad_norm, "skipped": outcome.skipped_reason}


def vision_critic(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Two steps of a new value head on rows with images; then its weights, values, gradients."""
    from tests.vision.cases import Model, mixed_rows

    backend = open_backend(rank, world, {**arguments, "trainer": {"head": "value"}})
    out, mesh, loss = Path(arguments["out"]), backend.mesh, LossSpec(name="value")
    rows = mixed_rows(Model(Path(arguments["model"])).rules)
    batches = [rows[:4], rows[4:], []]
    before = backend.compute_values(batches)
    for _ in range(2):
        backend.forward_backward(batches, loss)
        assert not backend.step(normalizer=NORMALIZER, learning_rate=None).skipped_reason
    save_export(backend, out / f"weights-{rank}.safetensors")
    values = backend.compute_values(batches)
    if mesh.reports:
        save_file(values, out / f"values-{rank}.safetensors")
    found = backend.forward_backward(batches, loss).loss
    backend._stepper.reduce(1.0)
    save_export(backend, out / f"gradients-{rank}.safetensors", main_gradient)
    backend.close()
    return {"before": max(float(each.abs().max()) for each in before.values()), "loss": found}


def vision_resumed(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Log-probs by a checkpoint."""
    from tests.vision.cases import Model, mixed_rows

    backend, out = open_backend(rank, world, arguments), Path(arguments["out"])
    backend.load_checkpoint(Path(arguments["checkpoint"]))
    rows = mixed_rows(Model(Path(arguments["model"])).rules)
    scored = backend.compute_logprobs([rows], model="policy", temperature=1.0)
    if backend.mesh.reports:
        save_file(scored, out / f"resumed-{rank}.safetensors")
    backend.close()
    return {}


def vision_scored(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Log-probs of rows that an engine has sampled."""
    backend, out = open_backend(rank, world, arguments), Path(arguments["out"])
    rows = torch.load(arguments["rows"], weights_only=False)
    scored = backend.compute_logprobs([rows], model="policy", temperature=1.0)
    if backend.mesh.reports:
        save_file(scored, out / f"scored-{rank}.safetensors")
    backend.close()
    return {}


def vision_parts(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """A step on rows with images, a checkpoint, and another step; or that from a checkpoint."""
    from tests.vision.cases import PPO, Model, mixed_rows

    backend, out = open_backend(rank, world, arguments), Path(arguments["out"])
    mesh, rows = backend.mesh, mixed_rows(Model(Path(arguments["model"])).rules)
    if mesh.data_size > 1:
        last = mesh.data_rank == mesh.data_size - 1
        rows = [row for row in rows if row.group_id.startswith("text") == last]

    def step(name: str) -> None:
        backend.forward_backward([rows], PPO)
        assert not backend.step(normalizer=1.0, learning_rate=None).skipped_reason
        save_export(backend, out / f"{name}-{rank}.safetensors")

    if "checkpoint" in arguments:
        backend.load_checkpoint(Path(arguments["checkpoint"]))
        step(arguments["name"])
    else:
        step("weights")
        (out / "checkpoint").mkdir(exist_ok=True)
        backend.save_checkpoint(out / "checkpoint")
        step("second")
    backend.close()
    return {}


def logprobs(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Log-probs of one batch only."""
    backend = open_backend(rank, world, arguments)
    mesh = backend.mesh
    batches = micro_batches(make_rows(), mesh.data_rank, mesh.data_size)
    scored = backend.compute_logprobs(batches, model="policy", temperature=SPEC.temperature or 1.0)
    save_file(scored, Path(arguments["out"]) / f"logprobs-{rank}.safetensors")
    backend.close()
    return {}


def head_gap(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """How far log-probs are from a float64 head over the same hidden states, on average.

    The output weight is scaled up, so that logits are as large as those of a trained model.
    """
    backend = open_backend(rank, world, arguments)
    made = backend._passes.head
    assert made is not None
    weight = made._weight().data.mul_(2)
    shards = [torch.empty_like(weight) for _ in range(world)]
    dist.all_gather(shards, weight)
    whole_VH = torch.cat(shards).double()[: made._vocab]
    gaps: list[torch.Tensor] = []
    inner = made.responses

    def compare(output: torch.Tensor, batch: Any, **options: Any) -> Any:
        found = inner(output, batch, **options)
        hidden_TH = output[0].index_select(0, batch.local_predictors).double()
        exact_TV = (hidden_TH @ whole_VH.t() / options["temperature"]).log_softmax(-1)
        exact_T = exact_TV.gather(1, batch.targets[:, None])[:, 0]
        gaps.append((found.outputs.detach() - exact_T).abs())
        return found

    with unittest.mock.patch.object(made, "responses", compare):
        backend.compute_logprobs([make_rows()], model="policy", temperature=0.8)
        gather_gradients(backend, 0)
    backend.close()
    return {"gap": float(torch.cat(gaps).mean())}


def main_gradient(tensor: LocalTensor) -> torch.Tensor:
    """A gradient knows nothing of how its tensor is stored."""
    gradient: torch.Tensor = tensor.parameter.main_grad  # type: ignore[attr-defined]
    return gradient.double() - 1 if tensor.binding.pack is Pack.SHIFTED else gradient


def save_export(backend: MegatronBackend, path: Path, *read: Any) -> None:
    save_tensors(backend._policy.tensors, path, *read)


def save_tensors(which: Sequence[LocalTensor], path: Path, *read: Any) -> None:
    made = [part for part in export_tensors(which, *read)]
    tensors = {name: tensor.clone() for part in made for name, tensor in part.items()}
    if tensors:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def save_midway(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Two steps, a checkpoint, three more steps, then the weights."""
    out = Path(arguments["out"])
    backend = open_backend(rank, world, arguments)
    before = run_steps(backend, 0, arguments.get("first", 2))
    if arguments.get("former"):
        former.save(backend, out / "checkpoint")
    else:
        backend.save_checkpoint(out / "checkpoint")
    if arguments.get("dump"):
        save_file(dump_adam(backend), out / f"adam-{rank}.safetensors")
    after = run_steps(backend, len(before), 3)
    save_export(backend, out / f"weights-{rank}.safetensors")
    backend.close()
    return {"steps": after, "draw": torch.rand(()).item()}


def dump_adam(backend: MegatronBackend) -> dict[str, torch.Tensor]:
    """What torch's AdamW itself holds of every parameter, where one rank holds all of them."""
    (part,) = backend._stepper.optimizer.chained_optimizers
    states = part.optimizer.state
    (model,) = backend._policy.models
    found = {}
    for name, parameter in model.named_parameters():
        found[f"{name}/weight"] = parameter.detach().clone()
        for kind in ("exp_avg", "exp_avg_sq"):
            found[f"{name}/{kind}"] = states[parameter][kind].clone()
    return found


def save_beside_steps(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint written at once, and the same state written while steps go on."""
    out = Path(arguments["out"])
    backend = open_backend(rank, world, arguments)
    run_steps(backend, 0, 2)
    backend.save_checkpoint(out / "at-once")
    staged = backend.stage_checkpoint(out / "beside")
    with ThreadPoolExecutor(1) as pool:
        gather_gradients(backend, 2)
        if arguments["when"] == "before":
            staged.keep()
            backend.step(normalizer=NORMALIZER, learning_rate=None)
        writing = pool.submit(staged.write)
        gather_gradients(backend, 3)
        staged.keep()
        backend.step(normalizer=NORMALIZER, learning_rate=None)
        run_steps(backend, 4, 2)
        files = writing.result(JOB_SECONDS)
    backend.close()
    return {"files": {name: list(asdict(entry).values()) for name, entry in files.items()}}


def waits(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """How long this rank would wait for others, by group."""
    backend = open_backend(rank, world, arguments)
    groups: dict[str, Any] = {
        "tensor": parallel.tensor_group(expert=False),
        "experts": parallel.tensor_group(expert=True),
    }
    found = {
        name: group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        for name, group in groups.items()
    }
    backend.close()
    return found


def checked(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Two steps of equal ranks, then a pass in which the last context rank has other rows."""
    backend = open_backend(rank, world, arguments)
    steps = run_steps(backend, 0, 2)
    is_last = backend._groups.context.rank == backend._groups.context.size - 1
    rows = make_rows()[: 1 if is_last else 2]
    try:
        backend.compute_logprobs([rows], model="policy", temperature=1.0)
    except CollectiveMismatchError as error:
        return {"steps": steps, "error_message": str(error), "error_rank": error.rank}
    finally:
        backend.close()
    return {"steps": steps}


def checked_reference(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """A step of the reference backend on ranks whose models may differ."""
    config = TrainerConfig(
        model=arguments["models"][rank],
        store=Path(arguments["out"]),
        optim=OPTIM,
        ranks=RanksConfig(check_collectives=True),
    )
    mesh = Mesh(rank=rank, world_size=world, data_rank=rank, data_size=world)
    backend = ReferenceBackend(config, mesh)
    backend.forward_backward([make_rows()[rank : rank + 1]], SPEC)
    try:
        outcome = backend.step(normalizer=NORMALIZER, learning_rate=None)
    except CollectiveMismatchError as error:
        return {"error_message": str(error), "error_rank": error.rank}
    finally:
        backend.close()
    return {"grad_norm": outcome.grad_norm}


def resume(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Three steps from a checkpoint."""
    out = Path(arguments["out"])
    backend = open_backend(rank, world, arguments)
    gather_gradients(backend, 0)  # must be forgotten
    torch.manual_seed(12345 + rank)
    backend.load_checkpoint(Path(arguments["checkpoint"]))
    steps = run_steps(backend, arguments.get("first", 2), 3)
    save_export(backend, out / f"weights-{rank}.safetensors")
    backend.close()
    return {"steps": steps, "draw": torch.rand(()).item()}


def resume_error(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    backend = open_backend(rank, world, arguments)
    try:
        backend.load_checkpoint(Path(arguments["checkpoint"]))
    except UnfitCheckpointError as error:
        return {"error_message": str(error)}
    return {}


def load_damaged(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """By file of a checkpoint and damage, what a rank says of it when it loads."""
    directory = Path(arguments["out"]) / "checkpoint"
    backend = open_backend(rank, world, arguments)
    run_steps(backend, 0, 1)
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, backend.save_checkpoint(directory))
    files = {name: entry for part in gathered for name, entry in part.items()}
    answers = {}
    for name in sorted(files):
        path = directory / name
        whole = path.read_bytes()
        middle = len(whole) // 2
        flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
        for damage, data in (("flipped", flipped), ("cut", whole[:-1]), ("half", whole[:middle])):
            dist.barrier()
            if rank == 0:
                path.write_bytes(data)
            dist.barrier()
            try:
                with executor.checked_beside(directory, files, rank, world):
                    backend.load_checkpoint(directory)
                answers[f"{name} {damage}"] = ""
            except FAILURES as error:
                answers[f"{name} {damage}"] = getattr(error, "metadata", {}).get("file", str(error))
        dist.barrier()
        if rank == 0:
            path.write_bytes(whole)
    dist.barrier()
    with executor.checked_beside(directory, files, rank, world):
        backend.load_checkpoint(directory)
    backend.close()
    return {"files": sorted(files), "answers": answers}


def save_full(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """What every rank says when the disk of the last one is full."""
    backend = open_backend(rank, world, arguments)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == world - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        backend.save_checkpoint(Path(arguments["out"]) / "checkpoint")
    except CheckpointWriteError as error:
        return {"error_message": str(error)}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        backend.close()
    return {}


def replay_rollout(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Log-probs and gradients with the experts that the rows bring."""
    out = Path(arguments["out"])
    backend = open_backend(rank, world, arguments)
    mesh, rows = backend.mesh, routed_rows()
    batches = micro_batches(rows, mesh.data_rank, mesh.data_size)
    scored = backend.compute_logprobs(batches, model="policy", temperature=SPEC.temperature or 1.0)
    if mesh.reports:
        save_file(scored, out / f"logprobs-{rank}.safetensors")
    gather_gradients(backend, 0, rows=rows)
    backend._stepper.reduce(NORMALIZER)
    save_export(backend, out / f"gradients-{rank}.safetensors", main_gradient)
    reference = backend.compute_logprobs(batches, model="reference", temperature=1.0)
    if mesh.reports:
        save_file(reference, out / f"reference-{rank}.safetensors")
    backend.close()
    return {}


def replay_recorded(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Losses under weights that moved since the experts were recorded, with and without them."""
    backend = open_backend(rank, world, arguments)
    replay, mesh = backend._passes.replay, backend.mesh
    assert replay is not None
    batches = micro_batches(make_rows(), mesh.data_rank, mesh.data_size)
    backend.compute_logprobs(batches, model="policy", temperature=1.0)
    first = gather_gradients(backend, 0)
    backend.step(normalizer=NORMALIZER, learning_rate=0.05)
    replayed = gather_gradients(backend, 0)
    missing = [error_of(backend, rows) for rows in (make_rows(1), renamed(make_rows()))]
    rows = [with_records(row, replay) for row in make_rows()]
    replay.mode = "rollout"
    brought = gather_gradients(backend, 0, rows=rows) if world == 1 else replayed
    backend._passes = replace(backend._passes, replay=None)
    free = gather_gradients(backend, 0)
    backend.close()
    losses = {"first": first, "replayed": replayed, "brought": brought, "free": free}
    return {**losses, "missing": missing}


def error_of(backend: MegatronBackend, rows: list[Row]) -> str:
    try:
        gather_gradients(backend, 0, rows=rows)
    except RoutingMissingError as error:
        return str(error)
    return ""


def renamed(rows: list[Row]) -> list[Row]:
    return [row._replace(sample_id=f"{row.sample_id}-new") for row in rows]


def with_records(row: Row, replay: RoutingReplay) -> Row:
    """The row with the experts that were recorded for it, all mixture layers on this rank."""
    found = [chunk.records.get(row.sample_id) for chunk in replay._chunks]
    parts = [record.experts for record in found if record is not None]
    return row._replace(routed_experts=torch.cat(parts, dim=1) if parts else None)


def publish(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """One step, then the shards into the staging directory; log-probs for comparison."""
    out = Path(arguments["out"])
    backend = open_backend(rank, world, arguments)
    run_steps(backend, 0, 1)
    shards = backend.write_shards(Path(arguments["staging"]))
    mesh = backend.mesh
    batches = micro_batches(make_rows(), mesh.data_rank, mesh.data_size)
    scored = backend.compute_logprobs(batches, model="policy", temperature=1.0)
    if mesh.reports:
        save_file(scored, out / f"logprobs-{rank}.safetensors")
    backend.close()
    return {"shards": [asdict(shard) for shard in shards]}


def poisoned_step(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """A step with an infinite advantage on the last data rank only, then a good one."""
    backend = open_backend(rank, world, arguments)
    before = [tensor.parameter.detach().clone() for tensor in backend._policy.tensors]
    rows = make_rows()
    rows[-1].columns["advantages"][:] = float("inf")
    rows[-1].loss_mask[:] = True
    gather_gradients(backend, 0, rows=rows)
    bad = backend.step(normalizer=NORMALIZER, learning_rate=None)
    after = [tensor.parameter.detach().clone() for tensor in backend._policy.tensors]
    gather_gradients(backend, 0)
    good = backend.step(normalizer=NORMALIZER, learning_rate=None)
    finite = all(bool(t.parameter.isfinite().all()) for t in backend._policy.tensors)
    moved = [
        not torch.equal(a, t.parameter) for a, t in zip(after, backend._policy.tensors, strict=True)
    ]
    backend.close()
    return {
        "bad": bad.skipped_reason,
        "bad_norm_is_finite": math.isfinite(bad.grad_norm),
        "unchanged": all(map(torch.equal, before, after)),
        "good": good.skipped_reason,
        "moved": any(moved) and finite,
    }


def stock_latent(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """`parity` with Megatron's own latent attention, which cuts what leads into a latent."""

    def cut(*where: Any) -> Any:
        for tensor in local_tensors(*where):
            if "_down_proj" in tensor.binding.megatron:
                binding = replace(tensor.binding, cut=ShardAxis.ROWS)
                yield replace(tensor, binding=binding)
            else:
                yield tensor

    # Not at the top: Megatron must have been adapted before it is imported.
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    stock = unittest.mock.patch.object(model, "LatentSelfAttention", MLASelfAttention)
    with stock, unittest.mock.patch.object(model, "local_tensors", cut):
        return parity(rank, world, arguments)


def open_error(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """What keeps a backend from being made."""
    try:
        open_backend(rank, world, arguments)
    except (ValueError, WeightStoreError) as error:
        return {"type": type(error).__name__, "text": str(error)}
    return {}


def schedule(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """How the pipeline's schedule was told to send and free what stages hand on."""
    backend = open_backend(rank, world, arguments)
    core = backend._policy.config
    backend.close()
    return {"batched": core.batch_p2p_comm, "freed": core.deallocate_pipeline_outputs}


def provided(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """The parity job; which providers were called on the way, and where the classes are from."""
    providers.CALLS.clear()
    parity(rank, world, arguments)
    return {"calls": providers.CALLS}


def origins(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """The modules of everything that the backend runs on."""
    backend = open_backend(rank, world, arguments)
    policy, stepper = backend._policy, backend._stepper
    found: dict[str, Any] = {
        "model": type(policy.models[0]),
        "block": type(policy.models[0].decoder),
        "linear": type(policy.models[0].decoder.layers[0].mlp.linear_fc1),
        "data_parallel": type(policy.chunks[0]),
        "optimizer": type(stepper.optimizer.chained_optimizers[0]),
        "schedule": megatron_backend.get_forward_backward_func(),
        "finalize": stepping.finalize_model_grads,
        "sharded_tensor": checkpoint.ShardedTensor,
    }
    backend.close()
    return {name: f"{thing.__module__}.{thing.__qualname__}" for name, thing in found.items()}


def critic(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Values and the gradients of the value loss."""
    out = Path(arguments["out"])
    backend = open_backend(rank, world, arguments)
    mesh = backend.mesh
    batches = micro_batches(make_rows(), mesh.data_rank, mesh.data_size)
    scored = backend.compute_logprobs(batches, model="policy", temperature=1.0)
    if mesh.reports:
        save_file(scored, out / f"logprobs-{rank}.safetensors")
    loss = gather_gradients(backend, 0, LossSpec(name="value")) * NORMALIZER
    backend._stepper.reduce(1.0)
    save_export(backend, out / f"gradients-{rank}.safetensors", main_gradient)
    backend.close()
    return {"loss": loss}


def new_critic(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Values before and after three steps of a head that is new on a language model."""
    out = Path(arguments["out"])
    backend = open_backend(rank, world, {**arguments, "trainer": {"head": "value"}})
    mesh, spec = backend.mesh, LossSpec(name="value")
    batches = micro_batches(make_rows(), mesh.data_rank, mesh.data_size)
    before = backend.compute_values(batches)
    for step in range(3):
        gather_gradients(backend, step, spec)
        backend.step(normalizer=NORMALIZER, learning_rate=None)
    after = backend.compute_values(batches)
    if mesh.reports:
        save_file(after, out / f"values-{rank}.safetensors")
    backend.close()
    return {"before": max(float(values.abs().max()) for values in before.values())}


def mutated_rules(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """What each wrong rule does to the log-probs: an error's name, or the largest difference."""
    right = open_backend(rank, world, arguments)
    source = right._policy.source
    rows = make_rows()
    expected = right.compute_logprobs([rows], model="policy", temperature=1.0)
    families = {"as it is": source.weights.family}
    families |= dict(mutants(source.weights.family, source.shape))
    families |= dict(exchanged(source.weights.family, source.shape))
    found: dict[str, Any] = {}
    for label, family in families.items():
        wrong, error = None, ""
        with unittest.mock.patch.object(model_config, "family_of", lambda _, f=family: f):
            try:
                wrong = open_backend(rank, world, arguments)
            except (IndexError, RuntimeError, ValueError, WeightStoreError) as caught:
                error = type(caught).__name__
                parallel.stop()
        refused = torch.tensor(float(wrong is None))
        dist.all_reduce(refused, op=dist.ReduceOp.MAX)
        if wrong is None or refused:
            found[label] = error or "refused by another rank"
        else:
            scored = wrong.compute_logprobs([rows], model="policy", temperature=1.0)
            found[label] = max(float((scored[n] - expected[n]).abs().max()) for n in expected)
        if wrong is not None:
            wrong.close()
    right.close()  # until here it kept the process groups
    return found


def held(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, int]:
    """Bytes of what this rank holds after a step and one more pass."""
    backend = open_backend(rank, world, arguments)
    run_steps(backend, 0, 1)
    gather_gradients(backend, 1)
    parts = held_parts(backend)
    backend.close()
    return parts
