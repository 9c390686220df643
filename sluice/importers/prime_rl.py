"""`sluice import-prime-rl`: what settings of prime-rl say, as run.yaml and services.yaml."""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sluice.config import PLAIN_NAME, ConfigError
from sluice.importers.documents import (
    REFUSED,
    UNKNOWN,
    Imported,
    NotCarriedError,
    check_documents,
    give_devices,
    set_at,
    write_documents,
)
from sluice.importers.prime_rl_keys import EVAL, NULLS, TRAIN, find_key, is_table
from sluice.importers.shell import read_script_file

COMMAND = "import-prime-rl"
USAGE = f"sluice {COMMAND} CONFIG.toml [MORE.toml ...] [-o DIR]"
NULL = "None"  # TOML has none
SOURCES = {TRAIN: ("orchestrator", "train", "source"), EVAL: ("orchestrator", "eval", "source")}
PORT = 8000
TASKS = 1000  # that stand for as many as an environment has
WEIGHT = 1e9  # of a token: there is no bound
_TABLE = re.compile(r"\s*(\[\[?)([^\[\]]+)\]")
_KEY = re.compile(r"\s*([A-Za-z0-9_-]+)\s*=")
VERIFIERS = (
    "is played by verifiers 0.3, which has load_environment, and prime-rl's tasksets are of a "
    "later one: put an environment of that package, or one of ours, in its place: docs/openai.md"
)


async def import_prime_rl(arguments: Sequence[str]) -> None:
    """Write run.yaml and services.yaml of settings; list what could not be carried.

    Raises ConfigError.
    """
    from sluice.run_commands import leading, take_value

    rest = list(arguments)
    output = Path(take_value(rest, "-o") or ".")
    names, flags = leading(rest)
    if not names or flags:
        raise ConfigError(f"{COMMAND} takes files: {USAGE}")
    files = [Path(name) for name in names]
    tree: dict[str, Any] = {}
    places: dict[str, str] = {}
    for file in files:
        text = read_script_file(file, COMMAND)
        _merge(tree, _read(file.name, text))
        places |= {key: f"{file.name}:{number}" for key, number in _lines(text)}
    run, services, left = import_settings(tree, Path("runs") / files[0].stem)
    left = [_with_place(line, places) for line in left]
    write_documents(COMMAND, " ".join(file.name for file in files), output, (run, services), left)


def _read(name: str, text: str) -> dict[str, Any]:
    """Raises ConfigError."""
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{COMMAND}: {name[:200]}: is no TOML: {error}") from None


def _lines(text: str) -> Iterator[tuple[str, int]]:
    """Keys and the numbers of their lines, as far as each has one of its own."""
    table, counts = "", Counter[str]()
    for number, line in enumerate(text.splitlines(), 1):
        if found := _TABLE.match(line):
            brackets, table = found[1], found[2].replace(" ", "").replace('"', "")
            if brackets == "[[":
                counts[table] += 1
            array = max((name for name in counts if f"{table}.".startswith(f"{name}.")), default="")
            if array:
                table = f"{array}[{counts[array] - 1}]{table.removeprefix(array)}"
            table += "."
        elif found := _KEY.match(line):
            yield f"{table}{found[1]}", number


def _with_place(told: str, places: Mapping[str, str]) -> str:
    """What is refused, behind the file and the line that has it."""
    name, is_refused, _ = told.partition(REFUSED)
    place = places.get(name.partition("=")[0]) if is_refused else None
    return f"{place}: {told}" if place else told


def _merge(tree: dict[str, Any], more: Mapping[str, Any]) -> None:
    """A later file counts; tables are joined, and lists are not."""
    for name, value in more.items():
        if isinstance(value, dict) and isinstance(tree.get(name), dict):
            _merge(tree[name], value)
        else:
            tree[name] = value


def _flat(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values; of an empty table itself."""
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _text(value: Any) -> str:
    """As the values of scripts are read."""
    if isinstance(value, bool | list | dict):
        return json.dumps(value, default=str)
    return str(value)


def import_settings(
    tree: Mapping[str, Any], run_dir: Path
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """run.yaml, services.yaml, and what could not be carried, a line each. Raises ConfigError.

    What settings leave out is as prime-rl has it, where that is not so here.
    """
    if not tree.keys() & {"orchestrator", "trainer", "inference"}:
        raise ConfigError(
            f"{COMMAND}: no orchestrator and no trainer is in the files: they are not those of rl"
        )
    into, rest = Imported(), json.loads(json.dumps(tree, default=str))
    sources = {prefix: _take_sources(rest, path) for prefix, path in SOURCES.items()}
    for name, value in _flat(rest, ""):
        _carry(into, into.facts, name, name, value)
    trained = [_source(into, TRAIN, number, own) for number, own in enumerate(sources[TRAIN])]
    scored = [_source(into, EVAL, number, own) for number, own in enumerate(sources[EVAL])]
    _sizes(into, trained)
    _algorithm(into)
    _optim(into)
    _environments(into, trained)
    _evaluation(into, scored)
    into.facts["modules"] = {
        each.get("taskset", "").replace("-", "_").rpartition("/")[2] for each in (*trained, *scored)
    }
    services = _documents(into, run_dir, has_engines="inference" in tree)
    return into.run, services, list(dict.fromkeys(into.left))


def _take_sources(tree: dict[str, Any], path: Sequence[str]) -> list[dict[str, Any]]:
    """Take the list at `path` away. Raises ConfigError where it is none of tables."""
    *above, last = path
    for name in above:
        tree = tree.get(name, {})
        if not isinstance(tree, dict):
            return []
    found = tree.pop(last, [])
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise ConfigError(f"{COMMAND}: {'.'.join(path)}: is no list of tables")
    return found


def _carry(into: Imported, facts: dict[str, Any], name: str, shown: str, value: Any) -> None:
    """Add one key; `shown` is what it is called in a line about it."""
    if value == NULL:
        if name in NULLS:
            facts.update([NULLS[name]])
        return
    if value == {}:
        facts.setdefault("tables", set()).add(name)
        if find_key(name) is None and not is_table(name):
            into.left.append(f"{shown}: is unknown")
        return
    key = find_key(name)
    if key is None:
        into.left.append(f"{shown}: is unknown")
    elif key.put is not None:
        into.note(key, f"{shown}={_text(value)}")
        all_facts, into.facts = into.facts, facts
        try:
            key.put(into, [_text(value)])
        except NotCarriedError as error:
            into.left.append(f"{shown}: {error}")
        finally:
            into.facts = all_facts
    elif key.why and not key.why.startswith("not needed"):
        into.left.append(f"{shown}: {key.why}")


def _source(into: Imported, prefix: str, number: int, own: Mapping[str, Any]) -> dict[str, Any]:
    """What is said of one environment."""
    facts: dict[str, Any] = {}
    taskset = f"{prefix}env.taskset."
    agents = set[str]()
    for name, value in _flat(own, prefix):
        shown = name.replace("[]", f"[{number}]")
        if name.startswith(f"{prefix}env.") and not name.startswith(taskset):
            agents.add(name.removeprefix(f"{prefix}env.").partition(".")[0])
        if name.startswith(taskset) and name != f"{taskset}id":
            facts["arguments"] = {n: v for n, v in own["env"]["taskset"].items() if n != "id"}
        elif name.startswith(f"{TRAIN}curriculum.gates."):
            facts.setdefault("gates", {})[name.removeprefix(f"{TRAIN}curriculum.gates.")] = value
        else:
            _carry(into, facts, name, shown, value)
    if len(agents) > 1:
        into.left.append(
            f"{prefix.replace('[]', f'[{number}]')}env: {', '.join(sorted(agents))}: several "
            "agents of one environment are one policy's here: docs/tutorial-agents.md"
        )
    name = facts.get("name") or facts.get("taskset", f"environment-{number}").rpartition("/")[2]
    facts["name"] = name if PLAIN_NAME.fullmatch(name) else f"environment-{number}"
    _gates(into, facts.get("gates", {}), number)
    return facts


def _gates(into: Imported, gates: Mapping[str, Any], number: int) -> None:
    bounds = [value for name, value in gates.items() if not name.endswith(".type")]
    kinds = [value for name, value in gates.items() if name.endswith(".type")]
    if kinds and all(kind == "advantage_range" for kind in kinds) and not any(bounds):
        into.run["filters"] = [{"name": "reward_std"}]
    elif gates:
        into.left.append(
            f"{TRAIN.replace('[]', f'[{number}]')}curriculum.gates: by hand: filters of run.yaml: "
            "docs/rollout.md"
        )


def _sizes(into: Imported, sources: Sequence[dict[str, Any]]) -> None:
    """How many groups and samples a step has."""
    facts, run = into.facts, into.run
    batch, samples = facts.get("batch", 128), facts.get("group", 1)
    if len(sources) == 1:
        samples = sources[0].get("group", samples)
    groups, rest = divmod(batch, samples) if samples > 0 else (batch, 0)
    if rest:
        into.left.append(
            f"orchestrator.batch_size {batch}: is no whole number of groups of {samples}"
        )
    if samples == 1:
        groups, samples = max(1, groups // 2), 2
        into.left.append(
            "orchestrator.group_size 1: a group has at least 2 samples; the files have 2, and half "
            "as many groups"
        )
    run["groups_per_step"], run["samples_per_group"] = max(1, groups), samples
    run["max_staleness"] = facts.get("staleness", 8)
    if any(source.get("group", samples) != samples for source in sources if len(sources) > 1):
        into.left.append(
            "orchestrator.train.source: group_size: groups_per_step counts groups of the size that "
            "all have"
        )
    if "steps" not in run:
        into.left.append("max_steps: is missing, which is without end; run.yaml steps is 100")


def _algorithm(into: Imported) -> None:
    facts = into.facts
    settings = {
        "high": facts.get("mask_high", 0.2),
        "low": facts.get("mask_low", 0.2),
        "ratio_limit": WEIGHT,
        "log_ratio_coefficient": facts.get("kl_tau", 0.001),
    }
    if facts.get("loss") == "ipo":
        threshold = facts.get("threshold", 0.1)
        settings |= {"high": threshold, "low": threshold, "two_sided": True}
    if facts.get("silent_left_out", True):
        into.left.append(
            "orchestrator.train.filter_zero_advantages: tokens of advantage 0 count in the mean "
            "over tokens here: steps are smaller by their share"
        )
    into.run["algorithm"] = {
        "advantage": {"name": "grpo", "scale_by_std": False},
        "loss": {"name": "dppo", "settings": settings},
    }


def _optim(into: Imported) -> None:
    """With prime-rl's defaults, where they are others than ours."""
    facts, optim = into.facts, into.trainer.setdefault("optim", {})
    kind = facts.get("optimizer", "adamw")
    optim |= {
        "kind": kind,
        "learning_rate": optim.get("learning_rate", 1e-6),
        "weight_decay": facts.get("decay", 0.01),
        "betas": [facts.get("beta1", 0.9), facts.get("beta2", 0.95 if kind == "muon" else 0.999)],
        "max_grad_norm": facts.get("norm", 1.0),
    }
    if kind == "muon" and "momentum" in facts:
        optim["muon"] = {"momentum": facts["momentum"]}
    schedule = facts.get("schedule", "constant")
    if schedule == "constant":
        return
    warmup, steps = facts.get("warmup", 10), into.run.get("steps", 0)
    if warmup:
        optim["warmup_steps"] = warmup
    falling = steps - warmup if schedule == "cosine" else facts.get("decay_steps", 10)
    if not steps:
        into.left.append(
            f"trainer.scheduler.type {schedule}: needs optim.decay_steps, and max_steps is missing"
        )
    elif schedule == "linear" and falling not in (0, steps - warmup):
        into.left.append(
            f"trainer.scheduler.decay_steps {falling}: a rate that stays before it falls is not "
            "there; the files have one that stays"
        )
    elif falling:
        optim |= {"schedule": schedule, "decay_steps": steps}
        if minimum := facts.get("minimum", 0.0) / (optim["learning_rate"] or 1.0):
            optim["minimum_ratio"] = min(1.0, minimum)


def _environment(source: Mapping[str, Any], split: str) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "environment": source.get("taskset", UNKNOWN),
        "openai_url": f"http://127.0.0.1:{PORT}/v1",
    }
    if "arguments" in source:
        settings["arguments"] = source["arguments"]
    if split != "train":
        settings["split"] = split
    return {"name": "verifiers", "settings": settings}


def _environments(into: Imported, sources: Sequence[dict[str, Any]]) -> None:
    run, sampling = into.run, into.run.setdefault("sampling", {})
    sampling.setdefault("max_new_tokens", into.facts.get("longest", into.facts.get("length", 2048)))
    if not sources:
        into.left.append("orchestrator.train.source: is missing; put an environment in its place")
    found = sources or [{"name": "train"}]
    shares = {
        source["name"]: {
            "weight": source.get("ratio", 1.0),
            "prompts": {"index_count": TASKS},
            "environment": _environment(source, "train"),
            **({"sampling": {"max_new_tokens": source["tokens"]}} if "tokens" in source else {}),
            **({"samples_per_group": source["group"]} if source.get("group", 1) > 1 else {}),
        }
        for source in found
    }
    if len(shares) < len(found):
        into.left.append(
            "orchestrator.train.source: two have one name: the files have the last of them"
        )
    if len(shares) == 1:
        share = next(iter(shares.values()))
        run |= {name: share[name] for name in ("prompts", "environment")}
        run["sampling"] = {**sampling, **share.get("sampling", {})}
    else:
        run["environments"] = shares
    into.left.append(f"orchestrator.train.source: environment {VERIFIERS}")
    into.left.append(
        f"orchestrator.train.source: index_count {TASKS}: give the number of its tasks"
    )


def _evaluation(into: Imported, sources: Sequence[dict[str, Any]]) -> None:
    facts = into.facts
    if not sources:
        return
    datasets = {}
    for source in sources:
        own = {
            name: source.get(name, facts.get(f"eval_{name}"))
            for name in ("temperature", "top_p", "top_k", "tokens")
        }
        own["max_new_tokens"] = own.pop("tokens")
        count = source.get("tasks", facts.get("eval_tasks", -1))
        datasets[source["name"]] = {
            "prompts": {"index_count": count if count > 0 else TASKS, "shuffle": False},
            "environment": _environment(source, "eval"),
            "groups": count if count > 0 else TASKS,
            "samples": source.get("samples", facts.get("eval_samples", 1)),
            "sampling": {name: value for name, value in own.items() if value is not None},
        }
    evaluation: dict[str, Any] = {"datasets": datasets, "every_steps": facts.get("eval_every", 100)}
    if facts.get("eval_late"):
        evaluation["before_training"] = False
    into.run["evaluation"] = evaluation


def _documents(into: Imported, run_dir: Path, *, has_engines: bool) -> dict[str, Any]:
    facts, run = into.facts, into.run
    model = facts.get("model", "Qwen/Qwen3-0.6B")
    if not model.startswith(("/", "~", ".")):
        into.left.append(
            f"model.name {model}: put its directory in its place; nothing is downloaded"
        )
    if facts.get("served", model) != model:
        into.left.append(
            f"inference.vllm.model {facts['served']}: engines have the trainer's weights; of 8 "
            "bits by trainer.config.publish.quantization: docs/weights.md"
        )
    if not has_engines:
        into.left.append("inference: is missing; services.yaml has engines all the same")
    if facts.get("tables", set()) & {"monitors.wandb"}:
        run.setdefault("trackers", {}).setdefault("wandb", {})
    if "wandb" in run.get("trackers", {}):
        run["trackers"]["wandb"].setdefault("project", "prime-rl")
    run |= {"run_dir": str(run_dir), "services": f"{run_dir}/services.json"}
    engine = into.rollout.setdefault("engine", {})
    engine["backend"] = "sglang"
    arguments = engine.setdefault("sglang", {}).setdefault("server_args", {})
    arguments.setdefault("mem_fraction_static", 0.9)
    if facts.get("wide_head", True):
        arguments["enable_fp32_lm_head"] = True
    if (tensor := max(1, facts.get("tensor", 1))) > 1:
        arguments["tp_size"] = tensor
    longest = facts.get("longest", facts.get("length", 2048))
    engine.setdefault("max_model_length", longest)
    trained, engines = _devices(into)
    trainer = _trainer(into, model, trained)
    tokenizer = into.rollout.pop("tokenizer", model)
    modules = {module for module in facts["modules"] if module}
    episodes = {
        "roles": ["episodes"],
        "tokenizer": tokenizer,
        "openai": {"port": PORT},
        "episodes": {"user_modules": sorted(modules)},
    }
    engines_config = {"roles": ["engine"], "tokenizer": tokenizer, **into.rollout}
    rollout: dict[str, Any] = {"kind": "rollout", "config": engines_config}
    if (replicas := engines // tensor) > 1:
        rollout["replicas"] = replicas
    entries: dict[str, Any] = {
        "router": {"kind": "router"},
        "trainer": {"kind": "trainer", "config": trainer},
        "rollout": rollout,
        "episodes": {"kind": "rollout", "config": episodes},
    }
    if facts.get("deployment", "single_node") == "single_node" and engines >= tensor:
        give_devices(into, entries, trained, engines // tensor * tensor, is_shared=False)
    services = {"run_dir": str(run_dir), "services": entries}
    check_documents(into, services)
    return services


def _devices(into: Imported) -> tuple[int, int]:
    """Accelerators of the trainer, and of the engines."""
    facts = into.facts
    if facts.get("deployment", "single_node") == "single_node":
        return facts.get("trained", 1), facts.get("engines", 1)
    gpus = facts.get("gpus", 8)
    into.left.append("deployment.type: ranks and engines on several hosts: docs/cluster.md")
    sets = facts.get("engine_sets", 1) * facts.get("engine_nodes", 1)
    return facts.get("train_nodes", 1) * gpus, sets * gpus


def _trainer(into: Imported, model: str, count: int) -> dict[str, Any]:
    facts, trainer = into.facts, {"model": model, "backend": "fsdp", **into.trainer}
    set_at(trainer, "ranks.count", count)
    fsdp: dict[str, Any] = {"dtype": "bfloat16", **trainer.get("fsdp", {})}
    fsdp["activation_checkpointing"] = facts.get("checkpointing", True)
    if fsdp["activation_checkpointing"] and facts.get("offloading", True):
        fsdp["activation_offload"] = True
    if (nodes := facts.get("group_nodes", 0)) > 0:
        facts.setdefault("replicas", max(1, facts.get("train_nodes", 1) // nodes))
    for name in ("replicas", "context"):
        if facts.get(name, 1) > 1:
            fsdp[name] = facts[name]
    trainer["fsdp"] = fsdp
    trainer["max_tokens_per_micro_batch"] = max(  # of each of those that share a row
        1, facts.get("length", 2048) // max(1, facts.get("context", 1))
    )
    trainer["oversize_policy"] = "truncate"
    if (
        "lora_rank" in facts
        or "lora_alpha" in facts
        or "targets" in facts
        or ("trainer.model.lora" in facts.get("tables", set()))
    ):
        lora: dict[str, Any] = {
            "rank": facts.get("lora_rank", 16),
            "alpha": facts.get("lora_alpha", 32.0),
        }
        trainer["lora"] = lora | ({"targets": facts["targets"]} if "targets" in facts else {})
    return trainer
