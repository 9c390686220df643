"""What a step does to parameters whose gradient is zero."""

from __future__ import annotations

import pytest
import torch

from services.trainer.backends.replica import FlatOptimizer
from services.trainer.config import OptimConfig


def test_weights_decay_and_biases_do_not_though_those_of_experts_are_stacked() -> None:
    shapes = {
        "proj.weight": (3, 2),
        "conv.weight": (2, 1, 4),
        "experts.gate_up_proj": (2, 3, 4),
        "experts.gate_up_proj_bias": (2, 4),
        "proj.bias": (3,),
        "norm.weight": (3,),
    }
    parameters = {n: torch.nn.Parameter(torch.ones(shape)) for n, shape in shapes.items()}
    optim = OptimConfig(learning_rate=0.1, weight_decay=0.5)
    optimizer = FlatOptimizer(parameters, optim, adamw="torch_foreach")
    optimizer.step(1.0, 0.1, reduce=lambda gradients: None)
    left = {name: parameter.max().item() for name, parameter in parameters.items()}
    assert left == pytest.approx(
        {name: 0.95 if name in [*shapes][:3] else 1.0 for name in shapes}, rel=1e-6
    )
