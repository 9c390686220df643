"""Trainers in a bucket: which run drives each of them, among the runs of a store.

drivers/<digest of an address>/log/<8 digits>     claims of runs, of which the newest counts
drivers/<digest of an address>/alive/<8 digits>   of a claim: changes while its loop lives
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sluice.bucket import ObjectBucket, ObjectsError, each_of
from sluice.loop.claims import BEATS, OVER, RunTakenError, shown_alive, wait_for_silence
from sluice.loop.run_directory import RunDirectoryError, digest_of, places_of
from sluice.weights.errors import FileDigestError
from sluice.weights.manifest import seal, unseal

DRIVERS, LOG, ALIVE = "drivers", "log", "alive"
FORMAT, SEAL = 1, "entry_digest"


@dataclass(frozen=True)
class Driver:
    """A loop and its run, by where the run is in the bucket, and as a user gave it."""

    run: str
    run_dir: str
    host: str
    process: int
    takeover_seconds: float

    def __str__(self) -> str:
        return f"process {self.process} on {self.host} for {self.run_dir}"


class TrainerLog:
    """The claims of one address of a trainer; once it has a claim, that of one loop."""

    def __init__(self, bucket: ObjectBucket, place: str, address: str, own: Driver) -> None:
        """`place` is the address as everybody writes it, `address` as this run has it."""
        self._root = f"{DRIVERS}/{digest_of(place)}"
        self.url = f"{bucket.url}/{self._root}"
        self._bucket, self._address, self._own = bucket, address, own
        self._number = 0  # of its claim

    @property
    def beat_seconds(self) -> float:
        return self._own.takeover_seconds / BEATS

    async def wait(self) -> int:
        """The newest claim, once its loop is dead or gone. Raises RunTakenError for one that
        lives."""
        newest, driver = await asyncio.to_thread(self._newest)
        # one run has one loop at a time, which is this one now
        if newest and (driver is None or driver.run != self._own.run):
            seconds = driver.takeover_seconds if driver else 0.0
            whom = str(driver or "another loop")
            await wait_for_silence(self, newest, seconds, whom, self._refusal(driver))
        return newest

    def sign_of_life(self, claim: int) -> bytes | None:
        with _errors():
            try:
                return self._bucket.get(self._key(ALIVE, claim))
            except FileNotFoundError:
                return None

    def beat(self, count: int) -> None:
        """Raises RunTakenError once another loop has claimed the trainer."""
        with _errors():
            self._bucket.put(self._key(ALIVE, self._number), b"%d" % count)
            if self._bucket.exists(self._key(LOG, self._number + 1)):
                driver = self._read(self._number + 1) or "another loop"
                raise RunTakenError(f"trainer: {driver} has taken over {self._address}; this ends")

    def end(self) -> None:
        with suppress(ObjectsError):
            self._bucket.put(self._key(ALIVE, self._number), OVER)

    def claim(self, number: int) -> None:
        """Raises RunTakenError for one who was faster."""
        document = {"format": FORMAT, "driver": asdict(self._own), "nonce": secrets.token_hex(8)}
        with _errors():
            if not self._bucket.put_once(self._key(LOG, number), seal(document, SEAL)):
                raise RunTakenError(self._refusal(self._read(number)))
        self._number = number

    def _refusal(self, driver: Driver | None) -> str:
        return (
            f"trainer: {self._address} is driven by {driver or 'another loop'}; stop that, or "
            "start services of this run's own (--up)"
        )

    def _newest(self) -> tuple[int, Driver | None]:
        """Its number, 0 where there is none, and who made it, where it can be read."""
        with _errors():
            keys = self._bucket.keys(f"{self._root}/{LOG}")
            newest = max((int(key.rpartition("/")[2]) for key in keys), default=0)
            return newest, self._read(newest) if newest else None

    def _read(self, number: int) -> Driver | None:
        key = self._key(LOG, number)
        try:
            return Driver(**unseal(self._bucket.get(key), SEAL, key)["driver"])
        except (FileNotFoundError, FileDigestError, ValueError, KeyError, TypeError):
            return None

    def _key(self, folder: str, number: int) -> str:
        return f"{self._root}/{folder}/{number:08d}"


class _Claims:
    """All addresses of the trainers of a run, which one loop has together."""

    def __init__(self, logs: list[TrainerLog], url: str, beat_seconds: float) -> None:
        self.url, self.beat_seconds, self._logs = url, beat_seconds, logs

    def beat(self, count: int) -> None:
        each_of(lambda log: log.beat(count), self._logs)

    def end(self) -> None:
        each_of(TrainerLog.end, self._logs)


@asynccontextmanager
async def sole_bucket_driver(
    store: str, run: str, run_dir: Path, trainers: Iterable[str], takeover_seconds: float
) -> AsyncIterator[None]:
    """Drive the trainers at these addresses alone, among the runs of a bucket, as `sole_driver`.

    `run` is where the run is in the bucket, which this loop has for itself. Raises RunTakenError
    while another run's loop shows that it lives, and out of the block once one has taken over.
    """
    named = {place: address for address in trainers for place in places_of(address)}
    own = Driver(run, str(run_dir), socket.gethostname(), os.getpid(), takeover_seconds)
    bucket = ObjectBucket(store)
    logs = [TrainerLog(bucket, place, address, own) for place, address in sorted(named.items())]
    claims = _Claims(logs, f"{bucket.url}/{DRIVERS}", takeover_seconds / BEATS)
    taken = list[TrainerLog]()
    try:
        for log, newest in zip(logs, await _all([log.wait() for log in logs]), strict=True):
            await asyncio.to_thread(log.claim, newest + 1)
            taken.append(log)
    except BaseException:
        await asyncio.to_thread(each_of, TrainerLog.end, taken)
        raise
    async with shown_alive(claims):
        yield


async def _all(calls: Sequence[Coroutine[Any, Any, int]]) -> list[int]:
    """What each returns; the others end with the first that fails."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except ObjectsError as error:
        raise RunDirectoryError(f"trainers: {error}") from error
