import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.rpc import status_pb2 as _status_pb2
from sluice.api.common.v1 import profile_pb2 as _profile_pb2
from sluice.api.common.v1 import sample_pb2 as _sample_pb2
from sluice.api.trainer.v1 import loss_pb2 as _loss_pb2
from sluice.api.trainer.v1 import trainer_service_pb2 as _trainer_service_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FollowRequest(_message.Message):
    __slots__ = ("hello", "heartbeat", "result", "ready", "written")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    hello: RankHello
    heartbeat: RankHeartbeat
    result: CommandResult
    ready: RankReady
    written: CommandResult
    def __init__(self, hello: _Optional[_Union[RankHello, _Mapping]] = ..., heartbeat: _Optional[_Union[RankHeartbeat, _Mapping]] = ..., result: _Optional[_Union[CommandResult, _Mapping]] = ..., ready: _Optional[_Union[RankReady, _Mapping]] = ..., written: _Optional[_Union[CommandResult, _Mapping]] = ...) -> None: ...

class RankHello(_message.Message):
    __slots__ = ("rank", "world_size", "generation", "process_id", "host")
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    rank: int
    world_size: int
    generation: int
    process_id: int
    host: str
    def __init__(self, rank: _Optional[int] = ..., world_size: _Optional[int] = ..., generation: _Optional[int] = ..., process_id: _Optional[int] = ..., host: _Optional[str] = ...) -> None: ...

class RankReady(_message.Message):
    __slots__ = ("error", "layout", "data_rank", "reports", "operations", "alone")
    class OperationsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ERROR_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    DATA_RANK_FIELD_NUMBER: _ClassVar[int]
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    ALONE_FIELD_NUMBER: _ClassVar[int]
    error: _status_pb2.Status
    layout: _trainer_service_pb2.ParallelLayout
    data_rank: int
    reports: bool
    operations: _containers.ScalarMap[str, str]
    alone: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., layout: _Optional[_Union[_trainer_service_pb2.ParallelLayout, _Mapping]] = ..., data_rank: _Optional[int] = ..., reports: bool = ..., operations: _Optional[_Mapping[str, str]] = ..., alone: _Optional[_Iterable[str]] = ...) -> None: ...

class RankHeartbeat(_message.Message):
    __slots__ = ("activity", "where")
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    activity: str
    where: str
    def __init__(self, activity: _Optional[str] = ..., where: _Optional[str] = ...) -> None: ...

class CommandResult(_message.Message):
    __slots__ = ("sequence", "error", "sums", "step", "columns", "shards", "advantages", "transfer_address", "encode_seconds", "transfer_failure", "sent_bytes", "transfer_backend", "checkpoint_files", "traits", "measured", "slept", "profile", "memory")
    class MeasuredEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    ADVANTAGES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ENCODE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FAILURE_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BACKEND_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FILES_FIELD_NUMBER: _ClassVar[int]
    TRAITS_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    SLEPT_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    error: _status_pb2.Status
    sums: PassSums
    step: StepResult
    columns: _sample_pb2.BlobReference
    shards: _containers.RepeatedCompositeFieldContainer[WrittenShard]
    advantages: AdvantageResult
    transfer_address: str
    encode_seconds: float
    transfer_failure: str
    sent_bytes: int
    transfer_backend: str
    checkpoint_files: _containers.RepeatedCompositeFieldContainer[CheckpointFile]
    traits: AlgorithmTraits
    measured: _containers.ScalarMap[str, float]
    slept: SleptBytes
    profile: RankProfile
    memory: DeviceMemory
    def __init__(self, sequence: _Optional[int] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., sums: _Optional[_Union[PassSums, _Mapping]] = ..., step: _Optional[_Union[StepResult, _Mapping]] = ..., columns: _Optional[_Union[_sample_pb2.BlobReference, _Mapping]] = ..., shards: _Optional[_Iterable[_Union[WrittenShard, _Mapping]]] = ..., advantages: _Optional[_Union[AdvantageResult, _Mapping]] = ..., transfer_address: _Optional[str] = ..., encode_seconds: _Optional[float] = ..., transfer_failure: _Optional[str] = ..., sent_bytes: _Optional[int] = ..., transfer_backend: _Optional[str] = ..., checkpoint_files: _Optional[_Iterable[_Union[CheckpointFile, _Mapping]]] = ..., traits: _Optional[_Union[AlgorithmTraits, _Mapping]] = ..., measured: _Optional[_Mapping[str, float]] = ..., slept: _Optional[_Union[SleptBytes, _Mapping]] = ..., profile: _Optional[_Union[RankProfile, _Mapping]] = ..., memory: _Optional[_Union[DeviceMemory, _Mapping]] = ...) -> None: ...

class DeviceMemory(_message.Message):
    __slots__ = ("peak_bytes", "total_bytes")
    PEAK_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    peak_bytes: int
    total_bytes: int
    def __init__(self, peak_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class RankProfile(_message.Message):
    __slots__ = ("name", "left_count", "files", "failure")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LEFT_COUNT_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    name: str
    left_count: int
    files: _containers.RepeatedScalarFieldContainer[str]
    failure: str
    def __init__(self, name: _Optional[str] = ..., left_count: _Optional[int] = ..., files: _Optional[_Iterable[str]] = ..., failure: _Optional[str] = ...) -> None: ...

class SleptBytes(_message.Message):
    __slots__ = ("state_bytes", "freed_bytes")
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREED_BYTES_FIELD_NUMBER: _ClassVar[int]
    state_bytes: int
    freed_bytes: int
    def __init__(self, state_bytes: _Optional[int] = ..., freed_bytes: _Optional[int] = ...) -> None: ...

class AlgorithmTraits(_message.Message):
    __slots__ = ("columns", "head", "silent", "rounds", "compares_siblings", "whitens", "width")
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    SILENT_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    COMPARES_SIBLINGS_FIELD_NUMBER: _ClassVar[int]
    WHITENS_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    columns: _containers.RepeatedScalarFieldContainer[str]
    head: str
    silent: bool
    rounds: int
    compares_siblings: bool
    whitens: bool
    width: int
    def __init__(self, columns: _Optional[_Iterable[str]] = ..., head: _Optional[str] = ..., silent: bool = ..., rounds: _Optional[int] = ..., compares_siblings: bool = ..., whitens: bool = ..., width: _Optional[int] = ...) -> None: ...

class CheckpointFile(_message.Message):
    __slots__ = ("name", "size_bytes", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    size_bytes: int
    digest: str
    def __init__(self, name: _Optional[str] = ..., size_bytes: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class AdvantageResult(_message.Message):
    __slots__ = ("moments", "silent_rows", "has_returns", "scores", "episodes")
    MOMENTS_FIELD_NUMBER: _ClassVar[int]
    SILENT_ROWS_FIELD_NUMBER: _ClassVar[int]
    HAS_RETURNS_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    EPISODES_FIELD_NUMBER: _ClassVar[int]
    moments: TokenMoments
    silent_rows: _containers.RepeatedScalarFieldContainer[int]
    has_returns: bool
    scores: _containers.RepeatedScalarFieldContainer[float]
    episodes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, moments: _Optional[_Union[TokenMoments, _Mapping]] = ..., silent_rows: _Optional[_Iterable[int]] = ..., has_returns: bool = ..., scores: _Optional[_Iterable[float]] = ..., episodes: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenMoments(_message.Message):
    __slots__ = ("count", "mean", "m2")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    MEAN_FIELD_NUMBER: _ClassVar[int]
    M2_FIELD_NUMBER: _ClassVar[int]
    count: float
    mean: float
    m2: float
    def __init__(self, count: _Optional[float] = ..., mean: _Optional[float] = ..., m2: _Optional[float] = ...) -> None: ...

class PassSums(_message.Message):
    __slots__ = ("loss", "token_count", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: WeightedSum
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[WeightedSum, _Mapping]] = ...) -> None: ...
    LOSS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    loss: float
    token_count: int
    metrics: _containers.MessageMap[str, WeightedSum]
    def __init__(self, loss: _Optional[float] = ..., token_count: _Optional[int] = ..., metrics: _Optional[_Mapping[str, WeightedSum]] = ...) -> None: ...

class WeightedSum(_message.Message):
    __slots__ = ("sum", "weight", "max")
    SUM_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    MAX_FIELD_NUMBER: _ClassVar[int]
    sum: float
    weight: float
    max: float
    def __init__(self, sum: _Optional[float] = ..., weight: _Optional[float] = ..., max: _Optional[float] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("grad_norm", "learning_rate", "skipped_reason", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_REASON_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    grad_norm: float
    learning_rate: float
    skipped_reason: str
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, grad_norm: _Optional[float] = ..., learning_rate: _Optional[float] = ..., skipped_reason: _Optional[str] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class WrittenShard(_message.Message):
    __slots__ = ("file_name", "size_bytes", "digest", "tensors", "delta")
    class TensorsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: WrittenTensor
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[WrittenTensor, _Mapping]] = ...) -> None: ...
    FILE_NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    file_name: str
    size_bytes: int
    digest: str
    tensors: _containers.MessageMap[str, WrittenTensor]
    delta: WrittenDelta
    def __init__(self, file_name: _Optional[str] = ..., size_bytes: _Optional[int] = ..., digest: _Optional[str] = ..., tensors: _Optional[_Mapping[str, WrittenTensor]] = ..., delta: _Optional[_Union[WrittenDelta, _Mapping]] = ...) -> None: ...

class WrittenDelta(_message.Message):
    __slots__ = ("file_name", "size_bytes", "digest", "changed_count", "element_count")
    FILE_NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    CHANGED_COUNT_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    file_name: str
    size_bytes: int
    digest: str
    changed_count: int
    element_count: int
    def __init__(self, file_name: _Optional[str] = ..., size_bytes: _Optional[int] = ..., digest: _Optional[str] = ..., changed_count: _Optional[int] = ..., element_count: _Optional[int] = ...) -> None: ...

class WrittenTensor(_message.Message):
    __slots__ = ("dtype", "shape", "digest")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    digest: str
    def __init__(self, dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., digest: _Optional[str] = ...) -> None: ...

class FollowResponse(_message.Message):
    __slots__ = ("sequence", "add_rows", "drop_batch", "compute_logprobs", "compute_advantages", "set_columns", "read_columns", "forward_backward", "step", "discard", "save", "load", "publish", "shutdown", "compute_values", "open_transfer", "send_weights", "describe", "measure", "sleep", "wake", "write_weights", "welcome", "add_adapter", "drop_adapter", "profile", "adapter")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ADD_ROWS_FIELD_NUMBER: _ClassVar[int]
    DROP_BATCH_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_ADVANTAGES_FIELD_NUMBER: _ClassVar[int]
    SET_COLUMNS_FIELD_NUMBER: _ClassVar[int]
    READ_COLUMNS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_BACKWARD_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    DISCARD_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_FIELD_NUMBER: _ClassVar[int]
    SHUTDOWN_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_VALUES_FIELD_NUMBER: _ClassVar[int]
    OPEN_TRANSFER_FIELD_NUMBER: _ClassVar[int]
    SEND_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    DESCRIBE_FIELD_NUMBER: _ClassVar[int]
    MEASURE_FIELD_NUMBER: _ClassVar[int]
    SLEEP_FIELD_NUMBER: _ClassVar[int]
    WAKE_FIELD_NUMBER: _ClassVar[int]
    WRITE_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ADD_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    DROP_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    add_rows: AddRows
    drop_batch: DropBatch
    compute_logprobs: LogprobsCommand
    compute_advantages: AdvantagesCommand
    set_columns: SetColumns
    read_columns: ReadColumns
    forward_backward: GradientsCommand
    step: StepCommand
    discard: DiscardCommand
    save: SaveCommand
    load: LoadCommand
    publish: PublishCommand
    shutdown: ShutdownCommand
    compute_values: ValuesCommand
    open_transfer: OpenTransferCommand
    send_weights: SendWeightsCommand
    describe: DescribeCommand
    measure: MeasureCommand
    sleep: SleepCommand
    wake: WakeCommand
    write_weights: WriteWeightsCommand
    welcome: RankWelcome
    add_adapter: AddAdapter
    drop_adapter: DropAdapter
    profile: ProfileCommand
    adapter: str
    def __init__(self, sequence: _Optional[int] = ..., add_rows: _Optional[_Union[AddRows, _Mapping]] = ..., drop_batch: _Optional[_Union[DropBatch, _Mapping]] = ..., compute_logprobs: _Optional[_Union[LogprobsCommand, _Mapping]] = ..., compute_advantages: _Optional[_Union[AdvantagesCommand, _Mapping]] = ..., set_columns: _Optional[_Union[SetColumns, _Mapping]] = ..., read_columns: _Optional[_Union[ReadColumns, _Mapping]] = ..., forward_backward: _Optional[_Union[GradientsCommand, _Mapping]] = ..., step: _Optional[_Union[StepCommand, _Mapping]] = ..., discard: _Optional[_Union[DiscardCommand, _Mapping]] = ..., save: _Optional[_Union[SaveCommand, _Mapping]] = ..., load: _Optional[_Union[LoadCommand, _Mapping]] = ..., publish: _Optional[_Union[PublishCommand, _Mapping]] = ..., shutdown: _Optional[_Union[ShutdownCommand, _Mapping]] = ..., compute_values: _Optional[_Union[ValuesCommand, _Mapping]] = ..., open_transfer: _Optional[_Union[OpenTransferCommand, _Mapping]] = ..., send_weights: _Optional[_Union[SendWeightsCommand, _Mapping]] = ..., describe: _Optional[_Union[DescribeCommand, _Mapping]] = ..., measure: _Optional[_Union[MeasureCommand, _Mapping]] = ..., sleep: _Optional[_Union[SleepCommand, _Mapping]] = ..., wake: _Optional[_Union[WakeCommand, _Mapping]] = ..., write_weights: _Optional[_Union[WriteWeightsCommand, _Mapping]] = ..., welcome: _Optional[_Union[RankWelcome, _Mapping]] = ..., add_adapter: _Optional[_Union[AddAdapter, _Mapping]] = ..., drop_adapter: _Optional[_Union[DropAdapter, _Mapping]] = ..., profile: _Optional[_Union[ProfileCommand, _Mapping]] = ..., adapter: _Optional[str] = ...) -> None: ...

class ProfileCommand(_message.Message):
    __slots__ = ("name", "step_count", "ranks", "options")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STEP_COUNT_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    name: str
    step_count: int
    ranks: _containers.RepeatedScalarFieldContainer[int]
    options: _profile_pb2.ProfileOptions
    def __init__(self, name: _Optional[str] = ..., step_count: _Optional[int] = ..., ranks: _Optional[_Iterable[int]] = ..., options: _Optional[_Union[_profile_pb2.ProfileOptions, _Mapping]] = ...) -> None: ...

class RankWelcome(_message.Message):
    __slots__ = ("meeting",)
    MEETING_FIELD_NUMBER: _ClassVar[int]
    meeting: str
    def __init__(self, meeting: _Optional[str] = ...) -> None: ...

class AddRows(_message.Message):
    __slots__ = ("batch_id", "blobs")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    BLOBS_FIELD_NUMBER: _ClassVar[int]
    batch_id: str
    blobs: _containers.RepeatedCompositeFieldContainer[BlobRows]
    def __init__(self, batch_id: _Optional[str] = ..., blobs: _Optional[_Iterable[_Union[BlobRows, _Mapping]]] = ...) -> None: ...

class BlobRows(_message.Message):
    __slots__ = ("blob", "indices", "rows")
    BLOB_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    blob: _sample_pb2.BlobReference
    indices: _containers.RepeatedScalarFieldContainer[int]
    rows: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, blob: _Optional[_Union[_sample_pb2.BlobReference, _Mapping]] = ..., indices: _Optional[_Iterable[int]] = ..., rows: _Optional[_Iterable[int]] = ...) -> None: ...

class DropBatch(_message.Message):
    __slots__ = ("batch_id",)
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    batch_id: str
    def __init__(self, batch_id: _Optional[str] = ...) -> None: ...

class MicroBatchRows(_message.Message):
    __slots__ = ("rows", "loss_weights")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    LOSS_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedScalarFieldContainer[int]
    loss_weights: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, rows: _Optional[_Iterable[int]] = ..., loss_weights: _Optional[_Iterable[float]] = ...) -> None: ...

class LogprobsCommand(_message.Message):
    __slots__ = ("batch_id", "model", "temperature", "micro_batches", "top_count", "reference_directory")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCHES_FIELD_NUMBER: _ClassVar[int]
    TOP_COUNT_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    batch_id: str
    model: _trainer_service_pb2.ComputeLogprobsRequest.Model
    temperature: float
    micro_batches: _containers.RepeatedCompositeFieldContainer[MicroBatchRows]
    top_count: int
    reference_directory: str
    def __init__(self, batch_id: _Optional[str] = ..., model: _Optional[_Union[_trainer_service_pb2.ComputeLogprobsRequest.Model, str]] = ..., temperature: _Optional[float] = ..., micro_batches: _Optional[_Iterable[_Union[MicroBatchRows, _Mapping]]] = ..., top_count: _Optional[int] = ..., reference_directory: _Optional[str] = ...) -> None: ...

class ValuesCommand(_message.Message):
    __slots__ = ("batch_id", "micro_batches")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCHES_FIELD_NUMBER: _ClassVar[int]
    batch_id: str
    micro_batches: _containers.RepeatedCompositeFieldContainer[MicroBatchRows]
    def __init__(self, batch_id: _Optional[str] = ..., micro_batches: _Optional[_Iterable[_Union[MicroBatchRows, _Mapping]]] = ...) -> None: ...

class DescribeCommand(_message.Message):
    __slots__ = ("loss", "advantage")
    LOSS_FIELD_NUMBER: _ClassVar[int]
    ADVANTAGE_FIELD_NUMBER: _ClassVar[int]
    loss: _loss_pb2.LossSpec
    advantage: _loss_pb2.AdvantageSpec
    def __init__(self, loss: _Optional[_Union[_loss_pb2.LossSpec, _Mapping]] = ..., advantage: _Optional[_Union[_loss_pb2.AdvantageSpec, _Mapping]] = ...) -> None: ...

class MeasureCommand(_message.Message):
    __slots__ = ("batch_id", "loss", "rows", "number", "measured")
    class MeasuredEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    batch_id: str
    loss: _loss_pb2.LossSpec
    rows: _containers.RepeatedScalarFieldContainer[int]
    number: int
    measured: _containers.ScalarMap[str, float]
    def __init__(self, batch_id: _Optional[str] = ..., loss: _Optional[_Union[_loss_pb2.LossSpec, _Mapping]] = ..., rows: _Optional[_Iterable[int]] = ..., number: _Optional[int] = ..., measured: _Optional[_Mapping[str, float]] = ...) -> None: ...

class AdvantagesCommand(_message.Message):
    __slots__ = ("batch_id", "advantage", "moments_only", "moments", "scores_only", "relative", "siblings")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    ADVANTAGE_FIELD_NUMBER: _ClassVar[int]
    MOMENTS_ONLY_FIELD_NUMBER: _ClassVar[int]
    MOMENTS_FIELD_NUMBER: _ClassVar[int]
    SCORES_ONLY_FIELD_NUMBER: _ClassVar[int]
    RELATIVE_FIELD_NUMBER: _ClassVar[int]
    SIBLINGS_FIELD_NUMBER: _ClassVar[int]
    batch_id: str
    advantage: _loss_pb2.AdvantageSpec
    moments_only: bool
    moments: TokenMoments
    scores_only: bool
    relative: RelativeScores
    siblings: SiblingScores
    def __init__(self, batch_id: _Optional[str] = ..., advantage: _Optional[_Union[_loss_pb2.AdvantageSpec, _Mapping]] = ..., moments_only: bool = ..., moments: _Optional[_Union[TokenMoments, _Mapping]] = ..., scores_only: bool = ..., relative: _Optional[_Union[RelativeScores, _Mapping]] = ..., siblings: _Optional[_Union[SiblingScores, _Mapping]] = ...) -> None: ...

class SiblingScores(_message.Message):
    __slots__ = ("scores", "groups", "episodes", "lengths", "last")
    SCORES_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    EPISODES_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    scores: _containers.RepeatedScalarFieldContainer[float]
    groups: _containers.RepeatedScalarFieldContainer[int]
    episodes: _containers.RepeatedScalarFieldContainer[int]
    lengths: _containers.RepeatedScalarFieldContainer[int]
    last: bool
    def __init__(self, scores: _Optional[_Iterable[float]] = ..., groups: _Optional[_Iterable[int]] = ..., episodes: _Optional[_Iterable[int]] = ..., lengths: _Optional[_Iterable[int]] = ..., last: bool = ...) -> None: ...

class RelativeScores(_message.Message):
    __slots__ = ("scores",)
    SCORES_FIELD_NUMBER: _ClassVar[int]
    scores: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, scores: _Optional[_Iterable[float]] = ...) -> None: ...

class SetColumns(_message.Message):
    __slots__ = ("batch_id", "rows", "columns")
    class ColumnsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    batch_id: str
    rows: BlobRows
    columns: _containers.ScalarMap[str, str]
    def __init__(self, batch_id: _Optional[str] = ..., rows: _Optional[_Union[BlobRows, _Mapping]] = ..., columns: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ReadColumns(_message.Message):
    __slots__ = ("batch_id", "columns")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    batch_id: str
    columns: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, batch_id: _Optional[str] = ..., columns: _Optional[_Iterable[str]] = ...) -> None: ...

class GradientsCommand(_message.Message):
    __slots__ = ("batch_id", "loss", "micro_batches", "measured", "keep_logprobs", "normalizer")
    class MeasuredEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCHES_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    KEEP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NORMALIZER_FIELD_NUMBER: _ClassVar[int]
    batch_id: str
    loss: _loss_pb2.LossSpec
    micro_batches: _containers.RepeatedCompositeFieldContainer[MicroBatchRows]
    measured: _containers.ScalarMap[str, float]
    keep_logprobs: bool
    normalizer: float
    def __init__(self, batch_id: _Optional[str] = ..., loss: _Optional[_Union[_loss_pb2.LossSpec, _Mapping]] = ..., micro_batches: _Optional[_Iterable[_Union[MicroBatchRows, _Mapping]]] = ..., measured: _Optional[_Mapping[str, float]] = ..., keep_logprobs: bool = ..., normalizer: _Optional[float] = ...) -> None: ...

class StepCommand(_message.Message):
    __slots__ = ("normalizer", "learning_rate", "adam")
    NORMALIZER_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    ADAM_FIELD_NUMBER: _ClassVar[int]
    normalizer: float
    learning_rate: float
    adam: _trainer_service_pb2.AdamSettings
    def __init__(self, normalizer: _Optional[float] = ..., learning_rate: _Optional[float] = ..., adam: _Optional[_Union[_trainer_service_pb2.AdamSettings, _Mapping]] = ...) -> None: ...

class DiscardCommand(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SaveCommand(_message.Message):
    __slots__ = ("directory", "write_behind")
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    WRITE_BEHIND_FIELD_NUMBER: _ClassVar[int]
    directory: str
    write_behind: bool
    def __init__(self, directory: _Optional[str] = ..., write_behind: bool = ...) -> None: ...

class LoadCommand(_message.Message):
    __slots__ = ("directory", "files", "weights_only")
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_ONLY_FIELD_NUMBER: _ClassVar[int]
    directory: str
    files: _containers.RepeatedCompositeFieldContainer[CheckpointFile]
    weights_only: bool
    def __init__(self, directory: _Optional[str] = ..., files: _Optional[_Iterable[_Union[CheckpointFile, _Mapping]]] = ..., weights_only: bool = ...) -> None: ...

class PublishCommand(_message.Message):
    __slots__ = ("directory", "version", "base", "write_behind")
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    WRITE_BEHIND_FIELD_NUMBER: _ClassVar[int]
    directory: str
    version: int
    base: int
    write_behind: bool
    def __init__(self, directory: _Optional[str] = ..., version: _Optional[int] = ..., base: _Optional[int] = ..., write_behind: bool = ...) -> None: ...

class WriteWeightsCommand(_message.Message):
    __slots__ = ("directory", "version")
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    directory: str
    version: int
    def __init__(self, directory: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...

class OpenTransferCommand(_message.Message):
    __slots__ = ("transfer_group", "world_size", "timeout")
    TRANSFER_GROUP_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    transfer_group: str
    world_size: int
    timeout: _duration_pb2.Duration
    def __init__(self, transfer_group: _Optional[str] = ..., world_size: _Optional[int] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class SendWeightsCommand(_message.Message):
    __slots__ = ("transfer_group", "version", "bucket_bytes", "timeout")
    TRANSFER_GROUP_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BUCKET_BYTES_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    transfer_group: str
    version: int
    bucket_bytes: int
    timeout: _duration_pb2.Duration
    def __init__(self, transfer_group: _Optional[str] = ..., version: _Optional[int] = ..., bucket_bytes: _Optional[int] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ShutdownCommand(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SleepCommand(_message.Message):
    __slots__ = ("keep_gradients",)
    KEEP_GRADIENTS_FIELD_NUMBER: _ClassVar[int]
    keep_gradients: bool
    def __init__(self, keep_gradients: bool = ...) -> None: ...

class WakeCommand(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AddAdapter(_message.Message):
    __slots__ = ("name", "rank", "alpha", "targets", "seed")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ALPHA_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    name: str
    rank: int
    alpha: float
    targets: _containers.RepeatedScalarFieldContainer[str]
    seed: int
    def __init__(self, name: _Optional[str] = ..., rank: _Optional[int] = ..., alpha: _Optional[float] = ..., targets: _Optional[_Iterable[str]] = ..., seed: _Optional[int] = ...) -> None: ...

class DropAdapter(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...
