"""What ranks of any backend do in the tests: they answer JSON and leave tensors in files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from services.trainer.backend import TrainingBackend, create_backend
from services.trainer.config import LoraConfig, TrainerConfig
from services.trainer.rank import FAILURES
from services.trainer.rank.process_group import find_mesh
from sluice.algo.spec import LossSpec
from sluice.config import parse_config
from sluice.weights.errors import InvalidAdapterError
from tests.contract.training_backend.cases import PPO
from tests.fsdp.jobs import NORMALIZER, OPTIM, micro_batches, rows_of, save

__all__ = ["NORMALIZER"]


def clean_up() -> None:
    parallel = sys.modules.get("services.trainer.backends.megatron.parallel")
    while parallel is not None and parallel._users:  # of a job that failed
        parallel.stop()


def open_backend(rank: int, world: int, arguments: dict[str, Any]) -> Any:
    """A backend; with an `adapter`, a checkpoint of adapters, its numbers."""
    torch.set_num_threads(1)
    name = arguments["backend"]
    values = {
        "model": arguments["model"],
        "store": arguments["out"],
        "backend": name,
        "lora": arguments["lora"],
        "optim": OPTIM,
        "durable": False,
        **arguments.get("trainer", {}),
    }
    if name != "reference":
        values[name] = {"dtype": "float32", **arguments.get("layout", {})}
    config = parse_config(TrainerConfig, values)
    mesh = find_mesh(config, rank, world)
    backend = create_backend(name, config, mesh)
    if arguments.get("adapter"):
        backend.load_checkpoint(Path(arguments["adapter"]))
    return backend


def base_digests(backend: Any) -> dict[str, str]:
    """Of every tensor of the model that this rank holds, by name."""
    from sluice.weights.manifest import digest_bytes
    from sluice.weights.shards import host_bytes

    policy = backend._policy
    models: Sequence[Any] = policy.models if hasattr(policy, "models") else [policy.model]
    found = {}
    for index, model in enumerate(models):
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("tokens_per_expert"):  # Megatron counts in it
                continue
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            found[f"{index}/{name}"] = digest_bytes(host_bytes(local.detach()))
    return found


def run_step(backend: TrainingBackend, step: int, spec: LossSpec = PPO) -> float:
    """Forward and backward on the rows of `step`, in two calls; the loss of all ranks."""
    mesh = backend.mesh
    batches = micro_batches(rows_of(step), mesh.data_rank, mesh.data_size)
    sums = [backend.forward_backward(part, spec) for part in (batches[:1], batches[1:])]
    total = torch.tensor(sum(s.loss for s in sums) if mesh.reports else 0.0, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def run_steps(backend: TrainingBackend, first: int, count: int) -> list[dict[str, float]]:
    steps = []
    for step in range(first, first + count):
        loss = run_step(backend, step)
        outcome = backend.step(normalizer=NORMALIZER, learning_rate=None)
        steps.append({"loss": loss, "grad_norm": outcome.grad_norm})
    return steps


def score(backend: Any, out: Path, kind: str, model: str = "policy") -> None:
    mesh = backend.mesh
    batches = micro_batches(rows_of(0), mesh.data_rank, mesh.data_size)
    scored = backend.compute_logprobs(batches, model=model, temperature=1.0)
    if mesh.reports:
        save(scored, out / f"{kind}-{mesh.rank}.safetensors")


def unsummed(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Gradients of adapters on Megatron whose tensor ranks keep what each has of them."""
    backend = open_backend(rank, world, arguments)
    training = backend._lora.used
    training._held = {name: replace(held, summed=False) for name, held in training._held.items()}
    run_step(backend, 0)
    save_gradients(backend, Path(arguments["out"]) / f"gradients-{rank}.safetensors")
    backend.close()
    return {}


def save_gradients(backend: Any, path: Path) -> None:
    training = backend._lora.used
    training.reduce(training.optimizer.gradients)
    whole = training.whole(dict(training.optimizer.views()))
    if training.is_writer:
        save({name: tensor.clone() for name, tensor in whole.items()}, path)


def parity(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Log-probs of adapters and of their base, gradients, five steps, then what is published."""
    out = Path(arguments["out"])
    backend = open_backend(rank, world, arguments)
    before = base_digests(backend)
    score(backend, out, "logprobs")
    score(backend, out, "base", model="reference")
    run_step(backend, 0)
    save_gradients(backend, out / f"gradients-{rank}.safetensors")
    backend.discard_gradients()
    steps = run_steps(backend, 0, 5)
    shards = backend.write_shards(out)
    score(backend, out, "trained")
    score(backend, out, "base_after", model="reference")
    frozen = before == base_digests(backend)
    backend.close()
    return {
        "steps": steps,
        "files": [shard.file_name for shard in shards],
        "dtypes": sorted({t.dtype for shard in shards for t in shard.tensors.values()}),
        "frozen": frozen,
    }


def start(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Log-probs and the adapters, as they are at first."""
    backend = open_backend(rank, world, arguments)
    score(backend, Path(arguments["out"]), "logprobs")
    backend.write_shards(Path(arguments["out"]))
    backend.close()
    return {}


def save_midway(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Some steps, a checkpoint, two more steps, then what is published."""
    out, first = Path(arguments["out"]), arguments.get("first", 2)
    backend = open_backend(rank, world, arguments)
    run_steps(backend, 0, first)
    (out / "checkpoint").mkdir(exist_ok=True)
    staged = backend.stage_checkpoint(out / "checkpoint")
    staged.keep()
    steps = run_steps(backend, first, 2)
    files = staged.write()
    backend.write_shards(out)
    backend.close()
    return {"steps": steps, "files": sorted(files)}


def resume(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """The steps behind a checkpoint, and what is published after them."""
    backend = open_backend(rank, world, arguments)
    run_step(backend, 7)  # gradients that loading has to drop
    try:
        backend.load_checkpoint(Path(arguments["checkpoint"]))
    except FAILURES as error:
        backend.close()
        return {"error_message": f"{type(error).__name__}: {error}"}
    steps = run_steps(backend, arguments.get("first", 2), 2)
    backend.write_shards(Path(arguments["out"]))
    backend.close()
    return {"steps": steps}


def attempt(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """What a start is refused with."""
    try:
        open_backend(rank, world, arguments).close()
    except FAILURES as error:
        return {"error_message": f"{type(error).__name__}: {error}"}
    return {"error_message": ""}


def several(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Users' adapters on one base, beside the one of the settings: their passes and steps by turns.

    `sharing`: the second goes on with the moments of the first, as if both had one optimizer.
    """
    out, users = Path(arguments["out"]), arguments["users"]
    backend = open_backend(rank, world, arguments)
    before = base_digests(backend)
    for name, user in users.items():
        if name:
            backend.create_adapter(name, LoraConfig(**user["settings"]))
        backend.use_adapter(name)
        backend.load_checkpoint(Path(user["adapter"]))
    steps: dict[str, list[dict[str, float]]] = {name: [] for name in users}
    for index in range(arguments["steps"]):
        losses = dict.fromkeys(users, 0.0)
        for part in range(2):
            for name, user in users.items():
                backend.use_adapter(name)
                losses[name] += run_part(backend, user["first"] + index, part)
        for name, user in users.items():
            backend.use_adapter(name)
            outcome = backend.step(normalizer=NORMALIZER, learning_rate=user["rate"])
            steps[name].append({"loss": losses[name], "grad_norm": outcome.grad_norm})
            if arguments.get("sharing"):
                share_moments(backend, *users)
    frozen = before == base_digests(backend)
    for name in users:
        folder = out / (name or "own")
        folder.mkdir(exist_ok=True)
        backend.use_adapter(name)
        score(backend, folder, "logprobs")
        score(backend, folder, "base", model="reference")
        backend.write_shards(folder)
    backend.close()
    return {"steps": steps, "frozen": frozen}


def replayed(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Losses of a user whose experts were recorded before another user scored, trained, stepped."""
    backend = open_backend(rank, world, {**arguments, "adapter": ""})
    for name, adapter in arguments["users"].items():
        backend.create_adapter(name, LoraConfig(**arguments["lora"]))
        backend.use_adapter(name)
        backend.load_checkpoint(Path(adapter))
    first, *others = arguments["users"]
    out, losses = Path(arguments["out"]), []
    backend.use_adapter(first)
    score(backend, out, "first")
    for name in others:
        backend.use_adapter(name)
        score(backend, out, name)
        run_steps(backend, 0, 1)
        score(backend, out, name)
    backend.use_adapter(first)
    for _ in range(2):  # the second with weights that have moved
        losses.append(run_step(backend, 0))
        backend.step(normalizer=NORMALIZER, learning_rate=None)
    backend.close()
    return {"losses": losses}


def refused(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Steps behind an adapter that some ranks refuse, and that all forget."""
    backend, reason = open_backend(rank, world, arguments), ""
    try:
        backend.create_adapter("alice", LoraConfig(**arguments["other"]))
    except InvalidAdapterError as error:
        reason = str(error)
    backend.delete_adapter("alice")
    steps = run_steps(backend, 0, 2)
    backend.close()
    return {"reason": reason, "steps": steps}


def run_part(backend: TrainingBackend, step: int, part: int) -> float:
    """One of the two passes of `run_step`; the loss of all ranks."""
    mesh = backend.mesh
    batches = micro_batches(rows_of(step), mesh.data_rank, mesh.data_size)
    sums = backend.forward_backward((batches[:1], batches[1:])[part], PPO)
    total = torch.tensor(sums.loss if mesh.reports else 0.0, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def share_moments(backend: Any, first: str, second: str) -> None:
    one, other = (backend._lora._trained[name].optimizer for name in (first, second))
    for mine, theirs in zip(one.parameters.values(), other.parameters.values(), strict=True):
        if mine in one.adam.state:
            other.adam.state[theirs] = one.adam.state[mine]


def held_bytes(backend: TrainingBackend) -> int:
    """Of all that a backend says it holds, whatever shares its memory once."""
    held = backend.held_tensors()
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in (*held.state, *held.gradients)
    }
    return sum(storages.values())


def growth(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Bytes held with more and more adapters that have all stepped, and hooks of a layer."""
    backend = open_backend(rank, world, arguments)
    run_steps(backend, 0, 1)
    held = {1: held_bytes(backend)}
    for count in range(2, arguments["count"] + 1):
        backend.create_adapter(f"user-{count}", LoraConfig(**arguments["lora"]))
        backend.use_adapter(f"user-{count}")
        run_steps(backend, 0, 1)
        held[count] = held_bytes(backend)
    numbers = sum(p.numel() for p in backend._lora.used.adapters.parameters.values())
    layers = backend._lora._model
    modules = layers._owners if hasattr(layers, "_owners") else layers._layers
    hooks = {len(module._forward_hooks) for module in modules.values()}
    backend.delete_adapter("user-2")
    backend.use_adapter("")
    left = held_bytes(backend)
    backend.close()
    return {
        "held": list(held.values()),
        "left": left,
        "adapter": numbers * 4,
        "tensors": len(backend._lora.used.adapters.parameters),
        "hooks": sorted(hooks),
    }
