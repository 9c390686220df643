"""What a run script of slime becomes; the script here is one in their form."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from services.rollout.engine import config as engine_config
from services.trainer.config import MuonConfig, OptimConfig
from sluice.algo.losses import LossInputs, compute_loss
from sluice.config import ConfigError, parse_config
from sluice.importers.documents import UNKNOWN
from sluice.importers.shell import with_sourced
from sluice.importers.slime import import_script, read_script
from sluice.importers.slime_flags import ADVANTAGES, find_flag, flag_table
from sluice.loop.config import RunConfig
from sluice.stack import UpConfig
from sluice.weights.convert.quantized_layout import Fp8Blocks, Int4Groups
from tests.unit.imported_stack import assert_loads, run_command

ROOT = Path(__file__).parent.parent.parent
SCRIPT = r"""
#!/bin/bash
set -ex
DETECTED=$(nvidia-smi -L | wc -l)
GPUS=${GPUS:-4}
DATA="/data"
source models/some.sh
MODEL_ARGS=(
   --num-layers 36   # of the model
   --swiglu
)
ROLLOUT_ARGS=(
   --hf-checkpoint ${DATA}/model
   #--hf-checkpoint /other
   --prompt-data ${DATA}/tasks.jsonl
   --input-key question --label-key solution
   --apply-chat-template
   --rollout-shuffle
   --rm-type deepscaler
   --num-rollout 300
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 1024
   --rollout-temperature 0.8
   --rollout-top-k -1
   --global-batch-size 128
   --dynamic-sampling-filter-path a.b.check_reward_nonzero_std
   --over-sampling-batch-size 64
)
ALGORITHM_ARGS=(
   --advantage-estimator gspo
   --eps-clip 3e-4 --eps-clip-high 4e-4
   --use-kl-loss --kl-loss-coef 0.01 --kl-loss-type low_var_kl
   --entropy-coef 0.00
   --use-tis --tis-clip 5
)
OTHER_ARGS=( --lr 2e-6 --lr-decay-style cosine --min-lr 2e-7 --adam-beta2 0.98 --weight-decay 0.1 )
UNUSED_ARGS=(
   --steps-of-nobody "an open quote
)
python3 slime/ray_start.py --num-gpus ${GPUS}
ray job submit --address="http://127.0.0.1:8265" \
   -- python3 train.py \
   --actor-num-nodes 1 --actor-num-gpus-per-node ${GPUS} \
   ${MODEL_ARGS[@]} ${ROLLOUT_ARGS[@]} ${ALGORITHM_ARGS[@]} \
   ${OTHER_ARGS[@]} \
   --eval-interval 20 --eval-prompt-data aime ${DATA}/aime.jsonl "gp qa" ${HELD_OUT}/g.jsonl \
   --n-samples-per-eval-prompt 16 --eval-max-response-len 2048 \
   --tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full \
   --recompute-num-layers 2 --expert-tensor-parallel-size 1 \
   --mtp-num-layers 1 --enable-mtp-training --mtp-loss-scaling-factor 0.2 \
   --rollout-num-gpus 4 --rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7 \
   --sglang-cuda-graph-bs 1 2 4 --sglang-enable-dp-attention \
   --colocate --custom-rm-path my.module.reward --brand-new-flag 7
"""


def imported(script: str, **environment: str) -> tuple[dict, dict, list[str]]:
    return import_script(script, Path("runs/slime"), environment)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


def test_every_number_arrives_where_it_has_an_effect(model: Path) -> None:
    run, services, left = imported(SCRIPT, HELD_OUT="/held")
    assert_loads(run, services, model)
    config = parse_config(RunConfig, run)
    assert (config.steps, config.groups_per_step, config.samples_per_group) == (300, 32, 8)
    assert (config.sampling.max_new_tokens, config.sampling.temperature) == (1024, 0.8)
    assert config.prompts.file == Path("/data/tasks.jsonl")
    assert config.environment.settings == {
        "prompt_key": "question",
        "answer_key": "solution",
        "chat": True,
        "reward": "math",
        "reward_settings": {"boxed": True},
    }
    assert config.algorithm.mini_batches == 2
    assert config.over_sampling == 2
    assert [each.name for each in config.filters] == ["reward_std"]
    loss = config.algorithm.loss
    assert (loss.name, loss.clip_low, loss.clip_high) == ("gspo", 3e-4, 4e-4)
    assert (loss.kl_coefficient, loss.kl_estimator) == (0.01, "low_variance")
    assert (loss.old_logprobs, loss.aggregation) == ("old", "sample_mean")
    assert (loss.importance.mode, loss.importance.high) == ("truncate", 5)
    assert loss.entropy_coefficient is None
    assert config.evaluation.every_steps == 20
    assert set(config.evaluation.datasets) == {"aime", "gp_qa"}
    assert config.evaluation.datasets["gp_qa"].prompts.file == Path("/held/g.jsonl")
    assert config.evaluation.datasets["aime"].samples == 16
    trainer = services["services"]["trainer"]["config"]
    assert trainer["model"] == "/data/model"
    assert trainer["ranks"] == {"count": 4}
    assert trainer["megatron"] == {
        "tensor": 2,
        "sequence_parallel": True,
        "recompute": "full",
        "recompute_layers": 2,
        "mtp_loss_scaling_factor": 0.2,
    }
    assert trainer["optim"] == {
        "learning_rate": 2e-6,
        "weight_decay": 0.1,
        "betas": [0.9, 0.98],
        "schedule": "cosine",
        "decay_steps": 600,  # optimizer steps, two a batch
        "minimum_ratio": pytest.approx(0.1),
    }
    rollout = services["services"]["rollout"]
    assert rollout["replicas"] == 2
    assert rollout["config"]["engine"]["sglang"]["server_args"] == {
        "mem_fraction_static": 0.7,
        "cuda_graph_bs": [1, 2, 4],
        "enable_dp_attention": True,
        "tp_size": 2,
    }
    assert config.group_timeout_seconds == 14_400
    assert trainer["oversize_policy"] == "alone"
    named = {line.split(":")[0] for line in left}
    assert {"--colocate", "--custom-rm-path", "--brand-new-flag"} <= named
    assert "--num-layers" not in named


@pytest.mark.parametrize(
    ("flag", "mode", "records"),
    [("rollout-routing-replay", "rollout", True), ("routing-replay", "recorded", None)],
)
def test_routing_is_replayed_and_engines_record_it_where_it_is_theirs(
    model: Path, flag: str, mode: str, records: bool | None
) -> None:
    run, services, _ = imported(f"{SCRIPT.rstrip()} --use-{flag}")
    assert_loads(run, services, model)
    kinds = services["services"]
    assert kinds["trainer"]["config"]["megatron"]["routing_replay"] == mode
    assert kinds["rollout"]["config"]["engine"].get("routed_experts") is records


def test_what_the_script_leaves_out_is_as_slime_has_it() -> None:
    run, services, left = imported(
        "train_async.py --num-rollout 10 --hf-checkpoint /m --load /other/ --save /s "
        "--use-kl-loss --kl-loss-coef 0.1 --rollout-top-p 0.9 --rollout-top-k 5 "
        "--rollout-stop-token-ids 7 --rollout-stop '</search>' \"&&\" "
        "--eval-prompt-data a /a.jsonl --skip-eval-before-train --colocate "
        "--save-debug-rollout-data /d/{rollout_id}.pt "
        "--actor-num-nodes 1 --actor-num-gpus-per-node 8 --rollout-num-gpus-per-engine 2"
    )
    assert run["max_staleness"] == 1
    assert run["environment"]["settings"]["prompt_key"] == "input"
    assert run["algorithm"]["loss"]["kl_estimator"] == "k1"
    assert run["evaluation"]["before_training"] is False
    assert run["retention"]["keep_blobs"] is True
    sampling = run["evaluation"]["datasets"]["a"]["sampling"]
    assert (sampling["top_p"], sampling["top_k"], sampling["stop_token_ids"]) == (0.9, 5, [7])
    assert run["sampling"]["stop"] == sampling["stop"] == ["</search>", "&&"], "quoted: texts"
    assert services["services"]["trainer"]["config"]["optim"] == {
        "betas": [0.9, 0.999],
        "weight_decay": 0.01,
        "schedule": "linear",
        "decay_steps": 10,
    }
    assert services["services"]["rollout"]["replicas"] == 4
    told = {line.split(":")[0] for line in left}
    assert {"--load /other", "--n-samples-per-prompt", "--colocate"} <= told


def test_a_script_is_read_as_its_shell_would(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "m.sh").write_text("MODEL_ARGS=(\n  --num-layers 3\n  --allgather-cp\n)")
    script = """
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/models/m.sh"
source /nowhere/n.sh
BASE=${BASE:-"/root"}
TP="${TP:-2}"  # of a host
NODES="${NODES:-${WORKERS:-3}}"
if [ -z "$GPUS" ]; then
    GPUS=8
fi
if [ -n "$KEY" ]; then
   WANDB_ARGS=(
      --use-wandb
   )
else
   WANDB_ARGS=()
fi
python train.py --hf-checkpoint ${BASE}/m --tensor-model-parallel-size ${TP} \\
  --actor-num-nodes $NODES --actor-num-gpus-per-node $GPUS ${MODEL_ARGS[@]} ${WANDB_ARGS[@]} \\
  --sglang-cuda-graph-bs 1 $(seq 16 8 32) --sglang-router-port 9 --lr 2e-6 2>&1 | tee log
"""
    text, missing = with_sourced(script, tmp_path, {}, "import-slime")
    assert missing == ["source /nowhere/n.sh: is not there; what it says is not carried"]
    flags = dict(read_script(text, {})[0])
    assert flags["hf-checkpoint"] == ["/root/m"]
    assert (flags["tensor-model-parallel-size"], flags["actor-num-nodes"]) == (["2"], ["3"])
    assert flags["actor-num-gpus-per-node"] == ["8"]
    assert flags["lr"] == ["2e-6"]
    assert flags["sglang-cuda-graph-bs"] == ["1", "$(seq 16 8 32)"]
    assert {"allgather-cp", "use-wandb", "num-layers"} <= flags.keys()
    environment = {"BASE": "/data", "TP": "4", "GPUS": "6", "WORKERS": "5"}
    given = dict(read_script(text, environment)[0])
    assert given["hf-checkpoint"] == ["/data/m"]
    assert given["tensor-model-parallel-size"] == ["4"]
    assert (given["actor-num-nodes"], given["actor-num-gpus-per-node"]) == (["5"], ["6"])
    _, services, left = imported(text)
    assert "engine" in services["services"]["rollout"]["config"]
    assert "sglang" not in services["services"]["rollout"]["config"]["engine"]
    assert any(line.startswith("--sglang-cuda-graph-bs: '$(seq 16 8 32)'") for line in left)


def test_lines_of_an_array_may_go_on() -> None:
    """But for a comment, which ends where its line does."""
    script = "A=(\n --lr 1 \\\n --colocate\\\n # --off 1 \\\n --on 2 \\\n)\npython train.py ${A[@]}"
    assert read_script(script, {})[0] == [("lr", ["1"]), ("colocate", []), ("on", ["2"])]


def test_of_a_script_that_trains_twice_the_first_command_is_read_and_the_others_are_told() -> None:
    text = """
pkill -9 -f train.py
if x
then
  LR=1e-6
else
  LR=2e-6
fi
python3 train.py --lr $LR --attention-backend flash "$@"
LR=3e-6
python3 train.py --lr $LR
"""
    flags, left = read_script(text, {})
    assert flags == [("lr", ["2e-6"]), ("attention-backend", ["flash"])]
    assert left == [
        "the script trains 2 times: the first of its commands is read",
        "LR: is set in several branches; the last of them counts here",
    ]
    assert set(left) <= set(imported(text)[2])


def test_what_only_the_shell_knows_is_said(model: Path) -> None:
    _, _, left = imported(SCRIPT)
    assert any("HELD_OUT" in line for line in left)
    run, services, left = imported("python train.py --lr 1e-6")
    assert_loads(run, services, model)
    assert run["prompts"]["file"] == UNKNOWN
    assert any(line.startswith("--hf-checkpoint: is missing") for line in left)


@pytest.mark.parametrize("estimator", [*ADVANTAGES])
def test_every_estimator_loads(model: Path, estimator: str) -> None:
    flags = "--normalize-advantages --gamma 0.9 --lambd 0.9 --kl-coef 0.1 --eps-clip-c 3"
    run, services, left = imported(f"train.py --advantage-estimator {estimator} {flags}")
    assert_loads(run, services, model)
    assert not [line for line in left if "do not load" in line]
    assert ("critic" in services["services"]) == (estimator == "ppo")


@pytest.mark.parametrize(
    ("flags", "low", "high"),
    [
        ("", 0.2, 0.2),
        ("--eps-clip 0.3 --eps-clip-high 4", 0.3, 4.0),
        ("--eps-clip 1.0 --eps-clip-high 4", None, 4.0),
        ("--eps-clip 1.5", None, 1.5),
    ],
)
def test_the_weight_of_cispo_has_both_bounds_of_the_script(
    model: Path, flags: str, low: float | None, high: float
) -> None:
    """clamp(ratio, 1 - eps_clip, 1 + eps_clip_high); a ratio is never below 0."""
    run, services, _ = imported(f"train.py --advantage-estimator cispo {flags}")
    assert_loads(run, services, model)
    loss = parse_config(RunConfig, run).algorithm.loss
    assert (loss.loss.settings.clip_low, loss.loss.settings.clip_high) == (low, high)


def test_a_kl_in_the_reward_is_of_the_form_and_log_probs_of_the_script(model: Path) -> None:
    script = "train.py --advantage-estimator ppo --kl-coef 0.1 --kl-loss-type low_var_kl"
    run, services, left = imported(script)
    assert_loads(run, services, model)
    advantage = parse_config(RunConfig, run).algorithm.advantage
    assert (advantage.kl_estimator, advantage.old_logprobs) == ("low_variance", "old")
    assert not [line for line in left if line.startswith("--kl-coef")]
    run, _, left = imported(f"{script} --use-rollout-logprobs")
    assert "old_logprobs" not in run["algorithm"]["advantage"]
    _, _, left = imported(
        "train.py --advantage-estimator reinforce_plus_plus_baseline --kl-coef 0.1"
    )
    assert any("--kl-coef: slime takes a token's own KL from it" in line for line in left)


def test_a_critic_is_clipped_and_averaged_as_that_of_the_script(model: Path) -> None:
    run, services, _ = imported("train.py --advantage-estimator ppo")
    assert_loads(run, services, model)
    loss = parse_config(RunConfig, run).critic.loss
    assert (loss.value_clip, loss.aggregation) == (0.2, "sample_mean")
    run, _, _ = imported(
        "train.py --advantage-estimator ppo --value-clip 0.5 --calculate-per-token-loss "
        "--num-critic-only-steps 3"
    )
    critic = parse_config(RunConfig, run).critic
    assert (critic.loss.value_clip, critic.loss.aggregation) == (0.5, "token_mean")
    assert critic.warmup_steps == 3


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--lr nan", "--lr: 'nan' is not finite"),
        ("--lr", "--lr: takes one value, has 0"),
        ("--num-rollout 1e9", "--num-rollout: '1e9' is no whole number"),
        ("--num-rollout -5", "do not load as they are: steps"),
        ("--advantage-estimator magic", "--advantage-estimator: 'magic' is not there"),
        ("--rm-type deepest", "--rm-type: 'deepest' is not there"),
        ("--rm-type dapo", "--rm-type dapo: what is wrong has a reward of 0 here"),
        ("--eval-prompt-data one", "--eval-prompt-data: takes pairs"),
        ("--use-kl-loss yes", "--use-kl-loss: takes no value"),
        ("--global-batch-size 0 --rollout-batch-size 3 --n-samples-per-prompt 3", "--global-batch"),
        ("--global-batch-size 7 --rollout-batch-size 3 --n-samples-per-prompt 3", "--global-batch"),
        ("--over-sampling-batch-size 1 --rollout-batch-size 3", "--over-sampling-batch-size"),
        ("--rollout-top-k x", "--rollout-top-k"),
        ("--optimizer-offload-fraction 1.5", "--optimizer-offload-fraction: '1.5' is not from 0"),
        ("--exp-avg-dtype bf16", "--exp-avg-dtype: "),
        ("--recompute-method block", "--recompute-method: 'block'"),
        ("--hidden-dropout 0.1", "--hidden-dropout: 0.1"),
        ("--moe-router-load-balancing-type sinkhorn", "load-balancing-type: 'sinkhorn' is not"),
        (
            "--moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type seq_aux_loss",
            "seq_aux_loss: is of all tokens of a call here",
        ),
        ("--moe-z-loss-coeff x", "--moe-z-loss-coeff: 'x' is no number"),
        ("--moe-router-bias-update-rate x", "--moe-router-bias-update-rate: 'x' is no number"),
        ("--moe-input-jitter-eps 0.1", "--moe-input-jitter-eps: 0.1"),
        ("--moe-expert-capacity-factor 1", "--moe-expert-capacity-factor: experts take all"),
        ("--moe-router-force-load-balancing", "--moe-router-force-load-balancing: experts are"),
        ("--train-backend fsdp", "--train-backend: 'fsdp'"),
        ("--prompt-data /a.jsonl@[0:100]", "--prompt-data: '/a.jsonl@[0:100]'"),
        ("--eval-prompt-data a /a.jsonl@[-9:]", "--eval-prompt-data: '/a.jsonl@[-9:]'"),
        ("--rm-type deepscaler", "--rm-type deepscaler: an answer without </think>"),
        ("--rollout-max-response-len 9", "--rollout-max-prompt-len: is missing"),
        (
            "--rollout-max-response-len 9 --rollout-max-prompt-len 512",
            "--rollout-max-prompt-len: a longer prompt is neither left out nor cut",
        ),
        (
            "--rollout-num-gpus-per-engine 8 --sglang-pp-size 3",
            "--rollout-num-gpus-per-engine 8: is no multiple of pp_size",
        ),
        ("--sglang-mem-fraction-static ${FREE}", "--sglang-mem-fraction-static: '${FREE}'"),
        ("--optimizer sgd", "--optimizer: 'sgd': AdamW and Muon are the optimizers"),
        ("--muon-scale-mode unit_rms_norm", "--muon-scale-mode: 'unit_rms_norm' is not there"),
        ("--muon-coefficient-type cubic", "--muon-coefficient-type: 'cubic': quintic alone"),
        ("--muon-num-ns-steps many", "--muon-num-ns-steps: 'many' is no whole number"),
        (
            "--dynamic-sampling-filter-path a.check_reward_nonzero_std_with_fallback",
            "--dynamic-sampling-filter-path: reward_std replaces all groups",
        ),
        (
            "--dynamic-sampling-filter-path check_reward_nonzero_std.my_filter",
            "--dynamic-sampling-filter-path: a function of your own",
        ),
    ],
)
def test_a_value_that_cannot_be_is_told(flags: str, told: str) -> None:
    _, _, left = imported(f"train.py {flags}")
    assert any(told in line for line in left), left


@pytest.mark.parametrize(
    "flags",
    [
        "--moe-router-bias-update-rate 0 --moe-z-loss-coeff 0.0 --moe-token-drop-policy probs",
        "--train-backend megatron --ci-test --rollout-data-transport nixl",
        "--rollout-max-context-len 512 --rollout-max-response-len 9",
    ],
)
def test_what_changes_nothing_is_not_told(flags: str) -> None:
    _, _, left = imported(f"train.py {flags}")
    named = {line.split(":")[0] for line in left}
    given = {word for word in flags.split() if word.startswith("--")}
    if "--rollout-max-response-len" in given:
        given.add("--rollout-max-prompt-len")
    assert not named & given


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--optimizer muon", {"momentum": 0.9, "nesterov": False, "rate_factor": 5.0}),
        (
            "--optimizer dist_muon --muon-momentum 0.95 --muon-use-nesterov "
            "--muon-extra-scale-factor 0.2 --muon-num-ns-steps 7 --muon-fp32-matmul-prec high "
            "--muon-tp-mode duplicated --muon-no-split-qkv --muon-coefficient-type quintic",
            {"newton_schulz_steps": 7, "newton_schulz_dtype": "float32"},
        ),
        (
            "--optimizer muon --muon-scale-mode shape_scaling --muon-extra-scale-factor 0.5",
            {"adjustment": "original", "rate_factor": 0.5, "momentum": 0.9, "nesterov": False},
        ),
    ],
)
def test_what_muon_would_be_here_is_told(flags: str, expected: dict[str, Any]) -> None:
    """Megatron's spectral mode with its factor of 0.2 is what ours is without any."""
    _, services, left = imported(f"train.py {flags}")
    assert services["services"]["trainer"]["config"]["optim"].get("kind") is None
    (line,) = (line for line in left if "optim" in line and "muon" in line)
    assert "emerging_optimizers" in line and "backend: fsdp" in line and "docs/muon.md" in line
    told = yaml.safe_load(line[line.index("{") : line.rindex("}") + 1])
    assert OptimConfig.model_validate(told) == OptimConfig(kind="muon", muon=MuonConfig(**expected))


def test_settings_of_muon_alone_change_nothing() -> None:
    _, _, left = imported("train.py --muon-momentum 0.8 --muon-nesterov")
    assert not any("muon" in line for line in left)


# of its parser at 624b824a8, those whose counterparts are in no script of its own
OF_THE_PARSER = """
apply-chat-template-kwargs ci-disable-kl-checker ci-load-grad-norm ci-save-grad-norm ci-test
ci-train-rollout-logprob-abs-diff-threshold custom-advantage-function-path
custom-convert-samples-to-train-data-path custom-eval-rollout-log-function-path
custom-pg-loss-reducer-function-path custom-rollout-log-function-path
custom-update-weight-post-write-path data-source-path disable-rollout-global-dataset dump-details
eval-function-path eval-max-context-len eval-max-prompt-len eval-min-new-tokens eval-reward-key
eval-tool-key fetch-trajectory-retry-times freeze-indexer freeze-params-name-list http-proxy
load-debug-rollout-data-subsample load-forge-rollout-data log-correct-samples log-multi-turn
log-reward-category megatron-deepgemm-forward-layers megatron-deepgemm-forward-modules
megatron-deepgemm-moe-forward-layers megatron-deepgemm-moe-forward-modules memory-recorder
memory-snapshot-dir memory-snapshot-num-steps min-batch-collection-ratio
only-train-params-name-list opd-teacher-ckpt-step profile-target qwen-gdn-backend
record-memory-history ref-ckpt-step release-train reset-optimizer-states
rollout-all-samples-process-path rollout-data-postprocess-path rollout-data-transport
rollout-sample-hook-path rollout-task-type save-debug-train-data start-rollout-id
update-weight-disk-keep-files use-distributed-post use-rollout-entropy use-stateless-adam
"""


def test_no_flag_of_its_parser_is_unknown() -> None:
    unknown = [name for name in OF_THE_PARSER.split() if find_flag(name) is None]
    assert not unknown


def test_parts_that_are_trained_are_carried_by_their_names_here() -> None:
    def trainable(flags: str, entry: str = "trainer") -> tuple[Any, str]:
        _, services, left = imported(f"train.py {flags}")
        told = [line for line in left if "trainable" in line]
        return services["services"][entry]["config"].get("trainable"), "\n".join(told)

    frozen = trainable("--freeze-params-name-list embedding output_layer")
    assert frozen == ({"deny": ["*.embed_tokens.*", "lm_head.*"]}, "")
    layers = r"--only-train-params-name-list 'layers\.2[0-3]\.' router"
    chosen = {"allow": ["*.layers.2[0-3].*", "*.mlp.gate.*"]}
    assert trainable(layers) == (chosen, "")
    staged, told = trainable(f"{layers} --pipeline-model-parallel-size 2")
    assert staged == chosen and "by pipeline stage" in told
    for own in ("self_attention.wq_b", "linear_fc1", "'embed.*'"):
        nothing, told = trainable(f"--freeze-params-name-list embedding {own}")
        assert nothing is None and own.strip("'") in told
    critic = "--advantage-estimator ppo --freeze-params-name-list output_layer"
    assert trainable(critic, "critic") == ({"deny": ["score.*"]}, "")


def test_a_reference_that_moves_is_carried_where_there_is_a_kl() -> None:
    run, _, left = imported("train.py --ref-update-interval 20 --use-kl-loss --kl-loss-coef 0.01")
    assert run["algorithm"]["reference_every"] == 20
    assert not any("ref-update" in line for line in left)
    run, _, left = imported("train.py --ref-update-interval 20")
    assert "reference_every" not in run["algorithm"]
    assert "--ref-update-interval: has no effect without a KL" in left


def test_the_ranks_of_an_engine_are_those_of_one_stage() -> None:
    """slime counts the GPUs of all stages; SGLang's tp_size is of one."""

    def arguments(flags: str) -> dict:
        _, services, _ = imported(f"train.py --rollout-num-gpus 16 {flags}")
        rollout = services["services"]["rollout"]
        return {**rollout["config"]["engine"]["sglang"]["server_args"], "n": rollout["replicas"]}

    whole = arguments("--rollout-num-gpus-per-engine 8")
    assert whole == {"tp_size": 8, "n": 2}
    for name in ("pp-size", "pipeline-parallel-size"):
        cut = arguments(f"--rollout-num-gpus-per-engine 8 --sglang-{name} 2")
        assert (cut["tp_size"], cut["n"]) == (4, 2)
    flat = arguments("--rollout-num-gpus-per-engine 2 --sglang-pp-size 2")
    assert "tp_size" not in flat


ONE_HOST = "--actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus-per-engine 2"


@pytest.mark.parametrize(
    ("flags", "placement", "trainers", "engines"),
    [
        (f"train.py --colocate {ONE_HOST}", "colocated", [0, 1, 2, 3], [0, 1, 2, 3]),
        (f"train.py --colocate --rollout-num-gpus 2 {ONE_HOST}", "colocated", [0, 1, 2, 3], [0, 1]),
        (f"train.py --rollout-num-gpus 4 {ONE_HOST}", "separate", [0, 1, 2, 3], [4, 5, 6, 7]),
        (f"train_async.py --rollout-num-gpus 2 {ONE_HOST}", "separate", [0, 1, 2, 3], [4, 5]),
        ("train.py --colocate " + ONE_HOST.replace("nodes 1", "nodes 2"), "colocated", [], []),
    ],
)
def test_devices_of_one_host_are_dealt_as_by_the_script(
    flags: str, placement: str, trainers: list[int], engines: list[int], model: Path
) -> None:
    run, services, left = imported(flags)
    assert_loads(run, services, model)
    assert parse_config(RunConfig, run).placement == placement
    entries = parse_config(UpConfig, services).services
    server = entries["rollout"].config["engine"].get("sglang", {}).get("server_args", {})
    assert server.get("enable_memory_saver", False) == (placement == "colocated"), "it can sleep"
    assert list(entries["trainer"].devices) == trainers
    assert list(entries["rollout"].devices) == engines
    assert not [line for line in left if line.startswith("--colocate")]


def test_sharing_that_is_not_there_is_told(model: Path) -> None:
    more = "--rollout-batch-size 4 --over-sampling-batch-size 8"
    for script in (f"train.py {more}", "train_async.py"):
        run, services, left = imported(f"{script} --colocate {ONE_HOST}")
        assert_loads(run, services, model)
        assert "placement" not in run
        assert [line for line in left if line.startswith("--colocate")]


def test_variables_of_the_chat_template_are_carried(model: Path) -> None:
    quick = """--apply-chat-template-kwargs '{"enable_thinking": false, "budget": 12}'"""
    run, services, left = imported(f"A=(\n --apply-chat-template {quick}\n)\ntrain.py ${{A[@]}}")
    assert_loads(run, services, model)
    expected = {"enable_thinking": False, "budget": 12}
    assert run["environment"]["settings"]["template"] == expected
    assert not [line for line in left if "kwargs" in line]
    for wrong in ("7", "'{'", "${OPTIONS}"):
        run, _, left = imported(f"train.py --apply-chat-template-kwargs {wrong}")
        assert [line for line in left if line.startswith("--apply-chat-template-kwargs")]
        assert "template" not in run["environment"]["settings"]


@pytest.mark.parametrize("name", sorted(engine_config._NOT_ITS_OWN))
def test_what_a_server_is_told_otherwise_does_not_keep_the_files_from_loading(
    name: str, model: Path
) -> None:
    run, services, _ = imported(f"train.py --sglang-{name.replace('_', '-')} 3")
    assert_loads(run, services, model)


def test_interleaved_stages_are_carried(model: Path) -> None:
    stages = "--num-virtual-stages-per-pipeline-rank 2"
    for flags, expected in ((f"--pipeline-model-parallel-size 2 {stages}", 2), (stages, None)):
        run, services, _ = imported(f"train.py {flags}")
        assert_loads(run, services, model)
        megatron = services["services"]["trainer"]["config"]["megatron"]
        assert megatron.get("virtual_pipeline") == expected


def test_a_critic_takes_the_steps_of_the_script() -> None:
    """Its loss is half that of slime here, clipped at half the norm."""
    run, services, _ = imported(
        "train.py --advantage-estimator ppo --clip-grad 0.7 --adam-eps 1e-3 --lr 0.1"
    )
    spec = parse_config(RunConfig, run).critic.loss
    ours = services["services"]["critic"]["config"]["optim"]
    policy = services["services"]["trainer"]["config"]["optim"]
    assert (policy["max_grad_norm"], policy["epsilon"]) == (0.7, 1e-3)
    target = torch.tensor([3.0, -0.2, 0.01])

    def trained(loss: Callable[[torch.Tensor], torch.Tensor], norm: float, epsilon: float) -> Any:
        weights = torch.zeros(3, requires_grad=True)
        optimizer = torch.optim.AdamW([weights], 0.1, (0.9, 0.999), epsilon, weight_decay=0.01)
        for _ in range(4):
            optimizer.zero_grad()
            loss(weights).backward()
            torch.nn.utils.clip_grad_norm_([weights], norm)
            optimizer.step()
        return weights.detach()

    def value_loss(weights: torch.Tensor) -> torch.Tensor:
        columns = {"returns": target, "values": torch.zeros(3)}
        inputs = LossInputs(
            outputs=weights,
            mask=torch.ones(3, dtype=torch.bool),
            sample_index=torch.zeros(3, dtype=torch.int64),
            sample_weights=torch.ones(1),
            columns=columns,
        )
        return compute_loss(inputs, spec).loss

    def whole(weights: torch.Tensor) -> torch.Tensor:  # value_loss_function of slime
        clipped = weights.clamp(-0.2, 0.2)
        return torch.max((clipped - target) ** 2, (weights - target) ** 2).sum()

    expected = trained(whole, 0.7, 1e-3)
    found = trained(value_loss, ours["max_grad_norm"], ours["epsilon"])
    torch.testing.assert_close(found, expected)


@given(st.text(max_size=200))
def test_no_text_ends_in_a_trace(text: str) -> None:
    for script in (text, f"A=(\n{text}\n)\ntrain.py ${{A[@]}}", f"train.py --lr {text}"):
        with contextlib.suppress(ConfigError):
            imported(script)


@pytest.mark.parametrize(
    ("name", "entry", "expected"),
    [
        ("/root/Qwen3-30B-A3B-FP8/", None, "fp8"),
        ("/root/Qwen3-30B-A3B-INT4", None, "int4_128"),
        ("/root/kimi-k2-Thinking-INT4/", None, "int4_32"),
        ("/root/Qwen3-30B-A3B", None, None),
        ("/root/fp8ish/model", None, None),
        ("own", Fp8Blocks().config([]), "fp8"),
        ("own-fp8", Int4Groups(32).config([]), "int4_32"),
        ("own-fp8", {}, None),
        ("own-fp8", [], None),
        ("own", {"quant_method": "awq"}, None),
    ],
)
def test_a_quantised_model_is_what_engines_are_given(
    name: str, entry: object, expected: str | None, tmp_path: Path
) -> None:
    if entry is not None:
        (tmp_path / name).mkdir()
        document = {"quantization_config": entry} if isinstance(entry, dict) and entry else entry
        (tmp_path / name / "config.json").write_text(json.dumps(document))
        name = str(tmp_path / name)
    _, services, left = imported(SCRIPT.replace("${DATA}/model", name), HELD_OUT="/held")
    trainer = services["services"]["trainer"]["config"]
    assert trainer["model"] == name
    assert trainer.get("publish") == (expected and {"quantization": expected})
    told = [line for line in left if "plain checkpoint in its place" in line]
    assert len(told) == bool(expected)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--fp8-format e4m3 --fp8-recipe blockwise", {"fp8": "e4m3", "fp8_recipe": "blockwise"}),
        ("--fp8-format hybrid", {"fp8": "hybrid"}),
        ("--fp8-recipe blockwise", {}),  # which Megatron does not look at then
    ],
)
def test_eight_bits_are_carried(flags: str, expected: dict, model: Path) -> None:
    script = SCRIPT.replace("--brand-new-flag 7", f"{flags} --prefill-num-servers 1")
    run, services, left = imported(script, HELD_OUT="/held")
    assert_loads(run, services, model)
    megatron = services["services"]["trainer"]["config"]["megatron"]
    assert {name: megatron[name] for name in megatron if "fp8" in name} == expected
    assert not [line for line in left if "fp8" in line]
    assert [line for line in left if "engine.sglang.prefill" in line], "which is there"


RUNTIME = r"""RUNTIME_ENV_JSON="{
  \"env_vars\": {
    \"PYTHONPATH\": \"/root/Megatron-LM/\",
    \"OPEN_TRAINING_INT4_FAKE_QAT_FLAG\": \"1\",
    \"OPEN_TRAINING_INT4_GROUP_SIZE\": \"%s\"
  }
}"
"""
EXPORTED = "export OPEN_TRAINING_INT4_FAKE_QAT_FLAG=1\n"


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        (RUNTIME % 128, "int4_128"),
        (RUNTIME % 32, "int4_32"),
        (EXPORTED, "int4_128"),
        (f"{EXPORTED}OPEN_TRAINING_INT4_GROUP_SIZE=${{SIZE:-32}}\n", "int4_32"),
        (f"GROUP=32\n{RUNTIME % '${GROUP}'}", "int4_32"),
        (EXPORTED.replace("=1", "=0"), None),
        (f"# {EXPORTED}", None),
        ("", None),
    ],
)
def test_passes_by_four_bits_are_carried(before: str, expected: str | None, model: Path) -> None:
    run, services, left = imported(before + SCRIPT, HELD_OUT="/held")
    assert_loads(run, services, model)
    trainer = services["services"]["trainer"]["config"]
    wanted = {"quantization": expected, "quantization_aware": True} if expected else None
    assert trainer.get("publish") == wanted
    told = [line for line in left if "OPEN_TRAINING" in line]
    assert len(told) == bool(expected)
    assert all("plain checkpoint" in line and "sluice convert" in line for line in told)


def test_four_bits_of_the_caller_s_environment_are_carried_and_a_critic_has_none(
    model: Path,
) -> None:
    variables = {"OPEN_TRAINING_INT4_FAKE_QAT_FLAG": "1", "OPEN_TRAINING_INT4_GROUP_SIZE": "32"}
    script = SCRIPT.replace("--advantage-estimator gspo", "--advantage-estimator ppo")
    run, services, _ = imported(script, HELD_OUT="/held", **variables)
    assert_loads(run, services, model)
    entries = services["services"]
    assert entries["trainer"]["config"]["publish"]["quantization"] == "int4_32"
    assert entries["trainer"]["config"]["megatron"]["mtp_loss_scaling_factor"] == 0.2
    assert "publish" not in entries["critic"]["config"]
    assert "mtp_loss_scaling_factor" not in entries["critic"]["config"]["megatron"]


@pytest.mark.parametrize(
    ("before", "what"),
    [
        (RUNTIME % 64, "OPEN_TRAINING_INT4_GROUP_SIZE 64: publish.quantization has 32 and 128"),
        (RUNTIME % "${UNKNOWN}", "is known to the shell alone"),
        (EXPORTED.replace("=1", "=$(nvidia-smi)"), "is known to the shell alone"),
    ],
)
def test_four_bits_that_are_not_there_are_told(before: str, what: str, model: Path) -> None:
    run, services, left = imported(before + SCRIPT, HELD_OUT="/held")
    assert_loads(run, services, model)
    assert "publish" not in services["services"]["trainer"]["config"]
    (told,) = [line for line in left if "OPEN_TRAINING" in line]
    assert what in told and "passes compute with weights as they are" in told


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d", 1.0),
        ("--optimizer-cpu-offload --optimizer-offload-fraction 0.75", 0.75),
        ("--optimizer-offload-fraction 0.75", None),  # of nothing that is offloaded
        ("--use-precision-aware-optimizer", None),
    ],
)
def test_optimizer_state_on_the_host_is_carried(
    flags: str, expected: float | None, model: Path
) -> None:
    script = SCRIPT.replace("--brand-new-flag 7", f"{flags} --use-precision-aware-optimizer")
    run, services, left = imported(script, HELD_OUT="/held")
    assert_loads(run, services, model)
    megatron = services["services"]["trainer"]["config"]["megatron"]
    assert megatron.get("optimizer_offload") == expected
    assert not [line for line in left if "optimizer" in line]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--moe-router-enable-expert-bias --moe-router-bias-update-rate 2e-3", 2e-3),
        ("--moe-router-enable-expert-bias", 1e-3),  # Megatron's default
        ("--moe-router-enable-expert-bias --moe-router-bias-update-rate 0", None),
        ("--moe-router-bias-update-rate 2e-3", None),  # there is no bias
    ],
)
def test_biases_of_experts_move_as_they_would(flags: str, expected: float | None) -> None:
    _, services, left = imported(f"train.py {flags}")
    trainer = services["services"]["trainer"]["config"]
    assert trainer.get("experts", {}).get("bias_update_rate") == expected
    assert not [line for line in left if "bias" in line]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--moe-aux-loss-coeff 0.01", {"aux_loss_coefficient": 0.01}),
        ("--moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type none", {}),
        ("--moe-z-loss-coeff 1e-3", {"z_loss_coefficient": 1e-3}),
        ("--moe-z-loss-coeff 0 --moe-aux-loss-coeff 0", {}),
    ],
)
def test_losses_of_routers_are_carried(flags: str, expected: dict[str, float]) -> None:
    _, services, left = imported(f"train.py {flags}")
    assert services["services"]["trainer"]["config"].get("experts", {}) == expected
    assert not [line for line in left if "loss-coeff" in line]


def test_the_page_lists_every_flag() -> None:
    page = (ROOT / "docs" / "from-slime.md").read_text()
    assert flag_table() in page


def test_the_command_writes_files_that_load(tmp_path: Path, model: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT)
    code, out, _ = run_command("import-slime", script, "-o", tmp_path / "out")
    assert code == 0 and "--brand-new-flag" in out
    services = yaml.safe_load((tmp_path / "out" / "services.yaml").read_text())
    assert_loads(yaml.safe_load((tmp_path / "out" / "run.yaml").read_text()), services, model)
    code, _, error = run_command("import-slime", script, "-o", tmp_path / "out")
    assert code == 2 and "is there already" in error
    binary = tmp_path / "binary.sh"
    binary.write_bytes(b"\xff\xfe\x00" * 50)
    for wrong in (tmp_path, tmp_path / "missing", "a\0b", "x" * 5000, binary):
        code, _, error = run_command("import-slime", wrong, "-o", tmp_path / "none")
        assert code == 2
        assert len(error.splitlines()) == 1


@pytest.mark.parametrize("shared", ["--colocate", f"--rollout-num-gpus {10**12}"])
def test_more_devices_than_a_host_has_are_told_and_not_made(shared: str) -> None:
    _, services, left = imported(
        f"train.py --actor-num-nodes 1 --actor-num-gpus-per-node {10**12} {shared}"
    )
    assert any(line.startswith("devices: by hand") for line in left)
    assert not any("devices" in entry for entry in services["services"].values())
