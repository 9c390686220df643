"""RMSNorm that Megatron's own layers lack: the stock one refuses sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch

from services.trainer.backends.megatron.device import current_device


class RMSNorm(torch.nn.Module):
    """Normalises in float32 and multiplies by the weight in the input's dtype, as HF models do.

    Under sequence parallelism each rank sees part of the tokens, so the weight is marked for
    Megatron to sum its gradient over tensor-parallel ranks.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        ones = torch.ones(hidden_size, dtype=config.params_dtype, device=current_device())
        self.weight = torch.nn.Parameter(ones)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = torch.nn.functional.rms_norm(hidden.float(), hidden.shape[-1:], None, self.eps)
        return normed.to(hidden.dtype) * self.weight
