"""The answers to the last AcquireLeases calls, so that a repeated one changes nothing.

For calls that do not wait for a free rank: they end without an await, so that none can be
joined while it runs, and remembering them costs little.
"""

from __future__ import annotations

from collections import OrderedDict

import xxhash

from sluice.api.router.v1 import router_service_pb2 as pb
from sluice.runtime.errors import RequestIdReusedError


class Answers:
    """The last `capacity` answers by request id."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._known: OrderedDict[str, tuple[bytes, pb.AcquireLeasesResponse]] = OrderedDict()

    def find(self, request: pb.AcquireLeasesRequest) -> pb.AcquireLeasesResponse | None:
        """The answer given before. Raises RequestIdReusedError if that was for another body."""
        known = self._known.get(request.request_id)
        if known is None:
            return None
        if known[0] != _digest(request):
            raise RequestIdReusedError(
                f"request_id {request.request_id} was used for another request",
                request_id=request.request_id,
            )
        return known[1]

    def remember(
        self, request: pb.AcquireLeasesRequest, response: pb.AcquireLeasesResponse
    ) -> None:
        if not request.request_id:
            return
        self._known[request.request_id] = _digest(request), response
        if len(self._known) > self._capacity:
            self._known.popitem(last=False)


def _digest(request: pb.AcquireLeasesRequest) -> bytes:
    return xxhash.xxh3_128_digest(request.SerializeToString())
