"""Between a word of the protocol and its message: fields of the same names, translated by their types.

A word is a frozen dataclass or a NamedTuple, a message is protobuf's. What a codec does it learns once, from the annotations of the one
and the descriptor of the other, and compiles; a field that only one of the two has is found when the codec is made.

| annotation | field |
|---|---|
| str, int, float, bool, bytes, and NewTypes of them | of that kind |
| an Enum | an enum with the names of its members, each behind the enum's own |
| a word | its message |
| `... | None` | absent for None |
| tuple, Sequence, frozenset of these | repeated |
| Mapping of scalars | a map |
| `Annotated[..., As(...)]` | what its two functions make of it |
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Annotated, Any, Generic, Protocol, TypeVar, cast

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

T = TypeVar("T")
M = TypeVar("M", bound=Message)
T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)
M_contra = TypeVar("M_contra", contravariant=True)


@dataclass(frozen=True, slots=True)
class As:
    """What in an annotation says how a field is put into a message, and taken from one. `decode` raises ValueError for what makes no
    sense."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


class Decoder(Protocol[M_contra, T_co]):
    """What makes a word of a message. Raises ValueError for one that makes no sense."""

    def decode(self, message: M_contra, /) -> T_co: ...


class Encoder(Protocol[T_contra]):
    """What makes a message of a word."""

    def encode(self, word: T_contra, /) -> Message: ...


class Codec(Generic[T, M]):
    """The codec of the word `word`, whose message is `message`. Words that it holds need to have a codec before it."""

    def __init__(self, word: type[T], message: type[M]) -> None:
        """Raises TypeError when the two do not fit."""
        self.word, self.message = word, message
        hints = typing.get_type_hints(word, include_extras=True)
        descriptors = {field.name: cast(FieldDescriptor, field) for field in message.DESCRIPTOR.fields}
        names = _field_names(word)
        if set(names) != set(descriptors):
            raise TypeError(f"{word.__name__} and {message.DESCRIPTOR.name} differ in the fields {sorted(set(names) ^ set(descriptors))}")
        compiler = _Compiler(word, message)
        encoding = ", ".join(f"{name}={compiler.encoding(hints[name], descriptors[name], f'word.{name}')}" for name in names)
        decoding = ", ".join(f"{name}={compiler.decoding(hints[name], descriptors[name], f'message.{name}')}" for name in names)
        self.encode: Callable[[T], M] = compiler.function(f"lambda word: message_type({encoding})")
        self.decode: Callable[[M], T] = compiler.function(f"lambda message: word_type({decoding})")
        """Raises ValueError, naming the field, when a value has no meaning in the word."""
        _CODECS[word] = self


class OneOf(Generic[T, M]):
    """The codec of a message that is one of several words, each in a field of its own: those of the message's only `oneof`."""

    def __init__(self, message: type[M], **words: Codec[Any, Any]) -> None:
        """`words` by the names of their fields. Raises TypeError when they are not those of the `oneof`."""
        (self._group,) = message.DESCRIPTOR.oneofs_by_name
        names = {field.name for field in message.DESCRIPTOR.fields}
        if set(words) != names:
            raise TypeError(f"{message.DESCRIPTOR.name} is one of {sorted(names)}, not of {sorted(words)}")
        self._message = message
        self._names = {codec.word: (name, codec.encode) for name, codec in words.items()}
        self._decoders = {name: codec.decode for name, codec in words.items()}

    def encode(self, word: T) -> M:
        name, encode = self._names[type(word)]
        return self._message(**{name: encode(word)})

    def decode(self, message: M) -> T:
        """Raises ValueError when it is none of them."""
        name = message.WhichOneof(self._group)
        if name is None:
            raise ValueError(f"{message.DESCRIPTOR.name} must have one of {', '.join(self._decoders)}")
        return cast(T, self._decoders[name](getattr(message, name)))


_CODECS: dict[type, Codec[Any, Any]] = {}
"""By the word."""


class _Compiler:
    """Writes the expressions that translate a codec's fields, and gathers the names that they use."""

    def __init__(self, word: type, message: type[Message]) -> None:
        self._word = word
        self._names: dict[str, Any] = {"word_type": word, "message_type": message}

    def function(self, source: str) -> Callable[[Any], Any]:
        return cast("Callable[[Any], Any]", eval(source, self._names))  # from annotations and descriptors alone

    def encoding(self, hint: Any, field: FieldDescriptor, value: str) -> str:
        hint, optional = _without_none(hint)
        if typing.get_origin(hint) is Mapping:
            return value
        if (item := _item_of(hint)) is not None:
            one = self._encoder(item, field)
            return value if one is None else f"[{one}(item) for item in {value}]"
        one = self._encoder(hint, field)
        if one is None:
            return value
        return f"None if {value} is None else {one}({value})" if optional else f"{one}({value})"

    def decoding(self, hint: Any, field: FieldDescriptor, value: str) -> str:
        hint, optional = _without_none(hint)
        if typing.get_origin(hint) is Mapping:
            return f"dict({value})"
        if (item := _item_of(hint)) is not None:
            one = self._decoder(item, field)
            held = "frozenset" if typing.get_origin(hint) is frozenset else "tuple"
            return f"{held}({value})" if one is None else f"{held}([{one}(item) for item in {value}])"
        one = self._decoder(hint, field)
        decoded = value if one is None else f"{one}({value})"
        if not optional:
            return decoded
        if field.has_presence:
            return f"{decoded} if message.HasField({field.name!r}) else None"
        if field.enum_type is not None:
            return f"{decoded} if {value} else None"
        raise TypeError(f"{self._word.__name__}.{field.name} may be None, but its message cannot be without it")

    def _encoder(self, hint: Any, field: FieldDescriptor) -> str | None:
        """The name of the function that puts one value into a message; None: it goes there as it is."""
        if (conversion := _conversion(hint)) is not None:
            return self._name(field, "to", conversion.encode)
        kind = _plain(hint)
        if field.enum_type is not None:
            return self._name(field, "to", _numbers(kind, field.enum_type).__getitem__)
        if field.message_type is not None:
            return self._name(field, "to", self._codec(kind, field).encode)
        return None

    def _decoder(self, hint: Any, field: FieldDescriptor) -> str | None:
        if (conversion := _conversion(hint)) is not None:
            return self._name(field, "of", conversion.decode)
        kind = _plain(hint)
        if field.enum_type is not None:
            return self._name(field, "of", _member_of(_numbers(kind, field.enum_type), f"{self._word.__name__}.{field.name}"))
        if field.message_type is not None:
            return self._name(field, "of", self._codec(kind, field).decode)
        return None

    def _codec(self, kind: Any, field: FieldDescriptor) -> Codec[Any, Any]:
        codec, descriptor = _CODECS.get(kind), field.message_type
        if codec is None or codec.message.DESCRIPTOR is not descriptor:
            raise TypeError(f"{self._word.__name__}.{field.name}: there is no codec between {kind} and {descriptor and descriptor.name}")
        return codec

    def _name(self, field: FieldDescriptor, direction: str, function: Callable[[Any], Any]) -> str:
        name = f"{direction}_{field.name}"
        self._names[name] = function
        return name


def _field_names(word: Any) -> list[str]:
    return [field.name for field in fields(word)] if is_dataclass(word) else list(word._fields)


def _without_none(hint: Any) -> tuple[Any, bool]:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        others = [member for member in typing.get_args(hint) if member is not type(None)]
        if len(others) == 1:
            return others[0], True
    return hint, False


def _item_of(hint: Any) -> Any:
    """What a collection is of; None: it is none."""
    return typing.get_args(hint)[0] if typing.get_origin(hint) in (tuple, Sequence, frozenset) else None


def _conversion(hint: Any) -> As | None:
    if typing.get_origin(hint) is not Annotated:
        return None
    return next((extra for extra in typing.get_args(hint)[1:] if isinstance(extra, As)), None)


def _plain(hint: Any) -> Any:
    return typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint


def _numbers(kind: Any, descriptor: EnumDescriptor) -> dict[Enum, int]:
    """Of the members, on the wire. Zero is nobody's: it stands for what was not said."""
    prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", descriptor.name).upper() + "_"
    numbers = {value.name.removeprefix(prefix): value.number for value in descriptor.values if value.number}
    members = kind.__members__ if isinstance(kind, type) and issubclass(kind, Enum) else {}
    if set(numbers) != set(members):
        raise TypeError(f"{kind} and {descriptor.name} differ in the members {sorted(set(numbers) ^ set(members))}")
    return {member: numbers[name] for name, member in members.items()}


def _member_of(numbers: Mapping[Enum, int], where: str) -> Callable[[int], Enum]:
    members = {number: member for member, number in numbers.items()}

    def member(number: int) -> Enum:
        try:
            return members[number]
        except KeyError:
            raise ValueError(f"{where} must be one of {', '.join(each.name for each in numbers)}, not the number {number}") from None

    return member
