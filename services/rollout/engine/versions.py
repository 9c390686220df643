"""Versions of weights as an engine takes them: checked on disk, then ready to serve. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from services.rollout.engine.interface import EngineStatus, ServedWeights
from services.rollout.errors import (
    AdapterBaseError,
    DigestMismatchError,
    MixedWeightsError,
    UnfitAdapterError,
    UnfitWeightsError,
    VersionNotPreparedError,
)
from sluice.runtime.errors import InvalidFieldError
from sluice.weights.adapter import check_name
from sluice.weights.checkpoint import describe_shard, shard_paths
from sluice.weights.convert import quantized_layout
from sluice.weights.errors import (
    DamagedFileError,
    FileDigestError,
    InvalidAdapterError,
    ManifestError,
    MissingFileError,
    TensorDigestError,
    WeightStoreError,
)
from sluice.weights.manifest import (
    MANIFEST_NAME,
    Manifest,
    TensorEntry,
    digest_version,
    read_manifest,
)

if TYPE_CHECKING:
    from sluice.weights.adapter import AdapterSpec

Version = tuple[int, str]


class Typed(Protocol):
    """A tensor, as a manifest describes it."""

    @property
    def dtype(self) -> str: ...


BASE_NAME = "base"
OWN_NAME = "policy"  # of a trainer of one adapter
NAME = f"{OWN_NAME}@"


def adapter_name(version: int) -> str:
    """Names an adapter so that no two versions share a name."""
    return f"{NAME}{version}"


def named_line(name: str) -> tuple[str, int | None] | None:
    """Returns the adapter and the version that `<adapter>@<version>` or `<adapter>` names.

    The one of a trainer of one, `policy`, has the empty name, and always a version; None for what
    can name nothing.
    """
    line, separator, number = name.partition("@")
    if separator and not (number.isascii() and number.isdigit() and len(number) <= 18):
        return None
    version = int(number) if separator else None
    if line == OWN_NAME:
        return None if version is None else ("", version)
    try:
        check_name(line)
    except InvalidAdapterError:
        return None
    return line, version


def held_version(name: str, status: EngineStatus) -> int | None:
    """Returns the version that a request means by `name`, of those that are held.

    That is `base`, `<adapter>@<version>`, or `<adapter>` for the newest of it. None where it is
    not held. Raises InvalidFieldError for what can name nothing.
    """
    if name == BASE_NAME:
        return None if status.base is None else status.base.version
    named = named_line(name)
    if named is None:
        raise InvalidFieldError(
            "adapter", "is neither `base` nor `policy@<version>`, nor an adapter's name"
        )
    line, version = named
    every = [weights.version for weights in status.adapters]
    if version is not None and not line and status.base is not None:
        every.append(status.base.version)
    held = [each for each in every if status.lines.get(each, "") == line]
    if version is not None:
        return version if version in held else None
    return max(held, default=None)


def surplus(held: Mapping[int, str], limit: int, used: Collection[int]) -> list[int]:
    """Chooses which adapters to let go, beyond `limit` and not among those used.

    held: their lines by version, in the order of their commits. What a newer one of its line has
    replaced goes before what is the newest of its own, the oldest first.
    """
    newest = {line: version for version, line in sorted(held.items())}
    order = sorted(held, key=lambda version: newest[held[version]] == version)  # stable
    idle = [version for version in order if version not in used]
    return idle[: max(0, len(held) - limit)]


def check_adapter(manifest: Manifest, base: ServedWeights | None) -> AdapterSpec:
    """Returns what the adapter of a version is once it belongs on this base.

    Raises AdapterBaseError or UnfitAdapterError.
    """
    spec, version = manifest.adapter, manifest.version
    assert spec is not None
    check_base(spec, version, base)
    try:
        spec.check_tensors({n: (t.dtype, t.shape) for n, t in manifest.tensors.items()})
    except InvalidAdapterError as error:
        raise UnfitAdapterError(f"version {version}: {error}", version=version) from error
    return spec


def check_base(spec: AdapterSpec, version: int, base: ServedWeights | None) -> None:
    """Raises AdapterBaseError unless an adapter belongs on this base."""
    if base is None:
        raise AdapterBaseError(
            f"version {version} is an adapter, and this engine has no base to put it on: set "
            "engine.model to the model that it was trained on",
            version=version,
            expected=spec.base_digest,
        )
    if base.digest != spec.base_digest:
        raise AdapterBaseError(
            f"version {version} is an adapter of a base of digest {spec.base_digest}, not of "
            f"{base.digest}, which is here",
            version=version,
            expected=spec.base_digest,
            actual=base.digest,
        )


def check_whole(manifest: Manifest, adapters: Collection[ServedWeights]) -> None:
    """Raises MixedWeightsError for a whole version where adapters are held."""
    if manifest.adapter is None and adapters:
        raise MixedWeightsError(
            f"version {manifest.version} is whole weights, and adapters of another base are "
            "served here: a run publishes one of both, and engines start anew for the other",
            version=manifest.version,
        )


def tag(version: int, digest: str) -> str:
    return f"{version}:{digest}"


def parse_tag(text: object) -> Version | None:
    """Reads a version; None for a name that we did not give."""
    number, separator, digest = str(text).partition(":")
    if not (separator and number.isdigit() and digest):
        return None
    return int(number), digest


def mismatch_of(error: WeightStoreError) -> DigestMismatchError | None:
    """Returns the engine's error for bytes that are not as published; None for other errors."""
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
    """Turns errors of a version's files into the engine's own.

    Raises DigestMismatchError, which names the tensor or file, or UnfitWeightsError.
    """
    try:
        yield
    except (WeightStoreError, OSError) as error:
        mismatch = mismatch_of(error) if isinstance(error, WeightStoreError) else None
        unfit = UnfitWeightsError(f"version {version} cannot be read: {error}")
        raise mismatch or unfit from error


def checked_manifest(directory: Path, version: int, digest: str) -> Manifest:
    """Reads the manifest of this version and digest.

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


def is_quantized(tensors: Mapping[str, Typed]) -> bool:
    """Return whether weights are stored quantised, beside their scales."""
    return quantized_layout.is_quantized({name: each.dtype for name, each in tensors.items()})


def check_processor(manifest: Manifest, processor: str) -> None:
    """Raise UnfitWeightsError where the model of a version is shown images in another way.

    processor: digest of the rules of this engine; empty where it is shown none. Versions of older
    releases do not say.
    """
    if processor and manifest.processor and processor != manifest.processor:
        raise UnfitWeightsError(
            f"version {manifest.version} was trained on images of another processor: with this "
            "engine's preprocessor_config.json it would see other pixels",
            version=manifest.version,
            expected=manifest.processor,
            actual=processor,
        )


def describe_model(directory: Path) -> tuple[str, Mapping[str, TensorEntry]]:
    """Hashes a plain HF directory: the digest of the version that it is, and its tensors by name.

    Raises UnfitWeightsError.
    """
    try:
        shards = [describe_shard(path) for path in shard_paths(directory)]
    except (WeightStoreError, OSError) as error:
        raise UnfitWeightsError(f"{directory} cannot be read: {error}") from error
    tensors = {name: entry for shard in shards for name, entry in shard.tensors.items()}
    return digest_version((n, t.dtype, t.shape, t.digest) for n, t in tensors.items()), tensors


PREPARED_LIMIT = 2  # versions that are ready at once; the oldest gives way


class PreparedVersion(Protocol):
    """What an engine keeps of a version that is ready to serve."""

    @property
    def version(self) -> int: ...

    @property
    def digest(self) -> str: ...

    @property
    def line(self) -> str:
        """The adapter of several that it is a version of; else empty."""


P = TypeVar("P", bound=PreparedVersion)


class PreparedVersions(Generic[P]):
    """The versions that are ready to serve."""

    def __init__(self) -> None:
        self._ready: dict[int, P] = {}  # in the order in which they were prepared
        self._in_use: int | None = None

    @property
    def numbers(self) -> tuple[int, ...]:
        """Version numbers, ascending."""
        return tuple(sorted(self._ready))

    def has(self, version: int, digest: str) -> bool:
        return version in self._ready and self._ready[version].digest == digest

    def add(self, prepared: P) -> None:
        """Keeps a version; the oldest of its line beyond PREPARED_LIMIT, not in use, gives way."""
        self._ready.pop(prepared.version, None)
        self._ready[prepared.version] = prepared
        own = [number for number, kept in self._ready.items() if kept.line == prepared.line]
        for oldest in own[:-PREPARED_LIMIT]:
            if oldest != self._in_use:
                del self._ready[oldest]

    def clear(self) -> None:
        """Forgets all."""
        self._ready.clear()

    @contextmanager
    def serving(self, version: int) -> Iterator[P]:
        """Yields a version that is about to serve, which others do not displace meanwhile.

        When the block ends without an error, it and all older ones of its line are forgotten.
        Raises VersionNotPreparedError.
        """
        if version not in self._ready:
            raise VersionNotPreparedError(
                f"version {version} is not prepared", version=version, prepared=[*self._ready]
            )
        self._in_use = version
        try:
            serving = self._ready[version]
            yield serving
            self._ready = {
                number: kept
                for number, kept in self._ready.items()
                if number > version or kept.line != serving.line
            }
        finally:
            self._in_use = None
