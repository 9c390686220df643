"""Metrics of the router service."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from services.router.pools import Pools

WAITS = (0.001, 0.01, 0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600)

LEASES = Counter("sluice_router_leases_total", "Leases given.", ["pool"])
RELEASES = Counter("sluice_router_releases_total", "Leases given back.", ["pool"])
REFUSALS = Counter("sluice_router_refused_leases_total", "Leases refused.", ["pool", "reason"])
EXPIRED_LEASES = Counter(
    "sluice_router_expired_leases_total", "Leases of clients that fell silent.", ["pool"]
)
ADOPTED_LEASES = Counter(
    "sluice_router_adopted_leases_total", "Leases taken over from an earlier router.", ["pool"]
)
DROPPED_LEASES = Counter(
    "sluice_router_dropped_leases_total", "Leases their client never received.", ["pool"]
)
HOLD_SECONDS = Histogram(
    "sluice_router_hold_duration_seconds", "Calls that waited for a free rank.", buckets=WAITS
)
PROXIED = Counter("sluice_router_proxied_requests_total", "Requests forwarded.", ["code"])


class PoolCollector(Collector):
    """State of the pools, read when scraped."""

    def __init__(self, pools: Pools, registry: CollectorRegistry = REGISTRY) -> None:
        self._pools, self._registry = pools, registry
        registry.register(self)

    def close(self) -> None:
        self._registry.unregister(self)

    def collect(self) -> Iterator[Metric]:
        def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"sluice_router_{name}", text, labels=("pool", *labels))

        outstanding = gauge("outstanding_leases", "Leases out.", "engine", "rank")
        slowdown = gauge("engine_slowdown_ratio", "Step time over the average one's.", "engine")
        state = gauge("engine_state", "1 for the state an engine is in.", "engine", "state")
        imbalance = gauge("imbalance_ratio", "Largest over mean leases of active ranks.")
        queued = gauge("queued_leases", "Leases that wait for a rank.")
        clients = gauge("clients", "Clients that hold leases.")
        sessions = gauge("sessions", "Sticky sessions.")
        for room in self._pools:
            counts: list[int] = []
            for view in room.pool.engines():
                name = view.spec.name
                slowdown.add_metric([room.name, name], view.slowdown)
                state.add_metric([room.name, name, view.state.value], 1)
                for rank, count in enumerate(view.lease_counts):
                    outstanding.add_metric([room.name, name, str(rank)], count)
                counts += view.lease_counts if view.state == "active" else ()
            mean = sum(counts) / len(counts) if counts else 0.0
            imbalance.add_metric([room.name], max(counts) / mean if mean else 1.0)
            queued.add_metric([room.name], room.pool.waiting.count)
            clients.add_metric([room.name], room.pool.client_count)
            sessions.add_metric([room.name], room.pool.session_count)
        yield from (outstanding, slowdown, state, imbalance, queued, clients, sessions)
