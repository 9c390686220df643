"""`sluice check`: what would make a run fail, or do something else, before anything is started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sluice.config import ConfigError, hint, load_config, read_yaml
from sluice.config_faults import examine_file
from sluice.finding import Finding, UnfitError, show
from sluice.loop.config import (
    CommonRunConfig,
    DpoConfig,
    RewardModelRunConfig,
    RowsRunConfig,
    RunConfig,
    SftConfig,
)
from sluice.preflight.findings import Findings
from sluice.preflight.run import Preflight
from sluice.preflight.services import Services, look_at_services
from sluice.run_commands import take_value

CHECK_USAGE = (
    "sluice check RUN.yaml [--up SERVICES.yaml] [--as train|sft|dpo|reward-model] [--rows N] "
    "[--key value ...]"
)
KINDS: Mapping[str, type[CommonRunConfig]] = {
    "train": RunConfig,
    "sft": SftConfig,
    "dpo": DpoConfig,
    "reward-model": RewardModelRunConfig,
}
ROWS = 200


async def check(arguments: Sequence[str]) -> None:
    """Print findings, a line each. Raises UnfitError if one is wrong, ConfigError."""
    rest = list(arguments)
    services_yaml, kind = take_value(rest, "--up"), take_value(rest, "--as")
    rows = _rows(take_value(rest, "--rows"))
    if any(argument in ("-h", "--help") for argument in rest):
        load_config(KINDS.get(kind or "train", RunConfig), ["--help"], CHECK_USAGE)
    if not rest or rest[0].startswith("-"):
        raise ConfigError(f"the file comes before flags: {CHECK_USAGE}")
    if kind is not None and kind not in KINDS:
        raise ConfigError(f"--as: {kind[:100]!r} is no command that trains{hint(kind, KINDS)}")
    path, *flags = rest
    found = await preflight(path, flags, services_yaml, kind, rows)
    wrong = show(found, width=max(len(finding.subject) for finding in found))
    if wrong:
        raise UnfitError(f"check: the run would fail: {', '.join(wrong)}")


def _rows(text: str | None) -> int:
    if text is None:
        return ROWS
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ConfigError(f"--rows: {text[:100]!r} is no number of rows; 0 is all")
    return int(text)


async def preflight(
    path: str, flags: Sequence[str], services_yaml: str | None, kind: str | None, rows: int
) -> list[Finding]:
    """All findings, of both files, of what they name, and of how they fit."""
    findings = Findings()
    services = None
    if services_yaml is not None:
        services = look_at_services(services_yaml, findings, CHECK_USAGE)
    subject = Path(path).name
    kind = kind or _kind_of(path, services)
    examined = examine_file(KINDS[kind], path, flags, CHECK_USAGE)
    for fault in examined.faults:
        findings.wrong(subject, fault)
    if (config := examined.config) is None:
        findings.warn(subject, "nothing but its settings was looked at: they are not whole")
        return findings.found
    run = Preflight(
        config=config,
        services=services,
        findings=findings,
        rows=rows,
        is_sound=not examined.faults,
    )
    await run.look()
    if run.is_sound:
        for name, text in _summary(kind, config, run).items():
            findings.ok(name, text)
    return findings.found


def _kind_of(path: str, services: Services | None) -> str:
    """The command that a file is for, by its keys and the head of the trainer."""
    try:
        values = read_yaml(path)
    except ConfigError:
        return "train"  # whose reading says what is wrong
    if "rows" not in values or "sampling" in values:
        return "train"
    if services is not None:
        entries = services.config.services.values()
        if any(e.kind == "trainer" and e.config.get("head") == "reward" for e in entries):
            return "reward-model"
    return "dpo" if "preference" in values or _holds_pairs(values) else "sft"


def _holds_pairs(values: Mapping[str, Any]) -> bool:
    """Whether the first row of the file is of preferences."""
    from sluice.loop.row_files import read_rows

    rows = values.get("rows")
    file = rows.get("file") if isinstance(rows, dict) else None
    if not isinstance(file, str):
        return False
    try:
        return "chosen" in read_rows(Path(file), "rows.file")[0][1]
    except (ConfigError, OSError, ValueError):
        return False


def _summary(kind: str, config: CommonRunConfig, run: Preflight) -> dict[str, str]:
    """What would run, how much of it, and where it is written."""
    told = {}
    if isinstance(config, RunConfig) and config.replay is None:
        each = [
            f"{name + ': ' if name else ''}{share.samples_per_group} answers of up to "
            f"{config.training_sampling(share).max_new_tokens} tokens"
            for name, share in config.shares.items()
        ]
        longest = max(
            (share.samples_per_group or 0) * config.training_sampling(share).max_new_tokens
            for share in config.shares.values()
        )
        told["steps"] = (
            f"`sluice {kind}`: {config.steps:,} steps of {config.groups_per_step} groups, "
            f"{'; '.join(each)}: {config.groups_per_step * longest:,} sampled tokens a step at most"
        )
    elif isinstance(config, RowsRunConfig):
        epochs = f"{config.epochs} epoch{'s' if config.epochs > 1 else ''}"
        told["steps"] = f"`sluice {kind}`: {config.rows_per_step} rows a step, {epochs}"
    else:
        told["steps"] = f"`sluice {kind}`: the steps of an earlier run, again"
    try:
        told["writes"] = f"{config.run_dir}, and the store {run.store}"
    except ConfigError:
        told["writes"] = str(config.run_dir)
    return told
