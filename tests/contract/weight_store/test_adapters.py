"""Adapters in every weight store: one kind a store, and whole on whichever host reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sluice.weights.adapter import ADAPTER_CONFIG, ADAPTER_FILE, decode_adapter_config
from sluice.weights.errors import MixedKindsError, WeightStoreError
from sluice.weights.host_cache import HostCache
from sluice.weights.manifest import read_manifest
from sluice.weights.shards import load_verified
from tests.adapters import import_adapter, make_adapter
from tests.contract.engine.cases import build_model
from tests.contract.weight_store.conftest import OpenStore
from tests.contract.weight_store.policy import Policy

BASE = "0123456789abcdef" * 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("peft")
    return make_adapter(build_model(root / "model", "qwen3", 0).directory, root / "adapter", 0)


def test_another_host_has_the_whole_adapter(
    open_again: OpenStore, folder: Path, tmp_path: Path
) -> None:
    record = import_adapter(open_again(), folder, BASE)
    there = open_again()
    assert there.get(record.version).adapter == record.adapter
    held = HostCache(tmp_path / "host", there).take(record.version)
    found = dict(load_verified(held.directory, read_manifest(held.directory)))
    expected = load_file(folder / ADAPTER_FILE)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert decode_adapter_config((held.directory / ADAPTER_CONFIG).read_bytes()) == record.adapter
    path = held.directory / ADAPTER_FILE
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(WeightStoreError):
        dict(load_verified(held.directory, read_manifest(held.directory)))


def test_whole_versions_do_not_follow_adapters(
    open_again: OpenStore, policy: Policy, folder: Path
) -> None:
    record = import_adapter(open_again(), folder, BASE)
    with pytest.raises(MixedKindsError):
        policy.publish()
    assert open_again().versions() == [record.version]
