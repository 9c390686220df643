"""The files in deploy/ are what the services accept; no engine is needed to see that."""

from __future__ import annotations

import subprocess
import sysconfig
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from services.converter.servicer import ConverterConfig
from services.gateway.config import GatewayConfig
from services.rollout.config import RolloutConfig
from services.router.config import RouterConfig
from services.trainer.config import TrainerConfig
from sluice.config import ProcessConfig, load_config
from sluice.loop.config import RunConfig
from tests.patience import PATIENCE

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
        assert services["file_sd_configs"] == [{"files": ["/etc/prometheus/sluice/*.yml"]}]
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


OVERLAYS = {  # the services that each changes, and the targets of their images
    "megatron": {"trainer": "megatron"},
    "sglang": {"rollout-0": "sglang", "rollout-1": "sglang"},
    "cuda": {"trainer": "cuda-trainer", "rollout-0": "cuda-rollout", "rollout-1": "cuda-rollout"},
    "npu": {"trainer": "npu", "rollout-0": "npu", "rollout-1": "npu"},
}
LOCKED = {  # image: extras of pyproject.toml, what its base has, what comes beside
    "cuda-trainer": (
        ["reference", "megatron", "s3"],
        set(),
        {
            "transformer-engine",
            "transformer-engine-cu13",
            "transformer-engine-torch",
            "ninja",
            "pybind11",
            "setuptools",
            "wheel",
        },
    ),
    "cuda-rollout": (["reference", "sglang", "s3"], {"torch"}, set()),
    "npu": (["reference", "megatron", "s3"], set(), {"torch-npu"}),
}


def merged(base: Any, over: Any) -> Any:
    """What compose makes of a value in two files; commands are replaced by `rendered`."""
    if isinstance(base, dict) and isinstance(over, dict):
        return base | {k: merged(base[k], v) if k in base else v for k, v in over.items()}
    if isinstance(base, list) and isinstance(over, list):
        return [*base, *over]
    return over


def rendered(name: str) -> dict[str, Any]:
    overlay = yaml.safe_load((DEPLOY / f"compose.{name}.yaml").read_text())["services"]
    return {
        service: merged(base, over := overlay.get(service, {}))
        | {key: over[key] for key in ("command",) if key in over}
        for service, base in COMPOSE.items()
    }


def stages() -> dict[str, str]:
    """The text of each stage of the Dockerfile by its name."""
    found = {}
    for stage in ("\n" + (DEPLOY / "Dockerfile").read_text()).split("\nFROM ")[1:]:
        found[stage.split("\n")[0].partition(" AS ")[2]] = stage
    return found


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay_changes_what_it_says_and_its_processes_accept_it(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    services = rendered(name)
    assert {s for s in services if services[s] != COMPOSE[s]} == set(OVERLAYS[name])
    (tmp_path / "config.json").write_text("{}")
    for service, target in OVERLAYS[name].items():
        found = services[service]
        assert found["build"] == COMPOSE[service]["build"] | {"target": target}
        assert found["image"] == f"sluice-{target}"
        assert "\nUSER 10001\n" in stages()[target]
        assert found["read_only"] and found["cap_drop"] == ["ALL"]
        *command, file = found["command"]
        cls, _ = CONFIGS[service]
        kind = service.partition("-")[0]
        assert command == ["python", "-m", f"services.{kind}", "--config"]
        with monkeypatch.context() as patch:
            for variable, value in found["environment"].items():
                patch.setenv(variable, "" if "$" in value else value)
            arguments = ["--config", str(DEPLOY / "config" / Path(file).name)]
            if cls is TrainerConfig:
                arguments += ["--model", str(tmp_path)]
            config: Any = load_config(cls, arguments)
        assert config.server.metrics_port == 9100
        if cls is RolloutConfig:
            assert config.server.advertise == f"{service}:50051"
        for volume in found["volumes"]:
            if volume.startswith("./"):
                assert (DEPLOY / volume.split(":")[0]).exists()
    declared = yaml.safe_load((DEPLOY / f"compose.{name}.yaml").read_text()).get("volumes", {})
    named = {v.split(":")[0] for s in OVERLAYS[name] for v in services[s]["volumes"]}
    named = {volume for volume in named if volume[0] not in "./$"}
    assert named <= {*declared, "store"}


def test_the_gateway_lies_over_the_base_and_its_trainer_has_adapters(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    services = yaml.safe_load((DEPLOY / "compose.tinker.yaml").read_text())["services"]
    engines = {name: services.pop(name) for name in ("rollout-0", "rollout-1")}
    assert services.keys() == {"trainer", "gateway", "prometheus"}
    gateway, plain = services["gateway"], COMPOSE["trainer"]
    for key in ("init", "restart", "networks", "stop_grace_period", "read_only", "tmpfs"):
        assert gateway[key] == plain[key], key
    for key in ("cap_drop", "security_opt", "logging", "image", "environment"):
        assert gateway[key] == plain[key], key
    assert gateway["healthcheck"] | {"test": None} == plain["healthcheck"] | {"test": None}
    assert {*plain["volumes"]} < {*gateway["volumes"]}
    assert all(port.startswith("127.0.0.1:") for port in gateway["ports"])
    for name, value in gateway["environment"].items():
        monkeypatch.setenv(name, "" if "$" in value else value)
    for name, cls in (("trainer", TrainerConfig), ("gateway", GatewayConfig)):
        *command, file = services[name]["command"]
        assert command == ["python", "-m", f"services.{name}", "--config"]
        (tmp_path / "config.json").write_text("{}")
        arguments = ["--config", str(DEPLOY / "config" / Path(file).name), "--model", str(tmp_path)]
        config: Any = load_config(cls, arguments)
        assert config.server.metrics_port == 9100
        assert str(config.store) == "/store"
        if name == "trainer":
            assert config.lora is not None
            base = yaml.safe_load((DEPLOY / "config" / Path(file).name).read_text())["model"]
            for engine in engines.values():
                assert engine == {"environment": {"SLUICE_ENGINE__MODEL": base}}
            continue
        assert gateway["ports"][0].endswith(f":{config.tinker.port}")
        assert str(config.journal).startswith("/runs/")  # a volume
        for other in ("trainer", "router"):
            assert getattr(config, other) == f"{other}:50051"
            assert gateway["depends_on"][other] == {"condition": "service_healthy"}
    (volume,) = services["prometheus"]["volumes"]
    source, target, _ = volume.split(":")
    assert Path(target).parent == Path("/etc/prometheus/sluice")
    (group,) = yaml.safe_load((DEPLOY / source).read_text())
    assert group["targets"] == ["gateway:9100"]


@pytest.mark.parametrize("name", ["cuda", "npu"])
def test_no_two_containers_share_a_device(name: str) -> None:
    seen: list[str] = []
    for service in OVERLAYS[name]:
        found = rendered(name)[service]
        if name == "cuda":
            (devices,) = found["deploy"]["resources"]["reservations"]["devices"]
            seen += devices["device_ids"]
        else:
            seen += [d for d in found["devices"] if d.removeprefix("/dev/davinci").isdigit()]
    assert len(seen) == len(set(seen)) == 4
    trainer = yaml.safe_load((DEPLOY / "config" / f"trainer.{name}.yaml").read_text())
    assert trainer["ranks"] == {"count": 2}


@pytest.mark.parametrize("image", LOCKED)
def test_an_image_for_accelerators_has_all_its_versions_in_one_file(image: str) -> None:
    def read(path: Path) -> dict[str, str]:
        lines = [line for line in path.read_text().splitlines() if line[:1] not in ("", "#")]
        pairs = [line.split("==") for line in lines]
        assert len(pairs) == len({canonicalize_name(name) for name, _ in pairs}), path
        return {canonicalize_name(name): version for name, version in pairs}

    extras, of_base, beside = [*LOCKED[image][0]], *LOCKED[image][1:]
    path = DEPLOY / "locks" / f"{image}.txt"
    locked, ours = read(path), read(ROOT / "constraints.txt")
    assert locked.keys() - ours.keys() == beside
    assert {n: v for n, v in locked.items() if n in ours and v != ours[n]} == {}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"]]
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    for text in wanted:
        requirement = Requirement(text)
        if requirement.name == "sluice":  # what an extra takes of another one
            for other in requirement.extras - {*extras}:
                extras.append(other)
                wanted += project["optional-dependencies"][other]
            continue
        name = canonicalize_name(requirement.name)
        assert (name in locked) != (name in of_base), f"{name} of {image}"
        assert name in of_base or requirement.specifier.contains(locked[name])
    stage = stages()[image]
    assert f"locks/{image}.txt" in stage or "\nFROM cuda AS cuda-trainer" in "\nFROM " + stage
    base = stages()["cuda" if image == "cuda-trainer" else image].split(" AS ")[0]
    assert f": {base}" in path.read_text()


def test_the_dockerfile_passes_hadolint() -> None:
    hadolint = Path(sysconfig.get_path("scripts")) / "hadolint"
    command = [hadolint, DEPLOY / "Dockerfile"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout
    worse = (DEPLOY / "Dockerfile").read_text().replace("WORKDIR /app", "RUN cd /app")
    done = subprocess.run(
        [hadolint, "-"], input=worse, capture_output=True, text=True, timeout=PATIENCE
    )
    assert "DL3003" in done.stdout  # it does look
