"""A version over a collective, from one process to another that shares the device.

`python -m tools.accelerator_check.collective send|receive BACKEND VERSION_DIRECTORY FOLDER`
"""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from sluice import platform
from sluice.weights.checkpoint import data_start
from sluice.weights.errors import TransferBrokenError
from sluice.weights.manifest import read_manifest
from sluice.weights.transfer.deadline import Deadline
from sluice.weights.transfer.group import Meeting, join_group, receive, send
from sluice.weights.transfer.plan import Bucket, Membership, plan_buckets
from tools.accelerator_check.steps import PACKAGE
from tools.accelerator_check.work import StepWork

GROUP = "accelerator-check"
ROUNDS = 2  # the first connects
SECONDS, PROCESS_SECONDS = 20.0, 30.0
SMALL_SECONDS = 120.0  # of a machine that may be busy


def broadcast(work: StepWork, version: Path) -> None:
    """GB/s over the device's own collectives; over the host's where two processes of one device
    cannot meet there."""
    own, host = platform.current().collective, platform.CPU.collective
    for backend in dict.fromkeys((own, host)):
        folder = work.directory / backend
        folder.mkdir(exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        try:
            seconds = pair(work, backend, version, folder)
        except (subprocess.SubprocessError, OSError, ValueError) as error:
            said = sorted({file.read_text() for file in folder.glob("*.reason")})
            reason = "; ".join(said) or f"{type(error).__name__}"
            work.note(f"no collective over {backend} between two processes here: {reason}")
            continue
        size = sum(bucket.size for bucket in buckets_of(version))
        work.record(collective_backend=backend, collective_gbs=size / seconds / 1e9)
        return
    work.fail("two processes did not meet in any collective")


def pair(work: StepWork, backend: str, version: Path, folder: Path) -> float:
    """Seconds in which a version went over, of the slower side; what failed raises OSError,
    ValueError or SubprocessError."""
    limit = SMALL_SECONDS if work.small else PROCESS_SECONDS
    with ThreadPoolExecutor(2) as pool:
        sides = [
            pool.submit(
                work.part,
                *(f"{PACKAGE}.collective", side, backend, str(version), str(folder)),
                seconds=limit,
            )
            for side in ("send", "receive")
        ]
        for side in sides:
            side.result()
    return max(json.loads((folder / side).read_text()) for side in ("send", "receive"))


def buckets_of(version: Path) -> list[Bucket]:
    manifest = read_manifest(version)
    files = sorted({tensor.file for tensor in manifest.tensors.values()})
    return plan_buckets(manifest, files)


def _send(backend: str, version: Path, folder: Path) -> float:
    deadline = Deadline(SECONDS)
    meeting = Meeting("127.0.0.1", 2, SECONDS)
    partial = folder / "address.partial"
    partial.write_text(meeting.address)
    partial.rename(folder / "address")
    group = meeting.join(GROUP, backend, deadline)
    buckets = buckets_of(version)
    maps = {name: _data_of(version / name) for name in {bucket.file_name for bucket in buckets}}

    def read(bucket: Bucket) -> torch.Tensor:
        return maps[bucket.file_name][bucket.offset : bucket.offset + bucket.size]

    for _ in range(ROUNDS):
        began = time.perf_counter()
        send(group, buckets, read, Deadline(SECONDS))
        platform.current().synchronize()
        seconds = time.perf_counter() - began
    _await(folder / "received", deadline)  # what is taken by handles lies here
    group.close()
    meeting.close()
    return seconds


def _await(path: Path, deadline: Deadline) -> None:
    while not path.exists():
        if deadline.passed:
            raise TimeoutError(f"there never was a {path.name}")
        time.sleep(0.02)


def _receive(backend: str, version: Path, folder: Path) -> float:
    deadline = Deadline(SECONDS)
    _await(folder / "address", deadline)
    address = (folder / "address").read_text()
    member = Membership(address=address, group=GROUP, rank=1, world_size=2, backend=backend)
    group = join_group(member, deadline)
    buckets = buckets_of(version)
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _name, _tensor in receive([(group, buckets)], Deadline(SECONDS)):
            pass
        platform.current().synchronize()
        seconds = time.perf_counter() - began
    (folder / "received").touch()
    group.close()
    return seconds


def _data_of(path: Path) -> torch.Tensor:
    """The data of a safetensors file, uint8, mapped."""
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return torch.frombuffer(mapped, dtype=torch.uint8)[data_start(mapped) :]


def main() -> None:
    side, backend, version, folder = sys.argv[1:5]
    platform.current().set_device(0)
    measure = _send if side == "send" else _receive
    try:
        seconds = measure(backend, Path(version), Path(folder))
    except TransferBrokenError as error:
        (Path(folder) / f"{side}.reason").write_text(str(error))
        sys.exit(1)
    (Path(folder) / side).write_text(json.dumps(seconds))


if __name__ == "__main__":
    main()
