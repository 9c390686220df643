"""Brings deploy/compose.yaml up, trains on it, kills every main process, reads every metric.

Then the same with each file that lies over it: under TLS, with Megatron, with SGLang, and with a
gateway, on which a program of Tinker's client runs (build/tinker); those of accelerators are only
rendered. One that fails is told, and the others are tried all the same. Needs a Docker engine with
compose v2. The last line is
`compose: up_seconds=<s> reward_last=<y> targets_up=<n>/<n> metrics=<m> overlays=<n> of=<n>`.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from sluice.client import RemoteError, TrainerClient
from sluice.ports import free_port
from sluice.runtime.security import SecurityConfig, TlsConfig
from tools.compose_project import ComposeError, Project, run, wait_until
from tools.declared_metrics import MODULES, declared
from tools.make_certificates import Authority

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
TINKER_PYTHON = ROOT / "build" / "tinker" / "bin" / "python"
ROUTER_IMAGE = "sluice-router"
INSTANCES = {
    "trainer": ["trainer:9100"],
    "rollout": ["rollout-0:9100", "rollout-1:9100"],
    "router": ["router:9100"],
    "converter": ["converter:9100"],
}
# the loop has ended with its run before metrics are read; the base has no others of these
UNSEEN = {"loop", "reward_model", "gateway"}
GATEWAY = {"gateway": ["gateway:9100"]}
INSTANCES[""] = [instance for service in INSTANCES.values() for instance in service]
SERVERS = ["trainer", "rollout-0", "rollout-1", "router", "converter"]
# the loop early
KILLS = ["trainer", "loop", "rollout-1", "router", "rollout-0", "converter", "prometheus"]
WITHOUT = {  # documented, and not there: without TLS, and of a service that has no store
    *(
        ("sluice_certificate_end_timestamp_seconds", instance)
        for instance in (*INSTANCES[""], *GATEWAY["gateway"])
    ),
    ("sluice_disk_free_bytes", "router:9100"),
    ("sluice_disk_size_bytes", "router:9100"),
}
MOVED = [  # a run leaves none of these at 0
    "sluice_rpc_duration_seconds_count",
    "sluice_trainer_step_number",
    "sluice_trainer_tokens_total",
    "sluice_trainer_weight_version",
    "sluice_trainer_publish_duration_seconds_count",
    "sluice_trainer_sample_lag_versions_count",
    "sluice_rollout_samples_total",
    "sluice_rollout_decoded_tokens_total",
    "sluice_rollout_group_duration_seconds_count",
    "sluice_rollout_pause_duration_seconds_count",
    "sluice_rollout_prepare_duration_seconds_count",
    "sluice_router_leases_total",
    "sluice_router_releases_total",
]
OVERLAYS = {"megatron": ["trainer"], "sglang": ["rollout-0", "rollout-1"]}  # whose image is whose
RENDERED = ("cuda", "npu")
OVERLAY_STEPS = 40
TINKER_STEPS = 60
TINKER_KILL = 20  # the gateway, after so many
GAIN = 0.1  # of the reward in so many steps
MAX_LOOP_RESTARTS = 5
PATIENCE = 600.0  # seconds, for anything on a busy machine
NO_TORCH = (
    "import importlib.util, os, sys;"
    "sys.exit(importlib.util.find_spec('torch') is not None or os.getuid() == 0)"
)


def note(text: str) -> None:
    print(text, flush=True)


def wheels_directory() -> str | None:
    """A folder with a build of torch that pip is told of, for the images too."""
    command = [sys.executable, "-m", "pip", "config", "get", "global.find-links"]
    asked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    for name in asked.stdout.split():
        if any(Path(name).glob("torch-*.whl")):
            return name
    return None


def create_project() -> Project:
    environment = {key: value for key, value in os.environ.items() if "SLUICE" not in key}
    environment.pop("TOKEN_FILE", None)
    ports = ("ROUTER_PORT", "TRAINER_PORT", "CONVERTER_PORT", "PROMETHEUS_PORT", "TINKER_PORT")
    for name in ports:
        environment[name] = str(free_port("127.0.0.1"))
    wheels = environment.get("WHEELS_DIR") or wheels_directory()
    if wheels is not None:
        environment["WHEELS_DIR"] = wheels
    name = f"sluice-smoke-{os.getpid()}"
    return Project(name, [DEPLOY / "compose.yaml"], environment, ROUTER_IMAGE, note)


def check_images(project: Project) -> None:
    """The router's image has no torch, and nobody is root or stays down."""
    run(["docker", "run", "--rm", "--network=none", ROUTER_IMAGE, "python", "-c", NO_TORCH])
    for service in (*SERVERS, "prometheus"):
        container = project.container(service)
        if container.user in ("", "0", "root") or container.restart_policy == "no":
            raise ComposeError(f"{service} runs as {container.user!r} and stays down once ended")


def read_rewards(metrics: str) -> list[float]:
    """Mean reward of each step in the text of a metrics.jsonl."""
    lines = [line for line in metrics.splitlines() if line[:1] == "{" and line.endswith("}")]
    return [row["reward_mean"] for row in map(json.loads, lines) if "reward_mean" in row]


def rewards(project: Project) -> list[float]:
    """Mean reward of each step of the run, so far."""
    return read_rewards(project.read("loop", "/runs/example/metrics.jsonl"))


def wait_for_steps(project: Project, count: int) -> None:
    """Until the run has `count` steps more, or is over."""
    target = len(rewards(project)) + count

    def are_done() -> bool:
        loop = project.container("loop")
        if loop.restarts > MAX_LOOP_RESTARTS:
            raise ComposeError("the loop ends again and again")
        return loop.has_ended or len(rewards(project)) >= target

    wait_until(f"step {target} of the run", are_done, PATIENCE)


def train_and_kill(project: Project, window: int) -> float:
    """Run the loop profile; meanwhile every container loses its main process once."""
    project.compose("--profile", "loop", "up", "-d", "--no-build", "loop")
    for service in KILLS:
        wait_for_steps(project, 4)
        project.kill(service, PATIENCE)
    wait_until(
        "the end of the run", lambda: project.container("loop").has_ended or None, 2 * PATIENCE
    )
    if code := project.container("loop").exit_code:
        raise ComposeError(f"the loop ended with {code}")
    last = rewards(project)[-window:]
    return sum(last) / len(last)


def ask_prometheus(project: Project, path: str, **query: str) -> Any:
    url = f"http://127.0.0.1:{project.environment['PROMETHEUS_PORT']}/api/v1/{path}"
    with urllib.request.urlopen(f"{url}?{urllib.parse.urlencode(query)}", timeout=10) as answer:
        return json.load(answer)["data"]


def wait_for_targets(project: Project, count: int = len(INSTANCES[""])) -> int:
    """How many targets are scraped; `count`, which are all, or ComposeError."""

    def all_up() -> int | None:
        found = ask_prometheus(project, "targets", state="active")["activeTargets"]
        found = [target for target in found if target["labels"]["job"] == "sluice"]
        up = [target for target in found if target["health"] == "up"]
        return len(up) if len(up) == len(found) == count else None

    return wait_until("all targets to be scraped", all_up, PATIENCE)


def check_metrics(project: Project) -> int:
    """How many documented metrics every instance of their service shows; all, or ComposeError."""
    if unseen := MODULES.keys() - INSTANCES.keys() - UNSEEN:
        raise ComposeError(f"nothing in compose runs {sorted(unseen)}, which have metrics")
    count = wait_for_metrics(
        project, {service: INSTANCES[service] for service in MODULES.keys() - UNSEEN}
    )
    for name in MOVED:
        query = f"sum(max_over_time({name}[1d])) > 0"
        if not ask_prometheus(project, "query", query=query)["result"]:
            raise ComposeError(f"{name} is 0 after a run")
    return count


def wait_for_metrics(project: Project, instances: Mapping[str, Sequence[str]]) -> int:
    """How many metrics these services have; each instance shows all of them, or ComposeError."""
    wanted = {
        (metric.name + ("_count" if metric.kind == "histogram" else ""), instance)
        for service in instances
        for metric in declared(service)
        for instance in instances[service]
        if (metric.name, instance) not in WITHOUT
    }
    missing = set(wanted)

    def all_seen() -> bool:
        query = 'count by (__name__, instance) ({__name__=~"sluice_.+"})'
        for series in ask_prometheus(project, "query", query=query)["result"]:
            missing.discard((series["metric"]["__name__"], series["metric"]["instance"]))
        return not missing

    try:
        wait_until("every metric to be scraped", all_seen, 60.0)
    except ComposeError:
        raise ComposeError(f"not scraped: {sorted(missing)}") from None
    return len({name for name, _ in wanted})


def secure(project: Project, directory: Path) -> SecurityConfig:
    """Certificates and a token for the overlay; the credentials of a client on this host."""
    authority = Authority()
    ca = authority.write(directory / "ca.pem")
    for name in [*SERVERS, "loop", "prometheus", "host"]:
        _, key = authority.issue(directory, name)
        key.chmod(0o644)  # the users of the containers are not ours
    token = directory / "token"
    token.write_text("a token for a trial\n")
    directory.chmod(0o755)
    project.environment |= {"CERTS_DIR": str(directory), "TOKEN_FILE": str(token)}
    project.files.append(DEPLOY / "compose.tls.yaml")
    cert, key = directory / "host.pem", directory / "host.key"
    return SecurityConfig(tls=TlsConfig(ca=ca, cert=cert, key=key), token_file=token)


async def refusal(address: str, security: SecurityConfig) -> str:
    async with TrainerClient(address, security) as client:
        try:
            await client.get()
        except RemoteError as error:
            return error.code.name
    return "OK"


def check_secured(project: Project, directory: Path) -> None:
    """The same under TLS and a token: it trains, is scraped, and refuses strangers."""
    right = secure(project, directory)
    project.up(PATIENCE)
    wait_for_targets(project)
    address = f"127.0.0.1:{project.environment['TRAINER_PORT']}"
    expected = {
        "OK": right,
        "UNAUTHENTICATED": SecurityConfig(tls=right.tls),
        "UNAVAILABLE": SecurityConfig(token_file=right.token_file),
    }
    for answer, security in expected.items():
        found = asyncio.run(refusal(address, security))
        if found != answer:
            raise ComposeError(f"the secured trainer answered {found}, not {answer}")
    command = "sluice train /config/run.yaml --run_dir /runs/secured --steps 2"
    project.compose("--profile", "loop", "run", "--rm", "-T", "loop", *command.split())
    note("under TLS and a token: trained, scraped, strangers refused")


def check_overlay(project: Project, name: str) -> None:
    """With deploy/compose.<name>.yaml alone over the base: it comes up, is scraped and learns."""
    project.files[1:] = [DEPLOY / f"compose.{name}.yaml"]
    services = OVERLAYS[name]
    project.compose("build", services[0], seconds=3600)
    up_seconds = project.up(PATIENCE)
    for service in services:
        if (image := project.container(service).image) != f"sluice-{name}":
            raise ComposeError(f"{service} runs {image}")
    wait_for_targets(project)
    train = f"sluice train /config/run.yaml --run_dir /runs/{name} --steps {OVERLAY_STEPS} >&2"
    command = ["sh", "-c", f"{train} && cat /runs/{name}/metrics.jsonl"]
    flags = ["--profile", "loop", "run", "--rm", "-T", "loop"]
    found = read_rewards(project.compose(*flags, *command, seconds=2 * PATIENCE))
    first, last = (sum(part) / len(part) for part in (found[:5], found[-5:]))
    if len(found) != OVERLAY_STEPS or not last > first + GAIN:
        raise ComposeError(f"{name}: {len(found)} steps, reward {first:.3f} -> {last:.3f}")
    note(f"{name}: up in {up_seconds:.1f} s, reward {first:.3f} -> {last:.3f}, scraped")


def check_tinker(project: Project) -> None:
    """With a gateway: a program of Tinker's client learns, though that is killed meanwhile."""
    project.files[1:] = [DEPLOY / "compose.tinker.yaml"]
    up_seconds = project.up(PATIENCE)
    wait_for_targets(project, len(INSTANCES[""]) + 1)
    url = f"http://127.0.0.1:{project.environment['TINKER_PORT']}"
    program = [str(TINKER_PYTHON), "-u", "examples/tinker_loop.py", url, "/store/model"]
    command = [*program, "--steps", str(TINKER_STEPS)]
    environment = os.environ | {"TINKER_TELEMETRY": "0"}
    found = list[float]()
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=sys.stderr, text=True
    ) as client:
        assert client.stdout is not None
        ending = threading.Timer(2 * PATIENCE, client.kill)
        ending.start()
        try:
            for line in client.stdout:
                if line.startswith("step"):
                    found.append(float(line.split()[-1]))
                    if len(found) == TINKER_KILL:
                        project.kill("gateway", PATIENCE)
            client.wait()
        except ComposeError:
            client.kill()
            raise
        finally:
            ending.cancel()
    first, last = (sum(part) / max(len(part), 1) for part in (found[:5], found[-5:]))
    if client.returncode or len(found) != TINKER_STEPS or not last > first + GAIN:
        steps = f"{len(found)} steps, reward {first:.3f} -> {last:.3f}"
        raise ComposeError(f"tinker: the program ended with {client.returncode}: {steps}")
    count = wait_for_metrics(project, GATEWAY)
    note(f"tinker: up in {up_seconds:.1f} s, reward {first:.3f} -> {last:.3f}, {count} metrics")


def passes(project: Project, name: str, check: Callable[[], None]) -> bool:
    """Whether `check` holds of the overlay `name`; the project is down afterwards."""
    try:
        check()
    except ComposeError as error:
        tell(project, f"{name}: {error}")
        return False
    finally:
        project.files[1:] = []  # what is wrong with a file must not keep anything up
        project.down()
    return True


def tell(project: Project, failure: str) -> None:
    for service in (*SERVERS, "loop", "prometheus", "gateway"):
        print(f"--- {service}\n{project.logs(service)}", file=sys.stderr)
    print(f"compose-smoke: {failure}", file=sys.stderr, flush=True)


def render(project: Project) -> None:
    """What no CPU can bring up is at least what compose understands."""
    for name in RENDERED:
        project.files[1:] = [DEPLOY / f"compose.{name}.yaml"]
        project.compose("config", "--quiet")
        note(f"{name}: rendered")


def smoke(project: Project) -> tuple[str, bool]:
    """The line, and whether all that lies over the base does what it is for."""
    config = yaml.safe_load((DEPLOY / "config" / "run.yaml").read_text())
    project.compose("build", "router", "model", seconds=3600)
    up_seconds = project.up(PATIENCE)
    note(f"up in {up_seconds:.1f} s")
    check_images(project)
    reward = train_and_kill(project, window=10)
    if reward < config["stop_at_reward"]:
        raise ComposeError(f"the reward ended at {reward:.3f}")
    targets, metrics = wait_for_targets(project), check_metrics(project)
    with tempfile.TemporaryDirectory() as directory:
        secured = partial(check_secured, project, Path(directory))
        passed = [passes(project, "tls", secured)]
    project.environment["TOKEN_FILE"] = ""
    passed += [passes(project, name, partial(check_overlay, project, name)) for name in OVERLAYS]
    passed.append(passes(project, "tinker", partial(check_tinker, project)))
    render(project)
    line = (
        f"compose: up_seconds={up_seconds:.1f} reward_last={reward:.3f} "
        f"targets_up={targets}/{len(INSTANCES[''])} metrics={metrics} "
        f"overlays={sum(passed)} of={len(passed)}"
    )
    return line, all(passed)


def main() -> int:
    if shutil.which("docker") is None:
        print("compose-smoke needs a Docker engine with compose v2", file=sys.stderr)
        return 1
    if not TINKER_PYTHON.exists():
        print("compose-smoke needs build/tinker: make build/tinker/.installed", file=sys.stderr)
        return 1
    project = create_project()
    try:
        line, passed = smoke(project)
    except ComposeError as error:
        tell(project, str(error))
        return 1
    finally:
        project.compose("--profile", "*", "down", "-v", "--remove-orphans")
    print(line)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
