"""A run directory: of one loop at a time, writable, and with a ledger that fits its last cut."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import xxhash

from sluice import durable
from sluice.config import ConfigError
from sluice.loop.config import RunConfig
from sluice.loop.ledger import Ledger
from sluice.loop.run_checkpoint import RunCheckpoint, latest_cut

CUTS, LEDGER = "cuts", "ledger.sqlite"
# what a sample and its part in the gradients depend on, besides the prompts
_SHAPING = {
    "algorithm",
    "critic",
    "environment",
    "filters",
    "groups_per_step",
    "samples_per_group",
    "sampling",
}


class RunDirectoryError(Exception):
    """The run directory cannot be written, or is damaged; the message says which."""


@contextmanager
def owned(run_dir: Path) -> Iterator[None]:
    """Have `run_dir` to oneself: two loops would train on the same groups.

    Raises DirectoryError for another loop, RunDirectoryError for what the disk refuses meanwhile.
    """
    with durable.owned(run_dir, "loop"), _told(run_dir):
        yield


@contextmanager
def _told(run_dir: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise RunDirectoryError(f"ledger {run_dir / LEDGER}: {error}") from error
    except OSError as error:
        if error.errno is None:  # a deadline, which is no file's fault
            raise
        where = error.filename or f"{run_dir}, or the store"
        raise RunDirectoryError(f"{where}: {error.strerror}") from error


def last_cut(run_dir: Path, *, resume: bool, seed: int) -> RunCheckpoint | None:
    """The cut to go on from, if there is one. Raises ConfigError and RunDirectoryError."""
    has_ledger = (run_dir / LEDGER).exists()
    cut = latest_cut(run_dir / CUTS)
    if has_ledger and not resume and (cut is not None or _has_groups(run_dir)):
        raise ConfigError(
            f"run_dir: {run_dir} holds a run; give resume: true (--resume) to go on with it, "
            "or another run_dir"
        )
    if cut is not None and not has_ledger:
        raise RunDirectoryError(f"run_dir: {run_dir} has cuts and no {LEDGER}")
    if cut is not None and cut.seed != seed:
        raise ConfigError(f"seed: is {seed}, the run to resume has {cut.seed}")
    return cut


def _has_groups(run_dir: Path) -> bool:
    """False after a start that failed before there was anything to go on from."""
    ledger = Ledger(run_dir / LEDGER)
    try:
        return ledger.next_position() > 0
    finally:
        ledger.close()


def check_ledger(ledger: Ledger, cut: RunCheckpoint | None) -> None:
    """Raise RunDirectoryError if rows are gone that the cut has seen.

    The run would train on their groups a second time.
    """
    if cut is None:
        return
    position, step = ledger.next_position(), ledger.last_consumed_step()
    if position < cut.position or step < cut.step:
        raise RunDirectoryError(
            f"{LEDGER} ends at group {position} and step {step}, before the last cut (group "
            f"{cut.position}, step {cut.step}): it is damaged, or of another time than cuts/"
        )


def settings_digests(config: RunConfig, prompts: str) -> dict[str, str]:
    """By setting, a digest of what a resumed run should have in common with its past.

    `prompts` is the digest of the tasks and their order.
    """
    dumped = config.model_dump(mode="json", include=_SHAPING)
    return {name: _digest(value) for name, value in dumped.items()} | {"prompts": prompts}


def check_resumed(
    config: RunConfig, settings: Mapping[str, str], note: Callable[[str], None]
) -> None:
    """Whether the last cut is of a run like this one; `note` hears of settings that differ.

    Raises ConfigError where they may not: positions would name other tasks, or a deterministic
    run would be none. Raises RunDirectoryError.
    """
    if config.resume and not (config.run_dir / LEDGER).exists():
        note(f"{config.run_dir} holds no run yet: this one begins")
    cut = last_cut(config.run_dir, resume=config.resume, seed=config.seed)
    if cut is None:
        return
    if bool(cut.critic_checkpoint) != (config.critic is not None):
        raise ConfigError(
            f"critic: the run to resume had {'one' if cut.critic_checkpoint else 'none'}"
        )
    changed = sorted(name for name, value in cut.settings.items() if settings.get(name) != value)
    if "prompts" in changed:
        raise ConfigError(
            "prompts: are not those of the run to resume, some would be trained on twice; "
            "begin another run_dir from its checkpoint (initial_checkpoint)"
        )
    if changed and config.deterministic:
        raise ConfigError(f"deterministic: the run to resume had another {', '.join(changed)}")
    if changed:
        note(f"resumed with another {', '.join(changed)}")


def _digest(value: object) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(value, sort_keys=True).encode())
