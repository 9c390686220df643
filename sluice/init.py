"""`sluice init`: a commented run.yaml and services.yaml for a model and a task."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from rich.console import Console

from sluice.config import ConfigError, ProcessConfig, load_config, no_model_text, parse_config
from sluice.json_values import find
from sluice.loop.config import PromptsConfig, RunConfig
from sluice.loop.prompts import load_prompts
from sluice.loop.row_files import read_rows
from sluice.loop.screen import plain_text
from sluice.stack import UpConfig
from sluice.yaml_values import load_yaml

INIT_USAGE = "sluice init MODEL_DIR TASK [-o DIR] [--key value ...]"
FILES = ("services.yaml", "run.yaml")
_KEYS = ("prompt_key", "answer_key")


class InitConfig(ProcessConfig):
    """What `sluice init` writes.

    TASK: a .jsonl or .parquet file of prompts, or the name of a data set of reasoning-gym.
    """

    foreign_keys = ("security",)  # it calls nobody

    run_dir: Path = Field(Path("runs/first"), description="Of the run, and of its services.")
    prompt_key: str = Field("prompt", min_length=1, description="The column of TASK with prompts.")
    answer_key: str = Field("answer", min_length=1, description="The one that rewards compare.")
    max_new_tokens: int = Field(256, gt=0, le=1 << 20)
    engine: Literal["reference", "sglang"] = "reference"
    backend: Literal["reference", "fsdp", "megatron"] = Field(
        "reference", description="Of the trainer; docs/models.md has what each trains."
    )


async def init(arguments: Sequence[str]) -> None:
    """Write both files into a directory that has neither. Raises ConfigError."""
    from sluice.run_commands import leading, take_value

    rest = list(arguments)
    output = Path(take_value(rest, "-o") or ".")
    places, flags = leading(rest)
    config = load_config(InitConfig, flags, INIT_USAGE)
    if len(places) != 2:
        raise ConfigError(f"init takes MODEL_DIR and TASK: {INIT_USAGE}")
    write_new(output, files_for(Path(places[0]), places[1], config, output))
    services, run = (shlex.quote(str(output / name)) for name in FILES)
    console = Console()
    for line in (
        f"wrote {services} and {run}; then:",
        f"  sluice up {services}",
        f"  sluice train {run}            # in another terminal",
        f"  sluice status {shlex.quote(str(config.run_dir))}",
    ):
        console.print(plain_text(line, 1000), highlight=False, markup=False, soft_wrap=True)


def write_new(directory: Path, texts: Mapping[str, str]) -> None:
    """Write files that are not there yet, or none. Raises ConfigError."""
    there = [str(directory / name) for name in texts if os.path.lexists(directory / name)]
    if there:
        raise ConfigError(f"{there[0]} is there already; give -o another directory")
    made: list[Path] = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            with (directory / name).open("x") as file:
                made.append(directory / name)
                file.write(text)
    except OSError as error:
        for path in made:
            path.unlink(missing_ok=True)
        raise ConfigError(f"-o: {str(directory)[:200]}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"-o: {error}") from None


def files_for(model: Path, task: str, config: InitConfig, output: Path) -> dict[str, str]:
    """The text of each file; both load. Raises ConfigError for a model or task that is none."""
    facts = _model(model)
    absolute = str(model.absolute())
    prompts, environment, told = _task(task, config, chat=facts["has_chat"])
    length = min(facts["longest"], 4 * config.max_new_tokens + 512)
    if length <= config.max_new_tokens:
        raise ConfigError(
            f"init: --max_new_tokens {config.max_new_tokens}: the model takes {facts['longest']} "
            "tokens, of the prompt too"
        )
    run_dir = str(config.run_dir.absolute())
    sglang = "\n        backend: sglang" if config.engine == "sglang" else ""
    backend = f"\n      backend: {config.backend}" if config.backend != "reference" else ""
    texts = {
        "services.yaml": f"""\
# `sluice up {output / "services.yaml"}`: the services as processes of this machine, until Ctrl-C.
# Every key of a service: `python -m services.trainer --help`, likewise rollout and router.
run_dir: {_quoted(run_dir)}
services:
  router:
    kind: router
  trainer:
    kind: trainer
    config:
      model: {_quoted(absolute)}{backend}
      optim: {{learning_rate: 1.0e-6}}      # 1e-3 for a model that knows nothing yet
      ranks: {{count: 1}}                   # processes, on an accelerator each where there are some
      max_tokens_per_micro_batch: {max(length, 8192)}     # less, where memory runs out
  rollout:
    kind: rollout
    # replicas: 2                         # several engines, with `devices: [0, 1]` shared out
    config:
      tokenizer: {_quoted(absolute)}
      engine:{sglang}
        max_running: 64                   # samples that decode at once
        max_model_length: {length}            # prompt and response together
""",
        "run.yaml": f"""\
# `sluice train {output / "run.yaml"}`; every key: `sluice train --help`. Flags win over this file,
# e.g. `--steps 10`. An interrupted run goes on with `--resume`.
run_dir: {_quoted(run_dir)}
services: {_quoted(run_dir + "/services.json")}
prompts: {prompts}
environment: {environment}    # {told}
sampling: {{max_new_tokens: {config.max_new_tokens}}}     # temperature 1
algorithm:
  advantage: {{name: grpo}}                # or rloo, reinforce_plus_plus_baseline, ...
  loss: {{name: ppo_clip, clip_low: 0.2, clip_high: 0.28}}
groups_per_step: 16                      # prompts a step
samples_per_group: 8                     # answers to each
steps: 200
max_staleness: 0                         # 1 and more: rollouts go on while the trainer works
checkpoint_every: 50
# evaluation:                            # held-out tasks, before, after and every so many steps
#   every_steps: 20
#   datasets:
#     held_out: {{prompts: {{file: held_out.jsonl}}, groups: 64}}
""",
    }
    parse_config(UpConfig, _loaded(texts["services.yaml"]))
    run = parse_config(RunConfig, _loaded(texts["run.yaml"]))
    if isinstance(run.prompts, PromptsConfig) and run.prompts.file is not None:
        _check_rows(run, run.prompts, run.prompts.file, config.answer_key)
    return texts


def _check_rows(run: RunConfig, prompts: PromptsConfig, file: Path, answer_key: str) -> None:
    """Raise ConfigError for a file that no run with these settings could take."""
    try:
        load_prompts(prompts, run.seed, run.environment)
        for where, row in read_rows(file, "prompts.file"):
            if find(row, answer_key) is None:
                raise ConfigError(
                    f"{where}: a row has no `{answer_key}`, which rewards compare; --answer_key "
                    "names another column"
                )
    except ConfigError as error:
        raise ConfigError(f"init: TASK: {error}") from None


def _loaded(text: str) -> dict[str, Any]:
    values: dict[str, Any] = load_yaml(text)
    return values


def _quoted(text: str) -> str:
    """As YAML, which takes JSON's strings."""
    return json.dumps(text)


def _model(model: Path) -> dict[str, Any]:
    """The longest sequence that it takes, and whether it has a chat template."""
    if "\0" in str(model):
        raise ConfigError("init: MODEL_DIR is no directory")
    try:
        config = json.loads((model / "config.json").read_text())
        tokenizer = model / "tokenizer_config.json"
        settings = json.loads(tokenizer.read_text()) if tokenizer.is_file() else {}
        if not isinstance(config, dict) or not isinstance(settings, dict):
            raise ValueError("no object")
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"init: {no_model_text(model)}") from None
    except OSError as error:
        raise ConfigError(f"init: {str(model)[:200]}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"init: {model}: its configuration is damaged: {error}") from None
    text = config.get("text_config", config)
    longest = text.get("max_position_embeddings", 4096) if isinstance(text, dict) else 4096
    if not isinstance(longest, int) or longest < 2:
        raise ConfigError(f"init: {model}: max_position_embeddings is {longest!r}")
    has_chat = "chat_template" in settings or (model / "chat_template.jinja").is_file()
    return {"longest": longest, "has_chat": has_chat}


def _task(task: str, config: InitConfig, *, chat: bool) -> tuple[str, str, str]:
    """Prompts, environment and a word on the reward."""
    path = Path(task)
    keys = {name: getattr(config, name) for name in _KEYS}
    own = [name for name, key in keys.items() if key != InitConfig.model_fields[name].default]
    if path.suffix in (".jsonl", ".parquet"):
        if not os.path.isfile(path):
            what = "is no file" if os.path.exists(path) else "does not exist"
            raise ConfigError(f"init: TASK: {task[:200]} {what}")
        settings = ["reward: exact_match", *(f"{name}: {_quoted(keys[name])}" for name in own)]
        settings += ["chat: true"] if chat else []
        prompt, answer = (_quoted(key) for key in keys.values())
        told = f'rows have {prompt} (or "messages") and {answer}; docs/rollout.md has more rewards'
        file = f"{{file: {_quoted(str(path.absolute()))}}}"
        return file, f"{{name: prompts, settings: {{{', '.join(settings)}}}}}", told
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise ConfigError("init: TASK: reasoning-gym is not installed: sluice[reference]") from None
    if task not in DATASETS:
        from sluice.config import hint

        raise ConfigError(
            f"init: TASK: {task[:200]!r} is neither a .jsonl or .parquet file nor a data set of "
            f"reasoning-gym{hint(task[:200], DATASETS)}"
        )
    if own:
        raise ConfigError(f"init: --{own[0]}: of rows of a file, which {task[:200]!r} is not")
    told = "tasks are made as they are needed, by number"
    environment = f"{{name: reasoning_gym, settings: {{dataset: {task}}}}}"
    return "{index_count: 100000}", environment, told
