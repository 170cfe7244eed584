"""What arguments a function takes: checked, and explained, for calls from outside and between functions alike.

Annotations are enforced, never coerced: see core/program.py. Only arguments from a poorer notation (JSON, a Spark row)
are converted first; those from JSON by wire/from_json.py.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from headrace.errors import BadArguments, BadValue, ModelError, TooLarge
from headrace.model.app import hints_of
from headrace.model.keywords import Keywords
from headrace.model.operator import Function
from headrace.wire.from_json import Convert, Converters, NotConverted, mentions_decimal
from headrace.wire.hints import Unsupported, name_of
from headrace.wire.typed_values import Codec, codec_for
from headrace.wire.values import HIGH, INT_MAX, INT_MIN, KEPT, LOW, Values, shown

TOGETHER = 4_096  # calls checked at once: if their total is within the limit of one, each is

Args = tuple[Any, ...]


class Signature:
    """What arguments a function takes."""

    def __init__(self, function: Function, values: Values) -> None:
        self.name, self.values = function.full_name, values
        hints = hints_of(function)
        self.variadic = bool(function.parameters) and function.parameters[-1].kind is inspect.Parameter.VAR_POSITIONAL
        named = function.parameters[:-1] if self.variadic else function.parameters
        self.keywords = Keywords(function.parameters)
        self.names = [parameter.name for parameter in function.parameters]
        self.hints = [hints.get(name, Any) for name in self.names]
        each = (f"{n}: {name_of(h)}" if h is not Any else n for n, h in zip(self.names, self.hints, strict=True))
        self.text = f"{self.name}({', '.join(each)})"
        self.least = sum(parameter.default is parameter.empty for parameter in named)
        self.most = len(named)
        exact = not self.variadic and self.least == self.most
        self.is_scalar = exact and all(hint in (int, str, float, bool) for hint in self.hints)
        self.codecs = [
            declared_codec(hint, values, f"{self.name}: parameter {name!r}")
            for name, hint in zip(self.names, self.hints, strict=True)
        ]
        self.result = declared_codec(hints.get("return", Any), values, f"{self.name}: result")
        for parameter, codec in zip(function.parameters, self.codecs, strict=True):
            trouble = None if parameter.default is parameter.empty else codec.fault(parameter.default)
            if trouble is not None:
                raise ModelError(f"{self.name}: the default of parameter {parameter.name!r}: {trouble}")
        self.trouble = self._compile_trouble() if self.is_scalar and self.most else self._trouble

    def compile_fits(self) -> Callable[[Args], bool]:
        """A fast check for the common case: the right number of arguments, each a small scalar of exactly the annotated
        type. After False, `admit` decides and explains."""
        each_max = self._text_max(len(self.hints))
        tests = {
            int: f"type({{0}}) is int and {{0}} < {HIGH} and {{0}} > {LOW}",
            str: f"type({{0}}) is str and len({{0}}) <= {each_max} and {{0}}.isascii()",
            float: "type({0}) is float",
            bool: "type({0}) is bool",
        }
        if not self.is_scalar or self._text_max(len(self.hints)) < 0:
            return self._fits_scalars if self._takes_anything() else never
        if not self.most:
            return operator.not_
        names = [f"a{i}" for i in range(self.most)]
        each = " and ".join(tests[hint].format(name) for name, hint in zip(names, self.hints, strict=True))
        source = f"""
def fits(args):
    try:
        [{", ".join(names)}] = args
    except ValueError:
        return False
    return {each}
"""
        namespace: dict[str, Any] = {}
        exec(source, namespace)  # noqa: S102 made of our own templates only: no text of the user's gets in
        fits: Callable[[Args], bool] = namespace["fits"]
        return fits

    def fits_all(self, rows: list[Args]) -> bool:
        """The same for many calls at once, in columns and mostly in C. After False, check them one by one."""
        if not self.is_scalar:
            return False
        some = (rows[at : at + TOGETHER] for at in range(0, len(rows), TOGETHER))
        return all(map(self._fit_together, some))

    def _fit_together(self, rows: list[Args]) -> bool:
        try:
            size = len(self.values.encode_plain(rows))  # finds ints over 64 bits and invalid Unicode
        except (ValueError, OverflowError, TypeError):
            return False
        if size > self.values.bytes_max or set(map(len, rows)) != {self.most}:
            return False
        return all({type(row[at]) for row in rows} == {hint} for at, hint in enumerate(self.hints))

    def _text_max(self, count: int) -> int:
        """Texts up to this length are not counted: too short to matter, and within the limit together."""
        return min(64, self.values.bytes_max // (2 * count or 1) - 16)

    def _takes_anything(self) -> bool:
        return all(hint is Any for hint in self.hints)

    def _fits_scalars(self, args: Args) -> bool:
        if not self.takes(len(args)):
            return False
        each_max = self._text_max(len(args))
        return each_max >= 0 and all(
            type(arg) in KEPT
            or (type(arg) is int and INT_MIN <= arg <= INT_MAX)
            or (type(arg) is str and arg.isascii() and len(arg) <= each_max)
            for arg in args
        )

    def _compile_trouble(self) -> Callable[[Args], str | None]:
        """`_trouble` with a short way for the usual mistake, an argument of another type."""
        names = [f"a{at}" for at in range(self.most)]
        lines = ["def trouble(args):", f"    if len(args) == {self.most}:", f"        [{', '.join(names)}] = args"]
        for at, (name, hint) in enumerate(zip(names, self.hints, strict=True)):
            kinds = "(float, int)" if hint is float else f"({hint.__name__},)"
            lines += [
                f"        if type({name}) not in {kinds}:",
                f"            return f'{{wanted[{at}]}}{{shown({name})}} ({{type({name}).__name__}})'",
            ]
        wanted = [
            f"{self.text}: {name!r}: wanted {codec.type.text}, found "
            for name, codec in zip(self.names, self.codecs, strict=True)
        ]
        namespace: dict[str, Any] = {"wanted": wanted, "shown": shown, "slowly": self._trouble}
        exec("\n".join([*lines, "    return slowly(args)"]), namespace)  # noqa: S102 no text of the user's gets in
        trouble: Callable[[Args], str | None] = namespace["trouble"]
        return trouble

    def _trouble(self, args: Args) -> str | None:
        """Why the arguments do not have the annotated types, if they do not. (A refusal costs less without raising.)"""
        if not self.takes(len(args)):
            return f"{self.text} takes {self._count()}, got {len(args)}"
        last = len(self.names) - 1
        for at, arg in enumerate(args):
            trouble = self.codecs[at if at < last else last].fault(arg)
            if trouble is not None:
                return f"{self.text}: {self.names[min(at, last)]!r}: {trouble}"
        return None

    def admit(self, args: Args, is_checked: bool = False) -> Args | bytes:
        """The arguments as they are logged and passed on; raises if they do not fit. With `is_checked`, `trouble` found
        none."""
        trouble = None if is_checked else self.trouble(args)
        if trouble is not None:
            raise BadArguments(trouble)
        is_scalar = True
        for i, arg in enumerate(args):
            at = min(i, len(self.names) - 1)
            try:
                is_scalar = type(self.values.seal(arg)) is not bytes and is_scalar
            except (BadValue, TooLarge) as error:
                raise type(error)(f"{self}: {self.names[at]!r}: {error}") from None
        encoded = self.values.encode(args)  # together they are one value, and limited like one
        return args if is_scalar else encoded

    def takes(self, count: int) -> bool:
        return self.least <= count and (self.variadic or count <= self.most)

    def bind(self, args: Args, kwargs: Mapping[str, Any]) -> Args:
        """The arguments by position, as they are logged; raises if a name is unknown, given twice or missing."""
        return self.keywords.bind(args, kwargs, self)

    @functools.cached_property
    def has_decimals(self) -> bool:
        """Whether JSON's numbers are to be read as texts: some argument may have a Decimal in it."""
        return any(mentions_decimal(codec.type) for codec in self.codecs)

    @functools.cached_property
    def _converters(self) -> list[Convert | None]:
        """By parameter. None if nothing needs to be converted."""
        converters = Converters(self.has_decimals)
        return [converters.of(codec.type) for codec in self.codecs]

    @functools.cached_property
    def _is_json(self) -> bool:
        """Whether JSON gives all arguments as they are wanted."""
        return not any(self._converters)

    def from_json(self, args: Sequence[Any]) -> Args:
        """Arguments that were read from JSON, as the annotated types. Raises BadArguments if that loses something; what
        does not convert otherwise stays as it is, for `admit` to refuse."""
        if self._is_json or not self.names:
            return tuple(args)
        last = len(self.names) - 1
        return tuple(self._argument_from_json(min(at, last), arg) for at, arg in enumerate(args))

    def named_from_json(self, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The same, for arguments by name."""
        if self._is_json:
            return kwargs
        places = self.keywords.places
        return {
            name: self._argument_from_json(places[name], arg) if name in places else arg for name, arg in kwargs.items()
        }

    def _argument_from_json(self, at: int, arg: Any) -> Any:
        convert = self._converters[at]
        if convert is None:
            return arg
        try:
            return convert(arg)
        except NotConverted as error:
            where = f"{self.codecs[at].type.text}{error.path}: " if error.path else ""
            raise BadArguments(f"{self}: {self.names[at]!r}: {where}{error.why}") from None

    def convert_named(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The same as `convert`, for arguments by name."""
        return {name: converted(arg, self._hint(name)) for name, arg in kwargs.items()}

    def convert_column(self, name: str, cells: list[Any]) -> list[Any]:
        """The same as `convert`, for one argument of many calls."""
        hint = self._hint(name)
        return [converted(cell, hint) for cell in cells]

    def _hint(self, name: str) -> Any:
        return self.hints[self.names.index(name)] if name in self.names else Any

    def convert(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments of a Spark row as the annotated types: a dict as a dataclass, a list as a tuple. What does not
        convert stays as it is, for `admit` to refuse."""
        return tuple(
            converted(arg, self.hints[min(i, len(self.hints) - 1)]) if self.hints else arg for i, arg in enumerate(args)
        )

    def _count(self) -> str:
        if self.variadic:
            return f"at least {self.least} arguments"
        span = str(self.most) if self.least == self.most else f"{self.least} to {self.most}"
        return f"{span} argument{'' if span == '1' else 's'}"

    def __str__(self) -> str:
        return self.text


def never(args: Args) -> bool:
    return False


def declared_codec(hint: Any, values: Values, where: str) -> Codec:
    try:
        return codec_for(hint, values)
    except Unsupported as error:
        raise ModelError(f"{where}: {error}") from None


def conforms(value: Any, hint: Any) -> bool:
    """Does the value have this type as it is?"""
    return fault_of(value, hint) is None


def why(value: Any, hint: Any) -> str:
    fault = fault_of(value, hint)
    return "" if fault is None else f": {fault}"


def fault_of(value: Any, hint: Any) -> str | None:
    return codec_of(hint).fault(value)


@functools.lru_cache(maxsize=256)
def codec_of(hint: Any) -> Codec:
    values = Values()
    return Codec(values.hints.type_of(hint), values)


def converted(value: Any, hint: Any) -> Any:
    if hint is Any or type(value) is hint:
        return value
    try:
        return msgspec.convert(value, hint, strict=True)
    except Exception:
        return value
