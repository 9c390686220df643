from google.rpc import status_pb2 as _status_pb2
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
    __slots__ = ("hello", "heartbeat", "result")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    hello: RankHello
    heartbeat: RankHeartbeat
    result: CommandResult
    def __init__(self, hello: _Optional[_Union[RankHello, _Mapping]] = ..., heartbeat: _Optional[_Union[RankHeartbeat, _Mapping]] = ..., result: _Optional[_Union[CommandResult, _Mapping]] = ...) -> None: ...

class RankHello(_message.Message):
    __slots__ = ("rank", "world_size", "generation", "layout", "reports")
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    rank: _trainer_service_pb2.Rank
    world_size: int
    generation: int
    layout: _trainer_service_pb2.ParallelLayout
    reports: bool
    def __init__(self, rank: _Optional[_Union[_trainer_service_pb2.Rank, _Mapping]] = ..., world_size: _Optional[int] = ..., generation: _Optional[int] = ..., layout: _Optional[_Union[_trainer_service_pb2.ParallelLayout, _Mapping]] = ..., reports: bool = ...) -> None: ...

class RankHeartbeat(_message.Message):
    __slots__ = ("activity",)
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    activity: str
    def __init__(self, activity: _Optional[str] = ...) -> None: ...

class CommandResult(_message.Message):
    __slots__ = ("sequence", "error", "sums", "step", "rows", "shards")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    error: _status_pb2.Status
    sums: PassSums
    step: StepResult
    rows: _containers.RepeatedCompositeFieldContainer[_trainer_service_pb2.RowColumns]
    shards: _containers.RepeatedCompositeFieldContainer[WrittenShard]
    def __init__(self, sequence: _Optional[int] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., sums: _Optional[_Union[PassSums, _Mapping]] = ..., step: _Optional[_Union[StepResult, _Mapping]] = ..., rows: _Optional[_Iterable[_Union[_trainer_service_pb2.RowColumns, _Mapping]]] = ..., shards: _Optional[_Iterable[_Union[WrittenShard, _Mapping]]] = ...) -> None: ...

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
    __slots__ = ("sum", "weight")
    SUM_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    sum: float
    weight: float
    def __init__(self, sum: _Optional[float] = ..., weight: _Optional[float] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("grad_norm", "learning_rate", "skipped_reason")
    GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_REASON_FIELD_NUMBER: _ClassVar[int]
    grad_norm: float
    learning_rate: float
    skipped_reason: str
    def __init__(self, grad_norm: _Optional[float] = ..., learning_rate: _Optional[float] = ..., skipped_reason: _Optional[str] = ...) -> None: ...

class WrittenShard(_message.Message):
    __slots__ = ("file_name", "size_bytes", "digest", "tensors")
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
    file_name: str
    size_bytes: int
    digest: str
    tensors: _containers.MessageMap[str, WrittenTensor]
    def __init__(self, file_name: _Optional[str] = ..., size_bytes: _Optional[int] = ..., digest: _Optional[str] = ..., tensors: _Optional[_Mapping[str, WrittenTensor]] = ...) -> None: ...

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
    __slots__ = ("sequence", "add_rows", "drop_batch", "compute_logprobs", "compute_advantages", "set_columns", "read_columns", "forward_backward", "step", "discard", "save", "load", "publish", "shutdown")
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
    def __init__(self, sequence: _Optional[int] = ..., add_rows: _Optional[_Union[AddRows, _Mapping]] = ..., drop_batch: _Optional[_Union[DropBatch, _Mapping]] = ..., compute_logprobs: _Optional[_Union[LogprobsCommand, _Mapping]] = ..., compute_advantages: _Optional[_Union[AdvantagesCommand, _Mapping]] = ..., set_columns: _Optional[_Union[SetColumns, _Mapping]] = ..., read_columns: _Optional[_Union[ReadColumns, _Mapping]] = ..., forward_backward: _Optional[_Union[GradientsCommand, _Mapping]] = ..., step: _Optional[_Union[StepCommand, _Mapping]] = ..., discard: _Optional[_Union[DiscardCommand, _Mapping]] = ..., save: _Optional[_Union[SaveCommand, _Mapping]] = ..., load: _Optional[_Union[LoadCommand, _Mapping]] = ..., publish: _Optional[_Union[PublishCommand, _Mapping]] = ..., shutdown: _Optional[_Union[ShutdownCommand, _Mapping]] = ...) -> None: ...

class AddRows(_message.Message):
    __slots__ = ("batch_id", "blob", "rows")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    BLOB_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    batch_id: str
    blob: _sample_pb2.BlobReference
    rows: _containers.RepeatedCompositeFieldContainer[RowIndices]
    def __init__(self, batch_id: _Optional[str] = ..., blob: _Optional[_Union[_sample_pb2.BlobReference, _Mapping]] = ..., rows: _Optional[_Iterable[_Union[RowIndices, _Mapping]]] = ...) -> None: ...

class RowIndices(_message.Message):
    __slots__ = ("indices",)
    INDICES_FIELD_NUMBER: _ClassVar[int]
    indices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, indices: _Optional[_Iterable[int]] = ...) -> None: ...

class DropBatch(_message.Message):
    __slots__ = ("batch_id",)
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    batch_id: str
    def __init__(self, batch_id: _Optional[str] = ...) -> None: ...

class MicroBatchRows(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, rows: _Optional[_Iterable[int]] = ...) -> None: ...

class RankPlan(_message.Message):
    __slots__ = ("micro_batches",)
    MICRO_BATCHES_FIELD_NUMBER: _ClassVar[int]
    micro_batches: _containers.RepeatedCompositeFieldContainer[MicroBatchRows]
    def __init__(self, micro_batches: _Optional[_Iterable[_Union[MicroBatchRows, _Mapping]]] = ...) -> None: ...

class LogprobsCommand(_message.Message):
    __slots__ = ("batch_id", "model", "temperature", "plan")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    batch_id: str
    model: _trainer_service_pb2.ComputeLogprobsRequest.Model
    temperature: float
    plan: _containers.RepeatedCompositeFieldContainer[RankPlan]
    def __init__(self, batch_id: _Optional[str] = ..., model: _Optional[_Union[_trainer_service_pb2.ComputeLogprobsRequest.Model, str]] = ..., temperature: _Optional[float] = ..., plan: _Optional[_Iterable[_Union[RankPlan, _Mapping]]] = ...) -> None: ...

class AdvantagesCommand(_message.Message):
    __slots__ = ("batch_id", "advantage")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    ADVANTAGE_FIELD_NUMBER: _ClassVar[int]
    batch_id: str
    advantage: _loss_pb2.AdvantageSpec
    def __init__(self, batch_id: _Optional[str] = ..., advantage: _Optional[_Union[_loss_pb2.AdvantageSpec, _Mapping]] = ...) -> None: ...

class SetColumns(_message.Message):
    __slots__ = ("batch_id", "rows")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    batch_id: str
    rows: _containers.RepeatedCompositeFieldContainer[_trainer_service_pb2.RowColumns]
    def __init__(self, batch_id: _Optional[str] = ..., rows: _Optional[_Iterable[_Union[_trainer_service_pb2.RowColumns, _Mapping]]] = ...) -> None: ...

class ReadColumns(_message.Message):
    __slots__ = ("batch_id", "columns", "rows")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    batch_id: str
    columns: _containers.RepeatedScalarFieldContainer[str]
    rows: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, batch_id: _Optional[str] = ..., columns: _Optional[_Iterable[str]] = ..., rows: _Optional[_Iterable[int]] = ...) -> None: ...

class GradientsCommand(_message.Message):
    __slots__ = ("batch_id", "loss", "plan")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    batch_id: str
    loss: _loss_pb2.LossSpec
    plan: _containers.RepeatedCompositeFieldContainer[RankPlan]
    def __init__(self, batch_id: _Optional[str] = ..., loss: _Optional[_Union[_loss_pb2.LossSpec, _Mapping]] = ..., plan: _Optional[_Iterable[_Union[RankPlan, _Mapping]]] = ...) -> None: ...

class StepCommand(_message.Message):
    __slots__ = ("normalizer", "learning_rate")
    NORMALIZER_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    normalizer: float
    learning_rate: float
    def __init__(self, normalizer: _Optional[float] = ..., learning_rate: _Optional[float] = ...) -> None: ...

class DiscardCommand(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SaveCommand(_message.Message):
    __slots__ = ("directory",)
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    directory: str
    def __init__(self, directory: _Optional[str] = ...) -> None: ...

class LoadCommand(_message.Message):
    __slots__ = ("directory",)
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    directory: str
    def __init__(self, directory: _Optional[str] = ...) -> None: ...

class PublishCommand(_message.Message):
    __slots__ = ("directory",)
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    directory: str
    def __init__(self, directory: _Optional[str] = ...) -> None: ...

class ShutdownCommand(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
