"""Shows callers which store a process sees."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Mapping

from sluice.api.common.v1 import store_service_pb2 as pb
from sluice.api.common.v1 import store_service_pb2_grpc as pb_grpc
from sluice.place import Place
from sluice.runtime.errors import InvalidFieldError
from sluice.runtime.server import Server
from sluice.store_check import NONCE, has_nonce, write_nonce

STORE_SERVICE = "sluice.api.common.v1.StoreService"


class StoreServicer(pb_grpc.StoreServiceServicer):
    """Reads and writes nonces in the places that a process uses."""

    def __init__(self, places: Mapping[str, Place]) -> None:
        """`places` by use; the same uses everywhere: `store`, `weights`."""
        self._places = places

    async def CheckStore(
        self, request: pb.CheckStoreRequest, context: object
    ) -> pb.CheckStoreResponse:
        if not NONCE.fullmatch(request.nonce):
            raise InvalidFieldError("nonce", "must be 32 hexadecimal digits")
        nonce = secrets.token_hex(16)
        checks = [
            asyncio.to_thread(_check, use, place, request.nonce, nonce)
            for use, place in self._places.items()
        ]
        return pb.CheckStoreResponse(
            host=socket.gethostname(),
            process_id=os.getpid(),
            nonce=nonce,
            places=await asyncio.gather(*checks),
        )


def add_store_service(server: Server, places: Mapping[str, Place]) -> None:
    """Have a server answer for these places."""
    server.add(pb_grpc.add_StoreServiceServicer_to_server, StoreServicer(places), STORE_SERVICE)


def _check(use: str, place: Place, wanted: str, own: str) -> pb.CheckedPlace:
    checked = pb.CheckedPlace(use=use, location=str(place))
    try:
        checked.found = has_nonce(place, wanted)
        if checked.found:  # else it is another's, in which nothing is to be written
            write_nonce(place, own)
    except (OSError, ValueError) as error:
        checked.problem = str(error)[:1000]
    return checked
