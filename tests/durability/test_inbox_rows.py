"""The rows of a batch that comes as files: what cannot be a call is a dead letter, and what was decided stays so."""

from __future__ import annotations

import dataclasses
import datetime
import json
import random
from typing import Any

import pyarrow as pa
import pytest

from headrace import App, Context
from headrace.durability.inbox.dead_letters import dead_letter_names, read_dead_letters
from headrace.durability.inbox.inbox import ClosedBatch, held, waiting
from headrace.durability.store import Store
from headrace.errors import AppChanged, LogBroken
from headrace.model.fingerprint import fingerprint
from tests.durability.hand import memory
from tests.durability.inbox_world import Engine, close, dead_rows, log_batch, notes, settle, start, table

# --- rows that cannot be calls ----------------------------------------------------------------------------------------

BAD_TEXT = pa.StringArray.from_buffers(3, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0\3\0\0\0"), pa.py_buffer(b"a\xffb"))
FAR = pa.array([0, 1 << 61, -(1 << 61)], pa.int64())
MAPS = pa.array([[("a", 1)], [("a", 1), ("a", 2)], None], pa.map_(pa.string(), pa.int64()))
STRANGE: list[Any] = [
    BAD_TEXT,
    FAR.cast(pa.timestamp("us", tz="UTC"), safe=False),
    FAR.cast(pa.timestamp("us"), safe=False),
    pa.array([1, 1 << 30, -(1 << 30)], pa.int32()).cast(pa.date32()),
    FAR.cast(pa.duration("us")),
    MAPS,
    pa.array([[1], None, [2, 3]], pa.list_(pa.int64())),
    pa.array([{"x": 1}, None, {"x": None}], pa.struct([("x", pa.int64())])),
    pa.array([b"a", b"\xff", None], pa.binary()),
    pa.array([True, False, None]),
    pa.array([1.5, float("nan"), float("inf")]),
    pa.array([1, (1 << 64) - 1, 0], pa.uint64()),
    pa.array([None, None, None], pa.null()),
    pa.array([datetime.time(1), None, datetime.time(2)]),
    pa.array(["1", "[1, ", "[" * 100_000]),
    pa.array(["a", "\ud800".encode("utf-16", "surrogatepass").decode("utf-16", "replace"), ""]),
]

strange = App("strange")
thing = strange.operator("thing")


@thing.register
def take(ctx: Context, value: Any) -> None:
    ctx.put(value)


@thing.register
def take_int(ctx: Context, value: int) -> None:
    ctx.put(value)


@thing.register
def take_days(ctx: Context, value: dict[str, datetime.date]) -> None:
    ctx.put(value)


@pytest.mark.parametrize("role", ["key", "arg0", "args", "id", "function", "call", "in a list", "in a map"])
def test_whatever_is_in_a_row_it_runs_or_it_is_a_dead_letter(role: str) -> None:
    """And it is the same after a restart that reads the batch again."""
    texts = [column for column in STRANGE if pa.types.is_string(column.type)]
    columns_of_role = {"args": texts, "id": texts, "call": [column.cast(pa.binary()) for column in texts]}
    for column in columns_of_role.get(role, STRANGE):
        for function in ("thing.take", "thing.take_int", "thing.take_days", "thing.none"):
            columns: dict[str, Any] = {"key": pa.array(["a", "b", "c"]), "arg0": pa.array([1, 2, 3]), role: column}
            if role == "args":
                del columns["arg0"]
            if role == "function":
                function = ""
            if role == "call":
                columns = {"call": column}
            if role.startswith("in"):
                del columns[role]
                offsets = pa.array([0, 1, 2, 3], pa.int32())
                keys = pa.array(["x", "y", "z"])
                nested = pa.MapArray.from_arrays(offsets, keys, column)
                columns["arg0"] = pa.ListArray.from_arrays(offsets, column) if role == "in a list" else nested
            store = memory()
            engine = start(store, strange)
            close(store, 0, pa.table(columns), function=function)
            log_batch(engine, 0)
            assert held(store) == set(), (column.type, function)
            assert waiting(store) == [("q", 0)]
            before = dead_rows(store)
            engine = settle(start(store, strange))
            assert (held(store), waiting(store)) == (set(), []), (column.type, function)
            assert dead_rows(store) == before
            ran = engine.hand.core.committed + engine.hand.core.aborted
            assert ran + len(before) == 3, (column.type, function, ran, before)
            close(store, 1, pa.table({"key": ["z"], "arg0": [1]}), function="thing.take")
            assert settle(engine).hand.state()["thing", "z"] == 1, "the stream goes on"


@dataclasses.dataclass(frozen=True)
class Size:
    width: int


@thing.register
def measure(ctx: Context, size: Size, unit: str = "cm", *, exact: bool = False, note: str | None = None) -> None:
    ctx.put((size, unit, exact, note))


SIZES = pa.array([{"width": 1}, {"width": 2}])
MEASURED: list[tuple[dict[str, Any], Any]] = [
    ({"size": SIZES}, [(Size(1), "cm", False, None), (Size(2), "cm", False, None)]),
    (
        {"exact": pa.array([True, False]), "size": SIZES},
        [(Size(1), "cm", True, None), (Size(2), "cm", False, None)],
    ),
    (
        {"note": pa.array([None, "x"]), "unit": pa.array(["m", "km"]), "size": SIZES},
        [(Size(1), "m", False, None), (Size(2), "km", False, "x")],
    ),
]


@pytest.mark.parametrize("how", ["one function", "own ids", "own functions", "JSON"])
@pytest.mark.parametrize(("named", "expected"), MEASURED)
def test_columns_may_be_named_by_parameters_and_what_has_no_column_takes_its_default(
    named: dict[str, Any], expected: Any, how: str
) -> None:
    store = memory()
    engine = start(store, strange)
    columns: dict[str, Any] = {"key": pa.array(["a", "b"])}
    if how == "own ids":
        columns["id"] = pa.array(["one", None])
    if how == "own functions":
        columns["function"] = pa.array(["thing.measure"] * 2)
    if how == "JSON":
        rows = [{name: column[at].as_py() for name, column in named.items()} for at in range(2)]
        columns["args"] = pa.array(list(map(json.dumps, rows)))
    else:
        columns |= {f"arg:{name}": column for name, column in named.items()}
    close(store, 0, pa.table(columns), function="" if how == "own functions" else "thing.measure")
    state = settle(engine).hand.state()
    assert dead_rows(store) == []
    assert [state["thing", key] for key in "ab"] == expected
    assert settle(start(store, strange)).hand.state() == state, "a batch that is read again gives the same calls"


def test_named_columns_of_other_functions_are_dropped_where_they_are_null() -> None:
    store = memory()
    engine = start(store, strange)
    columns = {
        "key": ["a", "b", "c"],
        "function": ["thing.take_int", "thing.take_int", "thing.take"],
        "arg:value": [1, 2, 3],
        "arg:size": [None, 5, None],
    }
    close(store, 0, pa.table(columns), function="")
    state = settle(engine).hand.state()
    assert (state["thing", "a"], state["thing", "c"]) == (1, 3)
    assert dead_rows(store) == [("q", 0, 1)]


def test_named_columns_that_fit_no_function_make_dead_letters_with_their_names() -> None:
    store = memory()
    engine = start(store, strange)
    close(store, 0, pa.table({"key": ["a"], "arg:size": [1], "arg:colour": ["red"]}), function="thing.measure")
    close(store, 1, pa.table({"key": ["a"], "arg:unit": ["m"]}), function="thing.measure")
    close(store, 2, pa.table({"key": ["a"], "arg:value": [7]}), function="thing.take_int")
    assert settle(engine).hand.state()["thing", "a"] == 7
    letters = [row for name in dead_letter_names(store) for row in read_dead_letters(store, name).to_pylist()]
    assert [row["args"] for row in letters] == ['{"size":1,"colour":"red"}', '{"unit":"m"}']
    assert [row["error_type"] for row in letters] == ["BadArguments"] * 2
    assert "has no parameter 'colour'" in letters[0]["error"]
    assert "needs 'size'" in letters[1]["error"]


def test_parts_of_a_batch_may_differ_in_type_where_one_has_only_nulls() -> None:
    store = memory()
    engine = start(store)
    empty = pa.table({"key": pa.array([None], pa.string()), "arg0": pa.array([None], pa.null())})
    close(store, 0, table([1]), empty, table([2]))
    assert notes(settle(engine)) == [1, 2]
    assert dead_rows(store) == [("q", 0, 1)]


def test_dead_letters_are_those_of_the_limits_that_the_batch_was_logged_under() -> None:
    """The first engine ends when it has written them, and has not logged the batch."""
    store = memory()
    first = start(store, key_bytes_max=10)
    close(store, 0, table([1], "k" * 20), table([2]), table([3], None))
    first.reader.look(lambda *item: None)
    assert dead_rows(store) == [("q", 0, 0), ("q", 0, 2)]
    engine = settle(start(store, key_bytes_max=100))
    assert notes(engine, "k" * 20) == [1]
    assert dead_rows(store) == [("q", 0, 2)]


# --- what may change between two runs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("epochs", range(4))
@pytest.mark.parametrize("smaller", [{"key_bytes_max": 10}, {"request_id_bytes_max": 10}, {"value_bytes_max": 16}])
def test_a_batch_in_the_log_is_judged_by_the_limits_of_then(smaller: dict[str, int], epochs: int) -> None:
    more = {"id": pa.array(["i" * 20, "j" * 20, "k" * 300], pa.string())}
    for first, then in ((smaller, {}), ({}, smaller)):
        store = memory()
        engine = start(store, epoch_transactions_max=1, **first)
        close(store, 0, table([1, 2, 3], "k" * 20, **more))
        log_batch(engine, epochs)
        refused = dead_rows(store)
        engine = settle(start(store, epoch_transactions_max=2, **then))
        assert dead_rows(store) == refused
        ran = [1, 2, 3] if not refused else [uid for uid in (1, 2, 3) if ("q", 0, uid - 1) not in refused]
        assert notes(engine, "k" * 20) == ran
        assert (held(store), waiting(store)) == (set(), [])


def version(number: int) -> App:
    """The second counts twice, and has another signature for `gone`."""
    made = App("versions")
    counter = made.operator("counter")

    @counter.register
    def count(ctx: Context, uid: int) -> int:
        ctx.put(ctx.get(0) + number)
        return int(ctx.get())

    if number == 1:

        @counter.register
        def gone(ctx: Context, uid: int) -> None:
            ctx.put(uid)

    return made


OLD, NEW = version(1), version(2)


@pytest.mark.parametrize("epochs", range(4))
def test_other_code_goes_on_with_a_batch_that_is_half_in_epochs_if_a_snapshot_covers_them(epochs: int) -> None:
    store = memory()
    engine = start(store, OLD, epoch_transactions_max=1)
    close(store, 0, table([1, 2, 3]), function="counter.count")
    log_batch(engine, epochs)
    if epochs:
        with pytest.raises(AppChanged, match=r"epoch 1 .* was logged by other code"):
            start(store, NEW)
        engine = start(store, OLD, epoch_transactions_max=1, snapshot_interval_us=1)
        log_epochs(engine, store)
    engine = settle(start(store, NEW))
    done = {0: 0, 1: 3, 2: 3, 3: 3}[epochs]
    assert engine.hand.state() == {("counter", "a"): done + 2 * (3 - done)}
    assert waiting(store) == []


def log_epochs(engine: Engine, store: Store) -> None:
    """All that is in the log runs, and a snapshot is made of it."""
    engine.hand.settle()
    engine.hand.take_snapshot()


def test_other_code_that_would_refuse_other_rows_of_a_logged_batch_does_not_start() -> None:
    store = memory()
    engine = start(store, OLD)
    close(store, 0, table([1, 2, 3]), function="counter.gone")
    log_batch(engine, 0)
    with pytest.raises(AppChanged, match=r"batch 0 of query q .* refused 0 of its rows; this code refuses 3"):
        start(store, NEW)
    assert settle(start(store, OLD)).hand.state() == {("counter", "a"): 3}


def test_a_segment_that_the_log_names_and_that_is_gone_is_told_by_name() -> None:
    store = memory()
    closed = close_in_log(store)
    store.delete(closed.segments[0].name)
    with pytest.raises(LogBroken, match=f"{closed.segments[0].name}.*backup"):
        start(store)


def close_in_log(store: Store) -> ClosedBatch:
    engine = start(store)
    closed = close(store, 0, table([1, 2, 3]))
    log_batch(engine, 0)
    return closed


@dataclasses.dataclass
class Parcel:
    weight: int


Narrow = Parcel


@dataclasses.dataclass
class Parcel:  # type: ignore[no-redef] # the next version
    weight: int
    colour: str = "grey"


def depot(number: int) -> App:
    """The second has one more field with a default, and one more function."""
    made, kind = App("depot"), Narrow if number == 1 else Parcel
    depot = made.operator("depot")

    def take_in(ctx: Context, parcel: Any) -> str:
        ctx.put([*ctx.get([]), parcel])
        return f"{parcel.weight}"

    take_in.__annotations__["parcel"] = kind
    depot.register(take_in)
    if number == 2:

        @depot.register
        def weigh(ctx: Context) -> int:
            return len(ctx.get([]))

    return made


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("epochs", range(5))
def test_a_logged_batch_gives_newer_code_the_calls_of_then(epochs: int, workers: int) -> None:
    """A row that was refused stays refused, though its function exists now, and so does one with a field that did not
    exist."""
    store = memory()
    old, new = depot(1), depot(2)
    assert fingerprint(old).obstacles(fingerprint(new)) == []
    messages = [
        b'{"function": "depot.take_in", "key": "a", "args": [{"weight": 1}]}',
        b'{"function": "depot.weigh", "key": "a"}',
        b'{"function": "depot.take_in", "key": "a", "args": [{"weight": 2, "colour": "red"}]}',
        b'{"function": "depot.take_in", "key": "a", "args": [{"weight": 3}]}',
    ]
    engine = start(store, old, epoch_transactions_max=1)
    close(store, 0, pa.table({"call": pa.array(messages, pa.binary())}), function="")
    log_batch(engine, epochs)
    assert dead_rows(store) == [("q", 0, 1), ("q", 0, 2)]
    engine = settle(Engine(store, random.Random(1), {}, workers, new))
    assert engine.hand.state() == {("depot", "a"): [Parcel(1), Parcel(3)]}
    assert dead_rows(store) == [("q", 0, 1), ("q", 0, 2)]
    assert (held(store), waiting(store)) == (set(), [])
    close(store, 1, pa.table({"call": pa.array(messages[1:3], pa.binary())}), function="")
    assert settle(engine).hand.state()["depot", "a"][-1] == Parcel(2, "red"), "from then on it is"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("epochs", range(3))
def test_a_logged_batch_has_no_fields_that_did_not_exist_then(epochs: int, workers: int) -> None:
    """In columns, unlike in JSON, more fields than a record has are left out."""
    store = memory()
    engine = start(store, depot(1), epoch_transactions_max=1)
    rows = pa.table({"key": ["a", "a"], "arg0": [{"weight": 1, "colour": "red"}, {"weight": 2, "colour": "blue"}]})
    close(store, 0, rows, function="depot.take_in")
    log_batch(engine, epochs)
    engine = settle(Engine(store, random.Random(1), {}, workers, depot(2)))
    assert engine.hand.state() == {("depot", "a"): [Parcel(1), Parcel(2)]}
    assert dead_rows(store) == []
    close(store, 1, rows, function="depot.take_in")
    assert settle(engine).hand.state()["depot", "a"][-1] == Parcel(2, "blue"), "from then on it has"
