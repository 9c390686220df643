"""What losses report beside their value: means over trained tokens, by their own definition."""

import pytest
import torch

from sluice.algo.losses import compute_loss
from sluice.algo.spec import LossSpec
from tests.unit.algo.loss_inputs import make_inputs


def read(settings, seed=0):
    """(inputs, means of the metrics, the trained tokens of a column or of the outputs)."""
    inputs = make_inputs(seed)
    metrics = compute_loss(inputs, LossSpec(**settings)).metrics
    means = {name: (total / weight).item() for name, (total, weight) in metrics.items()}

    def trained(name):
        values = inputs.outputs.detach() if name == "outputs" else inputs.columns[name]
        return values[inputs.mask]

    return inputs, means, trained


def share(condition):
    return condition.double().mean().item()


@pytest.mark.parametrize("seed", [0, 1])
def test_shares_of_clipped_tokens(seed):
    cispo = {"name": "cispo", "clip_low": 0.3, "clip_high": 0.2}
    _, means, trained = read(cispo, seed)
    ratio = (trained("outputs") - trained("rollout_logprobs")).exp()
    advantages = trained("advantages")
    assert means["clipped_low"] == pytest.approx(share(ratio < 0.7))
    assert means["clipped_high"] == pytest.approx(share(ratio > 1.2))
    assert 0 < means["clipped_low"] < 1
    assert 0 < means["clipped_high"] < 1
    _, means, _ = read({"name": "ppo_clip", "clip_low": 0.2, "dual_clip": 1.3}, seed)
    beyond = (advantages < 0) & (torch.maximum(ratio, torch.tensor(0.8)) > 1.3)
    assert means["clipped_dual"] == pytest.approx(share(beyond))
    assert means["clipped_low"] == pytest.approx(share((ratio < 0.8) & (advantages < 0)))
    assert means["clipped_high"] == pytest.approx(share((ratio > 1.2) & (advantages > 0)))


@pytest.mark.parametrize("name", ["ppo", "gmpo", "dppo"])
def test_shares_of_tokens_without_a_gradient_of_their_own(name):
    bounds = {
        "ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
        "gmpo": {"log_clip_low": 0.2, "log_clip_high": 0.1},
        "dppo": {"low": 0.02, "high": 0.03},
    }[name]
    _, means, trained = read({"name": name, "settings": bounds})
    now, old, gain = trained("outputs"), trained("rollout_logprobs"), trained("advantages")
    low, high = bounds.values()
    apart = {"ppo": (now - old).exp(), "gmpo": now - old, "dppo": now.exp() - old.exp()}[name]
    fell, rose = (apart < (low if name == "ppo" else -low)), apart > high
    wanted = [share(fell & (gain < 0)), share(rose & (gain > 0))]
    assert [means["clipped_low"], means["clipped_high"]] == pytest.approx(wanted)
    assert 0 < min(wanted) < share(fell), "or the sign would not count"


def test_opsm_tells_what_it_dropped():
    settings = {"name": "ppo_clip", "clip_low": 0.2, "opsm_delta": 0.05}
    inputs, means, trained = read(settings)
    drift = inputs.columns["rollout_logprobs"] - inputs.outputs.detach()
    far = torch.stack([drift[(inputs.sample_index == i) & inputs.mask].mean() for i in range(4)])
    dropped = (far[inputs.sample_index] > 0.05)[inputs.mask] & (trained("advantages") < 0)
    assert means["opsm_dropped"] == pytest.approx(share(dropped))
    assert 0 < means["opsm_dropped"] < 1
    assert not [name for name in means if name.startswith(("importance_", "correction_"))]


def test_each_of_two_stages_tells_what_it_dropped():
    bounds = [{"low": 0.7, "high": 9.0}, {"low": 0.0, "high": 1.1}]
    stages = [{"name": "weight", "settings": {"mode": "mask", **each}} for each in bounds]
    settings = {"name": "importance_sampling", "old_logprobs": "old"}
    _, means, trained = read({**settings, "corrections": stages})
    weight = (trained("old_logprobs") - trained("rollout_logprobs")).exp()
    few, many = weight < 0.7, weight > 1.1
    found = [means[f"{name}_dropped"] for name in ("correction_0", "correction_1", "importance")]
    assert found == pytest.approx([share(few), share(many), share(few | many)])
    assert 0 < found[0] < found[2] > found[1] > 0


def test_kl_is_reported_without_its_coefficient_and_the_policy_loss_without_the_kl():
    base = {"name": "ppo_clip", "clip_low": 0.2}
    _, plain, trained = read(base)
    _, means, _ = read({**base, "kl_coefficient": 0.1, "kl_unbiased": True})
    gap = trained("outputs") - trained("reference_logprobs")
    assert means["kl_reference"] == pytest.approx(((-gap).exp() - 1 + gap).mean().item())
    ratio = (trained("outputs") - trained("rollout_logprobs")).exp()
    advantages = trained("advantages")
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    assert means["policy_loss"] == plain["policy_loss"] == pytest.approx(loss.mean().item())


def test_sft_and_value_report_what_they_fit():
    _, means, trained = read({"name": "sft"})
    assert means["negative_logprob"] == pytest.approx(-trained("outputs").mean().item())
    _, means, trained = read({"name": "value", "value_clip": 0.1})
    values, returns, old = trained("outputs"), trained("returns"), trained("values")
    assert means["value"] == pytest.approx(values.mean().item())
    assert means["return"] == pytest.approx(returns.mean().item())
    plain = 0.5 * (values - returns).square()
    clipped = 0.5 * (old + (values - old).clamp(-0.1, 0.1) - returns).square()
    assert means["value_loss"] == pytest.approx(torch.maximum(plain, clipped).mean().item())
    assert means["clipped_value"] == pytest.approx(share(clipped > plain))
    assert 0 < means["clipped_value"] < 1
