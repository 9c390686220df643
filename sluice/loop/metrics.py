"""Metrics of the loop of a run, and the keys of the rows it leaves in metrics.jsonl."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from sluice.runtime.metrics import with_values

MINUTES = (0.1, 0.5, 1, 5, 10, 30, 60, 300, 600, 1800, 3600)
PHASES = ("rollout", "train", "publish")

STEP = Gauge("sluice_loop_step", "Steps of the run that are done.")
PLANNED_STEPS = Gauge("sluice_loop_planned_steps", "Steps after which the run ends at the latest.")
TRAINER_LOST = Counter(
    "sluice_loop_trainer_lost_total", "Times the trainer was lost and the run went back."
)
LOST_GROUPS = Counter(
    "sluice_loop_lost_version_groups_total",
    "Groups dropped and replaced, as weights that sampled them were lost before they were written.",
)
STEP_SECONDS = Histogram(
    "sluice_loop_step_duration_seconds", "Steps of the run, whole.", buckets=MINUTES
)
PHASE_SECONDS = with_values(
    Histogram(
        "sluice_loop_phase_duration_seconds",
        "Parts of a step: the wait for groups, training on them, publication.",
        ["kind"],
        buckets=MINUTES,
    ),
    PHASES,
)
TOKENS = Counter("sluice_loop_tokens_total", "Tokens that losses were of.")
REWARD = Gauge("sluice_loop_reward_mean", "Mean reward of the last step.")
LENGTH = Gauge("sluice_loop_response_length_tokens", "Mean response of the last step.")
STALENESS = Gauge(
    "sluice_loop_staleness_steps", "Steps to the farthest weights that sampled the last step."
)
TRACKER_FAILURES = with_values(
    Counter(
        "sluice_loop_tracker_failures_total", "What trackers of the run failed at.", ["tracker"]
    ),
    ("tensorboard", "wandb", "mlflow", "trackio", "otel"),
)
SCORE = Gauge("sluice_loop_score", "Last score on a data set of held-out tasks.", ["dataset"])

REWARD.set(math.nan)  # until a step tells: none of them is 0
LENGTH.set(math.nan)
STALENESS.set(math.nan)

# Keys of the rows of metrics.jsonl, which are those of trackers; <name> stands for a name of the
# run. The metrics of a user's own loss or advantage come on top, under the names they give.
ROW_KEYS = {
    "optimizer_step": "Optimizer steps of the trainer.",
    "weight_version": "Version of the weights after the step.",
    "reward_mean": "Mean reward of the episodes, each of which counts once.",
    "reward_mean_unfiltered": "The same before filters and surplus; absent where none finished.",
    "reward_mean/<environment>": "Mean reward of one environment of a mixture.",
    "response_length_mean": "Mean tokens of a response.",
    "response_length_mean/<environment>": "The same of one environment.",
    "groups/<environment>": "Groups of one environment.",
    "filtered_groups": "Groups that filters dropped for this step.",
    "surplus_groups": "Groups that over-sampling left over.",
    "dropped_groups": "Groups given up as their tasks failed; absent where there are none.",
    "silent_groups": "Groups whose advantages are all 0.",
    "advantage": "Mean advantage of trained tokens, before it is whitened.",
    "advantage_abs_mean": "Mean absolute advantage of trained tokens.",
    "loss": "Loss, with all its terms.",
    "policy_loss": "Its term of the policy, mean of the tokens whatever `aggregation` is.",
    "entropy": "Entropy of the policy, nats a token.",
    "negative_logprob": "Of supervised tokens, nats a token.",
    "preference_loss": "Of preferences sampled in the run: mean loss of a pair that differs.",
    "accuracy": "Of preferences: share of pairs whose chosen answer has the higher reward.",
    "reward_chosen": "Of preferences: mean implicit reward of the chosen answers, which is beta "
    "times their log-prob less the reference's; a reward model's own.",
    "reward_rejected": "The same of the rejected ones.",
    "reward_margin": "Their mean difference.",
    "logprob_chosen": "Of preferences: mean log-prob of a whole chosen answer, nats.",
    "logprob_rejected": "The same of the rejected ones.",
    "held_out_<metric>": "What the weights after the step make of held-out rows: loss, accuracy "
    "and so on.",
    "ratio": "Mean ratio to the old policy.",
    "clipped_low": "Share of tokens whose ratio the lower bound cut.",
    "clipped_high": "Share of tokens whose ratio the upper bound cut.",
    "clipped_dual": "Share of tokens that the second bound of dual clipping cut.",
    "clipped_covariance": "Share of tokens that clip_cov holds.",
    "penalised_covariance": "Share of tokens that kl_cov penalises.",
    "kl_old_k1": "KL to the old policy, estimator k1, nats a token.",
    "kl_old_k3": "KL to the old policy, estimator k3, nats a token.",
    "kl_reference": "KL to the reference model, nats a token.",
    "reference_step": "Step whose weights were that model; where it moves.",
    "kl_in_reward": "KL that was taken off rewards, times its coefficient, a token.",
    "kl_teacher": "KL to the teacher, or what divergence the loss is, nats a token.",
    "teacher_tail": "Mean probability of what the teacher did not name.",
    "rollout_mismatch": "Mean abs(trainer - engine) of log-probs of sampled tokens, nats.",
    "rollout_mismatch_k3": "KL from engine to trainer, estimator k3, nats a token.",
    "sampling_truncated": "Share of rows that were sampled from a part of the distribution.",
    "importance_weight": "Mean weight that corrects for the engines' policy.",
    "importance_dropped": "Share of tokens that its bounds dropped.",
    "opsm_dropped": "Share of tokens that off-policy sequence masking dropped.",
    "correction_<n>_dropped": "Share of tokens that a stage of corrections dropped.",
    "mtp_loss": "Cross-entropy of the layer of multi-token prediction, nats a guessed token.",
    "tokens": "Tokens that the loss was of, once in each epoch.",
    "grad_norm": "Gradient norm, unclipped; mean of the optimizer steps.",
    "expert_load_max": "Of a mixture: tokens of the busiest expert by the mean of its layer, of "
    "the worst layer; mean of the optimizer steps.",
    "expert_load_mean": "The same, mean of all layers.",
    "experts_unused": "Of a mixture: experts of all layers that no token of a step went to, mean "
    "of the optimizer steps.",
    "experts_aux_loss": "What the loss of even use comes to without its coefficient, mean of "
    "layers: 1 where use is even; mean of the optimizer steps.",
    "experts_z_loss": "The same of the loss of large logits.",
    "learning_rate": "Learning rate of the last optimizer step.",
    "memory_peak_gib": "Most memory that tensors of a rank held at once, of the fullest rank; on a "
    "CPU that its process ever had.",
    "critic_<metric>": "What the critic's loss and steps have: loss, clipped_value, return, "
    "grad_norm and so on.",
    "staleness_max": "Steps between the weights that were trained and the farthest that sampled a "
    "token: older ones, and once a run has gone back to a run checkpoint maybe newer ones.",
    "staleness_mean": "Mean of the groups' largest.",
    "skipped": "Optimizer steps that were skipped (in the file: why).",
    "engines": "Engines that serve the new weights.",
    "prepare_seconds": "Longest preparation of the weights by an engine.",
    "pause_seconds": "Longest pause of an engine for the new weights.",
    "rollout_seconds": "Wait for groups.",
    "train_seconds": "Training on them.",
    "publish_seconds": "Publication, and the engines' change where the run waits for it.",
    "step_seconds": "The whole step.",
    "epoch": "Of training on rows of a file: passes over it.",
    "rows": "Of training on rows of a file: those of the step.",
    "spool_seconds": "Of training on rows of a file: tokenising and storing them.",
    "eval/<data set>/score": "Mean reward on held-out tasks.",
    "eval/<data set>/score_std": "Standard deviation of the reward over all episodes.",
    "eval/<data set>/score_error": "Its standard error.",
    "eval/<data set>/pass@<k>": "Share of tasks that one of k samples solves.",
    "eval/<data set>/response_length_mean": "Mean tokens of a response.",
    "eval/<data set>/truncated_share": "Share of responses that the limit cut.",
    "eval/<data set>/groups": "Tasks that were scored.",
    "eval/<data set>/failed_groups": "Tasks that could not be.",
    "eval/<data set>/samples_per_group": "Samples of a task.",
    "eval/<data set>/seconds": "Wall time.",
    "eval/<data set>/weight_version": "Newest weights when it began.",
    "eval/<data set>/version_min": "Oldest weights that sampled.",
    "eval/<data set>/version_max": "Newest weights that sampled.",
}


def is_documented(key: str) -> bool:
    """Whether a key of a tracker is one of `ROW_KEYS`."""
    patterns = (re.sub(r"<[^>]+>", ".+", re.escape(known)) for known in ROW_KEYS)
    return any(re.fullmatch(pattern, key) for pattern in patterns)


def show_step(row: Mapping[str, Any]) -> None:
    """Show a row of a training step, as far as it tells; numbers that are none are left out."""
    STEP.set(row["step"])
    if (seconds := _number(row, "step_seconds")) is not None:
        STEP_SECONDS.observe(seconds)
    for phase in PHASES:
        if (seconds := _number(row, f"{phase}_seconds")) is not None:
            PHASE_SECONDS.labels(phase).observe(seconds)
    TOKENS.inc(_number(row, "tokens") or 0)
    for gauge, key in (
        (REWARD, "reward_mean"),
        (LENGTH, "response_length_mean"),
        (STALENESS, "staleness_max"),
    ):
        if (value := _number(row, key)) is not None:
            gauge.set(value)


def _number(row: Mapping[str, Any], key: str) -> float | None:
    value = row.get(key)
    return value if isinstance(value, int | float) and math.isfinite(value) else None
