"""The only module that knows which accelerator this process runs on.

`SLUICE_DEVICE` chooses (auto, cpu, cuda, npu), and `SLUICE_SIDE_STREAMS=off` has copies wait for
one another and for what computes. torch is imported when a device is first asked for, so that
processes without torch may read names: `declared().visible_devices(...)`.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import psutil

from sluice.host_memory import give_back, peak_memory
from sluice.imports import uncollected
from sluice.shared_memory import MemoryHandle, ProcessIdentity, SharedMemoryError

if TYPE_CHECKING:
    import torch

DEVICE_VARIABLE = "SLUICE_DEVICE"
STREAMS_VARIABLE = "SLUICE_SIDE_STREAMS"
AUTOLOAD_VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"


LARGEST_KEPT = 32 << 20  # bytes; glibc takes no more
MOST_KEPT = 256 << 20  # of the end of an arena
EXPANDABLE = "expandable_segments:True"
MUCH_IN_PIECES = 1 / 16  # of a device's memory
_MOST_ALLOCATIONS = 1_000_000  # remembered of a device, the latest ones
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_NO_MEMORY = re.compile(r"out of memory|ALLOC_FAILED|DefaultCPUAllocator: (can't|not enough)")
_MALLOC_VARIABLES = frozenset(
    {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"}
)


class PlatformError(RuntimeError):
    """The accelerator asked for cannot be used; the message says what to do."""


@dataclass(frozen=True)
class MemoryStatistics:
    """Bytes on the current device; on the cpu of this process and this host."""

    allocated: int
    reserved: int
    peak: int
    free: int
    total: int


@dataclass(frozen=True)
class Platform:
    """One kind of device. `module` offers what differs only by the name of the torch module."""

    device_type: str  # torch device type
    collective: str  # torch.distributed backend
    visible_env: str  # variable that masks devices; empty on cpu
    # its matrix products of bfloat16 can be answered in float32, as they were summed
    has_wide_products: bool = False
    can_capture: bool = False  # launches, to be replayed as one
    profiled: tuple[str, ...] = ()  # what torch's profiler records beside the host
    # variables that tell torch's allocator of it how to allocate, that of today first
    allocator_envs: tuple[str, ...] = ()

    @property
    def module(self) -> ModuleType:
        """`torch.cpu`, `torch.cuda` or `torch.npu`: generators, streams, events and so on."""
        module: ModuleType = _torch().get_device_module(self.device_type)
        return module

    def device(self, local_rank: int | None = None) -> torch.device:
        """Returns the device of a local rank; of none, the one that is current in this thread."""
        index = self.module.current_device() if local_rank is None else local_rank
        return _torch().device(self.device_type, index)

    def set_device(self, local_rank: int = 0) -> None:
        """Make the device of `local_rank` the current one."""
        self.module.set_device(local_rank)

    def visible_devices(self, local_ranks: Sequence[int]) -> dict[str, str]:
        """Returns the environment in which a child sees only these of the devices visible here."""
        if not self.visible_env or os.environ.get(self.visible_env) == "":  # all are hidden
            return {}
        seen = [entry for entry in os.environ.get(self.visible_env, "").split(",") if entry]
        try:
            chosen = [seen[rank] if seen else str(rank) for rank in local_ranks]
        except IndexError:
            raise PlatformError(
                f"{self.visible_env}={','.join(seen)} shows {len(seen)} devices, "
                f"but local ranks {list(local_ranks)} were asked for"
            ) from None
        return {self.visible_env: ",".join(chosen)}

    def collective_ports(self, first: int, count: int) -> dict[str, str]:
        """Returns the environment that keeps collectives to `count` host ports from `first`."""
        del first, count  # NCCL and gloo take free ports by themselves
        return {}

    def answer_cuda(self, package: str) -> None:
        """Have `package`, which is written for CUDA alone and not imported yet, find this device.

        Raises PlatformError where that needs what is not installed.
        """
        del package  # it finds CUDA; on a CPU it is up to who imports it

    def synchronize(self) -> None:
        """Wait for all work queued on the current device."""
        self.module.synchronize()

    def profiler(self, *, stacks: bool, memory: bool) -> Any:
        """Returns a profiler of this thread and the device, not begun; see `torch.profiler`.

        stacks: with the Python lines of operations; memory: with what they allocate.
        """
        kinds = _torch().profiler.ProfilerActivity
        return _torch().profiler.profile(
            activities=[kinds.CPU, *(getattr(kinds, name) for name in self.profiled)],
            record_shapes=True,
            with_stack=stacks,
            profile_memory=memory,
        )

    def record_allocations(self) -> None:
        """Remember from now on who allocates the device's memory."""

    def write_allocations(self, path: Path) -> None:
        """Write who holds the device's memory; nothing where that is not known."""

    def forget_allocations(self) -> None:
        """Remember them no more."""

    def host_memory(self, size: int) -> torch.Tensor:
        """Returns uint8[size] of this host that the device copies to without a stop between."""
        return _torch().empty(size, dtype=_torch().uint8, pin_memory=True)

    def shareable_memory(self, size: int) -> torch.Tensor:
        """Returns uint8[size] of the device that `share` takes."""
        return _torch().empty(size, dtype=_torch().uint8, device=self.device_type)

    def share(self, memory: torch.Tensor) -> MemoryHandle:
        """Returns a handle of `shareable_memory`, by which one other process may open it.

        What is written to it must be there (`synchronize`) before others are told. Raises
        PlatformError where this device's memory cannot be shared.
        """
        storage = memory.untyped_storage()
        share = getattr(storage, f"_share_{self.device_type}_", None)
        if share is None:
            raise PlatformError(f"this torch cannot share memory of {self.device_type}")
        _, *parts = share()  # but for the device, which has another number elsewhere
        own, size = ProcessIdentity.own(), storage.nbytes()
        return MemoryHandle(own, self.device_type, self._device_id(), size, tuple(parts))

    def open_shared(self, handle: MemoryHandle) -> torch.Tensor:
        """Returns the memory of a handle, uint8; raises SharedMemoryError where it is gone."""
        handle.owner.check()
        if (handle.device_type, handle.device_id) != (self.device_type, self._device_id()):
            raise SharedMemoryError(
                f"it is memory of {handle.device_type} {handle.device_id}, and this process uses "
                f"{self.device_type} {self._device_id()}"
            )
        try:
            storage = self._open(handle)
        except (OSError, RuntimeError, TypeError, ValueError) as error:
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise SharedMemoryError(f"memory of process {handle.owner.process}: {why}") from error
        if storage.nbytes() < handle.size:
            raise SharedMemoryError(
                f"memory of process {handle.owner.process} has {storage.nbytes()} bytes, not "
                f"{handle.size}"
            )
        memory = _torch().empty(0, dtype=_torch().uint8, device=storage.device)
        shared: torch.Tensor = memory.set_(storage)[: handle.size]
        return shared

    def _open(self, handle: MemoryHandle) -> Any:
        opened = getattr(_torch().UntypedStorage, f"_new_shared_{self.device_type}", None)
        if opened is None:
            raise SharedMemoryError(f"this torch cannot share memory of {self.device_type}")
        return opened(self.module.current_device(), *handle.parts)

    def _device_id(self) -> str:
        """The current device, by a name that it has in all processes of the host."""
        properties = self.module.get_device_properties(self.module.current_device())
        return str(getattr(properties, "uuid", properties.name))

    def side_stream(self) -> Any:
        """Returns a stream for copies, which begins when all that is queued now is done.

        None where copies are to be plain ones: on a cpu, and where side streams are off.
        """
        if not has_side_streams():
            return None
        stream = self.module.Stream()
        stream.wait_stream(self.module.current_stream())
        return stream

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Has the block, on whatever thread, use a stream of `side_stream`."""
        if stream is None:
            return nullcontext()
        context: AbstractContextManager[object] = self.module.stream(stream)
        return context

    def begin_copy(self, into: torch.Tensor, source: torch.Tensor, stream: Any) -> Any:
        """Begins to copy on a stream of `side_stream`; returns the event of its end.

        One side is the device's, the other `host_memory`. Before anything reads `into`, or writes
        to either side, the host calls the event's `synchronize`, or the device `await_event`.
        """
        with self.on(stream):
            into.copy_(source, non_blocking=True)
            for tensor in (into, source):
                if tensor.device.type == self.device_type:  # given up, it is not used again before
                    tensor.record_stream(stream)
            event = self.module.Event()
            event.record(stream)
        return event

    def await_event(self, event: Any) -> None:
        """Has what is queued from here on begin behind an event; the host does not wait."""
        self.module.current_stream().wait_event(event)

    def capture_pool(self) -> Any:
        """Returns where what `capture` computes lies, for several of them that run in turns.

        It ends with the last of them: what is captured after that needs another one.
        """
        return None

    def capture(
        self, run: Callable[[], torch.Tensor], pool: Any
    ) -> tuple[torch.Tensor, Callable[[], None]]:
        """Records what `run` launches; returns its answer's memory, and what launches it again.

        A replay reads what `run` read where that lay, and fills the answer; before the first one
        it has no content. `run` may run several times, and must not wait for the device. Only
        where `can_capture`.
        """
        raise PlatformError(f"nothing is captured on {self.device_type}")

    def seed_all(self, seed: int) -> None:
        """Seed torch on the host and on every device."""
        _torch().manual_seed(seed)

    def memory(self) -> MemoryStatistics:
        """Reads the memory of the current device."""
        free, total = self.module.mem_get_info()
        return MemoryStatistics(
            allocated=self.module.memory_allocated(),
            reserved=self.module.memory_reserved(),
            peak=self.module.max_memory_allocated(),
            free=free,
            total=total,
        )

    def joining(self, full: MemoryStatistics) -> str:
        """What joins memory that lies in pieces, to be set in the environment of a process.

        Empty where little does, where it is set, and where there is no such thing. Once memory was
        asked for in vain, what is reserved and not in use lies between what is: the allocator has
        given back all else.
        """
        set_already = any(EXPANDABLE in os.environ.get(name, "") for name in self.allocator_envs)
        in_pieces = full.reserved - full.allocated
        if set_already or not self.allocator_envs or in_pieces < full.total * MUCH_IN_PIECES:
            return ""
        return f"{self.allocator_envs[0]}={EXPANDABLE}"

    def begin_peak(self) -> None:
        """Have `memory().peak` be of what comes from now on."""
        self.module.reset_peak_memory_stats()

    def release_memory(self) -> None:
        """Give cached blocks back to the driver and start a new peak."""
        self.module.empty_cache()
        self.begin_peak()

    def keep_memory(self) -> None:
        """Have what one step frees serve the next, by whatever has no cache of its own."""

    def describe(self) -> dict[str, str]:
        """Returns what the current device and the libraries under torch call themselves.

        `name` is always there; the others (toolkit, collectives, capability) where they exist.
        """
        return {"name": str(self.module.get_device_name())}


class _Cpu(Platform):
    def device(self, local_rank: int | None = None) -> torch.device:
        del local_rank  # all ranks of a host share it; no index, as tensors have none
        return _torch().device(self.device_type)

    def host_memory(self, size: int) -> torch.Tensor:
        return _torch().empty(size, dtype=_torch().uint8)

    def shareable_memory(self, size: int) -> torch.Tensor:
        storage = _torch().UntypedStorage._new_shared(size, device="cpu")
        memory: torch.Tensor = _torch().empty(0, dtype=_torch().uint8).set_(storage)
        return memory

    def share(self, memory: torch.Tensor) -> MemoryHandle:
        """By its file, which has no name and is found among those that this process has open."""
        storage = memory.untyped_storage()
        descriptor, size = storage._share_fd_cpu_()
        found = os.fstat(descriptor)
        parts = (descriptor, found.st_dev, found.st_ino)
        return MemoryHandle(ProcessIdentity.own(), self.device_type, "", size, parts)

    def _open(self, handle: MemoryHandle) -> Any:
        descriptor, device, inode = handle.parts
        own = os.open(
            f"/proc/{handle.owner.process}/fd/{int(descriptor)}", os.O_RDWR | os.O_CLOEXEC
        )
        try:
            found = os.fstat(own)
            if (found.st_dev, found.st_ino) != (device, inode) or found.st_size < handle.size:
                raise SharedMemoryError(
                    f"memory of process {handle.owner.process} is gone: it has given it up"
                )
            return _torch().UntypedStorage._new_shared_fd_cpu(own, handle.size)
        finally:
            os.close(own)

    def _device_id(self) -> str:
        return ""

    def side_stream(self) -> Any:
        return None

    def memory(self) -> MemoryStatistics:
        used, host = psutil.Process().memory_info().rss, psutil.virtual_memory()
        peak = max(used, peak_memory())
        return MemoryStatistics(used, used, peak, free=host.available, total=host.total)

    def begin_peak(self) -> None:
        """The kernel keeps the largest that a process has had."""

    def release_memory(self) -> None:
        give_back()

    def keep_memory(self) -> None:
        """Of glibc: it gives each large block back, and the kernel zeroes every page of the next.

        Nothing where the environment says how glibc is to allocate.
        """
        if _MALLOC_VARIABLES.isdisjoint(os.environ) and (
            mallopt := getattr(ctypes.CDLL(None), "mallopt", None)
        ):
            mallopt(_M_MMAP_THRESHOLD, LARGEST_KEPT)
            mallopt(_M_TRIM_THRESHOLD, MOST_KEPT)

    def describe(self) -> dict[str, str]:
        return {"name": self.device_type}


class _Cuda(Platform):
    def record_allocations(self) -> None:
        self.module.memory._record_memory_history(max_entries=_MOST_ALLOCATIONS)

    def write_allocations(self, path: Path) -> None:
        self.module.memory._dump_snapshot(str(path))

    def forget_allocations(self) -> None:
        self.module.memory._record_memory_history(enabled=None)

    def capture_pool(self) -> Any:
        return self.module.graph_pool_handle()

    def capture(
        self, run: Callable[[], torch.Tensor], pool: Any
    ) -> tuple[torch.Tensor, Callable[[], None]]:
        here, side = self.module.current_stream(), self.module.Stream()
        side.wait_stream(here)
        with self.module.stream(side):
            run()  # libraries settle what they do once
        here.wait_stream(side)
        graph = self.module.CUDAGraph()
        # other threads load weights meanwhile
        with self.module.graph(graph, pool=pool, capture_error_mode="thread_local"):
            answer = run()
        return answer, graph.replay

    def describe(self) -> dict[str, str]:
        found = super().describe()
        found["capability"] = ".".join(str(part) for part in self.module.get_device_capability())
        found["toolkit"] = str(_torch().version.cuda)
        if _torch().distributed.is_nccl_available():
            version = importlib.import_module("torch.cuda.nccl").version()
            found[self.collective] = ".".join(str(part) for part in version)
        return found


class _Npu(Platform):
    def profiler(self, *, stacks: bool, memory: bool) -> Any:
        """By the vendor's, which has the interface of torch's without its sums."""
        own = importlib.import_module("torch_npu").profiler
        return own.profile(
            activities=[own.ProfilerActivity.CPU, own.ProfilerActivity.NPU],
            record_shapes=True,
            with_stack=stacks,
            profile_memory=memory,
        )

    def answer_cuda(self, package: str) -> None:
        """By MindSpeed, the vendor's adapter, for the whole process."""
        if importlib.util.find_spec("mindspeed") is None:
            raise PlatformError(
                f"{package} runs on NPUs with MindSpeed, which is not installed: install its "
                f"release for this {package} (https://gitcode.com/Ascend/MindSpeed)"
            )
        if any(name == package or name.startswith(f"{package}.") for name in sys.modules):
            raise PlatformError(f"{package} was imported before MindSpeed could adapt it")
        importlib.import_module("torch_npu")
        importlib.import_module("mindspeed.megatron_adaptor")

    def collective_ports(self, first: int, count: int) -> dict[str, str]:
        """HCCL's listening ports: processes that share a host or an NPU need ranges apart."""
        if not (first >= 1024 and count >= 1 and first + count <= 65536):
            raise PlatformError(f"no {count} ports from {first}: 1024 to 65535 may be used")
        ports = f"{first}-{first + count - 1}"
        return {"HCCL_HOST_SOCKET_PORT_RANGE": ports, "HCCL_NPU_SOCKET_PORT_RANGE": ports}


CPU = _Cpu("cpu", "gloo", "")
CUDA = _Cuda(
    "cuda",
    "nccl",
    "CUDA_VISIBLE_DEVICES",
    has_wide_products=True,
    can_capture=True,
    profiled=("CUDA",),
    allocator_envs=("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),  # the first since torch 2.9
)
NPU = _Npu(
    "npu",
    "hccl",
    "ASCEND_RT_VISIBLE_DEVICES",
    allocator_envs=("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
)
_PLATFORMS = {platform.device_type: platform for platform in (CPU, CUDA, NPU)}


@cache
def current() -> Platform:
    """Returns the platform of SLUICE_DEVICE; auto is the first accelerator found, else the cpu.

    Raises PlatformError when the device asked for, or one that is installed, does not work.
    """
    wanted = _wanted()
    has_side_streams()
    if wanted in (NPU.device_type, "auto") and _npu_count(required=wanted != "auto"):
        return NPU
    if wanted in (CUDA.device_type, "auto") and _cuda_count(required=wanted != "auto"):
        return CUDA
    return CPU


def declared() -> Platform:
    """Returns the platform by name alone, without torch: of SLUICE_DEVICE, or by device files."""
    wanted = _wanted()
    if wanted != "auto":
        return _PLATFORMS[wanted]
    if any(Path("/dev").glob("davinci[0-9]*")):
        return NPU
    return CUDA if any(Path("/dev").glob("nvidia[0-9]*")) else CPU


def is_out_of_memory(error: BaseException) -> bool:
    """Whether there was no memory for what was asked for, of a device or of the host.

    torch's allocators of hosts and of some devices, and its libraries, have no type for it.
    """
    if isinstance(error, MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    typed = getattr(sys.modules.get("torch"), "OutOfMemoryError", ())
    return isinstance(error, typed) or _NO_MEMORY.search(str(error)) is not None


def explain_memory(error: BaseException, full: MemoryStatistics) -> str:
    """Says what was asked for in vain, in the allocator's words, and how full the device was."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    gib = {name: size / 2**30 for name, size in asdict(full).items()}
    return (
        f"{lines[0].rpartition('Allocator: ')[2]} (of {gib['total']:.1f} GiB {gib['free']:.1f} are "
        f"free; of this process {gib['reserved']:.1f} are reserved, {gib['allocated']:.1f} of them "
        "in use)"
    )


def has_side_streams() -> bool:
    """Whether copies may run beside what computes. Raises PlatformError for another word."""
    wanted = os.environ.get(STREAMS_VARIABLE) or "on"
    if wanted not in ("on", "off"):
        raise PlatformError(f"{STREAMS_VARIABLE} must be on or off; it is {wanted!r}")
    return wanted == "on"


def _wanted() -> str:
    wanted = os.environ.get(DEVICE_VARIABLE) or "auto"
    if wanted not in (*_PLATFORMS, "auto"):
        raise PlatformError(
            f"{DEVICE_VARIABLE} must be auto, {', '.join(_PLATFORMS)}; it is {wanted!r}"
        )
    return wanted


def _npu_count(*, required: bool) -> int:
    if importlib.util.find_spec("torch_npu") is None:
        if required:
            raise PlatformError(
                f"{DEVICE_VARIABLE}=npu needs torch-npu of the release of this torch "
                f"({_torch().__version__}): pip install 'sluice[npu]'"
            )
        return 0
    torch = _torch()
    try:
        importlib.import_module("torch_npu")  # registers torch.npu
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise PlatformError(
            f"torch-npu is installed but does not load ({error}). Install CANN and run "
            "`source /usr/local/Ascend/ascend-toolkit/set_env.sh` before starting, check that "
            f"torch-npu and torch are of one release, or set {DEVICE_VARIABLE}=cpu. Until then "
            f"a plain `import torch` fails too, except with {AUTOLOAD_VARIABLE}=0."
        ) from error
    count = torch.npu.device_count() if torch.npu.is_available() else 0
    return _counted(NPU, count, "see `npu-smi info`", required=required)


def _cuda_count(*, required: bool) -> int:
    torch = _torch()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    hint = f"torch is built for CUDA {torch.version.cuda}; see `nvidia-smi`"
    return _counted(CUDA, count, hint, required=required)


def _counted(platform: Platform, count: int, hint: str, *, required: bool) -> int:
    if required and not count:
        mask = os.environ.get(platform.visible_env)
        raise PlatformError(
            f"{DEVICE_VARIABLE}={platform.device_type}, but no such device is visible "
            f"({platform.visible_env} is {'not set' if mask is None else repr(mask)}; {hint})"
        )
    return count


@cache
def _torch() -> ModuleType:
    """Import torch without its vendor plug-ins, whose failure would make torch unusable."""
    with _without_autoload(), uncollected():
        try:
            return importlib.import_module("torch")
        except ImportError as error:
            raise PlatformError(
                f"torch does not load ({error}): pip install 'sluice[reference]'"
            ) from error


@contextmanager
def _without_autoload() -> Iterator[None]:
    """A failing vendor plug-in would leave torch half imported; it is loaded by name instead."""
    if "torch" in sys.modules:
        yield
        return
    before = os.environ.get(AUTOLOAD_VARIABLE)
    os.environ[AUTOLOAD_VARIABLE] = "0"
    try:
        yield
    finally:
        os.environ.pop(AUTOLOAD_VARIABLE)
        if before is not None:
            os.environ[AUTOLOAD_VARIABLE] = before
