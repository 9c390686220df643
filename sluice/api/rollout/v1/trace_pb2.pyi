import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SpanKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SPAN_KIND_UNSPECIFIED: _ClassVar[SpanKind]
    SPAN_KIND_TASK: _ClassVar[SpanKind]
    SPAN_KIND_LEASE: _ClassVar[SpanKind]
    SPAN_KIND_QUEUE: _ClassVar[SpanKind]
    SPAN_KIND_PREFILL: _ClassVar[SpanKind]
    SPAN_KIND_DECODE: _ClassVar[SpanKind]
    SPAN_KIND_GENERATE: _ClassVar[SpanKind]
    SPAN_KIND_TOOL: _ClassVar[SpanKind]
    SPAN_KIND_SIBLINGS: _ClassVar[SpanKind]
    SPAN_KIND_REWARD: _ClassVar[SpanKind]
    SPAN_KIND_STORE: _ClassVar[SpanKind]
    SPAN_KIND_TEACHER: _ClassVar[SpanKind]
SPAN_KIND_UNSPECIFIED: SpanKind
SPAN_KIND_TASK: SpanKind
SPAN_KIND_LEASE: SpanKind
SPAN_KIND_QUEUE: SpanKind
SPAN_KIND_PREFILL: SpanKind
SPAN_KIND_DECODE: SpanKind
SPAN_KIND_GENERATE: SpanKind
SPAN_KIND_TOOL: SpanKind
SPAN_KIND_SIBLINGS: SpanKind
SPAN_KIND_REWARD: SpanKind
SPAN_KIND_STORE: SpanKind
SPAN_KIND_TEACHER: SpanKind

class GroupTrace(_message.Message):
    __slots__ = ("start_time", "place_names", "kinds", "episodes", "places", "starts", "durations")
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    PLACE_NAMES_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    EPISODES_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    DURATIONS_FIELD_NUMBER: _ClassVar[int]
    start_time: _timestamp_pb2.Timestamp
    place_names: _containers.RepeatedScalarFieldContainer[str]
    kinds: _containers.RepeatedScalarFieldContainer[SpanKind]
    episodes: _containers.RepeatedScalarFieldContainer[int]
    places: _containers.RepeatedScalarFieldContainer[int]
    starts: _containers.RepeatedScalarFieldContainer[float]
    durations: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, start_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., place_names: _Optional[_Iterable[str]] = ..., kinds: _Optional[_Iterable[_Union[SpanKind, str]]] = ..., episodes: _Optional[_Iterable[int]] = ..., places: _Optional[_Iterable[int]] = ..., starts: _Optional[_Iterable[float]] = ..., durations: _Optional[_Iterable[float]] = ...) -> None: ...
