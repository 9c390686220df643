"""What a rank does for a new version of weights: write its shards, send them to engines."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from services.trainer.backend import TrainingBackend
from services.trainer.config import TrainerConfig
from sluice import platform
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.runtime.wire import seconds_of
from sluice.weights.errors import WeightStoreError
from sluice.weights.manifest import ShardFile, delta_name
from sluice.weights.store import WeightStore
from sluice.weights.transfer.group import Deadline, Meeting, TransferGroup, send
from sluice.weights.transfer.plan import plan_shards
from sluice.weights.writer import PublishedShards


class RankPublisher:
    """One rank's shards, and the group in which it broadcasts them."""

    def __init__(self, config: TrainerConfig, backend: TrainingBackend) -> None:
        self._config, self._backend = config, backend
        keep = config.publish.delta or config.transfer.enabled
        self._shards = PublishedShards(keep=keep, sync=config.durable)
        self._meeting: Meeting | None = None
        self._group: TransferGroup | None = None

    def publish(self, command: pb.PublishCommand, result: pb.CommandResult) -> None:
        self._shards.begin(command.base if command.HasField("base") else None)
        if command.directory:
            shards = self._backend.write_shards(Path(command.directory), self._shards.write)
        else:
            shards = self._upload_shards(command.version)
        self._shards.finish(command.version)
        result.shards.extend(_shard_to_proto(shard) for shard in shards)
        result.encode_seconds = self._shards.encode_seconds

    def _upload_shards(self, version: int) -> list[ShardFile]:
        """Write shard after shard on this host, and put each into the bucket."""
        with tempfile.TemporaryDirectory(prefix="sluice-shards-") as scratch:
            store = WeightStore(self._config.weights_location, scratch=Path(scratch))

            def write(
                directory: Path, file_name: str, tensors: Mapping[str, torch.Tensor]
            ) -> ShardFile:
                shard = self._shards.write(directory, file_name, tensors)
                stored = delta_name(file_name) if shard.delta else file_name
                store.upload(version, directory / stored)
                return shard

            return self._backend.write_shards(Path(scratch), write)

    def open_transfer(self, command: pb.OpenTransferCommand, result: pb.CommandResult) -> None:
        """Listen for the members of a new group, if there is anything to send."""
        self.close()
        if self._shards.empty:
            return
        seconds = seconds_of(command.timeout)
        self._meeting = Meeting(self._host(), command.world_size, seconds)
        result.transfer_address = self._meeting.address
        result.transfer_backend = platform.current().collective

    def send(self, command: pb.SendWeightsCommand, result: pb.CommandResult) -> None:
        """Broadcast the version published last. That engines are gone is no error here."""
        if self._meeting is None:
            return
        deadline = Deadline(seconds_of(command.timeout))
        try:
            buckets = plan_shards(self._shards.report(command.version), command.bucket_bytes)
            if self._group is None:
                name = f"{command.transfer_group}-{self._backend.mesh.rank}"
                backend = platform.current().collective
                self._group = self._meeting.join(name, backend, deadline)
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
