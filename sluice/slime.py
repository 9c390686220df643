"""`sluice import-slime`: what a run script of slime says, as run.yaml and services.yaml.

The script is read, never run. Every flag is carried, not needed, or not there; which, and why, is
in `FLAGS` and, from there, in docs/from-slime.md.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from sluice.config import ConfigError, parse_config
from sluice.init import write_new
from sluice.loop.config import RunConfig
from sluice.supervise import UpConfig

IMPORT_USAGE = "sluice import-slime SCRIPT.sh [-o DIR]"
LARGEST_BYTES = 1 << 20

Values = list[str]
Put = Callable[["_Import", Values], None]


@dataclass(frozen=True)
class Flag:
    """`ours`: the key it becomes; empty where `why` says what to do, or why there is nothing."""

    ours: str = ""
    why: str = ""
    put: Put | None = None


class NotCarriedError(Exception):
    """A value has no counterpart; the message says what to do."""


@dataclass
class _Import:
    """The two documents as they grow."""

    run: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    rollout: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)  # of several flags together
    left: list[str] = field(default_factory=list)  # what could not be carried, for people

    def document(self, name: str) -> dict[str, Any]:
        return {"run": self.run, "trainer": self.trainer, "rollout": self.rollout}[name]


def _set(tree: dict[str, Any], path: str, value: Any) -> None:
    *above, last = path.split(".")
    for name in above:
        tree = tree.setdefault(name, {})
    tree[last] = value


def _only(values: Values) -> str:
    if len(values) != 1:
        raise NotCarriedError(f"takes one value, has {len(values)}")
    return values[0]


def _int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise NotCarriedError(f"{text!r} is no whole number") from None


def _float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise NotCarriedError(f"{text!r} is no number") from None
    if not math.isfinite(value):
        raise NotCarriedError(f"{text!r} is not finite")
    return value


def _text(text: str) -> str:
    if "$" in text:
        raise NotCarriedError(f"{text!r} is known to the shell alone")
    return text


def _key(document: str, path: str, read: Callable[[str], Any], why: str = "") -> Flag:
    def put(into: _Import, values: Values) -> None:
        _set(into.document(document), path, read(_only(values)))

    return Flag(f"{document}: {path}", why, put)


def _true(document: str, path: str) -> Flag:
    def put(into: _Import, _: Values) -> None:
        _set(into.document(document), path, True)

    return Flag(f"{document}: {path}", "", put)


def _fact(name: str, read: Callable[[str], Any], ours: str, why: str = "") -> Flag:
    def put(into: _Import, values: Values) -> None:
        into.facts[name] = read(_only(values))

    return Flag(ours, why, put)


def _switch(name: str, ours: str, why: str = "") -> Flag:
    def put(into: _Import, values: Values) -> None:
        if values:
            raise NotCarriedError("takes no value")
        into.facts[name] = True

    return Flag(ours, why, put)


def _choice(name: str, known: Mapping[str, Any], ours: str) -> Flag:
    def put(into: _Import, values: Values) -> None:
        value = _only(values)
        if value not in known:
            raise NotCarriedError(f"{value!r} is not there; known: {', '.join(known)}")
        into.facts[name] = known[value]

    return Flag(ours, f"{', '.join(known)}", put)


def _unneeded(why: str) -> Flag:
    return Flag("", f"not needed: {why}")


def _absent(why: str) -> Flag:
    return Flag("", f"not there: {why}")


def _by_hand(why: str) -> Flag:
    return Flag("", f"by hand: {why}")


def _evaluation_sets(into: _Import, values: Values) -> None:
    if len(values) % 2 or not values:
        raise NotCarriedError("takes pairs of name and file")
    into.facts["evaluation"] = dict(zip(values[::2], map(_text, values[1::2]), strict=True))


def _recompute(into: _Import, values: Values) -> None:
    value = _only(values)
    if value not in ("full", "selective"):
        raise NotCarriedError(f"{value!r} is neither full nor selective")
    _set(into.trainer, "megatron.recompute", value)


def _recompute_method(_: _Import, values: Values) -> None:
    if _only(values) != "uniform":
        raise NotCarriedError(f"{values[0]!r}: megatron.recompute_layers counts uniform blocks")


def _nought(_: _Import, values: Values) -> None:
    if _float(_only(values)):
        raise NotCarriedError(f"{values[0]}: there is no dropout")


def _no_auxiliary_loss(_: _Import, values: Values) -> None:
    if any(map(_float, values)):
        raise NotCarriedError(f"{', '.join(values)}: there is no auxiliary loss")


def _place(name: str) -> Put:
    def put(into: _Import, values: Values) -> None:
        into.facts[name] = _only(values).rstrip("/")

    return put


def _colocate(into: _Import, _: Values) -> None:
    into.facts["colocate"] = True
    raise NotCarriedError(FLAGS["colocate"].why)


def _schedule(into: _Import, values: Values) -> None:
    value = _only(values)
    if value not in ("constant", "linear", "cosine"):
        raise NotCarriedError(f"{value!r}: optim.schedule has constant, linear and cosine")
    into.facts["schedule"] = value


def _filter(into: _Import, values: Values) -> None:
    if "check_reward_nonzero_std" not in _only(values):
        raise NotCarriedError("a function of your own: filters of run.yaml, docs/rollout.md")
    into.run["filters"] = [{"name": "reward_std"}]


def _stop_tokens(into: _Import, values: Values) -> None:
    _set(into.run, "sampling.stop_token_ids", [_int(value) for value in values])


def _top_k(into: _Import, values: Values) -> None:
    _set(into.run, "sampling.top_k", max(0, _int(_only(values))))


def _optimizer(into: _Import, values: Values) -> None:
    if _only(values) != "adam":
        raise NotCarriedError(f"{values[0]!r}: AdamW is the optimizer")


def _loss_type(into: _Import, values: Values) -> None:
    if _only(values) != "policy_loss":
        raise NotCarriedError(f"{values[0]!r}: supervised training is `sluice sft`, docs/api.md")


_REWARDS = {"math": "math", "deepscaler": "math", "dapo": "math", "f1": "f1", "gpqa": "choice"}
_ADVANTAGES = {
    "grpo": ("grpo", "ppo_clip"),
    "gspo": ("grpo", "gspo"),
    "cispo": ("grpo", "cispo"),
    "reinforce_plus_plus": ("reinforce_plus_plus", "ppo_clip"),
    "reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", "ppo_clip"),
    "ppo": ("gae", "ppo_clip"),
}
_KL = {"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "low_variance"}
_EVAL = "run: evaluation.datasets.<name>"
_LOSS, _ADVANTAGE = "run: algorithm.loss", "run: algorithm.advantage"
_MODEL = _unneeded("the model's config.json says it")
_ALWAYS = _unneeded("it is always so")
_STORE = _unneeded("checkpoints and weights are in the store of the run; `--resume` goes on")
_OWN = "functions of your own are named otherwise: docs/rollout.md, Your own functions"

FLAGS: dict[str, Flag] = {
    # cluster
    "actor-num-nodes": _fact("nodes", _int, "trainer: ranks.count", "times the GPUs of a node"),
    "actor-num-gpus-per-node": _fact("gpus", _int, "trainer: ranks.count"),
    "rollout-num-gpus": _fact("rollout_gpus", _int, "services.yaml: rollout.replicas"),
    "rollout-num-gpus-per-engine": _fact(
        "engine_gpus", _int, "rollout: engine.sglang.server_args.tp_size"
    ),
    "num-gpus-per-node": _unneeded("`devices` of a service names those that it sees"),
    "colocate": Flag("", "by hand: run.yaml placement: colocated: docs/colocation.md", _colocate),
    "offload": _by_hand("see colocate"),
    "offload-train": _by_hand("see colocate"),
    "offload-rollout": _by_hand("see colocate"),
    "no-offload-train": _unneeded("nothing is offloaded"),
    "no-offload-rollout": _unneeded("nothing is offloaded"),
    "train-backend": _unneeded("the import writes backend: megatron"),
    "train-env-vars": _by_hand("services have the variables of the shell of `sluice up`"),
    "distributed-backend": _unneeded("it follows from the device"),
    "distributed-timeout-minutes": _unneeded("every wait has a deadline of its own"),
    # weights
    "update-weight-mode": _by_hand("trainer.config.publish has deltas: docs/weights.md"),
    "update-weight-transport": _by_hand("run.yaml weight_transport: docs/weights.md"),
    "update-weight-buffer-size": _unneeded("buckets have a size of their own"),
    "update-weight-disk-dir": _STORE,
    "update-weight-local-checkpoint-dir": _STORE,
    "update-weight-delta-encoding": _by_hand("trainer.config.publish: docs/weights.md"),
    "update-weight-delta-checksum": _ALWAYS,
    "update-weights-interval": _by_hand("run.yaml max_staleness bounds how old samples may be"),
    "keep-old-actor": _by_hand("algorithm.loss.old_logprobs: rollout is the policy that sampled"),
    "check-weight-update-equal": _ALWAYS,
    # models and checkpoints
    "hf-checkpoint": _fact("model", _text, "trainer: model; rollout: tokenizer"),
    "model-name": _MODEL,
    "load": Flag("", _STORE.why, _place("load")),
    "save": Flag("", _STORE.why, _place("save")),
    "critic-load": _STORE,
    "critic-save": _STORE,
    "save-interval": _key("run", "checkpoint_every", _int),
    "async-save": _unneeded("a checkpoint is written beside what follows it"),
    "no-save-optim": _absent("checkpoints are whole"),
    "save-hf": _unneeded("every weight version is a Hugging Face directory in the store"),
    "ref-load": _by_hand(
        "the reference is the model itself; trainer.config.reference_model names another "
        "Hugging Face directory (`sluice convert` makes one of torch_dist)"
    ),
    "ref-update-interval": _absent("the reference stays"),
    "custom-model-provider-path": _by_hand("trainer.config.megatron.model_provider"),
    "megatron-config-path": _by_hand("a critic is an entry of services.yaml with its own settings"),
    # rollout
    "num-rollout": _key("run", "steps", _int),
    "num-epoch": _by_hand("run.yaml steps: epochs times rows, by groups_per_step"),
    "rollout-batch-size": _key("run", "groups_per_step", _int),
    "n-samples-per-prompt": _key("run", "samples_per_group", _int),
    "rollout-max-response-len": _key("run", "sampling.max_new_tokens", _int),
    "rollout-max-prompt-len": _fact("prompt_length", _int, "rollout: engine.max_model_length"),
    "rollout-max-context-len": _key("rollout", "engine.max_model_length", _int),
    "rollout-temperature": _key("run", "sampling.temperature", _float),
    "rollout-top-p": _key("run", "sampling.top_p", _float),
    "rollout-top-k": Flag("run: sampling.top_k", "-1 is 0", _top_k),
    "rollout-stop-token-ids": Flag("run: sampling.stop_token_ids", "", _stop_tokens),
    "rollout-stop": _absent("stop tokens end a sample: sampling.stop_token_ids"),
    "rollout-skip-special-tokens": _unneeded("tokens travel as numbers"),
    "rollout-shuffle": _true("run", "prompts.shuffle"),
    "rollout-seed": _key("run", "seed", _int),
    "seed": _key("trainer", "seed", _int),
    "over-sampling-batch-size": _fact("over_sampling", _int, "run: over_sampling"),
    "partial-rollout": _unneeded("a group goes on while weights change under it (max_staleness)"),
    "mask-offpolicy-in-partial-rollout": _absent("algorithm.loss.importance weighs such tokens"),
    "rollout-function-path": _by_hand(_OWN),
    "custom-generate-function-path": _by_hand(_OWN),
    "rollout-external-engine-addrs": _by_hand("rollout.config.engine.sglang.url, one an engine"),
    "rollout-buffer-url": _by_hand(_OWN),
    "use-rollout-routing-replay": Flag(
        "trainer: megatron.routing_replay",
        "rollout",
        lambda into, _: _set(into.trainer, "megatron.routing_replay", "rollout"),
    ),
    "use-routing-replay": Flag(
        "trainer: megatron.routing_replay",
        "recorded",
        lambda into, _: _set(into.trainer, "megatron.routing_replay", "recorded"),
    ),
    # data
    "prompt-data": _key("run", "prompts.file", _text),
    "input-key": _key("run", "environment.settings.prompt_key", _text),
    "label-key": _key("run", "environment.settings.answer_key", _text),
    "apply-chat-template": _true("run", "environment.settings.chat"),
    "metadata-key": Flag(
        "run: environment.settings.state_keys",
        "",
        lambda into, values: _set(
            into.run, "environment.settings.state_keys", [_text(_only(values))]
        ),
    ),
    "multimodal-keys": _by_hand("environment.settings.images_key: docs/rollout.md"),
    "tool-key": _by_hand("the environment `tools`: docs/rollout.md"),
    "loss-mask-type": _unneeded("answers of the model are trained on, whatever its template"),
    "data-pad-size-multiplier": _unneeded("the planner pads"),
    # reward
    "rm-type": _choice("reward", _REWARDS, "run: environment.settings.reward"),
    "custom-rm-path": _by_hand(_OWN),
    "rm-url": _by_hand("the reward `remote`: docs/rollout.md"),
    "group-rm": _by_hand(_OWN),
    "reward-key": _by_hand(_OWN),
    "custom-reward-post-process-path": _by_hand(_OWN),
    "disable-rewards-normalization": _by_hand("advantage provided, or a loop of your own"),
    "disable-grpo-std-normalization": _switch(
        "no_std", f"{_ADVANTAGE}.scale_by_std", "false, of grpo"
    ),
    "dynamic-sampling-filter-path": Flag("run: filters", "reward_std", _filter),
    "rollout-sample-filter-path": _by_hand(_OWN),
    "buffer-filter-path": _by_hand(_OWN),
    # algorithm
    "advantage-estimator": _choice(
        "estimator", _ADVANTAGES, f"{_ADVANTAGE}.name, {_LOSS.removeprefix('run: ')}.name"
    ),
    "loss-type": Flag("", "policy_loss; supervised training is `sluice sft`", _loss_type),
    "gamma": _fact("gamma", _float, f"{_ADVANTAGE}.gamma"),
    "lambd": _fact("gae_lambda", _float, f"{_ADVANTAGE}.gae_lambda"),
    "kl-coef": _fact("kl_reward", _float, f"{_ADVANTAGE}.kl_coefficient"),
    "use-kl-loss": _switch("kl_loss", f"{_LOSS}.kl_coefficient"),
    "kl-loss-coef": _fact("kl_coefficient", _float, f"{_LOSS}.kl_coefficient"),
    "kl-loss-type": _choice("kl_estimator", _KL, f"{_LOSS}.kl_estimator"),
    "use-unbiased-kl": _switch("kl_unbiased", f"{_LOSS}.kl_unbiased"),
    "eps-clip": _fact("clip_low", _float, f"{_LOSS}.clip_low"),
    "eps-clip-high": _fact("clip_high", _float, f"{_LOSS}.clip_high"),
    "eps-clip-c": _fact("dual_clip", _float, f"{_LOSS}.dual_clip"),
    "value-clip": _by_hand("run.yaml critic.loss.value_clip"),
    "entropy-coef": _fact("entropy", _float, f"{_LOSS}.entropy_coefficient"),
    "normalize-advantages": _switch("whiten", f"{_ADVANTAGE}.whiten"),
    "calculate-per-token-loss": _switch("per_token", f"{_LOSS}.aggregation", "token_mean"),
    "use-rollout-logprobs": _switch("rollout_logprobs", f"{_LOSS}.old_logprobs", "rollout"),
    "use-tis": _switch("tis", f"{_LOSS}.importance"),
    "tis-clip": _fact("tis_high", _float, f"{_LOSS}.importance.high"),
    "tis-clip-low": _fact("tis_low", _float, f"{_LOSS}.importance.low"),
    "custom-tis-function-path": _by_hand("algorithm.loss.importance has mask, clip, reject, veto"),
    "get-mismatch-metrics": _ALWAYS,
    "use-opsm": _switch("opsm", f"{_LOSS}.opsm_delta"),
    "opsm-delta": _fact("opsm_delta", _float, f"{_LOSS}.opsm_delta"),
    "use-opd": _by_hand("run.yaml teachers, docs/algorithms.md"),
    "opd-type": _by_hand("a teacher has a pool of engines, or is a trainer's service"),
    "opd-kl-coef": _by_hand("run.yaml algorithm.advantage.teacher_coefficient"),
    "opd-teacher-load": _by_hand("services.yaml: the teacher's entry, its model"),
    "num-critic-only-steps": _fact("critic_steps", _int, "run: critic.warmup_steps"),
    "disable-compute-advantages-and-returns": _unneeded("supervised training is `sluice sft`"),
    "custom-loss-function-path": _by_hand("algorithm.loss.name: package.module:Name"),
    "custom-config-path": _by_hand(_OWN),
    # optimizer
    "optimizer": Flag("", "adam: AdamW is the optimizer", _optimizer),
    "lr": _key("trainer", "optim.learning_rate", _float),
    "min-lr": _fact("min_lr", _float, "trainer: optim.minimum_ratio"),
    "lr-decay-style": Flag("trainer: optim.schedule", "constant, linear, cosine", _schedule),
    "lr-decay-iters": _fact("decay_steps", _int, "trainer: optim.decay_steps"),
    "lr-warmup-iters": _key("trainer", "optim.warmup_steps", _int),
    "lr-warmup-fraction": _fact("warmup_fraction", _float, "trainer: optim.warmup_steps"),
    "weight-decay": _key("trainer", "optim.weight_decay", _float),
    "adam-beta1": _fact("beta1", _float, "trainer: optim.betas"),
    "adam-beta2": _fact("beta2", _float, "trainer: optim.betas"),
    "adam-eps": _key("trainer", "optim.epsilon", _float),
    "clip-grad": _key("trainer", "optim.max_grad_norm", _float),
    "optimizer-cpu-offload": _absent("distributed_optimizer spreads the state over data ranks"),
    "overlap-cpu-optimizer-d2h-h2d": _absent("see optimizer-cpu-offload"),
    "use-precision-aware-optimizer": _absent("the optimizer's state is float32"),
    "use-distributed-optimizer": _ALWAYS,
    # batching
    "global-batch-size": _fact("global_batch", _int, "run: algorithm.mini_batches"),
    "num-steps-per-rollout": _key("run", "algorithm.mini_batches", _int),
    "micro-batch-size": _unneeded("micro-batches are packed by tokens"),
    "ref-micro-batch-size": _unneeded("micro-batches are packed by tokens"),
    "use-dynamic-batch-size": _ALWAYS,
    "max-tokens-per-gpu": _key("trainer", "max_tokens_per_micro_batch", _int),
    "log-probs-chunk-size": _unneeded("log-probs are fused"),
    "log-probs-max-tokens-per-gpu": _unneeded("log-probs are fused"),
    "balance-data": _ALWAYS,
    "balance-by-flops": _ALWAYS,
    "allgather-cp": Flag(
        "trainer: megatron.cp_layout",
        "contiguous",
        lambda into, _: _set(into.trainer, "megatron.cp_layout", "contiguous"),
    ),
    "recompute-loss-function": _unneeded("log-probs are fused"),
    "enable-mtp-training": _switch(
        "predicts", "trainer: megatron.mtp_loss_scaling_factor", "0.1 unless it is given"
    ),
    "mtp-num-layers": _unneeded("the checkpoint has one, or none"),
    "mtp-loss-scaling-factor": _fact(
        "prediction_scale", _float, "trainer: megatron.mtp_loss_scaling_factor"
    ),
    # evaluation
    "eval-interval": _fact("eval_every", _int, "run: evaluation.every_steps"),
    "eval-prompt-data": Flag(f"{_EVAL}.prompts.file", "", _evaluation_sets),
    "eval-config": _by_hand("evaluation.datasets of run.yaml"),
    "n-samples-per-eval-prompt": _fact("eval_samples", _int, f"{_EVAL}.samples"),
    "eval-max-response-len": _fact("eval_tokens", _int, f"{_EVAL}.sampling.max_new_tokens"),
    "eval-temperature": _fact("eval_temperature", _float, f"{_EVAL}.sampling.temperature"),
    "eval-top-p": _fact("eval_top_p", _float, f"{_EVAL}.sampling.top_p"),
    "eval-top-k": _fact("eval_top_k", _int, f"{_EVAL}.sampling.top_k"),
    "eval-input-key": _by_hand("environment of a data set"),
    "eval-label-key": _by_hand("environment of a data set"),
    "skip-eval-before-train": _absent("the first scores are what the last ones are compared with"),
    # Megatron
    "tensor-model-parallel-size": _key("trainer", "megatron.tensor", _int),
    "pipeline-model-parallel-size": _key("trainer", "megatron.pipeline", _int),
    "context-parallel-size": _key("trainer", "megatron.context", _int),
    "expert-model-parallel-size": _key("trainer", "megatron.expert", _int),
    "expert-tensor-parallel-size": _key("trainer", "megatron.expert_tensor", _int),
    "sequence-parallel": _true("trainer", "megatron.sequence_parallel"),
    "decoder-first-pipeline-num-layers": _key("trainer", "megatron.first_stage_layers", _int),
    "decoder-last-pipeline-num-layers": _key("trainer", "megatron.last_stage_layers", _int),
    "recompute-granularity": Flag("trainer: megatron.recompute", "full, selective", _recompute),
    "recompute-method": Flag("", "not needed: blocks are uniform", _recompute_method),
    "recompute-num-layers": _fact("recompute_layers", _int, "trainer: megatron.recompute_layers"),
    "attention-dropout": Flag("", "not needed: there is no dropout", _nought),
    "hidden-dropout": Flag("", "not needed: there is no dropout", _nought),
    "accumulate-allreduce-grads-in-fp32": _ALWAYS,
    "attention-softmax-in-fp32": _ALWAYS,
    "attention-backend": _unneeded("the layer's own choice (megatron.layer_spec)"),
    "transformer-impl": _by_hand("trainer.config.megatron.layer_spec"),
    "bf16": _ALWAYS,
    "fp8-format": _absent("training is in bfloat16, float16 or float32"),
    "fp8-recipe": _absent("see fp8-format"),
    "deterministic-mode": _by_hand("run.yaml deterministic: docs/recovery.md"),
    "no-check-for-nan-in-loss-and-grad": _unneeded("a step of NaN is skipped, and said"),
    "moe-aux-loss-coeff": Flag("", "not needed: there is no auxiliary loss", _no_auxiliary_loss),
    "moe-token-dispatcher-type": _unneeded("all-to-all"),
    "moe-enable-deepep": _absent("experts exchange tokens all-to-all"),
    # what people look at
    "use-wandb": _by_hand("trackers.wandb of run.yaml: docs/trackers.md"),
    "use-tensorboard": _by_hand("trackers.tensorboard of run.yaml: docs/trackers.md"),
    "save-debug-rollout-data": _unneeded("`sluice samples` has them"),
    "load-debug-rollout-data": _absent("a ledger's groups are trained on as they are"),
    "debug-train-only": _absent("supervised training is `sluice sft`"),
    "debug-rollout-only": _by_hand("`sluice eval` rolls out alone"),
    "log-passrate": _by_hand("evaluation.datasets.<name>.pass_at"),
    "use-fault-tolerance": _ALWAYS,
    "prefill-num-servers": _absent("an engine does both"),
    "sglang-config": _by_hand("rollout entries of services.yaml, one a kind of engine"),
    "sglang-server-concurrency": _unneeded("engine.max_running of each engine"),
    "sglang-mem-fraction-static": Flag("rollout: engine.sglang.server_args.mem_fraction_static"),
}
# of whole families: by the beginning of the name
FAMILIES: dict[str, Flag] = {
    "sglang-router-": _unneeded("the router is ours: docs/routing.md"),
    "sglang-": Flag("rollout: engine.sglang.server_args.<name>"),
    "router-": _unneeded("the router is ours: docs/routing.md"),
    "wandb-": _by_hand("see use-wandb"),
    "tb-": _by_hand("see use-tensorboard"),
    "disable-wandb": _by_hand("see use-wandb"),
    "moe-": _MODEL,
    "rotary-": _MODEL,
    "rollout-health-check-": _ALWAYS,
    "custom-megatron-": _absent("hooks into a step"),
    "mscale": _MODEL,
    "qk-": _MODEL,
}
ARCHITECTURE = frozenset(
    {
        "add-qkv-bias",
        "apply-layernorm-1p",
        "attention-output-gate",
        "disable-bias-linear",
        "enable-experimental",
        "ffn-hidden-size",
        "group-query-attention",
        "hidden-size",
        "kv-channels",
        "kv-lora-rank",
        "make-vocab-size-divisible-by",
        "max-position-embeddings",
        "multi-latent-attention",
        "no-gradient-accumulation-fusion",
        "no-masked-softmax-fusion",
        "no-position-embedding",
        "no-rope-fusion",
        "norm-epsilon",
        "normalization",
        "num-attention-heads",
        "num-experts",
        "num-layers",
        "num-query-groups",
        "position-embedding-type",
        "post-mlp-layernorm",
        "post-self-attn-layernorm",
        "q-lora-rank",
        "seq-length",
        "spec",
        "swiglu",
        "untie-embeddings-and-output-weights",
        "use-gated-attention",
        "use-rope-scaling",
        "use-rotary-position-embeddings",
        "v-head-dim",
        "vocab-size",
    }
)


def find_flag(name: str) -> Flag | None:
    """What a flag becomes; None for one that is not known."""
    if name in FLAGS and FLAGS[name].put is not None:
        return FLAGS[name]
    if name in ARCHITECTURE:
        return _MODEL
    if name in FLAGS and not name.startswith("sglang-mem"):
        return FLAGS[name]
    return next((flag for start, flag in FAMILIES.items() if name.startswith(start)), None)


# --- reading the script

_ASSIGNMENT = re.compile(
    r"^([ \t]*)(?:export[ \t]+)?([A-Za-z_]\w*)="
    r"""("[^"\n]*"|'[^'\n]*'|[^\s#;(][^\s;]*|)[ \t]*(?:\#.*)?$""",
    re.MULTILINE,
)
_ARRAY = re.compile(
    r"^([ \t]*)([A-Za-z_]\w*)(\+?)=\((?![^\n]*\)\s*$)(.*?)^\s*\)", re.MULTILINE | re.DOTALL
)
_ONE_LINE_ARRAY = re.compile(r"^([ \t]*)([A-Za-z_]\w*)(\+?)=\(([^()\n]*)\)\s*$", re.MULTILINE)
_REFERENCE = re.compile(r"\$\{(\w+)(?::?-([^{}]*))?\}|\$(\w+)")
_EXPANSION = re.compile(r"\$\{(\w+)\[@\]\}")
_TRAIN = re.compile(r"\btrain(_async)?\.py\b[\"']?")
_SOURCED = re.compile(r"^[ \t]*(?:source|\.)[ \t]+(\S[^\n]*?)[ \t]*$", re.MULTILINE)
_OUTSIDE = re.compile(r"\d*>.*|&>.*|<.*|&&?|\|\|?|;")  # what follows is no argument
DEPTH = 3  # of files that are put in for one another


def read_script(text: str, environment: Mapping[str, str]) -> list[tuple[str, Values]]:
    """Flags and their values as the training command would get them. Raises ConfigError.

    Arrays are put in where the command names them, and variables that the script sets, gives a
    default, or that `environment` has are replaced; nothing is run. What stands in a branch counts
    as well: arrays of several add up, and a variable of `environment` stays as it is.
    """
    plain = text.replace("\\\n", " ")
    variables = dict(environment)

    def replaced(words: str) -> str:
        for _ in range(4):
            after = _REFERENCE.sub(lambda m: _value(m, variables), words)
            if after == words:
                break
            words = after
        return words

    for indent, name, value in _ASSIGNMENT.findall(plain):
        known = replaced(value.strip("\"'"))
        if "$" not in known and "`" not in known and not (indent and environment.get(name)):
            variables[name] = known
    arrays: dict[str, str] = {}
    for found in sorted(
        (*_ONE_LINE_ARRAY.finditer(text), *_ARRAY.finditer(text)), key=lambda found: found.start()
    ):
        before = arrays.get(found[2], "") if found[1] or found[3] else ""
        arrays[found[2]] = f"{before}\n{found[4]}"
    command = _command(plain)
    if command is None:
        words = [word for array in arrays.values() for word in _words(replaced(array))]
    else:
        words = []
        for word in _words(replaced(command[0])):
            if _OUTSIDE.fullmatch(word):
                break
            if match := _EXPANSION.fullmatch(word):
                words += _words(replaced(arrays.get(match[1], "")))
            else:
                words.append(word)
    if not any(word.startswith("--") for word in words):
        raise ConfigError("import-slime: the script has no command train.py and no arguments")
    flags: list[tuple[str, Values]] = []
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            flags.append((name, [value] if equals else []))
        elif flags:
            flags[-1][1].append(word)
    return flags


def _command(plain: str) -> tuple[str, bool] | None:
    """What stands behind the name of the program, and whether that is train_async.py."""
    for line in plain.splitlines():
        if (found := _TRAIN.search(line)) and not line.lstrip().startswith("#"):
            return line[found.end() :], bool(found[1])
    return None


def _value(match: re.Match[str], variables: Mapping[str, str]) -> str:
    value = variables.get(match[1] or match[3], "")
    if value:
        return value
    return match[0] if match[2] is None else match[2].strip("\"'")


def _words(text: str) -> list[str]:
    """The words of a shell; a substitution such as `$(seq 2)` is one."""
    try:
        cut = shlex.split(text, comments=True)
    except ValueError as error:
        raise ConfigError(f"import-slime: the script is no text of a shell: {error}") from None
    words: list[str] = []
    for word in cut:
        if words and "$(" in words[-1] and words[-1].count("(") > words[-1].count(")"):
            words[-1] += f" {word}"
        else:
            words.append(word)
    return words


def _with_sourced(
    text: str, folder: Path, environment: Mapping[str, str], depth: int = DEPTH
) -> tuple[str, list[str]]:
    """The script with the files that it takes in, and those that are not there, a line each.

    A variable of their names that `environment` has not is taken for the folder of the script.
    """
    left: list[str] = []

    def taken_in(match: re.Match[str]) -> str:
        name = match[1].strip("\"'")
        place = re.sub(r"^\$\(.*\)", str(folder), name)
        place = _REFERENCE.sub(lambda m: environment.get(m[1] or m[3]) or str(folder), place)
        path = folder / place
        if "\0" in place or depth == 0 or not os.path.isfile(path):
            left.append(f"source {name}: is not there; what it says is not carried")
            return ""
        inner, more = _with_sourced(_read(path), path.parent, environment, depth - 1)
        left.extend(more)
        return inner

    return _SOURCED.sub(taken_in, text), left


# --- making the documents


async def import_slime(arguments: Sequence[str]) -> None:
    """Write run.yaml and services.yaml of a script; list what could not be carried.

    Raises ConfigError.
    """
    from sluice.run_commands import leading, plain_lines, take_value

    rest = list(arguments)
    output = Path(take_value(rest, "-o") or ".")
    places, flags = leading(rest)
    if len(places) != 1 or flags:
        raise ConfigError(f"import-slime takes one SCRIPT.sh: {IMPORT_USAGE}")
    script = Path(places[0])
    text, missing = _with_sourced(_read(script), script.parent, os.environ)
    run, services, left = import_script(text, Path("runs") / script.stem, os.environ)
    left = [*missing, *left]
    head = f"# From {plain_lines(script.name)} by `sluice import-slime`; what is left to do:\n"
    head += "".join(f"#   {plain_lines(line)}\n" for line in left)
    documents = {"services.yaml": services, "run.yaml": run}
    write_new(
        output,
        {name: head + yaml.safe_dump(each, sort_keys=False) for name, each in documents.items()},
    )
    told = [*left, f"wrote {output / 'services.yaml'} and {output / 'run.yaml'}"]
    Console().print(plain_lines("\n".join(told)), highlight=False, markup=False, soft_wrap=True)


def _read(script: Path) -> str:
    try:
        with script.open("rb") as file:
            data = file.read(LARGEST_BYTES + 1)
        if len(data) > LARGEST_BYTES:
            raise ValueError("too large")
        return data.decode()
    except OSError as error:
        raise ConfigError(f"import-slime: {str(script)[:200]}: {error.strerror}") from None
    except ValueError:  # a name with NUL, bytes that are no text, too many of them
        raise ConfigError(f"import-slime: {str(script)[:200]!r} is no script") from None


def import_script(
    text: str, run_dir: Path, environment: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """run.yaml, services.yaml, and what could not be carried, a line each. Raises ConfigError.

    What is missing for the files to load, because the script does not say it or a function of its
    own does, is told as well, and stands in the files as a value to be replaced.
    """
    into = _Import()
    command = _command(text.replace("\\\n", " "))
    if command and command[1]:
        into.run["max_staleness"] = 1  # train_async.py samples ahead of one step
    for name, values in read_script(text, environment):
        flag = find_flag(name)
        if flag is None:
            into.left.append(f"--{name}: is unknown")
            continue
        try:
            if flag.put is not None:
                flag.put(into, values)
            elif name.startswith("sglang-") and flag.ours:
                _server_argument(into, name.removeprefix("sglang-"), values)
            elif not flag.why.startswith("not needed"):
                into.left.append(f"--{name}: {flag.why}")
        except NotCarriedError as error:
            into.left.append(f"--{name}: {error}")
    _algorithm(into)
    _sizes(into)
    _optim(into)
    _evaluation(into)
    run, services = _documents(into, run_dir)
    return run, services, list(dict.fromkeys(into.left))


def _plain(text: str) -> Any:
    """A number or a truth where the text is one."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return value if isinstance(value, bool | int | float) else text


def _server_argument(into: _Import, name: str, values: Values) -> None:
    name = name.replace("-", "_")
    known = [_plain(_text(value)) for value in values]
    value = True if not known else known[0] if len(known) == 1 else known
    _set(into.rollout, f"engine.sglang.server_args.{name}", value)


def _algorithm(into: _Import) -> None:
    facts = into.facts
    advantage, loss = facts.get("estimator", ("grpo", "ppo_clip"))
    low, high = facts.get("clip_low", 0.2), facts.get("clip_high")
    spec: dict[str, Any] = {"name": loss}
    spec |= {"clip_low": low} if loss != "cispo" else {}
    spec |= {"clip_high": high} if high is not None else {}
    if loss == "cispo":
        spec.setdefault("clip_high", low)
    if not facts.get("per_token"):
        spec["aggregation"] = "sample_mean"
    if "dual_clip" in facts and loss != "cispo":
        spec["dual_clip"] = facts["dual_clip"]
    if not facts.get("rollout_logprobs"):
        spec["old_logprobs"] = "old"
    if facts.get("kl_loss") and facts.get("kl_coefficient"):
        spec["kl_coefficient"] = facts["kl_coefficient"]
        spec["kl_estimator"] = facts.get("kl_estimator", "k1")
        spec |= {"kl_unbiased": True} if facts.get("kl_unbiased") else {}
    if facts.get("entropy"):
        spec["entropy_coefficient"] = facts["entropy"]
    if facts.get("opsm"):
        spec["opsm_delta"] = facts.get("opsm_delta", 1e-4)
    if facts.get("tis") and facts.get("rollout_logprobs"):
        into.left.append("--use-tis: corrects nothing with --use-rollout-logprobs")
    elif facts.get("tis"):
        high, low = facts.get("tis_high", 2.0), facts.get("tis_low", 0.0)
        importance = {"mode": "clip", "low": low, "high": high} if low else {"high": high}
        spec["importance"] = importance
    given: dict[str, Any] = {"name": advantage}
    if advantage == "grpo" and facts.get("no_std"):
        given["scale_by_std"] = False
    if facts.get("whiten") and not advantage.startswith("reinforce"):  # those always are
        given["whiten"] = True
    if advantage == "gae":
        given |= {name: facts[name] for name in ("gamma", "gae_lambda") if name in facts}
        into.run["critic"] = {}
        if facts.get("critic_steps"):
            into.run["critic"] = {"warmup_steps": facts["critic_steps"]}
        into.left.append(
            "--advantage-estimator ppo: services.yaml has a critic beside the trainer; look at it"
        )
    if advantage == "reinforce_plus_plus" and "gamma" in facts:
        given["gamma"] = facts["gamma"]
    if facts.get("kl_reward"):
        if advantage in ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"):
            given["kl_coefficient"] = facts["kl_reward"]
        else:
            into.left.append(f"--kl-coef: has no effect with {advantage}, in slime either")
    algorithm = into.run.setdefault("algorithm", {})
    algorithm |= {"advantage": given, "loss": spec}


def _optim(into: _Import) -> None:
    """With Megatron's defaults, where they are others than ours."""
    facts, optim = into.facts, into.trainer.setdefault("optim", {})
    optim["betas"] = [facts.get("beta1", 0.9), facts.get("beta2", 0.999)]
    optim.setdefault("weight_decay", 0.01)
    schedule = facts.get("schedule", "linear")
    steps = facts.get("decay_steps")
    if steps is None and "steps" in into.run:
        steps = into.run["steps"] * into.run.get("algorithm", {}).get("mini_batches", 1)
    if "warmup_fraction" in facts and steps:
        optim["warmup_steps"] = round(facts["warmup_fraction"] * steps)
    if schedule == "constant":
        return
    if not steps:
        into.left.append(
            f"--lr-decay-style {schedule}: needs optim.decay_steps, which nothing tells"
        )
        return
    optim |= {"schedule": schedule, "decay_steps": steps}
    if facts.get("min_lr") and optim.get("learning_rate"):
        optim["minimum_ratio"] = min(1.0, facts["min_lr"] / optim["learning_rate"])


def _sizes(into: _Import) -> None:
    """Numbers that follow from several flags."""
    facts, run = into.facts, into.run
    groups, samples = run.get("groups_per_step"), run.get("samples_per_group")
    if "global_batch" in facts and groups and samples:
        parts, rest = divmod(groups * samples, max(1, facts["global_batch"]))
        if rest or not 1 <= parts <= groups:
            into.left.append(
                f"--global-batch-size {facts['global_batch']}: does not divide the "
                f"{groups * samples} samples of a step by whole groups"
            )
        elif parts > 1:
            _set(run, "algorithm.mini_batches", parts)
    if facts.get("over_sampling") and groups:
        factor = facts["over_sampling"] / groups
        if 1 <= factor <= 16:
            run["over_sampling"] = factor
        else:
            into.left.append("--over-sampling-batch-size: over_sampling is within 1..16")
    if "nodes" in facts and "gpus" in facts:
        _set(into.trainer, "ranks.count", facts["nodes"] * facts["gpus"])
        if facts["nodes"] > 1:
            into.left.append("--actor-num-nodes: ranks on several hosts: docs/megatron.md")
    elif "nodes" in facts or "gpus" in facts:
        into.left.append("--actor-num-gpus-per-node: the number of ranks is known to the shell")
    if facts.get("engine_gpus", 1) > 1:
        _set(into.rollout, "engine.sglang.server_args.tp_size", facts["engine_gpus"])
    megatron = into.trainer.setdefault("megatron", {})
    if "recompute_layers" in facts and megatron.get("recompute") == "full":
        megatron["recompute_layers"] = facts["recompute_layers"]
    if facts.get("predicts"):
        megatron["mtp_loss_scaling_factor"] = facts.get("prediction_scale", 0.1)
    if megatron.get("tensor", 1) == 1:
        megatron.pop("sequence_parallel", None)
    if megatron.get("context", 1) == 1:
        megatron.pop("cp_layout", None)
    if megatron.get("pipeline", 1) == 1:
        for name in ("first_stage_layers", "last_stage_layers"):
            megatron.pop(name, None)
    if megatron.get("expert", 1) == 1:
        megatron.pop("expert_tensor", None)


def _evaluation(into: _Import) -> None:
    facts = into.facts
    if "evaluation" not in facts:
        return
    samples = facts.get("eval_samples", 1)
    trained = into.run.get("sampling", {})
    temperature = facts.get("eval_temperature", trained.get("temperature", 1.0))
    sampling: dict[str, Any] = {
        "max_new_tokens": facts.get("eval_tokens", trained.get("max_new_tokens", 1024)),
        "temperature": temperature,
    }
    if (top_p := facts.get("eval_top_p", trained.get("top_p", 1.0))) < 1:
        sampling["top_p"] = top_p
    if (top_k := facts.get("eval_top_k", trained.get("top_k", 0))) > 0:
        sampling["top_k"] = top_k
    if stops := trained.get("stop_token_ids"):
        sampling["stop_token_ids"] = stops
    if samples > 1 and not temperature:
        into.left.append("--n-samples-per-eval-prompt: greedy answers are equal; one is asked")
        samples = 1
    sets = {}
    for name, file in facts["evaluation"].items():
        plain = re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:64]
        sets[plain] = {"prompts": {"file": file, "shuffle": False}, "samples": samples}
        sets[plain]["sampling"] = dict(sampling)
        sets[plain]["groups"] = 1024
    evaluation: dict[str, Any] = {"datasets": sets}
    if "eval_every" in facts:
        evaluation["every_steps"] = facts["eval_every"]
    into.run["evaluation"] = evaluation
    into.left.append("--eval-prompt-data: groups: 1024 bounds the tasks; give their number")


UNKNOWN = "REPLACE-ME"


def _documents(into: _Import, run_dir: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    facts, run = into.facts, into.run
    model = facts.get("model", UNKNOWN)
    if model == UNKNOWN:
        into.left.append("--hf-checkpoint: is missing; put the model directory in its place")
    settings = run.setdefault("environment", {}).setdefault("settings", {})
    settings.setdefault("prompt_key", "input")  # slime's default
    run["environment"]["name"] = "prompts"
    if facts.get("load", "") not in ("", facts.get("save"), model.rstrip("/")):
        into.left.append(
            f"--load {facts['load']}: training begins with the model; `sluice convert` makes a "
            "Hugging Face directory of torch_dist"
        )
    if "reward" in facts:
        settings["reward"] = facts["reward"]
    else:
        into.left.append("--rm-type: no reward of ours is named; the files have exact_match")
    prompts = run.setdefault("prompts", {"file": UNKNOWN})
    if "file" not in prompts:
        prompts["file"] = UNKNOWN
    if prompts["file"] == UNKNOWN:
        into.left.append("--prompt-data: is missing; put the file in its place")
    prompts.setdefault("shuffle", False)
    sampling = run.setdefault("sampling", {})
    if "samples_per_group" not in run:
        into.left.append("--n-samples-per-prompt: is missing; the files have 8, of at least 2")
    if "max_new_tokens" not in sampling:
        sampling["max_new_tokens"] = 1024
        into.left.append("--rollout-max-response-len: is missing; the files have 1024")
    run |= {"run_dir": str(run_dir), "services": f"{run_dir}/services.json"}
    engine = into.rollout.setdefault("engine", {})
    engine["backend"] = "sglang"
    known = max(sampling["max_new_tokens"], facts.get("eval_tokens", 0))
    engine.setdefault("max_model_length", known + facts.get("prompt_length", 2048))
    trainer = {"model": model, "backend": "megatron", **into.trainer}
    entries: dict[str, Any] = {
        "router": {"kind": "router"},
        "trainer": {"kind": "trainer", "config": trainer},
    }
    if "critic" in run:
        critic = {**trainer, "head": "value"}
        entries["critic"] = {"kind": "trainer", "config": critic}
    rollout: dict[str, Any] = {"kind": "rollout", "config": {"tokenizer": model, **into.rollout}}
    trained = facts.get("nodes", 1) * facts.get("gpus", 0) if facts.get("colocate") else 0
    replicas = facts.get("rollout_gpus", trained) // max(1, facts.get("engine_gpus", 1))
    if replicas > 1:
        rollout["replicas"] = replicas
    entries["rollout"] = rollout
    services = {"run_dir": str(run_dir), "services": entries}
    try:
        parse_config(UpConfig, services)
        parse_config(RunConfig, run)
    except ConfigError as error:
        into.left.append(f"the files do not load as they are: {error}")
    return run, services


def flag_table() -> str:
    """The table of docs/from-slime.md."""
    lines = ["| slime | ours, or why not |", "|---|---|"]
    for name, flag in {**FLAGS, **{f"{start}*": each for start, each in FAMILIES.items()}}.items():
        ours = f"`{flag.ours}`" if flag.ours else ""
        why = flag.why[:1] + flag.why[1:]
        lines.append(f"| `--{name}` | {', '.join(filter(None, (ours, why)))} |")
    names = ", ".join(f"`{name}`" for name in sorted(ARCHITECTURE))
    lines.append(f"| {names} | {_MODEL.why} |")
    return "\n".join(lines) + "\n"
