"""A writer to be killed: publishes versions until its end, telling each on a line of output.

Arguments: the store, and the name of this writer. Lines: "allocated <n>", "committed <n>".
"""

from __future__ import annotations

import sys

from sluice.weights.checkpoint import describe_shard, encode_header
from sluice.weights.store import WeightStore


def main() -> None:
    store = WeightStore(sys.argv[1])
    parent = None
    while True:
        staging = store.allocate(parent)
        print("allocated", staging.version, flush=True)
        shards = []
        for part in range(2):
            header, _ = encode_header({f"{sys.argv[2]}.{part}": ("U8", (4096,))})
            path = staging.directory / f"model-{part}.safetensors"
            path.write_bytes(header + bytes([staging.version % 251]) * 4096)
            shards.append(describe_shard(path))
        parent = store.commit(staging, shards, [], staging.version).version
        print("committed", parent, flush=True)


if __name__ == "__main__":
    main()
