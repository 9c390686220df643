"""Samples of a run, to look at: those kept with what the trainer knew of them, and the store's.

<run_dir>/samples/<step>-<digest>.arrow holds whole groups of a step, as the store has them, with
the columns that the trainer added.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from sluice.durable import replace_file
from sluice.loop.config import TraceConfig
from sluice.loop.ledger import LedgerGroup, SeenGroup, groups_of
from sluice.place import Place, StoreCacheConfig
from sluice.samples.arrow import InvalidGroupError, decode_group, encode_group, read_metadata
from sluice.samples.blob_store import read_blob
from sluice.samples.blobs import BlobDigestError, BlobNotFoundError, BlobReference
from sluice.samples.sample import Sample

if TYPE_CHECKING:  # a loop needs none
    from sluice.samples.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)

KEPT = "samples"  # in a run directory
KEPT_COLUMNS = ("advantages", "old_logprobs", "reference_logprobs", "values", "returns")
_FILE = re.compile(r"(\d{7,})-([0-9a-f]{16})\.arrow")
_GROUPS = "groups"
LOST = (BlobNotFoundError, BlobDigestError, InvalidGroupError)


class SampleKeeper:
    """Keeps a few groups of every so many steps; what it cannot write is left out."""

    def __init__(
        self,
        run_dir: Path,
        store: Place,
        config: TraceConfig,
        cache: StoreCacheConfig | None = None,
    ) -> None:
        self._root, self._config = run_dir / KEPT, config
        self._store, self._cache = store, cache

    def choose(self, step: int, groups: Sequence[LedgerGroup]) -> Sequence[LedgerGroup]:
        """Whole groups, the first ones; none for most steps."""
        every, room = self._config.samples_every, self._config.samples_per_step
        if not self._config.steps or not every or (step - 1) % every:
            return ()
        chosen: list[LedgerGroup] = []
        for group in groups:
            room -= group.sample_count
            if room < 0:
                break
            chosen.append(group)
        return chosen

    def keep(
        self, step: int, groups: Sequence[LedgerGroup], columns: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Write groups of a step with columns by sample id."""
        try:
            samples, metadata = self._read(groups, columns)
            if samples:
                self._write(step, samples, metadata)
        except (OSError, *LOST) as error:  # a run goes on without them
            logger.warning("samples of step %d: %s", step, error)

    def _read(
        self, groups: Sequence[LedgerGroup], columns: Mapping[str, Mapping[str, Any]]
    ) -> tuple[list[Sample], dict[str, dict[str, str]]]:
        samples, metadata = list[Sample](), dict[str, dict[str, str]]()
        for group in groups:
            assert group.blob is not None
            data = read_blob(self._store, group.blob, self._cache)
            metadata[group.group_id] = _plain(read_metadata(data))
            for sample in decode_group(data):
                more = columns.get(sample.sample_id, {})
                merged = {**sample.columns, **more}
                samples.append(replace(sample, columns=merged, routed_experts=None))
        return samples, metadata

    def _write(self, step: int, samples: list[Sample], metadata: dict[str, dict[str, str]]) -> None:
        data = encode_group(samples, {_GROUPS: json.dumps(metadata)})
        self._root.mkdir(parents=True, exist_ok=True)
        for old in kept_files(self._root):
            if _step_of(old) >= step:  # of a step that is made again
                old.unlink(missing_ok=True)
        path = self._root / f"{step:07}-{xxhash.xxh3_64_hexdigest(data)}.arrow"
        replace_file(path, data, temporary=self._root, sync=False)
        for old in kept_files(self._root)[: -self._config.steps]:
            old.unlink(missing_ok=True)


def kept_files(root: Path) -> list[Path]:
    """By step; later ones last. Raises OSError where they cannot be listed."""
    if not root.is_dir():
        return []
    return sorted(path for path in root.iterdir() if _FILE.fullmatch(path.name))


def _step_of(path: Path) -> int:
    return int(path.name.partition("-")[0])


def _plain(metadata: Mapping[str, str]) -> dict[str, str]:
    """Without the seeds of sampling, which nobody reads."""
    return {name: text for name, text in metadata.items() if name != "sampling"}


@dataclass(frozen=True)
class SeenSample:
    """A sample, the step that trained on it (None: none has) and what its environment noted."""

    step: int | None
    state: str  # consumed, generated, dropped
    sample: Sample
    notes: Mapping[str, str]

    def number(self, name: str) -> float | None:
        """A value of the whole sample, e.g. its reward."""
        value = self.sample.columns.get(name)
        return None if value is None or isinstance(value, np.ndarray) else float(value)

    def per_token(self, name: str) -> np.ndarray | None:
        """A value of every response token."""
        value = self.sample.columns.get(name)
        return value if isinstance(value, np.ndarray) else None

    @property
    def advantage(self) -> float | None:
        """Mean over the tokens trained on."""
        values, mask = self.per_token("advantages"), self.per_token("loss_mask")
        if values is None or not len(values):
            return None
        chosen = values if mask is None or not mask.any() else values[mask]
        return float(np.mean(chosen))

    @property
    def mismatch(self) -> np.ndarray | None:
        """By token: log-prob of the trainer minus that of the engine."""
        ours, theirs = self.per_token("old_logprobs"), self.per_token("rollout_logprobs")
        return None if ours is None or theirs is None else ours - theirs


def load_samples(
    run_dir: Path,
    store: Place,
    steps: range | None,
    warn: Callable[[str], None],
    groups: Sequence[SeenGroup] | None = None,
) -> Iterator[SeenSample]:
    """Samples of a run: those kept with what the trainer knew, then those of the store, each with
    the latest steps first. Those that the trainer has not seen come last.

    `warn` is told of files and blobs that are damaged or gone. Nothing is changed. `groups`: those
    of the ledger, where it was read before.
    """
    told, kept = set[str](), list[Path]()
    try:
        kept = kept_files(run_dir / KEPT)
    except OSError as error:
        warn(f"{run_dir / KEPT}: {error.strerror}")
    for path in reversed(kept):
        step = _step_of(path)
        if steps is not None and step not in steps:
            continue
        for seen in _kept(path, step, warn):
            told.add(seen.sample.group_id)
            yield seen
    found = groups_of(run_dir, warn) if groups is None else groups
    gone, broken = 0, list[str]()
    for group in sorted(found or (), key=lambda group: -(group.consumed_step or 0)):
        if group.blob is None or group.group_id in told:
            continue
        if steps is not None and (group.consumed_step is None or group.consumed_step not in steps):
            continue
        try:
            data = read_blob(store, group.blob)
            samples, notes = decode_group(data), _plain(read_metadata(data))
        except BlobNotFoundError:
            gone += 1
            continue
        except (BlobDigestError, InvalidGroupError, OSError) as error:
            broken.append(f"{group.group_id}: {error}")
            continue
        for sample in samples:
            yield SeenSample(group.consumed_step, group.state, sample, notes)
    if gone:
        warn(f"{gone} groups are no longer in the store {store} (retention.blob_grace_seconds)")
    if broken:
        warn(f"{len(broken)} groups are damaged in the store, e.g. {broken[0]}")


def _kept(path: Path, step: int, warn: Callable[[str], None]) -> Iterator[SeenSample]:
    try:
        data = path.read_bytes()
        if xxhash.xxh3_64_hexdigest(data) != path.stem.rpartition("-")[2]:
            raise InvalidGroupError("its bytes are not those that were written")
        samples = decode_group(data)
        notes = json.loads(read_metadata(data).get(_GROUPS, "{}"))
    except FileNotFoundError:  # a run that goes on forgets its oldest
        return
    except (OSError, ValueError) as error:
        warn(f"{path} is damaged and left out: {error}")
        return
    for sample in samples:
        yield SeenSample(step, "consumed", sample, notes.get(sample.group_id, {}))


def pieces_of(tokenizer: TextTokenizer | None, token_ids: Sequence[int]) -> list[str]:
    """The text that each token adds; "" where its bytes are whole only with the next one's.

    All of them are the text of all tokens: bytes that the last ones leave open are the last one's.
    Without a tokenizer the numbers themselves.
    """
    if tokenizer is None:
        return [f"{token} " for token in token_ids]
    step = tokenizer.decoder(special=True)
    pieces = [step(int(token)) for token in token_ids]
    if pieces:
        [whole] = tokenizer.decode([[int(token) for token in token_ids]], special=True)
        told = "".join(pieces)
        pieces[-1] += whole[len(told) :] if whole.startswith(told) else ""
    return pieces


def image_of(store: Place, digest: str, size: int) -> bytes | None:
    """The PNG that a sample was shown; None where it is gone or damaged."""
    try:
        return bytes(read_blob(store, BlobReference(digest, size)))
    except (BlobNotFoundError, BlobDigestError, OSError):
        return None


@dataclass(frozen=True, kw_only=True)
class SampleFilter:
    """Which samples to show; what is None or empty selects nothing away."""

    group: str = ""
    contains: str = ""
    finish_reason: str = ""
    min_reward: float | None = None
    max_reward: float | None = None

    def takes(self, seen: SeenSample, text: Callable[[], str]) -> bool:
        """`text` is asked for only where the rest fits. NaN is within no bounds."""
        sample, reward = seen.sample, seen.number("reward")
        if self.group and sample.group_id != self.group:
            return False
        if self.finish_reason and sample.finish_reason != self.finish_reason:
            return False
        low, high = self.min_reward, self.max_reward
        if (low is not None or high is not None) and (reward is None or math.isnan(reward)):
            return False
        if low is not None and reward is not None and reward < low:
            return False
        if high is not None and reward is not None and reward > high:
            return False
        return not self.contains or self.contains in text()


def export_row(seen: SeenSample, prompt: str, response: str) -> dict[str, Any]:
    """A row of an exported file: texts, tokens, numbers; absent values are None."""
    sample = seen.sample
    numbers = {
        name: float(value)
        for name, value in sample.columns.items()
        if not isinstance(value, np.ndarray)
    }
    arrays = {
        name: _listed(value)
        for name, value in sample.columns.items()
        if isinstance(value, np.ndarray)
    }
    return {
        "step": seen.step,
        "state": seen.state,
        "group_id": sample.group_id,
        "sample_id": sample.sample_id,
        "prompt": prompt,
        "response": response,
        "finish_reason": sample.finish_reason,
        "reward": numbers.pop("reward", None),
        "raw_reward": numbers.pop("raw_reward", None),
        "advantage": seen.advantage,
        "prompt_tokens": sample.prompt_length,
        "response_tokens": sample.response_length,
        "weight_versions": sorted({span.version for span in sample.spans}),
        "notes": json.dumps(dict(seen.notes), sort_keys=True),
        "numbers": json.dumps(_json_of(numbers), sort_keys=True),
        "token_ids": sample.token_ids.tolist(),
        **{name: arrays.get(name) for name in _EXPORTED},
        "images": [span.digest for span in sample.media],
    }


_EXPORTED = ("loss_mask", "rollout_logprobs", "old_logprobs", "reference_logprobs", "advantages")


def _listed(values: np.ndarray) -> list[Any]:
    found: list[Any] = values.tolist()
    return found


def export(rows: Iterable[Mapping[str, Any]], path: Path) -> int:
    """Write rows as Parquet or JSONL, by the ending of `path`; how many.

    JSON has no words for NaN and infinity: they are null there.

    Raises ValueError for another ending, OSError.
    """
    if path.suffix == ".jsonl":
        count = 0
        with path.open("w") as file:
            for count, row in enumerate(rows, 1):  # noqa: B007
                file.write(json.dumps(_json_of(row), allow_nan=False) + "\n")
        return count
    if path.suffix != ".parquet":
        raise ValueError(f"{path.name} ends neither in .parquet nor in .jsonl")
    import pyarrow as pa
    import pyarrow.parquet as pq

    numbers = pa.list_(pa.float32())
    types = {
        "step": pa.int64(),
        "weight_versions": pa.list_(pa.int64()),
        "token_ids": pa.list_(pa.int32()),
        "images": pa.list_(pa.string()),
        "loss_mask": pa.list_(pa.bool_()),
        **dict.fromkeys(("reward", "raw_reward", "advantage"), pa.float64()),
        **dict.fromkeys(("prompt_tokens", "response_tokens"), pa.int64()),
        **dict.fromkeys([name for name in _EXPORTED if name != "loss_mask"], numbers),
    }
    listed = [dict(row) for row in rows]
    names = export_columns()
    table = pa.table(
        {n: pa.array([row[n] for row in listed], types.get(n, pa.string())) for n in names}
    )
    pq.write_table(table, path)
    return len(listed)


def _json_of(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _json_of(inner) for name, inner in value.items()}
    return [_json_of(inner) for inner in value] if isinstance(value, list) else value


def export_columns() -> list[str]:
    """Names of what `export_row` gives, in its order."""
    nothing = Sample(
        sample_id="", group_id="", token_ids=np.zeros(1, dtype=np.int32), prompt_length=1
    )
    return list(export_row(SeenSample(None, "", nothing, {}), "", ""))
