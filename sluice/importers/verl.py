"""`sluice import-verl`: what a run script of verl says, as run.yaml and services.yaml."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sluice.config import ConfigError
from sluice.importers.documents import (
    LONG_PROMPTS,
    UNKNOWN,
    Imported,
    NotCarriedError,
    check_documents,
    give_devices,
    of_critic,
    set_at,
    write_imported,
)
from sluice.importers.shell import Shell, command_place, joined_lines
from sluice.importers.verl_files import read_config, take_options
from sluice.importers.verl_keys import find_key

COMMAND = "import-verl"
GROUP_SECONDS = 14_400  # verl has no limit of a group
MOST_TOLD = 200  # characters of a word
_PROGRAM = re.compile(r"(?:-m\s+([\w.]*\.main_ppo|[\w.]*_async_main)|\bmain_ppo\w*\.py)\b[\"']?")
_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
_NULL = ("null", "None", "~", "")
_FSDP_SIZE = "actor_rollout_ref.actor.fsdp_config.fsdp_size"
_EXPERT = "actor_rollout_ref.actor.veomni.expert_parallel_size"


async def import_verl(arguments: Sequence[str]) -> None:
    """Write run.yaml and services.yaml of a script; list what could not be carried.

    Raises ConfigError.
    """
    write_imported(COMMAND, import_script, arguments)


def read_overrides(
    text: str, environment: Mapping[str, str], folder: Path | None = None
) -> tuple[dict[str, str], dict[str, Any], list[str]]:
    """Keys and their texts as the training command would get them, the last of each; what the
    command itself says: `megatron`, `one_step_off`, `asynchronous`; and what is not sure of all
    that, a line each. Keys of a file that it names, found from `folder` upwards, are among them.
    Raises ConfigError."""
    lines = [line for line in joined_lines(text).splitlines() if not line.lstrip().startswith("#")]
    commands = [line[found.end() :] for line in lines if (found := _PROGRAM.search(line))]
    if not commands:
        raise ConfigError(f"{COMMAND}: the script has no command of verl's main_ppo")
    program = next(filter(None, map(_PROGRAM.search, lines)))[1] or ""
    left = list[str]()
    if len(commands) > 1:
        left.append(f"the script trains {len(commands)} times: the first of its commands is read")
    shell = Shell(text, environment, COMMAND, command_place(text, _PROGRAM))
    options, words = take_options(shell.words(commands[0]))
    file = read_config(options, folder)
    given = file.values
    for word in words:
        if match := _OVERRIDE.fullmatch(word):
            given[match[1]] = match[2].strip("\"'") if match[2][:1] not in "[{" else match[2]
        elif word.strip() and not word.startswith("--"):
            why = "is known to the shell alone" if "$" in word else "is no key=value"
            left.append(f"{word[:MOST_TOLD]!r}: {why}; what it says is not carried")
    if not given:
        raise ConfigError(f"{COMMAND}: the command has no key=value")
    told = {
        "megatron": file.is_megatron,
        "one_step_off": "one_step_off" in program,
        "asynchronous": "async_main" in program,
    }
    return given, told, [*left, *file.left, *shell.doubts]


def import_script(
    text: str, run_dir: Path, environment: Mapping[str, str], folder: Path | None = None
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """run.yaml, services.yaml, and what could not be carried, a line each. Raises ConfigError.

    What a script leaves out is as verl has it, where that is not so here.
    """
    into = Imported()
    given, command, into.left = read_overrides(text, environment, folder)
    into.facts |= command
    for name, value in given.items():
        key = find_key(name)
        if key is None:
            into.left.append(f"{name}: is unknown")
        elif value in _NULL:
            continue
        elif key.put is not None:
            into.note(key, f"{name}={value}")
            try:
                key.put(into, [value])
            except NotCarriedError as error:
                into.left.append(f"{name}: {error}")
        elif not key.why.startswith("not needed"):
            into.left.append(f"{name}: {key.why}")
    for name in ("prompt_length", "response_length"):  # an engine's own are those that count
        if (own := into.facts.get(f"engine_{name}")) is not None:
            into.facts[name] = own
    _sizes(into)
    _algorithm(into)
    _optim(into)
    _trainer(into)
    _prompts(into)
    _evaluation(into)
    services = _documents(into, run_dir)
    return into.run, services, list(dict.fromkeys(into.left))


def _sizes(into: Imported) -> None:
    """How many groups and samples a step has, and how many optimizer steps."""
    facts, run = into.facts, into.run
    groups, mini = facts.get("groups", 1024), facts.get("mini_batch", 256)
    if facts["asynchronous"]:
        updates = facts.get("updates", 4) * facts.get("batches", 1)
        groups = updates * mini
        run["max_staleness"] = max(0, math.ceil(facts.get("staleness", 0.1)))
        if "prompts" in facts and groups > 0:
            run["steps"] = max(1, facts["prompts"] // groups)
    elif facts["one_step_off"]:
        run["max_staleness"] = 1
    elif "filters" not in run:  # the rows that are drawn are those that are trained on
        groups = facts.get("generated", groups)
    samples = facts.get("samples", 1)
    if samples == 1:
        groups, samples = max(1, groups // 2), 2
        mini = max(1, mini // 2) if mini > 0 else mini
        into.left.append(
            "actor_rollout_ref.rollout.n 1: a group has at least 2 samples; the files have 2, and "
            "half as many groups"
        )
    run["groups_per_step"], run["samples_per_group"] = groups, samples
    parts, rest = divmod(groups, mini) if mini > 0 else (0, 0)
    if rest or parts < 1:
        into.left.append(
            f"actor_rollout_ref.actor.ppo_mini_batch_size {mini}: does not divide the {groups} "
            "groups of a step"
        )
    elif parts > 1:
        set_at(run, "algorithm.mini_batches", parts)
    if "filters" in run:
        into.left.append(
            "algorithm.filter_groups.enable: of verl's own programs its recipe dapo alone filters; "
            "the files do"
        )
        if (generated := facts.get("generated", groups)) > groups and not facts["asynchronous"]:
            run["over_sampling"] = min(16.0, generated / groups)
    if "steps" not in run:
        into.left.append(
            "trainer.total_training_steps: is missing; run.yaml steps is epochs times rows, by "
            "groups_per_step"
        )


def _algorithm(into: Imported) -> None:
    facts = into.facts
    loss, advantage = facts.get("loss", "ppo_clip"), facts.get("estimator", "gae")
    averaged = _aggregation(into, loss)
    spec: dict[str, Any] = {"name": loss, **averaged}
    low, high = facts.get("clip_low", 0.2), facts.get("clip_high", 0.2)
    if loss == "gmpo":
        spec["settings"] = {"log_clip_low": low, "log_clip_high": high}
    elif loss not in ("gpg", "sapo", "kl_cov"):
        spec |= {"clip_low": low, "clip_high": high}
    if loss == "cispo" and low >= 1:
        del spec["clip_low"]  # the bound is below 0, where no ratio is
    if loss == "ppo_clip":
        spec["dual_clip"] = facts.get("dual_clip", 3.0)
    bypass = _sampled_logprobs(facts)
    if not bypass and loss != "gpg":
        spec["old_logprobs"] = "old"
    coefficient = facts.get("kl_loss_coef", 0.001) if facts.get("kl_loss") else 0.0
    if coefficient and facts.get("kl_loss_type") == "k1":
        into.left.append(
            "actor_rollout_ref.actor.kl_loss_type: the expected gradient of kl, or k1, is 0; the "
            "files have no KL in the loss"
        )
    elif coefficient:
        spec["kl_coefficient"] = coefficient
        spec["kl_estimator"] = facts.get("kl_loss_type", "low_variance")
    if facts.get("entropy"):
        spec["entropy_coefficient"] = facts["entropy"]
    if "importance" in facts and bypass:
        into.left.append("algorithm.rollout_correction.rollout_is: by hand: with bypass_mode")
    elif "importance" in facts:
        high = facts.get("importance_high", 2.0)
        spec["importance"] = {"level": facts["importance"], "high": high}
    given: dict[str, Any] = {"name": advantage}
    if advantage == "grpo" and facts.get("by_std") is False:
        given["scale_by_std"] = False
    if advantage in ("gae", "reinforce_plus_plus") and facts.get("gamma", 1.0) != 1.0:
        given["gamma"] = facts["gamma"]
    if advantage == "gae":
        given |= {"whiten": True, "gae_lambda": facts.get("lambda", 1.0)}
        value = {"name": "value", "value_clip": facts.get("value_clip", 0.5), **averaged}
        into.run["critic"] = {"loss": value}
        if facts.get("critic_steps"):
            into.run["critic"]["warmup_steps"] = facts["critic_steps"]
        into.left.append(
            "algorithm.adv_estimator gae: services.yaml has a critic beside the trainer; look at it"
        )
    if facts.get("kl_in_reward"):
        _reward_kl(into, given)
    if facts.get("overlong") and facts.get("overlong_buffer"):
        given["overlong"] = {
            "max_length": facts.get("overlong_length", facts.get("response_length", 512)),
            "buffer": facts["overlong_buffer"],
            "penalty": facts.get("overlong_penalty", 1.0),
        }
    into.run.setdefault("algorithm", {}).update({"advantage": given, "loss": spec})


def _sampled_logprobs(facts: Mapping[str, Any]) -> bool:
    """Whether the engines' log-probs are the old policy's; each trainer has its own default."""
    if facts["asynchronous"]:
        return facts.get("engine_logprobs", True) and not facts.get("proximal")
    bypass: bool = facts.get("bypass", facts["one_step_off"])
    return bypass


def _aggregation(into: Imported, loss: str) -> dict[str, Any]:
    facts = into.facts
    kind = facts.get("aggregation", "token_mean")
    if loss in ("gspo", "gmpo"):  # whatever is given
        if facts.get("kl_loss") and kind != "sample_mean":
            into.left.append(
                f"actor_rollout_ref.actor.loss_agg_mode: with {loss} the KL is a mean over samples "
                "here, as the loss is, in verl only the loss"
            )
        kind = "sample_mean"
    if kind == "norm":
        into.left.append(
            "actor_rollout_ref.actor.loss_agg_mode seq-mean-token-sum-norm: the sum over samples "
            "is divided by their number here, in verl it is not"
        )
        length = facts.get("scale", facts.get("response_length", 512))
        return {"aggregation": "constant", "constant_length": float(length)}
    if kind == "constant":
        return {"aggregation": "constant", "constant_length": 1.0}
    return {} if kind == "token_mean" else {"aggregation": kind}


def _reward_kl(into: Imported, given: dict[str, Any]) -> None:
    facts = into.facts
    if given["name"] not in ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"):
        into.left.append(
            f"algorithm.use_kl_in_reward: not there with {given['name']}; algorithm.loss has "
            "kl_coefficient"
        )
        return
    given["kl_coefficient"] = facts.get("kl", 0.001)
    if not _sampled_logprobs(facts):
        given["old_logprobs"] = "old"
    if facts.get("reward_kl", "k1") != "k1":
        given["kl_estimator"] = facts["reward_kl"]
    if facts.get("kl_control", "fixed") != "fixed":
        into.left.append("algorithm.kl_ctrl.type: not there: the coefficient does not adapt")


def _optimizer_steps(into: Imported) -> int:
    """Of one training step."""
    algorithm = into.run["algorithm"]
    count: int = algorithm.get("mini_batches", 1) * algorithm.get("epochs", 1)
    return count


def _optim(into: Imported) -> None:
    """With verl's defaults, where they are others than ours.

    verl's schedules count training steps, ours count optimizer steps.
    """
    facts, optim = into.facts, into.trainer.setdefault("optim", {})
    optim.setdefault("learning_rate", 1e-6)
    optim.setdefault("weight_decay", 0.01)
    optim["betas"] = [0.9, 0.999]
    optim["max_grad_norm"] = _norm(facts, "")
    _schedule(into, "", optim)


def _norm(facts: Mapping[str, Any], whose: str) -> float:
    """Of two keys that name it the one that the backend reads, or else the one that is given."""
    names = [f"{whose}norm", f"{whose}optim_norm"]
    if _backend(facts) == "megatron":
        names.reverse()
    return next((facts[name] for name in names if name in facts), 1.0)


def _schedule(into: Imported, whose: str, optim: dict[str, Any]) -> None:
    """Of the facts that begin with `whose`."""
    facts, each = into.facts, _optimizer_steps(into)
    steps = facts.get(f"{whose}decay_steps") or into.run.get("steps", 0)
    if warmup := _warmup(into, f"{whose}warmup", steps):
        optim["warmup_steps"] = warmup * each
    schedule = facts.get(f"{whose}schedule", "constant")
    if schedule == "constant":
        return
    if not steps:
        into.left.append(
            f"{'critic' if whose else 'actor_rollout_ref.actor'}.optim: {schedule} needs "
            "optim.decay_steps, which nothing tells"
        )
        return
    optim |= {"schedule": schedule, "decay_steps": steps * each}
    lowest = facts.get(f"{whose}minimum_rate", 0.0) / (optim["learning_rate"] or 1.0)
    if minimum := facts.get(f"{whose}minimum", lowest):
        optim["minimum_ratio"] = min(1.0, minimum)


def _warmup(into: Imported, name: str, steps: int) -> int:
    """Training steps; 0 where there are none, or their number is not known."""
    facts = into.facts
    given = facts.get(name, -1)
    if given > 0 or (given == 0 and _backend(facts) == "fsdp"):  # for Megatron 0 is as if not given
        return int(given)
    if ratio := facts.get(f"{name}_ratio", 0.0):
        if not steps:
            into.left.append(f"{name} of {ratio:g} of the steps: needs optim.warmup_steps")
        return int(ratio * steps)
    return 0


def _backend(facts: Mapping[str, Any]) -> str:
    told: str = facts.get("model_engine") or facts.get("strategy", "fsdp")
    return "megatron" if facts["megatron"] else told


def _offloads(into: Imported, runs_again: bool) -> bool:
    """Whether what layers are run again on waits on the host."""
    if not into.facts.get("activations_offloaded"):
        return False
    if not runs_again:
        into.left.append(
            "actor_rollout_ref.model.enable_activation_offload: fsdp.activation_offload is of what "
            "its activation_checkpointing keeps"
        )
    return runs_again


def _trainer(into: Imported) -> None:
    facts, trainer = into.facts, into.trainer
    backend = _backend(facts)
    trainer["backend"] = backend
    count = facts.get("nodes", 1) * facts.get("gpus", 8)
    set_at(trainer, "ranks.count", count)
    if facts.get("nodes", 1) > 1:
        into.left.append("trainer.nnodes: ranks on several hosts: docs/cluster.md")
    longest = facts.get("prompt_length", 512) + facts.get("response_length", 512)
    if facts.get("by_tokens"):
        trainer["max_tokens_per_micro_batch"] = facts.get("micro_tokens", 16384)
    elif "micro_batch" in facts:  # as many tokens as the longest rows of its micro-batches
        trainer["max_tokens_per_micro_batch"] = max(1, facts["micro_batch"]) * longest
    trainer["oversize_policy"] = "alone"
    if facts.get("lora_rank"):
        lora: dict[str, Any] = {
            "rank": facts["lora_rank"],
            "alpha": facts.get("lora_alpha", 32.0 if backend == "megatron" else 16.0),
        }
        lora |= {"targets": facts["targets"]} if "targets" in facts else {}
        trainer["lora"] = lora | ({"start": facts["lora_start"]} if "lora_start" in facts else {})
    replay = {"routing_replay": facts["routing_replay"]} if "routing_replay" in facts else {}
    if backend == "fsdp":
        trainer.pop("megatron", None)
        trainer.pop("experts", None)
        fsdp: dict[str, Any] = {"dtype": "bfloat16", **trainer.get("fsdp", {}), **replay}
        fsdp["activation_checkpointing"] = facts.get("checkpointing", True)
        if _offloads(into, fsdp["activation_checkpointing"]):
            fsdp["activation_offload"] = True
        size = facts.get("fsdp_size", -1)
        if 0 < size < count and count % size == 0:
            fsdp["replicas"] = count // size
        elif size not in (-1, count):
            into.left.append(
                f"{_FSDP_SIZE} {size}: does not divide the {count} ranks into fsdp.replicas"
            )
        if (expert := facts.get("expert", 1)) > 1:
            if count // fsdp.get("replicas", 1) % expert == 0:
                fsdp["expert"] = expert
            else:
                into.left.append(f"{_EXPERT} {expert}: does not divide the ranks of a copy")
        trainer["fsdp"] = fsdp | ({"context": facts["context"]} if "context" in facts else {})
        return
    trainer.pop("fsdp", None)
    _offloads(into, False)
    megatron = trainer.setdefault("megatron", {}) | replay
    trainer["megatron"] = megatron
    if megatron.get("tensor", 1) > 1:
        megatron["sequence_parallel"] = facts.get("sequence_parallel", True)
    if megatron.get("pipeline", 1) == 1:
        for name in ("first_stage_layers", "last_stage_layers", "virtual_pipeline"):
            megatron.pop(name, None)
    if megatron.get("expert", 1) == 1:
        megatron.pop("expert_tensor", None)
    if "recompute_layers" in facts and megatron.get("recompute") == "full":
        megatron["recompute_layers"] = facts["recompute_layers"]
    if facts.get("offloads") and "lora" not in trainer:  # whose state is small
        megatron["optimizer_offload"] = facts.get("offload_fraction", 0.0)
    _experts(into)
    if facts.get("predicts"):
        megatron["mtp_loss_scaling_factor"] = facts.get("prediction_scale", 0.1)


def _prompts(into: Imported) -> None:
    """Rows are as verl's own data sets have them: a chat, and an object with the right answer."""
    facts, run = into.facts, into.run
    settings = run.setdefault("environment", {}).setdefault("settings", {})
    run["environment"]["name"] = "prompts"
    settings.setdefault("prompt_key", "prompt")
    settings |= {"chat": True, "answer_key": "reward_model.ground_truth", "reward": "math"}
    files = facts.get("trained") or {"train": UNKNOWN}
    if UNKNOWN in files.values():
        into.left.append("data.train_files: is missing; put the file in its place")
    shuffle = facts.get("shuffle", True)
    if len(files) == 1:
        run["prompts"] = {"file": next(iter(files.values())), "shuffle": shuffle}
    else:
        environment = run.pop("environment")
        run["environments"] = {
            name: {
                "weight": 1.0,
                "prompts": {"file": file, "shuffle": shuffle},
                "environment": environment,
            }
            for name, file in files.items()
        }
        into.left.append(
            "data.train_files: environments: each file has the same weight; verl joins them, so "
            "that theirs are their rows"
        )
    into.left.append(
        "environment.settings.reward: in verl the row's data_source chooses it; the files have "
        "math; several: environments of one file, each with its where: {data_source: ...}, see "
        "docs/rollout.md"
    )
    if facts.get("filters_prompts") or facts.get("truncation", "error") != "error":
        into.left.append(f"data.max_prompt_length: {LONG_PROMPTS}")
    if facts.get("reward_manager") == "dapo":
        into.left.append(
            "reward_model.reward_manager dapo: what is wrong has a reward of 0 here, of -1 there"
        )
    if facts.get("reward_model"):
        into.left.append(
            "reward_model.enable: by hand: a service of its own, and reward: reward_model: "
            "docs/rollout.md"
        )
    sampling = run.setdefault("sampling", {})
    sampling["max_new_tokens"] = facts.get("response_length", 512)
    if facts.get("top_k"):
        sampling["top_k"] = facts["top_k"]
    if facts.get("ignores_eos"):
        sampling["ignore_eos"] = True
    if facts.get("samples_at_all") is False:
        into.left.append("actor_rollout_ref.rollout.do_sample: greedy answers of a group are equal")
    run["group_timeout_seconds"] = GROUP_SECONDS
    if "save_every" in facts:
        run["checkpoint_every"] = facts["save_every"]


def _evaluation(into: Imported) -> None:
    facts = into.facts
    if not facts.get("evaluated"):
        return
    temperature = facts.get("eval_temperature", 0.0)
    samples = facts.get("eval_samples", 1)
    if samples > 1 and not temperature:
        into.left.append(
            "actor_rollout_ref.rollout.val_kwargs.n: greedy answers are equal; one is asked"
        )
        samples = 1
    sampling: dict[str, Any] = {
        "max_new_tokens": facts.get("response_length", 512),
        "temperature": temperature,
    }
    if temperature and facts.get("eval_top_p", 1.0) < 1:
        sampling["top_p"] = facts["eval_top_p"]
    if temperature and facts.get("eval_top_k"):
        sampling["top_k"] = facts["eval_top_k"]
    sets = {}
    environments = into.run.get("environments", {})
    for name, file in facts["evaluated"].items():
        named = name if name in environments else next(iter(environments), None)
        sets[name] = {
            "prompts": {"file": file, "shuffle": False},
            **({"environment": named} if named else {}),
            "samples": samples,
            "sampling": dict(sampling),
            "groups": 1024,
        }
    evaluation: dict[str, Any] = {"datasets": sets}
    name, otherwise = ("ahead_eval_every", 1) if facts["asynchronous"] else ("eval_every", 0)
    if every := facts.get(name, otherwise):
        evaluation["every_steps"] = every
    if facts.get("evaluated_early") is False:
        evaluation["before_training"] = False
    into.run["evaluation"] = evaluation
    into.left.append("data.val_files: groups: 1024 bounds the tasks; give their number")


def _documents(into: Imported, run_dir: Path) -> dict[str, Any]:
    facts, run = into.facts, into.run
    model = facts.get("model", UNKNOWN)
    if model == UNKNOWN:
        into.left.append("actor_rollout_ref.model.path: is missing; put its directory there")
    elif "/" in model and not model.startswith(("/", "~", ".")):
        into.left.append(
            f"actor_rollout_ref.model.path {model}: put its directory in its place; nothing is "
            "downloaded"
        )
    run |= {"run_dir": str(run_dir), "services": f"{run_dir}/services.json"}
    engine = into.rollout.setdefault("engine", {})
    engine["backend"] = "sglang"
    if facts.get("engine", "sglang") != "sglang":
        into.left.append(f"actor_rollout_ref.rollout.name {facts['engine']}: engines are SGLang")
    gpus = facts.get("engine_gpus", 2)
    arguments = engine.setdefault("sglang", {}).setdefault("server_args", {})
    if gpus > 1:
        arguments["tp_size"] = gpus
    arguments.setdefault("mem_fraction_static", 0.5)
    engine.setdefault(
        "max_model_length", facts.get("prompt_length", 512) + facts.get("response_length", 512)
    )
    trainer = {"model": model, **into.trainer}
    entries: dict[str, Any] = {
        "router": {"kind": "router"},
        "trainer": {"kind": "trainer", "config": trainer},
    }
    if "critic" in run:
        entries["critic"] = {"kind": "trainer", "config": _critic(into, trainer)}
    rollout: dict[str, Any] = {"kind": "rollout", "config": {"tokenizer": model, **into.rollout}}
    entries["rollout"] = rollout
    _devices(into, entries, max(1, gpus))
    services = {"run_dir": str(run_dir), "services": entries}
    check_documents(into, services)
    return services


def _experts(into: Imported) -> None:
    """Its bridge has no balancing unless it is named."""
    facts, trainer = into.facts, into.trainer
    if facts.get("aux_loss") and facts.get("balancing", "none") != "none":
        set_at(trainer, "experts.aux_loss_coefficient", facts["aux_loss"])
    elif facts.get("aux_loss"):
        into.left.append(
            f"moe_aux_loss_coeff {facts['aux_loss']:g}: has no effect in verl with "
            "moe_router_load_balancing_type none, its default; here it is "
            "trainer.config.experts.aux_loss_coefficient"
        )
    if "lora" in trainer and trainer.pop("experts", None):
        into.left.append("moe_*_loss_coeff: with adapters routers stay as they were loaded")


def _critic(into: Imported, trainer: dict[str, Any]) -> dict[str, Any]:
    facts = into.facts
    optim = {
        "learning_rate": facts.get("critic_rate", 1e-5),
        "weight_decay": facts.get("critic_decay", 0.01),
        "betas": [0.9, 0.999],
        "max_grad_norm": _norm(facts, "critic_"),
    }
    _schedule(into, "critic_", optim)
    critic = of_critic(trainer) | {"head": "value", "optim": optim}
    critic["model"] = facts.get("critic_model", trainer["model"])
    critic.pop("experts", None)  # which verl sets of each
    if facts.get("critic_strategy", trainer["backend"]) != trainer["backend"]:
        into.left.append("critic.strategy: by hand: the critic's config has the trainer's backend")
    return critic


def _devices(into: Imported, entries: dict[str, Any], engine_gpus: int) -> None:
    """Engines on the trainer's devices where verl has them share, else on the ones behind."""
    facts, run, rollout = into.facts, into.run, entries["rollout"]
    trained = facts.get("nodes", 1) * facts.get("gpus", 8)
    ahead = facts["one_step_off"] or facts["asynchronous"]
    apart = ahead or facts.get("shared") is False
    gpus = facts.get("rollout_gpus", 8 if ahead else 0)
    engines = facts.get("rollout_nodes", 1) * gpus if apart else trained
    if (replicas := engines // engine_gpus) > 1:
        rollout["replicas"] = replicas
    if not apart and run.get("over_sampling", 1) > 1:
        into.left.append(
            "actor_rollout_ref.hybrid_engine: placement: colocated takes over_sampling 1; "
            "docs/colocation.md"
        )
        return
    if not apart:
        run["placement"] = "colocated"
        set_at(rollout["config"], "engine.sglang.server_args.enable_memory_saver", True)
    if facts.get("nodes", 1) > 1 or facts.get("rollout_nodes", 1) > 1 or engines < engine_gpus:
        return
    used = engines // engine_gpus * engine_gpus
    give_devices(into, entries, trained, used, is_shared=not apart)
