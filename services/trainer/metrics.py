"""Metrics of the trainer."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

MINUTES = (0.1, 0.5, 1, 5, 10, 30, 60, 300, 600, 1800)

PASS_SECONDS = Histogram(
    "sluice_trainer_pass_duration_seconds", "Passes over a batch.", ["kind"], buckets=MINUTES
)
STEP_SECONDS = Histogram(
    "sluice_trainer_step_duration_seconds", "Optimizer steps.", buckets=MINUTES
)
PUBLISH_SECONDS = Histogram(
    "sluice_trainer_publish_duration_seconds", "Publications of weights.", buckets=MINUTES
)
CHECKPOINT_SECONDS = Histogram(
    "sluice_trainer_checkpoint_duration_seconds", "Checkpoints.", ["kind"], buckets=MINUTES
)
TOKENS = Counter("sluice_trainer_tokens_total", "Tokens trained on.")
STEPS = Counter("sluice_trainer_steps_total", "Optimizer steps by outcome.", ["outcome"])
SKIPS_IN_A_ROW = Gauge("sluice_trainer_consecutive_skipped_steps", "Skipped steps in a row.")
STEP = Gauge("sluice_trainer_step_number", "Optimizer steps taken.")
WEIGHT_VERSION = Gauge("sluice_trainer_weight_version", "Latest published version.")
GRAD_NORM = Gauge("sluice_trainer_gradient_norm", "Gradient norm of the last step, unclipped.")
LEARNING_RATE = Gauge("sluice_trainer_learning_rate", "Learning rate of the last step.")
LOSS = Gauge("sluice_trainer_loss", "Mean loss of the last pass.")
MISMATCH = Gauge(
    "sluice_trainer_rollout_mismatch_logprob",
    "Mean |trainer - engine| log-prob of sampled tokens, last pass that saw both.",
)
BATCHES = Gauge("sluice_trainer_batches_held", "Batches held.")
RESTARTS = Counter("sluice_trainer_rank_restarts_total", "Restarts of the ranks.")
