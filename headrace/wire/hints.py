"""Type hints, read: which types values may have, and which are refused when the app starts.

Refused are types whose values cannot be carried (sets, enums, arbitrary classes) and unions whose members msgspec
cannot tell apart. The error says what to write instead.
"""

from __future__ import annotations

import dataclasses
import datetime
import types
import typing
from collections import abc
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.wire.types import (
    SCALARS,
    TEXTUAL,
    AnyType,
    ConstrainedType,
    DatetimeType,
    DeclaredRecord,
    DeclaredType,
    DictType,
    ListType,
    LiteralType,
    NeverType,
    ScalarType,
    TextType,
    TupleType,
    UnionType,
)

LISTS = (list, abc.Sequence, abc.MutableSequence, abc.Collection, abc.Iterable)
DICTS = (dict, abc.Mapping, abc.MutableMapping)


class Unsupported(Exception):
    """A type hint whose values cannot be carried. Says what to write instead."""


class Hints:
    """Reads type hints. A record is read once."""

    def __init__(self) -> None:
        self._records: dict[type, DeclaredRecord] = {}
        self._under_way: set[type] = set()

    def type_of(self, hint: Any) -> DeclaredType:
        """Raises `Unsupported`."""
        if hint is Any or hint is object:
            return AnyType("Any")
        if hint is None or hint in SCALARS:
            return ScalarType(type(None) if hint is None else hint)
        if hint in TEXTUAL:
            return TextType(hint)
        if hint is datetime.datetime:
            return DatetimeType()
        if hint in (typing.NoReturn, typing.Never):
            return NeverType("no value")
        if isinstance(hint, typing.NewType):
            return self.type_of(hint.__supertype__)
        if is_record_class(hint):
            return self._record(hint)
        return self._form(hint)

    def _form(self, hint: Any) -> DeclaredType:
        """A hint with parts."""
        origin, parts = typing.get_origin(hint) or hint, typing.get_args(hint)
        if origin in (typing.Union, types.UnionType):
            check_with_msgspec(hint)
            return UnionType([self.type_of(each) for each in parts])
        if origin is typing.Literal:
            if not all(type(each) in (int, str, type(None)) for each in parts):
                raise Unsupported(f"{name_of(hint)}: a Literal is made of str, int and None")
            return LiteralType(parts)
        if origin is typing.Annotated:
            return self._annotated(hint, parts[0], parts[1:])
        if origin in LISTS:
            return ListType(list, self.type_of(parts[0] if parts else Any))
        if origin is tuple:
            if not parts and hint not in (tuple, typing.Tuple):  # noqa: UP006 that is how it may be written
                return TupleType([])
            if not parts or parts[-1] is ...:
                return ListType(tuple, self.type_of(parts[0] if parts else Any))
            return TupleType([self.type_of(each) for each in parts])
        if origin in DICTS:
            key, item = parts or (Any, Any)
            if key not in (Any, str, int, bytes):
                raise Unsupported(f"{name_of(hint)}: the keys of a dict are str, int or bytes")
            return DictType(any_key() if key is Any else self.type_of(key), self.type_of(item))
        raise Unsupported(f"{name_of(hint)} is not supported for values{advice(origin)}")

    def _annotated(self, hint: Any, base: Any, notes: tuple[Any, ...]) -> DeclaredType:
        of = self.type_of(base)
        kinds = [each.text for each in (of.members if isinstance(of, UnionType) else [of])]
        if any(isinstance(note, msgspec.Meta) for note in notes):
            check_with_msgspec(hint)
            of = ConstrainedType(of, name_of(hint), meets(hint))
        for note in notes:
            if callable(getattr(note, "accepts", None)):
                if note.of.__name__ not in kinds:
                    raise Unsupported(f"{name_of(hint)}: {note} is for values of type {note.of.__name__}")
                of = ConstrainedType(of, f"{of.text} of {note}", note.accepts)
        return of

    def _record(self, cls: type) -> DeclaredType:
        if cls in self._under_way:
            found = self._records[cls]
            found.depth = None
            return found
        if cls in self._records:
            return self._records[cls]
        self._under_way.add(cls)
        record = self._records[cls] = DeclaredRecord(cls)
        try:
            hints = typing.get_type_hints(cls, include_extras=True)
            fields = {}
            for name in field_names(cls):
                try:
                    fields[name] = self.type_of(hints[name])
                except Unsupported as error:
                    raise Unsupported(f"{cls.__name__}.{name}: {error}") from None
        except BaseException:
            del self._records[cls]
            raise
        finally:
            self._under_way.discard(cls)
        is_recursive = record.depth is None
        record.complete(fields)
        if is_recursive:  # only a walk can count how deep its values are
            record.depth, record.is_native, record.is_immutable = None, False, False
        return record


def any_key() -> DeclaredType:
    return UnionType([ScalarType(str), ScalarType(int), ScalarType(bytes)])


def is_record_class(hint: Any) -> bool:
    return isinstance(hint, type) and (dataclasses.is_dataclass(hint) or issubclass(hint, msgspec.Struct))


def field_names(cls: type) -> tuple[str, ...]:
    if issubclass(cls, msgspec.Struct):
        return cls.__struct_fields__
    return tuple(field.name for field in dataclasses.fields(cls))  # type: ignore[arg-type]


def meets(hint: Any) -> Callable[[Any], bool]:
    def accepts(value: Any) -> bool:
        try:
            msgspec.convert(value, hint)
        except msgspec.ValidationError:
            return False
        return True

    return accepts


def check_with_msgspec(hint: Any) -> None:
    """Types that msgspec cannot decode, such as a union of two types that look alike, are refused."""
    try:
        msgspec.msgpack.Decoder(hint)
    except TypeError as error:
        raise Unsupported(f"{name_of(hint)} is not supported for values: {error}") from None


def advice(origin: Any) -> str:
    if origin in (set, frozenset):
        return ": it has no order to carry; use a list or a tuple"
    if isinstance(origin, type):
        return ": use plain values, a dataclass, or a msgspec struct"
    return ""


def name_of(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint).replace("typing.", "")
