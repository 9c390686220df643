"""The cost of the store: a group of samples spooled, a version written and loaded verified.

    python benchmarks/store.py [--mib 256] [--directory DIR]

The version is compared with `cp` and sync of the same bytes. Prints one summary line, last.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from sluice.durable import sync_path
from sluice.samples.arrow import decode_group, encode_group
from sluice.samples.blob_store import BlobStore
from sluice.samples.sample import Sample, VersionSpan, validate_sample
from sluice.weights.shards import load_verified, write_shard
from sluice.weights.store import WeightStore

ROUNDS = 200


def group_of(count: int, tokens: int) -> list[Sample]:
    ones = np.ones(tokens, np.float32)
    return [
        Sample(
            sample_id=f"g/{index}",
            group_id="g",
            token_ids=np.arange(8 + tokens, dtype=np.int32),
            prompt_length=8,
            finish_reason="stop",
            columns={
                "loss_mask": ones.astype(bool),
                "rollout_logprobs": -ones,
                "rollout_logprobs_t1": -ones,
                "reward": 1.0,
                "raw_reward": 1.0,
            },
            spans=(VersionSpan(version=1, digest="0" * 32, first_token=0, last_token=tokens - 1),),
        )
        for index in range(count)
    ]


def cpu_microseconds(work: Callable[[int], object]) -> float:
    for number in range(3 * ROUNDS):  # until folders and memory pools are there
        work(number)
    start = time.process_time()
    for number in range(3 * ROUNDS, 4 * ROUNDS):
        work(number)
    return (time.process_time() - start) / ROUNDS * 1e6


def validate(group: list[Sample]) -> None:
    for sample in group:
        validate_sample(sample)


def wall_seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure_samples(directory: Path) -> str:
    group = group_of(16, 5)
    encoded = encode_group(group)
    blobs = BlobStore(directory / "blobs", sync=False)
    synced = BlobStore(directory / "synced")
    parts = {
        "validate": cpu_microseconds(lambda _: validate(group)),
        "encode": cpu_microseconds(lambda _: encode_group(group)),
        "put": cpu_microseconds(lambda number: blobs.put(encoded + b"%d" % number)),
        "put_synced": cpu_microseconds(lambda number: synced.put(encoded + b"%d" % number)),
        "decode": cpu_microseconds(lambda _: decode_group(encoded)),
        "decode_one_row": cpu_microseconds(lambda _: decode_group(encoded, [7])),
    }
    return " ".join(f"{name}_us={value:.0f}" for name, value in parts.items())


def measure_weights(directory: Path, mib: int) -> str:
    tensors = {f"layers.{i}.weight": torch.randn(512, 1024).bfloat16() for i in range(mib)}
    size = sum(tensor.nbytes for tensor in tensors.values())
    store = WeightStore(directory / "weights")

    def publish() -> None:
        staging = store.allocate(None)
        shard = write_shard(staging.directory, "model.safetensors", tensors)
        store.commit(staging, [shard], [], 0)

    def latest() -> Path:
        found = store.latest().directory
        assert found is not None  # a version in a directory
        return found

    def copy() -> None:
        shutil.copyfile(latest() / "model.safetensors", directory / "copy")
        sync_path(directory / "copy")

    def load() -> None:
        for _ in load_verified(latest(), store.manifest(store.latest().version)):
            pass

    os.sync()
    write, plain, read = wall_seconds(publish), wall_seconds(copy), wall_seconds(load)
    rates = {"publish": write, "cp_sync": plain, "load_verified": read}
    return " ".join(f"{name}_gbs={size / seconds / 1e9:.2f}" for name, seconds in rates.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--directory", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        samples = measure_samples(Path(directory))
        weights = measure_weights(Path(directory), options.mib)
    print(f"store: {samples} {weights}")


if __name__ == "__main__":
    main()
