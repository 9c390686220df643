"""`python -m sluice.runtime.healthcheck host:port [service]`: exit 0 when it is SERVING."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sluice.runtime.security import TlsConfig, channel_credentials


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("service", nargs="?", default="", help="empty asks whether it is alive")
    parser.add_argument("--ca", type=Path)
    parser.add_argument("--cert", type=Path)
    parser.add_argument("--key", type=Path)
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds")
    flags = parser.parse_args()
    if flags.ca is None:
        channel = grpc.insecure_channel(flags.address)
    else:
        tls = TlsConfig(ca=flags.ca, cert=flags.cert, key=flags.key)
        channel = grpc.secure_channel(flags.address, channel_credentials(tls))
    request = health_pb2.HealthCheckRequest(service=flags.service)
    try:
        answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=flags.timeout)
    except grpc.RpcError as error:
        print(f"{flags.address}: {error.code().name}: {error.details()}", file=sys.stderr)
        return 1
    return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1


if __name__ == "__main__":
    sys.exit(main())
