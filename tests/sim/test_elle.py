"""The checker finds each anomaly in a history made by hand, and nothing in histories that are fine."""

from __future__ import annotations

import random
from typing import Any

import pytest

from headrace.sim.elle import ABORTED, APPEND, OK, READ, ElleTransaction, check


def a(key: str, value: int) -> Any:
    return APPEND, key, value


def r(key: str, *seen: int) -> Any:
    return READ, key, list(seen)


def history(*rows: Any) -> list[ElleTransaction]:
    """All at the same time, unless a row says (ops, asked, answered)."""
    made = []
    for number, row in enumerate(rows):
        ops, asked, answered = row if isinstance(row, tuple) else (row, 0, 1000)
        made.append(ElleTransaction(number, ops, OK, asked, answered))
    return made


def names(*rows: Any) -> list[str]:
    return [anomaly.name for anomaly in check(history(*rows))]


def test_a_serial_history_is_fine() -> None:
    assert names(([a("x", 1)], 0, 1), ([r("x", 1), a("x", 2)], 2, 3), ([r("x", 1, 2), a("y", 3)], 4, 5)) == []


def test_concurrent_transactions_may_take_effect_in_either_order() -> None:
    assert names([a("x", 1)], [a("x", 2)], [r("x", 2, 1)], [r("x")], [r("x", 2)]) == []


def test_g0_is_found_where_two_lists_disagree_on_the_order_of_writes() -> None:
    assert names([a("x", 1), a("y", 1)], [a("x", 2), a("y", 2)], [r("x", 1, 2)], [r("y", 2, 1)]) == ["G0"]


def test_g1a_is_found_where_an_aborted_write_was_read() -> None:
    rows = [ElleTransaction(0, [a("x", 1)], ABORTED, 0, 9), ElleTransaction(1, [r("x", 1)], OK, 0, 9)]
    assert [anomaly.name for anomaly in check(rows)] == ["G1a"]


def test_g1b_is_found_where_half_of_a_transaction_was_read() -> None:
    assert "G1b" in names([a("x", 1), a("x", 2)], [r("x", 1)])


def test_g1c_is_found_where_two_transactions_read_each_other() -> None:
    assert names([a("x", 1), r("y", 2)], [a("y", 2), r("x", 1)]) == ["G1c"]


def test_a_lost_update_is_found() -> None:
    found = names([r("x"), a("x", 1)], [r("x"), a("x", 2)], [r("x", 1, 2)])
    assert found == ["G-single"]


def test_a_lost_update_is_found_though_nobody_sees_what_was_lost() -> None:
    assert names([r("x"), a("x", 1)], [r("x"), a("x", 2)], [r("x", 2)]) == ["G-single"]


def test_g_single_is_found_where_a_reader_sees_half_of_another() -> None:
    assert names([a("x", 1), a("y", 1)], [r("x", 1), r("y")], [r("y", 1)]) == ["G-single"]


def test_g2_is_found_where_two_transactions_miss_each_other() -> None:
    assert names([r("x"), a("y", 1)], [r("y"), a("x", 1)], [r("x", 1), r("y", 1)]) == ["G2"]


def test_a_stale_read_is_found() -> None:
    assert names(([a("x", 1)], 0, 1), ([r("x")], 2, 3), ([r("x", 1)], 4, 5)) == ["G-single-realtime"]


def test_a_stale_read_is_found_though_nobody_sees_the_write() -> None:
    assert names(([a("x", 1)], 0, 1), ([r("x")], 2, 3)) == ["G-single-realtime"]


def test_a_write_from_the_future_is_found() -> None:
    assert names(([r("x", 1)], 0, 1), ([a("x", 1)], 2, 3)) == ["G1c-realtime"]


def test_writes_against_real_time_are_found() -> None:
    assert names(([a("x", 1)], 0, 1), ([a("x", 2)], 2, 3), ([r("x", 2, 1)], 4, 5)) == ["G0-realtime"]


def test_real_time_reaches_over_others() -> None:
    rows = [([a("x", 1)], 0, 1), ([a("y", 1)], 2, 3), ([a("z", 1)], 4, 5), ([r("x")], 6, 7), ([r("x", 1)], 0, 9)]
    assert names(*rows) == ["G-single-realtime"]


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("incompatible order", ([a("x", 1)], [a("x", 2)], [r("x", 1, 2)], [r("x", 2, 1)])),
        ("duplicate", ([a("x", 1)], [r("x", 1, 1)])),
        ("garbage", ([r("x", 7)],)),
        ("internal", ([a("x", 1), r("x")],)),
        ("internal", ([r("x"), r("x", 1)], [a("x", 1)])),
        ("internal", ([r("x", 1), a("x", 1)],)),
    ],
)
def test_a_list_that_cannot_be_is_found(name: str, rows: Any) -> None:
    assert name in names(*rows)


def test_a_value_appended_twice_cannot_be_judged() -> None:
    with pytest.raises(ValueError, match="twice"):
        names([a("x", 1)], [a("x", 1)])


def serial_history(rng: random.Random, count: int) -> list[ElleTransaction]:
    """Transactions that took effect one after the other, each somewhere between its question and its answer."""
    lists: dict[str, list[int]] = {}
    rows, value = [], 0
    for number in range(count):
        ops: list[Any] = []
        for _ in range(rng.randint(1, 4)):
            key = rng.choice("xyz")
            if rng.random() < 0.5:
                value += 1
                lists[key] = [*lists.get(key, []), value]
                ops.append(a(key, value))
            else:
                ops.append(r(key, *lists.get(key, [])))
        rows.append(
            ElleTransaction(number, ops, OK, number * 10 - rng.randrange(50), number * 10 + rng.randrange(1, 50))
        )
    rng.shuffle(rows)
    return rows


def test_random_serial_histories_are_fine_and_swapped_reads_are_not() -> None:
    caught = 0
    for seed in range(100):
        rng = random.Random(seed)
        rows = serial_history(rng, 30)
        assert check(rows) == []
        reads = [(at, row) for at, row in enumerate(rows) if any(op[0] == READ and len(op[2]) > 3 for op in row.ops)]
        if reads:
            at, row = rng.choice(reads)
            ops = [(kind, key, v[:-3] if kind == READ else v) for kind, key, v in row.ops]
            rows[at] = row._replace(ops=ops)
            caught += bool(check(rows))
    assert caught > 80
