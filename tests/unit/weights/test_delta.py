"""Versions that hold what changed: reconstructed to the bit, kept with what they are made of."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sluice.weights.checkout import check_out
from sluice.weights.convert.options import PlacedOptions
from sluice.weights.convert.placed import compare_places, convert_places
from sluice.weights.convert.work import Control
from sluice.weights.delta import encode_file
from sluice.weights.errors import (
    FileDigestError,
    InvalidCheckpointError,
    ManifestError,
    TensorDigestError,
    VersionNotFoundError,
    WeightStoreError,
)
from sluice.weights.host_cache import HostCache
from sluice.weights.manifest import (
    MANIFEST_NAME,
    Manifest,
    digest_bytes,
    encode_manifest,
    read_manifest,
)
from sluice.weights.shards import load_verified
from sluice.weights.staging import assemble
from sluice.weights.store import WeightStore
from tests.contract.weight_store.policy import Policy


def make(store: WeightStore, version: int, directory: Path) -> dict[str, torch.Tensor]:
    directory.mkdir()
    manifest = check_out(store, version, directory)
    loaded = dict(load_verified(directory, manifest))
    plain = {n: t for path in directory.glob("*.safetensors") for n, t in load_file(path).items()}
    assert all(torch.equal(_bytes(plain[name]), _bytes(t)) for name, t in loaded.items())
    return loaded


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)  # a NaN equals itself


def test_a_base_that_goes_during_the_commit_is_missed(
    policy: Policy, store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two writers, or a retention that knows nothing of this one: no chain is committed broken."""
    base = policy.publish().version
    other = Policy(WeightStore(store.location, durable=False))

    def assemble_slowly(*arguments: Any) -> Manifest:
        manifest = assemble(*arguments)
        monkeypatch.undo()
        other.publish()
        other.store.retain(1)
        return manifest

    monkeypatch.setattr("sluice.weights.store.assemble", assemble_slowly)
    policy.change()
    with pytest.raises(VersionNotFoundError):
        policy.publish(base=base)
    assert list(store.versions()) == [other.store.latest().version]


def test_every_version_of_a_chain_comes_out_to_the_bit(policy, store, tmp_path) -> None:
    versions = policy.publish_chain(6)
    for version in versions:
        loaded = make(store, version, tmp_path / str(version))
        assert loaded.keys() == policy.history[version].keys()
        assert all(torch.equal(loaded[n], t) for n, t in policy.history[version].items())
    assert list(store.chain(versions[-1])) == versions[::-1]
    names = {path.name for path in (tmp_path / str(versions[-1])).iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= names
    index = json.loads((tmp_path / "1" / "model.safetensors.index.json").read_bytes())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in policy.tensors.values())


def test_a_delta_holds_little_and_the_digest_of_the_whole(policy, store) -> None:
    first, second = policy.publish_chain(2)
    whole, delta = store.manifest(first), store.manifest(second)
    size = {m.version: sum(entry.size for entry in m.stored.values()) for m in (whole, delta)}
    assert size[second] < 0.3 * size[first]
    stored = {path.name for path in store.get(second).directory.iterdir()}
    assert stored == {*delta.stored, MANIFEST_NAME}
    assert not stored & {"config.json", "model-0.safetensors"}
    again = policy.publish()  # the same weights, whole
    assert again.base is None
    assert again.digest == delta.digest


def test_a_delta_that_is_no_smaller_is_written_whole(policy, store, tmp_path) -> None:
    first = policy.publish()
    bits = torch.randint(-(2**15), 2**15, (4000,), generator=torch.Generator().manual_seed(1))
    policy.tensors["embed.weight"] = bits.to(torch.int16).view(torch.bfloat16)  # not compressible
    second = policy.publish(base=first.version)
    assert set(store.manifest(second.version).deltas) == {"model-1.safetensors"}
    loaded = make(store, second.version, tmp_path / "out")
    assert torch.equal(loaded["embed.weight"].view(torch.int16), bits.to(torch.int16))


def test_another_base_than_the_one_kept_gives_whole_files(policy, store) -> None:
    first = policy.publish()
    policy.change()
    policy.publish(base=first.version)
    policy.change()
    assert policy.publish(base=first.version).base is None


def test_a_publication_that_failed_leaves_no_wrong_base(policy, store, tmp_path) -> None:
    first = policy.publish()
    policy.change()
    policy.shards.begin(first.version)
    staging = store.allocate(first.version)
    tensors = {"embed.weight": policy.tensors["embed.weight"]}
    policy.shards.write(staging.directory, "model-0.safetensors", tensors)
    store.abort(staging)  # the rank has moved on, the store has not
    third = policy.publish(base=first.version)
    assert third.base is None
    assert torch.equal(
        make(store, third.version, tmp_path / "out")["embed.weight"],
        policy.tensors["embed.weight"],
    )


def test_retention_keeps_what_a_kept_version_is_made_of(policy, store, tmp_path) -> None:
    versions = policy.publish_chain(4)
    policy.change()
    whole = policy.publish().version
    policy.change()
    last = policy.publish(base=whole).version
    store.pin(versions[2], "an engine")
    assert list(store.retain(1)) == [versions[3]]
    make(store, versions[2], tmp_path / "pinned")
    make(store, last, tmp_path / "last")
    store.unpin(versions[2], "an engine")
    assert list(store.retain(1)) == versions[:3]
    assert list(store.versions()) == [whole, last]


def test_local_versions_spare_all_but_the_deltas_since(policy, store, tmp_path) -> None:
    versions = policy.publish_chain(4)
    base = tmp_path / "base"
    make(store, versions[1], base)
    store.retain(1)
    fetched: list[tuple[int, str]] = []

    class Counting:
        manifest = staticmethod(store.manifest)

        def local_file(self, version: int, name: str, scratch: Path) -> Path:
            fetched.append((version, name))
            return store.local_file(version, name, scratch)

    out = tmp_path / "out"
    out.mkdir()
    check_out(Counting(), versions[3], out, {versions[1]: base})
    assert {version for version, _ in fetched} == set(versions[2:])
    assert all(name.endswith(".delta") for _, name in fetched)


def test_one_flipped_byte_anywhere_is_found_and_the_tensor_named(policy, store, tmp_path) -> None:
    versions = policy.publish_chain(3)
    named = 0
    for version in versions:
        for path in sorted(store.get(version).directory.iterdir()):
            data = path.read_bytes()
            for position in {0, 9, len(data) // 3, len(data) // 2, len(data) - 1}:
                path.write_bytes(
                    data[:position] + bytes([data[position] ^ 0x10]) + data[position + 1 :]
                )
                out = tmp_path / f"{version}-{path.name}-{position}"
                out.mkdir()
                with pytest.raises(WeightStoreError) as found:
                    check_out(WeightStore(store.location), versions[-1], out)
                if isinstance(found.value, TensorDigestError):
                    named += 1
                    assert found.value.name in policy.tensors
                    assert " of 'model-" in str(found.value)
                else:
                    assert str(found.value)
            path.write_bytes(data)
    assert named > 10


def test_a_version_whose_base_is_gone_cannot_be_had(policy, store, tmp_path) -> None:
    first, second = policy.publish_chain(2)
    store.get(first).directory.rename(tmp_path / "gone")
    (tmp_path / "out").mkdir()
    with pytest.raises(VersionNotFoundError):
        check_out(WeightStore(store.location), second, tmp_path / "out")


def test_a_commit_refuses_a_delta_of_what_the_base_has_not(policy, store) -> None:
    first = policy.publish()
    staging = store.allocate(first.version)
    policy.change()
    policy.shards.begin(first.version)
    shard = policy.shards.write(
        staging.directory, "model-0.safetensors", {"embed.weight": policy.tensors["embed.weight"]}
    )
    assert shard.delta is not None
    with pytest.raises(InvalidCheckpointError, match=r"embed\.weight"):
        store.commit(staging, [shard], [], step=0)  # no base
    other = replace(shard, file_name="model-1.safetensors")
    (staging.directory / "model-0.safetensors.delta").rename(
        staging.directory / "model-1.safetensors.delta"
    )
    with pytest.raises(InvalidCheckpointError, match=r"embed\.weight"):
        store.commit(staging, [other], [], step=0, base=first.version)


def test_a_commit_refuses_a_delta_that_lacks_a_tensor(policy, store) -> None:
    base = policy.publish().version
    staging = store.allocate(base)
    policy.change()
    policy.shards.begin(base)
    tensors = {n: t for n, t in policy.tensors.items() if n != "embed.weight"}
    shard = policy.shards.write(staging.directory, "model-1.safetensors", tensors)
    assert shard.delta is not None
    path = staging.directory / "model-1.safetensors.delta"
    payloads = load_file(path)
    del payloads["router.bias"]
    data = b"".join(encode_file({n: p.numpy().tobytes() for n, p in payloads.items()}))
    path.write_bytes(data)
    cut = replace(shard, delta=replace(shard.delta, size=len(data), digest=digest_bytes(data)))
    with pytest.raises(InvalidCheckpointError, match=r"router\.bias"):
        store.commit(staging, [cut], [], step=0, base=base)


def test_a_base_that_is_not_older_is_no_endless_chain(policy, store, tmp_path) -> None:
    _, second = policy.publish_chain(2)
    directory = store.get(second).directory
    looped = replace(read_manifest(directory), base=second)
    (directory / MANIFEST_NAME).write_bytes(encode_manifest(looped))
    (tmp_path / "out").mkdir()
    with pytest.raises(ManifestError):
        check_out(WeightStore(store.location), second, tmp_path / "out")
    with pytest.raises(ManifestError):
        HostCache(tmp_path / "cache", WeightStore(store.location)).take(second)
    with pytest.raises(ManifestError):
        WeightStore(store.location).chain(second)
    policy.publish()
    assert WeightStore(store.location).retain(1, in_use=[second]) == [1]  # it ends


def test_whole_versions_keep_the_format_that_older_readers_know(policy, store) -> None:
    first, second = policy.publish_chain(2)
    documents = [
        json.loads((store.get(v).directory / MANIFEST_NAME).read_bytes()) for v in (first, second)
    ]
    assert [document["format"] for document in documents] == [1, 2]
    assert "base" not in documents[0]


def test_a_header_that_says_the_same_in_other_bytes_is_found(
    policy: Policy, store: WeightStore, tmp_path: Path
) -> None:
    """Every tensor comes out right; the file is not the one that was published."""
    first, second = policy.publish_chain(2)
    path = store.get(first).directory / "model-0.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"format":"pt"', b'"format":"px"'))
    for version in (first, second):
        (tmp_path / str(version)).mkdir()
        with pytest.raises(FileDigestError) as found:
            check_out(store, version, tmp_path / str(version))
        assert found.value.file_name == path.name


def test_a_version_of_changes_converts_and_compares_as_what_it_stands_for(
    policy, store, tmp_path, monkeypatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    *_, newest = policy.publish_chain(4)
    held = Path(store.location, "versions", f"{newest:08d}")
    assert list(held.glob("*.delta")) and not list(held.glob("*.safetensors"))
    out = tmp_path / "out"
    convert_places(held, out, PlacedOptions(to="hf"), Control(), scratch=scratch)
    loaded = {n: t for path in out.glob("*.safetensors") for n, t in load_file(path).items()}
    assert loaded.keys() == policy.history[newest].keys()
    assert all(torch.equal(loaded[n], t) for n, t in policy.history[newest].items())
    assert not compare_places(held, out, Control(), scratch=scratch).different
    before = held.with_name(f"{newest - 1:08d}")
    compared = compare_places(before, out, Control(), scratch=scratch)
    assert compared.different.keys() == {"embed.weight", "layer.weight", "step"}
    assert not [path for path in scratch.rglob("*") if path.is_file()]
    moved = shutil.copytree(held, tmp_path / "moved")
    with pytest.raises(InvalidCheckpointError, match="from its own place in the store"):
        convert_places(moved, tmp_path / "none", PlacedOptions(), Control(), scratch=scratch)


@pytest.mark.parametrize("inside", ["", "store", "store/checkpoints/run-1"])
def test_a_directory_of_a_run_names_where_its_newest_weights_are(policy, tmp_path, inside) -> None:
    versions = policy.publish_chain(2)
    run = tmp_path / "run"
    saved = run / "store" / "checkpoints" / "run-1"
    saved.mkdir(parents=True)
    (saved / "checkpoint.json").write_text('{"format": 1}')
    shutil.copytree(policy.store.location, run / "store" / "weights")
    newest = run / "store" / "weights" / "versions" / f"{versions[-1]:08d}"
    with pytest.raises(InvalidCheckpointError, match=re.escape(repr(str(newest)))):
        convert_places(run / inside, tmp_path / "out", PlacedOptions(), Control())
