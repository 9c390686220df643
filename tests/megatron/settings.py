"""What ranks and oracle agree on. Imports nothing of Megatron."""

from __future__ import annotations

from sluice.algo.spec import LossSpec

SPEC = LossSpec(
    name="ppo_clip",
    clip_low=0.2,
    temperature=0.8,
    kl_coefficient=0.1,
    entropy_coefficient=0.05,
)
OPTIM = {"learning_rate": 2e-3, "epsilon": 1e-5, "weight_decay": 0.1, "max_grad_norm": 0.5}
NORMALIZER = 37.0
STEPS = 5
NAMED = 6  # tokens that a teacher names at each place
TAUGHT = LossSpec(name="topk_jsd", settings={"top_count": NAMED}, temperature=0.8)
