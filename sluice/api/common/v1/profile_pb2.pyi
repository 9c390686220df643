from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class ProfileOptions(_message.Message):
    __slots__ = ("stacks", "memory")
    STACKS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    stacks: bool
    memory: bool
    def __init__(self, stacks: bool = ..., memory: bool = ...) -> None: ...

class Profile(_message.Message):
    __slots__ = ("name", "directory", "left_count", "files", "failure")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    LEFT_COUNT_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    name: str
    directory: str
    left_count: int
    files: _containers.RepeatedScalarFieldContainer[str]
    failure: str
    def __init__(self, name: _Optional[str] = ..., directory: _Optional[str] = ..., left_count: _Optional[int] = ..., files: _Optional[_Iterable[str]] = ..., failure: _Optional[str] = ...) -> None: ...
