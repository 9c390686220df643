"""A student learns from a teacher what is in pictures."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from services.trainer.backend import Row
from sluice.samples.arrow import decode_group
from sluice.samples.blob_store import BlobStore
from sluice.samples.blobs import BlobReference
from sluice.weights.store import WeightStore
from tests.e2e.conftest import Stack, start_stack, stop_stack
from tests.vision.bad_images import encoded, noise, url
from tests.vision.cases import Model, Oracle, build_model, part_of, speak

STEPS, GROUPS, IMAGES = 16, 4, 3


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return speak(build_model(tmp_path_factory.mktemp("teacher") / "model", "qwen3_vl"))


@pytest.fixture(scope="module")
def student(teacher: Model, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The teacher, but for what pictures come to: text it knows already."""
    directory = tmp_path_factory.mktemp("student") / "model"
    shutil.copytree(teacher.directory, directory)
    tensors = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for name, tensor in tensors.items():
        if part_of(name) == "merger" and tensor.ndim == 2:
            tensors[name] = torch.randn(tensor.shape, generator=generator) * 0.3
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return Model(directory)


@pytest.fixture(scope="module")
def stack(
    tmp_path_factory: pytest.TempPathFactory, teacher: Model, student: Model
) -> Iterator[Stack]:
    root = tmp_path_factory.mktemp("seeing")
    own, theirs = str(student.directory), str(teacher.directory)
    engine = {"max_running": 64, "max_model_length": 100, "threads": 1}
    sight = {"frozen_tower": True, "projector_learning_rate": 1e-2}
    trainer = {"model": own, "optim": {"learning_rate": 1e-5}, "vision": sight}
    stack = start_stack(
        root,
        rollout={"kind": "rollout", "config": {"tokenizer": own, "engine": engine}},
        trainer={"kind": "trainer", "config": trainer},
        seeing={"kind": "trainer", "config": {"model": theirs}},
    )
    rows = []
    for number in range(STEPS * GROUPS):  # every fourth shows none
        shown = [url(picture(number % IMAGES))] if number % 4 else []
        rows.append({"prompt": f"WHAT IS {number}?", "answer": "1", "images": shown})
    (root / "seen.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    yield stack
    stop_stack(stack)


def picture(number: int) -> bytes:
    return encoded(noise(number, 20, 40, 3))


def rows_of(blob: BlobReference, blobs: BlobStore) -> list[Row]:
    """What was sampled, with the pictures that it shows."""
    return [
        Row(
            sample_id=sample.sample_id,
            group_id=sample.group_id,
            token_ids=torch.from_numpy(sample.token_ids.astype(np.int64)),
            prompt_length=sample.prompt_length,
            loss_mask=torch.ones(sample.response_length, dtype=torch.bool),
            media=sample.media,
            images={
                span.digest: blobs.get(BlobReference(span.digest, span.size))
                for span in sample.media
            },
        )
        for sample in decode_group(blobs.get(blob))
    ]


@torch.no_grad()
def divergence(student: Model, teacher: Model, rows: Sequence[Row]) -> float:
    """KL from the teacher, nats a token, as transformers has it."""
    left, right = Oracle(student), Oracle(teacher)
    tables = [(left.table(row), right.table(row)) for row in rows]
    kl = torch.cat([(mine.exp() * (mine - theirs)).sum(-1) for mine, theirs in tables])
    return float(kl.mean())


def test_a_student_sees_as_its_teacher_does(stack: Stack, student: Model, teacher: Model) -> None:
    settings = {"reward": "position_match", "chat": True}
    training = stack.train(
        "distilled",
        prompts={"file": str(stack.run_dir / "seen.jsonl")},
        environment={"name": "prompts", "settings": settings},
        algorithm={"loss": {"name": "topk_reverse_kl", "settings": {"top_count": 64}}},
        sampling={"max_new_tokens": 4},
        teachers={"seeing": {"service": "seeing"}},
        steps=STEPS,
        groups_per_step=GROUPS,
        samples_per_group=4,
    )
    training.finish()
    blobs = BlobStore(stack.run_dir / "store", sync=False)
    consumed = [group for group in training.groups("consumed") if group.consumed_step == STEPS]
    rows = [row for group in consumed for row in rows_of(group.blob, blobs)]
    seeing = [row for row in rows if row.media]
    assert 0 < len(seeing) < len(rows)
    weights = WeightStore(stack.run_dir / "store" / "weights", durable=False)
    sampled_by = Model(weights.get(weights.latest().version - 1).directory)
    found = divergence(sampled_by, teacher, rows)
    assert training.rows()[-1]["kl_teacher"] == pytest.approx(found, rel=1e-3)
    assert divergence(sampled_by, teacher, seeing) < 0.4 * divergence(student, teacher, seeing)
