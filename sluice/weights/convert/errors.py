"""What can go wrong in a conversion, beyond the errors of stored weights."""

from __future__ import annotations

from pathlib import Path

from sluice.weights.errors import InvalidCheckpointError, WeightStoreError


class TargetExistsError(WeightStoreError):
    """There is something where the conversion should write."""

    def __init__(self, target: Path) -> None:
        self.target = target
        super().__init__(f"{target.name!r} exists already")


class BusyTargetError(WeightStoreError):
    """Another conversion writes the same target."""

    def __init__(self, target: Path) -> None:
        self.target = target
        super().__init__(f"another conversion writes {target.name!r}")


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
