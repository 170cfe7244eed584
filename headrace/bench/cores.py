"""Which parts use the cores: processor time of this process's threads and of all its children, by purpose."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
THREADS = {"headrace-intake": "intake", "headrace-keeper": "keeper", "headrace-log": "log"}
COMPILERS = ("C1 Compiler", "C2 Compiler", "Sweeper")


class Stat(NamedTuple):
    name: str
    parent: int
    used_s: float
    children_s: float  # of children that have ended


def stat(path: Path) -> Stat:
    ticks = os.sysconf("SC_CLK_TCK")
    text = path.read_text()
    name, rest = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()
    user, system, gone_user, gone_system = (int(each) / ticks for each in rest[11:15])
    return Stat(name, int(rest[1]), user + system, gone_user + gone_system)


def used(engine: str) -> dict[str, float]:
    """Seconds so far; empty if the system does not report them. `engine` is the name of the engine's thread."""
    found: dict[str, float] = defaultdict(float)
    if not (PROC / "self" / "task").exists():
        return found
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    for task in (PROC / "self" / "task").iterdir():
        name = names.get(int(task.name), "")
        found["engine" if name == engine else THREADS.get(name, "driver")] += read(task).used_s
    for process in descendants(os.getpid()):
        own = read(PROC / str(process))
        if own.name != "java":
            found["tasks"] += own.used_s + own.children_s
            continue
        for task in tasks_of(process):
            told = read(task)
            is_compiler = told.name.startswith(COMPILERS)
            found["compiling" if is_compiler else "jvm"] += told.used_s
    return found


def read(place: Path) -> Stat:
    try:
        return stat(place / "stat")
    except OSError:  # it has ended
        return Stat("", 0, 0.0, 0.0)


def tasks_of(process: int) -> list[Path]:
    try:
        return list((PROC / str(process) / "task").iterdir())
    except OSError:
        return []


def descendants(process: int) -> list[int]:
    children = defaultdict(list)
    for place in PROC.iterdir():
        if place.name.isdecimal():
            children[read(place).parent].append(int(place.name))
    found, waiting = [], list(children[process])
    while waiting:
        each = waiting.pop()
        found.append(each)
        waiting += children[each]
    return found


def between(before: dict[str, float], after: dict[str, float], seconds: float) -> dict[str, float]:
    """How many cores each part used in between."""
    return {name: round(max(0.0, after[name] - before.get(name, 0.0)) / seconds, 2) for name in sorted(after)}
