"""Promises broken on purpose: a test that proves a promise fails when it is not kept.

For each row of `docs/guarantees.md` there is one mistake in `tests/planted/`. It is planted in a copy, and the test
that the row names is run there. (Where it names several, one of them has to notice.)

    python -m tests.broken_promises                        # all of them
    python -m tests.broken_promises abort                  # those with one of these words
    python -m tests.broken_promises --section "The log"    # those of one section, or of several
    python -m tests.broken_promises --jobs 2               # so many at once

A line for each, with what the test said; the last line is one JSON object. The exit code is 1 if a test did not notice,
and 2 if a test fails without a mistake. All of it takes about an hour, so it is no part of `make test`;
`test_broken_promises.py` sees to it that the list stays whole.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.planted import Mistake

ROOT = Path(__file__).resolve().parent.parent
GUARANTEES = "docs/guarantees.md"
NEEDED = ("headrace", "tests", "examples", "docs", "pyproject.toml", "README.md")
TIMEOUT_S = 600
NO_SHRINKING = """
from hypothesis import Phase

settings.register_profile("broken", settings.get_profile("headrace"), phases=(Phase.explicit, Phase.generate))
settings.load_profile("broken")
"""  # what fails is not made smaller: that takes long, and nobody looks at it


def promises() -> dict[str, dict[str, list[str]]]:
    """Of each section: its promises, and the tests that prove them."""
    found: dict[str, dict[str, list[str]]] = {}
    for section in (ROOT / GUARANTEES).read_text().split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        rows = re.findall(r"^\| (.+?) \| `headrace/.*?` \| (.+?) \|$", text, re.MULTILINE)
        found[title] = {promise: re.findall(r"`(tests/.+?)`", proofs) for promise, proofs in rows}
    return found


def mistakes_of(section: str) -> tuple[Mistake, ...]:
    module = importlib.import_module(f"tests.planted.{section.lower().replace(' ', '_')}")
    return tuple(module.MISTAKES)


def main(words: list[str], sections: list[str], jobs: int) -> int:
    known = promises()
    tests = {promise: proofs for section in known.values() for promise, proofs in section.items()}
    chosen = [
        mistake
        for section in sections or known
        for mistake in mistakes_of(section)
        if not words or any(word in mistake.promise for word in words)
    ]
    missed: list[str] = []
    copies: queue.SimpleQueue[Path] = queue.SimpleQueue()

    def plant(mistake: Mistake) -> None:
        begin_s, copy = time.monotonic(), copies.get()
        outcome, said = judge(copy, mistake, tests[mistake.promise])
        copies.put(copy)
        is_seen = outcome in ("failed", "did not end")
        if not is_seen:
            missed.append(mistake.promise)
        seconds = time.monotonic() - begin_s
        print(f"{'seen  ' if is_seen else 'missed'} {mistake.promise} ({outcome}, {seconds:.0f} s) {said}", flush=True)

    with tempfile.TemporaryDirectory(prefix="broken-") as folder:
        for number in range(jobs):
            copies.put(copy_tree(Path(folder) / str(number)))
        needed = sorted({test for mistake in chosen for test in tests[mistake.promise]})
        copy = copies.get()
        sound, said = run_tests(copy, needed, TIMEOUT_S * len(needed))
        copies.put(copy)
        print(f"without mistakes: {sound} {said}", flush=True)
        if sound != "passed":
            return 2
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(plant, chosen))
    print(json.dumps({"promises": len(chosen), "seen": len(chosen) - len(missed), "missed": missed}))
    return 1 if missed else 0


def copy_tree(copy: Path) -> Path:
    copy.mkdir()
    for name in NEEDED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy)
    with (copy / "tests" / "conftest.py").open("a") as conftest:
        conftest.write(NO_SHRINKING)
    return copy


def judge(copy: Path, mistake: Mistake, tests: list[str]) -> tuple[str, str]:
    right = {file: (copy / file).read_text() for file, _, _ in mistake.changes}
    try:
        for file, old, new in mistake.changes:
            text = (copy / file).read_text()
            assert text.count(old) == 1, f"{file}: {old}"
            (copy / file).write_text(text.replace(old, new))
        return run_tests(copy, tests, TIMEOUT_S)
    finally:
        for file, text in right.items():
            (copy / file).write_text(text)


def run_tests(copy: Path, tests: list[str], timeout_s: float) -> tuple[str, str]:
    """What became of them, and what the first one that failed said. What they leave running is stopped."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "300"}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, cwd=copy, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return "did not end", ""
        finally:
            process.kill()
            process.wait()
            for pid in left_running(copy):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        output.seek(0)
        said = next(
            (line.strip().partition(" - ")[2] for line in output if line.startswith(("FAILED tests", "ERROR tests"))),
            "",
        )
    return {0: "passed", 1: "failed"}.get(code, f"pytest ended with {code}"), said[:200]


def left_running(copy: Path) -> list[int]:
    """Processes that import from the copy."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"PYTHONPATH={copy}".encode() in environment.read_bytes().split(b"\0"):
                found.append(int(environment.parent.name))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Break promises, and see that their tests fail.")
    parser.add_argument("words", nargs="*", help="only promises with one of these words")
    parser.add_argument("--section", action="append", default=[], choices=list(promises()), help="only of this section")
    parser.add_argument("--jobs", type=int, default=1, help="how many mistakes at once")
    given = parser.parse_args()
    sys.exit(main(given.words, given.section, given.jobs))
