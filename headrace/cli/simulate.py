"""`headrace sim`: one seed in full, or many on all cores, each core with its own process."""

from __future__ import annotations

import faulthandler
import hashlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import Progress

from headrace.sim.parameters import draw
from headrace.sim.run import PROBES, RunReport, simulate
from headrace.sim.shrink import shrink

SHOWN_MAX = 10  # violations printed
SEED_S_MAX = 300  # a seed that takes longer hangs, also on a busy machine


def sim_one(seed: int, as_json: bool, trace: bool, shrinks: bool) -> bool:
    """Repeat one seed and print everything about it."""
    be_quiet()
    began_s = time.monotonic()
    report = shrink(draw(seed))[1] if shrinks else simulate(seed, print if trace else None)
    seconds = time.monotonic() - began_s
    if as_json:
        print(json.dumps(summary([report], seconds)))
        return report.is_clean
    out = Console(highlight=False, soft_wrap=True)
    out.print(f"seed        {report.seed}", markup=False)
    for name, value in report.parameters.items():
        out.print(f"{name:<11} {value}", markup=False)
    for title, counts in (("faults hit", report.faults), ("probes hit", report.probes)):
        out.print(f"{title:<11} {', '.join(f'{name} {count}' for name, count in counts.items())}", markup=False)
    out.print(f"size        {report.transactions} transactions, {report.events} events, {report.effects} effects")
    out.print(f"digest      {report.digest}")
    for violation in report.violations:
        out.print(f"violation   {violation}", markup=False, style="red")
    out.print(f"verdict     {'clean' if report.is_clean else 'VIOLATED'}", style="green" if report.is_clean else "red")
    return report.is_clean


def sim_many(first: int, seeds: int, jobs: int, as_json: bool) -> bool:
    """Run `seeds` seeds from `first` on; the last line printed has all results."""
    began_s = time.monotonic()
    be_quiet()
    jobs = min(jobs or os.cpu_count() or 1, seeds)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("simulating", total=seeds)
        reports = gather(first, seeds, jobs, lambda: progress.advance(bar))
    whole = summary(reports, time.monotonic() - began_s)
    if as_json:
        print(json.dumps(whole))
    else:
        show(whole)
    return not whole["violations"]


def be_quiet() -> None:
    """Failures of a simulated disk are not worth a log line."""
    logging.getLogger("headrace.durability").setLevel(logging.CRITICAL)


def sim_part(seeds: range) -> None:
    """The body of one of several processes: prints a line for each seed. A seed that hangs ends it."""
    be_quiet()
    for seed in seeds:
        faulthandler.dump_traceback_later(SEED_S_MAX, exit=True)
        sys.stdout.buffer.write(msgspec.json.encode(guarded(seed)) + b"\n")
        sys.stdout.buffer.flush()


def guarded(seed: int) -> RunReport:
    """An error of the simulator itself is a violation, too."""
    try:
        return simulate(seed)
    except Exception as error:
        return RunReport(seed, draw(seed).described(), [f"the simulator failed: {error!r}"], {}, {}, "", 0, 0, 0, 0)


def gather(first: int, seeds: int, jobs: int, advance: Callable[[], None]) -> list[RunReport]:
    reports: list[RunReport] = []

    def run(part: range) -> None:
        while part:
            for report in run_part(part):
                reports.append(report)
                advance()
                part = part[1:]
            if part:
                why = f"its process ended, or it took more than {SEED_S_MAX} seconds"
                reports.append(RunReport(part[0], draw(part[0]).described(), [why], {}, {}, "", 0, 0, 0, 0))
                advance()
                part = part[1:]

    threads = [
        threading.Thread(target=run, args=(range(first + job, first + seeds, jobs),), daemon=True)
        for job in range(jobs)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return reports


def run_part(seeds: range) -> Iterator[RunReport]:
    """Run seeds in a process of their own."""
    numbers = f"{seeds.start}, {seeds.stop}, {seeds.step}"
    script = f"from headrace.cli.simulate import sim_part; sim_part(range({numbers}))"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as part:
        assert part.stdout is not None
        for line in part.stdout:
            yield msgspec.json.decode(line, type=RunReport)


def summary(reports: list[RunReport], seconds: float) -> dict[str, Any]:
    """All runs in one object. The same seeds give the same object, however they are run, except for the seconds."""
    digest = hashlib.blake2b(digest_size=16)
    faults: Counter[str] = Counter()
    probes: Counter[str] = Counter(dict.fromkeys(PROBES, 0))
    found = []
    reports = sorted(reports, key=lambda report: report.seed)
    for report in reports:
        digest.update(f"{report.seed} {report.digest}\n".encode())
        faults.update(report.faults)
        probes.update(report.probes)
        found += [{"seed": report.seed, "violation": violation} for violation in report.violations]
    return {
        "seeds": len(reports),
        "violations": len(found),
        "found": found,
        "faults": dict(sorted(faults.items())),
        "probes": dict(sorted(probes.items())),
        "transactions": sum(report.transactions for report in reports),
        "events": sum(report.events for report in reports),
        "digest": digest.hexdigest(),
        "seconds": round(seconds, 3),
    }


def show(whole: dict[str, Any]) -> None:
    out = Console(highlight=False, soft_wrap=True)
    for title in ("faults", "probes"):
        out.print(f"{title:<11} {', '.join(f'{name} {count}' for name, count in whole[title].items())}", markup=False)
    missed = [name for name in PROBES if not whole["probes"][name]]
    if missed:
        out.print(f"not seen    {', '.join(missed)}", markup=False, style="yellow")
    for violation in whole["found"][:SHOWN_MAX]:
        out.print(f"violation   seed {violation['seed']}: {violation['violation']}", markup=False, style="red")
    out.print(f"digest      {whole['digest']}")
    out.print(f"runs        {whole['seeds']} seeds, {whole['transactions']} transactions, {whole['events']} events")
    failed = len({violation["seed"] for violation in whole["found"]})
    verdict = "clean" if not failed else f"{failed} seeds VIOLATED; repeat one with headrace sim --seed N"
    out.print(f"verdict     {verdict}, in {whole['seconds']:.1f} s", style="red" if failed else "green")
