"""Clients in another language, and without any generated code, against a stack under mTLS."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from sluice.api.trainer.v1 import trainer_service_pb2 as pb
from sluice.client import TrainerClient
from tests.e2e.conftest import Stack
from tests.patience import PATIENCE
from tests.service.security.trust import Trust
from tools.gen_protos import GOOGLEAPIS, PROTOS, ROOT, copy_googleapis

HERE = Path(__file__).parent
NODE_SOURCES = HERE / "node"
NODE_FOLDER = ROOT / "build" / "foreign-node"  # packages are installed once
PROMPT = [1, 2, 3, 4, 10]  # 1234=


@pytest.fixture(scope="module")
def settings(secured: Stack, trust: Trust, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a foreign client is told."""
    tls = trust.right.tls
    assert tls is not None
    copy_googleapis()
    services = secured.services
    path = tmp_path_factory.mktemp("foreign") / "settings.json"
    values = {
        "trainer": services["trainer"]["address"],
        "router": services["router"]["address"],
        "includes": [str(PROTOS), str(GOOGLEAPIS)],
        "tls": {name: str(getattr(tls, name)) for name in ("ca", "cert", "key")},
        "token": str(trust.right.token_file),
        "prompt": PROMPT,
    }
    path.write_text(json.dumps(values))
    asyncio.run(_is_active(services["trainer"]["address"], trust))
    return path


async def _is_active(address: str, trust: Trust) -> None:
    """The ranks have loaded."""
    async with TrainerClient(address, trust.right) as client, asyncio.timeout(PATIENCE):
        while (await client.get()).state != pb.Trainer.STATE_ACTIVE:
            await asyncio.sleep(0.1)


def run(
    command: Sequence[str], seconds: float, cwd: Path, env: Mapping[str, str] | None = None
) -> str:
    """What it printed; it must end well."""
    ended = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert ended.returncode == 0, f"{command[0]}: {ended.stdout}{ended.stderr}"
    return ended.stdout


def install_node_packages() -> None:
    """Those of package-lock.json, once; the lock names versions and digests, no registry."""
    lock, marker = NODE_SOURCES / "package-lock.json", NODE_FOLDER / "installed.json"
    NODE_FOLDER.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "package-lock.json", "client.js"):
        shutil.copyfile(NODE_SOURCES / name, NODE_FOLDER / name)
    if marker.exists() and marker.read_bytes() == lock.read_bytes():
        return
    flags = ("--ignore-scripts", "--no-audit", "--no-fund")
    run(["npm", "ci", *flags], 240, NODE_FOLDER)
    shutil.copyfile(lock, marker)


def check(outcome: dict[str, Any]) -> None:
    """One step was taken, on what the engine said of its own tokens."""
    before, after = outcome["steps"]
    assert after == before + 1
    assert outcome["outcome"] == "OUTCOME_APPLIED"
    assert outcome["grad_norm"] > 0
    assert outcome["mismatch"] <= 1e-4
    assert len(outcome["generated"]) == 4
    assert outcome["tokens"] == sum(map(len, outcome["generated"]))
    assert outcome["streamed"] == outcome["generated"]  # the seeds are the same


def test_a_node_client_generates_and_trains_from_the_protos_alone(settings: Path) -> None:
    missing = [name for name in ("node", "npm") if shutil.which(name) is None]
    assert not missing, f"this test needs Node.js; not found: {', '.join(missing)}"
    install_node_packages()
    outcome = json.loads(run(["node", "client.js", str(settings)], PATIENCE, NODE_FOLDER))
    check(outcome)
    assert outcome["refused"] == ["ABORTED", "STEP_MISMATCH"]


def test_a_client_that_knows_reflection_alone_generates_and_trains(
    settings: Path, tmp_path: Path
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-I", str(HERE / "reflection_client.py"), str(settings)]
    outcome = json.loads(run(command, PATIENCE, tmp_path, environment))
    check(outcome)
    assert outcome["refused"] == "ABORTED"
    assert outcome["knows"] == []
