"""What `sluice up` does with services that die, and what is left when it dies itself."""

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys

import grpc
import psutil
import pytest
import yaml
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from openai import APIError, AsyncOpenAI

from examples.models.tiny_qwen3 import build_tiny_qwen3
from sluice import ports as sluice_ports
from sluice.config import ConfigError, parse_config
from sluice.durable import DirectoryError
from sluice.stack import UpConfig
from sluice.supervise import ServiceDiedError, Supervisor
from tests.e2e.conftest import ENVIRONMENT, wait_until
from tests.patience import PATIENCE

ADDRESSES = ("address", "metrics_address")


def config(run_dir, **changes) -> UpConfig:
    services = {"router": {"kind": "router"}}
    return parse_config(UpConfig, {"run_dir": run_dir, "services": services, **changes})


def known(run_dir, name="router") -> dict:
    return json.loads((run_dir / "services.json").read_text())[name]


async def pid_after(run_dir, old: int, name="router") -> int:
    async with asyncio.timeout(PATIENCE):
        while (pid := known(run_dir, name)["pid"]) == old:
            await asyncio.sleep(0.02)
    return pid


def test_what_a_child_used_before_the_services_is_counted(tmp_path):
    """The model of a demo is built by one."""
    before = Supervisor(config(tmp_path)).cpu_seconds()
    burn = "import time\nwhile time.process_time() < 0.5: pass"
    subprocess.run([sys.executable, "-c", burn], check=True, timeout=PATIENCE)
    assert Supervisor(config(tmp_path)).cpu_seconds() >= before + 0.4


async def test_a_killed_service_comes_back_at_its_address(tmp_path):
    supervisor = Supervisor(config(tmp_path))
    await supervisor.start()
    watching = asyncio.create_task(supervisor.watch())
    before = known(tmp_path)
    os.kill(before["pid"], signal.SIGKILL)
    assert await pid_after(tmp_path, before["pid"]) != before["pid"]
    assert known(tmp_path)["address"] == before["address"]
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await supervisor.stop()


async def test_a_start_that_takes_long_says_whom_it_waits_for(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("sluice.supervise.START_SECONDS", -1)  # however fast the start is
    supervisor = Supervisor(config(tmp_path))
    await supervisor.start()
    await supervisor.stop()
    log = tmp_path / "logs" / "router.log"
    assert f"waiting for router: it did not open its port; see {log}" in caplog.messages


async def test_a_service_that_is_stopped_right_after_its_start_is_replaced_at_its_address(tmp_path):
    liveness = {"interval_seconds": 0.1, "timeout_seconds": 0.5, "failures": 2}
    supervisor = Supervisor(config(tmp_path, liveness=liveness))
    await supervisor.start()
    before = known(tmp_path)
    os.kill(before["pid"], signal.SIGSTOP)  # before any check but that of the start
    watching = asyncio.create_task(supervisor.watch())
    assert await pid_after(tmp_path, before["pid"]) != before["pid"]
    assert not psutil.pid_exists(before["pid"])
    assert known(tmp_path)["address"] == before["address"]
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    os.kill(known(tmp_path)["pid"], signal.SIGSTOP)
    await supervisor.stop()  # which does not wait for one that cannot hear it


async def test_nobody_is_given_the_ports_of_a_service_that_is_down(tmp_path):
    supervisor = Supervisor(config(tmp_path))
    await supervisor.start()
    (service,) = supervisor._services
    ports = [int(known(tmp_path)[name].rpartition(":")[2]) for name in ADDRESSES]
    assert service.process is not None
    service.process.kill()
    await service.process.wait()  # nobody watches: it stays down
    assert [may_be_given(port) for port in ports] == [False, False]
    watching = asyncio.create_task(supervisor.watch())
    await pid_after(tmp_path, service.process.pid)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await supervisor.stop()
    assert may_be_given(ports[1])  # the other one was spoken at: the system keeps it a minute
    assert not service.ports


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1", "a" * 5000, "x\0y"])
async def test_a_host_where_nothing_can_listen_is_named(tmp_path, host):
    router = {"kind": "router", "config": {"server": {"host": host, "allow_insecure": True}}}
    supervisor = Supervisor(config(tmp_path, services={"router": router}))
    with pytest.raises(ConfigError, match=r"router: server\.host"):
        await supervisor.start()


def may_be_given(port: int) -> bool:
    """Whether a stranger can have this port."""
    with socket.socket() as stranger:
        try:
            stranger.bind(("127.0.0.1", port))
        except OSError as error:
            assert error.errno == errno.EADDRINUSE
            return False
        return True


async def test_a_killed_rollout_comes_back_at_the_address_its_clients_know(tmp_path):
    model = str(build_tiny_qwen3(tmp_path / "model", 0))
    rollout = {"tokenizer": model, "engine": {"model": model, "threads": 1}, "openai": {}}
    services = {
        "router": {"kind": "router"},
        "rollout": {"kind": "rollout", "config": rollout},
    }
    supervisor = Supervisor(config(tmp_path, services=services))
    await supervisor.start()
    watching = asyncio.create_task(supervisor.watch())
    before = known(tmp_path, "rollout")
    os.kill(before["pid"], signal.SIGKILL)
    await pid_after(tmp_path, before["pid"], "rollout")
    assert known(tmp_path, "rollout")["openai_url"] == before["openai_url"]
    async with AsyncOpenAI(base_url=before["openai_url"], api_key="none") as client:
        async with asyncio.timeout(PATIENCE):
            while True:
                with contextlib.suppress(APIError):  # it loads its model
                    await client.completions.create(model="policy", prompt="1=", max_tokens=1)
                    break
                await asyncio.sleep(0.1)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await supervisor.stop()


async def test_a_second_supervisor_of_a_directory_is_refused_and_the_first_goes_on(tmp_path):
    supervisor = Supervisor(config(tmp_path))
    await supervisor.start()
    before = known(tmp_path)
    with pytest.raises(DirectoryError, match=f"process {os.getpid()} "):
        await Supervisor(config(tmp_path)).start()
    assert known(tmp_path) == before
    assert psutil.pid_exists(before["pid"])
    await supervisor.stop()
    await (again := Supervisor(config(tmp_path))).start()
    await again.stop()


async def test_a_service_that_does_not_end_in_time_is_killed(tmp_path, caplog):
    services = {"router": {"kind": "router", "config": {"server": {"drain_seconds": 3600}}}}
    supervisor = Supervisor(config(tmp_path, services=services, stop_timeout_seconds=0.2))
    await supervisor.start()
    async with grpc.aio.insecure_channel(known(tmp_path)["address"]) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        await call.read()  # a caller that stays, for whom the router would wait an hour
        async with asyncio.timeout(30):  # the default is 40
            await supervisor.stop()
    assert "router does not stop; killing it" in caplog.text


async def test_a_service_that_dies_while_it_restarts_is_tried_again_and_given_up_at_last(tmp_path):
    supervisor = Supervisor(config(tmp_path, restarts=3))
    await supervisor.start()
    (service,) = supervisor._services
    service.entry.config["no_such_key"] = 1  # every further start ends at once
    watching = asyncio.create_task(supervisor.watch())
    os.kill(known(tmp_path)["pid"], signal.SIGKILL)
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.timeout(PATIENCE):
            await watching
    (error,) = caught.value.exceptions
    assert isinstance(error, ServiceDiedError)
    assert "too often" in str(error)
    assert "no_such_key" in str(error)
    assert service.restarts == 4
    await supervisor.stop()


async def test_a_service_that_is_killed_as_it_starts_is_not_quoted_with_what_one_before_it_said(
    tmp_path, monkeypatch
):
    (tmp_path / "sitecustomize.py").write_text(f"import time; time.sleep({PATIENCE})")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # it gets no further
    (log := tmp_path / "logs" / "router.log").parent.mkdir()
    log.write_text("the line of an earlier life\n")
    supervisor = Supervisor(config(tmp_path))
    (service,) = supervisor._services
    starting = asyncio.create_task(supervisor.start())
    async with asyncio.timeout(PATIENCE):
        while service.process is None:
            await asyncio.sleep(0)
    service.kill()
    with pytest.raises(ServiceDiedError, match=r"was killed by SIGKILL while starting: no output"):
        await starting


async def test_a_service_that_dies_as_others_start_is_named_at_once(tmp_path):
    """Nobody restarts it yet, and the others wait for it."""
    services = {
        "router": {"kind": "router"},
        "rollout": {"kind": "rollout", "config": {"roles": ["engine"]}},
    }
    supervisor = Supervisor(config(tmp_path, services=services))
    router, rollout = supervisor._services
    starting = asyncio.create_task(supervisor.start())
    async with asyncio.timeout(PATIENCE):
        while rollout.process is None:
            await asyncio.sleep(0)
    router.kill()
    os.kill(rollout.process.pid, signal.SIGSTOP)  # it would take long
    with pytest.raises(ServiceDiedError, match=r"router was killed by SIGKILL while starting"):
        async with asyncio.timeout(PATIENCE):
            await starting


async def test_a_service_that_is_late_names_the_setting_it_was_waited_for_by(tmp_path):
    supervisor = Supervisor(config(tmp_path, start_timeout_seconds=0.01))
    late = r"router was not ready in 0\.01 s: .* \(start_timeout_seconds of the services file\)"
    with pytest.raises(ServiceDiedError, match=late):
        await supervisor.start()


def test_a_killed_supervisor_leaves_no_service_behind_and_the_next_one_has_its_ports(tmp_path):
    path, ready = tmp_path / "services.yaml", tmp_path / "services.json"
    services = {"router": {"kind": "router", "replicas": 2}}
    path.write_text(yaml.safe_dump({"run_dir": str(tmp_path), "services": services}))
    command = [sys.executable, "-m", "sluice.cli", "up", str(path)]
    process = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    wait_until(ready.exists, what="sluice up")
    before = [known(tmp_path, f"router-{index}") for index in range(2)]
    process.kill()
    process.wait(timeout=PATIENCE)
    ready.unlink()
    process = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    wait_until(ready.exists, what="sluice up again")
    routers = [psutil.Process(each["pid"]) for each in before if psutil.pid_exists(each["pid"])]
    _, alive = psutil.wait_procs(routers, timeout=PATIENCE)
    assert not alive
    after = [known(tmp_path, f"router-{index}") for index in range(2)]
    ports = [[each[name] for name in ADDRESSES] for each in (*before, *after)]
    assert ports[:2] == ports[2:]
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=PATIENCE) == 0


@pytest.mark.parametrize("damage", ["flipped", "cut", "former release"])
async def test_ports_are_kept_where_their_file_is_damaged(tmp_path, damage):
    await (supervisor := Supervisor(config(tmp_path))).start()
    before = known(tmp_path)
    await supervisor.stop()
    file = tmp_path / "services" / "ports.json"
    text = file.read_text()
    port = before["address"].rpartition(":")[2]
    changed = text.replace(port, str(int(port) ^ 1))
    assert changed != text
    ports = json.loads(text)["ports"]
    file.write_text(
        {"flipped": changed, "cut": text[:-9], "former release": json.dumps(ports)}[damage]
    )
    await (supervisor := Supervisor(config(tmp_path))).start()
    after = known(tmp_path)
    await supervisor.stop()
    assert [after[name] for name in ADDRESSES] == [before[name] for name in ADDRESSES]


async def test_a_port_that_a_stranger_took_meanwhile_is_replaced(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(sluice_ports, "LINGERING_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        taken = stranger.getsockname()[1]
        (directory := tmp_path / "services").mkdir()
        (directory / "ports.json").write_text("{")
        (directory / "router.yaml").write_text(f"server: {{port: {taken}, metrics_port: '?'}}")
        await (supervisor := Supervisor(config(tmp_path))).start()
        assert "the service gets new ports" in caplog.text  # for what is no port
        await supervisor.stop()
        (directory / "ports.json").write_text("{")
        (directory / "router.yaml").write_text(f"server: {{port: {taken}}}")
        await (supervisor := Supervisor(config(tmp_path))).start()
        assert f"router: port {taken} is taken" in caplog.text
        assert not known(tmp_path)["address"].endswith(f":{taken}")
        await supervisor.stop()


async def test_services_without_a_run_are_shown_and_ended_by_their_directory(tmp_path):
    """By `sluice status` and `sluice down`, which ends the process that keeps them too."""
    run_dir = tmp_path / "run"
    file = tmp_path / "services.yaml"
    file.write_text(
        yaml.safe_dump({"run_dir": str(run_dir), "services": {"r": {"kind": "router"}}})
    )

    def sluice(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "sluice.cli", *arguments]
        return subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)

    up = sluice("up", str(file))
    async with asyncio.timeout(PATIENCE):
        while not (run_dir / "services.json").exists():
            assert up.poll() is None
            await asyncio.sleep(0.05)
    pid = known(run_dir, "r")["pid"]
    shown, _ = sluice("status", str(run_dir), "--json", "--timeout_seconds", "60").communicate(
        timeout=PATIENCE
    )
    status = json.loads(shown)
    assert status["run"] is None
    assert [(each["name"], each["health"]) for each in status["services"]] == [("r", "serving")]
    down = sluice("down", str(run_dir))
    assert down.wait(PATIENCE) == 0
    assert up.wait(PATIENCE) == 0
    assert not psutil.pid_exists(pid)
    assert not (run_dir / "services.json").exists()
    assert sluice("down", str(run_dir)).wait(PATIENCE) == 2
