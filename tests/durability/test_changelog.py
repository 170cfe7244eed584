"""The changelog: what each epoch changed, before and after, whoever ran it, and whatever happened meanwhile."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from headrace import App, Config, Context, Runtime
from headrace.core import coordinator, local
from headrace.core.epoch_changes import OperatorChanges
from headrace.core.events import Lost, TakeSnapshot
from headrace.core.outcome import UNKNOWN
from headrace.durability.log.changelog import (
    DELETE,
    INSERT,
    UPDATE,
    Changelog,
    ChangeWriter,
    EpochChanges,
    Streams,
    changes_to_columns,
    columns_of,
    pack,
)
from headrace.durability.log.log import Log
from headrace.durability.log.records import ChangesHeader
from headrace.durability.log.store_repair import repair_store
from headrace.durability.reading.store_reader import StoreReader
from headrace.durability.store import DirectoryStore, open_store
from headrace.errors import AppChanged, Fenced, LogBroken, ModelError, NotDeterministic, StoreError
from headrace.model.fingerprint import fingerprint
from headrace.runtime.cluster import Cluster
from headrace.sim.oracle import Oracle
from headrace.wire.values import MISSING, is_wrapped
from tests.durability import hand
from tests.durability.hand import Hand, add, drop, memory, move, put
from tests.process import bank
from tests.programs import MANY, PROGRAMS, Program, app

State = dict[Any, Any]


@contextmanager
def logging(app: App, *operators: str) -> Iterator[None]:
    """These operators log their changes, all others do not."""
    try:
        for name, operator in app.operators.items():
            operator.changes = name in operators
        yield
    finally:
        for operator in app.operators.values():
            operator.changes = False


def exact(value: Any) -> Any:
    """1, 1.0 and True differ, and a NaN is one."""
    return repr(value)


def net_changes(before: State, after: State, operators: Any) -> dict[Any, tuple[Any, Any]]:
    """What a loop would log: of each entity that differs, what it was and what it is."""
    pairs = {
        entity: (exact(before[entity]) if entity in before else None, exact(after[entity]) if entity in after else None)
        for entity in {**before, **after}
        if entity[0] in operators
    }
    return {(entity[0], type(entity[1]), entity[1]): pair for entity, pair in pairs.items() if pair[0] != pair[1]}


def logged(changes: EpochChanges, unseal: Any) -> dict[Any, tuple[Any, Any]]:
    found: dict[Any, tuple[Any, Any]] = {}
    for name in changes.operators:
        changed = changes.of(name)
        assert changed is not None
        for key, *states in zip(*changed, strict=True):
            assert (name, type(key), key) not in found, "an entity is logged twice"
            one, two = (None if state == MISSING else exact(unseal(state)) for state in states)
            found[name, type(key), key] = one, two
    return found


def by_epoch(store: Any) -> dict[int, EpochChanges]:
    return {each.epoch: each for each in Changelog(store).read(Changelog(store).bounds()[0])}


OPERATORS = tuple(app.operators)
WORKERS = st.lists(st.integers(0, 3), min_size=1, max_size=3)


@given(PROGRAMS, WORKERS, st.integers(1, 5), st.booleans(), st.integers(0, 1 << 32))
@settings(max_examples=MANY)
def test_each_epoch_logs_what_differs_between_its_two_ends_in_a_loop(
    program: Program, workers: list[int], size: int, snaps: bool, seed: int
) -> None:
    """Serially or on workers, with crashes, losses of workers and snapshots."""
    calls, rng, store = program.calls(), random.Random(seed), memory()
    with logging(app, *OPERATORS):
        replies: list[Any] = []
        for at, count in enumerate(workers):
            mine = Hand(store, app, count, seed=seed, epoch_transactions_max=size, snapshot_interval_us=1 << 60)
            first, stop = len(calls) * at // len(workers), len(calls) * (at + 1) // len(workers)
            token = mine.send(f"part{at}", calls[first:stop])
            if count > 1:
                for _ in range(rng.randrange(40)):
                    mine.deliver()
                mine.submit(Lost(1 + rng.randrange(count)))
            mine.settle()
            replies += mine.replies[token]
            if snaps:
                mine.take_snapshot()
        found = by_epoch(store)
        unseal = mine.core.program.values.unseal
    oracle, before = Oracle(), dict[Any, Any]()
    event(f"workers {workers}")
    for epoch in sorted({reply.epoch for reply in replies}):
        for call, reply in zip(calls, replies, strict=True):
            if reply.epoch == epoch:
                oracle.transact(*call)
        expected = net_changes(before, oracle.state, OPERATORS)
        assert logged(found[epoch], unseal) == expected
        before = dict(oracle.state)
    assert set(found) == {reply.epoch for reply in replies}


@given(PROGRAMS, st.integers(1, 4), st.integers(0, 1 << 32))
@settings(max_examples=MANY // 2)
def test_the_records_are_the_same_bytes_in_both_modes(program: Program, size: int, seed: int) -> None:
    calls = program.calls()
    written = []
    with logging(app, *OPERATORS):
        for count in (0, 1, 3):
            store = memory()
            hand = Hand(store, app, count, seed=seed, epoch_transactions_max=size, report_delay_us=0)  # no time passes
            hand.run("all", calls)
            written.append([record.data for record in Log.take_over(store, "changes", term=99).read(1)])
    assert written[0] == written[1] == written[2]


def test_a_record_says_of_which_types_the_keys_have_been() -> None:
    """So far, through restarts, and only of changes: not of a transaction that was undone."""
    store = memory()
    rounds = [([(add, 7, 1)], ["long"]), ([(add, 8, 0), (move, 7, "b", 500)], ["long"]), ([(drop, "x")], ["long"])]
    rounds += [([(add, "a", 1)], ["long", "string"]), ([(add, 9, 1)], ["long", "string"])]
    with logging(hand.app, "item"):
        for at, (calls, types) in enumerate(rounds):
            mine = Hand(store, hand.app)
            mine.run(f"round{at}", calls)
            mine.take_snapshot()  # so that the next one does not run them again
            newest = Changelog(store).newest()
            assert newest is not None
            assert newest[2].header.key_types["item"] == types


CALLS = [
    (add, "a", 1),
    (move, "a", "b", 5),
    (add, 7, 2),
    (move, "b", "c", 500),
    (drop, "a"),
    (add, "c", 0),
    (drop, "x"),
]


def epochs_of(store: Any, operator: str = "item") -> dict[int, list[tuple[Any, Any, Any]]]:
    """Of a store that was logged from its beginning on: key, before, after."""
    found = {}
    for each in Changelog(store).read(1):
        changed = each.of(operator)
        found[each.epoch] = [] if changed is None else list(zip(*changed, strict=True))
    return found


def test_one_row_per_entity_and_epoch_with_nothing_that_was_undone() -> None:
    store = memory()
    with logging(hand.app, "item"):
        Hand(store, hand.app, epoch_transactions_max=2).run("all", CALLS)
    assert epochs_of(store) == {
        1: [("a", MISSING, -4), ("b", MISSING, 5)],
        2: [(7, MISSING, 2)],  # the transfer of 500 aborted
        3: [("a", -4, MISSING), ("c", MISSING, 0)],
        4: [],
    }


def test_off_there_is_no_changelog_and_the_error_says_how_to_turn_it_on() -> None:
    store = memory()
    Hand(store, hand.app).run("all", CALLS)
    assert not Changelog(store).is_there
    assert Changelog(store).bounds() == (1, 0)
    assert Changelog(store).since("item") is None
    with pytest.raises(StoreError, match="changes=True"):
        list(Changelog(store).read(1, 2))


def test_it_is_no_part_of_the_fingerprint() -> None:
    with logging(hand.app, "item"):
        on = fingerprint(hand.app)
    assert on == fingerprint(hand.app)


def test_what_is_neither_true_nor_false_is_refused() -> None:
    with pytest.raises(ModelError, match="True or False"):
        App("strange").operator("item", changes="yes")  # type: ignore[arg-type]


# --- on and off -------------------------------------------------------------------------------------------------------

shop = App("shop")
stock, price = shop.operator("stock"), shop.operator("price")


@stock.register
def fill(ctx: Context, amount: int) -> None:
    ctx.put(amount)
    ctx.call_async(cost, ctx.key, amount)


@price.register
def cost(ctx: Context, amount: int) -> None:
    ctx.put(amount * 10)


GUESSES = ["fine"]


@stock.register
def guess(ctx: Context) -> None:
    """Depends on what is not in the log, and does not say so."""
    ctx.put(GUESSES[0])


def go(store: Any, *operators: str, epochs: int = 2, snapshot: bool = False, workers: int = 0) -> None:
    """One start of the shop: so many epochs of one transaction, each with new values."""
    with logging(shop, *operators):
        mine = Hand(store, shop, workers, epoch_transactions_max=1)
        last = mine.core.sequencing.open.number
        for epoch in range(last, last + epochs):
            mine.run(f"epoch{epoch}", [(fill, "a", epoch)])
        if snapshot:
            mine.take_snapshot()


def test_a_changelog_that_begins_late_says_so() -> None:
    store = memory()
    go(store, epochs=3, snapshot=True)
    go(store, "stock", "price", epochs=2)
    log = Changelog(store)
    assert log.bounds() == (4, 5)
    assert log.since("stock") == log.since("price") == 4
    assert [each.epoch for each in log.read(4)] == [4, 5]
    with pytest.raises(StoreError, match=r"epochs 1 to 5 .* it has those of 4 to 5"):
        list(log.read(1))


def test_epochs_that_are_replayed_when_it_is_turned_on_are_logged() -> None:
    store = memory()
    go(store, epochs=3)
    go(store, "stock", epochs=1)
    assert Changelog(store).bounds() == (1, 4)
    assert epochs_of(store, "stock") == {
        1: [("a", MISSING, 1)],
        2: [("a", 1, 2)],
        3: [("a", 2, 3)],
        4: [("a", 3, 4)],
    }


def test_after_a_time_without_it_begins_anew() -> None:
    store = memory()
    go(store, "stock", epochs=3, snapshot=True)
    go(store, epochs=2, snapshot=True)
    assert Changelog(store).bounds() == (1, 3)
    go(store, "stock", epochs=0)
    assert Changelog(store).bounds() == (6, 5)
    assert Changelog(store).since("stock") == 6
    go(store, "stock", epochs=2)
    assert Changelog(store).bounds() == (6, 7)
    assert Changelog(store).since("stock") == 6


def test_each_operator_begins_when_it_was_turned_on() -> None:
    store = memory()
    go(store, "stock", epochs=2)
    go(store, "stock", "price", epochs=2)
    log = Changelog(store)
    assert log.bounds() == (1, 4)
    assert (log.since("stock"), log.since("price")) == (1, 3)
    go(store, "price", epochs=1, snapshot=True)
    assert (log.since("stock"), log.since("price")) == (None, 3)
    go(store, "stock", "price", epochs=1, workers=2)
    assert (log.since("stock"), log.since("price")) == (6, 3)
    assert list(epochs_of(store, "price").values())[2:] == [[("a", at * 10 - 10, at * 10)] for at in (3, 4, 5, 6)]


def test_an_operator_that_was_loaded_begins_behind_the_load() -> None:
    writer = ChangeWriter(memory(), 1, 1 << 20)
    writer.start(0, 0, ["stock", "price"], {})
    assert writer.since == {"stock": 1, "price": 1}
    writer.kept = 5
    again = ChangeWriter(memory(), 1, 1 << 20)
    again._newest, again.kept = (
        EpochChanges(pack(Streams(), changes_to_columns(ChangesHeader(5, 0, 1, dict(writer.since), []), {}))),
        5,
    )
    again.start(5, 0, ["stock", "price"], {"stock": 1})
    assert again.since == {"stock": 6, "price": 1}
    assert again.breaks == {"stock": 1, "price": 0}


# --- lost and made again ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_what_was_lost_is_made_again(workers: int) -> None:
    calls = [*CALLS, *((add, n, n) for n in range(40)), *((put, n, [n]) for n in range(20))]
    whole, store = memory(), memory()
    with logging(hand.app, "item"):
        Hand(whole, hand.app, epoch_transactions_max=3).run("all", calls)
        first = Hand(store, hand.app, workers, epoch_transactions_max=3)
        first.send("all", calls)
        for _ in range(8):
            first.compute()
            first.sync()
        kept = 0
        for _ in range(4):  # of all epochs that are durable, the changes of four are kept
            kept += first.work()
        assert kept == 4
        assert Changelog(store).bounds()[1] == 4
        second = Hand(store, hand.app, workers, epoch_transactions_max=3)
        second.settle()
    assert epochs_of(store) == epochs_of(whole)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_restarts_and_snapshots_between_epochs_change_nothing_in_what_is_logged(workers: int) -> None:
    found = []
    for is_interrupted in (True, False):
        store = memory()
        with logging(hand.app, "item"):
            first = second = Hand(store, hand.app, workers, epoch_transactions_max=3)
            first.run("many", [(add, n, n) for n in range(40)])
            first.take_snapshot()
            for at in (1, 2):
                if is_interrupted:
                    second = Hand(store, hand.app, workers, epoch_transactions_max=3)
                second.run(
                    f"all{at}", [*CALLS, (drop, 3), (drop, 3), (add, 3, 0), (drop, 4), (put, 5, [5]), (drop, "new")]
                )
                if is_interrupted:
                    second.take_snapshot()
                second.run(f"more{at}", [(add, n, at) for n in range(0, 40, 2)])
        found.append(epochs_of(store))
    assert found[0] == found[1]
    changes = [change for epoch in found[0].values() for change in epoch]
    assert (3, 3, MISSING) in changes
    assert (3, MISSING, 0) in changes


@pytest.fixture
def no_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a store that an older version wrote: else a digest of all writes comes first."""
    for module in (local, coordinator):
        monkeypatch.setattr(module, "compare_writes", lambda *_: UNKNOWN)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.usefixtures("no_digests")
def test_what_a_replay_changes_otherwise_stops_it(workers: int) -> None:
    """Though it answers the same."""
    store = memory()
    with logging(shop, "stock"):
        Hand(store, shop, workers).run("all", [(fill, "a", 1), (guess, "sky")])
        GUESSES[0] = "rain"
        try:
            again = Hand(store, shop, workers)
            with pytest.raises(
                NotDeterministic, match=r"epoch 1, stock 'sky': .* from nothing to 'fine', .* to 'rain'"
            ):
                again.settle()
        finally:
            GUESSES[0] = "fine"


@pytest.mark.usefixtures("no_digests")
def test_changes_that_other_code_has_written_are_not_called_nondeterministic() -> None:
    """An older version may come back after a newer one has replayed its epochs and written their changes."""
    store = memory()
    with logging(shop, "stock"):
        Hand(store, shop).run("all", [(fill, "a", 1), (guess, "sky")])
        GUESSES[0] = "rain"
        try:
            again = Hand(store, shop)
            assert again.opened_store.changes is not None
            again.opened_store.changes.fingerprint = "another version"
            with pytest.raises(
                AppChanged, match=r"epoch 1, stock 'sky': .* to 'rain': the changes were written by other"
            ):
                again.settle()
            zombie = Hand(store, shop)
            Hand(store, shop)
            with pytest.raises(Fenced):
                zombie.settle()
        finally:
            GUESSES[0] = "fine"


def test_a_snapshot_is_saved_after_the_changes_that_it_covers() -> None:
    store = memory()
    with logging(hand.app, "item"):
        mine = Hand(store, hand.app, 2, seed=3, epoch_transactions_max=2)
        mine.send("all", CALLS)
        mine.submit(TakeSnapshot("now"))
        while not (saved := mine.opened_store.snapshots.manifests()):
            assert mine.deliver() or mine.sync() or mine.work(), "there is no snapshot"
    assert [each.epoch for each in saved] == [4]
    assert Changelog(store).bounds() == (1, 4), "at the moment when it is saved"


def test_they_are_retired_with_the_replies_but_not_behind_the_oldest_snapshot() -> None:
    store = memory()
    with logging(shop, "stock"):
        mine = Hand(
            store,
            shop,
            epoch_transactions_max=1,
            segment_bytes_max=1,
            reply_retention_us=1_000_000,
            request_id_retention_us=1,
            snapshots_kept=1,
        )
        for epoch in range(1, 9):
            mine.now_us += 10_000_000
            mine.run(f"epoch{epoch}", [(fill, "a", epoch)])
            if epoch % 2 == 0:
                mine.take_snapshot()
        mine.settle()
    oldest, newest = Changelog(store).bounds()
    assert newest == 8
    assert 1 < oldest <= 9
    assert Changelog(store).since("stock") == oldest
    with pytest.raises(StoreError, match="not all in"):
        list(Changelog(store).read(1))
    state = {"a": None}
    for each in Changelog(store).read(oldest):
        changed = each.of("stock")
        assert changed is not None
        state["a"] = changed.afters[0]
    assert oldest == 9 or state == {"a": 8}


def test_a_state_with_a_time_to_live_is_logged_as_it_is_stored_and_its_end_is_a_deletion() -> None:
    expiring = App("expiring")
    note = expiring.operator("note", ttl=5, changes=True)

    @note.register
    def write(ctx: Context, text: str) -> None:
        ctx.put(text)

    store = memory()
    mine = Hand(store, expiring)
    mine.run("one", [(write, "a", "x")])
    mine.settle()
    found = [row for rows in epochs_of(store, "note").values() for row in rows]
    assert [row[0] for row in found] == ["a", "a"]
    assert is_wrapped(found[0][2])
    assert found[0][1] == found[1][2] == MISSING
    assert found[1][1] == found[0][2]


def test_a_runtime_keeps_them(tmp_path: Path) -> None:
    with logging(shop, "price"), Runtime(shop, store=tmp_path) as runtime:
        for amount in (1, 2):
            runtime.client.call(fill, "a", amount)
    changes = by_epoch(open_store(str(tmp_path)))
    assert [each.of("price") for each in changes.values()] == [
        OperatorChanges(["a"], [MISSING], [10]),
        OperatorChanges(["a"], [10], [20]),
    ]
    assert all(each.of("stock") is None for each in changes.values())


def test_worker_processes_tell_them_and_folded_they_are_the_state(tmp_path: Path) -> None:
    keys = [f"k{n}" for n in range(30)]
    calls = [(bank.deposit, key, 50) for key in keys]
    calls += [(bank.transfer, keys[n % 30], keys[n * 7 % 30], n % 40) for n in range(300)]
    with logging(bank.app, "account"):
        config = Config(epoch_transactions_max=50)
        with Cluster("tests.process.bank:app", 2, config=config, store=tmp_path) as cluster:
            cluster.client.batch(calls)
            expected = cluster.state("account")
    state: State = {}
    for each in by_epoch(open_store(str(tmp_path))).values():
        changed = each.of("account")
        for key, before, after in [] if changed is None else zip(*changed, strict=True):
            assert state.get(key, MISSING) == before
            state[key] = after
    assert state == expected
    assert len(state) == 30


# --- records ----------------------------------------------------------------------------------------------------------

INTS = st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-3, 3) | st.integers(60_000, 70_000)
KEYS = INTS | st.integers(1 << 63, (1 << 64) - 1) | st.text(max_size=3) | st.binary(max_size=3)
STATES = (
    INTS
    | st.floats()
    | st.none()
    | st.booleans()
    | st.text(max_size=3)
    | st.just(b"\x93\x01\x02\x03")
    | st.just(MISSING)
)
ROWS = st.dictionaries(KEYS, st.tuples(STATES, STATES), max_size=6)
INT_ROWS = st.dictionaries(INTS, st.tuples(INTS, INTS), max_size=6)
RANK = {int: 0, str: 1, bytes: 2}


@given(ROWS | INT_ROWS, st.sampled_from([0, 31, 40]))
@settings(max_examples=2 * MANY)
def test_a_record_is_read_as_it_was_written_in_order_and_without_what_is_the_same(
    rows: dict[Any, tuple[Any, Any]], more: int
) -> None:
    rows = rows | {n: (n, n + 1) for n in range(1000, 1000 + more)}
    expected = sorted(
        [(key, *states) for key, states in rows.items() if exact(states[0]) != exact(states[1])],
        key=lambda row: (RANK[type(row[0])], row[0]),
    )
    shuffled = random.Random(len(rows)).sample(list(rows), len(rows))
    changed = OperatorChanges(shuffled, [rows[key][0] for key in shuffled], [rows[key][1] for key in shuffled])
    read = EpochChanges(pack(Streams(), changes_to_columns(ChangesHeader(3, 17, 1, {"x": 1}, []), {"x": changed})))
    assert (read.epoch, read.closed_us, read.begin, read.since) == (3, 17, 1, {"x": 1})
    found = read.of("x")
    if not expected:
        assert found is None
        assert read.arrow("x") is None
        assert read.operators == []
        return
    assert found is not None
    assert exact(list(zip(*found, strict=True))) == exact(expected)
    arrays = read.arrow("x")
    assert arrays is not None
    keys, kinds, befores, afters = arrays
    assert len(keys) == len(kinds) == len(befores) == len(afters) == len(expected)
    assert kinds.to_pylist() == [
        INSERT if one == MISSING else DELETE if two == MISSING else UPDATE for _, one, two in expected
    ]
    assert befores.is_valid().to_pylist() == [one != MISSING for _, one, _ in expected]
    assert afters.is_valid().to_pylist() == [two != MISSING for _, _, two in expected]


def test_operators_stand_in_the_order_of_their_names() -> None:
    one = OperatorChanges([1], [1], [2])
    changes = EpochChanges(
        pack(
            Streams(),
            changes_to_columns(
                ChangesHeader(1, 0, 1, {}, []), {"b": one, "c": OperatorChanges([1], [1], [1]), "a": one}
            ),
        )
    )
    assert changes.operators == ["a", "b"]
    assert columns_of(OperatorChanges([1], [1], [1])) is None


# --- repairs ----------------------------------------------------------------------------------------------------------


def broken(path: Path, folder: str, at: float) -> None:
    """A bit has flipped in the largest file of a log, so far into it."""
    file = max((path / folder).glob("*"), key=lambda each: each.stat().st_size if each.is_file() else 0)
    data = bytearray(file.read_bytes())
    data[int(len(data) * at)] ^= 1
    file.write_bytes(data)


def test_a_changelog_that_is_broken_is_cut_and_begins_anew_behind_the_snapshot(tmp_path: Path) -> None:
    with logging(shop, "stock"):
        with Runtime(shop, store=tmp_path) as runtime:
            for amount in range(1, 9):
                runtime.client.call(fill, "a", amount)
        broken(tmp_path, "changes", 0.9)
        with pytest.raises(LogBroken, match="headrace log repair"):
            Runtime(shop, store=tmp_path)
        done = repair_store(StoreReader(tmp_path))
        assert done.changes is not None
        assert done.changes.lost is not None
        assert done.last_epoch == 8
        with Runtime(shop, store=tmp_path) as runtime:
            assert Changelog(open_store(str(tmp_path))).bounds() == (9, 8)
            runtime.client.call(fill, "a", 9)
        assert not repair_store(StoreReader(tmp_path)).has_changed
    (last,) = Changelog(open_store(str(tmp_path))).read(9)
    assert last.of("stock") == OperatorChanges(["a"], [8], [9])


def test_a_changelog_is_cut_with_the_log(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    with logging(shop, "stock"):
        go(store, "stock", epochs=8)
        store.close()
        broken(tmp_path, "log", 0.6)
        done = repair_store(StoreReader(tmp_path))
        assert 1 < done.last_epoch < 8
        assert done.changes is not None
        assert done.changes.lost is not None
        assert Changelog(store).bounds() == (1, done.last_epoch)
        go(DirectoryStore(tmp_path), "stock", epochs=1)
    found = epochs_of(DirectoryStore(tmp_path), "stock")
    assert list(found) == list(range(1, done.last_epoch + 2))
    assert found[done.last_epoch + 1] == [("a", done.last_epoch, done.last_epoch + 1)]
