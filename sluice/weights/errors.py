"""What can be wrong with stored weights. Services turn these into their own typed errors."""

from __future__ import annotations

from pathlib import Path

from sluice.place import Place

LONGEST = 2000  # characters of a message: names come from files, and may be of any length


class WeightStoreError(Exception):
    """Root of the errors of `sluice.weights`."""

    def __str__(self) -> str:
        text = super().__str__()
        return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


class VersionNotFoundError(WeightStoreError):
    """No such committed version: never made, not finished, or removed."""

    def __init__(self, version: int | None) -> None:
        self.version = version
        named = "the store holds no version" if version is None else f"no version {version}"
        super().__init__(named)


class VersionExistsError(WeightStoreError):
    """The version was committed before."""

    def __init__(self, version: int) -> None:
        self.version = version
        super().__init__(f"version {version} is already committed")


class StagingLostError(WeightStoreError):
    """The staging directory is gone: committed, aborted or swept."""

    def __init__(self, version: int) -> None:
        self.version = version
        super().__init__(f"the staging directory of version {version} is gone")


class StoppedError(WeightStoreError):
    """A file was being made that nobody wants any more."""

    def __init__(self, file_name: str) -> None:
        self.file_name = file_name
        super().__init__(f"{file_name!r} is not wanted any more")


class InvalidCheckpointError(WeightStoreError):
    """A directory is no HF checkpoint in safetensors, or a file of it is malformed."""


class DamagedFileError(InvalidCheckpointError):
    """What is in a file cannot be what was written: it is cut short, or makes no sense."""

    def __init__(self, file_name: str, detail: str) -> None:
        self.file_name = file_name
        super().__init__(f"{file_name!r} {detail}")


class ManifestError(WeightStoreError):
    """A manifest is malformed or does not carry its own digest."""


class DuplicateTensorError(WeightStoreError):
    """Two shards hold a tensor of one name."""

    def __init__(self, name: str, files: tuple[str, str]) -> None:
        self.name, self.files = name, files
        super().__init__(f"tensor {name!r} is in both {files[0]!r} and {files[1]!r}")


class DuplicateFileError(WeightStoreError):
    """Two writers, or two companions, claim one file name."""

    def __init__(self, file_name: str) -> None:
        self.file_name = file_name
        super().__init__(f"file {file_name!r} is given twice")


class MissingTensorError(WeightStoreError):
    """Tensors that the model has are in no shard."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        super().__init__(f"{len(names)} tensors are missing: {', '.join(names[:8])}")


class UnexpectedTensorError(WeightStoreError):
    """Shards hold tensors that the model has not, or with another dtype or shape."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        super().__init__(f"{len(names)} tensors are not expected: {', '.join(names[:8])}")


class MissingFileError(WeightStoreError):
    """A file that a shard or a manifest names is absent or has another size.

    place: the directory that lacks it, where several are read.
    """

    def __init__(self, file_name: str, detail: str = "is missing", place: str = "") -> None:
        self.file_name = file_name
        super().__init__(f"file {file_name!r} {detail}" + (f" in {place!r}" if place else ""))


class TensorDigestError(WeightStoreError):
    """The bytes of a tensor are not those that were written."""

    def __init__(self, name: str, expected: str, actual: str, place: str = "") -> None:
        self.name, self.expected, self.actual = name, expected, actual
        where = f" of {place!r}" if place else ""
        super().__init__(f"tensor {name!r}{where} has digest {actual}, not {expected}")


class FileDigestError(WeightStoreError):
    """The bytes of a file (header, companion or manifest) are not those that were written."""

    def __init__(self, file_name: str, expected: str, actual: str) -> None:
        self.file_name, self.expected, self.actual = file_name, expected, actual
        super().__init__(f"file {file_name!r} has digest {actual}, not {expected}")


class InvalidAdapterError(WeightStoreError):
    """An adapter, or what describes one, is malformed, or needs what is unknown here."""


class OtherBaseError(WeightStoreError):
    """An adapter was trained on another base than the one it is put on."""

    def __init__(self, expected: str, actual: str) -> None:
        self.expected, self.actual = expected, actual
        super().__init__(f"the adapter is of a base of digest {expected}, not {actual}")


class MixedKindsError(WeightStoreError):
    """A store of whole versions is to hold an adapter, or one of adapters a whole version."""

    def __init__(self, version: int, newest: int, *, is_adapter: bool) -> None:
        self.version, self.newest = version, newest
        kinds = ("whole weights", "an adapter")
        super().__init__(
            f"version {version} would be {kinds[is_adapter]}, but version {newest} before it is "
            f"{kinds[not is_adapter]}: a run publishes one of both"
        )


class TransferBrokenError(WeightStoreError):
    """A group of a transfer does not work any more: a member is gone, late, or never came."""

    def __init__(self, group: str, cause: str) -> None:
        self.group, self.cause = group, cause
        super().__init__(f"transfer group {group!r}: {cause}")


class TargetExistsError(WeightStoreError):
    """There is something where the conversion should write."""

    def __init__(self, target: Path) -> None:
        self.target = target
        super().__init__(f"{target.name or str(target)!r} exists already")


class BusyTargetError(WeightStoreError):
    """Another conversion writes the same target."""

    def __init__(self, target: Place) -> None:
        self.target = target
        super().__init__(f"another conversion writes {str(target).rpartition('/')[2]!r}")


class BucketCheckpointError(WeightStoreError):
    """A place in a bucket holds no whole checkpoint, or is not free for one; the message says
    which."""


class NoCheckpointError(BucketCheckpointError):
    """Nothing lies in a place of a bucket."""

    def __init__(self, url: str) -> None:
        self.url = url
        super().__init__(f"{url} holds no objects")


class TakenPlaceError(BucketCheckpointError):
    """Something lies in a bucket where the conversion should write."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url
        super().__init__(f"{url} is not empty: it holds {key}")


class ClaimedPlaceError(BucketCheckpointError):
    """Another conversion writes there in a bucket, or was killed elsewhere."""

    def __init__(self, url: str) -> None:
        self.url = url
        super().__init__(
            f"{url}: another conversion writes there, or was killed; then ask for the same one "
            "again where it ran, or remove what lies there"
        )


class MixedTypesError(InvalidCheckpointError):
    """Tensors of several types would become one, which has one type; `names` are the odd ones."""

    def __init__(self, key: str, names: tuple[str, ...]) -> None:
        self.names = names
        listed = ", ".join(names[:8])
        super().__init__(
            f"{key!r} would be made of tensors of several types; unlike most of them are: {listed}"
        )


class DiskFullError(WeightStoreError):
    """The target does not fit where it should be written."""

    def __init__(self, target: Path, needed: int, detail: str) -> None:
        self.target, self.needed = target, needed
        super().__init__(f"{target.name!r} needs {needed} bytes: {detail}")


class CancelledConversionError(WeightStoreError):
    """The caller stopped the conversion; nothing is left of it."""


class ForbiddenObjectError(InvalidCheckpointError):
    """The metadata of a checkpoint names something that is not data."""

    def __init__(self, name: str) -> None:
        super().__init__(f".metadata names {name!r}, which is no description of tensors")


class UncoveredTensorError(InvalidCheckpointError):
    """The chunks of a checkpoint do not make up one of its tensors."""

    def __init__(self, key: str, detail: str) -> None:
        self.key = key
        super().__init__(f"tensor {key!r}: {detail}")


class ConflictingTensorError(InvalidCheckpointError):
    """Two tensors that should be one differ."""

    def __init__(self, name: str, other: str) -> None:
        self.name, self.other = name, other
        super().__init__(f"{name!r} and {other!r} should be equal but differ")
