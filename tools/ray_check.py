"""A stack on a Ray cluster of its own, on this host: up, a run that processes are lost under, down.

    python -m tools.ray_check [--whole | --reward-model]

Nodes are `ray start --block` on loopback addresses of their own, with tokens. The copy task trains
through `sluice train` while, one after the other, processes are lost; each has to be back, and the
run to get on, before the next. The short form has two nodes and kills (-9) a service and an actor.
The whole one has three, of which the head runs no service, and goes on with a rank, a node, the
node of the router, one that falls silent (SIGSTOP of its raylet), and the head: its GCS is killed,
and started again on what it has stored. A node that was lost comes back empty. With a reward model
it is that, its actor and its node that are lost, under a run whose groups it scores.
The last line is
`ray: up_seconds=<x> faults=<n> recovered=<n> reward_last=<x> lost=0 doubled=0 orphans=0`;
it ends with 1 where one of them is not as it should be.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from sluice.loop.ledger import Ledger
from sluice.loop.report import read_metrics
from sluice.loop.run_directory import LEDGER
from sluice.ports import reserve_port
from sluice.starting import read_starting

ROOT = Path(__file__).parent.parent
NODES = ("127.0.0.31", "127.0.0.32", "127.0.0.33")
PATIENCE = 600.0  # seconds, for anything on a busy machine
POLL_SECONDS = 0.2
GROUPS, SAMPLES, CHECKPOINT_EVERY = 32, 16, 10
FIRST_STEPS, STEPS_EACH = 80, 10  # of the run, and for each fault
STEPS_ON = 3  # by which a run has got on
REWARD = 0.9
LITTLE = {"cpus": 0.5}
BLOCKS = "This command will now block"
TOO_SLOW = "timed out during startup"  # by its own 30 s, which nothing sets


def wait_for(what: str, holds: Callable[[], Any]) -> Any:
    """What `holds` returns, once it is true. Raises TimeoutError."""
    deadline = time.monotonic() + PATIENCE
    while not (found := holds()):
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(POLL_SECONDS)
    return found


class Cluster:
    """Ray nodes of this host, each with an address of its own."""

    def __init__(self, count: int, directory: Path, environment: dict[str, str]) -> None:
        self.directory, self.environment = directory, environment
        self._ray = str(Path(sys.executable).with_name("ray"))
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        self.address = ""
        self.addresses = NODES[:count]

    @property
    def head(self) -> str:
        return self.addresses[0]

    def start(self) -> None:
        with reserve_port(self.head) as held:
            self.address = f"{self.head}:{int(held.getsockname()[1])}"
        for node in self.addresses:
            self.start_node(node)

    def start_node(self, node: str) -> None:
        """Start a node, or start it again once all that it was has ended."""
        if node != self.head:
            return self._start(node, "--num-cpus=4", "--address", self.address)
        # A head looks among the processes of its host for one that runs already, and takes the
        # other nodes for it.
        (self.directory / "ray" / "ray_current_cluster").unlink(missing_ok=True)
        port, temporary = self.address.rpartition(":")[2], str(self.directory / "ray")
        cpus = "--num-cpus=0" if len(self.addresses) > 2 else "--num-cpus=4"
        flags = ("--head", "--port", port, "--temp-dir", temporary, "--include-dashboard=false")
        return self._start(node, cpus, *flags)

    def await_end(self, node: str) -> None:
        """Until nothing of a node that was lost is left."""
        process = self.nodes[node]
        wait_for(f"node {node} does not end", lambda: process.poll() is not None)

    def _start(self, node: str, *flags: str) -> None:
        log = self.directory / f"{node}.log"
        common = ["--node-ip-address", node, "--num-gpus=0", "--block"]
        common += ["--object-store-memory=80000000", "--disable-usage-stats"]

        def launch() -> None:
            with log.open("wb") as file:
                self.nodes[node] = subprocess.Popen(
                    [self._ray, "start", *flags, *common],
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                )

        def up() -> bool:
            text = log.read_text()
            if self.nodes[node].poll() is not None:
                if TOO_SLOW not in text:
                    raise RuntimeError(text)
                print(f"node {node}: `ray start` gave up on a busy machine, and again", flush=True)
                launch()
            return BLOCKS in text

        launch()
        wait_for(f"node {node}", up)

    def process(self, node: str, name: str) -> int:
        """A process of a node; the end of its `raylet` is that of the node."""
        family = psutil.Process(self.nodes[node].pid).children(recursive=True)
        (found,) = [each.pid for each in family if each.name() == name]
        return found

    def processes(self) -> list[psutil.Process]:
        """All below the nodes."""
        found: list[psutil.Process] = []
        for node in self.nodes.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                found += psutil.Process(node.pid).children(recursive=True)
        return found

    def close(self) -> None:
        for node in reversed(self.nodes.values()):
            family = []
            with contextlib.suppress(psutil.NoSuchProcess):
                family = psutil.Process(node.pid).children(recursive=True)
            node.terminate()
            try:
                node.wait(30)
            except subprocess.TimeoutExpired:
                node.kill()
            for each in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()


class Run:
    """A stack on a cluster and a run on it, by the commands that users have."""

    def __init__(self, cluster: Cluster, steps: int, *, scored: bool = False) -> None:
        """`scored`: by a reward model of the stack, and not by what was to be copied."""
        self.cluster, self.steps = cluster, steps
        self.directory = cluster.directory / "run"
        self.directory.mkdir()
        model = self.directory / "model"
        self._command("examples.models.tiny_qwen3", str(model))
        scores: dict[str, Any] = {}
        rewarded: dict[str, Any] = {"reward": "position_match"}
        if scored:
            head = self.directory / "head"
            self._command("examples.models.value_head", str(model), str(head))
            config = {"model": str(head), "threads": 1}
            scores = {"scores": {"kind": "reward_model", "resources": LITTLE, "config": config}}
            url = f"{self.directory / 'services.json'}#scores"
            asked = {"url": url, "model": "head", "attempt_seconds": 10}
            asked |= {"deadline_seconds": PATIENCE, "longest_backoff_seconds": 0.5}
            rewarded = {"reward": "reward_model", "reward_settings": asked}
        self.names = ("router", "trainer", "rollout-0", "rollout-1", *scores)
        self.services_yaml = self._write(
            "services",
            {
                "run_dir": str(self.directory),
                "start_timeout_seconds": PATIENCE,
                "services": {
                    "router": {"kind": "router"},
                    **scores,
                    "trainer": {
                        "kind": "trainer",
                        "resources": {"cpus": 0.5},
                        "config": {
                            "model": str(model),
                            "optim": {"learning_rate": 2e-3},
                            "max_tokens_per_micro_batch": 8192,
                        },
                    },
                    "rollout": {
                        "kind": "rollout",
                        "replicas": 2,
                        "strategy": "spread",
                        "resources": {"cpus": 0.5, "memory_gib": 0.1},
                        "config": {
                            "tokenizer": str(model),
                            "engine": {"max_running": 512, "max_model_length": 16, "threads": 1},
                        },
                    },
                },
            },
        )
        self.run_yaml = self._write(
            "run",
            {
                "run_dir": str(self.directory),
                "services": str(self.directory / "services.json"),
                "prompts": {"file": "examples/copy_digits.jsonl"},
                "environment": {"name": "prompts", "settings": rewarded},
                "sampling": {"max_new_tokens": 5},
                "algorithm": {
                    "advantage": {"name": "grpo"},
                    "loss": {"name": "ppo_clip", "clip_low": 0.2},
                },
                "groups_per_step": GROUPS,
                "samples_per_group": SAMPLES,
                "steps": steps,
                "checkpoint_every": CHECKPOINT_EVERY,
                "service_timeout_seconds": PATIENCE,
            },
        )

    def _write(self, name: str, config: dict[str, Any]) -> str:
        path = self.directory / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config))
        return str(path)

    def _command(self, *command: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            env=self.cluster.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
        return done.stdout + done.stderr

    def up(self) -> float:
        began = time.monotonic()
        flags = ("--on", "ray", "--address", self.cluster.address)
        with ThreadPoolExecutor(1) as pool:
            starting = pool.submit(self._command, "sluice.cli", "up", self.services_yaml, *flags)
            told = wait_for("a start", lambda: read_starting(self.directory) or starting.done())
            starting.result()
        if told is True or read_starting(self.directory):
            raise RuntimeError("a start does not tell what it waits for, or does so behind its end")
        return time.monotonic() - began

    def down(self) -> None:
        self._command("sluice.cli", "down", str(self.directory))

    def status(self) -> dict[str, str]:
        """Health by service."""
        told = self._command("sluice.cli", "status", str(self.directory), "--json")
        return {each["name"]: each["health"] for each in json.loads(told)["services"]}

    @contextlib.contextmanager
    def training(self) -> Iterator[subprocess.Popen[bytes]]:
        with (self.directory / "train.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "sluice.cli", "train", self.run_yaml],
                cwd=ROOT,
                env=self.cluster.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def step(self) -> int:
        rows = read_metrics(self.directory) if self.directory.exists() else []
        return max((int(row["step"]) for row in rows if "reward_mean" in row), default=0)

    @property
    def services_json(self) -> Path:
        return self.directory / "services.json"

    def entry(self, name: str) -> dict[str, Any]:
        """Of services.json; empty while it has none."""
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(self.services_json.read_text())
            entry: dict[str, Any] = found.get(name, {})
            return entry
        return {}

    def judge(self) -> tuple[int, int, float]:
        """Groups lost and doubled, and the mean reward of the last ten steps."""
        ledger = Ledger(self.directory / LEDGER)
        try:
            consumed = ledger.groups("consumed")
        finally:
            ledger.close()
        expected, found = set(range(self.steps * GROUPS)), {each.position for each in consumed}
        by_step = Counter(each.consumed_step for each in consumed)
        doubled = len(found - expected) + sum(max(0, n - GROUPS) for n in by_step.values())
        rewards = [row["reward_mean"] for row in read_metrics(self.directory)][-10:]
        return len(expected - found), doubled, sum(rewards) / max(1, len(rewards))


def parent_of(pid: int) -> int:
    return int(psutil.Process(pid).ppid())


def rank_of(pid: int) -> int:
    """The rank process below a trainer."""
    ranks = [
        each.pid
        for each in psutil.Process(pid).children(recursive=True)
        if "services.trainer.rank" in " ".join(each.cmdline())
    ]
    return ranks[0]


@dataclass(frozen=True)
class Fault:
    """Whom to lose, whose entries of services.json change then, and what comes after."""

    what: str
    find: Callable[[Run], tuple[list[str], int]]  # services; the process
    signal: signal.Signals = signal.SIGKILL
    node: Callable[[Run], str] = lambda run: ""  # that has to be started again


def service(name: str) -> Callable[[Run], tuple[list[str], int]]:
    return lambda run: ([name], run.entry(name)["pid"])


def actor(name: str) -> Callable[[Run], tuple[list[str], int]]:
    return lambda run: ([name], parent_of(run.entry(name)["pid"]))


def beside_router(run: Run) -> str:
    """A node with an engine and without the router; else that of the router."""
    hosts = {run.entry(f"rollout-{i}")["host"] for i in range(2)}
    return min(hosts - {run.entry("router")["host"]}, default=of_router(run))


def of_router(run: Run) -> str:
    return str(run.entry("router")["host"])


def raylet(node: Callable[[Run], str]) -> Callable[[Run], tuple[list[str], int]]:
    """That of a node, with which all its services are lost."""

    def find(run: Run) -> tuple[list[str], int]:
        where = node(run)
        names = [name for name in run.names if run.entry(name)["host"] == where]
        return names, run.cluster.process(where, "raylet")

    return find


def gcs(run: Run) -> tuple[list[str], int]:
    return [], run.cluster.process(run.cluster.head, "gcs_server")


def of_reward_model(run: Run) -> str:
    return str(run.entry("scores")["host"])


SHORT = (
    Fault("a service", service("rollout-0")),
    Fault("its actor", actor("rollout-0")),
)
MORE = (
    Fault("a rank", lambda run: ([], rank_of(run.entry("trainer")["pid"]))),
    Fault("a node", raylet(beside_router), node=beside_router),
    Fault("the router's node", raylet(of_router), node=of_router),
    Fault("a silent node", raylet(of_router), signal.SIGSTOP, of_router),
    Fault("the GCS", gcs, node=lambda run: run.cluster.head),
)
SCORED = (
    Fault("a reward model", service("scores")),
    Fault("its actor", actor("scores")),
    Fault("its node", raylet(of_reward_model), node=of_reward_model),
)


def disturb(run: Run, training: subprocess.Popen[bytes], fault: Fault) -> bool:
    """Lose somebody; whether all is back, and the run gets on."""
    node, (names, pid) = fault.node(run), fault.find(run)
    before, began = {name: run.entry(name)["pid"] for name in names}, time.monotonic()
    written = run.services_json.stat().st_mtime_ns
    os.kill(pid, fault.signal)

    def is_back() -> bool:
        if before or node:
            return all(run.entry(name).get("pid", was) != was for name, was in before.items())
        with contextlib.suppress(psutil.Error, LookupError):  # it is not there yet
            return fault.find(run)[1] != pid
        return False

    def is_told_again() -> bool:
        """By a registry that knew of nobody when it began."""
        told = run.services_json.stat().st_mtime_ns != written
        return told and all(run.entry(name) for name in run.names)

    try:
        if node == run.cluster.head:
            run.cluster.await_end(node)
            run.cluster.start_node(node)
            wait_for(f"{fault.what}: nobody is announced", is_told_again)
        wait_for(f"{fault.what} is not back", is_back)
        seconds, step = time.monotonic() - began, run.step()
        wait_for(
            f"the run does not get on without {fault.what}",
            lambda: run.step() >= min(step + STEPS_ON, run.steps) or training.poll() is not None,
        )
        on = time.monotonic() - began
        if node and node != run.cluster.head:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)  # the host speaks again, and hears that it is out
            run.cluster.await_end(node)
            run.cluster.start_node(node)
    except (TimeoutError, OSError, RuntimeError) as error:
        print(f"{fault.what}: {error}", flush=True)
        return False
    print(
        f"{fault.what}: back after {seconds:.1f} s, {STEPS_ON} steps on after {on:.1f} s",
        flush=True,
    )
    return training.poll() in (None, 0)


def orphans_of(run: Run) -> int:
    """Processes of the stack that are left: services, and actors of theirs."""
    found = 0
    for each in psutil.process_iter(["cmdline"]):
        line = " ".join(each.info["cmdline"] or [])
        found += str(run.directory) in line and "services." in line
    for each in run.cluster.processes():
        with contextlib.suppress(psutil.Error):
            line = " ".join(each.cmdline())
            found += line.startswith(("ray::Cell", "ray::Registry"))
    return found


def check(whole: bool, scored: bool, directory: Path) -> int:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "SLUICE_DEVICE": "cpu",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(16),
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_timeout_ms": "5000",
        "RAY_health_check_failure_threshold": "5",
        "RAY_gcs_storage": "rocksdb",
        "RAY_gcs_storage_path": str(directory / "gcs"),
        "RAY_gcs_rpc_server_reconnect_timeout_s": "300",
    }
    faults = SCORED if scored else SHORT + MORE if whole else SHORT
    cluster = Cluster(3 if whole or scored else 2, directory, environment)
    try:
        cluster.start()
        steps = STEPS_EACH if scored else FIRST_STEPS
        run = Run(cluster, steps + STEPS_EACH * len(faults), scored=scored)
        up_seconds = run.up()
        print(f"up after {up_seconds:.1f} s", flush=True)
        recovered = 0
        with run.training() as training:
            wait_for("the run does not begin", lambda: run.step() or training.poll() is not None)
            for fault in faults:
                recovered += disturb(run, training, fault)
            code = training.wait(PATIENCE)
        if code:
            print((run.directory / "train.log").read_text()[-3000:])
        sick = [name for name, health in run.status().items() if health != "serving"]
        lost, doubled, reward = run.judge()
        run.down()
        orphans = orphans_of(run)
    finally:
        cluster.close()
    if sick:
        print(f"not serving: {', '.join(sick)}")
    print(
        f"ray: up_seconds={up_seconds:.1f} faults={len(faults)} recovered={recovered} "
        f"reward_last={reward:.3f} lost={lost} doubled={doubled} orphans={orphans}"
    )
    wrong = code or sick or lost or doubled or orphans
    learned = scored or reward >= REWARD  # of a head that was drawn at random
    return int(bool(wrong) or recovered < len(faults) or not learned)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--whole", action="store_true", help="three nodes and seven faults")
    form.add_argument(
        "--reward-model", action="store_true", help="three nodes, and one that scores"
    )
    flags = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="rc-", dir="/tmp"))  # sockets have short paths
    try:
        return check(flags.whole, flags.reward_model, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
