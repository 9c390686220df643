"""Adapters as versions of a store: a peft folder that is whole, or is not there."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sluice.weights.adapter import ADAPTER_CONFIG, ADAPTER_FILE, AdapterSpec
from sluice.weights.checkpoint import describe_shard, digest_base
from sluice.weights.errors import (
    InvalidAdapterError,
    MixedKindsError,
    WeightStoreError,
)
from sluice.weights.host_cache import HostCache
from sluice.weights.manifest import MANIFEST_NAME, read_manifest
from sluice.weights.shards import PublishedShards, load_verified
from sluice.weights.store import StoredVersion, WeightStore
from sluice.weights.transfer.plan import plan_buckets
from tests.adapters import TARGETS, import_adapter, make_adapter, publish_adapters
from tests.contract.engine.cases import build_model
from tests.imported import import_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("model"), "qwen3", seed=0).directory


@pytest.fixture(scope="module")
def folder(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(model, tmp_path_factory.mktemp("peft"), seed=0)


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "weights", durable=False)


@torch.no_grad()
def logits(model: Path, folder: Path) -> torch.Tensor:
    base = AutoModelForCausalLM.from_pretrained(model)
    return PeftModel.from_pretrained(base, folder).eval()(torch.arange(12)[None]).logits


def test_a_version_is_a_folder_that_plain_peft_reads(
    store: WeightStore, model: Path, folder: Path
) -> None:
    record = import_adapter(store, folder, digest_base(model))
    assert record.directory is not None
    assert torch.equal(logits(model, record.directory), logits(model, folder))
    spec = AdapterSpec(rank=4, alpha=12.0, targets=TARGETS, base_digest=digest_base(model))
    assert record.adapter == store.manifest(record.version).adapter == spec
    assert sorted(path.name for path in record.directory.iterdir()) == sorted(
        [ADAPTER_CONFIG, ADAPTER_FILE, MANIFEST_NAME]
    )
    size = sum(path.stat().st_size for path in record.directory.iterdir())
    assert size < (model / "model.safetensors").stat().st_size


def test_another_process_reads_what_was_written(
    store: WeightStore, model: Path, folder: Path, tmp_path: Path
) -> None:
    record = import_adapter(store, folder, digest_base(model))
    again = WeightStore(store.location, durable=False).get(record.version)
    assert again == record
    cache = HostCache(tmp_path / "host", store)
    cached = cache.take(record.version)
    assert torch.equal(logits(model, cached.directory), logits(model, folder))
    buckets = plan_buckets(store.manifest(record.version), [ADAPTER_FILE])
    assert sum(bucket.size for bucket in buckets) == sum(
        tensor.nbytes for tensor in load_file(folder / ADAPTER_FILE).values()
    )


def test_the_digest_is_of_what_an_adapter_does(
    store: WeightStore, model: Path, folder: Path, tmp_path: Path
) -> None:
    digest = digest_base(model)
    first = import_adapter(store, folder, digest)
    assert import_adapter(store, folder, digest).digest == first.digest
    assert import_adapter(store, folder, "0" * 32).digest != first.digest
    louder = shutil.copytree(folder, tmp_path / "louder")
    text = (louder / ADAPTER_CONFIG).read_text()
    (louder / ADAPTER_CONFIG).write_text(text.replace('"lora_alpha": 12', '"lora_alpha": 13'))
    assert import_adapter(store, louder, digest).digest != first.digest


def test_a_store_holds_versions_of_one_kind(store: WeightStore, model: Path, folder: Path) -> None:
    digest = digest_base(model)
    adapter = import_adapter(store, folder, digest)
    with pytest.raises(MixedKindsError, match="whole weights, but version 1"):
        import_checkpoint(store, model, adapter.version, 0)
    assert import_adapter(store, folder, digest, adapter.version).version == 3
    other = WeightStore(Path(store.location).with_name("whole"), durable=False)
    whole = import_checkpoint(other, model, None, 0)
    with pytest.raises(MixedKindsError, match="an adapter, but version 1"):
        import_adapter(other, folder, digest, whole.version)
    assert other.versions() == [1]


def test_what_is_no_such_adapter_is_not_published(
    store: WeightStore, model: Path, folder: Path
) -> None:
    tensors = load_file(folder / ADAPTER_FILE)
    name = min(tensors)
    spec = AdapterSpec(rank=4, alpha=12.0, targets=TARGETS, base_digest=digest_base(model))
    cases = {
        "rank": (replace(spec, rank=5), tensors),
        "target": (replace(spec, targets=(*TARGETS, "k_proj")), tensors),
        "lora_": (spec, {n: t for n, t in tensors.items() if n != name}),
        "none of": (spec, {**tensors, "model.norm.weight": torch.ones(4)}),
        "dtype": (spec, {**tensors, name: tensors[name].to(torch.int32)}),
    }
    for word, (claimed, written) in cases.items():
        staging = store.allocate(None)
        save_file(written, staging.directory / ADAPTER_FILE)
        shard = describe_shard(staging.directory / ADAPTER_FILE)
        with pytest.raises(InvalidAdapterError, match=word):
            store.commit(staging, [shard], [], 0, adapter=claimed)
        store.abort(staging)
    assert store.versions() == []


def test_an_adapter_is_always_whole(store: WeightStore, model: Path, folder: Path) -> None:
    tensors = load_file(folder / ADAPTER_FILE)
    spec = AdapterSpec(rank=4, alpha=12.0, targets=TARGETS, base_digest=digest_base(model))
    shards, base = PublishedShards(keep=True, sync=False), None
    for _ in range(2):
        staging = store.allocate(base)
        shards.begin(base)
        written = shards.write(staging.directory, ADAPTER_FILE, tensors)
        shards.finish(staging.version)
        if base is None:
            base = store.commit(staging, [written], [], 0, adapter=spec).version
    assert written.delta is not None
    with pytest.raises(InvalidAdapterError, match="whole"):
        store.commit(staging, [written], [], 1, base=base, adapter=spec)


def test_ranks_may_write_parts(store: WeightStore, model: Path, folder: Path) -> None:
    tensors = load_file(folder / ADAPTER_FILE)
    spec = AdapterSpec(rank=4, alpha=12.0, targets=TARGETS, base_digest=digest_base(model))
    staging, shards = store.allocate(None), []
    for part in range(2):
        path = staging.directory / f"model-0000{part}.safetensors"
        save_file({n: tensors[n] for n in sorted(tensors)[part::2]}, path)
        shards.append(describe_shard(path))
    record = store.commit(staging, shards, [], 0, adapter=spec)
    assert record.directory is not None
    assert record.digest == import_adapter(store, folder, spec.base_digest).digest
    found = dict(load_verified(record.directory, store.manifest(record.version)))
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("seed", range(4))
def test_any_flipped_byte_and_any_cut_is_found(
    store: WeightStore, model: Path, folder: Path, seed: int
) -> None:
    record = import_adapter(store, folder, digest_base(model))
    directory, draw = record.directory, random.Random(seed)
    assert directory is not None
    for name in (MANIFEST_NAME, ADAPTER_CONFIG, ADAPTER_FILE):
        path = directory / name
        whole = path.read_bytes()
        for place in draw.sample(range(len(whole)), 12):
            flipped = bytearray(whole)
            flipped[place] ^= 1 << draw.randrange(8)
            for damaged in (bytes(flipped), whole[:place]):
                path.write_bytes(damaged)
                with pytest.raises(WeightStoreError):
                    dict(load_verified(directory, read_manifest(directory)))
        path.write_bytes(whole)
    assert dict(load_verified(directory, read_manifest(directory)))


def test_retention_goes_by_versions_as_ever(
    store: WeightStore, model: Path, tmp_path: Path
) -> None:
    records: list[StoredVersion] = publish_adapters(store, model, tmp_path, 3)
    store.pin(records[0].version, "engine-0")
    assert store.retain(1) == [2]
    assert store.versions() == [1, 3]
