"""Committed versions as every kind of store describes them, and what follows from that alone."""

from __future__ import annotations

import builtins
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sluice.weights.errors import ManifestError, VersionNotFoundError, WeightStoreError
from sluice.weights.manifest import Manifest


@dataclass(frozen=True, kw_only=True)
class StoredVersion:
    """With a `base` it holds what changed since that version; `checkout` makes the whole."""

    version: int
    digest: str
    parent: int | None = None
    step: int = 0
    created: str = ""
    base: int | None = None


def fields_of(manifest: Manifest) -> dict[str, Any]:
    """The fields of a StoredVersion."""
    names = ("version", "digest", "parent", "step", "created", "base")
    return {name: getattr(manifest, name) for name in names}


V = TypeVar("V", bound=StoredVersion)


class Versions(ABC, Generic[V]):
    """What a store answers about its versions once it can list and describe them."""

    location: str  # as a user names the store

    @abstractmethod
    def versions(self) -> Sequence[int]:
        """The numbers of the committed versions, ascending; reads no manifest."""

    @abstractmethod
    def get(self, version: int) -> V:
        """A committed version; raises VersionNotFoundError, ManifestError or FileDigestError."""

    def chain(self, version: int) -> Sequence[int]:
        """The versions that `version` is made of, itself first, up to one that needs no base.

        Raises like `get`.
        """
        versions = [version]
        while (base := self.get(versions[-1]).base) is not None:
            if base >= versions[-1]:
                raise ManifestError(f"version {versions[-1]} has the base {base}, no older one")
            versions.append(base)
        return versions

    def list(self) -> builtins.list[V]:
        """The committed versions, ascending."""
        records = []
        for version in self.versions():
            try:
                records.append(self.get(version))
            except VersionNotFoundError:
                continue  # removed since
        return records

    def latest(self) -> V:
        """The version committed with the highest number; raises VersionNotFoundError if none."""
        for version in reversed(self.versions()):
            try:
                return self.get(version)
            except VersionNotFoundError:
                continue
        raise VersionNotFoundError(None)

    def _chain_or_itself(self, version: int) -> Sequence[int]:
        try:
            return self.chain(version)
        except WeightStoreError:  # damaged: nobody can read it, whatever is kept
            return [version]
