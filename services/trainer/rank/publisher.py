"""One rank's part of a version: its shards written, and broadcast."""

from __future__ import annotations

import socket
from functools import partial
from pathlib import Path

import torch

from services.trainer.backend import TrainingBackend
from services.trainer.config import TrainerConfig
from services.trainer.rank.quantization import quantizing
from sluice import faults, platform
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.durable import scratch
from sluice.place import is_bucket
from sluice.runtime.wire import seconds_of
from sluice.weights.errors import WeightStoreError
from sluice.weights.manifest import ShardFile, delta_name
from sluice.weights.shards import PublishedShards, ShardWrite
from sluice.weights.store import WeightStore
from sluice.weights.transfer.deadline import Deadline
from sluice.weights.transfer.group import Meeting, MemberGroup, send
from sluice.weights.transfer.plan import HANDLES, plan_shards


class RankPublisher:
    """One rank's shards, and the group in which it broadcasts them."""

    def __init__(self, config: TrainerConfig, backend: TrainingBackend) -> None:
        self._config, self._backend = config, backend
        keep = config.publish.delta or config.transfer.enabled
        sync = config.durable and not is_bucket(config.weights_location)
        self._shards = PublishedShards(keep=keep, sync=sync)
        self._meeting: Meeting | None = None
        self._group: MemberGroup | None = None
        by_handles = config.transfer.medium == "handles"
        self._medium = HANDLES if by_handles else platform.current().collective

    def publish(self, command: pb.PublishCommand, result: pb.CommandResult) -> None:
        """Write this rank's shards; each is announced when it is written and digested.

        With `write_behind` they are kept alone, for `write`.
        """
        base = command.base if command.HasField("base") else None
        self._shards.begin(base, behind=command.write_behind)
        try:
            if command.directory:
                shards = self._write_shards(command.version, Path(command.directory), base)
            else:
                shards = self._upload_shards(command.version, base)
        finally:
            self._shards.settle()
        self._shards.finish(command.version)
        result.shards.extend(_shard_to_proto(shard) for shard in shards)
        result.encode_seconds = self._shards.encode_seconds

    def write(self, command: pb.WriteWeightsCommand) -> None:
        """Write the files of the version published last, on another thread than all else."""

        def note(_: ShardFile) -> None:
            faults.point("weights.behind")

        if command.directory:
            self._shards.write_kept(command.version, Path(command.directory), note)
            return
        with scratch("sluice-behind-") as folder:
            store = WeightStore(self._config.weights_location, scratch=folder)

            def upload(shard: ShardFile) -> None:
                store.upload(command.version, folder / shard.file_name)
                note(shard)

            self._shards.write_kept(command.version, folder, upload)

    def _write_shards(self, version: int, directory: Path, base: int | None) -> list[ShardFile]:
        store = WeightStore(self._config.weights_location, durable=False)

        def announce(shard: ShardFile) -> None:
            store.announce(version, shard, directory, base=base)
            faults.point("weights.announced")

        submit = partial(self._shards.submit, written=announce)
        return self._backend.write_shards(directory, self._quantized(submit))

    def _quantized(self, submit: ShardWrite) -> ShardWrite:
        config = self._config
        if (layout := config.publish.layout) is None:
            return submit
        narrow = config.publish.quantization_aware and config.passes_narrow
        return quantizing(submit, layout, torch.bfloat16 if narrow else None)

    def _upload_shards(self, version: int, base: int | None) -> list[ShardFile]:
        """Write shard after shard on this host, and put each into the bucket."""
        with scratch("sluice-shards-") as folder:
            store = WeightStore(self._config.weights_location, scratch=folder)

            def upload(shard: ShardFile) -> None:
                stored = delta_name(shard.file_name) if shard.delta else shard.file_name
                store.upload(version, folder / stored)
                store.announce(version, shard, base=base)
                faults.point("weights.announced")

            submit = partial(self._shards.submit, written=upload)
            try:
                return self._backend.write_shards(folder, self._quantized(submit))
            finally:
                self._shards.settle()

    def open_transfer(self, command: pb.OpenTransferCommand, result: pb.CommandResult) -> None:
        """Listen for the members of a new group, if there is anything to send."""
        self.close()
        if self._shards.empty:
            return
        seconds = seconds_of(command.timeout)
        self._meeting = Meeting(self._host(), command.world_size, seconds)
        result.transfer_address = self._meeting.address
        result.transfer_backend = self._medium

    def send(self, command: pb.SendWeightsCommand, result: pb.CommandResult) -> None:
        """Broadcast the version published last. That engines are gone is no error here."""
        if self._meeting is None:
            return
        deadline = Deadline(seconds_of(command.timeout))
        try:
            buckets = plan_shards(self._shards.report(command.version), command.bucket_bytes)
            if self._group is None:
                name = f"{command.transfer_group}-{self._backend.mesh.rank}"
                self._group = self._meeting.join(name, self._medium, deadline)
            result.sent_bytes = send(self._group, buckets, self._shards.read, deadline)
        except WeightStoreError as error:
            self.close()
            result.transfer_failure = str(error)

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()
        if self._meeting is not None:
            self._meeting.close()
        self._group = self._meeting = None

    def _host(self) -> str:
        if self._config.transfer.host:
            return self._config.transfer.host
        return "127.0.0.1" if self._config.ranks.launch == "local" else socket.gethostname()


def _shard_to_proto(shard: ShardFile) -> pb.WrittenShard:
    message = pb.WrittenShard(
        file_name=shard.file_name,
        size_bytes=shard.size,
        digest=shard.digest,
        tensors={
            name: pb.WrittenTensor(dtype=entry.dtype, shape=entry.shape, digest=entry.digest)
            for name, entry in shard.tensors.items()
        },
    )
    if (delta := shard.delta) is not None:
        message.delta.file_name = delta_name(shard.file_name)
        message.delta.size_bytes, message.delta.digest = delta.size, delta.digest
        message.delta.changed_count, message.delta.element_count = delta.changed, delta.elements
    return message
