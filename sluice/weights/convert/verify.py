"""Are two checkpoints the same?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sluice.weights.convert.hf import CONFIG, HfSource, read_config
from sluice.weights.convert.module_source import ModuleSource
from sluice.weights.convert.pieces import Content, Files
from sluice.weights.convert.plan import check_files, has_prediction, read_weights
from sluice.weights.convert.saved import has_modules
from sluice.weights.convert.stored import is_torch_dist
from sluice.weights.convert.torch_dist_source import TorchDistSource
from sluice.weights.convert.work import Control
from sluice.weights.errors import InvalidCheckpointError
from sluice.weights.rules.weight_map import WeightMap


@dataclass(frozen=True)
class Comparison:
    """Two checkpoints by HF name. `different` says what differs; equal is equal to the bit."""

    equal: int
    size: int
    different: Mapping[str, str]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]

    @property
    def same(self) -> bool:
        return not (self.different or self.only_first or self.only_second)


def compare(
    first: Path, second: Path, control: Control | None = None, *, model: Path | None = None
) -> Comparison:
    """Compare two checkpoints of any formats, tensor by tensor.

    `model` has the `config.json` of one that says nothing of its model. Raises
    CancelledConversionError, or an error of `sluice.weights.errors` for what cannot be read.
    """
    control = control or Control()
    for path in (first, second):
        check_files(path)
    with Files() as files:
        weights = _weights(first, second, model)
        described = [path for path in (model, first, second) if path and (path / CONFIG).is_file()]
        views = [_open(path, weights, described, files) for path in (first, second)]
        names = [set(view) for view in views]
        both = sorted(names[0] & names[1])
        progress = control.progress
        progress.total_tensors = len(both)
        progress.total_bytes = sum(views[0][name].size for name in both)
        different, size = {}, 0
        for name in both:
            reason = _difference(views[0][name], views[1][name], files, control)
            if reason is not None:
                different[name] = reason
            size += views[0][name].size
            progress.done_tensors += 1
    return Comparison(
        equal=len(both) - len(different),
        size=size,
        different=different,
        only_first=tuple(sorted(names[0] - names[1])),
        only_second=tuple(sorted(names[1] - names[0])),
    )


def _weights(first: Path, second: Path, model: Path | None) -> WeightMap | None:
    stored = [each for each in (first, second) if is_torch_dist(each) and not has_modules(each)]
    if not stored:
        return None
    for path in (model, first, second):
        if path is not None and (path / CONFIG).is_file():
            config = read_config(path)
            predicts = all(has_prediction(each, config) for each in stored)
            return read_weights(config, path, predicts=predicts)
    raise InvalidCheckpointError(f"no {CONFIG!r} says what model this is")


def _open(
    path: Path, weights: WeightMap | None, described: list[Path], files: Files
) -> dict[str, Content]:
    if has_modules(path):
        if weights is not None:
            raise InvalidCheckpointError(f"{path.name!r}, of the trainer, is converted to hf first")
        if not described:
            raise InvalidCheckpointError(f"no {CONFIG!r} says what model this is")
        groups = ModuleSource(path, described[0], files).groups()
        return {part.name: part.content for _, parts in groups for part in parts}
    if is_torch_dist(path):
        assert weights is not None
        source, contents = TorchDistSource(path, weights, files), {}
        for binding in source.bindings():
            parts = source.contents(binding)
            for tensor in binding.sources:
                suffix = "" if tensor.index is None else f"[{tensor.index}]"
                contents[tensor.name + suffix] = parts[tensor.name]
        return contents
    if weights is None:
        return {n: f.content for n, f in HfSource(path, files).stored().items()}
    checkpoint = HfSource(path, files, weights.family.spellings)
    left_out = {n for n in checkpoint.names() if weights.is_copy(n) or weights.is_ignored(n)}
    contents, owned = {}, weights.hf_tensors()
    for name in checkpoint.names():
        if name in left_out or (weights.is_foreign(name) and name not in owned):
            continue
        content = checkpoint.content(name)
        if name in owned and weights.is_stacked(name):
            for index in range(content.shape[0]):
                contents[f"{name}[{index}]"] = checkpoint.expert(name, index)
        else:
            contents[name] = content
    return contents


def _difference(first: Content, second: Content, files: Files, control: Control) -> str | None:
    if first.shape != second.shape:
        return f"shape {first.shape} and {second.shape}"
    if first.dtype != second.dtype:
        return f"type {first.dtype} and {second.dtype}"
    control.check()
    if files.digest(first) != files.digest(second):
        return "other numbers"
    control.progress.done_bytes += first.size
    return None
