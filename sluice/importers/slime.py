"""`sluice import-slime`: what a run script of slime says, as run.yaml and services.yaml."""

from __future__ import annotations

import json
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
    Values,
    check_documents,
    give_devices,
    of_critic,
    plain_text,
    plain_value,
    set_at,
    write_imported,
)
from sluice.importers.shell import Shell, command_place, joined_lines
from sluice.importers.slime_flags import REWARDS, find_flag
from sluice.json_values import load_json
from sluice.weights.convert.quantized_layout import Int4Groups, layout_of
from sluice.weights.errors import WeightStoreError

COMMAND = "import-slime"
_TRAIN = re.compile(r"\btrain(_async)?\.py\b[\"']?")
_RUN = re.compile(r"\bpython[\w.]*[ \t][^#\n]*?\btrain(?:_async)?\.py\b")
# variables of its trainer
AWARE, GROUP_SIZE = "OPEN_TRAINING_INT4_FAKE_QAT_FLAG", "OPEN_TRAINING_INT4_GROUP_SIZE"


async def import_slime(arguments: Sequence[str]) -> None:
    """Write run.yaml and services.yaml of a script; list what could not be carried.

    Raises ConfigError.
    """
    write_imported(COMMAND, import_script, arguments)


def read_script(
    text: str, environment: Mapping[str, str]
) -> tuple[list[tuple[str, Values]], list[str]]:
    """Flags and their values as the training command would get them; what is not sure of them.

    Arrays are put in where the command names them; of a script without it, all are. Raises
    ConfigError.
    """
    shell = Shell(text, environment, COMMAND, command_place(text, _RUN))
    command = training_command(text)
    words = list(shell.array_words()) if command is None else shell.words(command[0])
    if not any(word.startswith("--") for word in words):
        raise ConfigError(f"{COMMAND}: the script has no command train.py and no arguments")
    flags: list[tuple[str, Values]] = []
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            flags.append((name, [value] if equals else []))
        elif flags:
            flags[-1][1].append(word)
    lines = joined_lines(text).splitlines()
    times = sum(bool(_RUN.search(line)) for line in lines if not line.lstrip().startswith("#"))
    several = f"the script trains {times} times: the first of its commands is read"
    return flags, [*([several] if times > 1 else []), *shell.doubts]


def training_command(text: str) -> tuple[str, bool] | None:
    """What stands behind the name of the program, and whether that is train_async.py.

    A line that runs it by Python goes before one that only names it, such as one of pkill.
    """
    lines = [line for line in joined_lines(text).splitlines() if not line.lstrip().startswith("#")]
    run = [line for line in lines if _RUN.search(line)]
    for line in run or lines:
        if found := _TRAIN.search(line):
            return line[found.end() :], bool(found[1])
    return None


def import_script(
    text: str, run_dir: Path, environment: Mapping[str, str], _: Path | None = None
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """run.yaml, services.yaml, and what could not be carried, a line each. Raises ConfigError.

    What is missing for the files to load, because the script does not say it or a function of its
    own does, is told as well, and stands in the files as a value to be replaced.
    """
    into = Imported()
    command = training_command(text)
    if command and command[1]:
        into.run["max_staleness"] = 1  # train_async.py samples ahead of one step
    flags, into.left = read_script(text, environment)
    for name, values in flags:
        flag = find_flag(name)
        if flag is None:
            into.left.append(f"--{name}: is unknown")
            continue
        try:
            into.note(flag, " ".join([f"--{name}", *values]))
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
    _experts(into)
    _evaluation(into)
    _four_bits(into, text, environment)
    run, services = _documents(into, run_dir)
    return run, services, list(dict.fromkeys(into.left))


def _four_bits(into: Imported, text: str, environment: Mapping[str, str]) -> None:
    """Experts that compute as they are published, by variables and not by flags."""
    try:
        if _variable(AWARE, text, environment, "0") != "1":
            return
        size = _variable(GROUP_SIZE, text, environment, "128")
        if size not in ("32", "128"):
            raise NotCarriedError(f"{GROUP_SIZE} {size}: publish.quantization has 32 and 128")
    except NotCarriedError as error:
        into.left.append(f"{AWARE}: {error}; passes compute with weights as they are")
        return
    into.trainer["publish"] = {"quantization": f"int4_{size}", "quantization_aware": True}
    into.left.append(
        f"{AWARE}: model has to be a plain checkpoint, of which versions in 4 bits are made; "
        "`sluice convert SRC DST --to hf` makes it of one in 4 bits"
    )


def _variable(name: str, text: str, environment: Mapping[str, str], default: str) -> str:
    """What a script gives its training, by `export`, `env` or the JSON of a runtime environment.

    Raises NotCarriedError for a value that only the shell knows.
    """
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    found = re.findall(
        rf"""\b{name}[\\"']*[ \t]*[:=][ \t]*[\\"']*(\$\{{[^{{}}]*\}}|[^\s"'\\,;{{}}]+)""",
        "\n".join(lines),
    )
    if not found:
        return environment.get(name) or default
    shell = Shell(text, environment, COMMAND, command_place(text, _RUN))
    return plain_text(shell.replaced(found[-1]))


def _server_argument(into: Imported, name: str, values: Values) -> None:
    name = name.replace("-", "_")
    known = [plain_value(plain_text(value)) for value in values]
    value = True if not known else known[0] if len(known) == 1 else known
    set_at(into.rollout, f"engine.sglang.server_args.{name}", value)


def _algorithm(into: Imported) -> None:
    facts = into.facts
    advantage, loss = facts.get("estimator", ("grpo", "ppo_clip"))
    low, high = facts.get("clip_low", 0.2), facts.get("clip_high")
    averaged = {} if facts.get("per_token") else {"aggregation": "sample_mean"}
    spec: dict[str, Any] = {"name": loss, **averaged}
    if loss != "cispo" or low < 1:  # its lower bound is then below 0, where no ratio is
        spec["clip_low"] = low
    if high is not None or loss == "cispo":
        spec["clip_high"] = low if high is None else high
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
        value = {"name": "value", "value_clip": facts.get("value_clip", 0.2), **averaged}
        into.run["critic"] = {"loss": value}
        if facts.get("critic_steps"):
            into.run["critic"]["warmup_steps"] = facts["critic_steps"]
        into.left.append(
            "--advantage-estimator ppo: services.yaml has a critic beside the trainer; look at it"
        )
    if advantage == "reinforce_plus_plus" and "gamma" in facts:
        given["gamma"] = facts["gamma"]
    if facts.get("kl_reward"):
        if advantage in ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"):
            given["kl_coefficient"] = facts["kl_reward"]
            given |= {"kl_estimator": facts["kl_estimator"]} if "kl_estimator" in facts else {}
            given |= {} if facts.get("rollout_logprobs") else {"old_logprobs": "old"}
            if advantage == "reinforce_plus_plus_baseline":
                into.left.append(
                    "--kl-coef: slime takes a token's own KL from it with this estimator, here "
                    "that of the tokens behind it too, as REINFORCE++ does"
                )
        else:
            into.left.append(f"--kl-coef: has no effect with {advantage}, in slime either")
    algorithm = into.run.setdefault("algorithm", {})
    algorithm |= {"advantage": given, "loss": spec}
    if every := facts.get("reference_every"):
        if "kl_coefficient" in given or "kl_coefficient" in spec:
            algorithm["reference_every"] = every
        else:
            into.left.append("--ref-update-interval: has no effect without a KL")


def _experts(into: Imported) -> None:
    """With Megatron's default, where it is another than ours."""
    facts = into.facts
    if facts.get("aux_loss") and facts.get("balancing") != "none":
        set_at(into.trainer, "experts.aux_loss_coefficient", facts["aux_loss"])
        if facts.get("balancing") == "seq_aux_loss":
            into.left.append(
                "--moe-router-load-balancing-type seq_aux_loss: is of all tokens of a call here, "
                "not of those of each micro-batch by itself"
            )
    if facts.get("z_loss"):
        set_at(into.trainer, "experts.z_loss_coefficient", facts["z_loss"])
    if facts.get("biased") and (rate := facts.get("bias_update_rate", 1e-3)):
        set_at(into.trainer, "experts.bias_update_rate", rate)


def _optim(into: Imported) -> None:
    """With Megatron's defaults, where they are others than ours."""
    facts, optim = into.facts, into.trainer.setdefault("optim", {})
    optim["betas"] = [facts.get("beta1", 0.9), facts.get("beta2", 0.999)]
    optim.setdefault("weight_decay", 0.01)
    if "optimizer" in facts:
        into.left.append(f"--optimizer {facts['optimizer']}: {_muon(facts)}")
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


def _muon(facts: Mapping[str, Any]) -> str:
    """How to train by it, with Megatron's defaults."""
    adjustment, factor = (
        facts.get("muon_adjustment", "match_rms_adamw"),
        facts.get("muon_factor", 1.0),
    )
    muon = {
        "momentum": facts.get("muon_momentum", 0.9),
        "nesterov": "muon_nesterov" in facts,
        "newton_schulz_steps": facts.get("muon_newton_schulz_steps", 5),
        "newton_schulz_dtype": facts.get("muon_newton_schulz_dtype", "bfloat16"),
        "adjustment": adjustment,
        # ours has the 0.2 of it, which Megatron's is given
        "rate_factor": factor / 0.2 if adjustment == "match_rms_adamw" else factor,
    }
    settings = ", ".join(f"{name}: {json.dumps(value)}" for name, value in muon.items())
    return (
        "the files have AdamW, as Megatron-Core's Muon needs emerging_optimizers, which no package "
        "index has; by hand, with backend: fsdp in place of megatron, "
        f"optim: {{kind: muon, muon: {{{settings}}}}}: docs/muon.md"
    )


def _sizes(into: Imported) -> None:
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
            set_at(run, "algorithm.mini_batches", parts)
    if facts.get("over_sampling") and groups:
        factor = facts["over_sampling"] / groups
        if 1 <= factor <= 16:
            run["over_sampling"] = factor
        else:
            into.left.append("--over-sampling-batch-size: over_sampling is within 1..16")
    if "nodes" in facts and "gpus" in facts:
        set_at(into.trainer, "ranks.count", facts["nodes"] * facts["gpus"])
        if facts["nodes"] > 1:
            into.left.append("--actor-num-nodes: ranks on several hosts: docs/megatron.md")
    elif "nodes" in facts or "gpus" in facts:
        into.left.append("--actor-num-gpus-per-node: the number of ranks is known to the shell")
    if facts.get("engine_gpus", 1) > 1:
        _engine_ranks(into, facts["engine_gpus"])
    megatron = into.trainer.setdefault("megatron", {})
    if "recompute_layers" in facts and megatron.get("recompute") == "full":
        megatron["recompute_layers"] = facts["recompute_layers"]
    if facts.get("offloads"):
        megatron["optimizer_offload"] = facts.get("offload_fraction", 1.0)
    if facts.get("predicts"):
        megatron["mtp_loss_scaling_factor"] = facts.get("prediction_scale", 0.1)
    if "fp8" in facts:
        megatron |= {name: facts[name] for name in ("fp8", "fp8_recipe") if name in facts}
    if megatron.get("tensor", 1) == 1:
        megatron.pop("sequence_parallel", None)
    if megatron.get("context", 1) == 1:
        megatron.pop("cp_layout", None)
    if facts.get("layers_named") and megatron.get("pipeline", 1) > 1:
        into.left.append(
            "trainable: layers are numbered through the model here, by pipeline stage in slime"
        )
    if megatron.get("pipeline", 1) == 1:
        for name in ("first_stage_layers", "last_stage_layers", "virtual_pipeline"):
            megatron.pop(name, None)
    if megatron.get("expert", 1) == 1:
        megatron.pop("expert_tensor", None)


def _engine_ranks(into: Imported, count: int) -> None:
    """The GPUs of an engine are those of all its pipeline stages; SGLang asks for one's."""
    own = into.rollout.get("engine", {}).get("sglang", {}).get("server_args", {})
    stages = own.get("pp_size", own.get("pipeline_parallel_size", 1))
    if not isinstance(stages, int) or stages < 1 or count % stages:
        into.left.append(f"--rollout-num-gpus-per-engine {count}: is no multiple of pp_size")
    elif count > stages:
        set_at(into.rollout, "engine.sglang.server_args.tp_size", count // stages)


def _evaluation(into: Imported) -> None:
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
    for name in ("stop_token_ids", "stop"):
        if stops := trained.get(name):
            sampling[name] = list(stops)
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
    if facts.get("evaluated_late"):
        evaluation["before_training"] = False
    into.run["evaluation"] = evaluation
    into.left.append("--eval-prompt-data: groups: 1024 bounds the tasks; give their number")


PROMPT_LENGTH = 2048  # tokens, where the script has no limit
GROUP_SECONDS = 14_400  # slime has no limit of a group; this one is of its requests


def _reward(into: Imported, name: str, settings: dict[str, Any]) -> None:
    settings["reward"] = REWARDS[name]
    if name in ("math", "deepscaler"):
        settings["reward_settings"] = {"boxed": True}
    if name == "deepscaler":
        into.left.append(
            "--rm-type deepscaler: an answer without </think> has no reward there, here its box"
        )
    if name == "dapo":
        into.left.append(
            "--rm-type dapo: what is wrong has a reward of 0 here, of -1 there, where only what "
            "stands behind `Answer:` is read"
        )


def _devices(into: Imported, entries: dict[str, Any]) -> None:
    """Those of one host, as slime deals them: trainers the first, engines the same or the next."""
    facts, run, rollout = into.facts, into.run, entries["rollout"]
    trained = facts.get("gpus", 0) if facts.get("nodes") == 1 else 0
    engines = rollout.get("replicas", 1) * max(1, facts.get("engine_gpus", 1))
    shared = bool(facts.get("colocate"))
    if shared:
        if run.get("max_staleness") or run.get("over_sampling", 1) > 1:
            into.left.append(
                "--colocate: run.yaml placement: colocated takes max_staleness 0 and over_sampling "
                "1: docs/colocation.md"
            )
            return
        run["placement"] = "colocated"
        arguments = "engine.sglang.server_args.enable_memory_saver"  # without, it does not sleep
        set_at(rollout["config"], arguments, True)
    elif "rollout_gpus" not in facts:
        return
    if not trained or (shared and engines > trained):
        return
    give_devices(into, entries, trained, engines, is_shared=shared)


def _halved(optim: dict[str, Any]) -> dict[str, Any]:
    """Of half the gradient, which that of slime's critic is here, the same steps.

    A value's loss is half the squared error here, the whole one there.
    """
    norm, epsilon = optim.get("max_grad_norm", 1.0), optim.get("epsilon", 1e-8)  # Megatron's
    return {**optim, "max_grad_norm": norm / 2, "epsilon": epsilon / 2}


def _of_values(trainable: dict[str, list[str]]) -> dict[str, list[str]]:
    """The output layer of a critic gives values."""
    return {
        setting: ["score.*" if pattern == "lm_head.*" else pattern for pattern in patterns]
        for setting, patterns in trainable.items()
    }


def _quantized_rollouts(into: Imported, model: str) -> None:
    """slime's engines have trained weights quantised as this directory is; training begins with
    others, of `--load` or `--ref-load`."""
    quantization = _quantization_of(model)
    if not quantization or "publish" in into.trainer:
        return
    into.trainer["publish"] = {"quantization": quantization}
    into.left.append(
        f"--hf-checkpoint {model}: is quantised: put the plain checkpoint in its place, of which "
        f"publish.quantization {quantization} makes what engines sample by (`sluice convert SRC "
        "DST --to hf` makes a plain one)"
    )


def _quantization_of(model: str) -> str:
    """As publish.quantization has it, by config.json or, where that is not at hand, by the name."""
    path = Path(model) / "config.json"
    if path.is_file():
        try:
            layout = layout_of(load_json(path.read_bytes()))
        except (ValueError, AttributeError, WeightStoreError):
            return ""  # whoever loads it says what it is
        if isinstance(layout, Int4Groups):
            return f"int4_{128 if layout.size == 128 else 32}"
        return "" if layout is None else "fp8"
    parts = re.split(r"[-_./]", model.lower())
    if "fp8" in parts:
        return "fp8"
    if "int4" in parts:
        return "int4_32" if "kimi" in parts else "int4_128"
    return ""


def _documents(into: Imported, run_dir: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    facts, run = into.facts, into.run
    model = facts.get("model", UNKNOWN)
    if model == UNKNOWN:
        into.left.append("--hf-checkpoint: is missing; put the model directory in its place")
    _quantized_rollouts(into, model)
    settings = run.setdefault("environment", {}).setdefault("settings", {})
    settings.setdefault("prompt_key", "input")  # slime's default
    run["environment"]["name"] = "prompts"
    if facts.get("load", "") not in ("", facts.get("save"), model.rstrip("/")):
        into.left.append(
            f"--load {facts['load']}: training begins with the model; `sluice convert` makes a "
            "Hugging Face directory of torch_dist"
        )
    if "reward" in facts:
        _reward(into, facts["reward"], settings)
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
    run["group_timeout_seconds"] = GROUP_SECONDS
    run |= {"run_dir": str(run_dir), "services": f"{run_dir}/services.json"}
    engine = into.rollout.setdefault("engine", {})
    engine["backend"] = "sglang"
    if "max_model_length" not in engine:
        longest = max(sampling["max_new_tokens"], facts.get("eval_tokens", 0))
        engine["max_model_length"] = longest + facts.get("prompt_length", PROMPT_LENGTH)
        if "prompt_length" in facts:
            into.left.append(f"--rollout-max-prompt-len: {LONG_PROMPTS}")
        else:
            into.left.append(
                f"--rollout-max-prompt-len: is missing; engine.max_model_length has {PROMPT_LENGTH}"
                " tokens for prompts, and longer ones leave less to their answers"
            )
    trainer = {"model": model, "backend": "megatron", "oversize_policy": "alone", **into.trainer}
    entries: dict[str, Any] = {
        "router": {"kind": "router"},
        "trainer": {"kind": "trainer", "config": trainer},
    }
    if "critic" in run:
        critic = of_critic(trainer) | {"head": "value", "optim": _halved(trainer["optim"])}
        if "trainable" in critic:
            critic["trainable"] = _of_values(critic["trainable"])
        entries["critic"] = {"kind": "trainer", "config": critic}
    rollout: dict[str, Any] = {"kind": "rollout", "config": {"tokenizer": model, **into.rollout}}
    trained = facts.get("nodes", 1) * facts.get("gpus", 0) if facts.get("colocate") else 0
    replicas = facts.get("rollout_gpus", trained) // max(1, facts.get("engine_gpus", 1))
    if replicas > 1:
        rollout["replicas"] = replicas
    entries["rollout"] = rollout
    _devices(into, entries)
    services = {"run_dir": str(run_dir), "services": entries}
    check_documents(into, services)
    return run, services
