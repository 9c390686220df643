"""Gated delta nets (arXiv 2412.06464) over packs of sequences: linear attention of Qwen3-Next.

Megatron's own refuses packs, wants kernels for one maker's devices, and without sequence
parallelism leaves the gradient of its norm to each tensor rank, which has seen its own heads only.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
)
from megatron.core.transformer import ModuleSpec
from torch.nn.functional import silu, softplus

from services.trainer.backends.megatron.attention import PackRuns
from services.trainer.backends.megatron.upstream import current_device
from sluice.algo.delta_rule import PackChunks, causal_convolution, gated_delta_rule
from sluice.fused_operations import rms_norm

WIDE = ("A_log", "out_norm.weight")  # of narrower models too: float32, as in checkpoints


class GatedNorm(torch.nn.Module):
    """Normalises a head's output, then gates it. The weight is kept less one, and is whole on every
    tensor rank; each sees other heads, so its gradient is summed over them.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.eps, self._kind = eps, config.operations["rms_norm"]
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size, device=current_device()))

    def forward(self, heads: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        weight = 1 + copy_to_tensor_model_parallel_region(self.weight)
        return rms_norm(self._kind, heads, weight, self.eps) * silu(gate.float())


class DeltaNet(GatedDeltaNet):  # type: ignore[misc]
    """A Megatron layer's `self_attention`; tensor ranks have whole key heads and their values'."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        narrow: torch.Tensor = self._parameters["A_log"]
        self.A_log = torch.nn.Parameter(narrow.float())  # see WIDE

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: None = None,
        *,
        packed_seq_params: PackRuns,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        """Map [tokens of this rank, 1, hidden] to the same; states begin anew with every row."""
        chunks = _chunks_of(packed_seq_params, hidden_states.device)
        keys, values = self.qk_dim // self.tp_size, self.v_dim // self.tp_size
        heads = self.num_v_heads_local_tp
        projected, _bias = self.in_proj(hidden_states)
        mixed, gate, strength, step = projected[:, 0].split(
            (2 * keys + values, values, heads, heads), dim=-1
        )
        mixed = silu(causal_convolution(mixed, self.conv1d.weight[:, 0], chunks.positions))
        query, key, value = mixed.split((keys, keys, values), dim=-1)
        query, key = (
            part.unflatten(-1, (-1, self.key_head_dim)).repeat_interleave(
                self.num_value_heads // self.num_key_heads, dim=1
            )
            for part in (query, key)
        )
        value, gate = (part.unflatten(-1, (-1, self.value_head_dim)) for part in (value, gate))
        decay = -self.A_log.float().exp() * softplus(step.float() + self.dt_bias.float())
        read = gated_delta_rule(query, key, value, decay, strength.sigmoid(), chunks)
        output = self.out_norm(read, gate).to(hidden_states.dtype)
        returned, _bias = self.out_proj(output.flatten(1)[:, None])
        return returned, None


def delta_net_spec() -> ModuleSpec:
    """What stands in place of a layer's attention."""
    return ModuleSpec(
        module=DeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=GatedNorm, out_proj=RowParallelLinear
        ),
    )


def _chunks_of(pack: PackRuns, device: torch.device) -> PackChunks:
    """All layers see the same pack, whose runs are its rows."""
    if pack.chunks is None:
        pack.chunks = PackChunks.lay_out([run.stop - run.start for run in pack.runs], device)
    return pack.chunks
