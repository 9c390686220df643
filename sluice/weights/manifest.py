"""The manifest of a version: every tensor and file of the directory with its digest.

`manifest.json` is written last and carries the digest of its own content, so that a reader
trusts nothing that was not written whole. Digests are xxh3-128 as 32 hex digits: they find damage
and mix-ups, not forgers; whoever may write to the store is trusted.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from sluice.weights.adapter import AdapterSpec, check_name
from sluice.weights.errors import FileDigestError, InvalidAdapterError, ManifestError

Buffer = bytes | bytearray | memoryview | mmap.mmap


def digest_bytes(data: Buffer) -> str:
    """Hash a C-contiguous buffer."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_shard(header: bytes, tensors: Iterable[str]) -> str:
    """Hash a safetensors file of ours by its header and the digests of its tensors in their order.

    Whoever checks the tensors and compares the header has checked all of it: no byte is hashed
    twice. The digest of a shard that another program wrote is that of its bytes.
    """
    return xxhash.xxh3_128_hexdigest(header + "".join(tensors).encode())


def digest_file(path: Path) -> tuple[int, str]:
    """Return size and digest of a file, read in pieces of 8 MiB."""
    hasher, size = xxhash.xxh3_128(), 0
    with path.open("rb", buffering=0) as file:
        while piece := file.read(1 << 23):
            hasher.update(piece)
            size += len(piece)
    return size, hasher.hexdigest()


def digest_version(tensors: Iterable[tuple[str, str, Sequence[int], str]]) -> str:
    """Hash (name, dtype, shape, digest) of every tensor; free of order and of files.

    The same weights cut into other shards are therefore the same version digest.
    """
    lines = sorted(
        json.dumps([name, dtype, list(shape), digest]) for name, dtype, shape, digest in tensors
    )
    return xxhash.xxh3_128_hexdigest("\n".join(lines).encode())


FORMAT = 1
DELTA_FORMAT = 2  # of a version that needs its base; readers of format 1 refuse it
ADAPTER_FORMAT = 3  # of an adapter, which is no model: readers of formats 1 and 2 refuse it
MANIFEST_NAME = "manifest.json"


@dataclass(frozen=True)
class TensorEntry:
    """A tensor: safetensors dtype name (F32, BF16 ...), shape and digest of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    digest: str


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and digest of a file."""

    size: int
    digest: str


@dataclass(frozen=True)
class DeltaFile:
    """A file that was written in place of a shard, with `changed` of its `elements` in it."""

    size: int
    digest: str
    changed: int
    elements: int


@dataclass(frozen=True)
class ShardFile:
    """A safetensors file as its writer reports it, with the tensors in it by HF name.

    With `delta` the file `delta_name(file_name)` was written, and the rest describes what it
    makes of the same file of the version before.
    """

    file_name: str
    size: int
    digest: str
    tensors: Mapping[str, TensorEntry]
    delta: DeltaFile | None = None


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a version and the file that holds it."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    digest: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Content of `manifest.json`. `created` is UTC in ISO 8601, `parent` the version trained on.

    `tensors` and `files` describe the whole HF directory. Where `base` is a version, some of it
    lies there: `deltas` are the files that hold what changed of the shards they are listed under,
    and the files named in `inherited` are the base's. `processor`: digest of how images are
    prepared for the model (`sluice.samples.images.processor_digest`); None where it sees none, and
    of versions that older releases wrote. `adapter`: what the adapter is that the version holds in
    place of a model; then `files` are a folder as peft reads it, but that its tensors may lie in
    several files. `line`: the adapter of several that it is a version of; empty for all others.
    """

    version: int
    parent: int | None
    step: int
    created: str
    digest: str
    tensors: Mapping[str, StoredTensor]
    files: Mapping[str, FileEntry]
    base: int | None = None
    deltas: Mapping[str, FileEntry] = field(default_factory=dict)
    inherited: tuple[str, ...] = ()
    processor: str | None = None
    adapter: AdapterSpec | None = None
    line: str = ""

    def shards(self) -> list[ShardFile]:
        """The files of tensors as a whole directory holds them, by name."""
        found: dict[str, dict[str, TensorEntry]] = {}
        for name, tensor in self.tensors.items():
            entry = TensorEntry(tensor.dtype, tensor.shape, tensor.digest)
            found.setdefault(tensor.file, {})[name] = entry
        return [
            ShardFile(name, self.files[name].size, self.files[name].digest, found[name])
            for name in sorted(found)
        ]

    @property
    def stored(self) -> dict[str, FileEntry]:
        """The files that lie in the version's own directory, by name."""
        elsewhere = {*self.deltas, *self.inherited}
        own = {name: entry for name, entry in self.files.items() if name not in elsewhere}
        return own | {delta_name(name): entry for name, entry in self.deltas.items()}


def delta_name(file_name: str) -> str:
    """Name the file that holds what changed of a shard."""
    return file_name + ".delta"


def version_digest(tensors: Mapping[str, StoredTensor], adapter: AdapterSpec | None = None) -> str:
    """Hash the weights themselves, whatever files hold them; of an adapter with what it is."""
    digest = digest_version((name, t.dtype, t.shape, t.digest) for name, t in tensors.items())
    if adapter is None:
        return digest
    return digest_bytes(json.dumps([digest, asdict(adapter)], sort_keys=True).encode())


def encode_manifest(manifest: Manifest) -> bytes:
    """Canonical JSON with the digest of the rest under `manifest_digest`."""
    document = {"format": DELTA_FORMAT, **vars(manifest)}
    for name in ("tensors", "files", "deltas"):
        document[name] = {key: vars(entry) for key, entry in document[name].items()}
    if manifest.base is None:
        for name in ("base", "deltas", "inherited"):
            del document[name]
        document["format"] = FORMAT
    for name in ("processor", "adapter"):
        if document[name] is None:
            del document[name]
    if not manifest.line:
        del document["line"]
    if manifest.adapter is not None:
        document |= {"format": ADAPTER_FORMAT, "adapter": asdict(manifest.adapter)}
    return seal(document, "manifest_digest")


def decode_manifest(data: bytes) -> Manifest:
    """Parse and check; raises ManifestError or FileDigestError for any changed byte."""
    try:
        document = unseal(data, "manifest_digest", MANIFEST_NAME)
        written = document.pop("format")
        if written not in (FORMAT, DELTA_FORMAT, ADAPTER_FORMAT):
            raise ManifestError(f"{MANIFEST_NAME} has a format that this release does not know")
        tensors = {
            name: StoredTensor(t["file"], t["dtype"], tuple(t["shape"]), t["digest"])
            for name, t in document.pop("tensors").items()
        }
        files = {name: FileEntry(**entry) for name, entry in document.pop("files").items()}
        deltas = {n: FileEntry(**entry) for n, entry in document.pop("deltas", {}).items()}
        inherited = tuple(document.pop("inherited", ()))
        adapter = _decode_adapter(document.pop("adapter", None))
        if (adapter is None) is (written == ADAPTER_FORMAT):
            raise ManifestError(f"{MANIFEST_NAME} has the format of another kind of version")
        if line := document.get("line", ""):
            check_name(line)
        return Manifest(
            tensors=tensors,
            files=files,
            deltas=deltas,
            inherited=inherited,
            adapter=adapter,
            **document,
        )
    except (ValueError, KeyError, TypeError, AttributeError, InvalidAdapterError) as error:
        raise ManifestError(f"{MANIFEST_NAME} is malformed: {error}") from error


def _decode_adapter(document: Any) -> AdapterSpec | None:
    if document is None:
        return None
    return AdapterSpec(**{**document, "targets": tuple(document["targets"])})


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of a version directory; FileNotFoundError where there is none."""
    return decode_manifest((directory / MANIFEST_NAME).read_bytes())


def seal(document: Mapping[str, Any], key: str) -> bytes:
    """JSON, first the digest of the rest under `key`, which the document has not."""
    rest = _render(document)
    return b"{\n " + _line(key, digest_bytes(rest)).encode() + b"," + rest[1:]


def unseal(data: bytes, key: str, file_name: str) -> dict[str, Any]:
    """Parse what `seal` made, without the digest.

    Raises FileDigestError for any changed byte of a sealed document, and ValueError, KeyError or
    TypeError for what is no sealed document at all.
    """
    document: dict[str, Any] = json.loads(data)
    stated = document.pop(key)
    line = f'\n "{key}": {json.dumps(stated)}'.encode()
    rest = data.replace(line + b",\n", b"\n", 1)  # a line of the document itself, the only one
    if rest == data:  # or the last one
        rest = data.replace(b"," + line + b"\n}\n", b"\n}\n", 1)
    if rest == data or digest_bytes(rest) != stated:
        raise FileDigestError(file_name, stated, digest_bytes(data))
    return document


_encode = json.JSONEncoder(sort_keys=True).encode  # with an indent it would be Python, not C


def _render(document: Mapping[str, Any]) -> bytes:
    """A line for each entry, and for each of an entry that has entries of its own."""
    lines = []
    for key, value in sorted(document.items()):
        if isinstance(value, Mapping) and value:
            inner = ",\n  ".join(_line(*item) for item in sorted(value.items()))
            lines.append(f"{_encode(key)}: {{\n  {inner}\n }}")
        else:
            lines.append(_line(key, value))
    return ("{\n " + ",\n ".join(lines) + "\n}\n").encode()


def _line(key: Any, value: Any) -> str:
    return _encode({key: value})[1:-1]
