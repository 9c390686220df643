"""Messages that no honest caller sends, built from descriptors by a seeded generator."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

from google.protobuf import message as pb
from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor as Field

MANY = 10_000
LONG = "x" * 5000
TEXTS = (
    *("", "a", "../", "../../../../tmp/sluice-fuzz", "/etc/passwd", "/tmp/sluice-fuzz"),
    *("\0", "a\0b", LONG, "é\u2028", "層" * 300),
)
_SURROGATE = "�-lone-surrogate-�"  # stands for bytes that no text may hold
_BROKEN = b"\xed\xa0\x80-lone-surrogate-\xed\xa0\x80"
FLOATS = (math.nan, math.inf, -math.inf, 0.0, -0.0, -1.0, 1.0, 1e-45, 3.4e38, -3.4e38)
_RANGES = {
    Field.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    Field.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    Field.CPPTYPE_UINT32: (0, 2**32 - 1),
    Field.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_FLOATS = (Field.CPPTYPE_FLOAT, Field.CPPTYPE_DOUBLE)
DEPTH = 4


class MessageMaker:
    """Makes messages of any type; `names` are texts that mean something to the service."""

    def __init__(self, dice: random.Random, names: Sequence[str] = ()) -> None:
        self._dice, self._texts = dice, (*TEXTS, _SURROGATE, *names)

    def malformed(self, valid: Sequence[bytes]) -> bytes:
        """Random bytes, or those of a valid message cut, flipped or with a wrong length."""
        dice = self._dice
        data = bytearray(dice.choice(valid)) if valid else bytearray()
        match dice.randrange(5):
            case 0:
                return dice.randbytes(dice.choice((1, 2, 3, 17, 300)))
            case 1 if len(data) > 1:
                return bytes(data[: dice.randrange(1, len(data))])
            case 2 if data:
                for _ in range(dice.randrange(1, 4)):
                    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
                return bytes(data)
            case 3:  # a field that says to be longer than the message
                return bytes(data) + b"\x0a\xff\xff\xff\xff\x07" + dice.randbytes(3)
        return bytes(data) + b"\xff" * dice.choice((1, 11))

    def extreme(self, kind: Any, valid: Sequence[pb.Message]) -> bytes:
        """A message of extreme values, or a valid one with a few of them in it."""
        dice = self._dice
        if valid and dice.random() < 0.6:
            message = kind()
            message.CopyFrom(dice.choice(valid))
            for _ in range(dice.choice((0, 1, 1, 1, 2))):
                self._spoil(message)
        else:
            message = self._fill(kind(), DEPTH)
        return self._bytes(message)

    def _bytes(self, message: pb.Message) -> bytes:
        data = message.SerializePartialToString()
        return data.replace(_SURROGATE.encode(), _BROKEN.ljust(len(_SURROGATE.encode()), b"-"))

    def _spoil(self, message: pb.Message) -> None:
        """Give one field, at any depth, an extreme value."""
        fields: list[Any] = list(message.DESCRIPTOR.fields)
        if not fields:
            return
        item = self._dice.choice(fields)
        inner = [
            value
            for field, value in message.ListFields()
            if isinstance(value, pb.Message) and field.full_name != "google.protobuf.Struct"
        ]
        for field, value in message.ListFields():
            if field.message_type and field.is_repeated and not _is_map(field) and len(value):
                inner.append(self._dice.choice(list(value)))
        if inner and self._dice.random() < 0.5:
            self._spoil(self._dice.choice(inner))
        else:
            message.ClearField(item.name)
            self._set(message, item, DEPTH)

    def _fill(self, message: pb.Message, depth: int) -> pb.Message:
        oneofs: Any = message.DESCRIPTOR.oneofs
        chosen = {each.name: self._dice.choice(each.fields).name for each in oneofs}
        for item in message.DESCRIPTOR.fields:
            oneof: Any = item.containing_oneof
            if oneof is not None and chosen[oneof.name] != item.name:
                continue
            if self._dice.random() < 0.85:
                self._set(message, item, depth)
        return message

    def _set(self, message: pb.Message, item: Any, depth: int) -> None:
        if item.message_type is not None and depth <= 0:
            return
        if not item.is_repeated:
            if item.message_type is not None:
                self._fill(getattr(message, item.name), depth - 1)
                getattr(message, item.name).SetInParent()
            else:
                setattr(message, item.name, self._value(item))
            return
        count = self._dice.choice((0, 1, 1, 2, MANY if depth == DEPTH else 3))
        values = getattr(message, item.name)
        if _is_map(item):
            self._set_map(values, item, min(count, 100), depth)
        elif item.message_type is not None:
            one = self._fill(_class_of(item.message_type), depth - 1)
            values.extend([one] * count)
        else:
            values.extend([self._value(item)] * count)

    def _set_map(self, values: Any, item: Any, count: int, depth: int) -> None:
        key, value = (item.message_type.fields_by_name[name] for name in ("key", "value"))
        for index in range(count):
            name = self._value(key)
            if index and isinstance(name, str):
                name = f"{name}{index}"
            if value.message_type is not None:
                self._fill(values[name], depth - 1)
            else:
                values[name] = self._value(value)

    def _value(self, item: Any) -> Any:
        dice = self._dice
        if item.cpp_type in _RANGES:
            low, high = _RANGES[item.cpp_type]
            return max(low, dice.choice((0, 1, -1, 2, low, high, high // 2, 65_537)))
        if item.cpp_type in _FLOATS:
            return dice.choice(FLOATS)
        if item.cpp_type == Field.CPPTYPE_BOOL:
            return dice.random() < 0.5
        if item.cpp_type == Field.CPPTYPE_ENUM:
            numbers = [value.number for value in item.enum_type.values]
            return dice.choice((*numbers, 99_999, -1))
        text = dice.choice(self._texts)
        return text if item.type == Field.TYPE_STRING else text.encode()


def _class_of(descriptor: Any) -> Any:
    return message_factory.GetMessageClass(descriptor)()


def _is_map(item: Any) -> bool:
    return bool(item.message_type is not None and item.message_type.GetOptions().map_entry)
