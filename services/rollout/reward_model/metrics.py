"""Metrics of a process that serves a reward model."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from sluice.runtime.metrics import with_values

SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60, 120, 300)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

REQUESTS = with_values(
    Counter("sluice_reward_model_requests_total", "Requests to `/classify`.", ["code"]),
    ("2xx", "4xx", "5xx"),
)
REQUEST_SECONDS = Histogram(
    "sluice_reward_model_request_duration_seconds", "Requests to `/classify`.", buckets=SECONDS
)
REFUSED = with_values(
    Counter("sluice_reward_model_refused_total", "Requests refused for their cause.", ["cause"]),
    ("busy", "key", "model", "size", "deadline", "other"),
)
WAITING = Gauge("sluice_reward_model_waiting_texts", "Texts that wait for their batch.")
ABANDONED = Counter(
    "sluice_reward_model_abandoned_texts_total",
    "Texts that were not scored: their caller had gone, or their time was over.",
)
BATCH_TEXTS = Histogram("sluice_reward_model_batch_size_texts", "Texts of a batch.", buckets=SIZES)
BATCH_SECONDS = Histogram(
    "sluice_reward_model_batch_duration_seconds", "Batches in the model.", buckets=SECONDS
)
TOKENS = Counter("sluice_reward_model_tokens_total", "Tokens of the texts that were scored.")
PADDING = Counter("sluice_reward_model_padding_tokens_total", "Tokens that filled their batches.")
