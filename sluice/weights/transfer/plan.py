"""Weights from a trainer's ranks to engines over collectives, past the store.

The trainer's controller publishes a version to the store, then sends it to the engines at hand:

0. `CheckTransfer` on every engine, which reads the manifest and compares it with its model: one
   that could not receive the version is left out of the group.
1. `OpenTransferCommand`: every rank that owns tensors (a *sender*) listens with a torch
   `TCPStore` and says at which host:port.
2. `JoinTransferGroup` on every engine: one process group for each sender, in the order of the
   request. The sender is rank 0, an engine has `transfer_rank_count` ranks from `first_rank` on.
   The group is what SGLang's `init_weights_update_group` makes: keys below
   `PrefixStore(group)`, `_new_process_group_helper` with the backend's name and no default group.
3. `SendWeightsCommand` on the ranks and `PrepareWeights` with `transfer` on the engines, at the
   same time. Sender after sender in the order in which they were joined, each broadcasts its
   *buckets* from rank 0: one `broadcast` of a flat uint8 tensor a bucket, and nothing else. No
   names travel: both sides compute the same list with `plan.plan_buckets` from the manifest of
   the version in the store, the names of the files that the sender owns, and `bucket_bytes`.

A bucket is a run of whole tensors of one shard file, in the order of its bytes there (wide dtypes
first, then by name, so that all are aligned): at most `bucket_bytes`, or one larger tensor. Its
bytes are those of the tensors in their published dtype, row-major, little-endian, without gaps:
what SGLang takes as `load_format="flattened_bucket"` with the names, dtypes and shapes of the
bucket. Tensors without elements are in no broadcast.

The receiver digests every tensor (xxh3-128) and compares it with the manifest before the version
counts as prepared. Who cannot check first, since its engine loads into the serving weights, stays
paused until it has checked, and goes back to a version of the store if they differ.

Every wait has the deadline of the request. A member that dies or stalls breaks its groups for
all; the controller then makes new ones without it, and the engine left out catches up from the
store.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sluice.weights.checkpoint import BITS, byte_order
from sluice.weights.errors import InvalidCheckpointError
from sluice.weights.manifest import Manifest, ShardFile, TensorEntry

DEFAULT_BUCKET_BYTES = 256 << 20
HANDLES = "handles"  # in place of a collective backend: `sluice.weights.transfer.handles`


@dataclass(frozen=True, kw_only=True)
class Membership:
    """A place in the group that meets at `address` (host:port)."""

    address: str
    group: str
    rank: int
    world_size: int
    backend: str


@dataclass(frozen=True)
class BucketTensor:
    """A tensor in a bucket: safetensors dtype, shape, digest, bytes begin..end of the bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str
    begin: int
    end: int


@dataclass(frozen=True)
class Bucket:
    """Tensors of one shard file that are broadcast as one flat uint8 tensor of `size` bytes.

    They lie in the file one after the other from byte `offset` of its data on.
    """

    file_name: str
    offset: int
    size: int
    pieces: tuple[BucketTensor, ...]


def plan_buckets(
    manifest: Manifest, file_names: Sequence[str], bucket_bytes: int = DEFAULT_BUCKET_BYTES
) -> list[Bucket]:
    """Plan the broadcasts of a sender that owns `file_names`, in order, as a receiver knows them.

    Raises InvalidCheckpointError for a file that the manifest has no tensors of.
    """
    owned: dict[str, dict[str, TensorEntry]] = {name: {} for name in file_names}
    for name, stored in manifest.tensors.items():
        if stored.file in owned:
            owned[stored.file][name] = TensorEntry(stored.dtype, stored.shape, stored.digest)
    if missing := [name for name, tensors in owned.items() if not tensors]:
        raise InvalidCheckpointError(f"the manifest has no tensors of {missing[0]!r}")
    return [bucket for file in file_names for bucket in _plan_file(file, owned[file], bucket_bytes)]


def plan_shards(shards: Iterable[ShardFile], bucket_bytes: int) -> list[Bucket]:
    """Plan the same as the sender knows them: of the shards that it reported, in that order."""
    return [
        bucket
        for shard in shards
        for bucket in _plan_file(shard.file_name, shard.tensors, bucket_bytes)
    ]


def _plan_file(
    file_name: str, tensors: Mapping[str, TensorEntry], bucket_bytes: int
) -> list[Bucket]:
    layout = {name: (entry.dtype, tuple(entry.shape)) for name, entry in tensors.items()}
    buckets: list[Bucket] = []
    pieces: list[BucketTensor] = []
    start = offset = 0

    def close() -> None:
        nonlocal start
        if offset > start:
            buckets.append(Bucket(file_name, start, offset - start, tuple(pieces)))
            pieces.clear()
        start = offset

    for name in byte_order(layout):
        dtype, shape = layout[name]
        size = math.prod(shape) * BITS[dtype] // 8
        if offset + size - start > bucket_bytes:
            close()
        begin = offset - start
        pieces.append(BucketTensor(name, dtype, shape, tensors[name].digest, begin, begin + size))
        offset += size
    close()
    return buckets
