"""How images are prepared goes with the weights: who would see other pixels refuses by name."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.rollout.config import ImagesConfig
from services.rollout.engine.config import EngineConfig
from services.rollout.engine.interface import (
    Generation,
    Media,
    MediaKind,
    PauseMode,
    Sampling,
    create_engine,
)
from services.rollout.engine.sglang.weights import check_fit, read_model, read_version
from services.rollout.engine.wire import MediaReader, VersionBounds
from services.rollout.episodes.engines import LOCAL_ADDRESS, EngineAccess
from services.rollout.episodes.images import Images
from services.rollout.errors import (
    DigestMismatchError,
    ImageProcessorError,
    UnfitWeightsError,
)
from services.trainer.config import TrainerConfig
from services.trainer.controller.checkpoint_record import CheckpointRecord
from services.trainer.controller.checkpoints import TrainerCheckpoints
from services.trainer.errors import CheckpointMismatchError
from services.trainer.rows import RowLimits
from sluice.client import RemoteError
from sluice.config import ConfigError, parse_config
from sluice.runtime.security import SecurityConfig
from sluice.samples.blob_store import BlobStore
from sluice.samples.images import processor_digest
from sluice.samples.sample import MediaSpan
from sluice.weights.manifest import MANIFEST_NAME, decode_manifest, encode_manifest
from sluice.weights.store import StoredVersion, WeightStore
from tests.contract.training_backend.cases import build_model as build_text_model
from tests.imported import import_checkpoint
from tests.vision.cases import IMAGE, Model, digest_of, draw_image

pytestmark = pytest.mark.fast
FILE = "preprocessor_config.json"


def altered(source: Path, target: Path, **fields: Any) -> Path:
    """The same model, which is shown images in another way."""
    shutil.copytree(source, target)
    document = json.loads((target / FILE).read_text())
    (target / FILE).write_text(json.dumps({**document, **fields}))
    return target


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "weights", durable=False)


@pytest.fixture
def other(qwen3_vl: Model, tmp_path: Path) -> Path:
    return altered(qwen3_vl.directory, tmp_path / "other", image_mean=[0.4, 0.5, 0.5])


def directory_of(stored: StoredVersion) -> Path:
    assert stored.directory is not None
    return stored.directory


def test_a_manifest_says_how_its_model_is_shown_images(
    qwen3_vl: Model, store: WeightStore, tmp_path: Path
) -> None:
    seeing = import_checkpoint(store, qwen3_vl.directory, None, 0)
    assert store.manifest(seeing.version).processor == qwen3_vl.rules.digest
    blind = import_checkpoint(store, build_text_model(tmp_path / "text", "qwen3").directory, 1, 0)
    document = json.loads((directory_of(blind) / MANIFEST_NAME).read_bytes())
    assert "processor" not in document and store.manifest(blind.version).processor is None
    # As releases wrote them that knew of no processor.
    old = replace(store.manifest(seeing.version), processor=None)
    assert b"processor" not in encode_manifest(old).replace(b"processor_config", b"")
    assert decode_manifest(encode_manifest(old)) == old
    for fields in ({"image_processor_type": "Another"}, {"patch_size": -1}):
        unknown = altered(qwen3_vl.directory, tmp_path / str(fields), **fields)
        assert processor_digest(unknown) is None  # engines refuse every image by themselves


@pytest.mark.parametrize(
    "fields",
    [
        {"image_std": [0.5, 0.5, 0.4]},
        {"rescale_factor": 1 / 256},
        {"resample": 2},
        {"size": {"shortest_edge": 256, "longest_edge": 16 * 256}},
        {"merge_size": 1},
        {"temporal_patch_size": 1},
    ],
    ids=str,
)
def test_every_rule_counts(qwen3_vl: Model, tmp_path: Path, fields: dict[str, Any]) -> None:
    digest = processor_digest(altered(qwen3_vl.directory, tmp_path / "other", **fields))
    assert digest not in (None, qwen3_vl.rules.digest)


@pytest.fixture
def prompt(qwen3_vl: Model) -> Generation:
    image = draw_image(qwen3_vl.rules, 1, 2, 3)
    return Generation(
        request_id="a",
        prompt_token_ids=[1, IMAGE, 2],
        sampling=Sampling(max_new_tokens=2, temperature=0),
        media=(Media(MediaKind.IMAGE, digest_of(image), memoryview(image.png)),),
    )


async def test_an_engine_refuses_weights_of_another_processor_and_serves_on(
    qwen3_vl: Model, store: WeightStore, other: Path, prompt: Generation
) -> None:
    good = import_checkpoint(store, qwen3_vl.directory, None, 0)
    bad = import_checkpoint(store, other, good.version, 0)
    engine = create_engine("reference", EngineConfig(model=str(qwen3_vl.directory), threads=1))
    await engine.start()
    try:
        with pytest.raises(UnfitWeightsError) as caught:
            await engine.prepare(bad.version, bad.digest, directory_of(bad))
        assert caught.value.metadata["actual"] == qwen3_vl.rules.digest
        assert caught.value.metadata["expected"] == processor_digest(other)
        with pytest.raises(UnfitWeightsError):
            engine.check_incoming(store.manifest(bad.version))
        await engine.prepare(good.version, good.digest, directory_of(good))
        engine.check_incoming(store.manifest(good.version))
        await engine.commit(good.version, PauseMode.WAIT)
        assert [delta async for delta in engine.generate(prompt)]
    finally:
        await engine.close()


async def test_an_engine_without_a_model_refuses_a_version_whose_file_was_edited(
    qwen3_vl: Model, store: WeightStore, other: Path
) -> None:
    stored = import_checkpoint(store, qwen3_vl.directory, None, 0)
    path = directory_of(stored) / FILE
    path.chmod(0o644)
    shutil.copyfile(other / FILE, path)
    engine = create_engine("reference", EngineConfig(threads=1))
    await engine.start()
    try:
        with pytest.raises(DigestMismatchError, match=FILE):
            await engine.prepare(stored.version, stored.digest, directory_of(stored))
    finally:
        await engine.close()


def test_versions_of_sglang_are_compared_too(
    qwen3_vl: Model, store: WeightStore, other: Path
) -> None:
    """A server keeps the processor that it began with, whatever weights it is given later."""
    serving = read_model(qwen3_vl.directory)
    good = import_checkpoint(store, qwen3_vl.directory, None, 0)
    bad = import_checkpoint(store, other, None, 0)
    check_fit(serving, read_version(good.version, good.digest, directory_of(good)))
    with pytest.raises(UnfitWeightsError, match="preprocessor_config") as caught:
        check_fit(serving, read_version(bad.version, bad.digest, directory_of(bad)))
    assert caught.value.metadata["actual"] == processor_digest(other)


async def test_a_worker_with_another_file_is_refused(
    qwen3_vl: Model, other: Path, prompt: Generation, tmp_path: Path
) -> None:
    engine = create_engine("reference", EngineConfig(model=str(qwen3_vl.directory), threads=1))
    await engine.start()
    blobs = BlobStore(tmp_path / "store", sync=False)
    image = draw_image(qwen3_vl.rules, 1, 2, 3)
    blobs.put(image.png)
    span = MediaSpan(
        digest=digest_of(image),
        size=len(image.png),
        kind="image",
        first_token=1,
        token_count=6,
        grid_thw=image.grid_thw,
    )
    try:
        for number, directory in enumerate((other, qwen3_vl.directory)):
            processor = Images.of_model(directory, blobs, ImagesConfig()).processor
            assert processor == processor_digest(directory)
            access = EngineAccess(SecurityConfig(), MediaReader(blobs), processor)
            access.add_local(LOCAL_ADDRESS, engine)
            asked = replace(prompt, request_id=str(number), media=())
            generate = access.generate(LOCAL_ADDRESS, asked, VersionBounds(), [span])
            if directory == other:
                with pytest.raises(RemoteError) as caught:
                    await generate
                assert caught.value.reason == ImageProcessorError.reason
                assert caught.value.metadata["actual"] == processor
            else:
                assert await generate
            text = replace(asked, request_id=f"text {number}", prompt_token_ids=[1, 2])
            assert await access.generate(LOCAL_ADDRESS, text, VersionBounds())
            await access.close()
    finally:
        await engine.close()


@pytest.fixture
def config_of(tmp_path: Path) -> Any:
    def make(model: Path, **settings: Any) -> TrainerConfig:
        values = {"model": str(model), "store": str(tmp_path / "store"), "durable": False}
        return parse_config(TrainerConfig, {**values, **settings})

    return make


def test_a_trainer_refuses_a_version_whose_file_was_edited(
    qwen3_vl: Model, store: WeightStore, other: Path, config_of: Any
) -> None:
    directory = directory_of(import_checkpoint(store, qwen3_vl.directory, None, 0))
    assert RowLimits.from_config(config_of(directory)).images == qwen3_vl.rules
    (directory / FILE).chmod(0o644)
    shutil.copyfile(other / FILE, directory / FILE)
    with pytest.raises(ConfigError, match="prepares images otherwise"):
        RowLimits.from_config(config_of(directory))


def test_a_trainer_refuses_a_reference_that_sees_other_pixels(
    qwen3_vl: Model, other: Path, config_of: Any
) -> None:
    with pytest.raises(ConfigError, match="reference_model"):
        RowLimits.from_config(config_of(qwen3_vl.directory, reference_model=str(other)))


class Blank:
    """What a trainer's checkpoints are given that this test has no use for."""


async def test_a_checkpoint_of_another_processor_is_refused(
    qwen3_vl: Model, other: Path, config_of: Any
) -> None:
    def checkpoints(model: Path) -> TrainerCheckpoints:
        blank: Any = Blank()
        return TrainerCheckpoints(config_of(model), blank, blank, blank, blank, blank)

    first = checkpoints(qwen3_vl.directory)
    for name, processor in (("new", first._processor), ("old", None)):
        record = CheckpointRecord(
            backend="reference",
            step=1,
            skipped_count=0,
            weights=None,
            layout={},
            files={},
            processor=processor,
        )
        first.store.finish(name, first.store.begin(name), record)
        assert await first._read(f"checkpoints/{name}", "") == record
    second = checkpoints(other)
    assert (await second._read("checkpoints/old", "")).step == 1
    with pytest.raises(CheckpointMismatchError, match="other pixels"):
        await second._read("checkpoints/new", "")
