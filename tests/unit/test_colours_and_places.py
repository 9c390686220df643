"""The task of `make demo-vision`, judged by its pixels; the tiny model that it is asked of."""

from __future__ import annotations

import base64
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoImageProcessor, AutoTokenizer, Qwen3VLForConditionalGeneration

from examples.environments.colours_and_places import ColoursAndPlaces, ColoursAndPlacesSettings
from examples.models.tiny_qwen3_vl import build_tiny_qwen3_vl
from services.rollout.environments.environment import Response, Task, TaskRequest
from services.rollout.episodes.environment_contract import check_environment
from sluice.samples.tokenizer import TextTokenizer

NAME = "examples.environments.colours_and_places:ColoursAndPlaces"
RED_GREEN_BLUE = [(220, 40, 40), (40, 200, 60), (50, 80, 230), (230, 210, 50)]


def tasks(count: int, **settings: Any) -> list[Task]:
    environment = ColoursAndPlaces(ColoursAndPlacesSettings(**settings))
    return [environment.make_task(TaskRequest(index=index)) for index in range(count)]


def shown(task: Task) -> tuple[np.ndarray, str]:
    """The picture as float64[side, side, 3], and the text after it."""
    picture, text = task.messages[0]["content"]
    data = base64.b64decode(picture["image_url"]["url"].partition(",")[2])
    return np.asarray(Image.open(io.BytesIO(data)), np.float64), text["text"]


def seen(pixels: np.ndarray, question: str) -> str:
    """The answer by what stands out of the grey."""
    rows, columns = np.nonzero(np.ptp(pixels, axis=-1) > 60)
    if question == "p=":
        return str(2 * int(rows.mean() > 15.5) + int(columns.mean() > 15.5))
    colour = pixels[rows, columns].mean(axis=0)
    return str(int(np.argmin([np.abs(colour - known).sum() for known in RED_GREEN_BLUE])))


def test_the_answer_is_in_the_picture() -> None:
    for task in tasks(128, seed=5):
        assert seen(*shown(task)) == task.answer


def test_an_empty_picture_says_nothing_and_one_answer_gets_a_quarter() -> None:
    blank = tasks(32, blank=True)
    assert len({shown(task)[0].tobytes() for task in blank}) == 1
    for question in ("c=", "p="):
        answers = Counter(task.answer for task in blank if shown(task)[1] == question)
        assert answers == dict.fromkeys("0123", 4)
    assert [task.answer for task in blank] == [task.answer for task in tasks(32)]


def test_a_seed_and_an_index_say_the_picture() -> None:
    first, again, other = (tasks(8, seed=seed) for seed in (3, 3, 4))
    assert [task.messages for task in first] == [task.messages for task in again]
    assert all(one.messages != two.messages for one, two in zip(first, other, strict=True))


@pytest.mark.parametrize("text", ["", "4", "NaN", "1e999", "0" * 5000, "01", " 0", "½"])
def test_what_is_no_right_digit_gets_nothing(text: str) -> None:
    environment = ColoursAndPlaces(ColoursAndPlacesSettings())
    task = environment.make_task(TaskRequest(index=0))
    assert task.answer == "0"
    rewards = environment.reward(task, [Response(text=text), Response(text="0")])
    assert [reward.reward for reward in rewards] == [0.0, 1.0]


def test_it_keeps_the_contract() -> None:
    check_environment(NAME, {"seed": 1}, [TaskRequest(index=3)])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_qwen3_vl(tmp_path_factory.mktemp("model"), 7)


def test_transformers_finds_every_weight_of_the_model_and_no_other(model: Path) -> None:
    loaded, info = Qwen3VLForConditionalGeneration.from_pretrained(model, output_loading_info=True)
    assert not any(info.values()), info
    assert 280_000 < sum(weight.numel() for weight in loaded.parameters()) < 320_000


def test_a_seed_says_which_model_is_built(model: Path, tmp_path: Path) -> None:
    weights, again, other = (
        load_file(directory / "model.safetensors")
        for directory in (
            model,
            build_tiny_qwen3_vl(tmp_path / "again", 7),
            build_tiny_qwen3_vl(tmp_path / "other", 8),
        )
    )
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert not torch.equal(weights["lm_head.weight"], other["lm_head.weight"])


def test_its_tokenizer_and_processor_are_those_of_transformers(model: Path) -> None:
    task = tasks(1)[0]
    pixels, question = shown(task)
    tokenizer = TextTokenizer(model)
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "AB?="}]}]
    ids = tokenizer.encode_chat(messages, ())
    plain = AutoTokenizer.from_pretrained(model)
    assert plain.convert_ids_to_tokens(ids) == [
        *("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "AB", "?", "=")
    ]
    config = json.loads((model / "config.json").read_text())
    assert ids[1] == config["image_token_id"]
    processor = AutoImageProcessor.from_pretrained(model)
    grid = processor(images=[Image.fromarray(pixels.astype(np.uint8))])["image_grid_thw"]
    assert np.asarray(grid).tolist() == [[1, 4, 4]], "four tokens"
    assert question in ("c=", "p=")
