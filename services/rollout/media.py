"""What prompts show, fetched from the shared store for an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from services.rollout.engine import Media, MediaKind
from sluice.api.rollout.v1 import engine_service_pb2 as pb
from sluice.runtime.errors import DataLossError, InvalidFieldError, NotFoundError
from sluice.samples.blobs import BlobDigestError, BlobNotFoundError, BlobReference, BlobStore

KINDS = {pb.MEDIA_KIND_IMAGE: MediaKind.IMAGE}


class MediaReader:
    """Reads blobs off the event loop."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs

    async def read(self, messages: Iterable[pb.Media]) -> tuple[Media, ...]:
        """Raises InvalidFieldError, NotFoundError, or DataLossError for damaged bytes."""
        return await asyncio.to_thread(lambda: tuple(self._read(one) for one in messages))

    def _read(self, message: pb.Media) -> Media:
        if message.kind not in KINDS:
            raise InvalidFieldError("media.kind", f"kind {message.kind} is unknown")
        reference = BlobReference(message.blob.digest, message.blob.size_bytes)
        try:
            data = self._blobs.get(reference)
        except BlobNotFoundError:
            raise NotFoundError("blob", reference.digest) from None
        except BlobDigestError as error:
            raise DataLossError(str(error), blob=reference.digest) from None
        return Media(KINDS[message.kind], reference.digest, data)
