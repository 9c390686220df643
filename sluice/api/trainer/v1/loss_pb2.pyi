from google.api import field_behavior_pb2 as _field_behavior_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Aggregation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    AGGREGATION_UNSPECIFIED: _ClassVar[Aggregation]
    AGGREGATION_TOKEN_MEAN: _ClassVar[Aggregation]
    AGGREGATION_SAMPLE_MEAN: _ClassVar[Aggregation]
    AGGREGATION_GROUP_MEAN: _ClassVar[Aggregation]
    AGGREGATION_CONSTANT: _ClassVar[Aggregation]
AGGREGATION_UNSPECIFIED: Aggregation
AGGREGATION_TOKEN_MEAN: Aggregation
AGGREGATION_SAMPLE_MEAN: Aggregation
AGGREGATION_GROUP_MEAN: Aggregation
AGGREGATION_CONSTANT: Aggregation

class Setting(_message.Message):
    __slots__ = ("number", "flag", "word")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FLAG_FIELD_NUMBER: _ClassVar[int]
    WORD_FIELD_NUMBER: _ClassVar[int]
    number: float
    flag: bool
    word: str
    def __init__(self, number: _Optional[float] = ..., flag: bool = ..., word: _Optional[str] = ...) -> None: ...

class LossSpec(_message.Message):
    __slots__ = ("name", "aggregation", "settings")
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Setting
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Setting, _Mapping]] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    AGGREGATION_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    name: str
    aggregation: Aggregation
    settings: _containers.MessageMap[str, Setting]
    def __init__(self, name: _Optional[str] = ..., aggregation: _Optional[_Union[Aggregation, str]] = ..., settings: _Optional[_Mapping[str, Setting]] = ...) -> None: ...

class AdvantageSpec(_message.Message):
    __slots__ = ("name", "settings")
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Setting
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Setting, _Mapping]] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    name: str
    settings: _containers.MessageMap[str, Setting]
    def __init__(self, name: _Optional[str] = ..., settings: _Optional[_Mapping[str, Setting]] = ...) -> None: ...
