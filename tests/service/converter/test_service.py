"""The converter over gRPC: progress, cancel, resume, refusals by code and reason."""

from __future__ import annotations

import asyncio
import json
import math
import resource
import shutil
import signal
import urllib.request
import uuid
from pathlib import Path
from typing import Any

import pytest

from sluice import faults
from sluice.api.converter.v1 import converter_service_pb2 as pb
from sluice.converter_client import ConverterClient
from sluice.runtime.remote import RemoteError
from sluice.weights.convert.conversion import convert
from sluice.weights.convert.model import read_weights
from sluice.weights.convert.options import ConvertOptions
from sluice.weights.convert.verify import compare
from sluice.weights.header import encode_header
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
    faults.arm(converter.faults, "convert.group", 15)
    asked = request(model, converter.root / "made")
    await client.convert(asked)
    assert await converter.ended() == -signal.SIGKILL
    assert not (converter.root / "made").exists()
    client = await converter.start()
    made, progress = await run(client, asked)
    assert dict(made.digests) == dict(whole.digests)
    assert 0 < progress.resumed_byte_count < progress.byte_count
    assert compare(model, converter.root / "made").same


def big_model(converter: Converter) -> Path:
    """Half a GiB of zeros: long enough to be stopped in the middle."""
    directory = converter.root / "big"
    directory.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 16384,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "vocab_size": 1024,
    }
    (directory / "config.json").write_text(json.dumps(config))
    shapes = read_weights(config, directory).hf_tensors()
    header, _ = encode_header({name: ("BF16", shape) for name, shape in shapes.items()})
    total = sum(2 * math.prod(shape) for shape in shapes.values())
    with (directory / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + total)
    return directory


async def started(client: ConverterClient, name: str) -> None:
    """Wait until a conversion writes."""
    async with asyncio.timeout(30):
        while True:
            (item,) = [item for item in await client.list() if item.operation == name]
            if item.metadata.byte_count:
                return
            await asyncio.sleep(0.005)


async def test_cancel_leaves_nothing_and_sigterm_what_is_done(converter: Converter) -> None:
    big = big_model(converter)
    client = await converter.start()
    operation = await client.convert(request(big, converter.root / "made"))
    await started(client, operation.name)
    await client.cancel(operation.name)
    with pytest.raises(RemoteError) as error:
        async for _ in client.follow(operation):
            pass
    assert error.value.code.name == "CANCELLED"
    async with asyncio.timeout(30):
        while [path.name for path in converter.root.iterdir()] != ["big"]:
            await asyncio.sleep(0.02)
    asked = request(big, converter.root / "made")
    operation = await client.convert(asked)
    await started(client, operation.name)
    waiting = await client.convert(request(big, converter.root / "later"))
    assert [wait.on for wait in await client.list_waits()] == [[str(converter.root / "later")]]
    assert not waiting.done
    assert await converter.stop() == 0
    assert (converter.root / ".made.converting").is_dir()
    client = await converter.start()
    _, progress = await run(client, asked)
    assert progress.total_byte_count == progress.byte_count


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
    address = (converter.root.parent / "address.json").read_text()
    metrics = f"http://{json.loads(address)['metrics_address']}/metrics"
    text = (await asyncio.to_thread(urllib.request.urlopen, metrics)).read().decode()
    assert "sluice_converter_digest_failures_total 1.0" in text
    assert 'sluice_converter_conversions_total{kind="convert",outcome="failed"} 2.0' in text
