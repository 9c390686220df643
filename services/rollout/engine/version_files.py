"""What every backend asks of a version directory before it reads weights; no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.rollout.errors import DigestMismatchError, UnfitWeightsError
from sluice.weights.checkpoint import describe_shard, shard_paths
from sluice.weights.errors import (
    DamagedFileError,
    FileDigestError,
    ManifestError,
    MissingFileError,
    TensorDigestError,
    WeightStoreError,
)
from sluice.weights.manifest import MANIFEST_NAME, Manifest, digest_version, read_manifest


def damage(error: WeightStoreError) -> DigestMismatchError | None:
    """The engine's error for what is not as it was published; None for errors of other kinds."""
    match error:
        case TensorDigestError():
            names = {"tensor": error.name, "expected": error.expected, "actual": error.actual}
        case FileDigestError():
            names = {"file": error.file_name, "expected": error.expected, "actual": error.actual}
        case DamagedFileError() | MissingFileError():
            names = {"file": error.file_name}
        case ManifestError():
            names = {"file": MANIFEST_NAME}
        case _:
            return None
    return DigestMismatchError(str(error), **names)


@contextmanager
def reading(version: int) -> Iterator[None]:
    """Gives what is wrong with the files of a version the engine's own errors.

    DigestMismatchError names the tensor or file, UnfitWeightsError what cannot be read.
    """
    try:
        yield
    except WeightStoreError as error:
        raise damage(error) or _unfit(version, error) from error
    except OSError as error:
        raise _unfit(version, error) from error


def _unfit(version: int, error: Exception) -> UnfitWeightsError:
    return UnfitWeightsError(f"version {version} cannot be read: {error}")


def checked_manifest(directory: Path, version: int, digest: str) -> Manifest:
    """The manifest, if it is of this version and digest.

    Raises DigestMismatchError, UnfitWeightsError, WeightStoreError or OSError.
    """
    manifest = read_manifest(directory)
    if manifest.digest != digest:
        raise DigestMismatchError(
            f"version {version} has digest {manifest.digest}, not {digest}",
            version=version,
            expected=digest,
            actual=manifest.digest,
        )
    if manifest.version != version:
        raise UnfitWeightsError(
            f"{directory.name!r} holds version {manifest.version}, not {version}", version=version
        )
    return manifest


def directory_digest(directory: Path) -> str:
    """The version digest of a plain HF directory. Raises WeightStoreError or OSError."""
    if (directory / MANIFEST_NAME).is_file():
        return read_manifest(directory).digest
    shards = [describe_shard(path) for path in shard_paths(directory)]
    return digest_version(
        (name, tensor.dtype, tensor.shape, tensor.digest)
        for shard in shards
        for name, tensor in shard.tensors.items()
    )
