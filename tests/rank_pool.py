"""Warm processes that run a job under any world size: their imports cost seconds, once."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

from torch.distributed import TCPStore

from services.trainer.rank import FAILURES
from tests.patience import PATIENCE

Job = Callable[[int, int, dict[str, Any]], dict[str, Any]]
JOB_SECONDS = 2 * PATIENCE  # longer than a collective may take, whose error says more
LEAVE_SECONDS = 10.0  # for the errors of others, once a rank has failed
JOBS_PER_LIFE = 20  # torch keeps the threads of every gloo group that ever was: start afresh


class JobError(AssertionError):
    """A job raised; the message holds every rank's trace."""


class Pool:
    """`run` gives a job to ranks 0..world-1; each makes its process group, runs and ends it.

    `jobs` is the module that has them, and a function `clean_up` for what one that failed leaves.
    One process imports it, computes nothing, and becomes a rank as often as one is needed.
    """

    def __init__(self, jobs: str) -> None:
        self._module = jobs
        self._origin: subprocess.Popen[bytes] | None = None
        self._orders: Connection  # of the origin
        self._ranks: list[tuple[int, Connection]] = []  # process ids too
        self._jobs = 0

    def run(self, job: str, world: int, **arguments: Any) -> list[dict[str, Any]]:
        """What `job` answered on every rank, in rank order. Raises JobError."""
        if self._jobs == JOBS_PER_LIFE:
            self._end_ranks()
        self._jobs += 1
        while len(self._ranks) < world:
            self._ranks.append(self._start_rank())
        meeting = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        task = {
            "module": self._module,
            "job": job,
            "world": world,
            "port": meeting.port,
            "arguments": arguments,
        }
        connections = [connection for _, connection in self._ranks[:world]]
        for rank, connection in enumerate(connections):
            connection.send_bytes(json.dumps({**task, "rank": rank}).encode())
        answers = self._answers(connections)
        errors = [f"rank {i}: {a['error']}" for i, a in enumerate(answers) if "error" in a]
        if errors:
            raise JobError("\n".join(errors))
        return [answer["result"] for answer in answers]

    def _answers(self, connections: list[Connection]) -> list[dict[str, Any]]:
        """In rank order. Once one has failed, those that wait for it are not waited for."""
        answers: dict[Connection, dict[str, Any]] = {}
        limit = JOB_SECONDS
        while waiting := [each for each in connections if each not in answers]:
            ready = wait(waiting, limit)
            for connection in ready:
                assert isinstance(connection, Connection)
                answers[connection] = _receive(connection)
            if any("error" in answer for answer in answers.values()):
                limit = LEAVE_SECONDS
            if not ready:
                late = {"error": f"no answer within {limit:g} s"}
                answers |= {connection: late for connection in waiting}
                self._end_ranks()
        return [answers[connection] for connection in connections]

    def close(self) -> None:
        self._end_ranks()
        if self._origin is not None:
            self._orders.close()
            self._origin.kill()
            self._origin.wait()
            self._origin = None

    def _end_ranks(self) -> None:
        for process, connection in self._ranks:
            connection.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)  # it holds nothing; leaving takes seconds
        self._ranks, self._jobs = [], 0

    def _start_rank(self) -> tuple[int, Connection]:
        if self._origin is None:
            self._orders, orders = Pipe()
            self._origin = subprocess.Popen(
                [sys.executable, "-m", "tests.rank_pool", self._module, str(orders.fileno())],
                pass_fds=[orders.fileno()],
            )
            orders.close()  # so that its end is heard of
            _receive(self._orders)
        mine, theirs = Pipe()
        send_handle(self._orders, theirs.fileno(), self._origin.pid)
        theirs.close()
        return _receive(self._orders)["process"], mine


def _receive(connection: Connection) -> dict[str, Any]:
    if not connection.poll(JOB_SECONDS):
        raise JobError(f"no answer within {JOB_SECONDS} s")
    try:
        answer: dict[str, Any] = json.loads(connection.recv_bytes())
    except EOFError:
        raise JobError("a rank has ended without an answer; its error is above") from None
    return answer


def _originate(jobs: str, orders: Connection) -> None:
    """Becomes a rank for every handle that comes, of a pipe on which the rank is to serve."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    importlib.import_module(jobs)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ranks that have ended are nobody's
    orders.send_bytes(b"{}")
    while True:
        try:
            handle = recv_handle(orders)
        except (EOFError, RuntimeError):  # the tests have ended
            return
        if process := os.fork():
            os.close(handle)
            orders.send_bytes(json.dumps({"process": process}).encode())
            continue
        orders.close()
        # torch makes its pool anew behind a fork, and fails where two threads ask for it first
        torch.set_num_threads(1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            _serve(Connection(handle))
        except FAILURES:
            traceback.print_exc()
        finally:
            os._exit(0)


def _serve(connection: Connection) -> None:
    while True:
        try:
            task = json.loads(connection.recv_bytes())
        except EOFError:
            return
        connection.send_bytes(json.dumps(_run(task["rank"], task)).encode())


def _run(rank: int, task: dict[str, Any]) -> dict[str, Any]:
    import torch.distributed as dist

    jobs, limit = importlib.import_module(task["module"]), timedelta(seconds=PATIENCE)
    try:
        store = dist.TCPStore("127.0.0.1", task["port"])
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=task["world"], timeout=limit
        )
        # gloo fails, or waits without a limit, where a rank leaves before another has its group
        store.set(f"has_group/{rank}", "")
        store.wait([f"has_group/{each}" for each in range(task["world"])], limit)
        job: Job = getattr(jobs, task["job"])
        return {"result": job(rank, task["world"], task["arguments"])}
    except FAILURES:
        return {"error": traceback.format_exc()}
    finally:
        jobs.clean_up()
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    _originate(sys.argv[1], Connection(int(sys.argv[2])))
