"""The client of docs/tutorial-node.md in a real Node, on real services."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from sluice.protoset import protoset
from tests.e2e.conftest import start_stack, stop_stack
from tests.patience import PATIENCE
from tests.service.security.trust import create_trust
from tests.tutorials import ROOT, follow, write_files

STEP = re.compile(r"^step (\d+)  weights (\d+)  reward (\S+)  gradient norm \S+$", re.MULTILINE)


@pytest.fixture(autouse=True)
def _own_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that `make test-node` brings."""
    bin_path = ROOT / "build" / "node" / "bin"
    assert (bin_path / "node").exists(), "make test-node brings it"
    monkeypatch.setenv("PATH", os.pathsep.join([str(bin_path), os.environ["PATH"]]))


def test_a_loop_in_node_learns_while_the_router_is_killed(tmp_path: Path) -> None:
    output = follow("node", tmp_path)
    steps = STEP.findall(output)
    assert [int(step) for step, *_ in steps] == list(range(1, 21))
    versions = [int(version) for _, version, _ in steps]
    assert versions == sorted(set(versions))
    found = [float(reward) for *_, reward in steps]
    assert sum(found[:2]) / 2 < 0.3 and sum(found[-2:]) / 2 > 0.5
    assert 'refused: ABORTED STEP_MISMATCH {"expected":"0","actual":"20"}' in output
    assert "router was killed by SIGKILL" in (tmp_path / "up.log").read_text()
    assert "services are down" in output


def test_the_same_under_tls_with_a_token(tmp_path: Path) -> None:
    trust = create_trust(tmp_path)
    stack = start_stack(
        tmp_path / "stack", {"security": trust.right.model_dump(mode="json", exclude_none=True)}
    )
    tls, token = trust.right.tls, trust.right.token_file
    assert tls is not None
    right = {"CA": tls.ca, "CERT": tls.cert, "KEY": tls.key, "TOKEN_FILE": token}
    try:
        told = {
            name: learn(stack.run_dir, {**right, **changes})
            for name, changes in {
                "right": {},
                "wrong token": {"TOKEN_FILE": tmp_path / "wrong-token"},
            }.items()
        }
    finally:
        stop_stack(stack)
    done, output = told["right"]
    assert (done, len(STEP.findall(output))) == (0, 2), output
    failed, output = told["wrong token"]
    assert failed == 1
    assert "code: 'UNAUTHENTICATED'" in output
    assert "reason: 'TOKEN_MISSING_OR_WRONG'" in output


def learn(folder: Path, security: dict[str, Path | None]) -> tuple[int, str]:
    """Two steps of the page's program on services that are up; its exit code and output."""
    if not (folder / "learn.mjs").exists():
        first, *_ = write_files("node", folder)
        (install,) = re.findall(r"^npm install .*$", first, re.MULTILINE)
        subprocess.run(install.split(), cwd=folder, check=True, timeout=PATIENCE)
        (folder / "sluice.binpb").write_bytes(protoset().SerializeToString())
    done = subprocess.run(
        ["node", "learn.mjs", "2"],
        cwd=folder,
        env={
            **os.environ,
            "SERVICES": "services.json",
            **{name: str(path) for name, path in security.items()},
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
    )
    return done.returncode, done.stdout
