"""ConverterService: decodes a request, runs it in a thread, encodes the result."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from google.longrunning import operations_pb2
from google.protobuf import message as pb_message

from services.converter import metrics, wire
from services.converter.config import ConverterConfig
from services.converter.errors import typed_errors
from sluice.api.converter.v1 import converter_service_pb2 as pb
from sluice.api.converter.v1 import converter_service_pb2_grpc as pb_grpc
from sluice.runtime import conversions
from sluice.runtime.server import Server
from sluice.weights.convert.control import Control
from sluice.weights.convert.conversion import convert, validate
from sluice.weights.convert.verify import compare

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
        wire.write_progress(self.control.progress, self.metadata)
        return self.metadata


class ConverterServicer(pb_grpc.ConverterServiceServicer):
    def __init__(self, config: ConverterConfig, server: Server) -> None:
        self._config, self._server = config, server
        self._paths = wire.Paths(config.roots)
        self._free = asyncio.Semaphore(config.max_running)
        self._threads = ThreadPoolExecutor(config.max_running, thread_name_prefix="conversion")
        self._jobs: OrderedDict[str, _Job] = OrderedDict()

    def close(self) -> None:
        """Let go of the threads; the server has stopped before."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def ConvertCheckpoint(
        self, request: pb.ConvertCheckpointRequest, context: Any
    ) -> operations_pb2.Operation:
        source = self._paths.existing("source", request.source)
        target = self._paths.inside("target", request.target)
        options = wire.options_from_proto(
            request, self._paths, workers=self._config.workers, sync=self._config.durable
        )
        with typed_errors():
            options.check()
        job = _Job("convert", _metadata(request.source, request.target))

        def work() -> pb.ConvertCheckpointResponse:
            if request.validate_only:
                return conversions.result_to_proto(validate(source, target, options))
            return conversions.result_to_proto(convert(source, target, options, job.control))

        return self._start(request, job, work)

    async def VerifyCheckpoint(
        self, request: pb.VerifyCheckpointRequest, context: Any
    ) -> operations_pb2.Operation:
        first = self._paths.existing("first", request.first)
        second = self._paths.existing("second", request.second)
        model = self._paths.existing("model", request.model) if request.model else None
        job = _Job("verify", _metadata(request.first, request.second))

        def work() -> pb.VerifyCheckpointResponse:
            return conversions.comparison_to_proto(compare(first, second, job.control, model=model))

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
        """A repeated request joins the job that it started before."""
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
        """Run in the place that was taken, which is free once the thread has ended."""
        start = time.perf_counter()
        with metrics.RUNNING.track_inprogress():
            running = asyncio.get_running_loop().run_in_executor(
                self._threads, partial(_typed, work)
            )
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
        """However often its caller was cancelled; what the thread raised may concern nobody."""
        self._free.release()
        if not running.cancelled():
            running.exception()


def _typed(work: Callable[[], M]) -> M:
    with typed_errors():
        return work()


def _metadata(source: str, target: str) -> pb.ConversionMetadata:
    metadata = pb.ConversionMetadata(source=source, target=target, state=pb.CONVERSION_STATE_QUEUED)
    metadata.create_time.GetCurrentTime()
    return metadata


def _has_ended(job: _Job) -> bool:
    return job.metadata.state not in (
        pb.CONVERSION_STATE_QUEUED,
        pb.CONVERSION_STATE_RUNNING,
    )
