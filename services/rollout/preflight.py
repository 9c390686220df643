"""What a rollout process would be by its settings: what would end it, what it would say of itself,
and its environments, opened as its episode worker opens them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from services.rollout.config import RolloutConfig
from services.rollout.environments.environment import TaskError, TaskRequest
from services.rollout.episodes.group import GroupSpec, tokenise
from services.rollout.episodes.images import NO_IMAGES
from services.rollout.episodes.worker import create_environments, open_environment
from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.config import ConfigError, no_model_text
from sluice.loop.config import EnvironmentConfig
from sluice.loop.prompts import Task
from sluice.loop.workers import refused, spec_of
from sluice.model_types import EXPERT_COUNTS
from sluice.preflight.service import LookedAt, TaskFaults
from sluice.runtime.errors import InvalidFieldError, ServiceError
from sluice.runtime.waits import Waits
from sluice.samples.messages import image_sources
from sluice.samples.tokenizer import TextTokenizer
from sluice.samples.vocabulary import vocabulary_digest
from sluice.weights.adapter import AdapterSpec
from sluice.weights.checkpoint import read_extents
from sluice.weights.convert.quantized_layout import check_stated
from sluice.weights.errors import WeightStoreError

NEEDED = ("torch", "transformers")  # by the reference engine


def look(config: RolloutConfig, served: Path | None) -> LookedAt:
    """Look at what this process would load and say. The configuration itself is sound.

    served: the model directory of the trainer, where the engine has none of its own.
    """
    found = LookedAt()
    directory = config.tokenizer_directory
    has_engine, has_episodes = ("engine" in config.roles), ("episodes" in config.roles)
    if directory is not None and (has_episodes or config.openai is not None):
        with found.noting(ConfigError):
            TextTokenizer(directory)
    if has_engine and not config.is_further_node:
        _look_at_engine(config, served, found)
    if has_engine:
        found.limits["engine.max_samples"] = config.engine.max_samples
    if has_episodes and directory is not None:
        found.limits["episodes.max_samples"] = config.episodes.max_samples
        found.vocabulary = vocabulary_digest(directory)
        found.open_episodes = lambda: TriedEpisodes(config)
    found.described = _described(config)
    return found


def _look_at_engine(config: RolloutConfig, served: Path | None, found: LookedAt) -> None:
    engine = config.engine
    own = None if engine.model is None else Path(engine.model)
    model = own or served
    if own is not None and not (own / "config.json").is_file():
        found.faults.append(f"engine.model: {no_model_text(own)}")
        model = None
    if engine.backend == "sglang":
        _look_at_sglang(config, model, found)
    elif missing := [name for name in NEEDED if find_spec(name) is None]:
        found.faults.append(
            f"engine.backend: reference needs {', '.join(missing)}, which is not installed: "
            "pip install 'sluice[reference]'"
        )
    elif model is not None:
        _look_at_reference(config, model, found)
    if model is not None:
        _look_at_length(engine.max_model_length, model, found)
    directory = config.tokenizer_directory
    found.pool, found.engine = (
        config.pool,
        engine_pb.GetEngineResponse(
            engine_id=config.engine_id,
            backend=engine.backend,
            max_model_length=engine.max_model_length,
            deterministic=engine.deterministic or _is_deterministic(engine.sglang.server_args),
            takes_min_new_tokens=engine.backend == "reference",
            vocabulary="" if directory is None else vocabulary_digest(directory),
            settings=engine.shaping,
            records_experts=engine.routed_experts,
        ),
    )


def _is_deterministic(arguments: Mapping[str, Any]) -> bool:
    return arguments.get("enable_deterministic_inference") is True


def _look_at_reference(config: RolloutConfig, model: Path, found: LookedAt) -> None:
    from services.rollout.engine.reference.fit import check_rope, read_model_config

    try:
        hf_config = read_model_config(model)
        check_rope(hf_config.get_text_config())
    except ServiceError as error:
        found.faults.append(f"engine: {error}")
        return
    if config.engine.model is not None:  # of the trainer's, it is told there
        _look_at_files(model, found)
    if config.engine.routed_experts and not _has_experts(hf_config.to_dict()):
        found.faults.append(
            f"engine: model_type {hf_config.model_type} has no experts; leave routed_experts off"
        )


def _look_at_files(model: Path, found: LookedAt) -> None:
    try:
        dtypes = {name: extent.dtype for name, extent in read_extents(model).items()}
        check_stated(json.loads((model / "config.json").read_bytes()), dtypes)
    except (OSError, ValueError, WeightStoreError) as error:
        found.faults.append(f"engine.model: {model}: {error}")


def _has_experts(config: Mapping[str, Any]) -> bool:
    text = config.get("text_config") or config
    return any(isinstance(text.get(key), int) and text[key] for key in EXPERT_COUNTS)


def _look_at_sglang(config: RolloutConfig, model: Path | None, found: LookedAt) -> None:
    from services.rollout.engine.sglang.adapters import lora_fault
    from services.rollout.engine.sglang.samples import read_routing
    from services.rollout.engine.sglang.servers import check_python

    engine = config.engine
    with found.noting(ConfigError):
        check_python(engine.sglang)
    if engine.routed_experts and model is not None:
        with found.noting(ServiceError, WeightStoreError):
            read_routing(json.loads((model / "config.json").read_bytes()))
    if engine.sglang.url:
        return
    lora = engine.sglang.lora

    def fault_of(adapter: AdapterSpec) -> str:
        rank, targets = (0, ()) if lora is None else (lora.max_rank, lora.targets)
        fault = lora_fault(adapter, rank, targets)
        return "" if fault is None else fault.text

    found.adapter_fault = fault_of


def _look_at_length(length: int, model: Path, found: LookedAt) -> None:
    document = json.loads((model / "config.json").read_bytes())
    text = document.get("text_config") or document
    longest = text.get("max_position_embeddings")
    if isinstance(longest, int) and length > longest:
        found.notes.append(
            f"engine.max_model_length: {length} is more than the {longest} positions that "
            f"{model} was made for (max_position_embeddings); set {longest} at most"
        )


def _described(config: RolloutConfig) -> str:
    engine = config.engine
    parts = []
    if "engine" in config.roles:
        parts.append(
            f"engine {engine.backend} in {engine.dtype}, {engine.max_model_length} tokens a sample,"
            f" {engine.max_running} at once"
        )
    if "episodes" in config.roles:
        parts.append("episodes")
    return "; ".join(parts)


class TriedEpisodes:
    """The environments of an episode worker that does not run."""

    def __init__(self, config: RolloutConfig) -> None:
        """Raises ConfigError when the tokenizer cannot be loaded, or an environment is none."""
        assert config.tokenizer_directory is not None
        self._tokenizer = TextTokenizer(config.tokenizer_directory)
        self._environments = create_environments(config, self._tokenizer)

    async def try_environment(
        self, key: str, environment: EnvironmentConfig, tasks: Sequence[Task]
    ) -> TaskFaults:
        groups = [
            GroupSpec(group_id=str(place), seeds=(), task=_request(task))
            for place, task in enumerate(tasks)
        ]
        try:
            runner, wrong = await open_environment(
                self._environments, spec_of(environment), groups, Waits()
            )
        except InvalidFieldError as error:
            raise refused(key, str(error)) from None
        except ServiceError as error:  # what code of users raised
            raise ConfigError(f"{key}: {error}") from None
        faults = {int(place): _told(str(error)) for place, error in wrong.items()}
        lengths = dict[int, int]()
        for place, group in enumerate(groups):
            if place in faults:
                continue
            try:
                task = await runner.make_task(group.task)
                if any(image_sources(task.messages)):
                    continue  # as many tokens as pixels make: what it shows is not read here
                passage = await tokenise(self._tokenizer, NO_IMAGES, task)
            except (TaskError, ServiceError, ValueError) as error:
                faults[place] = str(error)
                continue
            lengths[place] = len(passage.token_ids)
        return TaskFaults(wrong=faults, lengths=lengths)

    async def close(self) -> None:
        await self._environments.close()


def _request(task: Task) -> TaskRequest:
    return TaskRequest(index=task) if isinstance(task, int) else TaskRequest(row=task)


def _told(message: str) -> str:
    """Without which of the groups it is, which are of no run."""
    return message.partition("].")[2] or message
