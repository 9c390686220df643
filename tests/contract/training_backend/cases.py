"""Tiny models, ragged rows, and what plain transformers and autograd say about them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4Config,
    Glm4ForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from services.trainer.backend import MicroBatch, Row, TrainingBackend
from services.trainer.config import OptimConfig
from sluice.algo.spec import LossSpec

StartBackend = Callable[..., TrainingBackend]

VOCABULARY = 53
NAMED = 5  # tokens that a teacher names at each place
PAD = 7  # drawn like any other token: it is trained like any other
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": PAD,
    "initializer_range": 0.2,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
INDEXED = {  # with so many heads no key has a score of 0, as others have
    "index_topk": 6,
    "index_n_heads": 24,
    "index_head_dim": 16,
    "indexer_types": ["full", "shared"],
}
OPTIM = OptimConfig(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.5)
PPO = LossSpec(name="ppo_clip", clip_low=0.2)
TAUGHT = LossSpec(name="topk_forward_kl", settings={"top_count": NAMED})


@dataclass(frozen=True)
class Model:
    """A tiny random checkpoint of one family."""

    directory: Path
    config: Any = None  # of transformers, where it does not know the directory's own type

    @property
    def attention(self) -> str | None:
        """transformers' own leaves out that scores are capped, but for this one."""
        config = json.loads((self.directory / "config.json").read_text())
        return "eager" if config.get("attn_logit_softcapping") else None

    def load(self) -> PreTrainedModel:
        model: Any = AutoModelForCausalLM.from_pretrained(
            self.directory,
            config=self.config,
            dtype=torch.float32,
            attn_implementation=self.attention,
            experts_implementation="eager",  # the other one knows no float64
        )
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding):
                module.padding_idx = None
        return model.eval()


def build_model(directory: Path, family: str, seed: int = 0, **settings: Any) -> Model:
    sizes = {**SIZES, **settings}
    torch.manual_seed(seed)
    if family == "qwen3":
        module: Any = Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=False))
    elif family == "llama":
        module = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))
    elif family == "glm4":
        module = Glm4ForCausalLM(Glm4Config(**sizes, attention_bias=True))
    elif family == "deepseek_v3":
        module = DeepseekV3ForCausalLM(DeepseekV3Config(**{**sizes, **LATENT}))
        for name, buffer in module.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.03)
    elif family == "glm_moe_dsa":
        module = GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**{**sizes, **LATENT, **INDEXED}))
    else:
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        module = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**experts, **sizes}))
    with torch.no_grad():  # transformers starts the padding token at zero
        module.get_input_embeddings().weight[PAD].normal_(std=0.2)
    module.save_pretrained(directory)
    return Model(directory)


def make_row(
    sample_id: str, prompt: Sequence[int], response: Sequence[int], *, seed: int, **fields: Any
) -> Row:
    """A row with random signals; the third response token is masked out."""
    generator = torch.Generator().manual_seed(seed)
    length = len(response)
    teacher = torch.Generator().manual_seed(seed + 1)
    named = torch.rand(length, VOCABULARY, generator=teacher).argsort(1)[:, :NAMED]
    taught = torch.randn(length, NAMED + 1, generator=teacher).log_softmax(1)[:, :NAMED]
    mask = torch.ones(length, dtype=torch.bool)
    if length > 2:
        mask[2] = False
    return Row(
        sample_id=sample_id,
        group_id=sample_id.split("/")[0],
        token_ids=torch.tensor([*prompt, *response]),
        prompt_length=len(prompt),
        loss_mask=mask,
        columns={
            "rollout_logprobs": torch.randn(length, generator=generator) * 0.3 - 3.5,
            "advantages": torch.randn(length, generator=generator),
            "reference_logprobs": torch.randn(length, generator=generator) * 0.3 - 3.5,
            f"teacher_top_ids/{NAMED}": named.int(),
            f"teacher_top_logprobs/{NAMED}": taught,
        },
        **fields,
    )


def ragged_rows() -> list[Row]:
    """Groups of several sizes and prompt lengths, long and one-token responses, a lone sample,
    two groups with one prompt and a group whose samples have two prompts."""
    generator = torch.Generator().manual_seed(7)

    def draw(count: int) -> list[int]:
        return torch.randint(VOCABULARY, (count,), generator=generator).tolist()

    shared = draw(5)
    prompts = {"a": draw(3), "b": draw(11), "c": shared, "d": shared, "lone": draw(1)}
    sizes = {"a": (4, 1, 7), "b": (2, 2, 9, 40), "c": (5, 6), "d": (5,), "lone": (3,)}
    rows = [
        make_row(f"{group}/{index}", prompts[group], draw(length), seed=len(group) + 10 * index)
        for group, lengths in sizes.items()
        for index, length in enumerate(lengths)
    ]
    rows.append(make_row("a/other-prompt", draw(6), draw(4), seed=99))
    # 70 tokens: more than share one attention call, and longer than all the others
    rows.append(make_row("b/long", prompts["b"], draw(70), seed=98))
    return [row._replace(loss_weight=1.0 + 0.1 * i) for i, row in enumerate(rows)]


@dataclass
class Oracle:
    """The same numbers from one sample at a time, prompt included, in plain transformers."""

    model: PreTrainedModel
    optim: OptimConfig = OPTIM
    adam: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        named = dict(self.model.named_parameters())
        decaying = {n for n, p in named.items() if p.ndim > 1 and not n.endswith(".A_log")}
        self.adam = torch.optim.AdamW(
            [
                {"params": [p for name, p in named.items() if name in decaying]},
                {
                    "params": [p for name, p in named.items() if name not in decaying],
                    "weight_decay": 0.0,
                },
            ],
            lr=self.optim.learning_rate,
            betas=self.optim.betas,
            eps=self.optim.epsilon,
            weight_decay=self.optim.weight_decay,
        )

    def logprobs(self, row: Row, temperature: float = 1.0) -> torch.Tensor:
        table_TV = self.table(row, temperature)
        return table_TV.gather(1, row.token_ids[row.prompt_length :, None])[:, 0]

    def entropy(self, row: Row) -> torch.Tensor:
        table_TV = self.table(row, 1.0)
        return -(table_TV.exp() * table_TV).sum(-1)

    def ppo_loss(
        self, rows: Sequence[Row], found: Mapping[str, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """sum_i w_i sum_t -min(r A, clip(r, 0.8, 1.2) A) over trained tokens.

        `found` has the log-probs of rows by their ids, where they are there already.
        """
        total = torch.zeros(())
        for row in rows:
            logprobs = self.logprobs(row) if found is None else found[row.sample_id]
            ratio = (logprobs - row.columns["rollout_logprobs"]).exp()
            advantages = row.columns["advantages"]
            loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            total = total + row.loss_weight * loss[row.loss_mask].sum()
        return total

    def named_logprobs(self, row: Row) -> torch.Tensor:
        """[response, NAMED]: of the tokens that the teacher named."""
        return self.table(row, 1.0).gather(1, row.columns[f"teacher_top_ids/{NAMED}"].long())

    def step(self, loss: torch.Tensor, normalizer: float) -> float:
        """Apply the gradients of loss / normalizer; returns their norm before clipping."""
        self.adam.zero_grad()
        (loss / normalizer).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.optim.max_grad_norm)
        self.adam.step()
        return float(norm)

    def table(self, row: Row, temperature: float) -> torch.Tensor:
        """Log-probs of the whole vocabulary at each response token, [response, V]."""
        logits_TV = self.model(row.token_ids[None]).logits[0, row.prompt_length - 1 : -1]
        return (logits_TV / temperature).log_softmax(-1)


def published(backend: TrainingBackend, directory: Path) -> dict[str, torch.Tensor]:
    """Tensors by name as `write_shards` leaves them."""
    from safetensors.torch import load_file

    directory.mkdir()
    found: dict[str, torch.Tensor] = {}
    for shard in backend.write_shards(directory):
        found.update(load_file(directory / shard.file_name))
    return found


def relative_distance(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left - right).norm() / right.norm())


def divergence_from_teacher(oracle: Oracle, rows: list[Row]) -> torch.Tensor:
    """KL(teacher || student) of the tokens that it named and of all others together."""
    total = torch.zeros(())
    for row in rows:
        teacher = row.columns[f"teacher_top_logprobs/{NAMED}"].exp()
        student = oracle.named_logprobs(row).exp()
        kl = (teacher * (teacher / student).log()).sum(1)
        rest, students = 1 - teacher.sum(1), 1 - student.sum(1)
        kl = kl + rest * (rest / students).log()
        total = total + row.loss_weight * kl[row.loss_mask].sum()
    return total


def check_kept(
    backend: TrainingBackend,
    batches: Sequence[MicroBatch],
    loss: LossSpec,
    scored: Mapping[str, torch.Tensor],
) -> None:
    """Gathers gradients in two calls, whose outputs are to be `scored`."""
    kept: dict[str, torch.Tensor] = {}
    for part in (batches[:1], batches[1:]):
        kept |= backend.forward_backward(part, loss, keep_outputs=True).outputs
    assert kept.keys() == scored.keys()
    for sample_id, logprobs in scored.items():
        torch.testing.assert_close(kept[sample_id], logprobs, atol=5e-6, rtol=0)
