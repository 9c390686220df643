"""Prometheus metrics on a port of their own, behind the same TLS and token."""

from __future__ import annotations

import hmac
import threading
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import REGISTRY, CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from sluice.runtime.security import SecurityConfig, http_context


class _QuietHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not worth a log line."""


class MetricsServer:
    """Serves `/metrics` from a thread until `stop`."""

    def __init__(
        self,
        host: str,
        port: int,
        security: SecurityConfig,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        self._token = security.token()
        self._app: Callable[..., Iterable[bytes]] = make_wsgi_app(registry)
        self._server: WSGIServer = make_server(
            host, port, self._serve, ThreadingWSGIServer, handler_class=_QuietHandler
        )
        if security.tls is not None:
            self._server.socket = http_context(security.tls).wrap_socket(
                self._server.socket, server_side=True
            )
        self.port = int(self._server.server_port)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="metrics"
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
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)
