"""Multi-head latent attention (arXiv 2405.04434) over packs of sequences.

Megatron's own takes lengths instead of positions. Its local layers cut what leads into a latent
over tensor-parallel ranks: the gradient of the rotary key then lacks the other ranks' heads.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from services.trainer.backends.megatron.attention import PackAttention, PackRuns
from services.trainer.backends.megatron.upstream import current_device

NORM_EPSILON = 1e-6  # of a latent's norm, whatever the model's other norms have


class DuplicatedLinear(torch.nn.Module):
    """A linear layer that is whole on every tensor-parallel rank, over this rank's tokens.

    Under sequence parallelism its gradient is summed over those ranks; without it every rank would
    have all of it, so `transformer_config` refuses that layout.
    """

    def __init__(self, input_size: int, output_size: int, config: Any) -> None:
        super().__init__()
        shape, dtype = (output_size, input_size), config.params_dtype
        self.weight = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=current_device()))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.nn.functional.linear(hidden, self.weight), None


class LatentSelfAttention(MLASelfAttention):  # type: ignore[misc]
    """Megatron's latent attention of local layers, its down projections whole on every rank."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        width = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = DuplicatedLinear(config.hidden_size, width, config)
        self.kv_layernorm.eps = NORM_EPSILON
        if config.q_lora_rank is not None:
            width = config.q_lora_rank
            self.linear_q_down_proj = DuplicatedLinear(config.hidden_size, width, config)
            self.q_layernorm.eps = NORM_EPSILON


class LatentPackAttention(PackAttention):
    """Attention over a pack of queries and keys [tokens, heads, dim], values of another width."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None = None,
        /,
        *,
        packed_seq_params: PackRuns,
        **_: object,
    ) -> torch.Tensor:
        """Returns [tokens, 1, heads * value dim]."""
        return super().forward(
            query[:, None], key[:, None], value[:, None], packed_seq_params=packed_seq_params
        )


class LatentRotary(torch.nn.Module):
    """Angles of the rotated part, in place of Megatron's own rotary embedding.

    Latent attention asks it for a length first, handing over the pack, and with that for angles.
    """

    def __init__(self, rotary: torch.nn.Module) -> None:
        super().__init__()
        self._rotary = rotary

    def get_rotary_seq_len(
        self, context: object, decoder: object, hidden: object, config: object, pack: PackRuns
    ) -> torch.Tensor:
        """Returns the positions int64[1, tokens] of this rank's share of the pack."""
        assert pack.positions is not None
        return pack.positions

    def forward(self, positions: torch.Tensor, packed_seq: bool = False) -> torch.Tensor:
        """Returns float32[tokens, 1, dim]."""
        angles: torch.Tensor = self._rotary(positions)
        return angles[:, 0]
