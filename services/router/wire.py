"""Between router protobufs and the routing library's types."""

from __future__ import annotations

import time
from collections.abc import Sequence, Sized
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sluice.api.common.v1 import sample_pb2
from sluice.api.router.v1 import router_service_pb2 as pb
from sluice.balance.routing import (
    NO_VERSION,
    EngineSpec,
    EngineState,
    EngineView,
    Held,
    LeaseRequest,
    Needs,
    Outcome,
    RankReport,
)
from sluice.runtime.errors import InvalidFieldError
from sluice.runtime.wire import timestamp_of

IntArray = NDArray[np.int64]

MAX_COUNT = 65_536  # leases of one call
MAX_DP_SIZE = 4_096
_ALL_OK = np.full(MAX_COUNT, int(Outcome.OK), np.uint8)
_STATES = {
    EngineState.ACTIVE: pb.ENGINE_STATE_ACTIVE,
    EngineState.DRAINING: pb.ENGINE_STATE_DRAINING,
    EngineState.BROKEN: pb.ENGINE_STATE_BROKEN,
    EngineState.LOST: pb.ENGINE_STATE_LOST,
}


def engine_from_proto(engine: pb.Engine) -> EngineSpec:
    """Raises InvalidFieldError for sizes out of range."""
    if not 0 <= engine.dp_size <= MAX_DP_SIZE:
        raise InvalidFieldError("engine.dp_size", f"must be 0 to {MAX_DP_SIZE}")
    if engine.max_running_count < 0:
        raise InvalidFieldError("engine.max_running_count", "must not be negative")
    weights = engine.weights if engine.HasField("weights") else None
    return EngineSpec(
        name=engine.engine_id,
        address=engine.address,
        instance=engine.incarnation,
        dp_size=engine.dp_size or 1,
        max_running=engine.max_running_count,
        version=NO_VERSION if weights is None else weights.version,
        digest="" if weights is None else weights.digest,
    )


def state_to_proto(view: EngineView) -> pb.EngineState:
    state = _STATES[view.state]
    if state == pb.ENGINE_STATE_ACTIVE and view.spec.version == NO_VERSION:
        return pb.ENGINE_STATE_EMPTY
    return state


def engine_to_proto(view: EngineView, pool: str, *, now: float | None = None) -> pb.Engine:
    """With `now` (the router's clock) the load and the heartbeat too, which change always."""
    spec = view.spec
    engine = pb.Engine(
        engine_id=spec.name,
        address=spec.address,
        role=pb.ROLE_ENGINE,
        pool=pool,
        dp_size=spec.dp_size,
        max_running_count=spec.max_running,
        incarnation=spec.instance,
        state=state_to_proto(view),
        first_target_index=view.first_target,
        slowdown=view.slowdown,
    )
    if spec.version != NO_VERSION:
        weights = sample_pb2.WeightVersion(version=spec.version, digest=spec.digest)
        engine.weights.CopyFrom(weights)
    if now is not None:
        engine.leased_counts.extend(view.lease_counts)
        set_heartbeat(engine, now - view.last_seen)
    return engine


def set_heartbeat(engine: pb.Engine, age: float) -> None:
    """Note a heartbeat of `age` seconds ago."""
    engine.heartbeat_time.CopyFrom(timestamp_of(time.time() - age))


def request_from_proto(request: pb.AcquireLeasesRequest) -> LeaseRequest:
    """Raises InvalidFieldError naming the column that does not fit."""
    count = request.count
    if not 0 <= count <= MAX_COUNT:
        raise InvalidFieldError("count", f"must be 0 to {MAX_COUNT}")
    for name in ("expected_token_counts", "session_ids", "cached_token_counts"):
        _check_length(name, getattr(request, name), count)
    names, sizes = request.group_ids[:], request.group_sizes[:]
    if (names or sizes) and (len(sizes) != len(names) or min(sizes) < 0 or sum(sizes) != count):
        raise InvalidFieldError("group_sizes", f"must be one per group and sum to {count}")
    expected = None
    if request.expected_token_counts:
        expected = np.asarray(request.expected_token_counts, dtype=np.float64)
        expected[~(expected > 0)] = np.nan
    cached = None
    if request.cached_token_counts:
        cached = np.asarray(request.cached_token_counts, dtype=np.int64)
    return LeaseRequest(
        count=count,
        groups=list(zip(names, sizes, strict=True)),
        expected_tokens=expected,
        sessions=request.session_ids,
        prefix_tokens=cached,
        needs=needs_from_proto(request),
        may_wait=request.HasField("max_wait"),
        excluded=frozenset(request.excluded_engine_ids or ()),
    )


def needs_from_proto(message: pb.AcquireLeasesRequest) -> Needs:
    """Of a message with min_version and exact_version."""
    return Needs(
        minimum=message.min_version if message.HasField("min_version") else 0,
        exact=message.exact_version if message.HasField("exact_version") else None,
    )


def held_from_proto(request: pb.RenewLeasesRequest) -> Held:
    """Raises InvalidFieldError naming the column that does not fit."""
    ids = int_column(request.lease_ids)
    for name in ("dp_ranks", "engine_indices"):
        if len(getattr(request, name)) != len(ids):
            raise InvalidFieldError(name, f"must have {len(ids)} entries, one per lease")
    engines, ranks = int_column(request.engine_indices), int_column(request.dp_ranks)
    bound = ranks >= 0
    if bound.any() and not (
        (engines[bound] >= 0).all() and (engines[bound] < len(request.engine_ids)).all()
    ):
        raise InvalidFieldError("engine_indices", "must index engine_ids")
    unique, first = np.unique(ids, return_index=True)
    return Held(
        ids=unique, names=list(request.engine_ids), engines=engines[first], ranks=ranks[first]
    )


def reports_from_proto(request: pb.ReportLoadRequest) -> list[RankReport]:
    return [
        RankReport(
            running_count=load.running_count,
            waiting_count=load.waiting_count,
            used_tokens=load.used_tokens,
            max_tokens=load.max_tokens,
        )
        for load in request.rank_loads
    ]


def int_column(values: Sequence[int]) -> IntArray:
    """int64[n] of a packed column."""
    return np.fromiter(values, dtype=np.int64, count=len(values))


def released_from_proto(
    released: pb.ReleasedLeases,
) -> tuple[IntArray, NDArray[Any], NDArray[Any] | None]:
    """Ids, outcomes (OK where the column is empty) and token counts (None) of leases given back.

    Raises InvalidFieldError naming the column that does not fit.
    """
    columns = read_columns(released.SerializeToString())
    ids = np.frombuffer(columns.get(1, b""), dtype="<i8")
    outcomes = _all_ok(len(ids))
    tokens: NDArray[Any] | None = None
    if 2 in columns:
        data = columns[2]  # packed varints: of one byte each, unless a newer client has more
        one_byte = len(data) == len(released.outcomes)
        outcomes = np.frombuffer(data, np.uint8) if one_byte else int_column(released.outcomes)
        _check_length("released.outcomes", outcomes, len(ids))
    if 3 in columns:
        tokens = np.frombuffer(columns[3], dtype="<i4")
        _check_length("released.token_counts", tokens, len(ids))
    return ids, outcomes, tokens


def _all_ok(count: int) -> NDArray[Any]:
    """uint8[count], not to be written to."""
    return _ALL_OK[:count] if count <= MAX_COUNT else np.full(count, _ALL_OK[0])


def read_columns(data: bytes) -> dict[int, bytes]:
    """Packed fields of a serialized message that has no others, by field number.

    The columns of thousands of leases become arrays without an object for each value.
    """
    columns: dict[int, bytes] = {}
    at = 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        length, at = _read_varint(data, at)
        assert tag & 7 == 2, "only packed fields"
        columns[tag >> 3] = data[at : at + length]
        at += length
    return columns


def write_column(field: int, values: IntArray) -> bytes:
    """A packed sfixed32 field, to be merged into a message."""
    data = values.astype("<i4").tobytes()
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _varint(value: int) -> bytes:
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)


def _check_length(name: str, column: Sized, count: int) -> None:
    if len(column) not in (0, count):
        raise InvalidFieldError(name, f"must be empty or have {count} entries")
