import datetime

from google.api import field_behavior_pb2 as _field_behavior_pb2
from google.longrunning import operations_pb2 as _operations_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.rpc import status_pb2 as _status_pb2
from sluice.api.common.v1 import profile_pb2 as _profile_pb2
from sluice.api.common.v1 import sample_pb2 as _sample_pb2
from sluice.api.rollout.v1 import engine_service_pb2 as _engine_service_pb2
from sluice.api.trainer.v1 import loss_pb2 as _loss_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OversizePolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OVERSIZE_POLICY_UNSPECIFIED: _ClassVar[OversizePolicy]
    OVERSIZE_POLICY_ERROR: _ClassVar[OversizePolicy]
    OVERSIZE_POLICY_TRUNCATE: _ClassVar[OversizePolicy]
    OVERSIZE_POLICY_ALONE: _ClassVar[OversizePolicy]
OVERSIZE_POLICY_UNSPECIFIED: OversizePolicy
OVERSIZE_POLICY_ERROR: OversizePolicy
OVERSIZE_POLICY_TRUNCATE: OversizePolicy
OVERSIZE_POLICY_ALONE: OversizePolicy

class Rank(_message.Message):
    __slots__ = ("rank", "process_id", "host", "heartbeat_time", "activity", "data_rank", "where")
    RANK_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_TIME_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    DATA_RANK_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    process_id: int
    host: str
    heartbeat_time: _timestamp_pb2.Timestamp
    activity: str
    data_rank: int
    where: str
    def __init__(self, rank: _Optional[int] = ..., process_id: _Optional[int] = ..., host: _Optional[str] = ..., heartbeat_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., activity: _Optional[str] = ..., data_rank: _Optional[int] = ..., where: _Optional[str] = ...) -> None: ...

class ParallelLayout(_message.Message):
    __slots__ = ("data", "tensor", "pipeline", "context", "expert", "virtual_pipeline", "replicas")
    DATA_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    EXPERT_FIELD_NUMBER: _ClassVar[int]
    VIRTUAL_PIPELINE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    data: int
    tensor: int
    pipeline: int
    context: int
    expert: int
    virtual_pipeline: int
    replicas: int
    def __init__(self, data: _Optional[int] = ..., tensor: _Optional[int] = ..., pipeline: _Optional[int] = ..., context: _Optional[int] = ..., expert: _Optional[int] = ..., virtual_pipeline: _Optional[int] = ..., replicas: _Optional[int] = ...) -> None: ...

class Trainer(_message.Message):
    __slots__ = ("state", "step", "weights", "part_ids", "layout", "ranks", "restart_count", "failure", "losses", "advantage_estimators", "batches", "backend", "skipped_count", "consecutive_skipped_count", "gradients_incomplete", "checkpoint", "head", "corrections", "kl_estimators", "user_modules", "vocabulary", "asleep", "write_behind", "promised_version", "adapters", "max_row_tokens", "trains_adapters", "profile", "fixed_reference", "name", "settings", "sends_weights")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[Trainer.State]
        STATE_LOADING: _ClassVar[Trainer.State]
        STATE_ACTIVE: _ClassVar[Trainer.State]
        STATE_FAILED: _ClassVar[Trainer.State]
    STATE_UNSPECIFIED: Trainer.State
    STATE_LOADING: Trainer.State
    STATE_ACTIVE: Trainer.State
    STATE_FAILED: Trainer.State
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    STATE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    PART_IDS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    RESTART_COUNT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    ADVANTAGE_ESTIMATORS_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_COUNT_FIELD_NUMBER: _ClassVar[int]
    CONSECUTIVE_SKIPPED_COUNT_FIELD_NUMBER: _ClassVar[int]
    GRADIENTS_INCOMPLETE_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    CORRECTIONS_FIELD_NUMBER: _ClassVar[int]
    KL_ESTIMATORS_FIELD_NUMBER: _ClassVar[int]
    USER_MODULES_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    ASLEEP_FIELD_NUMBER: _ClassVar[int]
    WRITE_BEHIND_FIELD_NUMBER: _ClassVar[int]
    PROMISED_VERSION_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    MAX_ROW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRAINS_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    FIXED_REFERENCE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    SENDS_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    state: Trainer.State
    step: int
    weights: _sample_pb2.WeightVersion
    part_ids: _containers.RepeatedScalarFieldContainer[str]
    layout: ParallelLayout
    ranks: _containers.RepeatedCompositeFieldContainer[Rank]
    restart_count: int
    failure: str
    losses: _containers.RepeatedScalarFieldContainer[str]
    advantage_estimators: _containers.RepeatedScalarFieldContainer[str]
    batches: _containers.RepeatedScalarFieldContainer[str]
    backend: str
    skipped_count: int
    consecutive_skipped_count: int
    gradients_incomplete: bool
    checkpoint: str
    head: str
    corrections: _containers.RepeatedScalarFieldContainer[str]
    kl_estimators: _containers.RepeatedScalarFieldContainer[str]
    user_modules: _containers.RepeatedScalarFieldContainer[str]
    vocabulary: str
    asleep: bool
    write_behind: bool
    promised_version: int
    adapters: _containers.RepeatedCompositeFieldContainer[TrainedAdapter]
    max_row_tokens: int
    trains_adapters: bool
    profile: _profile_pb2.Profile
    fixed_reference: str
    name: str
    settings: _containers.ScalarMap[str, str]
    sends_weights: bool
    def __init__(self, state: _Optional[_Union[Trainer.State, str]] = ..., step: _Optional[int] = ..., weights: _Optional[_Union[_sample_pb2.WeightVersion, _Mapping]] = ..., part_ids: _Optional[_Iterable[str]] = ..., layout: _Optional[_Union[ParallelLayout, _Mapping]] = ..., ranks: _Optional[_Iterable[_Union[Rank, _Mapping]]] = ..., restart_count: _Optional[int] = ..., failure: _Optional[str] = ..., losses: _Optional[_Iterable[str]] = ..., advantage_estimators: _Optional[_Iterable[str]] = ..., batches: _Optional[_Iterable[str]] = ..., backend: _Optional[str] = ..., skipped_count: _Optional[int] = ..., consecutive_skipped_count: _Optional[int] = ..., gradients_incomplete: bool = ..., checkpoint: _Optional[str] = ..., head: _Optional[str] = ..., corrections: _Optional[_Iterable[str]] = ..., kl_estimators: _Optional[_Iterable[str]] = ..., user_modules: _Optional[_Iterable[str]] = ..., vocabulary: _Optional[str] = ..., asleep: bool = ..., write_behind: bool = ..., promised_version: _Optional[int] = ..., adapters: _Optional[_Iterable[_Union[TrainedAdapter, _Mapping]]] = ..., max_row_tokens: _Optional[int] = ..., trains_adapters: bool = ..., profile: _Optional[_Union[_profile_pb2.Profile, _Mapping]] = ..., fixed_reference: _Optional[str] = ..., name: _Optional[str] = ..., settings: _Optional[_Mapping[str, str]] = ..., sends_weights: bool = ...) -> None: ...

class TrainedAdapter(_message.Message):
    __slots__ = ("adapter", "rank", "alpha", "targets", "learning_rate", "step", "weights", "part_ids", "checkpoint", "skipped_count", "consecutive_skipped_count", "gradients_incomplete")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ALPHA_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    PART_IDS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_COUNT_FIELD_NUMBER: _ClassVar[int]
    CONSECUTIVE_SKIPPED_COUNT_FIELD_NUMBER: _ClassVar[int]
    GRADIENTS_INCOMPLETE_FIELD_NUMBER: _ClassVar[int]
    adapter: str
    rank: int
    alpha: float
    targets: _containers.RepeatedScalarFieldContainer[str]
    learning_rate: float
    step: int
    weights: _sample_pb2.WeightVersion
    part_ids: _containers.RepeatedScalarFieldContainer[str]
    checkpoint: str
    skipped_count: int
    consecutive_skipped_count: int
    gradients_incomplete: bool
    def __init__(self, adapter: _Optional[str] = ..., rank: _Optional[int] = ..., alpha: _Optional[float] = ..., targets: _Optional[_Iterable[str]] = ..., learning_rate: _Optional[float] = ..., step: _Optional[int] = ..., weights: _Optional[_Union[_sample_pb2.WeightVersion, _Mapping]] = ..., part_ids: _Optional[_Iterable[str]] = ..., checkpoint: _Optional[str] = ..., skipped_count: _Optional[int] = ..., consecutive_skipped_count: _Optional[int] = ..., gradients_incomplete: bool = ...) -> None: ...

class GetTrainerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTrainerResponse(_message.Message):
    __slots__ = ("trainer",)
    TRAINER_FIELD_NUMBER: _ClassVar[int]
    trainer: Trainer
    def __init__(self, trainer: _Optional[_Union[Trainer, _Mapping]] = ...) -> None: ...

class BatchHeader(_message.Message):
    __slots__ = ("batch_id", "sample_count", "request_id", "adapter")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    batch_id: str
    sample_count: int
    request_id: str
    adapter: str
    def __init__(self, batch_id: _Optional[str] = ..., sample_count: _Optional[int] = ..., request_id: _Optional[str] = ..., adapter: _Optional[str] = ...) -> None: ...

class UploadBatchRequest(_message.Message):
    __slots__ = ("header", "sample", "blob", "more_blobs")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    BLOB_FIELD_NUMBER: _ClassVar[int]
    MORE_BLOBS_FIELD_NUMBER: _ClassVar[int]
    header: BatchHeader
    sample: _sample_pb2.Sample
    blob: _sample_pb2.BlobReference
    more_blobs: _containers.RepeatedCompositeFieldContainer[_sample_pb2.BlobReference]
    def __init__(self, header: _Optional[_Union[BatchHeader, _Mapping]] = ..., sample: _Optional[_Union[_sample_pb2.Sample, _Mapping]] = ..., blob: _Optional[_Union[_sample_pb2.BlobReference, _Mapping]] = ..., more_blobs: _Optional[_Iterable[_Union[_sample_pb2.BlobReference, _Mapping]]] = ...) -> None: ...

class UploadBatchResponse(_message.Message):
    __slots__ = ("batch", "sample_count", "token_count", "group_count")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    GROUP_COUNT_FIELD_NUMBER: _ClassVar[int]
    batch: str
    sample_count: int
    token_count: int
    group_count: int
    def __init__(self, batch: _Optional[str] = ..., sample_count: _Optional[int] = ..., token_count: _Optional[int] = ..., group_count: _Optional[int] = ...) -> None: ...

class DeleteBatchRequest(_message.Message):
    __slots__ = ("batch", "request_id")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    batch: str
    request_id: str
    def __init__(self, batch: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class DeleteBatchResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ComputeLogprobsRequest(_message.Message):
    __slots__ = ("batch", "model", "temperature", "request_id", "allow_other_temperature", "adapter", "top_count", "reference_version")
    class Model(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        MODEL_UNSPECIFIED: _ClassVar[ComputeLogprobsRequest.Model]
        MODEL_POLICY: _ClassVar[ComputeLogprobsRequest.Model]
        MODEL_REFERENCE: _ClassVar[ComputeLogprobsRequest.Model]
    MODEL_UNSPECIFIED: ComputeLogprobsRequest.Model
    MODEL_POLICY: ComputeLogprobsRequest.Model
    MODEL_REFERENCE: ComputeLogprobsRequest.Model
    BATCH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ALLOW_OTHER_TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    TOP_COUNT_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_VERSION_FIELD_NUMBER: _ClassVar[int]
    batch: str
    model: ComputeLogprobsRequest.Model
    temperature: float
    request_id: str
    allow_other_temperature: bool
    adapter: str
    top_count: int
    reference_version: int
    def __init__(self, batch: _Optional[str] = ..., model: _Optional[_Union[ComputeLogprobsRequest.Model, str]] = ..., temperature: _Optional[float] = ..., request_id: _Optional[str] = ..., allow_other_temperature: bool = ..., adapter: _Optional[str] = ..., top_count: _Optional[int] = ..., reference_version: _Optional[int] = ...) -> None: ...

class ComputeLogprobsResponse(_message.Message):
    __slots__ = ("column", "mean", "token_count", "rollout_mismatch_mean", "rollout_mismatch_max")
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    MEAN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_MISMATCH_MEAN_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_MISMATCH_MAX_FIELD_NUMBER: _ClassVar[int]
    column: str
    mean: float
    token_count: int
    rollout_mismatch_mean: float
    rollout_mismatch_max: float
    def __init__(self, column: _Optional[str] = ..., mean: _Optional[float] = ..., token_count: _Optional[int] = ..., rollout_mismatch_mean: _Optional[float] = ..., rollout_mismatch_max: _Optional[float] = ...) -> None: ...

class ComputeValuesRequest(_message.Message):
    __slots__ = ("batch", "request_id")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    batch: str
    request_id: str
    def __init__(self, batch: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class ComputeValuesResponse(_message.Message):
    __slots__ = ("mean", "token_count")
    MEAN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    mean: float
    token_count: int
    def __init__(self, mean: _Optional[float] = ..., token_count: _Optional[int] = ...) -> None: ...

class DescribeAlgorithmRequest(_message.Message):
    __slots__ = ("loss", "advantage")
    LOSS_FIELD_NUMBER: _ClassVar[int]
    ADVANTAGE_FIELD_NUMBER: _ClassVar[int]
    loss: _loss_pb2.LossSpec
    advantage: _loss_pb2.AdvantageSpec
    def __init__(self, loss: _Optional[_Union[_loss_pb2.LossSpec, _Mapping]] = ..., advantage: _Optional[_Union[_loss_pb2.AdvantageSpec, _Mapping]] = ...) -> None: ...

class DescribeAlgorithmResponse(_message.Message):
    __slots__ = ("loss_columns", "advantage_columns")
    LOSS_COLUMNS_FIELD_NUMBER: _ClassVar[int]
    ADVANTAGE_COLUMNS_FIELD_NUMBER: _ClassVar[int]
    loss_columns: _containers.RepeatedScalarFieldContainer[str]
    advantage_columns: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, loss_columns: _Optional[_Iterable[str]] = ..., advantage_columns: _Optional[_Iterable[str]] = ...) -> None: ...

class ComputeAdvantagesRequest(_message.Message):
    __slots__ = ("batch", "advantage", "request_id")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    ADVANTAGE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    batch: str
    advantage: _loss_pb2.AdvantageSpec
    request_id: str
    def __init__(self, batch: _Optional[str] = ..., advantage: _Optional[_Union[_loss_pb2.AdvantageSpec, _Mapping]] = ..., request_id: _Optional[str] = ...) -> None: ...

class ComputeAdvantagesResponse(_message.Message):
    __slots__ = ("reward_mean", "advantage_abs_mean", "silent_group_count", "group_count", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    REWARD_MEAN_FIELD_NUMBER: _ClassVar[int]
    ADVANTAGE_ABS_MEAN_FIELD_NUMBER: _ClassVar[int]
    SILENT_GROUP_COUNT_FIELD_NUMBER: _ClassVar[int]
    GROUP_COUNT_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    reward_mean: float
    advantage_abs_mean: float
    silent_group_count: int
    group_count: int
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, reward_mean: _Optional[float] = ..., advantage_abs_mean: _Optional[float] = ..., silent_group_count: _Optional[int] = ..., group_count: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class RowColumns(_message.Message):
    __slots__ = ("sample_id", "columns")
    class ColumnsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _sample_pb2.Column
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_sample_pb2.Column, _Mapping]] = ...) -> None: ...
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    sample_id: str
    columns: _containers.MessageMap[str, _sample_pb2.Column]
    def __init__(self, sample_id: _Optional[str] = ..., columns: _Optional[_Mapping[str, _sample_pb2.Column]] = ...) -> None: ...

class PutColumnsRequest(_message.Message):
    __slots__ = ("batch", "rows", "request_id", "blobs", "columns")
    class ColumnsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    BATCH_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    BLOBS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    batch: str
    rows: _containers.RepeatedCompositeFieldContainer[RowColumns]
    request_id: str
    blobs: _containers.RepeatedCompositeFieldContainer[_sample_pb2.BlobReference]
    columns: _containers.ScalarMap[str, str]
    def __init__(self, batch: _Optional[str] = ..., rows: _Optional[_Iterable[_Union[RowColumns, _Mapping]]] = ..., request_id: _Optional[str] = ..., blobs: _Optional[_Iterable[_Union[_sample_pb2.BlobReference, _Mapping]]] = ..., columns: _Optional[_Mapping[str, str]] = ...) -> None: ...

class PutColumnsResponse(_message.Message):
    __slots__ = ("row_count",)
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    row_count: int
    def __init__(self, row_count: _Optional[int] = ...) -> None: ...

class GetColumnsRequest(_message.Message):
    __slots__ = ("batch", "columns", "sample_ids", "by_reference")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_IDS_FIELD_NUMBER: _ClassVar[int]
    BY_REFERENCE_FIELD_NUMBER: _ClassVar[int]
    batch: str
    columns: _containers.RepeatedScalarFieldContainer[str]
    sample_ids: _containers.RepeatedScalarFieldContainer[str]
    by_reference: bool
    def __init__(self, batch: _Optional[str] = ..., columns: _Optional[_Iterable[str]] = ..., sample_ids: _Optional[_Iterable[str]] = ..., by_reference: bool = ...) -> None: ...

class GetColumnsResponse(_message.Message):
    __slots__ = ("rows", "blobs")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    BLOBS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[RowColumns]
    blobs: _containers.RepeatedCompositeFieldContainer[_sample_pb2.BlobReference]
    def __init__(self, rows: _Optional[_Iterable[_Union[RowColumns, _Mapping]]] = ..., blobs: _Optional[_Iterable[_Union[_sample_pb2.BlobReference, _Mapping]]] = ...) -> None: ...

class BareRow(_message.Message):
    __slots__ = ("length", "prompt_length", "group", "prompt_patches", "patches")
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    PROMPT_PATCHES_FIELD_NUMBER: _ClassVar[int]
    PATCHES_FIELD_NUMBER: _ClassVar[int]
    length: int
    prompt_length: int
    group: int
    prompt_patches: _containers.RepeatedScalarFieldContainer[int]
    patches: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, length: _Optional[int] = ..., prompt_length: _Optional[int] = ..., group: _Optional[int] = ..., prompt_patches: _Optional[_Iterable[int]] = ..., patches: _Optional[_Iterable[int]] = ...) -> None: ...

class PlanBatchRequest(_message.Message):
    __slots__ = ("batch", "sample_ids", "bare_rows", "max_tokens_per_micro_batch", "oversize_policy", "micro_batch_multiple", "max_micro_batches")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_IDS_FIELD_NUMBER: _ClassVar[int]
    BARE_ROWS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_PER_MICRO_BATCH_FIELD_NUMBER: _ClassVar[int]
    OVERSIZE_POLICY_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCH_MULTIPLE_FIELD_NUMBER: _ClassVar[int]
    MAX_MICRO_BATCHES_FIELD_NUMBER: _ClassVar[int]
    batch: str
    sample_ids: _containers.RepeatedScalarFieldContainer[str]
    bare_rows: _containers.RepeatedCompositeFieldContainer[BareRow]
    max_tokens_per_micro_batch: int
    oversize_policy: OversizePolicy
    micro_batch_multiple: int
    max_micro_batches: int
    def __init__(self, batch: _Optional[str] = ..., sample_ids: _Optional[_Iterable[str]] = ..., bare_rows: _Optional[_Iterable[_Union[BareRow, _Mapping]]] = ..., max_tokens_per_micro_batch: _Optional[int] = ..., oversize_policy: _Optional[_Union[OversizePolicy, str]] = ..., micro_batch_multiple: _Optional[int] = ..., max_micro_batches: _Optional[int] = ...) -> None: ...

class PlannedMicroBatch(_message.Message):
    __slots__ = ("rows", "sample_ids", "token_count")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedScalarFieldContainer[int]
    sample_ids: _containers.RepeatedScalarFieldContainer[str]
    token_count: int
    def __init__(self, rows: _Optional[_Iterable[int]] = ..., sample_ids: _Optional[_Iterable[str]] = ..., token_count: _Optional[int] = ...) -> None: ...

class PlannedRank(_message.Message):
    __slots__ = ("micro_batches", "token_count")
    MICRO_BATCHES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    micro_batches: _containers.RepeatedCompositeFieldContainer[PlannedMicroBatch]
    token_count: int
    def __init__(self, micro_batches: _Optional[_Iterable[_Union[PlannedMicroBatch, _Mapping]]] = ..., token_count: _Optional[int] = ...) -> None: ...

class TruncatedRow(_message.Message):
    __slots__ = ("row", "sample_id", "length")
    ROW_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    row: int
    sample_id: str
    length: int
    def __init__(self, row: _Optional[int] = ..., sample_id: _Optional[str] = ..., length: _Optional[int] = ...) -> None: ...

class PlanBatchResponse(_message.Message):
    __slots__ = ("ranks", "micro_batch_count", "dummy_count", "token_count", "imbalance", "lockstep_imbalance", "fill", "leftover_rows", "leftover_sample_ids", "truncated_rows")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCH_COUNT_FIELD_NUMBER: _ClassVar[int]
    DUMMY_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    IMBALANCE_FIELD_NUMBER: _ClassVar[int]
    LOCKSTEP_IMBALANCE_FIELD_NUMBER: _ClassVar[int]
    FILL_FIELD_NUMBER: _ClassVar[int]
    LEFTOVER_ROWS_FIELD_NUMBER: _ClassVar[int]
    LEFTOVER_SAMPLE_IDS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_ROWS_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedCompositeFieldContainer[PlannedRank]
    micro_batch_count: int
    dummy_count: int
    token_count: int
    imbalance: float
    lockstep_imbalance: float
    fill: float
    leftover_rows: _containers.RepeatedScalarFieldContainer[int]
    leftover_sample_ids: _containers.RepeatedScalarFieldContainer[str]
    truncated_rows: _containers.RepeatedCompositeFieldContainer[TruncatedRow]
    def __init__(self, ranks: _Optional[_Iterable[_Union[PlannedRank, _Mapping]]] = ..., micro_batch_count: _Optional[int] = ..., dummy_count: _Optional[int] = ..., token_count: _Optional[int] = ..., imbalance: _Optional[float] = ..., lockstep_imbalance: _Optional[float] = ..., fill: _Optional[float] = ..., leftover_rows: _Optional[_Iterable[int]] = ..., leftover_sample_ids: _Optional[_Iterable[str]] = ..., truncated_rows: _Optional[_Iterable[_Union[TruncatedRow, _Mapping]]] = ...) -> None: ...

class ForwardBackwardRequest(_message.Message):
    __slots__ = ("batch", "loss", "expected_step", "part_id", "sample_ids", "request_id", "allow_other_temperature", "adapter", "keep_logprobs")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_STEP_FIELD_NUMBER: _ClassVar[int]
    PART_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_IDS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ALLOW_OTHER_TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    KEEP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    batch: str
    loss: _loss_pb2.LossSpec
    expected_step: int
    part_id: str
    sample_ids: _containers.RepeatedScalarFieldContainer[str]
    request_id: str
    allow_other_temperature: bool
    adapter: str
    keep_logprobs: bool
    def __init__(self, batch: _Optional[str] = ..., loss: _Optional[_Union[_loss_pb2.LossSpec, _Mapping]] = ..., expected_step: _Optional[int] = ..., part_id: _Optional[str] = ..., sample_ids: _Optional[_Iterable[str]] = ..., request_id: _Optional[str] = ..., allow_other_temperature: bool = ..., adapter: _Optional[str] = ..., keep_logprobs: bool = ...) -> None: ...

class ForwardBackwardResponse(_message.Message):
    __slots__ = ("loss", "token_count", "metrics", "micro_batch_count", "silent_row_count", "metric_weights")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class MetricWeightsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    LOSS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCH_COUNT_FIELD_NUMBER: _ClassVar[int]
    SILENT_ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    METRIC_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    loss: float
    token_count: int
    metrics: _containers.ScalarMap[str, float]
    micro_batch_count: int
    silent_row_count: int
    metric_weights: _containers.ScalarMap[str, float]
    def __init__(self, loss: _Optional[float] = ..., token_count: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ..., micro_batch_count: _Optional[int] = ..., silent_row_count: _Optional[int] = ..., metric_weights: _Optional[_Mapping[str, float]] = ...) -> None: ...

class StepOptimizerRequest(_message.Message):
    __slots__ = ("expected_step", "part_ids", "learning_rate", "request_id", "adapter", "adam")
    EXPECTED_STEP_FIELD_NUMBER: _ClassVar[int]
    PART_IDS_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAM_FIELD_NUMBER: _ClassVar[int]
    expected_step: int
    part_ids: _containers.RepeatedScalarFieldContainer[str]
    learning_rate: float
    request_id: str
    adapter: str
    adam: AdamSettings
    def __init__(self, expected_step: _Optional[int] = ..., part_ids: _Optional[_Iterable[str]] = ..., learning_rate: _Optional[float] = ..., request_id: _Optional[str] = ..., adapter: _Optional[str] = ..., adam: _Optional[_Union[AdamSettings, _Mapping]] = ...) -> None: ...

class AdamSettings(_message.Message):
    __slots__ = ("beta1", "beta2", "epsilon", "weight_decay", "max_grad_norm")
    BETA1_FIELD_NUMBER: _ClassVar[int]
    BETA2_FIELD_NUMBER: _ClassVar[int]
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    MAX_GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    max_grad_norm: float
    def __init__(self, beta1: _Optional[float] = ..., beta2: _Optional[float] = ..., epsilon: _Optional[float] = ..., weight_decay: _Optional[float] = ..., max_grad_norm: _Optional[float] = ...) -> None: ...

class StepOptimizerResponse(_message.Message):
    __slots__ = ("step", "outcome", "skipped_reason", "grad_norm", "learning_rate", "duration", "skipped_count", "consecutive_skipped_count", "metrics")
    class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        OUTCOME_UNSPECIFIED: _ClassVar[StepOptimizerResponse.Outcome]
        OUTCOME_APPLIED: _ClassVar[StepOptimizerResponse.Outcome]
        OUTCOME_SKIPPED: _ClassVar[StepOptimizerResponse.Outcome]
    OUTCOME_UNSPECIFIED: StepOptimizerResponse.Outcome
    OUTCOME_APPLIED: StepOptimizerResponse.Outcome
    OUTCOME_SKIPPED: StepOptimizerResponse.Outcome
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_REASON_FIELD_NUMBER: _ClassVar[int]
    GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    DURATION_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_COUNT_FIELD_NUMBER: _ClassVar[int]
    CONSECUTIVE_SKIPPED_COUNT_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    step: int
    outcome: StepOptimizerResponse.Outcome
    skipped_reason: str
    grad_norm: float
    learning_rate: float
    duration: _duration_pb2.Duration
    skipped_count: int
    consecutive_skipped_count: int
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, step: _Optional[int] = ..., outcome: _Optional[_Union[StepOptimizerResponse.Outcome, str]] = ..., skipped_reason: _Optional[str] = ..., grad_norm: _Optional[float] = ..., learning_rate: _Optional[float] = ..., duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., skipped_count: _Optional[int] = ..., consecutive_skipped_count: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class DiscardGradientsRequest(_message.Message):
    __slots__ = ("request_id", "adapter")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    adapter: str
    def __init__(self, request_id: _Optional[str] = ..., adapter: _Optional[str] = ...) -> None: ...

class DiscardGradientsResponse(_message.Message):
    __slots__ = ("part_ids",)
    PART_IDS_FIELD_NUMBER: _ClassVar[int]
    part_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, part_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class SaveCheckpointRequest(_message.Message):
    __slots__ = ("checkpoint_id", "request_id", "write_behind", "adapter")
    CHECKPOINT_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    WRITE_BEHIND_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    checkpoint_id: str
    request_id: str
    write_behind: bool
    adapter: str
    def __init__(self, checkpoint_id: _Optional[str] = ..., request_id: _Optional[str] = ..., write_behind: bool = ..., adapter: _Optional[str] = ...) -> None: ...

class SaveCheckpointResponse(_message.Message):
    __slots__ = ("checkpoint", "step")
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    checkpoint: str
    step: int
    def __init__(self, checkpoint: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class LoadCheckpointRequest(_message.Message):
    __slots__ = ("checkpoint", "request_id", "adapter", "saved_adapter", "weights_only")
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    SAVED_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_ONLY_FIELD_NUMBER: _ClassVar[int]
    checkpoint: str
    request_id: str
    adapter: str
    saved_adapter: str
    weights_only: bool
    def __init__(self, checkpoint: _Optional[str] = ..., request_id: _Optional[str] = ..., adapter: _Optional[str] = ..., saved_adapter: _Optional[str] = ..., weights_only: bool = ...) -> None: ...

class LoadCheckpointResponse(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    def __init__(self, step: _Optional[int] = ...) -> None: ...

class CheckpointMetadata(_message.Message):
    __slots__ = ("checkpoint", "create_time")
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    checkpoint: str
    create_time: _timestamp_pb2.Timestamp
    def __init__(self, checkpoint: _Optional[str] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class PublishWeightsRequest(_message.Message):
    __slots__ = ("request_id", "engines", "pause_mode", "adapter")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    PAUSE_MODE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    engines: _containers.RepeatedCompositeFieldContainer[TransferTarget]
    pause_mode: _engine_service_pb2.PauseMode
    adapter: str
    def __init__(self, request_id: _Optional[str] = ..., engines: _Optional[_Iterable[_Union[TransferTarget, _Mapping]]] = ..., pause_mode: _Optional[_Union[_engine_service_pb2.PauseMode, str]] = ..., adapter: _Optional[str] = ...) -> None: ...

class TransferTarget(_message.Message):
    __slots__ = ("engine_id", "address")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    address: str
    def __init__(self, engine_id: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class TransferOutcome(_message.Message):
    __slots__ = ("engine_id", "error")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    error: _status_pb2.Status
    def __init__(self, engine_id: _Optional[str] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class PublishWeightsResponse(_message.Message):
    __slots__ = ("weights", "step", "byte_count", "full_byte_count", "transfer", "engines", "adapter", "promised")
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    BYTE_COUNT_FIELD_NUMBER: _ClassVar[int]
    FULL_BYTE_COUNT_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    PROMISED_FIELD_NUMBER: _ClassVar[int]
    weights: _sample_pb2.WeightVersion
    step: int
    byte_count: int
    full_byte_count: int
    transfer: _duration_pb2.Duration
    engines: _containers.RepeatedCompositeFieldContainer[TransferOutcome]
    adapter: _sample_pb2.AdapterSpec
    promised: bool
    def __init__(self, weights: _Optional[_Union[_sample_pb2.WeightVersion, _Mapping]] = ..., step: _Optional[int] = ..., byte_count: _Optional[int] = ..., full_byte_count: _Optional[int] = ..., transfer: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., engines: _Optional[_Iterable[_Union[TransferOutcome, _Mapping]]] = ..., adapter: _Optional[_Union[_sample_pb2.AdapterSpec, _Mapping]] = ..., promised: bool = ...) -> None: ...

class PublishWeightsMetadata(_message.Message):
    __slots__ = ("version", "create_time")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    version: int
    create_time: _timestamp_pb2.Timestamp
    def __init__(self, version: _Optional[int] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class SleepRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class SleepResponse(_message.Message):
    __slots__ = ("step", "state_bytes", "freed_bytes")
    STEP_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREED_BYTES_FIELD_NUMBER: _ClassVar[int]
    step: int
    state_bytes: int
    freed_bytes: int
    def __init__(self, step: _Optional[int] = ..., state_bytes: _Optional[int] = ..., freed_bytes: _Optional[int] = ...) -> None: ...

class WakeRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class WakeResponse(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    def __init__(self, step: _Optional[int] = ...) -> None: ...

class CreateAdapterRequest(_message.Message):
    __slots__ = ("adapter", "rank", "alpha", "targets", "learning_rate", "request_id", "seed")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ALPHA_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    adapter: str
    rank: int
    alpha: float
    targets: _containers.RepeatedScalarFieldContainer[str]
    learning_rate: float
    request_id: str
    seed: int
    def __init__(self, adapter: _Optional[str] = ..., rank: _Optional[int] = ..., alpha: _Optional[float] = ..., targets: _Optional[_Iterable[str]] = ..., learning_rate: _Optional[float] = ..., request_id: _Optional[str] = ..., seed: _Optional[int] = ...) -> None: ...

class CreateAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: TrainedAdapter
    def __init__(self, adapter: _Optional[_Union[TrainedAdapter, _Mapping]] = ...) -> None: ...

class DeleteAdapterRequest(_message.Message):
    __slots__ = ("adapter", "request_id")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    adapter: str
    request_id: str
    def __init__(self, adapter: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class DeleteAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ProfileRequest(_message.Message):
    __slots__ = ("step_count", "ranks", "options", "name", "request_id")
    STEP_COUNT_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    step_count: int
    ranks: _containers.RepeatedScalarFieldContainer[int]
    options: _profile_pb2.ProfileOptions
    name: str
    request_id: str
    def __init__(self, step_count: _Optional[int] = ..., ranks: _Optional[_Iterable[int]] = ..., options: _Optional[_Union[_profile_pb2.ProfileOptions, _Mapping]] = ..., name: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class ProfileResponse(_message.Message):
    __slots__ = ("profile",)
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    profile: _profile_pb2.Profile
    def __init__(self, profile: _Optional[_Union[_profile_pb2.Profile, _Mapping]] = ...) -> None: ...
