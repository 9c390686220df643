"""`python -m sluice.runtime.healthcheck host:port [service]`: exit 0 when it is SERVING.

TLS is that of the server's own variables, `SLUICE_SERVER__SECURITY__TLS__{CA,CERT,KEY}`, unless
flags name other files. It runs every few seconds, so it imports little.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sluice.logs import printable

VARIABLE = "SLUICE_SERVER__SECURITY__TLS__"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("service", nargs="?", default="", help="empty asks whether it is alive")
    for name in ("ca", "cert", "key"):
        parser.add_argument(f"--{name}", default=os.environ.get(VARIABLE + name.upper(), ""))
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds")
    flags = parser.parse_args()
    request = health_pb2.HealthCheckRequest(service=flags.service)
    try:
        with _channel(flags) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = stub.Check(request, timeout=flags.timeout)
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    except grpc.RpcError as error:
        told = f"{flags.address}: {error.code().name}: {error.details()}"
        print(printable(told), file=sys.stderr)
        return 1
    return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1


def _channel(flags: argparse.Namespace) -> grpc.Channel:
    if not flags.ca:
        return grpc.insecure_channel(flags.address)
    files = [
        Path(name).read_bytes() if name else None for name in (flags.ca, flags.key, flags.cert)
    ]
    return grpc.secure_channel(flags.address, grpc.ssl_channel_credentials(*files))


if __name__ == "__main__":
    sys.exit(main())
