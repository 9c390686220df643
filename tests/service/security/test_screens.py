"""`sluice status`, `report` and `samples` of runs whose services ask for TLS and a token."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.e2e.conftest import ENVIRONMENT, Stack, wait_until
from tests.e2e.test_status import status_of
from tests.patience import PATIENCE
from tests.service.security.trust import Trust


def sluice(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sluice.cli", *map(str, arguments)]
    return subprocess.run(
        command, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE
    )


def healths(target: str | Path, *flags: str) -> dict[str, str]:
    found = status_of(target, "--timeout_seconds", "60", *flags)
    return {each["name"]: each["health"] for each in found["services"]}


def flags_of(trust: Trust, token: str) -> list[str]:
    tls = trust.right.tls
    assert tls is not None
    files = {"ca": tls.ca, "cert": tls.cert, "key": tls.key}
    return [
        f"--security.token_file={trust.directory / token}",
        *(f"--security.tls.{name}={path}" for name, path in files.items()),
    ]


def test_a_secured_run_is_looked_at_alive_killed_and_resumed(secured: Stack, trust: Trust) -> None:
    security = trust.right.model_dump(mode="json")
    training = secured.train("seen", steps=400, security=security, server={"port": 0})
    training.wait_for_step(2)
    run_dir = training.run_dir
    everything = {name: "serving" for name in ("loop", *secured.services)}
    assert healths(run_dir) == everything  # with what the run itself has
    found = status_of(run_dir, "--timeout_seconds", "60")
    assert found["run"]["state"] == "running"
    assert [engine["state"] for engine in found["engines"]] == ["active"]
    training.process.send_signal(signal.SIGKILL)
    training.process.communicate(timeout=PATIENCE)
    killed = status_of(run_dir, "--timeout_seconds", "60")
    assert killed["run"]["state"] == "gone"
    last = killed["run"]["step"]
    resumed = secured.train(
        "seen", steps=last + 12, security=security, server={"port": 0}, resume=True
    )
    wait_until(lambda: status_of(run_dir)["run"]["starts"] == 2, what="the second start")
    output = resumed.finish()
    line = re.search(r"^step +(\d+)  reward .* of +(\d+)  tokens/s \d+", output, re.MULTILINE)
    assert line is not None and int(line[2]) == last + 12
    done = status_of(run_dir, "--timeout_seconds", "60")
    assert (done["run"]["state"], done["run"]["step"]) == ("done", last + 12)

    page = run_dir / "report.html"
    assert sluice("report", run_dir).returncode == 0
    assert "<html" in page.read_text()
    assert "open sesame" not in page.read_text()  # the token
    out = run_dir / "rows.jsonl"
    assert sluice("samples", run_dir, "--steps", last + 12, "-o", out).returncode == 0
    assert {json.loads(row)["step"] for row in out.read_text().splitlines()} == {last + 12}


def test_an_address_asks_for_flags_and_says_which_is_wrong(secured: Stack, trust: Trust) -> None:
    address = secured.services["trainer"]["address"]
    assert healths(address, *flags_of(trust, "token")) == {address: "serving"}
    found = status_of(address, "--timeout_seconds", "60", *flags_of(trust, "wrong-token"))
    (service,) = found["services"]
    assert service["health"] == "not serving"
    assert "token" in service["detail"].lower()
    bare = sluice("status", address, "--timeout_seconds", "60")
    assert bare.returncode == 2
    assert "TLS" in bare.stderr
    assert bare.stderr.count("\n") == 1
