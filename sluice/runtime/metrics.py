"""Declarations of metrics: those read when scraped, and the closed sets of labels."""

from __future__ import annotations

import contextlib
import hmac
import logging
import socket
import ssl
import sys
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeVar
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import REGISTRY, CollectorRegistry, Histogram, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from sluice.runtime.security import SecurityConfig, http_context

M = TypeVar("M", bound=MetricWrapperBase)
Family = CounterMetricFamily | GaugeMetricFamily


@dataclass(frozen=True)
class Reading:
    """A value that a collector reads when scraped; a counter where the name ends in `_total`.

    Declared at the top of a `metrics.py`, as counted metrics are, so that docs find it there.
    """

    name: str
    text: str
    labels: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        return "counter" if self.name.endswith("_total") else "gauge"

    def family(self) -> Family:
        """An empty family for `add_metric`, one value per set of labels."""
        kind = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        return kind(self.name.removesuffix("_total"), self.text, labels=self.labels)

    def of(self, value: float) -> Metric:
        """The family with its one value."""
        family = self.family()
        family.add_metric((), value)
        return family


_closed: dict[MetricWrapperBase, tuple[tuple[str, ...] | None, ...]] = {}


def with_values(metric: M, *sets: Iterable[str] | None) -> M:
    """`metric` with a series at 0 for every combination of its labels' closed sets.

    Without it a scrape shows a series only after the first event, and a rate over it misses
    that event. None, for the first label, stands for values that come with the fleet: `show`.
    """
    closed = _closed[metric] = tuple(None if names is None else tuple(names) for names in sets)
    if closed[0] is not None:
        show(metric, *closed[0])
    return metric


def show(metric: MetricWrapperBase, *values: str) -> None:
    """Show these values of the first label from 0 on."""
    rest = [names or () for names in _closed[metric][1:]]
    for combination in product(values, *rest):
        metric.labels(*combination)


def closed_sets(metric: MetricWrapperBase) -> dict[str, tuple[str, ...]]:
    """The labels of `metric` whose values are known to the code."""
    sets = zip(metric._labelnames, _closed.get(metric, ()), strict=False)
    return {label: names for label, names in sets if names is not None}


def observe_all(histogram: Histogram, values: Iterable[float]) -> None:
    """As `histogram.observe` of each value; those that are alike take as long as one."""
    for value, count in Counter(values).items():
        histogram._sum.inc(value * count)
        histogram._buckets[bisect_left(histogram._upper_bounds, value)].inc(count)


class StateCollector(Collector):
    """Reads the state of a process whenever metrics are scraped, until `close`."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._registry = registry
        registry.register(self)

    def close(self) -> None:
        """Show nothing from now on."""
        self._registry.unregister(self)

    def describe(self) -> list[Metric]:
        """Returns nothing, so that registration does not read the state."""
        return []


logger = logging.getLogger(__name__)

SILENT_SECONDS = 10.0  # a connection that says nothing for so long is closed
STOP_SECONDS = 1.0  # at most, where the system does not say that a port has closed
MOST_CONNECTIONS = 64  # at once; the oldest makes room for a further one


class _Handler(WSGIRequestHandler):
    timeout = SILENT_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not worth a log line."""


class _Server(ThreadingWSGIServer):
    """Shakes hands in the thread of the connection: a peer that stalls stalls nobody else.

    Nor do many: a connection beyond `MOST_CONNECTIONS` closes the one that is open for longest.
    """

    tls: ssl.SSLContext | None = None

    def __init__(self, host: str, port: int) -> None:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)
        self.address_family = min(family for family, *_ in found)  # IPv4 where there are both
        super().__init__((host, port), _Handler)
        self._lock = threading.Lock()
        self._open: dict[socket.socket, socket.socket] = {}  # as accepted, as used by now

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._open[request] = request
            if len(self._open) > MOST_CONNECTIONS:
                oldest = self._open.pop(next(iter(self._open)))
                socket.socket.shutdown(oldest, socket.SHUT_RDWR)  # its thread reads the end
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def finish_request(self, request: Any, client_address: Any) -> None:
        connection: socket.socket = request
        if self.tls is not None:
            connection.settimeout(SILENT_SECONDS)
            try:
                connection = self._secured(request, self.tls)
            except OSError:  # ssl.SSLError included: no certificate, a wrong one, or no TLS at all
                return
        try:
            super().finish_request(connection, client_address)
        finally:
            if connection is not request:
                connection.close()

    def _secured(self, request: socket.socket, tls: ssl.SSLContext) -> ssl.SSLSocket:
        with self._lock:
            connection = tls.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
            if request in self._open:
                self._open[request] = connection
        try:
            connection.do_handshake()
        except BaseException:
            connection.close()
            raise
        return connection

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception()
        if not isinstance(error, OSError):  # a caller that went away is no news
            logger.error("the metrics port failed", exc_info=error)


class MetricsServer:
    """Serves `/metrics` from a thread until `stop`. Raises ConfigError and OSError."""

    def __init__(
        self,
        host: str,
        port: int,
        security: SecurityConfig,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        self._token = security.token()
        self._app: Callable[..., Iterable[bytes]] = make_wsgi_app(registry)
        tls = None if security.tls is None else http_context(security.tls)
        self._server = _Server(host, port)
        self._server.tls = tls
        self._server.set_app(self._serve)
        self.port = int(self._server.server_port)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(STOP_SECONDS,), name="metrics"
        )
        self._thread.daemon = True
        self._thread.start()

    def _serve(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        given = str(environ.get("HTTP_AUTHORIZATION", ""))
        if self._token and not hmac.compare_digest(
            given.encode(), f"Bearer {self._token}".encode()
        ):
            start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer")])
            return [b"bearer token missing or wrong\n"]
        return self._app(environ, start_response)

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._server.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)
