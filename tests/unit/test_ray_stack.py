"""How the services of a file become actors of Ray, and where ranks meet; without a cluster."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import pytest

from sluice import ray_cell
from sluice.config import ConfigError, parse_config
from sluice.durable import DirectoryError
from sluice.ray_cell import Registry
from sluice.ray_stack import Member, RayStack, carried_environment, members_of
from sluice.stack import STACK_FILE, UpConfig
from sluice.starting import read_starting
from sluice.supervise import ServiceDiedError


def config(run_dir: Path, services: dict[str, Any], **more: Any) -> UpConfig:
    return parse_config(UpConfig, {"run_dir": str(run_dir), "services": services, **more})


def members(run_dir: Path, services: dict[str, Any]) -> dict[str, Member]:
    found = members_of(config(run_dir, services))
    assert len({member.name for member in found}) == len(found)
    return {member.name: member for member in found}


def test_each_replica_is_a_member_with_what_it_needs(tmp_path: Path) -> None:
    needs = {"cpus": 2.5, "gpus": 4, "memory_gib": 1.5}
    found = members(
        tmp_path,
        {
            "engines": {"kind": "rollout", "replicas": 3, "resources": needs, "strategy": "pack"},
            "router": {"kind": "router"},
            "npu": {"kind": "converter", "resources": {"npus": 8}},
        },
    )
    assert [*found] == ["router", "npu", "engines-0", "engines-1", "engines-2"]
    engine = found["engines-1"]
    assert engine.bundle == {"CPU": 2.5, "GPU": 4.0, "memory": 1.5 * 2**30}
    assert (engine.group, engine.strategy) == ("engines", "PACK")
    assert engine.spec["router"] == "router" and engine.spec["config"]["engine_id"] == "engines-1"
    assert found["npu"].bundle == {"CPU": 0.01, "NPU": 8.0}
    assert found["router"].bundle == {"CPU": 0.01}
    assert found["router"].strategy == "SPREAD"


def test_hosts_take_replicas_in_turn(tmp_path: Path) -> None:
    engines = {"kind": "rollout", "replicas": 3, "hosts": ["10.0.0.1", "10.0.0.2"]}
    found = members(tmp_path, {"router": {"kind": "router", "hosts": ["10.0.0.9"]}, "e": engines})
    hosts = [[key for key in found[f"e-{i}"].bundle if "node:" in key] for i in range(3)]
    assert hosts == [["node:10.0.0.1"], ["node:10.0.0.2"], ["node:10.0.0.1"]]
    assert found["router"].bundle == {"CPU": 0.01, "node:10.0.0.9": 0.001}  # not at the head


def test_external_ranks_are_members_beside_their_trainer(tmp_path: Path) -> None:
    ranks = {"count": 2, "launch": "external"}
    entry = {"kind": "trainer", "resources": {"gpus": 1}, "config": {"ranks": ranks}}
    found = members(tmp_path, {"actor": entry})
    assert [*found] == ["actor", "actor-rank0", "actor-rank1"]
    assert found["actor"].bundle == {"CPU": 0.01}
    assert found["actor-rank1"].bundle == {"CPU": 0.01, "GPU": 1.0}
    assert found["actor-rank1"].group == found["actor-rank0"].group != found["actor"].group
    local = {"kind": "trainer", "resources": {"gpus": 2}, "config": {"ranks": {"count": 2}}}
    assert members(tmp_path, {"actor": local})["actor"].bundle == {"CPU": 0.01, "GPU": 2.0}


def test_a_reward_model_is_a_member_whose_second_port_its_actor_keeps(tmp_path: Path) -> None:
    """Its `classify_url` in services.json is where episode workers find it, wherever it is."""
    scores = {"kind": "reward_model", "replicas": 2, "resources": {"gpus": 1}}
    found = members(tmp_path, {"scores": {**scores, "config": {"model": "m"}}})
    assert [*found] == ["scores-0", "scores-1"]
    one = found["scores-1"]
    assert one.bundle == {"CPU": 0.01, "GPU": 1.0}
    assert one.spec["http_section"] == "classify"
    assert one.spec["module"] == "services.rollout.reward_model"
    assert "router" not in one.spec


def test_what_is_of_one_machine_is_refused(tmp_path: Path) -> None:
    devices = {"router": {"kind": "router", "devices": [0]}}
    with pytest.raises(ConfigError, match=r"services\.router\.devices"):
        members_of(config(tmp_path, devices))
    with pytest.raises(ConfigError, match="needs a router"):
        members_of(config(tmp_path, {"a": {"kind": "rollout"}}))
    with pytest.raises(ConfigError, match="liveness"):
        RayStack(config(tmp_path, {"router": {"kind": "router"}}, liveness={"failures": 2}))


async def test_a_directory_with_services_on_ray_is_not_started_again(tmp_path: Path) -> None:
    (tmp_path / STACK_FILE).write_text("{}")
    with pytest.raises(DirectoryError, match="sluice down"):
        await RayStack(config(tmp_path, {"router": {"kind": "router"}})).start()


def test_only_what_services_need_travels_to_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "SLUICE_DEVICE",
        "SLUICE_SIDE_STREAMS",
        "HF_HOME",
        "NCCL_DEBUG",
        "SECRET",
        "SLUICE_STEPS",
        "PATH",
    ):
        monkeypatch.setenv(name, "x")
    carried = carried_environment()
    assert {"SLUICE_DEVICE", "SLUICE_SIDE_STREAMS", "HF_HOME", "NCCL_DEBUG"} <= carried.keys()
    assert not {"SECRET", "SLUICE_STEPS", "PATH", "RAY_AUTH_TOKEN"} & carried.keys()


def entry(
    node: str = "h", ports: dict[str, int] | None = None, since: float = 1.0, **shown: str
) -> dict[str, Any]:
    return {"shown": shown, "node": node, "ports": ports or {}, "failure": "", "since": since}


def test_an_actor_that_is_started_again_hears_of_its_ports_on_that_node(tmp_path: Path) -> None:
    registry = Registry(str(tmp_path / "services.json"))
    registry.announce("a", entry(ports={"port": 5, "metrics_port": 6}))
    assert registry.announce("a", entry())["a"]["ports"] == {"port": 5, "metrics_port": 6}
    known = registry.announce("a", entry(ports={"port": 7}))
    assert known["a"]["ports"] == {"port": 7, "metrics_port": 6}
    assert registry.announce("a", entry(node="other"))["a"]["ports"] == {}


def test_services_json_has_those_that_have_opened_a_port(tmp_path: Path) -> None:
    file = tmp_path / "services.json"
    registry = Registry(str(file))
    registry.announce("b", entry())
    known = registry.announce("a", entry(address="h:1"))
    assert known.keys() == {"a", "b"}
    assert json.loads(file.read_text()) == {"a": {"address": "h:1"}}
    registry.announce("a", entry())
    assert json.loads(file.read_text()) == {}


def test_an_actor_whose_node_was_taken_for_lost_is_not_heard_again(tmp_path: Path) -> None:
    """It hears of the one that came after it, in place of being told of in turn with that."""
    file = tmp_path / "services.json"
    registry = Registry(str(file))
    registry.announce("a", entry(address="silent:1"))
    registry.announce("a", entry(node="other", since=2.0, address="other:1"))
    assert registry.announce("a", entry(address="silent:1"))["a"]["since"] == 2.0
    assert json.loads(file.read_text()) == {"a": {"address": "other:1"}}
    registry.announce("a", entry(node="other", since=2.0))
    assert json.loads(file.read_text()) == {}  # of the same it is taken


def test_ranks_meet_round_by_round(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry("unused")
    assert registry.meet("t", 0, 2, "a:1") == ""
    assert registry.meet("other", 1, 2, "x:1") == ""  # of another trainer
    assert registry.meet("t", 1, 2, "b:1") == "a:1"
    assert registry.meet("t", 1, 2, "b:2") == ""  # has died and comes again: the next round
    assert registry.meet("t", 0, 2, "a:1") == "a:1"  # hears of its own
    assert registry.meet("t", 0, 2, "a:2") == "a:2"
    assert registry.meet("t", 1, 2, "b:3") == ""  # it died before it heard
    assert registry.meet("t", 0, 2, "a:3") == "a:3"
    assert registry.meet("t", 1, 2, "b:3") == "a:3"
    registry.meet("t", 0, 2, "a:4")
    monkeypatch.setattr(ray_cell, "MEETING_SECONDS", -1.0)  # nobody is awaited: it has gone
    assert registry.meet("t", 1, 2, "b:4") == ""


def test_an_engine_of_several_nodes_is_placed_with_all_of_them(tmp_path: Path) -> None:
    sglang = {
        "nnodes": 2,
        "server_args": {"tp_size": 16},
        "prefill": {"server_args": {"tp_size": 8}},
    }
    engine = {"backend": "sglang", "sglang": sglang}
    entry = {
        "kind": "rollout",
        "replicas": 2,
        "resources": {"gpus": 8},
        "hosts": [f"10.0.0.{number}" for number in range(1, 7)],
        "config": {"engine": engine},
    }
    found = members(tmp_path, {"router": {"kind": "router"}, "e": entry})
    names = [f"e-{replica}{node}" for replica in (0, 1) for node in ("", "-node1", "-node2")]
    assert [*found][1:] == names
    for place, name in enumerate(names, 1):
        member = found[name]
        node = (place - 1) % 3
        assert (member.bundle["GPU"], member.group) == (8.0, "e")
        assert f"node:10.0.0.{place}" in member.bundle
        own = member.spec["config"]
        assert own["engine_id"] == name.partition("-node")[0]
        assert own["engine"]["sglang"].get("node_rank", 0) == node
        assert member.spec.get("leader", "") == (own["engine_id"] if node else "")
        assert member.spec["shown"]["kind"] == ("node" if node else "rollout")
        assert own["server"]["address_file"].endswith(f"/{name}.address.json")


class SlowRay:
    """Stands in for Ray, whose calls to an actor raise while it has yet to start."""

    class exceptions:  # noqa: N801
        class GetTimeoutError(Exception):
            pass

    def __init__(self, late: int) -> None:
        self.late = late

    def get(self, called: Any, *, timeout: float) -> Any:
        if self.late:
            self.late -= 1
            raise self.exceptions.GetTimeoutError("Get timed out: some object(s) not ready.")
        return called


async def test_a_registry_that_is_slow_to_start_is_waited_for(tmp_path: Path) -> None:
    """Ray's own timeout of one call ended `sluice up` on a busy machine."""
    shown = {"address": "10.0.0.1:1"}
    router = {**entry("10.0.0.1", 1.0), "shown": shown, "failure": "", "deaths": 0, "told": ""}
    registry = types.SimpleNamespace(
        entries=types.SimpleNamespace(remote=lambda: {"router": router})
    )
    started = RayStack(config(tmp_path, {"router": {"kind": "router"}}))
    ray = SlowRay(2)
    await started._wait(ray, registry)
    assert ray.late == 0
    late = RayStack(config(tmp_path, {"router": {"kind": "router"}}, start_timeout_seconds=1))
    with pytest.raises(ServiceDiedError, match=r"registry on Ray's head does not answer"):
        await late._wait(SlowRay(10**9), registry)


async def test_a_start_tells_who_has_yet_to_open_a_port_and_why(tmp_path: Path) -> None:
    services = {"router": {"kind": "router"}, "converter": {"kind": "converter"}}
    started, answers, told = RayStack(config(tmp_path, services)), iter(range(4)), []
    facts = {"node": "10.0.0.1", "since": 1.0, "failure": "", "deaths": 0, "told": ""}

    def entries() -> dict[str, Any]:
        told.append([(each.name, each.address, each.reason) for each in read_starting(tmp_path)])
        answer = next(answers)
        opened = {name: {**facts, "shown": {"address": f"{name}:1"}} for name in services}
        died = {**facts, "shown": {}, "deaths": 1, "told": "ended with 1 on 10.0.0.1: no room"}
        return [{}, {**opened, "converter": died}, opened][answer]

    registry = types.SimpleNamespace(entries=types.SimpleNamespace(remote=entries))
    await started._wait(SlowRay(0), registry)
    told.append([(each.name, each.address, each.reason) for each in read_starting(tmp_path)])
    no_port = "it did not open its port"
    assert told == [
        [],
        [("router", "", no_port), ("converter", "", no_port)],
        [
            ("router", "router:1", ""),
            ("converter", "", f"{no_port}: ended with 1 on 10.0.0.1: no room"),
        ],
        [("router", "router:1", ""), ("converter", "converter:1", "")],
    ]
