"""Metrics of the rollout service."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from sluice.runtime.metrics import Reading, with_values

MINUTES = (0.01, 0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600, 1800, 3600, 10800)
PAUSES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60, 600)
LENGTHS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)

GROUPS = with_values(
    Counter("sluice_rollout_groups_total", "Groups settled.", ["outcome"]),
    ("finished", "failed", "cancelled"),
)
EVALUATED_GROUPS = with_values(
    Counter(
        "sluice_rollout_evaluated_groups_total",
        "Groups of evaluations settled; sluice_rollout_groups_total has them too.",
        ["outcome"],
    ),
    ("finished", "failed", "cancelled"),
)
GROUP_SECONDS = Histogram(
    "sluice_rollout_group_duration_seconds", "A group, from its start to its blob.", buckets=MINUTES
)
GENERATE_SECONDS = Histogram(
    "sluice_rollout_generate_duration_seconds", "Sampling of a group.", buckets=MINUTES
)
REWARD_SECONDS = Histogram(
    "sluice_rollout_reward_duration_seconds", "Rewarding of a group.", buckets=MINUTES
)
GROUPS_OPEN = Gauge("sluice_rollout_open_groups", "Groups accepted and not settled.")
RETRIES = Counter("sluice_rollout_generate_retries_total", "Requests sent to another engine.")
WORKERS_LOST = with_values(
    Counter("sluice_rollout_grader_exits_total", "Grader processes ended.", ["cause"]),
    ("grader_crashed", "grader_timed_out"),
)
SPOOLED_BYTES = Counter("sluice_rollout_spooled_bytes_total", "Bytes of groups in the store.")
SAMPLES = with_values(
    Counter("sluice_rollout_samples_total", "Samples an engine ended.", ["finish_reason"]),
    ("stop", "length", "aborted"),
)
SAMPLE_TOKENS = Histogram(
    "sluice_rollout_sample_length_tokens", "Response lengths.", buckets=LENGTHS
)
HTTP_REQUESTS = with_values(
    Counter("sluice_rollout_http_requests_total", "Requests to the OpenAI port.", ["code"]),
    ("2xx", "4xx", "5xx"),
)
HTTP_SECONDS = Histogram(
    "sluice_rollout_http_duration_seconds", "Requests to the OpenAI port.", buckets=MINUTES
)
PREPARE_SECONDS = Histogram(
    "sluice_rollout_prepare_duration_seconds",
    "Preparations of weights, while decoding goes on.",
    buckets=MINUTES,
)
FETCH_SECONDS = Histogram(
    "sluice_rollout_fetch_duration_seconds",
    "Versions of weights made on this host out of the store, before they are loaded.",
    buckets=MINUTES,
)
STAGED_BYTES = Counter(
    "sluice_rollout_staged_bytes_total",
    "Bytes of weights read and checked before their version was committed.",
)
TRANSFER_SECONDS = Histogram(
    "sluice_rollout_transfer_duration_seconds",
    "Weights received from a trainer's ranks, checked and loaded.",
    buckets=MINUTES,
)
TRANSFERRED_BYTES = Counter(
    "sluice_rollout_transferred_bytes_total", "Bytes of weights received from a trainer's ranks."
)
DIGEST_FAILURES = Counter(
    "sluice_rollout_digest_failures_total", "Weights refused because bytes were not as published."
)
PAUSE_SECONDS = Histogram(
    "sluice_rollout_pause_duration_seconds",
    "Commits of weights: time without decoding.",
    buckets=PAUSES,
)

OPERATIONS = Gauge(
    "sluice_rollout_operation_info",
    "1 for the implementation of an operation that the engine's model runs (sluice/operations.py).",
    ["operation", "implementation"],
)

DECODE_PASSES = with_values(
    Counter(
        "sluice_rollout_decode_passes_total",
        "With decode_graphs, passes that only decoded; captured: graphs that were made for them.",
        ["kind"],
    ),
    ("plain", "captured", "replayed"),
)

WEIGHT_VERSION = Reading("sluice_rollout_weight_version", "Version that serves; -1 none.")
ADAPTERS = Reading("sluice_rollout_adapters", "Adapters that are held beside the base.")
RUNNING = Reading("sluice_rollout_running_samples", "Samples that decode.")
WAITING = Reading("sluice_rollout_waiting_samples", "Samples that wait for a slot.")
CACHE = Reading("sluice_rollout_cache_tokens", "Tokens in the cache.")
CACHE_LIMIT = Reading("sluice_rollout_cache_limit_tokens", "Tokens the cache has room for.")
PAUSED = Reading("sluice_rollout_paused", "1 while the engine is paused.")
DECODED = Reading("sluice_rollout_decoded_tokens_total", "Tokens sampled.")
PREFILLED = Reading("sluice_rollout_prefilled_tokens_total", "Prompt tokens read.")
PREFIX_HITS = Reading(
    "sluice_rollout_prefix_hit_tokens_total", "Prompt tokens that the cache had from others."
)
RESTARTS = Reading(
    "sluice_rollout_engine_restarts_total", "Servers of SGLang that were lost and started anew."
)
