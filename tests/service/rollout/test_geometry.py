"""Two turns of a real engine and a real episode worker, a picture in each."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import numpy as np
from PIL import Image

from examples.geometry.measured import SIDES, make_puzzle
from examples.models.tiny_qwen3_vl import IMAGE, WORDS, build_tiny_qwen3_vl
from sluice.samples.blob_store import BlobStore
from sluice.samples.blobs import BlobReference
from sluice.samples.sample import validate_sample
from sluice.weights.store import WeightStore
from tests.imported import import_checkpoint
from tests.patience import PATIENCE
from tests.service.rollout.harness import Store, rollout_request, running_episodes

MEASURED = "examples.geometry.measured:MeasuredGeometry"
DIGITS = [str(number) for number in range(10)]


async def test_what_is_asked_for_is_shown_in_the_second_turn(tmp_path: Path) -> None:
    model = build_tiny_qwen3_vl(tmp_path / "model", 0)
    weights = WeightStore(tmp_path / "store" / "weights", durable=False)
    first = import_checkpoint(weights, model, None, 0)
    store = Store(tmp_path / "store", weights, first, first)
    request = rollout_request(
        {f"g{index}": {"index": index} for index in range(4)},
        environment=MEASURED,
        settings={"difficulty": 0, "max_turns": 2, "seed": 9},
        sample_count=24,
        max_new_tokens=2,
    )
    request.sampling.stop_token_ids.extend(map(WORDS.index, (*SIDES, *DIGITS)))
    for index, group in enumerate(request.groups):
        group.seeds.extend(range(index * 24, (index + 1) * 24))
    async with running_episodes(store, model, user_modules=("examples",)) as episodes:
        async with asyncio.timeout(PATIENCE):
            finished = await episodes.finished(request)
    blobs, asked = BlobStore(store.root, sync=False), set[str]()
    for index in range(4):
        group = finished[f"g{index}"]
        puzzle = make_puzzle(9, index, 0)
        for sample, detail in zip(store.samples(group), group.details, strict=True):
            validate_sample(sample)
            assert len(sample.media) == detail.turn_count
            assert float(sample.columns["score/turns"]) == detail.turn_count
            if detail.turn_count == 1:
                continue
            ids, span = sample.token_ids, sample.media[1]
            side = WORDS[ids[sample.prompt_length]]
            asked.add(side)
            assert set(ids[span.first_token : span.end]) == {WORDS.index(IMAGE)}
            assert span.first_token > sample.prompt_length
            mask = sample.columns["loss_mask"]
            seen = len(ids) - sample.prompt_length - 2  # all but an answer of one token each
            assert [bool(each) for each in mask] == [True, *[False] * seen, True]
            data = blobs.get(BlobReference(span.digest, span.size))
            pixels = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
            bar = (pixels == (220, 40, 40)).all(axis=-1).any(axis=0).sum()
            assert bar == 7 * puzzle.lengths[side]
    assert asked == set(SIDES), "each was asked for by some sample"
