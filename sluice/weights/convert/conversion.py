"""`convert`: a checkpoint in one format to a directory in another, all or nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from sluice.weights.checkpoint import INDEX_NAME
from sluice.weights.convert.control import Control
from sluice.weights.convert.errors import CancelledConversionError, TargetExistsError
from sluice.weights.convert.execute import (
    Execution,
    full_disk_as,
    locked_target,
    publish,
    staging_of,
)
from sluice.weights.convert.known import RECORD
from sluice.weights.convert.options import ConvertOptions
from sluice.weights.convert.pieces import Files
from sluice.weights.convert.plan import Plan, plan_conversion
from sluice.weights.convert.stored import CONFIG, METADATA
from sluice.weights.convert.torch_dist_target import COMMON
from sluice.weights.convert.work import Report
from sluice.weights.digest import digest_file

MADE = (METADATA, CONFIG, COMMON, INDEX_NAME)  # small files that only we write


@dataclass(frozen=True)
class Result:
    """A finished conversion. `digests` are xxh3-128 by the names under which parts are stored."""

    target: Path
    size: int
    largest_group: int
    report: Report
    digests: Mapping[str, str]


def convert(
    source: Path, target: Path, options: ConvertOptions, control: Control | None = None
) -> Result:
    """Convert `source` to the new directory `target`.

    A run that was killed is taken up by the next one with the same arguments; a run that was
    stopped leaves nothing; a run that is done is not done again. Raises OptionError,
    TargetExistsError, BusyTargetError, DiskFullError, CancelledConversionError,
    TensorDigestError and what else `sluice.weights.errors` has.
    """
    control = control or Control()
    options.check()
    with locked_target(target), Files() as files:
        plan = plan_conversion(source, options, files)
        fingerprint = _fingerprint(source, options, plan)
        if target.exists():
            return _finished(target, plan, fingerprint)
        staging = staging_of(target)
        run = Execution(plan, staging, files, control, workers=options.workers, sync=options.sync)
        try:
            with full_disk_as(target, lambda: plan.work.size):
                run.run(fingerprint)
                record = _record(source, options, plan, fingerprint)
                record["digests"] = dict(sorted(run.digests.items()))
                record["files"] = {
                    name: digest_file(staging / name)[1]
                    for name in MADE
                    if (staging / name).is_file()
                }
                publish(staging, target, record)
        except CancelledConversionError:
            if not control.keep.is_set():
                shutil.rmtree(staging, ignore_errors=True)
            raise
    return _result(target, plan, run.digests)


def validate(source: Path, target: Path, options: ConvertOptions) -> Result:
    """What `convert` would do, from names and shapes alone. Raises what it would, but for bytes."""
    options.check()
    if target.exists():
        raise TargetExistsError(target)
    with Files() as files:
        return _result(target, plan_conversion(source, options, files), {})


def _result(target: Path, plan: Plan, digests: Mapping[str, str]) -> Result:
    work = plan.work
    return Result(target, work.size, work.largest_group, work.report, dict(digests))


def _finished(target: Path, plan: Plan, fingerprint: str) -> Result:
    """The result of a run that ended before. Raises TargetExistsError if it was another."""
    try:
        record = json.loads((target / RECORD).read_bytes())
        same, digests = record["fingerprint"] == fingerprint, dict(record["digests"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TargetExistsError(target) from error
    if not same:
        raise TargetExistsError(target)
    return _result(target, plan, digests)


def _fingerprint(source: Path, options: ConvertOptions, plan: Plan) -> str:
    """Another one where the source, the options or the layout of the files differ."""
    hasher = xxhash.xxh3_128()
    inputs = {piece.path for g in plan.work.groups for t in g.tasks for piece in t.content.pieces}
    for directory in (source, options.model, options.origin):
        found = [] if directory is None else directory.iterdir()
        # Hidden ones are, but for one, marks of conversions whose targets lie in there too.
        inputs |= {path for path in found if path.name[0] != "." or path.name == METADATA}
    for path in sorted(path for path in inputs if path is not None and path.is_file()):
        stat = path.stat()
        hasher.update(json.dumps([str(path.resolve()), stat.st_size, stat.st_mtime_ns]).encode())
    hasher.update(json.dumps(_described(options), sort_keys=True).encode())
    for file in plan.work.files:
        hasher.update(json.dumps([file.name, file.size]).encode())
    return hasher.hexdigest()


def _described(options: ConvertOptions) -> dict[str, object]:
    values = asdict(options)
    for name in ("workers", "sync"):
        del values[name]
    return {k: str(v.resolve()) if isinstance(v, Path) else v for k, v in values.items()}


def _record(
    source: Path, options: ConvertOptions, plan: Plan, fingerprint: str
) -> dict[str, object]:
    """What the target says of its own making; its digests are checked when it is a source."""
    return {
        "format": 1,
        "source": source.name,
        "fingerprint": fingerprint,
        "options": _described(options),
        "report": asdict(plan.work.report),
    }
