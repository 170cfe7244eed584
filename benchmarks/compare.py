"""Compares two checkouts of Headrace: their benchmarks in alternating laps of one run.

    python benchmarks/compare.py OLD NEW --laps 3 --save benchmarks/results/house.json

A lap runs each benchmark with the old code, the new code and the old code again. So the result shows the ratio of new
to old, and what the machine's noise makes of old against old. Figures that are ratios themselves (`of_serial`, `ratio`)
are compared as well as rates. Both checkouts run under this Python, which needs Headrace's dependencies. The last line
is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

# name -> arguments of `headrace bench`, and the figures to compare (a path of names; higher is better)
BENCHMARKS: dict[str, tuple[list[str], list[str]]] = {
    "ycsb": (["ycsb", "--repeats", "3"], ["committed_per_s", "ratio", "coroutine.committed_per_s", "coroutine.ratio"]),
    "workers": (
        ["ycsb", "--workers", "2", "--transactions", "100000", "--repeats", "3"],
        ["one_way.committed_per_s", "one_way.of_serial", "awaited.committed_per_s", "awaited.of_serial"],
    ),
    "durable": (
        ["ycsb", "--durable", "--repeats", "3", "--seconds", "3"],
        ["committed_per_s", "non_durable_per_s", "ratio"],
    ),
    "spark": (["ycsb", "--through", "spark", "--seconds", "6"], ["committed_per_s", "ratio"]),
}


def measure(checkout: Path, arguments: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "headrace.cli", "bench", *arguments, "--json"]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def figure(result: dict[str, Any], path: str) -> float:
    found: Any = result
    for name in path.split("."):
        found = found[name]
    return float(found)


def compare(old: Path, new: Path, laps: int, names: list[str]) -> dict[str, Any]:
    compared: dict[str, Any] = {}
    for name in names:
        arguments, paths = BENCHMARKS[name]
        runs = []
        for lap in range(laps):
            runs.append([measure(checkout, arguments) for checkout in (old, new, old)])
            print(f"{name}: lap {lap + 1} of {laps}", file=sys.stderr, flush=True)
        compared[name] = {}
        for path in paths:
            laps_of = [[figure(result, path) for result in run] for run in runs]
            again = [last / first for first, _, last in laps_of]
            compared[name][path] = {
                "old": [first for first, _, _ in laps_of],
                "new": [second for _, second, _ in laps_of],
                "old_again": [last for _, _, last in laps_of],
                "new_of_old": round(median(2 * second / (first + last) for first, second, last in laps_of), 3),
                "old_of_old": [round(min(again), 3), round(max(again), 3)],
            }
    return compared


def revision(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--laps", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=list(BENCHMARKS), default=list(BENCHMARKS))
    parser.add_argument("--save", type=Path)
    given = parser.parse_args()
    old, new = given.old.resolve(), given.new.resolve()
    result = {"old": revision(old), "new": revision(new), "laps": given.laps}
    result |= compare(old, new, given.laps, given.only)
    if given.save is not None:
        given.save.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
