"""deploy/kubernetes-many-pods and the components: what kubectl makes of them is accepted."""

from __future__ import annotations

import copy
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from services.converter.servicer import ConverterConfig
from services.gateway.config import GatewayConfig
from services.rollout.config import RolloutConfig
from services.trainer.config import TrainerConfig
from services.trainer.rank.__main__ import parse_flags, read_config
from sluice.config import load_config, parse_config, read_yaml
from sluice.loop.config import RunConfig
from tests.patience import PATIENCE
from tests.unit.custom_resources import check, job_templates, pod_templates
from tests.unit.test_cluster_files import environment_of

ROOT = Path(__file__).parent.parent.parent
MANY = ROOT / "deploy" / "kubernetes-many-pods"
BUCKET = ROOT / "deploy" / "kubernetes-bucket"
COMPONENTS = ROOT / "deploy" / "kubernetes" / "components"
REFUSED = (jsonschema.ValidationError, kubernetes_validate.ValidationError)


def rendered(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """What `kubectl apply -k` would apply, by kind and name."""
    done = subprocess.run(
        ["kubectl", "kustomize", str(folder)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [each for each in yaml.safe_load_all(done.stdout) if each]
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


@pytest.fixture(scope="module")
def manifests() -> dict[tuple[str, str], dict[str, Any]]:
    return rendered(MANY)


def overlay(folder: Path, *components: str) -> dict[tuple[str, str], dict[str, Any]]:
    """The base with some components, as kubectl renders it."""
    kustomization = read_yaml(MANY / "kustomization.yaml")
    base = Path("../" * len(folder.parts)) / str(ROOT / "deploy").lstrip("/")
    kustomization["resources"] = [str(base / "kubernetes")]
    kustomization["components"] = [str(base / "kubernetes" / "components" / n) for n in components]
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return rendered(folder)


@pytest.fixture(scope="module", params=["one pod each", "many pods"])
def in_a_bucket(request, tmp_path_factory) -> dict[tuple[str, str], dict[str, Any]]:
    """Services whose store is a bucket, and their loop."""
    if request.param == "one pod each":
        return rendered(BUCKET) | rendered(BUCKET / "loop")
    folder = tmp_path_factory.mktemp("overlay")
    return overlay(folder, "ranks", "engines", "monitoring", "s3") | rendered(BUCKET / "loop")


def config_files(manifests: dict[tuple[str, str], dict[str, Any]], folder: Path) -> Path:
    """Writes the ConfigMap as pods mount it."""
    for name, text in manifests["ConfigMap", "sluice"]["data"].items():
        (folder / name).write_text(text)
    return folder


def test_kubernetes_and_its_operators_know_every_key(manifests, in_a_bucket) -> None:
    for each in [*manifests.values(), *in_a_bucket.values()]:
        check(each)
    assert ("StatefulSet", "rollout") not in manifests  # LeaderWorkerSet has a service of its own
    assert ("Service", "rollout") not in manifests
    files = {path.parent.name for path in COMPONENTS.glob("*/kustomization.yaml")}
    assert files == {"ranks", "engines", "monitoring", "s3", "service-monitor", "tinker"}


@pytest.mark.parametrize(
    ("kind", "name", "path"),
    [
        ("JobSet", "ranks", "spec/failurePolicy/restartStrategy"),
        ("JobSet", "ranks", "spec/network/subdomain"),
        ("JobSet", "ranks", "spec/replicatedJobs/0/replicas"),
        ("JobSet", "ranks", "spec/replicatedJobs/0/template/spec/completionMode"),
        ("JobSet", "ranks", "spec/replicatedJobs/0/template/spec/template/spec/volumes"),
        ("LeaderWorkerSet", "rollout", "spec/startupPolicy"),
        ("LeaderWorkerSet", "rollout", "spec/leaderWorkerTemplate/size"),
        (
            "LeaderWorkerSet",
            "rollout",
            "spec/leaderWorkerTemplate/workerTemplate/spec/containers/0/readinessProbe",
        ),
        ("PodMonitor", "sluice", "spec/selector"),
        ("PodMonitor", "sluice", "spec/podMetricsEndpoints/0/interval"),
        ("PodMonitor", "sluice", "spec/podMetricsEndpoints/0/authorization/credentials"),
        ("PodMonitor", "sluice", "metadata/labels"),
    ],
)
def test_a_key_that_is_misspelt_is_refused(manifests, kind, name, path) -> None:
    manifest = copy.deepcopy(manifests[kind, name])
    *outer, last = path.split("/")
    place: Any = manifest
    for word in outer:
        place = place[int(word)] if isinstance(place, list) else place[word]
    place[last + "s"] = place.pop(last)
    with pytest.raises(REFUSED):
        check(manifest)


def test_what_a_pod_mounts_is_there_and_locked(manifests) -> None:
    for manifest in manifests.values():
        for template in pod_templates(manifest):
            pod = template["spec"]
            volumes = {volume["name"]: volume for volume in pod["volumes"]}
            for container in [*pod.get("initContainers", []), *pod["containers"]]:
                mounts = {mount["name"] for mount in container["volumeMounts"]}
                assert mounts <= volumes.keys(), manifest["metadata"]["name"]
                assert container["securityContext"]["readOnlyRootFilesystem"]
            assert pod["securityContext"]["runAsNonRoot"]
            for volume in volumes.values():
                if claim := volume.get("persistentVolumeClaim"):
                    assert ("PersistentVolumeClaim", claim["claimName"]) in manifests


def injected(index: int) -> list[dict[str, str]]:
    """What LeaderWorkerSet puts in front of a container's variables."""
    return [
        {"name": "LWS_LEADER_ADDRESS", "value": "rollout-1.rollout.sluice"},
        {"name": "LWS_GROUP_SIZE", "value": "2"},
        {"name": "LWS_WORKER_INDEX", "value": str(index)},
    ]


@pytest.mark.parametrize("index", [0, 1])
def test_every_pod_of_an_engine_accepts_its_configuration(
    manifests, index, monkeypatch, tmp_path
) -> None:
    group = manifests["LeaderWorkerSet", "rollout"]
    template = pod_templates(group)[index]
    (container,) = template["spec"]["containers"]
    pod = "rollout-1" + ("-1" if index else "")
    own = [*injected(index), *container["env"]]
    assert own[5:]  # fieldRef of the group is filled in by hand
    for entry in own:
        if "group-index" in str(entry):
            entry = {"name": entry["name"], "value": "1"}
        own[[each["name"] for each in own].index(entry["name"])] = entry
    for variable, value in environment_of({"env": own}, pod).items():
        monkeypatch.setenv(variable, value)
    folder = config_files(manifests, tmp_path)
    words = [word.replace("/config/", f"{folder}/") for word in container["command"][3:]]
    config = load_config(RolloutConfig, words)
    assert config.engine_id == "rollout-1"  # of both pods: they are one engine
    assert config.is_further_node is bool(index)
    assert config.engine.sglang.leader == "rollout-1.rollout.sluice:50051"
    assert config.node_host == f"{pod}.rollout"
    assert config.engine.sglang.node_count == group["spec"]["leaderWorkerTemplate"]["size"]
    assert config.server.security.token_file == Path("/run/secrets/sluice/token")
    service = "EngineNodeService" if index else "EngineService"
    ready = container["readinessProbe"]["exec"]["command"]
    assert ready[-1] == f"sluice.api.rollout.v1.{service}"


def test_ranks_and_their_trainer_read_one_file_and_find_each_other(
    manifests, monkeypatch, tmp_path
) -> None:
    job_set = manifests["JobSet", "ranks"]
    (template,) = pod_templates(job_set)
    (container,) = template["spec"]["containers"]
    (job,) = job_templates(job_set)
    command = container["command"]
    inner = command[command.index("services.trainer.rank") + 1 :]
    flags = parse_flags(inner)
    folder = config_files(manifests, tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    values = read_yaml(folder / flags.config.name) | {"model": str(tmp_path / "model")}
    rank = parse_config(TrainerConfig, values)  # it has none of the trainer's variables
    (front,) = manifests["StatefulSet", "trainer"]["spec"]["template"]["spec"]["containers"]
    for variable, value in environment_of(front, "trainer-0").items():
        monkeypatch.setenv(variable, value)
    words = [word.replace("/config/", f"{folder}/") for word in front["command"][3:]]
    trainer = load_config(TrainerConfig, [*words, "--model", str(tmp_path / "model")])
    assert rank.ranks == trainer.ranks and trainer.ranks.launch == "external"
    assert rank.server.security == trainer.server.security
    options = dict(
        word[2:].split("=", 1) for word in command if word.startswith("--") and "=" in word
    )
    pods, each = int(options["nnodes"]), int(options["nproc-per-node"])
    assert trainer.ranks.count == pods * each
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == pods
    host, _, port = flags.controller.rpartition(":")
    ports = {p["name"]: p["port"] for p in manifests["Service", host]["spec"]["ports"]}
    assert int(port) == trainer.ranks.listen_port == ports["ranks"]
    name, network = job_set["metadata"]["name"], job_set["spec"]["network"]["subdomain"]
    (replicated,) = job_set["spec"]["replicatedJobs"]
    assert options["rdzv-endpoint"] == f"{name}-{replicated['name']}-0-0.{network}:29400"
    assert job["spec"]["backoffLimit"] == 0  # a pod that ends restarts all


def test_metrics_of_every_service_are_scraped_with_its_token(manifests) -> None:
    monitor = manifests["PodMonitor", "sluice"]["spec"]
    (wanted,) = monitor["selector"]["matchExpressions"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    serving = set()
    for manifest in manifests.values():
        for template in pod_templates(manifest):
            for container in template["spec"]["containers"]:
                ports = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
                if endpoint["port"] in ports:
                    serving.add(template["metadata"]["labels"]["app"])
                    assert {"name": "SLUICE_SERVER__METRICS_PORT", "value": "9100"} in container[
                        "env"
                    ]
                    assert ports[endpoint["port"]] == 9100
    assert serving == set(wanted["values"]) - {"gateway"}
    credentials = endpoint["authorization"]["credentials"]
    assert credentials == {"name": "sluice-token", "key": "token"}


def test_a_service_monitor_scrapes_every_pod_behind_a_service(tmp_path) -> None:
    manifests = overlay(tmp_path, "ranks", "service-monitor")
    monitor = manifests["ServiceMonitor", "sluice"]
    for each in manifests.values():
        check(each)
    (wanted,) = monitor["spec"]["selector"]["matchExpressions"]
    (endpoint,) = monitor["spec"]["endpoints"]
    scraped = set()
    for (kind, _), manifest in manifests.items():
        ports = {port["name"]: port for port in manifest.get("spec", {}).get("ports", [])}
        if kind == "Service" and manifest["metadata"]["labels"]["app"] in wanted["values"]:
            assert ports[endpoint["port"]]["port"] == 9100
            scraped.add(manifest["spec"]["selector"]["app"])
    serving = {
        template["metadata"]["labels"]["app"]
        for manifest in manifests.values()
        for template in pod_templates(manifest)
        for container in template["spec"]["containers"]
        for port in container.get("ports", [])
        if port["name"] == "metrics"
    }
    assert scraped == serving == set(wanted["values"]) - {"gateway"}
    assert endpoint["authorization"]["credentials"] == {"name": "sluice-token", "key": "token"}
    for path in ("selector", "endpoints"):
        misspelt = copy.deepcopy(monitor)
        misspelt["spec"][f"{path}s"] = misspelt["spec"].pop(path)
        with pytest.raises(REFUSED):
            check(misspelt)


def containers(
    manifests: dict[tuple[str, str], dict[str, Any]],
) -> dict[tuple[str, str, int], dict[str, Any]]:
    """The one of each pod that is no init container."""
    found = {}
    for (kind, name), manifest in manifests.items():
        for place, template in enumerate(pod_templates(manifest)):
            (found[kind, name, place],) = template["spec"]["containers"]
    return found


def test_no_pod_shares_a_volume_where_the_store_is_a_bucket(in_a_bucket, manifests) -> None:
    def shared(some: dict[tuple[str, str], dict[str, Any]]) -> list[str]:
        claims = [name for kind, name in some if kind == "PersistentVolumeClaim"]
        for manifest in some.values():
            for template in pod_templates(manifest):
                volumes = template["spec"]["volumes"]
                claims += [v["name"] for v in volumes if "persistentVolumeClaim" in v]
                assert all(len(volume) == 2 for volume in volumes)  # a name and one kind
        return claims

    assert shared(in_a_bucket) == []
    assert "sluice-store" in shared(manifests)


def test_a_bucket_is_named_to_all_who_read_or_write_a_store(in_a_bucket, monkeypatch) -> None:
    found, store = {}, "s3://sluice/store"
    for where, container in containers(in_a_bucket).items():
        secrets = [each["secretRef"]["name"] for each in container.get("envFrom", [])]
        named = [e["value"] for e in container.get("env", []) if e["name"] == "SLUICE_STORE"]
        found[where] = secrets == ["sluice-s3"], named == [store]
    assert found.pop(("StatefulSet", "router", 0)) == (False, False)  # it has no store
    for name in (("StatefulSet", "converter", 0), ("Job", "sluice-model", 0)):
        assert found.pop(name) == (True, False)  # it is told places
    assert {name for _, name, _ in found} >= {"trainer", "rollout", "loop"}
    assert set(found.values()) == {(True, True)}


def test_who_reads_a_model_fetches_it_from_the_bucket_first(in_a_bucket) -> None:
    """What they run is `sluice convert`, which tests/converter/test_bucket.py has do this."""
    readers = set()
    for (_, name), manifest in in_a_bucket.items():
        for template in pod_templates(manifest):
            pod = template["spec"]
            for first in pod.get("initContainers", []):
                readers.add(name)
                assert (
                    "sluice convert s3://sluice/model /store/model --to hf;" in first["command"][-1]
                )
                assert first["envFrom"] == [{"secretRef": {"name": "sluice-s3"}}]
                assert {m["mountPath"] for m in first["volumeMounts"]} == {"/store", "/tmp"}
                assert {"name": "store", "emptyDir": {}} in pod["volumes"]
    assert {"trainer", "rollout"} <= readers


def test_services_accept_the_bucket_as_their_store(in_a_bucket, monkeypatch, tmp_path) -> None:
    folder = config_files(in_a_bucket, tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    accepted = 0
    for (kind, name, _), container in containers(in_a_bucket).items():
        with monkeypatch.context() as patch:
            environment = environment_of(container, f"{name}-0")
            for variable, value in environment.items():
                if "$(" not in value:  # what LeaderWorkerSet puts in
                    patch.setenv(variable, value)
            words = [word.replace("/config/", f"{folder}/") for word in container["command"]]
            if name == "trainer":
                words += ["--model", str(tmp_path / "model")]
                assert load_config(TrainerConfig, words[3:]).store == "s3://sluice/store"
            elif name == "ranks":
                flags = parse_flags(words[words.index("services.trainer.rank") + 1 :])
                patch.setenv("SLUICE_MODEL", str(tmp_path / "model"))
                assert read_config(flags).store == "s3://sluice/store"
            elif name == "rollout" and kind == "StatefulSet":
                config = load_config(RolloutConfig, words[3:])
                assert (config.store, config.weights_location) == (
                    "s3://sluice/store",
                    "s3://sluice/store/weights",
                )
            elif name == "converter":
                assert load_config(ConverterConfig, words[3:]).roots == ["s3://sluice"]
            elif name == "loop":
                patch.delenv("SLUICE_STORE")
                patch.setenv("SLUICE_STORE", environment["SLUICE_STORE"])
                config = load_config(RunConfig, ["--config", words[2], *words[4:]])
                assert config.store_place == "s3://sluice/store"
            else:
                continue
            accepted += 1
    assert accepted >= 3


@pytest.mark.parametrize("store", ["/store", "s3://sluice/store"])
def test_a_gateway_stands_over_a_trainer_with_adapters_and_engines_with_a_base(
    tmp_path, monkeypatch, store
) -> None:
    more = ["s3"] if store.startswith("s3") else []
    manifests = overlay(tmp_path, "monitoring", "tinker", *more)
    for each in manifests.values():
        check(each)
    (wanted,) = manifests["PodMonitor", "sluice"]["spec"]["selector"]["matchExpressions"]
    assert {name for kind, name in manifests if kind == "StatefulSet"} == set(wanted["values"])
    (template,) = pod_templates(manifests["StatefulSet", "gateway"])
    (claimed,) = manifests["StatefulSet", "gateway"]["spec"]["volumeClaimTemplates"]
    held = {v["name"] for v in template["spec"]["volumes"]} | {claimed["metadata"]["name"]}
    folder, found = config_files(manifests, tmp_path), {}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    kinds = {"gateway": GatewayConfig, "trainer": TrainerConfig, "rollout": RolloutConfig}
    for name, config in kinds.items():
        (pod,) = pod_templates(manifests["StatefulSet", name])
        (container,) = pod["spec"]["containers"]
        words = [word.replace("/config/", f"{folder}/") for word in container["command"][3:]]
        if name == "trainer":
            words += ["--model", str(tmp_path / "model")]
        with monkeypatch.context() as patch:
            for variable, value in environment_of(container, f"{name}-0").items():
                patch.setenv(variable, value)
            found[name] = load_config(config, words)
        assert str(found[name].store) == store
    gateway, trainer, rollout = found["gateway"], found["trainer"], found["rollout"]
    assert trainer.lora is not None and trainer.lora.rank == 16
    assert Path(rollout.engine.model) == gateway.model == Path("/store/model")
    for address, name in ((gateway.trainer, "trainer"), (gateway.router, "router")):
        ports = {p["name"]: p["port"] for p in manifests["Service", name]["spec"]["ports"]}
        assert address == f"{name}:{ports['grpc']}"
    ports = {p["name"]: p["port"] for p in manifests["Service", "gateway"]["spec"]["ports"]}
    assert ports["http"] == gateway.tinker.port
    mounts = {m["mountPath"]: m["name"] for m in template["spec"]["containers"][0]["volumeMounts"]}
    assert set(mounts.values()) <= held
    assert mounts[str(gateway.journal.parent)] == claimed["metadata"]["name"]
    assert gateway.server.security.token_file == trainer.server.security.token_file
