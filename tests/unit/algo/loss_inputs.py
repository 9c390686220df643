"""A micro-batch of four samples with every column a loss may read; float64."""

import torch

from sluice.algo.losses import LossInputs

LENGTHS = (5, 1, 7, 3)  # the last sample is fully masked
COLUMNS = (
    "old_logprobs",
    "rollout_logprobs",
    "reference_logprobs",
    "advantages",
    "returns",
    "values",
)


def make_inputs(seed=0, *, uniform_advantages=False):
    generator = torch.Generator().manual_seed(seed)
    total = sum(LENGTHS)

    def normal(scale):
        return scale * torch.randn(total, generator=generator, dtype=torch.float64)

    index = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    logprobs = -2 + normal(0.4)
    columns = {name: logprobs + normal(0.4) for name in COLUMNS}
    columns["advantages"] = normal(1.0)
    if uniform_advantages:
        columns["advantages"] = torch.tensor([1.3, -0.7, -1.1, 0.4], dtype=torch.float64)[index]
    mask = torch.rand(total, generator=generator) > 0.3
    mask[:5] = torch.tensor([True, True, False, True, True])
    mask[5] = True
    mask[-3:] = False
    return LossInputs(
        outputs=logprobs.requires_grad_(),
        mask=mask,
        sample_index=index,
        sample_weights=torch.tensor([0.5, 1.0, 0.25, 2.0], dtype=torch.float64),
        columns=columns,
        entropy=normal(1.0).abs().requires_grad_(),
    )
