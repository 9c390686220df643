"""Metrics of the router service. The label `engine` grows with the fleet, `pool` with the pools."""

from __future__ import annotations

import grpc
from prometheus_client import Counter, Gauge, Histogram

from sluice.balance.routing import Refusal
from sluice.runtime.metrics import Reading, show, with_values

WAITS = (0.001, 0.01, 0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600)
DECISIONS = ("session", "placed", "queued")

LEASES = Reading(  # of each lease a number is cheaper than a counter
    "sluice_router_leases_total",
    "Leases given: on the rank of their session, on the best free one (placed), or queued for one.",
    ("pool", "decision"),
)
REFUSALS = with_values(
    Counter("sluice_router_refused_leases_total", "Leases refused.", ["pool", "reason"]),
    None,
    Refusal,
)
RELEASES = Reading("sluice_router_releases_total", "Leases given back.", ("pool",))
EXPIRED_LEASES = with_values(
    Counter(
        "sluice_router_expired_leases_total",
        "Leases of clients that fell silent or were replaced.",
        ["pool"],
    ),
    None,
)
ADOPTED_LEASES = with_values(
    Counter(
        "sluice_router_adopted_leases_total", "Leases taken over from an earlier router.", ["pool"]
    ),
    None,
)
DROPPED_LEASES = with_values(
    Counter("sluice_router_dropped_leases_total", "Leases their client never received.", ["pool"]),
    None,
)
SECOND_ROUTER = Gauge(
    "sluice_router_second_router",
    "1 while engines or workers hear this router and another one in turn.",
)
STOPS = Counter(
    "sluice_router_stops_total",
    "Times the router could not be heard for seconds (stopped, held up), and settled after it.",
)
HOLD_SECONDS = Histogram(
    "sluice_router_hold_duration_seconds", "Calls that waited for a free rank.", buckets=WAITS
)
PROXIED = with_values(
    Counter("sluice_router_proxied_requests_total", "Requests forwarded.", ["code"]),
    (code.name for code in grpc.StatusCode),
)

OUTSTANDING = Reading("sluice_router_outstanding_leases", "Leases out.", ("pool", "engine", "rank"))
SLOWDOWN = Reading(
    "sluice_router_engine_slowdown_ratio", "Step time over the average one's.", ("pool", "engine")
)
STATE = Reading(
    "sluice_router_engine_state",
    "1 for the state an engine is in.",
    ("pool", "engine", "state"),
)
LAG = Reading(
    "sluice_router_engine_lag_versions",
    "Weight versions behind the newest of the pool; -1 without weights.",
    ("pool", "engine"),
)
IMBALANCE = Reading(
    "sluice_router_imbalance_ratio", "Largest over mean leases of active ranks.", ("pool",)
)
QUEUED = Reading("sluice_router_queued_leases", "Leases that wait for a rank.", ("pool",))
LOCAL = Reading(
    "sluice_router_local_leases",
    "Of the leases out, those that clients picked while they could reach no router.",
    ("pool",),
)
SETTLING = Reading(
    "sluice_router_settling_engines",
    "Engines not leased yet after a restart of the router: what is held on them is not known.",
    ("pool",),
)
CLIENTS = Reading("sluice_router_clients", "Clients that hold leases.", ("pool",))
SESSIONS = Reading("sluice_router_sessions", "Sticky sessions.", ("pool",))
_OF_POOLS = (REFUSALS, EXPIRED_LEASES, ADOPTED_LEASES, DROPPED_LEASES)
POOL_READINGS = (LEASES, RELEASES, IMBALANCE, QUEUED, CLIENTS, SESSIONS, LOCAL, SETTLING)


def open_pool(name: str) -> None:
    """Show a pool's counters from 0 on."""
    for counter in _OF_POOLS:
        show(counter, name)


def close_pool(name: str) -> None:
    """Show a pool's counters no more."""
    for counter in _OF_POOLS:
        counter.remove_by_labels({"pool": name})
