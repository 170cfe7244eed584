"""Sequencers give TIDs without gaps or doubles, also where their number changes, and there is none beyond 63 bits."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.sequencing import TID_MAX, Sequencer
from headrace.wire.messages import Run
from tests.cluster import Cluster, on
from tests.core.things import add, app, note_tid
from tests.programs import MANY


def test_a_tid_is_the_sequencers_id_plus_its_counter_times_their_number() -> None:
    sequencer = Sequencer(sid=2, n_seq=3)
    assert list(sequencer.take(3)) == [2 + 0 * 3, 2 + 1 * 3, 2 + 2 * 3]
    assert list(sequencer.take(0)) == []
    assert list(sequencer.take(1)) == [2 + 3 * 3]
    assert list(Sequencer().take(4)) == [1, 2, 3, 4]


@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.booleans()), max_size=30))
@settings(max_examples=MANY)
def test_no_two_sequencers_give_the_same_tid_whatever_their_number_becomes(n_seq: int, takes: Any) -> None:
    sequencers = [Sequencer(sid, n_seq) for sid in range(1, n_seq + 1)]
    given_out: list[int] = []
    for who, count, resizes in takes:
        sequencer = sequencers[who % len(sequencers)]
        before = max(given_out, default=0)
        tids = list(sequencer.take(count))
        assert tids == sorted(tids)
        given_out += tids
        if resizes:
            n_seq = count + 1
            largest = max(given_out, default=0)
            sequencers = [Sequencer.above(sid, n_seq, largest) for sid in range(1, n_seq + 1)]
            for each in sequencers:
                assert each.sid + each.lc * each.n_seq > before
        else:
            largest = max(each.lc for each in sequencers)
            for each in sequencers:
                each.level(largest)
    assert len(set(given_out)) == len(given_out)


def test_after_levelling_nobody_gives_a_tid_below_one_that_was_used() -> None:
    busy, idle = Sequencer(1, 2), Sequencer(2, 2)
    used = list(busy.take(10))
    idle.level(busy.lc)
    busy.level(busy.lc)
    assert min(itertools.chain(idle.take(1), busy.take(1))) > max(used)
    idle.level(0)
    assert idle.take(1)[0] > max(used)


@pytest.mark.parametrize(("sid", "n_seq"), [(0, 1), (2, 1), (-1, 3), (4, 3), (1, 0)])
def test_a_sequencers_id_lies_between_one_and_their_number(sid: int, n_seq: int) -> None:
    with pytest.raises(ValueError, match="sequencer"):
        Sequencer(sid, n_seq)


def test_a_tid_over_63_bits_is_refused_and_none_is_used() -> None:
    sequencer = Sequencer(1, 1, lc=TID_MAX - 2)
    with pytest.raises(OverflowError):
        sequencer.take(3)
    assert list(sequencer.take(2)) == [TID_MAX - 1, TID_MAX]
    with pytest.raises(OverflowError):
        sequencer.take(1)


# --- B9: TIDs have room, and an end -----------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [(1 << 31) - 2, (1 << 32) - 2, (1 << 53) - 2, TID_MAX - 4])
@pytest.mark.parametrize("workers", [1, 3])
def test_b9_tids_beyond_31_bits_are_what_they_are(first: int, workers: int) -> None:
    for seed in range(4):
        cluster = Cluster(app, workers, seed=seed)
        cluster.engine.sequencing.sequencer = Sequencer(lc=first - 1)
        tids = list(range(first, first + 5))
        replies = cluster.run([(note_tid, on(1 + at % 3), on(2, "to")) for at in range(5)])
        assert [reply.tid for reply in replies] == [reply.result for reply in replies] == tids
        assert cluster.state() == {("thing", on(2, "to")): tids}


def test_b9_there_is_no_tid_beyond_63_bits() -> None:
    sequencer = Sequencer(lc=TID_MAX - 2)
    with pytest.raises(OverflowError, match="does not fit into 63 bits"):
        sequencer.take(3)
    assert list(sequencer.take(2)) == [TID_MAX - 1, TID_MAX], "what was refused has taken nothing"
    with pytest.raises(OverflowError):
        sequencer.take(1)
    cluster = Cluster(app, 3)
    cluster.engine.sequencing.sequencer = sequencer
    with pytest.raises(OverflowError):
        cluster.send([(add, on(1), 1)])
    assert not cluster.bodies(Run), "and nothing has run under another one"
