"""The commands and files of the overlays for accelerators, on a CPU that stands in for these.

`cuda`: both are told that the device is the CPU, and the reference engine stands in for SGLang.
Containers' paths, addresses and ports are replaced, nothing else.
"""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from sluice.loop.report import read_metrics
from sluice.ports import free_port
from tests.e2e.conftest import ENVIRONMENT, wait_until
from tests.unit.test_deploy import DEPLOY, ROOT, rendered

STEPS = 3
STAND_IN = {
    "cuda": {"SLUICE_DEVICE": "cpu", "SLUICE_ENGINE__BACKEND": "reference"},
}
SERVICES = {
    "router": "router.v1.RouterService",
    "trainer": "trainer.v1.TrainerService",
    "rollout-0": "rollout.v1.RolloutService",
}


class Host:
    """Runs what containers run, with their files, below a directory."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name, self.directory = name, directory
        self.services = rendered(name)
        self.ports = {name: free_port("127.0.0.1") for name in (*SERVICES, "loop")}
        (directory / "store").mkdir()
        shutil.copytree(DEPLOY / "config", directory / "config")

    def command(self, service: str) -> list[str]:
        """The command of a service, and a file of its own for it."""
        found = []
        for word in self.services[service]["command"]:
            if word.startswith("/config/"):
                word = str(self._own_file(service, Path(word).name))
            found.append(word.replace("/store", str(self.directory / "store")))
        if found[0] == "sluice":
            found[:1] = ["python", "-m", "sluice.cli"]
        return [sys.executable if word == "python" else word for word in found]

    def _own_file(self, service: str, name: str) -> Path:
        text = (self.directory / "config" / name).read_text()
        text = text.replace("  sglang: {python: /usr/bin/python3}\n", "")  # of what is stood in for
        for path in ("/store", "/runs"):
            text = text.replace(f" {path}", f" {self.directory}{path}")
        text = text.replace("examples/", f"{ROOT}/examples/")
        text = text.replace("host: 0.0.0.0", "host: 127.0.0.1").replace("port: 9100", "port: 0")
        text = text.replace("{host: 127.0.0.1, port: 50051", f"{{port: {self.ports[service]}")
        for other, port in self.ports.items():
            text = text.replace(f"{other}:50051", f"127.0.0.1:{port}")
        file = self.directory / f"{service}.yaml"
        file.write_text(text)
        return file

    def environment(self, service: str) -> dict[str, str]:
        own = dict(self.services[service].get("environment", {}))
        own = {k: v for k, v in own.items() if "$" not in v and k != "HOME"}
        if "SLUICE_SERVER__ADVERTISE" in own:
            own["SLUICE_SERVER__ADVERTISE"] = f"127.0.0.1:{self.ports[service]}"
        stand_in = STAND_IN[self.name] if "SLUICE_DEVICE" in own else {}
        if not service.startswith("rollout"):
            stand_in = {k: v for k, v in stand_in.items() if "ENGINE" not in k}
        return {**ENVIRONMENT, "PYTHONPATH": str(ROOT), **own, **stand_in}

    @contextmanager
    def running(self, service: str) -> Iterator[None]:
        """A service's process, until it says what its container's health check asks for."""
        log = (self.directory / f"{service}.log").open("w")
        command, environment = self.command(service), self.environment(service)
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        address = f"127.0.0.1:{self.ports[service]}"
        check = [sys.executable, "-m", "sluice.runtime.healthcheck", address]
        check.append(f"sluice.api.{SERVICES[service]}")
        try:

            def is_healthy() -> bool:
                said = (self.directory / f"{service}.log").read_text
                assert process.poll() is None, said()
                return subprocess.run(check, env=environment, capture_output=True).returncode == 0

            wait_until(is_healthy, what=service)
            yield
        finally:
            process.terminate()
            process.wait(60)
            log.close()


@pytest.mark.long
@pytest.mark.parametrize("name", STAND_IN)
def test_what_the_containers_of_an_overlay_run_trains(name: str, tmp_path: Path) -> None:
    host = Host(name, tmp_path)
    model = host.command("model")
    subprocess.run(model, env=ENVIRONMENT | {"PYTHONPATH": str(ROOT)}, check=True, timeout=600)
    with ExitStack() as stack:
        for service in SERVICES:
            stack.enter_context(host.running(service))
        train = [*host.command("loop"), "--steps", str(STEPS), "--groups_per_step", "4"]
        done = subprocess.run(
            train, env=host.environment("loop"), capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stdout + done.stderr
    rows = [row for row in read_metrics(tmp_path / "runs/example") if "reward_mean" in row]
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
