"""Where a run writes: directories that can be written, their disks, and what is there already."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from sluice import durable
from sluice.doctor import look_at_store
from sluice.finding import OK, WARNING, Finding
from sluice.loop.config import CommonRunConfig
from sluice.place import Place, directory_of
from sluice.preflight.findings import Findings
from sluice.preflight.service import Size


def existing(path: Path) -> Path:
    """The path, or the last of those above it that is there."""
    return next((each for each in (path, *path.absolute().parents) if each.exists()), path)


def look_at_places(run_dir: Path, store: Place, findings: Findings) -> None:
    """Whether they can be written, by writing where they are, or are to be made."""
    directory = directory_of(store)
    looked: set[Path] = set()
    for key, path in (("run_dir", run_dir), ("store", directory)):
        if path is None:  # a bucket: who asks it needs its keys
            continue
        place = existing(path)
        if not place.is_dir():
            findings.wrong(key, f"{place} is no directory", f"give another {key}")
        elif place not in looked:
            looked.add(place)
            findings.add(_named(key, each) for each in look_at_store(place) if each.state != OK)


def _named(key: str, finding: Finding) -> Finding:
    """What `sluice doctor` says of a store, of this place."""
    state = WARNING if finding.subject == "disk" else finding.state
    return Finding(key, state, finding.text, finding.remedy.replace("--store", key))


def look_at_run(run_dir: Path, findings: Findings) -> bool:
    """Whether no loop is at work there."""
    if not (run_dir / ".loop.lock").exists():
        return True
    with findings.expecting("run_dir"), durable.owned(run_dir, "loop"):
        return True
    return False


def look_at_room(
    config: CommonRunConfig, store: Place, sizes: Iterable[Size], steps: int, findings: Findings
) -> None:
    """Whether checkpoints and versions fit on the disk of the store.

    A checkpoint is written before the oldest one goes, and so is a version.
    """
    directory = directory_of(store)
    if directory is None:
        return
    checkpoints = versions = 0
    kept = min(config.retention.cuts, steps) + 1
    for size in sizes:
        checkpoints += kept * size.checkpoint_bytes
        versions += (min(size.kept_versions or steps, steps) + 1) * size.version_bytes
    needed = checkpoints + versions
    place = existing(directory)
    if not needed or not place.is_dir():
        return
    free = shutil.disk_usage(place).free
    told = (
        f"{_gib(free)} free at {place}, and a run takes about {_gib(needed)}: {kept} checkpoints "
        f"at once (retention.cuts and the one that is written) {_gib(checkpoints)}, versions of "
        f"weights (the trainer's keep_versions) {_gib(versions)}"
    )
    if free < needed and not config.resume:
        findings.wrong("disk", told, "give store another place, or keep fewer")
    elif free < needed:  # of which a run that goes on may have some already
        findings.warn("disk", told)
    else:
        findings.ok("disk", told)


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"
