"""Placement: which worker owns an entity.

A stable hash of the key (or of what the operator's `partition_by` returns for it) gives the entity's shard. The hash is
the same in every process and version. The shard map gives the shard's worker; it has a version and changes only between
two epochs. Entities of different operators with the same key are on the same shard.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from headrace.errors import BadKey
from headrace.model.operator import Operator
from headrace.wire.values import Key, check_key, shown

CACHE_MAX = 1_000_000
VECTOR_MIN = 32  # fewer keys are hashed one by one


def shard_of(operator: Operator, key: Key, shards: int) -> int:
    """The shard of an entity. An error or invalid key from `partition_by` is the caller's error."""
    if operator.partition_by is not None:
        try:
            key = operator.partition_by(key)
            check_key(key, 1 << 20)
        except Exception as error:
            raise BadKey(f"partition_by of operator {operator.name} fails for the key {shown(key)}: {error}") from None
    return stable_hash(key) * shards >> 32


def stable_hash(key: Key) -> int:
    """32 bits, well mixed: keys that are close have hashes that are not. 1, "1" and b"1" differ."""
    if type(key) is str:
        mixed = zlib.crc32(key.encode())
    elif type(key) is int:
        mixed = zlib.crc32(key.to_bytes(9, "little", signed=True), 2)
    else:
        mixed = zlib.crc32(key, 1)  # type: ignore[arg-type]
    mixed = (mixed ^ mixed >> 15) * 0x2C1B3C6D & 0xFFFFFFFF  # crc32 alone is linear
    mixed = (mixed ^ mixed >> 12) * 0x297A2D39 & 0xFFFFFFFF
    return mixed ^ mixed >> 15


def shards_of(operator: Operator, keys: Any, shards: int) -> Sequence[int]:
    """The shard of each key, as in `shard_of`, for many at a time. `keys` is a list, or a NumPy array of int64."""
    if type(keys) is list:
        kinds = set(map(type, keys))
        kind = kinds.pop() if len(kinds) == 1 and len(keys) >= VECTOR_MIN else None
    else:
        kind = int
    if operator.partition_by is None and (kind is int or kind is str):
        from headrace.core import hashes  # needs NumPy, which `import headrace` does not need

        try:
            many = hashes.hashes_of_ints(keys) if kind is int else hashes.hashes_of_texts(keys)
            return (many.astype("u8") * shards >> 32).astype("i8")  # type: ignore[return-value]
        except OverflowError:
            pass  # an int of all 64 bits
    return [shard_of(operator, key, shards) for key in (keys if type(keys) is list else keys.tolist())]


class ShardMap:
    """Shard -> worker, by version."""

    def __init__(self, owners: list[int], version: int = 1) -> None:
        self.owners, self.version = owners, version
        self._cache: dict[Any, dict[Key, int]] = {}

    @classmethod
    def even(cls, shards: int, workers: int) -> ShardMap:
        return cls([1 + shard * workers // shards for shard in range(shards)])

    def rescaled(self, workers: int) -> ShardMap:
        """The map for another number of workers; moves as few shards as an even spread allows."""
        shards = len(self.owners)
        room = {worker: shards // workers + (worker <= shards % workers) for worker in range(1, workers + 1)}
        owners = [0] * shards
        unassigned = []
        for shard, owner in enumerate(self.owners):
            if room.get(owner, 0) > 0:
                owners[shard] = owner
                room[owner] -= 1
            else:
                unassigned.append(shard)
        free = [worker for worker, count in room.items() for _ in range(count)]
        for shard, owner in zip(unassigned, free, strict=True):
            owners[shard] = owner
        return ShardMap(owners, self.version + 1)

    def owner(self, operator: Operator, key: Key) -> int:
        cache = self.cache_of(operator)
        if len(cache) > CACHE_MAX:
            cache.clear()
        owner = cache.get(key)
        if owner is None:
            owner = cache[key] = self.owners[shard_of(operator, key, len(self.owners))]
        return owner

    def cache_of(self, operator: Operator) -> dict[Key, int]:
        """The known owners of an operator's keys: for hot loops, which fall back on `owner`."""
        return self._cache.setdefault(operator, {})
