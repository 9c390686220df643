"""Families that see and have no place here are refused by name, wherever one is brought."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    SiglipVisionConfig,
)

from services.rollout.engine.config import EngineConfig
from services.rollout.engine.interface import Generation, Sampling, create_engine
from services.rollout.errors import MediaUnsupportedError, UnfitWeightsError
from services.trainer.backend import Mesh
from services.trainer.backends.families import UnknownFamilyError, layout_of
from services.trainer.backends.megatron import upstream
from services.trainer.backends.reference.backend import ReferenceBackend
from services.trainer.config import TrainerConfig
from sluice.config import parse_config
from sluice.weights.convert.conversion import convert
from sluice.weights.convert.options import ConvertOptions
from sluice.weights.rules.weight_map import UnknownArchitectureError
from tests.vision.asking import shown
from tests.vision.cases import IMAGE, build_model, draw_image

pytestmark = pytest.mark.fast
TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}


def llava() -> Any:
    tower, text = CLIPVisionConfig(**TOWER, projection_dim=32), LlamaConfig(**TEXT)
    config = LlavaConfig(vision_config=tower, text_config=text, image_token_index=IMAGE)
    return LlavaForConditionalGeneration(config)


def gemma3() -> Any:
    config = Gemma3Config(
        vision_config=SiglipVisionConfig(**TOWER).to_dict(),
        text_config=Gemma3TextConfig(**TEXT).to_dict(),
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
    )
    return Gemma3ForConditionalGeneration(config)


@pytest.fixture(scope="module", params=[llava, gemma3])
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param.__name__)
    request.param().save_pretrained(directory)
    return directory


def test_trainers_and_the_converter_name_it(other: Path, tmp_path: Path) -> None:
    kind = other.name.removesuffix("0")
    values = {"model": str(other), "store": str(tmp_path), "durable": False}
    with pytest.raises(ValueError, match=f"{kind} is unknown here; known: .*qwen3_vl"):
        ReferenceBackend(parse_config(TrainerConfig, values), Mesh(rank=0, world_size=1))
    with pytest.raises(UnknownFamilyError, match=kind):
        layout_of({"model_type": kind})
    name = {"llava": "Llava", "gemma3": "Gemma3"}[kind] + "ForConditionalGeneration"
    upstream.load()  # before anything imports Megatron: other tests of this process need it so
    from services.trainer.backends.megatron.model_config import read_model

    with pytest.raises(UnknownArchitectureError, match=f"{name}.*Qwen3VLFor"):
        read_model(other)
    with pytest.raises(UnknownArchitectureError, match=f"{name}.*Qwen3VLFor"):
        convert(other, tmp_path / "megatron", ConvertOptions(sync=False))
    assert not (tmp_path / "megatron").exists()


async def test_an_engine_shows_it_no_image(other: Path, tmp_path: Path) -> None:
    """What transformers reads as a model of text is one: it may be asked in words."""
    config = EngineConfig(model=str(other), max_model_length=100, threads=1)
    engine = create_engine("reference", config)
    try:
        if other.name.startswith("llava"):
            with pytest.raises(UnfitWeightsError, match="qwen3_vl_moe, not llava"):
                await engine.start()
            return
        await engine.start()
        image = draw_image(build_model(tmp_path / "model", "qwen3_vl").rules, 1, 2, 3)
        asked = Generation(
            request_id="a",
            prompt_token_ids=[1, IMAGE, 2],
            sampling=Sampling(max_new_tokens=2),
            media=(shown(image),),
        )
        with pytest.raises(MediaUnsupportedError, match="qwen3_vl_moe, not to gemma3"):
            [delta async for delta in engine.generate(asked)]
    finally:
        await engine.close()
