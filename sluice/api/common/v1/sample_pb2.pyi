from google.api import field_behavior_pb2 as _field_behavior_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORTED: _ClassVar[FinishReason]

class MediaKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEDIA_KIND_UNSPECIFIED: _ClassVar[MediaKind]
    MEDIA_KIND_IMAGE: _ClassVar[MediaKind]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORTED: FinishReason
MEDIA_KIND_UNSPECIFIED: MediaKind
MEDIA_KIND_IMAGE: MediaKind

class BlobReference(_message.Message):
    __slots__ = ("digest", "size_bytes")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    digest: str
    size_bytes: int
    def __init__(self, digest: _Optional[str] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class WeightVersion(_message.Message):
    __slots__ = ("version", "digest", "adapter")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    version: int
    digest: str
    adapter: str
    def __init__(self, version: _Optional[int] = ..., digest: _Optional[str] = ..., adapter: _Optional[str] = ...) -> None: ...

class AdapterSpec(_message.Message):
    __slots__ = ("rank", "alpha", "targets", "base_digest")
    RANK_FIELD_NUMBER: _ClassVar[int]
    ALPHA_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    BASE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    rank: int
    alpha: float
    targets: _containers.RepeatedScalarFieldContainer[str]
    base_digest: str
    def __init__(self, rank: _Optional[int] = ..., alpha: _Optional[float] = ..., targets: _Optional[_Iterable[str]] = ..., base_digest: _Optional[str] = ...) -> None: ...

class VersionSpan(_message.Message):
    __slots__ = ("weights", "first_token", "last_token", "base_digest")
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LAST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    BASE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    weights: WeightVersion
    first_token: int
    last_token: int
    base_digest: str
    def __init__(self, weights: _Optional[_Union[WeightVersion, _Mapping]] = ..., first_token: _Optional[int] = ..., last_token: _Optional[int] = ..., base_digest: _Optional[str] = ...) -> None: ...

class FloatValues(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, values: _Optional[_Iterable[float]] = ...) -> None: ...

class BoolValues(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, values: _Optional[_Iterable[bool]] = ...) -> None: ...

class WideValues(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: bytes
    def __init__(self, values: _Optional[bytes] = ...) -> None: ...

class Column(_message.Message):
    __slots__ = ("floats", "bools", "scalar", "wide")
    FLOATS_FIELD_NUMBER: _ClassVar[int]
    BOOLS_FIELD_NUMBER: _ClassVar[int]
    SCALAR_FIELD_NUMBER: _ClassVar[int]
    WIDE_FIELD_NUMBER: _ClassVar[int]
    floats: FloatValues
    bools: BoolValues
    scalar: float
    wide: WideValues
    def __init__(self, floats: _Optional[_Union[FloatValues, _Mapping]] = ..., bools: _Optional[_Union[BoolValues, _Mapping]] = ..., scalar: _Optional[float] = ..., wide: _Optional[_Union[WideValues, _Mapping]] = ...) -> None: ...

class RoutedExperts(_message.Message):
    __slots__ = ("layer_count", "choice_count", "experts")
    LAYER_COUNT_FIELD_NUMBER: _ClassVar[int]
    CHOICE_COUNT_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    layer_count: int
    choice_count: int
    experts: bytes
    def __init__(self, layer_count: _Optional[int] = ..., choice_count: _Optional[int] = ..., experts: _Optional[bytes] = ...) -> None: ...

class MediaSpan(_message.Message):
    __slots__ = ("blob", "kind", "first_token", "token_count", "grid_thw", "turn")
    BLOB_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    GRID_THW_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    blob: BlobReference
    kind: MediaKind
    first_token: int
    token_count: int
    grid_thw: _containers.RepeatedScalarFieldContainer[int]
    turn: int
    def __init__(self, blob: _Optional[_Union[BlobReference, _Mapping]] = ..., kind: _Optional[_Union[MediaKind, str]] = ..., first_token: _Optional[int] = ..., token_count: _Optional[int] = ..., grid_thw: _Optional[_Iterable[int]] = ..., turn: _Optional[int] = ...) -> None: ...

class Sample(_message.Message):
    __slots__ = ("sample_id", "group_id", "token_ids", "prompt_length", "finish_reason", "columns", "spans", "routed_experts", "media")
    class ColumnsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Column
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Column, _Mapping]] = ...) -> None: ...
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    sample_id: str
    group_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_length: int
    finish_reason: FinishReason
    columns: _containers.MessageMap[str, Column]
    spans: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    routed_experts: RoutedExperts
    media: _containers.RepeatedCompositeFieldContainer[MediaSpan]
    def __init__(self, sample_id: _Optional[str] = ..., group_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., prompt_length: _Optional[int] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., columns: _Optional[_Mapping[str, Column]] = ..., spans: _Optional[_Iterable[_Union[VersionSpan, _Mapping]]] = ..., routed_experts: _Optional[_Union[RoutedExperts, _Mapping]] = ..., media: _Optional[_Iterable[_Union[MediaSpan, _Mapping]]] = ...) -> None: ...
