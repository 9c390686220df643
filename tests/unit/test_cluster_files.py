"""What deploy/kubernetes and deploy/slurm say is what Kubernetes, bash and the services accept."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from services.converter.servicer import ConverterConfig
from services.rollout.config import RolloutConfig
from services.router.config import RouterConfig
from services.trainer.config import TrainerConfig
from sluice.config import ProcessConfig, load_config
from sluice.loop.config import RunConfig
from tests.patience import PATIENCE
from tests.unit import custom_resources

ROOT = Path(__file__).parent.parent.parent
KUBERNETES, SLURM = ROOT / "deploy" / "kubernetes", ROOT / "deploy" / "slurm"
VERSION = "1.32"  # of Kubernetes
KUSTOMIZATION: dict[str, Any] = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())
SERVICES: dict[str, type[ProcessConfig]] = {
    "router": RouterConfig,
    "trainer": TrainerConfig,
    "rollout": RolloutConfig,
    "converter": ConverterConfig,
}


def manifests() -> Iterator[dict[str, Any]]:
    for name in [*KUSTOMIZATION["resources"], "loop/loop.yaml"]:
        yield from yaml.safe_load_all((KUBERNETES / name).read_text())


def named(kind: str, name: str) -> dict[str, Any]:
    (found,) = (
        each for each in manifests() if (each["kind"], each["metadata"]["name"]) == (kind, name)
    )
    return found


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    for each in manifests():
        if "template" in each["spec"]:
            yield each["metadata"]["name"], each["spec"]["template"]["spec"]


def check(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, VERSION, strict=True)


@pytest.mark.parametrize("manifest", [*manifests()], ids=lambda each: each["metadata"]["name"])
def test_kubernetes_knows_every_key(manifest):
    check(manifest)


@pytest.mark.parametrize("path", ["livenessProbe", "securityContext", "volumeMounts", "env"])
def test_a_key_that_is_misspelt_is_refused(path):
    manifest = copy.deepcopy(named("StatefulSet", "trainer"))
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    container[path + "s"] = container.pop(path)
    with pytest.raises(kubernetes_validate.ValidationError):
        check(manifest)


@pytest.mark.parametrize("path", [*KUBERNETES.glob("components/*/*s.yaml")], ids=lambda p: p.stem)
def test_operators_know_every_key_of_a_component(path):
    (manifest,) = yaml.safe_load_all(path.read_text())
    custom_resources.check(manifest)
    wrong = copy.deepcopy(manifest)
    first = next(iter(wrong["spec"]))
    wrong["spec"][first + "s"] = wrong["spec"].pop(first)
    with pytest.raises(jsonschema.ValidationError):
        custom_resources.check(wrong)


def test_every_manifest_is_in_the_kustomization_but_the_loop():
    files = {path.name for path in KUBERNETES.glob("*.yaml")}
    assert files - {"kustomization.yaml"} == set(KUSTOMIZATION["resources"])
    (config,) = KUSTOMIZATION["configMapGenerator"]
    assert {KUBERNETES / name for name in config["files"]} == set(KUBERNETES.glob("config/*"))


@pytest.mark.parametrize(("name", "pod"), [*pods()])
def test_what_a_pod_mounts_is_there(name, pod):
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes.keys()
        assert container["securityContext"]["readOnlyRootFilesystem"]
        if "/config/" in " ".join(container["command"]):
            assert volumes["config"]["configMap"]["name"] == "sluice"
    for volume in volumes.values():
        if claim := volume.get("persistentVolumeClaim"):
            assert named("PersistentVolumeClaim", claim["claimName"])
    assert pod["securityContext"]["runAsNonRoot"]


def environment_of(container: dict[str, Any], pod_name: str) -> dict[str, str]:
    """As a node gives it to a container."""
    found: dict[str, str] = {}
    for entry in container.get("env", []):
        value = entry.get("value", pod_name)
        for name, earlier in found.items():
            value = value.replace(f"$({name})", earlier)
        found[entry["name"]] = value
    return found


def accepted(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The configuration of a service's container, as its process would read it."""
    (container,) = named("StatefulSet", name)["spec"]["template"]["spec"]["containers"]
    for variable, value in environment_of(container, f"{name}-1").items():
        monkeypatch.setenv(variable, value)
    arguments = [
        word.replace("/config/", f"{KUBERNETES}/config/") for word in container["command"][3:]
    ]
    if name == "trainer":  # a model directory, which is built in a pod
        (tmp_path / "config.json").write_text("{}")
        arguments += ["--model", str(tmp_path)]
    return load_config(SERVICES[name], arguments)


@pytest.mark.parametrize("name", SERVICES)
def test_every_pod_accepts_its_configuration(name, monkeypatch, tmp_path):
    config = accepted(name, monkeypatch, tmp_path)
    (container,) = named("StatefulSet", name)["spec"]["template"]["spec"]["containers"]
    secret = next(m for m in container["volumeMounts"] if m["name"] == "token")
    assert config.server.security.token_file == Path(secret["mountPath"], "token")
    assert (config.server.port, config.server.metrics_port) == (50051, 9100)
    if name == "rollout":
        assert (config.engine_id, config.server.advertise) == (
            "rollout-1",
            "rollout-1.rollout:50051",
        )
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        command = container[probe]["exec"]["command"]
        assert command[:4] == ["python", "-m", "sluice.runtime.healthcheck", "127.0.0.1:50051"]


def test_the_loop_finds_the_services_by_their_names(monkeypatch):
    (container,) = named("Job", "loop")["spec"]["template"]["spec"]["containers"]
    for variable, value in environment_of(container, "loop").items():
        monkeypatch.setenv(variable, value)
    config = load_config(RunConfig, ["--config", str(KUBERNETES / "config" / "run.yaml")])
    for address, name in ((config.trainer, "trainer"), (config.router, "router")):
        (port, *_) = named("Service", name)["spec"]["ports"]
        assert address == f"{name}:{port['port']}"
    assert config.security.token_file == Path("/run/secrets/sluice/token")


SRUN = """\
#!/bin/bash
echo "$(printf '%q ' "$@")" >>"$RECORD"  # a line at once: several run beside each other
[[ " $* " == *" sluice.cli train "* ]] && exit {loop_code}
[[ " $* " == *" services.router "* ]] && exit {router_code}
exec sleep 60
"""
SCONTROL = """\
#!/bin/bash
[[ $2 == hostnames ]] && { printf 'n1\\nn2\\nn3\\n'; exit; }
echo "NodeName=$4 NodeAddr=10.0.0.${4#n} Port=1"
"""


def run_script(tmp_path: Path, srun: str, **variables: str) -> tuple[int, str, list[str]]:
    """Exit code and errors of the job's script, and what it gave to srun."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in (("srun", srun), ("scontrol", SCONTROL)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    record = tmp_path / "record"
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")},
        "PATH": f"{tools}:{os.environ['PATH']}",
        "RECORD": str(record),
        **{"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_SUBMIT_DIR": str(ROOT)},
        **{"RUN_DIR": str(tmp_path / "run"), "MODEL": str(tmp_path / "a model")},
        **variables,
    }
    with (tmp_path / "errors").open("w") as errors:
        done = subprocess.run(
            ["bash", SLURM / "sluice.sbatch"],
            env=environment,
            stdout=errors,
            stderr=errors,
            timeout=PATIENCE,
            check=False,
        )
    text = (tmp_path / "errors").read_text()
    return done.returncode, text, record.read_text().splitlines() if record.exists() else []


@pytest.mark.parametrize("code", [0, 1])
def test_the_loop_ends_a_slurm_job_with_its_code(tmp_path, code):
    srun = SRUN.format(loop_code=code, router_code=0)
    found, _, commands = run_script(tmp_path, srun)
    assert found == code
    assert sum("sluice.cli train" in command for command in commands) == 1


def test_settings_that_a_service_refuses_end_a_slurm_job(tmp_path):
    srun = SRUN.replace("exit {loop_code}", "exec sleep 60").format(router_code=2)
    found, errors, _ = run_script(tmp_path, srun)
    assert found == 2
    assert "settings were refused" in errors


def test_ranks_stand_on_the_first_nodes_and_engines_on_the_last(tmp_path):
    all_there = 'until (($(wc -l <"$RECORD") >= 6)); do sleep 0.05; done'
    srun = SRUN.replace("exit {loop_code}", f"{{ {all_there}; exit 0; }}")
    srun = srun.replace("exit {router_code}", "exec sleep 60")
    variables = {"TRAIN_NODES": "2", "ROLLOUT_NODES": "1", "ENGINES_PER_NODE": "2"}
    code, errors, commands = run_script(tmp_path, srun, RANKS_PER_NODE="4", **variables)
    assert code == 0, errors
    (ranks,) = (each for each in commands if "torch.distributed.run" in each)
    assert "--nodelist=n1\\,n2 " in ranks and "--nproc-per-node=4" in ranks
    engines = [each for each in commands if "services.rollout" in each]
    assert len(engines) == 2
    assert all("--nodelist=n3 " in each and "--server.host 10.0.0.3" in each for each in engines)
    config = load_config(RolloutConfig, flags_of(engines[0]))
    assert config.router.startswith("10.0.0.1:")
    file = tmp_path / "run" / "services" / "trainer.yaml"
    model = tmp_path / "a model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    trainer = load_config(TrainerConfig, ["--config", str(file)])
    assert (trainer.ranks.count, trainer.ranks.launch) == (8, "external")
    assert Path(trainer.model) == model
    assert trainer.server.security.token_file == config.server.security.token_file
    assert trainer.server.security.token_file is not None
    assert trainer.server.security.token_file.stat().st_mode & 0o077 == 0


def over_nodes(folder: Path, **sglang: object) -> Path:
    shutil.copytree(SLURM / "config", folder)
    engine = {"backend": "sglang", "model": "/m", "sglang": sglang}
    (folder / "rollout.yaml").write_text(yaml.safe_dump({"engine": engine}))
    return folder


def test_an_engine_over_nodes_takes_them_in_a_row(tmp_path):
    all_there = 'until (($(wc -l <"$RECORD") >= 10)); do sleep 0.05; done'
    srun = SRUN.replace("exit {loop_code}", f"{{ {all_there}; exit 0; }}")
    srun = srun.replace("exit {router_code}", "exec sleep 60")
    config = over_nodes(tmp_path / "config", nnodes=2, prefill={"nnodes": 1})
    code, errors, commands = run_script(tmp_path, srun, CONFIG=str(config), ENGINES_PER_NODE="2")
    assert code == 0, errors
    found: dict[str, list[tuple[str, ...]]] = {}
    for command in (each for each in commands if "services.rollout" in each):
        given = dict(zip(flags_of(command)[::2], flags_of(command)[1::2], strict=False))
        names = ("--engine.sglang.node_rank", "--engine.sglang.leader", "--server.host")
        assert given["--engine.sglang.leader"].endswith(f":{leading_port(commands, given)}")
        part = (given[names[0]], given[names[1]].partition(":")[0], given[names[2]])
        found.setdefault(given["--engine_id"], []).append(part)
    whole = [
        ("0", "10.0.0.1", "10.0.0.1"),
        ("1", "10.0.0.1", "10.0.0.2"),
        ("2", "10.0.0.1", "10.0.0.3"),
    ]
    assert {name: sorted(parts) for name, parts in found.items()} == {
        "rollout-n1-0": whole,
        "rollout-n1-1": whole,
    }


def leading_port(commands: list[str], given: dict[str, str]) -> str:
    """The port at which the first node of the same engine serves."""
    (first,) = (
        each
        for each in commands
        if f"--engine_id {given['--engine_id']} " in each and "node_rank 0 " in each
    )
    flags = flags_of(first)
    return flags[flags.index("--server.port") + 1]


@pytest.mark.parametrize(
    ("sglang", "text"),
    [({"nnodes": 2}, "ROLLOUT_NODES is 3, and an engine"), ({"nnodes": -1}, "a number from 1 to")],
)
def test_engines_that_do_not_fit_the_nodes_are_refused(tmp_path, sglang, text):
    config = over_nodes(tmp_path / "config", **sglang)
    code, errors, commands = run_script(tmp_path, SRUN, CONFIG=str(config))
    assert (code, commands) == (2, [])
    assert text in errors


@pytest.mark.parametrize("value", ["0", "4", "-1"])
@pytest.mark.parametrize("name", ["TRAIN_NODES", "ROLLOUT_NODES"])
def test_more_nodes_than_the_job_has_are_refused(tmp_path, name, value):
    code, errors, commands = run_script(tmp_path, SRUN, **{name: value})
    assert (code, commands) == (2, [])
    assert "1 to 3" in errors


def flags_of(command: str) -> list[str]:
    """What a recorded service was given."""
    words = subprocess.run(
        ["bash", "-c", f'printf "%s\\n" {command}'],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    ).stdout.splitlines()
    return words[words.index("services.rollout") + 1 :]
