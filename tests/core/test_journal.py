"""The order in which an engine makes things durable."""

from __future__ import annotations

from headrace.config import Config
from headrace.core.epoch import Epoch
from headrace.core.events import Keep, Save
from headrace.core.journal import Journal
from headrace.core.log_records import Decree
from headrace.core.snapshot_metadata import INITIAL


def test_a_snapshot_waits_for_the_replies_of_what_it_covers() -> None:
    """Epoch 2 begins to run, and logs a decree, while the snapshot at the end of epoch 1 waits for the log: the
    replies of epoch 1 then wait for the decree, and the snapshot must wait for these replies."""
    journal = Journal(Config(), is_durable=True)
    first, second = (Epoch(number, 0, 0) for number in (1, 2))
    first.position, second.position = journal.append(first), journal.append(second)
    journal.keep(first)
    journal.take(0, [], 1, 1, INITIAL)
    journal.note(Decree({}))
    done: list[type] = []
    for number in (1, 2, 3):
        journal.effects.clear()
        journal.appended(number)
        done += [type(effect) for effect in journal.effects]
        assert done == ([Keep, Save] if number == 3 else [])
