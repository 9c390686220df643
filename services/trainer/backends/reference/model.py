"""Attention over a packed micro-batch, plugged into transformers models by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
)
from transformers.utils.logging import (
    disable_progress_bar,
    get_verbosity,
    set_verbosity,
    set_verbosity_error,
)

from services.trainer.backend import MicroBatch
from services.trainer.backends.reference.layout import PackedLayout, PromptBucket, pack
from services.trainer.config import Head
from sluice.algo.linear_logprobs import linear_logprobs
from sluice.algo.logprobs import EntropyMode, token_logprobs

IMPLEMENTATION = "sluice_shared_prompt"


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed_layout: PackedLayout,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, heads, T, D], key and value [1, kv_heads, T, D] -> [1, T, heads, D].

    A window is honoured by refusing it where it would matter.
    """
    del attention_mask  # the layout knows
    if sliding_window is not None and packed_layout.longest > sliding_window:
        raise NotImplementedError(f"a window of {sliding_window} tokens over longer rows")
    outputs = [
        _attend_bucket(query[0], key[0], value[0], bucket, scaling)
        for bucket in packed_layout.buckets
    ]
    return torch.cat(outputs)[None], None


def _attend_bucket(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bucket: PromptBucket,
    scaling: float | None,
) -> torch.Tensor:
    """The bucket's share of the pack, [tokens, heads, D]."""

    def gather(heads: torch.Tensor, index: torch.Tensor, length: int) -> torch.Tensor:
        picked = heads.index_select(1, index)
        return picked.view(len(heads), bucket.count, length, -1).transpose(0, 1)

    out = scaled_dot_product_attention(
        gather(query, bucket.queries, bucket.query_length),
        gather(key, bucket.keys, bucket.key_length),
        gather(value, bucket.keys, bucket.key_length),
        attn_mask=bucket.mask,
        is_causal=bucket.mask is None,
        scale=scaling,
        enable_gqa=len(query) != len(key),
    )
    flat = out.transpose(1, 2).flatten(0, 1)
    return flat if bucket.kept is None else flat.index_select(0, bucket.kept)


AttentionInterface.register(IMPLEMENTATION, attend)


# Their attention is the plain one, of queries, keys, values and a scale.
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
MAX_LOGITS = 1 << 26  # entries held at once; larger passes make them in chunks, twice


@dataclass(frozen=True)
class ScoredModel:
    """A transformers model on a device."""

    model: Any  # transformers.PreTrainedModel, whose types mypy does not see
    device: torch.device

    @classmethod
    def load(cls, path: str, device: torch.device, head: Head = "policy") -> ScoredModel:
        """A HF checkpoint directory in float32. Raises OSError or ValueError for another thing.

        head value: transformers' token classifier of one label; its `score` starts at zero
        where the directory, a language model's, has none, so that every rank starts alike.
        """
        family = AutoConfig.from_pretrained(path, local_files_only=True).model_type
        if family not in FAMILIES:
            raise ValueError(f"model_type {family} is unknown here; known: {', '.join(FAMILIES)}")
        disable_progress_bar()
        options: dict[str, Any] = {
            "dtype": torch.float32,
            "attn_implementation": IMPLEMENTATION,
            "local_files_only": True,
        }
        if head == "policy":
            model = AutoModelForCausalLM.from_pretrained(path, **options)
        else:
            with errors_only():  # a new head and an unused one are what is asked for
                model, loading = AutoModelForTokenClassification.from_pretrained(
                    path, num_labels=1, output_loading_info=True, **options
                )
            if "score.weight" in loading["missing_keys"]:
                for parameter in model.score.parameters():
                    torch.nn.init.zeros_(parameter)
        # transformers gives this token's embedding no gradient; here nothing is padded, so it is
        # part of a sample, or even the token that ends one
        model.get_input_embeddings().padding_idx = None
        return cls(model.to(device).eval(), device)

    def value(self, rows: MicroBatch) -> torch.Tensor:
        """Values in front of all response tokens, float32[R], rows in order."""
        layout = pack(rows).to(self.device)
        hidden_TH = self.model.base_model(**_inputs(layout)).last_hidden_state[0]
        picked_RH = hidden_TH.index_select(0, layout.predictors).float()
        with torch.autocast(self.device.type, enabled=False):
            values_R1: torch.Tensor = self.model.score(picked_RH)
        return values_R1[:, 0]

    def score(
        self, rows: MicroBatch, *, temperature: float, entropy: EntropyMode
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probs, entropy) of all response tokens, float32[R], rows in order."""
        layout = pack(rows).to(self.device)
        inputs = _inputs(layout)
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


def _inputs(layout: PackedLayout) -> dict[str, Any]:
    return {
        "input_ids": layout.token_ids[None],
        "position_ids": layout.position_ids[None],
        "use_cache": False,
        "packed_layout": layout,
    }


@contextmanager
def errors_only() -> Iterator[None]:
    """transformers says nothing below errors meanwhile."""
    before = get_verbosity()
    set_verbosity_error()
    try:
        yield
    finally:
        set_verbosity(before)
