"""`headrace sim --app`: a user's app in the simulator, with the user's invariants. What fails is printed as a test."""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from rich.progress import Progress

from headrace.cli.simulate import SEED_S_MAX, be_quiet
from headrace.errors import HeadraceError, ModelError
from headrace.runtime.loading import import_module, load
from headrace.sim.user_app import UserRun
from headrace.testing.given_calls import calls_from
from headrace.testing.shrunk_history import as_test, shrink_history

SHRUNK_MAX = 1  # failing seeds that are made smaller: --seed N does it for another one


class AppTargets(msgspec.Struct):
    """What the command was given, as `module:attribute`."""

    app: str
    calls: str | None = None
    invariants: list[str] = []

    def run(self, seed: int) -> UserRun:
        draw = None if self.calls is None else calls_from(attribute(self.calls, "--calls"))(seed)
        return UserRun(load(self.app), seed, draw, self.functions())

    def functions(self) -> list[Any]:
        found = [attribute(target, "--invariant") for target in self.invariants]
        for target, function in zip(self.invariants, found, strict=True):
            if not callable(function):
                raise ModelError(f"--invariant {target} is {function!r}; it must be a function of the state")
        return found


class AppReport(msgspec.Struct):
    """One seed."""

    seed: int
    violations: list[str]
    transactions: int = 0
    faults: dict[str, int] = {}
    probes: dict[str, int] = {}
    raised: dict[str, int] = {}  # by functions, other than Abort
    digest: str = ""


class Found(NamedTuple):
    """A seed that failed, made smaller."""

    report: AppReport
    test: str
    is_verified: bool  # the test fails


def attribute(target: str, option: str) -> Any:
    module_name, colon, name = target.partition(":")
    if not colon or not module_name or not name:
        raise ModelError(f"{option} {target!r}: give module:attribute, as in examples.auction:money_is_conserved")
    module = import_module(module_name)
    if not hasattr(module, name):
        raise ModelError(f"{option} {target}: module {module_name!r} has no {name!r}")
    return getattr(module, name)


def sim_app(targets: AppTargets, seed: int | None, first: int, seeds: int, jobs: int, as_json: bool) -> bool:
    """Run one seed or many. True if all is well."""
    be_quiet()
    began_s = time.monotonic()
    targets.run(seed or first)  # what cannot be loaded or drawn is refused here
    numbers = range(first, first + seeds) if seed is None else range(seed, seed + 1)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("simulating", total=len(numbers))
        reports = gather(targets, numbers, jobs or os.cpu_count() or 1, lambda: progress.advance(bar))
    failed = [report for report in reports if report.violations]
    found = [smaller(targets, report) for report in failed[:SHRUNK_MAX]]
    seconds = time.monotonic() - began_s
    if as_json:
        print(json.dumps(summary(reports, found, seconds)))
    else:
        tell(targets, reports, found, seconds)
    return not failed


def look(targets: AppTargets, seed: int) -> AppReport:
    run = targets.run(seed)
    report = run.report()
    raised = dict(run.workload.raised.most_common(10))
    return AppReport(seed, report.violations, report.transactions, report.faults, report.probes, raised, report.digest)


def smaller(targets: AppTargets, report: AppReport) -> Found:
    """Run the seed again, and make it a test. A seed that hangs is left alone."""
    if not report.digest:
        return Found(report, "", False)
    run = targets.run(report.seed)
    run.report()
    history = shrink_history(load(targets.app), targets.functions(), run)
    return Found(report, as_test(history, targets.app, targets.invariants), history.verdict is not None)


# --- many seeds, in processes -----------------------------------------------------------------------------------------


def gather(targets: AppTargets, seeds: range, jobs: int, advance: Any) -> list[AppReport]:
    reports: list[AppReport] = []
    jobs = min(jobs, len(seeds))

    def take(part: range) -> None:
        while part:
            for report in run_part(targets, part):
                reports.append(report)
                advance()
                part = part[1:]
            if part:
                why = f"its process ended, or it took more than {SEED_S_MAX} seconds: does a function never return?"
                reports.append(AppReport(part[0], [why]))
                advance()
                part = part[1:]

    threads = [threading.Thread(target=take, args=(seeds[job::jobs],), daemon=True) for job in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(reports, key=lambda report: report.seed)


def run_part(targets: AppTargets, seeds: range) -> Iterator[AppReport]:
    """Run seeds in a process of their own. Sets have the same order in each."""
    given = msgspec.json.encode((targets, [*seeds])).decode()
    script = "import sys; from headrace.cli.simulate_app import run_seeds; run_seeds(sys.argv[1])"
    environment = os.environ | {"PYTHONHASHSEED": "0"}
    with subprocess.Popen([sys.executable, "-c", script, given], stdout=subprocess.PIPE, env=environment) as part:
        assert part.stdout is not None
        for line in part.stdout:
            if line.startswith(b"{"):  # the app may print
                yield msgspec.json.decode(line, type=AppReport)


def run_seeds(given: str) -> None:
    """The body of one of several processes: prints a line for each seed. A seed that hangs ends it."""
    be_quiet()
    targets, seeds = msgspec.json.decode(given, type=tuple[AppTargets, list[int]])
    for seed in seeds:
        faulthandler.dump_traceback_later(SEED_S_MAX, exit=True)
        try:
            report = look(targets, seed)
        except HeadraceError as error:
            report = AppReport(seed, [f"{error.code}: {error}"])
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
        sys.stdout.buffer.flush()


# --- what is told -----------------------------------------------------------------------------------------------------


def summary(reports: list[AppReport], found: list[Found], seconds: float) -> dict[str, Any]:
    faults: Counter[str] = Counter()
    probes: Counter[str] = Counter()
    raised: Counter[str] = Counter()
    for report in reports:
        faults.update(report.faults)
        probes.update(report.probes)
        raised.update(report.raised)
    tests = {each.report.seed: {"test": each.test, "is_verified": each.is_verified} for each in found}
    return {
        "seeds": len(reports),
        "violations": sum(len(report.violations) for report in reports),
        "found": [
            {"seed": report.seed, "violation": report.violations[0], **tests.get(report.seed, {})}
            for report in reports
            if report.violations
        ],
        "transactions": sum(report.transactions for report in reports),
        "faults": dict(sorted(faults.items())),
        "probes": dict(sorted(probes.items())),
        "raised": dict(sorted(raised.items())),
        "seconds": round(seconds, 3),
    }


def tell(targets: AppTargets, reports: list[AppReport], found: list[Found], seconds: float) -> None:
    whole = summary(reports, found, seconds)
    out = Console(highlight=False, soft_wrap=True)
    out.print(f"faults      {', '.join(f'{name} {count}' for name, count in whole['faults'].items())}", markup=False)
    outcomes = ", ".join(f"{name} {whole['probes'].get(name, 0)}" for name in ("ok", "aborted", "timers fired"))
    out.print(f"calls       {outcomes}", markup=False)
    for what, count in whole["raised"].items():
        out.print(f"raised      {what} ({count} times)", markup=False, style="yellow")
    for each in found:
        out.print(f"violation   seed {each.report.seed}: {each.report.violations[0]}", markup=False, style="red")
        if each.test:
            is_so = "this test fails as the run did:" if each.is_verified else "only the seed repeats it; its calls:"
            out.print(f"history     {is_so}", markup=False)
            out.print(f"\n{each.test}\n", markup=False)
    failed = sum(bool(report.violations) for report in reports)
    out.print(f"runs        {len(reports)} seeds, {whole['transactions']} transactions")
    again = f"headrace sim --app {targets.app} --seed N, with the same options"
    verdict = "clean" if not failed else f"{failed} of {len(reports)} seeds VIOLATED; repeat one with {again}"
    out.print(f"verdict     {verdict}, in {seconds:.1f} s", style="red" if failed else "green", markup=False)
