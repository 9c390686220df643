"""What a run script of verl becomes; the scripts here are ones in their form."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sluice.algo.losses import LossInputs, compute_loss
from sluice.config import ConfigError, parse_config
from sluice.importers.shell import Shell, with_sourced
from sluice.importers.verl import import_script, read_overrides
from sluice.importers.verl_keys import KEYS, find_key, key_table
from sluice.loop.config import RunConfig
from tests.unit.imported_stack import assert_loads, run_command

ROOT = Path(__file__).parent.parent.parent
ACTOR = "actor_rollout_ref.actor"
CORE = f"{ACTOR}.megatron.override_transformer_config"
ON_MEGATRON = f"{ACTOR}.strategy=megatron"
VEOMNI = f"{ACTOR}.veomni"
OVERRIDE = f"{ACTOR}.optim.override_optimizer_config"
OFFLOADED = f"+{OVERRIDE}.optimizer_cpu_offload=True +{OVERRIDE}.use_precision_aware_optimizer=True"
RUN = "python3 -m verl.trainer.main_ppo "
LONG = "echo" + " \\\n  x" * 50 + "\n"  # a command
SCRIPT = r"""
set -x
NNODES=${NNODES:-1}
RAY_DATA_HOME=${RAY_DATA_HOME:-"${HOME}/verl"}
max_prompt_length=$((1024 * 2))
max_response_length=$((1024 * 8 - 24))  # of dapo
TRAIN_FILE="['$RAY_DATA_HOME/gsm8k/train.parquet', '$RAY_DATA_HOME/math/train.parquet']"
LOSS="
    actor_rollout_ref.actor.clip_ratio_low=0.2 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.clip_ratio_c=10.0"
ARGS=( trainer.total_training_steps=400 )

python3 -m verl.trainer.main_ppo --config-path=config --config-name='ppo_megatron_trainer'\
    algorithm.adv_estimator=grpo \
    algorithm.norm_adv_by_std_in_grpo=False \
    +algorithm.filter_groups.enable=True \
    data.train_files="$TRAIN_FILE" \
    data.val_files="${RAY_DATA_HOME}/math/test.parquet" \
    data.train_batch_size=512 \
    data.max_prompt_length=${max_prompt_length} \
    data.max_response_length=${max_response_length} \
    +data.apply_chat_template_kwargs.enable_thinking=False \
    actor_rollout_ref.model.path=/models/qwen \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
    actor_rollout_ref.actor.optim.lr_decay_style='cosine' \
    actor_rollout_ref.actor.optim.min_lr=1e-7 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$(((max_prompt_length + \
        max_response_length) / 2)) \
    actor_rollout_ref.actor.loss_agg_mode="token-mean" \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    $LOSS \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \
    actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=null \
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.rollout.top_k=-1 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.8 \
    +actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=fa3 \
    actor_rollout_ref.rollout.val_kwargs.n=4 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=True \
    actor_rollout_ref.rollout.val_kwargs.temperature=0.6 \
    reward_model.reward_manager=dapo \
    +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True \
    +reward_model.reward_kwargs.overlong_buffer_cfg.len=4096 \
    trainer.logger='["console","wandb"]' \
    trainer.nnodes="${NNODES}" trainer.n_gpus_per_node=8 \
    trainer.test_freq=5 trainer.save_freq=-1 \
    trainer.brand_new=7 \
    "${ARGS[@]}" $@ 2>&1 | tee log.txt
"""


def imported(script: str, **environment: str) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    if "main_ppo" not in script and "_async_main" not in script:
        script = RUN + script
    return import_script(script, Path("runs/verl"), environment)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


def test_every_value_arrives_where_it_has_an_effect(model: Path) -> None:
    run, services, left = imported(SCRIPT, HOME="/home/me")
    assert_loads(run, services, model)
    config = parse_config(RunConfig, run)
    assert (config.steps, config.groups_per_step, config.samples_per_group) == (400, 512, 16)
    assert (config.sampling.max_new_tokens, config.sampling.top_k) == (8168, 0)
    files = {name: each.prompts.file for name, each in config.environments.items()}
    assert files == {
        "gsm8k": Path("/home/me/verl/gsm8k/train.parquet"),
        "math": Path("/home/me/verl/math/train.parquet"),
    }
    assert config.environments["math"].environment.settings == {
        "prompt_key": "prompt",
        "answer_key": "reward_model.ground_truth",
        "chat": True,
        "reward": "math",
        "template": {"enable_thinking": False},
    }
    algorithm = config.algorithm
    assert algorithm.mini_batches == 4
    assert (algorithm.advantage.name, algorithm.advantage.scale_by_std) == ("grpo", False)
    assert run["algorithm"]["advantage"]["overlong"] == {
        "max_length": 8168,
        "buffer": 4096,
        "penalty": 1.0,
    }
    assert run["algorithm"]["loss"] == {
        "name": "ppo_clip",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "dual_clip": 10.0,
        "old_logprobs": "old",
        "kl_coefficient": 0.001,
        "kl_estimator": "low_variance",
    }
    assert [each.name for each in config.filters] == ["reward_std"]
    assert (config.placement, config.checkpoint_every) == ("colocated", 0)
    assert config.evaluation is not None and config.evaluation.every_steps == 5
    held_out = config.evaluation.datasets["math"]
    assert (held_out.samples, held_out.environment) == (4, "math")
    assert held_out.sampling is not None and held_out.sampling.temperature == 0.6
    trainer = services["services"]["trainer"]["config"]
    assert trainer["megatron"] == {"tensor": 2, "sequence_parallel": True, "recompute": "full"}
    assert (trainer["backend"], trainer["ranks"]) == ("megatron", {"count": 8})
    assert trainer["max_tokens_per_micro_batch"] == (2048 + 8168) // 2
    assert trainer["optim"] == {
        "learning_rate": 1e-6,
        "weight_decay": 0.01,
        "betas": [0.9, 0.999],
        "max_grad_norm": 1.0,
        "warmup_steps": 40,
        "schedule": "cosine",
        "decay_steps": 1600,
        "minimum_ratio": pytest.approx(0.1),
    }
    rollout = services["services"]["rollout"]
    assert (rollout["replicas"], rollout["devices"]) == (2, list(range(8)))
    assert rollout["config"]["engine"]["max_model_length"] == 2048 + 8168
    assert rollout["config"]["engine"]["sglang"]["server_args"] == {
        "mem_fraction_static": 0.8,
        "attention_backend": "fa3",
        "tp_size": 4,
        "enable_memory_saver": True,
    }
    told = "\n".join(left)
    for word in ("trainer.brand_new: is unknown", "trainer.logger", "rollout.name vllm", "dapo"):
        assert word in told
    assert "experiment_name" not in told and "do not load" not in told


def test_what_the_script_leaves_out_is_as_verl_has_it(model: Path) -> None:
    run, services, left = imported("actor_rollout_ref.model.path=/m data.train_files=/t.parquet")
    assert_loads(run, services, model)
    assert run["algorithm"]["advantage"] == {"name": "gae", "whiten": True, "gae_lambda": 1.0}
    assert run["critic"]["loss"] == {"name": "value", "value_clip": 0.5}
    assert (run["groups_per_step"], run["samples_per_group"]) == (512, 2), "n is 1 there"
    assert run["algorithm"]["mini_batches"] == 4
    loss = run["algorithm"]["loss"]
    assert (loss["clip_high"], loss["dual_clip"], loss["old_logprobs"]) == (0.2, 3.0, "old")
    assert run["prompts"] == {"file": "/t.parquet", "shuffle": True}
    assert run["sampling"] == {"max_new_tokens": 512}
    entries = services["services"]
    assert entries["trainer"]["config"]["backend"] == "fsdp"
    assert entries["trainer"]["config"]["fsdp"] == {
        "dtype": "bfloat16",
        "activation_checkpointing": True,
    }
    assert entries["critic"]["config"]["optim"]["learning_rate"] == 1e-5
    assert entries["critic"]["config"]["head"] == "value"
    assert entries["rollout"]["replicas"] == 4, "engines have two GPUs of eight"
    assert any("at least 2 samples" in line for line in left)


def test_epochs_are_carried_and_schedules_count_their_steps(model: Path) -> None:
    """Four mini-batches of the defaults, twice."""
    run, services, left = imported(
        "actor_rollout_ref.actor.ppo_epochs=2 actor_rollout_ref.actor.optim.lr_warmup_steps=10 "
        "critic.optim.lr_warmup_steps=5 trainer.total_training_steps=100 "
        "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine "
        "actor_rollout_ref.model.path=/m data.train_files=/t.parquet"
    )
    assert_loads(run, services, model)
    algorithm = parse_config(RunConfig, run).algorithm
    assert (algorithm.mini_batches, algorithm.epochs) == (4, 2)
    optims = {name: services["services"][name]["config"]["optim"] for name in ("trainer", "critic")}
    assert (optims["trainer"]["warmup_steps"], optims["trainer"]["decay_steps"]) == (80, 800)
    assert optims["critic"]["warmup_steps"] == 40
    assert not any("ppo_epochs" in line for line in left)


@pytest.mark.parametrize(
    ("program", "keys", "expected"),
    [
        ("verl.experimental.one_step_off_policy.main_ppo", "", (1, 1024, 2)),
        (
            "verl.experimental.fully_async_policy.fully_async_main",
            "async_training.require_batches=2 async_training.trigger_parameter_sync_step=4 "
            "actor_rollout_ref.actor.ppo_mini_batch_size=32 async_training.staleness_threshold=1.5 "
            "rollout.total_rollout_steps=25600",
            (2, 256, 2),
        ),
    ],
)
def test_trainers_that_sample_ahead_have_devices_of_their_own(
    program: str, keys: str, expected: tuple[int, int, int], model: Path
) -> None:
    common = (
        "rollout.nnodes=1 rollout.n_gpus_per_node=4 actor_rollout_ref.rollout.n=8 "
        "actor_rollout_ref.model.path=/m trainer.n_gpus_per_node=4 algorithm.adv_estimator=rloo"
    )
    run, services, _ = imported(f"python3 -m {program} {common} {keys}")
    assert_loads(run, services, model)
    rollout = services["services"]["rollout"]
    assert (run["max_staleness"], run["groups_per_step"], rollout["replicas"]) == expected
    assert rollout["devices"] == [4, 5, 6, 7]
    assert "placement" not in run
    assert run.get("steps") == (100 if keys else None)


@pytest.mark.parametrize(
    ("program", "keys", "old"),
    [
        ("verl.trainer.main_ppo", "", "old"),
        ("verl.experimental.one_step_off_policy.main_ppo", "", "rollout"),
        (
            "verl.experimental.one_step_off_policy.main_ppo",
            "algorithm.rollout_correction.bypass_mode=False",
            "old",
        ),
        ("x.fully_async_main", "", "rollout"),
        ("x.fully_async_main", "async_training.use_rollout_log_probs=False", "old"),
        (
            "x.fully_async_main",
            "async_training.use_rollout_log_probs=True async_training.compute_prox_log_prob=True",
            "old",
        ),
    ],
)
def test_ratios_are_to_the_policy_that_each_trainer_has_for_the_old_one(
    program: str, keys: str, old: str, model: Path
) -> None:
    """The three trainers have configurations of their own, with other defaults."""
    common = "algorithm.adv_estimator=rloo actor_rollout_ref.model.path=/m trainer.nnodes=1"
    run, services, _ = imported(f"python3 -m {program} {common} {keys}")
    assert_loads(run, services, model)
    assert (parse_config(RunConfig, run).algorithm.loss.old_logprobs or "rollout") == old


def test_the_asynchronous_trainer_has_its_own_defaults(model: Path) -> None:
    keys = (
        "python3 -m x.fully_async_main algorithm.adv_estimator=rloo actor_rollout_ref.rollout.n=8 "
        "actor_rollout_ref.model.path=/m data.val_files=/v.parquet trainer.test_freq=7 "
    )
    run, services, _ = imported(keys)
    assert_loads(run, services, model)
    assert (run["groups_per_step"], run["algorithm"]["mini_batches"]) == (4 * 256, 4)
    assert run["max_staleness"] == 1, "a tenth of a step ahead"
    assert "before_training" not in run["evaluation"] and "ignore_eos" not in run["sampling"]
    assert run["evaluation"]["every_steps"] == 1, "rollout.test_freq counts, and not trainer's"
    assert services["services"]["rollout"]["replicas"] == 4, "eight GPUs, two an engine"
    run, services, _ = imported(
        keys + "async_training.staleness_threshold=0 trainer.val_before_train=False "
        "actor_rollout_ref.rollout.ignore_eos=True"
    )
    assert_loads(run, services, model)
    assert run["max_staleness"] == 0
    assert run["evaluation"]["before_training"] is False
    assert run["sampling"]["ignore_eos"] is True


@pytest.mark.parametrize(
    ("keys", "path", "expected"),
    [
        ("trainer.critic_warmup=10", "run.critic.warmup_steps", 9),
        ("trainer.critic_warmup=1", "run.critic.warmup_steps", None),
        (f"{ACTOR}.optim.lr_scheduler_type=cosine", "critic.optim.schedule", None),
        ("critic.optim.lr_scheduler_type=cosine", "critic.optim.decay_steps", 400),
        (
            "critic.optim.lr_decay_style=linear critic.optim.min_lr=1e-6",
            "critic.optim.minimum_ratio",
            pytest.approx(0.1),
        ),
        ("critic.optim.clip_grad=0.3", "critic.optim.max_grad_norm", 0.3),
        (
            "critic.grad_clip=0.2 critic.optim.clip_grad=0.3",
            "critic.optim.max_grad_norm",
            0.2,
        ),
        (
            f"{ACTOR}.optim.clip_grad=0.3 {ACTOR}.grad_clip=0.2 {ACTOR}.strategy=megatron",
            "trainer.optim.max_grad_norm",
            0.3,
        ),
        (
            "+reward_model.reward_kwargs.overlong_buffer_cfg.enable=True "
            "+reward_model.reward_kwargs.overlong_buffer_cfg.len=64 "
            "+reward_model.reward_kwargs.max_resp_len=256",
            "run.algorithm.advantage.overlong.max_length",
            256,
        ),
        (
            f"{ACTOR}.optim.lr_warmup_steps=0 {ACTOR}.optim.lr_warmup_steps_ratio=0.1",
            "trainer.optim.warmup_steps",
            None,
        ),
        (
            f"{ACTOR}.optim.lr_warmup_steps=0 {ACTOR}.optim.lr_warmup_steps_ratio=0.1 "
            f"{ACTOR}.strategy=megatron",
            "trainer.optim.warmup_steps",
            40,
        ),
        (f"{ACTOR}.optim.lr_warmup_steps_ratio=0.019", "trainer.optim.warmup_steps", 4),
        (
            f"{ACTOR}.optim.total_training_steps=7 {ACTOR}.optim.lr_scheduler_type=cosine",
            "trainer.optim.decay_steps",
            400,
        ),
        (f"{ACTOR}.fsdp_config.dtype=float32", "trainer.fsdp.dtype", "float32"),
        (
            f"{ACTOR}.megatron.dtype=float16 {ACTOR}.strategy=megatron",
            "trainer.megatron.dtype",
            "float16",
        ),
        (
            f"actor_rollout_ref.model.lora.rank=8 {ACTOR}.strategy=megatron",
            "trainer.lora.alpha",
            32.0,
        ),
        (f"{OFFLOADED} {ACTOR}.strategy=megatron", "trainer.megatron.optimizer_offload", 0.0),
        (
            f"{OFFLOADED} +{OVERRIDE}.optimizer_offload_fraction=0.5 {ACTOR}.strategy=megatron",
            "trainer.megatron.optimizer_offload",
            0.5,
        ),
        (
            f"{OFFLOADED} +{OVERRIDE}.optimizer_offload_fraction=0.5 {ACTOR}.strategy=megatron "
            "actor_rollout_ref.model.lora.rank=8",
            "trainer.megatron.optimizer_offload",
            None,
        ),
        (
            f"+{OVERRIDE}.optimizer_offload_fraction=0.5 {ACTOR}.strategy=megatron",
            "trainer.megatron.optimizer_offload",
            None,
        ),
        ("actor_rollout_ref.model.lora_rank=8", "trainer.lora.alpha", 16.0),
        ("+actor_rollout_ref.ref.model.path=/other", "trainer.reference_model", "/other"),
        ("+actor_rollout_ref.ref.model.path=/other", "critic.reference_model", None),
        ("+data.gen_batch_size=512", "run.groups_per_step", 256),
        (
            "actor_rollout_ref.rollout.val_kwargs.temperature=0.6 data.val_files=/v.parquet",
            "run.evaluation.datasets.v.sampling.temperature",
            0.6,
        ),
        (
            "actor_rollout_ref.model.enable_activation_offload=True",
            "trainer.fsdp.activation_offload",
            True,
        ),
        (
            "algorithm.adv_estimator=gae actor_rollout_ref.rollout.quantization=fp8",
            "critic.publish",
            None,
        ),
        (f"{ACTOR}.fsdp_config.fsdp_size=2", "trainer.fsdp.replicas", 4),
        (f"{ACTOR}.fsdp_config.fsdp_size=8 trainer.nnodes=2", "trainer.fsdp.replicas", 2),
        (f"{ACTOR}.fsdp_config.fsdp_size=-1", "trainer.fsdp.replicas", None),
        (f"{ACTOR}.fsdp_config.fsdp_size=8", "trainer.fsdp.replicas", None),
        (f"model_engine=veomni {VEOMNI}.expert_parallel_size=4", "trainer.fsdp.expert", 4),
        (
            f"{ACTOR}.strategy=veomni {VEOMNI}.expert_parallel_size=8 {VEOMNI}.fsdp_size=8 "
            "trainer.nnodes=2",
            "trainer.fsdp",
            {
                "dtype": "bfloat16",
                "activation_checkpointing": True,
                "replicas": 2,
                "expert": 8,
            },
        ),
        (f"{VEOMNI}.ulysses_parallel_size=2", "trainer.fsdp.context", 2),
        (f"{VEOMNI}.expert_parallel_size=1", "trainer.fsdp.expert", None),
        ("model_engine=megatron", "trainer.backend", "megatron"),
        ("actor_rollout_ref.rollout.name=sglang", "trainer.backend", "fsdp"),
        (
            "actor_rollout_ref.rollout.quantization=fp8",
            "trainer.publish.quantization",
            "fp8",
        ),
        ("actor_rollout_ref.rollout.quantization=null", "trainer.publish.quantization", None),
        (f"{ACTOR}.router_replay.mode=R2", "trainer.fsdp.routing_replay", "recorded"),
        (f"{ACTOR}.router_replay.mode=R2", "rollout.engine.routed_experts", None),
        (f"{ACTOR}.router_replay.mode=disabled", "trainer.fsdp.routing_replay", None),
        (
            f"{ACTOR}.router_replay.mode=R3 {ACTOR}.strategy=megatron",
            "trainer.megatron.routing_replay",
            "rollout",
        ),
        (
            f"{VEOMNI}.router_replay.mode=R3 {ACTOR}.strategy=veomni",
            "trainer.fsdp.routing_replay",
            "rollout",
        ),
        (f"{VEOMNI}.router_replay.mode=R3", "rollout.engine.routed_experts", True),
        (
            "actor_rollout_ref.rollout.enable_rollout_routing_replay=True",
            "rollout.engine.routed_experts",
            True,
        ),
    ],
)
def test_values_are_those_that_verl_would_train_with(
    keys: str, path: str, expected: object
) -> None:
    run, services, left = imported(f"trainer.total_training_steps=100 {keys}")
    assert not any("do not load" in line for line in left), left
    configs = {name: each.get("config") for name, each in services["services"].items()}
    at: Any = {**configs, "run": run}
    for name in path.split("."):
        at = at.get(name) if at else None
    assert at == expected


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        (f"{ACTOR}.fsdp_config.dtype=float16", "is not there"),
        (f"{ACTOR}.fsdp_config.model_dtype=bf16", "moments are float32"),
        (f"+{ACTOR}.megatron.override_transformer_config.fp8=hybrid", "by hand"),
        (f"+{ACTOR}.megatron.override_transformer_config.attention_dropout=0.1", "dropped out"),
        (f"+{CORE}.moe_aux_loss_coeff=0.01 {ON_MEGATRON}", "has no effect in verl with"),
        (f"+{CORE}.moe_router_load_balancing_type=sinkhorn", "'sinkhorn' is not there"),
        (f"+{ACTOR}.megatron.override_ddp_config.grad_reduce_in_fp32=False", "by hand"),
        (f"+{OVERRIDE}.optimizer_offload_fraction=-1", "is not from 0 to 1"),
        (f"+{OVERRIDE}.exp_avg_dtype=bf16", "state of float32"),
        (f"{ACTOR}.optim.optimizer=Muon", "'Muon': by hand, optim.kind of backend fsdp"),
        ("critic.optim.optimizer=muon", "'muon': by hand, optim.kind of backend fsdp"),
        (f"{ACTOR}.optim.optimizer=sgd", "'sgd': AdamW and Muon are the optimizers"),
        ("critic.optim.betas=[0.9,0.95]", "the critic's config.optim"),
        ("critic.model.lora_rank=8", "a critic trains whole"),
        ("critic.model.override_config.x=1", "by hand"),
        ("critic.strategy=megatron", "has the trainer's backend"),
        ("algorithm.filter_groups.enable=True", "dapo alone filters"),
        ("algorithm.adv_estimator=remax", "'remax' is not there"),
        ("actor_rollout_ref.actor.clip_ratio=0.1", "clip_ratio_low and clip_ratio_high count"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=300", "does not divide"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=0", "ppo_mini_batch_size 0: does not divide"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=-4", "ppo_mini_batch_size -4: does not"),
        ("actor_rollout_ref.actor.ppo_epochs=65", "algorithm.epochs: "),
        ("actor_rollout_ref.actor.use_kl_loss=maybe", "neither true nor false"),
        ("actor_rollout_ref.actor.optim.lr=nan", "is not finite"),
        ("actor_rollout_ref.actor.optim.lr=$LR", "LR"),
        ("data.max_response_length=1e9999", "is no whole number"),
        ("algorithm.use_kl_in_reward=True algorithm.adv_estimator=grpo", "not there with grpo"),
        (
            "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_type=kl",
            "is 0",
        ),
        (f"{ACTOR}.fsdp_config.fsdp_size=3", "fsdp_size 3: does not divide the 8 ranks"),
        (f"{ACTOR}.fsdp_config.fsdp_size=0", "fsdp_size 0: does not divide"),
        (f"{ACTOR}.fsdp_config.fsdp_size=16", "fsdp_size 16: does not divide"),
        (f"{VEOMNI}.expert_parallel_size=16", "expert_parallel_size 16: does not divide"),
        ("model_engine=torchtitan", "'torchtitan' is not there; known: dp, veomni, megatron"),
        (
            "actor_rollout_ref.model.enable_activation_offload=True "
            "actor_rollout_ref.model.enable_gradient_checkpointing=False",
            "of what its activation_checkpointing keeps",
        ),
        ("actor_rollout_ref.rollout.quantization=torchao", "'torchao': trainer.config.publish"),
        ("custom_reward_function.path=/r.py", "functions of your own"),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.x=1", "SGLang is the engine"),
        ("actor_rollout_ref.actor.use_kl_los=True", "is unknown"),
        ("trainer.nnodes=4", "several hosts"),
        ("reward_model.enable=True", "a service of its own"),
    ],
)
def test_what_cannot_be_carried_is_said(keys: str, word: str) -> None:
    _, _, left = imported(keys)
    assert any(word in line for line in left), left


def test_lengths_of_the_engine_count_before_those_of_the_data() -> None:
    data = "data.max_prompt_length=64 data.max_response_length=128"
    engine = "actor_rollout_ref.rollout"
    keys = f"{engine}.response_length=32 {data} {engine}.prompt_length=16 data.val_files=/v.parquet"
    run, services, _ = imported(keys)
    assert run["sampling"]["max_new_tokens"] == 32
    assert run["evaluation"]["datasets"]["v"]["sampling"]["max_new_tokens"] == 32
    assert services["services"]["rollout"]["config"]["engine"]["max_model_length"] == 48


@pytest.mark.parametrize(
    ("keys", "is_told"),
    [
        ("data.filter_overlong_prompts=True", True),
        ("data.truncation=left", True),
        ("data.truncation='error' data.filter_overlong_prompts=False", False),
        ("data.max_prompt_length=9", False),  # a longer one is an error there
    ],
)
def test_prompts_that_verl_leaves_out_or_cuts_are_told(keys: str, is_told: bool) -> None:
    _, _, left = imported(keys)
    told = "data.max_prompt_length: a longer prompt is neither left out nor cut"
    assert any(line.startswith(told) for line in left) is is_told


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("$((2 * N + 1))", "15"),
        ("$(((N + 1) * (N - 1)))", "48"),
        ("$((-N / 2))", "-3"),
        ("$((N / 0))", "$((N / 0))"),
        ("$((N ** N))", "$((N ** N))"),
        ("$((N << 70))", "$((N << 70))"),
        ("$((UNSET + 1))", "$((UNSET + 1))"),
        ("$((9999999999999999999 * 9))", "$((9999999999999999999 * 9))"),
        ("${M:-$((N * 2))}", "14"),
    ],
)
def test_sums_of_a_shell_are_those_of_whole_numbers(text: str, value: str) -> None:
    assert Shell("N=7\n", {}, "x").replaced(text) == value


def seconds_of(script: str) -> float:
    """Processor time that reading it takes, right or wrong."""
    began = time.process_time()
    with contextlib.suppress(ConfigError):
        imported(script)
    return time.process_time() - began


@pytest.mark.parametrize(
    "line",
    [
        "A=(",
        "A+=(a)",
        "A+=(\n\n\n",
        'A="',
        "A='",
        "$((",
        "A=$A$A",
        "A=`x",
        "${A:-",
        "A=(a\n)",
        "((",
    ],
)
def test_a_long_script_takes_no_longer_for_each_line_than_a_short_one(line: str) -> None:
    """A reader that looks at the rest of the script for each line takes minutes for these."""
    lines = 300_000 // (len(line) + 1)

    def seconds(count: int) -> float:
        return seconds_of(f"{line}\n" * count + f"\n{RUN}trainer.nnodes=1")

    assert seconds(lines) < 40 * seconds(lines // 8)  # quadratic: 64 times


@pytest.mark.parametrize(
    ("start", "part", "count"),
    [
        ('"', r"\"", 150_000),
        ("x=$(", " a", 150_000),
        ("x=", "$((", 100_000),
        ("x=", "$((a)", 60_000),
    ],
)
def test_a_long_command_is_read_once(start: str, part: str, count: int) -> None:
    whole, eighth = (seconds_of(RUN + start + part * n) for n in (count, count // 8))
    assert whole < 40 * eighth  # quadratic: 64 times


@pytest.mark.parametrize(
    "script",
    [
        f"A={'x' * 60_000}\n{RUN}a=b {'$A ' * 300}",
        "A=(\n" + "a\n" * 20_000 + f")\n{RUN}a=b {'${A[@]} ' * 50}",
    ],
)
def test_values_put_in_again_and_again_are_refused(script: str) -> None:
    with pytest.raises(ConfigError, match="grow too long"):
        imported(script)


def test_files_that_take_in_one_another_are_refused(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("source ./run.sh   \n" * 50)
    with pytest.raises(ConfigError, match="more than 64 files"):
        with_sourced(script.read_text(), tmp_path, {}, "import-verl")
    (tmp_path / "more.sh").write_text("N=1")
    taken = with_sourced("source 'more.sh'  \nM=2", tmp_path, {}, "import-verl")
    assert taken == ("N=1\nM=2", [])


@pytest.mark.parametrize("value", ["2024-99-99", "9" * 6000, "[" * 5000])
@pytest.mark.parametrize(
    "key", ["data.train_files", "+data.apply_chat_template_kwargs.x", f"{ACTOR}.use_kl_loss"]
)
def test_a_value_that_is_no_yaml_is_a_text(key: str, value: str) -> None:
    run, services, _ = imported(f"{key}={value}")
    assert run and services


def test_arrays_end_where_those_of_a_shell_do() -> None:
    several = "B=(c=3\n  'd=4 5'\n)\nB+=(\n\n e=6\n   ) # end\n"
    shell = Shell(f"A=(a=1 b=2)\n{several}if x\nthen\n  A=( f=7 )\nfi\nC=(\n", {}, "x")
    words = shell.words('"${A[@]}" ${B[@]} ${C[@]}')
    assert words == ["a=1", "b=2", "f=7", "c=3", "d=4 5", "e=6"]


def test_variables_that_name_each_other_do_not_grow_for_ever() -> None:
    lines = "".join(f'A{i}="$A{i - 1} $A{i - 1} $Z"\n' for i in range(1, 64))
    shell = Shell(f'Z="$A63"\nA0="word word"\n{lines}', {}, "x")
    assert len(shell.replaced("$A63")) < 1 << 20


def test_the_last_of_a_key_counts_and_quotes_are_no_part_of_a_value() -> None:
    given, _, left = read_overrides(
        RUN + "trainer.a=1 +trainer.b='x y' trainer.a=\"2\" ++trainer.c=\"['u', 'v']\" plain", {}
    )
    assert given == {"trainer.a": "2", "trainer.b": "x y", "trainer.c": "['u', 'v']"}
    assert left == ["'plain': is no key=value; what it says is not carried"]


@pytest.mark.parametrize(
    ("script", "wanted"),
    [
        (f"{RUN}a=b#c d=2 # e=3", {"a": "b#c", "d": "2"}),
        (f"{RUN}a='x # y' d=2", {"a": "x # y", "d": "2"}),
        (f"F=x\n{RUN}a=${{F##*/}} d=2", {"a": "${F##*/}", "d": "2"}),
        (f"{RUN}a=1; echo b=2", {"a": "1"}),
        (f"{RUN}'a=1;2' b=3", {"a": "1;2", "b": "3"}),
        (f'A="a=1"\nA+=" b=2"\n{RUN}$A', {"a": "1", "b": "2"}),
        (f"A=(a=1 b=2)\n{RUN}${{A[*]}}", {"a": "1", "b": "2"}),
        (f"A=(a=$((2 * 3)) 'b=(1)')\n{RUN}${{A[@]}}", {"a": "6", "b": "(1)"}),
        (f"A=(\n a=1 # it's (\n b=2)\n{RUN}${{A[@]}}", {"a": "1", "b": "2"}),
        (f"declare -a A=(a=1); B=(b=2) # c\n{RUN}${{A[@]}} ${{B[@]}}", {"a": "1", "b": "2"}),
        (f'A=(a=1)\nB=("${{A[@]}}" b=2)\n{RUN}"${{B[@]}}"', {"a": "1", "b": "2"}),
        (f"N=1\nA=(a=$N)\nN=2\n{RUN}${{A[@]}} b=$N", {"a": "1", "b": "2"}),
        (f"N=1\nN=2; M=3\n{RUN}a=$N", {"a": "2"}),
        (f"{LONG}N=1\nA=(a=$N)\nN=2\nA+=(b=$N)\nN=3\n{RUN}${{A[@]}}", {"a": "1", "b": "2"}),
        (f'A=(a=1)\nA=("${{A[@]}}" b=2)\n{RUN}"${{A[@]}}"', {"a": "1", "b": "2"}),
        (f"A=()\nif x; then A=(a=1); fi\n# A=(a=2)\n{RUN}${{A[@]}}", {"a": "1"}),
        (f"N=1\nB=(b=1)\n{RUN}a=$N ${{B[@]}}\nN=2\nB=(b=2)", {"a": "1", "b": "1"}),
        (f"{RUN}a=$N ${{B[@]}}\nN=2\nB=(b=2)", {"a": "2", "b": "2"}),
        (f'{RUN}a=1 "$@" ${{@:2}} $*', {"a": "1"}),
        (f": ${{N:=3}} \n{RUN}a=$N", {"a": "3"}),
        (f"N=1\n: ${{N:=3}}\n{RUN}a=$N", {"a": "1"}),
        (f"readonly N=4\ndeclare -i M=5\n{RUN}a=$N b=$M", {"a": "4", "b": "5"}),
    ],
)
def test_words_are_those_that_a_shell_gives_the_command(
    script: str, wanted: dict[str, str]
) -> None:
    words, _, left = read_overrides(script, {})
    assert (words, left) == (wanted, [])


@pytest.mark.parametrize(
    "line", ["((N += 2))", "let N=5", "unset N", "printf -v N 5", "for N in 1 2; do", "read N"]
)
def test_a_variable_whose_value_a_shell_alone_knows_is_not_put_in(line: str) -> None:
    assert read_overrides(f"N=1\n{line}\n{RUN}a=$N", {})[0] == {"a": "$N"}
    assert read_overrides(f"N=1\n((N > 2))\n{RUN}a=$N", {})[0] == {"a": "1"}


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (f"{RUN}a=1\n# {RUN}a=0\n{RUN}a=2", "the script trains 2 times"),
        (f"if x\nthen\n  N=1\nelse\n  N=2\nfi\nM=$N\n{RUN}a=$M", "N: is set in several branches"),
        (f"N=1\nif x; then N=2; fi\n{RUN}a=$N", "N: is set behind a condition"),
        (f"N=1\nx && N=2\nN+=3\n{RUN}a=$N", "N: is set behind a condition"),
        (f"N=1\nx && N=2\nA=(a=$N)\nN=3\n{RUN}${{A[@]}}", "N: is set behind a condition"),
        (f"{RUN}a=1 $MORE", "'$MORE': is known to the shell alone"),
        (f"if x; then A=(a=1); else A=(a=2); fi\n{RUN}${{A[@]}}", "A: is set in several branches"),
        (f"read -ra A <<< 'a=1'\n{RUN}b=1 ${{A[@]}}", "A: is an array that is set in no way"),
        (f"A=($(cat a))\n{RUN}b=1 ${{A[@]}}", "'$(cat a)': is known to the shell alone"),
        (f"{RUN}a=1 ~data.seed", "'~data.seed': is no key=value"),
    ],
)
def test_what_a_shell_may_read_otherwise_is_told(script: str, told: str) -> None:
    _, _, left = read_overrides(script, {})
    assert [line[: len(told)] for line in left] == [told]
    assert import_script(script, Path("runs/x"), {})[2][0].startswith(told)


@pytest.mark.parametrize(
    "script",
    [
        f"if x\nthen\n  N=2\nelse\n  N=2\nfi\n{RUN}a=$N",
        f"if x\nthen\n  N=1\nelse\n  N=2\nfi\n{RUN}a=1",
        f"N=1\nx && N=2\nN=3\n{RUN}a=$N",
    ],
)
def test_of_what_a_shell_reads_in_one_way_alone_nothing_is_told(script: str) -> None:
    assert read_overrides(script, {})[2] == []


@pytest.mark.parametrize(
    ("mode", "low", "high"), [("vanilla", 0.2, 0.28), ("gspo", 0.3, 0.4), ("geo_mean", 0.4, 0.1)]
)
def test_a_loss_has_the_gradient_of_its_formula_there(mode: str, low: float, high: float) -> None:
    """core_algos.py of verl, of two samples of which the second is longer."""
    run, _, _ = imported(
        f"{ACTOR}.policy_loss.loss_mode={mode} "
        f"{ACTOR}.clip_ratio_low={low} {ACTOR}.clip_ratio_high={high}"
    )
    spec = parse_config(RunConfig, run).algorithm.loss
    generator = torch.Generator().manual_seed(5)
    lengths = torch.tensor([3, 7])
    index = torch.repeat_interleave(torch.arange(2), lengths)
    old = -torch.rand(10, generator=generator, dtype=torch.float64)
    ratio = torch.randn(10, generator=generator, dtype=torch.float64) * 0.5
    advantages = torch.tensor([1.5, -0.5], dtype=torch.float64)[index]

    def theirs(logprobs: torch.Tensor) -> torch.Tensor:
        log = logprobs - old
        means = torch.stack([log[index == i].mean() for i in range(2)])
        if mode == "geo_mean":
            sign = advantages.sign()
            log = sign * torch.min(sign * log, sign * log.clamp(-low, high))
            means = torch.stack([log[index == i].mean() for i in range(2)])
            return (-advantages[[0, 3]] * means.exp()).mean()
        if mode == "gspo":
            log = logprobs - logprobs.detach() + means.detach()[index]
        losses = torch.max(
            -advantages * log.exp(), -advantages * log.exp().clamp(1 - low, 1 + high)
        )
        if mode == "gspo":
            return torch.stack([losses[index == i].mean() for i in range(2)]).mean()
        return torch.where(advantages < 0, losses.min(-advantages * 3.0), losses).mean()

    def ours(logprobs: torch.Tensor) -> torch.Tensor:
        by_sample = spec.aggregation == "sample_mean"
        columns = {"old_logprobs": old, "rollout_logprobs": old, "advantages": advantages}
        inputs = LossInputs(
            outputs=logprobs,
            mask=torch.ones(10, dtype=torch.bool),
            sample_index=index,
            sample_weights=1 / lengths / 2 if by_sample else torch.full((2,), 0.1),
            columns=columns,
        )
        return compute_loss(inputs, spec).loss

    gradients = []
    for loss in (theirs, ours):
        logprobs = (old + ratio).requires_grad_()
        gradients += torch.autograd.grad(loss(logprobs), logprobs)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-6, atol=1e-8)
    assert gradients[0].abs().max() > 0


@given(st.text(max_size=200), st.sampled_from(list(KEYS)))
def test_no_text_ends_in_a_trace(text: str, key: str) -> None:
    for script in (text, f'A="{text}"\n{RUN}$A', f"{RUN}{key}={text}"):
        with contextlib.suppress(ConfigError):
            import_script(script, Path("runs/x"), {})


@given(
    st.sampled_from(list(KEYS)), st.sampled_from(["-1", "0", "null", "", "[]", "{}", "x" * 5000])
)
def test_every_key_takes_any_value(key: str, value: str) -> None:
    assert find_key(key) is not None
    run, services, _ = imported(f"{key}={value} trainer.total_training_steps=3")
    assert run and services


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (f"+{CORE}.moe_z_loss_coeff=0.001", {"z_loss_coefficient": 0.001}),
        (
            f"+{CORE}.moe_aux_loss_coeff=0.01 +{CORE}.moe_router_load_balancing_type=aux_loss",
            {"aux_loss_coefficient": 0.01},
        ),
        (f"+{CORE}.moe_router_bias_update_rate=0.002", {"bias_update_rate": 0.002}),
    ],
)
def test_even_use_of_experts_is_carried(keys: str, expected: dict[str, float]) -> None:
    _, services, left = imported(f"{ON_MEGATRON} {keys}")
    assert services["services"]["trainer"]["config"]["experts"] == expected
    assert not [line for line in left if "moe_" in line]
    _, services, _ = imported(keys)  # of no effect on its other backend
    assert "experts" not in services["services"]["trainer"]["config"]


def test_the_page_lists_every_key() -> None:
    assert key_table() in (ROOT / "docs" / "from-verl.md").read_text()


def test_the_command_writes_files_that_load(tmp_path: Path, model: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT)
    code, out, _ = run_command("import-verl", script, "-o", tmp_path / "out")
    assert code == 0 and "trainer.brand_new" in out
    services = yaml.safe_load((tmp_path / "out" / "services.yaml").read_text())
    assert_loads(yaml.safe_load((tmp_path / "out" / "run.yaml").read_text()), services, model)
    assert "&id" not in (tmp_path / "out" / "services.yaml").read_text()
    code, _, error = run_command("import-verl", script, "-o", tmp_path / "out")
    assert code == 2 and "is there already" in error
    code, _, error = run_command("import-verl", ROOT / "README.md", "-o", tmp_path / "none")
    assert code == 2 and "no command of verl" in error


@pytest.mark.parametrize(
    "keys", ["", f"rollout.n_gpus_per_node={10**12} actor_rollout_ref.hybrid_engine=False"]
)
def test_more_devices_than_a_host_has_are_told_and_not_made(keys: str) -> None:
    _, services, left = imported(f"trainer.n_gpus_per_node={10**12} {keys}")
    assert any(line.startswith("devices: by hand") for line in left)
    assert not any("devices" in entry for entry in services["services"].values())
