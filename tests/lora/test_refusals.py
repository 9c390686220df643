"""What is asked of adapters and cannot be is refused by name, before anything is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.trainer.config import LoraConfig, TrainerConfig
from sluice.config import ConfigError, parse_config
from sluice.weights.adapter import DEFAULT_TARGETS
from tests.lora.conftest import HYBRIDS, ExpectedAdapters
from tests.models.families import build
from tests.rank_pool import Pool

pytestmark = pytest.mark.fast


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


def parse(model: Path, **values: Any) -> TrainerConfig:
    return parse_config(TrainerConfig, {"model": str(model), "store": str(model), **values})


def test_defaults(model: Path) -> None:
    assert parse(model).lora is None
    lora = parse(model, lora={"rank": 16}).lora
    assert lora == LoraConfig(rank=16, alpha=None, targets=DEFAULT_TARGETS)
    assert lora.spec("0" * 32).scale == 1.0
    assert parse(model, lora={"rank": 4, "alpha": 6}).lora.spec("0" * 32).scale == 1.5  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "lora",
    [
        {},
        {"rank": 0},
        {"rank": -3},
        {"rank": 1 << 17},
        {"rank": 1.5},
        {"rank": "nan"},
        {"rank": 4, "alpha": 0},
        {"rank": 4, "alpha": -1},
        {"rank": 4, "alpha": float("nan")},
        {"rank": 4, "alpha": float("inf")},
        {"rank": 4, "alpha": 1e7},
        {"rank": 4, "targets": []},
        {"rank": 4, "targets": [""]},
        {"rank": 4, "targets": ["../q_proj"]},
        {"rank": 4, "targets": ["q\0proj"]},
        {"rank": 4, "targets": ["q" * 5000]},
        {"rank": 4, "targets": ["self_attn.q_proj"]},
        {"rank": 4, "targets": ["q_proj", "q_proj"]},
        {"rank": 4, "start": ""},
        {"rank": 4, "dropout": 0.1},
        {"rank": 4, "alhpa": 1},
    ],
)
def test_impossible_adapters(model: Path, lora: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="lora"):
        parse(model, lora=lora)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"head": "value"}, "lora is not for head value"),
        ({"publish": {"delta": True}}, "publish.delta has no effect with lora"),
        (
            {"backend": "megatron", "megatron": {"dtype": "float16"}},
            "not for megatron.dtype float16",
        ),
        (
            {"backend": "megatron", "megatron": {"distributed_optimizer": False}},
            "megatron.distributed_optimizer has no effect with lora",
        ),
        ({"backend": "fsdp", "fsdp": {"reduce": "call"}}, "fsdp.reduce has no effect with lora"),
    ],
)
def test_settings_that_would_do_nothing(model: Path, values: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse(model, lora={"rank": 4}, **values)


def test_a_reference_of_its_own(model: Path) -> None:
    with pytest.raises(ConfigError, match="reference_model has no effect with lora"):
        parse(model, lora={"rank": 4}, reference_model=str(model))


def test_a_model_that_sees(model: Path) -> None:
    config = json.dumps({"model_type": "qwen3_vl", "vision_config": {}})
    (model / "config.json").write_text(config)
    with pytest.raises(ConfigError, match="lora is not for a model that sees"):
        parse(model, lora={"rank": 4})


CASES = [
    ("qwen3", ["q_proj", "q_prj"], "lora.targets name 'q_prj', which no linear layer"),
    ("qwen3", ["lm_head"], "lora.targets name 'lm_head', which no linear layer"),
    ("qwen3", ["embed_tokens"], "lora.targets name 'embed_tokens', which no linear layer"),
    ("glm_moe_dsa", ["o_proj", "wq_b"], "lora.targets name 'wq_b', which no linear layer"),
    ("glm_moe_dsa", ["weights_proj"], "lora.targets name 'weights_proj', which no linear layer"),
    ("qwen3_moe", ["q_proj", "up_proj"], "'up_proj': layers of the model's experts too"),
]


@pytest.mark.parametrize(("family", "targets", "reason"), CASES)
@pytest.mark.parametrize(("backend", "world"), [("reference", 1), ("fsdp", 2), ("megatron", 1)])
def test_targets_that_are_not_there(
    pool: Pool,
    expected: ExpectedAdapters,
    tmp_path: Path,
    backend: str,
    world: int,
    family: str,
    targets: list[str],
    reason: str,
) -> None:
    model = str(expected(family).directory)
    lora = {"rank": 4, "targets": targets}
    answers = pool.run("attempt", world, backend=backend, model=model, out=str(tmp_path), lora=lora)
    for answer in answers:
        assert reason in answer["error_message"]
        assert answer["error_message"].startswith("InvalidAdapterError")


@pytest.mark.parametrize(
    ("family", "targets", "reason"),
    [
        ("nemotron_h", ["in_proj", "out_proj"], "'out_proj': a layer of Mamba, whose kernels take"),
        ("nemotron_h", ["down_proj", "in_proj"], "'down_proj': layers of the model's experts too"),
        ("lfm2_moe", ["w1", "in_proj"], "'w1': layers of the model's experts too"),
    ],
)
def test_targets_of_hybrids_that_take_none(
    pool: Pool, tmp_path: Path, family: str, targets: list[str], reason: str
) -> None:
    model = str(build(HYBRIDS[family], tmp_path / "model").directory)
    lora = {"rank": 4, "targets": targets}
    (answer,) = pool.run("attempt", 1, backend="fsdp", model=model, out=str(tmp_path), lora=lora)
    assert f"lora.targets name {reason}" in answer["error_message"]
