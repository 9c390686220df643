"""What each flag of slime becomes: carried, not needed, or not there, and why."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sluice.slime.script import Values

Put = Callable[["Imported", Values], None]


@dataclass(frozen=True)
class Flag:
    """`ours`: the key it becomes; empty where `why` says what to do, or why there is nothing."""

    ours: str = ""
    why: str = ""
    put: Put | None = None


class NotCarriedError(Exception):
    """A value has no counterpart; the message says what to do."""


@dataclass
class Imported:
    """The two documents as they grow."""

    run: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    rollout: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)  # of several flags together
    left: list[str] = field(default_factory=list)  # what could not be carried, for people

    def document(self, name: str) -> dict[str, Any]:
        return {"run": self.run, "trainer": self.trainer, "rollout": self.rollout}[name]


def set_at(tree: dict[str, Any], path: str, value: Any) -> None:
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


def plain_text(text: str) -> str:
    if "$" in text:
        raise NotCarriedError(f"{text!r} is known to the shell alone")
    return text


def _key(document: str, path: str, read: Callable[[str], Any], why: str = "") -> Flag:
    def put(into: Imported, values: Values) -> None:
        set_at(into.document(document), path, read(_only(values)))

    return Flag(f"{document}: {path}", why, put)


def _true(document: str, path: str) -> Flag:
    def put(into: Imported, _: Values) -> None:
        set_at(into.document(document), path, True)

    return Flag(f"{document}: {path}", "", put)


def _fact(name: str, read: Callable[[str], Any], ours: str, why: str = "") -> Flag:
    def put(into: Imported, values: Values) -> None:
        into.facts[name] = read(_only(values))

    return Flag(ours, why, put)


def _switch(name: str, ours: str, why: str = "") -> Flag:
    def put(into: Imported, values: Values) -> None:
        if values:
            raise NotCarriedError("takes no value")
        into.facts[name] = True

    return Flag(ours, why, put)


def _choice(name: str, known: Mapping[str, Any], ours: str) -> Flag:
    def put(into: Imported, values: Values) -> None:
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


def _evaluation_sets(into: Imported, values: Values) -> None:
    if len(values) % 2 or not values:
        raise NotCarriedError("takes pairs of name and file")
    into.facts["evaluation"] = dict(zip(values[::2], map(_file, values[1::2]), strict=True))


def _recompute(into: Imported, values: Values) -> None:
    value = _only(values)
    if value not in ("full", "selective"):
        raise NotCarriedError(f"{value!r} is neither full nor selective")
    set_at(into.trainer, "megatron.recompute", value)


def _recompute_method(_: Imported, values: Values) -> None:
    if _only(values) != "uniform":
        raise NotCarriedError(f"{values[0]!r}: megatron.recompute_layers counts uniform blocks")


def _only_zero(why: str) -> Flag:
    """What is not needed at 0, and not there otherwise."""

    def put(_: Imported, values: Values) -> None:
        if any(map(_float, values)):
            raise NotCarriedError(f"{', '.join(values)}: {why}")

    return Flag("", f"not needed at 0: {why}", put)


def _untaken(why: str) -> Flag:
    """A switch or a value that is not there, of a family that is not needed."""

    def put(_: Imported, values: Values) -> None:
        raise NotCarriedError(why)

    return Flag("", f"not there: {why}", put)


def _place(name: str) -> Put:
    def put(into: Imported, values: Values) -> None:
        into.facts[name] = _only(values).rstrip("/")

    return put


def _train_backend(_: Imported, values: Values) -> None:
    if _only(values) != "megatron":
        raise NotCarriedError(f"{values[0]!r}: the files have backend: megatron; docs/fsdp.md")


def _file(text: str) -> str:
    if re.search(r"@\[[^\]]*\]$", text):
        raise NotCarriedError(f"{text!r}: rows are taken from a file of their own, not by numbers")
    return plain_text(text)


def _template(into: Imported, values: Values) -> None:
    text = _only(values)
    try:
        options = json.loads(text)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise NotCarriedError(f"{plain_text(text)!r} is no JSON object")
    if options:
        set_at(into.run, "environment.settings.template", options)


def _schedule(into: Imported, values: Values) -> None:
    value = _only(values)
    if value not in ("constant", "linear", "cosine"):
        raise NotCarriedError(f"{value!r}: optim.schedule has constant, linear and cosine")
    into.facts["schedule"] = value


def _filter(into: Imported, values: Values) -> None:
    name = re.split(r"[.:]", _only(values))[-1]
    if not name.startswith("check_reward_nonzero_std"):
        raise NotCarriedError("a function of your own: filters of run.yaml, docs/rollout.md")
    into.run["filters"] = [{"name": "reward_std"}]
    if name.endswith("_with_fallback"):
        raise NotCarriedError("reward_std replaces all groups of one reward, however few are left")


def _stop_tokens(into: Imported, values: Values) -> None:
    set_at(into.run, "sampling.stop_token_ids", [_int(value) for value in values])


def _stops(into: Imported, values: Values) -> None:
    if "" in values:
        raise NotCarriedError("an empty text ends nothing")
    set_at(into.run, "sampling.stop", [plain_text(value) for value in values])


def _top_k(into: Imported, values: Values) -> None:
    set_at(into.run, "sampling.top_k", max(0, _int(_only(values))))


def _optimizer(into: Imported, values: Values) -> None:
    if _only(values) != "adam":
        raise NotCarriedError(f"{values[0]!r}: AdamW is the optimizer")


def _loss_type(into: Imported, values: Values) -> None:
    if _only(values) != "policy_loss":
        raise NotCarriedError(f"{values[0]!r}: supervised training is `sluice sft`, docs/api.md")


REWARDS = {"math": "math", "deepscaler": "math", "dapo": "math", "f1": "f1", "gpqa": "choice"}
ADVANTAGES = {
    "grpo": ("grpo", "ppo_clip"),
    "gspo": ("grpo", "gspo"),
    "cispo": ("grpo", "cispo"),
    "reinforce_plus_plus": ("reinforce_plus_plus", "ppo_clip"),
    "reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", "ppo_clip"),
    "ppo": ("gae", "ppo_clip"),
}
_KL = {"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "low_variance"}
_FP8_RECIPES = {name: name for name in ("delayed", "tensorwise", "blockwise", "mxfp8")}
_EVAL = "run: evaluation.datasets.<name>"
_LOSS, _ADVANTAGE = "run: algorithm.loss", "run: algorithm.advantage"
_MEGATRON = "trainer: megatron"
_MODEL = _unneeded("the model's config.json says it")
_ALWAYS = _unneeded("it is always so")
_STORE = _unneeded("checkpoints and weights are in the store of the run; `--resume` goes on")
_OWN = "functions of your own are named otherwise: docs/rollout.md, Your own functions"

_ALL_TRAINED = "all weights are trained, or adapters (docs/lora.md); vision has frozen parts"

FLAGS: dict[str, Flag] = {
    # cluster
    "actor-num-nodes": _fact("nodes", _int, "trainer: ranks.count", "times the GPUs of a node"),
    "actor-num-gpus-per-node": _fact("gpus", _int, "trainer: ranks.count"),
    "rollout-num-gpus": _fact("rollout_gpus", _int, "services.yaml: rollout.replicas"),
    "rollout-num-gpus-per-engine": _fact(
        "engine_gpus", _int, "rollout: engine.sglang.server_args.tp_size"
    ),
    "num-gpus-per-node": _unneeded("`devices` of a service names those of one host"),
    "colocate": _switch("colocate", "run: placement", "colocated: docs/colocation.md"),
    "offload": _by_hand("see colocate"),
    "offload-train": _by_hand("see colocate"),
    "offload-rollout": _by_hand("see colocate"),
    "no-offload-train": _unneeded("nothing is offloaded"),
    "no-offload-rollout": _unneeded("nothing is offloaded"),
    "train-backend": Flag("", "not needed: the import writes backend: megatron", _train_backend),
    "train-env-vars": _by_hand("services have the variables of the shell of `sluice up`"),
    "release-train": _by_hand("see colocate"),
    "qwen-gdn-backend": _unneeded("the layer's own choice (megatron.layer_spec)"),
    "http-proxy": _unneeded("services reach each other by gRPC"),
    "use-distributed-post": _unneeded("episode workers are processes of their own"),
    "rollout-data-transport": _unneeded("samples are blobs of the store"),
    "distributed-backend": _unneeded("it follows from the device"),
    "distributed-timeout-minutes": _unneeded("every wait has a deadline of its own"),
    # weights
    "update-weight-mode": _by_hand("trainer.config.publish has deltas: docs/weights.md"),
    "update-weight-transport": _by_hand("run.yaml weight_transport: docs/weights.md"),
    "update-weight-buffer-size": _unneeded("buckets have a size of their own"),
    "update-weight-disk-dir": _STORE,
    "update-weight-disk-keep-files": _by_hand("trainer.config.keep_versions, 0 for all"),
    "update-weight-local-checkpoint-dir": _STORE,
    "custom-update-weight-post-write-path": _unneeded("a version is read once it is whole"),
    "update-weight-delta-encoding": _by_hand("trainer.config.publish: docs/weights.md"),
    "update-weight-delta-checksum": _ALWAYS,
    "update-weights-interval": _by_hand("run.yaml max_staleness bounds how old samples may be"),
    "keep-old-actor": _by_hand("algorithm.loss.old_logprobs: rollout is the policy that sampled"),
    "check-weight-update-equal": _ALWAYS,
    # models and checkpoints
    "hf-checkpoint": _fact("model", plain_text, "trainer: model; rollout: tokenizer"),
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
    "ref-ckpt-step": _by_hand("see ref-load"),
    "ref-update-interval": _absent("the reference stays"),
    "start-rollout-id": _STORE,
    "ckpt-step": _by_hand("run.yaml initial_checkpoint"),
    "only-train-params-name-list": _absent(_ALL_TRAINED),
    "freeze-params-name-list": _absent(_ALL_TRAINED),
    "freeze-indexer": _absent(_ALL_TRAINED),
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
    "rollout-stop": Flag("run: sampling.stop", "", _stops),
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
    "fetch-trajectory-retry-times": _by_hand("see rollout-buffer-url"),
    "min-batch-collection-ratio": _by_hand("see rollout-buffer-url"),
    "rollout-task-type": _by_hand("see rollout-buffer-url"),
    "rollout-sample-hook-path": _by_hand(_OWN),
    "custom-rollout-log-function-path": _absent("metrics.jsonl and trackers have what is known"),
    "custom-eval-rollout-log-function-path": _absent("see custom-rollout-log-function-path"),
    "rollout-data-postprocess-path": _absent("a loop of your own may put columns: docs/api.md"),
    "custom-convert-samples-to-train-data-path": _absent("see rollout-data-postprocess-path"),
    "rollout-all-samples-process-path": _absent("filters see a group at a time"),
    "use-rollout-routing-replay": Flag(
        "trainer: megatron.routing_replay",
        "rollout",
        lambda into, _: set_at(into.trainer, "megatron.routing_replay", "rollout"),
    ),
    "use-routing-replay": Flag(
        "trainer: megatron.routing_replay",
        "recorded",
        lambda into, _: set_at(into.trainer, "megatron.routing_replay", "recorded"),
    ),
    # data
    "prompt-data": _key("run", "prompts.file", _file),
    "input-key": _key("run", "environment.settings.prompt_key", plain_text),
    "label-key": _key("run", "environment.settings.answer_key", plain_text),
    "apply-chat-template": _true("run", "environment.settings.chat"),
    "metadata-key": Flag(
        "run: environment.settings.state_keys",
        "",
        lambda into, values: set_at(
            into.run, "environment.settings.state_keys", [plain_text(_only(values))]
        ),
    ),
    "apply-chat-template-kwargs": Flag("run: environment.settings.template", "", _template),
    "data-source-path": _by_hand("prompts.file, or a loop of your own: docs/api.md"),
    "disable-rollout-global-dataset": _by_hand("see data-source-path"),
    "multimodal-keys": _by_hand("environment.settings.images_key: docs/rollout.md"),
    "tool-key": _by_hand("the environment `tools`: docs/rollout.md"),
    "loss-mask-type": _unneeded("answers of the model are trained on, whatever its template"),
    "data-pad-size-multiplier": _unneeded("the planner pads"),
    # reward
    "rm-type": _choice(
        "reward", {name: name for name in REWARDS}, "run: environment.settings.reward"
    ),
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
        "estimator", ADVANTAGES, f"{_ADVANTAGE}.name, {_LOSS.removeprefix('run: ')}.name"
    ),
    "loss-type": Flag("", "policy_loss; supervised training is `sluice sft`", _loss_type),
    "gamma": _fact("gamma", _float, f"{_ADVANTAGE}.gamma"),
    "lambd": _fact("gae_lambda", _float, f"{_ADVANTAGE}.gae_lambda"),
    "kl-coef": _fact("kl_reward", _float, f"{_ADVANTAGE}.kl_coefficient"),
    "use-kl-loss": _switch("kl_loss", f"{_LOSS}.kl_coefficient"),
    "kl-loss-coef": _fact("kl_coefficient", _float, f"{_LOSS}.kl_coefficient"),
    "kl-loss-type": _choice(
        "kl_estimator", _KL, f"{_LOSS}.kl_estimator, algorithm.advantage.kl_estimator"
    ),
    "use-unbiased-kl": _switch("kl_unbiased", f"{_LOSS}.kl_unbiased"),
    "eps-clip": _fact("clip_low", _float, f"{_LOSS}.clip_low"),
    "eps-clip-high": _fact("clip_high", _float, f"{_LOSS}.clip_high"),
    "eps-clip-c": _fact("dual_clip", _float, f"{_LOSS}.dual_clip"),
    "value-clip": _fact("value_clip", _float, "run: critic.loss.value_clip"),
    "entropy-coef": _fact("entropy", _float, f"{_LOSS}.entropy_coefficient"),
    "normalize-advantages": _switch("whiten", f"{_ADVANTAGE}.whiten"),
    "calculate-per-token-loss": _switch("per_token", f"{_LOSS}.aggregation", "token_mean"),
    "use-rollout-logprobs": _switch("rollout_logprobs", f"{_LOSS}.old_logprobs", "rollout"),
    "use-tis": _switch("tis", f"{_LOSS}.importance"),
    "tis-clip": _fact("tis_high", _float, f"{_LOSS}.importance.high"),
    "tis-clip-low": _fact("tis_low", _float, f"{_LOSS}.importance.low"),
    "custom-advantage-function-path": _by_hand("algorithm.advantage.name: package.module:Name"),
    "custom-pg-loss-reducer-function-path": _by_hand(
        "algorithm.loss.aggregation: constant, with constant_length, is Dr.GRPO's"
    ),
    "custom-tis-function-path": _by_hand("algorithm.loss.importance has mask, clip, reject, veto"),
    "get-mismatch-metrics": _ALWAYS,
    "use-opsm": _switch("opsm", f"{_LOSS}.opsm_delta"),
    "opsm-delta": _fact("opsm_delta", _float, f"{_LOSS}.opsm_delta"),
    "use-opd": _by_hand("run.yaml teachers, docs/algorithms.md"),
    "opd-type": _by_hand("a teacher has a pool of engines, or is a trainer's service"),
    "opd-kl-coef": _by_hand("run.yaml algorithm.advantage.teacher_coefficient"),
    "opd-teacher-load": _by_hand("services.yaml: the teacher's entry, its model"),
    "opd-teacher-ckpt-step": _by_hand("see opd-teacher-load"),
    "use-rollout-entropy": _unneeded("the entropy is a metric"),
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
    "use-stateless-adam": _absent("AdamW is the optimizer"),
    "reset-optimizer-states": _absent("the optimizer's state stays from step to step"),
    # batching
    "global-batch-size": _fact("global_batch", _int, "run: algorithm.mini_batches"),
    "num-steps-per-rollout": _key("run", "algorithm.mini_batches", _int),
    "micro-batch-size": _unneeded("micro-batches are packed by tokens"),
    "ref-micro-batch-size": _unneeded("micro-batches are packed by tokens"),
    "use-dynamic-batch-size": _ALWAYS,
    "max-tokens-per-gpu": _key(
        "trainer", "max_tokens_per_micro_batch", _int, "a longer sample is one by itself"
    ),
    "log-probs-chunk-size": _unneeded("log-probs are fused"),
    "log-probs-max-tokens-per-gpu": _unneeded("log-probs are fused"),
    "balance-data": _ALWAYS,
    "balance-by-flops": _ALWAYS,
    "allgather-cp": Flag(
        "trainer: megatron.cp_layout",
        "contiguous",
        lambda into, _: set_at(into.trainer, "megatron.cp_layout", "contiguous"),
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
    "eval-function-path": _by_hand(_OWN),
    "n-samples-per-eval-prompt": _fact("eval_samples", _int, f"{_EVAL}.samples"),
    "eval-max-response-len": _fact("eval_tokens", _int, f"{_EVAL}.sampling.max_new_tokens"),
    "eval-temperature": _fact("eval_temperature", _float, f"{_EVAL}.sampling.temperature"),
    "eval-top-p": _fact("eval_top_p", _float, f"{_EVAL}.sampling.top_p"),
    "eval-top-k": _fact("eval_top_k", _int, f"{_EVAL}.sampling.top_k"),
    "eval-input-key": _by_hand("environment of a data set"),
    "eval-label-key": _by_hand("environment of a data set"),
    "eval-tool-key": _by_hand("environment of a data set"),
    "eval-reward-key": _by_hand("environment of a data set"),
    "eval-max-prompt-len": _by_hand("engine.max_model_length is of all that an engine samples"),
    "eval-max-context-len": _by_hand("see eval-max-prompt-len"),
    "eval-min-new-tokens": _absent("an answer ends where the model ends it"),
    "skip-eval-before-train": _absent("the first scores are what the last ones are compared with"),
    # Megatron
    "tensor-model-parallel-size": _key("trainer", "megatron.tensor", _int),
    "pipeline-model-parallel-size": _key("trainer", "megatron.pipeline", _int),
    "context-parallel-size": _key("trainer", "megatron.context", _int),
    "expert-model-parallel-size": _key("trainer", "megatron.expert", _int),
    "expert-tensor-parallel-size": _key("trainer", "megatron.expert_tensor", _int),
    "sequence-parallel": _true("trainer", "megatron.sequence_parallel"),
    "num-virtual-stages-per-pipeline-rank": _key("trainer", "megatron.virtual_pipeline", _int),
    "num-layers-per-virtual-pipeline-stage": _by_hand(
        "megatron.virtual_pipeline: layers of a stage by this number"
    ),
    "decoder-first-pipeline-num-layers": _key("trainer", "megatron.first_stage_layers", _int),
    "decoder-last-pipeline-num-layers": _key("trainer", "megatron.last_stage_layers", _int),
    "recompute-granularity": Flag("trainer: megatron.recompute", "full, selective", _recompute),
    "recompute-method": Flag("", "not needed: blocks are uniform", _recompute_method),
    "recompute-num-layers": _fact("recompute_layers", _int, "trainer: megatron.recompute_layers"),
    "attention-dropout": _only_zero("there is no dropout"),
    "hidden-dropout": _only_zero("there is no dropout"),
    "accumulate-allreduce-grads-in-fp32": _ALWAYS,
    "attention-softmax-in-fp32": _ALWAYS,
    "attention-backend": _unneeded("the layer's own choice (megatron.layer_spec)"),
    "transformer-impl": _by_hand("trainer.config.megatron.layer_spec"),
    "bf16": _ALWAYS,
    "fp16": _by_hand("trainer.config.megatron.dtype: float16"),
    "fp8-format": _choice("fp8", {name: name for name in ("hybrid", "e4m3")}, f"{_MEGATRON}.fp8"),
    "fp8-recipe": _choice("fp8_recipe", _FP8_RECIPES, f"{_MEGATRON}.fp8_recipe"),
    "deterministic-mode": _by_hand("run.yaml deterministic: docs/recovery.md"),
    "no-check-for-nan-in-loss-and-grad": _unneeded("a step of NaN is skipped, and said"),
    "moe-aux-loss-coeff": _only_zero("there is no auxiliary loss"),
    "moe-z-loss-coeff": _only_zero("there is no auxiliary loss"),
    "moe-router-bias-update-rate": _only_zero("biases of experts stay as they were loaded"),
    "moe-input-jitter-eps": _only_zero("routers see what a layer gives them"),
    "moe-expert-capacity-factor": _untaken("experts take all tokens that are sent to them"),
    "moe-router-force-load-balancing": _untaken("experts are chosen by the router"),
    "moe-token-dispatcher-type": _unneeded("all-to-all"),
    "moe-enable-deepep": _absent("experts exchange tokens all-to-all"),
    # what people look at
    "use-wandb": _by_hand("trackers.wandb of run.yaml: docs/trackers.md"),
    "use-tensorboard": _by_hand("trackers.tensorboard of run.yaml: docs/trackers.md"),
    "save-debug-rollout-data": _unneeded("`sluice samples` has them"),
    "save-debug-train-data": _unneeded("`sluice samples` has them"),
    "dump-details": _unneeded("`sluice samples` has them"),
    "load-debug-rollout-data": _absent("a ledger's groups are trained on as they are"),
    "load-debug-rollout-data-subsample": _absent("see load-debug-rollout-data"),
    "load-forge-rollout-data": _absent("see load-debug-rollout-data"),
    "debug-train-only": _absent("supervised training is `sluice sft`"),
    "debug-rollout-only": _by_hand("`sluice eval` rolls out alone"),
    "log-passrate": _by_hand("evaluation.datasets.<name>.pass_at"),
    "log-multi-turn": _ALWAYS,
    "log-correct-samples": _unneeded("`sluice samples` has them"),
    "log-reward-category": _by_hand("run.yaml environments: each has metrics of its own"),
    "profile-target": _absent("there is no profiler; docs/trace.md has spans of every sample"),
    "record-memory-history": _absent("see profile-target"),
    "use-fault-tolerance": _ALWAYS,
    "prefill-num-servers": _by_hand("rollout.config.engine.sglang.prefill: docs/sglang.md"),
    "sglang-config": _by_hand("rollout entries of services.yaml, one a kind of engine"),
    "sglang-server-concurrency": _unneeded("engine.max_running of each engine"),
    "sglang-disaggregation-transfer-backend": _by_hand(
        "rollout.config.engine.sglang.transfer_backend, with prefill"
    ),
    "sglang-disaggregation-mode": _by_hand("see prefill-num-servers"),
    "sglang-disaggregation-bootstrap-port": _unneeded("a free one is taken"),
    "sglang-encoder-only": _by_hand("rollout.config.engine.sglang.encoders: docs/sglang.md"),
    "sglang-encoder-urls": _by_hand("see sglang-encoder-only"),
    "sglang-language-only": _by_hand("see sglang-encoder-only"),
    "sglang-nnodes": _by_hand("rollout.config.engine.sglang.nnodes: docs/sglang.md"),
    "sglang-node-rank": _by_hand("see sglang-nnodes"),
    "sglang-dist-init-addr": _by_hand("see sglang-nnodes"),
    "sglang-api-key": _by_hand("rollout.config.engine.sglang.api_key"),
    "sglang-host": _by_hand("rollout.config.engine.sglang.host"),
    "sglang-port": _unneeded("a free one is taken"),
    "sglang-model-path": _unneeded("engines are given the trainer's weights"),
    "sglang-weight-version": _unneeded("it follows from the weights"),
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
    "memory-": _absent("see profile-target"),
    "megatron-deepgemm-": _absent("products are torch's, or Transformer Engine's"),
    "ci-": _unneeded("they are of slime's own tests"),
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
