import datetime

from google.api import field_behavior_pb2 as _field_behavior_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from sluice.api.common.v1 import sample_pb2 as _sample_pb2
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
ROLE_UNSPECIFIED: Role
ROLE_ENGINE: Role
ROLE_EPISODES: Role
ENGINE_STATE_UNSPECIFIED: EngineState
ENGINE_STATE_ACTIVE: EngineState
ENGINE_STATE_DRAINING: EngineState
ENGINE_STATE_LOST: EngineState
ENGINE_STATE_EMPTY: EngineState

class Engine(_message.Message):
    __slots__ = ("engine_id", "address", "role", "pool", "dp_size", "max_running_count", "weights", "incarnation", "state", "leased_counts", "heartbeat_time")
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
    def __init__(self, engine_id: _Optional[str] = ..., address: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., pool: _Optional[str] = ..., dp_size: _Optional[int] = ..., max_running_count: _Optional[int] = ..., weights: _Optional[_Union[_sample_pb2.WeightVersion, _Mapping]] = ..., incarnation: _Optional[str] = ..., state: _Optional[_Union[EngineState, str]] = ..., leased_counts: _Optional[_Iterable[int]] = ..., heartbeat_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class RegisterEngineRequest(_message.Message):
    __slots__ = ("engine",)
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    engine: Engine
    def __init__(self, engine: _Optional[_Union[Engine, _Mapping]] = ...) -> None: ...

class RegisterEngineResponse(_message.Message):
    __slots__ = ("heartbeat_interval", "state")
    HEARTBEAT_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    heartbeat_interval: _duration_pb2.Duration
    state: EngineState
    def __init__(self, heartbeat_interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., state: _Optional[_Union[EngineState, str]] = ...) -> None: ...

class DrainEngineRequest(_message.Message):
    __slots__ = ("engine_id",)
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    def __init__(self, engine_id: _Optional[str] = ...) -> None: ...

class DrainEngineResponse(_message.Message):
    __slots__ = ("engine",)
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    engine: Engine
    def __init__(self, engine: _Optional[_Union[Engine, _Mapping]] = ...) -> None: ...

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

class AcquireLeasesRequest(_message.Message):
    __slots__ = ("client_id", "pool", "count", "min_version", "exact_version", "released_lease_ids", "request_id")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    MIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    EXACT_VERSION_FIELD_NUMBER: _ClassVar[int]
    RELEASED_LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    pool: str
    count: int
    min_version: int
    exact_version: int
    released_lease_ids: _containers.RepeatedScalarFieldContainer[int]
    request_id: str
    def __init__(self, client_id: _Optional[str] = ..., pool: _Optional[str] = ..., count: _Optional[int] = ..., min_version: _Optional[int] = ..., exact_version: _Optional[int] = ..., released_lease_ids: _Optional[_Iterable[int]] = ..., request_id: _Optional[str] = ...) -> None: ...

class AcquireLeasesResponse(_message.Message):
    __slots__ = ("lease_ids", "engine_indices", "dp_ranks", "engines", "ttl")
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_INDICES_FIELD_NUMBER: _ClassVar[int]
    DP_RANKS_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    engine_indices: _containers.RepeatedScalarFieldContainer[int]
    dp_ranks: _containers.RepeatedScalarFieldContainer[int]
    engines: _containers.RepeatedCompositeFieldContainer[Engine]
    ttl: _duration_pb2.Duration
    def __init__(self, lease_ids: _Optional[_Iterable[int]] = ..., engine_indices: _Optional[_Iterable[int]] = ..., dp_ranks: _Optional[_Iterable[int]] = ..., engines: _Optional[_Iterable[_Union[Engine, _Mapping]]] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class RenewLeasesRequest(_message.Message):
    __slots__ = ("client_id", "lease_ids", "engine_ids", "dp_ranks")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_IDS_FIELD_NUMBER: _ClassVar[int]
    DP_RANKS_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    engine_ids: _containers.RepeatedScalarFieldContainer[str]
    dp_ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, client_id: _Optional[str] = ..., lease_ids: _Optional[_Iterable[int]] = ..., engine_ids: _Optional[_Iterable[str]] = ..., dp_ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class RenewLeasesResponse(_message.Message):
    __slots__ = ("void_lease_ids", "ttl")
    VOID_LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    void_lease_ids: _containers.RepeatedScalarFieldContainer[int]
    ttl: _duration_pb2.Duration
    def __init__(self, void_lease_ids: _Optional[_Iterable[int]] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...
