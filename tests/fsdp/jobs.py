"""What ranks do in the tests: they answer JSON and leave tensors in files."""

from __future__ import annotations

import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from transformers import GptOssConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from services.trainer.backend import Mesh, MicroBatch, Row
from services.trainer.backends.fsdp import context, directions
from services.trainer.backends.fsdp.backend import FsdpBackend
from services.trainer.backends.fsdp.config import FsdpConfig
from services.trainer.backends.fsdp.expert_parallel import create_experts, cut_experts
from services.trainer.backends.fsdp.layout import mesh_of
from services.trainer.backends.fsdp.optimizer import local_part
from services.trainer.backends.fsdp.tensor_parallel import tensor_cut
from services.trainer.backends.reference.backend import ReferenceBackend
from services.trainer.config import LoraConfig, TrainerConfig
from services.trainer.errors import RoutingMissingError
from services.trainer.rank import FAILURES
from sluice.algo.spec import LossSpec
from sluice.config import parse_config
from sluice.weights.manifest import digest_bytes
from sluice.weights.shards import host_bytes
from tests.contract.training_backend.cases import (
    NAMED,
    PPO,
    TAUGHT,
    check_kept,
    make_row,
    ragged_rows,
)
from tests.held_memory import held_parts
from tests.models.forced import with_experts

NORMALIZER = 37.0
KINDS = ("logprobs", "ids", "top")
OPTIM = {"learning_rate": 2e-3, "epsilon": 1e-5, "weight_decay": 0.1, "max_grad_norm": 0.5}


def clean_up() -> None:
    """Nothing outlives a job."""


def open_backend(rank: int, world: int, arguments: dict[str, Any]) -> FsdpBackend:
    values = {
        "model": arguments["model"],
        "store": arguments["out"],
        "backend": "fsdp",
        "optim": OPTIM,
        "durable": False,
        **arguments.get("trainer", {}),
        "fsdp": {"dtype": "float32", **arguments.get("fsdp", {})},
    }
    config = parse_config(TrainerConfig, values)
    return FsdpBackend(config, mesh_of(config.fsdp, rank, world))


def rows_of(step: int) -> list[Row]:
    """Other rows every step, of the lengths and groups of the contract's."""
    if step == 0:
        return ragged_rows()
    generator = torch.Generator().manual_seed(100 + step)
    rows = []
    for row in ragged_rows():
        tokens = torch.randint(53, row.token_ids.shape, generator=generator).tolist()
        prompt, response = tokens[: row.prompt_length], tokens[row.prompt_length :]
        rows.append(make_row(row.sample_id, prompt, response, seed=step))
    return rows


def micro_batches(rows: list[Row], rank: int, world: int) -> list[MicroBatch]:
    """Whole groups by data rank, in three micro-batches; the last is empty, of some ranks all."""
    groups = sorted({row.group_id for row in rows})
    mine = [row for row in rows if groups.index(row.group_id) % max(world - 1, 1) == rank]
    half = (len(mine) + 1) // 2
    return [mine[:half], mine[half:], []]


def batches_of(backend: FsdpBackend, rows: list[Row]) -> list[MicroBatch]:
    return micro_batches(rows, backend.mesh.data_rank, backend.mesh.data_size)


def run_step(backend: FsdpBackend, step: int, spec: LossSpec = PPO) -> float:
    """Forward and backward on the rows of `step`, in two calls; the loss of all ranks."""
    batches = batches_of(backend, rows_of(step))
    sums = [backend.forward_backward(part, spec) for part in (batches[:1], batches[1:])]
    return loss_of_all(backend, sum(each.loss for each in sums))


def loss_of_all(backend: FsdpBackend, loss: float) -> float:
    """The sum over data ranks, of which one each reports."""
    total = torch.tensor(loss if backend.mesh.reports else 0.0, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def parity(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Log-probs and gradients of one batch, then five steps, then the weights."""
    out = Path(arguments["out"])
    backend = open_backend(rank, world, arguments)
    batches = batches_of(backend, rows_of(0))
    scored = backend.compute_logprobs(batches, model="policy", temperature=1.0)
    save_scores(backend, scored, out / f"logprobs-{rank}.safetensors")
    check_kept(backend, batches, PPO, scored)
    export(backend, out / f"gradients-{rank}.safetensors", gradients=True)
    backend.discard_gradients()
    steps = []
    for step in range(arguments.get("steps", 5)):
        loss = run_step(backend, step)
        outcome = backend.step(normalizer=NORMALIZER, learning_rate=None)
        steps.append({"loss": loss, "grad_norm": outcome.grad_norm})
    export(backend, out / f"weights-{rank}.safetensors")
    policy = backend._policy
    parts = policy.parameters().values()
    return {
        "steps": steps,
        "held": sum(local_part(p).numel() for p in parts),
        "counted": sum(local_part(p).numel() for p in parts if policy.is_counted(p)),
        "whole": sum(p.numel() for p in parts),
    }


def kept_inputs(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Of how many layers the memory of the input is still there when backward begins."""
    backend = open_backend(rank, world, arguments)
    layers = [
        m for m in backend._policy.root.modules() if type(m).__name__.endswith("DecoderLayer")
    ]
    inputs: list[weakref.ref[torch.UntypedStorage]] = []
    alive: list[int] = []

    def note(module: Any, given: tuple[torch.Tensor, ...]) -> None:
        if not alive:
            inputs.append(weakref.ref(given[0].untyped_storage()))

    def count(gradient: torch.Tensor) -> None:
        alive.append(sum(each() is not None for each in inputs))

    def watch(module: Any, given: Any, made: torch.Tensor) -> None:
        made.register_hook(count)

    for layer in layers:
        layer.register_forward_pre_hook(note)
    layers[-1].register_forward_hook(watch)
    backend.forward_backward([rows_of(0)], PPO)
    return {"layers": len(inputs), "kept": alive[0]}


def on_copies(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Five steps on the reference backend, of which every rank has the whole model."""
    values = {"model": arguments["model"], "store": arguments["out"], "durable": False}
    config = parse_config(TrainerConfig, values | arguments["trainer"])
    mesh = Mesh(rank=rank, world_size=world, data_rank=rank, data_size=world)
    backend, norms = ReferenceBackend(config, mesh), []
    for step in range(5):
        backend.forward_backward(micro_batches(rows_of(step), rank, world), PPO)
        norms.append(backend.step(normalizer=NORMALIZER, learning_rate=None).grad_norm)
    weights = dict(backend._policy.model.named_parameters())
    made = revert_weight_conversion(backend._policy.model, {n: p.data for n, p in weights.items()})
    if rank == world - 1:
        save(made, Path(arguments["out"]) / "weights-0.safetensors")
    return {"norms": norms, "digest": digest_bytes(b"".join(map(host_bytes, made.values())))}


def gathered(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """How many whole matrices this rank is given in a step of Muon, and has at most at a time."""
    backend, proper = open_backend(rank, world, arguments), directions.gather_rows
    given: list[weakref.ref[torch.Tensor]] = []  # gloo's threads let go of its memory later
    most = [0]

    def gather(*arguments: Any) -> torch.Tensor | None:
        whole = proper(*arguments)
        if whole is not None:
            given.append(weakref.ref(whole))
        most[0] = max(most[0], sum(each() is not None for each in given))
        return whole

    directions.gather_rows = gather
    try:
        _steps(backend, 0, 1)
    finally:
        directions.gather_rows = proper
    return {"made": len(given), "most": most[0]}


def gathered_weights(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """The most bytes of gathered weights that there are at once in a pass with its backward."""
    backend, seen = open_backend(rank, world, arguments), [0]
    proper = FSDPParamGroup.wait_for_unshard
    layers = [m for m in backend._policy.root.modules() if isinstance(m, FSDPModule)]
    groups = [g for layer in layers for g in layer._get_fsdp_state()._fsdp_param_groups]

    def wait(group: FSDPParamGroup) -> None:
        proper(group)
        outputs = [t for g in groups for p in g.fsdp_params for t in p.all_gather_outputs]
        seen.append(sum(tensor.untyped_storage().nbytes() for tensor in outputs))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FSDPParamGroup, "wait_for_unshard", wait)
        backend.forward_backward([rows_of(0)[:1]], PPO)
    experts = [p for n, p in backend._policy.parameters().items() if ".experts." in n]
    return {"most": max(seen), "experts": sum(4 * p.numel() for p in experts)}


def travels(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """How far a layer whose experts ranks have is from the whole, as transformers runs it.

    tokens: of each rank. favoured: experts that all of them go to.
    """
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_local_experts": 8}
    experts: Any = GptOssExperts(GptOssConfig(**sizes)).double()
    model = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"experts": experts})})
    experts.config._experts_implementation = "eager"
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    counts, favoured = arguments["tokens"], arguments["favoured"]
    hidden = torch.randn(sum(counts), 8, dtype=torch.float64)
    drawn = [torch.randperm(len(favoured))[: arguments["count"]] for _ in hidden]
    chosen = torch.tensor(favoured)[torch.stack(drawn)]
    weights, seen = torch.rand(chosen.shape, dtype=torch.float64), torch.randn_like(hidden)
    given = [t.requires_grad_() for t in (hidden, weights)]
    whole = experts(hidden, chosen, weights)
    own = [*experts.parameters()]
    wanted = torch.autograd.grad((whole * seen).sum(), [*given, *own])
    mesh = Mesh(rank=rank, world_size=world)
    limit = timedelta(seconds=60)
    spread = create_experts(mesh, "cpu", limit, FsdpConfig(expert=world), limit)
    assert spread is not None
    assert cut_experts(model, spread) == [experts]
    part = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    made = experts(hidden[part], chosen[part], weights[part])
    cut = [*experts.parameters()]
    found = torch.autograd.grad((made * seen[part]).sum(), [*given, *cut])
    spread.collectives.end_step()
    pairs = [
        (made, whole[part]),
        *((f[part], w[part]) for f, w in zip(found[:2], wanted[:2], strict=True)),
    ]
    share = 8 // world
    mine = slice(rank * share, (rank + 1) * share)
    pairs += [(local_part(f), w[mine]) for f, w in zip(found[2:], wanted[2:], strict=True)]
    return {"off": max(float((a - b).detach().abs().max()) for a, b in pairs if a.numel())}


def waits(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """How long this rank would wait for others, by group."""
    backend = open_backend(rank, world, arguments)
    experts = backend._experts
    meshes = [backend._cut_over] if experts is None else [backend._cut_over, experts.mesh]
    names = [(mesh, name) for mesh in meshes for name in mesh.mesh_dim_names or ()]
    groups: dict[str, Any] = {name: mesh.get_group(name) for mesh, name in names}
    return {
        name: group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        for name, group in groups.items()
        if group is not dist.group.WORLD and group.size() > 1
    }


def replicas(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Some steps, then what of the model other ranks must hold to the bit too."""
    backend = open_backend(rank, world, arguments)
    _steps(backend, 0, arguments["steps"])
    digests = {
        name: digest_bytes(host_bytes(local_part(parameter.detach())))
        for name, parameter in backend._policy.parameters().items()
        if tensor_cut(parameter) is None
    }
    return {"digests": digests}


def taught(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """One pass over what a teacher named, its groups spread over the ranks; and a step."""
    backend, rows = open_backend(rank, world, arguments), rows_of(0)
    groups, mesh = sorted({row.group_id for row in rows}), backend.mesh
    mine = [row for row in rows if groups.index(row.group_id) % mesh.data_size == mesh.data_rank]
    sums = backend.forward_backward([mine[:3], mine[3:]], TAUGHT)
    total = loss_of_all(backend, sums.loss)
    export(backend, Path(arguments["out"]) / f"gradients-{rank}.safetensors", gradients=True)
    outcome = backend.step(normalizer=NORMALIZER, learning_rate=None)
    return {"rows": len(mine), "loss": total, "grad_norm": outcome.grad_norm}


def named(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """The likeliest tokens of a batch of which a rank may have no row."""
    backend = open_backend(rank, world, arguments)
    batches = batches_of(backend, rows_of(0))
    found = backend.compute_top_logprobs(batches, model="policy", temperature=0.8, count=NAMED)
    parts = {f"{n}/{kind}": getattr(top, kind) for n, top in found.items() for kind in KINDS}
    save_scores(backend, parts, Path(arguments["out"]) / f"named-{rank}.safetensors")
    return {"rows": len(found)}


def replay(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Log-probs and gradients by the experts that rows bring, and of the reference, by its own."""
    out, backend = Path(arguments["out"]), open_backend(rank, world, arguments)
    rows = with_experts(rows_of(0), arguments["shape"])
    batches = batches_of(backend, rows)
    scored = backend.compute_logprobs(batches, model="policy", temperature=1.0)
    save_scores(backend, scored, out / f"logprobs-{rank}.safetensors")
    check_kept(backend, batches, PPO, scored)
    export(backend, out / f"gradients-{rank}.safetensors", gradients=True)
    scored = backend.compute_logprobs(batches, model="reference", temperature=1.0)
    save_scores(backend, scored, out / f"reference-{rank}.safetensors")
    return {}


def replay_recorded(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Losses under weights that moved since experts were recorded, with and without these."""
    backend, out = open_backend(rank, world, arguments), Path(arguments["out"])
    batches = batches_of(backend, rows_of(0))
    backend.compute_logprobs(batches, model="policy", temperature=1.0)
    kept = backend._replay
    assert kept is not None
    records = {name: record.experts for name, record in kept._records.rows.items()}
    save_scores(backend, records, out / f"records-{rank}.safetensors")
    first = run_step(backend, 0)
    backend.step(normalizer=NORMALIZER, learning_rate=0.05)
    replayed = run_step(backend, 0)
    missing = [refusal_of(backend, rows) for rows in (other_tokens(), renamed(rows_of(0)))]
    brought = [row._replace(routed_experts=records.get(row.sample_id)) for row in rows_of(0)]
    kept._mode = "rollout"
    sums = backend.forward_backward(batches_of(backend, brought), PPO)
    losses = {"first": first, "replayed": replayed, "brought": loss_of_all(backend, sums.loss)}
    kept._mode = "recorded"
    backend.compute_logprobs([[]], model="policy", temperature=1.0)
    missing.append(refusal_of(backend, rows_of(0)))
    backend._replay = None
    return {**losses, "free": run_step(backend, 0), "missing": missing}


def other_tokens() -> list[Row]:
    return [row._replace(token_ids=row.token_ids.flip(0)) for row in rows_of(0)]


def renamed(rows: list[Row]) -> list[Row]:
    return [row._replace(sample_id=f"{row.sample_id}-new") for row in rows]


def refusal_of(backend: FsdpBackend, rows: list[Row]) -> str:
    """What a pass over rows is refused with on this rank, in full; empty if it is not."""
    try:
        backend.forward_backward(batches_of(backend, rows), PPO)
    except RoutingMissingError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def replay_hostile(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """What rows of which one is not as it should be are refused with; losses around that."""
    backend = open_backend(rank, world, arguments)
    rows, found = with_experts(rows_of(0), arguments["shape"]), dict[str, Any]()

    def loss() -> float:
        sums = backend.forward_backward(batches_of(backend, rows), PPO)
        return loss_of_all(backend, sums.loss)

    found["before"] = loss()
    for kind in arguments["kinds"]:
        wrong = [spoilt(row, kind) if row.sample_id == "b/0" else row for row in rows]
        found[kind] = refusal_of(backend, wrong)
    return {**found, "after": loss()}


def spoilt(row: Row, kind: str) -> Row:
    """The row with routed experts that are not its own, or not the model's."""
    assert row.routed_experts is not None
    experts: torch.Tensor | None = row.routed_experts.clone()
    assert experts is not None
    if kind == "none":
        experts = None
    elif kind in ("beyond", "negative"):
        experts[0, 0, 0] = 4 if kind == "beyond" else -1
    else:
        cut = {
            "layers": experts[:, :1],
            "choices": experts[..., :1],
            "tokens": experts[:-1],
            "flat": experts.flatten(1),
        }
        experts = cut[kind]
    return row._replace(routed_experts=experts)


def replay_critic(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Values of rows that bring experts, behind a step, before which all are zero."""
    backend = open_backend(rank, world, {**arguments, "trainer": {"head": "value"}})
    given = [replace_columns(row) for row in with_experts(rows_of(0), arguments["shape"])]
    batches = batches_of(backend, given)
    backend.forward_backward(batches, LossSpec(name="value"))
    backend.step(normalizer=NORMALIZER, learning_rate=0.1)
    out = Path(arguments["out"])
    save_scores(backend, backend.compute_values(batches), out / f"values-{rank}.safetensors")
    return {}


def replay_adapters(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Which adapter's passes are refused where one has recorded; the base chooses for itself."""
    settings = {"rank": 2, "alpha": 4.0, "targets": ["q_proj"], "max_adapters": 2}
    backend = open_backend(rank, world, {**arguments, "trainer": {"lora": settings}})
    backend.create_adapter("other", LoraConfig(rank=2, alpha=4.0, targets=("q_proj",)))
    batches = batches_of(backend, rows_of(0))
    backend.use_adapter("")
    base = backend.compute_logprobs(batches, model="policy", temperature=1.0)
    found = {"own": refusal_of(backend, rows_of(0))}
    backend.use_adapter("other")
    found["other"] = refusal_of(backend, rows_of(0))
    backend.use_adapter("")
    found["again"] = refusal_of(backend, rows_of(0))
    backend.step(normalizer=NORMALIZER, learning_rate=0.05)
    reference = backend.compute_logprobs(batches, model="reference", temperature=1.0)
    sums = (sum(float(part.sum()) for part in each.values()) for each in (base, reference))
    return {**found, **dict(zip(("base", "reference"), sums, strict=True))}


def save_scores(backend: FsdpBackend, scored: dict[str, torch.Tensor], path: Path) -> None:
    """What the rank that reports has; the others of its data rank have the same."""
    if backend.mesh.reports:
        save(scored, path)


def save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    if tensors:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def export(backend: FsdpBackend, path: Path, *, gradients: bool = False) -> None:
    def read_gradient(name: str, tensor: torch.Tensor) -> torch.Tensor:
        gradient = tensor.grad
        return torch.zeros_like(tensor) if gradient is None else gradient

    read = {"read": read_gradient} if gradients else {}
    made = [part for part in backend._export.tensors(**read)]
    save({name: tensor.clone() for part in made for name, tensor in part.items()}, path)


def save_midway(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Some steps, a checkpoint, some more, then the weights."""
    out, first = Path(arguments["out"]), arguments.get("first", 2)
    backend = open_backend(rank, world, arguments)
    _steps(backend, 0, first)
    files = backend.save_checkpoint(out / "checkpoint")
    answer = _steps(backend, first, arguments.get("steps_after", 2))
    export(backend, out / f"weights-{rank}.safetensors")
    return {"steps": answer, "files": sorted(files), "draw": torch.rand(()).item()}


def resume(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """The steps behind a checkpoint, and the weights after them."""
    backend = open_backend(rank, world, arguments)
    run_step(backend, 7)  # gradients that loading has to drop
    try:
        backend.load_checkpoint(Path(arguments["checkpoint"]))
    except FAILURES as error:
        return {"error": f"{type(error).__name__}: {error}"}
    answer = _steps(backend, arguments.get("first", 2), 2)
    export(backend, Path(arguments["out"]) / f"weights-{rank}.safetensors")
    return {"steps": answer, "draw": torch.rand(()).item()}


def _steps(backend: FsdpBackend, first: int, count: int) -> list[dict[str, float]]:
    steps = []
    for step in range(first, first + count):
        loss = run_step(backend, step)
        outcome = backend.step(normalizer=NORMALIZER, learning_rate=None)
        steps.append({"loss": loss, "grad_norm": outcome.grad_norm})
    return steps


def attempt(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """What a start is refused with."""
    try:
        open_backend(rank, world, arguments)
    except FAILURES as error:
        return {"error_message": f"{type(error).__name__}: {error}"}
    return {"error_message": ""}


def critic(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Values, then three steps of a value loss, then values again, and a critic's tensors."""
    out = Path(arguments["out"])
    trainer = {**arguments.get("trainer", {}), "head": "value"}
    backend = open_backend(rank, world, {**arguments, "trainer": trainer})
    rows = [replace_columns(row) for row in rows_of(0)]
    batches = batches_of(backend, rows)
    save_scores(backend, backend.compute_values(batches), out / f"before-{rank}.safetensors")
    steps = []
    for _ in range(3):
        sums = backend.forward_backward(batches, LossSpec(name="value"))
        loss = loss_of_all(backend, sums.loss)
        outcome = backend.step(normalizer=NORMALIZER, learning_rate=None)
        steps.append({"loss": loss, "grad_norm": outcome.grad_norm})
    save_scores(backend, backend.compute_values(batches), out / f"after-{rank}.safetensors")
    export(backend, out / f"weights-{rank}.safetensors")
    return {"steps": steps}


def replace_columns(row: Row) -> Row:
    """The row with what a critic is to find: one number a token."""
    return row._replace(columns={"returns": row.columns["advantages"] + 1.0})


def recomputes(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """How often each layer's attention runs in a pass with gradients."""
    backend, counts = open_backend(rank, world, arguments), [0]

    def count(*_: Any) -> None:
        counts[0] += 1

    for name, module in backend._policy.model.named_modules():
        if name.endswith("self_attn"):
            module.register_forward_pre_hook(count)
    backend.forward_backward([rows_of(0)], PPO)
    layers = backend._policy.model.config.num_hidden_layers
    return {"runs": counts[0] / layers}


def surrogates(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Loss, entropy and norm of one pass under each of some losses, whose rows are on all ranks."""
    backend, rows, found = open_backend(rank, world, arguments), rows_of(0), {}
    groups, mesh = sorted({row.group_id for row in rows}), backend.mesh
    mine = [row for row in rows if groups.index(row.group_id) % mesh.data_size == mesh.data_rank]
    for name, settings in arguments["losses"].items():
        sums = backend.forward_backward([mine[:3], mine[3:]], LossSpec(**settings))
        values = {"loss": sums.loss, **{n: total for n, (total, _) in sums.metrics.items()}}
        values = {n: loss_of_all(backend, value) for n, value in values.items()}
        norm = backend.step(normalizer=NORMALIZER, learning_rate=0.0).grad_norm
        found[name] = {**values, "grad_norm": norm}
    return found


def with_other_keys(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """`parity` where attention has its own keys in place of the others', or keeps its gradients."""
    kind, proper = arguments["kind"], context.gather_tokens

    def gather(local: torch.Tensor, ranks: Any, *, gradient: Any) -> torch.Tensor:
        if kind == "own keys":
            return torch.cat([local] * ranks.size)
        return proper(local, ranks, gradient="own")

    context.gather_tokens = gather
    try:
        return parity(rank, world, {**arguments, "steps": 0})
    finally:
        context.gather_tokens = proper


def held(rank: int, world: int, arguments: dict[str, Any]) -> dict[str, int]:
    """Bytes of what this rank holds after a step and one more pass."""
    backend = open_backend(rank, world, arguments)
    for step in range(2):
        batches = micro_batches(rows_of(step), backend.mesh.data_rank, backend.mesh.data_size)
        backend.forward_backward(batches, PPO)
        if step == 0:
            backend.step(normalizer=NORMALIZER, learning_rate=None)
    parts = held_parts(backend)
    backend.close()
    return parts
