"""Options of the data sources: their values are strings, their names ignore case; the path is the store."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping

from headrace.durability.identity import identity_of
from headrace.durability.reading.column_types import PLAIN_DECIMAL
from headrace.durability.store import Store, open_store
from headrace.errors import ModelError, StoreError, StreamError
from headrace.model.places import Places

OF_ALL = ("path", "store", "checkpointLocation", "queryName")  # of every source; the last two are Spark's


def store_of(options: Mapping[str, str]) -> Store:
    """The store at the path. It must exist: a source that created an empty store would hide a wrong path."""
    where = url_of(options)
    try:
        store = open_store(where)
        if identity_of(store) is not None:
            return store
    except StoreError as error:
        raise StreamError(f"no Headrace store at {where}: {error}") from None
    raise StreamError(
        f"no Headrace store at {where}: it is empty. Give the path that Runtime(store=...) or `headrace run --store` "
        "uses"
    )


def url_of(options: Mapping[str, str]) -> str:
    where = options.get("path") or options.get("store")
    if not where:
        raise StreamError(
            'give the path of the store: .load("bank-store"), .start("bank-store") or .option("path", ...)'
        )
    return where


def located(options: Mapping[str, str]) -> dict[str, str]:
    """The same path for a process that runs elsewhere, in another folder."""
    where = url_of(options)
    return dict(options) | {"path": where if "://" in where else os.path.abspath(os.path.expanduser(where))}


def check_names(options: Mapping[str, str], known: Iterable[str]) -> None:
    """Refuse options that the source does not know: a name that is misspelt must not be ignored."""
    names = {name.lower(): name for name in (*known, *OF_ALL)}
    for name in options:
        if name.lower() not in names and not name.startswith("__"):  # Spark's own
            close = difflib.get_close_matches(name.lower(), names, 1)
            meant = f" Did you mean {names[close[0]]}?" if close else ""
            raise StreamError(f"there is no option {name}.{meant} The options are: {', '.join(sorted(known))}")


def text(options: Mapping[str, str], name: str, default: str | None = None) -> str:
    given = options.get(name, default)
    if given is None:
        raise StreamError(f'the option {name} is needed: .option("{name}", ...)')
    return given


def whole(options: Mapping[str, str], name: str, default: int, least: int = 0) -> int:
    given = options.get(name)
    if given is None:
        return default
    try:
        number = int(given)
    except ValueError:
        number = least - 1
    if number < least:
        raise StreamError(f"the option {name} is {given!r}; it must be a whole number, at least {least}")
    return number


def one_of(options: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> str:
    """One of these words; the first one is the default."""
    given = options.get(name, allowed[0])
    if given not in allowed:
        raise StreamError(f'the option "{name}" is {given!r}; it must be {", ".join(allowed[:-1])} or {allowed[-1]}')
    return given


def bad_rows_are_null(options: Mapping[str, str]) -> bool:
    return one_of(options, "badRows", ("fail", "null")) == "null"


def plain_places(options: Mapping[str, str]) -> Places:
    """The option `decimals`: the places of Decimals for which none are declared."""
    given = options.get("decimals")
    if given is None:
        return PLAIN_DECIMAL
    try:
        precision, scale = map(int, given.split(","))
        return Places(precision, scale)
    except (ValueError, ModelError) as error:
        why = f" ({error})" if isinstance(error, ModelError) else ""
        raise StreamError(
            f'the option decimals is {given!r}; it must be precision and scale, as in "18,2"{why}'
        ) from None


def names(options: Mapping[str, str], name: str) -> list[str] | dict[str, str]:
    """A list of columns; in JSON, if a name contains a comma. Or a JSON object: the columns by the names of what they
    are for."""
    given = options.get(name, "").strip()
    if not given.startswith(("[", "{")):
        return [each.strip() for each in given.split(",") if each.strip()]
    import json

    try:
        found = json.loads(given)
    except ValueError:
        raise StreamError(
            f"the option {name} is {given!r}; it must be comma-separated names, a JSON list or a JSON object"
        ) from None
    if isinstance(found, dict):
        return {each: str(column) for each, column in found.items()}
    return [str(each) for each in found]
