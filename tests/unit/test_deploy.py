"""The files in deploy/ are what the services accept; no engine is needed to see that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from services.converter.servicer import ConverterConfig
from services.rollout.config import RolloutConfig
from services.router.config import RouterConfig
from services.trainer.config import TrainerConfig
from sluice.config import ProcessConfig, load_config
from sluice.loop.config import RunConfig

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
OVERLAY: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.tls.yaml").read_text())["services"]
SERVERS = ("router", "trainer", "rollout-0", "rollout-1", "converter")
CONFIGS: dict[str, tuple[type[ProcessConfig], str]] = {
    "router": (RouterConfig, "router.yaml"),
    "trainer": (TrainerConfig, "trainer.yaml"),
    "rollout-0": (RolloutConfig, "rollout.yaml"),
    "rollout-1": (RolloutConfig, "rollout.yaml"),
    "converter": (ConverterConfig, "converter.yaml"),
    "loop": (RunConfig, "run.yaml"),
}


def load(name: str, overlay: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The configuration of a container, as its process would read it."""
    environment = dict(COMPOSE[name].get("environment", {}))
    if overlay:
        environment |= OVERLAY[name]["environment"]
    for variable, value in environment.items():
        monkeypatch.setenv(variable, "" if "$" in value else value)  # unset on the host
    cls, file = CONFIGS[name]
    arguments = ["--config", str(DEPLOY / "config" / file)]
    if cls is TrainerConfig:  # a model directory, which is built in the container
        (tmp_path / "config.json").write_text("{}")
        arguments += ["--model", str(tmp_path)]
    return load_config(cls, arguments)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("overlay", [False, True], ids=["plain", "tls"])
def test_every_container_accepts_its_configuration(
    name: str, overlay: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = load(name, overlay, monkeypatch, tmp_path)
    security = config.security if name == "loop" else config.server.security
    assert (security.tls is not None) == overlay
    assert security.token_file is None
    assert config.server.host == "0.0.0.0"
    assert config.server.metrics_port == 9100
    if name.startswith("rollout"):
        assert (config.engine_id, config.server.advertise) == (name, f"{name}:50051")


def test_prometheus_scrapes_every_server_in_both_set_ups() -> None:
    plain, tls = (
        yaml.safe_load((DEPLOY / "config" / name).read_text())["scrape_configs"]
        for name in ("prometheus.yml", "prometheus.tls.yml")
    )
    for services, loop, _ in (plain, tls):
        targets = services["static_configs"][0]["targets"]
        assert targets == [f"{name}:9100" for name in SERVERS]
        assert loop["static_configs"][0]["targets"] == ["loop:9100"]
    assert [job.get("scheme") for job in tls] == ["https", "https", None]  # the host's has none


def test_grafana_and_prometheus_are_given_what_is_there() -> None:
    services = yaml.safe_load((DEPLOY / "compose.observability.yaml").read_text())["services"]
    assert services.keys() == {"prometheus", "node-exporter", "grafana"}
    held = {}
    for name, service in services.items():
        for volume in service["volumes"]:
            source, target = volume.removesuffix(":ro").split(":")[-2:]
            held[name, target] = source
            if source.startswith("."):
                assert (DEPLOY / source).exists(), volume
        assert ":latest" not in service.get("image", ":latest") or name == "prometheus"
    config = yaml.safe_load((DEPLOY / "config" / "prometheus.yml").read_text())
    (rules,) = config["rule_files"]
    assert ("prometheus", str(Path(rules).parent)) in held
    (nodes,) = config["scrape_configs"][-1]["file_sd_configs"][0]["files"]
    assert ("prometheus", str(Path(nodes).parent)) in held
    provided = yaml.safe_load((DEPLOY / "observability/grafana/dashboards.yml").read_text())
    assert ("grafana", provided["providers"][0]["options"]["path"]) in held


def test_containers_restart_are_checked_and_hold_no_privilege() -> None:
    for name, service in COMPOSE.items():
        assert service["cap_drop"] == ["ALL"] and service["read_only"], name
        if name in (*SERVERS, "prometheus"):
            assert service["restart"] == "unless-stopped", name
            assert service["healthcheck"]["test"], name
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), name
    for name in ("trainer", "rollout-0", "rollout-1"):
        assert COMPOSE["loop"]["depends_on"][name] == {"condition": "service_healthy"}
    assert OVERLAY.keys() == {*SERVERS, "loop", "prometheus"}


def test_no_image_runs_as_root() -> None:
    stages = (DEPLOY / "Dockerfile").read_text().split("\nFROM ")
    for stage in stages:
        if "CMD" in stage:
            assert "\nUSER 10001\n" in stage
            assert stage.index("USER 10001") < stage.index("CMD")
