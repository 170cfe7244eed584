"""Hashes: `stable_hash` of many keys at once, as array operations, which release the interpreter lock.

CRC-32 is linear: the CRC of a text is that of as many zero bytes, xor what each byte adds at its distance from the end.
So the bytes at one distance are looked up for all keys at once.

Imported only where many keys are hashed: NumPy is slow to load.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

ONES = 0xFFFFFFFF
INT_BYTES = 9  # of an int in `stable_hash`: 64 bits and the sign
TEXT_BYTES_MAX = 64  # longer ones are hashed one by one

Array = np.ndarray[Any, Any]


def hashes_of_ints(keys: list[int] | Array) -> Array:
    """Raises OverflowError if a key needs 64 bits without a sign."""
    numbers = np.ascontiguousarray(keys if isinstance(keys, np.ndarray) else np.fromiter(keys, "i8", len(keys)), "<i8")
    tables = _tables(INT_BYTES)
    crc = np.where(numbers < 0, tables[0][255], np.uint32(0))
    crc ^= np.uint32(zlib.crc32(bytes(INT_BYTES), 2))
    columns = numbers.view(np.uint8).reshape(-1, 8)
    for place in range(8):
        crc ^= tables[INT_BYTES - 1 - place][columns[:, place]]
    return _mixed(crc)


def hashes_of_texts(keys: list[str]) -> Array:
    data = "\0".join(keys).encode()
    values = np.frombuffer(data, np.uint8)
    ends = np.append(np.flatnonzero(values == 0), len(data))
    if len(ends) == len(keys):
        lengths = np.diff(ends, prepend=-1) - 1
    else:  # a key contains a zero byte
        lengths = np.fromiter((len(key.encode()) for key in keys), np.int64, len(keys))
        ends = np.cumsum(lengths + 1) - 1
    # Longest first: keys with a byte at some distance come before keys without one.
    order = np.argsort((TEXT_BYTES_MAX + 1 - np.minimum(lengths, TEXT_BYTES_MAX + 1)).astype(np.uint8), kind="stable")
    lengths, ends = lengths[order], ends[order]
    length_max = min(int(lengths[0]), TEXT_BYTES_MAX)
    zeros = [zlib.crc32(bytes(length)) for length in range(length_max + 1)]
    crc = np.array(zeros, np.uint32)[np.minimum(lengths, length_max)]
    for distance, table in enumerate(_tables(length_max)):
        count = int(np.count_nonzero(lengths > distance))
        crc[:count] ^= table[values[ends[:count] - 1 - distance]]
    for row in np.flatnonzero(lengths > TEXT_BYTES_MAX).tolist():
        crc[row] = zlib.crc32(data[ends[row] - lengths[row] : ends[row]])
    hashes: Array = np.empty_like(crc)
    hashes[order] = _mixed(crc)
    return hashes


def _tables(count: int) -> list[Array]:
    """Per distance from the end, what each byte value adds."""
    first = np.array([zlib.crc32(bytes((value,)), ONES) ^ ONES for value in range(256)], np.uint32)
    tables = [first]
    while len(tables) < count:
        last = tables[-1]
        tables.append(last >> 8 ^ first[last & 255])
    return tables[:count]


def _mixed(crc: Array) -> Array:
    crc ^= crc >> 15
    crc *= np.uint32(0x2C1B3C6D)  # modulo 2^32
    crc ^= crc >> 12
    crc *= np.uint32(0x297A2D39)
    crc ^= crc >> 15
    return crc
