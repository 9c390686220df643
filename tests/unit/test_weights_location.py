"""Where versions of weights are is said once, to the trainer: all else hears it from there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from examples.models.tiny_qwen3 import build_tiny_qwen3
from services.gateway.config import GatewayConfig
from services.rollout.config import RolloutConfig
from services.trainer.config import TrainerConfig
from sluice.config import ConfigError, ProcessConfig, parse_config
from sluice.loop.config import RunConfig
from sluice.stack import UpConfig, read_weights
from sluice.supervise import Supervisor

URL = "s3://weights/run"


class Written(Supervisor):
    """What `sluice up` writes for services, without starting any."""

    def __init__(self, config: UpConfig, addresses: Mapping[str, str] | None = None) -> None:
        super().__init__(config)
        self._addresses = addresses or {}

    def write(self) -> Written:
        for service in self._services:
            address = self._addresses.get(service.name, "127.0.0.1:1")
            service.addresses = {"address": address, "metrics_address": "127.0.0.1:2"}
        for service in self._services:
            path = self.run_dir / f"{service.name}.yaml"
            path.write_text(yaml.safe_dump(self._filled_in(service)))
        self._write_services()
        return self

    def config_of(self, name: str) -> dict[str, object]:
        config: dict[str, object] = yaml.safe_load((self.run_dir / f"{name}.yaml").read_text())
        return config


def write(run_dir: Path, trainer: dict[str, object], rollout: dict[str, object]) -> Written:
    services = {
        "router": {"kind": "router"},
        "critic": {"kind": "trainer", "config": {"head": "value", "weights": "s3://other/one"}},
        "trainer": {"kind": "trainer", "config": trainer},
        "rollout": {"kind": "rollout", "config": rollout},
    }
    return Written(parse_config(UpConfig, {"run_dir": run_dir, "services": services})).write()


def test_engines_and_runs_look_where_the_trainer_of_the_policy_publishes(tmp_path: Path) -> None:
    written = write(tmp_path, {"weights": URL}, {})
    assert written.config_of("rollout")["weights"] == URL
    assert read_weights(written.services_file) == URL


def test_a_teacher_that_comes_first_is_not_taken_for_the_trainer(tmp_path: Path) -> None:
    services = {
        "router": {"kind": "router"},
        "maths": {"kind": "trainer"},
        "trainer": {"kind": "trainer", "config": {"weights": URL}},
        "rollout": {"kind": "rollout"},
        "gateway": {"kind": "gateway"},
    }
    up = parse_config(UpConfig, {"run_dir": tmp_path, "services": services})
    written = Written(up, addresses={"trainer": "127.0.0.1:9"}).write()
    assert written.config_of("rollout")["weights"] == URL
    assert written.config_of("gateway")["trainer"] == "127.0.0.1:9"
    assert read_weights(written.services_file) == URL


@pytest.mark.parametrize("own", ["s3://mirror/run", ""])
def test_what_an_engine_is_told_itself_stays(own: str, tmp_path: Path) -> None:
    assert (
        write(tmp_path, {"weights": URL}, {"weights": own}).config_of("rollout")["weights"] == own
    )


def test_without_a_location_all_look_into_the_store(tmp_path: Path) -> None:
    written = write(tmp_path, {}, {})
    assert "weights" not in written.config_of("rollout")
    assert read_weights(written.services_file) == ""


@pytest.mark.parametrize("weights", ["gs://weights/run", "s3:/weights/run", "s3://"])
def test_a_location_that_is_none_is_refused_by_name(weights: str, tmp_path: Path) -> None:
    model = str(build_tiny_qwen3(tmp_path / "model", 0))
    store, trainer, router = str(tmp_path / "store"), "a:1", "a:2"
    served = {"trainer": trainer, "router": router}
    run = {
        "run_dir": tmp_path,
        "prompts": {"index_count": 5},
        "environment": {"name": "prompts"},
        "sampling": {"max_new_tokens": 5},
    }
    gateway = {"model": model, "store": store, "journal": tmp_path / "journal"}
    given: list[tuple[type[ProcessConfig], dict[str, object]]] = [
        (TrainerConfig, {"model": model, "store": store}),
        (RolloutConfig, {"tokenizer": model, "store": store, "router": router}),
        (GatewayConfig, {**gateway, **served}),
        (RunConfig, {**run, **served}),
    ]
    for config, values in given:
        assert parse_config(config, {**values, "weights": "s3://weights/run"})
        with pytest.raises(ConfigError, match=r"^weights: "):
            parse_config(config, {**values, "weights": weights})


def test_a_model_with_too_long_a_name_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="model: cannot be looked at"):
        parse_config(TrainerConfig, {"model": "x" * 5000, "store": "store"})
