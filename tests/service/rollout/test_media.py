"""Images in a prompt, on an engine that reads text only."""

from __future__ import annotations

import grpc
import pytest

from sluice.api.common.v1 import sample_pb2
from sluice.api.rollout.v1 import engine_service_pb2 as pb
from sluice.client import EngineClient, RemoteError, new_request_id, typed_errors
from sluice.samples.blob_store import BlobStore
from tests.service.rollout.harness import Store, load_weights


async def refused(
    engine: EngineClient, digest: str, kind: pb.MediaKind = pb.MEDIA_KIND_IMAGE
) -> RemoteError:
    request = pb.GenerateRequest(
        request_id=new_request_id(),
        prompt_token_ids=[1, 2],
        sampling=pb.SamplingParams(max_new_tokens=1),
        media=[pb.Media(kind=kind, blob=sample_pb2.BlobReference(digest=digest))],
    )
    with pytest.raises(RemoteError) as caught, typed_errors():
        await engine.stub.Generate(request)
    return caught.value


async def test_an_image_is_refused_and_the_engine_goes_on(
    engine: EngineClient, store: Store
) -> None:
    await load_weights(engine, store.first)
    blob = BlobStore(store.root, sync=False).put(b"a picture")
    error = await refused(engine, blob.digest)
    expected = (grpc.StatusCode.INVALID_ARGUMENT, "MEDIA_UNSUPPORTED")
    assert (error.code, error.reason) == expected
    request = pb.GenerateRequest(
        request_id=new_request_id(),
        prompt_token_ids=[1, 2],
        sampling=pb.SamplingParams(max_new_tokens=1),
    )
    assert (await engine.stub.Generate(request)).completions


async def test_what_is_not_in_the_store_or_not_whole_is_named(
    engine: EngineClient, store: Store
) -> None:
    await load_weights(engine, store.first)
    error = await refused(engine, "0" * 32)
    assert error.code is grpc.StatusCode.NOT_FOUND
    blobs = BlobStore(store.root, sync=False)
    blob = blobs.put(b"a picture")
    path = next(path for path in blobs.root.rglob(f"*{blob.digest}*") if path.is_file())
    path.chmod(0o644)
    path.write_bytes(b"a Picture")
    error = await refused(engine, blob.digest)
    assert error.code is grpc.StatusCode.DATA_LOSS
    error = await refused(engine, blob.digest, kind=pb.MEDIA_KIND_UNSPECIFIED)
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
