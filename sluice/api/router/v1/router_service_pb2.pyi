import datetime

from google.api import field_behavior_pb2 as _field_behavior_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.rpc import status_pb2 as _status_pb2
from sluice.api.common.v1 import sample_pb2 as _sample_pb2
from sluice.api.rollout.v1 import engine_service_pb2 as _engine_service_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_ENGINE: _ClassVar[Role]
    ROLE_EPISODES: _ClassVar[Role]

class EngineState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENGINE_STATE_UNSPECIFIED: _ClassVar[EngineState]
    ENGINE_STATE_ACTIVE: _ClassVar[EngineState]
    ENGINE_STATE_DRAINING: _ClassVar[EngineState]
    ENGINE_STATE_LOST: _ClassVar[EngineState]
    ENGINE_STATE_EMPTY: _ClassVar[EngineState]
    ENGINE_STATE_BROKEN: _ClassVar[EngineState]

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_OK: _ClassVar[Outcome]
    OUTCOME_CONNECT_ERROR: _ClassVar[Outcome]
    OUTCOME_SERVER_ERROR: _ClassVar[Outcome]
    OUTCOME_TIMEOUT: _ClassVar[Outcome]
    OUTCOME_CLIENT_ERROR: _ClassVar[Outcome]
    OUTCOME_ABORTED: _ClassVar[Outcome]
ROLE_UNSPECIFIED: Role
ROLE_ENGINE: Role
ROLE_EPISODES: Role
ENGINE_STATE_UNSPECIFIED: EngineState
ENGINE_STATE_ACTIVE: EngineState
ENGINE_STATE_DRAINING: EngineState
ENGINE_STATE_LOST: EngineState
ENGINE_STATE_EMPTY: EngineState
ENGINE_STATE_BROKEN: EngineState
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_OK: Outcome
OUTCOME_CONNECT_ERROR: Outcome
OUTCOME_SERVER_ERROR: Outcome
OUTCOME_TIMEOUT: Outcome
OUTCOME_CLIENT_ERROR: Outcome
OUTCOME_ABORTED: Outcome

class Engine(_message.Message):
    __slots__ = ("engine_id", "address", "role", "pool", "dp_size", "max_running_count", "weights", "incarnation", "state", "leased_counts", "heartbeat_time", "first_target_index", "slowdown")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    DP_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_COUNT_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LEASED_COUNTS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_TIME_FIELD_NUMBER: _ClassVar[int]
    FIRST_TARGET_INDEX_FIELD_NUMBER: _ClassVar[int]
    SLOWDOWN_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    address: str
    role: Role
    pool: str
    dp_size: int
    max_running_count: int
    weights: _sample_pb2.WeightVersion
    incarnation: str
    state: EngineState
    leased_counts: _containers.RepeatedScalarFieldContainer[int]
    heartbeat_time: _timestamp_pb2.Timestamp
    first_target_index: int
    slowdown: float
    def __init__(self, engine_id: _Optional[str] = ..., address: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., pool: _Optional[str] = ..., dp_size: _Optional[int] = ..., max_running_count: _Optional[int] = ..., weights: _Optional[_Union[_sample_pb2.WeightVersion, _Mapping]] = ..., incarnation: _Optional[str] = ..., state: _Optional[_Union[EngineState, str]] = ..., leased_counts: _Optional[_Iterable[int]] = ..., heartbeat_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., first_target_index: _Optional[int] = ..., slowdown: _Optional[float] = ...) -> None: ...

class RegisterEngineRequest(_message.Message):
    __slots__ = ("engine", "known_epoch", "refused_router_id", "kept_router_id")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    KNOWN_EPOCH_FIELD_NUMBER: _ClassVar[int]
    REFUSED_ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    KEPT_ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    engine: Engine
    known_epoch: int
    refused_router_id: str
    kept_router_id: str
    def __init__(self, engine: _Optional[_Union[Engine, _Mapping]] = ..., known_epoch: _Optional[int] = ..., refused_router_id: _Optional[str] = ..., kept_router_id: _Optional[str] = ...) -> None: ...

class RegisterEngineResponse(_message.Message):
    __slots__ = ("heartbeat_interval", "state", "epoch", "router_id")
    HEARTBEAT_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    heartbeat_interval: _duration_pb2.Duration
    state: EngineState
    epoch: int
    router_id: str
    def __init__(self, heartbeat_interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., state: _Optional[_Union[EngineState, str]] = ..., epoch: _Optional[int] = ..., router_id: _Optional[str] = ...) -> None: ...

class DrainEngineRequest(_message.Message):
    __slots__ = ("engine_id", "resume")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    resume: bool
    def __init__(self, engine_id: _Optional[str] = ..., resume: bool = ...) -> None: ...

class DrainEngineResponse(_message.Message):
    __slots__ = ("engine", "epoch")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    engine: Engine
    epoch: int
    def __init__(self, engine: _Optional[_Union[Engine, _Mapping]] = ..., epoch: _Optional[int] = ...) -> None: ...

class ListEnginesRequest(_message.Message):
    __slots__ = ("role", "pool")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    role: Role
    pool: str
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., pool: _Optional[str] = ...) -> None: ...

class ListEnginesResponse(_message.Message):
    __slots__ = ("engines",)
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    engines: _containers.RepeatedCompositeFieldContainer[Engine]
    def __init__(self, engines: _Optional[_Iterable[_Union[Engine, _Mapping]]] = ...) -> None: ...

class WatchEnginesRequest(_message.Message):
    __slots__ = ("pool", "client_id", "known_epoch")
    POOL_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    KNOWN_EPOCH_FIELD_NUMBER: _ClassVar[int]
    pool: str
    client_id: str
    known_epoch: int
    def __init__(self, pool: _Optional[str] = ..., client_id: _Optional[str] = ..., known_epoch: _Optional[int] = ...) -> None: ...

class WatchEnginesResponse(_message.Message):
    __slots__ = ("engines", "epoch")
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    engines: _containers.RepeatedCompositeFieldContainer[Engine]
    epoch: int
    def __init__(self, engines: _Optional[_Iterable[_Union[Engine, _Mapping]]] = ..., epoch: _Optional[int] = ...) -> None: ...

class ReleasedLeases(_message.Message):
    __slots__ = ("lease_ids", "outcomes", "token_counts")
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    outcomes: _containers.RepeatedScalarFieldContainer[Outcome]
    token_counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lease_ids: _Optional[_Iterable[int]] = ..., outcomes: _Optional[_Iterable[_Union[Outcome, str]]] = ..., token_counts: _Optional[_Iterable[int]] = ...) -> None: ...

class AcquireLeasesRequest(_message.Message):
    __slots__ = ("client_id", "pool", "count", "min_version", "exact_version", "released", "request_id", "group_ids", "group_sizes", "expected_token_counts", "session_ids", "cached_token_counts", "max_wait", "known_epoch", "excluded_engine_ids")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    MIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    EXACT_VERSION_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_IDS_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZES_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_FIELD_NUMBER: _ClassVar[int]
    KNOWN_EPOCH_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_ENGINE_IDS_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    pool: str
    count: int
    min_version: int
    exact_version: int
    released: ReleasedLeases
    request_id: str
    group_ids: _containers.RepeatedScalarFieldContainer[str]
    group_sizes: _containers.RepeatedScalarFieldContainer[int]
    expected_token_counts: _containers.RepeatedScalarFieldContainer[float]
    session_ids: _containers.RepeatedScalarFieldContainer[str]
    cached_token_counts: _containers.RepeatedScalarFieldContainer[int]
    max_wait: _duration_pb2.Duration
    known_epoch: int
    excluded_engine_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, client_id: _Optional[str] = ..., pool: _Optional[str] = ..., count: _Optional[int] = ..., min_version: _Optional[int] = ..., exact_version: _Optional[int] = ..., released: _Optional[_Union[ReleasedLeases, _Mapping]] = ..., request_id: _Optional[str] = ..., group_ids: _Optional[_Iterable[str]] = ..., group_sizes: _Optional[_Iterable[int]] = ..., expected_token_counts: _Optional[_Iterable[float]] = ..., session_ids: _Optional[_Iterable[str]] = ..., cached_token_counts: _Optional[_Iterable[int]] = ..., max_wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., known_epoch: _Optional[int] = ..., excluded_engine_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class AcquireLeasesResponse(_message.Message):
    __slots__ = ("first_lease_id", "target_indices", "bound_lease_ids", "bound_target_indices", "engines", "epoch", "ttl")
    FIRST_LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_INDICES_FIELD_NUMBER: _ClassVar[int]
    BOUND_LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    BOUND_TARGET_INDICES_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    first_lease_id: int
    target_indices: _containers.RepeatedScalarFieldContainer[int]
    bound_lease_ids: _containers.RepeatedScalarFieldContainer[int]
    bound_target_indices: _containers.RepeatedScalarFieldContainer[int]
    engines: _containers.RepeatedCompositeFieldContainer[Engine]
    epoch: int
    ttl: _duration_pb2.Duration
    def __init__(self, first_lease_id: _Optional[int] = ..., target_indices: _Optional[_Iterable[int]] = ..., bound_lease_ids: _Optional[_Iterable[int]] = ..., bound_target_indices: _Optional[_Iterable[int]] = ..., engines: _Optional[_Iterable[_Union[Engine, _Mapping]]] = ..., epoch: _Optional[int] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class StreamLeasesRequest(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[StreamedLeaseRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[StreamedLeaseRequest, _Mapping]]] = ...) -> None: ...

class StreamedLeaseRequest(_message.Message):
    __slots__ = ("number", "acquire")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ACQUIRE_FIELD_NUMBER: _ClassVar[int]
    number: int
    acquire: AcquireLeasesRequest
    def __init__(self, number: _Optional[int] = ..., acquire: _Optional[_Union[AcquireLeasesRequest, _Mapping]] = ...) -> None: ...

class StreamLeasesResponse(_message.Message):
    __slots__ = ("answers",)
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedCompositeFieldContainer[StreamedLeaseAnswer]
    def __init__(self, answers: _Optional[_Iterable[_Union[StreamedLeaseAnswer, _Mapping]]] = ...) -> None: ...

class StreamedLeaseAnswer(_message.Message):
    __slots__ = ("number", "leases", "error")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    number: int
    leases: AcquireLeasesResponse
    error: _status_pb2.Status
    def __init__(self, number: _Optional[int] = ..., leases: _Optional[_Union[AcquireLeasesResponse, _Mapping]] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class RenewLeasesRequest(_message.Message):
    __slots__ = ("client_id", "lease_ids", "engine_ids", "dp_ranks", "engine_indices", "pool", "known_epoch")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_IDS_FIELD_NUMBER: _ClassVar[int]
    DP_RANKS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_INDICES_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    KNOWN_EPOCH_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    engine_ids: _containers.RepeatedScalarFieldContainer[str]
    dp_ranks: _containers.RepeatedScalarFieldContainer[int]
    engine_indices: _containers.RepeatedScalarFieldContainer[int]
    pool: str
    known_epoch: int
    def __init__(self, client_id: _Optional[str] = ..., lease_ids: _Optional[_Iterable[int]] = ..., engine_ids: _Optional[_Iterable[str]] = ..., dp_ranks: _Optional[_Iterable[int]] = ..., engine_indices: _Optional[_Iterable[int]] = ..., pool: _Optional[str] = ..., known_epoch: _Optional[int] = ...) -> None: ...

class RenewLeasesResponse(_message.Message):
    __slots__ = ("void_lease_ids", "ttl", "adopted_count", "dropped_count", "bound_lease_ids", "bound_target_indices", "engines", "epoch")
    VOID_LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    ADOPTED_COUNT_FIELD_NUMBER: _ClassVar[int]
    DROPPED_COUNT_FIELD_NUMBER: _ClassVar[int]
    BOUND_LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    BOUND_TARGET_INDICES_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    void_lease_ids: _containers.RepeatedScalarFieldContainer[int]
    ttl: _duration_pb2.Duration
    adopted_count: int
    dropped_count: int
    bound_lease_ids: _containers.RepeatedScalarFieldContainer[int]
    bound_target_indices: _containers.RepeatedScalarFieldContainer[int]
    engines: _containers.RepeatedCompositeFieldContainer[Engine]
    epoch: int
    def __init__(self, void_lease_ids: _Optional[_Iterable[int]] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., adopted_count: _Optional[int] = ..., dropped_count: _Optional[int] = ..., bound_lease_ids: _Optional[_Iterable[int]] = ..., bound_target_indices: _Optional[_Iterable[int]] = ..., engines: _Optional[_Iterable[_Union[Engine, _Mapping]]] = ..., epoch: _Optional[int] = ...) -> None: ...

class EndSessionRequest(_message.Message):
    __slots__ = ("session_ids", "pool")
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    session_ids: _containers.RepeatedScalarFieldContainer[str]
    pool: str
    def __init__(self, session_ids: _Optional[_Iterable[str]] = ..., pool: _Optional[str] = ...) -> None: ...

class EndSessionResponse(_message.Message):
    __slots__ = ("ended_count",)
    ENDED_COUNT_FIELD_NUMBER: _ClassVar[int]
    ended_count: int
    def __init__(self, ended_count: _Optional[int] = ...) -> None: ...

class ReportLoadRequest(_message.Message):
    __slots__ = ("engine_id", "rank_loads", "time_per_token", "age")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_LOADS_FIELD_NUMBER: _ClassVar[int]
    TIME_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    rank_loads: _containers.RepeatedCompositeFieldContainer[_engine_service_pb2.RankLoad]
    time_per_token: _duration_pb2.Duration
    age: _duration_pb2.Duration
    def __init__(self, engine_id: _Optional[str] = ..., rank_loads: _Optional[_Iterable[_Union[_engine_service_pb2.RankLoad, _Mapping]]] = ..., time_per_token: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ReportLoadResponse(_message.Message):
    __slots__ = ("known",)
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    known: bool
    def __init__(self, known: bool = ...) -> None: ...
