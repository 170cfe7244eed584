"""What happened, as seen from outside: every request with its time, and every answer that was sent.

Instants are numbers of one counter, so no two are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from headrace.wire.messages import Answers, Failure, id_of
from headrace.wire.renewal import renew
from headrace.wire.values import Values

_encode = msgspec.msgpack.Encoder().encode


class HistoryRow:
    """One request."""

    __slots__ = ("answered", "call", "data", "epoch", "failure", "is_bad", "request_id", "result", "sent", "tid")

    def __init__(self, request_id: str, call: tuple[Any, ...], sent: int, is_bad: bool) -> None:
        self.request_id, self.call, self.sent = request_id, call, sent
        self.is_bad = is_bad  # it must be refused
        self.answered = 0  # when its first answer left
        self.data = b""  # the answer as bytes
        self.tid: int | None = None
        self.epoch: int | None = None
        self.result: Any = None
        self.failure: Failure | None = None

    @property
    def status(self) -> str:
        if not self.answered:
            return "unanswered"
        return "ok" if self.failure is None else "refused" if self.tid is None else "aborted"


class StateRead:
    """One read of state, and its result."""

    __slots__ = ("asked", "entities", "found", "key", "operator", "process")

    def __init__(self, operator: str | None, key: Any, asked: int, process: Any) -> None:
        self.operator, self.key, self.asked, self.process = operator, key, asked, process  # process: who was asked
        self.found = 0
        self.entities: list[Any] = []

    def is_over(self) -> bool:
        """Whether it has a result, or never will have one."""
        return self.found > 0 or not self.process.is_alive


class History:
    def __init__(self, values: Values, violate: Callable[[str], None]) -> None:
        self.values, self.violate = values, violate  # values: of the newest version of the app
        self.instant = 0
        self.rows: dict[str, HistoryRow] = {}
        self.reads: list[StateRead] = []
        self.kept: dict[int, int] = {}  # when each epoch was first known to be final and durable
        self.repeats = 0  # answers for a request that had been answered before

    def now(self) -> int:
        self.instant += 1
        return self.instant

    def keep(self, epoch: int) -> None:
        if epoch not in self.kept:
            self.kept[epoch] = self.now()

    def ask(self, request_id: str, call: tuple[Any, ...], is_bad: bool) -> None:
        if request_id not in self.rows:
            self.rows[request_id] = HistoryRow(request_id, call, self.now(), is_bad)

    def answer(self, answers: Answers) -> None:
        """Answers are sent. A request id must get the same answer each time; a field that an older version of the app
        did not have counts as its default."""
        columns = (answers.tids, answers.epochs, answers.results)
        lengths = {*map(len, columns), *([] if isinstance(answers.ids, str) else [len(answers.ids)])}
        if len(lengths) > 1:
            self.violate(f"the answers to {answers.ids} have columns of different lengths: {columns!r}")
            return
        for at, (tid, epoch, result) in enumerate(zip(answers.tids, answers.epochs, answers.results, strict=True)):
            request_id, failure = id_of(answers.ids, at), answers.failures.get(at)
            row = self.rows.get(request_id)
            if row is None:
                self.violate(f"an answer for {request_id!r}, which no client sent")
                continue
            data = _encode((tid, epoch, renew(result, self.values), failure))
            if row.answered:
                self.repeats += 1
                if data != row.data:
                    self.violate(f"{request_id} was answered {row.data!r}, and then {data!r}")
                continue
            row.answered, row.data = self.now(), data
            row.tid, row.epoch, row.failure, row.result = tid, epoch, failure, self.values.unseal(result)

    def in_order(self) -> list[HistoryRow]:
        """The logged requests, in the order of the log."""
        return sorted((row for row in self.rows.values() if row.tid is not None), key=lambda row: row.tid or 0)
