"""The converter over gRPC: progress, cancel, resume, refusals by code and reason."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import signal
import urllib.request
import uuid
from pathlib import Path
from typing import Any

import pytest

from sluice.api.converter.v1 import converter_service_pb2 as pb
from sluice.convert_command import ConverterClient
from sluice.runtime.errors import RemoteError
from sluice.weights.convert.conversion import convert
from sluice.weights.convert.options import ConvertOptions
from sluice.weights.convert.verify import compare
from tests.patience import PATIENCE
from tests.service.converter.conftest import Converter


def request(source: Path, target: Path, **more: Any) -> pb.ConvertCheckpointRequest:
    values = {"target_format": pb.FORMAT_TORCH_DIST, "request_id": str(uuid.uuid4())} | more
    return pb.ConvertCheckpointRequest(source=str(source), target=str(target), **values)


async def run(client: ConverterClient, asked: pb.ConvertCheckpointRequest) -> Any:
    """The answer and the last progress."""
    response, metadata = pb.ConvertCheckpointResponse(), pb.ConversionMetadata()
    async for operation in client.follow(await client.convert(asked)):
        operation.metadata.Unpack(metadata)
        operation.response.Unpack(response)
    return response, metadata


async def test_convert_verify_and_list(converter: Converter, model: Path) -> None:
    client = await converter.start()
    target = converter.root / "made"
    asked = request(model, target)
    dry, _ = await run(client, request(model, target, validate_only=True))
    assert not target.exists()
    assert (len(dry.report.converted), dict(dry.digests)) == (47, {})
    made, progress = await run(client, asked)
    assert made.byte_count == dry.byte_count == progress.byte_count == progress.total_byte_count
    assert progress.tensor_count == progress.total_tensor_count == len(made.digests)
    again, _ = await run(client, asked)  # a repeated request is answered, not done again
    assert again == made
    with pytest.raises(RemoteError) as error:
        await client.convert(request(model, converter.root / "x", request_id=asked.request_id))
    assert error.value.reason == "REQUEST_ID_REUSED"
    response = pb.VerifyCheckpointResponse()
    comparison = pb.VerifyCheckpointRequest(first=str(model), second=str(target))
    async for operation in client.follow(await client.verify(comparison)):
        operation.response.Unpack(response)
    assert response.equal
    assert response.equal_count == 47
    listed = await client.list()
    assert [item.metadata.state for item in listed] == [pb.CONVERSION_STATE_SUCCEEDED] * 3
    assert listed[1].metadata.target == str(target)


async def test_a_killed_converter_goes_on_where_it_was(converter: Converter, model: Path) -> None:
    whole = convert(model, converter.root / "whole", ConvertOptions(sync=False))
    client = await converter.start()
    converter.hold("convert.group")  # until the call is answered
    asked = request(model, converter.root / "made")
    await client.convert(asked)
    converter.let_go("convert.group", 15)
    assert await converter.ended() == -signal.SIGKILL
    assert not (converter.root / "made").exists()
    client = await converter.start()
    made, progress = await run(client, asked)
    assert dict(made.digests) == dict(whole.digests)
    assert 0 < progress.resumed_byte_count < progress.byte_count
    assert compare(model, converter.root / "made").same


async def started(client: ConverterClient, name: str) -> None:
    """Wait until a conversion writes."""
    async with asyncio.timeout(PATIENCE):
        while True:
            (item,) = [item for item in await client.list() if item.operation == name]
            if item.metadata.byte_count:
                return
            await asyncio.sleep(0.005)


async def metrics_of(converter: Converter) -> str:
    address = json.loads((converter.root.parent / "address.json").read_text())["metrics_address"]
    answer = await asyncio.to_thread(urllib.request.urlopen, f"http://{address}/metrics")
    return str(answer.read().decode())


async def test_cancel_leaves_nothing_and_sigterm_what_is_done(
    converter: Converter, model: Path
) -> None:
    client = await converter.start()
    converter.hold("convert.group")  # so that both come in the middle
    operation = await client.convert(request(model, converter.root / "made"))
    await started(client, operation.name)
    await client.cancel(operation.name)
    await client.list()  # answered after the conversion was told to stop
    converter.let_go("convert.group")
    with pytest.raises(RemoteError) as error:
        async for _ in client.follow(operation):
            pass
    assert error.value.code.name == "CANCELLED"
    assert [path.name for path in converter.root.iterdir()] == ["model"]
    converter.hold("convert.group")
    asked = request(model, converter.root / "made")
    operation = await client.convert(asked)
    await started(client, operation.name)
    waiting = await client.convert(request(model, converter.root / "later"))
    assert [wait.on for wait in await client.list_waits()] == [[str(converter.root / "later")]]
    assert not waiting.done
    os.kill(converter.pid, signal.SIGTERM)
    # The one that waits is stopped after the one that runs, and is the second in all.
    async with asyncio.timeout(PATIENCE):
        while 'kind="convert",outcome="cancelled"} 2.0' not in await metrics_of(converter):
            await asyncio.sleep(0.02)
    converter.let_go("convert.group")
    await client.close()
    assert await converter.ended() == 0
    assert (converter.root / ".made.converting").is_dir()
    client = await converter.start()
    _, progress = await run(client, asked)
    assert progress.total_byte_count == progress.byte_count > progress.resumed_byte_count > 0


REFUSALS: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"source": "relative"}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    ({"source": "/etc"}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    ({"source": "{root}/../other"}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    ({"target": "/tmp/elsewhere"}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    ({"source": "{root}/none"}, "NOT_FOUND", "CHECKPOINT_NOT_FOUND"),
    ({"target": "{root}/model"}, "ALREADY_EXISTS", "CHECKPOINT_EXISTS"),
    ({"target": "{root}/model/config.json/made"}, "FAILED_PRECONDITION", "UNUSABLE_PATH"),
    ({"target_format": 77}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    ({"quantization": pb.QUANTIZATION_FP8_BLOCK}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    ({"layout": pb.Layout(tensor=5)}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    ({"layout": pb.Layout(expert=2)}, "FAILED_PRECONDITION", "UNFIT_CHECKPOINT"),
)


async def test_refusals(converter: Converter, model: Path) -> None:
    client = await converter.start("--no-durable")
    for change, code, reason in REFUSALS:
        values = {
            key: value.format(root=converter.root) if isinstance(value, str) else value
            for key, value in change.items()
        }
        asked = request(model, converter.root / "made")
        asked.MergeFrom(pb.ConvertCheckpointRequest(**values))
        with pytest.raises(RemoteError) as error:
            await run(client, asked)
        assert (error.value.code.name, error.value.reason) == (code, reason), change
        assert not (converter.root / "made").exists()


async def test_damage_and_a_full_disk_are_typed(converter: Converter, model: Path) -> None:
    convert(model, converter.root / "made", ConvertOptions(sync=False))
    shutil.copytree(converter.root / "made", converter.root / "damaged")
    path = converter.root / "damaged/__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)
    client = await converter.start()
    back = {"target_format": pb.FORMAT_HF}
    with pytest.raises(RemoteError) as error:
        await run(client, request(path.parent, converter.root / "back", **back))
    assert (error.value.code.name, error.value.reason) == ("DATA_LOSS", "DIGEST_MISMATCH")
    assert error.value.metadata["tensor"].startswith(("decoder.", "embedding.", "output_layer."))
    resource.prlimit(converter.pid, resource.RLIMIT_FSIZE, (50_000, 50_000))
    with pytest.raises(RemoteError) as error:
        await run(client, request(model, converter.root / "full"))
    assert (error.value.code.name, error.value.reason) == ("RESOURCE_EXHAUSTED", "DISK_FULL")
    assert not (converter.root / "full").exists()
    text = await metrics_of(converter)
    assert "sluice_converter_digest_failures_total 1.0" in text
    assert 'sluice_converter_conversions_total{kind="convert",outcome="failed"} 2.0' in text
