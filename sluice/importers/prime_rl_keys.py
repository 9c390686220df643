"""What each key of prime-rl becomes: carried, not needed, or not there, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sluice.importers.documents import (
    Flag,
    Imported,
    NotCarriedError,
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
    read_yaml,
    set_at,
    unneeded,
    whole,
)
from sluice.importers.verl_keys import eager, listed, published_quantization, truth
from sluice.platform import CUDA

LOSSES = ("default", "ipo")
OPTIMIZERS = {"adamw": "adamw", "muon": "muon"}
SCHEDULES = {name: name for name in ("constant", "linear", "cosine")}
_TEACHER = "algorithm.advantage.name distillation, and teachers of run.yaml: docs/algorithms.md"
ALGORITHMS: Mapping[str, str] = {  # that are not GRPO, and what to do about each
    "max_rl": "by hand: an estimator of your own: docs/algorithms.md",
    "opd": f"by hand: {_TEACHER}",
    "sft": "by hand: `sluice sft` on what the other model answered: docs/start.md",
    "echo": "not there: no loss is taken of what an environment says",
    "rae": "not there: no baseline outlives its group",
    "hierarchical_grpo": "not there: a group has one prompt",
    "opsd": "not there: a teacher sees what the student sees",
}
TRAIN, EVAL = "orchestrator.train.source[].", "orchestrator.eval.source[]."


def _settled(known: Mapping[str, str]) -> Flag:
    """What is not needed with some values; others by why they are not carried, "" for any."""

    def put(_: Imported, values: Values) -> None:
        value = only(values)
        why = known.get(value, known.get("", ""))
        if why:
            raise NotCarriedError(f"{plain_text(value)}: {why}")

    return Flag(
        "",
        ", ".join(f"{name or 'else'}: {why or 'not needed'}" for name, why in known.items()),
        put,
    )


def _unless(read: Callable[[str], Any], fine: Any, why: str) -> Flag:
    """What is not needed at one value, and otherwise told."""

    def put(_: Imported, values: Values) -> None:
        if read(only(values)) != fine:
            raise NotCarriedError(why)

    shown = str(fine).lower() if isinstance(fine, bool) else str(fine)
    return Flag("", f"not needed at {shown}: {why}", put)


def _algorithm(into: Imported, values: Values) -> None:
    if (name := only(values)) == "grpo":
        return
    if name not in ALGORITHMS:
        raise NotCarriedError(f"{name!r} is unknown")
    raise NotCarriedError(f"{name}: {ALGORITHMS[name]}; the files have grpo")


def _loss(into: Imported, values: Values) -> None:
    if (name := only(values)) in LOSSES:
        into.facts["loss"] = name
        return
    why = {"custom": "by hand: a loss of your own: docs/tutorial-loss.md"}.get(name, "is unknown")
    raise NotCarriedError(f"{name}: {why}; the files have dppo")


def _optimizer(into: Imported, values: Values) -> None:
    if (name := only(values)) not in OPTIMIZERS:
        raise NotCarriedError(f"{name}: AdamW and Muon are the optimizers; the files have AdamW")
    into.facts["optimizer"] = name


def _broadcast(into: Imported, values: Values) -> None:
    if (kind := only(values)) == CUDA.collective:
        into.run["weight_transport"] = "collective"
        set_at(into.trainer, "transfer.enabled", True)
    elif kind != "filesystem":
        raise NotCarriedError(
            f"{kind}: not there: weights go by the store, or by NCCL: docs/weights.md"
        )


def _experts(into: Imported, values: Values) -> None:
    if (text := only(values)) == "auto":
        raise NotCarriedError("auto: by hand, of a mixture: trainer.config.fsdp.expert")
    if (count := whole(text)) > 1:
        set_at(into.trainer, "fsdp.expert", count)


def _replay(into: Imported, values: Values) -> None:
    if truth(only(values)):
        set_at(into.trainer, "fsdp.routing_replay", "rollout")
        set_at(into.rollout, "engine.routed_experts", True)


def _recorded(into: Imported, values: Values) -> None:
    if truth(only(values)):
        set_at(into.rollout, "engine.routed_experts", True)


def _offline(into: Imported, values: Values) -> None:
    set_at(into.run, "trackers.wandb.mode", "offline" if truth(only(values)) else "online")


def _tags(into: Imported, values: Values) -> None:
    set_at(into.run, "trackers.wandb.tags", listed(only(values)))


def _targets(into: Imported, values: Values) -> None:
    into.facts["targets"] = listed(only(values))


def _frozen_tower(into: Imported, values: Values) -> None:
    set_at(into.trainer, "vision.frozen_tower", truth(only(values)))


def _top_k(text: str) -> int:
    return max(0, whole(text))


def _truth_or_table(name: str, ours: str, why: str = "") -> Flag:
    return fact(name, lambda text: bool(read_yaml(text)), ours, why)


_NUMBERED = by_hand("`--resume` goes on with the run directory; initial_checkpoint begins with one")
_PLACES = unneeded("checkpoints, weights and samples are in the store of the run")
_WAITS = unneeded("every wait has a deadline of its own")
_PORTS = unneeded("services find free ports, and each other: docs/cluster.md")
_LOGS = unneeded("services log to RUN_DIR/logs; `sluice logs`")
_ENVIRONMENT = by_hand("the environment of `sluice up`, or of the service")
_KERNELS = unneeded("operations are chosen as the trainer starts: docs/accelerators.md")
_OFFLOAD = by_hand("trainer.config.fsdp.cpu_offload, which takes weights along")
_MODEL = unneeded("the model's config.json says it")
_CODE = _unless(truth, False, "not there: code of a model directory is never run")
_VLLM = absent("engines are SGLang: rollout.config.engine.sglang.server_args")
_SLURM = by_hand("docs/cluster.md, Slurm")
_CLIENT = unneeded("episode workers find the engines by the router")
_ENGINE_ROUTER = by_hand("the router's entry of services.yaml: docs/routing.md")
_FLIGHT = unneeded("engine.max_running bounds an engine, max_staleness what is ahead of training")
_HEARTBEAT = by_hand("health, and metrics of every service: docs/observability.md")
_OWN_ENVIRONMENT = by_hand(
    "environment.settings.arguments, or an environment of ours: docs/openai.md"
)
_RENDERER = unneeded("chats become tokens by the tokenizer's own template")
_ECHO = absent("no loss is taken of what an environment says")
_PENALTY = by_hand("a reward of your own, or algorithm.advantage.overlong: docs/algorithms.md")
_DEMONSTRATION = absent("a teacher sees what the student sees")
_SAMPLER = by_hand("run.yaml environment_schedule: docs/rollout.md")
_CHECK_EVERY = key_of("run", "checkpoint_every", whole)
_CUTS = key_of("run", "retention.cuts", whole)
_STEPS = key_of("run", "steps", whole)
_NAMED = fact("model", plain_text, "trainer: model; rollout: tokenizer")
_SERVED = fact(
    "served", plain_text, "", "not needed as trainer.model.name: engines have its weights"
)
_LENGTH = fact("length", whole, "trainer: max_tokens_per_micro_batch")
_WANDB = {
    "project": key_of("run", "trackers.wandb.project", plain_text),
    "entity": key_of("run", "trackers.wandb.entity", plain_text),
    "name": key_of("run", "trackers.wandb.name", plain_text),
    "group": key_of("run", "trackers.wandb.group", plain_text),
    "tags": Flag("run: trackers.wandb.tags", "", _tags),
    "offline": Flag("run: trackers.wandb.mode", "", _offline),
}
_TEMPLATE = by_hand("the tokenizer's own template")
_BROADCAST: dict[str, Flag] = {
    "type": Flag(
        "run: weight_transport; trainer: transfer.enabled",
        "nccl; filesystem is the store",
        _broadcast,
    ),
    "quantize_in_weight_transfer": by_hand("trainer.config.publish.quantization: docs/weights.md"),
    "timeout": by_hand("trainer.config.transfer.timeout_seconds"),
    "host": _PORTS,
    "port": _PORTS,
    "session_id": _PORTS,
}
_WHOLE = absent("checkpoints are whole")
_CHECKPOINTS: dict[str, Flag] = {
    "interval": _CHECK_EVERY,
    "keep_last": _CUTS,
    "keep_interval": absent("the last checkpoints are kept: retention.cuts"),
}
_OF_TRAINER: dict[str, Flag] = {
    "output_dir": _PLACES,
    **{f"skip_{name}": _WHOLE for name in ("progress", "scheduler", "dataloader", "optimizer")},
}
_TRANSPORT = unneeded("samples are blobs of the store")


def _under(prefix: str, flags: Mapping[str, Flag]) -> dict[str, Flag]:
    return {f"{prefix}.{name}": flag for name, flag in flags.items()}


KEYS: dict[str, Flag] = {
    # the model
    "model.name": _NAMED,
    "trainer.model.name": _NAMED,
    "orchestrator.model.name": _SERVED,
    "inference.vllm.model": _SERVED,
    **{f"{p}trust_remote_code": _CODE for p in ("trainer.model.", "orchestrator.model.")},
    **{
        f"{place}vlm.{name}": flag
        for place in ("model.", "trainer.model.", "orchestrator.model.")
        for name, flag in {
            "vision_encoder_attr": _MODEL,
            "language_model_attr": _MODEL,
            "freeze_vision_encoder": Flag("trainer: vision.frozen_tower", "", _frozen_tower),
        }.items()
    },
    **{
        f"{place}tokenizer.{name}": flag
        for place in ("", "trainer.", "orchestrator.")
        for name, flag in {
            "name": key_of("rollout", "tokenizer", plain_text),
            "trust_remote_code": _CODE,
            "chat_template": _TEMPLATE,
        }.items()
    },
    # training
    "seq_len": _LENGTH,
    "trainer.model.seq_len": _LENGTH,
    "orchestrator.seq_len": fact("longest", whole, "rollout: engine.max_model_length"),
    "trainer.model.conversion_dir": unneeded("a model is read as it is"),
    "trainer.model.attn": _KERNELS,
    "trainer.model.compile.fullgraph": _KERNELS,
    "trainer.model.ac.mode": _settled({"full": "", "": "not there: layers are run again whole"}),
    "trainer.model.ac.freq": _unless(whole, 1, "not there: all layers are run again, or none"),
    "trainer.model.ac.targets": absent("layers are run again whole"),
    "trainer.model.ac_offloading.pin_memory": unneeded("it is always so"),
    "trainer.model.ac_offloading.max_inflight_activations": unneeded("copies run beside layers"),
    "trainer.model.fsdp_cpu_offload": key_of("trainer", "fsdp.cpu_offload", truth),
    "trainer.model.optim_cpu_offload": _unless(truth, False, _OFFLOAD.why),
    "trainer.model.full_offload": _unless(truth, False, _OFFLOAD.why),
    "trainer.model.full_offload.": _OFFLOAD,
    "trainer.model.reshard_after_forward": key_of("trainer", "fsdp.reshard_after_forward", truth),
    "trainer.model.dp_replicate": fact("replicas", whole, "trainer: fsdp.replicas"),
    "trainer.model.ep": Flag("trainer: fsdp.expert", "auto by hand", _experts),
    "trainer.model.ep_comm_backend": _KERNELS,
    "trainer.model.deepep_num_sms": _KERNELS,
    "trainer.model.deepep_token_chunk_size": _KERNELS,
    "trainer.model.cp": fact("context", whole, "trainer: fsdp.context"),
    "trainer.model.cp_style": unneeded("a row's keys are gathered: docs/fsdp.md"),
    "trainer.model.impl": _KERNELS,
    "trainer.model.optimization_dtype": _settled(
        {"float32": "", "": "not there: weights and moments are float32"}
    ),
    "trainer.model.reduce_dtype": _settled(
        {"float32": "", "": "not there: gradients are summed in float32"}
    ),
    "trainer.model.moe_router_dtype": _MODEL,
    "trainer.model.moe_use_grouped_mm": _KERNELS,
    "trainer.model.moe_fused_kernel": _KERNELS,
    "trainer.model.quantization.": by_hand("trainer.config.megatron, whose products have 8 bits"),
    "trainer.model.index_cache.": absent("every layer chooses its own keys"),
    "trainer.model.freeze_moe_router": by_hand("trainer.config.trainable: docs/trainable.md"),
    "trainer.model.lora.rank": fact("lora_rank", whole, "trainer: lora.rank"),
    "trainer.model.lora.alpha": fact("lora_alpha", number, "trainer: lora.alpha"),
    "trainer.model.lora.dropout": only_zero("nothing is dropped out"),
    "trainer.model.lora.target_modules": Flag("trainer: lora.targets", "", _targets),
    "trainer.model.lora.modules_to_save": by_hand("adapters are trained alone: docs/lora.md"),
    "trainer.model.debug.": absent("a model is what its directory has"),
    "trainer.model.fused_lm_head_token_chunk_size": unneeded("log-probs are fused"),
    "trainer.data.fake.": absent("rows come of groups"),
    "trainer.loss.type": Flag("run: algorithm.loss", "default is dppo, ipo is it two_sided", _loss),
    "trainer.loss.dppo_mask_low": fact("mask_low", number, "run: algorithm.loss.settings"),
    "trainer.loss.dppo_mask_high": fact("mask_high", number, "run: algorithm.loss.settings"),
    "trainer.loss.ipo_threshold": fact(
        "threshold", number, "run: algorithm.loss.settings", "high, low"
    ),
    "trainer.loss.adv_tau": _unless(number, 1.0, "not there: advantages are not scaled"),
    "trainer.loss.kl_tau": fact(
        "kl_tau", number, "run: algorithm.loss.settings", "log_ratio_coefficient"
    ),
    "trainer.loss.import_path": by_hand("a loss of your own: docs/tutorial-loss.md"),
    "trainer.loss.kwargs.": by_hand("run.yaml algorithm.loss.settings"),
    "trainer.optim.type": Flag("trainer: optim.kind", "adamw, muon", _optimizer),
    "trainer.optim.lr": key_of("trainer", "optim.learning_rate", number),
    "trainer.optim.weight_decay": fact("decay", number, "trainer: optim.weight_decay"),
    "trainer.optim.max_norm": fact("norm", number, "trainer: optim.max_grad_norm"),
    "trainer.optim.betas1": fact("beta1", number, "trainer: optim.betas"),
    "trainer.optim.betas2": fact("beta2", number, "trainer: optim.betas"),
    "trainer.optim.mu": fact("momentum", number, "trainer: optim.muon.momentum"),
    "trainer.optim.nesterov": absent("AdamW and Muon are the optimizers"),
    "trainer.optim.momentum": absent("AdamW and Muon are the optimizers"),
    "trainer.scheduler.type": choice("schedule", SCHEDULES, "trainer: optim.schedule"),
    "trainer.scheduler.warmup_steps": fact("warmup", whole, "trainer: optim.warmup_steps"),
    "trainer.scheduler.decay_steps": fact("decay_steps", whole, "trainer: optim.decay_steps"),
    "trainer.scheduler.min_lr": fact("minimum", number, "trainer: optim.minimum_ratio"),
    "trainer.enable_router_replay": Flag(
        "trainer: fsdp.routing_replay; rollout: engine.routed_experts", "", _replay
    ),
    "trainer.matmul_precision": _KERNELS,
    "trainer.memory_profiler_path": by_hand("`sluice profile RUN_DIR`: docs/trace.md"),
    "trainer.trace_path": by_hand("`sluice profile RUN_DIR`: docs/trace.md"),
    "trainer.gc.interval": unneeded("garbage is looked for between steps"),
    "trainer.dist_timeout_seconds": _WAITS,
    "trainer.enable_token_export": unneeded("`sluice samples` has them"),
    # the algorithm and its groups
    "orchestrator.algo.type": Flag(
        "run: algorithm.advantage.name", "grpo, not by the deviation", _algorithm
    ),
    "orchestrator.algo.length_penalty.": _PENALTY,
    "orchestrator.algo.sampling.source": unneeded("the policy samples"),
    "orchestrator.algo.sampling.source.": by_hand(
        "`sluice sft` on what the other model answered: docs/start.md"
    ),
    "orchestrator.algo.teacher.": by_hand(_TEACHER),
    "orchestrator.algo.roles.": _ECHO,
    "orchestrator.algo.filter.": _ECHO,
    "orchestrator.algo.decay": absent("no baseline outlives its group"),
    "orchestrator.algo.episode_agents": absent("a group has one prompt"),
    "orchestrator.algo.demo_key": _DEMONSTRATION,
    "orchestrator.algo.template": _DEMONSTRATION,
    "orchestrator.algo.renderer.": _DEMONSTRATION,
    "orchestrator.batch_size": fact("batch", whole, "run: groups_per_step", "by group_size"),
    "orchestrator.token_batch_size": by_hand("run.yaml groups_per_step counts groups"),
    "orchestrator.group_size": fact("group", whole, "run: samples_per_group"),
    "orchestrator.max_off_policy_steps": fact("staleness", whole, "run: max_staleness"),
    "orchestrator.train.filter_zero_advantages": fact(
        "silent_left_out", truth, "", "not needed as false: tokens of advantage 0 count in the mean"
    ),
    "orchestrator.train.sampling.temperature": key_of("run", "sampling.temperature", number),
    "orchestrator.train.sampling.max_completion_tokens": key_of(
        "run", "sampling.max_new_tokens", whole
    ),
    "orchestrator.train.sampling.extra_body.top_p": key_of("run", "sampling.top_p", number),
    "orchestrator.train.sampling.extra_body.top_k": key_of(
        "run", "sampling.top_k", _top_k, "-1 is 0"
    ),
    "orchestrator.train.sampling.extra_body.min_p": only_zero("there is no min_p"),
    "orchestrator.train.sampling.extra_body.": by_hand("run.yaml sampling: docs/rollout.md"),
    "orchestrator.concurrency.": _FLIGHT,
    "orchestrator.tasks_per_minute": _FLIGHT,
    "orchestrator.num_train_workers": unneeded("micro-batches are packed by the trainer"),
    "orchestrator.pad_to_multiple_of": unneeded("micro-batches are packed by the trainer"),
    "orchestrator.env_server_base_port": _PORTS,
    "orchestrator.collect_inference_metrics": _HEARTBEAT,
    "orchestrator.inference_metrics_roles": _HEARTBEAT,
    "orchestrator.renderer.name": _RENDERER,
    "orchestrator.renderer.": by_hand("the tokenizer's own template, and rollout.config.openai"),
    "orchestrator.model.lora.": unneeded("engines have the trainer's adapters"),
    "orchestrator.model.client.": _CLIENT,
    # evaluation
    "orchestrator.eval.interval": fact("eval_every", whole, "run: evaluation.every_steps"),
    "orchestrator.eval.num_examples": fact(
        "eval_tasks", whole, "run: evaluation.datasets.<name>.groups"
    ),
    "orchestrator.eval.group_size": fact(
        "eval_samples", whole, "run: evaluation.datasets.<name>.samples"
    ),
    "orchestrator.eval.skip_first_step": fact(
        "eval_late", truth, "run: evaluation.before_training"
    ),
    "orchestrator.eval.retrigger_on_resume": absent("what was scored before is not scored again"),
    # engines
    "inference.vllm.dtype": _unless(str, "auto", "by hand: rollout.config.engine.dtype"),
    "inference.vllm.max_model_len": key_of("rollout", "engine.max_model_length", whole),
    "inference.vllm.enforce_eager": Flag(
        "rollout: engine.sglang.server_args.disable_cuda_graph", "", eager
    ),
    "inference.vllm.trust_remote_code": _CODE,
    "inference.vllm.chat_template": _TEMPLATE,
    "inference.vllm.tool_call_parser": by_hand("rollout.config.openai: docs/openai.md"),
    "inference.vllm.reasoning_parser": by_hand("rollout.config.openai: docs/openai.md"),
    "inference.vllm.rope_scaling": _MODEL,
    "inference.vllm.rope_scaling.": _MODEL,
    "inference.vllm.tensor_parallel_size": fact(
        "tensor", whole, "rollout: engine.sglang.server_args.tp_size"
    ),
    "inference.vllm.data_parallel_size": unneeded("each copy of the model is a replica"),
    "inference.vllm.data_parallel_size_local": unneeded("each copy of the model is a replica"),
    "inference.vllm.data_parallel_rpc_port": _PORTS,
    "inference.vllm.api_server_count": _PORTS,
    "inference.vllm.seed": unneeded("samples have seeds of their own"),
    "inference.vllm.gpu_memory_utilization": key_of(
        "rollout", "engine.sglang.server_args.mem_fraction_static", number
    ),
    "inference.vllm.enable_prefix_caching": unneeded("it is always so"),
    "inference.vllm.quantization": Flag(
        "trainer: publish.quantization", "of fp8", published_quantization
    ),
    "inference.vllm.enable_expert_parallel": by_hand("rollout.config.engine.sglang.server_args"),
    "inference.vllm.all2all_backend": _VLLM,
    "inference.vllm.enable_eplb": _VLLM,
    "inference.vllm.enable_dbo": _VLLM,
    "inference.vllm.enable_return_routed_experts": Flag(
        "rollout: engine.routed_experts", "", _recorded
    ),
    **{
        f"inference.vllm.{name}": unneeded("engines have the trainer's adapters")
        for name in (
            "enable_lora",
            "max_loras",
            "max_cpu_loras",
            "max_lora_rank",
            "lora_target_modules",
        )
    },
    "inference.vllm.": _VLLM,
    "inference.server.": _PORTS,
    "inference.router.": _ENGINE_ROUTER,
    "inference.backend_port": _PORTS,
    "inference.use_deep_gemm": _VLLM,
    "inference.kv_cache_offload.": by_hand("rollout.config.engine.sglang.server_args"),
    "inference.use_pd_kv_transfer": unneeded("engine.sglang.prefill says it: docs/sglang.md"),
    "inference.enable_fp32_lm_head": fact(
        "wide_head", truth, "rollout: engine.sglang.server_args.enable_fp32_lm_head"
    ),
    "inference.enable_fp32_router_logits": _MODEL,
    "inference.weight_broadcast.type": unneeded("weight_broadcast.type says it"),
    "inference.deployment.type": _settled(
        {
            "single_node": "",
            "": "by hand: rollout.config.engine.sglang.nnodes, or prefill: docs/sglang.md",
        }
    ),
    "inference.deployment.": by_hand("rollout.config.engine.sglang: docs/sglang.md"),
    # the run
    "max_steps": _STEPS,
    "trainer.max_steps": _STEPS,
    "orchestrator.max_steps": _STEPS,
    "deployment.type": fact("deployment", plain_text, "services.yaml: devices"),
    "deployment.gpus_per_node": fact("gpus", whole, "trainer: ranks.count"),
    "deployment.num_train_gpus": fact("trained", whole, "trainer: ranks.count"),
    "deployment.num_infer_gpus": fact("engines", whole, "services.yaml: rollout.replicas"),
    "deployment.num_train_nodes": fact("train_nodes", whole, "trainer: ranks.count"),
    "deployment.num_infer_nodes": fact("engine_nodes", whole, "services.yaml: rollout.replicas"),
    "deployment.num_infer_replicas": fact("engine_sets", whole, "services.yaml: rollout.replicas"),
    "deployment.nodes_per_fsdp_group": fact("group_nodes", whole, "trainer: fsdp.replicas"),
    "deployment.orchestrator_on_inference": unneeded("the loop runs where it is started"),
    "run.name": unneeded("run.yaml run_dir is the run's name"),
    "run.dir": unneeded("run.yaml run_dir is the run's name"),
    "clean": by_hand("another run_dir, or remove the one that is there"),
    **_under("weight_broadcast", _BROADCAST),
    **_under("trainer.weight_broadcast", _BROADCAST),
    **_under("orchestrator.weight_broadcast", _BROADCAST),
    **_under("monitors.wandb", _WANDB),
    **_under("trainer.monitors.wandb", _WANDB),
    **_under("orchestrator.monitors.wandb", _WANDB),
    "trainer.weight_broadcast.inference_world_size": _PORTS,
    "orchestrator.weight_broadcast.inference_world_size": _PORTS,
    **_under("ckpt", {**_CHECKPOINTS, "output_dir": _PLACES}),
    **_under("trainer.ckpt", {**_CHECKPOINTS, **_OF_TRAINER}),
    **_under("orchestrator.ckpt", {**_CHECKPOINTS, "skip_progress": _WHOLE}),
    "orchestrator.ckpt.wait_for_weights_timeout": _WAITS,
    # an environment; one source, or one of several
    f"{TRAIN}name": fact("name", plain_text, "run: environments.<name>", "where there are several"),
    f"{TRAIN}ratio": fact("ratio", number, "run: environments.<name>.weight"),
    f"{TRAIN}group_size": fact("group", whole, "run: environments.<name>.samples_per_group"),
    f"{TRAIN}sampling.max_completion_tokens": fact(
        "tokens", whole, "run: environments.<name>.sampling.max_new_tokens"
    ),
    f"{TRAIN}sampling.temperature": by_hand(
        "one temperature of all: run.yaml sampling.temperature"
    ),
    f"{TRAIN}sampling.": by_hand("run.yaml environments.<name>.sampling"),
    f"{TRAIN}algo.": by_hand("one algorithm of all environments: run.yaml algorithm"),
    f"{TRAIN}curriculum.gates.": Flag("run: filters", "advantage_range at 0, which is reward_std"),
    f"{TRAIN}curriculum.sampler.type": _settled({"standard": "", "": _SAMPLER.why}),
    f"{TRAIN}curriculum.sampler.": _SAMPLER,
    f"{EVAL}name": fact("name", plain_text, "run: evaluation.datasets.<name>"),
    f"{EVAL}ratio": absent("each data set is scored whole"),
    f"{EVAL}num_examples": fact("tasks", whole, "run: evaluation.datasets.<name>.groups"),
    f"{EVAL}group_size": fact("samples", whole, "run: evaluation.datasets.<name>.samples"),
    f"{EVAL}interval": by_hand("one interval of all: run.yaml evaluation.every_steps"),
}
for _source, _name in ((TRAIN, "environment"), (EVAL, "evaluation.datasets.<name>.environment")):
    KEYS |= {
        f"{_source}env.taskset.id": fact(
            "taskset", plain_text, f"run: {_name}.settings.environment", "of verifiers"
        ),
        f"{_source}env.taskset.": Flag(f"run: {_name}.settings.arguments"),
        f"{_source}env.<agent>.harness.id": _settled(
            {"null": "", "": "by hand: docs/openai.md, Harnesses"}
        ),
        f"{_source}env.<agent>.runtime.type": _settled(
            {"subprocess": "", "": "by hand: docs/rollout.md, Programs"}
        ),
        f"{_source}env.<agent>.timeout.rollout": by_hand("run.yaml group_timeout_seconds"),
        f"{_source}env.": _OWN_ENVIRONMENT,
        f"{_source}serve.": _PORTS,
    }
for _place, _every in (("orchestrator.eval.sampling.", "eval_"), (f"{EVAL}sampling.", "")):
    _sampling = "run: evaluation.datasets.<name>.sampling"
    KEYS |= {
        f"{_place}temperature": fact(f"{_every}temperature", number, f"{_sampling}.temperature"),
        f"{_place}top_p": fact(f"{_every}top_p", number, f"{_sampling}.top_p"),
        f"{_place}top_k": fact(f"{_every}top_k", _top_k, f"{_sampling}.top_k", "-1 is 0"),
        f"{_place}min_p": only_zero("there is no min_p"),
        f"{_place}max_completion_tokens": fact(
            f"{_every}tokens", whole, f"{_sampling}.max_new_tokens"
        ),
        f"{_place}": by_hand("run.yaml evaluation.datasets.<name>.sampling"),
    }
# which several parts have: of all, of a trainer, an orchestrator, the engines
_ALL, _TRAINED = ("", "trainer.", "orchestrator.", "inference."), ("", "trainer.", "orchestrator.")
_SHARED: dict[str, tuple[tuple[str, ...], Flag]] = {
    "env_vars.": (_ALL, _ENVIRONMENT),
    "log.": (_ALL, _LOGS),
    "output_dir": (_ALL, _PLACES),
    "monitors.file.": (_TRAINED, unneeded("RUN_DIR/metrics.jsonl is always written")),
    "monitors.prime.": (("", "orchestrator."), absent("trackers of run.yaml: docs/trackers.md")),
    "heartbeat.": (("trainer.", "orchestrator."), _HEARTBEAT),
    "metrics_server.": (("trainer.",), _HEARTBEAT),
    "resume.": (_TRAINED, _NUMBERED),
    "rollout_transport.": (_TRAINED, _TRANSPORT),
    "slurm.": (("", "inference."), _SLURM),
    "dry_run": (("", "inference."), by_hand("`sluice check run.yaml --up services.yaml`")),
}
KEYS |= {f"{part}{name}": flag for name, (parts, flag) in _SHARED.items() for part in parts}
# tables that stand for themselves: what "None" in their place is, and in that of a number
NULLS: dict[str, tuple[str, Any]] = {
    "trainer.model.ac": ("checkpointing", False),
    "trainer.model.ac_offloading": ("offloading", False),
    "trainer.optim.max_norm": ("norm", 0.0),
}


def find_key(name: str) -> Flag | None:
    """What a key becomes; None for one that is not known. Agents have any name."""
    if name in KEYS:
        return KEYS[name]
    head, env, rest = name.partition("].env.")
    agent, _, inner = rest.partition(".")
    if env and agent != "taskset" and (flag := KEYS.get(f"{head}{env}<agent>.{inner}")):
        return flag
    starts = [start for start in KEYS if start.endswith(".") and name.startswith(start)]
    return KEYS[max(starts, key=len)] if starts else None


def is_table(name: str) -> bool:
    """Whether keys of a table are known: one that is empty has its defaults."""
    return any(known.startswith(f"{name}.") for known in KEYS)


def key_table() -> str:
    """The table of docs/from-prime-rl.md."""
    lines = ["| prime-rl | ours, or why not |", "|---|---|"]
    rows: dict[str, list[str]] = {}
    for name, key in KEYS.items():
        ours = f"`{key.ours}`" if key.ours else ""
        told = ", ".join(filter(None, (ours, key.why)))
        rows.setdefault(told, []).append(f"`{name}*`" if name.endswith(".") else f"`{name}`")
    lines += [f"| {', '.join(names)} | {told} |" for told, names in rows.items()]
    return "\n".join(lines) + "\n"
