"""Metrics are named as people expect, shown from 0 on, and documented as they are scraped."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable
from types import SimpleNamespace

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import Metric

from services.rollout.engine.interface import EngineStatus, RankLoad
from services.rollout.engine.servicer import EngineCollector
from services.router.config import RouterConfig
from services.router.pools import PoolCollector, Pools
from sluice.balance.routing import EngineSpec, LeaseRequest
from sluice.config import parse_config
from sluice.runtime import waits as waits_module
from sluice.runtime.metrics import Reading, observe_all, with_values
from sluice.runtime.waits import Waits
from tools.declared_metrics import MODULES, Declared, declared
from tools.metrics_docs import PAGE

UNITS = ("seconds", "bytes", "tokens", "ratio", "versions", "logprob", "texts")
LABELS = {
    "method",
    "code",
    "kind",
    "outcome",
    "finish_reason",
    "cause",
    "decision",
    "reason",
    "tracker",
    "use",
    "operation",
    "implementation",
}
FLEET = {"pool", "engine", "rank", "state", "dataset"}
EVERY = [(service, metric) for service in MODULES for metric in declared(service)]


@pytest.mark.parametrize("service, metric", EVERY, ids=lambda value: getattr(value, "name", value))
def test_names_and_labels_follow_the_house(service: str, metric: Declared) -> None:
    assert re.fullmatch(f"sluice_{service and service + '_'}[a-z_]+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    if metric.kind == "histogram":
        assert metric.name.endswith(UNITS)
    assert not re.search("_(ms|millis|minutes|kb|mb|gb|percent)(_|$)", metric.name)
    assert set(metric.labels) <= LABELS | FLEET
    assert metric.text.endswith(".")


def test_the_page_has_what_the_code_declares() -> None:
    """`make lint` generates it again, in a process where no test has made values of labels."""
    names = [metric.name for _, metric in EVERY]
    assert len(names) == len(set(names))
    page = PAGE.read_text()
    for name in names:
        assert f"`{name}`" in page


def scraped(families: Iterable[Metric]) -> dict[str, set[tuple[str, ...]]]:
    """Label names by exposed name; every family has a value."""
    found: dict[str, set[tuple[str, ...]]] = {}
    for family in families:
        assert family.samples, family.name
        for sample in family.samples:
            found.setdefault(sample.name, set()).add(tuple(sample.labels))
    return found


def readings(module: str) -> dict[str, set[tuple[str, ...]]]:
    found = vars(__import__(module, fromlist=["_"])).values()
    return {value.name: {value.labels} for value in found if isinstance(value, Reading)}


def test_a_scrape_of_an_engine_shows_what_is_declared() -> None:
    load = RankLoad(running_count=2, waiting_count=3, used_tokens=5, max_tokens=7)
    status = EngineStatus(
        version=None,
        digest="",
        prepared_versions=(),
        paused=True,
        rank_loads=(load, load),
        max_running=4,
        max_model_length=8,
        decode_tokens_total=11,
        prefix_hit_tokens_total=13,
        restarts_total=17,
    )
    registry = CollectorRegistry()
    collector = EngineCollector(SimpleNamespace(status=lambda: status), registry)  # type: ignore[arg-type]
    assert scraped(collector.collect()) == readings("services.rollout.metrics")
    values = {
        "weight_version": -1,
        "running_samples": 4,
        "waiting_samples": 6,
        "cache_tokens": 10,
        "cache_limit_tokens": 14,
        "paused": 1,
        "decoded_tokens_total": 11,
        "prefix_hit_tokens_total": 13,
        "engine_restarts_total": 17,
    }
    for name, value in values.items():
        assert registry.get_sample_value(f"sluice_rollout_{name}") == value
    collector.close()
    assert not list(registry.collect())


def test_a_scrape_of_a_router_shows_what_is_declared() -> None:
    pools, registry = Pools(parse_config(RouterConfig, {}), clock=lambda: 0.0), CollectorRegistry()
    room = pools.room("policy")
    for name, version in (("a", 5), ("b", 3)):
        room.pool.register(EngineSpec(name=name, max_running=1, version=version), 0.0)
    room.acquire("client", LeaseRequest(count=3, may_wait=True), 0.0)
    collector = PoolCollector(pools, registry)
    assert scraped(collector.collect()) == readings("services.router.metrics")
    of = {"pool": "policy"}
    assert registry.get_sample_value("sluice_router_queued_leases", of) == 1
    lags = [
        registry.get_sample_value("sluice_router_engine_lag_versions", {**of, "engine": engine})
        for engine in ("a", "b")
    ]
    assert lags == [0, 2]


def test_series_of_closed_sets_are_there_before_the_first_event() -> None:
    registry = CollectorRegistry()
    counter = Counter("sluice_x_total", "X.", ["a", "b"], registry=registry)
    with_values(counter, ("1", "2"), ("x", "y"))
    values = {
        (a, b): registry.get_sample_value("sluice_x_total", {"a": a, "b": b})
        for a in "12"
        for b in "xy"
    }
    assert values == dict.fromkeys([("1", "x"), ("1", "y"), ("2", "x"), ("2", "y")], 0.0)


def value_of(name: str, **labels: str) -> float:
    from prometheus_client import REGISTRY

    value = REGISTRY.get_sample_value(name, labels)
    assert value is not None, f"{name} {labels} is not shown"
    return value


def test_values_observed_together_count_as_one_by_one() -> None:
    draw = np.random.default_rng(0)
    registry = CollectorRegistry()
    alone, together = (
        Histogram(name, "text", buckets=(0, 1, 5, 20), registry=registry)
        for name in ("alone", "together")
    )
    for count in (0, 1, 40, 500):
        values = [*draw.integers(-1, 30, count).tolist(), *(0.0, 1.0, 20.0, 20.5)]
        for value in values:
            alone.observe(value)
        observe_all(together, values)
    one, other = (
        {(each.name.partition("_")[2], each.labels.get("le")): each.value for each in found.samples}
        for found in sorted(registry.collect(), key=lambda metric: metric.name)
    )
    assert {key: value for key, value in one.items() if key[0] != "created"} == pytest.approx(
        {key: value for key, value in other.items() if key[0] != "created"}
    )


def test_what_a_router_decides_is_counted_by_how() -> None:
    pools, registry = Pools(parse_config(RouterConfig, {}), clock=lambda: 0.0), CollectorRegistry()
    PoolCollector(pools, registry)
    room = pools.room("counted")
    room.pool.register(EngineSpec(name="a", max_running=3), 0.0)
    for sessions in (["s"], ["s"]):
        room.acquire("client", LeaseRequest(count=1, sessions=sessions, may_wait=True), 0.0)
    room.acquire("client", LeaseRequest(count=3, may_wait=True), 0.0)

    def counted(decision: str) -> float | None:
        of = {"pool": "counted", "decision": decision}
        return registry.get_sample_value("sluice_router_leases_total", of)

    assert [counted(decision) for decision in ("session", "placed", "queued")] == [1, 2, 2]


def test_the_oldest_wait_of_a_process_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits_module, "_listed", weakref.WeakSet())  # not what other tests left
    waits = Waits()
    before = value_of("sluice_waits")
    with waits.waiting("a"), waits.waiting("b") as wait:
        wait.began -= 1000.0
        assert value_of("sluice_waits") == before + 2
        assert value_of("sluice_oldest_wait_seconds") >= 1000.0
    assert value_of("sluice_waits") == before
