"""What is checked before weights serve: bytes on the way to the host, and what SGLang holds."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from services.rollout.config import RolloutConfig
from services.rollout.engine.sglang.samples import of_tokens, versions_of
from services.rollout.engine.sglang.weights import (
    CheckpointChecksums,
    DiskVersion,
    check_drafts,
    check_encoders,
    check_fit,
    from_answer,
    read_model,
    read_version,
    tensors_of,
    wrong_changes,
    wrong_values,
)
from services.rollout.engine.versions import PreparedVersions, parse_tag, tag
from services.rollout.errors import DigestMismatchError, UnfitWeightsError, VersionNotPreparedError
from sluice.config import ConfigError, parse_config
from sluice.weights.store import StoredVersion, WeightStore
from tests.imported import import_checkpoint

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


async def test_a_version_that_is_being_loaded_is_not_displaced(
    store: WeightStore, record: StoredVersion, tmp_path: Path
) -> None:
    """Others are prepared meanwhile; the oldest of those that are only ready gives way."""
    records = [record, *(import_checkpoint(store, tmp_path / "model", None, i) for i in (1, 2, 3))]
    first, second, *others = [
        read_version(each.version, each.digest, each.directory) for each in records
    ]
    versions = PreparedVersions[DiskVersion]()
    for each in (first, second):
        versions.add(each)
    with versions.serving(first.version) as loaded:
        for each in others:
            versions.add(each)
        assert loaded is first
        assert second.version not in versions.numbers
    assert versions.numbers == tuple(each.version for each in others)
    with pytest.raises(VersionNotPreparedError), versions.serving(first.version):
        pass


def test_a_version_that_was_not_taken_stays_ready(record: StoredVersion) -> None:
    versions = PreparedVersions[DiskVersion]()
    versions.add(read_version(record.version, record.digest, record.directory))
    with pytest.raises(UnfitWeightsError), versions.serving(record.version):
        raise UnfitWeightsError("refused")
    assert versions.has(record.version, record.digest)


def test_weights_have_one_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="weights_cache"):
        parse_config(
            RolloutConfig,
            {"store": tmp_path, "roles": ["engine"], "engine": {"sglang": {"staging": tmp_path}}},
        )


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("place", [-3, None])
def test_damage_is_named(record: StoredVersion, name: str, place: int | None) -> None:
    """A bit that flipped, or a file that is gone."""
    path = record.directory / name
    if place is None:
        path.unlink()
    else:
        data = bytearray(path.read_bytes())
        data[place] ^= 1
        path.chmod(0o644)
        path.write_bytes(data)
    with pytest.raises(DigestMismatchError) as raised:
        read_version(record.version, record.digest, record.directory)
    assert raised.value.metadata.get("tensor", raised.value.metadata.get("file"))


def test_other_shapes_do_not_fit(tmp_path: Path) -> None:
    serving = read_model(write_model(tmp_path / "a"))
    other = write_model(
        tmp_path / "b", **{"model.embed_tokens.weight": np.ones((70, 5), np.float32)}
    )
    check_fit(serving, read_model(write_model(tmp_path / "c")))
    with pytest.raises(UnfitWeightsError, match="embed_tokens"):
        check_fit(serving, read_model(other))


def test_weights_that_encoders_would_not_get_are_refused(tmp_path: Path) -> None:
    tower, text = "model.visual.blocks.0.attn.qkv.weight", "model.embed_tokens.weight"
    ones, twos = (np.full((70, 4), value, np.float32) for value in (1, 2))
    serving = read_model(write_model(tmp_path / "a", **{tower: ones}))
    check_encoders(serving, read_model(write_model(tmp_path / "b", **{tower: ones, text: twos})))
    with pytest.raises(UnfitWeightsError, match=r"visual\.blocks.*engine\.sglang\.encoders"):
        check_encoders(serving, read_model(write_model(tmp_path / "c", **{tower: twos})))


def test_a_version_that_drafts_nothing_is_refused_where_it_should(tmp_path: Path) -> None:
    plain = read_model(write_model(tmp_path / "plain"))
    with pytest.raises(UnfitWeightsError, match=r"no layer of .*engine\.sglang\.speculative_steps"):
        check_drafts(plain)
    norm = {"mtp.norm.weight": np.ones(4, np.float32)}
    check_drafts(read_model(write_model(tmp_path / "drafting", **norm)))


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
