"""Warm processes that run a job under any world size: their imports cost seconds, once."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

from torch.distributed import TCPStore

from services.trainer.rank import FAILURES
from tests.patience import PATIENCE

Job = Callable[[int, int, dict[str, Any]], dict[str, Any]]
JOB_SECONDS = 2 * PATIENCE  # longer than a collective may take, whose error says more
JOBS_PER_LIFE = 20  # torch keeps the threads of every gloo group that ever was: start afresh


class JobError(AssertionError):
    """A job raised; the message holds every rank's trace."""


class Pool:
    """`run` gives a job to ranks 0..world-1; each makes its process group, runs and ends it.

    `jobs` is the module that has them, and a function `clean_up` for what one that failed leaves.
    """

    def __init__(self, jobs: str) -> None:
        self._module = jobs
        self._connections: list[Connection] = []
        self._processes: list[SpawnProcess] = []
        self._jobs = 0

    def run(self, job: str, world: int, **arguments: Any) -> list[dict[str, Any]]:
        """What `job` answered on every rank, in rank order. Raises JobError."""
        if self._jobs == JOBS_PER_LIFE:
            self.close()
        self._jobs += 1
        self._grow(world)
        meeting = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        task = {
            "module": self._module,
            "job": job,
            "world": world,
            "port": meeting.port,
            "arguments": arguments,
        }
        for connection in self._connections[:world]:
            connection.send_bytes(json.dumps(task).encode())
        answers = [_receive(connection, JOB_SECONDS) for connection in self._connections[:world]]
        errors = [f"rank {i}: {a['error']}" for i, a in enumerate(answers) if "error" in a]
        if errors:
            raise JobError("\n".join(errors))
        return [answer["result"] for answer in answers]

    def close(self) -> None:
        for connection, process in zip(self._connections, self._processes, strict=True):
            connection.close()
            process.kill()  # it holds nothing; leaving torch in order takes seconds
            process.join(10)
        self._connections, self._processes, self._jobs = [], [], 0

    def _grow(self, world: int) -> None:
        """Start the missing processes, all at once."""
        context = multiprocessing.get_context("spawn")
        started = len(self._processes)
        for rank in range(started, world):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self._module, theirs), daemon=True)
            process.start()
            theirs.close()  # so that its end is heard of
            self._connections.append(mine)
            self._processes.append(process)
        for connection in self._connections[started:]:
            _receive(connection, JOB_SECONDS)


def _receive(connection: Connection, seconds: float) -> dict[str, Any]:
    if not connection.poll(seconds):
        raise JobError(f"no answer within {seconds} s")
    try:
        answer: dict[str, Any] = json.loads(connection.recv_bytes())
    except EOFError:
        raise JobError("a rank has ended without an answer; its error is above") from None
    return answer


def _serve(rank: int, jobs: str, connection: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    importlib.import_module(jobs)
    connection.send_bytes(b"{}")
    while True:
        try:
            task = json.loads(connection.recv_bytes())
        except EOFError:
            return
        connection.send_bytes(json.dumps(_run(rank, task)).encode())


def _run(rank: int, task: dict[str, Any]) -> dict[str, Any]:
    import torch.distributed as dist

    jobs = importlib.import_module(task["module"])
    try:
        dist.init_process_group(
            "gloo",
            store=dist.TCPStore("127.0.0.1", task["port"]),
            rank=rank,
            world_size=task["world"],
            timeout=timedelta(seconds=PATIENCE),
        )
        job: Job = getattr(jobs, task["job"])
        return {"result": job(rank, task["world"], task["arguments"])}
    except FAILURES:
        return {"error": traceback.format_exc()}
    finally:
        jobs.clean_up()
        if dist.is_initialized():
            dist.destroy_process_group()
