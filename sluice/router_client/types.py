"""What a caller asks of the router, and what it gets."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import grpc

from sluice.api.router.v1 import router_service_pb2 as pb
from sluice.balance.routing.types import Needs

T = TypeVar("T")

_OUTCOMES = {
    grpc.StatusCode.OK: pb.OUTCOME_OK,
    grpc.StatusCode.UNAVAILABLE: pb.OUTCOME_CONNECT_ERROR,
    grpc.StatusCode.INTERNAL: pb.OUTCOME_SERVER_ERROR,
    grpc.StatusCode.DATA_LOSS: pb.OUTCOME_SERVER_ERROR,
    grpc.StatusCode.UNKNOWN: pb.OUTCOME_SERVER_ERROR,
    grpc.StatusCode.DEADLINE_EXCEEDED: pb.OUTCOME_TIMEOUT,
    grpc.StatusCode.CANCELLED: pb.OUTCOME_ABORTED,
    grpc.StatusCode.ABORTED: pb.OUTCOME_ABORTED,
}


def outcome_of(code: grpc.StatusCode) -> pb.Outcome:
    """What a call to an engine that ended with `code` says about the engine."""
    return _OUTCOMES.get(code, pb.OUTCOME_CLIENT_ERROR)


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to run one sample on a data-parallel rank of an engine."""

    lease_id: int
    engine_id: str
    address: str
    dp_rank: int


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Leases to ask for. Columns have one entry per lease, or are empty.

    groups: (group id, number of consecutive leases), summing to count.
    expected_tokens: of output, 0 unknown. sessions: "" for none; cached_tokens: what a
    session's target has in its cache of the next prompt. excluded_engines: ids of engines to
    keep off, as long as there is a free one beside them.
    """

    count: int
    min_version: int | None = None
    exact_version: int | None = None
    groups: Sequence[tuple[str, int]] = ()
    expected_tokens: Sequence[float] = ()
    sessions: Sequence[str] = ()
    cached_tokens: Sequence[int] = ()
    excluded_engines: Sequence[str] = ()

    @property
    def needs(self) -> Needs:
        return Needs(self.min_version or 0, self.exact_version)

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for leases that one call can ask for."""
        return self.min_version, self.exact_version, *self.excluded_engines

    def only(self, index: int) -> Wanted:
        """The same for one of the leases."""
        group, start = "", 0
        for name, size in self.groups:
            if start <= index < start + size:
                group = name
            start += size
        return Wanted(
            count=1,
            min_version=self.min_version,
            exact_version=self.exact_version,
            groups=[(group, 1)] if group else (),
            expected_tokens=self.expected_tokens[index : index + 1],
            sessions=self.sessions[index : index + 1],
            cached_tokens=self.cached_tokens[index : index + 1],
            excluded_engines=self.excluded_engines,
        )


def join(singles: Sequence[Wanted]) -> Wanted:
    """One request for single leases of the same kind."""
    names = [wanted.groups[0][0] if wanted.groups else "" for wanted in singles]
    groups = [(name, len(list(run))) for name, run in itertools.groupby(names)]
    return Wanted(
        count=len(singles),
        min_version=singles[0].min_version,
        exact_version=singles[0].exact_version,
        groups=groups if any(names) else (),
        expected_tokens=_column([wanted.expected_tokens for wanted in singles], 0.0),
        sessions=_column([wanted.sessions for wanted in singles], ""),
        cached_tokens=_column([wanted.cached_tokens for wanted in singles], 0),
        excluded_engines=singles[0].excluded_engines,
    )


def _column(cells: Sequence[Sequence[T]], missing: T) -> Sequence[T]:
    """Of columns of one entry or none; empty where all are."""
    return [cell[0] if cell else missing for cell in cells] if any(cells) else ()
