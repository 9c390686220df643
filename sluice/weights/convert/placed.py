"""Conversions and comparisons between places: directories, and prefixes of a bucket.

What comes from a bucket and goes there, and the whole of a version that holds only what changed,
lies in a room of this host meanwhile:

<scratch>/sluice-convert-<uid>/<digest>/    of one conversion by its places and options; one that
                                            was killed is gone on with from there
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from sluice.durable import scratch as scratch_directory
from sluice.place import Place, directory_of
from sluice.weights.checkout import check_out
from sluice.weights.convert.adapters import is_adapter
from sluice.weights.convert.conversion import Result, convert, locked_target, validate
from sluice.weights.convert.options import ConvertOptions, PlacedOptions
from sluice.weights.convert.verify import Comparison, compare
from sluice.weights.convert.work import Control
from sluice.weights.errors import (
    BusyTargetError,
    InvalidCheckpointError,
    TakenPlaceError,
    TargetExistsError,
)
from sluice.weights.manifest import (
    MANIFEST_NAME,
    Manifest,
    decode_manifest,
    digest_bytes,
    encode_manifest,
)
from sluice.weights.store import WeightStore

PREFIX = "sluice-convert-"
LEFT_SECONDS = 7 * 86400.0  # after which nobody goes on with a conversion that was killed
CLAIM = "claim"  # of a place in a bucket; while it is there a later run goes on
NAME = 80  # characters of the last part of a URL


def convert_places(
    source: Place,
    target: Place,
    options: PlacedOptions,
    control: Control,
    *,
    scratch: Path | None = None,
    validate_only: bool = False,
) -> Result:
    """Convert what is in one place to another, which has to be free.

    Files of a bucket lie below `scratch` meanwhile, or the system's directory for temporary ones.
    Raises what `convert` raises, and BucketCheckpointError, ObjectsError and OSError.
    """
    options.check()
    directory, places = directory_of(target), (source, target, options.model, options.origin)
    if validate_only:
        with _passing_room(scratch, *places) as room:
            if directory is None:
                from sluice.weights.convert.places import check_free  # nobody else needs obstore

                check_free(str(target))
            here = _Here(room, control)
            planned = validate(
                here.existing(source), directory or room / "none", here.options(options)
            )
            return replace(planned, target=target)
    if not _need_room(places):
        here = _Here(Path(), control)
        return convert(here.existing(source), directory or Path(), here.options(options), control)
    with _kept_room(source, target, options, scratch, control) as room:
        here = _Here(room, control)
        if directory is not None:
            return convert(here.existing(source), directory, here.options(options), control)
        return _convert_to_bucket(source, str(target), options, here, control)


def _convert_to_bucket(
    source: Place, url: str, options: PlacedOptions, here: _Here, control: Control
) -> Result:
    from sluice.weights.convert.places import claimed  # nobody else needs obstore

    with claimed(url, here.room / CLAIM, control) as there:
        read, local = here.existing(source), here.options(options)
        written = here.room / "target" / _last_name(url)
        try:
            result = convert(read, written, local, control)
        except TargetExistsError as error:  # of an earlier run; the source has changed since
            if there.is_whole and not is_adapter(read):
                raise TakenPlaceError(url, "a conversion of an earlier source") from error
            shutil.rmtree(written)
            result = convert(read, written, local, control)
        there.put(written, control)
    return replace(result, target=url)


def compare_places(
    first: Place,
    second: Place,
    control: Control,
    *,
    model: Place | None = None,
    scratch: Path | None = None,
) -> Comparison:
    """Compare what is in two places. Raises what `compare` and `convert_places` raise."""
    with _passing_room(scratch, first, second, model) as room:
        here = _Here(room, control)
        one, other = here.existing(first), here.existing(second)
        return compare(one, other, control, model=here.directory(model))


class _Here:
    """Places as directories of this host: themselves, or what was fetched of a bucket."""

    def __init__(self, room: Path, control: Control) -> None:
        self.room, self._control = room, control
        self._fetched: dict[str, Path] = {}

    def existing(self, place: Place) -> Path:
        """Return a directory with what is in a place."""
        if (directory := directory_of(place)) is not None:
            return self._whole(directory, str(directory.absolute()))
        from sluice.weights.convert.places import fetch  # nobody else needs obstore

        url = str(place)
        if url not in self._fetched:
            # by its name: a record of the conversion has it
            folder = self.room / digest_bytes(url.encode()) / _last_name(url)
            fetched = fetch(url, folder, self._control)
            self._fetched[url] = self._whole(fetched, url)
        return self._fetched[url]

    def _whole(self, directory: Path, place: str) -> Path:
        """A directory with the whole of what is in one: of a version that holds only what changed
        since another of its store, both of them."""
        manifest = _manifest_of_changes(directory)
        if manifest is None:
            return directory
        store, _, name = place.rstrip("/").rpartition("/versions/")
        if name != f"{manifest.version:08d}":
            raise InvalidCheckpointError(
                f"{place!r} holds only what changed since version {manifest.base}, which is found "
                "from its own place in the store, <store>/versions/<number>, alone"
            )
        whole = self.room / "whole" / digest_bytes(place.encode()) / _last_name(place)
        said = encode_manifest(replace(manifest, base=None, deltas={}, inherited=()))
        if (whole / MANIFEST_NAME).is_file() and (whole / MANIFEST_NAME).read_bytes() == said:
            return whole
        shutil.rmtree(whole, ignore_errors=True)  # of a conversion that was killed
        whole.mkdir(parents=True)
        self._control.check()
        check_out(WeightStore(store, scratch=self.room), manifest.version, whole)
        (whole / MANIFEST_NAME).write_bytes(said)
        return whole

    def directory(self, place: Place | None) -> Path | None:
        """The same of a place that need not be given."""
        return None if place is None else self.existing(place)

    def options(self, options: PlacedOptions) -> ConvertOptions:
        values = {name: getattr(options, name) for name in ConvertOptions.model_fields}
        values |= {name: self.directory(values[name]) for name in ("model", "origin")}
        return ConvertOptions(**values)


def _need_room(places: Iterable[Place | None]) -> bool:
    return any(_needs_room(place) for place in places if place is not None)


def _needs_room(place: Place) -> bool:
    directory = directory_of(place)
    return directory is None or _manifest_of_changes(directory) is not None


def _manifest_of_changes(directory: Path) -> Manifest | None:
    """The manifest of a version of a store that holds only what changed; None of all others."""
    try:
        data = (directory / MANIFEST_NAME).read_bytes()
    except OSError:  # a name longer than any can be, too
        return None
    manifest = decode_manifest(data)
    return None if manifest.base is None else manifest


def _passing_room(
    scratch: Path | None, *places: Place | None
) -> contextlib.AbstractContextManager[Path]:
    """Have a directory for the block, where one of the places needs any."""
    if _need_room(places):
        return scratch_directory(PREFIX, scratch)
    return contextlib.nullcontext(Path())


@contextlib.contextmanager
def _kept_room(
    source: Place, target: Place, options: PlacedOptions, scratch: Path | None, control: Control
) -> Iterator[Path]:
    """Have the directory of a conversion for the block, with what a killed one has left there.

    It is gone at the end, unless a later run is to go on with it. Raises BusyTargetError.
    """
    fields = PlacedOptions.model_fields.keys() - {"workers", "model", "origin"}
    places = [source, target, options.model, options.origin]
    wanted = [*map(_absolute, places), options.model_dump(mode="json", include=fields)]
    rooms = _rooms(scratch)
    room = rooms / digest_bytes(json.dumps(wanted).encode())
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked_target(room))
        except BusyTargetError as error:
            raise BusyTargetError(target) from error
        room.mkdir(exist_ok=True)
        try:
            yield room
        finally:
            if not (control.keep.is_set() or (room / CLAIM).exists()):
                shutil.rmtree(room, ignore_errors=True)


def _rooms(scratch: Path | None) -> Path:
    """Return the directory of all rooms of this user, without those that are left for good.

    Raises OSError where it is another user's: then so were the files in it.
    """
    root = Path(tempfile.gettempdir()) if scratch is None else scratch
    rooms = root / f"{PREFIX}{os.getuid()}"
    rooms.mkdir(mode=0o700, exist_ok=True)
    found = rooms.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"{rooms} is no directory of this user's own")
    for other in rooms.iterdir():
        with contextlib.suppress(BusyTargetError, FileNotFoundError):
            if other.name[0] == "." or other.stat().st_mtime > time.time() - LEFT_SECONDS:
                continue
            with locked_target(other):
                shutil.rmtree(other, ignore_errors=True)
    return rooms


def _absolute(place: Place | None) -> str | None:
    if place is None:
        return None
    directory = directory_of(place)
    return str(place if directory is None else directory.absolute())


def _last_name(url: str) -> str:
    return url.rpartition("/")[2][-NAME:]
