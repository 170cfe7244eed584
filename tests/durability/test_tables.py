"""Tables: columns of keys, arguments and results survive as bytes, exactly in value and type."""

from __future__ import annotations

import math
import random
from typing import Any

import pyarrow as pa
import pytest

from headrace.durability.log.column_bytes import (
    ROWS_FOR_ARROW,
    SHAPES_MAX,
    Ints,
    Streams,
    from_bytes,
    from_column,
    to_column,
)

MAKERS = {
    "small ints": lambda rng: rng.randrange(1 << 16),
    "ints with a sign": lambda rng: rng.randrange(-(1 << 31), 1 << 31),
    "ints of 64 bits": lambda rng: rng.randrange(-(1 << 63), 1 << 63),
    "ints without a sign": lambda rng: rng.randrange(1 << 64),
    "bools": lambda rng: rng.random() < 0.5,
    "bools and ints": lambda rng: rng.choice([True, False, 0, 1]),
    "floats": lambda rng: rng.choice([0.0, -0.0, math.inf, 1.5, math.nan]),
    "ints and floats": lambda rng: rng.choice([1, 1.0, -0.0, 0]),
    "texts": lambda rng: rng.choice(["", "a", "naïve", "\0", "1"]),
    "bytes": lambda rng: rng.choice([b"", b"\xc1", b"\xff\xff\xff\xff", b"a"]),
    "nothing": lambda rng: None,
    "all of them": lambda rng: rng.choice([None, True, 1, 1.0, "1", b"1", 1 << 63, -1]),
}
EDGES = [
    0,
    -1,
    1,
    (1 << 16) - 1,
    1 << 16,
    (1 << 31) - 1,
    1 << 31,
    -(1 << 31),
    -(1 << 31) - 1,
    (1 << 63) - 1,
    -(1 << 63),
]


def same(one: list[Any], other: list[Any]) -> bool:
    return [(type(value), repr(value)) for value in one] == [(type(value), repr(value)) for value in other]


def there_and_back(columns: dict[str, list[Any]], streams: Streams | None = None) -> dict[str, list[Any]]:
    data = (streams or Streams()).to_bytes({name: to_column(values) for name, values in columns.items()})
    return {name: from_column(column) for name, column in from_bytes(memoryview(data)).items()}


@pytest.mark.parametrize("rows", [1, ROWS_FOR_ARROW - 1, ROWS_FOR_ARROW, 1_000])
@pytest.mark.parametrize("kind", MAKERS)
def test_a_column_comes_back_exactly(kind: str, rows: int) -> None:
    rng = random.Random(rows)
    values = [MAKERS[kind](rng) for _ in range(rows)]
    found = there_and_back({"only": values})
    assert list(found) == ["only"]
    assert same(found["only"], values)


def test_columns_of_all_kinds_come_back_together() -> None:
    rng, streams = random.Random(1), Streams()
    for _ in range(200):
        rows = rng.choice([1, 5, 31, 32, 33, 100])
        kinds = rng.sample(list(MAKERS), rng.randint(1, 4))
        columns = {kind: [MAKERS[kind](rng) for _ in range(rows)] for kind in kinds}
        found = there_and_back(columns, streams)
        assert list(found) == list(columns)
        assert all(same(found[kind], columns[kind]) for kind in kinds)


@pytest.mark.parametrize("edge", EDGES)
def test_an_int_at_the_edge_of_a_width_comes_back(edge: int) -> None:
    values = [0] * 40 + [edge]
    assert there_and_back({"only": values}) == {"only": values}


def test_a_bool_among_ints_stays_a_bool() -> None:
    values = [1] * 50 + [True]
    assert type(to_column(values)) is not Ints
    assert same(there_and_back({"only": values})["only"], values)


def test_what_is_remembered_of_a_shape_gives_what_arrow_gives() -> None:
    """The second table of a shape is put together without Arrow, which reads it all the same."""
    rng, streams = random.Random(2), Streams()
    for rows in (32, 33, 35, 1_000):
        for _ in range(3):
            columns = {"key": [rng.randrange(9) for _ in range(rows)], "arg0": [-rng.randrange(9) for _ in range(rows)]}
            data = streams.to_bytes({name: to_column(values) for name, values in columns.items()})
            fresh = Streams().to_bytes({name: to_column(values) for name, values in columns.items()})
            assert data == fresh
            assert pa.ipc.open_stream(data).read_all().to_pydict() == columns


def test_tables_of_one_shape_but_other_names_are_not_mixed_up() -> None:
    streams = Streams()
    for name in ("a", "b", "a"):
        assert there_and_back({name: [1] * 40}, streams) == {name: [1] * 40}


def test_not_more_shapes_are_remembered_than_is_sensible() -> None:
    streams = Streams()
    for rows in range(32, 32 + SHAPES_MAX + 10):
        there_and_back({"only": [1] * rows}, streams)
    assert len(streams._around) <= SHAPES_MAX


def test_a_table_without_columns_is_nothing() -> None:
    assert Streams().to_bytes({}) == b""
    assert from_bytes(memoryview(b"")) == {}


def test_texts_are_compressed_and_small_ints_need_not_be() -> None:
    texts = Streams().to_bytes({"only": to_column(["the same text again"] * 1_000)})
    ints = Streams().to_bytes({"only": to_column(list(range(1_000)))})
    assert len(texts) < 2_000
    assert len(ints) < 2_500
