"""What is checked before weights serve: bytes on the way to the host, and what SGLang holds."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from services.rollout.config import RolloutConfig
from services.rollout.engine.sglang.jobs import is_expansion
from services.rollout.engine.sglang.samples import of_tokens, parse_tag, tag, versions_of
from services.rollout.engine.sglang.staging import (
    HostStaging,
    HostVersions,
    check_fit,
    plain_version,
)
from services.rollout.engine.sglang.weights import (
    CheckpointChecksums,
    from_answer,
    tensors_of,
    wrong_changes,
    wrong_values,
)
from services.rollout.errors import DigestMismatchError, UnfitWeightsError, VersionNotPreparedError
from sluice.config import parse_config
from sluice.weights.host_cache import HostCache
from sluice.weights.store import StoredVersion, WeightStore
from tests.imported import import_checkpoint
from tests.patience import PATIENCE

RNG = np.random.default_rng(0)
NAMES = ("q_proj", "k_proj", "v_proj", "o_proj")


def write_model(directory: Path, **changes: np.ndarray) -> Path:
    directory.mkdir()
    tensors = {
        f"model.layers.0.self_attn.{name}.weight": np.full((4, 8), place, np.float32)
        for place, name in enumerate(NAMES)
    }
    tensors["model.embed_tokens.weight"] = np.ones((70, 4), np.float32)
    save_file({**tensors, **changes}, directory / "model.safetensors")
    config = {"architectures": ["TinyForCausalLM"], "vocab_size": 70}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "store", durable=False)


@pytest.fixture
def record(store: WeightStore, tmp_path: Path) -> StoredVersion:
    return import_checkpoint(store, write_model(tmp_path / "model"), None, 0)


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def test_checksums_of_joined_and_padded_parameters(record: StoredVersion) -> None:
    files = CheckpointChecksums([record.directory / "model.safetensors"])
    joined = "model.layers.0.self_attn.qkv_proj.weight"
    assert tensors_of(joined) == tuple(
        f"model.layers.0.self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj")
    )
    found = files.of([joined, "model.embed_tokens.weight", "unknown.weight"])
    parts = [np.full((4, 8), place, np.float32).tobytes() for place in range(3)]
    padded = np.zeros((128, 4), np.float32)
    padded[:70] = 1
    assert found == {
        joined: sha(b"".join(parts)),
        "model.embed_tokens.weight": sha(padded.tobytes()),
    }
    assert wrong_values([found, {**found, joined: "0"}], found) == [joined]


def test_ranks_are_in_order() -> None:
    ranks = [
        {
            "checksums": {"a": str(rank)},
            "parallelism_info": [{"dp_rank": 0, "pp_rank": 0, "tp_rank": rank}],
        }
        for rank in (2, 0, 1)
    ]
    assert [rank["a"] for rank in from_answer({"ranks": ranks})] == ["0", "1", "2"]


def test_what_must_change_and_what_must_not() -> None:
    before = [{"x.weight": "1", "y.weight": "1"}, {"x.weight": "2", "y.weight": "2"}]
    old = {"x.weight": "a", "y.weight": "a"}
    new = {"x.weight": "b", "y.weight": "a"}
    one_rank_changed = [{"x.weight": "9", "y.weight": "1"}, {"x.weight": "2", "y.weight": "2"}]
    assert wrong_changes(before, one_rank_changed, old, new, exact=True) == []
    assert wrong_changes(before, before, old, new, exact=True) == ["x.weight"]
    assert wrong_changes(before, before, old, new, exact=False) == []
    both = [{"x.weight": "9", "y.weight": "9"}, before[1]]
    assert wrong_changes(before, both, old, new, exact=False) == ["y.weight"]


def test_a_version_is_fetched_once_and_goes_with_the_last_engine(
    record: StoredVersion, tmp_path: Path
) -> None:
    root = tmp_path / "host"
    engines = [HostStaging(root) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        stage = [
            pool.submit(engine.stage, record.version, record.digest, record.directory)
            for engine in engines
        ]
        held = [future.result(timeout=PATIENCE) for future in stage]
    directory = held[0].directory
    assert {staged.directory for staged in held} == {directory}
    inode = (directory / "model.safetensors").stat().st_ino
    for engine, staged in zip(engines[:3], held[:3], strict=True):
        engine.release(staged)
        assert (directory / "model.safetensors").stat().st_ino == inode
    HostStaging(root).sweep()  # another engine starts
    assert directory.is_dir()
    engines[3].release(held[3])
    assert not directory.exists()
    assert [path.suffix for path in root.iterdir()] == [".lock"]


def test_a_version_that_is_cached_on_this_host_is_not_copied_again(
    record: StoredVersion, store: WeightStore, tmp_path: Path
) -> None:
    values = {"store": tmp_path, "roles": ["engine"], "weights_cache": tmp_path / "cache"}
    config = parse_config(RolloutConfig, values)
    held = HostCache(config.cache_directory, store).take(record.version)
    staging = HostStaging(config.engine_here.sglang.staging)
    staged = staging.stage(record.version, record.digest, held.directory)
    files = [directory / "model.safetensors" for directory in (held.directory, staged.directory)]
    assert files[0].samefile(files[1])
    staging.release(staged)
    assert HostCache(config.cache_directory, store).take(record.version).directory.is_dir()
    own = {"engine": {"sglang": {"staging": tmp_path / "own"}}}
    assert parse_config(RolloutConfig, values | own).engine_here.sglang.staging == tmp_path / "own"


async def test_a_version_that_is_being_loaded_is_not_displaced(
    store: WeightStore, record: StoredVersion, tmp_path: Path
) -> None:
    """Others are prepared meanwhile; the oldest of those that only lie there gives way."""
    records = [record, *(import_checkpoint(store, tmp_path / "model", None, i) for i in (1, 2, 3))]
    versions = HostVersions(tmp_path / "host")
    first, second, *others = records
    for each in (first, second):
        await versions.prepare(each.version, each.digest, each.directory, lambda staged: None)
    with versions.using(first.version) as staged:
        for each in others:
            await versions.prepare(each.version, each.digest, each.directory, lambda staged: None)
        assert staged.directory.is_dir()
        assert second.version not in versions.prepared
    await versions.served(staged)
    assert versions.prepared == [each.version for each in others]
    assert versions.restorable is staged and staged.directory.is_dir()
    with pytest.raises(VersionNotPreparedError), versions.using(first.version):
        pass
    await versions.close()
    assert not [path for path in (tmp_path / "host").iterdir() if path.is_dir()]


def test_what_a_killed_engine_left_is_swept(record: StoredVersion, tmp_path: Path) -> None:
    import os

    staging = HostStaging(tmp_path / "host")
    staged = staging.stage(record.version, record.digest, record.directory)
    assert staged.hold is not None
    os.close(staged.hold)  # as the kernel does
    HostStaging(tmp_path / "host").sweep()
    assert not staged.directory.exists()
    assert record.directory.is_dir()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_damage_is_named_and_leaves_nothing(
    record: StoredVersion, tmp_path: Path, name: str
) -> None:
    path = record.directory / name
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    staging = HostStaging(tmp_path / "host")
    with pytest.raises(DigestMismatchError) as raised:
        staging.stage(record.version, record.digest, record.directory)
    assert raised.value.metadata.get("tensor", raised.value.metadata.get("file"))
    assert not [path for path in (tmp_path / "host").iterdir() if path.is_dir()]


def test_other_shapes_do_not_fit(tmp_path: Path) -> None:
    serving = plain_version(write_model(tmp_path / "a"))
    other = write_model(
        tmp_path / "b", **{"model.embed_tokens.weight": np.ones((70, 5), np.float32)}
    )
    check_fit(serving, plain_version(write_model(tmp_path / "c")))
    with pytest.raises(UnfitWeightsError, match="embed_tokens"):
        check_fit(serving, plain_version(other))


def test_tags_and_spans() -> None:
    assert parse_tag(tag(7, "ab")) == (7, "ab")
    assert parse_tag("default") is parse_tag("x:ab") is parse_tag(None) is None
    spans = of_tokens([(1, "a"), (1, "a"), (2, "b")], 5)
    assert [(s.version, s.first_token, s.last_token) for s in spans] == [(1, 5, 6), (2, 7, 7)]
    meta = {
        "weight_versions": [
            {"version": "1:a", "start": 0, "end": 2},
            {"version": "2:b", "start": 2, "end": 3},
        ]
    }
    assert versions_of(meta, 3) == [(1, "a"), (1, "a"), (2, "b")]
    assert versions_of(meta, 4) is versions_of({}, 1) is None


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=12),
    st.integers(1, 3),
    st.integers(1, 9),
)
def test_a_prompt_may_grow_at_its_placeholders_only(
    words: list[int], count: int, grows_by: int
) -> None:
    placeholder = 9
    given_tokens = [token for _ in range(count) for token in (*words, placeholder)]
    read = [
        copy
        for token in given_tokens
        for copy in [token] * (1 + grows_by if token == placeholder else 1)
    ]
    assert is_expansion(given_tokens, read, count)
    assert not is_expansion(given_tokens, read, count - 1)
    assert not is_expansion(given_tokens, given_tokens, count)  # no image was seen
    assert not is_expansion(given_tokens, [7, *read], count)
    assert not is_expansion(given_tokens, read[1:], count)
