"""Metrics of the trainer."""

from __future__ import annotations

import math

from prometheus_client import Counter, Gauge, Histogram

from sluice.runtime.metrics import with_values

MINUTES = (0.1, 0.5, 1, 5, 10, 30, 60, 300, 600, 1800)
LAGS = (0, 1, 2, 4, 8, 16, 32)

PASSES = ("logprobs", "values", "advantages", "forward_backward")
PASS_SECONDS = with_values(
    Histogram(
        "sluice_trainer_pass_duration_seconds", "Passes over a batch.", ["kind"], buckets=MINUTES
    ),
    PASSES,
)
SLEEP_SECONDS = with_values(
    Histogram(
        "sluice_trainer_sleep_duration_seconds",
        "Falling asleep and waking: state off the devices and back.",
        ["kind"],
        buckets=MINUTES,
    ),
    ("sleep", "wake"),
)
ASLEEP = Gauge("sluice_trainer_asleep", "Whether the trainer sleeps.")
FREED_BYTES = Gauge("sluice_trainer_freed_bytes", "Of devices, when the trainer last fell asleep.")
OPERATIONS = Gauge(
    "sluice_trainer_operation_info",
    "Ranks that run an implementation of an operation (sluice/operations.py).",
    ["operation", "implementation"],
)
OUT_OF_MEMORY = Counter(
    "sluice_trainer_out_of_memory_total", "Passes and steps that ranks had no memory for."
)
MICRO_BATCH_TOKENS = Gauge(
    "sluice_trainer_micro_batch_tokens",
    "What a micro-batch of a context-parallel rank may hold: max_tokens_per_micro_batch, or less "
    "where there was no memory for it.",
)
MEMORY_PEAK = Gauge(
    "sluice_trainer_memory_peak_bytes",
    "Most that tensors of a rank held in a step, of the rank that was fullest; on a CPU of the "
    "process, ever.",
)
MEMORY_TOTAL = Gauge("sluice_trainer_memory_size_bytes", "Memory of that rank's device.")
STEP_SECONDS = Histogram(
    "sluice_trainer_step_duration_seconds", "Optimizer steps.", buckets=MINUTES
)
PUBLISH_SECONDS = Histogram(
    "sluice_trainer_publish_duration_seconds", "Publications of weights.", buckets=MINUTES
)
PUBLISHED_BYTES = Counter(
    "sluice_trainer_published_bytes_total", "Bytes of published weights, as stored."
)
FULL_BYTES = Counter(
    "sluice_trainer_published_full_bytes_total", "Bytes of published weights, had all been whole."
)
ENCODE_SECONDS = Histogram(
    "sluice_trainer_delta_encode_duration_seconds",
    "Differences of a version, on the slowest rank.",
    buckets=MINUTES,
)
DELTA_DENSITY = Gauge(
    "sluice_trainer_delta_density_ratio", "Elements that changed in the last version of deltas."
)
TRANSFER_SECONDS = Histogram(
    "sluice_trainer_transfer_duration_seconds", "Weights sent to engines.", buckets=MINUTES
)
TRANSFERRED_BYTES = Counter(
    "sluice_trainer_transferred_bytes_total", "Bytes that ranks broadcast to engines."
)
TRANSFER_RATE = Gauge(
    "sluice_trainer_transfer_rate_bytes", "Bytes broadcast a second in the last transfer."
)
TRANSFER_CAUSES = (
    "TRANSFER_BROKEN",
    "NO_TRANSFER",
    "UNFIT_WEIGHTS",
    "DIGEST_MISMATCH",
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "OTHER",
)
TRANSFER_FAILURES = with_values(
    Counter(
        "sluice_trainer_transfer_failures_total", "Engines that a transfer left out.", ["cause"]
    ),
    TRANSFER_CAUSES,
)
WRITE_BEHIND_SECONDS = Histogram(
    "sluice_trainer_write_behind_duration_seconds",
    "Weights written to the store after they were sent, until they are durable.",
    buckets=MINUTES,
)
LOST_VERSIONS = Counter(
    "sluice_trainer_lost_versions_total",
    "Versions of weights that engines were sent and that could not be written afterwards.",
)
CHECKPOINT_SECONDS = with_values(
    Histogram(
        "sluice_trainer_checkpoint_duration_seconds",
        "Checkpoints; `stage` is what calls wait for where the rest is written beside them.",
        ["kind"],
        buckets=MINUTES,
    ),
    ("save", "stage", "load"),
)
UNVERIFIED_CHECKPOINTS = Counter(
    "sluice_trainer_unverified_checkpoints_total",
    "Checkpoints loaded that name no digests of their files.",
)
TOKENS = Counter("sluice_trainer_tokens_total", "Tokens trained on.")
STEPS = with_values(
    Counter("sluice_trainer_steps_total", "Optimizer steps by outcome.", ["outcome"]),
    ("applied", "skipped"),
)
SKIPS_IN_A_ROW = Gauge("sluice_trainer_consecutive_skipped_steps", "Skipped steps in a row.")
STEP = Gauge("sluice_trainer_step_number", "Optimizer steps taken.")
WEIGHT_VERSION = Gauge("sluice_trainer_weight_version", "Latest published version.")
SAMPLE_LAG = Histogram(
    "sluice_trainer_sample_lag_versions",
    "Published versions between the oldest weights of an uploaded sample and the latest.",
    buckets=LAGS,
)
GRAD_NORM = Gauge("sluice_trainer_gradient_norm", "Gradient norm of the last step, unclipped.")
LEARNING_RATE = Gauge("sluice_trainer_learning_rate", "Learning rate of the last step.")
EXPERT_LOAD = Gauge(
    "sluice_trainer_expert_load_ratio",
    "Tokens of a layer's busiest expert by the mean of the layer, in the last step: `max` of the "
    "worst layer, `mean` of all.",
    ["kind"],
)
UNUSED_EXPERTS = Gauge(
    "sluice_trainer_unused_experts", "Experts of all layers that the last step sent no token to."
)
EXPERTS_LOSS = Gauge(
    "sluice_trainer_experts_loss",
    "What losses of routers come to in the last step, without coefficients, mean of all layers: "
    "`aux` of even use, 1 where it is even, `z` of large logits.",
    ["kind"],
)
OF_STEPS = {  # by what backends call them
    "expert_load_max": EXPERT_LOAD.labels("max"),
    "expert_load_mean": EXPERT_LOAD.labels("mean"),
    "experts_unused": UNUSED_EXPERTS,
    "experts_aux_loss": EXPERTS_LOSS.labels("aux"),
    "experts_z_loss": EXPERTS_LOSS.labels("z"),
}
LOSS = Gauge("sluice_trainer_loss", "Mean loss of the last pass.")
MISMATCH = Gauge(
    "sluice_trainer_rollout_mismatch_logprob",
    "Mean abs(trainer - engine) of sampled tokens' log-probs, last pass that saw both, before "
    "its batch's first step.",
)
BATCHES = Gauge("sluice_trainer_batches_held", "Batches held.")
WAITING_CALLS = Gauge("sluice_trainer_waiting_calls", "Calls that run or wait for their turn.")
RESTARTS = Counter("sluice_trainer_rank_restarts_total", "Restarts of the ranks.")

WEIGHT_VERSION.set(math.nan)  # until there is one to tell of: 0 is a loss, a rate and a version too
GRAD_NORM.set(math.nan)
LEARNING_RATE.set(math.nan)
LOSS.set(math.nan)
EXPERT_LOAD.labels("max").set(math.nan)
EXPERT_LOAD.labels("mean").set(math.nan)
UNUSED_EXPERTS.set(math.nan)
EXPERTS_LOSS.labels("aux").set(math.nan)
EXPERTS_LOSS.labels("z").set(math.nan)
MISMATCH.set(math.nan)
DELTA_DENSITY.set(math.nan)
TRANSFER_RATE.set(math.nan)
