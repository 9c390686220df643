"""`sluice convert` and `verify` between directories and a bucket."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sluice import faults
from sluice.bucket import ObjectBucket
from sluice.config import ConfigError
from sluice.convert_command import CheckpointError, convert, verify
from sluice.weights.convert.places import fetch
from sluice.weights.convert.verify import compare
from sluice.weights.convert.work import Control
from sluice.weights.manifest import FileEntry, digest_file, seal
from sluice.weights.store import WeightStore
from tests.contract.weight_store.policy import Policy
from tests.patience import PATIENCE
from tests.s3_server import Faults, environment, make_bucket, running_s3
from tests.unit.weights_rules.models import save_model

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
    """What is in the directory for temporary files, but for the one that holds rooms."""
    scratch = tmp_path / "scratch"
    return [path.name for path in (*scratch.glob("[!s]*"), *scratch.glob("*/*"))]


def run(command, *arguments: object) -> None:
    asyncio.run(command([str(each) for each in arguments]))


def upload(bucket: ObjectBucket, directory: Path, key: str) -> None:
    for path in directory.iterdir():
        bucket.put_file(f"{key}/{path.name}", path)


def mark(bucket: ObjectBucket, *keys: str) -> None:
    """Empty objects, as consoles make them of folders."""
    for key in keys:
        asked = urllib.request.Request(
            f"{os.environ['AWS_ENDPOINT_URL']}/models/{key}", method="PUT", data=b""
        )
        with urllib.request.urlopen(asked, timeout=PATIENCE):
            pass


def download(bucket: ObjectBucket, key: str, directory: Path) -> Path:
    directory.mkdir()
    for each in bucket.keys(key):
        bucket.local_file(each, directory / each.rpartition("/")[2])
    return directory


def test_a_version_of_changes_in_a_bucket_is_read_with_those_it_is_made_of(bucket, tmp_path):
    policy = Policy(WeightStore("s3://models/weights", scratch=tmp_path / "scratch"))
    (tmp_path / "config.json").write_text("{}")
    policy.companions = [tmp_path / "config.json"]
    *_, newest = policy.publish_chain(3)
    run(convert, f"s3://models/weights/versions/{newest:08d}", tmp_path / "out", "--to", "hf")
    files = (tmp_path / "out").glob("*.safetensors")
    loaded = {name: tensor for path in files for name, tensor in load_file(path).items()}
    assert loaded.keys() == policy.history[newest].keys()
    assert all(torch.equal(loaded[n], t) for n, t in policy.history[newest].items())
    run(verify, f"s3://models/weights/versions/{newest:08d}", tmp_path / "out")
    assert not left(tmp_path)


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
    mark(bucket, "original/", "original/none/")
    bucket.put("original/none/more.txt", b"more")
    run(verify, "s3://models/a/hf", "s3://models/original")
    run(verify, "s3://models/a/megatron", qwen3, "--model", "s3://models/original")
    assert not [key for key in bucket.keys("") if ".converting" in key]
    assert left(tmp_path) == []


def test_a_trainers_checkpoint_is_read_where_its_record_says(
    bucket: ObjectBucket, qwen3: Path, megatron: Path, tmp_path: Path, server: Faults
) -> None:
    upload(bucket, megatron, "checkpoints/one/0badcafe")
    bucket.put("checkpoints/one/0ther/junk", b"of a writer that died")
    entries = {p.name: FileEntry(*digest_file(p)) for p in megatron.iterdir()}
    files = {name: asdict(entry) for name, entry in entries.items()}
    record = {"format": 2, "backend": "megatron", "files": files, "folder": "0badcafe"}
    bucket.put("checkpoints/one/checkpoint.json", seal(record, "record_digest"))
    server.calls.clear()
    run(convert, "s3://models/checkpoints/one", tmp_path / "hf", "--to", "hf", "--model", qwen3)
    assert compare(qwen3, tmp_path / "hf").same
    read = [path for method, path in server.calls if method == "GET"]
    assert any("0badcafe/" in path for path in read)
    assert not any(path.endswith("junk") for path in read)
    key = max(bucket.keys("checkpoints/one/0badcafe"), key=bucket.size)
    data = bytearray(bucket.get(key))
    data[-1] ^= 4  # behind what is converted
    bucket.put(key, bytes(data))
    with pytest.raises(CheckpointError, match=key.rpartition("/")[2]):
        run(convert, "s3://models/checkpoints/one", tmp_path / "h", "--to", "hf", "--model", qwen3)
    assert not (tmp_path / "h").exists()


@pytest.mark.parametrize("folder", ["../aside", "ABSOLUTE", "a/b", "..", ".", "a\0b", "x" * 5000])
def test_a_record_that_names_no_folder_beside_it_has_nothing_written(
    bucket: ObjectBucket, qwen3: Path, tmp_path: Path, folder: str
) -> None:
    folder = folder.replace("ABSOLUTE", str(tmp_path / "aside"))
    record = {"format": 2, "backend": "fsdp", "files": {}, "folder": folder}
    bucket.put("hostile/checkpoint.json", seal(record, "record_digest"))
    with pytest.raises(CheckpointError, match=r"names .*, which is no folder there"):
        run(convert, "s3://models/hostile", tmp_path / "hf", "--to", "hf", "--model", qwen3)
    assert not (tmp_path / "aside").exists() and not (tmp_path / "hf").exists()
    assert left(tmp_path) == []


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


def killed(armed: Path, point: str, passing: int, *arguments: object) -> None:
    """Run `sluice convert` that dies there."""
    faults.arm(armed, point, passing)
    died = subprocess.run(
        [sys.executable, "-m", "sluice.cli", "convert", *map(str, arguments)],
        env={**os.environ, faults.VARIABLE: str(armed)},
        timeout=PATIENCE,
    )
    assert died.returncode == -signal.SIGKILL


def test_what_a_killed_conversion_leaves_nobody_takes_for_a_checkpoint(
    bucket: ObjectBucket, qwen3: Path, tmp_path: Path
) -> None:
    killed(tmp_path / "faults", "convert.uploaded", 1, qwen3, "s3://models/t", *FLAGS)
    assert "t/metadata.json" in bucket.keys("t") or len(bucket.keys("t")) > 2
    with pytest.raises(CheckpointError, match=r"s3://models/t is not whole"):
        run(verify, "s3://models/t", qwen3)
    for more in (["--stacking", "single"], ["--scratch", str(tmp_path)]):  # another, or elsewhere
        with pytest.raises(CheckpointError, match=r"where it ran, or remove what lies there"):
            run(convert, qwen3, "s3://models/t", *FLAGS, *more)
    run(convert, qwen3, "s3://models/t", *FLAGS)
    run(verify, "s3://models/t", qwen3, "--model", qwen3)
    assert left(tmp_path) == []


@pytest.mark.parametrize(
    ("point", "passing"),
    [("convert.group", 20), ("convert.upload", 2), ("convert.in_bucket", 1)],
)
def test_a_killed_conversion_is_gone_on_with(
    bucket: ObjectBucket, qwen3: Path, tmp_path: Path, server: Faults, point: str, passing: int
) -> None:
    upload(bucket, qwen3, "m")
    arguments = ["s3://models/m", "s3://models/t", *FLAGS]
    killed(tmp_path / "faults", point, passing, *arguments)
    server.calls.clear()
    run(convert, *arguments)
    assert not [path for method, path in server.calls if method == "GET" and ".safetens" in path]
    stored = [path for method, path in server.calls if method == "PUT"]
    assert bool(stored) == (point != "convert.in_bucket")
    assert compare(qwen3, download(bucket, "t", tmp_path / "t"), model=qwen3).same
    assert left(tmp_path) == []


def test_a_source_that_changed_after_a_kill_is_read_again(
    bucket: ObjectBucket, qwen3: Path, tmp_path: Path
) -> None:
    upload(bucket, qwen3, "m")
    arguments = ["s3://models/m", "s3://models/t", *FLAGS]
    killed(tmp_path / "faults", "convert.upload", 2, *arguments)
    other = save_model("qwen3", tmp_path / "other", seed=1)
    bucket.delete(bucket.keys("m"))
    upload(bucket, other, "m")
    run(convert, *arguments)
    assert compare(other, download(bucket, "t", tmp_path / "t"), model=other).same


def test_an_object_written_twice_within_a_second_is_fetched_again(
    bucket: ObjectBucket, tmp_path: Path
) -> None:
    """Its size and its time are those of the one before."""
    times = set[object]()
    for number in range(8):
        bucket.put("m/weights", b"%d" % number)
        times.add(bucket.info("m/weights").modified)
        assert (fetch("s3://models/m", tmp_path / "m", Control()) / "weights").read_bytes() == (
            b"%d" % number
        )
    assert len(times) < 8, "no two were written within a second"


def test_what_was_fetched_stays_until_its_object_is_another(
    bucket: ObjectBucket, tmp_path: Path, server: Faults
) -> None:
    bucket.put("m/weights", b"one")
    fetch("s3://models/m", tmp_path / "fetched", Control())
    server.calls.clear()
    fetch("s3://models/m", tmp_path / "fetched", Control())
    assert not [path for method, path in server.calls if method == "GET" and "weights" in path]


def test_what_comes_to_a_directory_is_gone_on_with_and_not_done_twice(
    bucket: ObjectBucket, qwen3: Path, tmp_path: Path
) -> None:
    upload(bucket, qwen3, "m")
    arguments = ["s3://models/m", tmp_path / "made", *FLAGS]
    killed(tmp_path / "faults", "convert.group", 20, *arguments)
    journal = (tmp_path / ".made.converting" / "journal.jsonl").read_bytes()
    assert journal.count(b"\n") > 1
    run(convert, *arguments)
    made = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "made").iterdir()}
    assert (tmp_path / "made" / "conversion.json").exists()
    run(convert, *arguments)
    assert {p.name: p.stat().st_mtime_ns for p in (tmp_path / "made").iterdir()} == made
    bucket.put("m/config.json", bucket.get("m/config.json") + b"\n")  # within a second, too
    with pytest.raises(CheckpointError, match="exists already"):
        run(convert, *arguments)


def test_a_bucket_that_fails_in_the_middle_of_an_upload_costs_no_conversion(
    bucket: ObjectBucket,
    qwen3: Path,
    tmp_path: Path,
    server: Faults,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "sluice.bucket.ObjectBucket.__init__.__kwdefaults__",
        {
            "request_seconds": PATIENCE,
            "retry_seconds": 0.5,
        },
    )
    server.add("refuse", "PUT", "conversion.json", 1_000)
    try:
        with pytest.raises(CheckpointError, match=r"s3://models/t/conversion.json: "):
            run(convert, qwen3, "s3://models/t", *FLAGS)
    finally:
        server.coming.clear()
    assert ".converting" in "".join(bucket.keys("t"))
    run(convert, qwen3, "s3://models/t", *FLAGS)
    run(verify, "s3://models/t", qwen3, "--model", qwen3)
    assert left(tmp_path) == []


def test_rooms_of_another_user_are_not_used(
    bucket: ObjectBucket, qwen3: Path, tmp_path: Path
) -> None:
    rooms = tmp_path / "scratch" / f"sluice-convert-{os.getuid()}"
    rooms.mkdir()
    rooms.chmod(0o777)
    with pytest.raises(CheckpointError, match="no directory of this user's own"):
        run(convert, qwen3, "s3://models/t", *FLAGS)
    assert bucket.keys("t") == []


def test_rooms_that_nobody_came_back_to_are_cleared(
    bucket: ObjectBucket, qwen3: Path, tmp_path: Path
) -> None:
    killed(tmp_path / "faults", "convert.uploaded", 1, qwen3, "s3://models/t", *FLAGS)
    (room,) = [path for path in (tmp_path / "scratch").glob("*/*") if path.is_dir()]
    run(convert, qwen3, "s3://models/other", *FLAGS)
    assert room.exists()
    os.utime(room, (0, 0))
    run(convert, qwen3, "s3://models/more", *FLAGS)
    assert not room.exists()


@pytest.mark.parametrize(("kind", "method"), [("lose", "PUT"), ("cut", "GET"), ("refuse", "GET")])
def test_what_goes_wrong_on_the_way_is_done_again(
    bucket: ObjectBucket, qwen3: Path, server: Faults, kind: str, method: str, tmp_path: Path
) -> None:
    upload(bucket, qwen3, "m")
    server.add(kind, method, "safetensors" if method == "GET" else "conversion.json")
    run(convert, "s3://models/m", "s3://models/t", *FLAGS)
    assert server.met[-1] == kind
    assert compare(qwen3, download(bucket, "t", tmp_path / "t"), model=qwen3).same


@pytest.mark.parametrize(
    "place",
    [
        *("s3://", "s3:///x", "s3://models/../x", "gs://models/x", "s3://-/x", "s3://models:80/x"),
        *("s3://models/a/%2e%2e/x", "s3://models/a/.\t./x", "s3://models/x?y", "s3://models/x#y"),
        *("s3://models/" + "x" * 5000, "s3://models/x\0", "s3://models/x//y", "s3://you@models/x"),
    ],
)
def test_what_is_no_place_is_refused_by_name(place: str, qwen3: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"s3://|can be no path") as error:
        run(convert, qwen3, place)
    assert len(str(error.value)) < 500


def test_scratch_is_where_files_lie_meanwhile(
    bucket: ObjectBucket, qwen3: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        run(convert, qwen3, "s3://models/t", *FLAGS, "--scratch", tmp_path / "nowhere")
    shutil.rmtree(tmp_path / "scratch")  # not needed
    (tmp_path / "room").mkdir()
    run(convert, qwen3, "s3://models/t", *FLAGS, "--scratch", tmp_path / "room")
    assert list((tmp_path / "room").glob("*/*")) == []
