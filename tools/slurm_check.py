"""Runs deploy/slurm/sluice.sbatch on a Slurm of its own: two nodes of this host.

Needs Debian's slurmctld, slurmd, slurm-client and munge, and root. One job trains to its end; of
another a node is lost in the middle, so that Slurm puts it into its queue again; a third has one
engine over both nodes, on a stand-in of SGLang, which trains on nonsense. The last two lines are
`over nodes: completed=<n>` and `slurm: completed=<n> resumed=<n>`, all 1 if all went well.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import yaml

from sluice.ports import free_port
from tests.sglang_stand_in import write_program

ROOT = Path(__file__).parent.parent
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel")
NODES = {"node1": "127.0.0.11", "node2": "127.0.0.12"}
FEW_STEPS = 3
LOST = "node2"  # without the loop, whose end is that of the job
PATIENCE = 900.0  # seconds, for anything on a busy machine
POLL_SECONDS = 0.5
STEPS, GROUPS, CHECKPOINT_EVERY = 12, 32, 2
MORE_STEPS = 40  # of the job that loses a node

CONFIG = """\
ClusterName=sluice
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=20
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdTimeout=10
KillWait=5
JobRequeue=1
PartitionName=all Nodes={nodes} Default=YES MaxTime=INFINITE State=UP
"""


class SlurmError(Exception):
    """A job or a daemon did not do what it should; the message names its log."""


def note(text: str) -> None:
    print(text, flush=True)


def wait_until(what: str, done: Callable[[], bool], seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            raise SlurmError(f"{what}: not within {seconds:.0f} s")
        time.sleep(POLL_SECONDS)


class Cluster:
    """munged, slurmctld and a slurmd a node; ended with everything that jobs have started."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._environment = {**os.environ, "SLURM_CONF": str(directory / "slurm.conf")}

    def __enter__(self) -> Cluster:
        directory = self.directory
        directory.chmod(0o755)  # munged refuses what others might change
        key = directory / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        (directory / "state").mkdir()
        lines = [
            f"NodeName={name} NodeHostname={socket.gethostname()} NodeAddr={address} "
            f"Port={free_port(address)} CPUs=16 State=UNKNOWN"
            for name, address in NODES.items()
        ]
        text = CONFIG.format(
            host=socket.gethostname(),
            directory=directory,
            control_port=free_port("127.0.0.1"),
            nodes=",".join(NODES),
        )
        (directory / "slurm.conf").write_text("\n".join([*lines, text]))
        try:
            self._start(
                *("munged", "--foreground", "--force", f"--key-file={key}"),
                *(f"--{name}-file={directory}/munged.{name}" for name in ("pid", "log", "seed")),
                f"--socket={directory}/munge.socket",
            )
            wait_until("munged", (directory / "munge.socket").exists, 60)
            self._start("slurmctld", "-D")
            for name in NODES:
                self.start_node(name)
            wait_until("the nodes", lambda: all(self.is_idle(name) for name in NODES), 120)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in NODES:
            self.lose_node(name)
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(30)
            daemon.kill()
            daemon.wait()

    def _start(self, program: str, *arguments: str, name: str = "") -> None:
        with (self.directory / f"{name or program}.out").open("ab") as log:
            self._daemons[name or program] = subprocess.Popen(
                [program, *arguments], env=self._environment, stdout=log, stderr=log
            )

    def start_node(self, name: str) -> None:
        self._start("slurmd", "-D", "-N", name, name=name)

    def lose_node(self, name: str) -> None:
        """Kill a node's daemon and all that runs on it, at once, as a loss of power does."""
        if name in self._daemons:
            self._daemons.pop(name).kill()
        for process in self._processes_of(name):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _processes_of(self, name: str) -> Iterator[psutil.Process]:
        """What jobs started on a node, and the daemons of their steps."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("SLURM_CONF") != self._environment["SLURM_CONF"]:
                    continue
                family = [process]
                if process.name() == "slurmstepd":
                    family += process.children()
                if any(each.environ().get("SLURMD_NODENAME") == name for each in family):
                    yield process

    def show(self, kind: str, name: str) -> dict[str, str]:
        done = subprocess.run(
            ["scontrol", "show", kind, "-o", name],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return dict(word.split("=", 1) for word in done.stdout.split() if "=" in word)

    def is_idle(self, name: str) -> bool:
        return self.show("node", name).get("State") == "IDLE"

    def submit(self, script: Path, log: Path, **environment: str) -> str:
        names = ",".join(["ALL", *(f"{key}={value}" for key, value in environment.items())])
        done = subprocess.run(
            ["sbatch", "--parsable", "--nodes=2", f"--output={log}", f"--export={names}", script],
            env=self._environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return done.stdout.strip()


def write_config(folder: Path, **changes: object) -> Path:
    """The files beside the script, with `changes` of the run."""
    shutil.copytree(ROOT / "deploy" / "slurm" / "config", folder)
    run = yaml.safe_load((folder / "run.yaml").read_text())
    del run["stop_at_reward"]
    (folder / "run.yaml").write_text(yaml.safe_dump({**run, **changes}))
    return folder


def steps_of(run: Path) -> list[int]:
    """The steps in a run's metrics so far."""
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [int(json.loads(line)["step"]) for line in lines]


def is_whole(run: Path, steps: int) -> bool:
    """Whether every step is there once, and so many groups were trained on."""
    with contextlib.closing(sqlite3.connect(run / "ledger.sqlite")) as ledger:
        query = "SELECT count(*) FROM groups WHERE state = 'consumed'"
        (consumed,) = ledger.execute(query).fetchone()
    found = steps_of(run)
    note(f"{run.name}: steps {found[0]} to {found[-1]}, {consumed} groups trained on")
    return found == list(range(1, steps + 1)) and consumed == steps * GROUPS


def over_nodes(config: Path, model: Path) -> None:
    """Have the engine of a job over both nodes."""
    sglang = {
        "python": str(write_program(config)),
        "nnodes": 2,
        "server_args": {"tp_size": 2},
        "environment": {"STAND_IN_SECONDS": "0.01", "STAND_IN_VOCABULARY": "13"},
    }
    engine = {"backend": "sglang", "model": str(model), "max_model_length": 16, "sglang": sglang}
    (config / "rollout.yaml").write_text(yaml.safe_dump({"engine": engine}))


def check(cluster: Cluster, directory: Path) -> tuple[bool, bool, bool]:
    """Whether a job trained to its end, whether one that lost a node did, and one whose engine is
    over nodes."""
    script, model = ROOT / "deploy" / "slurm" / "sluice.sbatch", directory / "model"
    build = [sys.executable, "-m", "examples.models.tiny_qwen3", str(model), "0"]
    subprocess.run(build, check=True, timeout=PATIENCE, cwd=ROOT)
    environment = {"MODEL": str(model), "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    environment["GLOO_SOCKET_IFNAME"] = "lo"  # the two nodes are one host

    def submit(name: str, **changes: object) -> tuple[str, Path]:
        run, config = directory / name, write_config(directory / f"{name}-config", **changes)
        if name == "nodes":
            over_nodes(config, model)
        log = directory / f"{name}.log"
        job = cluster.submit(script, log, RUN_DIR=str(run), CONFIG=str(config), **environment)
        note(f"job {job}: {name}, log {log}")
        return job, run

    def state(job: str) -> str:
        found = cluster.show("job", job).get("JobState", "")
        if found in ("FAILED", "CANCELLED", "TIMEOUT"):
            raise SlurmError(f"job {job}: {found}; see {directory}")
        return found

    job, run = submit("whole", steps=STEPS)
    wait_until("the whole job", lambda: state(job) == "COMPLETED")
    completed = is_whole(run, STEPS)

    job, run = submit("lost", steps=MORE_STEPS, checkpoint_every=CHECKPOINT_EVERY)
    wait_until("some steps", lambda: len(steps_of(run)) > 3 * CHECKPOINT_EVERY)
    before = len(steps_of(run))
    note(f"job {job}: {LOST} is lost at step {before}")
    cluster.lose_node(LOST)
    wait_until("the queue", lambda: cluster.show("job", job).get("Restarts") == "1")
    cluster.start_node(LOST)
    wait_until("the job that was resumed", lambda: state(job) == "COMPLETED")
    resumed = is_whole(run, MORE_STEPS) and before < MORE_STEPS

    job, run = submit("nodes", steps=FEW_STEPS, max_mismatch=0)
    wait_until("the job with one engine", lambda: state(job) == "COMPLETED")
    served = len(list(run.glob("logs/rollout-*.log"))) == len(
        NODES
    )  # a process each, of one engine
    return completed, resumed, is_whole(run, FEW_STEPS) and served


def main() -> int:
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        note(f"slurm_check: not installed: {', '.join(missing)}")
        return 2
    if os.geteuid():
        note("slurm_check: needs root, for slurmd")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="sluice-slurm-") as name:
        directory = Path(name)
        try:
            with Cluster(directory) as cluster:
                completed, resumed, over = check(cluster, directory)
        except SlurmError as error:
            note(f"slurm_check: {error}")
            for log in sorted([*directory.glob("*.log"), *directory.glob("*/logs/*.log")]):
                note(f"== {log}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-15:]))
            return 1
    note(f"over nodes: completed={over:d}")
    note(f"slurm: completed={completed:d} resumed={resumed:d}")
    return 0 if completed and resumed and over else 1


if __name__ == "__main__":
    sys.exit(main())
