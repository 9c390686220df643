"""Rotary embedding by position ids: right for packs, for both context layouts, for all scalings.

Megatron's own rotary embedding counts positions from the row index, under context parallelism
by the zig-zag layout only. Its multimodal variant is the one that is handed the position ids;
this module stands in its place and ignores the sections.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

SUPPORTED = ("default", "linear", "llama3", "yarn")  # others change with the sequence length


class RotaryScalingError(ValueError):
    """The model scales its rotary embedding in a way that is not supported."""


class PositionRotary(torch.nn.Module):
    """Angles for given positions, with the inverse frequencies that transformers computes.

    `attention_scaling` multiplies cosine and sine in transformers. Megatron only takes angles,
    so it belongs, squared, into the softmax scale.
    """

    def __init__(self, hf_config: Any, device: torch.device) -> None:
        super().__init__()
        reference = LlamaRotaryEmbedding(hf_config)
        if reference.rope_type not in SUPPORTED:
            raise RotaryScalingError(
                f"rope_type {reference.rope_type!r} is not one of {', '.join(SUPPORTED)}"
            )
        self.attention_scaling = float(reference.attention_scaling)
        # Not a buffer: a cast of the model to bfloat16 must leave it alone.
        self.frequencies = reference.inv_freq.to(device=device, dtype=torch.float32)

    def forward(
        self, position_ids: torch.Tensor, mrope_section: object = None, cp_group: object = None
    ) -> torch.Tensor:
        """int64[batch, tokens] -> float32[tokens, batch, 1, head_dim], of this rank's tokens."""
        angles = position_ids[..., None].float() * self.frequencies
        return torch.cat((angles, angles), dim=-1).transpose(0, 1).unsqueeze(2)
