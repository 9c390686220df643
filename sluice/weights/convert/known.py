"""Digests that the writer of a checkpoint left, so that damage since then is found.

They are in the manifest of a published version, or in the record of a conversion.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from sluice.weights.convert.hf import HfSource
from sluice.weights.convert.pieces import Content
from sluice.weights.convert.torch_dist_source import TorchDistSource
from sluice.weights.convert.work import Check
from sluice.weights.digest import digest_file
from sluice.weights.errors import (
    DamagedFileError,
    FileDigestError,
    InvalidCheckpointError,
    MissingFileError,
    MissingTensorError,
)
from sluice.weights.manifest import MANIFEST_NAME, read_manifest
from sluice.weights.shards import verify_companions

RECORD = "conversion.json"


def check_files(source: Path) -> None:
    """The small files of a checkpoint are those that were written, where their digests are known.

    Of a conversion that is what no person edits. Raises FileDigestError, MissingFileError or
    InvalidCheckpointError.
    """
    if (source / MANIFEST_NAME).is_file():
        manifest = read_manifest(source)
        if manifest.base is not None:
            raise InvalidCheckpointError(
                f"{source.name!r} holds only what changed since version {manifest.base}"
            )
        verify_companions(source, manifest)
        return
    for name, digest in _read_record(source).get("files", {}).items():
        try:
            _, actual = digest_file(source / name)
        except FileNotFoundError as error:
            raise MissingFileError(name) from error
        if actual != digest:
            raise FileDigestError(name, digest, actual)


def find_checks(source: HfSource | TorchDistSource) -> tuple[Check, ...]:
    """What can be checked of a checkpoint; nothing where nobody left digests.

    Raises MissingTensorError where a tensor with a digest is gone, or FileDigestError.
    """
    known = _known_digests(source.directory)
    if not known:
        return ()
    stored = dict(_stored(source, known))
    if lost := sorted(set(known) - set(stored)):
        raise MissingTensorError(tuple(lost))
    return tuple(Check(name, stored[name], digest) for name, digest in known.items())


def _known_digests(source: Path) -> dict[str, str]:
    if (source / MANIFEST_NAME).is_file():
        return {name: entry.digest for name, entry in read_manifest(source).tensors.items()}
    return _read_record(source).get("digests", {})


def _read_record(source: Path) -> dict[str, dict[str, str]]:
    """The digests in the record of a conversion; nothing where there is none."""
    try:
        record = json.loads((source / RECORD).read_bytes())
        return {
            kind: {str(name): str(digest) for name, digest in found.items()}
            for kind, found in (("digests", record["digests"]), ("files", record.get("files", {})))
        }
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFileError(RECORD, f"is no record of digests: {error!r}") from error


def _stored(
    source: HfSource | TorchDistSource, known: Mapping[str, str]
) -> Iterator[tuple[str, Content]]:
    """Tensors as they are stored, by the names that digests are kept under."""
    if isinstance(source, TorchDistSource):
        yield from source.chunks()
        return
    for found in source.stored().values():
        name, content = found.name, found.content
        if f"{name}[0]" not in known:
            yield name, content
            continue
        for index in range(content.shape[0]):
            yield f"{name}[{index}]", content.rows(index, index + 1)
