"""The broadcasts of a transfer: what a sender sends, and receivers check."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from sluice import faults, platform
from sluice.weights.digest import digest_bytes
from sluice.weights.errors import TensorDigestError
from sluice.weights.shards import TORCH_DTYPES
from sluice.weights.transfer.group import Deadline, TransferGroup
from sluice.weights.transfer.plan import Bucket


def send(
    group: TransferGroup,
    buckets: Sequence[Bucket],
    read: Callable[[Bucket], torch.Tensor],
    deadline: Deadline,
) -> int:
    """Broadcast `buckets`, whose bytes `read` gives as uint8[size] on the host; bytes sent.

    Raises TransferBrokenError.
    """
    device = platform.current().device()
    for bucket in buckets:
        group.broadcast(read(bucket).to(device), deadline)
        faults.point("transfer.sent")
    return sum(bucket.size for bucket in buckets)


def receive(
    senders: Sequence[tuple[TransferGroup, Sequence[Bucket]]], deadline: Deadline
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of every sender, on the device, as views of memory that their bucket shares.

    Each is digested, but broadcasts go on after a wrong one, for the sake of the other members:
    serve the tensors only after the iterator has ended without TensorDigestError (which names
    the first wrong one) or TransferBrokenError.
    """
    device = platform.current().device()
    wrong: TensorDigestError | None = None
    for group, buckets in senders:
        for bucket in buckets:
            flat = torch.empty(bucket.size, dtype=torch.uint8, device=device)
            group.broadcast(flat, deadline)
            faults.point("transfer.received")
            host = flat.cpu().numpy().data
            for piece in bucket.pieces:
                actual = digest_bytes(host[piece.begin : piece.end])
                if actual != piece.digest:
                    wrong = wrong or TensorDigestError(piece.name, piece.digest, actual)
                tensor = flat[piece.begin : piece.end].view(TORCH_DTYPES[piece.dtype])
                yield piece.name, tensor.reshape(piece.shape)
    if wrong is not None:
        raise wrong
