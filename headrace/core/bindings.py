"""Bindings: the functions of a program as one executor runs them.

An entry (`core/program.py`) is shared by all executors. A binding belongs to one executor: it joins the entry with the
table of its operator and the context of the next call. Several executors may be alive over one state.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, Generic, TypeVar

from headrace.core.program import Entry, Program
from headrace.core.signature import never
from headrace.core.state import State, Table
from headrace.errors import Poisoned
from headrace.model.operator import Function


class Binding:
    """A function and its operator's table."""

    __slots__ = (
        "befores",
        "body",
        "codec",
        "context",
        "entry",
        "fits",
        "is_plain",
        "name",
        "news",
        "number",
        "operator",
        "placed",
        "quick",
        "run",
        "seal",
        "states",
        "table",
        "written",
    )

    def __init__(self, entry: Entry, table: Table, program: Program) -> None:
        self.entry, self.name, self.number = entry, entry.name, entry.number
        self.operator, self.fits, self.is_plain = entry.operator, entry.fits, entry.is_plain
        self.body, self.codec = entry.body, program.states[entry.operator.name]
        self.placed = program.placed.get(entry.operator.name)  # if it is not None, other keys are checked first
        self.quick, self.seal = entry.result.quick, entry.result.seal  # of results
        self.table, self.states = table, table.states
        self.written, self.befores, self.news = table.written, table.befores, table.news
        self.context: Any = None  # of the running or the next call
        self.run: Callable[..., Any] = never  # the body with this context

    def bind(self, context: Any) -> None:
        self.context, self.run = context, MethodType(self.body, context)

    def decree(self, why: str) -> None:
        """From now on, the function fails: this binding is for a transaction that aborts by decree."""

        def fail(context: Any, *args: Any) -> Any:
            raise Poisoned(why)

        self.body, self.is_plain = fail, True

    def __repr__(self) -> str:
        return f"<binding of {self.name}>"


B = TypeVar("B", bound=Binding)


class Bindings(Generic[B]):
    """All bindings of an executor: by the number of the entry, and by function as in `Program.functions`."""

    def __init__(self, program: Program, state: State, bind: Callable[[Entry, Table], B]) -> None:
        self.program, self.state, self.version = program, state, state.version
        self.by_number = [bind(entry, state.tables[entry.operator.name]) for entry in program.entries]
        self.functions: dict[Function | str, B] = {
            function: self.by_number[entry.number] for function, entry in program.functions.items()
        }

    def refresh(self) -> None:
        """Call it before an epoch: tables may be watched, or deltas taken, that were not before."""
        self.state.sort_out()
        if self.version != self.state.version:
            self.version = self.state.version
            for binding in self.by_number:
                table = binding.table
                binding.written, binding.befores, binding.news = table.written, table.befores, table.news

    def of(self, entries: list[Entry]) -> list[B]:
        """For each entry its binding. The entries may be those of another program of the same app."""
        by_number = self.by_number
        if entries and entries.count(entries[0]) == len(entries):  # as in most epochs
            return [by_number[entries[0].number]] * len(entries)
        return [by_number[entry.number] for entry in entries]
