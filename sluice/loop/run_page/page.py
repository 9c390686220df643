"""Runs beside each other as one HTML file; it asks the network for nothing, and changes no run."""

from __future__ import annotations

import base64
import contextlib
import html
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from sluice.config import ConfigError
from sluice.durable import write_output
from sluice.loop.journal import BACK, END, NOTE, START, read_journal
from sluice.loop.ledger import SeenGroup, groups_of
from sluice.loop.report import read_metrics, tokens_per_second
from sluice.loop.run_samples import SeenSample, image_of, load_samples, pieces_of
from sluice.loop.status import life_of
from sluice.place import Place, place_of
from sluice.samples.tokenizer import TextTokenizer
from sluice.yaml_values import load_yaml

MOST_SAMPLES = 10_000  # of all runs; a browser scrolls through them without effort
MOST_TOKENS = 600_000  # that are shown one by one; of further samples the text alone
LONGEST = 8_192  # tokens of a prompt or response; what is behind is cut off
MOST_IMAGE_BYTES = 24 << 20

_PANELS = (
    ("learning", ("reward_mean", "response_length_mean", "loss", "entropy", "grad_norm")),
    (
        "estimates",
        (
            "advantage_abs_mean",
            "silent_groups",
            "filtered_groups",
            "dropped_groups",
            "kl_reference",
        ),
    ),
    (
        "preferences",
        ("preference_loss", "accuracy", "reward_margin", "held_out_loss", "held_out_accuracy"),
    ),
    (
        "trust",
        ("rollout_mismatch", "ratio", "clipped_high", "clipped_low", "kl_old_k3", "staleness_mean"),
    ),
    (
        "experts",
        (
            "expert_load_max",
            "expert_load_mean",
            "experts_unused",
            "experts_aux_loss",
            "experts_z_loss",
        ),
    ),
    (
        "speed",
        (
            "tokens_per_second",
            "step_seconds",
            "rollout_seconds",
            "train_seconds",
            "publish_seconds",
            "pause_seconds",
            "memory_peak_gib",
        ),
    ),
)
_LABELS = {
    "reward_mean": "mean reward",
    "response_length_mean": "tokens",
    "rollout_mismatch": "|trainer - engine|, nats a token",
    "ratio": "new over old probability",
    "clipped_high": "share of tokens",
    "clipped_low": "share of tokens",
    "staleness_mean": "steps behind",
    "tokens_per_second": "trained on, whole step",
    "pause_seconds": "engines stand still",
    "memory_peak_gib": "most that tensors of a rank held, GiB",
    "silent_groups": "all rewards equal",
    "kl_reference": "nats a token",
    "preference_loss": "of a pair",
    "accuracy": "share of pairs ranked as they are preferred",
    "reward_margin": "of the chosen over the rejected",
    "grad_norm": "before clipping",
    "expert_load_max": "busiest expert over the mean of its layer, worst layer",
    "expert_load_mean": "the same, mean of layers",
    "experts_unused": "that a step sends no token to",
    "experts_aux_loss": "1 where use is even, mean of layers",
    "experts_z_loss": "log of summed exponentials, squared",
}
_NOT_CURVES = {"step", "time", "optimizer_step", "weight_version", "epoch"}


@dataclass(frozen=True)
class SeenRun:
    """What a run directory holds, as far as it can be read; `warnings` tell of the rest."""

    run_dir: Path
    rows: list[dict[str, Any]]
    scores: list[dict[str, Any]]
    events: list[dict[str, Any]]
    warnings: list[str] = field(default_factory=list)

    @property
    def config(self) -> Mapping[str, Any]:
        """Settings of the last start; empty where none is recorded."""
        config = self.start.get("config")
        return config if isinstance(config, Mapping) else {}

    @property
    def start(self) -> dict[str, Any]:
        """The last start; empty where none is recorded."""
        return next((event for event in reversed(self.events) if event["event"] == START), {})

    @cached_property
    def groups(self) -> list[SeenGroup] | None:
        """Those of its ledger; None where that cannot be read."""
        return groups_of(self.run_dir, self.warnings.append)

    @property
    def store(self) -> Place:
        """Where its samples are: as its settings say, or as `sluice up` wrote, or below it."""
        if isinstance(store := self.config.get("store"), str) and store:
            with contextlib.suppress(ValueError):  # it can be no place
                return place_of(store)
        beside = self.run_dir / "store"
        services = self.services
        if services is not None and not beside.is_dir():
            return services.parent / "store"
        return beside

    @property
    def services(self) -> Path | None:
        """The services.json that it began with; None where its directory is gone by now."""
        services = self.config.get("services")
        if not isinstance(services, str) or not services:
            return None
        return path if os.path.isdir((path := Path(services)).parent) else None


def read_run(run_dir: Path) -> SeenRun:
    """Raises ConfigError for a directory that is none, or holds no run."""
    if not os.path.isdir(run_dir):
        raise ConfigError(f"{str(run_dir)[:200]!r} is no run directory")
    events, warnings = read_journal(run_dir), list[str]()
    try:
        rows = read_metrics(run_dir)
    except OSError as error:
        raise ConfigError(f"{run_dir}: {error.strerror}") from None
    if not rows and not events:
        raise ConfigError(f"{run_dir} holds no run: neither metrics.jsonl nor a journal")
    steps = [row for row in rows if "score" not in row]
    scores = [row for row in rows if "score" in row and isinstance(row.get("dataset"), str)]
    return SeenRun(run_dir, steps, scores, events, warnings)


def tokenizer_of(run: SeenRun, given: Path | None) -> TextTokenizer | None:
    """That of the rollout services of a run, or the given one. Raises ConfigError for that."""
    if given is not None:
        return TextTokenizer(given)
    for place in tokenizer_places(run):
        try:
            return TextTokenizer(place)
        except (ConfigError, OSError):
            continue
    run.warnings.append("no tokenizer is there any more; give --tokenizer to see texts")
    return None


def tokenizer_places(run: SeenRun) -> list[Path]:
    """Where the tokenizer of a run's rollout services may be, likeliest first."""
    import yaml

    configured = run.config.get("tokenizer")
    places = [Path(configured)] if isinstance(configured, str) else []
    folders = [run.run_dir] if run.services is None else [run.services.parent, run.run_dir]
    for folder in folders:
        for path in sorted((folder / "services").glob("*.yaml")):
            try:
                config = load_yaml(path.read_text())
            except (OSError, ValueError, RecursionError, yaml.YAMLError):
                continue
            if isinstance(config, dict) and isinstance(config.get("tokenizer"), str):
                places.append(Path(config["tokenizer"]))
    return [*places, run.run_dir / "model"]


def write_run_page(
    run_dirs: Sequence[Path], output: Path, *, tokenizer: Path | None, samples: int
) -> str:
    """Write the page of these runs; what to say about it. Raises ConfigError."""
    runs = [read_run(run_dir) for run_dir in run_dirs]
    page = render_runs(runs, tokenizer=tokenizer, samples=samples, beside=output.parent)
    try:
        write_output(output, page.encode("utf-8", "replace"))
    except OSError as error:
        raise ConfigError(f"-o: {output}: {error.strerror}") from None
    names = ", ".join(run.run_dir.resolve().name for run in runs)
    told = f"{output}: {sum(len(run.rows) for run in runs)} steps of {names}"
    warnings = [
        f"{run.run_dir.name}: {text}" for run in runs for text in dict.fromkeys(run.warnings)
    ]
    return "\n".join([*warnings, told])


def render_runs(
    runs: Sequence[SeenRun], *, tokenizer: Path | None, samples: int, beside: Path
) -> str:
    """The page; `beside` is the directory that links to traces are relative to."""
    assets = resources.files("sluice.loop.run_page")
    data = page_data(runs, tokenizer=tokenizer, samples=samples, beside=beside)
    # no text of a run can end the script that holds it
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    parts = {
        "title": html.escape(data["title"]),
        "style": assets.joinpath("page.css").read_text(),
        "charts": assets.joinpath("charts.js").read_text(),
        "script": assets.joinpath("page.js").read_text(),
        "data": text,
    }
    page = assets.joinpath("page.html").read_text()
    head, *rest = page.split("<!--")
    filled = [head]
    for part in rest:
        name, _, behind = part.partition("-->")
        filled += [parts[name], behind]
    return "".join(filled)


def page_data(
    runs: Sequence[SeenRun], *, tokenizer: Path | None, samples: int, beside: Path
) -> dict[str, Any]:
    """What the page draws; numbers that are not finite are None."""
    names = _names(runs)
    book = _SampleBook(samples)
    for index, run in enumerate(runs):
        share = math.ceil((samples - len(book.rows)) / (len(runs) - index))
        book.add(index, run, tokenizer_of(run, tokenizer), share)
    shown = [_run(run, name, beside) for run, name in zip(runs, names, strict=True)]
    known = {name for _, panel in _PANELS for name in panel}
    others = sorted({name for run in shown for name in run["columns"]} - known)
    events = [event for index, run in enumerate(runs) for event in _events(index, run)]
    return {
        "title": "Runs: " + ", ".join(names) if len(runs) > 1 else f"Run {names[0]}",
        "warnings": [
            f"{name}: {text}"
            for run, name in zip(runs, names, strict=True)
            for text in dict.fromkeys(run.warnings)
        ],
        "runs": shown,
        "panels": [*_PANELS, ("everything else", others)],
        "labels": _LABELS,
        "settings": _settings(runs),
        "events": sorted(events, key=lambda event: event[1]),
        "pieces": list(book.pieces),
        "samples": book.rows,
    }


def _names(runs: Sequence[SeenRun]) -> list[str]:
    """Names of directories, with as many of those above them as tell them apart."""
    paths = [run.run_dir.resolve() for run in runs]
    names = [path.name or str(path) for path in paths]
    twice = {name for name, count in Counter(names).items() if count > 1}
    return [
        f"{path.parent.name}/{name}" if name in twice else name
        for path, name in zip(paths, names, strict=True)
    ]


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) else None


def _short(value: float | None) -> float | None:
    """Six digits, which is more than a screen shows; none of what is not finite."""
    return None if _number(value) is None else float(f"{value:.6g}")


def _run(run: SeenRun, name: str, beside: Path) -> dict[str, Any]:
    rows = run.rows
    columns: dict[str, list[float | None]] = {}
    found = {key for row in rows for key, value in row.items() if _number(value) is not None}
    for key in sorted(found - _NOT_CURVES):
        columns[key] = [_short(_number(row.get(key))) for row in rows]
    rates = [tokens_per_second(row) for row in rows]
    if any(rate is not None for rate in rates):
        columns["tokens_per_second"] = [_short(_number(rate)) for rate in rates]
    seconds = np.array([_number(row.get("step_seconds")) or 0.0 for row in rows])
    hours = (np.cumsum(seconds) / 3600).tolist()
    state, detail = life_of(run.run_dir, run.events, bool(rows))
    trace = run.run_dir / "trace.html"
    return {
        "name": name,
        "state": state,
        "detail": detail,
        "step": rows[-1]["step"] if rows else 0,
        "total": run.start.get("steps") if isinstance(run.start.get("steps"), int) else None,
        "steps": [row["step"] for row in rows],
        "hours": [_short(hour) for hour in hours],
        "columns": columns,
        "scores": _scores(run, hours),
        "summary": _summary(run, float(seconds.sum())),
        "phases": _phases(rows),
        "trace": _link(trace, beside) if trace.is_file() else None,
    }


def _link(path: Path, beside: Path) -> str:
    try:
        relative = path.resolve().relative_to(beside.resolve())
    except ValueError:
        return path.resolve().as_uri()
    from urllib.parse import quote

    return quote(str(relative))


def _scores(run: SeenRun, hours: Sequence[float]) -> dict[str, list[tuple[int, Any, float]]]:
    """By data set: step, score and hour."""
    by_step = {row["step"]: hour for row, hour in zip(run.rows, hours, strict=True)}
    found: dict[str, list[tuple[int, Any, float]]] = {}
    for row in run.scores:
        point = (row["step"], _number(row["score"]), by_step.get(row["step"], 0.0))
        found.setdefault(row["dataset"], []).append(point)
    return found


def _summary(run: SeenRun, seconds: float) -> dict[str, Any]:
    rewards = [r for row in run.rows[-10:] if (r := _number(row.get("reward_mean"))) is not None]
    tokens = sum(_number(row.get("tokens")) or 0.0 for row in run.rows)
    return {
        "reward": _number(sum(rewards) / len(rewards)) if rewards else None,
        "seconds": _number(seconds),
        "tokens": _number(tokens),
        "rate": _number(tokens / seconds) if seconds else None,
        "starts": sum(event["event"] == START for event in run.events),
        "backs": max(0, sum(event["event"] == BACK for event in run.events)),
        "skipped": sum(bool(row.get("skipped")) for row in run.rows),
        "groups": _group_counts(run),
    }


def _group_counts(run: SeenRun) -> str:
    if run.groups is None:
        return "-"
    counts = Counter(group.state for group in run.groups)
    return ", ".join(f"{count} {state}" for state, count in counts.most_common()) or "-"


def _phases(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """Seconds of all steps by what they went to; they add up to the steps."""
    names = ("rollout", "train", "publish", "spool")
    sums = {name: sum(_number(row.get(f"{name}_seconds")) or 0.0 for row in rows) for name in names}
    whole = sum(_number(row.get("step_seconds")) or 0.0 for row in rows)
    sums["other"] = max(0.0, whole - sum(sums.values()))
    return [(name, seconds) for name, seconds in sums.items() if 0 < seconds < math.inf]


def _settings(runs: Sequence[SeenRun]) -> list[tuple[str, list[str | None]]]:
    """By dotted key the value of each run, versions and host first."""
    flat = []
    for run in runs:
        start = run.start
        facts: dict[str, Any] = {key: start[key] for key in ("host", "cores") if key in start}
        versions = start.get("versions")
        if isinstance(versions, Mapping):
            facts |= {f"version of {name}": version for name, version in versions.items()}
        flat.append({key: str(value) for key, value in facts.items()} | dict(_flat(run.config)))
    names = dict.fromkeys(name for each in flat for name in each)
    return [
        (name, [each.get(name) for each in flat])
        for name in names
        if any(each.get(name) not in (None, "None") for each in flat)
    ]


def _flat(value: Any, path: str = "") -> Iterable[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}" if path else str(key))
    elif path:
        yield path, value if isinstance(value, str) else json.dumps(value)


def _events(index: int, run: SeenRun) -> Iterable[tuple[int, float, int | None, str, str, bool]]:
    """Run, time, step, what, text, whether it is bad news."""
    for event in run.events:
        step = event.get("step")
        step = step if isinstance(step, int) else None
        time, text = float(event["time"]), str(event.get("text", ""))
        if not math.isfinite(time):
            continue
        if event["event"] == START:
            host = f"process {event.get('pid')} on {event.get('host')}"
            yield index, time, None, "started", host, False
        elif event["event"] == END:
            outcome = str(event.get("outcome"))
            yield index, time, step, outcome, text, outcome == "failed"
        elif event["event"] == BACK:
            yield index, time, step, "went to the state after this step", text, False
        elif event["event"] == NOTE:
            yield index, time, step, "note", text, False


class _SampleBook:
    """Samples as rows of the page; texts of tokens are there once."""

    def __init__(self, most: int) -> None:
        self.rows: list[list[Any]] = []
        self.pieces: dict[str, int] = {}
        self._tokens, self._image_bytes, self._most = 0, 0, most

    def add(self, index: int, run: SeenRun, tokenizer: TextTokenizer | None, share: int) -> None:
        groups = run.groups or ()
        seen = load_samples(run.run_dir, run.store, None, run.warnings.append, groups)
        if share <= 0:
            return
        for sample in islice(seen, share):
            self.rows.append(self._row(index, run, sample, tokenizer))
        if next(seen, None) is not None:
            run.warnings.append(f"the latest {share} samples are shown; --samples shows more")

    def _row(
        self, index: int, run: SeenRun, seen: SeenSample, tokenizer: TextTokenizer | None
    ) -> list[Any]:
        sample = seen.sample
        prompt = pieces_of(tokenizer, sample.token_ids[: sample.prompt_length][-LONGEST:].tolist())
        response = pieces_of(tokenizer, sample.token_ids[sample.prompt_length :][:LONGEST].tolist())
        self._tokens += len(response)
        is_detailed = self._tokens <= MOST_TOKENS
        arrays: list[list[Any] | None] = [None] * 4
        if is_detailed:
            mask = seen.per_token("loss_mask")
            arrays = [
                _rounded(seen.per_token("advantages")),
                _rounded(seen.mismatch),
                _rounded(seen.per_token("rollout_logprobs")),
                None if mask is None else mask[:LONGEST].astype(int).tolist(),
            ]
        numbers = {
            name: _short(_number(float(value)))
            for name, value in sample.columns.items()
            if not isinstance(value, np.ndarray) and name != "reward"
        }
        numbers["advantage"] = _short(_number(seen.advantage))
        return [
            index,
            seen.step,
            sample.group_id,
            sample.sample_id,
            "".join(prompt),
            self._numbers(response) if is_detailed else "".join(response),
            _short(_number(seen.number("reward"))),
            {name: value for name, value in numbers.items() if value is not None},
            sample.finish_reason,
            {str(name): str(text)[:LONGEST] for name, text in seen.notes.items()},
            *arrays,
            [self._image(run.store, span.digest, span.size) for span in sample.media],
        ]

    def _numbers(self, pieces: Sequence[str]) -> list[int]:
        return [self.pieces.setdefault(piece, len(self.pieces)) for piece in pieces]

    def _image(self, store: Place, digest: str, size: int) -> str:
        if self._image_bytes + size > MOST_IMAGE_BYTES:
            return "an image is left out: the page has enough of them"
        data = image_of(store, digest, size)
        if data is None:
            return f"image {digest} is no longer in the store"
        self._image_bytes += len(data)
        return "data:image/png;base64," + base64.b64encode(data).decode()


def _rounded(values: np.ndarray | None) -> list[float | None] | None:
    if values is None:
        return None
    return [float(f"{v:.4g}") if math.isfinite(v) else None for v in values[:LONGEST].tolist()]
