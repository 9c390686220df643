"""The run files for NPUs are what the loop and the services accept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from services.rollout.config import RolloutConfig
from services.router.config import RouterConfig
from services.trainer.config import TrainerConfig
from sluice.config import ConfigError, ProcessConfig, parse_config
from sluice.loop.config import RunConfig
from sluice.stack import UpConfig

NPU = Path(__file__).parents[2] / "examples" / "npu"
SERVICES: dict[str, type[ProcessConfig]] = {
    "trainer": TrainerConfig,
    "rollout": RolloutConfig,
    "router": RouterConfig,
}


def read(name: str) -> Any:
    return yaml.safe_load((NPU / f"{name}.yaml").read_text())


def services_of(document: Any, directory: Path) -> dict[str, Any]:
    """What each process of `sluice up` reads, by its name."""
    up = parse_config(UpConfig, document)
    found: dict[str, Any] = {}
    for name, entry in up.services.items():
        given = dict(entry.config)
        if "model" in given:  # it is fetched first
            (directory / "config.json").write_text("{}")
            given["model"] = str(directory)
        if entry.kind != "router":
            given["store"] = directory
        if entry.kind == "rollout":
            given["router"] = "127.0.0.1:1"
        found[name] = parse_config(SERVICES[entry.kind], given)
    return found


@pytest.mark.parametrize(("name", "devices"), [("one", []), ("eight", [*range(8)])])
def test_run_files_for_npus_are_accepted(name: str, devices: list[int], tmp_path: Path) -> None:
    run, document = parse_config(RunConfig, read(name)), read(f"{name}_services")
    assert str(run.services) == f"{document['run_dir']}/services.json"
    found = services_of(document, tmp_path)
    given = [device for each in document["services"].values() for device in each.get("devices", [])]
    assert given == devices  # none twice; one NPU is everybody's
    assert (run.placement == "colocated") == (not devices)
    trainer = document["services"]["trainer"]
    assert found["trainer"].ranks.count == max(1, len(trainer.get("devices", [])))
    for service, config in found.items():
        if isinstance(config, RolloutConfig) and config.engine.backend == "sglang":
            arguments = config.engine.sglang.server_args
            assert arguments["device"] == "npu"
            assert arguments["tp_size"] == len(document["services"][service]["devices"])


@pytest.mark.parametrize("name", ["one", "eight"])
def test_a_misspelt_key_is_told(name: str, tmp_path: Path) -> None:
    document = read(f"{name}_services")
    document["services"]["trainer"]["config"]["rank"] = {"count": 1}
    with pytest.raises(ConfigError, match="rank"):
        services_of(document, tmp_path)
    run = read(name) | {"step": 1}
    with pytest.raises(ConfigError, match="step"):
        parse_config(RunConfig, run)
