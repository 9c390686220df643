"""`sluice protoset`: the API as one file of descriptors, for clients in other languages."""

from __future__ import annotations

import asyncio
import importlib
import pkgutil
from collections.abc import Sequence
from pathlib import Path

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2

import sluice.api
from sluice.config import ConfigError

PROTOSET_USAGE = "sluice protoset FILE.binpb"


def protoset() -> FileDescriptorSet:
    """Every file of the API and what it imports, each behind its imports.

    With the details of errors (`google.rpc.ErrorInfo`, `RetryInfo`) and the health service.
    """
    found, seen = FileDescriptorSet(), set[str]()

    def add(file: FileDescriptor) -> None:
        if file.name in seen:
            return
        seen.add(file.name)
        for needed in file.dependencies:
            add(needed)
        file.CopyToProto(found.file.add())

    for module in pkgutil.walk_packages(sluice.api.__path__, "sluice.api."):
        if module.name.endswith("_pb2"):
            add(importlib.import_module(module.name).DESCRIPTOR)
    add(error_details_pb2.DESCRIPTOR)
    add(health_pb2.DESCRIPTOR)
    return found


async def write_protoset(arguments: Sequence[str]) -> None:
    """Write the file. Raises ConfigError."""
    if len(arguments) != 1:
        raise ConfigError(f"protoset takes one FILE: {PROTOSET_USAGE}")
    try:
        await asyncio.to_thread(
            Path(arguments[0]).write_bytes, protoset().SerializeToString(deterministic=True)
        )
    except (OSError, ValueError) as error:  # a NUL in its name
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"protoset: {arguments[0][:200]!r}: {why}") from None
