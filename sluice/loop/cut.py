"""A cut: one manifest, written last, that names everything a run resumes from."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from sluice.durable import replace_file


@dataclass(frozen=True, kw_only=True)
class Cut:
    """`step` is the loop's, `optimizer_step` the trainer's; `position` the ledger's next row.

    The weights were published last before the cut: 0 and empty where none were yet. `settings`
    are digests of those that shaped the run so far.
    """

    step: int
    optimizer_step: int
    checkpoint: str
    weight_version: int
    weight_digest: str
    position: int
    seed: int
    critic_checkpoint: str = ""  # empty where the run has no critic
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """Of every trainer."""
        return tuple(name for name in (self.checkpoint, self.critic_checkpoint) if name)


def write_cut(directory: Path, cut: Cut) -> None:
    """Write the manifest; it is durable and whole, or not there."""
    directory.mkdir(parents=True, exist_ok=True)
    data = json.dumps(asdict(cut), indent=1).encode()
    replace_file(_path(directory, cut.step), data, temporary=directory)


def list_cuts(directory: Path) -> list[Cut]:
    """All cuts, by step."""
    if not directory.is_dir():
        return []
    paths = sorted(path for path in directory.iterdir() if path.suffix == ".json")
    return [Cut(**json.loads(path.read_text())) for path in paths]


def latest_cut(directory: Path) -> Cut | None:
    """The cut of the highest step, None if there is none."""
    cuts = list_cuts(directory)
    return cuts[-1] if cuts else None


def remove_cut(directory: Path, cut: Cut) -> None:
    """Remove a manifest; a run no longer resumes from it."""
    _path(directory, cut.step).unlink(missing_ok=True)


def _path(directory: Path, step: int) -> Path:
    return directory / f"{step:08}.json"
