"""Whether a pool takes a request at all; if not, the caller learns why and when to return."""

from __future__ import annotations

from sluice.balance.routing.clients import ClientRow
from sluice.balance.routing.tables import Tables
from sluice.balance.routing.types import LeaseRequest, Refusal, RefusedError
from sluice.balance.routing.waiting import WaitingRoom


def admit(
    tables: Tables, waiting: WaitingRoom, row: ClientRow, request: LeaseRequest, unbound: int
) -> None:
    """Raise RefusedError unless the pool can take `request`, `unbound` leases of which need a
    target."""
    config, leases = tables.config, tables.leases
    if leases.live_count + request.count > config.max_leases:
        raise RefusedError(Refusal.TOO_MANY_LEASES, f"{config.max_leases} leases are out", 1.0)
    if leases.count_of(row.slot) + request.count > config.max_leases_per_client:
        raise RefusedError(
            Refusal.TOO_MANY_LEASES_OF_CLIENT,
            f"{row.name} may hold {config.max_leases_per_client} leases",
            1.0,
        )
    if not unbound:
        return
    if not request.may_wait and not tables.targets.able(request.needs).any():
        if tables.targets.any_usable():
            raise RefusedError(
                Refusal.NO_ENGINE_WITH_VERSION, f"no engine serves {request.needs}", 1.0
            )
        raise RefusedError(Refusal.NO_ENGINE, "no engine takes requests", 1.0)
    missing = unbound
    if not waiting.has(request.needs):
        missing -= tables.targets.fleet(request.needs).free_count
    if missing > 0 and not request.may_wait:
        raise RefusedError(Refusal.NO_CREDIT, f"{missing} leases exceed the credits", 0.5)
    if missing > 0 and waiting.count + missing > config.max_queued:
        raise RefusedError(Refusal.QUEUE_FULL, f"{config.max_queued} leases wait", 1.0)
