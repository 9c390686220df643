"""Processes that begin with their libraries loaded, as forks of one that has imported them.

What a rank or an engine costs until it serves is three seconds of processor time for the imports
of torch and transformers, and next to nothing else. `install` has `subprocess.Popen`, and what
services start in turn, fork `python -m services...` from a nursery, and pytest-xdist its workers.
The process is a child of who asked for it, has its own id, command line, environment and
descriptors, and declares the metrics that it would have; it is a `python -m` in all but where its
modules come from, and that it ends without taking them apart. Whatever else is started, or has
another environment for what was loaded, begins afresh as ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from sluice.imports import run_process, uncompiled
from sluice.runtime.processes import PR_SET_CHILD_SUBREAPER, end_with_parent

ROOT = Path(__file__).parent.parent
MODULES = (
    *("services.", "sluice.cli", "sluice.demo.", "examples."),
    *("tests.converter.", "tests.program", "tests.rank_pool", "tests.s3_server"),
    *("tests.unit.algo.ranks.", "tests.unit.process_facts"),
)
WORKER = ["-u", "-c", "import sys;exec(eval(sys.stdin.readline()))"]  # of pytest-xdist
LOADED_BY = ("PYTHON", "LD_", "OMP_NUM_", "TORCH_", "MKL_", "KMP_", "CUDA_", "ASCEND_", "GRPC_")
ROOM = 100_000  # bytes, of a command line or an environment
ABOVE = 500  # where descriptors are kept on their way
HUGE_PAGE = 2 << 20  # bytes
MADV_COLLAPSE = 25  # of Linux 6.1

LIBRARIES = (
    "aiohttp.web",
    "encodings.idna",  # of addresses
    "google.longrunning.operations_pb2",
    "google.protobuf.json_format",
    "grpc.aio",
    "grpc_health.v1.health",
    "grpc_reflection.v1alpha.reflection",
    "grpc_status.rpc_status",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "numpy.random",
    "openai",  # of tests, in each worker
    "packaging.requirements",
    "prometheus_client",
    "pyarrow.compute",
    "pydantic_settings",
    "rich._emoji_codes",
    "rich.progress",
    "sqlite3",
    "uvloop",
    "yaml",
)
MODELS = (
    "torch.distributed",
    "transformers",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "torch.distributed.checkpoint",  # with what shards models, which transformers began without
    *("numpy.fft", "torch._functorch.config", "torch.profiler._cupti_monitor"),  # by first passes
    *("torch.utils._device", "torch.utils.serialization.config"),
)

OWN = (  # with what they import
    "services.rollout.config",
    "services.rollout.engine.images",
    "services.rollout.engine.reference.engine",
    "services.rollout.engine.streaming",
    "services.rollout.engine.wire",
    "services.rollout.environments.graders.texts",
    "services.rollout.environments.prompts",
    "services.rollout.episodes.worker",
    "services.router.config",
    "services.trainer.backends.fsdp.backend",
    "services.trainer.backends.reference.backend",
    "services.trainer.checkpoint_files",
    "services.trainer.rank.executor",
    "services.trainer.rows",
    "sluice.check_command",
    "sluice.convert_command",
    "sluice.loop.filters",
    "sluice.loop.mixture",
    "sluice.loop.placement",
    "sluice.loop.retention",
    "sluice.loop.rows_run",
    "sluice.loop.run_samples",
    "sluice.protoset",
    "sluice.router_client",
    "sluice.runtime.http",
    "sluice.stack",
    "sluice.weights.convert.hf",
    "sluice.weights.convert.placed",
    "sluice.weights.convert.torch_dist_target",
    "sluice.weights.host_cache",
    "sluice.weights.transfer.group",
)
COMMANDS = (  # these as well, but for themselves
    "sluice.cli",
    "services.converter.__main__",
    "services.rollout.__main__",
    "services.router.__main__",
    "services.trainer.__main__",
)
OWNERS = ("converter", "loop", "rollout", "router", "trainer")  # of metrics, by their names
SINGLE = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}  # which pyarrow would start
FAULTS = "sluice.faults"  # reads the environment as it is imported

_cold: list[bool] = []  # for each `cold` that is under way

START = "from tests.warm import originate; originate()"


@dataclass
class Order:
    """A process to be: what `python -m` was asked for, or a worker of pytest."""

    parent: int
    command: list[str]  # as given
    environment: dict[str, str]
    directory: str
    session: bool
    targets: list[int]  # descriptors, in the order of those that come with it

    @property
    def module(self) -> str:
        return self.command[2]

    @property
    def has_children(self) -> bool:
        """Whether it starts such processes itself."""
        if self.is_worker:
            return True
        if self.module == "sluice.cli":
            return "up" in self.command[3:4] or "--up" in self.command
        return self.module == "services.trainer"

    @property
    def is_worker(self) -> bool:
        return self.command[1:] == WORKER


class Nursery:
    """Of this process; it ends with it. Without a line to one it is started when first needed."""

    def __init__(self, line: socket.socket | None = None) -> None:
        self._line, self._lock, self._owner = line, threading.Lock(), os.getpid()
        self.process: subprocess.Popen[bytes] | None = None
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # else imports start threads

    def takes(self, command: Any, environment: dict[str, str]) -> bool:
        return (
            not _cold
            and self._owner == os.getpid()
            and isinstance(command, list | tuple)
            and (_names_module(command) or list(command) == [sys.executable, *WORKER])
            and loaded_by(environment) == loaded_by(self._environment)
        )

    def bear(self, order: Order, descriptors: list[int]) -> int:
        """The id of the new child of this process. Raises OSError where there is no nursery."""
        with self._lock:
            if self._line is None:
                self._line = self._start()
            _prctl(PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._line, [json.dumps(vars(order)).encode()], descriptors)
                answer = int(self._line.recv(32) or 0)
            finally:
                _prctl(PR_SET_CHILD_SUBREAPER, 0)
        if answer < 0:
            os.waitpid(-answer, 0)
        if answer <= 0:
            raise OSError("there is no nursery, or it cannot")
        return answer

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", START, str(theirs.fileno()), " " * ROOM],
                env={**self._environment, **SINGLE, "ROOM": " " * ROOM},
                cwd=ROOT,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        return ours


def _names_module(command: list[str] | tuple[str, ...]) -> bool:
    started = len(command) > 2 and list(command[:2]) == [sys.executable, "-m"]
    return started and str(command[2]).startswith(MODULES)


def loaded_by(environment: dict[str, str]) -> dict[str, str]:
    """What decides how libraries load."""
    return {k: v for k, v in environment.items() if k.startswith(LOADED_BY)}


def originate() -> None:
    """The first nursery, and whatever it becomes."""
    line = _lifted(socket.socket(fileno=int(sys.argv[1])))
    os.environ.pop("ROOM")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _import_libraries()
    while True:
        order = _serve(line)
        if not order.has_children:
            break
        line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        owner = os.getpid()
        if os.fork():
            theirs.close()
            install(Nursery(_lifted(line)))
            break
        line.close()
        line = _lifted(theirs)
        with open(os.devnull, "r+b") as nothing:
            for descriptor in range(3):
                os.dup2(nothing.fileno(), descriptor)
        _rename([sys.executable, "-c", START], {})
        end_with_parent(owner)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    importlib.reload(sys.modules[FAULTS])
    run_process(partial(_run, order))


def _run(order: Order) -> int:
    try:
        if order.is_worker:
            sys.argv = ["-c"]
            exec(order.command[3], vars(sys.modules["__main__"]))
        else:
            sys.argv = [order.module, *order.command[3:]]
            _forget_metrics(order.module)
            runpy._run_module_as_main(order.module)  # type: ignore[attr-defined]  # as `python -m`
    except SystemExit as end:
        if isinstance(end.code, int):
            return end.code
        if end.code is not None:
            raise
    return 0


def _lifted(line: socket.socket) -> socket.socket:
    """Out of the way of descriptors whose numbers are given."""
    with line:
        return socket.socket(fileno=fcntl.fcntl(line.fileno(), fcntl.F_DUPFD_CLOEXEC, ABOVE))


def _import_libraries() -> None:
    for name in LIBRARIES:
        importlib.import_module(name)
    with uncompiled():
        for name in MODELS:
            importlib.import_module(name)
        for name in OWN:
            importlib.import_module(name)
        for name in COMMANDS:
            importlib.import_module(name)
            del sys.modules[name]  # what is run is none that was imported
        conversions = sys.modules["transformers.conversion_mapping"]
        conversions.get_checkpoint_conversion_mapping("")  # made by the first model that loads
    tempfile.tempdir = None  # each has that of its environment
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads is not to be forked"
    gc.freeze()
    _collapse_pages()


def _forget_metrics(module: str) -> None:
    """Those that only others declare. A program that is no service has those of a run."""
    own = module.split(".")[1] if module.startswith("services.") else "loop"
    registry = sys.modules["prometheus_client"].REGISTRY
    for collector, names in list(registry._collector_to_names.items()):
        owner = names[0].removeprefix("sluice_").split("_")[0]
        if owner in OWNERS and owner != own:
            registry.unregister(collector)


def _collapse_pages() -> None:
    """Half of what a fork costs is the table of its pages: one of 2 MiB takes the place of 512."""
    libc = ctypes.CDLL(None)
    for start, size in huge_pages(Path("/proc/self/maps").read_text()):
        # where the kernel cannot, or has no room, all stays as it is
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), MADV_COLLAPSE)


def huge_pages(maps: str) -> Iterator[tuple[int, int]]:
    """Starts and sizes of what may become such pages: writable memory that is of no file."""
    for line in maps.splitlines():
        place, rights, _, _, inode, *_ = line.split()
        first, last = (int(end, 16) for end in place.split("-"))
        start, end = -(-first // HUGE_PAGE) * HUGE_PAGE, last // HUGE_PAGE * HUGE_PAGE
        if rights.startswith("rw") and inode == "0" and start < end:
            yield start, end - start


def _serve(line: socket.socket) -> Order:
    """Forks; returns in the children, each with what it is to be."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(line, 1 << 20, 64)
        if not data:  # its owner has ended
            os._exit(0)
        if (between := os.fork()) == 0:
            if os.fork():
                os._exit(0)  # so that the child becomes one of who asked
            order = Order(**json.loads(data))
            try:
                _become(order, descriptors)
            except OSError:
                line.send(f"-{os.getpid()}".encode())
                os._exit(1)
            line.send(str(os.getpid()).encode())
            line.close()
            return order
        os.waitpid(between, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def _become(order: Order, descriptors: list[int]) -> None:
    while (parent := os.getppid()) != order.parent:
        if parent == 1:
            os._exit(1)
        time.sleep(0.0005)
    high = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, ABOVE) for number in descriptors]
    for number in descriptors:
        os.close(number)
    for number, target in zip(high, order.targets, strict=True):
        os.dup2(number, target)
        os.close(number)
    if order.session:
        os.setsid()
    os.chdir(order.directory)
    sys.path[0] = order.directory
    os.environ.clear()
    os.environ.update(order.environment)
    _rename(order.command, order.environment)
    sys.orig_argv[:] = order.command
    if not os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())  # type: ignore[union-attr]


def _rename(command: list[str], environment: dict[str, str]) -> None:
    """What /proc says of this process, in the room that the first command line has left."""
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    settings = [f"{key}={value}" for key, value in environment.items()]
    for first, words in ((45, command), (47, settings)):  # arg_start, env_start
        start, end = int(fields[first]), int(fields[first + 1])
        text = b"".join(os.fsencode(word) + b"\0" for word in words)[: end - start - 1]
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, text, len(text))


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


# In a process that has a nursery

_execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_exec = asyncio.create_subprocess_exec


class Child:
    """An `asyncio.subprocess.Process` whose pipes, if any, are nobody's."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self.pid, self.kill, self.terminate = popen.pid, popen.kill, popen.terminate
        self.send_signal = popen.send_signal
        self._popen = popen
        self._watched = asyncio.create_task(self._watch())

    @property
    def returncode(self) -> int | None:
        return self._popen.returncode

    async def wait(self) -> int:
        return await asyncio.shield(self._watched)

    async def _watch(self) -> int:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        descriptor = os.pidfd_open(self.pid)
        loop.add_reader(descriptor, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        return self._popen.wait()


@contextlib.contextmanager
def cold() -> Iterator[None]:
    """What this process starts meanwhile begins afresh, and so does what that starts."""
    _cold.append(True)
    try:
        yield
    finally:
        _cold.pop()


def children(process_id: int, recursive: bool = False) -> list[psutil.Process]:
    """Without nurseries."""
    found = psutil.Process(process_id).children(recursive)
    return [process for process in found if not _is_nursery(process)]


def _is_nursery(process: psutil.Process) -> bool:
    try:
        return START in process.cmdline()
    except psutil.Error:  # it has ended
        return False


def begin() -> None:
    """Have a nursery, unless this process came from one and has it still."""
    if not has_begun():
        install(Nursery())


def has_begun() -> bool:
    return subprocess.Popen._execute_child is not _execute  # type: ignore[attr-defined]


def install(nursery: Nursery) -> None:
    """Processes of Sluice that this one starts come from there, and others as ever."""

    def execute(popen: Any, args: Any, executable: Any, preexec_fn: Any, *more: Any) -> None:
        names = _execute.__code__.co_varnames[4 : _execute.__code__.co_argcount]
        given = dict(zip(names, more, strict=True))
        environment = dict(os.environ if given["env"] is None else given["env"])
        strange = preexec_fn or executable or any(given[name] not in (None, -1) for name in STRANGE)
        if not strange and nursery.takes(args, environment):
            streams = (given["p2cread"], given["c2pwrite"], given["errwrite"])
            passed = [fd for fd in given["pass_fds"] if fd > 2]
            order = Order(
                parent=os.getpid(),
                command=[os.fspath(word) for word in args],
                environment=environment,
                directory=os.path.abspath(given["cwd"] or os.curdir),
                session=given["start_new_session"],
                targets=[0, 1, 2, *passed],
            )
            own = [fd if fd != -1 else number for number, fd in enumerate(streams)]
            with contextlib.suppress(OSError):
                popen.pid = nursery.bear(order, [*own, *passed])
                popen._child_created = True
                popen._close_pipe_fds(*(given[name] for name in PIPES))
                return
        _execute(popen, args, executable, preexec_fn, *more)

    start = subprocess.Popen

    async def create(*command: Any, **options: Any) -> Any:
        environment = dict(options.get("env") or os.environ)
        piped = asyncio.subprocess.PIPE in options.values()
        if piped or not nursery.takes(command, environment):
            return await _exec(*command, **options)
        return Child(start(list(command), **options))

    subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]
    asyncio.create_subprocess_exec = create  # type: ignore[assignment]


STRANGE = ("gid", "gids", "uid", "umask", "process_group")
PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
