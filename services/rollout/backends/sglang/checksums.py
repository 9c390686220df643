"""Whether the weights that SGLang holds are those of a version.

SGLang reports a checksum of each of its parameters (/weights_checker). On a host they are the
first 8 bytes of the SHA-256 of the parameter's bytes (`tensor_hash` in SGLang 0.5.23), so that
they follow from the checkpoint; elsewhere, or where a parameter is cut over ranks or cast, they
must at least have changed with the tensors that changed and with no others.
"""

from __future__ import annotations

import hashlib
import mmap
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sluice.weights.header import Extent, parse_header

# checkpoints hold apart, in this order, what SGLang holds in one parameter
STACKED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
PADDED = ("embed_tokens.weight", "lm_head.weight")  # SGLang adds rows of zeros to the vocabulary
PADDED_ROWS = 64
_STACKED_NAME = re.compile(r"^(.*\.)(qkv_proj|gate_up_proj)(\.(?:weight|bias))$")

Checksums = Mapping[str, str]


def tensors_of(parameter: str) -> tuple[str, ...]:
    """The checkpoint's tensors that make up a parameter of SGLang, by HF names."""
    match = _STACKED_NAME.match(parameter)
    if match is None:
        return (parameter,)
    before, stacked, after = match.groups()
    return tuple(f"{before}{part}{after}" for part in STACKED[stacked])


def from_answer(answer: Mapping[str, Any]) -> list[dict[str, str]]:
    """Checksums by parameter of every rank, in the order of ranks."""

    def place(rank: Mapping[str, Any]) -> tuple[int, ...]:
        info = rank["parallelism_info"]
        info = info[0] if isinstance(info, list) else info
        return (info["dp_rank"], info["pp_rank"], info["tp_rank"])

    return [dict(rank["checksums"]) for rank in sorted(answer["ranks"], key=place)]


class CheckpointChecksums:
    """SGLang's checksums of parameters, computed from safetensors files."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._places: dict[str, tuple[Path, Extent]] = {}
        for path in files:
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                for name, extent in parse_header(mapped, file_name=path.name).items():
                    self._places[name] = (path, extent)

    def of(self, parameters: Iterable[str]) -> dict[str, str]:
        """Those of the parameters whose tensors are all here."""
        found: dict[str, str] = {}
        for parameter in parameters:
            names = tensors_of(parameter)
            if all(name in self._places for name in names):
                found[parameter] = self._digest(names)
        return found

    def _digest(self, names: Iterable[str]) -> str:
        hasher = hashlib.sha256()
        for name in names:
            path, extent = self._places[name]
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                with memoryview(mapped) as view, view[extent.begin : extent.end] as piece:
                    hasher.update(piece)
                    hasher.update(bytes(_padding(name, extent)))
        return f"{int.from_bytes(hasher.digest()[:8], 'big'):016x}"


def _padding(name: str, extent: Extent) -> int:
    """Bytes that SGLang adds to a tensor."""
    rows = extent.shape[0] if extent.shape else 0
    if not (rows and name.endswith(PADDED)):
        return 0
    return (extent.end - extent.begin) // rows * (-rows % PADDED_ROWS)


def wrong_values(ranks: Iterable[Checksums], expected: Checksums) -> list[str]:
    """Parameters that are not what the checkpoint says, on any rank."""
    return sorted(
        {
            name
            for rank in ranks
            for name in rank
            if name in expected and rank[name] != expected[name]
        }
    )


def wrong_changes(
    before: list[dict[str, str]],
    after: list[dict[str, str]],
    old: Mapping[str, str],
    new: Mapping[str, str],
    *,
    exact: bool,
) -> list[str]:
    """Parameters that changed though their tensors did not, or stayed though they changed.

    `old` and `new` are digests of the tensors of the two versions by HF name. A parameter has
    changed when it has on some rank: the others may hold what stayed of it. Unless the server
    keeps them as `exact` as they came, small changes may be lost in a cast.
    """
    wrong: list[str] = []
    for name in {name for rank in before for name in rank}:
        parts = tensors_of(name)
        if not all(part in old and part in new for part in parts):
            continue
        wanted = any(old[part] != new[part] for part in parts)
        found = any(
            one.get(name) != other.get(name) for one, other in zip(before, after, strict=True)
        )
        if (found and not wanted) or (exact and wanted and not found):
            wrong.append(name)
    return sorted(wrong)
