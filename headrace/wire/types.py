"""Declared types: whether a value has one, and what is wrong if it does not.

A declared type is a type hint that was read (`wire/hints.py`). It can say two things about a value:

- `fault(value, room)`: where the value differs from the type, or None. It walks the value, and is the definition.
- `exactly(value)`, compiled by `compile_check`: whether the value has the type, and msgspec can encode it and decode it
  by this type without a loss. It is much faster, and the common case. After False, `fault` decides.

Rules:
1. A value has a type as it is: nothing is converted, subclasses do not count. 1, 1.0 and True differ; but an int passes
   for a float, as everywhere in Python (and stays an int, so it is not *exactly* of the type).
2. A check takes bounded time: a value that contains one part many times is not walked much further than the limit.

Never here: how values are encoded, state, functions.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import keyword
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import msgspec

TUPLE_CODE, DATETIME_CODE = 1, 4
# Types whose values are written as texts: type -> (extension code, to text, from text)
TEXTUAL: dict[type, tuple[int, Callable[[Any], str], Callable[[str], Any]]] = {
    decimal.Decimal: (3, str, decimal.Decimal),
    datetime.date: (5, datetime.date.isoformat, datetime.date.fromisoformat),
    uuid.UUID: (6, str, uuid.UUID),
}
FROM_TEXT = {code: parse for code, _, parse in TEXTUAL.values()}
SCALARS = (bool, int, float, str, bytes, type(None))
HEAP_TYPE = 1 << 9  # in the flags of a class: it was made by a class statement
FIXED_SIZE = (bool, int, float, type(None))

Exactly = Callable[[Any], bool]


def is_short(key: Any) -> bool:
    """Whether a key may stand in a message."""
    if type(key) is int:
        return key.bit_length() <= 200
    return type(key) in (str, bytes) and len(key) <= 60


class Fault(NamedTuple):
    """Where a value differs from its type: the path to the part, the type wanted there, and the part."""

    path: str
    wanted: str
    found: Any

    def within(self, step: str) -> Fault:
        return Fault(step + self.path, self.wanted, self.found)


class Constraint(Protocol):
    """In `Annotated[type, constraint]`: a further condition on values of the type, which must be, or allow, `of`."""

    of: type

    def accepts(self, value: Any) -> bool: ...


class Room:
    """How much of a value may still be walked, and how many records deep."""

    __slots__ = ("depth_left", "left")

    def __init__(self, limit: int, depth_max: int = 0) -> None:
        self.left, self.depth_left = limit, depth_max

    def take(self, size: int) -> bool:
        self.left -= size + 1
        return self.left >= 0


class Source:
    """Collects the functions of a compiled check."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.lines: list[str] = []
        self.names: dict[str, Any] = {"Room": Room}
        self._made: list[tuple[DeclaredType, bool, str]] = []

    def name(self, thing: Any) -> str:
        """A name for something that the code refers to."""
        name = f"n{len(self.names)}"
        self.names[name] = thing
        return name

    def function(self, of: DeclaredType, counted: bool, body: Callable[[], Iterable[str]]) -> str:
        """The name of a function over `v` (and `room`, if it counts) with this body, made at its first use."""
        for made, was_counted, name in self._made:
            if made is of and was_counted == counted:
                return name
        name = f"f{len(self._made)}"
        self._made.append((of, counted, name))
        lines = [f"def {name}(v, room):" if counted else f"def {name}(v):", *(f"    {line}" for line in body())]
        self.lines += lines
        return name


class DeclaredType(ABC):
    """A type hint, read. `path` and `text` are for messages."""

    depth: int | None = 0  # how deep its values are nested; None if that has no bound
    has_parts = False  # whether the size of its values has no bound by its scalars alone
    is_native = True  # whether values that are `exactly` of it survive msgspec
    is_immutable = True
    takes_int = False

    def __init__(self, text: str) -> None:
        self.text = text

    @abstractmethod
    def fault(self, value: Any, room: Room) -> Fault | None:
        """Where the value differs from the type; None also if there is no room to look any further."""

    @abstractmethod
    def test(self, v: str, source: Source, counted: bool) -> str:
        """An expression that is true if `v` is exactly of the type. If it counts, it takes the size from `room`."""

    def parts(self) -> list[DeclaredType]:
        """The types of its parts. (Those of a record are its fields.)"""
        return []

    def lift(self) -> Any:
        """How a reader without the type gets the values back from what msgspec wrote: None (as they are), an extension
        code (a text that stands for another type), a dict (a record, with what is to be done to its fields), or a list
        (of the kind of container, and what is to be done to its items)."""
        return None


class AnyType(DeclaredType):
    is_immutable, takes_int = False, True

    def fault(self, value: Any, room: Room) -> Fault | None:
        return None  # whether it can be carried is checked when it is encoded

    def test(self, v: str, source: Source, counted: bool) -> str:
        kinds = source.name(frozenset(FIXED_SIZE))
        text = f"type({v}) is str" + (f" and room.take(len({v}))" if counted else "")
        return f"(type({v}) in {kinds} or {text})"


class ScalarType(DeclaredType):
    def __init__(self, kind: type) -> None:
        super().__init__("None" if kind is type(None) else kind.__name__)
        self.kind, self.takes_int = kind, kind in (int, float)

    def fault(self, value: Any, room: Room) -> Fault | None:
        if type(value) is self.kind or (self.kind is float and type(value) is int):
            room.take(len(value) if isinstance(value, str | bytes) else 0)
            return None
        return Fault("", self.text, value)

    def test(self, v: str, source: Source, counted: bool) -> str:
        if self.kind is type(None):
            return f"{v} is None"
        test = f"type({v}) is {self.text}"
        return f"{test} and room.take(len({v}))" if counted and self.kind in (str, bytes) else test


class TextType(DeclaredType):
    """A type whose values msgspec writes as texts."""

    depth = 1

    def __init__(self, kind: type) -> None:
        super().__init__(kind.__name__)
        self.kind = kind

    def fault(self, value: Any, room: Room) -> Fault | None:
        return None if type(value) is self.kind else Fault("", self.text, value)

    def test(self, v: str, source: Source, counted: bool) -> str:
        test = f"type({v}) is {source.name(self.kind)}"
        is_long = counted and self.kind is decimal.Decimal
        return f"{test} and room.take({v}.__sizeof__() >> 3)" if is_long else test

    def lift(self) -> Any:
        return TEXTUAL[self.kind][0]


class DatetimeType(DeclaredType):
    depth = 1

    def __init__(self) -> None:
        super().__init__("datetime")

    def fault(self, value: Any, room: Room) -> Fault | None:
        return None if type(value) is datetime.datetime else Fault("", self.text, value)

    def test(self, v: str, source: Source, counted: bool) -> str:
        # msgspec keeps UTC and no zone, no other offset, and no fold
        utc = source.name(datetime.UTC)
        is_kept = f"({v}.tzinfo is None or {v}.tzinfo is {utc}) and not {v}.fold"
        return f"type({v}) is {source.name(datetime.datetime)} and {is_kept}"

    def lift(self) -> Any:
        return DATETIME_CODE


class ListType(DeclaredType):
    """A list, or a tuple of any length."""

    has_parts = True

    def __init__(self, kind: type, item: DeclaredType) -> None:
        more = ", ..." if kind is tuple else ""
        super().__init__(f"{kind.__name__}[{item.text}{more}]")
        self.kind, self.item, self.depth = kind, item, deeper(item.depth)
        self.is_native, self.is_immutable = item.is_native, kind is tuple and item.is_immutable

    def fault(self, value: Any, room: Room) -> Fault | None:
        if type(value) is not self.kind:
            return Fault("", self.text, value)
        items: Any = value
        return first(((f"[{at}]", self.item.fault(each, room)) for at, each in enumerate(items)), room)

    def test(self, v: str, source: Source, counted: bool) -> str:
        def body() -> Iterable[str]:
            yield f"if type(v) is not {self.kind.__name__} or not room.take(len(v)):"
            yield "    return False"
            yield "for w in v:"
            yield f"    if not ({self.item.test('w', source, True)}):"
            yield "        return False"
            yield "return True"

        return call(source.function(self, True, body), v, source, counted)

    def parts(self) -> list[DeclaredType]:
        return [self.item]

    def lift(self) -> Any:
        inner = self.item.lift()
        if self.kind is tuple:
            return ["tuple", inner]
        return None if inner is None else ["list", inner]


class TupleType(DeclaredType):
    """A tuple of fixed length."""

    def __init__(self, items: list[DeclaredType]) -> None:
        super().__init__(f"tuple[{', '.join(each.text for each in items) or '()'}]")
        self.items, self.depth = items, deeper(*(each.depth for each in items))
        self.has_parts = any(each.has_parts for each in items)
        self.is_native = all(each.is_native for each in items)
        self.is_immutable = all(each.is_immutable for each in items)

    def fault(self, value: Any, room: Room) -> Fault | None:
        if type(value) is not tuple or len(value) != len(self.items):
            return Fault("", self.text, value)
        pairs = zip(self.items, value, strict=True)
        return first(((f"[{at}]", item.fault(each, room)) for at, (item, each) in enumerate(pairs)), room)

    def test(self, v: str, source: Source, counted: bool) -> str:
        counted_inside = counted or self.has_parts

        def body() -> Iterable[str]:
            yield f"return type(v) is tuple and len(v) == {len(self.items)}" + "".join(
                f" and ({each.test(f'v[{at}]', source, counted_inside)})" for at, each in enumerate(self.items)
            )

        function = source.function(self, counted_inside, body)
        return call(function, v, source, counted) if counted_inside else f"{function}({v})"

    def parts(self) -> list[DeclaredType]:
        return self.items

    def lift(self) -> Any:
        return ["items", [each.lift() for each in self.items]]


class DictType(DeclaredType):
    has_parts, is_immutable = True, False

    def __init__(self, key: DeclaredType, item: DeclaredType) -> None:
        super().__init__(f"dict[{key.text}, {item.text}]")
        self.key, self.item, self.depth, self.is_native = key, item, deeper(item.depth), item.is_native

    def fault(self, value: Any, room: Room) -> Fault | None:
        if type(value) is not dict:
            return Fault("", self.text, value)
        for key, item in value.items():
            found = self.key.fault(key, room) or self.item.fault(item, room)
            if not room.take(0):
                return None
            if found is not None:
                return found.within(f"[{key!r}]" if is_short(key) else "[...]")
        return None

    def test(self, v: str, source: Source, counted: bool) -> str:
        def body() -> Iterable[str]:
            yield "if type(v) is not dict or not room.take(len(v)):"
            yield "    return False"
            yield "for k, w in v.items():"
            yield f"    if not ({self.key.test('k', source, True)} and {self.item.test('w', source, True)}):"
            yield "        return False"
            yield "return True"

        return call(source.function(self, True, body), v, source, counted)

    def parts(self) -> list[DeclaredType]:
        return [self.item]

    def lift(self) -> Any:
        inner = self.item.lift()
        return None if inner is None else ["dict", inner]


class DeclaredRecord(DeclaredType):
    """A dataclass or struct, with the types of its fields."""

    def __init__(self, cls: type) -> None:
        super().__init__(cls.__name__)
        self.cls = cls
        self.fields: dict[str, DeclaredType] = {}

    def complete(self, fields: dict[str, DeclaredType]) -> None:
        """Its fields are known only after it is: they may contain the record itself."""
        self.fields = fields
        self.depth = deeper(*(each.depth for each in fields.values()))
        self.has_parts = any(each.has_parts for each in fields.values())
        self.is_native = is_plain_record(self.cls) and all(each.is_native for each in fields.values())
        self.is_native &= not any(map(keyword.iskeyword, fields))
        self.is_immutable = is_frozen(self.cls) and all(each.is_immutable for each in fields.values())

    def fault(self, value: Any, room: Room) -> Fault | None:
        if type(value) is not self.cls:
            return Fault("", self.text, value)
        if room.depth_left <= 0 or not room.take(len(self.fields)):
            return None
        room.depth_left -= 1
        found = self._fault_in_fields(value, room)
        room.depth_left += 1
        return found

    def _fault_in_fields(self, value: Any, room: Room) -> Fault | None:
        for name, each in self.fields.items():
            if not hasattr(value, name):
                return Fault(f".{name}", each.text, ABSENT)
            found = each.fault(getattr(value, name), room)
            if found is not None:
                return found.within(f".{name}")
        return None

    def test(self, v: str, source: Source, counted: bool) -> str:
        if self.depth is None or any(map(keyword.iskeyword, self.fields)):
            return "False"  # a walk must count how deep it is, or read fields that code cannot name
        counted_inside = counted or self.has_parts

        def body() -> Iterable[str]:
            yield f"if type(v) is not {source.name(self.cls)}:"
            yield "    return False"
            for name, each in self.fields.items():
                yield f"w = v.{name}"  # read once: a test may mention it several times
                yield f"if not ({each.test('w', source, counted_inside)}):"
                yield "    return False"
            yield "return True"

        if self._is_short() and not counted_inside:
            return " and ".join(
                [f"type({v}) is {source.name(self.cls)}"]
                + [each.test(f"{v}.{name}", source, False) for name, each in self.fields.items()]
            )
        function = source.function(self, counted_inside, body)
        return call(function, v, source, counted) if counted_inside else f"{function}({v})"

    def _is_short(self) -> bool:
        """Whether the test of each field mentions it once: then they are one expression, without a call."""
        return all(isinstance(each, ScalarType | TextType) for each in self.fields.values())

    def lift(self) -> Any:
        if not self.is_native:
            return None  # it is never written by msgspec; it may contain itself
        return {name: lifted for name, each in self.fields.items() if (lifted := each.lift()) is not None}


class UnionType(DeclaredType):
    def __init__(self, members: list[DeclaredType]) -> None:
        super().__init__(" | ".join(each.text for each in members))
        self.members, self.depth = members, deepest(*(each.depth for each in members))
        self.has_parts = any(each.has_parts for each in members)
        self.is_native = all(each.is_native for each in members) and self._is_told_apart()
        self.is_immutable = all(each.is_immutable for each in members)
        self.takes_int = any(each.takes_int for each in members)

    def _is_told_apart(self) -> bool:
        """Whether a reader without the type knows which member a value was: only one of them is lifted, and what is
        lifted has a form of its own."""
        lifted = [each for each in self.members if each.lift() is not None]
        others = [each.kind for each in self.members if isinstance(each, ScalarType)]
        is_text = any(isinstance(each, TextType | DatetimeType) for each in lifted)
        return len(lifted) <= 1 and not (is_text and str in others) and len(self.members) - len(others) <= 1

    def fault(self, value: Any, room: Room) -> Fault | None:
        faults = [each.fault(value, room) for each in self.members]
        if None in faults:
            return None
        deep = [found for found in faults if found is not None and found.path]
        return deep[0] if deep else Fault("", self.text, value)  # the member that has the right class says more

    def test(self, v: str, source: Source, counted: bool) -> str:
        return "(" + " or ".join(f"({each.test(v, source, counted)})" for each in self.members) + ")"

    def parts(self) -> list[DeclaredType]:
        return self.members

    def lift(self) -> Any:
        lifted = [each.lift() for each in self.members]
        return next((each for each in lifted if each is not None), None)


class LiteralType(DeclaredType):
    def __init__(self, values: tuple[Any, ...]) -> None:
        super().__init__(f"Literal[{', '.join(map(repr, values))}]")
        self.values = values

    def fault(self, value: Any, room: Room) -> Fault | None:
        return None if self.accepts(value) else Fault("", self.text, value)

    def accepts(self, value: Any) -> bool:
        return any(type(value) is type(each) and value == each for each in self.values)

    def test(self, v: str, source: Source, counted: bool) -> str:
        return f"{source.name(self.accepts)}({v})"


class ConstrainedType(DeclaredType):
    """A type with conditions on its values."""

    def __init__(self, base: DeclaredType, text: str, accepts: Callable[[Any], bool]) -> None:
        super().__init__(text)
        self.base, self.accepts, self.depth, self.has_parts = base, accepts, base.depth, base.has_parts
        self.is_native, self.is_immutable = base.is_native, base.is_immutable

    def fault(self, value: Any, room: Room) -> Fault | None:
        found = self.base.fault(value, room)
        if found is not None:
            return found if found.path else Fault("", self.text, value)
        return None if self.accepts(value) else Fault("", self.text, value)

    def test(self, v: str, source: Source, counted: bool) -> str:
        return f"{self.base.test(v, source, counted)} and {source.name(self.accepts)}({v})"

    def parts(self) -> list[DeclaredType]:
        return [self.base]

    def lift(self) -> Any:
        return self.base.lift()


class NeverType(DeclaredType):
    def fault(self, value: Any, room: Room) -> Fault | None:
        return Fault("", self.text, value)

    def test(self, v: str, source: Source, counted: bool) -> str:
        return "False"


class Absent:
    """In place of a field that a record lacks."""


ABSENT = Absent()


def call(function: str, v: str, source: Source, counted: bool) -> str:
    """A call of a function that counts."""
    return f"{function}({v}, {'room' if counted else f'Room({source.limit})'})"


def deeper(*depths: int | None) -> int | None:
    found = deepest(*depths)
    return None if found is None else found + 1


def deepest(*depths: int | None) -> int | None:
    return None if None in depths else max(depths, default=0)  # type: ignore[type-var]


def first(faults: Iterable[tuple[str, Fault | None]], room: Room) -> Fault | None:
    for step, found in faults:
        if found is not None:
            return found.within(step)
        if not room.take(0):
            return None
    return None


EXACTLY = """
def exactly(v):
    try:
        return {test}
    except AttributeError:  # a record that lacks a field
        return False
"""


def compile_check(of: DeclaredType, limit: int) -> Exactly:
    """A function that says whether a value is exactly of the type. `limit` bounds how much of a value is walked."""
    source = Source(limit)
    test = of.test("v", source, False)
    exactly: Exactly = compile_function(source, EXACTLY.format(test=test).splitlines(), "exactly")
    return exactly


def compile_function(source: Source, lines: list[str], name: str) -> Any:
    exec("\n".join([*source.lines, *lines]), source.names)  # noqa: S102 our own templates and the names of fields
    return source.names[name]


def is_plain_record(cls: type) -> bool:
    """Whether msgspec writes its fields, all of them under their names, and makes it again without running code."""
    if issubclass(cls, msgspec.Struct):
        config = cls.__struct_config__
        is_renamed = cls.__struct_fields__ != cls.__struct_encode_fields__
        is_strict = config.forbid_unknown_fields or config.array_like
        return not (is_renamed or config.tag is not None or is_strict or config.omit_defaults)
    is_heap_type = all(base.__flags__ & HEAP_TYPE for base in cls.__mro__[:-1])  # not a dict or an Exception as well
    return (
        is_heap_type and not hasattr(cls, "__post_init__") and all(field.init for field in dataclasses.fields(cls))  # type: ignore[arg-type]
    )


def is_frozen(cls: type) -> bool:
    if issubclass(cls, msgspec.Struct):
        return bool(cls.__struct_config__.frozen)
    return bool(cls.__dataclass_params__.frozen)  # type: ignore[attr-defined]
