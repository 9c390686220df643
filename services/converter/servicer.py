"""ConverterService: conversions and comparisons in threads, followed as operations."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
from google.longrunning import operations_pb2
from google.protobuf import message as pb_message
from pydantic import Field

from services.converter import metrics
from sluice.api.converter.v1 import converter_service_pb2 as pb
from sluice.api.converter.v1 import converter_service_pb2_grpc as pb_grpc
from sluice.config import ProcessConfig
from sluice.place import Place, StorePlace, directory_of, place_of
from sluice.runtime import wire
from sluice.runtime.errors import (
    AlreadyExistsError,
    DataLossError,
    InvalidFieldError,
    NotFoundError,
    ServiceError,
)
from sluice.runtime.server import Server, ServerConfig
from sluice.weights.convert.options import OptionError
from sluice.weights.convert.work import Control, ConversionProgress
from sluice.weights.errors import (
    LONGEST,
    BusyTargetError,
    ClaimedPlaceError,
    ConflictingTensorError,
    DamagedFileError,
    DiskFullError,
    FileDigestError,
    ManifestError,
    MissingTensorError,
    MixedTypesError,
    NoCheckpointError,
    TakenPlaceError,
    TargetExistsError,
    TensorDigestError,
    UnexpectedTensorError,
    WeightStoreError,
)
from sluice.weights.rules.packing import PartitionError


class ConverterConfig(ProcessConfig):
    """Converter service: checkpoints between HF and torch_dist."""

    roots: list[StorePlace] = Field(
        min_length=1,
        description="Directories and s3:// URLs below which checkpoints are read and written.",
    )
    scratch: Path | None = Field(
        None,
        description="Directory with room for what comes from a bucket and goes there; a converter "
        "that is started again goes on from it. Default: the system's.",
    )
    max_running: int = Field(1, ge=1, description="Conversions at a time; others wait.")
    workers: int = Field(2, ge=1, description="Threads of one conversion.")
    durable: bool = Field(True, description="Files are on the disk before a target appears.")
    server: ServerConfig = ServerConfig()


class UnfitSourceError(ServiceError):
    """A source is not what the conversion needs; metadata names tensors."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "UNFIT_CHECKPOINT"


class TargetBusyError(ServiceError):
    """Another conversion writes the same target."""

    code = grpc.StatusCode.ABORTED
    reason = "TARGET_BUSY"


class UnusablePathError(ServiceError):
    """The operating system refuses: no permission, no directory, a failing disk."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "UNUSABLE_PATH"


class DiskTooSmallError(ServiceError):
    """The target does not fit."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "DISK_FULL"


@contextmanager
def typed_errors() -> Iterator[None]:
    """Raise errors of conversions as those of the service."""
    try:
        yield
    except OptionError as error:
        raise InvalidFieldError("request", str(error)) from error
    except PartitionError as error:
        raise InvalidFieldError("layout", str(error)) from error
    except TargetExistsError as error:
        raise AlreadyExistsError("checkpoint", error.target.name) from error
    except TakenPlaceError as error:
        raise AlreadyExistsError("checkpoint", error.url) from error
    except NoCheckpointError as error:
        raise NotFoundError("checkpoint", error.url) from error
    except BusyTargetError as error:
        raise TargetBusyError(str(error), target=str(error.target)) from error
    except ClaimedPlaceError as error:
        raise TargetBusyError(str(error), target=error.url) from error
    except DiskFullError as error:
        raise DiskTooSmallError(str(error), needed=error.needed) from error
    except TensorDigestError as error:
        metrics.DIGEST_FAILURES.inc()
        raise DataLossError(str(error), tensor=error.name[:LONGEST]) from error
    except (FileDigestError, DamagedFileError) as error:
        metrics.DIGEST_FAILURES.inc()
        raise DataLossError(str(error), file=error.file_name) from error
    except ManifestError as error:
        metrics.DIGEST_FAILURES.inc()
        raise DataLossError(str(error), file="manifest.json") from error
    except (MissingTensorError, MixedTypesError, UnexpectedTensorError) as error:
        tensors = ",".join(error.names[:64])[:LONGEST]
        raise UnfitSourceError(str(error), tensors=tensors) from error
    except ConflictingTensorError as error:
        names = f"{error.name},{error.other}"[:LONGEST]
        raise UnfitSourceError(str(error), tensors=names) from error
    except WeightStoreError as error:
        raise UnfitSourceError(str(error)) from error
    except OSError as error:
        raise UnusablePathError(str(error), file=error.filename or "") from error


class Roots:
    """Directories and prefixes of buckets; nothing outside of them is touched, links followed."""

    def __init__(self, roots: Sequence[Place]) -> None:
        found = [(root, directory_of(root)) for root in roots]
        self._directories = [path.resolve() for _, path in found if path is not None]
        self._prefixes = [f"{root}/" for root, path in found if path is None]

    def existing(self, field: str, text: str) -> Place:
        """Read a place with something in it; a bucket is asked later.

        Raises InvalidFieldError, NotFoundError and UnusablePathError.
        """
        place = self.inside(field, text)
        directory = directory_of(place)
        if directory is not None and not directory.is_dir():
            raise NotFoundError("checkpoint", text)
        return place

    def inside(self, field: str, text: str) -> Place:
        """Raises InvalidFieldError and UnusablePathError."""
        try:
            place = place_of(text)
        except ValueError as error:
            raise InvalidFieldError(field, str(error)) from error
        directory = directory_of(place)
        if directory is None:
            is_below = str(place).startswith(tuple(self._prefixes))
        elif text and directory.is_absolute():
            with typed_errors():  # of names that are too long
                place = directory = directory.resolve()
                directory.exists()
            is_below = any(root in directory.parents for root in self._directories)
        else:
            raise InvalidFieldError(field, "is no absolute path and no s3:// URL")
        if not is_below:
            raise InvalidFieldError(field, "is not below a root of this converter")
        return place


def write_progress(progress: ConversionProgress, metadata: pb.ConversionMetadata) -> None:
    """Bring `metadata` up to date."""
    metadata.byte_count, metadata.total_byte_count = progress.done_bytes, progress.total_bytes
    metadata.tensor_count = progress.done_tensors
    metadata.total_tensor_count = progress.total_tensors
    metadata.resumed_byte_count = progress.resumed_bytes
    metadata.ClearField("remaining")
    left = progress.seconds_left
    if left is not None and metadata.state == pb.CONVERSION_STATE_RUNNING:
        metadata.remaining.CopyFrom(wire.duration_of(left))


M = TypeVar("M", bound=pb_message.Message)
REMEMBERED = 256
STOP_SECONDS = 60.0  # for a thread to come to its next piece


@dataclass(eq=False)
class _Job:
    """A conversion or comparison and how far it is."""

    kind: str
    metadata: pb.ConversionMetadata
    control: Control = field(default_factory=Control)

    def progress(self) -> pb.ConversionMetadata:
        write_progress(self.control.progress, self.metadata)
        return self.metadata


class ConverterServicer(pb_grpc.ConverterServiceServicer):
    def __init__(self, config: ConverterConfig, server: Server) -> None:
        self._config, self._server = config, server
        self._roots = Roots(config.roots)
        self._free = asyncio.Semaphore(config.max_running)
        self._threads = ThreadPoolExecutor(config.max_running, thread_name_prefix="conversion")
        self._jobs: OrderedDict[str, _Job] = OrderedDict()

    def close(self) -> None:
        """Let go of the threads; the server has stopped before."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def ConvertCheckpoint(
        self, request: pb.ConvertCheckpointRequest, context: Any
    ) -> operations_pb2.Operation:
        source = self._roots.existing("source", request.source)
        target = self._roots.inside("target", request.target)
        options = wire.convert_options_from_proto(
            request, self._roots.existing, workers=self._config.workers, sync=self._config.durable
        )
        with typed_errors():
            options.check()
        job = _Job("convert", _metadata(request.source, request.target))

        def work() -> pb.ConvertCheckpointResponse:
            from sluice.weights.convert.placed import convert_places

            result = convert_places(
                source,
                target,
                options,
                job.control,
                scratch=self._config.scratch,
                validate_only=request.validate_only,
            )
            return wire.conversion_to_proto(result)

        return self._start(request, job, work)

    async def VerifyCheckpoint(
        self, request: pb.VerifyCheckpointRequest, context: Any
    ) -> operations_pb2.Operation:
        first = self._roots.existing("first", request.first)
        second = self._roots.existing("second", request.second)
        model = self._roots.existing("model", request.model) if request.model else None
        scratch = self._config.scratch
        job = _Job("verify", _metadata(request.first, request.second))

        def work() -> pb.VerifyCheckpointResponse:
            from sluice.weights.convert.placed import compare_places

            comparison = compare_places(first, second, job.control, model=model, scratch=scratch)
            return wire.comparison_to_proto(comparison)

        return self._start(request, job, work)

    async def ListConversions(
        self, request: pb.ListConversionsRequest, context: Any
    ) -> pb.ListConversionsResponse:
        return pb.ListConversionsResponse(
            conversions=[
                pb.Conversion(operation=name, metadata=job.progress())
                for name, job in self._jobs.items()
            ]
        )

    def _start(
        self, request: pb_message.Message, job: _Job, work: Callable[[], M]
    ) -> operations_pb2.Operation:
        """Start a job; a repeated request joins the one that it started before."""
        started = []

        async def run() -> M:
            return await self._run(job, work)

        def begin() -> Any:
            started.append(job)
            return run()

        operation = self._server.operations.start(job.kind, request, begin, job.progress)
        if started:
            self._jobs[operation.name] = job
            self._jobs.move_to_end(operation.name)
            ended = [name for name, other in self._jobs.items() if _has_ended(other)]
            for name in ended[: max(0, len(self._jobs) - REMEMBERED)]:
                del self._jobs[name]
        return operation

    async def _run(self, job: _Job, work: Callable[[], M]) -> M:
        state = pb.CONVERSION_STATE_FAILED
        try:
            with self._server.waits.waiting(
                f"a free place to {job.kind}", on=[job.metadata.target]
            ):
                await self._free.acquire()
            job.metadata.state = pb.CONVERSION_STATE_RUNNING
            answer = await self._in_thread(job, work)
            state = pb.CONVERSION_STATE_SUCCEEDED
            return answer
        except asyncio.CancelledError:
            state = pb.CONVERSION_STATE_CANCELLED
            raise
        finally:
            job.metadata.state = state
            outcome = pb.ConversionState.Name(state).rpartition("_")[2].lower()
            metrics.CONVERSIONS.labels(job.kind, outcome).inc()

    async def _in_thread(self, job: _Job, work: Callable[[], M]) -> M:
        """Run `work` in a thread; the place that was acquired is given back when it ends."""
        start = time.perf_counter()
        with metrics.RUNNING.track_inprogress():
            typed = typed_errors()(work)
            running = asyncio.get_running_loop().run_in_executor(self._threads, typed)
            running.add_done_callback(self._leave_place)
            try:
                return await asyncio.shield(running)
            except asyncio.CancelledError:
                if self._server.stopping.is_set():  # a later process goes on with it
                    job.control.keep.set()
                job.control.stop.set()
                await asyncio.wait([running], timeout=STOP_SECONDS)
                raise
            finally:
                progress = job.control.progress
                metrics.SECONDS.labels(job.kind).observe(time.perf_counter() - start)
                metrics.BYTES.labels(job.kind).inc(progress.done_bytes - progress.resumed_bytes)
                metrics.RESUMED_BYTES.inc(progress.resumed_bytes)

    def _leave_place(self, running: asyncio.Future[Any]) -> None:
        """Give the place back, however often its caller was cancelled."""
        self._free.release()
        if not running.cancelled():
            running.exception()


def _metadata(source: str, target: str) -> pb.ConversionMetadata:
    metadata = pb.ConversionMetadata(source=source, target=target, state=pb.CONVERSION_STATE_QUEUED)
    metadata.create_time.GetCurrentTime()
    return metadata


def _has_ended(job: _Job) -> bool:
    return job.metadata.state not in (
        pb.CONVERSION_STATE_QUEUED,
        pb.CONVERSION_STATE_RUNNING,
    )
