"""`sluice convert` and `sluice verify`: here, or at a converter with `--address`."""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from google.longrunning import operations_pb2
from google.protobuf import message as pb_message
from pydantic import Field
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sluice.address import ServerAddress
from sluice.api.converter.v1 import converter_service_pb2 as pb
from sluice.api.converter.v1 import converter_service_pb2_grpc as pb_grpc
from sluice.client import Client, error_from_status
from sluice.config import ConfigError, ProcessConfig, load_config
from sluice.logs import printable_lines
from sluice.place import Place, StorePlace, directory_of, place_of
from sluice.runtime.processes import allow_open_files
from sluice.runtime.security import SecurityConfig
from sluice.runtime.wire import (
    comparison_to_proto,
    conversion_to_proto,
    convert_options_to_proto,
    duration_of,
    place_to_proto,
)
from sluice.weights.convert.options import OptionError, PlacedOptions

if TYPE_CHECKING:
    from sluice.weights.convert.work import Control, ConversionProgress

M = TypeVar("M", bound=pb_message.Message)
T = TypeVar("T")
FLAGS = "[--key value ...]"
SHOWN = 8  # names of a list in the report


SCRATCH = (
    "Of this host, with room for what comes from a bucket and goes there. Default: the system's."
)


class ConvertConfig(ProcessConfig, PlacedOptions):
    """Flags of `sluice convert SRC DST`, directories or s3:// URLs."""

    scratch: Path | None = Field(None, description=SCRATCH)
    validate_only: bool = False
    report: Path | None = Field(None, description="Write the whole report there, as JSON.")
    address: ServerAddress = Field("", description="host:port of a converter that does it instead.")
    security: SecurityConfig = SecurityConfig()


class VerifyConfig(ProcessConfig):
    """What `sluice verify FIRST SECOND` takes besides."""

    model: StorePlace | None = Field(
        None, description="Directory or s3:// URL with config.json, if neither has one."
    )
    scratch: Path | None = Field(None, description=SCRATCH)
    address: ServerAddress = Field("", description="host:port of a converter that does it instead.")
    security: SecurityConfig = SecurityConfig()


class CheckpointError(Exception):
    """Checkpoints cannot be converted, or are not the same."""


async def convert(arguments: Sequence[str]) -> None:
    """Convert a checkpoint and print what became of its tensors."""
    source, target, flags = _two_places(arguments)
    config = load_config(ConvertConfig, flags, f"sluice convert SRC DST {FLAGS}")
    if config.report is not None:
        _check_report(config.report)
    answer = await (_convert_there if config.address else _convert_here)(config, source, target)
    if config.report is not None:
        config.report.write_text(json.dumps(_plain(answer), indent=1) + "\n")
    _print_report(answer, config.validate_only)


async def verify(arguments: Sequence[str]) -> None:
    """Compare two checkpoints. Raises CheckpointError."""
    first, second, flags = _two_places(arguments)
    config = load_config(VerifyConfig, flags, f"sluice verify FIRST SECOND {FLAGS}")
    answer = await (_verify_there if config.address else _verify_here)(config, first, second)
    for name, reason in sorted(answer.different.items()):
        _say(f"{name}: {reason}")
    for where, names in ((first, answer.only_first), (second, answer.only_second)):
        for name in names:
            _say(f"{name}: only in {where}")
    if not answer.equal:
        raise CheckpointError(f"{first} and {second} differ")
    _say(f"equal: {answer.equal_count} tensors, {answer.byte_count} bytes")


def _check_report(path: Path) -> None:
    """Raises ConfigError where it cannot be written: before the work, not after it."""
    try:
        was_there = path.exists()
        path.open("a").close()
        if not was_there:
            path.unlink()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"report: {str(path)[:200]!r}: {why}") from None


async def _convert_here(
    config: ConvertConfig, source: Place, target: Place
) -> pb.ConvertCheckpointResponse:
    from sluice.weights.convert.work import Control

    _check_here(source, config.model, config.origin)
    control = Control()

    def work() -> pb.ConvertCheckpointResponse:
        from sluice.weights.convert.placed import convert_places

        result = convert_places(
            source,
            target,
            config,
            control,
            scratch=config.scratch,
            validate_only=config.validate_only,
        )
        return conversion_to_proto(result)

    return await _in_thread(work, control)


async def _verify_here(
    config: VerifyConfig, first: Place, second: Place
) -> pb.VerifyCheckpointResponse:
    from sluice.weights.convert.work import Control

    _check_here(first, second, config.model)
    control = Control()

    def work() -> pb.VerifyCheckpointResponse:
        from sluice.weights.convert.placed import compare_places

        comparison = compare_places(
            first, second, control, model=config.model, scratch=config.scratch
        )
        return comparison_to_proto(comparison)

    return await _in_thread(work, control)


def _check_here(*places: Place | None) -> None:
    for place in places:
        directory = None if place is None else directory_of(place)
        try:
            is_there = directory is None or directory.is_dir()
        except OSError:  # a name longer than any can be
            is_there = False
        if not is_there:
            raise CheckpointError(f"{str(directory)[:300]} is no directory")


async def _in_thread(work: Callable[[], T], control: Control) -> T:
    """Run `work`, showing its progress; who cancels this stops it. Raises CheckpointError."""
    from sluice.weights.errors import WeightStoreError
    from sluice.weights.rules.packing import PartitionError

    allow_open_files()  # all of a checkpoint's
    running = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        while not running.done():
            await asyncio.wait([running], timeout=1.0)
            _show(control.progress)
    except asyncio.CancelledError:  # a signal
        control.stop.set()
        await asyncio.wait([running])
        running.exception()  # which it has stopped with
        raise
    try:
        return await running
    except (OptionError, PartitionError, WeightStoreError, OSError) as error:
        raise CheckpointError(str(error)) from error


async def _convert_there(
    config: ConvertConfig, source: Place, target: Place
) -> pb.ConvertCheckpointResponse:
    _check_there(config.scratch)
    try:
        config.check()
    except OptionError as error:
        raise CheckpointError(str(error)) from error
    request = convert_options_to_proto(config)
    request.request_id = str(uuid.uuid4())
    request.source, request.target = place_to_proto(source), place_to_proto(target)
    request.validate_only = config.validate_only
    async with ConverterClient(config.address, config.security) as client:
        operation = await client.convert(request)
        return await _follow(client, operation, pb.ConvertCheckpointResponse())


async def _verify_there(
    config: VerifyConfig, first: Place, second: Place
) -> pb.VerifyCheckpointResponse:
    _check_there(config.scratch)
    request = pb.VerifyCheckpointRequest(
        request_id=str(uuid.uuid4()),
        first=place_to_proto(first),
        second=place_to_proto(second),
        model=place_to_proto(config.model),
    )
    async with ConverterClient(config.address, config.security) as client:
        operation = await client.verify(request)
        return await _follow(client, operation, pb.VerifyCheckpointResponse())


async def _follow(client: ConverterClient, operation: Any, response: M) -> M:
    metadata = pb.ConversionMetadata()
    async for now in client.follow(operation):
        now.metadata.Unpack(metadata)
        _show_bytes(metadata.byte_count, metadata.total_byte_count)
        if now.done:
            now.response.Unpack(response)
    return response


def _two_places(arguments: Sequence[str]) -> tuple[Place, Place, list[str]]:
    if "--help" in arguments or "-h" in arguments:
        return Path(), Path(), ["--help"]
    if len(arguments) < 2 or any(path.startswith("-") for path in arguments[:2]):
        raise ConfigError("two directories or s3:// URLs are needed, before any flag")
    try:
        first, second = map(place_of, arguments[:2])
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return first, second, list(arguments[2:])


def _check_there(scratch: Path | None) -> None:
    if scratch is not None:
        raise ConfigError("scratch: is of this host; a converter has its own")


def _show(progress: ConversionProgress) -> None:
    left = progress.seconds_left
    _show_bytes(progress.done_bytes, progress.total_bytes, left)


def _show_bytes(done: int, total: int, seconds_left: float | None = None) -> None:
    if not sys.stderr.isatty() or not total:
        return
    left = "" if seconds_left is None else f", {seconds_left:.0f} s left"
    print(f"\r{done / 2**20:.0f} of {total / 2**20:.0f} MiB{left}   ", end="", file=sys.stderr)


def _plain(answer: pb.ConvertCheckpointResponse) -> dict[str, object]:
    report = answer.report
    return {
        "target": answer.target,
        "bytes": answer.byte_count,
        "converted": list(report.converted),
        "copied": list(report.copied),
        "skipped": dict(report.skipped),
        "conflicting": dict(report.conflicting),
        "notes": list(report.notes),
        "digests": dict(answer.digests),
    }


def _print_report(answer: pb.ConvertCheckpointResponse, validate_only: bool) -> None:
    report = answer.report
    table = Table("", "tensors", "which")
    rows = {
        "converted": list(report.converted),
        "copied": list(report.copied),
        "skipped": [f"{name} ({reason})" for name, reason in sorted(report.skipped.items())],
        "conflicting": [f"{name} ({text})" for name, text in sorted(report.conflicting.items())],
    }
    for kind, names in rows.items():
        shown = "" if kind == "converted" else "\n".join(names[:SHOWN])
        more = "" if len(names) <= SHOWN or kind == "converted" else f"\nand {len(names) - SHOWN}"
        table.add_row(kind, str(len(names)), Text(printable_lines(shown + more)))
    Console().print(table)
    for note in report.notes:
        _say(note)
    verb = "would hold" if validate_only else "holds"
    _say(f"{answer.target} {verb} {answer.byte_count} bytes")


def _say(text: str) -> None:
    """Print it, where names of others' tensors do no harm."""
    Console().print(printable_lines(text), highlight=False, markup=False, soft_wrap=True)


class ConverterClient(Client):
    """ConverterService. Refusals raise RemoteError."""

    def __init__(self, address: str, security: SecurityConfig | None = None) -> None:
        super().__init__(address, security)
        self.stub = pb_grpc.ConverterServiceStub(self.channel)

    async def convert(self, request: pb.ConvertCheckpointRequest) -> operations_pb2.Operation:
        """Start a conversion, or join the one of this request."""
        return await self._call(self.stub.ConvertCheckpoint, request)

    async def verify(self, request: pb.VerifyCheckpointRequest) -> operations_pb2.Operation:
        """Start a comparison, or join the one of this request."""
        return await self._call(self.stub.VerifyCheckpoint, request)

    async def list(self) -> list[pb.Conversion]:
        """List what waits, runs and has ended, oldest first."""
        response = await self._call(self.stub.ListConversions, pb.ListConversionsRequest())
        return list(response.conversions)

    async def cancel(self, operation: str) -> None:
        """Stop a conversion; nothing is left of it."""
        request = operations_pb2.CancelOperationRequest(name=operation)
        await self._call(self._operations.CancelOperation, request)

    async def follow(
        self, operation: operations_pb2.Operation, *, seconds: float = 1.0
    ) -> AsyncIterator[operations_pb2.Operation]:
        """Yield the operation now and every `seconds` until it is done. Raises RemoteError."""
        timeout = duration_of(seconds)
        while True:
            if operation.HasField("error"):
                raise error_from_status(operation.error)
            yield operation
            if operation.done:
                return
            wait = operations_pb2.WaitOperationRequest(name=operation.name, timeout=timeout)
            operation = await self._call(self._operations.WaitOperation, wait)
