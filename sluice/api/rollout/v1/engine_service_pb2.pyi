import datetime

from google.api import field_behavior_pb2 as _field_behavior_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from sluice.api.common.v1 import profile_pb2 as _profile_pb2
from sluice.api.common.v1 import sample_pb2 as _sample_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MediaKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEDIA_KIND_UNSPECIFIED: _ClassVar[MediaKind]
    MEDIA_KIND_IMAGE: _ClassVar[MediaKind]

class PauseMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PAUSE_MODE_UNSPECIFIED: _ClassVar[PauseMode]
    PAUSE_MODE_WAIT: _ClassVar[PauseMode]
    PAUSE_MODE_ABORT: _ClassVar[PauseMode]
    PAUSE_MODE_IN_PLACE: _ClassVar[PauseMode]
MEDIA_KIND_UNSPECIFIED: MediaKind
MEDIA_KIND_IMAGE: MediaKind
PAUSE_MODE_UNSPECIFIED: PauseMode
PAUSE_MODE_WAIT: PauseMode
PAUSE_MODE_ABORT: PauseMode
PAUSE_MODE_IN_PLACE: PauseMode

class SamplingParams(_message.Message):
    __slots__ = ("max_new_tokens", "temperature", "top_p", "top_k", "stop_token_ids", "seeds", "stop", "min_new_tokens", "ignore_eos")
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SEEDS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    seeds: _containers.RepeatedScalarFieldContainer[int]
    stop: _containers.RepeatedScalarFieldContainer[str]
    min_new_tokens: int
    ignore_eos: bool
    def __init__(self, max_new_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., seeds: _Optional[_Iterable[int]] = ..., stop: _Optional[_Iterable[str]] = ..., min_new_tokens: _Optional[int] = ..., ignore_eos: bool = ...) -> None: ...

class VersionBounds(_message.Message):
    __slots__ = ("min_version", "exact_version")
    MIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    EXACT_VERSION_FIELD_NUMBER: _ClassVar[int]
    min_version: int
    exact_version: int
    def __init__(self, min_version: _Optional[int] = ..., exact_version: _Optional[int] = ...) -> None: ...

class Completion(_message.Message):
    __slots__ = ("index", "token_ids", "logprobs", "logprobs_t1", "finish_reason", "spans", "timing", "routed_experts", "columns")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_T1_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    logprobs_t1: _containers.RepeatedScalarFieldContainer[float]
    finish_reason: _sample_pb2.FinishReason
    spans: _containers.RepeatedCompositeFieldContainer[_sample_pb2.VersionSpan]
    timing: SampleTiming
    routed_experts: _sample_pb2.RoutedExperts
    columns: TokenColumns
    def __init__(self, index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., logprobs_t1: _Optional[_Iterable[float]] = ..., finish_reason: _Optional[_Union[_sample_pb2.FinishReason, str]] = ..., spans: _Optional[_Iterable[_Union[_sample_pb2.VersionSpan, _Mapping]]] = ..., timing: _Optional[_Union[SampleTiming, _Mapping]] = ..., routed_experts: _Optional[_Union[_sample_pb2.RoutedExperts, _Mapping]] = ..., columns: _Optional[_Union[TokenColumns, _Mapping]] = ...) -> None: ...

class TokenColumns(_message.Message):
    __slots__ = ("token_ids", "logprobs", "logprobs_t1")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_T1_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    logprobs: bytes
    logprobs_t1: bytes
    def __init__(self, token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., logprobs_t1: _Optional[bytes] = ...) -> None: ...

class SampleTiming(_message.Message):
    __slots__ = ("queue", "prefill", "decode")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    queue: _duration_pb2.Duration
    prefill: _duration_pb2.Duration
    decode: _duration_pb2.Duration
    def __init__(self, queue: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., prefill: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., decode: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "sampling", "sample_count", "dp_rank", "versions", "media", "takes_columns", "processor", "adapter", "sampled_count")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    TAKES_COLUMNS_FIELD_NUMBER: _ClassVar[int]
    PROCESSOR_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_COUNT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: SamplingParams
    sample_count: int
    dp_rank: int
    versions: VersionBounds
    media: _containers.RepeatedCompositeFieldContainer[Media]
    takes_columns: bool
    processor: str
    adapter: str
    sampled_count: int
    def __init__(self, request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., sample_count: _Optional[int] = ..., dp_rank: _Optional[int] = ..., versions: _Optional[_Union[VersionBounds, _Mapping]] = ..., media: _Optional[_Iterable[_Union[Media, _Mapping]]] = ..., takes_columns: bool = ..., processor: _Optional[str] = ..., adapter: _Optional[str] = ..., sampled_count: _Optional[int] = ...) -> None: ...

class Media(_message.Message):
    __slots__ = ("kind", "blob")
    KIND_FIELD_NUMBER: _ClassVar[int]
    BLOB_FIELD_NUMBER: _ClassVar[int]
    kind: MediaKind
    blob: _sample_pb2.BlobReference
    def __init__(self, kind: _Optional[_Union[MediaKind, str]] = ..., blob: _Optional[_Union[_sample_pb2.BlobReference, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("completions",)
    COMPLETIONS_FIELD_NUMBER: _ClassVar[int]
    completions: _containers.RepeatedCompositeFieldContainer[Completion]
    def __init__(self, completions: _Optional[_Iterable[_Union[Completion, _Mapping]]] = ...) -> None: ...

class StreamGenerateRequest(_message.Message):
    __slots__ = ("generate",)
    GENERATE_FIELD_NUMBER: _ClassVar[int]
    generate: GenerateRequest
    def __init__(self, generate: _Optional[_Union[GenerateRequest, _Mapping]] = ...) -> None: ...

class StreamGenerateResponse(_message.Message):
    __slots__ = ("delta",)
    DELTA_FIELD_NUMBER: _ClassVar[int]
    delta: Completion
    def __init__(self, delta: _Optional[_Union[Completion, _Mapping]] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("token_ids", "prompt_length", "versions", "top_count", "adapter")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    TOP_COUNT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_length: int
    versions: VersionBounds
    top_count: int
    adapter: str
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., prompt_length: _Optional[int] = ..., versions: _Optional[_Union[VersionBounds, _Mapping]] = ..., top_count: _Optional[int] = ..., adapter: _Optional[str] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("logprobs", "weights", "top")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    weights: _sample_pb2.WeightVersion
    top: _containers.RepeatedCompositeFieldContainer[TopTokens]
    def __init__(self, logprobs: _Optional[_Iterable[float]] = ..., weights: _Optional[_Union[_sample_pb2.WeightVersion, _Mapping]] = ..., top: _Optional[_Iterable[_Union[TopTokens, _Mapping]]] = ...) -> None: ...

class TopTokens(_message.Message):
    __slots__ = ("token_ids", "logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("aborted_request_ids",)
    ABORTED_REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    aborted_request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, aborted_request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("mode",)
    MODE_FIELD_NUMBER: _ClassVar[int]
    mode: PauseMode
    def __init__(self, mode: _Optional[_Union[PauseMode, str]] = ...) -> None: ...

class PauseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TransferSender(_message.Message):
    __slots__ = ("address", "group")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    address: str
    group: str
    def __init__(self, address: _Optional[str] = ..., group: _Optional[str] = ...) -> None: ...

class CheckTransferRequest(_message.Message):
    __slots__ = ("weights",)
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    weights: _sample_pb2.WeightVersion
    def __init__(self, weights: _Optional[_Union[_sample_pb2.WeightVersion, _Mapping]] = ...) -> None: ...

class CheckTransferResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class JoinTransferGroupRequest(_message.Message):
    __slots__ = ("transfer_group", "senders", "first_rank", "world_size", "backend", "timeout")
    TRANSFER_GROUP_FIELD_NUMBER: _ClassVar[int]
    SENDERS_FIELD_NUMBER: _ClassVar[int]
    FIRST_RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    transfer_group: str
    senders: _containers.RepeatedCompositeFieldContainer[TransferSender]
    first_rank: int
    world_size: int
    backend: str
    timeout: _duration_pb2.Duration
    def __init__(self, transfer_group: _Optional[str] = ..., senders: _Optional[_Iterable[_Union[TransferSender, _Mapping]]] = ..., first_rank: _Optional[int] = ..., world_size: _Optional[int] = ..., backend: _Optional[str] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class JoinTransferGroupResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SentFiles(_message.Message):
    __slots__ = ("file_names",)
    FILE_NAMES_FIELD_NUMBER: _ClassVar[int]
    file_names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, file_names: _Optional[_Iterable[str]] = ...) -> None: ...

class WeightTransfer(_message.Message):
    __slots__ = ("transfer_group", "senders", "bucket_bytes", "timeout", "mode")
    TRANSFER_GROUP_FIELD_NUMBER: _ClassVar[int]
    SENDERS_FIELD_NUMBER: _ClassVar[int]
    BUCKET_BYTES_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    transfer_group: str
    senders: _containers.RepeatedCompositeFieldContainer[SentFiles]
    bucket_bytes: int
    timeout: _duration_pb2.Duration
    mode: PauseMode
    def __init__(self, transfer_group: _Optional[str] = ..., senders: _Optional[_Iterable[_Union[SentFiles, _Mapping]]] = ..., bucket_bytes: _Optional[int] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., mode: _Optional[_Union[PauseMode, str]] = ...) -> None: ...

class StageWeightsRequest(_message.Message):
    __slots__ = ("version", "timeout")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    version: int
    timeout: _duration_pb2.Duration
    def __init__(self, version: _Optional[int] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class StageWeightsResponse(_message.Message):
    __slots__ = ("file_count", "size_bytes")
    FILE_COUNT_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    file_count: int
    size_bytes: int
    def __init__(self, file_count: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class PrepareWeightsRequest(_message.Message):
    __slots__ = ("weights", "transfer")
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    weights: _sample_pb2.WeightVersion
    transfer: WeightTransfer
    def __init__(self, weights: _Optional[_Union[_sample_pb2.WeightVersion, _Mapping]] = ..., transfer: _Optional[_Union[WeightTransfer, _Mapping]] = ...) -> None: ...

class PrepareWeightsResponse(_message.Message):
    __slots__ = ("duration",)
    DURATION_FIELD_NUMBER: _ClassVar[int]
    duration: _duration_pb2.Duration
    def __init__(self, duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class CommitWeightsRequest(_message.Message):
    __slots__ = ("weights", "mode")
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    weights: _sample_pb2.WeightVersion
    mode: PauseMode
    def __init__(self, weights: _Optional[_Union[_sample_pb2.WeightVersion, _Mapping]] = ..., mode: _Optional[_Union[PauseMode, str]] = ...) -> None: ...

class CommitWeightsResponse(_message.Message):
    __slots__ = ("pause",)
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    pause: _duration_pb2.Duration
    def __init__(self, pause: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class SleepRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SleepResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WakeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WakeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetEngineRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RankLoad(_message.Message):
    __slots__ = ("running_count", "waiting_count", "used_tokens", "max_tokens")
    RUNNING_COUNT_FIELD_NUMBER: _ClassVar[int]
    WAITING_COUNT_FIELD_NUMBER: _ClassVar[int]
    USED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    running_count: int
    waiting_count: int
    used_tokens: int
    max_tokens: int
    def __init__(self, running_count: _Optional[int] = ..., waiting_count: _Optional[int] = ..., used_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ...) -> None: ...

class GetEngineResponse(_message.Message):
    __slots__ = ("weights", "prepared_versions", "paused", "rank_loads", "max_running_count", "max_model_length", "backend", "engine_id", "last_pause", "last_preparation", "decoded_token_count", "prefilled_token_count", "deterministic", "transfer_rank_count", "transfer_group", "base", "adapters", "vocabulary", "asleep", "profile", "takes_min_new_tokens", "settings", "records_experts")
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    PREPARED_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    RANK_LOADS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_COUNT_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LENGTH_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_PAUSE_FIELD_NUMBER: _ClassVar[int]
    LAST_PREPARATION_FIELD_NUMBER: _ClassVar[int]
    DECODED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    DETERMINISTIC_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_RANK_COUNT_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_GROUP_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    ASLEEP_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    TAKES_MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    RECORDS_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    weights: _sample_pb2.WeightVersion
    prepared_versions: _containers.RepeatedScalarFieldContainer[int]
    paused: bool
    rank_loads: _containers.RepeatedCompositeFieldContainer[RankLoad]
    max_running_count: int
    max_model_length: int
    backend: str
    engine_id: str
    last_pause: _duration_pb2.Duration
    last_preparation: _duration_pb2.Duration
    decoded_token_count: int
    prefilled_token_count: int
    deterministic: bool
    transfer_rank_count: int
    transfer_group: str
    base: _sample_pb2.WeightVersion
    adapters: _containers.RepeatedCompositeFieldContainer[_sample_pb2.WeightVersion]
    vocabulary: str
    asleep: bool
    profile: _profile_pb2.Profile
    takes_min_new_tokens: bool
    settings: _containers.ScalarMap[str, str]
    records_experts: bool
    def __init__(self, weights: _Optional[_Union[_sample_pb2.WeightVersion, _Mapping]] = ..., prepared_versions: _Optional[_Iterable[int]] = ..., paused: bool = ..., rank_loads: _Optional[_Iterable[_Union[RankLoad, _Mapping]]] = ..., max_running_count: _Optional[int] = ..., max_model_length: _Optional[int] = ..., backend: _Optional[str] = ..., engine_id: _Optional[str] = ..., last_pause: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., last_preparation: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., decoded_token_count: _Optional[int] = ..., prefilled_token_count: _Optional[int] = ..., deterministic: bool = ..., transfer_rank_count: _Optional[int] = ..., transfer_group: _Optional[str] = ..., base: _Optional[_Union[_sample_pb2.WeightVersion, _Mapping]] = ..., adapters: _Optional[_Iterable[_Union[_sample_pb2.WeightVersion, _Mapping]]] = ..., vocabulary: _Optional[str] = ..., asleep: bool = ..., profile: _Optional[_Union[_profile_pb2.Profile, _Mapping]] = ..., takes_min_new_tokens: bool = ..., settings: _Optional[_Mapping[str, str]] = ..., records_experts: bool = ...) -> None: ...

class ProfileRequest(_message.Message):
    __slots__ = ("pass_count", "options", "name", "request_id")
    PASS_COUNT_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    pass_count: int
    options: _profile_pb2.ProfileOptions
    name: str
    request_id: str
    def __init__(self, pass_count: _Optional[int] = ..., options: _Optional[_Union[_profile_pb2.ProfileOptions, _Mapping]] = ..., name: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class ProfileResponse(_message.Message):
    __slots__ = ("profile",)
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    profile: _profile_pb2.Profile
    def __init__(self, profile: _Optional[_Union[_profile_pb2.Profile, _Mapping]] = ...) -> None: ...
