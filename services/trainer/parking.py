"""Tensors that leave the device while others use it: their bytes wait on the host."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from sluice import platform
from sluice.durable import write_all


@dataclass(frozen=True)
class HeldTensors:
    """What a backend holds on the device; tensors may share their memory.

    gradients: those gathered since the last step, which are zeros or none right after it.
    """

    state: Sequence[torch.Tensor]
    gradients: Sequence[torch.Tensor] = ()


class ParkingError(RuntimeError):
    """Bytes that waited are not those that were parked."""


class Parking(ABC):
    """Where bytes of a device wait, in the order in which they were put; gone with the process."""

    @property
    def device_type(self) -> str:
        """Of the device."""
        return platform.current().device_type

    @abstractmethod
    def put(self, storage: torch.UntypedStorage) -> None:
        """Take a copy. Raises OSError where there is no room."""

    @abstractmethod
    def free(self, storage: torch.UntypedStorage) -> None:
        """Give up the memory of a storage, which stays what its tensors lie on."""

    @abstractmethod
    def reserve(self, storage: torch.UntypedStorage, size: int) -> None:
        """Give a storage its memory again, of whatever content."""

    @abstractmethod
    def take(self, storage: torch.UntypedStorage) -> None:
        """Fill a storage with what was put first and not taken. Raises OSError or ParkingError."""

    @abstractmethod
    def close(self) -> None:
        """Give up the room."""


class HostParking(Parking):
    """Memory of the host that the device copies to without a stop between."""

    def __init__(self) -> None:
        self._waiting: list[torch.Tensor] = []

    def put(self, storage: torch.UntypedStorage) -> None:
        host = platform.current().host_memory(storage.nbytes())
        host.copy_(_bytes_of(storage), non_blocking=True)
        self._waiting.append(host)

    def free(self, storage: torch.UntypedStorage) -> None:
        platform.current().synchronize()  # copies are done
        storage.resize_(0)

    def reserve(self, storage: torch.UntypedStorage, size: int) -> None:
        storage.resize_(size)

    def take(self, storage: torch.UntypedStorage) -> None:
        _bytes_of(storage).copy_(self._waiting.pop(0))

    def close(self) -> None:
        self._waiting.clear()


class FileParking(Parking):
    """A file without a name, for a device that is the host itself: the disk takes the bytes.

    Nothing else can open it, and nothing is left of it when this process ends, however it does.
    Pages are given back to the system where they lie, so that no address changes. What a tensor has
    of pages that it shares stays.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._file: Any = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115
        self._digests: list[bytes] = []
        self._taken = 0

    def put(self, storage: torch.UntypedStorage) -> None:
        view = _memory_of(storage)
        self._digests.append(xxhash.xxh3_128_digest(view))
        try:
            write_all(self._file, view)
        except OSError as error:
            error.filename = str(self._directory)  # the file itself has no name to tell
            raise

    def free(self, storage: torch.UntypedStorage) -> None:
        page, address = mmap.PAGESIZE, storage.data_ptr()
        first, end = -(-address // page) * page, (address + storage.nbytes()) // page * page
        if end > first and ctypes.CDLL(None, use_errno=True).madvise(
            ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED
        ):
            raise OSError(ctypes.get_errno(), "madvise")

    def reserve(self, storage: torch.UntypedStorage, size: int) -> None:
        pass  # a page comes back when it is written

    def take(self, storage: torch.UntypedStorage) -> None:
        view, count = _memory_of(storage), 0
        while count < len(view) and (
            read := os.preadv(self._file.fileno(), [view[count:]], self._taken)
        ):
            count, self._taken = count + read, self._taken + read
        if count < len(view) or xxhash.xxh3_128_digest(view) != self._digests.pop(0):
            raise ParkingError(f"parked tensors are damaged ({count} of {len(view)} bytes read)")

    def close(self) -> None:
        self._file.close()


class ParkedTensors:
    """Memory of tensors that is not on the device until `restore`.

    The tensors stay what they are, and all views of them, but for their elements.
    """

    def __init__(
        self,
        kept: Sequence[torch.UntypedStorage],
        cleared: Sequence[torch.UntypedStorage],
        parking: Parking,
    ) -> None:
        self._kept = [(storage, storage.nbytes()) for storage in kept]
        self._cleared = [(storage, storage.nbytes()) for storage in cleared]
        self._parking = parking

    @classmethod
    def park(
        cls, kept: Iterable[torch.Tensor], cleared: Iterable[torch.Tensor], parking: Parking
    ) -> ParkedTensors:
        """Move `kept` to the parking; `cleared` are zeros when they come back.

        What is not on the device of the parking stays where it is. All is as before where that
        raises OSError.
        """
        storages = _storages(kept, parking.device_type)
        found = _storages(cleared, parking.device_type)
        rest = [storage for key, storage in found.items() if key not in storages]
        parked = cls(list(storages.values()), rest, parking)
        try:
            for storage in storages.values():
                parking.put(storage)
        except BaseException:
            parking.close()
            raise
        for storage in (*storages.values(), *rest):
            parking.free(storage)
        return parked

    @property
    def nbytes(self) -> int:
        """Bytes that left the device."""
        return sum(size for _, size in (*self._kept, *self._cleared))

    def restore(self) -> None:
        """Take the memory back, with what was in it. After an error the state is undefined.

        Raises OSError, ParkingError, or RuntimeError where the device has no room.
        """
        for storage, size in self._kept:
            self._parking.reserve(storage, size)
            self._parking.take(storage)
        for storage, size in self._cleared:
            self._parking.reserve(storage, size)
            _bytes_of(storage).zero_()
        self._parking.close()


def create_parking(directory: Path) -> Parking:
    """Return where bytes of the device wait; `directory` is for a device that is the host."""
    on_host = platform.current().device_type == "cpu"
    return FileParking(directory) if on_host else HostParking()


def _storages(tensors: Iterable[torch.Tensor], device_type: str) -> dict[int, torch.UntypedStorage]:
    """Return what tensors of a device lie on, each once."""
    own = [tensor for tensor in tensors if tensor.device.type == device_type]
    found = {t.untyped_storage()._cdata: t.untyped_storage() for t in own}
    return {key: storage for key, storage in found.items() if storage.nbytes()}


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]


def _memory_of(storage: torch.UntypedStorage) -> memoryview:
    """Return the memory of a storage of the host."""
    whole = (ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())
    return memoryview(whole).cast("B")
