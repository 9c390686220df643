"""SGLang's own parser takes the command lines of engines over several nodes; nothing is started."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from services.rollout.engine.config import EngineConfig, SglangConfig
from services.rollout.engine.sglang.group import NodePlace, command_lines
from services.rollout.engine.sglang.servers import flags
from tests.contract.engine.cases import Model
from tests.patience import PATIENCE
from tests.sglang_servers import PYTHON

PARSE = """\
import json, sys
from sglang.srt.server_args import prepare_server_args
found = []
for words in json.load(sys.stdin):
    args = prepare_server_args(words)
    found.append({name: getattr(args, name) for name in sys.argv[1].split(",")})
print("FOUND" + json.dumps(found))
"""
NAMES = (
    "nnodes,node_rank,dist_init_addr,tp_size,dp_size,enable_dp_attention,disaggregation_mode,"
    "disaggregation_transfer_backend,disaggregation_bootstrap_port,port"
)
PLACES = [NodePlace(f"10.0.0.{number}", 20000 + number * 100) for number in range(1, 5)]


def parsed(commands: list[list[str]]) -> list[dict[str, Any]]:
    done = subprocess.run(
        [str(PYTHON), "-c", PARSE, NAMES],
        input=json.dumps(commands),
        env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = (each for each in done.stdout.splitlines() if each.startswith("FOUND"))
    return list(json.loads(line.removeprefix("FOUND")))


def lines(model: Path, sglang: dict[str, Any]) -> list[list[str]]:
    config = EngineConfig(backend="sglang", model=str(model), sglang=SglangConfig(**sglang))
    found = command_lines(config, "cpu", model, "1:ab", PLACES[: config.sglang.node_count], {})
    return [flags(each) for each in found]


def test_sglang_reads_what_it_is_told_of_nodes_and_roles(models: tuple[Model, Model]) -> None:
    model = models[0].directory
    spread = lines(model, {"nnodes": 2, "server_args": {"tp_size": 4}})
    attention = {"tp_size": 4, "dp_size": 2, "enable_dp_attention": True}
    copies = lines(model, {"nnodes": 2, "server_args": attention})
    prefill = {"nnodes": 2, "server_args": {"tp_size": 2}}
    apart = lines(model, {"nnodes": 2, "server_args": {"tp_size": 4}, "prefill": prefill})
    found = parsed([*spread, *copies, *apart])
    assert [each["node_rank"] for each in found] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert {each["nnodes"] for each in found} == {2}
    assert [each["dp_size"] for each in found[:4]] == [1, 1, 2, 2]
    assert [each["enable_dp_attention"] for each in found[:4]] == [False, False, True, True]
    first = "10.0.0.1:20104"
    assert [each["dist_init_addr"] for each in found[-4:]] == [first] * 2 + ["10.0.0.3:20304"] * 2
    assert [each["disaggregation_mode"] for each in found[-4:]] == ["decode"] * 2 + ["prefill"] * 2
    assert [each["tp_size"] for each in found[-4:]] == [4, 4, 2, 2]
    assert {each["disaggregation_transfer_backend"] for each in found[-4:]} == {"mooncake"}
    assert found[-2]["disaggregation_bootstrap_port"] == 20301


def test_sglang_refuses_a_flag_that_it_does_not_have(models: tuple[Model, Model]) -> None:
    words = lines(models[0].directory, {"nnodes": 2, "server_args": {"tp_size": 2}})
    with pytest.raises(AssertionError, match="unrecognized arguments"):
        parsed([[*words[0], "--node-ranks", "1"]])
