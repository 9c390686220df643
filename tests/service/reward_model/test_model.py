"""Scores are those of transformers one text at a time; directories that hold no such model."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from examples.models.tiny_qwen3 import build_tiny_qwen3
from services.rollout.reward_model.batching import choose
from services.rollout.reward_model.model import ValueModel
from sluice.config import ConfigError
from tests.service.reward_model.conftest import FAMILIES, Models, oracle_of, random_texts

CPU = torch.device("cpu")


def load(directory: Path, **values: Any) -> ValueModel:
    return ValueModel(directory, **{"dtype": "float32", "device": CPU, **values})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_score_is_that_of_the_text_alone(models: Models, family: str) -> None:
    model, oracle = load(models[family]), oracle_of(models[family])
    texts = [*random_texts(1, 60), "1", "1<pad>", "<pad>", "<end>" * 60, "0" * 60]
    tokens, alone = model.encode(texts), oracle.scores(texts)
    assert max(alone) - min(alone) > 0.1  # else it would not matter which of them is whose
    draws = random.Random(2)
    for size in (1, 2, 7, len(texts)):
        order = draws.sample(range(len(texts)), size)
        found = model.score([tokens[index] for index in order])
        assert found == pytest.approx([alone[index] for index in order], abs=1e-5)


def test_padding_that_were_read_would_show(qwen3: Path) -> None:
    model = load(qwen3)
    short, long = model.encode(["12=", "1234567890="])
    padded = [*short, *[0] * (len(long) - len(short))]
    together, alone = model.score([short, long]), model.score([padded, long])
    assert abs(together[0] - alone[0]) > 1e-2 and together[1] == pytest.approx(alone[1], abs=1e-5)


def test_bfloat16_is_another_number_and_near(qwen3: Path) -> None:
    texts = random_texts(3, 8)
    narrow, wide = (load(qwen3, dtype=dtype) for dtype in ("bfloat16", "float32"))
    scores = [model.score(model.encode(texts)) for model in (narrow, wide)]
    assert scores[0] != scores[1] and scores[0] == pytest.approx(scores[1], abs=0.2)


@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=40),
    texts=st.integers(1, 20),
    tokens=st.integers(1, 500),
)
def test_a_batch_has_the_oldest_text_and_fits(lengths: list[int], texts: int, tokens: int) -> None:
    chosen = choose(lengths, texts=texts, tokens=tokens)
    assert 0 in chosen and len({*chosen}) == len(chosen) <= texts
    size = len(chosen) * max(lengths[index] for index in chosen)
    assert size <= tokens or len(chosen) == 1
    left = [index for index in range(len(lengths)) if index not in chosen]
    if len(chosen) < texts:  # nothing shorter or longer would fit beside them
        longest = max(lengths[index] for index in chosen)
        for index in left:
            assert (len(chosen) + 1) * max(longest, lengths[index]) > tokens


def test_a_batch_is_of_neighbours_in_length() -> None:
    lengths = [50, 1, 48, 90, 51, 2, 49]
    assert sorted(choose(lengths, texts=4, tokens=10_000)) == [0, 2, 4, 6]


def rewritten(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        path = directory / "config.json"
        values = json.loads(path.read_text())
        change(values)
        path.write_text(json.dumps(values))

    return apply


def without_head(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    del tensors["score.weight"]
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def with_more(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors["score.scale"] = torch.ones(1)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def with_flipped(place: int) -> Callable[[Path], None]:
    def flip(directory: Path) -> None:
        path = directory / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[place] ^= 1
        path.write_bytes(data)

    return flip


def cut(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def remove(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "no head": (without_head, "lacks score.weight"),
    "more": (with_more, "no use for score.scale"),
    "language model": (
        rewritten(lambda values: values.update(architectures=["Qwen3ForCausalLM"])),
        "no value head",
    ),
    "two labels": (
        rewritten(lambda values: values.update(num_labels=2, id2label=None, label2id=None)),
        "2 labels|shapes",
    ),
    "nobody's": (rewritten(lambda values: values.update(model_type="../etc")), "cannot be loaded"),
    "other code": (
        rewritten(lambda v: v.update(model_type="x", auto_map={"AutoConfig": "evil.Config"})),
        "cannot be loaded",
    ),
    "no config": (remove("config.json"), "cannot be loaded"),
    "no tokenizer": (remove("tokenizer.json"), "cannot be loaded|tokenizer"),
    "no weights": (remove("model.safetensors"), "cannot be read"),
    "flipped header": (with_flipped(12), "cannot be read|lacks|no use"),
    "cut": (cut, "cannot be read"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_directory_that_holds_no_reward_model_is_refused(
    qwen3: Path, tmp_path: Path, damage: str
) -> None:
    change, said = DAMAGE[damage]
    directory = shutil.copytree(qwen3, tmp_path / "model")
    load(directory)
    change(directory)
    with pytest.raises(ConfigError, match=f"^model: .*({said})"):
        load(directory)


def test_a_flipped_byte_is_another_digest(qwen3: Path, tmp_path: Path) -> None:
    digest = load(qwen3).digest
    assert load(qwen3, digest=digest).digest == digest
    directory = shutil.copytree(qwen3, tmp_path / "model")
    with_flipped(-3)(directory)
    assert load(directory).digest != digest
    with pytest.raises(ConfigError, match=rf"^digest: .*not {digest}"):
        load(directory, digest=digest)


def test_two_halves_of_a_translator_are_refused(tmp_path: Path) -> None:
    config = transformers.BartConfig(
        vocab_size=13, d_model=16, encoder_layers=1, decoder_layers=1, num_labels=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16,
        decoder_ffn_dim=16, max_position_embeddings=64,
    )  # fmt: skip
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(
        build_tiny_qwen3(tmp_path / "plain", 0)
    ).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="an encoder and a decoder"):
        load(tmp_path)


def test_a_model_that_reads_its_padding_is_refused(tmp_path: Path) -> None:
    """XLNet looks at the last place, whatever stands there."""
    config = transformers.XLNetConfig(
        vocab_size=13, d_model=32, n_layer=2, n_head=4, d_inner=64, num_labels=1, pad_token_id=12,
        initializer_range=1.0,
    )  # fmt: skip
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(
        build_tiny_qwen3(tmp_path / "plain", 0)
    ).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="among longer ones"):
        load(tmp_path, max_length=32)


@pytest.mark.parametrize("seed", [1, 5, 8, 10])
def test_scores_near_zero_are_rounded_as_large_ones_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Rewards of about 20 in bfloat16, of probes so long that their rounding shows on a CPU too."""
    monkeypatch.setattr(
        "services.rollout.reward_model.model.PROBES", (20, 60, 40, 30, 50, 25, 45, 35)
    )
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=13, hidden_size=128, intermediate_size=256, num_hidden_layers=16, num_labels=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=64,
        initializer_range=0.2, pad_token_id=12,
    )  # fmt: skip
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    torch.nn.init.normal_(model.score.weight, std=20 / 128**0.5)
    model.save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(
        build_tiny_qwen3(tmp_path / "plain", 0)
    ).save_pretrained(tmp_path)
    (score,) = load(tmp_path, dtype="bfloat16").score([[1, 2, 3]])
    (wide,) = load(tmp_path).score([[1, 2, 3]])
    assert score == pytest.approx(wide, abs=4)


def test_max_length_is_what_the_model_has_places_for(qwen3: Path) -> None:
    assert load(qwen3).max_length == 64 and load(qwen3, max_length=5).max_length == 5
    with pytest.raises(ConfigError, match="max_length: the model has 64 places"):
        load(qwen3, max_length=65)
