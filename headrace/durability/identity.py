"""The identity of a store: `headrace.json`, written once. A directory or bucket that is not empty and has none is
refused, so that a store is never started again as an empty one."""

from __future__ import annotations

import json
import secrets
import zlib
from typing import Any

from headrace.config import Config
from headrace.durability.store import Store
from headrace.errors import AppChanged, ObjectMissing, WrongStore
from headrace.model.app import App
from headrace.model.fingerprint import Fingerprint

FORMAT = 2  # of the store; raised when what it holds changes, so that another version refuses it before taking over
IDENTITY = "headrace.json"
CURRENT = "apps/current.json"  # the functions of the running app, for callers without its code


def identity_of(store: Store) -> dict[str, Any] | None:
    """The store's identity; None if the store is empty."""
    if not store.exists(IDENTITY):
        others = store.list("")
        if others and not store.exists(IDENTITY):  # another process has not created it just now
            raise WrongStore(
                f"{store.url} is not empty and has no {IDENTITY}, so it is not a Headrace store (it has {others[0]}): "
                "give another path, or restore the file from a backup"
            )
        return None
    try:
        identity = read_checked(store, IDENTITY)
        if identity["format"] != FORMAT:
            raise WrongStore(
                f"{store.url}/{IDENTITY} has format {identity['format']}, this Headrace reads format {FORMAT}: use the "
                "version that wrote it"
            )
        return {name: identity[name] for name in ("format", "app", "cluster", "seed", "shards", "epoch0")}
    except (ValueError, KeyError, TypeError) as error:
        raise WrongStore(f"{store.url}/{IDENTITY} cannot be read: {error}. Restore it from a backup") from None


def read_checked(store: Store, name: str) -> dict[str, Any]:
    """Reads a JSON object with a checksum; reads it twice before it is called broken. ValueError says why."""
    trouble = ""
    for _ in range(2):
        try:
            found = json.loads(store.get(name))
            checksum = found.pop("checksum", None)
            if checksum == checksum_of(found):
                return dict(found)
            trouble = "its checksum is wrong"
        except (ValueError, AttributeError, TypeError) as error:
            trouble = str(error)
    raise ValueError(trouble)


def with_checksum(value: dict[str, Any]) -> bytes:
    return (json.dumps(value | {"checksum": checksum_of(value)}, indent=2) + "\n").encode()


def checksum_of(value: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(value, sort_keys=True).encode()):08x}"


def create_identity(
    store: Store,
    app: App,
    config: Config,
    cluster: str | None = None,
    seed: int | None = None,
    epoch0: int = 0,
) -> dict[str, Any]:
    """Creates a store for this app. Returns its identity, which another process may have created first."""
    identity = {
        "format": FORMAT,
        "app": app.name,
        "cluster": secrets.token_hex(8) if cluster is None else cluster,
        "seed": secrets.randbits(63) if seed is None else seed,
        "shards": config.shards,
        "epoch0": epoch0,
    }
    store.create(IDENTITY, with_checksum(identity))
    return identity_of(store) or identity


def read_fingerprint(store: Store, digest: str) -> Fingerprint:
    """The fingerprint of the code with this digest."""
    try:
        return Fingerprint.from_plain(read_checked(store, f"apps/{digest}.json"))
    except (ObjectMissing, ValueError) as error:
        raise AppChanged(
            f"{store.url} was written by other code, whose description cannot be read: apps/{digest}.json: {error}. "
            "Restore it from a backup"
        ) from None


def callable_functions(app: App) -> dict[str, Any]:
    """The app's functions: the least and the most arguments they take (None: any number), their parameters, and those
    that can be given by name, with whether they must be given."""
    found = {}
    for function in app.functions:
        variadic = [each for each in function.parameters if each.kind is each.VAR_POSITIONAL]
        named = [each for each in function.parameters if each not in variadic]
        least = sum(each.default is each.empty for each in named)
        needed = {each.name: each.default is each.empty for each in named if each.kind is not each.POSITIONAL_ONLY}
        text = ", ".join(map(str, function.parameters))
        found[function.full_name] = [least, None if variadic else len(named), text, needed]
    return found


def check_identity(store: Store, identity: dict[str, Any], app: App, config: Config) -> None:
    if identity["app"] != app.name:
        raise WrongStore(
            f"{store.url} belongs to app {identity['app']!r}, not to {app.name!r}: give each app its own store"
        )
    if identity["shards"] != config.shards:
        raise WrongStore(
            f"{store.url} has {identity['shards']} shards, but the configuration has {config.shards}. The number is "
            f"fixed when the store is created: set shards={identity['shards']}"
        )
