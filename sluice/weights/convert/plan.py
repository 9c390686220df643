"""Plans a conversion: which bytes of the sources go where, by the rules of the model.

Digests that the writer of a source left, in the manifest of a published version or in the
record of a conversion, are checked, so that damage since then is found.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from sluice.imports import uncollected
from sluice.json_values import load_json
from sluice.place import is_plain_name
from sluice.weights.checkpoint import check_companions, check_file, check_header, companion_files
from sluice.weights.classifier import CRITIC, REWARD_MODEL
from sluice.weights.convert.hf import (
    CONFIG,
    WORKING_BYTES,
    HfSource,
    TensorPart,
    fill_from_origin,
    lay_out_hf,
    read_config,
)
from sluice.weights.convert.module_source import ModuleSource
from sluice.weights.convert.options import ConvertOptions
from sluice.weights.convert.pieces import Content, Files
from sluice.weights.convert.quantization import quantize
from sluice.weights.convert.quantized_layout import QuantizedLayout, layout_named
from sluice.weights.convert.saved import SAVED, check_saved, has_modules, saved_checks
from sluice.weights.convert.stored import is_torch_dist, read_keys
from sluice.weights.convert.torch_dist_source import TorchDistSource
from sluice.weights.convert.work import Check, ConversionReport, Work
from sluice.weights.dtypes import DTYPE_NAMES, TORCH_DTYPES
from sluice.weights.errors import (
    ConflictingTensorError,
    DamagedFileError,
    InvalidCheckpointError,
    MissingFileError,
    MissingTensorError,
)
from sluice.weights.manifest import MANIFEST_NAME, digest_bytes, digest_file, read_manifest
from sluice.weights.rules.common import PREDICTION
from sluice.weights.rules.packing import InexactTensorError
from sluice.weights.rules.rule import Stage
from sluice.weights.rules.shape import read_shape
from sluice.weights.rules.weight_map import UnknownArchitectureError, WeightMap, family_of
from sluice.weights.stored_experts import are_stacked, are_straight, tensor_shapes

RECORD = "conversion.json"


def check_files(source: Path) -> None:
    """Check the small files of a checkpoint, where their digests are known.

    Of a conversion that is what no person edits. Raises FileDigestError, MissingFileError or
    InvalidCheckpointError.
    """
    if (source / MANIFEST_NAME).is_file():
        manifest = read_manifest(source)
        if manifest.base is not None:
            raise InvalidCheckpointError(
                f"{source.name!r} holds only what changed since version {manifest.base}"
            )
        check_companions(source, manifest)
        return
    check_saved(source)
    record = _read_record(source)
    for name, digest in record.get("files", {}).items():
        check_file(source / name, digest)
    for name, digest in record.get("headers", {}).items():
        check_header(source / name, digest)


def find_checks(
    source: HfSource | TorchDistSource, taken: Collection[str] | None = None
) -> tuple[Check, ...]:
    """List what can be checked of a checkpoint; nothing where nobody left digests.

    With `taken` only the HF tensors of these names, which is what a conversion uses of an origin.
    Raises MissingTensorError where a tensor with a digest is gone, DamagedFileError where one has
    another type or shape, or FileDigestError.
    """
    digests = _known_digests(source)
    if not digests:
        return ()
    stored = dict(_stored(source, digests))
    if missing := sorted(set(digests) - set(stored)):
        raise MissingTensorError(tuple(missing))
    place = source.directory.name
    return tuple(
        Check(name, stored[name], digest, place)
        for name, digest in digests.items()
        if taken is None or name in taken or name.rpartition("[")[0] in taken
    )


def _known_digests(source: HfSource | TorchDistSource) -> dict[str, str]:
    if not (source.directory / MANIFEST_NAME).is_file():
        return _read_record(source.directory).get("digests", {})
    tensors = read_manifest(source.directory).tensors
    found = source.stored().values() if isinstance(source, HfSource) else ()
    for entry in found:
        said, content = tensors.get(entry.name), entry.content
        if said and (said.dtype, said.shape) != (DTYPE_NAMES[content.dtype], content.shape):
            raise DamagedFileError(entry.path.name, f"and its manifest differ in: {entry.name}")
    return {name: said.digest for name, said in tensors.items()}


def _read_record(source: Path) -> dict[str, dict[str, str]]:
    """Read the digests in the record of a conversion; nothing where there is none."""
    try:
        record = load_json((source / RECORD).read_bytes())
        stated = record.pop("record", None)  # earlier releases left none
        if stated not in (None, digest_record(record)):
            raise ValueError("is not as it was written")
        kinds = {"digests": record["digests"]}
        kinds |= {kind: record.get(kind, {}) for kind in ("files", "headers", "companions")}
        read = {
            kind: {str(name): str(digest) for name, digest in found.items()}
            for kind, found in kinds.items()
        }
        for name in (*read["files"], *read["headers"], *read["companions"]):
            if not is_plain_name(name):
                raise ValueError(f"names {name[:80]!r}, which lies elsewhere or is no file")
        return read
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFileError(RECORD, f"is no record of digests: {error!r}") from error


def digest_record(record: Mapping[str, object]) -> str:
    """Hash the record of a conversion."""
    return digest_bytes(json.dumps(record, sort_keys=True, default=list).encode())


def edited_files(source: Path) -> tuple[str, ...]:
    """Say which files that people may edit are not as a conversion wrote them."""
    return tuple(
        f"{name!r} of {source.name!r} is not as it was written: edited, or damaged"
        for name, digest in _read_record(source).get("companions", {}).items()
        if (source / name).is_file() and digest_file(source / name)[1] != digest
    )


def _stored(
    source: HfSource | TorchDistSource, digests: Mapping[str, str]
) -> Iterator[tuple[str, Content]]:
    """Yield tensors as they are stored, by the names that digests are kept under."""
    if isinstance(source, TorchDistSource):
        yield from source.chunks()
        return
    for entry in source.stored().values():
        name, content = entry.name, entry.content
        if f"{name}[0]" not in digests:
            yield name, content
            continue
        for index in range(content.shape[0]):
            yield f"{name}[{index}]", content.rows(index, index + 1)


def read_weights(
    config: dict[str, object], checkpoint: Path, *, predicts: bool = False
) -> WeightMap:
    """Find the rules of a model by its `config.json` and the names in an HF checkpoint of it.

    Names tell apart checkpoints with a tensor for each expert and with one of all, shapes how these
    are stored. A torch_dist checkpoint that was converted from the latter says so in its record,
    but for shapes: of it all are as they are published. `predicts`: with its layer of multi-token
    prediction.
    """
    family = family_of(config)
    architectures = config["architectures"]
    architecture = str(architectures[0]) if isinstance(architectures, list) else ""
    shapes = _shapes(checkpoint)
    shape = read_shape(
        family,
        config,
        value_head=architecture.endswith((CRITIC, REWARD_MODEL)),
        value_bias=architecture.endswith(CRITIC),
        stacked_experts=are_stacked(shapes),
        straight_experts=are_straight(shapes),
        predicts=predicts,
    )
    return WeightMap(family, shape)


def has_prediction(directory: Path, config: dict[str, object]) -> bool:
    """Return whether a torch_dist checkpoint has a trained layer of multi-token prediction."""
    before = f"{family_of(config).prefix}{PREDICTION}"
    return any(key.startswith(before) for key in read_keys(directory))


def _shapes(checkpoint: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of an HF checkpoint; names alone of what was converted from one."""
    try:
        return tensor_shapes(checkpoint)
    except MissingFileError:
        pass
    try:
        report = load_json((checkpoint / RECORD).read_bytes())["report"]
        return {str(name): () for name in report["converted"]}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedFileError(RECORD, f"is malformed: {error}") from error


Groups = list[tuple[str, list[TensorPart]]]


def plan_conversion(source: Path, options: ConvertOptions, files: Files) -> Work:
    """Plan all of the work. `files` must stay open until it is done.

    Raises OptionError, the errors of `sluice.weights.errors` or PartitionError.
    """
    options.check()
    edited: list[str] = []
    for directory in {source, options.origin or source, options.model or source}:
        check_files(directory)
        edited += edited_files(directory)
    work = _plan(source, options, files)
    notes = (*work.report.notes, *sorted(edited))
    checks = (*work.checks, *saved_checks(source))
    return replace(work, checks=checks, report=replace(work.report, notes=notes))


def _refuse_run(source: Path) -> None:
    """Raises InvalidCheckpointError for a directory of a run that holds weights elsewhere."""
    if (source / CONFIG).exists():
        return
    roots = [source, source / "weights", source / "store" / "weights"]
    if (source / SAVED).is_file():
        roots = [source.absolute().parent.parent / "weights"]
    for versions in (root / "versions" for root in roots):
        if found := sorted(path.name for path in versions.glob("[0-9]" * 8)):
            raise InvalidCheckpointError(
                f"{str(source)!r} is no checkpoint that can be converted; the newest weights of "
                f"that run are in {str(versions / found[-1])!r}"
            )


def _described(source: Path, options: ConvertOptions) -> Path:
    """The directory that has the `config.json` of a source that may have none."""
    described = options.model or (source if (source / CONFIG).is_file() else options.origin)
    if described is None:
        raise InvalidCheckpointError(
            f"{source.name!r} says nothing of its model: give a directory with {CONFIG!r}"
        )
    return described


def _plan_modules(source: Path, options: ConvertOptions, files: Files) -> Work:
    if options.to == "torch_dist":
        raise InvalidCheckpointError(f"{source.name!r}, of the trainer, is converted to hf first")
    described = _described(source, options)
    config = read_config(described)
    stored = ModuleSource(source, described, files)
    config["dtype"] = stored.dtype  # by which transformers reads them
    config.pop("torch_dtype", None)
    return _plan_hf(stored.groups(), config, described, options, files, set())


def _plan(source: Path, options: ConvertOptions, files: Files) -> Work:
    if has_modules(source):
        return _plan_modules(source, options, files)
    if is_torch_dist(source):
        described = _described(source, options)
        config = read_config(described)
        if options.to == "torch_dist":
            raise InvalidCheckpointError("the source is a torch_dist checkpoint already")
        predicts = has_prediction(source, config)
        rules = read_weights(config, options.origin or described, predicts=predicts)
        tower = set[str]()
        if options.origin and not any(key.startswith("vision_model.") for key in read_keys(source)):
            rules, tower = rules.without(Stage.VISION), rules.tensors_of(Stage.VISION)
        stored = TorchDistSource(source, rules, files)
        work = _plan_hf(
            _groups_of_torch_dist(stored, rules), config, described, options, files, tower
        )
        return replace(work, checks=(*work.checks, *find_checks(stored)))
    _refuse_run(source)
    config = read_config(options.model or source)
    if options.to == "torch_dist":
        return _plan_torch_dist(source, config, options, files)
    weights = _weights_or_none(config, source)
    spellings = () if weights is None else weights.family.spellings
    checkpoint, tower = HfSource(source, files, spellings), set()
    if weights is not None:
        if options.origin and not weights.tensors_of(Stage.VISION) & set(checkpoint.names()):
            weights, tower = weights.without(Stage.VISION), weights.tensors_of(Stage.VISION)
        checkpoint.check(weights)
        _check_copies(checkpoint, weights, files)
    names = [n for n in checkpoint.names() if weights is None or not weights.is_ignored(n)]
    groups = [(name, checkpoint.tensor_parts(name)) for name in names]
    work = _plan_hf(groups, config, options.model or source, options, files, tower)
    skipped = {**work.report.skipped, **_ghosts(checkpoint)}
    notes = (*checkpoint.notes, *work.report.notes)
    report = replace(work.report, skipped=skipped, notes=notes)
    return replace(work, report=report, checks=(*work.checks, *find_checks(checkpoint)))


def _ghosts(source: HfSource) -> dict[str, str]:
    return dict.fromkeys(source.ghosts, "named by the index, in no file")


def _check_copies(source: HfSource, weights: WeightMap, files: Files) -> None:
    """Raises ConflictingTensorError where tensors that are tied differ."""
    present = set(source.names())
    for binding in weights.bindings():
        for copy in binding.copies:
            first = binding.sources[0].name
            if copy.name in present and files.digest(source.content(copy.name)) != files.digest(
                source.content(first)
            ):
                raise ConflictingTensorError(first, copy.name)


def _plan_torch_dist(
    source: Path, config: dict[str, object], options: ConvertOptions, files: Files
) -> Work:
    with uncollected():  # only here: torch's own writer brings DTensor and sympy with it
        from sluice.weights.convert.torch_dist_target import TorchDistLayout, ToTorchDist

    weights = read_weights(config, source)
    checkpoint = HfSource(source, files, weights.family.spellings)
    checkpoint.check(weights)
    _check_copies(checkpoint, weights, files)
    making = ToTorchDist(checkpoint, weights, options, files)
    groups = list(making.groups())
    total = sum(part.content.size for _, parts in groups for part in parts)
    layout = TorchDistLayout(
        groups, list(making.states()), max_file_bytes=options.file_bytes(total)
    )
    common = {"iteration": 0, "checkpoint_version": 3.0}
    owned = weights.hf_tensors()
    skipped = {n: _reason(weights, n) for n in checkpoint.names() if n not in owned}
    skipped |= {n: "stored twice, equal" for n in checkpoint.duplicates} | _ghosts(checkpoint)
    texts = {**layout.texts(common), **_companions(options.model or source, config)}
    notes = (*checkpoint.notes, *making.notes)
    report = ConversionReport(converted=tuple(sorted(owned)), skipped=skipped, notes=notes)
    return Work(
        layout.files,
        layout.groups,
        texts,
        report,
        find_checks(checkpoint),
        finish=layout.write_metadata,
    )


def _plan_hf(
    groups: Groups,
    config: dict[str, object],
    described: Path,
    options: ConvertOptions,
    files: Files,
    tower: Collection[str],
) -> Work:
    """Lay out an HF checkpoint. `tower`: tensors of the model that the origin alone may have."""
    weights = _weights_or_none(config, options.origin or described)
    report = ConversionReport(converted=tuple(sorted({p.name for _, ps in groups for p in ps})))
    checks: tuple[Check, ...] = ()
    if options.origin is not None:
        origin = HfSource(options.origin, files, weights.family.spellings if weights else ())
        copied, report = fill_from_origin(groups, origin, options, weights, config, tower)
        groups = [*groups, *copied]
        checks = find_checks(origin, origin.names_in_files(report.copied))
    if missing := sorted(set(tower).difference(report.copied, report.skipped)):
        raise MissingTensorError(tuple(missing))
    config = dict(config)
    config.pop("quantization_config", None)
    if isinstance(text := config.get("text_config"), Mapping):
        config["text_config"] = {k: v for k, v in text.items() if k != "quantization_config"}
    if options.dtype != "keep":
        groups = _cast(groups, getattr(torch, options.dtype), weights)
        config["dtype"] = options.dtype
        config.pop("torch_dtype", None)
    if (layout := layout_named(options.quantize)) is not None:
        groups, kept = _quantize(groups, layout, files)
        config["quantization_config"] = layout.config(kept)
    total = sum(part.content.size for _, parts in groups for part in parts)
    laid, work, texts = lay_out_hf(groups, max_file_bytes=options.file_bytes(total))
    texts |= _companions(described, config)
    return Work(laid, work, texts, report, checks)


def _groups_of_torch_dist(source: TorchDistSource, weights: WeightMap) -> Groups:
    groups: Groups = []
    for binding in source.bindings():
        contents = source.contents(binding)
        parts = [
            TensorPart(s.name, contents[s.name], s.index, s.shape[0] if s.index is not None else 1)
            for s in binding.sources
        ]
        parts += [
            TensorPart(copy, content)
            for name, content in contents.items()
            for copy in weights.copies_of(name)
        ]
        groups.append((binding.megatron, parts))
    return groups


def _cast(groups: Groups, dtype: torch.dtype, weights: WeightMap | None) -> Groups:
    def change(part: TensorPart) -> TensorPart:
        kept = weights is not None and weights.is_full_precision(part.name)
        if kept or part.is_kept or not part.content.dtype.is_floating_point:
            return part
        return replace(part, content=part.content.cast(dtype))

    return [(name, [change(part) for part in parts]) for name, parts in groups]


def _quantize(groups: Groups, layout: QuantizedLayout, files: Files) -> tuple[Groups, list[str]]:
    """Matrices with their scales, and the names of the modules left as they are.

    Raises InvalidCheckpointError where the layout has no place for a tensor, or for none at all.
    """
    made, kept, count = [], set(), 0
    for name, parts in groups:
        now: list[TensorPart] = []
        for part in parts:
            if refusal := layout.refusal(part.name, part.shape):
                raise InvalidCheckpointError(refusal)
            if part.content.dtype.itemsize == 1 or not layout.quantizes(part.name, part.shape):
                if len(part.shape) == 2 and part.name.endswith(".weight"):
                    kept.add(part.name.removesuffix(".weight"))
                now.append(part)
            else:
                count += 1
                now += _quantized(part, layout, files)
        made.append((name, now))
    if not count:
        raise InvalidCheckpointError(f"it has no weights that are stored in {layout.label}")
    return made, sorted(kept)


def _quantized(part: TensorPart, layout: QuantizedLayout, files: Files) -> Sequence[TensorPart]:
    content, shape = part.content, part.content.shape

    def compute(which: int) -> torch.Tensor:
        weight = files.load(content)
        if not torch.isfinite(weight).all():
            raise InexactTensorError(f"{part.name!r} has numbers that are infinite, or none")
        return quantize(weight, layout)[which]

    items = torch.Size(shape).numel()
    working = content.working_bytes + content.size + WORKING_BYTES * items
    return [
        TensorPart(
            name,
            Content(
                TORCH_DTYPES[dtype], stored, compute=partial(compute, which), working_bytes=working
            ),
        )
        for which, (name, (dtype, stored)) in enumerate(
            zip(layout.names(part.name), layout.parts(shape), strict=True)
        )
    ]


def _companions(directory: Path, config: dict[str, object]) -> dict[str, bytes]:
    texts = {path.name: path.read_bytes() for path in companion_files(directory)}
    if config != read_config(directory):
        texts[CONFIG] = (json.dumps(config, indent=2) + "\n").encode()
    return texts


def _weights_or_none(config: dict[str, object], checkpoint: Path) -> WeightMap | None:
    """Find the rules, if any: HF to HF needs none, so an unknown architecture is no error there."""
    try:
        return read_weights(config, checkpoint)
    except UnknownArchitectureError:
        return None


def _reason(weights: WeightMap, name: str) -> str:
    if weights.is_copy(name):
        return "tied: equal to the tensor that was converted"
    return "not owned by training" if weights.is_foreign(name) else "carries no weights"
