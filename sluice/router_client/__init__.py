"""Leases from the router: batches, heartbeats, and local picks while it is down."""

from sluice.router_client.client import LeaseClient
from sluice.router_client.lease_book import Lease, LeaseDemand, outcome_of

__all__ = ["Lease", "LeaseClient", "LeaseDemand", "outcome_of"]
