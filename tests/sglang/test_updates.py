"""Weights change while SGLang generates: from disk and over a process group."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from services.rollout.engine.interface import Delta, IncomingWeights, PauseMode
from services.rollout.engine.sglang.engine import SglangEngine
from services.rollout.errors import DigestMismatchError, EngineFailedError
from sluice.runtime.errors import ServiceError
from sluice.weights.manifest import Manifest, read_manifest
from sluice.weights.shards import load_verified
from sluice.weights.store import StoredVersion
from sluice.weights.transfer.deadline import Deadline
from sluice.weights.transfer.group import Meeting
from sluice.weights.transfer.plan import Bucket, Membership, plan_buckets
from tests.contract.engine.cases import Model, complete, request_of
from tests.patience import PATIENCE
from tests.sglang.conftest import Start

LENGTH = 1000  # tokens: an update comes before the end


async def running(engine: SglangEngine, name: str, count: int = 4) -> asyncio.Task[list[Delta]]:
    """A request of which every sample has drawn tokens."""
    request = request_of(name, [1, 2, 3], count, max_new_tokens=LENGTH)
    task = asyncio.create_task(complete(engine, request))
    async with asyncio.timeout(PATIENCE):
        while engine.status().rank_loads[0].running_count < count:
            await asyncio.sleep(0.01)
    return task


def check_spans(
    samples: Sequence[Delta], versions: Sequence[tuple[int, str]], old: Model
) -> list[int]:
    """Every sample began under the first version and ended under the last; where it changed."""
    cuts = []
    for sample in samples:
        assert [(span.version, span.digest) for span in sample.spans] == list(versions)
        places = [place for span in sample.spans for place in (span.first_token, span.last_token)]
        cut = places[1] + 1
        assert places == [0, cut - 1, cut, LENGTH - 1]
        expected = old.logprobs([1, 2, 3], sample.token_ids[:cut])
        assert sample.logprobs[:cut] == pytest.approx(expected, abs=1e-3)
        after = old.logprobs([1, 2, 3], sample.token_ids)[cut:]
        assert sample.logprobs[cut:] != pytest.approx(after, abs=1e-3)
        cuts.append(cut)
    return cuts


@pytest.mark.fast
async def test_an_update_from_disk_while_generating(
    models: tuple[Model, Model], versions: list[StoredVersion], attach: Start
) -> None:
    engine = await attach()
    old, new = versions
    task = await running(engine, "a")
    await engine.prepare(new.version, new.digest, new.directory)
    assert not task.done()
    pause = await engine.commit(new.version, PauseMode.IN_PLACE)
    samples = await asyncio.wait_for(task, PATIENCE)
    check_spans(samples, [(0, old.digest), (new.version, new.digest)], models[0])
    (fresh,) = await complete(engine, request_of("b", [1, 2, 3]))  # a prefix of the old weights
    expected = models[1].logprobs([1, 2, 3], fresh.token_ids)
    assert fresh.logprobs == pytest.approx(expected, abs=1e-3)
    assert engine.status().last_pause_seconds == pause


class Sender(threading.Thread):
    """Rank 0 of a transfer group: meets the engine, then broadcasts buckets."""

    def __init__(self, record: StoredVersion, name: str, *, stop_after: int | None = None) -> None:
        super().__init__(daemon=True)
        manifest = read_manifest(record.directory)
        files = sorted({stored.file for stored in manifest.tensors.values()})
        self.buckets = plan_buckets(manifest, files, 8192)
        self._tensors = dict(load_verified(record.directory, manifest))
        self._meeting = Meeting("127.0.0.1", 2, PATIENCE)
        self._count = len(self.buckets) if stop_after is None else stop_after
        self._go = threading.Event()
        self.membership = Membership(
            address=self._meeting.address, group=name, rank=1, world_size=2, backend="gloo"
        )

    def run(self) -> None:
        group = self._meeting.join(self.membership.group, "gloo", Deadline(PATIENCE))
        assert self._go.wait(PATIENCE)
        for bucket in self.buckets[: self._count]:
            group.broadcast(self._bytes(bucket), Deadline(PATIENCE))
        group.close()
        self._meeting.close()

    def send(self) -> None:
        self._go.set()

    def _bytes(self, bucket: Bucket):  # type: ignore[no-untyped-def]
        import torch

        flat = torch.empty(bucket.size, dtype=torch.uint8)
        for piece in bucket.pieces:
            flat[piece.begin : piece.end] = self._tensors[piece.name].flatten().view(torch.uint8)
        return flat


async def meet(engine: SglangEngine, sender: Sender) -> None:
    sender.start()
    await engine.join_transfer([sender.membership], PATIENCE)


def incoming(record: StoredVersion, sender: Sender, seconds: float = PATIENCE) -> IncomingWeights:
    manifest: Manifest = read_manifest(record.directory)
    return IncomingWeights(manifest=manifest, buckets=[sender.buckets], seconds=seconds)


@pytest.mark.fast
async def test_an_update_over_gloo_while_generating(
    models: tuple[Model, Model], versions: list[StoredVersion], attach: Start
) -> None:
    engine = await attach()
    assert engine.status().transfer_ranks == 1
    old, new = versions
    sender = Sender(new, "while-generating")
    await meet(engine, sender)
    task = await running(engine, "a")
    sender.send()
    assert len(sender.buckets) > 3
    await engine.receive(incoming(new, sender))
    status = engine.status()
    assert (status.version, status.digest) == (new.version, new.digest)
    samples = await asyncio.wait_for(task, PATIENCE)
    check_spans(samples, [(0, old.digest), (new.version, new.digest)], models[0])
    (fresh,) = await complete(engine, request_of("b", [1, 2, 3]))
    expected = models[1].logprobs([1, 2, 3], fresh.token_ids)
    assert fresh.logprobs == pytest.approx(expected, abs=1e-3)
    sender.join(PATIENCE)


async def test_other_bytes_than_announced_are_found_and_the_old_weights_go_on(
    models: tuple[Model, Model], versions: list[StoredVersion], attach: Start
) -> None:
    engine = await attach()
    old, new = versions
    sender = Sender(old, "liar")  # says it is the new version, and sends the old one
    await meet(engine, sender)
    sender.send()
    with pytest.raises(DigestMismatchError):
        await engine.receive(incoming(new, sender))
    status = engine.status()
    assert (status.version, status.digest, status.paused) == (0, old.digest, False)
    (after,) = await complete(engine, request_of("b", [1, 2, 3]))
    expected = models[0].logprobs([1, 2, 3], after.token_ids)
    assert after.logprobs == pytest.approx(expected, abs=1e-3)
    sender.join(PATIENCE)


async def test_a_sender_that_dies_is_an_error_in_time_and_the_server_is_started_anew(
    models: tuple[Model, Model], versions: list[StoredVersion], launch: Start
) -> None:
    engine = await launch(model=str(models[0].directory))
    old, new = versions
    sender = Sender(new, "dying", stop_after=2)
    await meet(engine, sender)
    sender.send()
    began = asyncio.get_running_loop().time()
    with pytest.raises(ServiceError):
        await engine.receive(incoming(new, sender, seconds=4))
    assert asyncio.get_running_loop().time() - began < 15
    with pytest.raises(EngineFailedError):
        await complete(engine, request_of("a", [1]))
    async with asyncio.timeout(PATIENCE):
        while engine.status().version is None:
            await asyncio.sleep(0.2)
    assert engine.status().digest == old.digest
    (after,) = await complete(engine, request_of("b", [1, 2, 3]))
    expected = models[0].logprobs([1, 2, 3], after.token_ids)
    assert after.logprobs == pytest.approx(expected, abs=1e-3)
    await engine.prepare(new.version, new.digest, new.directory)
    await engine.commit(new.version, PauseMode.IN_PLACE)
    assert engine.status().digest == new.digest


def flip_a_bit(directory: Path) -> None:
    (shard,) = directory.glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-5] ^= 64
    shard.unlink()
    shard.write_bytes(data)


async def test_weights_that_the_server_did_not_take_are_found(
    models: tuple[Model, Model],
    versions: list[StoredVersion],
    attach: Start,
) -> None:
    """The files of a version are exchanged for others between prepare and commit."""
    engine = await attach()
    old, new = versions
    await engine.prepare(new.version, new.digest, new.directory)
    flip_a_bit(new.directory)
    with pytest.raises(DigestMismatchError):
        await engine.commit(new.version, PauseMode.IN_PLACE)
    assert engine.status().digest == old.digest
    (after,) = await complete(engine, request_of("b", [1, 2, 3]))
    expected = models[0].logprobs([1, 2, 3], after.token_ids)
    assert after.logprobs == pytest.approx(expected, abs=1e-3)
