"""What a request may hold: its bytes are looked at before they are decoded, its fields after."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import grpc
import numpy as np
from google.api import field_behavior_pb2
from google.protobuf import message as pb
from google.protobuf.descriptor import FieldDescriptor
from pydantic import Field

from sluice.config import Config
from sluice.runtime.errors import InvalidFieldError, ServiceError

Descriptor = Any  # of a message type: protobuf has a class of them per implementation
Check = Callable[[Any], None]  # of a value, which raises InvalidFieldError with a path from it

LONGEST_SECONDS = 365 * 86_400  # of a duration
SCANNED_BYTES = 1 << 16  # shorter messages cannot hold much, whatever they hold
DEPTH = 100  # of messages in messages; the decoder takes no more either

# A number of one of these names counts something; others, such as seeds and ranks, may be negative.
_COUNTS = re.compile(
    r"(^|_)(counts?|lengths?|bytes|sizes?|multiple|tokens|micro_batches|groups|index)$"
)
_PART = 1 << 20  # bytes looked at in one go
_DURATION = "google.protobuf.Duration"
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_FREE = {  # messages and fields that hold any text
    "google.protobuf.Any",
    "google.protobuf.ListValue",
    "google.protobuf.Struct",
    "google.protobuf.Value",
    "google.rpc.Status",
    "sluice.api.rollout.v1.SamplingParams.stop",
    "sluice.api.trainer.v1.CommandResult.transfer_failure",
}
_SIGNED = {"sluice.api.router.v1.ReleasedLeases.token_counts"}  # negative says nothing
_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32,
    FieldDescriptor.CPPTYPE_INT64,
    FieldDescriptor.CPPTYPE_UINT32,
    FieldDescriptor.CPPTYPE_UINT64,
}
_FIXED_WIDTH = {
    FieldDescriptor.TYPE_FIXED32: 4,
    FieldDescriptor.TYPE_SFIXED32: 4,
    FieldDescriptor.TYPE_FLOAT: 4,
    FieldDescriptor.TYPE_FIXED64: 8,
    FieldDescriptor.TYPE_SFIXED64: 8,
    FieldDescriptor.TYPE_DOUBLE: 8,
}


class MessageLimits(Config):
    """What one request may hold beside `max_message_bytes`; more is INVALID_ARGUMENT."""

    name_characters: int = Field(1024, ge=1, description="Of an id, a name, a path, an address.")
    items: int = Field(1_000_000, ge=1, description="Texts and messages in it, at any depth.")
    numbers: int = Field(1 << 24, ge=1, description="Numbers in lists in it, at any depth.")


class Bound(NamedTuple):
    """How many values a field may have, or how large one may be, and the setting that says so."""

    limit: int
    setting: str


class MalformedMessageError(ServiceError):
    """The bytes are no message of the type that the method takes."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "MALFORMED_MESSAGE"


class _LimitError(InvalidFieldError):
    def __init__(self, path: str, what: str, found: int, bound: Bound) -> None:
        super().__init__(
            path,
            f"{what} {found:,}, {bound.setting} allows {bound.limit:,}",
            limit=bound.limit,
            setting=bound.setting,
        )


class _Rule(NamedTuple):
    """What is checked of one field of a decoded message, where it is set.

    by_presence: whether it is set says HasField, and not its value. suspect: an expression of
    `value`; where it is false, as of most, the checks have nothing to say.
    """

    name: str
    is_required: bool
    by_presence: bool
    suspect: str
    checks: tuple[Check, ...]

    def lines(self, number: int) -> list[str]:
        """Statements of a function of `message` in which check n is `check_<number>_n`."""
        name, calls = self.name, [f"check_{number}_{n}(value)" for n in range(len(self.checks))]
        read = f"value = message.{name}"
        if keyword.iskeyword(name):
            read = f"value = getattr(message, {name!r})"
        if self.suspect:
            calls = [f"if {self.suspect}:", *("    " + call for call in calls)]
        if self.by_presence:
            lines = [f"if message.HasField({name!r}):", f"    {read}"]
        else:
            lines = [read, "if value:"]
        lines += ["    " + call for call in calls or ["pass"]]
        if self.is_required:
            lines += ["else:", f"    raise missing({name!r}, 'is required')"]
        return lines


@dataclass
class _Layout:
    """How the bytes of one message type are walked: by field number and wire type."""

    names: dict[int, str] = field(default_factory=dict)
    singles: set[int] = field(default_factory=set)  # numbers that stand alone
    numbers: dict[int, int] = field(default_factory=dict)  # width in bytes, 0 where it varies
    messages: dict[int, Descriptor] = field(default_factory=dict)
    bounds: dict[int, Bound] = field(default_factory=dict)


class RequestRules:
    """Decodes requests within limits and checks them.

    `bounds` are of single fields by their full names, e.g.
    `sluice.api.rollout.v1.GenerateRequest.sample_count`: of how many values a list may have, of
    how large a number may be. They are read when the first request of a type comes.
    """

    def __init__(
        self, limits: MessageLimits | None = None, bounds: Mapping[str, Bound] | None = None
    ) -> None:
        self._limits = limits or MessageLimits()
        self._bounds = {} if bounds is None else bounds  # which may be empty still
        self._name_bound = Bound(self._limits.name_characters, "server.limits.name_characters")
        self._item_bound = Bound(self._limits.items, "server.limits.items")
        self._number_bound = Bound(self._limits.numbers, "server.limits.numbers")
        self._checks: dict[Descriptor, Check] = {}
        self._layouts: dict[Descriptor, _Layout] = {}

    def weigh(self, raw: bytes, parse: Callable[[bytes], Any]) -> int:
        """About how many bytes a message takes once it is decoded.

        Raises InvalidFieldError naming a list that is too long.
        """
        if len(raw) <= SCANNED_BYTES:
            return len(raw)
        descriptor = getattr(getattr(parse, "__self__", None), "DESCRIPTOR", None)
        return len(raw) if descriptor is None else self._scan(raw, descriptor)

    def decode(self, raw: bytes, parse: Callable[[bytes], Any]) -> Any:
        """Raises MalformedMessageError."""
        try:
            return parse(raw)
        except pb.DecodeError as error:
            raise MalformedMessageError(str(error)) from None

    def check(self, message: pb.Message) -> None:
        """Raises InvalidFieldError for the first field that breaks a rule.

        A field marked REQUIRED is set, texts are short and without control characters, counts are
        not negative, durations are sensible and bounds are kept.
        """
        self._check_of(message.DESCRIPTOR)(message)

    def _check_of(self, descriptor: Descriptor) -> Check:
        """The checks of a message type in one function, which reads its fields by their names.

        Most requests are small and asked for one by one, so that a loop over rules, each with
        its way to read a field, would take longer than what they do.
        """
        known = self._checks.get(descriptor)
        if known is not None:
            return known
        names: dict[str, Any] = {"missing": InvalidFieldError}
        lines = ["def check(message):", "    pass"]
        for item in sorted(descriptor.fields, key=lambda item: item.number):
            rule = self._rule(item, ())
            if rule is not None:
                lines += ["    " + line for line in rule.lines(item.number)]
                names |= {f"check_{item.number}_{n}": each for n, each in enumerate(rule.checks)}
        exec("\n".join(lines), names)  # names of fields, and nothing that a request says
        check: Check = self._checks.setdefault(descriptor, names["check"])
        return check

    def _rule(self, item: Any, above: tuple[Descriptor, ...]) -> _Rule | None:
        """The rule of a field; None where there is nothing to check."""
        behavior = item.GetOptions().Extensions[field_behavior_pb2.field_behavior]
        is_required = field_behavior_pb2.REQUIRED in behavior
        checks: list[Check] = []
        suspect = ""
        if (bound := self._bounds.get(item.full_name)) is not None:
            checks.append(_bound_check(item, bound))
        below = item.message_type
        if below is None:
            is_signed = item.cpp_type not in _INTEGERS or item.full_name in _SIGNED
            if item.type == FieldDescriptor.TYPE_STRING and item.full_name not in _FREE:
                suspect = f"len(value) > {self._name_bound.limit} or not value.isprintable()"
                checks.append(self._text_check(item))
            elif not is_signed and _COUNTS.search(item.name):
                suspect = "value < 0"
                checks.append(_count_check(item))
        elif below.full_name not in _FREE and self._asks(below, above):
            checks.append(self._check_below(item))
        if not (is_required or checks):
            return None
        if item.is_repeated or len(checks) > 1:
            suspect = ""
        return _Rule(item.name, is_required, item.has_presence, suspect, tuple(checks))

    def _text_check(self, item: Any) -> Check:
        name = item.name

        def check_text(text: str) -> None:
            self._check_texts((text,), name)

        def check_texts(texts: Sequence[str]) -> None:
            self._check_texts(texts, name)

        return check_texts if item.is_repeated else check_text

    def _check_texts(self, texts: Iterable[str], name: str) -> None:
        for text in texts:
            if len(text) > self._name_bound.limit:
                raise _LimitError(name, "has so many characters:", len(text), self._name_bound)
        if _CONTROL.search("".join(texts)):
            raise InvalidFieldError(name, "must not hold control characters")

    def _check_below(self, item: Any) -> Check:
        """Looks into a message, into each of a list, or into keys and values of a map."""
        name, below = item.name, item.message_type

        def check_one(message: pb.Message) -> None:
            try:
                self._check_of(below)(message)
            except InvalidFieldError as error:
                raise error.within(name) from None

        def check_each(messages: Sequence[pb.Message]) -> None:
            check, index = self._check_of(below), -1
            try:
                for message in messages[:]:  # half the cost of an iterator
                    index += 1
                    check(message)
            except InvalidFieldError as error:
                raise error.within(f"{name}[{index}]") from None

        def check_map(items: Mapping[Any, Any]) -> None:
            key, value = below.fields_by_name["key"], below.fields_by_name["value"]
            if key.type == FieldDescriptor.TYPE_STRING:
                self._check_texts(list(items), name)
            if value.message_type is not None:
                for each, message in items.items():
                    try:
                        self.check(message)
                    except InvalidFieldError as error:
                        raise error.within(f"{name}[{each}]") from None

        def check_duration(duration: Any) -> None:
            if not (0 <= duration.seconds <= LONGEST_SECONDS and 0 <= duration.nanos < 10**9):
                raise InvalidFieldError(name, f"must be a time of 0 to {LONGEST_SECONDS} s")

        if below.GetOptions().map_entry:
            return check_map
        if item.is_repeated:
            return check_each
        return check_duration if below.full_name == _DURATION else check_one

    def _asks(self, descriptor: Descriptor, above: tuple[Descriptor, ...]) -> bool:
        """Whether a message type has fields with rules, itself or below."""
        if descriptor in above:
            return False
        if descriptor.full_name == _DURATION:
            return True
        above = (*above, descriptor)
        return any(self._rule(item, above) is not None for item in descriptor.fields)

    def _layout_of(self, descriptor: Descriptor) -> _Layout:
        layout = self._layouts.get(descriptor)
        if layout is not None:
            return layout
        layout = self._layouts[descriptor] = _Layout()
        for item in descriptor.fields:
            layout.names[item.number] = item.name
            if item.message_type is not None:
                layout.messages[item.number] = item.message_type
            elif item.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
                pass
            elif item.is_repeated:
                layout.numbers[item.number] = _FIXED_WIDTH.get(item.type, 0)
            else:
                layout.singles.add(item.number)
            if item.is_repeated and item.full_name in self._bounds:
                layout.bounds[item.number] = self._bounds[item.full_name]
        return layout

    def _scan(self, raw: bytes, descriptor: Descriptor) -> int:
        """Returns about how many bytes the decoded values take.

        Bytes that are no message are left for the decoder to refuse. Raises InvalidFieldError.
        """
        items = numbers = 0
        most_items, most_numbers = self._item_bound, self._number_bound
        pending = [(0, len(raw), descriptor, "", 0)]
        while pending:
            start, end, kind, prefix, depth = pending.pop()
            layout = self._layout_of(kind)
            counts: dict[int, int] = {}
            for number, wire_type, first, last in _fields(raw, start, end):
                count = 1
                if number in layout.numbers:
                    if wire_type == 2:
                        count = _packed_count(raw, first, last, layout.numbers[number])
                    numbers += count
                    if numbers > most_numbers.limit:
                        path = prefix + layout.names[number]
                        raise _LimitError(
                            path, "brings the numbers to", numbers, self._number_bound
                        )
                elif number in layout.singles:
                    continue
                else:
                    items += 1
                    if number in layout.messages and depth < DEPTH:
                        path = f"{prefix}{layout.names[number]}."
                        pending.append((first, last, layout.messages[number], path, depth + 1))
                    if items > most_items.limit:
                        path = prefix + layout.names.get(number, str(number))
                        raise _LimitError(
                            path, "brings texts and messages to", items, self._item_bound
                        )
                if number in layout.bounds:
                    counts[number] = counts.get(number, 0) + count
                    if counts[number] > layout.bounds[number].limit:
                        path, found = prefix + layout.names[number], counts[number]
                        raise _LimitError(
                            path, "has so many entries:", found, layout.bounds[number]
                        )
        return len(raw) + 8 * numbers + 64 * items


def _bound_check(item: Any, bound: Bound) -> Check:
    what = "has so many entries:" if item.is_repeated else "is"

    def check_bound(value: Any) -> None:
        found = len(value) if item.is_repeated else value
        if found > bound.limit:
            raise _LimitError(item.name, what, found, bound)

    return check_bound


def _count_check(item: Any) -> Check:
    name, is_repeated = item.name, item.is_repeated

    def check_count(value: Any) -> None:
        if (min(value) if is_repeated else value) < 0:
            raise InvalidFieldError(name, "must not be negative")

    return check_count


def _packed_count(raw: bytes, first: int, last: int, width: int) -> int:
    if width:
        return (last - first) // width
    values = np.frombuffer(raw, dtype=np.uint8, count=last - first, offset=first)
    parts = (values[at : at + _PART] for at in range(0, len(values), _PART))
    return sum(int(np.count_nonzero(part < 0x80)) for part in parts)


def _fields(raw: bytes, position: int, end: int) -> Iterable[tuple[int, int, int, int]]:
    """Yields (number, wire type, start, end of the value); ends early at what is no field."""
    while position < end:
        tag = raw[position]
        position += 1
        if tag >= 0x80:
            tag, position = _varint(raw, position - 1, end)
        wire_type, first = tag & 7, position
        if wire_type == 2:
            if position >= end:
                return
            size = raw[position]
            position += 1
            if size >= 0x80:
                size, position = _varint(raw, position - 1, end)
            first, position = position, position + size
        elif wire_type == 0:
            while position < end and raw[position] >= 0x80:
                position += 1
            position += 1
        elif wire_type in (1, 5):
            position += 8 if wire_type == 1 else 4
        else:
            return
        if position > end:
            return
        yield tag >> 3, wire_type, first, position


def _varint(raw: bytes, position: int, end: int) -> tuple[int, int]:
    """The number at a place and the place after it; a place beyond `end` where it is cut off."""
    value = shift = 0
    while position < end and shift < 70:
        byte = raw[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    return value, end + 1
