"""A causal language model that scores packed micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from services.trainer.backend import MicroBatch
from services.trainer.backends.reference.attention import IMPLEMENTATION
from services.trainer.backends.reference.layout import pack
from sluice.algo.linear_logprobs import linear_logprobs
from sluice.algo.logprobs import EntropyMode, token_logprobs

# Their attention is the plain one, of queries, keys, values and a scale.
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
MAX_LOGITS = 1 << 26  # entries held at once; larger passes make them in chunks, twice


@dataclass(frozen=True)
class ScoredModel:
    """A transformers model on a device."""

    model: Any  # transformers.PreTrainedModel, whose types mypy does not see
    device: torch.device

    @classmethod
    def load(cls, path: str, device: torch.device) -> ScoredModel:
        """A HF checkpoint directory in float32. Raises OSError or ValueError for another thing."""
        family = AutoConfig.from_pretrained(path, local_files_only=True).model_type
        if family not in FAMILIES:
            raise ValueError(f"model_type {family} is unknown here; known: {', '.join(FAMILIES)}")
        disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation=IMPLEMENTATION, local_files_only=True
        )
        return cls(model.to(device).eval(), device)

    def score(
        self, rows: MicroBatch, *, temperature: float, entropy: EntropyMode
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probs, entropy) of all response tokens, float32[R], rows in order."""
        layout = pack(rows).to(self.device)
        inputs = {
            "input_ids": layout.token_ids[None],
            "position_ids": layout.position_ids[None],
            "use_cache": False,
            "packed_layout": layout,
        }
        if len(layout.targets) * self.model.config.vocab_size > MAX_LOGITS:
            hidden_TH = self.model.base_model(**inputs).last_hidden_state[0]
            weight_VH = self.model.get_output_embeddings().weight
            picked_RH = hidden_TH.index_select(0, layout.predictors)
            return linear_logprobs(
                picked_RH,
                weight_VH.to(picked_RH.dtype),
                layout.targets,
                temperature=temperature,
                entropy=entropy,
            )
        logits_RV = self.model(**inputs, logits_to_keep=layout.predictors).logits[0]
        return token_logprobs(
            logits_RV,
            layout.targets,
            temperature=temperature,
            entropy=entropy,
            reuse_logits=True,
        )
