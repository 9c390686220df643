import datetime

from google.api import field_behavior_pb2 as _field_behavior_pb2
from google.longrunning import operations_pb2 as _operations_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Format(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FORMAT_UNSPECIFIED: _ClassVar[Format]
    FORMAT_HF: _ClassVar[Format]
    FORMAT_TORCH_DIST: _ClassVar[Format]
    FORMAT_PEFT: _ClassVar[Format]

class Dtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[Dtype]
    DTYPE_FLOAT32: _ClassVar[Dtype]
    DTYPE_BFLOAT16: _ClassVar[Dtype]
    DTYPE_FLOAT16: _ClassVar[Dtype]

class Quantization(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    QUANTIZATION_UNSPECIFIED: _ClassVar[Quantization]
    QUANTIZATION_FP8_BLOCK: _ClassVar[Quantization]
    QUANTIZATION_FP8_BLOCK_UE8M0: _ClassVar[Quantization]
    QUANTIZATION_INT4_GROUP_32: _ClassVar[Quantization]
    QUANTIZATION_INT4_GROUP_128: _ClassVar[Quantization]

class Stacking(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STACKING_UNSPECIFIED: _ClassVar[Stacking]
    STACKING_STACKED: _ClassVar[Stacking]
    STACKING_SINGLE: _ClassVar[Stacking]

class ConversionState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CONVERSION_STATE_UNSPECIFIED: _ClassVar[ConversionState]
    CONVERSION_STATE_QUEUED: _ClassVar[ConversionState]
    CONVERSION_STATE_RUNNING: _ClassVar[ConversionState]
    CONVERSION_STATE_SUCCEEDED: _ClassVar[ConversionState]
    CONVERSION_STATE_FAILED: _ClassVar[ConversionState]
    CONVERSION_STATE_CANCELLED: _ClassVar[ConversionState]
FORMAT_UNSPECIFIED: Format
FORMAT_HF: Format
FORMAT_TORCH_DIST: Format
FORMAT_PEFT: Format
DTYPE_UNSPECIFIED: Dtype
DTYPE_FLOAT32: Dtype
DTYPE_BFLOAT16: Dtype
DTYPE_FLOAT16: Dtype
QUANTIZATION_UNSPECIFIED: Quantization
QUANTIZATION_FP8_BLOCK: Quantization
QUANTIZATION_FP8_BLOCK_UE8M0: Quantization
QUANTIZATION_INT4_GROUP_32: Quantization
QUANTIZATION_INT4_GROUP_128: Quantization
STACKING_UNSPECIFIED: Stacking
STACKING_STACKED: Stacking
STACKING_SINGLE: Stacking
CONVERSION_STATE_UNSPECIFIED: ConversionState
CONVERSION_STATE_QUEUED: ConversionState
CONVERSION_STATE_RUNNING: ConversionState
CONVERSION_STATE_SUCCEEDED: ConversionState
CONVERSION_STATE_FAILED: ConversionState
CONVERSION_STATE_CANCELLED: ConversionState

class Layout(_message.Message):
    __slots__ = ("tensor", "pipeline", "expert")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_FIELD_NUMBER: _ClassVar[int]
    EXPERT_FIELD_NUMBER: _ClassVar[int]
    tensor: int
    pipeline: int
    expert: int
    def __init__(self, tensor: _Optional[int] = ..., pipeline: _Optional[int] = ..., expert: _Optional[int] = ...) -> None: ...

class Origin(_message.Message):
    __slots__ = ("directory", "allow", "deny")
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    ALLOW_FIELD_NUMBER: _ClassVar[int]
    DENY_FIELD_NUMBER: _ClassVar[int]
    directory: str
    allow: _containers.RepeatedScalarFieldContainer[str]
    deny: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, directory: _Optional[str] = ..., allow: _Optional[_Iterable[str]] = ..., deny: _Optional[_Iterable[str]] = ...) -> None: ...

class ConvertCheckpointRequest(_message.Message):
    __slots__ = ("request_id", "source", "target", "target_format", "model", "origin", "dtype", "quantization", "layout", "vocab_multiple", "stacking", "plain_norms", "max_file_bytes", "validate_only")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    TARGET_FORMAT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_MULTIPLE_FIELD_NUMBER: _ClassVar[int]
    STACKING_FIELD_NUMBER: _ClassVar[int]
    PLAIN_NORMS_FIELD_NUMBER: _ClassVar[int]
    MAX_FILE_BYTES_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    source: str
    target: str
    target_format: Format
    model: str
    origin: Origin
    dtype: Dtype
    quantization: Quantization
    layout: Layout
    vocab_multiple: int
    stacking: Stacking
    plain_norms: bool
    max_file_bytes: int
    validate_only: bool
    def __init__(self, request_id: _Optional[str] = ..., source: _Optional[str] = ..., target: _Optional[str] = ..., target_format: _Optional[_Union[Format, str]] = ..., model: _Optional[str] = ..., origin: _Optional[_Union[Origin, _Mapping]] = ..., dtype: _Optional[_Union[Dtype, str]] = ..., quantization: _Optional[_Union[Quantization, str]] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ..., vocab_multiple: _Optional[int] = ..., stacking: _Optional[_Union[Stacking, str]] = ..., plain_norms: bool = ..., max_file_bytes: _Optional[int] = ..., validate_only: bool = ...) -> None: ...

class ConversionReport(_message.Message):
    __slots__ = ("converted", "copied", "skipped", "conflicting", "notes")
    class SkippedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class ConflictingEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CONVERTED_FIELD_NUMBER: _ClassVar[int]
    COPIED_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    CONFLICTING_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    converted: _containers.RepeatedScalarFieldContainer[str]
    copied: _containers.RepeatedScalarFieldContainer[str]
    skipped: _containers.ScalarMap[str, str]
    conflicting: _containers.ScalarMap[str, str]
    notes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, converted: _Optional[_Iterable[str]] = ..., copied: _Optional[_Iterable[str]] = ..., skipped: _Optional[_Mapping[str, str]] = ..., conflicting: _Optional[_Mapping[str, str]] = ..., notes: _Optional[_Iterable[str]] = ...) -> None: ...

class ConvertCheckpointResponse(_message.Message):
    __slots__ = ("target", "byte_count", "largest_group_byte_count", "report", "digests")
    class DigestsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TARGET_FIELD_NUMBER: _ClassVar[int]
    BYTE_COUNT_FIELD_NUMBER: _ClassVar[int]
    LARGEST_GROUP_BYTE_COUNT_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    target: str
    byte_count: int
    largest_group_byte_count: int
    report: ConversionReport
    digests: _containers.ScalarMap[str, str]
    def __init__(self, target: _Optional[str] = ..., byte_count: _Optional[int] = ..., largest_group_byte_count: _Optional[int] = ..., report: _Optional[_Union[ConversionReport, _Mapping]] = ..., digests: _Optional[_Mapping[str, str]] = ...) -> None: ...

class VerifyCheckpointRequest(_message.Message):
    __slots__ = ("request_id", "first", "second", "model")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    SECOND_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    first: str
    second: str
    model: str
    def __init__(self, request_id: _Optional[str] = ..., first: _Optional[str] = ..., second: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class VerifyCheckpointResponse(_message.Message):
    __slots__ = ("equal", "equal_count", "different", "only_first", "only_second", "byte_count")
    class DifferentEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    EQUAL_FIELD_NUMBER: _ClassVar[int]
    EQUAL_COUNT_FIELD_NUMBER: _ClassVar[int]
    DIFFERENT_FIELD_NUMBER: _ClassVar[int]
    ONLY_FIRST_FIELD_NUMBER: _ClassVar[int]
    ONLY_SECOND_FIELD_NUMBER: _ClassVar[int]
    BYTE_COUNT_FIELD_NUMBER: _ClassVar[int]
    equal: bool
    equal_count: int
    different: _containers.ScalarMap[str, str]
    only_first: _containers.RepeatedScalarFieldContainer[str]
    only_second: _containers.RepeatedScalarFieldContainer[str]
    byte_count: int
    def __init__(self, equal: bool = ..., equal_count: _Optional[int] = ..., different: _Optional[_Mapping[str, str]] = ..., only_first: _Optional[_Iterable[str]] = ..., only_second: _Optional[_Iterable[str]] = ..., byte_count: _Optional[int] = ...) -> None: ...

class ConversionMetadata(_message.Message):
    __slots__ = ("source", "target", "state", "byte_count", "total_byte_count", "tensor_count", "total_tensor_count", "resumed_byte_count", "remaining", "create_time")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BYTE_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTE_COUNT_FIELD_NUMBER: _ClassVar[int]
    TENSOR_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_TENSOR_COUNT_FIELD_NUMBER: _ClassVar[int]
    RESUMED_BYTE_COUNT_FIELD_NUMBER: _ClassVar[int]
    REMAINING_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    source: str
    target: str
    state: ConversionState
    byte_count: int
    total_byte_count: int
    tensor_count: int
    total_tensor_count: int
    resumed_byte_count: int
    remaining: _duration_pb2.Duration
    create_time: _timestamp_pb2.Timestamp
    def __init__(self, source: _Optional[str] = ..., target: _Optional[str] = ..., state: _Optional[_Union[ConversionState, str]] = ..., byte_count: _Optional[int] = ..., total_byte_count: _Optional[int] = ..., tensor_count: _Optional[int] = ..., total_tensor_count: _Optional[int] = ..., resumed_byte_count: _Optional[int] = ..., remaining: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class ListConversionsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Conversion(_message.Message):
    __slots__ = ("operation", "metadata")
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    operation: str
    metadata: ConversionMetadata
    def __init__(self, operation: _Optional[str] = ..., metadata: _Optional[_Union[ConversionMetadata, _Mapping]] = ...) -> None: ...

class ListConversionsResponse(_message.Message):
    __slots__ = ("conversions",)
    CONVERSIONS_FIELD_NUMBER: _ClassVar[int]
    conversions: _containers.RepeatedCompositeFieldContainer[Conversion]
    def __init__(self, conversions: _Optional[_Iterable[_Union[Conversion, _Mapping]]] = ...) -> None: ...
