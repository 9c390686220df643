"""`sluice convert` and `verify` between directories and a bucket."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice import faults
from sluice.bucket import ObjectBucket
from sluice.config import ConfigError
from sluice.convert_command import CheckpointError, convert, verify
from sluice.weights.convert.verify import compare
from tests.patience import PATIENCE
from tests.s3_server import Faults, environment, make_bucket, running_s3

FLAGS = ["--vocab_multiple", "8", "--no-sync"]


@pytest.fixture(scope="module")
def server() -> Iterator[Faults]:
    of_server = Faults()
    with running_s3(of_server) as endpoint, pytest.MonkeyPatch.context() as patch:
        make_bucket(endpoint, "models")
        for name, value in environment(endpoint).items():
            patch.setenv(name, value)
        yield of_server


@pytest.fixture
def bucket(server: Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectBucket:
    bucket = ObjectBucket("s3://models")
    bucket.delete(bucket.keys(""))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr("tempfile.tempdir", None)
    return bucket


def left(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "scratch").iterdir()]


def run(command, *arguments: object) -> None:
    asyncio.run(command([str(each) for each in arguments]))


def upload(bucket: ObjectBucket, directory: Path, key: str) -> None:
    for path in directory.iterdir():
        bucket.put_file(f"{key}/{path.name}", path)


def download(bucket: ObjectBucket, key: str, directory: Path) -> Path:
    directory.mkdir()
    for each in bucket.keys(key):
        bucket.local_file(each, directory / each.rpartition("/")[2])
    return directory


def test_a_round_trip_through_the_bucket_is_equal_to_the_bit(
    bucket: ObjectBucket, qwen3: Path, tmp_path: Path
) -> None:
    run(convert, qwen3, "s3://models/a/megatron", *FLAGS)
    run(convert, "s3://models/a/megatron", "s3://models/a/hf", "--to", "hf", "--origin", qwen3)
    upload(bucket, qwen3, "original")
    run(convert, "s3://models/original", tmp_path / "local", *FLAGS)
    for key, name in (("a/hf", "hf"), ("a/megatron", "megatron")):
        assert compare(qwen3, download(bucket, key, tmp_path / name), model=qwen3).same
    assert compare(qwen3, tmp_path / "local", model=qwen3).same
    run(verify, "s3://models/a/hf", "s3://models/original")
    run(verify, "s3://models/a/megatron", qwen3, "--model", "s3://models/original")
    assert not [key for key in bucket.keys("") if ".converting" in key]
    assert left(tmp_path) == []


def test_a_trainers_checkpoint_is_read_where_its_record_says(
    bucket: ObjectBucket, qwen3: Path, megatron: Path, tmp_path: Path, server: Faults
) -> None:
    upload(bucket, megatron, "checkpoints/one/0badcafe")
    bucket.put("checkpoints/one/0ther/junk", b"of a writer that died")
    bucket.put("checkpoints/one/checkpoint.json", b'{"folder": "0badcafe"}')
    server.calls.clear()
    run(convert, "s3://models/checkpoints/one", tmp_path / "hf", "--to", "hf", "--model", qwen3)
    assert compare(qwen3, tmp_path / "hf").same
    read = [path for method, path in server.calls if method == "GET"]
    assert any("0badcafe/" in path for path in read)
    assert not any(path.endswith("junk") for path in read)


@pytest.mark.parametrize("damage", ["flipped", "cut"])
def test_damage_in_the_bucket_is_found(
    bucket: ObjectBucket, megatron: Path, qwen3: Path, tmp_path: Path, damage: str
) -> None:
    upload(bucket, megatron, "m")
    key = max(bucket.keys("m"), key=bucket.size)
    data = bytearray(bucket.get(key))
    data[len(data) // 2] ^= 4
    bucket.put(key, bytes(data if damage == "flipped" else data[:-100]))
    with pytest.raises(CheckpointError):
        run(convert, "s3://models/m", "s3://models/hf", "--to", "hf", "--model", qwen3)
    assert bucket.keys("hf") == []
    assert left(tmp_path) == []


def test_a_place_that_is_not_free_is_refused_before_anything_is_read(
    bucket: ObjectBucket, qwen3: Path, server: Faults
) -> None:
    bucket.put("taken/mine", b"mine")
    server.calls.clear()
    for flags in ([], ["--validate_only"]):
        with pytest.raises(CheckpointError, match="s3://models/taken is not empty: it holds mine"):
            run(convert, "s3://models/none", "s3://models/taken", *flags)
    assert not [path for _, path in server.calls if "none" in path]
    assert bucket.keys("taken") == ["taken/mine"]
    with pytest.raises(CheckpointError, match="s3://models/none holds no objects"):
        run(convert, "s3://models/none", "s3://models/free")
    assert bucket.keys("free") == []
    run(convert, qwen3, "s3://models/free", "--validate_only", *FLAGS)
    assert bucket.keys("free") == []


def test_a_conversion_that_dies_leaves_what_nobody_takes_for_a_checkpoint(
    bucket: ObjectBucket, qwen3: Path, tmp_path: Path
) -> None:
    armed = tmp_path / "faults" / "armed"
    faults.arm(armed, "convert.uploaded")
    died = subprocess.run(
        [sys.executable, "-m", "sluice.cli", "convert", str(qwen3), "s3://models/t", *FLAGS],
        env={**os.environ, faults.VARIABLE: str(armed)},
        timeout=PATIENCE,
    )
    assert died.returncode == -signal.SIGKILL
    assert "t/metadata.json" in bucket.keys("t") or len(bucket.keys("t")) > 2
    with pytest.raises(CheckpointError, match=r"s3://models/t is not whole"):
        run(verify, "s3://models/t", qwen3)
    with pytest.raises(CheckpointError, match=r"then remove what lies there"):
        run(convert, qwen3, "s3://models/t", *FLAGS)
    bucket.delete(bucket.keys("t"))
    run(convert, qwen3, "s3://models/t", *FLAGS)
    run(verify, "s3://models/t", qwen3, "--model", qwen3)
    assert left(tmp_path) == []  # the dead one's too


@pytest.mark.parametrize(("kind", "method"), [("lose", "PUT"), ("cut", "GET"), ("refuse", "GET")])
def test_what_goes_wrong_on_the_way_is_done_again(
    bucket: ObjectBucket, qwen3: Path, server: Faults, kind: str, method: str, tmp_path: Path
) -> None:
    upload(bucket, qwen3, "m")
    server.add(kind, method, "safetensors" if method == "GET" else "conversion.json")
    run(convert, "s3://models/m", "s3://models/t", *FLAGS)
    assert server.met[-1] == kind
    assert compare(qwen3, download(bucket, "t", tmp_path / "t"), model=qwen3).same


@pytest.mark.parametrize("place", ["s3://", "s3:///x", "s3://models/../x", "gs://models/x"])
def test_what_is_no_place_is_refused_by_name(place: str, qwen3: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"s3://bucket/prefix|neither a directory nor"):
        run(convert, qwen3, place)
    with pytest.raises(ConfigError, match="leave out --address"):
        run(convert, qwen3, "s3://models/x", "--address", "127.0.0.1:1")


def test_scratch_is_where_files_lie_meanwhile(
    bucket: ObjectBucket, qwen3: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        run(convert, qwen3, "s3://models/t", *FLAGS, "--scratch", tmp_path / "nowhere")
    shutil.rmtree(tmp_path / "scratch")  # not needed
    (tmp_path / "room").mkdir()
    run(convert, qwen3, "s3://models/t", *FLAGS, "--scratch", tmp_path / "room")
    assert list((tmp_path / "room").iterdir()) == []
