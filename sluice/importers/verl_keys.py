"""What each key of verl becomes: carried, not needed, or not there, and why."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

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
    plain_value,
    read_yaml,
    set_at,
    share,
    unneeded,
    whole,
)

ADVANTAGES = {
    "gae": "gae",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "opo": "opo",
    "gpg": "gpg",
}
LOSSES = {
    "vanilla": "ppo_clip",
    "gspo": "gspo",
    "cispo": "cispo",
    "geo_mean": "gmpo",
    "sapo": "sapo",
    "gpg": "gpg",
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
}
AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "constant",
    "seq-mean-token-mean": "sample_mean",
    "seq-mean-token-sum-norm": "norm",
}
KL_FORMS = {
    "kl": "k1",
    "k1": "k1",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "low_variance",
    "k3": "low_variance",
}
LOSS_KL_FORMS = {
    **KL_FORMS,
    **{f"{name}+": "k2" for name in KL_FORMS},  # those have the gradient of k2
}
STRATEGIES = {"fsdp": "fsdp", "fsdp2": "fsdp", "veomni": "fsdp", "megatron": "megatron"}
ENGINES = {"dp": "fsdp", "veomni": "fsdp", "megatron": "megatron"}
_GENERIC = {"", "train", "test", "val", "validation"}
SCHEDULES = {name: name for name in ("constant", "linear", "cosine")}


def truth(text: str) -> bool:
    """Raises NotCarriedError for what is neither true nor false."""
    value = plain_value(text)
    if not isinstance(value, bool):
        raise NotCarriedError(f"{plain_text(text)!r} is neither true nor false")
    return value


def listed(text: str) -> list[str]:
    """One text, or the texts of a list."""
    value = read_yaml(plain_text(text))
    found = value if isinstance(value, list) else [text]
    if not found or not all(isinstance(each, str) for each in found):
        raise NotCarriedError(f"{text!r} is neither a text nor a list of texts")
    return found


def _files(name: str) -> Put:
    def put(into: Imported, values: Values) -> None:
        files = listed(only(values))
        into.facts[name] = {_name_of(files, index): file for index, file in enumerate(files)}

    return put


def _name_of(files: Sequence[str], index: int) -> str:
    """Of one of several files: its own, or that of its folder where it says nothing."""
    paths = [PurePosixPath(file) for file in files]
    plain = re.compile(r"[^A-Za-z0-9_.-]")
    for name in (lambda path: path.stem, lambda path: path.parent.name):
        names = [plain.sub("_", name(path))[:64].strip(".") for path in paths]
        if len(set(names)) == len(names) and not _GENERIC & set(names):
            return names[index]
    return f"set_{index}"


def _top_k(name: str) -> Put:
    def put(into: Imported, values: Values) -> None:
        into.facts[name] = max(0, whole(only(values)))

    return put


def _template(into: Imported, name: str, values: Values) -> None:
    settings = into.run.setdefault("environment", {}).setdefault("settings", {})
    settings.setdefault("template", {})[name] = plain_value(plain_text(only(values)))


def _server_argument(into: Imported, name: str, values: Values) -> None:
    value = plain_value(plain_text(only(values)))
    set_at(into.rollout, f"engine.sglang.server_args.{name.replace('-', '_')}", value)


def eager(into: Imported, values: Values) -> None:
    if truth(only(values)):
        set_at(into.rollout, "engine.sglang.server_args.disable_cuda_graph", True)


def published_quantization(into: Imported, values: Values) -> None:
    if (value := only(values)) != "fp8":
        raise NotCarriedError(f"{value!r}: trainer.config.publish.quantization: docs/weights.md")
    set_at(into.trainer, "publish.quantization", value)


def _targets(into: Imported, values: Values) -> None:
    names = [name for text in listed(only(values)) for name in text.split(",") if name]
    if names != ["all-linear"]:
        into.facts["targets"] = names


def _filter(into: Imported, values: Values) -> None:
    if truth(only(values)):
        into.run["filters"] = [{"name": "reward_std"}]


def _resume(into: Imported, values: Values) -> None:
    if only(values) not in ("disable", "auto"):
        raise NotCarriedError("`sluice train run.yaml --resume` goes on with its run directory")


def _replay(into: Imported, values: Values) -> None:
    known = {"disabled": "off", "R2": "recorded", "R3": "rollout"}
    mode = only(values)
    if mode not in known:
        raise NotCarriedError(f"{mode!r} is not there; known: {', '.join(known)}")
    if mode != "disabled":
        into.facts["routing_replay"] = known[mode]
    if mode == "R3":
        set_at(into.rollout, "engine.routed_experts", True)


def _recorded_experts(into: Imported, values: Values) -> None:
    if truth(only(values)):
        set_at(into.rollout, "engine.routed_experts", True)


def _recompute(into: Imported, values: Values) -> None:
    value = only(values)
    if value not in ("full", "selective"):
        raise NotCarriedError(f"{value!r} is neither full nor selective")
    set_at(into.trainer, "megatron.recompute", value)


def _reward_manager(into: Imported, values: Values) -> None:
    name = only(values)
    into.facts["reward_manager"] = name
    if name not in ("naive", "dapo", "batch", "prime"):
        raise NotCarriedError(f"{plain_text(name)!r}: {_OWN}")


def _positive(text: str) -> int:
    """0 where a negative number, which is never, stands."""
    return max(0, whole(text))


def _precision(ours: str, known: Mapping[str, str]) -> Flag:
    """Of products; `known` are ours by verl's names. Put at `trainer: {ours}`."""

    def put(into: Imported, values: Values) -> None:
        value = only(values)
        if value not in known:
            raise NotCarriedError(f"{value!r} is not there; known: {', '.join(known)}")
        set_at(into.trainer, ours, known[value])

    return Flag(f"trainer: {ours}", ", ".join(known), put)


def _only_of(known: Sequence[str], why: str) -> Flag:
    """What is not needed with one of these values, and not there otherwise."""

    def put(_: Imported, values: Values) -> None:
        if (value := only(values)) not in known:
            raise NotCarriedError(f"{plain_text(value)}: {why}")

    return Flag("", f"not needed as {', '.join(known)}: {why}", put)


def _optimizer(_: Imported, values: Values) -> None:
    if (value := only(values)).lower() in {"muon", "dist_muon"}:
        raise NotCarriedError(f"{value!r}: by hand, optim.kind of backend fsdp: docs/muon.md")
    if value.lower() not in {"adam", "adamw"}:
        raise NotCarriedError(f"{value!r}: AdamW and Muon are the optimizers")


def _steps_before(text: str) -> int:
    """verl's counts of steps begin at 1, and its actor is trained in the step that is named."""
    return max(0, whole(text) - 1)


def _threshold(text: str) -> float:
    value = number(text)
    if not 0 < value < math.inf:
        raise NotCarriedError(f"{text!r} is no bound")
    return value


_ALWAYS = unneeded("it is always so")
_MODEL = unneeded("the model's config.json says it")
_PACKED = unneeded("micro-batches are packed by tokens")
_REPLAY = Flag("trainer: fsdp.routing_replay, megatron.routing_replay", "by its backend", _replay)
_KEPT = absent("activations are kept, or made anew")
_FUSED = unneeded("log-probs are fused")
_PROFILER = by_hand("`sluice profile RUN_DIR` while it trains: docs/trace.md")
_OWN = "functions of your own are named otherwise: docs/rollout.md, Your own functions"
_TURNS = by_hand("environment: tools of run.yaml, or one of your own: docs/rollout.md")
_REWARD_MODEL = by_hand("a service of its own, and reward: reward_model: docs/rollout.md")
_COUNTED = unneeded("trainer.total_training_steps stands in its place, in verl too")
_FLOATS = _only_of(("fp32", "float32"), "weights, gradients and moments are float32")
_OPTIMIZER = Flag("", "not needed as adam, AdamW; muon by hand: docs/muon.md", _optimizer)
_BFLOAT = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"}
_MEGATRON = by_hand("trainer.config.megatron, or config.json of the model directory")
_ALIKE = "a critic's products have the precision of the trainer's"
_CRITIC_STEPS = by_hand("a critic goes by the mini-batches and epochs of the run")
_BATCHES = unneeded("the ranks of the trainer go by the same plan for it")
_SLEEP = unneeded("with placement: colocated who waits has given its memory away")
_LOGGED = unneeded("`sluice samples` has them")
_STORE = unneeded("checkpoints and weights are in the store of the run")
_ACTOR, _ROLLOUT, _LOSS = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm.loss"
_OVERRIDE = f"{_ACTOR}.optim.override_optimizer_config"
_TRANSFORMER = f"{_ACTOR}.megatron.override_transformer_config"

KEYS: dict[str, Flag] = {
    # data
    "data.train_files": Flag(
        "run: prompts.file", "of several files each is one of `environments`", _files("trained")
    ),
    "data.val_files": Flag("run: evaluation.datasets.<name>.prompts.file", "", _files("evaluated")),
    "data.prompt_key": key_of("run", "environment.settings.prompt_key", plain_text),
    "data.image_key": key_of("run", "environment.settings.images_key", plain_text),
    "data.train_batch_size": fact("groups", whole, "run: groups_per_step"),
    "data.gen_batch_size": fact(
        "generated", whole, "run: groups_per_step", "with filter_groups over_sampling"
    ),
    "data.max_prompt_length": fact("prompt_length", whole, "rollout: engine.max_model_length"),
    "data.max_response_length": fact("response_length", whole, "run: sampling.max_new_tokens"),
    "data.shuffle": fact("shuffle", truth, "run: prompts.shuffle"),
    "data.seed": key_of("run", "seed", whole),
    "data.filter_overlong_prompts": fact(
        "filters_prompts", truth, "", "by hand: leave rows above max_prompt_length out of the file"
    ),
    "data.filter_overlong_prompts_workers": unneeded("rows are looked at when they are asked for"),
    "data.truncation": fact("truncation", str, "", "not there but as error: no prompt is cut"),
    "data.return_raw_chat": unneeded("rows are chats as they are"),
    "data.return_raw_input_ids": unneeded("rows are chats as they are"),
    "data.return_full_prompt": _LOGGED,
    "data.reward_fn_key": by_hand("environments of run.yaml, each with its where and its reward"),
    "data.val_batch_size": unneeded("evaluation.max_running_groups bounds what runs"),
    "data.train_max_samples": by_hand("a file of so many rows"),
    "data.val_max_samples": by_hand("evaluation.datasets.<name>.groups"),
    "data.trust_remote_code": absent("code of a model directory is never run"),
    "data.dataloader_num_workers": unneeded("rows are read as they are asked for"),
    "data.video_key": absent("pictures are seen, films are not: docs/vision.md"),
    "data.tokenizer": by_hand("rollout.config.tokenizer"),
    "data.tool_config_path": _TURNS,
    # the model
    "actor_rollout_ref.model.path": fact("model", plain_text, "trainer: model; rollout: tokenizer"),
    "actor_rollout_ref.model.tokenizer_path": key_of("rollout", "tokenizer", plain_text),
    "actor_rollout_ref.model.enable_gradient_checkpointing": fact(
        "checkpointing", truth, "trainer: fsdp.activation_checkpointing"
    ),
    "actor_rollout_ref.model.lora_rank": fact("lora_rank", whole, "trainer: lora.rank"),
    "actor_rollout_ref.model.lora.rank": fact("lora_rank", whole, "trainer: lora.rank"),
    "actor_rollout_ref.model.lora_alpha": fact("lora_alpha", number, "trainer: lora.alpha"),
    "actor_rollout_ref.model.lora.alpha": fact("lora_alpha", number, "trainer: lora.alpha"),
    "actor_rollout_ref.model.target_modules": Flag("trainer: lora.targets", "", _targets),
    "actor_rollout_ref.model.lora.target_modules": by_hand("trainer.config.lora.targets"),
    "actor_rollout_ref.model.lora_adapter_path": fact(
        "lora_start", plain_text, "trainer: lora.start"
    ),
    "actor_rollout_ref.model.exclude_modules": by_hand("trainer.config.lora.targets"),
    "actor_rollout_ref.model.trust_remote_code": absent("code of a model directory is never run"),
    "actor_rollout_ref.model.external_lib": by_hand("trainer.config.user_modules"),
    "actor_rollout_ref.model.custom_chat_template": by_hand("the tokenizer's own template"),
    "actor_rollout_ref.model.use_remove_padding": _ALWAYS,
    "actor_rollout_ref.model.use_fused_kernels": _FUSED,
    "actor_rollout_ref.model.use_liger": _FUSED,
    "actor_rollout_ref.model.use_shm": unneeded("files are mapped"),
    "actor_rollout_ref.model.enable_activation_offload": fact(
        "activations_offloaded",
        truth,
        "trainer: fsdp.activation_offload",
        "with gradient checkpointing",
    ),
    "actor_rollout_ref.model.mtp.enable_train": fact(
        "predicts", truth, "trainer: megatron.mtp_loss_scaling_factor"
    ),
    "actor_rollout_ref.model.mtp.mtp_loss_scaling_factor": fact(
        "prediction_scale", number, "trainer: megatron.mtp_loss_scaling_factor"
    ),
    # training
    f"{_ACTOR}.strategy": choice("strategy", STRATEGIES, "trainer: backend"),
    f"{_ACTOR}.fsdp_config.strategy": choice("strategy", STRATEGIES, "trainer: backend"),
    f"{_ACTOR}.optim.lr": key_of("trainer", "optim.learning_rate", number),
    f"{_ACTOR}.optim.weight_decay": key_of("trainer", "optim.weight_decay", number),
    f"{_ACTOR}.optim.clip_grad": fact("optim_norm", number, "trainer: optim.max_grad_norm"),
    f"{_ACTOR}.grad_clip": fact("norm", number, "trainer: optim.max_grad_norm"),
    f"{_ACTOR}.optim.optimizer": _OPTIMIZER,
    f"{_ACTOR}.optim.betas": by_hand("trainer.config.optim.betas"),
    f"{_ACTOR}.optim.lr_warmup_steps": fact("warmup", whole, "trainer: optim.warmup_steps"),
    f"{_ACTOR}.optim.lr_warmup_steps_ratio": fact(
        "warmup_ratio", number, "trainer: optim.warmup_steps"
    ),
    f"{_ACTOR}.optim.lr_scheduler_type": choice("schedule", SCHEDULES, "trainer: optim.schedule"),
    f"{_ACTOR}.optim.warmup_style": choice("schedule", SCHEDULES, "trainer: optim.schedule"),
    f"{_ACTOR}.optim.lr_decay_style": choice("schedule", SCHEDULES, "trainer: optim.schedule"),
    f"{_ACTOR}.optim.lr_decay_steps": fact("decay_steps", _positive, "trainer: optim.decay_steps"),
    f"{_ACTOR}.optim.total_training_steps": _COUNTED,
    f"{_ACTOR}.optim.min_lr_ratio": fact("minimum", number, "trainer: optim.minimum_ratio"),
    f"{_ACTOR}.optim.min_lr": fact("minimum_rate", number, "trainer: optim.minimum_ratio"),
    f"{_ACTOR}.ppo_mini_batch_size": fact("mini_batch", whole, "run: algorithm.mini_batches"),
    f"{_ACTOR}.use_dynamic_bsz": fact("by_tokens", truth, "trainer: max_tokens_per_micro_batch"),
    f"{_ACTOR}.ppo_max_token_len_per_gpu": fact(
        "micro_tokens", whole, "trainer: max_tokens_per_micro_batch", "with use_dynamic_bsz"
    ),
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": fact(
        "micro_batch", whole, "trainer: max_tokens_per_micro_batch", "without use_dynamic_bsz"
    ),
    f"{_ACTOR}.ppo_micro_batch_size": _PACKED,
    f"{_ACTOR}.ppo_epochs": key_of("run", "algorithm.epochs", whole),
    f"{_ACTOR}.shuffle": unneeded("groups of a step are dealt to mini-batches by the seed"),
    f"{_ACTOR}.ulysses_sequence_parallel_size": fact("context", whole, "trainer: fsdp.context"),
    f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size": fact(
        "context", whole, "trainer: fsdp.context"
    ),
    f"{_ACTOR}.fsdp_config.dtype": _precision("fsdp.dtype", _BFLOAT),
    f"{_ACTOR}.fsdp_config.model_dtype": _FLOATS,
    f"{_ACTOR}.megatron.dtype": _precision(
        "megatron.dtype", {**_BFLOAT, "float16": "float16", "fp16": "float16"}
    ),
    "actor_rollout_ref.ref.model.path": key_of("trainer", "reference_model", plain_text),
    f"{_ACTOR}.fsdp_config.seed": key_of("trainer", "seed", whole),
    f"{_ACTOR}.fsdp_config.fsdp_size": fact(
        "fsdp_size", whole, "trainer: fsdp.replicas", "ranks by it"
    ),
    f"{_ACTOR}.fsdp_config.offload_policy": by_hand("trainer.config.fsdp.cpu_offload"),
    "model_engine": choice("model_engine", ENGINES, "trainer: backend"),
    f"{_ACTOR}.veomni.expert_parallel_size": fact("expert", whole, "trainer: fsdp.expert"),
    f"{_ACTOR}.veomni.ulysses_parallel_size": fact("context", whole, "trainer: fsdp.context"),
    f"{_ACTOR}.veomni.fsdp_size": fact("fsdp_size", whole, "trainer: fsdp.replicas", "ranks by it"),
    f"{_ACTOR}.veomni.mixed_precision": by_hand("trainer.config.fsdp.dtype"),
    f"{_ACTOR}.freeze_vision_tower": key_of("trainer", "vision.frozen_tower", truth),
    f"{_ACTOR}.router_replay.mode": _REPLAY,
    f"{_ACTOR}.veomni.router_replay.mode": _REPLAY,
    f"{_ACTOR}.checkpoint.save_contents": absent("checkpoints are whole"),
    f"{_ACTOR}.checkpoint.load_contents": absent("checkpoints are whole"),
    f"{_ACTOR}.checkpoint.async_save": unneeded("a checkpoint is written beside what follows it"),
    # the algorithm
    "algorithm.adv_estimator": choice("estimator", ADVANTAGES, "run: algorithm.advantage.name"),
    "algorithm.gamma": fact("gamma", number, "run: algorithm.advantage.gamma"),
    "algorithm.lam": fact("lambda", number, "run: algorithm.advantage.gae_lambda"),
    "algorithm.norm_adv_by_std_in_grpo": fact(
        "by_std", truth, "run: algorithm.advantage.scale_by_std"
    ),
    "algorithm.use_kl_in_reward": fact(
        "kl_in_reward", truth, "run: algorithm.advantage.kl_coefficient"
    ),
    "algorithm.kl_penalty": choice("reward_kl", KL_FORMS, "run: algorithm.advantage.kl_estimator"),
    "algorithm.kl_ctrl.kl_coef": fact("kl", number, "run: algorithm.advantage.kl_coefficient"),
    "algorithm.use_pf_ppo": absent("groups of a step are all trained on"),
    "algorithm.kl_ctrl.type": fact(
        "kl_control", plain_text, "run: algorithm.advantage.kl_coefficient"
    ),
    "algorithm.filter_groups.enable": Flag("run: filters", "reward_std", _filter),
    "algorithm.filter_groups.metric": unneeded("groups are told apart by their rewards"),
    "algorithm.filter_groups.max_num_gen_batches": by_hand("run.yaml max_filtered_in_a_row"),
    "algorithm.rollout_correction.bypass_mode": fact(
        "bypass", truth, "run: algorithm.loss.old_logprobs"
    ),
    "algorithm.rollout_correction.rollout_is": choice(
        "importance", {"token": "token", "sequence": "sequence"}, "run: algorithm.loss.importance"
    ),
    "algorithm.rollout_correction.rollout_is_threshold": fact(
        "importance_high", _threshold, "run: algorithm.loss.importance"
    ),
    "algorithm.rollout_correction.": by_hand("run.yaml algorithm.loss.corrections"),
    f"{_ACTOR}.policy_loss.loss_mode": choice("loss", LOSSES, "run: algorithm.loss.name"),
    f"{_ACTOR}.policy_loss.": by_hand("run.yaml algorithm.loss.settings"),
    f"{_ACTOR}.tau_pos": by_hand("run.yaml algorithm.loss.settings"),
    f"{_ACTOR}.tau_neg": by_hand("run.yaml algorithm.loss.settings"),
    f"{_ACTOR}.clip_ratio": absent("clip_ratio_low and clip_ratio_high count, in verl too"),
    f"{_ACTOR}.clip_ratio_low": fact("clip_low", number, f"run: {_LOSS}.clip_low"),
    f"{_ACTOR}.clip_ratio_high": fact("clip_high", number, f"run: {_LOSS}.clip_high"),
    f"{_ACTOR}.clip_ratio_c": fact("dual_clip", number, f"run: {_LOSS}.dual_clip"),
    f"{_ACTOR}.entropy_coeff": fact("entropy", number, f"run: {_LOSS}.entropy_coefficient"),
    f"{_ACTOR}.use_kl_loss": fact("kl_loss", truth, f"run: {_LOSS}.kl_coefficient"),
    f"{_ACTOR}.kl_loss_coef": fact("kl_loss_coef", number, f"run: {_LOSS}.kl_coefficient"),
    f"{_ACTOR}.kl_loss_type": choice("kl_loss_type", LOSS_KL_FORMS, f"run: {_LOSS}.kl_estimator"),
    f"{_ACTOR}.loss_agg_mode": choice("aggregation", AGGREGATIONS, f"run: {_LOSS}.aggregation"),
    f"{_ACTOR}.loss_scale_factor": fact("scale", number, f"run: {_LOSS}.constant_length"),
    # sampling
    f"{_ROLLOUT}.name": fact("engine", plain_text, "rollout: engine.backend", "sglang"),
    f"{_ROLLOUT}.n": fact("samples", whole, "run: samples_per_group"),
    f"{_ROLLOUT}.temperature": key_of("run", "sampling.temperature", number),
    f"{_ROLLOUT}.top_p": key_of("run", "sampling.top_p", number),
    f"{_ROLLOUT}.top_k": Flag("run: sampling.top_k", "-1 is 0", _top_k("top_k")),
    f"{_ROLLOUT}.do_sample": fact("samples_at_all", truth, "run: sampling.temperature"),
    f"{_ROLLOUT}.stop": by_hand("run.yaml sampling.stop: docs/rollout.md, Stop strings"),
    f"{_ROLLOUT}.ignore_eos": fact("ignores_eos", truth, "run: sampling.ignore_eos"),
    f"{_ROLLOUT}.tensor_model_parallel_size": fact(
        "engine_gpus", whole, "rollout: engine.sglang.server_args.tp_size"
    ),
    f"{_ROLLOUT}.expert_parallel_size": key_of(
        "rollout", "engine.sglang.server_args.ep_size", whole
    ),
    f"{_ROLLOUT}.data_parallel_size": by_hand("rollout.config.engine.sglang.server_args"),
    f"{_ROLLOUT}.pipeline_model_parallel_size": by_hand("rollout.config.engine.sglang.server_args"),
    f"{_ROLLOUT}.gpu_memory_utilization": key_of(
        "rollout", "engine.sglang.server_args.mem_fraction_static", number
    ),
    f"{_ROLLOUT}.max_num_seqs": key_of("rollout", "engine.max_running", whole),
    f"{_ROLLOUT}.prompt_length": fact(
        "engine_prompt_length", whole, "rollout: engine.max_model_length", "else as of data"
    ),
    f"{_ROLLOUT}.response_length": fact(
        "engine_response_length", whole, "run: sampling.max_new_tokens", "else as of data"
    ),
    f"{_ROLLOUT}.max_model_len": key_of("rollout", "engine.max_model_length", whole),
    f"{_ROLLOUT}.dtype": key_of("rollout", "engine.dtype", plain_text),
    f"{_ROLLOUT}.enforce_eager": Flag(
        "rollout: engine.sglang.server_args.disable_cuda_graph", "", eager
    ),
    f"{_ROLLOUT}.quantization": Flag(
        "trainer: publish.quantization", "of fp8", published_quantization
    ),
    f"{_ROLLOUT}.over_sample_rate": by_hand("run.yaml over_sampling"),
    f"{_ROLLOUT}.enable_rollout_routing_replay": Flag(
        "rollout: engine.routed_experts", "", _recorded_experts
    ),
    f"{_ROLLOUT}.calculate_log_probs": _ALWAYS,
    f"{_ROLLOUT}.val_kwargs.n": fact(
        "eval_samples", whole, "run: evaluation.datasets.<name>.samples"
    ),
    f"{_ROLLOUT}.val_kwargs.temperature": fact(
        "eval_temperature", number, "run: evaluation.datasets.<name>.sampling.temperature"
    ),
    f"{_ROLLOUT}.val_kwargs.top_p": fact(
        "eval_top_p", number, "run: evaluation.datasets.<name>.sampling.top_p"
    ),
    f"{_ROLLOUT}.val_kwargs.top_k": Flag(
        "run: evaluation.datasets.<name>.sampling.top_k", "-1 is 0", _top_k("eval_top_k")
    ),
    f"{_ROLLOUT}.val_kwargs.do_sample": unneeded("its temperature says it, in verl too"),
    f"{_ROLLOUT}.multi_turn.": _TURNS,
    f"{_ROLLOUT}.agent.": _TURNS,
    # rewards
    "custom_reward_function.": by_hand(f"environment.settings.reward of run.yaml; {_OWN}"),
    "reward_model.reward_manager": Flag(
        "run: environment.settings.reward", "naive, dapo, batch, prime", _reward_manager
    ),
    "reward_manager.": by_hand(_OWN),
    "reward_model.reward_kwargs.overlong_buffer_cfg.enable": fact(
        "overlong", truth, "run: algorithm.advantage.overlong"
    ),
    "reward_model.reward_kwargs.overlong_buffer_cfg.len": fact(
        "overlong_buffer", whole, "run: algorithm.advantage.overlong"
    ),
    "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor": fact(
        "overlong_penalty", number, "run: algorithm.advantage.overlong"
    ),
    "reward_model.reward_kwargs.overlong_buffer_cfg.log": _ALWAYS,
    "reward_model.overlong_buffer.enable": fact(
        "overlong", truth, "run: algorithm.advantage.overlong"
    ),
    "reward_model.overlong_buffer.len": fact(
        "overlong_buffer", whole, "run: algorithm.advantage.overlong"
    ),
    "reward_model.overlong_buffer.penalty_factor": fact(
        "overlong_penalty", number, "run: algorithm.advantage.overlong"
    ),
    "reward_model.reward_kwargs.max_resp_len": fact(
        "overlong_length", whole, "run: algorithm.advantage.overlong"
    ),
    "reward_model.sandbox_fusion.": by_hand("reward: code of run.yaml, docs/rollout.md"),
    "reward_model.enable": fact("reward_model", truth, "run: environment.settings.reward"),
    "reward_model.use_reward_loop": unneeded("rewards are given beside sampling"),
    "reward_model.launch_reward_fn_async": unneeded("rewards are given beside sampling"),
    "reward_model.num_workers": unneeded("rewards are given beside sampling"),
    "reward_model.": _REWARD_MODEL,
    # the critic
    "critic.optim.optimizer": _OPTIMIZER,
    "critic.optim.lr": fact("critic_rate", number, "trainer: optim.learning_rate"),
    "critic.optim.lr_warmup_steps": fact("critic_warmup", whole, "trainer: optim.warmup_steps"),
    "critic.optim.lr_warmup_steps_ratio": fact(
        "critic_warmup_ratio", number, "trainer: optim.warmup_steps"
    ),
    "critic.optim.lr_scheduler_type": choice(
        "critic_schedule", SCHEDULES, "trainer: optim.schedule"
    ),
    "critic.optim.warmup_style": choice("critic_schedule", SCHEDULES, "trainer: optim.schedule"),
    "critic.optim.lr_decay_style": choice("critic_schedule", SCHEDULES, "trainer: optim.schedule"),
    "critic.optim.lr_decay_steps": fact(
        "critic_decay_steps", _positive, "trainer: optim.decay_steps"
    ),
    "critic.optim.total_training_steps": _COUNTED,
    "critic.optim.min_lr_ratio": fact("critic_minimum", number, "trainer: optim.minimum_ratio"),
    "critic.optim.min_lr": fact("critic_minimum_rate", number, "trainer: optim.minimum_ratio"),
    "critic.optim.clip_grad": fact("critic_optim_norm", number, "trainer: optim.max_grad_norm"),
    "critic.optim.": by_hand("the critic's config.optim"),
    "critic.model.lora_rank": only_zero("a critic trains whole"),
    "critic.model.lora.rank": only_zero("a critic trains whole"),
    "critic.model.override_config.": by_hand("config.json of the critic's model directory"),
    "critic.model.fsdp_config.dtype": _only_of(("bfloat16", "bf16"), _ALIKE),
    "critic.model.fsdp_config.model_dtype": _FLOATS,
    "critic.megatron.dtype": _only_of(("bfloat16", "bf16"), _ALIKE),
    "critic.optim.weight_decay": fact("critic_decay", number, "trainer: optim.weight_decay"),
    "critic.model.path": fact("critic_model", plain_text, "trainer: model"),
    "critic.cliprange_value": fact("value_clip", number, "run: critic.loss.value_clip"),
    "critic.strategy": choice("critic_strategy", STRATEGIES, "trainer: backend"),
    "critic.enable": unneeded("a run with gae has one"),
    "critic.ppo_max_token_len_per_gpu": unneeded("a critic has the trainer's micro-batches"),
    "critic.grad_clip": fact("critic_norm", number, "trainer: optim.max_grad_norm"),
    "critic.loss_agg_mode": by_hand("run.yaml critic.loss.aggregation"),
    "critic.ppo_epochs": _CRITIC_STEPS,
    "critic.ppo_mini_batch_size": _CRITIC_STEPS,
    "critic.": unneeded("the critic's entry of services.yaml begins as the trainer's"),
    # the run
    "trainer.total_training_steps": key_of("run", "steps", whole),
    "trainer.total_epochs": by_hand("run.yaml steps: epochs times rows, by groups_per_step"),
    "trainer.save_freq": fact("save_every", _positive, "run: checkpoint_every"),
    "trainer.test_freq": fact("eval_every", _positive, "run: evaluation.every_steps"),
    "trainer.critic_warmup": fact(
        "critic_steps", _steps_before, "run: critic.warmup_steps", "less 1"
    ),
    "trainer.nnodes": fact("nodes", whole, "trainer: ranks.count", "times the GPUs of a node"),
    "trainer.n_gpus_per_node": fact("gpus", whole, "trainer: ranks.count"),
    "trainer.logger": by_hand("run.yaml trackers: docs/trackers.md"),
    "trainer.project_name": unneeded("run.yaml trackers has the names of a tracker"),
    "trainer.experiment_name": unneeded("run.yaml run_dir is the run's name"),
    "trainer.resume_mode": Flag("", "not needed: `--resume` goes on", _resume),
    "trainer.resume_from_path": by_hand("run.yaml initial_checkpoint"),
    "trainer.val_before_train": fact("evaluated_early", truth, "run: evaluation.before_training"),
    "trainer.val_only": by_hand("`sluice eval run.yaml`"),
    "trainer.max_actor_ckpt_to_keep": by_hand("run.yaml retention.cuts"),
    "trainer.max_critic_ckpt_to_keep": by_hand("run.yaml retention.cuts"),
    "trainer.default_local_dir": _STORE,
    "trainer.default_hdfs_dir": _STORE,
    "trainer.del_local_ckpt_after_load": _STORE,
    "trainer.log_val_generations": _LOGGED,
    "trainer.rollout_data_dir": _LOGGED,
    "trainer.validation_data_dir": _LOGGED,
    "trainer.balance_batch": _ALWAYS,
    "trainer.device": unneeded("services take the device that is there"),
    "trainer.use_legacy_worker_impl": unneeded("of verl's own parts"),
    "trainer.esi_redundant_time": unneeded("of verl's own parts"),
    "trainer.ray_wait_register_center_timeout": unneeded("Ray is not needed: docs/cluster.md"),
    "actor_rollout_ref.hybrid_engine": fact("shared", truth, "run: placement", "colocated"),
    "actor_rollout_ref.nccl_timeout": unneeded("every wait has a deadline of its own"),
    # one step off, and asynchronous
    "rollout.nnodes": fact("rollout_nodes", whole, "services.yaml: rollout.replicas"),
    "rollout.n_gpus_per_node": fact("rollout_gpus", whole, "services.yaml: rollout.replicas"),
    "rollout.total_rollout_steps": fact("prompts", whole, "run: steps"),
    "rollout.test_freq": fact("ahead_eval_every", _positive, "run: evaluation.every_steps"),
    "rollout.total_epochs": by_hand("run.yaml steps: epochs times rows, by groups_per_step"),
    "async_training.staleness_threshold": fact("staleness", number, "run: max_staleness"),
    "async_training.trigger_parameter_sync_step": fact(
        "updates", whole, "run: algorithm.mini_batches"
    ),
    "async_training.require_batches": fact("batches", whole, "run: groups_per_step"),
    "async_training.use_rollout_log_probs": fact(
        "engine_logprobs", truth, "run: algorithm.loss.old_logprobs"
    ),
    "async_training.compute_prox_log_prob": fact(
        "proximal", truth, "run: algorithm.loss.old_logprobs"
    ),
    "async_training.partial_rollout": unneeded("a group goes on while weights change under it"),
    # Megatron
    f"{_ACTOR}.megatron.tensor_model_parallel_size": key_of("trainer", "megatron.tensor", whole),
    f"{_ACTOR}.megatron.pipeline_model_parallel_size": key_of(
        "trainer", "megatron.pipeline", whole
    ),
    f"{_ACTOR}.megatron.virtual_pipeline_model_parallel_size": key_of(
        "trainer", "megatron.virtual_pipeline", whole
    ),
    f"{_ACTOR}.megatron.context_parallel_size": key_of("trainer", "megatron.context", whole),
    f"{_ACTOR}.megatron.expert_model_parallel_size": key_of("trainer", "megatron.expert", whole),
    f"{_ACTOR}.megatron.expert_tensor_parallel_size": key_of(
        "trainer", "megatron.expert_tensor", whole
    ),
    f"{_ACTOR}.megatron.sequence_parallel": fact(
        "sequence_parallel", truth, "trainer: megatron.sequence_parallel"
    ),
    f"{_ACTOR}.megatron.seed": key_of("trainer", "seed", whole),
    f"{_TRANSFORMER}.recompute_granularity": Flag("trainer: megatron.recompute", "", _recompute),
    f"{_TRANSFORMER}.recompute_method": unneeded("blocks are uniform"),
    f"{_TRANSFORMER}.recompute_num_layers": fact(
        "recompute_layers", whole, "trainer: megatron.recompute_layers"
    ),
    f"{_TRANSFORMER}.num_layers_in_first_pipeline_stage": key_of(
        "trainer", "megatron.first_stage_layers", whole
    ),
    f"{_TRANSFORMER}.num_layers_in_last_pipeline_stage": key_of(
        "trainer", "megatron.last_stage_layers", whole
    ),
    f"{_TRANSFORMER}.moe_router_load_balancing_type": choice(
        "balancing",
        {name: name for name in ("aux_loss", "global_aux_loss", "seq_aux_loss", "none")},
        "trainer: experts.aux_loss_coefficient",
    ),
    f"{_TRANSFORMER}.moe_aux_loss_coeff": fact(
        "aux_loss",
        number,
        "trainer: experts.aux_loss_coefficient",
        "of all tokens of a call at once, with the one above, which is none otherwise",
    ),
    f"{_TRANSFORMER}.moe_z_loss_coeff": key_of("trainer", "experts.z_loss_coefficient", number),
    f"{_TRANSFORMER}.moe_router_bias_update_rate": key_of(
        "trainer", "experts.bias_update_rate", number
    ),
    f"{_TRANSFORMER}.attention_dropout": only_zero("nothing is dropped out"),
    f"{_TRANSFORMER}.hidden_dropout": only_zero("nothing is dropped out"),
    f"{_TRANSFORMER}.": _MEGATRON,
    f"{_ACTOR}.megatron.override_ddp_config.": _MEGATRON,
    f"{_ACTOR}.megatron.override_mcore_model_config.": _MEGATRON,
    f"{_ACTOR}.megatron.dist_checkpointing_path": by_hand(
        "the model is a Hugging Face directory; `sluice convert` makes one of torch_dist"
    ),
    f"{_OVERRIDE}.optimizer_cpu_offload": fact(
        "offloads", truth, "trainer: megatron.optimizer_offload", "steps stay the device's"
    ),
    f"{_OVERRIDE}.optimizer_offload_fraction": fact(
        "offload_fraction", share, "trainer: megatron.optimizer_offload"
    ),
    f"{_OVERRIDE}.overlap_cpu_optimizer_d2h_h2d": unneeded("copies run beside steps"),
    f"{_OVERRIDE}.use_torch_optimizer_for_cpu_offload": unneeded("steps stay the device's"),
    f"{_OVERRIDE}.use_precision_aware_optimizer": unneeded(
        "masters and moments are float32, and optimizer_offload takes masters along"
    ),
    f"{_OVERRIDE}.": absent("AdamW is the optimizer, with state of float32"),
}
# of whole families: by the beginning of the name, as those of KEYS that end in a dot
FAMILIES: dict[str, Flag] = {
    "data.apply_chat_template_kwargs.": Flag("run: environment.settings.template"),
    f"{_ROLLOUT}.engine_kwargs.sglang.": Flag("rollout: engine.sglang.server_args.<name>"),
    f"{_ROLLOUT}.engine_kwargs.": absent("SGLang is the engine; engine.sglang.server_args"),
    f"{_ROLLOUT}.log_prob_": _BATCHES,
    f"{_ROLLOUT}.checkpoint_engine.": unneeded("buckets have a size of their own"),
    f"{_ROLLOUT}.profiler.": _PROFILER,
    f"{_ROLLOUT}.prometheus.": _ALWAYS,
    f"{_ROLLOUT}.trace.": _LOGGED,
    f"{_ROLLOUT}.mtp.": by_hand("rollout.config.engine.sglang.speculative_steps"),
    "data.custom_cls.": by_hand(_OWN),
    "data.sampler.": by_hand("run.yaml environment_schedule: docs/rollout.md"),
    "data.datagen.": by_hand(_OWN),
    "actor_rollout_ref.model.override_config.": by_hand("config.json of the model directory"),
    "actor_rollout_ref.model.mtp.": unneeded("the layer that predicts is as the checkpoint has it"),
    "actor_rollout_ref.model.fused_kernel_options.": _FUSED,
    "actor_rollout_ref.model.lora.": by_hand("trainer.config.lora: docs/lora.md"),
    "actor_rollout_ref.model.tiled_mlp.": _KEPT,
    "actor_rollout_ref.ref.": _BATCHES,
    f"{_ACTOR}.profiler.": _PROFILER,
    f"{_ACTOR}.fsdp_config.mixed_precision.": by_hand("trainer.config.fsdp.dtype"),
    f"{_ACTOR}.fsdp_config.": _SLEEP,
    f"{_ACTOR}.veomni.router_replay.": absent("records are kept in memory, or come with rows"),
    f"{_ACTOR}.veomni.": unneeded("operations are chosen as the trainer starts; who waits sleeps"),
    f"{_ACTOR}.megatron.": _SLEEP,
    f"{_ACTOR}.optim.": by_hand("trainer.config.optim"),
    "algorithm.pf_ppo.": absent("groups of a step are all trained on"),
    "global_profiler.": _PROFILER,
    "transfer_queue.": unneeded("samples are blobs of the store"),
    "ray_kwargs.": unneeded("Ray is not needed: docs/cluster.md"),
    "ray_init.": unneeded("Ray is not needed: docs/cluster.md"),
}
# which change nothing of what is trained, or are of parts that are otherwise here
UNNEEDED: dict[str, frozenset[str]] = {
    f"{_TRANSFORMER}.": frozenset(
        {
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
            "apply_rope_fusion",
            "attention_backend",
            "bias_activation_fusion",
            "bias_dropout_fusion",
            "cross_entropy_fusion_impl",
            "cross_entropy_loss_fusion",
            "deallocate_pipeline_outputs",
            "gradient_accumulation_fusion",
            "masked_softmax_fusion",
            "moe_enable_deepep",
            "moe_grouped_gemm",
            "moe_permute_fusion",
            "moe_router_dtype",
            "moe_router_fusion",
            "moe_shared_expert_overlap",
            "moe_token_dispatcher_type",
            "persist_layer_norm",
            "recompute_modules",
        }
    ),
    "data.": frozenset(
        {"image_patch_size", "return_multi_modal_inputs", "use_shm", "validation_shuffle"}
    ),
    f"{_ACTOR}.": frozenset(
        {
            "calculate_entropy",
            "data_loader_seed",
            "entropy_checkpointing",
            "entropy_from_logits_with_chunking",
            "rollout_n",
            "use_fused_kernels",
            "use_prefix_grouper",
            "use_remove_padding",
            "use_torch_compile",
        }
    ),
    f"{_ROLLOUT}.": frozenset(
        {
            "cudagraph_capture_sizes",
            "disable_log_stats",
            "enable_chunked_prefill",
            "enable_prefix_caching",
            "enable_sleep_mode",
            "free_cache_engine",
            "layered_summon",
            "load_format",
            "logprobs_mode",
            "max_num_batched_tokens",
            "mode",
            "multi_stage_wake_up",
            "scheduling_policy",
            "skip_tokenizer_init",
            "update_weights_bucket_megabytes",
        }
    ),
}
_OTHERWISE = unneeded("it changes nothing of what is trained")
_PREFIXES = {
    **{name: key for name, key in KEYS.items() if name.endswith(".")},
    **FAMILIES,
}
_REST = {
    "data.apply_chat_template_kwargs.": _template,
    f"{_ROLLOUT}.engine_kwargs.sglang.": _server_argument,
}


def find_key(name: str) -> Flag | None:
    """What a key becomes; None for one that is not known."""
    if name in KEYS:
        return KEYS[name]
    above, dot, last = name.rpartition(".")
    if last in UNNEEDED.get(above + dot, ()):
        return _OTHERWISE
    starts = [start for start in _PREFIXES if name.startswith(start)]
    if not starts:
        return None
    start = max(starts, key=len)
    if start not in _REST:
        return _PREFIXES[start]

    def put(into: Imported, values: Values) -> None:
        _REST[start](into, name.removeprefix(start), values)

    return Flag(_PREFIXES[start].ours, "", put)


def key_table() -> str:
    """The table of docs/from-slime.md."""
    lines = ["| verl | ours, or why not |", "|---|---|"]
    exact = {name: key for name, key in KEYS.items() if not name.endswith(".")}
    for name, key in {**exact, **{f"{start}*": each for start, each in _PREFIXES.items()}}.items():
        ours = f"`{key.ours}`" if key.ours else ""
        lines.append(f"| `{name}` | {', '.join(filter(None, (ours, key.why)))} |")
    names = ", ".join(f"`{start}{name}`" for start, own in UNNEEDED.items() for name in sorted(own))
    lines.append(f"| {names} | {_OTHERWISE.why} |")
    return "\n".join(lines) + "\n"
