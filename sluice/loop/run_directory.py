"""A run directory: its lock, its run checkpoints, and whether its ledger fits them.

A run checkpoint is one manifest, written last, that names everything a run resumes from.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import xxhash

from sluice import durable
from sluice.address import split_address
from sluice.config import ConfigError
from sluice.durable import DirectoryError, replace_file
from sluice.loop.config import CommonRunConfig, RunConfig
from sluice.loop.journal import END, START, read_journal, without_secrets
from sluice.loop.ledger import Ledger
from sluice.loop.tracking import part_trackers
from sluice.weights.errors import FileDigestError
from sluice.weights.manifest import seal, unseal

RUN_CHECKPOINTS, LEDGER = "cuts", "ledger.sqlite"
PLACE = "place"  # a file that says where the directory was when the run last began
ANOTHER = "begin another run_dir from its checkpoint (initial_checkpoint)"
_WAYS_ON = "put a copy back, or begin another run_dir from a checkpoint (initial_checkpoint)"
FORMAT, SEAL = 2, "manifest_digest"  # earlier releases wrote neither
FORMAT_OF_CRITIC = 3  # with the step of a critic, which releases of format 2 do not know
FORMAT_OF_REFERENCE = 4  # with a version of weights as the reference
FORMAT_OF_TRAINERS = 5  # with the settings of trainers
KNOWN_FORMATS = (FORMAT, FORMAT_OF_CRITIC, FORMAT_OF_REFERENCE, FORMAT_OF_TRAINERS)
# what a sample and its part in the gradients depend on, besides the prompts
_SHAPING = {
    "algorithm",
    "critic",
    "environment",
    "environment_schedule",
    "environments",
    "filters",
    "groups_per_step",
    "max_staleness",
    "over_sampling",
    "pause_mode",
    "samples_per_group",
    "sampling",
    "surplus",
    "teacher",
}
_OF_SAMPLES = {
    "environment",
    "environments",
    "samples_per_group",
    "sampling",
    "teacher",
    "teachers",
}
# of trainers: how weights are computed, not which: rounding is another
_OF_ROUNDING = {
    "autocast",
    "float32_head",
    "fsdp",
    "max_tokens_per_micro_batch",
    "megatron",
    "operations",
    "threads",
}
_INITIAL = "initial_checkpoint"
ENGINES = "engines"  # among those whose settings a run checkpoint has; weights are none of theirs
# settings that came after digests of them were kept, and what releases without them did
_FORMER: dict[tuple[str, ...], Any] = {
    ("algorithm", "epochs"): 1,
    ("algorithm", "reference_every"): 0,
    ("sampling", "stop"): [],
    ("sampling", "min_new_tokens"): 0,
    ("sampling", "ignore_eos"): False,
    ("environments", "*", "sampling", "stop"): [],
    ("environments", "*", "sampling", "min_new_tokens"): 0,
    ("environments", "*", "sampling", "ignore_eos"): False,
    ("environments", "*", "prompts", "where"): {},
}
_NAMED, _NAMED_LENGTH = 8, 60  # settings that differ, and letters of a value, that are told


@dataclass(frozen=True, kw_only=True)
class RunCheckpoint:
    """Names what a run resumes from.

    `step` is the loop's, `optimizer_step` the trainer's; `position` the ledger's next row. The
    weights are those published last: 0 and empty where none were yet. `settings` are digests of
    those that shaped the run so far; `layouts` how the ranks of each trainer were laid out, and
    `trainers` the settings of each, and of the engines, that its numbers depend on. The reference
    of the KL is a version of the weights, those after `reference_step`, or 0: that of the trainer's
    settings.
    """

    step: int
    optimizer_step: int
    checkpoint: str
    weight_version: int
    weight_digest: str
    position: int
    seed: int
    critic_checkpoint: str = ""  # empty where the run has no critic
    critic_optimizer_step: int | None = None  # earlier releases did not write it
    settings: dict[str, str] = field(default_factory=dict)
    layouts: dict[str, dict[str, int]] = field(default_factory=dict)
    trainers: dict[str, dict[str, str]] = field(default_factory=dict)
    reference_version: int = 0
    reference_step: int = 0

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """Of every trainer."""
        return tuple(name for name in (self.checkpoint, self.critic_checkpoint) if name)


def write_run_checkpoint(directory: Path, run_checkpoint: RunCheckpoint) -> None:
    """Writes the manifest; it is durable and whole, or not there."""
    directory.mkdir(parents=True, exist_ok=True)
    has_step = run_checkpoint.critic_optimizer_step is not None
    number = FORMAT_OF_CRITIC if has_step else FORMAT
    number = FORMAT_OF_REFERENCE if run_checkpoint.reference_version else number
    number = FORMAT_OF_TRAINERS if run_checkpoint.trainers else number
    data = seal({"format": number, **document_of(run_checkpoint)}, SEAL)
    replace_file(_path(directory, run_checkpoint.step), data, temporary=directory)


def document_of(run_checkpoint: RunCheckpoint) -> dict[str, Any]:
    """A run checkpoint as it is stored."""
    document = asdict(run_checkpoint)
    if run_checkpoint.critic_optimizer_step is None:
        del document["critic_optimizer_step"]
    if not run_checkpoint.reference_version:
        del document["reference_version"], document["reference_step"]
    if not run_checkpoint.trainers:
        del document["trainers"]
    return document


def list_run_checkpoints(directory: Path) -> list[RunCheckpoint]:
    """Returns all run checkpoints that are intact, by step.

    Raises RunDirectoryError for one of a newer release.
    """
    return [each for each in _read_all(directory).values() if isinstance(each, RunCheckpoint)]


def damaged_run_checkpoints(directory: Path) -> dict[int, str]:
    """Returns by step what is wrong with manifests that cannot be read."""
    read = _read_all(directory).items()
    return {int(path.stem): each for path, each in read if isinstance(each, str)}


def latest_run_checkpoint(directory: Path) -> RunCheckpoint | None:
    """The intact run checkpoint of the highest step, None if there is none."""
    run_checkpoints = list_run_checkpoints(directory)
    return run_checkpoints[-1] if run_checkpoints else None


_RESOLVED = {"trainer", "router", "store", "weights"}  # of `services`, where they are not given


def finished_step(config: CommonRunConfig) -> int | None:
    """The last step of a run that is to be resumed and has ended well under just these settings:
    nothing is left to do of it. None of any other, and where the store is a bucket, in which a loop
    elsewhere may have gone on with it. Raises RunDirectoryError.
    """
    begun_and_ended = [e for e in read_journal(config.run_dir) if e["event"] in (START, END)][-2:]
    if not config.resume or [e["event"] for e in begun_and_ended] != [START, END]:
        return None
    start, end = begun_and_ended
    before, own = start.get("config"), without_secrets(config.model_dump(mode="json"))
    if end.get("outcome") != "done" or not isinstance(before, Mapping):
        return None
    if str(before.get("store") or "").startswith("s3://") or _asked(before, own) != _asked(
        own, own
    ):
        return None
    newest = latest_run_checkpoint(config.run_dir / RUN_CHECKPOINTS)
    return newest.step if newest is not None and newest.step == end.get("step") else None


def _asked(settings: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without what services are asked for, and what is said of how to begin."""
    resolved = {name for name in _RESOLVED if not own.get(name)}
    found = {k: v for k, v in settings.items() if k not in {"resume", *resolved}}
    if isinstance(teachers := found.get("teachers"), Mapping):  # with their addresses
        found["teachers"] = sorted(teachers)
    return found


def _read_all(directory: Path) -> dict[Path, RunCheckpoint | str]:
    """By path, and so by step, the run checkpoint, or why it cannot be read."""
    if not directory.is_dir():
        return {}
    paths = sorted(path for path in directory.iterdir() if re.fullmatch(r"\d+\.json", path.name))
    return {path: _read(path) for path in paths}


def _read(path: Path) -> RunCheckpoint | str:
    data = path.read_bytes()
    try:
        document: dict[str, Any] = json.loads(data)
        if SEAL in document:
            document = unseal(data, SEAL, path.name)
        elif "format" in document:
            return "it has lost its digest"
        if document.pop("format", FORMAT) not in KNOWN_FORMATS:
            raise RunDirectoryError(f"{path}: was written by a newer release of Sluice")
        run_checkpoint = RunCheckpoint(**document)
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
        FileDigestError,
    ) as error:
        return f"{type(error).__name__}: {error}"
    if run_checkpoint.step != int(path.stem):
        return f"it is that of step {run_checkpoint.step}"
    return run_checkpoint


def none_intact(directory: Path, damaged: Mapping[int, str]) -> RunDirectoryError:
    """What ends a run that has none to go back to; `damaged` says by step what is wrong."""
    newest = max(damaged)
    return RunDirectoryError(
        f"no run checkpoint in {directory} is intact; the newest, of step {newest}: "
        f"{damaged[newest]}"
    )


def set_aside(directory: Path, step: int) -> None:
    """Renames a manifest that a run cannot resume from; it stays to be looked at."""
    path = _path(directory, step)
    path.replace(path.with_name(f"{path.name}.damaged"))


def remove_run_checkpoint(directory: Path, run_checkpoint: RunCheckpoint) -> None:
    """Removes a manifest; a run no longer resumes from it."""
    _path(directory, run_checkpoint.step).unlink(missing_ok=True)


def _path(directory: Path, step: int) -> Path:
    return directory / f"{step:08}.json"


class RunDirectoryError(Exception):
    """The run directory cannot be written, or is damaged; the message says which."""


@contextmanager
def owned(run_dir: Path) -> Iterator[None]:
    """Have `run_dir` to oneself: two loops would train on the same groups.

    Raises DirectoryError for another loop, RunDirectoryError for what the disk refuses meanwhile.
    """
    with durable.owned(run_dir, "loop"), _typed_errors(run_dir):
        yield


@contextmanager
def sole_driver(store: Path, run_dir: Path, trainers: Iterable[str]) -> Iterator[None]:
    """Drive the trainers at these addresses alone, among the runs of a store.

    Two loops would each take a trainer back to checkpoints of its own, and train what the other
    has trained. For the life of a process, as `owned`. Raises DirectoryError, which names the
    other run. Where the store does not exist nothing is claimed: the run itself says so.
    """
    with ExitStack() as stack:
        named = {place: address for address in trainers for place in places_of(address)}
        for place, address in sorted(named.items()) if store.is_dir() else ():
            path = store / "loops" / f"{digest_of(place)}.lock"
            path.parent.mkdir(exist_ok=True)
            try:
                stack.enter_context(durable.locked(path, timeout_seconds=0))
            except durable.LockTimeoutError:
                other = path.read_text(errors="replace") or "another process"
                raise DirectoryError(
                    f"trainer: {address} is driven by {other}; stop that, or start services of "
                    "this run's own (--up)"
                ) from None
            path.write_text(f"process {os.getpid()} on {socket.gethostname()} for {run_dir}")
        yield


def places_of(address: str) -> set[str]:
    """Where a trainer is, alike for whoever reaches it, by name or number, from its host or not."""
    host, port = split_address(address.lower())
    name = socket.gethostname().lower()
    found, own = _resolve(host), _resolve(name) | {name}
    if found & own or any(map(_is_loopback, found)):
        found |= own
    return {f"{each}:{port}" for each in found if not _is_loopback(each)}


def _resolve(host: str) -> set[str]:
    """The numbers of a host; itself where nobody knows them."""
    try:
        return {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):  # unknown, or no name of a host at all
        return {host}


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


@contextmanager
def _typed_errors(run_dir: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise RunDirectoryError(f"ledger {run_dir / LEDGER}: {error}") from error
    except OSError as error:
        if error.filename is not None and error.errno is None:  # of a bucket, or a lock
            raise RunDirectoryError(str(error)) from error
        if error.errno is None:  # a deadline, which is no file's fault
            raise
        where = error.filename or f"{run_dir}, or the store"
        raise RunDirectoryError(f"{where}: {error.strerror}") from error


def checked_run_checkpoint(config: CommonRunConfig) -> RunCheckpoint | None:
    """Returns the run checkpoint to go on from, if there is one.

    Raises ConfigError and RunDirectoryError.
    """
    run_dir, resume = config.run_dir, config.resume
    has_ledger = (run_dir / LEDGER).exists()
    run_checkpoint = latest_run_checkpoint(run_dir / RUN_CHECKPOINTS)
    if has_ledger and not resume and (run_checkpoint is not None or _has_groups(run_dir)):
        raise ConfigError(
            f"run_dir: {run_dir} holds a run; give resume: true (--resume) to go on with it, "
            "or another run_dir"
        )
    if run_checkpoint is None and (damaged := damaged_run_checkpoints(run_dir / RUN_CHECKPOINTS)):
        raise none_intact(run_dir / RUN_CHECKPOINTS, damaged)
    if run_checkpoint is not None and not has_ledger:
        raise RunDirectoryError(
            f"run_dir: {run_dir} has run checkpoints and no {LEDGER}; {_WAYS_ON}"
        )
    if run_checkpoint is None:
        return None
    if run_checkpoint.seed != config.seed:
        raise ConfigError(
            f"seed: is {config.seed}, the run to resume has {run_checkpoint.seed}; give it that, "
            f"or {ANOTHER}"
        )
    began = run_checkpoint.settings.get(_INITIAL)  # earlier releases did not say
    if config.initial_checkpoint and began not in (None, digest_of(config.initial_checkpoint)):
        raise ConfigError(
            f"initial_checkpoint: the run to resume did not begin with {config.initial_checkpoint},"
            f" and goes on from its own of step {run_checkpoint.step}; leave it out, or begin "
            "another run_dir with it"
        )
    return run_checkpoint


def _has_groups(run_dir: Path) -> bool:
    """False after a start that failed before there was anything to go on from."""
    ledger = Ledger(run_dir / LEDGER)
    try:
        return ledger.next_position() > 0
    finally:
        ledger.close()


def check_ledger(ledger: Ledger, run_checkpoint: RunCheckpoint | None) -> None:
    """Raise RunDirectoryError if rows are gone that the run checkpoint has seen.

    The run would train on their groups a second time. So would one of which no run checkpoint
    is left.
    """
    try:
        ledger.check()
    except sqlite3.DatabaseError as error:
        raise RunDirectoryError(f"{LEDGER} {error}; {_WAYS_ON}") from None
    position, step = ledger.next_position(), ledger.last_consumed_step()
    if run_checkpoint is None:
        if step:
            raise RunDirectoryError(
                f"no run checkpoint is left in {RUN_CHECKPOINTS}/, and {step} steps were trained; "
                "begin another run_dir, from a checkpoint (initial_checkpoint)"
            )
        return
    if position < run_checkpoint.position or step < run_checkpoint.step:
        raise RunDirectoryError(
            f"{LEDGER} ends at group {position} and step {step}, before the last run "
            f"checkpoint (group {run_checkpoint.position}, step {run_checkpoint.step}): it is "
            f"damaged, or of another time than {RUN_CHECKPOINTS}/; {_WAYS_ON}"
        )


def notice_copy(run_dir: Path, ledger: Ledger) -> Path | None:
    """Have a copy of a run directory be another run; returns what it is a copy of.

    Else both would pin and remove in one name, each what the other still needs. A directory that
    was moved is no copy.
    """
    here, note = run_dir.resolve(), run_dir / PLACE
    former = Path(os.fsdecode(note.read_bytes())) if note.is_file() else here
    is_copy = former != here and _holds_same_run(former / LEDGER, here / LEDGER, ledger.run_id)
    if is_copy:
        part_trackers(run_dir)  # first: killed behind it, the copy is noticed once more
        ledger.become_another()
    if former != here or not note.is_file():
        replace_file(note, os.fsencode(here), temporary=run_dir, sync=False)
    return former if is_copy else None


def _holds_same_run(path: Path, own: Path, run_id: str) -> bool:
    try:
        if path.samefile(own):  # by another name of its directory
            return False
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as ledger:
            return ledger.execute("SELECT id FROM run").fetchone() == (run_id,)
    except (OSError, ValueError, sqlite3.Error):  # none is there, or none that could go on
        return False


def settings_digests(config: RunConfig, prompts: str) -> dict[str, str]:
    """By setting, a digest of what a resumed run should have in common with its past.

    `prompts` is the digest of the tasks and their order, or of the groups to replay.
    """
    dumped = config.model_dump(mode="json", include=_SHAPING)
    pools = {name: teacher.pool for name, teacher in config.teachers.items()}
    more = {"prompts": prompts, "teachers": digest_of(pools)}  # no addresses, which may be others
    return _digests(dumped) | more | initial_digest(config)


def initial_digest(config: CommonRunConfig) -> dict[str, str]:
    """That of the checkpoint which a run begins with; one that goes on keeps the first."""
    run_checkpoint = latest_run_checkpoint(config.run_dir / RUN_CHECKPOINTS)
    if run_checkpoint is None:
        return {_INITIAL: digest_of(config.initial_checkpoint)}
    kept = run_checkpoint.settings.get(_INITIAL)
    return {} if kept is None else {_INITIAL: kept}


def _digests(dumped: Mapping[str, Any]) -> dict[str, str]:
    """By setting, its digest as releases before `_FORMER` would have it."""
    return {name: digest_of(_as_before(value, (name,))) for name, value in dumped.items()}


def _as_before(value: Any, path: tuple[str, ...]) -> Any:
    """Settings as they are dumped, without those that came later and say what was done before."""
    if not isinstance(value, Mapping):
        return value
    kept: dict[str, Any] = {}
    for name, inner in value.items():
        inside = (*path, name)
        if any(each == inner and _is_at(inside, place) for place, each in _FORMER.items()):
            continue
        kept[name] = _as_before(inner, inside)
    return kept


def _is_at(path: tuple[str, ...], place: tuple[str, ...]) -> bool:
    return len(path) == len(place) and all(
        wanted in ("*", name) for name, wanted in zip(path, place, strict=True)
    )


def check_resumed(
    config: RunConfig, settings: Mapping[str, str], note: Callable[[str], None]
) -> None:
    """Checks that the last run checkpoint is of a run like this one; notes settings that differ.

    Raises ConfigError where they may not: positions would name other tasks, or a deterministic
    run would be none. Raises RunDirectoryError.
    """
    if config.resume and not (config.run_dir / LEDGER).exists():
        note(f"{config.run_dir} holds no run yet: this one begins")
    run_checkpoint = checked_run_checkpoint(config)
    if run_checkpoint is None:
        return
    if bool(run_checkpoint.critic_checkpoint) != (config.critic is not None):
        had, way = ("one", "give it") if config.critic is None else ("none", "leave it out")
        raise ConfigError(f"critic: the run to resume had {had}; {way}, or {ANOTHER}")
    changed = {
        name: digest
        for name, digest in sorted(run_checkpoint.settings.items())
        if settings.get(name) != digest
    }
    if "prompts" in changed:
        what = "prompts: are not those" if config.replay is None else "replay: is not that"
        told = told_changes(config, "prompts" if config.replay is None else "replay")
        raise ConfigError(
            f"{what} of the run to resume{told}, some would be trained on twice; {ANOTHER}"
        )
    if not changed:
        return
    told = ", ".join(_differences(config, changed))
    if config.deterministic:
        raise ConfigError(f"deterministic: the run to resume had another {told}")
    note(f"resumed with another {told}")


def _differences(config: RunConfig, changed: Mapping[str, str]) -> Iterator[str]:
    """By setting, what is another in it than when its digest was that of `changed`.

    The journal has the settings of every start. Where none of them has that digest, as where it
    is gone or left a secret out, the setting is named alone.
    """
    starts = [
        event["config"]
        for event in reversed(read_journal(config.run_dir))
        if event["event"] == START and isinstance(event.get("config"), Mapping)
    ]
    now = without_secrets(config.model_dump(mode="json", include=_SHAPING))
    for name, digest in changed.items():
        had = [start[name] for start in starts if name in start]
        before = [value for value in had if digest_of(_as_before(value, (name,))) == digest]
        told = list(_named(before[0], now.get(name), (name,))) if before else []
        more = f"{len(told) - _NAMED} more" if len(told) > _NAMED else ""
        yield f"{name} ({'; '.join([*told[:_NAMED], *filter(None, [more])])})" if told else name


def told_changes(config: CommonRunConfig, about: str) -> str:
    """What is another than at the last start that was not refused, in brackets; none where it says
    nothing. `about`: a key that the settings are, or are below."""
    starts: list[Mapping[str, Any]] = []
    for event in read_journal(config.run_dir):
        if event["event"] == START and isinstance(event.get("config"), Mapping):
            starts.append(event["config"])
        elif event["event"] == END and str(event.get("text")).startswith(ConfigError.__name__):
            starts = starts[:-1]
    now = without_secrets(config.model_dump(mode="json"))
    for start in reversed(starts):
        named = _named(start, now, ())
        told = [each for each in named if about in each.partition(":")[0].split(".")]
        if told:
            return f" ({'; '.join(told[:_NAMED])})"
    return ""


def _named(before: Any, now: Any, path: tuple[str, ...]) -> Iterator[str]:
    """The settings within one that differ, each with both values."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for name in sorted({*before, *now}):
            former = [each for place, each in _FORMER.items() if _is_at((*path, name), place)]
            absent = former[0] if former else None
            yield from _named(before.get(name, absent), now.get(name, absent), (*path, name))
    elif before != now:
        yield f"{'.'.join(path)}: {_shown(before)}, now {_shown(now)}"


def _shown(value: Any) -> str:
    return _clipped(json.dumps(value))


def _clipped(text: str) -> str:
    return text if len(text) <= _NAMED_LENGTH else f"{text[:_NAMED_LENGTH]}..."


def check_layouts(
    run_checkpoint: RunCheckpoint,
    layouts: Mapping[str, Mapping[str, int]],
    note: Callable[[str], None],
    *,
    deterministic: bool,
) -> None:
    """Notes trainers whose ranks are laid out otherwise: sums of floats in another order differ.

    Raises ConfigError where the run is to be deterministic. Earlier releases recorded no layout.
    """
    for name, before in run_checkpoint.layouts.items():
        now = layouts.get(name, {})
        if before == now:
            continue
        had, has = (", ".join(f"{k} {v}" for k, v in each.items()) for each in (before, now))
        if deterministic:
            raise ConfigError(
                f"deterministic: the ranks of the run to resume were laid out otherwise "
                f"({name}: {had}; now {has})"
            )
        note(f"resumed with another layout of ranks ({name}: {had}; now {has}): numbers differ")


def last_step_of_samples(
    run_checkpoint: RunCheckpoint,
    settings: Mapping[str, str],
    trainers: Mapping[str, Mapping[str, str]],
) -> int | None:
    """The last step whose weights sampled what a run that goes back may train on; None for any.

    With the settings that it had, steps make the same weights again, but for rounding. With others
    they do not: what those of later steps sampled is of a policy that there will never be, however
    close its step is. Nothing that was sampled or rewarded otherwise is trained on: -1.
    """
    changed = {
        name
        for name, digest in run_checkpoint.settings.items()
        if name != _INITIAL and settings.get(name) != digest
    }
    if changed & _OF_SAMPLES:
        return -1
    others = {
        key.partition(".")[0]
        for name, before in run_checkpoint.trainers.items()
        if name != ENGINES
        for key in _other_keys(before, trainers.get(name, {}))
    }
    return run_checkpoint.step if changed or others - _OF_ROUNDING else None


def _other_keys(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Settings that differ, of those that both know: earlier releases may say fewer."""
    return [key for key in sorted(before.keys() & now.keys()) if before[key] != now[key]]


def check_trainers(
    run_checkpoint: RunCheckpoint,
    trainers: Mapping[str, Mapping[str, str]],
    note: Callable[[str], None],
    *,
    deterministic: bool,
) -> None:
    """Notes settings of trainers that are others than when they saved, which they do not say.

    Raises ConfigError where the run is to be deterministic.
    """
    for name, before in run_checkpoint.trainers.items():
        now = trainers.get(name, {})
        told = [
            f"{key}: {_clipped(before[key])}, now {_clipped(now[key])}"
            for key in _other_keys(before, now)
        ]
        if not told:
            continue
        more = [f"{len(told) - _NAMED} more"] if len(told) > _NAMED else []
        named = "; ".join([*told[:_NAMED], *more])
        if deterministic:
            raise ConfigError(
                f"deterministic: the {name} of the run to resume had other settings ({named}); "
                "set them back, or resume without deterministic"
            )
        note(f"resumed with other settings of the {name} ({named})")


def digest_of(value: object) -> str:
    """Of a setting, as JSON has it."""
    return xxhash.xxh3_64_hexdigest(json.dumps(value, sort_keys=True).encode())
