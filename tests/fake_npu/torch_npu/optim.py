"""`torch_npu.optim`."""

from __future__ import annotations

from typing import Any

import torch

from .watch import count


class NpuFusedAdamW(torch.optim.AdamW):
    def __init__(self, params: Any, **options: Any) -> None:
        count("kernel.NpuFusedAdamW")
        super().__init__(params, **options)
