"""Metrics of the rollout service."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.rollout.engine import Delta, Engine

MINUTES = (0.01, 0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600)
LENGTHS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)

GROUPS = Counter("sluice_rollout_groups_total", "Groups settled.", ["outcome"])
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
WORKERS_LOST = Counter("sluice_rollout_grader_exits_total", "Grader processes ended.", ["cause"])
SPOOLED_BYTES = Counter("sluice_rollout_spooled_bytes_total", "Bytes of groups in the store.")
SAMPLES = Counter("sluice_rollout_samples_total", "Samples an engine ended.", ["finish_reason"])
SAMPLE_TOKENS = Histogram(
    "sluice_rollout_sample_length_tokens", "Response lengths.", buckets=LENGTHS
)


def count_generation(deltas: Sequence[Delta]) -> None:
    """Count the samples that ended with these deltas."""
    for delta in deltas:
        if delta.finish_reason is not None:
            SAMPLES.labels(delta.finish_reason.value).inc()
            SAMPLE_TOKENS.observe(len(delta.token_ids))


class EngineCollector(Collector):
    """State of one engine, read when scraped."""

    def __init__(self, engine: Engine, registry: CollectorRegistry = REGISTRY) -> None:
        self._engine, self._registry = engine, registry
        registry.register(self)

    def close(self) -> None:
        self._registry.unregister(self)

    def describe(self) -> list[Metric]:
        """Nothing is asked of the engine at registration."""
        return []

    def collect(self) -> Iterator[Metric]:
        status = self._engine.status()
        running = sum(load.running_count for load in status.rank_loads)
        waiting = sum(load.waiting_count for load in status.rank_loads)
        used = sum(load.used_tokens for load in status.rank_loads)
        version = -1 if status.version is None else status.version
        pause, prepare = status.last_pause_seconds, status.last_prepare_seconds
        yield _gauge("sluice_rollout_weight_version", "Version that serves; -1 none.", version)
        yield _gauge("sluice_rollout_running_samples", "Samples that decode.", running)
        yield _gauge("sluice_rollout_waiting_samples", "Samples that wait for a slot.", waiting)
        yield _gauge("sluice_rollout_cache_tokens", "Tokens in the cache.", used)
        yield _gauge("sluice_rollout_pause_seconds", "Pause of the last commit.", pause)
        yield _gauge("sluice_rollout_prepare_seconds", "The last preparation.", prepare)
        yield _counter(
            "sluice_rollout_decoded_tokens", "Tokens sampled.", status.decode_tokens_total
        )
        yield _counter(
            "sluice_rollout_prefilled_tokens", "Prompt tokens.", status.prefill_tokens_total
        )


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)
