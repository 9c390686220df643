"""The converter on a bucket: the same answers, kills, cancels and refusals as on directories."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice.api.converter.v1 import converter_service_pb2 as pb
from sluice.bucket import ObjectBucket
from sluice.convert_command import CheckpointError, convert, verify
from sluice.runtime.errors import RemoteError
from tests.s3_server import Faults, environment, make_bucket, running_s3
from tests.service.converter.conftest import Converter
from tests.service.converter.test_service import request, run, started

OWN = "s3://models/own"


@pytest.fixture(scope="module")
def server() -> Iterator[Faults]:
    of_server = Faults()
    with running_s3(of_server) as endpoint, pytest.MonkeyPatch.context() as patch:
        make_bucket(endpoint, "models")
        for name, value in environment(endpoint).items():
            patch.setenv(name, value)
        yield of_server


@pytest.fixture
def bucket(server: Faults) -> ObjectBucket:
    bucket = ObjectBucket("s3://models")
    bucket.delete(bucket.keys(""))
    return bucket


@pytest.fixture
def scratch(converter: Converter, bucket: ObjectBucket, model: Path, tmp_path: Path) -> Path:
    """Of a converter that may touch a prefix of the bucket; the model lies there."""
    converter.roots.append(OWN)
    for path in model.iterdir():
        bucket.put_file(f"own/model/{path.name}", path)
    directory = tmp_path / "scratch"
    directory.mkdir()
    return directory


def left(scratch: Path) -> list[Path]:
    return [path for path in scratch.glob("*/*") if path.is_dir()]


def asked(**more: Any) -> pb.ConvertCheckpointRequest:
    values = {"source": f"{OWN}/model", "target": f"{OWN}/made"} | more
    return request(values.pop("source"), values.pop("target"), **values)


async def test_the_command_has_a_converter_read_and_write_the_bucket(
    converter: Converter, bucket: ObjectBucket, scratch: Path, model: Path, server: Faults
) -> None:
    client = await converter.start("--scratch", str(scratch))
    at = ["--address", client.address]
    server.add("lose", "PUT", "made/conversion.json")
    server.add("cut", "GET", "model/model")
    await convert([f"{OWN}/model", f"{OWN}/made", "--vocab_multiple", "8", *at])
    assert sorted(server.met) == ["cut", "lose"]
    await convert([f"{OWN}/made", f"{OWN}/back", "--to", "hf", "--origin", f"{OWN}/model", *at])
    await verify([f"{OWN}/back", str(model), *at])
    await verify([f"{OWN}/made", f"{OWN}/back", "--model", f"{OWN}/model", *at])
    await verify([f"{OWN}/back", str(model)])  # by what this process reads
    with pytest.raises(CheckpointError, match="allow is empty"):
        flags = ["--to", "hf", "--origin", f"{OWN}/model", "--allow", "[]"]
        await convert([f"{OWN}/made", f"{OWN}/none", *flags, *at])
    assert not [key for key in bucket.keys("") if ".converting" in key or "none" in key]
    assert left(scratch) == []


async def test_a_killed_converter_goes_on_in_the_bucket(
    converter: Converter, bucket: ObjectBucket, scratch: Path, server: Faults
) -> None:
    client = await converter.start("--scratch", str(scratch))
    converter.hold("convert.group")
    wanted = asked()
    await client.convert(wanted)
    converter.let_go("convert.group", 15)
    assert await converter.ended() == -signal.SIGKILL
    assert bucket.keys("own/made") == ["own/made/.converting"]
    client = await converter.start("--scratch", str(scratch))
    with pytest.raises(RemoteError) as error:  # another one
        await run(client, asked(stacking=pb.STACKING_SINGLE))
    assert (error.value.code.name, error.value.reason) == ("ABORTED", "TARGET_BUSY")
    server.calls.clear()
    made, progress = await run(client, wanted)
    assert made.target == f"{OWN}/made"
    assert 0 < progress.resumed_byte_count < progress.byte_count
    assert not [path for method, path in server.calls if method == "GET" and ".safetens" in path]
    await verify([f"{OWN}/made", f"{OWN}/model", "--model", f"{OWN}/model"])
    assert left(scratch) == []


async def test_cancel_leaves_nothing_in_the_bucket_and_sigterm_what_is_done(
    converter: Converter, bucket: ObjectBucket, scratch: Path
) -> None:
    client = await converter.start("--scratch", str(scratch))
    converter.hold("convert.group")
    operation = await client.convert(asked())
    await started(client, operation.name)
    await client.cancel(operation.name)
    await client.list()  # answered after the conversion was told to stop
    converter.let_go("convert.group")
    with pytest.raises(RemoteError) as error:
        async for _ in client.follow(operation):
            pass
    assert error.value.code.name == "CANCELLED"
    while left(scratch):  # the thread comes to its next piece
        await client.list()
    assert bucket.keys("own/made") == []
    converter.hold("convert.group")
    wanted = asked()
    operation = await client.convert(wanted)
    await started(client, operation.name)
    os.kill(converter.pid, signal.SIGTERM)
    with pytest.raises(RemoteError):  # it has heard
        async for _ in client.follow(operation):
            pass
    converter.let_go("convert.group")
    await client.close()
    assert await converter.ended() == 0
    assert bucket.keys("own/made") == ["own/made/.converting"]
    client = await converter.start("--scratch", str(scratch))
    _, progress = await run(client, wanted)
    assert progress.total_byte_count == progress.byte_count > progress.resumed_byte_count > 0
    assert left(scratch) == []


LONG = "x" * 5000
REFUSALS: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"source": "s3://models/other"}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    ({"source": "s3://models/owner"}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    ({"source": "s3://others/own/model"}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    ({"target": OWN}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    ({"target": f"{OWN}/../x"}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    ({"target": f"{OWN}/%2e%2e/x"}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    ({"target": f"{OWN}/.\t./x"}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    ({"target": f"{OWN}/x\0"}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    ({"target": f"{OWN}/{LONG}"}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    ({"target": "{root}/x\0"}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    ({"target": f"{{root}}/{LONG}"}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    ({"target": f"{{root}}/{LONG[:400]}"}, "FAILED_PRECONDITION", "UNUSABLE_PATH"),
    ({"source": f"{{root}}/{LONG[:400]}"}, "FAILED_PRECONDITION", "UNUSABLE_PATH"),
    ({"target": f"{OWN}/{LONG[:950]}"}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    ({"model": "s3://models/other"}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    ({"source": f"{OWN}/none"}, "NOT_FOUND", "CHECKPOINT_NOT_FOUND"),
    ({"target": f"{OWN}/model"}, "ALREADY_EXISTS", "CHECKPOINT_EXISTS"),
    ({"source": f"{OWN}/hostile"}, "FAILED_PRECONDITION", "UNFIT_CHECKPOINT"),
    ({"source": f"{OWN}/flipped", "target_format": pb.FORMAT_HF}, "DATA_LOSS", "DIGEST_MISMATCH"),
)


async def test_refusals_on_a_bucket(
    converter: Converter, bucket: ObjectBucket, scratch: Path
) -> None:
    client = await converter.start("--scratch", str(scratch))
    bucket.put("own/hostile/config.json", b"{}")
    bucket.put(f"own/hostile/{'y' * 400}", b"longer than a file's name can be")
    await run(client, asked(target=f"{OWN}/flipped"))
    key = max(bucket.keys("own/flipped"), key=bucket.size)
    data = bytearray(bucket.get(key))
    data[len(data) // 2] ^= 4
    bucket.put(key, bytes(data))
    before = sorted(bucket.keys(""))
    for change, code, reason in REFUSALS:
        values = {
            name: value.replace("{root}", str(converter.root)) if isinstance(value, str) else value
            for name, value in change.items()
        }
        if reason == "DIGEST_MISMATCH":
            values["model"] = f"{OWN}/model"
        with pytest.raises(RemoteError) as error:
            await run(client, asked(**values))
        found = (error.value.code.name, error.value.reason)
        assert found == (code, reason), (change, str(error.value)[:300])
        assert len(str(error.value)) < 3000
        assert sorted(bucket.keys("")) == before, change
    assert [path.name for path in converter.root.iterdir()] == ["model"]
    assert left(scratch) == []
