"""An S3 server on this host: moto's."""

from __future__ import annotations

import contextlib
import logging
import urllib.request
from collections.abc import Iterator

from moto.server import ThreadedMotoServer


@contextlib.contextmanager
def running_s3() -> Iterator[str]:
    """Its endpoint."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def make_bucket(endpoint: str, name: str) -> None:
    create = urllib.request.Request(f"{endpoint}/{name}", method="PUT")
    with urllib.request.urlopen(create, timeout=10):
        pass


def environment(endpoint: str) -> dict[str, str]:
    """What clients find the server by."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
    }
