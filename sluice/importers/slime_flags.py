"""What each flag of slime becomes: carried, not needed, or not there, and why."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from sluice.importers.documents import (
    Flag,
    Imported,
    NotCarriedError,
    Put,
    Values,
    absent,
    by_hand,
    choice,
    fact,
    key_of,
    number,
    only,
    only_zero,
    plain_text,
    set_at,
    set_true,
    share,
    switch,
    unneeded,
    untaken,
    whole,
)

MUON = ("muon", "dist_muon")
_ADJUSTMENTS = {"spectral": "match_rms_adamw", "shape_scaling": "original"}
_PRODUCTS = {"low": "bfloat16", "medium": "bfloat16", "high": "float32", "highest": "float32"}


def _evaluation_sets(into: Imported, values: Values) -> None:
    if len(values) % 2 or not values:
        raise NotCarriedError("takes pairs of name and file")
    into.facts["evaluation"] = dict(zip(values[::2], map(_file, values[1::2]), strict=True))


def _recompute(into: Imported, values: Values) -> None:
    value = only(values)
    if value not in ("full", "selective"):
        raise NotCarriedError(f"{value!r} is neither full nor selective")
    set_at(into.trainer, "megatron.recompute", value)


def _replay(into: Imported, _: Values) -> None:
    set_at(into.trainer, "megatron.routing_replay", "rollout")
    set_at(into.rollout, "engine.routed_experts", True)


def _recompute_method(_: Imported, values: Values) -> None:
    if only(values) != "uniform":
        raise NotCarriedError(f"{values[0]!r}: megatron.recompute_layers counts uniform blocks")


def _place(name: str) -> Put:
    def put(into: Imported, values: Values) -> None:
        into.facts[name] = only(values).rstrip("/")

    return put


def _train_backend(_: Imported, values: Values) -> None:
    if only(values) != "megatron":
        raise NotCarriedError(f"{values[0]!r}: the files have backend: megatron; docs/fsdp.md")


def _file(text: str) -> str:
    if re.search(r"@\[[^\]]*\]$", text):
        raise NotCarriedError(f"{text!r}: rows are taken from a file of their own, not by numbers")
    return plain_text(text)


def _template(into: Imported, values: Values) -> None:
    text = only(values)
    try:
        options = json.loads(text)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise NotCarriedError(f"{plain_text(text)!r} is no JSON object")
    if options:
        set_at(into.run, "environment.settings.template", options)


def _schedule(into: Imported, values: Values) -> None:
    value = only(values)
    if value not in ("constant", "linear", "cosine"):
        raise NotCarriedError(f"{value!r}: optim.schedule has constant, linear and cosine")
    into.facts["schedule"] = value


def _filter(into: Imported, values: Values) -> None:
    name = re.split(r"[.:]", only(values))[-1]
    if not name.startswith("check_reward_nonzero_std"):
        raise NotCarriedError("a function of your own: filters of run.yaml, docs/rollout.md")
    into.run["filters"] = [{"name": "reward_std"}]
    if name.endswith("_with_fallback"):
        raise NotCarriedError("reward_std replaces all groups of one reward, however few are left")


def _stop_tokens(into: Imported, values: Values) -> None:
    set_at(into.run, "sampling.stop_token_ids", [whole(value) for value in values])


def _stops(into: Imported, values: Values) -> None:
    if "" in values:
        raise NotCarriedError("an empty text ends nothing")
    set_at(into.run, "sampling.stop", [plain_text(value) for value in values])


def _keep_blobs(into: Imported, values: Values) -> None:
    only(values)
    set_at(into.run, "retention.keep_blobs", True)


def _top_k(into: Imported, values: Values) -> None:
    set_at(into.run, "sampling.top_k", max(0, whole(only(values))))


def _optimizer(into: Imported, values: Values) -> None:
    if (value := only(values)) in MUON:
        into.facts["optimizer"] = value
    elif value != "adam":
        raise NotCarriedError(f"{value!r}: AdamW and Muon are the optimizers")


def _told(name: str, read: Callable[[str], Any]) -> Flag:
    """What is told with --optimizer muon."""
    return fact(f"muon_{name}", read, "", "told with `--optimizer muon`: docs/muon.md")


def _one_of(known: Mapping[str, str]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in known:
            raise NotCarriedError(f"{text!r} is not there; known: {', '.join(known)}")
        return known[text]

    return read


def _no_other(only_one: str) -> Flag:
    def put(_: Imported, values: Values) -> None:
        if (value := only(values)) != only_one:
            raise NotCarriedError(f"{value!r}: {only_one} alone is there")

    return Flag("", f"not needed as {only_one}", put)


def _loss_type(into: Imported, values: Values) -> None:
    if only(values) != "policy_loss":
        raise NotCarriedError(f"{values[0]!r}: supervised training is `sluice sft`, docs/api.md")


# What a part of a Megatron name is called in a Hugging Face checkpoint. Layers of Transformer
# Engine, which slime trains, have the norm before them in their name.
NAMED_PARTS = {
    "embedding": ("*.embed_tokens.*",),
    "experts": ("*.mlp.*expert*",),
    "final_layernorm": ("model.norm.*",),
    "linear_fc2": ("*.down_proj*",),
    "linear_proj": ("*.self_attn.o_proj.*",),
    "linear_qkv": ("*.self_attn.[qkv]_proj.*", "*.input_layernorm.*"),
    "mlp": ("*.mlp.*", "*.post_attention_layernorm.*"),
    "output_layer": ("lm_head.*",),
    "router": ("*.mlp.gate.*",),
    "self_attention": ("*.self_attn.*", "*.input_layernorm.*"),
}
_LAYERS = re.compile(r"(?:decoder\\?\.)?layers\\?\.((?:\d|\[[\d-]+\])+)\\?\.")


def _trainable(setting: str) -> Flag:
    def put(into: Imported, values: Values) -> None:
        patterns: list[str] = []
        for value in map(plain_text, values):
            layers = _LAYERS.fullmatch(value)
            if layers is None and value not in NAMED_PARTS:
                raise NotCarriedError(
                    f"{value!r}: patterns are of Hugging Face names: trainer.config.trainable"
                )
            patterns += [f"*.layers.{layers[1]}.*"] if layers else NAMED_PARTS[value]
            if layers:
                into.facts["layers_named"] = True
        if not patterns:
            raise NotCarriedError("names nothing")
        set_at(into.trainer, f"trainable.{setting}", patterns)

    return Flag(f"trainer: trainable.{setting}", f"{', '.join(NAMED_PARTS)}, layers by number", put)


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
_MODEL = unneeded("the model's config.json says it")
_ALWAYS = unneeded("it is always so")
_STORE = unneeded("checkpoints and weights are in the store of the run; `--resume` goes on")
_OWN = "functions of your own are named otherwise: docs/rollout.md, Your own functions"

FLAGS: dict[str, Flag] = {
    # cluster
    "actor-num-nodes": fact("nodes", whole, "trainer: ranks.count", "times the GPUs of a node"),
    "actor-num-gpus-per-node": fact("gpus", whole, "trainer: ranks.count"),
    "rollout-num-gpus": fact("rollout_gpus", whole, "services.yaml: rollout.replicas"),
    "rollout-num-gpus-per-engine": fact(
        "engine_gpus", whole, "rollout: engine.sglang.server_args.tp_size"
    ),
    "num-gpus-per-node": unneeded("`devices` of a service names those of one host"),
    "colocate": switch("colocate", "run: placement", "colocated: docs/colocation.md"),
    "offload": by_hand("see colocate"),
    "offload-train": by_hand("see colocate"),
    "offload-rollout": by_hand("see colocate"),
    "no-offload-train": unneeded("nothing is offloaded"),
    "no-offload-rollout": unneeded("nothing is offloaded"),
    "train-backend": Flag("", "not needed: the import writes backend: megatron", _train_backend),
    "train-env-vars": by_hand("services have the variables of the shell of `sluice up`"),
    "release-train": by_hand("see colocate"),
    "qwen-gdn-backend": unneeded("the layer's own choice (megatron.layer_spec)"),
    "http-proxy": unneeded("services reach each other by gRPC"),
    "use-distributed-post": unneeded("episode workers are processes of their own"),
    "rollout-data-transport": unneeded("samples are blobs of the store"),
    "distributed-backend": unneeded("it follows from the device"),
    "distributed-timeout-minutes": unneeded("every wait has a deadline of its own"),
    # weights
    "update-weight-mode": by_hand("trainer.config.publish has deltas: docs/weights.md"),
    "update-weight-transport": by_hand("run.yaml weight_transport: docs/weights.md"),
    "update-weight-buffer-size": unneeded("buckets have a size of their own"),
    "update-weight-disk-dir": _STORE,
    "update-weight-disk-keep-files": by_hand("trainer.config.keep_versions, 0 for all"),
    "update-weight-local-checkpoint-dir": _STORE,
    "custom-update-weight-post-write-path": unneeded("a version is read once it is whole"),
    "update-weight-delta-encoding": by_hand("trainer.config.publish: docs/weights.md"),
    "update-weight-delta-checksum": _ALWAYS,
    "update-weights-interval": by_hand("run.yaml max_staleness bounds how old samples may be"),
    "keep-old-actor": by_hand("algorithm.loss.old_logprobs: rollout is the policy that sampled"),
    "check-weight-update-equal": _ALWAYS,
    # models and checkpoints
    "hf-checkpoint": fact(
        "model",
        plain_text,
        "trainer: model; rollout: tokenizer",
        "a quantised one is publish.quantization",
    ),
    "model-name": _MODEL,
    "load": Flag("", _STORE.why, _place("load")),
    "save": Flag("", _STORE.why, _place("save")),
    "critic-load": _STORE,
    "critic-save": _STORE,
    "save-interval": key_of("run", "checkpoint_every", whole),
    "async-save": unneeded("a checkpoint is written beside what follows it"),
    "no-save-optim": absent("checkpoints are whole"),
    "save-hf": unneeded("every weight version is a Hugging Face directory in the store"),
    "ref-load": by_hand(
        "the reference is the model itself; trainer.config.reference_model names another "
        "Hugging Face directory (`sluice convert` makes one of torch_dist)"
    ),
    "ref-ckpt-step": by_hand("see ref-load"),
    "ref-update-interval": fact(
        "reference_every", whole, "run: algorithm.reference_every", "with a KL"
    ),
    "start-rollout-id": _STORE,
    "ckpt-step": by_hand("run.yaml initial_checkpoint"),
    "only-train-params-name-list": _trainable("allow"),
    "freeze-params-name-list": _trainable("deny"),
    "freeze-indexer": unneeded("it is always so"),
    "custom-model-provider-path": by_hand("trainer.config.megatron.model_provider"),
    "megatron-config-path": by_hand("a critic is an entry of services.yaml with its own settings"),
    # rollout
    "num-rollout": key_of("run", "steps", whole),
    "num-epoch": by_hand("run.yaml steps: epochs times rows, by groups_per_step"),
    "rollout-batch-size": key_of("run", "groups_per_step", whole),
    "n-samples-per-prompt": key_of("run", "samples_per_group", whole),
    "rollout-max-response-len": key_of("run", "sampling.max_new_tokens", whole),
    "rollout-max-prompt-len": fact("prompt_length", whole, "rollout: engine.max_model_length"),
    "rollout-max-context-len": key_of("rollout", "engine.max_model_length", whole),
    "rollout-temperature": key_of("run", "sampling.temperature", number),
    "rollout-top-p": key_of("run", "sampling.top_p", number),
    "rollout-top-k": Flag("run: sampling.top_k", "-1 is 0", _top_k),
    "rollout-stop-token-ids": Flag("run: sampling.stop_token_ids", "", _stop_tokens),
    "rollout-stop": Flag("run: sampling.stop", "", _stops),
    "rollout-skip-special-tokens": unneeded("tokens travel as numbers"),
    "rollout-shuffle": set_true("run", "prompts.shuffle"),
    "rollout-seed": key_of("run", "seed", whole),
    "seed": key_of("trainer", "seed", whole),
    "over-sampling-batch-size": fact("over_sampling", whole, "run: over_sampling"),
    "partial-rollout": unneeded("a group goes on while weights change under it (max_staleness)"),
    "mask-offpolicy-in-partial-rollout": absent("algorithm.loss.importance weighs such tokens"),
    "rollout-function-path": by_hand(_OWN),
    "custom-generate-function-path": by_hand(_OWN),
    "rollout-external-engine-addrs": by_hand("rollout.config.engine.sglang.url, one an engine"),
    "rollout-buffer-url": by_hand(_OWN),
    "fetch-trajectory-retry-times": by_hand("see rollout-buffer-url"),
    "min-batch-collection-ratio": by_hand("see rollout-buffer-url"),
    "rollout-task-type": by_hand("see rollout-buffer-url"),
    "rollout-sample-hook-path": by_hand(_OWN),
    "custom-rollout-log-function-path": absent("metrics.jsonl and trackers have what is known"),
    "custom-eval-rollout-log-function-path": absent("see custom-rollout-log-function-path"),
    "rollout-data-postprocess-path": absent("a loop of your own may put columns: docs/api.md"),
    "custom-convert-samples-to-train-data-path": absent("see rollout-data-postprocess-path"),
    "rollout-all-samples-process-path": absent("filters see a group at a time"),
    "use-rollout-routing-replay": Flag(
        "trainer: megatron.routing_replay", "rollout; rollout: engine.routed_experts", _replay
    ),
    "use-routing-replay": Flag(
        "trainer: megatron.routing_replay",
        "recorded",
        lambda into, _: set_at(into.trainer, "megatron.routing_replay", "recorded"),
    ),
    # data
    "prompt-data": key_of("run", "prompts.file", _file),
    "input-key": key_of("run", "environment.settings.prompt_key", plain_text),
    "label-key": key_of("run", "environment.settings.answer_key", plain_text),
    "apply-chat-template": set_true("run", "environment.settings.chat"),
    "metadata-key": Flag(
        "run: environment.settings.state_keys",
        "",
        lambda into, values: set_at(
            into.run, "environment.settings.state_keys", [plain_text(only(values))]
        ),
    ),
    "apply-chat-template-kwargs": Flag("run: environment.settings.template", "", _template),
    "data-source-path": by_hand("prompts.file, or a loop of your own: docs/api.md"),
    "disable-rollout-global-dataset": by_hand("see data-source-path"),
    "multimodal-keys": by_hand("environment.settings.images_key: docs/rollout.md"),
    "tool-key": by_hand("the environment `tools`: docs/rollout.md"),
    "loss-mask-type": unneeded("answers of the model are trained on, whatever its template"),
    "data-pad-size-multiplier": unneeded("the planner pads"),
    # reward
    "rm-type": choice(
        "reward", {name: name for name in REWARDS}, "run: environment.settings.reward"
    ),
    "custom-rm-path": by_hand(_OWN),
    "rm-url": by_hand("the reward `remote`: docs/rollout.md"),
    "group-rm": by_hand(_OWN),
    "reward-key": by_hand(_OWN),
    "custom-reward-post-process-path": by_hand(_OWN),
    "disable-rewards-normalization": by_hand("advantage provided, or a loop of your own"),
    "disable-grpo-std-normalization": switch(
        "no_std", f"{_ADVANTAGE}.scale_by_std", "false, of grpo"
    ),
    "dynamic-sampling-filter-path": Flag("run: filters", "reward_std", _filter),
    "rollout-sample-filter-path": by_hand(_OWN),
    "buffer-filter-path": by_hand(_OWN),
    # algorithm
    "advantage-estimator": choice(
        "estimator", ADVANTAGES, f"{_ADVANTAGE}.name, {_LOSS.removeprefix('run: ')}.name"
    ),
    "loss-type": Flag("", "policy_loss; supervised training is `sluice sft`", _loss_type),
    "gamma": fact("gamma", number, f"{_ADVANTAGE}.gamma"),
    "lambd": fact("gae_lambda", number, f"{_ADVANTAGE}.gae_lambda"),
    "kl-coef": fact("kl_reward", number, f"{_ADVANTAGE}.kl_coefficient"),
    "use-kl-loss": switch("kl_loss", f"{_LOSS}.kl_coefficient"),
    "kl-loss-coef": fact("kl_coefficient", number, f"{_LOSS}.kl_coefficient"),
    "kl-loss-type": choice(
        "kl_estimator", _KL, f"{_LOSS}.kl_estimator, algorithm.advantage.kl_estimator"
    ),
    "use-unbiased-kl": switch("kl_unbiased", f"{_LOSS}.kl_unbiased"),
    "eps-clip": fact("clip_low", number, f"{_LOSS}.clip_low"),
    "eps-clip-high": fact("clip_high", number, f"{_LOSS}.clip_high"),
    "eps-clip-c": fact("dual_clip", number, f"{_LOSS}.dual_clip"),
    "value-clip": fact("value_clip", number, "run: critic.loss.value_clip"),
    "entropy-coef": fact("entropy", number, f"{_LOSS}.entropy_coefficient"),
    "normalize-advantages": switch("whiten", f"{_ADVANTAGE}.whiten"),
    "calculate-per-token-loss": switch("per_token", f"{_LOSS}.aggregation", "token_mean"),
    "use-rollout-logprobs": switch("rollout_logprobs", f"{_LOSS}.old_logprobs", "rollout"),
    "use-tis": switch("tis", f"{_LOSS}.importance"),
    "tis-clip": fact("tis_high", number, f"{_LOSS}.importance.high"),
    "tis-clip-low": fact("tis_low", number, f"{_LOSS}.importance.low"),
    "custom-advantage-function-path": by_hand("algorithm.advantage.name: package.module:Name"),
    "custom-pg-loss-reducer-function-path": by_hand(
        "algorithm.loss.aggregation: constant, with constant_length, is Dr.GRPO's"
    ),
    "custom-tis-function-path": by_hand("algorithm.loss.importance has mask, clip, reject, veto"),
    "get-mismatch-metrics": _ALWAYS,
    "use-opsm": switch("opsm", f"{_LOSS}.opsm_delta"),
    "opsm-delta": fact("opsm_delta", number, f"{_LOSS}.opsm_delta"),
    "use-opd": by_hand("run.yaml teachers, docs/algorithms.md"),
    "opd-type": by_hand("a teacher has a pool of engines, or is a trainer's service"),
    "opd-kl-coef": by_hand("run.yaml algorithm.advantage.teacher_coefficient"),
    "opd-teacher-load": by_hand("services.yaml: the teacher's entry, its model"),
    "opd-teacher-ckpt-step": by_hand("see opd-teacher-load"),
    "use-rollout-entropy": unneeded("the entropy is a metric"),
    "num-critic-only-steps": fact("critic_steps", whole, "run: critic.warmup_steps"),
    "disable-compute-advantages-and-returns": unneeded("supervised training is `sluice sft`"),
    "custom-loss-function-path": by_hand("algorithm.loss.name: package.module:Name"),
    "custom-config-path": by_hand(_OWN),
    # optimizer
    "optimizer": Flag(
        "",
        "adam: AdamW is the optimizer; muon: what to set with `backend: fsdp` is told",
        _optimizer,
    ),
    "muon-momentum": _told("momentum", number),
    "muon-use-nesterov": switch("muon_nesterov", "", "told with `--optimizer muon`: docs/muon.md"),
    "muon-nesterov": switch("muon_nesterov", "", "told with `--optimizer muon`: docs/muon.md"),
    "muon-num-ns-steps": _told("newton_schulz_steps", whole),
    "muon-scale-mode": _told("adjustment", _one_of(_ADJUSTMENTS)),
    "muon-extra-scale-factor": _told("factor", number),
    "muon-fp32-matmul-prec": _told("newton_schulz_dtype", _one_of(_PRODUCTS)),
    "muon-coefficient-type": _no_other("quintic"),
    "muon-scalar-optimizer": _no_other("adam"),
    "muon-tp-mode": unneeded("matrices are whole while they are made orthogonal"),
    "muon-no-split-qkv": unneeded("a matrix is what the Hugging Face checkpoint has a tensor of"),
    "lr": key_of("trainer", "optim.learning_rate", number),
    "min-lr": fact("min_lr", number, "trainer: optim.minimum_ratio"),
    "lr-decay-style": Flag("trainer: optim.schedule", "constant, linear, cosine", _schedule),
    "lr-decay-iters": fact("decay_steps", whole, "trainer: optim.decay_steps"),
    "lr-warmup-iters": key_of("trainer", "optim.warmup_steps", whole),
    "lr-warmup-fraction": fact("warmup_fraction", number, "trainer: optim.warmup_steps"),
    "weight-decay": key_of("trainer", "optim.weight_decay", number),
    "adam-beta1": fact("beta1", number, "trainer: optim.betas"),
    "adam-beta2": fact("beta2", number, "trainer: optim.betas"),
    "adam-eps": key_of("trainer", "optim.epsilon", number),
    "clip-grad": key_of("trainer", "optim.max_grad_norm", number),
    "optimizer-cpu-offload": switch(
        "offloads", "trainer: megatron.optimizer_offload", "steps stay the device's"
    ),
    "optimizer-offload-fraction": fact(
        "offload_fraction", share, "trainer: megatron.optimizer_offload"
    ),
    "overlap-cpu-optimizer-d2h-h2d": unneeded("copies run beside steps"),
    "use-torch-optimizer-for-cpu-offload": unneeded("steps stay the device's"),
    "no-pin-cpu-grads": unneeded("gradients stay on the device"),
    "no-pin-cpu-params": absent("host memory of optimizer_offload is pinned"),
    "use-precision-aware-optimizer": unneeded(
        "masters and moments are float32, and optimizer_offload takes masters along"
    ),
    "main-grads-dtype": absent("gradients are summed in float32"),
    "main-params-dtype": absent("masters are float32"),
    "exp-avg-dtype": absent("moments are float32"),
    "exp-avg-sq-dtype": absent("moments are float32"),
    "use-distributed-optimizer": _ALWAYS,
    "use-stateless-adam": absent("AdamW is the optimizer"),
    "reset-optimizer-states": absent("the optimizer's state stays from step to step"),
    # batching
    "global-batch-size": fact("global_batch", whole, "run: algorithm.mini_batches"),
    "num-steps-per-rollout": key_of("run", "algorithm.mini_batches", whole),
    "micro-batch-size": unneeded("micro-batches are packed by tokens"),
    "ref-micro-batch-size": unneeded("micro-batches are packed by tokens"),
    "use-dynamic-batch-size": _ALWAYS,
    "max-tokens-per-gpu": key_of(
        "trainer", "max_tokens_per_micro_batch", whole, "a longer sample is one by itself"
    ),
    "log-probs-chunk-size": unneeded("log-probs are fused"),
    "log-probs-max-tokens-per-gpu": unneeded("log-probs are fused"),
    "balance-data": _ALWAYS,
    "balance-by-flops": _ALWAYS,
    "allgather-cp": Flag(
        "trainer: megatron.cp_layout",
        "contiguous",
        lambda into, _: set_at(into.trainer, "megatron.cp_layout", "contiguous"),
    ),
    "recompute-loss-function": unneeded("log-probs are fused"),
    "enable-mtp-training": switch(
        "predicts", "trainer: megatron.mtp_loss_scaling_factor", "0.1 unless it is given"
    ),
    "mtp-num-layers": unneeded("the checkpoint has one, or none"),
    "mtp-loss-scaling-factor": fact(
        "prediction_scale", number, "trainer: megatron.mtp_loss_scaling_factor"
    ),
    # evaluation
    "eval-interval": fact("eval_every", whole, "run: evaluation.every_steps"),
    "eval-prompt-data": Flag(f"{_EVAL}.prompts.file", "", _evaluation_sets),
    "eval-config": by_hand("evaluation.datasets of run.yaml"),
    "eval-function-path": by_hand(_OWN),
    "n-samples-per-eval-prompt": fact("eval_samples", whole, f"{_EVAL}.samples"),
    "eval-max-response-len": fact("eval_tokens", whole, f"{_EVAL}.sampling.max_new_tokens"),
    "eval-temperature": fact("eval_temperature", number, f"{_EVAL}.sampling.temperature"),
    "eval-top-p": fact("eval_top_p", number, f"{_EVAL}.sampling.top_p"),
    "eval-top-k": fact("eval_top_k", whole, f"{_EVAL}.sampling.top_k"),
    "eval-input-key": by_hand("environment of a data set"),
    "eval-label-key": by_hand("environment of a data set"),
    "eval-tool-key": by_hand("environment of a data set"),
    "eval-reward-key": by_hand("environment of a data set"),
    "eval-max-prompt-len": by_hand("engine.max_model_length is of all that an engine samples"),
    "eval-max-context-len": by_hand("see eval-max-prompt-len"),
    "eval-min-new-tokens": by_hand(
        "evaluation.datasets.<name>.sampling.min_new_tokens, where engines are of the reference"
    ),
    "skip-eval-before-train": switch("evaluated_late", "run: evaluation.before_training"),
    # Megatron
    "tensor-model-parallel-size": key_of("trainer", "megatron.tensor", whole),
    "pipeline-model-parallel-size": key_of("trainer", "megatron.pipeline", whole),
    "context-parallel-size": key_of("trainer", "megatron.context", whole),
    "expert-model-parallel-size": key_of("trainer", "megatron.expert", whole),
    "expert-tensor-parallel-size": key_of("trainer", "megatron.expert_tensor", whole),
    "sequence-parallel": set_true("trainer", "megatron.sequence_parallel"),
    "num-virtual-stages-per-pipeline-rank": key_of("trainer", "megatron.virtual_pipeline", whole),
    "num-layers-per-virtual-pipeline-stage": by_hand(
        "megatron.virtual_pipeline: layers of a stage by this number"
    ),
    "decoder-first-pipeline-num-layers": key_of("trainer", "megatron.first_stage_layers", whole),
    "decoder-last-pipeline-num-layers": key_of("trainer", "megatron.last_stage_layers", whole),
    "recompute-granularity": Flag("trainer: megatron.recompute", "full, selective", _recompute),
    "recompute-method": Flag("", "not needed: blocks are uniform", _recompute_method),
    "recompute-num-layers": fact("recompute_layers", whole, "trainer: megatron.recompute_layers"),
    "attention-dropout": only_zero("there is no dropout"),
    "hidden-dropout": only_zero("there is no dropout"),
    "accumulate-allreduce-grads-in-fp32": _ALWAYS,
    "attention-softmax-in-fp32": _ALWAYS,
    "attention-backend": unneeded("the layer's own choice (megatron.layer_spec)"),
    "transformer-impl": by_hand("trainer.config.megatron.layer_spec"),
    "bf16": _ALWAYS,
    "fp16": by_hand("trainer.config.megatron.dtype: float16"),
    "fp8-format": choice("fp8", {name: name for name in ("hybrid", "e4m3")}, f"{_MEGATRON}.fp8"),
    "fp8-recipe": choice("fp8_recipe", _FP8_RECIPES, f"{_MEGATRON}.fp8_recipe"),
    "deterministic-mode": by_hand("run.yaml deterministic: docs/recovery.md"),
    "no-check-for-nan-in-loss-and-grad": unneeded("a step of NaN is skipped, and said"),
    "moe-router-load-balancing-type": choice(
        "balancing",
        {name: name for name in ("aux_loss", "global_aux_loss", "seq_aux_loss", "none")},
        "trainer: experts.aux_loss_coefficient",
    ),
    "moe-aux-loss-coeff": fact(
        "aux_loss",
        number,
        "trainer: experts.aux_loss_coefficient",
        "of all tokens of a call at once, unless the one above is none",
    ),
    "moe-z-loss-coeff": fact("z_loss", number, "trainer: experts.z_loss_coefficient"),
    "moe-router-enable-expert-bias": switch("biased", "trainer: experts.bias_update_rate", "1e-3"),
    "moe-router-bias-update-rate": fact(
        "bias_update_rate", number, "trainer: experts.bias_update_rate", "with the one above"
    ),
    "moe-input-jitter-eps": only_zero("routers see what a layer gives them"),
    "moe-expert-capacity-factor": untaken("experts take all tokens that are sent to them"),
    "moe-router-force-load-balancing": untaken("experts are chosen by the router"),
    "moe-token-dispatcher-type": unneeded("all-to-all"),
    "moe-enable-deepep": absent("experts exchange tokens all-to-all"),
    # what people look at
    "use-wandb": by_hand("trackers.wandb of run.yaml: docs/trackers.md"),
    "use-tensorboard": by_hand("trackers.tensorboard of run.yaml: docs/trackers.md"),
    "save-debug-rollout-data": Flag("run: retention.keep_blobs", "true", _keep_blobs),
    "save-debug-train-data": unneeded("`sluice samples` has them"),
    "dump-details": unneeded("`sluice samples` has them"),
    "load-debug-rollout-data": by_hand("run.yaml replay: groups of a run of ours: docs/replay.md"),
    "load-debug-rollout-data-subsample": absent("a replay takes whole steps"),
    "load-forge-rollout-data": absent("see load-debug-rollout-data"),
    "debug-train-only": by_hand("see load-debug-rollout-data"),
    "debug-rollout-only": by_hand("`sluice eval` rolls out alone"),
    "log-passrate": by_hand("evaluation.datasets.<name>.pass_at"),
    "log-multi-turn": _ALWAYS,
    "log-correct-samples": unneeded("`sluice samples` has them"),
    "log-reward-category": by_hand("run.yaml environments: each has metrics of its own"),
    "profile-target": by_hand("`sluice profile RUN_DIR` while it trains: docs/trace.md"),
    "record-memory-history": by_hand("`sluice profile RUN_DIR --memory`"),
    "use-fault-tolerance": _ALWAYS,
    "prefill-num-servers": by_hand("rollout.config.engine.sglang.prefill: docs/sglang.md"),
    "sglang-config": by_hand("rollout entries of services.yaml, one a kind of engine"),
    "sglang-server-concurrency": unneeded("engine.max_running of each engine"),
    "sglang-disaggregation-transfer-backend": by_hand(
        "rollout.config.engine.sglang.transfer_backend, with prefill"
    ),
    "sglang-disaggregation-mode": by_hand("see prefill-num-servers"),
    "sglang-disaggregation-bootstrap-port": unneeded("a free one is taken"),
    "sglang-encoder-only": by_hand("rollout.config.engine.sglang.encoders: docs/sglang.md"),
    "sglang-encoder-urls": by_hand("see sglang-encoder-only"),
    "sglang-language-only": by_hand("see sglang-encoder-only"),
    "sglang-nnodes": by_hand("rollout.config.engine.sglang.nnodes: docs/sglang.md"),
    "sglang-node-rank": by_hand("see sglang-nnodes"),
    "sglang-dist-init-addr": by_hand("see sglang-nnodes"),
    "sglang-api-key": by_hand("rollout.config.engine.sglang.api_key"),
    "sglang-host": by_hand("rollout.config.engine.sglang.host"),
    "sglang-port": unneeded("a free one is taken"),
    "sglang-model-path": unneeded("engines are given the trainer's weights"),
    "sglang-weight-version": unneeded("it follows from the weights"),
    "sglang-mem-fraction-static": Flag("rollout: engine.sglang.server_args.mem_fraction_static"),
}
# of whole families: by the beginning of the name
FAMILIES: dict[str, Flag] = {
    "sglang-router-": unneeded("the router is ours: docs/routing.md"),
    "sglang-": Flag("rollout: engine.sglang.server_args.<name>"),
    "router-": unneeded("the router is ours: docs/routing.md"),
    "wandb-": by_hand("see use-wandb"),
    "tb-": by_hand("see use-tensorboard"),
    "disable-wandb": by_hand("see use-wandb"),
    "moe-": _MODEL,
    "rotary-": _MODEL,
    "rollout-health-check-": _ALWAYS,
    "memory-": by_hand("see record-memory-history"),
    "megatron-deepgemm-": absent("products are torch's, or Transformer Engine's"),
    "ci-": unneeded("they are of slime's own tests"),
    "custom-megatron-": absent("hooks into a step"),
    "mscale": _MODEL,
    "qk-": _MODEL,
}
ARCHITECTURE = frozenset(
    {
        "activation-func-clamp-value",
        "add-qkv-bias",
        "apply-layernorm-1p",
        "attention-output-gate",
        "disable-bias-linear",
        "enable-experimental",
        "ffn-hidden-size",
        "glu-linear-offset",
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
        "quick-geglu",
        "seq-length",
        "softmax-type",
        "spec",
        "swiglu",
        "untie-embeddings-and-output-weights",
        "use-gated-attention",
        "use-rope-scaling",
        "use-rotary-position-embeddings",
        "v-head-dim",
        "vocab-size",
        "window-attn-skip-freq",
        "window-size",
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
