"""Who belongs to an engine over nodes, and what its settings refuse."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from services.rollout.config import RolloutConfig
from services.rollout.engine.config import EngineConfig, SglangConfig
from services.rollout.engine.sglang.group import NodePlace, command_lines, spread
from services.rollout.engine.sglang.nodes import (
    EngineNodes,
    NodeOrder,
    NodeReport,
    NodeState,
    report_from_proto,
    report_to_proto,
)
from services.rollout.errors import EngineFailedError
from sluice.api.rollout.v1 import engine_node_service_pb2 as pb
from sluice.config import ConfigError, parse_config
from sluice.runtime.errors import InvalidFieldError
from tests.patience import PATIENCE

SPREAD = {"nnodes": 2, "server_args": {"tp_size": 2}}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**SPREAD, "node_rank": 2, "leader": "a:1"}, "node_rank: 2 is none of 2 nodes"),
        ({**SPREAD, "node_rank": 1}, "leader: a node other than 0 needs one"),
        ({"nnodes": 2, "server_args": {"tp_size": 3}}, "nnodes: 3 ranks"),
        ({"nnodes": 2}, "nnodes: 1 ranks"),
        ({"nnodes": 0}, "nnodes"),
        ({"nnodes": 2, "server_args": {"tp_size": 2, "dp_size": 2}}, "enable_dp_attention"),
        ({"prefill": {"nnodes": 2}}, "prefill.nnodes: 1 ranks"),
        ({"prefill": {"server_args": {"node_rank": 1}}}, "prefill.server_args.node_rank"),
        ({"prefill": {"nodes": 2}}, "prefill.nodes"),
        ({"prefill": {}, "lora": {}}, "lora: takes one server"),
        ({"prefill": {}, "transfer_backend": "fake"}, "transfer_backend"),
        ({"transfer_backend": "nixl"}, "transfer_backend: is between prefill and decode"),
        ({"server_args": {"disaggregation_mode": "prefill"}}, "disaggregation_mode: set engine"),
        ({"server_args": {"nnodes": 2}}, "server_args.nnodes: set engine.sglang.nnodes"),
        ({"server_args": {"dist_init_addr": "a:1"}}, "server_args.dist_init_addr"),
        ({"url": "http://a", "nnodes": 2}, "url: a running server takes no nnodes"),
        ({"url": "http://a", "prefill": {}}, "url: a running server takes no nnodes or prefill"),
        ({"silent_seconds": 0}, "silent_seconds"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_by_name(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(RolloutConfig, rollout(sglang=values))


def rollout(**engine: Any) -> dict[str, Any]:
    engine = {"backend": "sglang", **engine}
    return {"store": "s", "roles": ["engine"], "engine": engine}


def test_what_the_whole_process_has_to_fit_is_refused_by_name() -> None:
    for values, message in (
        (
            rollout(sglang=SPREAD) | {"server": {"host": "0.0.0.0", "allow_insecure": True}},
            "engine.sglang.node_host: 0.0.0.0",
        ),
        (rollout(sglang={"prefill": {}}, routed_experts=True), "routed_experts"),
        (rollout(backend="reference", sglang=SPREAD), "sglang.nnodes"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_config(RolloutConfig, values)


def test_a_node_is_reached_as_its_server_is_unless_it_has_an_address_of_its_own() -> None:
    server = {"host": "10.0.0.1", "allow_insecure": True}
    for sglang, more, host in (
        ({}, {}, "10.0.0.1"),
        ({}, {"advertise": "engine-0.engines:50051"}, "engine-0.engines"),
        ({"node_host": "ib0.host"}, {"advertise": "engine-0.engines:50051"}, "ib0.host"),
    ):
        values = rollout(sglang={**SPREAD, **sglang}) | {"server": {**server, **more}}
        config = parse_config(RolloutConfig, values)
        assert config.placed_engine.sglang.node_host == host


def test_all_processes_of_a_server_meet_at_the_first_and_listen_where_they_are(
    tmp_path: Path,
) -> None:
    places = [NodePlace("10.0.0.1", 100, "127.0.0.1", 80), NodePlace("fe80::2", 200)]
    first, second = spread({"tp_size": 2}, places)
    shared = {"tp_size": 2, "nnodes": 2, "dist_init_addr": "10.0.0.1:104"}
    assert first == {**shared, "node_rank": 0, "host": "127.0.0.1", "port": 80}
    assert second == {**shared, "node_rank": 1, "host": "fe80::2", "port": 200}
    assert spread({}, places[:1]) == [{"host": "127.0.0.1", "port": 80}]
    assert [place.url for place in places] == ["http://127.0.0.1:80", "http://[fe80::2]:200"]
    (tmp_path / "config.json").write_text("{}")
    sglang = SglangConfig(
        prefill={"server_args": {"tp_size": 4, "attention_backend": "own"}},
        server_args={"tp_size": 2},
        transfer_backend="nixl",
    )
    config = EngineConfig(backend="sglang", sglang=sglang)
    encoders = {"language_only": True}
    decode, prefill = command_lines(config, "gpu", tmp_path, "1:a", places, encoders)
    assert (decode["disaggregation_mode"], prefill["disaggregation_mode"]) == ("decode", "prefill")
    assert (decode["tp_size"], prefill["tp_size"], prefill["attention_backend"]) == (2, 4, "own")
    assert prefill["disaggregation_bootstrap_port"] == 201
    assert "disaggregation_bootstrap_port" not in decode and "nnodes" not in decode
    assert prefill["language_only"] and "language_only" not in decode  # one of the two asks
    assert decode["disaggregation_transfer_backend"] == "nixl"
    regular = EngineConfig(backend="sglang")
    (alone,) = command_lines(regular, "gpu", tmp_path, "1:a", places[:1], encoders)
    assert alone["language_only"] and "disaggregation_mode" not in alone


class Talking:
    """A node whose reports a test sends."""

    def __init__(self, number: int, process: str = "p") -> None:
        self.report = NodeReport(engine_id="e", node=number, process=process, host="h", port=20000)
        self._reports: asyncio.Queue[NodeReport] = asyncio.Queue()
        self.orders: list[NodeOrder] = []
        self.came = asyncio.Event()

    def say(self, **changes: Any) -> None:
        self.report = NodeReport(**{**vars(self.report), **changes})
        self._reports.put_nowait(self.report)

    async def reports(self) -> AsyncIterator[NodeReport]:
        while True:
            yield await self._reports.get()

    @asynccontextmanager
    async def at(self, nodes: EngineNodes) -> AsyncIterator[Talking]:
        async def hear() -> None:
            async for order in nodes.follow(self.reports()):
                self.orders.append(order)
                self.came.set()

        hearing = asyncio.create_task(hear())
        self.say()
        yield self
        hearing.cancel()
        await asyncio.gather(hearing, return_exceptions=True)

    @asynccontextmanager
    async def speaking(self) -> AsyncIterator[None]:
        """Repeats its report again and again."""

        async def repeat() -> None:
            while True:
                await asyncio.sleep(0.02)
                self.say()

        repeating = asyncio.create_task(repeat())
        try:
            yield
        finally:
            repeating.cancel()

    async def until(self, incarnation: int) -> None:
        async with asyncio.timeout(PATIENCE):
            while not self.orders or self.orders[-1].incarnation != incarnation:
                self.came.clear()
                await self.came.wait()


async def begun(nodes: EngineNodes, node: Talking, incarnation: int) -> None:
    reports = await nodes.gather(PATIENCE)
    nodes.run({1: (reports[1], NodeOrder(incarnation, ("--a",)))})
    await node.until(incarnation)
    node.say(incarnation=incarnation, state=NodeState.RUNNING)


async def test_a_group_begins_with_all_nodes_or_not_at_all() -> None:
    nodes = EngineNodes(2, silent_seconds=60)
    async with Talking(1).at(nodes) as first:
        with pytest.raises(EngineFailedError, match="node 2 has not come"):
            await nodes.gather(0.05)
        async with Talking(2).at(nodes) as second:
            assert [*await nodes.gather(PATIENCE)] == [1, 2]
            second.say(incarnation=7, state=NodeState.RUNNING)  # of a first node before this
            async with asyncio.timeout(PATIENCE):
                while "still runs" not in nodes._missing():
                    await asyncio.sleep(0.01)
            with pytest.raises(EngineFailedError, match="node 2 on h still runs"):
                await nodes.gather(0.05)
        with pytest.raises(EngineFailedError, match="node 2 has not come"):
            await nodes.gather(0.05)
    assert not first.orders[-1].arguments


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"state": NodeState.ENDED, "message": "SGLang ended with -9"}, "SGLang ended with -9"),
        ({"state": NodeState.IDLE, "message": "it was cut off"}, "it was cut off"),
    ],
)
async def test_a_node_that_does_not_run_its_part_is_lost(change: dict[str, Any], why: str) -> None:
    nodes = EngineNodes(1, silent_seconds=60)
    async with Talking(1).at(nodes) as node:
        await begun(nodes, node, 5)
        losing = asyncio.create_task(nodes.lost(5))
        node.say(incarnation=5, **change)
        assert why in await asyncio.wait_for(losing, PATIENCE)


async def test_a_node_that_falls_silent_or_goes_is_lost() -> None:
    nodes = EngineNodes(1, silent_seconds=0.2)
    async with Talking(1).at(nodes) as node:
        async with node.speaking():
            await begun(nodes, node, 5)
        assert "silent" in await asyncio.wait_for(nodes.lost(5), PATIENCE)
        with pytest.raises(EngineFailedError, match="silent"):
            await nodes.gather(0.05)
    assert "has gone" in await asyncio.wait_for(nodes.lost(5), PATIENCE)


async def test_a_process_that_was_started_anew_gets_no_part_of_the_group_before() -> None:
    """It would be half an old group."""
    nodes = EngineNodes(1, silent_seconds=60)
    async with Talking(1, "old").at(nodes) as old:
        await begun(nodes, old, 5)
        async with Talking(1, "new").at(nodes) as new:
            assert "started anew" in await asyncio.wait_for(nodes.lost(5), PATIENCE)
            await new.until(0)
            assert not any(order.arguments for order in new.orders)
            nodes.end()
            await begun(nodes, new, 6)
            assert new.orders[-1].arguments == ("--a",)
        assert [order.incarnation for order in old.orders][-1] == 5


@pytest.mark.parametrize("number", [0, 3, -1, 1 << 30])
async def test_a_node_of_another_engine_is_refused(number: int) -> None:
    nodes, node = EngineNodes(2, silent_seconds=60), Talking(number)
    node.say()
    with pytest.raises(InvalidFieldError):
        await anext(nodes.follow(node.reports()))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", 0),
        ("port", 65535),
        ("port", -1),
        ("host", "a" * 5000),
        ("host", "a\0"),
        ("state", 9),
    ],
)
def test_a_report_that_is_none_is_refused_by_name(field: str, value: object) -> None:
    good = NodeReport(engine_id="e", node=1, process="p", host="h", port=20000)
    message = report_to_proto(good)
    assert report_from_proto(pb.FollowRequest.FromString(message.SerializeToString())) == good
    setattr(message, field, value)
    with pytest.raises(InvalidFieldError) as refused:
        report_from_proto(message)
    assert refused.value.metadata["field"] == field
