import datetime

from google.api import field_behavior_pb2 as _field_behavior_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import struct_pb2 as _struct_pb2
from google.rpc import status_pb2 as _status_pb2
from sluice.api.common.v1 import sample_pb2 as _sample_pb2
from sluice.api.rollout.v1 import engine_service_pb2 as _engine_service_pb2
from sluice.api.rollout.v1 import trace_pb2 as _trace_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EnvironmentSpec(_message.Message):
    __slots__ = ("name", "settings", "settings_order")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_ORDER_FIELD_NUMBER: _ClassVar[int]
    name: str
    settings: _struct_pb2.Struct
    settings_order: bytes
    def __init__(self, name: _Optional[str] = ..., settings: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., settings_order: _Optional[bytes] = ...) -> None: ...

class GroupRequest(_message.Message):
    __slots__ = ("group_id", "index", "row", "seeds", "teacher_pool", "teacher_top_count", "row_order")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    SEEDS_FIELD_NUMBER: _ClassVar[int]
    TEACHER_POOL_FIELD_NUMBER: _ClassVar[int]
    TEACHER_TOP_COUNT_FIELD_NUMBER: _ClassVar[int]
    ROW_ORDER_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    index: int
    row: _struct_pb2.Struct
    seeds: _containers.RepeatedScalarFieldContainer[int]
    teacher_pool: str
    teacher_top_count: int
    row_order: bytes
    def __init__(self, group_id: _Optional[str] = ..., index: _Optional[int] = ..., row: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., seeds: _Optional[_Iterable[int]] = ..., teacher_pool: _Optional[str] = ..., teacher_top_count: _Optional[int] = ..., row_order: _Optional[bytes] = ...) -> None: ...

class RolloutRequest(_message.Message):
    __slots__ = ("request_id", "groups", "environment", "sampling", "sample_count", "versions", "group_timeout", "pool", "takes_more")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    GROUP_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    TAKES_MORE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    groups: _containers.RepeatedCompositeFieldContainer[GroupRequest]
    environment: EnvironmentSpec
    sampling: _engine_service_pb2.SamplingParams
    sample_count: int
    versions: _engine_service_pb2.VersionBounds
    group_timeout: _duration_pb2.Duration
    pool: str
    takes_more: bool
    def __init__(self, request_id: _Optional[str] = ..., groups: _Optional[_Iterable[_Union[GroupRequest, _Mapping]]] = ..., environment: _Optional[_Union[EnvironmentSpec, _Mapping]] = ..., sampling: _Optional[_Union[_engine_service_pb2.SamplingParams, _Mapping]] = ..., sample_count: _Optional[int] = ..., versions: _Optional[_Union[_engine_service_pb2.VersionBounds, _Mapping]] = ..., group_timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., pool: _Optional[str] = ..., takes_more: bool = ...) -> None: ...

class FinishedGroup(_message.Message):
    __slots__ = ("group_id", "blob", "rewards", "response_lengths", "min_version", "max_version", "prompt_length", "raw_rewards", "finish_reasons", "details", "prompt_digest", "media", "trace")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    BLOB_FIELD_NUMBER: _ClassVar[int]
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    MIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    RAW_REWARDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASONS_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    blob: _sample_pb2.BlobReference
    rewards: _containers.RepeatedScalarFieldContainer[float]
    response_lengths: _containers.RepeatedScalarFieldContainer[int]
    min_version: int
    max_version: int
    prompt_length: int
    raw_rewards: _containers.RepeatedScalarFieldContainer[float]
    finish_reasons: _containers.RepeatedScalarFieldContainer[_sample_pb2.FinishReason]
    details: _containers.RepeatedCompositeFieldContainer[SampleDetails]
    prompt_digest: str
    media: _containers.RepeatedCompositeFieldContainer[_sample_pb2.BlobReference]
    trace: _trace_pb2.GroupTrace
    def __init__(self, group_id: _Optional[str] = ..., blob: _Optional[_Union[_sample_pb2.BlobReference, _Mapping]] = ..., rewards: _Optional[_Iterable[float]] = ..., response_lengths: _Optional[_Iterable[int]] = ..., min_version: _Optional[int] = ..., max_version: _Optional[int] = ..., prompt_length: _Optional[int] = ..., raw_rewards: _Optional[_Iterable[float]] = ..., finish_reasons: _Optional[_Iterable[_Union[_sample_pb2.FinishReason, str]]] = ..., details: _Optional[_Iterable[_Union[SampleDetails, _Mapping]]] = ..., prompt_digest: _Optional[str] = ..., media: _Optional[_Iterable[_Union[_sample_pb2.BlobReference, _Mapping]]] = ..., trace: _Optional[_Union[_trace_pb2.GroupTrace, _Mapping]] = ...) -> None: ...

class SampleDetails(_message.Message):
    __slots__ = ("raw_reward", "scores", "episode", "turn_count")
    class ScoresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    RAW_REWARD_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    EPISODE_FIELD_NUMBER: _ClassVar[int]
    TURN_COUNT_FIELD_NUMBER: _ClassVar[int]
    raw_reward: float
    scores: _containers.ScalarMap[str, float]
    episode: int
    turn_count: int
    def __init__(self, raw_reward: _Optional[float] = ..., scores: _Optional[_Mapping[str, float]] = ..., episode: _Optional[int] = ..., turn_count: _Optional[int] = ...) -> None: ...

class FailedGroup(_message.Message):
    __slots__ = ("group_id", "error")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    error: _status_pb2.Status
    def __init__(self, group_id: _Optional[str] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class RolloutResponse(_message.Message):
    __slots__ = ("finished", "failed", "more")
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    finished: FinishedGroup
    failed: FailedGroup
    more: _containers.RepeatedCompositeFieldContainer[RolloutResponse]
    def __init__(self, finished: _Optional[_Union[FinishedGroup, _Mapping]] = ..., failed: _Optional[_Union[FailedGroup, _Mapping]] = ..., more: _Optional[_Iterable[_Union[RolloutResponse, _Mapping]]] = ...) -> None: ...

class EvaluateRequest(_message.Message):
    __slots__ = ("rollout", "pass_at", "pass_threshold", "max_running_groups")
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    PASS_AT_FIELD_NUMBER: _ClassVar[int]
    PASS_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_GROUPS_FIELD_NUMBER: _ClassVar[int]
    rollout: RolloutRequest
    pass_at: _containers.RepeatedScalarFieldContainer[int]
    pass_threshold: float
    max_running_groups: int
    def __init__(self, rollout: _Optional[_Union[RolloutRequest, _Mapping]] = ..., pass_at: _Optional[_Iterable[int]] = ..., pass_threshold: _Optional[float] = ..., max_running_groups: _Optional[int] = ...) -> None: ...

class EvaluateResponse(_message.Message):
    __slots__ = ("finished", "failed", "report")
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    finished: FinishedGroup
    failed: FailedGroup
    report: EvaluationReport
    def __init__(self, finished: _Optional[_Union[FinishedGroup, _Mapping]] = ..., failed: _Optional[_Union[FailedGroup, _Mapping]] = ..., report: _Optional[_Union[EvaluationReport, _Mapping]] = ...) -> None: ...

class EvaluationReport(_message.Message):
    __slots__ = ("group_count", "failed_group_count", "reward_mean", "reward_std", "reward_error", "pass_at", "response_length_mean", "truncated_share", "min_version", "max_version")
    class PassAtEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    GROUP_COUNT_FIELD_NUMBER: _ClassVar[int]
    FAILED_GROUP_COUNT_FIELD_NUMBER: _ClassVar[int]
    REWARD_MEAN_FIELD_NUMBER: _ClassVar[int]
    REWARD_STD_FIELD_NUMBER: _ClassVar[int]
    REWARD_ERROR_FIELD_NUMBER: _ClassVar[int]
    PASS_AT_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_LENGTH_MEAN_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_SHARE_FIELD_NUMBER: _ClassVar[int]
    MIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_VERSION_FIELD_NUMBER: _ClassVar[int]
    group_count: int
    failed_group_count: int
    reward_mean: float
    reward_std: float
    reward_error: float
    pass_at: _containers.ScalarMap[int, float]
    response_length_mean: float
    truncated_share: float
    min_version: int
    max_version: int
    def __init__(self, group_count: _Optional[int] = ..., failed_group_count: _Optional[int] = ..., reward_mean: _Optional[float] = ..., reward_std: _Optional[float] = ..., reward_error: _Optional[float] = ..., pass_at: _Optional[_Mapping[int, float]] = ..., response_length_mean: _Optional[float] = ..., truncated_share: _Optional[float] = ..., min_version: _Optional[int] = ..., max_version: _Optional[int] = ...) -> None: ...

class CancelRolloutRequest(_message.Message):
    __slots__ = ("rollout_request_id", "group_ids")
    ROLLOUT_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_IDS_FIELD_NUMBER: _ClassVar[int]
    rollout_request_id: str
    group_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, rollout_request_id: _Optional[str] = ..., group_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class CancelRolloutResponse(_message.Message):
    __slots__ = ("cancelled_group_ids",)
    CANCELLED_GROUP_IDS_FIELD_NUMBER: _ClassVar[int]
    cancelled_group_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, cancelled_group_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ListEnvironmentsRequest(_message.Message):
    __slots__ = ("omits_schemas", "checked")
    OMITS_SCHEMAS_FIELD_NUMBER: _ClassVar[int]
    CHECKED_FIELD_NUMBER: _ClassVar[int]
    omits_schemas: bool
    checked: EnvironmentSpec
    def __init__(self, omits_schemas: bool = ..., checked: _Optional[_Union[EnvironmentSpec, _Mapping]] = ...) -> None: ...

class Environment(_message.Message):
    __slots__ = ("name", "settings_schema")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    name: str
    settings_schema: str
    def __init__(self, name: _Optional[str] = ..., settings_schema: _Optional[str] = ...) -> None: ...

class ListEnvironmentsResponse(_message.Message):
    __slots__ = ("environments", "vocabulary")
    ENVIRONMENTS_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    environments: _containers.RepeatedCompositeFieldContainer[Environment]
    vocabulary: str
    def __init__(self, environments: _Optional[_Iterable[_Union[Environment, _Mapping]]] = ..., vocabulary: _Optional[str] = ...) -> None: ...
