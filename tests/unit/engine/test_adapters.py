"""Several adapters on one base in one batch: every row comes out as of the merged model."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.rollout.engine.interface import Delta, TokenScores
from services.rollout.engine.reference.core import EngineCore
from services.rollout.engine.reference.loading import VersionLoader
from services.rollout.errors import (
    AdapterBaseError,
    DigestMismatchError,
    MixedWeightsError,
    NonFiniteLogitsError,
    UnfitAdapterError,
    VersionUnavailableError,
)
from sluice.runtime.errors import ServiceError
from sluice.weights.adapter import ADAPTER_FILE
from sluice.weights.checkpoint import digest_base
from sluice.weights.store import StoredVersion, WeightStore
from tests.adapters import import_adapter, make_adapter, peft_logprobs, publish_adapters
from tests.contract.engine.cases import Model, build_model, request_of
from tests.imported import import_checkpoint
from tests.models.families import CASES, build

CreateCore = Callable[..., EngineCore]
SHARED = [random.Random(0).randrange(97) for _ in range(40)]


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "weights", durable=False)


@pytest.fixture
def records(store: WeightStore, qwen3: Model, tmp_path: Path) -> list[StoredVersion]:
    return publish_adapters(store, qwen3.directory, tmp_path, 3)


def loader_of(core: EngineCore) -> VersionLoader:
    loader = VersionLoader(torch.float32, torch.device("cpu"))
    loader.model = core.model
    return loader


def commit(core: EngineCore, record: StoredVersion, *, drain: bool = False) -> list[int]:
    """Serves a version; returns the versions that are let go."""
    assert record.directory is not None
    adapter = loader_of(core).load(
        record.version, record.digest, record.directory, core.base, core.adapters
    )
    return [gone.version for gone in core.serve_adapter(adapter, drain=drain)]


def finish(core: EngineCore) -> dict[int, Delta]:
    while core.has_work:
        core.step()
    return dict(core.take_outbox())


def furthest(model: Model, folder: Path | None, prompt: list[int], delta: Delta) -> float:
    expected = peft_logprobs(model.directory, folder, prompt, delta.token_ids)
    return max(abs(a - b) for a, b in zip(delta.logprobs, expected, strict=True))


@pytest.mark.parametrize("settings", [{}, {"prefill_chunk_tokens": 7}, {"deterministic": True}])
def test_a_mixed_batch_has_the_log_probs_of_the_merged_models(
    qwen3: Model,
    create_core: CreateCore,
    records: list[StoredVersion],
    tmp_path: Path,
    settings: dict[str, object],
) -> None:
    core = create_core(qwen3.directory, max_running=16, **settings)
    for record in records:
        commit(core, record)
    versions = [0, *(record.version for record in records), None]
    prompts = {}
    for key, version in enumerate(2 * versions, 1):
        prompts[key] = SHARED[: 5 + 3 * key] if key % 2 else [*SHARED, key]
        request = request_of(str(key), prompts[key], max_new_tokens=9, seeds=(key,))
        core.submit(key, replace(request, version=version))
    found, errors, others = finish(core), [], []
    for key, version in enumerate(2 * versions, 1):
        served = records[-1].version if version is None else version
        folder = tmp_path / f"adapter-{served - 1}" if served else None
        errors.append(furthest(qwen3, folder, prompts[key], found[key]))
        others.append(furthest(qwen3, tmp_path / "adapter-0", prompts[key], found[key]))
        span = found[key].spans[0]
        digest = {0: core.base.digest} | {r.version: r.digest for r in records}
        assert (span.version, span.digest) == (served, digest[served])
        assert span.base_digest == (digest_base(qwen3.directory) if served else "")
    assert max(errors) < 1e-5
    assert sum(error > 0.01 for error in others) == 8  # of all that are not of that adapter


def test_deterministic_samples_do_not_feel_other_adapters(
    qwen3: Model, create_core: CreateCore, records: list[StoredVersion]
) -> None:
    def sample(neighbours: list[int | None]) -> Delta:
        core = create_core(qwen3.directory, max_running=8, deterministic=True)
        for record in records:
            commit(core, record)
        for key, version in enumerate([records[1].version, *neighbours], 1):
            request = request_of(str(key), SHARED[: 3 + 5 * key], max_new_tokens=20, seeds=(key,))
            core.submit(key, replace(request, version=version))
        return finish(core)[1]

    alone, beside = sample([]), sample([0, records[1].version, records[0].version, None, 0])
    assert list(alone.token_ids) == list(beside.token_ids)
    assert list(alone.logprobs) == list(beside.logprobs)


def test_an_adapter_that_overflows_fails_its_own_requests_alone(
    qwen3: Model, create_core: CreateCore, records: list[StoredVersion]
) -> None:
    def samples(*, broken: bool) -> dict[int, Delta | ServiceError]:
        core = create_core(qwen3.directory, max_running=8)
        for record in records[:2]:
            commit(core, record)
        assert core.model is not None
        bad = core.model.adapters.held[records[1].version]
        for key, record in enumerate(2 * records[:2], 1):
            request = request_of(str(key), [*SHARED, key], max_new_tokens=12, seeds=(key,))
            core.submit(key, replace(request, version=record.version))
        for _ in range(3):
            core.step()
        if broken:
            for factors in bad.factors.values():
                factors.b.fill_(float("inf"))
        ends: dict[int, Delta | ServiceError] = {}
        while core.has_work:
            core.step()
            for key, outcome in core.take_outbox():
                ends.setdefault(key, outcome)
        assert core.reserved_tokens == core.running_count == 0
        return ends

    whole, found = samples(broken=False), samples(broken=True)
    assert {key for key, end in found.items() if isinstance(end, NonFiniteLogitsError)} == {2, 4}
    for key in (1, 3):
        end, expected = found[key], whole[key]
        assert isinstance(end, Delta) and isinstance(expected, Delta)
        assert end.token_ids == expected.token_ids


def test_scores_are_by_the_weights_that_are_named(
    qwen3: Model, create_core: CreateCore, records: list[StoredVersion], tmp_path: Path
) -> None:
    core = create_core(qwen3.directory)
    for record in records:
        commit(core, record)
    tokens = SHARED[:12]
    for key, version in enumerate((0, 1, 2, 3, None), 1):
        core.submit_score(key, tokens, 5, version=version)
    while core.has_work:
        core.step()
    for key, outcome in core.take_outbox():
        assert isinstance(outcome, TokenScores)
        folder = None if key == 1 else tmp_path / f"adapter-{min(key, 4) - 2}"
        expected = peft_logprobs(qwen3.directory, folder, tokens[:5], tokens[5:])
        assert outcome.logprobs == pytest.approx(expected, abs=1e-5)


def test_prompts_share_prefixes_with_those_of_their_own_adapter_alone(
    qwen3: Model, create_core: CreateCore, records: list[StoredVersion], tmp_path: Path
) -> None:
    core = create_core(qwen3.directory)
    for record in records[:2]:
        commit(core, record)
    prompts = {1: [*SHARED, 1], 2: [*SHARED, 2], 3: [*SHARED, 3], 4: [*SHARED, 4]}
    for key, version in ((1, 1), (2, 2), (3, 1), (4, 0)):
        request = request_of(str(key), prompts[key], max_new_tokens=4)
        core.submit(key, replace(request, version=version))
        found = finish(core)[key]
        folder = tmp_path / f"adapter-{version - 1}" if version else None
        assert furthest(qwen3, folder, prompts[key], found) < 1e-5
    assert core.prefix_hit_tokens == 32  # of the third, from the first


@pytest.mark.parametrize("drain", [False, True])
def test_what_runs_follows_a_new_adapter_or_goes_on_under_its_own(
    qwen3: Model, create_core: CreateCore, records: list[StoredVersion], drain: bool
) -> None:
    core = create_core(qwen3.directory, max_running=4)
    commit(core, records[0])
    core.submit(1, request_of("free", SHARED[:5], max_new_tokens=12))
    core.submit(2, replace(request_of("named", SHARED[:6], max_new_tokens=12), version=1))
    core.submit(3, request_of("two", SHARED[:7], 4, max_new_tokens=12))  # of which two wait
    for _ in range(4):
        core.step()
    commit(core, records[1], drain=drain)
    core.submit(4, request_of("late", SHARED[:8], max_new_tokens=12))
    while core.has_work:
        core.step()
    spans: dict[tuple[int, int], list[int]] = {}
    for key, delta in core.take_outbox():
        assert isinstance(delta, Delta)
        spans[key, delta.index] = [span.version for span in delta.spans]
    started = [1] if drain else [1, 2]
    assert spans[1, 0] == spans[3, 0] == spans[3, 1] == started
    assert spans[2, 0] == [1]
    assert spans[4, 0] == [2]
    assert spans[3, 2] == spans[3, 3] == ([1] if drain else [2])


def test_the_oldest_adapter_that_nobody_uses_is_let_go(
    qwen3: Model, create_core: CreateCore, records: list[StoredVersion]
) -> None:
    core = create_core(qwen3.directory, max_adapters=1)
    assert commit(core, records[0]) == []
    core.submit(1, replace(request_of("a", SHARED[:5], max_new_tokens=30), version=1))
    core.step()
    assert commit(core, records[1]) == []  # the first one is in use
    assert [held.version for held in core.adapters] == [1, 2]
    finish(core)
    assert [held.version for held in core.adapters] == [2]
    assert commit(core, records[2]) == [2]
    with pytest.raises(VersionUnavailableError):
        core.submit(2, replace(request_of("b", [1, 2]), version=1))


def test_other_bases_and_whole_weights_are_refused_by_name(
    qwen3: Model, create_core: CreateCore, store: WeightStore, tmp_path: Path
) -> None:
    core, digest = create_core(qwen3.directory), digest_base(qwen3.directory)
    other = build_model(tmp_path / "other", "qwen3", seed=1)
    stranger = make_adapter(other.directory, tmp_path / "stranger", seed=0)
    with pytest.raises(AdapterBaseError) as base:
        commit(core, import_adapter(store, stranger, digest_base(other.directory)))
    assert base.value.metadata["expected"] == digest_base(other.directory)
    assert base.value.metadata["actual"] == digest
    mine = make_adapter(qwen3.directory, tmp_path / "mine", seed=0)
    commit(core, served := import_adapter(store, mine, digest))
    whole = WeightStore(tmp_path / "whole", durable=False)
    with pytest.raises(MixedWeightsError):
        commit(core, import_checkpoint(whole, other.directory, None, 0))
    assert core.version.version == served.version


def test_a_layer_that_the_model_has_not_is_named(
    qwen3: Model, create_core: CreateCore, store: WeightStore, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    core, digest = create_core(qwen3.directory), digest_base(qwen3.directory)
    folder = make_adapter(qwen3.directory, tmp_path / "a", seed=0, targets=["q_proj"])
    tensors = load_file(folder / ADAPTER_FILE)
    renamed = {name.replace("layers.1.", "layers.7."): t for name, t in tensors.items()}
    save_file(renamed, folder / ADAPTER_FILE)
    with pytest.raises(UnfitAdapterError, match=r"layers\.7") as unknown:
        commit(core, import_adapter(store, folder, digest))
    assert "layers.7.self_attn.q_proj" in unknown.value.metadata["tensor"]
    narrow = {n: t[:, :-1].contiguous() if "lora_A" in n else t for n, t in tensors.items()}
    save_file(narrow, folder / ADAPTER_FILE)
    with pytest.raises(UnfitAdapterError, match="31") as shape:
        commit(core, import_adapter(store, folder, digest))
    assert shape.value.metadata["tensor"].endswith("lora_A.weight")
    assert core.version == core.base


@pytest.mark.parametrize("damage", ["flipped", "cut", "config"])
def test_damaged_files_are_named_and_the_version_before_serves(
    qwen3: Model,
    create_core: CreateCore,
    records: list[StoredVersion],
    damage: str,
) -> None:
    core = create_core(qwen3.directory)
    commit(core, records[0])
    directory = records[1].directory
    assert directory is not None
    name = "adapter_config.json" if damage == "config" else ADAPTER_FILE
    data = bytearray((directory / name).read_bytes())
    if damage == "cut":
        del data[-5:]
    else:
        data[-5] ^= 1
    (directory / name).unlink()
    (directory / name).write_bytes(data)
    with pytest.raises(DigestMismatchError) as error:
        commit(core, records[1])
    assert error.value.metadata.get("tensor") or error.value.metadata["file"] == name
    core.submit(1, request_of("a", SHARED[:5]))
    assert [span.version for span in finish(core)[1].spans] == [1]


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("gemma2", ["q_proj", "o_proj", "up_proj"]),  # whose passes run whole rows
        ("deepseek_v3", ["o_proj", "kv_b_proj"]),
        ("qwen3_moe", ["q_proj", "v_proj"]),
    ],
)
def test_other_families_take_adapters_too(
    family: str, targets: list[str], create_core: CreateCore, store: WeightStore, tmp_path: Path
) -> None:
    case = next(case for case in CASES if case.name == family)
    build(case, tmp_path / "model")
    model, core = tmp_path / "model", create_core(tmp_path / "model", max_running=8)
    for seed in range(2):
        folder = make_adapter(model, tmp_path / str(seed), seed, targets=targets)
        commit(core, import_adapter(store, folder, digest_base(model)))
    prompts = {1: [3, 4, 5], 2: [3, 4, 6], 3: [*range(3, 30)], 4: [9, 8, 7, 6]}
    versions = {1: 0, 2: 1, 3: 2, 4: None}
    for key, version in versions.items():
        request = request_of(str(key), prompts[key], 2, max_new_tokens=6)
        core.submit(key, replace(request, version=version))
    while core.has_work:
        core.step()
    for key, delta in core.take_outbox():
        assert isinstance(delta, Delta)
        served = 2 if versions[key] is None else versions[key]
        folders = {place: tmp_path / str(place - 1) if place else None for place in range(3)}
        errors = {
            place: max(
                abs(a - b)
                for a, b in zip(
                    delta.logprobs,
                    peft_logprobs(model, folder, prompts[key], delta.token_ids),
                    strict=True,
                )
            )
            for place, folder in folders.items()
        }
        assert errors.pop(served) < 1e-5
        assert min(errors.values()) > 1e-4
