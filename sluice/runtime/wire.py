"""Between protobuf messages and the library's own types; servicers and clients call it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from google.protobuf import duration_pb2, struct_pb2, timestamp_pb2
from google.protobuf import message as pb
from pydantic import BaseModel, ValidationError

from sluice import address as addresses
from sluice.algo.evaluation import TaskScores, summarise
from sluice.algo.plugins import PluginSettingError, check_allowed
from sluice.algo.spec import AdvantageSpec, LossSpec
from sluice.api.common.v1 import sample_pb2
from sluice.api.converter.v1 import converter_service_pb2 as converter_pb
from sluice.api.rollout.v1 import rollout_service_pb2 as rollout_pb
from sluice.api.trainer.v1 import loss_pb2, trainer_service_pb2
from sluice.place import Place, directory_of
from sluice.runtime.errors import InvalidFieldError
from sluice.samples.blobs import BlobReference
from sluice.samples.sample import MediaSpan, Sample, VersionSpan, find_column
from sluice.weights.adapter import AdapterSpec
from sluice.weights.convert.options import Layout, PlacedOptions

if TYPE_CHECKING:  # they import torch
    from sluice.weights.convert.conversion import Result
    from sluice.weights.convert.verify import Comparison

M = TypeVar("M", bound=BaseModel)

FINISH_REASONS = {
    "": sample_pb2.FINISH_REASON_UNSPECIFIED,
    "stop": sample_pb2.FINISH_REASON_STOP,
    "length": sample_pb2.FINISH_REASON_LENGTH,
    "aborted": sample_pb2.FINISH_REASON_ABORTED,
}
_FINISH_NAMES = {int(number): name for name, number in FINISH_REASONS.items()}


def duration_of(seconds: float) -> duration_pb2.Duration:
    """A Duration of so many seconds."""
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    return duration


def seconds_of(time: duration_pb2.Duration | timestamp_pb2.Timestamp) -> float:
    """Seconds of a Duration, or of a Timestamp since 1970."""
    return time.seconds + time.nanos / 1e9


def timestamp_of(seconds: float) -> timestamp_pb2.Timestamp:
    """A Timestamp of so many seconds since 1970."""
    timestamp = timestamp_pb2.Timestamp()
    timestamp.FromNanoseconds(int(seconds * 1e9))
    return timestamp


def check_address(address: str, field: str) -> None:
    """Raises InvalidFieldError unless `address` is host:port, IPv6 in brackets."""
    try:
        addresses.check_address(address)
    except ValueError:
        raise InvalidFieldError(field, "must be host:port") from None


def loss_from_proto(message: loss_pb2.LossSpec, field: str = "loss") -> LossSpec:
    """Raises InvalidFieldError naming the setting that is wrong or without effect."""
    return _model_from_proto(LossSpec, message, field)


def advantage_from_proto(
    message: loss_pb2.AdvantageSpec, field: str = "advantage"
) -> AdvantageSpec:
    """Raises InvalidFieldError naming the setting that is wrong or without effect."""
    return _model_from_proto(AdvantageSpec, message, field)


def loss_to_proto(spec: LossSpec) -> loss_pb2.LossSpec:
    message = loss_pb2.LossSpec()
    _fill(message, spec.model_dump(exclude_none=True))
    return message


def advantage_to_proto(spec: AdvantageSpec) -> loss_pb2.AdvantageSpec:
    message = loss_pb2.AdvantageSpec()
    _fill(message, spec.model_dump(exclude_none=True))
    return message


def invalid_setting(error: PluginSettingError, field: str) -> InvalidFieldError:
    """What a caller is told of a wrong setting of what stands in `field`."""
    return InvalidFieldError(f"{field}.{error.key}", error.problem)


@contextmanager
def invalid_settings(
    field: str, plugins: Mapping[str, str], modules: Sequence[str]
) -> Iterator[None]:
    """Imports `plugins`, by field, of allowed modules alone, for a block that reads their settings.

    Raises InvalidFieldError for what the block says is wrong.
    """
    check_plugins(field, plugins, modules)
    try:
        yield
    except PluginSettingError as error:
        raise invalid_setting(error, field) from None
    except ValueError as error:
        first = next(iter(plugins), "name")
        raise InvalidFieldError(f"{field}.{first}", str(error)) from None


def check_plugins(field: str, plugins: Mapping[str, str], modules: Sequence[str]) -> None:
    """Raises InvalidFieldError for a user's name, by field, whose module is not an allowed one."""
    for key, name in plugins.items():
        try:
            check_allowed(name, modules)
        except ValueError as error:
            raise InvalidFieldError(f"{field}.{key}", str(error)) from None


def _fill(message: pb.Message, values: Mapping[str, Any]) -> None:
    """Sets the fields of a message, of messages inside, and of Structs."""
    for name, value in values.items():
        if isinstance(value, tuple):
            for each in value:
                _fill(getattr(message, name).add(), each)
        elif not isinstance(value, dict):
            setattr(message, name, value)
        elif isinstance(inner := getattr(message, name), struct_pb2.Struct):
            inner.SetInParent()
            inner.update(value)
        else:
            inner.SetInParent()
            _fill(inner, value)


def _set_fields(message: pb.Message) -> dict[str, Any]:
    return {field.name: _plain(value) for field, value in message.ListFields()}


def _plain(value: Any) -> Any:
    if isinstance(value, struct_pb2.Struct):
        return {name: _plain(each) for name, each in value.fields.items()}
    if isinstance(value, struct_pb2.Value):
        kind = value.WhichOneof("kind")
        return None if kind in (None, "null_value") else _plain(getattr(value, kind))
    if isinstance(value, struct_pb2.ListValue):
        return [_plain(each) for each in value.values]
    if isinstance(value, pb.Message):
        return _set_fields(value)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(each) for each in value]
    return value


def _model_from_proto(model: type[M], message: pb.Message, field: str) -> M:
    try:
        return model(**_set_fields(message))
    except ValidationError as error:
        first = error.errors()[0]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, PluginSettingError):
            raise invalid_setting(cause, field) from None
        path = ".".join([field, *(str(part) for part in first["loc"])])
        raise InvalidFieldError(path, first["msg"]) from None


def column_to_proto(value: np.ndarray | float) -> sample_pb2.Column:
    """A per-token flag or signal, or a per-sample scalar."""
    if not isinstance(value, np.ndarray):
        return sample_pb2.Column(scalar=float(value))
    if value.ndim == 2:
        packed = value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes()
        return sample_pb2.Column(wide=sample_pb2.WideValues(values=packed))
    if value.dtype == np.bool_:
        return sample_pb2.Column(bools=sample_pb2.BoolValues(values=value.tolist()))
    return sample_pb2.Column(floats=sample_pb2.FloatValues(values=value.tolist()))


def column_from_proto(column: sample_pb2.Column, field: str, name: str) -> np.ndarray | float:
    """bool[n], float32[n], the array of a wide one or a float. Raises InvalidFieldError."""
    kind = column.WhichOneof("kind")
    if kind == "floats":
        return np.asarray(column.floats.values, dtype=np.float32)
    if kind == "bools":
        return np.asarray(column.bools.values, dtype=np.bool_)
    if kind == "scalar":
        return float(column.scalar)
    if kind == "wide":
        known, packed = find_column(name), column.wide.values
        if known is None or not known.width:
            raise InvalidFieldError(field, "is no column of several numbers a token")
        if len(packed) % (4 * known.width):
            raise InvalidFieldError(field, f"is not {known.width} numbers of 4 bytes a token")
        wide = np.frombuffer(packed, known.dtype.newbyteorder("<")).astype(known.dtype)
        return wide.reshape(-1, known.width)
    raise InvalidFieldError(field, "holds no value")


def columns_from_proto(
    columns: Mapping[str, sample_pb2.Column], field: str
) -> dict[str, np.ndarray | float]:
    return {
        name: column_from_proto(column, f"{field}[{name}]", name)
        for name, column in columns.items()
    }


def adapter_to_proto(spec: AdapterSpec) -> sample_pb2.AdapterSpec:
    return sample_pb2.AdapterSpec(
        rank=spec.rank, alpha=spec.alpha, targets=spec.targets, base_digest=spec.base_digest
    )


def spans_to_proto(spans: Iterable[VersionSpan]) -> list[sample_pb2.VersionSpan]:
    return [
        sample_pb2.VersionSpan(
            weights=sample_pb2.WeightVersion(version=span.version, digest=span.digest),
            first_token=span.first_token,
            last_token=span.last_token,
            base_digest=span.base_digest,
        )
        for span in spans
    ]


def spans_from_proto(spans: Iterable[sample_pb2.VersionSpan]) -> tuple[VersionSpan, ...]:
    return tuple(
        VersionSpan(
            version=span.weights.version,
            digest=span.weights.digest,
            first_token=span.first_token,
            last_token=span.last_token,
            base_digest=span.base_digest,
        )
        for span in spans
    )


def experts_to_proto(experts: np.ndarray | None) -> sample_pb2.RoutedExperts | None:
    """Of int16[tokens, layers, choices]."""
    if experts is None:
        return None
    _, layers, choices = experts.shape
    data = experts.astype("<i2", copy=False).tobytes()
    return sample_pb2.RoutedExperts(layer_count=layers, choice_count=choices, experts=data)


def experts_from_proto(message: sample_pb2.RoutedExperts, field: str) -> np.ndarray:
    """int16[tokens, layers, choices]. Raises InvalidFieldError for bytes of another shape."""
    width = message.layer_count * message.choice_count
    if min(message.layer_count, message.choice_count) < 1 or len(message.experts) % (2 * width):
        raise InvalidFieldError(field, "holds no whole tokens of these layers and choices")
    values = np.frombuffer(message.experts, dtype="<i2").astype(np.int16, copy=False)
    return values.reshape(-1, message.layer_count, message.choice_count)


MEDIA_KINDS = {"image": sample_pb2.MEDIA_KIND_IMAGE}
_MEDIA_NAMES = {number: name for name, number in MEDIA_KINDS.items()}


def media_to_proto(media: Iterable[MediaSpan]) -> list[sample_pb2.MediaSpan]:
    return [
        sample_pb2.MediaSpan(
            blob=sample_pb2.BlobReference(digest=span.digest, size_bytes=span.size),
            kind=MEDIA_KINDS[span.kind],
            first_token=span.first_token,
            token_count=span.token_count,
            grid_thw=span.grid_thw,
            turn=span.turn,
        )
        for span in media
    ]


def media_from_proto(media: Iterable[sample_pb2.MediaSpan]) -> tuple[MediaSpan, ...]:
    """As they came; a kind that this build does not know has a number for a name."""
    return tuple(
        MediaSpan(
            digest=span.blob.digest,
            size=span.blob.size_bytes,
            kind=_MEDIA_NAMES.get(span.kind, str(span.kind)),
            first_token=span.first_token,
            token_count=span.token_count,
            grid_thw=tuple(span.grid_thw),
            turn=span.turn,
        )
        for span in media
    )


def sample_to_proto(sample: Sample) -> sample_pb2.Sample:
    return sample_pb2.Sample(
        sample_id=sample.sample_id,
        group_id=sample.group_id,
        token_ids=sample.token_ids.tolist(),
        prompt_length=sample.prompt_length,
        finish_reason=FINISH_REASONS[sample.finish_reason],
        columns={name: column_to_proto(value) for name, value in sample.columns.items()},
        spans=spans_to_proto(sample.spans),
        routed_experts=experts_to_proto(sample.routed_experts),
        media=media_to_proto(sample.media),
    )


def sample_from_proto(message: sample_pb2.Sample, field: str = "sample") -> Sample:
    """The sample as it came; `sluice.samples.sample.validate_sample` checks it."""
    return Sample(
        sample_id=message.sample_id,
        group_id=message.group_id,
        token_ids=np.asarray(message.token_ids, dtype=np.int32),
        prompt_length=message.prompt_length,
        finish_reason=finish_reason_name(message.finish_reason),
        columns=columns_from_proto(message.columns, f"{field}.columns"),
        spans=spans_from_proto(message.spans),
        routed_experts=experts_from_proto(message.routed_experts, f"{field}.routed_experts")
        if message.HasField("routed_experts")
        else None,
        media=media_from_proto(message.media),
    )


def finish_reason_name(number: int) -> str:
    """`stop`, `length`, `aborted`, or empty for values this build does not know."""
    return _FINISH_NAMES.get(number, "")


def blob_to_proto(blob: BlobReference) -> sample_pb2.BlobReference:
    return sample_pb2.BlobReference(digest=blob.digest, size_bytes=blob.size)


def blob_from_proto(message: sample_pb2.BlobReference) -> BlobReference:
    return BlobReference(digest=message.digest, size=message.size_bytes)


def replay_of(trainer: trainer_service_pb2.Trainer) -> tuple[str, str]:
    """The setting of a trainer that has experts taken again, and its value; empty where none has.

    So it is of trainers of earlier releases, which do not tell their settings.
    """
    for name, value in trainer.settings.items():
        if name.endswith(".routing_replay") and (mode := json.loads(value)) != "off":
            return name, mode
    return "", ""


def evaluation_report(
    finished: Sequence[rollout_pb.FinishedGroup],
    failed_count: int,
    *,
    pass_at: Sequence[int] = (),
    threshold: float = 1.0,
) -> rollout_pb.EvaluationReport:
    """Sums up the finished groups of a data set.

    Each group is a task; an episode passes from a raw reward of `threshold` on.

    Means are NaN without groups. Raises ValueError for a k above the episodes of a task.
    """
    summary = summarise([_task_scores(group, threshold) for group in finished], pass_at)
    lengths = [length for group in finished for length in group.response_lengths]
    reasons = [reason for group in finished for reason in group.finish_reasons]
    truncated = sum(reason == sample_pb2.FINISH_REASON_LENGTH for reason in reasons)
    return rollout_pb.EvaluationReport(
        group_count=summary.task_count,
        failed_group_count=failed_count,
        reward_mean=summary.reward_mean,
        reward_std=summary.reward_std,
        reward_error=summary.reward_error,
        pass_at=dict(summary.pass_at),
        response_length_mean=sum(lengths) / len(lengths) if lengths else math.nan,
        truncated_share=truncated / len(reasons) if reasons else math.nan,
        min_version=min((group.min_version for group in finished), default=0),
        max_version=max((group.max_version for group in finished), default=0),
    )


def _task_scores(group: rollout_pb.FinishedGroup, threshold: float) -> TaskScores:
    """The last sample of an episode speaks for it."""
    episodes = {detail.episode: index for index, detail in enumerate(group.details)}
    last = sorted(episodes.values()) or range(len(group.rewards))
    return TaskScores(
        rewards=[group.rewards[index] for index in last],
        passes=[group.raw_rewards[index] >= threshold for index in last],
    )


_FORMATS = {
    "hf": converter_pb.FORMAT_HF,
    "torch_dist": converter_pb.FORMAT_TORCH_DIST,
    "peft": converter_pb.FORMAT_PEFT,
}
_DTYPES = {
    "keep": converter_pb.DTYPE_UNSPECIFIED,
    "float32": converter_pb.DTYPE_FLOAT32,
    "bfloat16": converter_pb.DTYPE_BFLOAT16,
    "float16": converter_pb.DTYPE_FLOAT16,
}
_STACKINGS = {
    "auto": converter_pb.STACKING_UNSPECIFIED,
    "stacked": converter_pb.STACKING_STACKED,
    "single": converter_pb.STACKING_SINGLE,
}
_QUANTIZATIONS = {
    "": converter_pb.QUANTIZATION_UNSPECIFIED,
    "fp8": converter_pb.QUANTIZATION_FP8_BLOCK,
    "fp8_ue8m0": converter_pb.QUANTIZATION_FP8_BLOCK_UE8M0,
    "int4_32": converter_pb.QUANTIZATION_INT4_GROUP_32,
    "int4_128": converter_pb.QUANTIZATION_INT4_GROUP_128,
}


def place_to_proto(place: Place | None) -> str:
    """A directory, made absolute, or the URL of a bucket; "" where none is given."""
    directory = None if place is None else directory_of(place)
    return str(place or "") if directory is None else str(directory.absolute())


def convert_options_to_proto(options: PlacedOptions) -> converter_pb.ConvertCheckpointRequest:
    """A request without its id, source and target; directories are made absolute."""
    request = converter_pb.ConvertCheckpointRequest(
        target_format=_FORMATS[options.to],
        model=place_to_proto(options.model),
        dtype=_DTYPES[options.dtype],
        quantization=_QUANTIZATIONS[options.quantize],
        layout=converter_pb.Layout(**dict(options.layout)),
        vocab_multiple=options.vocab_multiple,
        stacking=_STACKINGS[options.stacking],
        plain_norms=options.plain_norms,
        max_file_bytes=options.max_file_bytes,
    )
    if options.origin is not None:
        request.origin.directory = place_to_proto(options.origin)
        request.origin.allow.extend(options.allow)
        request.origin.deny.extend(options.deny)
    return request


def convert_options_from_proto(
    request: converter_pb.ConvertCheckpointRequest,
    place: Callable[[str, str], Place],
    *,
    workers: int,
    sync: bool,
) -> PlacedOptions:
    """The options of a request. `place` finds one by the field and what stands in it.

    Raises InvalidFieldError and what `place` raises.
    """
    values: dict[str, object] = {
        "to": _name_of(_FORMATS, request.target_format, "target_format"),
        "dtype": _name_of(_DTYPES, request.dtype, "dtype"),
        "quantize": _name_of(_QUANTIZATIONS, request.quantization, "quantization"),
        "stacking": _name_of(_STACKINGS, request.stacking, "stacking"),
        "layout": {name: getattr(request.layout, name) or 1 for name in Layout.model_fields},
        "vocab_multiple": request.vocab_multiple or 128,
        "plain_norms": request.plain_norms,
        "max_file_bytes": request.max_file_bytes,
        "workers": workers,
        "sync": sync,
    }
    if request.model:
        values["model"] = place("model", request.model)
    if request.HasField("origin"):
        values["origin"] = place("origin.directory", request.origin.directory)
        values["allow"] = list(request.origin.allow) or ["*"]
        values["deny"] = list(request.origin.deny)
    return PlacedOptions.model_validate(values)


def _name_of(numbers: Mapping[str, int], number: int, field: str) -> str:
    for name, other in numbers.items():
        if other == number:
            return name
    raise InvalidFieldError(field, "is unknown to this converter")


def conversion_to_proto(result: Result) -> converter_pb.ConvertCheckpointResponse:
    """Returns the answer to a conversion, or to its validation."""
    report = result.report
    return converter_pb.ConvertCheckpointResponse(
        target=str(result.target),
        byte_count=result.size,
        largest_group_byte_count=result.largest_group,
        report=converter_pb.ConversionReport(
            converted=report.converted,
            copied=report.copied,
            skipped=report.skipped,
            conflicting=report.conflicting,
            notes=report.notes,
        ),
        digests=result.digests,
    )


def comparison_to_proto(comparison: Comparison) -> converter_pb.VerifyCheckpointResponse:
    """Returns the answer to a comparison."""
    return converter_pb.VerifyCheckpointResponse(
        equal=comparison.same,
        equal_count=comparison.equal,
        different=comparison.different,
        only_first=comparison.only_first,
        only_second=comparison.only_second,
        byte_count=comparison.size,
    )
