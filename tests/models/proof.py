"""What a family showed, for the summary line and the table of docs/models.md."""

from __future__ import annotations

import json
import shutil
from collections.abc import Container, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from services.trainer.backends.families import REFUSED
from tests.contract.training_backend.cases import Model, Oracle
from tests.fsdp.jobs import rows_of
from tests.fsdp.oracle import (
    Expected,
    Tensors,
    gradient_difference,
    logprob_difference,
    read_ranks,
)
from tests.models.families import CASES, Case
from tests.rank_pool import Pool
from tools.models_table import megatron_families

MAX_LOGPROB_DIFF, MAX_GRADIENT_DIFF = 5e-6, 5e-5
RESULTS = Path("build/models.json")  # of the last runs, for `make models-table`
# The engine's and the trainer's log-probs round in other orders, and large steps make more of it:
# up to 1.5e-5 was seen, by machine. An engine that is one step behind is a hundred times this off.
MAX_MISMATCH = 5e-5
# which tests/vision builds and proves
SEEING = (
    Case("qwen3_vl", "Qwen3-VL"),
    Case("qwen3_vl_moe", "Qwen3-VL-MoE"),
    Case("qwen2_5_vl", "Qwen2.5-VL"),
    Case("qwen3_5", "Qwen3.5"),
    Case("qwen3_5_moe", "Qwen3.5-MoE"),
)


@dataclass(frozen=True)
class Proof:
    """Largest differences of a case on some ranks.

    logprob; gradient: by each tensor's largest element; norm: relative, over the steps; reloaded:
    of log-probs when transformers loads what was published. rounding: of log-probs of plain
    transformers to those in float64, which depends on the model and on the machine's products.
    layout: in short, of Megatron's.
    """

    case: str
    ranks: int
    logprob: float
    gradient: float
    norm: float
    reloaded: float
    rounding: float = 0.0
    layout: str = ""

    @property
    def logprob_limit(self) -> float:
        """Returns how far apart two may be that each round in an order of their own.

        What is broken is a hundred times this off.
        """
        return max(MAX_LOGPROB_DIFF, 5 * self.rounding)

    @property
    def holds(self) -> bool:
        return (
            max(self.logprob, self.reloaded) <= self.logprob_limit
            and self.gradient <= MAX_GRADIENT_DIFF
            and self.norm <= 1e-3
        )


@dataclass
class Summary:
    """The line that a whole run ends with.

    mismatches: the largest difference of log-probs between engine and trainer, by case, over
    three steps of GRPO. A family counts where it trains and rolls out.
    """

    proofs: list[Proof] = field(default_factory=list)
    mismatches: dict[str, float] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)  # how it is packed and served
    megatron: list[Proof] = field(default_factory=list)  # of layouts, beside tests/megatron
    megatron_mismatches: dict[str, float] = field(default_factory=dict)

    def line(self) -> str:
        types = {case.name: case.model_type for case in (*CASES, *SEEING)}
        rolled = {types[c] for c, gap in self.mismatches.items() if gap <= MAX_MISMATCH}
        families = rolled & {types[proof.case] for proof in self.proofs if proof.holds}
        logprobs = [max(p.logprob, p.reloaded) for p in self.proofs]
        logprob = max([*logprobs, *(p.logprob for p in self.megatron)], default=0.0)
        gradient = max((p.gradient for p in (*self.proofs, *self.megatron)), default=0.0)
        return (
            f"models: fsdp_families={len(families)} megatron_families={len(megatron_families())} "
            f"max_logprob_diff={logprob:.1e} max_grad_rel={gradient:.1e} "
            f"refused_by_name={len(REFUSED)}"
        )

    def write(self, path: Path) -> None:
        """Add what this run showed of each case to what is there, for tools/models_table.py."""
        path.parent.mkdir(exist_ok=True)
        found: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else {}
        day = datetime.now(UTC).date().isoformat()
        for case in (*CASES, *SEEING):
            facts = found.setdefault(case.name, {})
            facts |= {"title": case.title, "model_type": case.model_type}
            if proofs := [asdict(proof) for proof in self.proofs if proof.case == case.name]:
                facts |= {"proofs": proofs, "day": day}
            facts |= self.facts.get(case.name, {})
            if case.name in self.mismatches:
                facts["mismatch"] = self.mismatches[case.name]
            if proofs := [asdict(proof) for proof in self.megatron if proof.case == case.name]:
                facts |= {"megatron": proofs, "megatron_day": day}
            if case.name in self.megatron_mismatches:
                facts["megatron_mismatch"] = self.megatron_mismatches[case.name]
        path.write_text(json.dumps(found, indent=1))


def short_name(world: int, layout: Mapping[str, Any]) -> str:
    """A layout of Megatron's in short, such as `TP2+SPxPP2`."""
    sizes = {"tensor": "TP", "context": "CP", "pipeline": "PP", "expert": "EP"}
    parts = {key: f"{name}{layout[key]}" for key, name in sizes.items() if key in layout}
    if "tensor" in parts and layout.get("sequence_parallel"):
        parts["tensor"] += "+SP"
    return "x".join(parts.values()) or ("1" if world == 1 else f"DP{world}")


def on_ranks(
    cases: Iterable[Case], *, four: Container[str] = (), fast: Container[str] = ()
) -> list[ParameterSet]:
    """Every case on two ranks, those of `four` on four as well. The fast part are those of `fast`
    on two."""
    return [
        pytest.param(
            case,
            world,
            id=case.name if world == 2 else f"{case.name}-{world}",
            marks=pytest.mark.fast if world == 2 and case.name in fast else (),
        )
        for case in cases
        for world in ((2, 4) if case.name in four else (2,))
    ]


def prove(
    pool: Pool,
    case: Case,
    model: Model,
    expected: Expected,
    out: Path,
    world: int,
    **arguments: Any,
) -> Proof:
    """Run the job on ranks and compare it with plain transformers."""
    (out / "published").mkdir(parents=True)
    steps = len(expected.steps)
    answers = pool.run(
        "prove", world, model=str(model.directory), out=str(out), steps=steps, **arguments
    )
    pairs = zip(answers[0]["steps"], expected.steps, strict=True)
    return Proof(
        case=case.name,
        ranks=world,
        logprob=logprob_difference(read_ranks(out, "logprobs"), expected.logprobs),
        gradient=gradient_difference(read_ranks(out, "gradients"), expected.gradients),
        norm=max(abs(a["grad_norm"] - b["grad_norm"]) / b["grad_norm"] for a, b in pairs),
        reloaded=_reload(model, out),
        rounding=expected.rounding,
    )


def _reload(model: Model, out: Path) -> float:
    """How far log-probs of the published files in transformers are from the backend's own."""
    published = out / "published"
    stored = _tensors(published)
    assert stored.keys() == _tensors(model.directory).keys()
    shutil.copy(model.directory / "config.json", published)
    if not (published / "model.safetensors").exists():
        index = {n: f.name for f in published.glob("*.safetensors") for n in load_file(f)}
        text = json.dumps({"metadata": {}, "weight_map": index})
        (published / "model.safetensors.index.json").write_text(text)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        published, config=model.config, dtype=torch.float32, attn_implementation=model.attention
    )
    oracle = Oracle(loaded.eval())
    rows = rows_of(0)
    expected = {row.sample_id: oracle.logprobs(row).detach() for row in rows}
    return logprob_difference(read_ranks(out, "trained"), expected)


def _tensors(directory: Path) -> Tensors:
    return {n: t for f in directory.glob("*.safetensors") for n, t in load_file(f).items()}
