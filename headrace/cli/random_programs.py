"""`headrace sim --programs`: random programs on workers, as many as the time allows, on all cores."""

from __future__ import annotations

import faulthandler
import gc
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import Progress

from headrace.sim.cases import CaseVerdict, Judge, draw_case, shrink

CASE_S_MAX = 600  # a case that takes longer hangs
HANGS = "hangs"
SHRUNK_MAX = 20  # seeds whose cases are shrunk right away


class Tally(msgspec.Struct):
    """The results of many cases."""

    cases: int = 0
    transactions: int = 0
    calls: int = 0
    runs: int = 0
    messages: int = 0
    runs_per_call_max: float = 0.0
    messages_per_call_max: float = 0.0
    found: list[dict[str, Any]] = []
    drawn: dict[str, int] = {}

    def add(self, verdict: CaseVerdict) -> None:
        self.cases += 1
        self.transactions += verdict.transactions
        self.calls += verdict.calls
        self.runs += verdict.runs
        self.messages += verdict.messages
        if verdict.is_usual:
            self.runs_per_call_max = max(self.runs_per_call_max, round(verdict.runs_per_call, 2))
            self.messages_per_call_max = max(self.messages_per_call_max, round(verdict.messages_per_call, 2))
        self.found += [{"seed": verdict.seed, "violation": violation} for violation in verdict.violations]
        self.drawn = dict(Counter(self.drawn) + Counter(verdict.drawn))

    def summary(self, seconds: float) -> dict[str, Any]:
        return {
            "cases": self.cases,
            "transactions": self.transactions,
            "violations": len(self.found),
            "found": self.found,
            "calls": self.calls,
            "runs_per_call": round(self.runs / max(1, self.calls), 3),
            "runs_per_call_max": self.runs_per_call_max,
            "messages_per_call": round(self.messages / max(1, self.calls), 3),
            "messages_per_call_max": self.messages_per_call_max,
            "drawn": dict(sorted(self.drawn.items())),
            "seconds": round(seconds, 1),
        }


def programs_one(seed: int, as_json: bool, shrinks: bool) -> bool:
    """Repeat one case and print everything about it."""
    judge, case = Judge(), draw_case(seed)
    case, verdict = shrink(judge, case) if shrinks else (case, judge.judge(case))
    if as_json:
        print(json.dumps(case.described() | msgspec.to_builtins(verdict)))
        return not verdict.violations
    out = Console(highlight=False, soft_wrap=True)
    for name, value in case.described().items():
        out.print(f"{name:<11} {value}", markup=False)
    out.print(f"size        {verdict.transactions} transactions, {verdict.calls} calls, {verdict.runs} runs")
    for violation in verdict.violations:
        out.print(f"violation   {violation}", markup=False, style="red")
    is_clean = not verdict.violations
    out.print(f"verdict     {'clean' if is_clean else 'VIOLATED'}", style="green" if is_clean else "red")
    return is_clean


def programs_many(first: int, seconds: float, jobs: int, as_json: bool) -> bool:
    """Run cases from `first` on for this many seconds; the last line printed has all results."""
    began_s = time.monotonic()
    tally, lock = Tally(), threading.Lock()
    jobs = jobs or os.cpu_count() or 1

    def take(job: int, show: Any) -> None:
        for verdict in run_part(first + job, jobs, began_s + seconds):
            with lock:
                tally.add(verdict)
                show()

    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("running", total=seconds)

        def show() -> None:
            progress.update(bar, completed=time.monotonic() - began_s)

        threads = [threading.Thread(target=take, args=(job, show), daemon=True) for job in range(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    make_smaller(tally.found)
    whole = tally.summary(time.monotonic() - began_s)
    if as_json:
        print(json.dumps(whole))
    else:
        tell(whole)
    return not whole["violations"]


def make_smaller(found: list[dict[str, Any]]) -> None:
    """Add to each violation a smaller case that shows it: once per seed, and not for a case that hangs."""
    by_seed = {each["seed"]: each for each in found if not each["violation"].startswith(HANGS)}
    for seed in list(by_seed)[:SHRUNK_MAX]:  # the others on request: --seed N --shrink
        case, verdict = shrink(Judge(), draw_case(seed))
        by_seed[seed]["shrunk"] = case.described() | {"violations": verdict.violations}


def run_part(first: int, step: int, until_s: float) -> Iterator[CaseVerdict]:
    """Run every `step`th case from `first` on in its own process. A case that hangs is a violation."""
    seed = first
    while time.monotonic() < until_s:
        script = f"from headrace.cli.random_programs import run_cases; run_cases({seed}, {step}, {until_s})"
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as part:
            assert part.stdout is not None
            for line in part.stdout:
                yield msgspec.json.decode(line, type=CaseVerdict)
                seed += step
        if part.returncode:
            yield CaseVerdict(seed, [f"{HANGS}: its process ended, or it took more than {CASE_S_MAX} seconds"])
            seed += step


def run_cases(first: int, step: int, until_s: float) -> None:
    """The body of one of several processes: prints a line for each case, and runs at least one, however late it
    starts."""
    judge = Judge()
    gc.disable()
    for count, seed in enumerate(itertools.count(first, step), start=1):
        if count > 1 and time.monotonic() >= until_s:
            return
        faulthandler.dump_traceback_later(CASE_S_MAX, exit=True)
        sys.stdout.buffer.write(msgspec.json.encode(judge.judge(draw_case(seed))) + b"\n")
        sys.stdout.buffer.flush()
        if count % 20 == 0:
            gc.collect()


def tell(whole: dict[str, Any]) -> None:
    out = Console(highlight=False, soft_wrap=True)
    out.print(f"drawn       {', '.join(f'{name} {count}' for name, count in whole['drawn'].items())}", markup=False)
    for found in whole["found"]:
        out.print(f"violation   seed {found['seed']}: {found['violation']}", markup=False, style="red")
        for name, value in found.get("shrunk", {}).items():
            out.print(f"            {name:<9} {value}", markup=False)
    for title, end in (("for each call of the loop", ""), ("at most, in one case", "_max")):
        runs, messages = whole[f"runs_per_call{end}"], whole[f"messages_per_call{end}"]
        out.print(f"work        {runs} runs and {messages} messages {title}")
    verdict = "clean" if not whole["violations"] else "VIOLATED; repeat one with headrace sim --programs --seed N"
    size = f"{whole['cases']:,} cases, {whole['transactions']:,} transactions in {whole['seconds']} s"
    out.print(f"verdict     {verdict}, {size}", style="red" if whole["violations"] else "green")
