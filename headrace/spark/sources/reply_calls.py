"""What the requests behind the replies of an epoch called: functions, keys, and what streams carry along.

A record of replies has its rows in two groups, those of streams and the others. Here they become columns with a row for
each row of the epoch. What an older version did not write is null.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.core.epoch import Piece
from headrace.durability.columns import kinds_of
from headrace.durability.log.column_bytes import from_column
from headrace.durability.log.records import CalledRows, unpack_called
from headrace.errors import StreamError
from headrace.spark.sources.key_column import key_column, keys_as

WHOSE = "a request"


class Requests(NamedTuple):
    """The columns, one row for each row of the epoch."""

    functions: pa.Array
    keys: pa.Array
    carried: pa.Array

    def calls_of(self, function: str, pieces: list[Piece], epoch: int) -> Any:
        """For each row, whether it is a call of the function."""
        if (self.functions.is_null().to_numpy(zero_copy_only=False) & ~spread(pieces, is_own)).any():
            raise StreamError(
                f"the replies of epoch {epoch} do not say which functions the rows of streams called: an older version "
                'wrote them. Leave out option("function", ...), or start behind them with option("startingEpoch", ...)'
            )
        return pc.fill_null(pc.equal(self.functions, function), False).to_numpy(zero_copy_only=False)


def requests_of(data: bytes, pieces: list[Piece], key_type: pa.DataType) -> Requests:
    """The requests of a record of replies."""
    of_streams, others = unpack_called(data)
    is_streams = spread(pieces, lambda piece: bool(piece.position))
    count = int(is_streams.sum())
    if count == len(is_streams):
        return columns_of(of_streams, count, key_type)
    is_ours = spread(pieces, is_own)[~is_streams]
    if is_ours.any() and others.keys is not None:  # a key of Headrace's own may be of any type
        keys = [None if ours else key for ours, key in zip(is_ours, from_column(others.keys), strict=True)]
        others = others._replace(keys=keys)
    rest = columns_of(others, len(is_streams) - count, key_type)
    if not count:
        return rest
    where = np.where(is_streams, np.cumsum(is_streams) - 1, count + np.cumsum(~is_streams) - 1)
    both = zip(columns_of(of_streams, count, key_type), rest, strict=True)
    return Requests(*(pa.concat_arrays(each).take(pa.array(where)) for each in both))


def columns_of(rows: CalledRows, count: int, key_type: pa.DataType) -> Requests:
    functions = pa.nulls(count, pa.string())
    if rows.numbers is not None:
        numbers = pa.array(rows.numbers, pa.int64()) if isinstance(rows.numbers, list) else rows.numbers
        functions = pa.array(rows.names, pa.string()).take(numbers)
    elif rows.names:
        functions = pa.repeat(rows.names[0], count)
    keys = pa.nulls(count, key_type)
    if isinstance(rows.keys, list):
        keys = key_column(rows.keys, key_type, WHOSE)
    elif rows.keys is not None:
        keys = keys_as(kinds_of(rows.keys), key_type, WHOSE)
    carried = pa.nulls(count, pa.string()) if rows.carried is None else rows.carried.cast(pa.string())
    return Requests(functions, keys, carried)


def is_own(piece: Piece) -> bool:
    return piece.is_own


def spread(pieces: list[Piece], of: Any) -> Any:
    """What holds for each piece, for each of its rows."""
    return np.repeat(np.array([of(piece) for piece in pieces], np.bool_), [piece.size for piece in pieces])
