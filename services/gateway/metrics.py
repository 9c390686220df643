"""Metrics of the gateway."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from sluice.runtime.metrics import with_values

MINUTES = (0.01, 0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600)
KINDS = ("create", "forward", "forward_backward", "optim_step", "save", "publish", "load")

HTTP_REQUESTS = with_values(
    Counter("sluice_gateway_http_requests_total", "Requests to the Tinker port.", ["code"]),
    ("2xx", "4xx", "5xx"),
)
REQUESTS = with_values(
    Counter(
        "sluice_gateway_training_requests_total",
        "Training requests done, once each.",
        ["kind", "outcome"],
    ),
    KINDS,
    ("done", "failed"),
)
REQUEST_SECONDS = with_values(
    Histogram(
        "sluice_gateway_training_request_duration_seconds",
        "Training requests, from their turn to their answer.",
        ["kind"],
        buckets=MINUTES,
    ),
    KINDS,
)
SAMPLES = with_values(
    Counter("sluice_gateway_sampling_requests_total", "Sampling requests.", ["outcome"]),
    ("done", "failed", "cancelled"),
)
SAMPLE_SECONDS = Histogram(
    "sluice_gateway_sampling_request_duration_seconds", "Sampling requests.", buckets=MINUTES
)
MODELS = Gauge("sluice_gateway_models", "Models that are trained.")
WAITING = Gauge("sluice_gateway_waiting_requests", "Training requests that are not done.")
SAMPLING = Gauge("sluice_gateway_running_samples", "Sampling requests that run.")
RECOVERIES = Counter(
    "sluice_gateway_recoveries_total", "Models brought back after their trainer lost them."
)
REPLAYED = Counter(
    "sluice_gateway_replayed_requests_total", "Training requests done again in recoveries."
)
