"""The native form of a record: what msgspec writes, with a head that says what it is.

    map of n + 1 entries, "\\0": (name, lift, head of the map), field: value, ...

msgspec encodes the record as a map of n entries. The head in front of it opens a map of n + 1, whose first value is a
byte string that ends with the old head of the map: so the head and the record are joined without a copy of a part. When
msgspec decodes the map as the record, it skips the first entry. Readers without the class learn from it how to *lift*
the fields: which texts and lists stand for other types.
"""

from __future__ import annotations

import datetime
import functools
import typing
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from headrace.wire.defaults import NOTHING, defaults_of, described
from headrace.wire.types import (
    DATETIME_CODE,
    FROM_TEXT,
    ConstrainedType,
    DatetimeType,
    DeclaredRecord,
    DeclaredType,
    DictType,
    ListType,
    LiteralType,
    ScalarType,
    Source,
    TextType,
    TupleType,
    UnionType,
    compile_function,
)

NATIVE_KEY = "\0"
NATIVE_MARK = msgspec.msgpack.encode(NATIVE_KEY)
FIXMAP_MAX = 15  # entries of a map whose head is one byte; that of a larger one has three


DECODE = """
def decode(sealed):
    v = typed(sealed)
"""


def record_name(cls: type) -> str:
    """Without the module: an app is the same whether it is run or imported."""
    return cls.__qualname__


class NativeForm:
    """How one record is written (`head + encode(record)`) and read."""

    def __init__(self, record: DeclaredRecord) -> None:
        self.record, self.cls, self.name = record, record.cls, record_name(record.cls)
        self.head = native_head(self.name, record.lift(), len(record.fields))
        self.map_head = map_head(len(record.fields))
        self.encode = msgspec.msgpack.Encoder().encode
        self.decode: Callable[[bytes], Any] = self.compile_reading(DECODE, "decode")

    @property
    def may_omit(self) -> bool:
        """Whether msgspec leaves out a field that was deleted: it finds it missing, where Python finds its default."""
        return "__slots__" in self.cls.__dict__ and not is_struct(self.cls) and bool(defaults_of(self.cls))

    def writing(self, source: Source) -> str:
        """An expression that encodes the record `v`, without the head."""
        encode = source.name(self.encode)
        if not is_remade(self.cls):
            return f"{encode}(v)"
        fields = list(self.record.fields)
        flat = msgspec.defstruct(self.cls.__name__, [(name, Any) for name in fields], gc=False)
        return f"{encode}({source.name(flat)}({', '.join(f'v.{name}' for name in fields)}))"

    def compile_reading(self, template: str, name: str, **names: Any) -> Any:
        """A function that begins with these lines, which set `v` by a call of `typed`, and then makes the record."""
        source = Source(0)
        remaking = Remaking(source)
        is_changed = remaking.is_changed(self.record)
        kind = remaking.twin(self.record) if is_changed else self.cls
        source.names |= {"typed": msgspec.msgpack.Decoder(kind).decode, **names}
        if not is_changed and name == "decode":
            return source.names["typed"]
        made = remaking.lines(self.record) if is_changed else ["return v"]
        return compile_function(source, [*template.strip().splitlines(), *(f"    {line}" for line in made)], name)


def native_head(name: str, lift: Any, fields: int) -> bytes:
    told = msgspec.msgpack.encode([name, lift])
    size = len(told) + len(map_head(fields))  # the record's own head is the end of it
    return map_head(fields + 1) + NATIVE_MARK + b"\xc5" + size.to_bytes(2, "big") + told


def map_head(count: int) -> bytes:
    return bytes((0x80 + count,)) if count <= FIXMAP_MAX else b"\xde" + count.to_bytes(2, "big")


def is_native(sealed: bytes) -> bool:
    first = sealed[0]
    return (0x80 < first < 0x90 and sealed[1:3] == NATIVE_MARK) or (first == 0xDE and sealed[3:5] == NATIVE_MARK)


def native_parts(sealed: bytes) -> tuple[str, Any, dict[str, Any]]:
    """The name of a record in its native form, how its fields are lifted, and the fields as msgspec wrote them."""
    fields = msgspec.msgpack.decode(sealed)
    told: bytes = fields.pop(NATIVE_KEY)
    name, lift = msgspec.msgpack.decode(told[: -len(map_head(len(fields)))])
    return name, lift, fields


# --- reading dataclasses ----------------------------------------------------------------------------------------------
#
# A dataclass that msgspec makes, or encodes, has its attributes in a separate dict: this dict takes as long as all the
# rest, and each access to an attribute then costs several times as much as usual. One that it makes also lacks the
# attributes of fields that take their default. So msgspec makes structs with the same fields, and these are set on new
# dataclasses, as an __init__ does it; and it encodes structs that are made of dataclasses.


def is_remade(cls: type) -> bool:
    return not is_struct(cls) and "__slots__" not in cls.__dict__


def is_struct(cls: type) -> bool:
    return issubclass(cls, msgspec.Struct)


def dir_of(cls: type) -> set[str]:
    """The attributes that a class and its bases define, besides those of every object."""
    return {name for base in cls.__mro__[:-1] for name in base.__dict__}


class Remaking:
    """Compiles how records are made of their twins, which are structs."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.twins: dict[type, Any] = {}
        source.names |= {"new": object.__new__, "put": object.__setattr__}

    def lines(self, record: DeclaredRecord) -> Iterable[str]:
        """The lines that make a record of its twin `v`."""
        if is_struct(record.cls):
            fields = ", ".join(f"{name}={self.made(each, f'v.{name}')}" for name, each in record.fields.items())
            yield f"return {self.source.name(record.cls)}({fields})"
            return
        yield f"o = new({self.source.name(record.cls)})"
        is_open = "__setattr__" not in dir_of(record.cls)  # else it is frozen, or has one of its own
        for name, each in record.fields.items():
            made = f"v.{name}"
            if self.is_changed(each):
                yield f"w = v.{name}"
                made = self.made(each, "w")
            yield f"o.{name} = {made}" if is_open else f"put(o, {name!r}, {made})"
        yield "return o"

    def is_changed(self, of: DeclaredType) -> bool:
        """Whether values of the type hold records that are remade."""
        if isinstance(of, DeclaredRecord):
            return is_remade(of.cls) or any(map(self.is_changed, of.fields.values()))
        return any(map(self.is_changed, of.parts()))

    def made(self, of: DeclaredType, v: str) -> str:
        """An expression for the value that `v` stands for."""
        if not self.is_changed(of):
            return v
        if isinstance(of, DeclaredRecord):
            return f"{self.source.function(of, False, functools.partial(self.lines, of))}({v})"
        if isinstance(of, UnionType):
            made = v
            for each in filter(self.is_changed, of.members):
                made = f"({self.made(each, v)} if type({v}) is {self.source.name(self.kind(each))} else {made})"
            return made
        if isinstance(of, ConstrainedType):
            return self.made(of.base, v)
        return f"{self.source.function(of, False, functools.partial(self._container, of))}({v})"

    def _container(self, of: DeclaredType) -> Iterable[str]:
        if isinstance(of, DictType):
            yield f"return {{k: {self.made(of.item, 'w')} for k, w in v.items()}}"
        elif isinstance(of, ListType):
            each = f"[{self.made(of.item, 'w')} for w in v]"
            yield f"return tuple({each})" if of.kind is tuple else f"return {each}"
        else:
            yield f"return ({''.join(self.made(each, f'v[{at}]') + ', ' for at, each in enumerate(of.parts()))})"

    def kind(self, of: DeclaredType) -> type:
        """What msgspec makes for values of the type."""
        if isinstance(of, DeclaredRecord):
            return self.twin(of)  # type: ignore[no-any-return]
        if isinstance(of, ConstrainedType):
            return self.kind(of.base)
        return dict if isinstance(of, DictType) else of.kind if isinstance(of, ListType) else tuple

    def hint(self, of: DeclaredType) -> Any:
        """The type for msgspec, with the twins in place of the records. (What it reads was checked.)"""
        if isinstance(of, DeclaredRecord):
            return self.twin(of) if self.is_changed(of) else of.cls
        if isinstance(of, ConstrainedType):
            return self.hint(of.base)
        inner = tuple(map(self.hint, of.parts()))
        if isinstance(of, UnionType):
            return typing.Union[inner]  # noqa: UP007 not all of them have a |
        if isinstance(of, DictType):
            return dict[self.hint(of.key), inner[0]]  # type: ignore[misc]
        if isinstance(of, ListType):
            return tuple[inner[0], ...] if of.kind is tuple else list[inner[0]]  # type: ignore[valid-type]
        if isinstance(of, TupleType):
            return tuple[inner]  # type: ignore[valid-type]
        if isinstance(of, LiteralType):
            return typing.Literal[of.values]
        if isinstance(of, DatetimeType):
            return datetime.datetime
        return of.kind if isinstance(of, ScalarType | TextType) else Any

    def twin(self, record: DeclaredRecord) -> Any:
        """A struct with the same fields, types and defaults."""
        if record.cls not in self.twins:
            fields: list[Any] = []
            for name, default, factory in described(record.cls):
                hint = self.hint(record.fields[name])
                if factory is not None:
                    fields.append((name, hint, msgspec.field(default_factory=factory)))
                else:
                    fields.append((name, hint) if default is NOTHING else (name, hint, default))
            self.twins[record.cls] = msgspec.defstruct(record.cls.__name__, fields, kw_only=True, gc=False)
        return self.twins[record.cls]


# --- reading without the class ----------------------------------------------------------------------------------------


def lifted(lift: Any, value: Any, record: Callable[[dict[str, Any]], Any] = dict) -> Any:
    """A value that was decoded without its type, with the types that `lift` notes; `record` makes one of its fields."""
    if lift is None or value is None:
        return value
    if type(lift) is int:
        return FROM_TEXT[lift](value) if lift in FROM_TEXT and type(value) is str else lifted_datetime(lift, value)
    if type(lift) is dict:
        if type(value) is not dict:
            return value
        return record({name: lifted(lift.get(name), item, record) for name, item in value.items()})
    form, inner = lift
    if form == "dict" and type(value) is dict:
        return {key: lifted(inner, item, record) for key, item in value.items()}
    if type(value) is not list:
        return value
    if form == "items":
        return tuple(lifted(each, item, record) for each, item in zip(inner, value, strict=True))
    items = [lifted(inner, item, record) for item in value]
    return tuple(items) if form == "tuple" else items


def mentions(lift: Any, code: int) -> bool:
    parts = lift.values() if type(lift) is dict else lift if type(lift) is list else ()
    return lift == code or any(mentions(part, code) for part in parts)


def in_iso(value: Any) -> Any:
    """The same with datetimes as texts."""
    if type(value) is dict:
        return {key: in_iso(item) for key, item in value.items()}
    if type(value) is list:
        return [in_iso(item) for item in value]
    return value.isoformat() if type(value) is datetime.datetime else value


def lifted_datetime(lift: int, value: Any) -> Any:
    is_text = lift == DATETIME_CODE and type(value) is str
    return datetime.datetime.fromisoformat(value) if is_text else value
