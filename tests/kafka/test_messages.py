"""Messages that are whole calls in JSON: what becomes a call, and why the rest does not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from examples.bank import app
from headrace import Config
from headrace.core.admission import Admission
from headrace.core.program import Program
from headrace.durability.inbox.batch_calls import read_calls
from headrace.durability.inbox.dead_letters import DEAD, dead_letter_names, read_dead_letters, write_dead_letters
from headrace.durability.inbox.inbox import ClosedBatch, write_segment
from headrace.durability.store import DirectoryStore


@pytest.fixture
def admission() -> Admission:
    return Admission(Program(app, Config()))


def closed(store: DirectoryStore, calls: list[bytes | None], keys: list[bytes | None] | None = None) -> ClosedBatch:
    columns: dict[str, Any] = {
        "call": pa.array(calls, pa.binary()),
        "id": pa.array([f"t/0/{at}" for at in range(len(calls))]),
    }
    if keys is not None:
        columns["key"] = pa.array(keys, pa.binary())
    return ClosedBatch("q", 0, "", [write_segment(store, "q", 0, 0, pa.table(columns))])


def test_a_message_is_a_call_with_its_own_id_and_key_or_those_of_its_row(tmp_path: Path, admission: Admission) -> None:
    store = DirectoryStore(tmp_path)
    calls = [
        {"function": "account.deposit", "key": "a", "args": [1], "request_id": "mine"},
        {"function": "account.transfer", "key": 5, "args": ["b", 2]},
        {"function": "account.deposit", "args": [3]},
        {"function": "account.deposit", "key": None, "args": [4], "request_id": None},
        {"function": "account.transfer", "key": 6, "args": {"amount": 7, "to": "c"}},
    ]
    batch = read_calls(
        store,
        closed(store, [json.dumps(call).encode() for call in calls], [b"x", b"x", b"k", "ä".encode(), None]),
        admission,
    )
    deposit, transfer = "account.deposit", "account.transfer"
    assert [entry.name for entry in batch.entries] == [deposit, transfer, deposit, deposit, transfer]
    assert batch.keys == ["a", 5, "k", "ä", 6]
    assert list(map(tuple, batch.args)) == [(1,), ("b", 2), (3,), (4,), ("c", 7)]
    assert batch.origin.ids == ["mine", "t/0/1", "t/0/2", "t/0/3", "t/0/4"]
    assert not batch.refused


REFUSED = (
    (None, "BadMessage", "the message is empty", "t/0/0"),
    (b"", "BadMessage", "the message is empty", "t/0/1"),
    (b"junk", "BadMessage", "not a call: JSON is malformed", "t/0/2"),
    (b"\xff\xfe", "BadMessage", "not a call", "t/0/3"),
    (b"[" * 100_000, "BadMessage", "not a call", "t/0/4"),
    (b'{"request_id": "r5", "key": "a"}', "BadMessage", "missing required field `function`", "r5"),
    (b'{"request_id": "r6", "function": "account.deposit", "amount": 5}', "BadMessage", "unknown field `amount`", "r6"),
    (b'{"function": "account.rob", "key": "a", "request_id": "r7"}', "UnknownFunction", "no function 'rob'", "r7"),
    (b'{"function": "account.deposit", "key": "a", "args": ["5"]}', "BadArguments", "amount", "t/0/8"),
    (b'{"function": "account.deposit", "args": [5]}', "BadKey", "None", "t/0/9"),
    (b'{"function": "account.deposit", "key": true, "args": [5]}', "BadMessage", r"\$.key", "t/0/10"),
    (b'{"function": "account.deposit", "key": 18446744073709551616, "args": [5]}', "BadKey", "64 bits", "t/0/11"),
    (
        b'{"function": "account.deposit", "key": "a", "args": [5], "request_id": 7}',
        "BadMessage",
        "request_id",
        "t/0/12",
    ),
    (json.dumps({"function": "account.deposit", "request_id": "x" * 300}).encode(), "TooLarge", "300 bytes", "t/0/13"),
    (json.dumps({"request_id": "x" * 300}).encode(), "BadMessage", "missing required", "t/0/14"),
    (
        b'{"function": "account.deposit", "key": "a", "args": {"sum": 5}}',
        "BadArguments",
        "no parameter 'sum'",
        "t/0/15",
    ),
    (b'{"function": "account.deposit", "key": "a", "args": {}}', "BadArguments", "needs 'amount'", "t/0/16"),
    (b'{"function": "account.deposit", "key": "a", "args": 5}', "BadMessage", r"\$.args", "t/0/17"),
)


def test_what_is_no_call_is_refused_alone_and_kept_with_the_reason(tmp_path: Path, admission: Admission) -> None:
    store = DirectoryStore(tmp_path)
    good = b'{"function": "account.deposit", "key": "a", "args": [5]}'
    made = closed(store, [message for message, *_ in REFUSED] + [good])
    batch = read_calls(store, made, admission)
    assert batch.keys == ["a"]
    assert list(batch.refused) == list(range(len(REFUSED)))
    write_dead_letters(store, made, batch)
    assert dead_letter_names(store) == [f"{DEAD}/q@000000000000"]
    for row, (message, kind, reason, request_id) in zip(
        read_dead_letters(store, dead_letter_names(store)[0]).to_pylist(), REFUSED, strict=True
    ):
        assert (row["error_type"], row["request_id"]) == (kind, request_id), row
        assert re.search(reason, row["error"]), row["error"]
        if message:
            assert row["args"] == message.decode(errors="replace")  # all of it, to be mended


def test_a_message_whose_key_is_no_text_is_refused(tmp_path: Path, admission: Admission) -> None:
    store = DirectoryStore(tmp_path)
    batch = read_calls(store, closed(store, [b'{"function": "account.deposit", "args": [5]}'], [b"\xff"]), admission)
    assert [failure.code for failure in batch.refused.values()] == ["bad_message"]
