"""Whether the services of a run see the store that the loop sees, asked at its start."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping
from contextlib import suppress

import grpc

from sluice.api.common.v1 import store_service_pb2 as pb
from sluice.client import Client, RemoteError
from sluice.config import ConfigError
from sluice.place import Place
from sluice.store_check import has_nonce, remove_nonce, write_nonce

logger = logging.getLogger(__name__)

_PASSED_OVER = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}


async def inspect_store(places: Mapping[str, Place], clients: Mapping[str, Client]) -> None:
    """Have each process read what this one writes, and this one what each writes.

    `places` by use, `clients` by the name of the process. One that cannot be reached is passed
    over, and so is one of a release that cannot be asked. Raises ConfigError, which names the
    first process, by name, that sees another store, and where.
    """
    nonce, others = secrets.token_hex(16), list[str]()
    try:
        for use, place in places.items():
            try:
                await asyncio.to_thread(write_nonce, place, nonce)
            except (OSError, ValueError) as error:
                problem = f"{use}: {place} cannot be written by this process: {error}"
                raise ConfigError(problem) from None
        names = sorted(clients)
        answers = await asyncio.gather(*(_ask(name, clients[name], nonce) for name in names))
        found = {name: answer for name, answer in zip(names, answers, strict=True) if answer}
        others = [answer.nonce for answer in found.values()]
        for name, answer in found.items():
            await _compare(name, answer, places)
    finally:
        for place in places.values():
            for each in (nonce, *others):
                with suppress(OSError):  # the next inspection removes it
                    await asyncio.to_thread(remove_nonce, place, each)


async def _ask(name: str, client: Client, nonce: str) -> pb.CheckStoreResponse | None:
    try:
        return await client.check_store(nonce)
    except RemoteError as error:
        if error.code is grpc.StatusCode.UNIMPLEMENTED:
            return None
        if error.code in _PASSED_OVER:
            logger.warning("%s was not asked which store it sees: %s", name, error)
            return None
        raise


async def _compare(name: str, answer: pb.CheckStoreResponse, places: Mapping[str, Place]) -> None:
    who = f"{name} (process {answer.process_id} on {answer.host})"
    for checked in answer.places:
        if (place := places.get(checked.use)) is None:
            continue
        if checked.problem:
            raise ConfigError(
                f"{checked.use}: {who} cannot use {checked.location}: {checked.problem}"
            )
        if not checked.found:
            raise ConfigError(
                f"{checked.use}: {who} does not see what this process writes: its "
                f"{checked.location} is another one than {place} here"
            )
        try:
            seen = await asyncio.to_thread(has_nonce, place, answer.nonce)
        except OSError as error:
            raise ConfigError(f"{checked.use}: {place} cannot be read: {error}") from None
        if not seen:
            raise ConfigError(
                f"{checked.use}: what {who} writes into {checked.location} does not come to "
                f"{place} here"
            )
