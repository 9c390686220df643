"""`sluice protoset`: a pool made of the file alone has every service and what errors carry."""

from __future__ import annotations

import asyncio
from pathlib import Path

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.rpc import code_pb2, error_details_pb2, status_pb2

from sluice.protoset import write_protoset

PROTOS = Path(__file__).parents[2] / "protos"


def test_the_file_alone_has_every_service_and_the_details_of_errors(tmp_path: Path) -> None:
    path = tmp_path / "sluice.binpb"
    asyncio.run(write_protoset([str(path)]))
    files = descriptor_pb2.FileDescriptorSet.FromString(path.read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.Add(file)  # raises for what comes before what it imports
    for source in PROTOS.rglob("*.proto"):
        assert pool.FindFileByName(str(source.relative_to(PROTOS)))
    methods = pool.FindServiceByName("sluice.api.router.v1.RouterService").methods_by_name
    assert "AcquireLeases" in methods
    assert pool.FindServiceByName("google.longrunning.Operations")
    assert pool.FindServiceByName("grpc.health.v1.Health")
    sent = status_pb2.Status(code=code_pb2.ABORTED)
    sent.details.add().Pack(error_details_pb2.ErrorInfo(reason="STEP_MISMATCH"))
    kind = message_factory.GetMessageClass(pool.FindMessageTypeByName("google.rpc.Status"))
    (detail,) = kind.FromString(sent.SerializeToString()).details
    info = pool.FindMessageTypeByName(detail.type_url.rpartition("/")[2])
    assert message_factory.GetMessageClass(info).FromString(detail.value).reason == "STEP_MISMATCH"
