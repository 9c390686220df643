"""Metrics of the converter."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from sluice.runtime.metrics import with_values

MINUTES = (0.1, 0.5, 1, 5, 10, 30, 60, 300, 600, 1800, 3600)
KINDS = ("convert", "verify")
OUTCOMES = ("succeeded", "failed", "cancelled")

CONVERSIONS = with_values(
    Counter(
        "sluice_converter_conversions_total",
        "Conversions and comparisons that ended.",
        ["kind", "outcome"],
    ),
    KINDS,
    OUTCOMES,
)
SECONDS = with_values(
    Histogram(
        "sluice_converter_conversion_duration_seconds",
        "Conversions and comparisons, without the wait for others.",
        ["kind"],
        buckets=MINUTES,
    ),
    KINDS,
)
BYTES = with_values(
    Counter(
        "sluice_converter_tensor_bytes_total",
        "Bytes of tensors converted or compared, resumed ones left out.",
        ["kind"],
    ),
    KINDS,
)
RESUMED_BYTES = Counter(
    "sluice_converter_resumed_bytes_total", "Bytes that an earlier, killed run had written."
)
DIGEST_FAILURES = Counter(
    "sluice_converter_digest_failures_total", "Sources whose bytes were not those once written."
)
RUNNING = Gauge("sluice_converter_running_conversions", "Conversions that run.")
