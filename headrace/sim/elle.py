"""Checks that a history of list-append transactions is strictly serializable. It does so from outside, as Elle does
(Kingsbury and Alvaro, VLDB 2020): it uses no TID and no epoch, only when each request was sent and what it saw.

Lists make the order of writes visible: every value is appended once, so a list that was read names all its writers, in
order. From that follow the edges between transactions: ww (appended right before), wr (appended what the other one saw
last), rw (saw the list without what the other one appended next), rt (was answered before the other one was sent).
A cycle is an anomaly, named (after Adya) by the weakest level it breaks: G0, G1c, G-single, G2, each also with rt.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

APPEND, READ = "append", "read"
OK, ABORTED = "ok", "aborted"

Op = tuple[str, Any, Any]  # APPEND, key, value; READ, key, the list seen (None: nothing was there)
Graph = dict[int, dict[int, set[str]]]


class ElleTransaction(NamedTuple):
    """One row of a history. `asked` and `answered` are instants of one clock."""

    number: int
    ops: Sequence[Op]
    status: str
    asked: int
    answered: int


class Anomaly(NamedTuple):
    name: str
    explanation: str


def check(history: Iterable[ElleTransaction]) -> list[Anomaly]:
    """All anomalies of a history; none if it is strictly serializable."""
    rows = sorted(history, key=lambda row: row.asked)
    found = Lists(rows)
    graph: Graph = {row.number: {} for row in rows if row.status == OK}
    for before, after, kind in [*found.edges(), *real_time(rows)]:
        if before != after:
            graph[before].setdefault(after, set()).add(kind)
    return found.anomalies + [classify(graph, component) for component in strongly_connected(graph)]


class Lists:
    """What the reads show about each key: which transaction appended what, in which order."""

    def __init__(self, rows: list[ElleTransaction]) -> None:
        self.anomalies: list[Anomaly] = []
        self.committed = [row for row in rows if row.status == OK]
        self.writers: dict[tuple[Any, Any], ElleTransaction] = {}  # of (key, value)
        self.appends: dict[Any, list[Any]] = {}  # by key: what committed transactions appended
        self.own: dict[tuple[Any, int], list[Any]] = {}  # by key and transaction
        self.orders: dict[Any, list[Any]] = {}  # by key: the longest list read
        for row in rows:
            self._note_appends(row)
        self.reads = [(row, key, seen or []) for row in self.committed for key, seen in self._outer_reads(row)]
        for row, key, seen in self.reads:
            self._check_seen(row, key, seen)
        for _, key, seen in self.reads:
            if len(seen) > len(self.orders.setdefault(key, [])):
                self.orders[key] = seen
        for row, key, seen in self.reads:
            if self.orders[key][: len(seen)] != seen:
                self._report("incompatible order", f"{row.number} read {seen} of {key!r}, another {self.orders[key]}")

    def _report(self, name: str, explanation: str) -> None:
        self.anomalies.append(Anomaly(name, explanation))

    def _note_appends(self, row: ElleTransaction) -> None:
        for kind, key, value in row.ops:
            if kind == APPEND:
                if (key, value) in self.writers:
                    raise ValueError(f"{value!r} is appended to {key!r} twice: such a history cannot be judged")
                self.writers[key, value] = row
                self.own.setdefault((key, row.number), []).append(value)
                if row.status == OK:
                    self.appends.setdefault(key, []).append(value)

    def _outer_reads(self, row: ElleTransaction) -> list[tuple[Any, list[Any] | None]]:
        """What a transaction saw of others, by key; also checks that it saw its own appends."""
        outer: dict[Any, list[Any]] = {}
        mine: dict[Any, list[Any]] = {}
        for kind, key, value in row.ops:
            if kind == APPEND:
                mine.setdefault(key, []).append(value)
                continue
            seen, own = list(value or []), mine.get(key, [])
            if own and seen[-len(own) :] != own:
                self._report("internal", f"{row.number} read {seen} of {key!r} after it had appended {own}")
                continue
            seen = seen[: len(seen) - len(own)]
            if outer.setdefault(key, seen) != seen:
                self._report("internal", f"{row.number} read {outer[key]} of {key!r}, and then {seen}")
        return list(outer.items())

    def _check_seen(self, row: ElleTransaction, key: Any, seen: list[Any]) -> None:
        if len(set(seen)) < len(seen):
            self._report("duplicate", f"{row.number} read {seen} of {key!r}")
        for value in seen:
            writer = self.writers.get((key, value))
            if writer is None:
                self._report("garbage", f"{row.number} read {value!r} of {key!r}, which no transaction appended")
            elif writer.status != OK:
                self._report("G1a", f"{row.number} read {value!r} of {key!r}, which {writer.number} took back")
            elif writer is row:
                self._report("internal", f"{row.number} read {value!r} of {key!r} before it appended it")
        last = self.writers.get((key, seen[-1])) if seen else None
        if last is not None and self.own[key, last.number][-1] != seen[-1]:
            self._report("G1b", f"{row.number} read {seen} of {key!r}, in the middle of what {last.number} appended")

    def edges(self) -> Iterable[tuple[int, int, str]]:
        unseen = {key: [v for v in values if v not in self.orders.get(key, [])] for key, values in self.appends.items()}
        for key, order in self.orders.items():
            for before, after in itertools.pairwise(order):
                yield from self._edge(key, before, after, "ww")
            for value in unseen.get(key, []) if order else []:  # unread values come after all others
                yield from self._edge(key, order[-1], value, "ww")
        for row, key, seen in self.reads:
            if seen:
                writer = self.writers.get((key, seen[-1]))
                if writer is not None and writer.status == OK:
                    yield writer.number, row.number, "wr"
            order = self.orders[key]
            following = order[len(seen) : len(seen) + 1] or unseen.get(key, [])
            for value in following:
                writer = self.writers.get((key, value))
                if writer is not None and writer.status == OK:
                    yield row.number, writer.number, "rw"

    def _edge(self, key: Any, before: Any, after: Any, kind: str) -> Iterable[tuple[int, int, str]]:
        first, second = self.writers.get((key, before)), self.writers.get((key, after))
        if first is not None and second is not None and first.status == second.status == OK:
            yield first.number, second.number, kind


def real_time(rows: list[ElleTransaction]) -> Iterable[tuple[int, int, str]]:
    """Edges from a transaction that was answered to those sent later; without those that follow from others."""
    committed = [row for row in rows if row.status == OK]
    answers = sorted(committed, key=lambda row: row.answered)
    frontier: list[ElleTransaction] = []  # answered, and none that was sent after them is answered yet
    at = 0
    for row in committed:  # in the order they were sent
        while at < len(answers) and answers[at].answered < row.asked:
            done = answers[at]
            frontier = [other for other in frontier if other.answered >= done.asked] + [done]
            at += 1
        for done in frontier:
            yield done.number, row.number, "rt"


# --- cycles -----------------------------------------------------------------------------------------------------------

LEVELS = (("G0", {"ww"}, False), ("G1c", {"ww", "wr"}, False), ("G-single", {"ww", "wr"}, True))


def classify(graph: Graph, component: list[int]) -> Anomaly:
    """The weakest level that a cycle within these transactions breaks."""
    inside = set(component)
    for suffix, more in (("", set()), ("-realtime", {"rt"})):
        for name, kinds, with_rw in LEVELS:
            cycle = find_cycle(graph, inside, kinds | more, with_rw)
            if cycle is not None:
                return Anomaly(name + suffix, " → ".join(map(str, cycle)))
        cycle = find_cycle(graph, inside, {"ww", "wr", "rw"} | more, False)
        if cycle is not None:
            return Anomaly("G2" + suffix, " → ".join(map(str, cycle)))
    raise AssertionError("strongly connected, but without a cycle")


def find_cycle(graph: Graph, inside: set[int], kinds: set[str], with_rw: bool) -> list[int] | None:
    """A shortest cycle of edges of these kinds; with_rw: and exactly one rw edge, as its first."""
    for start in sorted(inside):
        for first, labels in sorted(graph[start].items()):
            if first in inside and labels & ({"rw"} if with_rw else kinds):
                path = shortest_path(graph, inside, kinds, first, start)
                if path is not None:
                    return [start, *path]
    return None


def shortest_path(graph: Graph, inside: set[int], kinds: set[str], start: int, goal: int) -> list[int] | None:
    came_from: dict[int, int] = {start: start}
    queue = [start]
    for node in queue:
        if node == goal:
            path = [node]
            while path[-1] != start:
                path.append(came_from[path[-1]])
            return path[::-1]
        for after, labels in sorted(graph[node].items()):
            if after in inside and after not in came_from and labels & kinds:
                came_from[after] = node
                queue.append(after)
    return None


def strongly_connected(graph: Graph) -> list[list[int]]:
    """Tarjan's components of more than one transaction, without recursion."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    found = []
    for root in graph:
        if root in index:
            continue
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        work = [(root, iter(graph[root]))]
        while work:
            node, edges = work[-1]
            for after in edges:
                if after not in index:
                    index[after] = low[after] = len(index)
                    stack.append(after)
                    on_stack.add(after)
                    work.append((after, iter(graph[after])))
                    break
                if after in on_stack:
                    low[node] = min(low[node], index[after])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    at = stack.index(node)
                    component, stack = stack[at:], stack[:at]
                    on_stack.difference_update(component)
                    if len(component) > 1:
                        found.append(sorted(component))
    return found
