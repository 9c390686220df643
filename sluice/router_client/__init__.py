"""Leases from the router: batches, heartbeats, and local picks while it is down."""

from sluice.router_client.client import LeaseClient
from sluice.router_client.types import Lease, Wanted, outcome_of

__all__ = ["Lease", "LeaseClient", "Wanted", "outcome_of"]
