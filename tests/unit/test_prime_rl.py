"""`sluice import-prime-rl`: TOML settings, as prime-rl's own examples have them."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from examples.models.tiny_qwen3 import build_tiny_qwen3
from sluice.algo.losses import compute_loss
from sluice.config import ConfigError, parse_config
from sluice.importers.prime_rl import import_settings
from sluice.importers.prime_rl_keys import KEYS, find_key, key_table
from sluice.loop.config import RunConfig
from tests.unit.algo.loss_inputs import make_inputs
from tests.unit.imported_stack import assert_loads, run_command

ROOT = Path(__file__).parent.parent.parent
SETTINGS = """
max_steps = 200
seq_len = 4096
[model]
name = "/models/qwen3"
[deployment]
num_train_gpus = 2
num_infer_gpus = 4
[ckpt]
interval = 25
keep_last = 3
[monitors.wandb]
project = "words"
tags = ["a", "b"]
[weight_broadcast]
type = "nccl"
[trainer.optim]
lr = 3e-6
max_norm = "None"
[trainer.scheduler]
type = "cosine"
warmup_steps = 20
min_lr = 3e-7
[trainer.model]
cp = 2
[trainer.model.ac]
[trainer.model.lora]
rank = 8
target_modules = ["q_proj", "v_proj"]
[trainer.loss]
dppo_mask_high = 0.3
kl_tau = 0.0
[orchestrator]
batch_size = 128
group_size = 16
max_off_policy_steps = 4
[orchestrator.train]
filter_zero_advantages = false
[orchestrator.train.sampling]
temperature = 0.7
max_completion_tokens = 512
[[orchestrator.train.source]]
name = "words"
[orchestrator.train.source.env.taskset]
id = "reverse-text"
words = 3
[orchestrator.train.source.env.agent.harness]
id = "null"
[orchestrator.train.source.env.agent.runtime]
type = "subprocess"
[orchestrator.eval]
interval = 5
num_examples = 64
[orchestrator.eval.sampling]
max_completion_tokens = 256
temperature = 0.1
[[orchestrator.eval.source]]
name = "held-out"
group_size = 4
[orchestrator.eval.source.env.taskset]
id = "reverse-text"
[inference.vllm]
tensor_parallel_size = 2
gpu_memory_utilization = 0.6
"""


def imported(*texts: str) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Of settings, and what stands behind them."""
    return import_settings(tomllib.loads("\n".join(texts)), Path("runs/words"))


def source(name: str, more: str = "") -> str:
    return (
        f"[[orchestrator.train.source]]\nname = '{name}'\n{more}\n"
        f"[orchestrator.train.source.env.taskset]\nid = '{name}'\n"
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_qwen3(tmp_path_factory.mktemp("model"), 0)


def test_settings_become_files_that_say_the_same(model: Path) -> None:
    run, services, left = imported(SETTINGS)
    assert_loads(run, services, model)
    assert [line.partition(":")[0] for line in left] == ["orchestrator.train.source"] * 2
    assert (run["steps"], run["groups_per_step"], run["samples_per_group"]) == (200, 8, 16)
    assert (run["max_staleness"], run["checkpoint_every"]) == (4, 25)
    assert run["retention"] == {"cuts": 3}
    assert run["trackers"] == {"wandb": {"project": "words", "tags": ["a", "b"]}}
    assert run["weight_transport"] == "collective"
    assert run["sampling"] == {"temperature": 0.7, "max_new_tokens": 512}
    assert run["environment"]["name"] == "verifiers"
    settings = run["environment"]["settings"]
    assert (settings["environment"], settings["arguments"]) == ("reverse-text", {"words": 3})
    held_out = run["evaluation"]["datasets"]["held-out"]
    assert (held_out["groups"], held_out["samples"]) == (64, 4)
    assert held_out["sampling"] == {"temperature": 0.1, "max_new_tokens": 256}
    assert held_out["environment"]["settings"]["split"] == "eval"
    assert run["evaluation"]["every_steps"] == 5
    entries = services["services"]
    trainer = entries["trainer"]["config"]
    assert trainer["model"] == "/models/qwen3"
    assert trainer["ranks"] == {"count": 2} and trainer["fsdp"]["context"] == 2
    assert trainer["max_tokens_per_micro_batch"] == 2048, "of each of two that share a row"
    assert trainer["transfer"] == {"enabled": True}
    assert trainer["lora"] == {"rank": 8, "alpha": 32.0, "targets": ["q_proj", "v_proj"]}
    assert trainer["optim"] == {
        "kind": "adamw",
        "learning_rate": 3e-6,
        "weight_decay": 0.01,
        "betas": [0.9, 0.999],
        "max_grad_norm": 0.0,
        "schedule": "cosine",
        "warmup_steps": 20,
        "decay_steps": 200,
        "minimum_ratio": pytest.approx(0.1),
    }
    assert entries["trainer"]["devices"] == [0, 1]
    assert (entries["rollout"]["replicas"], entries["rollout"]["devices"]) == (2, [2, 3, 4, 5])
    engine = entries["rollout"]["config"]["engine"]
    assert engine["max_model_length"] == 4096
    assert engine["sglang"]["server_args"] == {
        "mem_fraction_static": 0.6,
        "enable_fp32_lm_head": True,
        "tp_size": 2,
    }
    assert entries["episodes"]["config"]["episodes"] == {"user_modules": ["reverse_text"]}


def test_what_is_left_out_is_as_prime_rl_has_it(model: Path) -> None:
    run, services, left = imported("[trainer]\n[orchestrator]\n[inference]")
    assert_loads(run, services, model)
    assert (run["groups_per_step"], run["samples_per_group"]) == (64, 2), "of 128 that are alone"
    assert run["max_staleness"] == 8
    optim = services["services"]["trainer"]["config"]["optim"]
    assert (optim["learning_rate"], optim["weight_decay"]) == (1e-6, 0.01)
    assert optim["max_grad_norm"] == 1.0
    fsdp = services["services"]["trainer"]["config"]["fsdp"]
    assert fsdp == {
        "dtype": "bfloat16",
        "activation_checkpointing": True,
        "activation_offload": True,
    }
    assert run["sampling"] == {"max_new_tokens": 2048}
    told = "\n".join(left)
    for what in ("filter_zero_advantages", "group_size 1", "max_steps", "is missing;"):
        assert what in told


LOW, HIGH, EITHER = 0.03, 0.02, 0.05
BOUNDS = f"dppo_mask_low = {LOW}\ndppo_mask_high = {HIGH}\n"


@pytest.mark.parametrize(
    ("settings", "two_sided", "pull"),
    [
        (f"{BOUNDS}kl_tau = 0", False, 0.0),
        (BOUNDS, False, 0.001),
        (f"{BOUNDS}kl_tau = 2.5", False, 2.5),
        (f"type = 'ipo'\nkl_tau = 0.3\nipo_threshold = {EITHER}", True, 0.3),
    ],
)
def test_the_loss_has_the_gradient_of_prime_rls(
    settings: str, two_sided: bool, pull: float
) -> None:
    """Of its formula: a weighted mean over tokens, without those that have moved too far, and the
    square of how far each has."""
    bounds = f"[trainer.loss]\n{settings}\n"
    run, _, _ = imported("[orchestrator]\n[inference]\n", bounds, source("a"))
    loss = parse_config(RunConfig, run).algorithm.loss
    inputs = make_inputs()
    compute_loss(inputs, loss).loss.backward()
    found = inputs.outputs.grad
    now = inputs.outputs.detach().clone().requires_grad_()
    old, gain = inputs.columns["rollout_logprobs"], inputs.columns["advantages"]
    moved = now.detach().exp() - old.exp()
    masked = torch.where(gain > 0, moved > HIGH, moved < -LOW)
    if two_sided:
        masked = moved.abs() > EITHER
    assert 3 < int(masked[inputs.mask].sum()) < int(inputs.mask.sum()) - 3
    weights = inputs.sample_weights[inputs.sample_index]
    terms = -(now - old).exp() * gain * weights
    squares = pull * (now - old) ** 2 * weights
    (terms[inputs.mask & ~masked].sum() + squares[inputs.mask].sum()).backward()
    torch.testing.assert_close(found, now.grad, rtol=1e-9, atol=1e-12)


def test_the_group_of_the_only_environment_counts() -> None:
    both = "[orchestrator]\ngroup_size = 8\n[inference]\n", source("a", "group_size = 32")
    run, _, left = imported(*both)
    assert (run["groups_per_step"], run["samples_per_group"]) == (4, 32)
    assert not [line for line in left if "group_size" in line]


def test_several_environments_are_a_mixture(model: Path) -> None:
    more = "ratio = 0.25\ngroup_size = 4\nsampling.max_completion_tokens = 64"
    run, services, left = imported(
        "[orchestrator]\ngroup_size = 8\n[inference]\n", source("a", more), source("b")
    )
    assert_loads(run, services, model)
    assert "environment" not in run and "prompts" not in run
    shares = run["environments"]
    assert (shares["a"]["weight"], shares["b"]["weight"]) == (0.25, 1.0)
    assert shares["a"]["sampling"] == {"max_new_tokens": 64}
    assert shares["a"]["samples_per_group"] == 4 and "samples_per_group" not in shares["b"]
    assert services["services"]["episodes"]["config"]["episodes"]["user_modules"] == ["a", "b"]
    assert any("group_size" in line for line in left)


def test_engines_and_ranks_of_several_hosts_have_no_devices(model: Path) -> None:
    run, services, left = imported(
        "[deployment]\ntype = 'multi_node'\nnum_train_nodes = 2\nnum_infer_nodes = 1\n"
        "num_infer_replicas = 3\nnodes_per_fsdp_group = 1\n[orchestrator]\ngroup_size = 2\n"
        "[inference.vllm]\ntensor_parallel_size = 4\n",
        source("a"),
    )
    assert_loads(run, services, model)
    entries = services["services"]
    trainer = entries["trainer"]["config"]
    assert trainer["ranks"]["count"] == 16 and trainer["fsdp"]["replicas"] == 2
    assert entries["rollout"]["replicas"] == 6
    assert not any("devices" in entry for entry in entries.values())
    assert any("several hosts" in line for line in left)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[trainer.optim]\ntype = 'sign_sgd'", "trainer.optim.type: sign_sgd: AdamW and Muon"),
        ("[trainer.loss]\ntype = 'newest'", "trainer.loss.type: newest: is unknown"),
        ("[trainer.loss]\nadv_tau = 0.5", "trainer.loss.adv_tau: not there"),
        ("[trainer.model]\nep = 'auto'", "trainer.model.ep: auto: by hand"),
        ("[trainer.model]\noptimization_dtype = 'bfloat16'", "weights and moments are float32"),
        ("[trainer.model]\nnew_key = 1", "trainer.model.new_key: is unknown"),
        ("[trainer.modle]", "trainer.modle: is unknown"),
        ("[orchestrator.algo]\ntype = 'opd'", "orchestrator.algo.type: opd: by hand: algorithm."),
        ("[orchestrator.algo]\ntype = 'newest'", "'newest' is unknown"),
        ("[orchestrator]\ntoken_batch_size = 9", "orchestrator.token_batch_size: by hand"),
        ("[weight_broadcast]\ntype = 'nixl'", "weight_broadcast.type: nixl: not there"),
        ("[trainer.scheduler]\ntype = 'linear'", "trainer.scheduler.decay_steps 10: a rate that"),
        ("[inference.vllm]\nmodel = 'other'", "inference.vllm.model other: engines have the train"),
    ],
)
def test_what_is_not_carried_is_told_with_the_reason(text: str, told: str) -> None:
    head = "max_steps = 100\n[model]\nname = '/m'\n"
    parts = [f"[{part}]" for part in ("orchestrator", "inference") if f"[{part}]" not in text]
    _, _, left = imported(head, *parts, text, source("a"))
    assert [line for line in left if told in line], left


def test_an_environment_that_is_more_than_a_taskset_is_told_of_by_its_number() -> None:
    agents = "".join(
        f"[orchestrator.train.source.env.{name}.harness]\nid = '{harness}'\n"
        for name, harness in (("player0", "bash"), ("player1", "null"))
    )
    gates = "curriculum = { gates = { g = { type = 'advantage_range', reject_max = 0.5 } } }"
    _, _, left = imported("[orchestrator]\n[inference]", source("a"), source("b", gates), agents)
    told = [line for line in left if line.startswith("orchestrator.train.source[1]")]
    assert [line.rpartition("]")[2].partition(":")[0] for line in told] == [
        ".env.player0.harness.id",
        ".env",
        ".curriculum.gates",
    ]


def test_groups_without_a_difference_are_left_out_where_a_gate_does_so() -> None:
    gate = "curriculum = { gates = { zero = { type = 'advantage_range' } } }"
    run, _, left = imported("[orchestrator]\n[inference]", source("a", gate))
    assert run["filters"] == [{"name": "reward_std"}]
    assert not [line for line in left if "gates" in line]


def test_a_layer_that_nothing_is_run_again_of_is_none() -> None:
    none = '[trainer.model]\nac = "None"\n'
    _, services, _ = imported("[orchestrator]\n[inference]", none, source("a"))
    fsdp = services["services"]["trainer"]["config"]["fsdp"]
    assert fsdp == {"dtype": "bfloat16", "activation_checkpointing": False}


def test_a_later_file_counts_and_what_is_refused_has_its_line(tmp_path: Path) -> None:
    (tmp_path / "rl.toml").write_text(SETTINGS)
    (tmp_path / "more.toml").write_text("max_steps = 7\n[trainer.optim]\nweight_decay = -1\n")
    command = ("import-prime-rl", tmp_path / "rl.toml", tmp_path / "more.toml")
    code, out, _ = run_command(*command, "-o", tmp_path / "out")
    assert code == 0
    told = "more.toml:3: trainer.optim.weight_decay=-1: is refused by trainer: optim.weight_decay"
    assert told in out
    written = (tmp_path / "out/run.yaml").read_text()
    assert written.startswith("# From rl.toml more.toml by `sluice import-prime-rl`")
    assert f"#   {told}" in written
    assert yaml.safe_load(written)["steps"] == 7
    code, _, error = run_command(*command, "-o", tmp_path / "out")
    assert code == 2 and "is there already" in error


@pytest.mark.parametrize(
    ("text", "why"),
    [("a = ", "is no TOML"), ("[data]\nname = 'x'", "not those of rl"), ("", "not those of rl")],
)
def test_what_are_no_settings_of_rl_is_refused_in_a_line(
    text: str, why: str, tmp_path: Path
) -> None:
    (tmp_path / "x.toml").write_text(text)
    code, _, error = run_command("import-prime-rl", tmp_path / "x.toml", "-o", tmp_path / "out")
    assert code == 2 and why in error and len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "text",
    [
        "orchestrator = 3",
        "[orchestrator]\ntrain = 3",
        "[orchestrator]\ngroup_size = 0",
        "[orchestrator]\nbatch_size = 'many'",
        "[orchestrator]\n[deployment]\nnum_train_gpus = 1000000000000",
        "[orchestrator]\n[[orchestrator.train.source]]\nenv = 3",
        "[orchestrator]\n[[orchestrator.train.source]]\nenv = { taskset = { a = 1, 'a.b' = 2 } }",
        "[orchestrator]\n[[orchestrator.train.source]]\nname = '../x'\n[trainer.optim]\nlr = 0.0",
        "[orchestrator]\n[[orchestrator.train.source]]\ncurriculum.gates.g.type = []",
        "[orchestrator]\n[trainer.optim]\nlr = nan\n[trainer.scheduler]\ntype = 'cosine'",
    ],
)
def test_what_no_settings_are_made_of_is_told_and_no_mistake_of_ours(text: str) -> None:
    _, _, left = imported(text)
    assert left


def test_a_source_that_is_no_table_is_refused() -> None:
    with pytest.raises(ConfigError, match="is no list of tables"):
        import_settings({"orchestrator": {"train": {"source": ["a"]}}}, Path("x"))


def test_every_key_says_what_it_becomes_or_why_not() -> None:
    for name, key in KEYS.items():
        assert key.ours or key.why, name
        assert key.put is not None or key.why or key.ours.endswith((".arguments", "filters")), name
    assert find_key("trainer.unheard_of") is None


def test_the_page_lists_every_key() -> None:
    assert key_table() in (ROOT / "docs" / "from-prime-rl.md").read_text()
