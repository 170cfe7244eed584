"""Scenarios: a story as a text, of what goes into a cluster and what must come out of it.

A file in `scenarios/` has blocks, with an empty line between them: commands, a line of four dashes, and what comes out
of them. Lines that begin with `#` tell the story. The commands:

    cluster workers=3 calls_max=5   a new cluster with these settings, of which only the coordinator has started
    hold 1->3 0->2                  from now on these links deliver nothing; 0 is the coordinator
    release 1->3                    they do again; without a link, all do
    submit                          a batch; each indented line below it is a call or calls: put(a{n}@1, 5) * 3
    deliver                         what is under way and not held arrives, until a reply leaves; the clock stands still
    rest                            all of it arrives, and at no time a worker asks to go on that has nothing to do
    pass 2ms                        the clock goes on, and nothing else happens
    wait 10ms                       time passes until a reply leaves, and no longer than that
    settle                          everything happens, also what waits for its time
    sent Run                        the epochs of all messages of this kind
    rows Failed                     the transactions of all rows of this kind that workers sent each other
    state                           all entities; and nothing else is left on the workers

`a@1` is a key that worker 1 owns. What comes out are replies as they leave (`batch 0: ok 5`), what functions note
(`rewrite sees 1`), and at the end of a block the links on which something is held back; `-` if there is nothing.

HEADRACE_REWRITE=1 writes what comes out into the files, to be read before it is committed.
"""

from __future__ import annotations

import ast
import difflib
import itertools
import os
import re
from pathlib import Path
from typing import Any

from headrace.wire import messages
from tests.cluster import Cluster, Link, on
from tests.core.scenario_app import app, functions, noted

FOLDER = Path(__file__).parent / "scenarios"
DASHES = "----"
STEPS_MAX = 200


class Stage:
    """Carries out the commands of one scenario."""

    def __init__(self) -> None:
        self.cluster: Any = None
        self.names: dict[str, str] = {}  # key -> as it is written in the text
        self.told = 0  # batches whose replies were told
        noted.clear()

    def do(self, lines: list[str]) -> list[str]:
        """Carry out the commands of a block; returns what comes out."""
        out: list[str] = []
        while lines:
            verb, *words = lines.pop(0).split()
            while lines and lines[0].startswith(" "):
                words.append(lines.pop(0).strip())
            out += getattr(self, f"do_{verb}")(*words) or ()
            out += self.news()
        held = [f"{a}->{b}" for a, b in sorted(self.cluster.held) if self.cluster.links.get((a, b))]
        return [*out, *([f"held back: {' '.join(held)}"] if held else [])] or ["-"]

    def news(self) -> list[str]:
        """What has come out since it was last asked for. What was noted by several runs is told once."""
        lines = [line for line, _ in itertools.groupby(noted)]
        noted.clear()
        for batch in range(self.told, self.cluster.submitted):
            if batch not in self.cluster.replies:
                break
            self.told += 1
            lines += [f"batch {batch}: {self.show_reply(reply)}" for reply in self.cluster.replies[batch]]
        counted = [(line, len(list(same))) for line, same in itertools.groupby(lines)]
        return [f"{line} ({count} times)" if count > 1 else line for line, count in counted]

    # --- text ---

    def read_call(self, text: str) -> list[tuple[Any, ...]]:
        """`put(a{n}@1, 5) * 2` -> put(a0@1, 5) and put(a1@1, 5), as (function, key, 5) each."""
        found = re.fullmatch(r"(\w+)\((.*)\)(?: \* (\d+))?", text)
        assert found is not None, f"no call: {text}"
        given = [found[2].replace("{n}", str(n)) for n in range(int(found[3] or 1))]
        given = [re.sub(r"(\w+)@(\d+)", lambda key: repr(self.key(key[1], int(key[2]))), each) for each in given]
        return [(functions[found[1]], *ast.literal_eval(f"({each},)")) for each in given]

    def key(self, name: str, worker: int) -> str:
        key = on(worker, name, self.cluster.coordinator.workers)
        self.names[key] = f"{name}@{worker}"
        return key

    def show(self, value: Any) -> str:
        return re.sub(r"'(\w+)'", lambda text: self.names.get(text[1], text[0]), repr(value))

    def show_reply(self, reply: Any) -> str:
        return f"ok {self.show(reply.result)}" if reply.ok else f"{reply.status}, {reply.failure.message}"

    @staticmethod
    def links(words: tuple[str, ...]) -> list[Link]:
        return [(int(word[0]), int(word[-1])) for word in words]

    # --- commands ---

    def do_cluster(self, *settings: str) -> None:
        self.cluster = Cluster(app, **{name: int(value) for name, value in (each.split("=") for each in settings)})

    def do_hold(self, *links: str) -> None:
        self.cluster.hold(*self.links(links))

    def do_release(self, *links: str) -> None:
        self.cluster.release(*self.links(links))

    def do_submit(self, *calls: str) -> None:
        self.cluster.send([call for text in calls for call in self.read_call(text)])

    def do_deliver(self) -> None:
        while len(self.cluster.replies) <= self.told and self.cluster.deliver():
            pass

    def do_rest(self) -> list[str] | None:
        for _ in range(STEPS_MAX):
            if not self.cluster.deliver():
                return None
            for node in self.cluster.timers:
                if node and self.cluster.timers[node] <= self.cluster.now_us:
                    worker = self.cluster.workers[node]
                    if not (worker.ordered.has_work() or worker.has_work()):
                        return [f"worker {node} wants to go on, and has nothing to do"]
        return ["it does not come to rest"]

    def do_pass(self, time: str) -> None:
        self.cluster.now_us += 1_000 * int(time.removesuffix("ms"))

    def do_wait(self, time: str) -> None:
        until_us = self.cluster.now_us + 1_000 * int(time.removesuffix("ms"))
        while len(self.cluster.replies) <= self.told and self.cluster.now_us < until_us:
            self.cluster.now_us = min(self.cluster.timers.values())
            self.cluster.deliver_all()

    def do_settle(self) -> None:
        self.cluster.settle()

    def do_sent(self, kind: str) -> list[str]:
        epochs = sorted({body.epoch for body in self.cluster.bodies(getattr(messages, kind))})
        return [f"{kind}: {', '.join(f'epoch {epoch}' for epoch in epochs) or '-'}"]

    def do_rows(self, kind: str) -> list[str]:
        tids = sorted({row.tid for row in self.cluster.rows(getattr(messages, kind))})
        return [f"{kind}: {', '.join(f'TID {tid}' for tid in tids) or '-'}"]

    def do_state(self) -> list[str]:
        found = {self.names.get(key, repr(key)): state for (_, key), state in self.cluster.state().items()}
        self.cluster.check_left_behind()
        return [f"{name}: {self.show(found[name])}" for name in sorted(found)]


def play(text: str) -> tuple[str, Exception | None]:
    """The text with what comes out now, as far as it goes; and the exception that ended it."""
    stage, blocks = Stage(), []
    for block in text.strip("\n").split("\n\n"):
        lines = block.split("\n")
        if DASHES not in lines:
            blocks.append(block)
            continue
        head = lines[: lines.index(DASHES) + 1]
        try:
            out = stage.do([line for line in head if not line.startswith(("#", DASHES))])
        except Exception as error:
            return "\n\n".join([*blocks, "\n".join([*head, repr(error)])]), error
        blocks.append("\n".join([*head, *out]))
    return "\n\n".join(blocks) + "\n", None


def played(name: str) -> str:
    """A scenario, with what comes out now."""
    return play((FOLDER / f"{name}.txt").read_text())[0]


def check_scenario(name: str) -> None:
    file = FOLDER / f"{name}.txt"
    text = file.read_text()
    found, error = play(text)
    if os.environ.get("HEADRACE_REWRITE") and error is None:
        file.write_text(found)
    elif found != text:
        lines = difflib.unified_diff(text.split("\n"), found.split("\n"), file.name, "what came out", n=99, lineterm="")
        raise AssertionError("\n".join(lines)) from error
