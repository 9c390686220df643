"""Learning rates by step, and settings that contradict each other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.trainer.config import LoraConfig, OptimConfig, TrainerConfig
from services.trainer.controller.state import learning_rate
from services.trainer.rows import read_shape
from sluice.config import ConfigError, parse_config
from tests.patience import PATIENCE

MEGATRON: dict[str, Any] = {"backend": "megatron"}
BIASES = "bias_update_rate"
MIXTURE = {"model_type": "deepseek_v3", "n_routed_experts": 8}


def rates(steps: list[int], **optim: Any) -> list[float]:
    config = OptimConfig(learning_rate=1.0, **optim)
    return [learning_rate(config, step) for step in steps]


def test_constant() -> None:
    assert rates([0, 1, 1000]) == [1.0, 1.0, 1.0]


def test_warm_up_reaches_the_rate_at_its_last_step() -> None:
    assert rates([0, 1, 3, 4], warmup_steps=4) == [0.25, 0.5, 1.0, 1.0]


def test_linear_and_cosine_fall_to_the_minimum_and_stay() -> None:
    for schedule, half in (("linear", 0.55), ("cosine", 0.55)):
        found = rates(
            [10, 60, 110, 500],
            schedule=schedule,
            warmup_steps=10,
            decay_steps=110,
            minimum_ratio=0.1,
        )
        assert found == pytest.approx([1.0, half, 0.1, 0.1]), schedule
    early = [
        rates([35], schedule=s, warmup_steps=10, decay_steps=110)[0] for s in ("linear", "cosine")
    ]
    assert early[0] == pytest.approx(0.75)
    assert early[1] == pytest.approx(0.8535533905932737)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"optim": {"schedule": "cosine"}}, "decay_steps"),
        ({"optim": {"decay_steps": 10}}, "decay_steps"),
        ({"optim": {"schedule": "linear", "warmup_steps": 5, "decay_steps": 5}}, "decay_steps"),
        ({"optim": {"lr": 1.0}}, "optim.lr"),
        ({"optim": {"learning_rate": 1e6}}, "optim.learning_rate"),
        ({"optim": {"weight_decay": 1e30}}, "optim.weight_decay"),
        ({"optim": {"learning_rate": 0.5, "weight_decay": 3.0}}, "learning_rate x weight_decay"),
        ({"optim": {"epsilon": 1e-46}}, "optim.epsilon"),  # nought as a float32
        ({"optim": {"epsilon": 1e39}}, "optim.epsilon"),
        ({"optim": {"max_grad_norm": 1e-30}}, "max_grad_norm is below"),
        ({"optim": {"max_grad_norm": 1e30}}, "optim.max_grad_norm"),
        ({"optim": {"warmup_steps": 10**400}}, "optim.warmup_steps"),
        ({"optim": {"betas": [0.9, 1.0]}}, "optim.betas"),
        ({"optim": {"betas": [-0.1, 0.95]}}, "optim.betas"),
        ({"experts": {"aux_loss_coefficient": float("nan")}}, "experts.aux_loss_coefficient"),
        ({"experts": {"aux_loss_coefficient": -0.01}}, "experts.aux_loss_coefficient"),
        ({"experts": {"z_loss_coefficient": 1e30}}, "experts.z_loss_coefficient"),
        ({"experts": {"z_loss_coefficient": float("inf")}}, "experts.z_loss_coefficient"),
        ({"experts": {"bias_update_rate": float("nan")}}, "experts.bias_update_rate"),
        ({"experts": {"bias_update_rate": -1e-3}}, "experts.bias_update_rate"),
        ({"experts": {"bias_update_rate": 1.5}}, "experts.bias_update_rate"),
        ({"experts": {"bias_update_rate": 1e-12}}, "bias_update_rate is below"),
        ({"experts": {"bias_rate": 1e-3}}, "experts.bias_rate"),
        ({"seed": 2**64}, "seed"),
        ({"seed": -1}, "seed"),
        ({"threads": 10**12}, "threads"),
        ({"name": "../weights", "head": "value"}, "name"),
        ({"name": "a/b"}, "name"),
        ({"log_level": "debg"}, "log_level"),
        ({"head": "reward"}, "no sequence classifier of nothing"),  # config.json names no model
        ({"head": "reward", "reference_model": "."}, "reference_model"),
        ({"lora": {"alpha": 1e-308}}, "lora.alpha"),
        ({"trainable": {"allow": []}}, "trainable.allow"),
        ({"trainable": {"deny": [""]}}, "trainable.deny"),
        ({"trainable": {"deny": ["x" * 257]}}, "trainable.deny"),
        ({"trainable": {"only": ["*"]}}, "trainable.only"),
        ({"lora": {"rank": 2}, "trainable": {"deny": ["*norm*"]}}, "trainable has no effect with"),
        (
            {
                **MEGATRON,
                "megatron": {"dtype": "float16", "pipeline": 2},
                "trainable": {"deny": ["*norm*"]},
            },
            "trainable is not for megatron.dtype float16",
        ),
        ({"transfer": {"bucket_bytes": 4096}}, "transfer: bucket_bytes has no effect without"),
        ({"transfer": {"host": "10.0.0.1"}}, "transfer: host has no effect without enabled"),
        ({"publish": {"chain": 3}}, "publish: chain has no effect without delta"),
        ({"ranks": {"heartbeat_seconds": 120.0}}, "ranks: lost_seconds 120 is not above"),
        ({"ranks": {"listen_port": -1}}, "ranks.listen_port"),
        ({"server": {"port": 65_536}}, "server.port"),
        ({"server": {"port": -1}}, "server.port"),
        ({"server": {"metrics_port": 65_536}}, "server.metrics_port"),
        ({"server": {"max_message_bytes": 2**31}}, "server.max_message_bytes"),
        ({"ranks": {"count": 0}}, "ranks.count"),
        ({"ranks": {"count": "two"}}, "ranks.count"),
        ({"backend": "deepspeed"}, "backend"),
        ({"modle": "x"}, "modle"),
        ({"model": "/no/such/model"}, "model"),
        ({"server": {"host": "0.0.0.0"}}, "server"),
        ({"megatron": {"tensor": 2}}, "megatron has no effect"),
        ({**MEGATRON, "autocast": True}, "autocast"),
        ({"float32_head": False}, "float32_head has no effect with a float32 model"),
        (
            {"float32_head": False, "autocast": True, "head": "value"},
            "float32_head has no effect with head value",
        ),
        (
            {**MEGATRON, "float32_head": False, "megatron": {"dtype": "float32"}},
            "float32_head has no effect with a float32 model",
        ),
        ({**MEGATRON, "publish_dtype": "bfloat16"}, "publish_dtype"),
        ({**MEGATRON, "megatron": {"sequence_parallel": True}}, "sequence_parallel"),
        ({**MEGATRON, "megatron": {"virtual_pipeline": 2}}, "virtual_pipeline"),
        ({**MEGATRON, "megatron": {"first_stage_layers": 2}}, "layers of a stage"),
        ({**MEGATRON, "megatron": {"cp_layout": "contiguous"}}, "cp_layout"),
        ({**MEGATRON, "megatron": {"recompute_layers": 2}}, "recompute_layers"),
        ({**MEGATRON, "megatron": {"tensor": 4, "expert": 2, "expert_tensor": 2}}, "expert_tensor"),
        # Gradients of experts would silently miss what the other tensor ranks have seen.
        ({**MEGATRON, "megatron": {"tensor": 2, "expert_tensor": 1}}, "expert_tensor"),
        (
            {**MEGATRON, "megatron": {"mtp_loss_scaling_factor": -0.1}},
            "megatron.mtp_loss_scaling_factor",
        ),
        (
            {**MEGATRON, "megatron": {"mtp_loss_scaling_factor": float("nan")}},
            "megatron.mtp_loss_scaling_factor",
        ),
        (
            {**MEGATRON, "megatron": {"mtp_loss_scaling_factor": float("inf")}},
            "megatron.mtp_loss_scaling_factor",
        ),
        (
            {**MEGATRON, "megatron": {"mtp_loss_scaling_factor": 1e9}},
            "megatron.mtp_loss_scaling_factor",
        ),
        (
            {**MEGATRON, "megatron": {"mtp_loss_scaling_factor": "much"}},
            "megatron.mtp_loss_scaling_factor",
        ),
        (
            {**MEGATRON, "lora": {"rank": 2}, "megatron": {"mtp_loss_scaling_factor": 0.1}},
            "mtp_loss_scaling_factor has no effect with lora",
        ),
        (
            {**MEGATRON, "head": "value", "megatron": {"mtp_loss_scaling_factor": 0.1}},
            "mtp_loss_scaling_factor has no effect with head value",
        ),
        (
            {
                **MEGATRON,
                "megatron": {"mtp_loss_scaling_factor": 0.1, "model_provider": "a:b"},
            },
            "mtp_loss_scaling_factor is not for models of a model_provider",
        ),
        ({"megatron": {"mtp_loss_scaling_factor": 0.1}}, "no effect with backend reference"),
    ],
)
def test_wrong_settings_are_named(tmp_path: Path, settings: dict[str, Any], key: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    values = {"model": str(tmp_path), "store": str(tmp_path), **settings}
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        parse_config(TrainerConfig, values)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"oversize_policy": "truncate"}, "oversize_policy truncate is not for head reward"),
        ({"lora": {"rank": 2}}, "lora is not for head reward"),
        ({"autocast": True, "float32_head": False}, "float32_head has no effect with head reward"),
        ({"publish": {"quantization": "fp8"}}, "publish"),
        (
            {**MEGATRON, "megatron": {"mtp_loss_scaling_factor": 0.1}},
            "mtp_loss_scaling_factor has no effect with head reward",
        ),
    ],
)
def test_settings_that_a_reward_model_has_no_use_for_are_named(
    tmp_path: Path, settings: dict[str, Any], key: str
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    values = {"model": str(tmp_path), "store": str(tmp_path), "head": "reward"}
    parse_config(TrainerConfig, values)
    with pytest.raises(ConfigError, match=key):
        parse_config(TrainerConfig, {**values, **settings})


@pytest.mark.parametrize("head", ["reward", "value"])
@pytest.mark.parametrize(
    ("said", "count"),
    [
        ({"id2label": {"0": "bad", "1": "fair", "2": "good"}}, 3),
        ({"num_labels": 5}, 5),
        ({}, 2),  # transformers write no labels where they are two
    ],
)
def test_a_classifier_of_several_labels_is_refused(
    tmp_path: Path, head: str, said: dict[str, Any], count: int
) -> None:
    config = tmp_path / "config.json"
    values = {"model": str(tmp_path), "store": str(tmp_path), "head": head}
    for kind in ("Sequence", "Token"):
        architectures = {"architectures": [f"Qwen3For{kind}Classification"]}
        config.write_text(json.dumps({**architectures, "id2label": {"0": "LABEL_0"}}))
        parse_config(TrainerConfig, values)
        config.write_text(json.dumps(architectures | said))
        with pytest.raises(ConfigError, match=f"model: .* has {count} labels, .* head {head}"):
            parse_config(TrainerConfig, values)


@pytest.mark.parametrize("text", [b"{", b"\xff\xfe", b""])
def test_a_broken_description_of_the_model_is_named(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "config.json").write_bytes(text)
    values = {"model": str(tmp_path), "store": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"model: \S+/config\.json is not JSON: "):
        parse_config(TrainerConfig, values)


@pytest.mark.parametrize("text", ["[]", "3"])
def test_a_description_of_the_model_that_is_no_object_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    values = {"model": str(tmp_path), "store": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"model: \S+/config\.json is no JSON object"):
        parse_config(TrainerConfig, values)


def test_the_resolved_config_survives_json(tmp_path: Path) -> None:
    """Ranks get it that way."""
    (tmp_path / "config.json").write_text("{}")
    values = {
        "model": str(tmp_path),
        "store": str(tmp_path),
        "optim": {"betas": [0.8, 0.9]},
        "ranks": {"count": 3},
    }
    config = parse_config(TrainerConfig, values)
    assert parse_config(TrainerConfig, config.model_dump(mode="json")) == config


def test_the_command_line_refuses_what_is_wrong() -> None:
    command = [sys.executable, "-m", "services.trainer", "--store", "x", "--model", "/no/such"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert found.returncode == 2
    assert found.stderr.startswith("trainer: model: ")
    assert "Traceback" not in found.stderr


def test_the_front_can_be_imported_without_torch() -> None:
    code = (
        "import sys; import services.trainer.__main__; "
        "bad = {'torch', 'transformers', 'safetensors', 'megatron'} & set(sys.modules); "
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], timeout=PATIENCE, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr


# where it is, what it may hold or wait for, who reaches it: another value gives the same numbers.
# What a layout or a checkpoint says is checked there
APART = {
    "store",
    "store_cache",
    "weights",
    "name",
    "backend",
    "head",
    "ranks",
    "max_batches",
    "max_rows",
    "max_micro_batch_multiple",
    "max_waiting_calls",
    "keep_versions",
    "transfer",
    "durable",
    "user_modules",
    "log_level",
    "server",
}


@pytest.mark.parametrize(
    ("config", "settings", "name", "told"),
    [
        ({"model_type": "qwen3"}, {}, BIASES, "has no effect on .*no experts"),
        ({"model_type": "qwen3"}, {}, "aux_loss_coefficient", "has no effect on .*no experts"),
        ({"model_type": "qwen3"}, {}, "z_loss_coefficient", "has no effect on .*no experts"),
        (MIXTURE, {"lora": {"rank": 4}}, BIASES, "is not for lora"),
        (MIXTURE, {"lora": {"rank": 4}}, "z_loss_coefficient", "is not for lora"),
        (MIXTURE, {"trainable": {"deny": ["*norm*"]}}, BIASES, "is not for trainable"),
    ],
)
def test_what_cannot_even_out_experts_is_refused(
    tmp_path: Path, config: dict[str, Any], settings: dict[str, Any], name: str, told: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    values = {"model": str(tmp_path), "store": tmp_path, **settings}
    assert parse_config(TrainerConfig, {**values, "experts": {name: 0.0}})
    with pytest.raises(ConfigError, match=f"experts.{name} {told}"):
        parse_config(TrainerConfig, {**values, "experts": {name: 1e-3}})


def test_each_setting_is_said_to_a_run_or_changes_no_number(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    config = TrainerConfig(model=str(tmp_path), store=tmp_path, lora=LoraConfig(rank=4))
    said = config.shaping
    assert {name.partition(".")[0] for name in said} == set(TrainerConfig.model_fields) - APART
    assert said["model"] == json.dumps(str(tmp_path))
    assert (said["optim.learning_rate"], said["optim.betas"]) == ("1e-06", "[0.9, 0.95]")
    assert (said["lora.rank"], said["reference_model"]) == ("4", "null")
    assert "publish.quantization" in said and "publish.delta" not in said
    assert "megatron.dtype" in said and "megatron.tensor" not in said


def test_the_name_of_a_model_on_a_hub_is_told_from_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no such folder at all, it may be meant for one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    text = "is no model directory: it has no config.json"
    for model, told in (("Qwen/Qwen3-8B", True), ("models/base", False), ("/a/b", False)):
        fetch = f"hf download {model} --local-dir DIR"
        with pytest.raises(ConfigError, match=text) as caught:
            parse_config(TrainerConfig, {"model": model, "store": "s"})
        assert (fetch in str(caught.value)) == told, model


def test_a_config_without_sizes_is_refused_by_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"^model: .*config\.json has no num_hidden_layers,"):
        read_shape(str(tmp_path))
