"""The parameters of a registered function, which a caller gives by position or by name.

Arguments are logged by position, keyword-only ones too: after the others, in the order in which they are declared.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.errors import ModelError

FunctionParameters = tuple[inspect.Parameter, ...]


def parameters_of(name: str, body: Callable[..., Any]) -> FunctionParameters:
    """The parameters without the context. ModelError if one of them could not be given or logged."""
    found = list(inspect.signature(body).parameters.values())
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if not found or found[0].kind not in positional:
        raise ModelError(f"{name}: its first parameter must be the context, as in def {body.__name__}(ctx, ...)")
    first, kind = found[0].name, type_name(found[0].annotation)
    if kind in VALUE_TYPES:
        raise ModelError(
            f"{name}: its first parameter must be the context, but {first!r} is declared as {kind}: write "
            f"def {body.__name__}(ctx, {first}, ...)"
        )
    found = found[1:]
    rest = next((each for each in found if each.kind is each.VAR_POSITIONAL), None)
    for each in found:
        if each.kind is each.VAR_KEYWORD:
            raise ModelError(
                f"{name}: arguments are logged by position, so {each} could not be: name the parameters, or take one "
                "dict"
            )
        if each.kind is each.KEYWORD_ONLY and rest is not None:
            raise ModelError(
                f"{name}: arguments are logged by position, so {each.name!r} could not be told from those of {rest}: "
                f"put it before {rest}, or take {rest.name} as one list"
            )
        if is_mutable(each.default):
            raise ModelError(
                f"{name}: the default of {each.name!r} is {each.default!r}, which all calls would share and could "
                f"change: write {each.name}=None, and make a new one in the function"
            )
    return tuple(found)


VALUE_TYPES = frozenset(
    [
        "int",
        "str",
        "float",
        "bool",
        "bytes",
        "list",
        "dict",
        "tuple",
        "Decimal",
        "date",
        "datetime",
        "timedelta",
        "UUID",
    ]
)


def type_name(annotation: Any) -> str:
    """Without its module and what is in brackets; it may be text."""
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    return text.partition("[")[0].rpartition(".")[2].strip()


def by_position(body: Callable[..., Any], parameters: FunctionParameters) -> Callable[..., Any]:
    """The body as it is called with what was logged: all arguments by position."""
    named = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    if not named:
        return body
    count = len(parameters) - len(named)

    def call(context: Any, *args: Any) -> Any:
        return body(context, *args[:count], **dict(zip(named, args[count:], strict=False)))

    return call


def is_mutable(value: Any) -> bool:
    """Could a function change it? Looks into tuples and frozen records."""
    if isinstance(value, list | dict | set | bytearray):
        return True
    if isinstance(value, tuple):
        return any(map(is_mutable, value))
    if isinstance(value, msgspec.Struct):
        return not value.__struct_config__.frozen or any(map(is_mutable, msgspec.structs.astuple(value)))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        is_frozen: bool = value.__dataclass_params__.frozen  # type: ignore[attr-defined]
        return not is_frozen or any(is_mutable(getattr(value, field.name)) for field in dataclasses.fields(value))
    return False
