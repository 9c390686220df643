"""`sluice check` of settings, alone and against each other: every fault in one pass."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.trainer.config import TrainerConfig
from sluice.config import ConfigError, parse_config
from sluice.config_faults import examine_values
from sluice.loop.config import RunConfig
from tests.unit.preflight.conftest import Files

LORA = {"rank": 4}
FSDP = {"backend": "fsdp"}


def put(where: str, **values: Any) -> Callable[[Files], None]:
    """A change of the run, of the `trainer` or of the `rollout`."""

    def change(files: Files) -> None:
        getattr(files, where).update(values)

    return change


def engine(**values: Any) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        files.rollout["engine"] |= values

    return change


def both(*changes: Callable[[Files], None]) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        for each in changes:
            each(files)

    return change


CASES: dict[str, tuple[Callable[[Files], None], str]] = {
    "a key of the run": (
        put("run", stepz=3),
        r"wrong run.yaml: stepz: unknown key; did you mean steps",
    ),
    "a value of the run": (
        put("run", steps=0),
        r"wrong run.yaml: steps: .*greater than 0 \(got 0\)",
    ),
    "settings of the run": (
        put("run", max_staleness=1, deterministic=True),
        r"wrong run.yaml: deterministic needs max_staleness 0",
    ),
    "a key of the services": (
        lambda files: files.services.update(run_dirr="x"),
        r"wrong services.yaml: run_dirr: unknown key; did you mean run_dir",
    ),
    "a key of a service": (
        put("trainer", optim={"lr": 1}),
        r"wrong trainer: optim.lr: unknown key",
    ),
    "settings of a service": (
        put("trainer", autocast=True, **FSDP),
        r"wrong trainer: autocast has no effect with backend fsdp; set fsdp.dtype",
    ),
    "a key of the engine": (engine(max_length=4), r"wrong rollout: engine.max_length: unknown key"),
    "another services.json": (
        put("run", services="elsewhere/services.json"),
        r"wrong services: services: elsewhere/services.json, and the services write",
    ),
    "a trainer that is not there": (
        lambda files: files.services["services"].pop("trainer"),
        r"wrong services: services: .* has no trainer, or several; known: rollout, router",
    ),
    "a router that is not there": (
        lambda files: files.services["services"].pop("router"),
        r"wrong rollout: services: a rollout service, or a gateway, needs a router",
    ),
    "a critic that is not there": (
        put("run", critic={}, algorithm={"advantage": {"name": "gae"}}),
        r"wrong critic: critic: no service is called critic; known: rollout, router, trainer",
    ),
    "a critic without values": (
        put("run", critic={"service": "trainer"}, algorithm={"advantage": {"name": "gae"}}),
        r"wrong critic: critic: the trainer at trainer has no head: value",
    ),
    "a teacher that is not there": (
        put(
            "run",
            teachers={"t": {"service": "old"}},
            algorithm={"advantage": {"name": "distillation"}},
        ),
        r"wrong teachers: teachers.t: no service is called old",
    ),
    "a teacher of no pool": (
        put(
            "run",
            teachers={"t": {"pool": "old"}},
            algorithm={"advantage": {"name": "distillation"}},
        ),
        r"wrong teachers: teachers.t.pool: no engine is of pool 'old'; there are: policy",
    ),
    "a reward service that is not there": (
        lambda files: files.run.update(
            environment={
                "name": "prompts",
                "settings": {
                    "reward": "reward_model",
                    "reward_settings": {"url": f"{files.run['services']}#scores"},
                },
            }
        ),
        r"wrong environment: environment.settings: no service is called scores",
    ),
    "no engine": (
        put("rollout", roles=["episodes"]),
        r"wrong services: services: no rollout .* role engine",
    ),
    "engines of another pool": (
        put("rollout", pool="old"),
        r"of pool policy: nothing would be sampled",
    ),
    "no episodes": (
        put("rollout", roles=["engine"]),
        r"wrong services: services: no rollout service has the role episodes",
    ),
    "weights that nobody sends": (
        put("run", weight_transport="collective"),
        r"wrong run: weight_transport: collective, but the trainer sends no weights: set its",
    ),
    "an engine that is not deterministic": (
        put("run", deterministic=True),
        r"wrong run: deterministic: engine rollout is not; set engine.deterministic",
    ),
    "a reference that stays": (
        both(
            put(
                "run",
                algorithm={
                    "reference_every": 2,
                    "loss": {"name": "reinforce", "kl_coefficient": 0.1},
                },
            ),
            put("trainer", lora=LORA),
        ),
        r"wrong run: algorithm.reference_every: the trainer's reference stays: lora",
    ),
    "answers that no micro-batch holds": (
        put("trainer", max_tokens_per_micro_batch=4),
        r"wrong run: sampling.max_new_tokens: 4, and the trainer takes 4 tokens of a sample",
    ),
    "samples that no micro-batch holds": (
        put("trainer", max_tokens_per_micro_batch=12),
        r"warning lengths: the trainer takes 12 tokens of a sample at most, and engines go to 16",
    ),
    "answers that no engine has room for": (
        put("run", sampling={"max_new_tokens": 16}),
        r"warning lengths: sampling.max_new_tokens: 16, and engines take 16 tokens, of the prompt",
    ),
    "more samples than a request has": (
        engine(max_samples=2),
        r"warning rollout: engine.max_samples: 2 is less than samples_per_group, 4",
    ),
    "more samples than a group has": (
        put("rollout", episodes={"max_samples": 3}),
        r"wrong rollout: episodes.max_samples: 3 is less than samples_per_group, 4",
    ),
    "more rows than a batch has": (
        put("trainer", max_rows=15),
        r"wrong trainer: max_rows: 15 is less than a step has: groups_per_step 4 x samples_per",
    ),
    "a port for two": (
        lambda files: [
            files.services["services"][name].setdefault("config", {}).update(server={"port": 45871})
            for name in ("router", "trainer")
        ],
        r"wrong trainer: server.port: 45871 is that of router, server.port too",
    ),
    "a port for all replicas": (
        lambda files: files.services["services"]["rollout"].update(
            replicas=2, config={**files.rollout, "server": {"port": 45872}}
        ),
        r"wrong rollout: server.port of each replica: 45872",
    ),
    "fewer devices than ranks": (
        lambda files: files.services["services"]["trainer"].update(
            devices=[0], config={**files.trainer, "ranks": {"count": 2}}
        ),
        r"wrong trainer: ranks.count: 2 ranks take a device each, and the service is shown 1",
    ),
    "another store": (
        put("run", store="elsewhere"),
        r"wrong store: store: elsewhere, and the trainer's is .*; leave it out",
    ),
    "a checkpoint that is not there": (
        put("run", initial_checkpoint="checkpoints/old"),
        r"wrong store: initial_checkpoint: checkpoints/old is not in the store",
    ),
    "a longer context than the model's": (
        engine(max_model_length=4096),
        r"warning rollout: engine.max_model_length: 4096 is more than the \d+ positions",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_with_settings_is_told(files: Files, case: str) -> None:
    change, expected = CASES[case]
    change(files)
    found = files.faults()
    assert any(re.search(expected, each) for each in found), found


def test_sound_files_have_nothing_to_tell(files: Files) -> None:
    """The control of every other test here: each spoils one thing of these."""
    assert files.faults() == []


def test_all_faults_of_both_files_are_told_in_one_pass(files: Files) -> None:
    files.run |= {"stepz": 3, "stop_window": 4, "deterministic": True, "surplus": "drop"}
    files.run["prompts"] = {"file": "nothing.jsonl"}
    files.trainer.update(autocast=True, backend="fsdp", head="value", lora=LORA)
    files.rollout["engine"] |= {"threads": 4, "deterministic": True, "max_length": 4}
    found = "\n".join(files.faults())
    for expected in (
        "run.yaml: stepz: unknown key",
        "run.yaml: stop_window: has no effect",
        "run.yaml: surplus: has no effect",
        "prompts: prompts.file: nothing.jsonl does not exist",
        "trainer: autocast has no effect",
        "trainer: lora is not for head value",
        "rollout: engine.max_length: unknown key",
    ):
        assert expected in found, expected


def test_routing_that_nobody_records_is_told(files: Files) -> None:
    """Of a model without experts the trainer is told besides, which its ranks would be."""
    files.trainer.update(backend="fsdp", fsdp={"routing_replay": "rollout"})
    found = "\n".join(files.faults())
    assert "wrong run: fsdp.routing_replay: the trainer takes the experts of rollouts" in found
    assert "engine rollout tells none: set engine.routed_experts: true" in found
    assert "trainer: fsdp.routing_replay: model_type qwen3 has no experts; leave it out" in found
    files.trainer["fsdp"] = {"routing_replay": "recorded"}
    assert "set algorithm.loss.old_logprobs: old" in "\n".join(files.faults())
    files.run["algorithm"] = {"loss": {"name": "ppo_clip", "clip_low": 0.2, "old_logprobs": "old"}}
    assert not any("old_logprobs" in each for each in files.faults())


def test_each_check_of_a_configuration_is_told_and_in_the_same_words() -> None:
    values: dict[str, Any] = {
        "run_dir": "run",
        "services": "services.json",
        "prompts": {"index_count": 8},
        "environment": {"name": "prompts"},
        "sampling": {"max_new_tokens": 8},
        "stop_window": 3,
        "surplus": "drop",
    }
    examined = examine_values(RunConfig, values)
    assert examined.config is not None and len(examined.faults) == 2
    for left, fault in (("stop_window", "surplus"), ("surplus", "stop_window")):
        alone = {key: value for key, value in values.items() if key != left}
        with pytest.raises(ConfigError) as caught:
            parse_config(RunConfig, alone)
        assert str(caught.value) in examined.faults and fault in str(caught.value)
    sound = {key: value for key, value in values.items() if key not in ("surplus", "stop_window")}
    assert examine_values(RunConfig, sound).faults == []
    assert examine_values(RunConfig, sound).config == parse_config(RunConfig, sound)


def test_values_that_are_wrong_leave_the_others_to_be_looked_at(tiny_model: Path) -> None:
    values = {
        "model": str(tiny_model),
        "store": "store",
        "ranks": {"count": 0, "lost_seconds": 1},
        "optim": {"betas": [2, 0.9], "schedule": "linear"},
        "publish": "x",
    }
    examined = examine_values(TrainerConfig, values)
    found = "\n".join(examined.faults)
    for key in ("ranks.count", "optim.betas.0", "publish"):
        assert key in found
    assert examined.config is not None and examined.config.ranks.count == 1
    assert examine_values(TrainerConfig, {"store": "store"}).config is None


def evaluated(**data: Any) -> dict[str, Any]:
    return {"datasets": {"held": {"prompts": {"index_count": 4}, **data}}}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda files: files.run.pop("environment"), "give environment and prompts, or"),
        (lambda files: files.run.pop("prompts"), "give environment and prompts, or"),
        (put("run", evaluation=evaluated(environment="old")), "'old' is none of environments"),
        (put("run", teacher="old"), "teacher: 'old' is none of teachers: none"),
        (put("run", algorithm={"advantage": {"name": "gae"}}), "critic: the advantage gae needs"),
        (put("run", replay={"run_dir": "none"}), "steps: has no effect with replay"),
        (put("run", services=3), "services: Input is not a valid path"),
        (put("trainer", server="x"), "server: must be a mapping of its settings"),
        (put("trainer", model=3), "model: Input should be a valid string"),
        (put("trainer", ranks=None), "ranks: Input should be a valid dictionary"),
        (put("rollout", engine="x"), "engine: Input should be a valid dictionary"),
        (put("rollout", tokenizer=None, roles=["episodes"]), "tokenizer: the episodes role"),
        (lambda files: files.services.update(services={}), "services: Dictionary should have"),
        (lambda files: files.services.update(services={"a": {"kind": "b"}}), "services.a.kind"),
    ],
)
def test_settings_that_lead_nowhere_are_told_and_end_nothing(
    files: Files, change: Callable[[Files], None], expected: str
) -> None:
    change(files)
    found = files.faults()
    assert any(expected in each for each in found), found


def test_a_wrong_flag_hides_nothing_of_the_file(files: Files) -> None:
    files.run["prompts"] = {"file": "none.jsonl"}
    found = "\n".join(files.faults("--stepz", "3"))
    assert "unknown flag --stepz" in found and "none.jsonl does not exist" in found
