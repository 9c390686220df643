"""What peft, plain transformers, autograd and AdamW say of adapters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file

from services.trainer.config import OptimConfig
from sluice.weights.adapter import AdapterSpec, encode_adapter_config
from sluice.weights.checkpoint import digest_base
from tests.contract.training_backend.cases import Model, Oracle
from tests.fsdp.jobs import NORMALIZER, OPTIM, rows_of

Tensors = dict[str, torch.Tensor]
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TARGETS: dict[str, tuple[str, ...]] = {
    "qwen3": ALL,
    "one_key_head": ALL,
    "llama": ALL,
    "qwen3_moe": ALL[:4],
    "glm4": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"),
    "deepseek_v3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    "nemotron_h": ("in_proj", "q_proj", "k_proj", "v_proj", "o_proj"),
    "lfm2": ("in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "w1", "w2", "w3"),
    "glm_moe_dsa": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
}
RANK, ALPHA, STEPS = 4, 10.0, 5


@dataclass(frozen=True)
class ExpectedAdapter:
    """directory: of a base. adapter: a checkpoint of adapters that it is given."""

    directory: Path
    adapter: Path
    settings: dict[str, Any]
    logprobs: Tensors
    base: Tensors
    gradients: Tensors
    steps: list[dict[str, float]]
    trained: Tensors
    tensors: Tensors


def adapted(
    model: Model,
    targets: tuple[str, ...],
    *,
    rank: int = RANK,
    alpha: float = ALPHA,
    seed: int = 6,
) -> PeftModel:
    """A model with adapters that are not zero."""
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(targets))  # type: ignore[arg-type]
    made = get_peft_model(model.load(), config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(made.named_parameters()):
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return made  # type: ignore[return-value]


def tensors_of(model: PeftModel) -> Tensors:
    return {name: t.detach().clone() for name, t in get_peft_model_state_dict(model).items()}


def write_checkpoint(directory: Path, spec: AdapterSpec, tensors: Tensors) -> Path:
    """Adapters that have not stepped yet, as backends read them."""
    directory.mkdir()
    save_file(tensors, directory / "policy.safetensors")
    save_file({}, directory / "optimizer.safetensors")
    (directory / "adapter_config.json").write_bytes(encode_adapter_config(spec))
    return directory


def expect(model: Model, family: str, root: Path) -> ExpectedAdapter:
    """One sample at a time, each whole; see `Oracle`."""
    torch.set_num_threads(1)
    targets = TARGETS[family]
    peft = adapted(model, targets)
    spec = AdapterSpec(
        rank=RANK, alpha=ALPHA, targets=targets, base_digest=digest_base(model.directory)
    )
    adapter = write_checkpoint(root / "adapter", spec, tensors_of(peft))
    oracle = Oracle(peft, OptimConfig(**OPTIM))  # type: ignore[arg-type]
    rows = rows_of(0)

    def logprobs() -> Tensors:
        with torch.no_grad():
            return {row.sample_id: oracle.logprobs(row) for row in rows}

    scored = logprobs()
    with peft.disable_adapter():
        base = logprobs()
    oracle.ppo_loss(rows).backward()
    gradients = {
        name.replace(".default", ""): p.grad.clone()
        for name, p in peft.named_parameters()
        if p.grad is not None
    }
    oracle.adam.zero_grad()
    steps = []
    for step in range(STEPS):
        loss = oracle.ppo_loss(rows_of(step))
        steps.append({"loss": loss.item(), "grad_norm": oracle.step(loss, NORMALIZER)})
    settings = {"rank": RANK, "alpha": ALPHA, "targets": list(targets)}
    return ExpectedAdapter(
        model.directory,
        adapter,
        settings,
        scored,
        base,
        gradients,
        steps,
        logprobs(),
        tensors_of(peft),
    )


@dataclass(frozen=True)
class User:
    """Of several adapters one: what it is, at which rate it learns, and from which step its rows
    are."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    rate: float
    first: int

    @property
    def settings(self) -> dict[str, Any]:
        return {"rank": self.rank, "alpha": self.alpha, "targets": list(self.targets)}


@dataclass(frozen=True)
class ExpectedUser:
    """What peft makes of a user's adapter that is trained alone, from the checkpoint `adapter`."""

    adapter: Path
    steps: list[dict[str, float]]
    logprobs: Tensors
    tensors: Tensors


def expect_user(model: Model, user: User, folder: Path, count: int) -> ExpectedUser:
    """Train an adapter of its own base for `count` steps, by nothing of ours."""
    torch.set_num_threads(1)
    peft = adapted(model, user.targets, rank=user.rank, alpha=user.alpha, seed=user.first)
    spec = AdapterSpec(
        rank=user.rank,
        alpha=user.alpha,
        targets=user.targets,
        base_digest=digest_base(model.directory),
    )
    adapter = write_checkpoint(folder, spec, tensors_of(peft))
    optim = OptimConfig(**{**OPTIM, "learning_rate": user.rate})  # type: ignore[arg-type]
    oracle = Oracle(peft, optim)  # type: ignore[arg-type]
    steps = []
    for step in range(user.first, user.first + count):
        loss = oracle.ppo_loss(rows_of(step))
        steps.append({"loss": loss.item(), "grad_norm": oracle.step(loss, NORMALIZER)})
    with torch.no_grad():
        logprobs = {row.sample_id: oracle.logprobs(row) for row in rows_of(0)}
    return ExpectedUser(adapter, steps, logprobs, tensors_of(peft))
