from google.api import field_behavior_pb2 as _field_behavior_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CheckStoreRequest(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: str
    def __init__(self, nonce: _Optional[str] = ...) -> None: ...

class CheckedPlace(_message.Message):
    __slots__ = ("use", "location", "found", "problem")
    USE_FIELD_NUMBER: _ClassVar[int]
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    use: str
    location: str
    found: bool
    problem: str
    def __init__(self, use: _Optional[str] = ..., location: _Optional[str] = ..., found: bool = ..., problem: _Optional[str] = ...) -> None: ...

class CheckStoreResponse(_message.Message):
    __slots__ = ("host", "process_id", "nonce", "places")
    HOST_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    host: str
    process_id: int
    nonce: str
    places: _containers.RepeatedCompositeFieldContainer[CheckedPlace]
    def __init__(self, host: _Optional[str] = ..., process_id: _Optional[int] = ..., nonce: _Optional[str] = ..., places: _Optional[_Iterable[_Union[CheckedPlace, _Mapping]]] = ...) -> None: ...
