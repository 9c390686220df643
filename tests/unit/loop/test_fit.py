"""What services say of themselves, against what a run asks of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.api.trainer.v1 import trainer_service_pb2 as pb
from sluice.config import ConfigError, parse_config
from sluice.loop.config import RunConfig, SftConfig
from sluice.loop.fit import SaidServices, check_rows_trainer, checks_of
from sluice.loop.fleet import DescribedEngine

RUN: dict[str, Any] = {
    "run_dir": "run",
    "services": "services.json",
    "prompts": {"index_count": 8},
    "environment": {"name": "prompts"},
    "sampling": {"max_new_tokens": 8},
}
OLD = {"loss": {"name": "ppo_clip", "clip_low": 0.2, "old_logprobs": "old"}}
BACKENDS = ("reference", "fsdp", "megatron")


def replaying(backend: str, mode: str, **said: Any) -> pb.Trainer:
    """As services/trainer says it: of every backend, as JSON."""
    settings = {f"{name}.routing_replay": '"off"' for name in BACKENDS}
    return pb.Trainer(settings={**settings, f"{backend}.routing_replay": f'"{mode}"'}, **said)


def engine(name: str = "rollout at here", **said: Any) -> DescribedEngine:
    return DescribedEngine(name, engine_pb.GetEngineResponse(max_model_length=64, **said))


def faults(
    run: dict[str, Any],
    trainer: pb.Trainer,
    engines: Iterable[DescribedEngine] = (),
    critic: pb.Trainer | None = None,
) -> list[str]:
    config = parse_config(RunConfig, {**RUN, **run})
    said = SaidServices(trainer=trainer, engines=list(engines), critic=critic)
    found, noted = [], list[str]()
    for check in checks_of(config, said, noted.append):
        try:
            check()
        except ConfigError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_experts_that_no_engine_tells_are_asked_for_when_a_run_begins(backend: str) -> None:
    trainer = replaying(backend, "rollout")
    (fault,) = faults(
        {}, trainer, [engine(records_experts=True), engine("e1", records_experts=False)]
    )
    assert fault.startswith(f"{backend}.routing_replay: ")
    assert "engine e1 tells none: set engine.routed_experts: true" in fault
    assert faults({}, trainer, [engine(records_experts=True)]) == []
    assert faults({}, trainer, [engine()]) == [], "one of an earlier release says nothing"
    assert faults({}, replaying(backend, "off"), [engine(records_experts=False)]) == []


def test_a_critic_takes_the_experts_of_rollouts_too() -> None:
    critic, run = (
        replaying("fsdp", "rollout"),
        {
            "critic": {},
            "algorithm": {"advantage": {"name": "gae"}},
        },
    )
    (fault,) = faults(run, pb.Trainer(), [engine(records_experts=False)], critic)
    assert fault.startswith("fsdp.routing_replay: the critic takes")
    assert faults(run, pb.Trainer(), [engine(records_experts=True)], critic) == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_experts_that_no_pass_records_are_asked_for_when_a_run_begins(backend: str) -> None:
    trainer = replaying(backend, "recorded")
    (fault,) = faults({}, trainer)
    assert fault.startswith(f"{backend}.routing_replay: ")
    assert "set algorithm.loss.old_logprobs: old" in fault
    assert faults({"algorithm": OLD}, trainer) == []
    assert faults({}, pb.Trainer()) == [], "one of an earlier release says nothing"
    own = {"loss": {"name": "examples.losses:Own"}}
    assert faults({"algorithm": own}, trainer) == [], "what it reads the trainer alone knows"


@pytest.mark.parametrize("mode", ["recorded", "rollout"])
def test_rows_of_a_file_bring_no_experts(mode: str) -> None:
    values = {"run_dir": "run", "services": "s.json", "tokenizer": "model", "rows": {"file": "r"}}
    config = parse_config(SftConfig, values)
    with pytest.raises(ConfigError, match=r"fsdp.routing_replay: .* rows of a file bring none"):
        check_rows_trainer(config, replaying("fsdp", mode, head="policy"), "here")
    check_rows_trainer(config, replaying("fsdp", "off", head="policy"), "here")


def test_all_that_does_not_fit_is_found() -> None:
    run = {
        "weight_transport": "collective",
        "deterministic": True,
        "sampling": {"max_new_tokens": 8, "min_new_tokens": 2},
        "algorithm": {"reference_every": 2, "loss": {"name": "reinforce", "kl_coefficient": 0.1}},
    }
    trainer = replaying(
        *("fsdp", "recorded"), max_row_tokens=8, sends_weights=False, fixed_reference="lora: it is"
    )
    found = faults(run, trainer, [engine()])
    assert [fault.partition(":")[0] for fault in found] == [
        "sampling.max_new_tokens",
        "algorithm.reference_every",
        "sampling.min_new_tokens",
        "weight_transport",
        "deterministic",
        "fsdp.routing_replay",
    ]
