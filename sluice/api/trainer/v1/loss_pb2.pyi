from google.api import field_behavior_pb2 as _field_behavior_pb2
from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ImportanceSpec(_message.Message):
    __slots__ = ("level", "mode", "low", "high", "veto")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    LOW_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    VETO_FIELD_NUMBER: _ClassVar[int]
    level: str
    mode: str
    low: float
    high: float
    veto: float
    def __init__(self, level: _Optional[str] = ..., mode: _Optional[str] = ..., low: _Optional[float] = ..., high: _Optional[float] = ..., veto: _Optional[float] = ...) -> None: ...

class CorrectionSpec(_message.Message):
    __slots__ = ("name", "settings")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    name: str
    settings: _struct_pb2.Struct
    def __init__(self, name: _Optional[str] = ..., settings: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class LossSpec(_message.Message):
    __slots__ = ("name", "aggregation", "constant_length", "temperature", "old_logprobs", "clip_low", "clip_high", "dual_clip", "value_clip", "dro_beta", "kl_coefficient", "kl_estimator", "kl_unbiased", "entropy_coefficient", "importance", "opsm_delta", "settings", "corrections", "kl_settings")
    NAME_FIELD_NUMBER: _ClassVar[int]
    AGGREGATION_FIELD_NUMBER: _ClassVar[int]
    CONSTANT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    OLD_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CLIP_LOW_FIELD_NUMBER: _ClassVar[int]
    CLIP_HIGH_FIELD_NUMBER: _ClassVar[int]
    DUAL_CLIP_FIELD_NUMBER: _ClassVar[int]
    VALUE_CLIP_FIELD_NUMBER: _ClassVar[int]
    DRO_BETA_FIELD_NUMBER: _ClassVar[int]
    KL_COEFFICIENT_FIELD_NUMBER: _ClassVar[int]
    KL_ESTIMATOR_FIELD_NUMBER: _ClassVar[int]
    KL_UNBIASED_FIELD_NUMBER: _ClassVar[int]
    ENTROPY_COEFFICIENT_FIELD_NUMBER: _ClassVar[int]
    IMPORTANCE_FIELD_NUMBER: _ClassVar[int]
    OPSM_DELTA_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    CORRECTIONS_FIELD_NUMBER: _ClassVar[int]
    KL_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    name: str
    aggregation: str
    constant_length: float
    temperature: float
    old_logprobs: str
    clip_low: float
    clip_high: float
    dual_clip: float
    value_clip: float
    dro_beta: float
    kl_coefficient: float
    kl_estimator: str
    kl_unbiased: bool
    entropy_coefficient: float
    importance: ImportanceSpec
    opsm_delta: float
    settings: _struct_pb2.Struct
    corrections: _containers.RepeatedCompositeFieldContainer[CorrectionSpec]
    kl_settings: _struct_pb2.Struct
    def __init__(self, name: _Optional[str] = ..., aggregation: _Optional[str] = ..., constant_length: _Optional[float] = ..., temperature: _Optional[float] = ..., old_logprobs: _Optional[str] = ..., clip_low: _Optional[float] = ..., clip_high: _Optional[float] = ..., dual_clip: _Optional[float] = ..., value_clip: _Optional[float] = ..., dro_beta: _Optional[float] = ..., kl_coefficient: _Optional[float] = ..., kl_estimator: _Optional[str] = ..., kl_unbiased: bool = ..., entropy_coefficient: _Optional[float] = ..., importance: _Optional[_Union[ImportanceSpec, _Mapping]] = ..., opsm_delta: _Optional[float] = ..., settings: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., corrections: _Optional[_Iterable[_Union[CorrectionSpec, _Mapping]]] = ..., kl_settings: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class OverlongSpec(_message.Message):
    __slots__ = ("max_length", "buffer", "penalty")
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    PENALTY_FIELD_NUMBER: _ClassVar[int]
    max_length: int
    buffer: int
    penalty: float
    def __init__(self, max_length: _Optional[int] = ..., buffer: _Optional[int] = ..., penalty: _Optional[float] = ...) -> None: ...

class AdvantageSpec(_message.Message):
    __slots__ = ("name", "reward", "scale_by_std", "whiten", "gamma", "gae_lambda", "kl_coefficient", "kl_estimator", "teacher_coefficient", "old_logprobs", "settings", "overlong", "kl_settings")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    SCALE_BY_STD_FIELD_NUMBER: _ClassVar[int]
    WHITEN_FIELD_NUMBER: _ClassVar[int]
    GAMMA_FIELD_NUMBER: _ClassVar[int]
    GAE_LAMBDA_FIELD_NUMBER: _ClassVar[int]
    KL_COEFFICIENT_FIELD_NUMBER: _ClassVar[int]
    KL_ESTIMATOR_FIELD_NUMBER: _ClassVar[int]
    TEACHER_COEFFICIENT_FIELD_NUMBER: _ClassVar[int]
    OLD_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    OVERLONG_FIELD_NUMBER: _ClassVar[int]
    KL_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    name: str
    reward: str
    scale_by_std: bool
    whiten: bool
    gamma: float
    gae_lambda: float
    kl_coefficient: float
    kl_estimator: str
    teacher_coefficient: float
    old_logprobs: str
    settings: _struct_pb2.Struct
    overlong: OverlongSpec
    kl_settings: _struct_pb2.Struct
    def __init__(self, name: _Optional[str] = ..., reward: _Optional[str] = ..., scale_by_std: bool = ..., whiten: bool = ..., gamma: _Optional[float] = ..., gae_lambda: _Optional[float] = ..., kl_coefficient: _Optional[float] = ..., kl_estimator: _Optional[str] = ..., teacher_coefficient: _Optional[float] = ..., old_logprobs: _Optional[str] = ..., settings: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., overlong: _Optional[_Union[OverlongSpec, _Mapping]] = ..., kl_settings: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...
