"""Values from JSON, converted to declared types. JSON has fewer types than Python: a list may stand for a tuple, an
object for a record, a text for a date.

Rules:
1. Nothing is lost. A number becomes a `Decimal` digit by digit, from its text; a time with more digits than Python
   keeps is refused; an integer becomes a float only if they are equal.
2. An object becomes a record only if the record has all its fields: an unknown one is refused, and so is a missing one
   that has no default.
3. Texts are not numbers, and numbers are not texts, except that a `Decimal` may be given as a text.
4. What does not convert stays as it is. Then the check of the type (`wire/types.py`) refuses it, and says what was
   wanted there.

Never here: functions, and what is done with values of Python clients, which are never converted.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import decimal
import math
import re
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.wire.types import (
    ConstrainedType,
    DatetimeType,
    DeclaredRecord,
    DeclaredType,
    DictType,
    ListType,
    Room,
    ScalarType,
    TextType,
    TupleType,
    UnionType,
    is_short,
)

Convert = Callable[[Any], Any]

DECIMAL = re.compile(r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
INTEGER = re.compile(r"0|-?[1-9]\d{0,19}", re.ASCII)
FINE_TIME = re.compile(r"[.,]\d{6}\d*[1-9]", re.ASCII)  # more than microseconds
UNBOUNDED = 1 << 40  # messages are bounded


class NumberText(str):
    """A JSON number with a fraction or an exponent, as it was written. Conversion leaves none of them."""

    __slots__ = ()


class NotConverted(Exception):
    """A part of a value cannot be what is declared for it: why, and the path to the part."""

    def __init__(self, why: str, path: str = "") -> None:
        super().__init__(why)
        self.why, self.path = why, path

    def within(self, step: str) -> NotConverted:
        return NotConverted(self.why, step + self.path)


def mentions_decimal(of: DeclaredType, seen: frozenset[DeclaredType] = frozenset()) -> bool:
    """Whether a value of the type can have a Decimal in it that was declared as one."""
    if isinstance(of, TextType):
        return of.kind is decimal.Decimal
    if of in seen:
        return False
    parts = list(of.fields.values()) if isinstance(of, DeclaredRecord) else parts_of(of)
    return any(mentions_decimal(part, seen | {of}) for part in parts)


def parts_of(of: DeclaredType) -> list[DeclaredType]:
    return of.items if isinstance(of, TupleType) else of.parts()


class Converters:
    """Makes converters of declared types; None if there is nothing to convert. `has_texts` says whether the values that
    come in have `NumberText`s, which are floats where no Decimal is declared."""

    def __init__(self, has_texts: bool) -> None:
        self.has_texts = has_texts
        self._leaf: Convert | None = to_plain if has_texts else None
        self._records: dict[DeclaredRecord, RecordConverter] = {}

    def of(self, declared: DeclaredType) -> Convert | None:
        if isinstance(declared, ConstrainedType):
            return self.of(declared.base)
        if isinstance(declared, ScalarType):
            return {float: to_float, bytes: to_bytes}.get(declared.kind, self._leaf)
        if isinstance(declared, TextType):
            return to_decimal if declared.kind is decimal.Decimal else from_text(declared.kind)
        if isinstance(declared, DatetimeType):
            return to_datetime
        if isinstance(declared, ListType):
            return self._list(declared)
        if isinstance(declared, TupleType):
            return tuple_converter([self.of(item) for item in declared.items])
        if isinstance(declared, DictType):
            return dict_converter(self._key(declared.key), self.of(declared.item))
        if isinstance(declared, UnionType):
            return union_converter(declared.members, [self.of(each) for each in declared.members])
        if isinstance(declared, DeclaredRecord):
            return self._record(declared)
        return self._leaf

    def _list(self, declared: ListType) -> Convert | None:
        item = self.of(declared.item)
        return None if item is None and declared.kind is list else list_converter(declared.kind, item)

    def _key(self, declared: DeclaredType) -> Convert | None:
        kind = declared.kind if isinstance(declared, ScalarType) else str
        return {int: to_int_key, bytes: to_bytes_key}.get(kind)

    def _record(self, declared: DeclaredRecord) -> Convert:
        found = self._records.get(declared)
        if found is None:
            found = self._records[declared] = RecordConverter(declared)
            found.fields = {name: self.of(each) for name, each in declared.fields.items()}
        return found


def convert_part(convert: Convert | None, value: Any, step: str) -> Any:
    if convert is None:
        return value
    try:
        return convert(value)
    except NotConverted as error:
        raise error.within(step) from None


# --- values without parts ---------------------------------------------------------------------------------------------


def to_plain(value: Any) -> Any:
    """As JSON means it: a number with a fraction is a float, however deep."""
    kind = type(value)
    if kind is NumberText:
        return as_float(value)
    if kind is list:
        return [to_plain(item) for item in value]
    if kind is dict:
        return {key: to_plain(item) for key, item in value.items()}
    return value


def as_float(text: NumberText) -> float:
    number = float(text)
    if math.isinf(number):
        raise NotConverted(f"{text[:60]} is too large for a float")
    return number


def to_float(value: Any) -> Any:
    if type(value) is int:
        try:
            return float(value) if float(value) == value else value
        except OverflowError:
            return value
    return as_float(value) if type(value) is NumberText else value


def to_decimal(value: Any) -> Any:
    kind = type(value)
    if kind is int or kind is NumberText or (kind is str and DECIMAL.fullmatch(value)):
        try:
            return decimal.Decimal(value)
        except decimal.InvalidOperation:
            raise NotConverted(f"{value[:60]} is out of the range of a Decimal") from None
    return to_plain(value)


def to_int_key(value: Any) -> Any:
    """Keys of JSON's objects are texts. Only the usual form of a number is one, so that no two texts are one key."""
    return int(value) if type(value) is str and INTEGER.fullmatch(value) else value


def to_bytes_key(value: Any) -> Any:
    made = to_bytes(value)
    return made if type(made) is bytes and base64.b64encode(made).decode() == value else value


def to_datetime(value: Any) -> Any:
    if type(value) is str and FINE_TIME.search(value):
        raise NotConverted(f"{value[:60]!r} has more digits than microseconds")
    return _datetime(value)


def from_text(kind: type) -> Convert:
    def convert(value: Any) -> Any:
        if type(value) is not str:
            return to_plain(value)
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError:
            return value

    return convert


to_bytes = from_text(bytes)  # base64
_datetime = from_text(datetime.datetime)

# --- values with parts ------------------------------------------------------------------------------------------------


def list_converter(kind: type, item: Convert | None) -> Convert:
    def convert(value: Any) -> Any:
        if type(value) is not list:
            return to_plain(value)
        if item is None:
            return kind(value)
        return kind([convert_part(item, each, f"[{at}]") for at, each in enumerate(value)])

    return convert


def tuple_converter(items: list[Convert | None]) -> Convert:
    def convert(value: Any) -> Any:
        if type(value) is not list or len(value) != len(items):
            return to_plain(value)
        pairs = enumerate(zip(items, value, strict=True))
        return tuple(convert_part(item, each, f"[{at}]") for at, (item, each) in pairs)

    return convert


def dict_converter(key: Convert | None, item: Convert | None) -> Convert | None:
    if key is None and item is None:
        return None

    def convert(value: Any) -> Any:
        if type(value) is not dict:
            return to_plain(value)
        return {
            each if key is None else key(each): convert_part(item, part, f"[{each!r}]" if is_short(each) else "[...]")
            for each, part in value.items()
        }

    return convert


def union_converter(members: list[DeclaredType], converters: list[Convert | None]) -> Convert:
    """A member that has the value as it is comes first, then one that it can be converted to. (An int passes for a
    float, but is converted if that is the only member it fits.)"""
    is_float = [isinstance(each, ScalarType) and each.kind is float for each in members]

    def fits(member: DeclaredType, value: Any) -> bool:
        return member.fault(value, Room(UNBOUNDED, UNBOUNDED)) is None

    def convert(value: Any) -> Any:
        why = None
        with_floats = as_far_as_possible(value)
        for member, only_floats in zip(members, is_float, strict=True):
            if not (only_floats and type(with_floats) is int) and fits(member, with_floats):
                return with_floats
        for member, converter in zip(members, converters, strict=True):
            try:
                made = value if converter is None else converter(value)
                if fits(member, made):
                    return made
            except NotConverted as error:
                why = why or error
        if why is not None and isinstance(value, dict | NumberText):
            raise why
        return with_floats

    return convert


def as_far_as_possible(value: Any) -> Any:
    try:
        return to_plain(value)
    except NotConverted:
        return value


class RecordConverter:
    """Makes a record of an object, as its class makes one: with its defaults, and its `__post_init__`."""

    def __init__(self, declared: DeclaredRecord) -> None:
        cls = self.cls = declared.cls
        self.fields: dict[str, Convert | None] = {}
        self.tag: tuple[str, Any] | None = None
        self.is_array = False
        if issubclass(cls, msgspec.Struct):
            config = cls.__struct_config__
            self.names = dict(zip(cls.__struct_encode_fields__, cls.__struct_fields__, strict=True))
            self.needed = {each.encode_name for each in msgspec.structs.fields(cls) if each.required}
            if config.tag is not None:
                self.tag = (str(config.tag_field), config.tag)
            self.is_array = config.array_like
        else:
            given = [each for each in dataclasses.fields(cls) if each.init]  # type: ignore[arg-type]
            self.names = {each.name: each.name for each in given}
            absent = dataclasses.MISSING
            self.needed = {each.name for each in given if each.default is absent and each.default_factory is absent}

    def __call__(self, value: Any) -> Any:
        value = self._by_name(value) if self.is_array and type(value) is list else value
        if type(value) is not dict:
            return to_plain(value)
        tag = self.tag
        if tag is not None and value.get(tag[0]) != tag[1]:
            raise NotConverted(f"{self.cls.__name__} needs {tag[0]!r} to be {tag[1]!r}")
        given = {}
        for each, part in value.items():
            name = self.names.get(each)
            if name is not None:
                given[name] = convert_part(self.fields[name], part, f".{name}")
            elif tag is None or each != tag[0]:
                known = ", ".join(self.names) or "none"
                raise NotConverted(f"{self.cls.__name__} has no field {each[:60]!r}; it has: {known}")
        missing = self.needed - value.keys()
        if missing:
            raise NotConverted(f"{self.cls.__name__} needs {', '.join(map(repr, sorted(missing)))}")
        try:
            return self.cls(**given)
        except Exception as error:  # of its __post_init__
            raise NotConverted(f"{self.cls.__name__}: {type(error).__name__}: {error}") from None

    def _by_name(self, value: list[Any]) -> Any:
        names = [*([] if self.tag is None else [self.tag[0]]), *self.names]
        return dict(zip(names, value, strict=False)) if len(value) <= len(names) else value
