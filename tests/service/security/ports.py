"""Asks one port as a caller with given credentials would, and says how it answers."""

from __future__ import annotations

import asyncio
import ssl
import urllib.error
import urllib.request

import grpc
from grpc_status import rpc_status

from sluice.api.common.v1 import wait_service_pb2, wait_service_pb2_grpc
from sluice.api.trainer.v1 import worker_service_pb2 as worker_pb
from sluice.api.trainer.v1 import worker_service_pb2_grpc
from sluice.client import RemoteError, typed_errors
from sluice.runtime.channel import create_channel
from sluice.runtime.errors import error_from_status
from sluice.runtime.security import SecurityConfig, channel_credentials
from tests.patience import PATIENCE

UNREACHABLE = "UNAVAILABLE/"  # the handshake failed
TOKEN_REFUSED = "UNAUTHENTICATED/TOKEN_MISSING_OR_WRONG"


async def ask_service(address: str, security: SecurityConfig) -> str:
    """`OK`, or code/reason of a public port."""
    async with create_channel(address, security) as channel:
        stub = wait_service_pb2_grpc.WaitServiceStub(channel)
        try:
            with typed_errors():
                await stub.ListWaits(wait_service_pb2.ListWaitsRequest(), timeout=PATIENCE)
        except RemoteError as error:
            return f"{error.code.name}/{error.reason}"
    return "OK"


async def ask_workers_port(address: str, security: SecurityConfig) -> str:
    """Code/reason for one who says to be rank 0, which is connected already.

    Asked over a blocking channel: grpc.aio may lose the status of a stream that ends as it begins.
    """
    return await asyncio.to_thread(_greet, address, security)


def _greet(address: str, security: SecurityConfig) -> str:
    greeting = worker_pb.RankHello(rank=0, world_size=2, generation=0)
    tls, token = security.tls, security.token()
    metadata = () if token is None else (("authorization", f"Bearer {token}"),)
    with (
        grpc.insecure_channel(address)
        if tls is None
        else grpc.secure_channel(address, channel_credentials(tls))
    ) as channel:
        stub = worker_service_pb2_grpc.WorkerServiceStub(channel)
        hello = iter([worker_pb.FollowRequest(hello=greeting)])
        try:
            next(stub.Follow(hello, timeout=PATIENCE, metadata=metadata))
        except grpc.RpcError as error:
            status = rpc_status.from_call(error)
            reason = "" if status is None else error_from_status(status).reason
            return f"{error.code().name}/{reason}"
    return "OK"


async def ask_metrics(address: str, security: SecurityConfig) -> str:
    """`OK`, `UNAVAILABLE/`, or the HTTP status of a metrics port."""
    return await asyncio.to_thread(_scrape, address, security)


def _scrape(address: str, security: SecurityConfig) -> str:
    tls, token = security.tls, security.token()
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    url = f"{'http' if tls is None else 'https'}://{address}/metrics"
    context = None
    if tls is not None:
        context = ssl.create_default_context(cafile=tls.ca)
        if tls.cert is not None:
            context.load_cert_chain(tls.cert, tls.key)
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE, context=context) as page:
            return "OK" if b"sluice_rpc_duration_seconds" in page.read() else "no metrics"
    except urllib.error.HTTPError as error:
        error.close()
        return TOKEN_REFUSED if error.code == 401 else str(error.code)
    except OSError:  # URLError, ssl.SSLError and ConnectionError
        return UNREACHABLE


async def answer_of(call: grpc.aio.UnaryUnaryCall) -> str:
    """`OK`, or code/reason of a call."""
    try:
        with typed_errors():
            await call
    except RemoteError as error:
        return f"{error.code.name}/{error.reason}"
    return "OK"
